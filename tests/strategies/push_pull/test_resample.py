"""Weights do not tell how the parts came to know the structure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dglx_dist.comm.session import start_session
from dglx_dist.graph.dist_graph import DistGraph
from tests.helpers.ranks import run_ranks
from tests.strategies import equality
from tests.strategies.push_pull import runs
from tests.strategies.push_pull.runs import Run

DEPTH = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return equality.write_parts(tmp_path_factory.mktemp("resample"))


def on_rank(folder: str) -> dict[str, Any]:
    with start_session(timeout_s=60) as session:
        g = DistGraph(folder, structure="replicated")
        found = {}
        for structure in ("push", "resample", "auto"):
            run = Run("sage", {"depth": DEPTH, "structure": structure}, share="empty")
            before = session.ledger.snapshot()
            notes = runs.train(g, run)
            seeds = sum(row.num_bytes for row in session.ledger.since(before) if row.phase == "seeds")
            found[structure] = notes.weights, notes.moved["structure"], seeds
        g.barrier()
        return found


def test_bits_are_those_of_the_push(folder: Path) -> None:
    for found in run_ranks(on_rank, 2, args=(str(folder),)):
        expected, pushed, _ = found["push"]
        assert pushed > 0
        for structure in ("resample", "auto"):
            for mine, other in zip(found[structure][0], expected, strict=True):
                assert np.array_equal(mine, other), structure
        assert found["resample"][1] == 0
        assert found["push"][2] == 0
