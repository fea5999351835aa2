"""The package as a user installs it: built, not editable, run from a folder elsewhere."""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "dglx_dist")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the built package; the dependencies are those of the tests."""
    folder = tmp_path_factory.mktemp("installed")
    source, environment = folder / "source", folder / "environment"
    source.mkdir()
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    run(sys.executable, "-m", "venv", "--without-pip", str(environment), folder=folder)
    python = environment / "bin" / "python"
    line = run(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", folder=folder)
    purelib = Path(line.strip())
    # A path in a .pth file is searched, but .pth files there (as of an editable install) are not read.
    (purelib / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = (sys.executable, "-m", "pip", "--python", str(python), "install", "-q")
    run(*pip, "--no-deps", "--no-build-isolation", "--no-index", str(source), folder=folder)
    return environment


def run(*command: str, folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_installed_command_partitions_and_trains(environment: Path, tmp_path: Path) -> None:
    python, dglx = str(environment / "bin" / "python"), str(environment / "bin" / "dglx")
    where = run(python, "-c", "import dglx_dist; print(dglx_dist.__file__)", folder=tmp_path)
    assert Path(where.strip()).is_relative_to(environment)
    assert "partition" in run(dglx, "--help", folder=tmp_path)
    graph = "synthetic:nodes=300,degree=6,classes=3,features=8"
    run(dglx, "partition", graph, "--method", "random", "--out", "data", folder=tmp_path)
    training = ("--ranks", "1", "--epochs", "1", "--fanout", "3,3", "--out", "run")
    run(dglx, "train", "data", *training, folder=tmp_path)
    assert (tmp_path / "run" / "summary.json").is_file()
