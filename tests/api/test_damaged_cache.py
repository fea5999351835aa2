"""A bit that flips in what is kept beside a dataset changes no run, on whichever rank it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from dglx_dist.cli.train_config import TrainConfig
from dglx_dist.cli.train_job import train_dataset
from dglx_dist.comm.collectives import barrier
from dglx_dist.comm.session import Session, start_session
from dglx_dist.data.partition.base import PARTITIONERS, PartitionOptions
from dglx_dist.data.storage.files import STAMP
from dglx_dist.data.storage.writer import write_dataset
from dglx_dist.data.synthetic import SyntheticConfig, generate
from tests.data.storage.graphs import flip
from tests.helpers.ranks import run_ranks

KINDS = {
    "data_parallel": ({}, "structure-*/*/"),
    "push_pull": ({}, "columns-*/*/feat/*/"),
    "cooperative": ({"batches": 2}, "cobatches-*/*/?-[01]/"),
    "cooperative rows": ({"batches": 2}, "cobatches-*/*/rows-[01]/*/"),
}


def trained(folder: Path, out: Path, kind: str) -> list[float]:
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
    losses, flipped = [trained(folder, out / "fresh", kind)], []
    for turn, name in enumerate(("*.npy", "*.arrow", STAMP, "one rank")):
        paths = sorted(folder.glob(f"cache/{KINDS[kind][1]}{'*' if name == 'one rank' else name}"))
        if name == "one rank":
            paths = [path for path in paths if path.name != STAMP][-1:]
        with start_session() as session:
            flip_first(session, paths)
        losses.append(trained(folder, out / str(turn), kind))
        flipped.append(len(paths))
    return losses, flipped


def flip_first(session: Session, paths: list[Path]) -> None:
    barrier(session, "the files were listed")
    if session.topology.rank == 0:
        for path in paths:
            flip(path, path.stat().st_size * 2 // 3)
    barrier(session, "bits are flipped")


@pytest.mark.parametrize("kind", KINDS)
def test_training_is_the_same_to_the_last_bit(tmp_path: Path, kind: str) -> None:
    graph = generate(SyntheticConfig(nodes=300, degree=6, features=8, classes=4, seed=1))
    folder = tmp_path / "graph"
    write_dataset(graph, PARTITIONERS.get("random")(PartitionOptions()).assign(graph, 2, 0), folder)
    found = run_ranks(
        with_flipped_bits, 2, args=(folder, tmp_path, kind), ranks_per_server=1, timeout_s=400.0
    )
    for losses, flipped in found:
        assert all(again == losses[0] for again in losses[1:])
        arrays = flipped[0] + flipped[1]
        assert arrays >= flipped[2] > 0
        assert flipped[3] == 1
