"""Sessions of real ranks: what they agree on, how they find each other, how they end."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dglx_dist.cluster.collectives import barrier, broadcast_json, gather_int64, gather_json, sum_over_ranks
from dglx_dist.cluster.session import current_session, start_session
from dglx_dist.errors import ConfigError
from tests.helpers.ranks import run_ranks


def _all_collectives() -> dict[str, object]:
    with start_session() as session:
        rank = session.topology.rank
        assert current_session() is session
        total = sum_over_ranks(torch.full((3,), float(rank + 1)), session, phase="dense")
        table = gather_int64([rank, 10 * rank], session)
        said = gather_json({"rank": rank, "text": "x" * rank}, session)
        told = broadcast_json({"from": rank}, session, source=session.topology.world_size - 1)
        barrier(session, "everyone")
        return {
            "total": total.tolist(),
            "table": table,
            "said": said,
            "told": told,
            "dense": session.ledger.total(phase="dense"),
        }


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_collectives_give_every_rank_the_same(world_size: int) -> None:
    for one in run_ranks(_all_collectives, world_size):
        assert one["total"] == [sum(range(1, world_size + 1))] * 3
        assert np.array_equal(one["table"], [[rank, 10 * rank] for rank in range(world_size)])
        assert one["said"] == [{"rank": rank, "text": "x" * rank} for rank in range(world_size)]
        assert one["told"] == {"from": world_size - 1}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_reduce_counts_the_ring_formula_to_the_byte(world_size: int) -> None:
    counted = [one["dense"] for one in run_ranks(_all_collectives, world_size)]
    assert sum(counted) == 2 * (world_size - 1) * 12
    assert max(counted) - min(counted) <= 1


def test_one_process_needs_no_launcher() -> None:
    with start_session(strategy="x", seed=3) as session:
        assert (session.topology.world_size, session.seed, session.strategy) == (1, 3, "x")
        assert session.rpc.call(0, "cluster.ping", "", [], phase="p") == []
        folder = session.scratch
        assert folder.is_dir()
    assert not folder.exists()
    with pytest.raises(ConfigError, match="init"):
        current_session()
