"""``dglx doctor`` and ``dglx --version``, and DGL's wheel for another Python."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from zipfile import ZipFile

import pytest
from typer.testing import CliRunner

import dglx_dist
from dglx_dist.cli import doctor
from dglx_dist.cli.app import app
from dglx_dist.errors import ConfigError
from dglx_dist.internals import dgl_wheel

ROOT = Path(__file__).parents[2]
MODULE = "dgl/_ffi/_cy3/core.cpython-312-x86_64-linux-gnu.so"


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.output


def diagnose(check: Callable[[doctor.Diagnosis], None]) -> doctor.Diagnosis:
    diagnosis = doctor.Diagnosis()
    check(diagnosis)
    return diagnosis


def test_shows_the_version() -> None:
    assert run("--version") == (0, f"dglx_dist {dglx_dist.__version__}\n")


def test_reports_every_section_in_text_and_json() -> None:
    code, text = run("doctor")
    assert code == 0
    assert "ready to train" in text
    code, output = run("doctor", "--json")
    facts = json.loads(output)
    assert code == 0
    assert facts["problems"] == []
    assert facts["versions"]["dglx_dist"] == dglx_dist.__version__
    assert facts["machine"]["usable_cores"] >= 1
    assert facts["torch"]["gloo"] is True
    assert facts["dgl"]["calls"] in ("cython", "ctypes")
    for section in ("versions", "machine", "network", "torch", "dgl", "cache"):
        assert [name for name in facts[section] if name not in text] == [], section


def test_uses_the_interface_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert diagnose(doctor._check_network).facts["network"]["address"] == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")
    diagnosis = diagnose(doctor._check_network)
    assert diagnosis.facts["network"]["interface"] is None
    assert "GLOO_SOCKET_IFNAME='none0'" in diagnosis.advice[0]


def test_advises_on_small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: SimpleNamespace(total=1 << 26, free=1 << 26))
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda _: (256, 512))
    monkeypatch.setattr(doctor, "machine_memory", lambda: (1, 1))
    shared, files = diagnose(doctor._check_machine).advice
    assert "--shm-size" in shared
    assert "67.1 MB" in shared
    assert "512 files" in files


@pytest.mark.parametrize(
    ("message", "is_official", "remedy"),
    [
        ("libgomp.so.1: cannot open shared object file", True, "apt-get install libgomp1"),
        ("No module named 'dgl'", True, "`pip install dgl`"),
        ("No module named 'dgl'", False, "`dglx doctor --install-dgl`"),
    ],
)
def test_names_a_remedy_without_dgl(
    monkeypatch: pytest.MonkeyPatch, message: str, is_official: bool, remedy: str
) -> None:
    def refuse(_: object) -> object:
        raise ImportError(message)

    monkeypatch.setattr("dgl.graph", refuse)
    monkeypatch.setattr(dgl_wheel, "find_version", lambda: None)
    monkeypatch.setattr(dgl_wheel, "has_official_wheel", lambda: is_official)
    code, output = run("doctor")
    assert code == 2
    assert remedy in output
    assert "ready" not in output


def test_asks_before_it_installs_dgl(monkeypatch: pytest.MonkeyPatch) -> None:
    installed: list[bool] = []
    monkeypatch.setattr(dgl_wheel, "install_wheel", lambda: installed.append(True))
    code, output = run("doctor", "--install-dgl", "--yes")
    assert (code, installed) == (0, [])
    assert "is installed already" in output
    monkeypatch.setattr(dgl_wheel, "find_version", lambda: None)
    monkeypatch.setattr(dgl_wheel, "has_official_wheel", lambda: True)
    with pytest.raises(ConfigError, match="pip install dgl"):
        CliRunner().invoke(app, ["doctor", "--install-dgl"], catch_exceptions=False)
    monkeypatch.setattr(dgl_wheel, "has_official_wheel", lambda: False)
    assert CliRunner().invoke(app, ["doctor", "--install-dgl"], input="n\n").exit_code == 1
    assert installed == []
    CliRunner().invoke(app, ["doctor", "--install-dgl"], input="y\n")
    CliRunner().invoke(app, ["doctor", "--install-dgl", "--yes"])
    assert installed == [True, True]


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A wheel with the parts of DGL's that matter here. The record of its files is wrong."""
    path = tmp_path / "index" / "dgl-2.1.0-cp312-cp312-manylinux1_x86_64.whl"
    path.parent.mkdir()
    tag = "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: false\nTag: cp312-cp312-manylinux1_x86_64\n"
    with ZipFile(path, "w") as archive:
        archive.writestr("dgl/__init__.py", "answer = 42\n")
        archive.writestr(MODULE, "for one version of Python")
        archive.writestr("dgl-2.1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: dgl\nVersion: 2.1.0\n")
        archive.writestr("dgl-2.1.0.dist-info/WHEEL", tag)
        archive.writestr("dgl-2.1.0.dist-info/RECORD", "")
    return path


@pytest.mark.wide
def test_pip_removes_the_wheel(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_PYTHON", str(python))
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    with pytest.raises(ConfigError, match=r"(?s)pip download: .*DO NOT MATCH"):
        dgl_wheel.install_wheel(["0" * 64])
    dgl_wheel.install_wheel(["0" * 64, digest])

    def call(*command: str) -> str:
        return subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path).stdout

    assert call(str(python), "-c", "import dgl; print(dgl.answer, dgl.__file__)").startswith("42 ")
    assert "dgl     2.1.0" in call(*pip, "list")
    files = call(*pip, "show", "--files", "dgl")
    assert "dgl/__init__.py" in files
    assert "core.cpython" not in files
    call(*pip, "uninstall", "--yes", "dgl")
    assert list(environment.rglob("dgl*")) == []


def test_the_copy_of_a_wheel_has_a_true_record(wheel: Path) -> None:
    with ZipFile(dgl_wheel.retag_wheel(wheel)) as archive:
        names = archive.namelist()
        record = archive.read("dgl-2.1.0.dist-info/RECORD").decode().splitlines()
        tag = archive.read("dgl-2.1.0.dist-info/WHEEL").decode()
    assert MODULE not in names
    assert [line.split(",")[0] for line in record] == names
    assert all("sha256=" in line for line in record[:-1])
    assert tag.endswith("Tag: py3-none-manylinux1_x86_64\n")
