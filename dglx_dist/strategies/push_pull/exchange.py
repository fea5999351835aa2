"""Sums over the parts of what each owner's block needs, and the way back: P3's pull and push.

Every rank is at once a part (it holds its columns and its rows of the layer-1 weights) and an owner (of its
own batch). Part p has a share for each owner's block; the owner needs their sum. The two functions are
each other's adjoint, so a layer that uses both in any order has the right gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from dglx_dist.cluster.collectives import peers_named
from dglx_dist.cluster.session import Session

FORWARD, BACKWARD = "activations", "activation_gradients"
"""The ledger's names of these bytes (algorithms 2.4: forward pull, backward push)."""


def sum_to_owner(shares: Sequence[Tensor], session: Session, phase: str = FORWARD) -> Tensor:
    """Return the sum over the parts of their shares for this rank's own block; every rank must call it.

    Added in the order of the parts, so that the bits do not depend on who was first.

    Args:
        shares: This part's share for each owner's block: W tensors, (D1 of that owner, ...).
        session: The run.
        phase: For the ledger; of the way back, :data:`BACKWARD`.

    Raises:
        PeerError: a rank is dead or did not take part within the time-out.
    """
    return cast("Tensor", _SumToOwner.apply(session, phase, *shares))  # type: ignore[no-untyped-call]  # torch leaves it bare


def hand_to_parts(own: Tensor, like: Sequence[Tensor], session: Session) -> tuple[Tensor, ...]:
    """Return what each owner hands to all parts: W tensors, this rank's own among them; all must call it.

    Args:
        own: This owner's (n, ...).
        like: W tensors with the shapes and dtypes that come from the owners.
        session: The run.

    Raises:
        PeerError: a rank is dead or did not take part within the time-out.
    """
    return cast("tuple[Tensor, ...]", _HandToParts.apply(session, own, *like))  # type: ignore[no-untyped-call]  # torch leaves it bare


class _SumToOwner(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, session: Session, phase: str, *shares: Tensor) -> Tensor:
        ctx.session, ctx.like = session, [share.detach() for share in shares]
        return _pull(list(shares), session, phase)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, None, *send_to_parts(gradient, ctx.like, ctx.session, BACKWARD)


class _HandToParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, session: Session, own: Tensor, *like: Tensor) -> tuple[Tensor, ...]:
        ctx.session, ctx.num_like = session, len(like)
        return tuple(send_to_parts(own, like, session, FORWARD))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, _pull(list(gradients), ctx.session, BACKWARD), *[None] * ctx.num_like


def _pull(shares: list[Tensor], session: Session, phase: str) -> Tensor:
    """Send each owner its share; return the sum of what all parts have for this owner."""
    topology = session.topology
    mine = shares[topology.rank].detach()
    received = [torch.empty_like(mine) for _ in range(topology.world_size)]
    received[topology.rank] = mine
    _swap(shares, received, session, phase)
    total = received[0].clone()
    for share in received[1:]:
        total += share
    return total


def send_to_parts(own: Tensor, like: Sequence[Tensor], session: Session, phase: str) -> list[Tensor]:
    """Send ``own`` to every part; return what all owners sent, in their order; carries no gradient.

    Args:
        own: This owner's tensor.
        like: W tensors with the shapes and dtypes that come from the owners.
        session: The run.
        phase: For the ledger.

    Raises:
        PeerError: a rank is dead or did not take part within the time-out.
    """
    received = [torch.empty_like(other) for other in like]
    received[session.topology.rank] = own.detach().contiguous()
    _swap([own] * session.topology.world_size, received, session, phase)
    return received


def _swap(sent: list[Tensor], received: list[Tensor], session: Session, phase: str) -> None:
    """Send ``sent[r]`` to every other rank r while ``received[r]`` arrives from it; nothing where empty."""
    rank = session.topology.rank
    others = [other for other in range(session.topology.world_size) if other != rank]
    outgoing = {other: sent[other].detach().contiguous() for other in others}
    work = [dist.irecv(received[other], other) for other in others if received[other].numel()]
    work += [dist.isend(outgoing[other], other) for other in others if outgoing[other].numel()]
    with peers_named(session, phase):
        for one in work:
            assert one is not None
            one.wait()
    for other in others:
        num_bytes = outgoing[other].numel() * outgoing[other].element_size()
        session.ledger.add(phase, 1, rank, other, num_bytes)
