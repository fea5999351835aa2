"""Shares of parts are summed at owners and gradients come back, with the bytes of the formula."""

from typing import Any

import pytest
import torch

from dglx_dist.comm.session import start_session
from dglx_dist.strategies.push_pull.activation_exchange import (
    BACKWARD,
    FORWARD,
    AsyncExchange,
    send_to_parts,
    sum_to_owner,
)
from dglx_dist.strategies.push_pull.options import make_group
from tests.helpers.ranks import run_ranks

ROWS = (4, 0, 3)
"""D1 of each owner; the second has an empty batch."""
H = 5


def share(part: int, owner: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * part + owner)
    return torch.randn(ROWS[owner], H, generator=generator, dtype=torch.float64)


def one_rank(world_size: int) -> dict[str, Any]:
    with start_session() as session:
        rank = session.topology.rank
        shares = [share(rank, owner).requires_grad_() for owner in range(world_size)]
        exchange = AsyncExchange(session, make_group(session, world_size))
        total = sum_to_owner(shares, exchange)
        handed = send_to_parts(total.sin(), [one.detach() for one in shares], exchange)
        sum((one * (rank + 1)).sum() for one in handed).backward()
        return {
            "total": total.detach(),
            "handed": [one.detach() for one in handed],
            "gradients": [one.grad for one in shares],
            "bytes": {phase: session.ledger.total(phase=phase) for phase in (FORWARD, BACKWARD)},
        }


@pytest.mark.parametrize("world_size", [1, 3])
def test_sums_and_their_adjoints(world_size: int) -> None:
    found = run_ranks(one_rank, world_size, args=(world_size,))
    weight = sum(range(1, world_size + 1))
    for owner in range(world_size):
        expected = sum(share(part, owner) for part in range(world_size))
        torch.testing.assert_close(found[owner]["total"], expected, rtol=0, atol=1e-14)
        for rank in range(world_size):
            torch.testing.assert_close(found[rank]["handed"][owner], expected.sin(), rtol=0, atol=1e-14)
            # Every part's share has the owner's whole gradient, which sums what all parts made of it.
            torch.testing.assert_close(
                found[rank]["gradients"][owner], weight * expected.cos(), rtol=0, atol=1e-13
            )


def test_bytes_are_those_of_the_formula() -> None:
    found = run_ranks(one_rank, 3, args=(3,))
    # (N - 1) D1 H s for a sum to the owner and as much for handing it out, each forward and backward.
    once = 2 * sum(ROWS) * H * 8
    assert sum(one["bytes"][FORWARD] for one in found) == 2 * once
    assert sum(one["bytes"][BACKWARD] for one in found) == 2 * once
