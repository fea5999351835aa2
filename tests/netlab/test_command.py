import sys
from pathlib import Path

import pytest

from dglx_dist.cli.common import LAUNCHED
from dglx_dist.errors import ConfigError
from scripts.netlab.launch import torchrun_arguments


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "__main__.py").write_text("")
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        (["dglx", "train", "data/x", "--epochs", "2"],
         ["-m", "dglx_dist.cli", LAUNCHED, "train", "data/x", "--epochs", "2"]),
        (["bin/dglx", "--debug", "train", "x"], ["-m", "dglx_dist.cli", LAUNCHED, "--debug", "train", "x"]),
        (["python", "train.py", "--ranks", "3"], ["train.py", "--ranks", "3"]),
        ([sys.executable, "./train.py"], ["./train.py"]),
        (["python3", "-m", "package.train", "-v"], ["-m", "package.train", "-v"]),
        (["train.py", "a"], ["train.py", "a"]),
        (["python", "tools", "halo"], ["tools", "halo"]),
        (["-m", "package", "--", "b"], ["-m", "package", "--", "b"]),
    ],
)  # fmt: skip
def test_every_form_becomes_what_torchrun_takes(command: list[str], arguments: list[str]) -> None:
    assert torchrun_arguments(command) == arguments


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ([], "there is no command"),
        (["ls", "-l"], "'ls' is nothing that torchrun can start as ranks; write `dglx train"),
        (["torchrun", "--nproc-per-node", "2", "train.py"], "leave torchrun and its options out"),
        (["bash", "-c", "python train.py"], "leave bash"),
        (["dglx", "partition", "synthetic"], "`dglx partition` runs in one process"),
        (["dglx", "train", "x", "--ranks", "2"], "leave it out: the lab starts --servers times"),
        (["dglx", "train", "x", "--ranks=2"], "leave it out"),
        (["python", "-m", "dglx_dist.cli", "train", "x", "--ranks", "2"], "leave it out"),
        (["python"], "starts a script or a module"),
        (["python", "-c", "print()"], "without options of Python"),
        (["python", "-u", "train.py"], "without options of Python"),
        (["python", "-m"], "starts a script or a module"),
        (["python", "data"], "'data' does not exist in"),
        (["other.py"], "'other.py' does not exist in"),
    ],
)
def test_what_cannot_run_as_ranks_is_refused_with_what_to_write(command: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        torchrun_arguments(command)
    assert says in str(refused.value)
