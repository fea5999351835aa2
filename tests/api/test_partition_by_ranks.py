"""Partitioning shared by ranks: the bytes of one process, and resumed after one is killed."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from dglx_dist.cli.app import app
from dglx_dist.data import external_memory
from dglx_dist.data.external_memory import Budget, Ranks
from dglx_dist.data.partition import semi_external
from dglx_dist.data.sources import load_dataset
from dglx_dist.data.storage import writer
from dglx_dist.errors import StorageError
from dglx_dist.records import Array
from tests.api.test_partition_in_files import content, one_part, shop
from tests.helpers.ranks import RankError, run_ranks, start_ranks

# Beside the program. Of 13,000 nodes it leaves one level on disk, and there are three streams to share.
WORK = "3MB"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    graph = load_dataset("synthetic", nodes=13_000, degree=16, features=3)
    return one_part(graph, tmp_path_factory.mktemp("one") / "data")


def partition(data: Path, out: Path, *options: str) -> None:
    """Run the command with a limit that does not count what the program takes."""
    external_memory.open_budget = lambda limit: Budget(work=limit)
    writer.MIN_WORK_BYTES = 0
    words = ["partition", str(data), "--out", str(out), *options]
    app(words, standalone_mode=False)


@pytest.fixture
def _same_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    keep(monkeypatch)


def keep(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(external_memory, "open_budget", external_memory.open_budget)
    patch.setattr(writer, "MIN_WORK_BYTES", writer.MIN_WORK_BYTES)


LEVELS = ("--parts", "4", "--memory", WORK)


@pytest.fixture(scope="module")
def expected_files(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    with pytest.MonkeyPatch.context() as patch:
        keep(patch)
        partition(data, out := tmp_path_factory.mktemp("expected") / "out", *LEVELS)
    return content(out)


@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.wide), 3])
def test_ranks_write_equal_bytes(
    data: Path, expected_files: dict[str, bytes], num_ranks: int, tmp_path: Path
) -> None:
    run_ranks(partition, num_ranks, args=(data, tmp_path / "out", *LEVELS))
    assert content(tmp_path / "out") == expected_files
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
    with pytest.raises(RankError, match="Add --memory SIZE, or start one process"):
        run_ranks(partition, 2, args=(data, tmp_path / "out"))
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def partition_until_killed(where: str, rank: int, data: Path, out: Path) -> None:
    """Partition; ``rank`` is killed in its tenth round of a sweep, or when it has found the owners."""
    module, name = (semi_external, "_propose") if where == "sweep" else (external_memory, "publish")
    before, calls = getattr(module, name), 0

    def count_calls(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 10 if where == "sweep" else given[1].name == where:
            os.kill(os.getpid(), signal.SIGKILL)
        return before(*given)

    if os.environ["RANK"] == str(rank):
        setattr(module, name, count_calls)
    partition(data, out, *LEVELS)


def test_a_killed_rank_ends_all_ranks(data: Path, expected_files: dict[str, bytes], tmp_path: Path) -> None:
    out = tmp_path / "out"
    left, dead = start_ranks(partition_until_killed, 2, args=("sweep", 1, data, out))
    assert dead.exitcode == -signal.SIGKILL
    assert "rank 1" in left.error
    dead, left = start_ranks(partition_until_killed, 2, args=("owners", 0, data, out))
    assert dead.exitcode == -signal.SIGKILL
    assert "resuming in" in dead.output
    assert "finished before: edges, owners.work/symmetric" in dead.output
    assert left.error.startswith("PeerError")
    assert "rank 0" in left.error
    assert [path.name for path in tmp_path.iterdir()] == ["out.work"]
    # With another number of ranks.
    run_ranks(partition, 3, args=(data, out, *LEVELS))
    assert content(out) == expected_files
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


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


class Differing(Several):
    def gather_objects(self, value: Any) -> list[Any]:
        return [{**value, "graph": "other"}, value]


def test_ranks_that_see_other_data_under_its_name_are_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(StorageError, match=r"rank 0 and rank 1 differ in graph; pass all the same DATA"),
        external_memory.open_workspace(tmp_path / "work", {"graph": "one"}, 1 << 40, Differing(1)),
    ):
        raise AssertionError
