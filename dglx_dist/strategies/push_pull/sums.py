"""Sums over the parts of what edges need in full, with gradients (P3's sync of a scatter stage).

The two functions are each other's adjoint, so a layer that uses both in any order has the right gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from dglx_dist.strategies.push_pull.transfer import BACKWARD, FORWARD, Courier, add_in_order


def sum_to_owner(shares: Sequence[Tensor], courier: Courier, phase: str = FORWARD) -> Tensor:
    """Return the sum over the parts of their shares for this rank's own block; every member must call it.

    Args:
        shares: This part's share for each owner's block: N_f tensors, (n of that owner, ...).
        courier: Of the group.
        phase: For the ledger; of the way back, BACKWARD.

    Raises:
        PeerError: a rank is dead or did not take part within the time-out.
    """
    return cast("Tensor", _SumToOwner.apply(courier, phase, *shares))  # type: ignore[no-untyped-call]  # torch leaves it bare


def hand_to_parts(own: Tensor, like: Sequence[Tensor], courier: Courier) -> tuple[Tensor, ...]:
    """Return what each owner hands to all parts: N_f tensors, this rank's own among them; all must call it.

    Args:
        own: This owner's (n, ...).
        like: N_f tensors with the shapes and dtypes that come from the owners.
        courier: Of the group.

    Raises:
        PeerError: a rank is dead or did not take part within the time-out.
    """
    return cast("tuple[Tensor, ...]", _HandToParts.apply(courier, own, *like))  # type: ignore[no-untyped-call]  # torch leaves it bare


class _SumToOwner(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, courier: Courier, phase: str, *shares: Tensor) -> Tensor:
        ctx.courier, ctx.like = courier, [share.detach() for share in shares]
        return add_in_order(courier.pull(shares, phase).result())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, None, *ctx.courier.push(gradient, ctx.like, BACKWARD).result()


class _HandToParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, courier: Courier, own: Tensor, *like: Tensor) -> tuple[Tensor, ...]:
        ctx.courier, ctx.num_like = courier, len(like)
        received = courier.push(own, like, FORWARD).result()
        # The own one is the input itself, which autograd must not see as an output.
        return tuple(tensor.clone() if tensor.data_ptr() == own.data_ptr() else tensor for tensor in received)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, add_in_order(ctx.courier.pull(gradients, BACKWARD).result()), *[None] * ctx.num_like
