"""Partitioning shared by ranks: the bytes of one process, and resumed after one is killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dglx_dist.cli.app import app
from dglx_dist.data import external_memory
from dglx_dist.data.external_memory import Budget, Ranks
from dglx_dist.data.sources import load_dataset
from dglx_dist.errors import StorageError
from dglx_dist.records import Array
from tests.api.test_partition_in_files import content, one_part, shop
from tests.helpers.ranks import RankError, run_ranks

# Beside the program. Of 13,000 nodes it leaves one level on disk, and there are three streams to share.
WORK = "3MB"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    graph = load_dataset("synthetic", nodes=13_000, degree=16, features=3)
    return one_part(graph, tmp_path_factory.mktemp("one") / "data")


def partition(data: Path, out: Path, *options: str) -> None:
    """Run the command with a limit that does not count what the program takes."""
    external_memory.open_budget = lambda limit: Budget(work=limit)
    words = ["partition", str(data), "--out", str(out), *options]
    app(words, standalone_mode=False)


@pytest.fixture
def _same_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external_memory, "open_budget", external_memory.open_budget)


LEVELS = ("--parts", "4", "--memory", WORK)


@pytest.fixture(scope="module")
def expected(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(external_memory, "open_budget", external_memory.open_budget)
        partition(data, out := tmp_path_factory.mktemp("expected") / "out", *LEVELS)
    return content(out)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_write_the_bytes_of_one_process(
    data: Path, expected: dict[str, bytes], num_ranks: int, tmp_path: Path
) -> None:
    run_ranks(partition, num_ranks, args=(data, tmp_path / "out", *LEVELS))
    assert content(tmp_path / "out") == expected
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.usefixtures("_same_budget")
def test_types_columns_and_more_ranks_than_parts(tmp_path: Path) -> None:
    data = one_part(shop(), tmp_path / "data")
    options = ("--parts", "2", "--memory", WORK, "--trainers-per-server", "2", "--feature-dtype", "bfloat16")
    partition(data, tmp_path / "one", *options)
    run_ranks(partition, 3, args=(data, tmp_path / "three", *options))
    assert content(tmp_path / "three") == content(tmp_path / "one")


def test_without_a_limit_ranks_are_refused(tmp_path: Path) -> None:
    data = one_part(shop(), tmp_path / "data")
    with pytest.raises(RankError, match="add --memory SIZE, for each rank, or start one process"):
        run_ranks(partition, 2, args=(data, tmp_path / "out"))
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


SCRIPT = """
import os, signal, sys
from dglx_dist.cli import main
from dglx_dist.data import external_memory
from dglx_dist.data.external_memory import Budget
from dglx_dist.data.partition import semi_external

external_memory.open_budget = lambda limit: Budget(work=limit)
where, calls = sys.argv.pop(1), 10
module, name = (semi_external, "_propose") if where == "sweep" else (external_memory, "publish")
rank = "1" if where == "sweep" else "0"
before = getattr(module, name)

def last(*given):
    global calls
    calls -= 1
    if calls == 0 or where == "owners" and given[1].name == "owners":
        os.kill(os.getpid(), signal.SIGKILL)
    return before(*given)

if where and os.environ["RANK"] == rank:
    setattr(module, name, last)
main()
"""


def test_a_killed_rank_ends_all_and_the_next_run_resumes(
    data: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    out = tmp_path / "out"

    def run(where: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "dglx_dist.cli.torchrun", "--standalone", "--nproc-per-node", "2"]
        command += [str(tmp_path / "script.py"), where, "partition", str(data), "--out", str(out), *LEVELS]
        return subprocess.run(command, capture_output=True, text=True, timeout=100)

    for where, rank in (("sweep", 1), ("owners", 0)):
        ended = run(where)
        assert ended.returncode == 137, ended.stderr
        assert f"rank {rank}" in ended.stderr
        assert "SIGKILL" in ended.stderr
        assert not out.exists()
    done = run("")
    assert "finished before: edges, owners.work/level1, owners.work/parts" in done.stderr
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("written to") == 1
    assert content(out) == expected


class Several(Ranks):
    """A rank whose others have made and said the same."""

    def __init__(self, rank: int) -> None:
        self.rank, self.count = rank, 2

    def gather(self, local: Array) -> list[Array]:
        return [local, local]


def test_a_rank_without_the_files_of_the_others_says_so(tmp_path: Path) -> None:
    with (
        pytest.raises(StorageError, match=r"rank 1 does not see .*must be on a file system"),
        external_memory.open_workspace(tmp_path / "work", {}, 1 << 40, Several(1)),
    ):
        raise AssertionError
    assert list(tmp_path.iterdir()) == []
