"""The package of a worker: what it imports and no more, small, equal bytes for equal contents."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from dglx_dist.errors import ConfigError
from dglx_dist.strategies.serverless.aws import package as libraries
from dglx_dist.strategies.serverless.aws.package import (
    LIBRARIES,
    download_wheels,
    package_root,
    wheel_files,
    worker_files,
    write_zip,
)
from dglx_dist.strategies.serverless.tasks import Direction, TaskKey
from dglx_dist.strategies.serverless.worker import WorkerAnswer

from .programs import gat
from .servers import Bench, serve

AS_A_FUNCTION = """
import json, sys
sys.path.insert(0, sys.argv[1])
event = json.load(sys.stdin)
from dglx_dist.strategies.serverless.aws.function import handler
print(json.dumps(handler(event, None)))
files = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
print(json.dumps(sorted(str(file) for name, file in files.items() if file and name.partition(".")[0] in (
    "numpy", "zmq", "dglx_dist"))))
# Quick to write, slow to import: each takes as long as half of NumPy.
print(json.dumps(sorted({"asyncio", "importlib.metadata"} & set(sys.modules))))
"""


def test_files_are_those_that_a_worker_imports() -> None:
    files = worker_files(package_root())
    assert files == tuple(sorted(files))
    rooms = {"/".join(file.split("/")[:2]) for file in files if file.count("/") > 1}
    assert rooms == {"dglx_dist/comm", "dglx_dist/data", "dglx_dist/internals", "dglx_dist/strategies/serverless"}
    assert "dglx_dist/internals/pytorch.py" not in files
    assert {"dglx_dist/strategies/serverless/worker_process.py", "dglx_dist/strategies/serverless/stages/conv.py"} <= set(files)
    assert not {"dglx_dist/comm/session.py", "dglx_dist/strategies/serverless/aws/executor.py"} & set(files)
    for file in files:
        parents = Path(file).parents
        assert all(f"{parent}/__init__.py" in files for parent in parents if parent.name), file


def test_files_of_an_installed_package_leave_out_the_libraries_beside_it(tmp_path: Path) -> None:
    (tmp_path / "dglx_dist").symlink_to(package_root() / "dglx_dist")
    for name in LIBRARIES:
        (tmp_path / f"{name}.py").touch()
    assert worker_files(tmp_path) == worker_files(package_root())


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no module dglx_dist\.serverless\.aws\.function"):
        worker_files(tmp_path)


def test_the_zip_is_small_and_works_alone(worker_package: Path, tmp_path: Path) -> None:
    assert worker_package.stat().st_size < 50e6
    folder = tmp_path / "inside"
    with zipfile.ZipFile(worker_package) as archive:
        assert sum(entry.file_size for entry in archive.infolist()) < 250e6  # AWS's limit
        archive.extractall(folder)
    assert any(folder.glob("numpy-*.dist-info/licenses/LICENSE*"))
    assert not any(folder.rglob("tests"))
    bench, key = Bench(gat(), [5]), TaskKey(0, 0, 0, Direction.FORWARD)
    with serve(bench):
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", AS_A_FUNCTION, str(folder)],
            input=bench.task(key).to_event(),
            capture_output=True,
            env={},
            cwd="/",
            check=False,
            timeout=60,
        )
    assert done.returncode == 0, done.stderr
    answer, files, slow = done.stdout.splitlines()
    assert json.loads(slow) == []
    assert WorkerAnswer.from_json(answer).accepted
    bench.check(key)
    assert all(file.startswith(str(folder)) for file in json.loads(files))


def test_equal_contents_are_equal_bytes_and_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine" / ".git").mkdir(parents=True)
    for name in ("__init__.py", "stages.py", ".env", ".git/config"):
        (tmp_path / "mine" / name).write_text("KEY = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(libraries, "LIBRARIES", {})
    first, second = tmp_path / "1.zip", tmp_path / "2.zip"
    for path in (first, second):
        write_zip(path)
    assert first.read_bytes() == second.read_bytes()
    write_zip(second, {"mine": "mine.stages:Stage"})
    assert first.read_bytes() != second.read_bytes()
    with zipfile.ZipFile(second) as archive:
        names = archive.namelist()
        assert names == sorted(names)
        assert [name for name in names if name.startswith("mine")] == ["mine/__init__.py", "mine/stages.py"]
        assert json.loads(archive.read("dglx_stages.json")) == {"mine": "mine.stages:Stage"}
    assert sorted(path.name for path in tmp_path.glob("*.zip*")) == ["1.zip", "2.zip"]


def wheel(folder: Path, name: str, inside: dict[str, str]) -> None:
    with zipfile.ZipFile(folder / name, "w") as archive:
        for path, text in inside.items():
            archive.writestr(path, text)


def test_wheels_replace_installed_libraries(tmp_path: Path) -> None:
    wheel(
        tmp_path,
        "numpy-2.0-cp312-cp312-manylinux2014_aarch64.whl",
        {
            "numpy/__init__.py": "n",
            "numpy/tests/t.py": "t",
            "numpy/x.pyi": "x",
            "numpy.libs/a.so": "a",
            "numpy-2.0.dist-info/RECORD": "r",
            "numpy-2.0.dist-info/licenses/LICENSE.txt": "l",
        },
    )
    with pytest.raises(ConfigError, match="0 wheels of pyzmq"):
        dict(wheel_files(tmp_path))
    wheel(tmp_path, "pyzmq-27.0-cp312-abi3-manylinux2014_aarch64.whl", {"zmq/__init__.py": "z"})
    results = dict(wheel_files(tmp_path))
    assert results == {
        "numpy/__init__.py": b"n",
        "numpy.libs/a.so": b"a",
        "numpy-2.0.dist-info/licenses/LICENSE.txt": b"l",
        "zmq/__init__.py": b"z",
    }
    write_zip(tmp_path / "w.zip", wheels=tmp_path)
    with zipfile.ZipFile(tmp_path / "w.zip") as archive:
        assert set(results) <= set(archive.namelist())


def test_wheels_are_asked_for_by_version_and_platform(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        request.append(command)
        return subprocess.CompletedProcess(command, len(request) - 1, "", "no such wheel")

    monkeypatch.setattr(libraries.subprocess, "run", run)
    download_wheels(tmp_path, python="3.12", architecture="aarch64")
    assert {
        f"numpy=={np.__version__}",
        "--platform=manylinux2014_aarch64",
        "--python-version=3.12",
        "--only-binary=:all:",
        f"--dest={tmp_path}",
    } <= set(request[0])
    with pytest.raises(ConfigError, match=r"failed; put wheels of both into .* pip says: no such wheel"):
        download_wheels(tmp_path, python="3.12", architecture="aarch64")
