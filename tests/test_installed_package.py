"""The package as a user installs it: built, not editable, run from a folder elsewhere."""

import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest

import dglx_dist

ROOT = Path(__file__).parent.parent
SOURCES = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "dglx_dist")
WITHOUT_TORCH = """
import sys

sys.argv = ["dglx", "--help"]
from dglx_dist.cli import main

try:
    main()
finally:
    assert "torch" not in sys.modules and "dgl" not in sys.modules, "--help loads torch or DGL"
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution, and the wheel that is built from it."""
    source = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    # Without isolation, because a test must not need a network.
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist", folder=source)
    return source / "dist"


@pytest.fixture(scope="module")
def environment(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel; the dependencies are those of the tests."""
    folder = tmp_path_factory.mktemp("installed")
    environment = folder / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", str(environment), folder=folder)
    python = environment / "bin" / "python"
    line = run(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", folder=folder)
    purelib = Path(line.strip())
    # A path in a .pth file is searched, but .pth files there (as of an editable install) are not read.
    (purelib / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = (sys.executable, "-m", "pip", "--python", str(python), "install", "-q")
    (wheel,) = built.glob("*.whl")
    run(*pip, "--no-deps", "--no-index", str(wheel), folder=folder)
    return environment


def run(*command: str, folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_distributions_are_complete_and_accepted_by_an_index(built: Path) -> None:
    version = dglx_dist.__version__
    names = [f"dglx_dist-{version}-py3-none-any.whl", f"dglx_dist-{version}.tar.gz"]
    assert sorted(path.name for path in built.iterdir()) == names
    pytest.importorskip("twine", reason="it needs newer packages than the oldest ones")
    run(sys.executable, "-m", "twine", "check", "--strict", *names, folder=built)
    with tarfile.open(built / names[1]) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "dglx_dist").rglob("*.py")}
    assert modules | {"README.md", "LICENSE", "pyproject.toml", "dglx_dist/py.typed"} <= packed


@pytest.mark.wide
def test_the_installed_command_partitions_and_trains(environment: Path, tmp_path: Path) -> None:
    python, dglx = str(environment / "bin" / "python"), str(environment / "bin" / "dglx")
    where = run(python, "-c", "import dglx_dist; print(dglx_dist.__file__)", folder=tmp_path)
    assert Path(where.strip()).is_relative_to(environment)
    assert run(dglx, "--version", folder=tmp_path) == f"dglx_dist {dglx_dist.__version__}\n"
    assert "partition" in run(python, "-c", WITHOUT_TORCH, folder=tmp_path)
    graph = "synthetic:nodes=300,degree=6,classes=3,features=8"
    run(dglx, "partition", graph, "--method", "random", "--out", "data", folder=tmp_path)
    training = ("--ranks", "1", "--epochs", "1", "--fanout", "3,3", "--out", "run")
    run(dglx, "train", "data", *training, folder=tmp_path)
    assert (tmp_path / "run" / "summary.json").is_file()
    assert "ready to train" in run(dglx, "doctor", folder=tmp_path)


def test_the_version_has_one_place() -> None:
    written = [
        path.name
        for path in (ROOT / "pyproject.toml", ROOT / "setup.py", *(ROOT / "dglx_dist").rglob("*.py"))
        if f'"{dglx_dist.__version__}"' in path.read_text()
    ]
    assert written == ["__init__.py"]
