"""Sums, gathers, broadcasts and barriers of real ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dglx_dist.comm.collectives import barrier, broadcast_json, gather_int64, gather_json, sum_over_ranks
from dglx_dist.comm.session import current_session, start_session
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
def test_collectives_give_every_rank_the_same_and_a_sum_costs_a_ring(world_size: int) -> None:
    found = run_ranks(_all_collectives, world_size)
    for one in found:
        assert one["total"] == [sum(range(1, world_size + 1))] * 3
        assert np.array_equal(one["table"], [[rank, 10 * rank] for rank in range(world_size)])
        assert one["said"] == [{"rank": rank, "text": "x" * rank} for rank in range(world_size)]
        assert one["told"] == {"from": world_size - 1}
    # The ring formula, to the byte.
    counted = [one["dense"] for one in found]
    assert sum(counted) == 2 * (world_size - 1) * 12
    assert max(counted) - min(counted) <= 1


def _shapes() -> list[object]:
    with start_session() as session:
        rank = session.topology.rank
        whole = torch.arange(12, dtype=torch.float64).reshape(3, 4)
        kept = whole.t() * (rank + 1)
        before = kept.clone()
        total = sum_over_ranks(kept, session, phase="p")
        assert torch.equal(kept, before)
        assert sum_over_ranks(torch.zeros(0, 3), session, phase="p").shape == (0, 3)
        mine = torch.full((2,), rank + 1)
        assert sum_over_ranks(mine, session, phase="p", in_place=True).data_ptr() == mine.data_ptr()
        return [total.tolist(), mine.tolist(), gather_int64([], session).shape]


@pytest.mark.parametrize("world_size", [1, 3])
def test_sums_keep_shape_and_input(world_size: int) -> None:
    factor = sum(range(1, world_size + 1))
    expected = (np.arange(12.0).reshape(3, 4).T * factor).tolist()
    for total, mine, shape in run_ranks(_shapes, world_size):
        assert total == expected
        assert mine == [factor, factor]
        assert shape == (world_size, 0)
