"""Sums, gathers, broadcasts and barriers of real ranks."""

from typing import Any

import pytest
import torch

from dglx_dist.comm.collectives import barrier, broadcast_json, gather_int64, gather_json, sum_over_ranks
from dglx_dist.comm.session import start_session
from tests.helpers.ranks import run_ranks

WHOLE = torch.arange(12, dtype=torch.float64).reshape(3, 4).t()
"""Array that is not contiguous."""


def _all_collectives() -> dict[str, Any]:
    with start_session() as session:
        rank, last = session.topology.rank, session.topology.world_size - 1
        own, kept = torch.full((3,), float(rank + 1)), WHOLE * (rank + 1)
        sum_over_ranks(own, session, phase="dense", in_place=True)
        results = {
            "shaped": sum_over_ranks(kept, session, phase="p").tolist(),
            "kept": torch.equal(kept, WHOLE * (rank + 1)),
            "no rows": sum_over_ranks(torch.zeros(0, 3), session, phase="p").shape,
            "sum": own.tolist(),
            "table": gather_int64([rank, 10 * rank], session).tolist(),
            "nothing": gather_int64([], session).shape,
            "texts": gather_json({"rank": rank, "text": "x" * rank}, session),
            "told": broadcast_json({"from": rank}, session, source=last),
        }
        barrier(session, "everyone")
        return {**results, "bytes": session.ledger.total(phase="dense")}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_collectives_give_every_rank_the_same_and_a_sum_costs_a_ring(world_size: int) -> None:
    result, factor = run_ranks(_all_collectives, world_size), sum(range(1, world_size + 1))
    counted = [result.pop("bytes") for result in result]
    # The ring formula, to the byte.
    assert sum(counted) == 2 * (world_size - 1) * 12
    assert max(counted) - min(counted) <= 1
    ranks = range(world_size)
    expected = {
        "shaped": (WHOLE * factor).tolist(),
        "kept": True,
        "no rows": (0, 3),
        "sum": [factor] * 3,
        "table": [[rank, 10 * rank] for rank in ranks],
        "nothing": (world_size, 0),
        "texts": [{"rank": rank, "text": "x" * rank} for rank in ranks],
        "told": {"from": world_size - 1},
    }
    assert result == [expected] * world_size
