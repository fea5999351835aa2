"""A rank that fails or dies between two batches is named by those who wait for its structure."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from dgl.dataloading import NeighborSampler

from dglx_dist.comm.session import start_session
from dglx_dist.graph.dist_graph import DistGraph
from tests.helpers.ranks import start_ranks
from tests.strategies.push_pull import rounds
from tests.strategies.push_pull.rounds import nodes_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rounds.write_ring(tmp_path_factory.mktemp("ring") / "parts", 2)


class Failing(NeighborSampler):
    """Fails at its third batch."""

    def __init__(self, how: str) -> None:
        super().__init__(rounds.FANOUTS)
        self.how, self.batches = how, 0

    def sample_blocks(self, g: Any, seed_nodes: Any, exclude_eids: Any = None) -> Any:
        self.batches += 1
        if self.batches == 3 and self.how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.batches == 3 and self.how == "raises":
            raise ValueError("no third batch")
        return super().sample_blocks(g, seed_nodes, exclude_eids)


def on_rank(folder: str, how: str) -> int:
    # Longer than the test may take: nobody is to wait for it.
    with start_session(timeout_s=600) as session:
        g = DistGraph(folder)
        last = session.topology.rank == 1
        loader = nodes_of(g, Failing(how if last else ""), num_threads=2)
        return len(list(loader))


@pytest.mark.parametrize("how", ["raises", "killed"])
def test_the_rank_is_named_long_before_the_time_is_out(folder: Path, how: str) -> None:
    waiting, failing = start_ranks(on_rank, 2, args=(str(folder), how))
    assert waiting.exitcode == 1
    assert "PeerError" in waiting.error
    assert "rank 1" in waiting.error
    if how == "raises":
        # Its own error, not that of a thread that was waiting for rank 0.
        assert failing.error.startswith("ValueError: no third batch")
    else:
        assert failing.exitcode == -signal.SIGKILL
