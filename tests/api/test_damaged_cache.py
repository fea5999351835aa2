"""Files that are kept beside a dataset: made once, checked, and made again when one bit differs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dglx_dist import api as cut_cache
from dglx_dist.api import partition_cached
from dglx_dist.cli.train_job import train_dataset
from dglx_dist.comm.collectives import barrier
from dglx_dist.comm.session import Session, start_session
from dglx_dist.data.partition.base import PARTITIONERS, PartitionOptions, PartitionPlan
from dglx_dist.data.partition.prepare import partition_to_disk
from dglx_dist.data.storage.arrays import STAMP
from dglx_dist.data.storage.columns import CACHE, MANIFEST
from dglx_dist.data.storage.reader import open_dataset
from dglx_dist.data.storage.writer import write_dataset
from dglx_dist.data.synthetic import SyntheticConfig, generate
from dglx_dist.errors import StorageError
from dglx_dist.training.config import TrainConfig
from tests.api.graphs import two_triangles
from tests.data.storage.graphs import flip
from tests.helpers.ranks import run_ranks

KINDS = {
    "data_parallel": ({}, "structure-*/*/"),
    "push_pull": ({}, "columns-*/*/feat/*/"),
    "cooperative": ({"batches": 2}, "cobatches-*/*/?-[01]/"),
    "cooperative rows": ({"batches": 2}, "cobatches-*/*/rows-[01]/*/"),
}


def train(folder: Path, out: Path, kind: str) -> list[float]:
    options, _ = KINDS[kind]
    plan = TrainConfig(
        data=str(folder),
        out=str(out),
        strategy=kind.split()[0],
        strategy_options=options,
        structure="replicated",
        hidden=8,
        epochs=2,
        eval_every=2,
    )
    return [epoch.loss for epoch in train_dataset(plan).epochs]


def with_flipped_bits(folder: Path, out: Path, kind: str) -> tuple[list[list[float]], list[int]]:
    """Losses of a first run, and of those before which bits flip: in arrays, in stamps, on one rank alone."""
    losses, flipped = [train(folder, out / "fresh", kind)], []
    for turn, name in enumerate(("*.npy", "*.arrow", STAMP, "one rank")):
        paths = sorted(folder.glob(f"cache/{KINDS[kind][1]}{'*' if name == 'one rank' else name}"))
        if name == "one rank":
            paths = [path for path in paths if path.name != STAMP][-1:]
        with start_session() as session:
            flip_first(session, paths)
        losses.append(train(folder, out / str(turn), kind))
        flipped.append(len(paths))
    return losses, flipped


def flip_first(session: Session, paths: list[Path]) -> None:
    barrier(session, "the files were listed")
    if session.topology.rank == 0:
        for path in paths:
            flip(path, path.stat().st_size * 2 // 3)
    barrier(session, "bits are flipped")


@pytest.mark.wide
@pytest.mark.parametrize("kind", KINDS)
def test_training_is_the_same_to_the_last_bit(tmp_path: Path, kind: str) -> None:
    graph = generate(SyntheticConfig(nodes=300, degree=6, features=8, classes=4, seed=1))
    folder = tmp_path / "graph"
    write_dataset(graph, PARTITIONERS.get("random")(PartitionOptions()).assign(graph, 2, 0), folder)
    results = run_ranks(
        with_flipped_bits, 2, args=(folder, tmp_path, kind), ranks_per_server=1, timeout_s=400.0
    )
    for losses, flipped in results:
        assert all(again == losses[0] for again in losses[1:])
        arrays = flipped[0] + flipped[1]
        assert arrays >= flipped[2] > 0
        assert flipped[3] == 1


PLAN = PartitionPlan(num_parts=2, method="hash")


@pytest.fixture
def instead(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., None]], None]:
    return lambda cut: monkeypatch.setattr(cut_cache, "partition_to_disk", cut)


def refuse(*_: object, **_options: object) -> None:
    raise StorageError("the disk is full")


def test_what_is_there_is_not_cut_again(tmp_path: Path, instead: Callable[..., None]) -> None:
    folder = partition_cached(two_triangles(), PLAN, tmp_path)
    full = contents(folder)
    instead(refuse)
    assert partition_cached(two_triangles(), PLAN, tmp_path) == folder
    assert contents(folder) == full


def contents(folder: Path) -> dict[Path, bytes]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.parent.name != CACHE)
    return {path: path.read_bytes() for path in files}


def test_a_cut_with_a_flipped_bit_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = partition_cached(two_triangles(), PLAN, tmp_path)
    full = contents(folder)
    for path in full:
        # Once as the user of an earlier run left it: found whole.
        open_dataset(folder)
        flip(path, path.stat().st_size // 2)
        caplog.clear()
        assert partition_cached(two_triangles(), PLAN, tmp_path) == folder
        assert contents(folder) == full
        assert caplog.text.count("is partitioned again") == 1
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("is_damaged", [False, True])
def test_first_of_two_runs_counts(tmp_path: Path, instead: Callable[..., None], is_damaged: bool) -> None:
    def cut(*arguments: Any, **options: Any) -> None:
        partition_to_disk(*arguments, **options)
        # Meanwhile another run finishes the same cut, and maps its files.
        instead(partition_to_disk)
        remaining.append(partition_cached(two_triangles(), PLAN, tmp_path))
        remaining.append((remaining[0] / MANIFEST).stat().st_ino)

    remaining: list[Any] = []
    if is_damaged:
        flip(partition_cached(two_triangles(), PLAN, tmp_path) / MANIFEST, 50)
    instead(cut)
    folder = partition_cached(two_triangles(), PLAN, tmp_path)
    assert [folder, (folder / MANIFEST).stat().st_ino] == remaining
    open_dataset(folder, verify="full")
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("error", [StorageError("the disk is full"), FileNotFoundError("of the source")])
def test_errors_of_the_partitioner_pass(
    tmp_path: Path, instead: Callable[..., None], error: Exception
) -> None:
    def cut(*_: object, **_options: object) -> None:
        raise error

    instead(cut)
    with pytest.raises(type(error), match=f"^{error}$"):
        partition_cached(two_triangles(), PLAN, tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_is_no_cut_stays(tmp_path: Path) -> None:
    folder = partition_cached(two_triangles(), PLAN, tmp_path)
    (folder / MANIFEST).unlink()
    with pytest.raises(StorageError, match=r"exists already; .* remove it yourself$"):
        partition_cached(two_triangles(), PLAN, tmp_path)


def test_names_a_cache_that_cannot_be_written(tmp_path: Path, instead: Callable[..., None]) -> None:
    instead(refuse)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StorageError, match="cannot be written"):
        partition_cached(two_triangles(), PLAN, tmp_path / "file")
