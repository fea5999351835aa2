"""Asynchronous exchange of partial activations and their gradients between parts and owners.

Every rank is at once a part (it holds its columns and its rows of the layer-1 weights) and an owner (of its
own batches). All members of a group must post the same transfers in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast, final

import torch
from dgl.heterograph import DGLBlock
from torch import Tensor

from dglx_dist.comm.exchange import GlooExchange, Handle, Incoming, Outgoing
from dglx_dist.comm.session import Session
from dglx_dist.strategies.push_pull.block_exchange import STRUCTURE
from dglx_dist.strategies.push_pull.options import Group, PartInput

FORWARD, BACKWARD = "activations", "activation_gradients"
"""Ledger phases (forward pull, backward push)."""

_SUMMED_IN_FLOAT32 = (torch.float16, torch.bfloat16)

Received: TypeAlias = list[Tensor]
"""(N_f,) tensors of all members, the own one among them, in the order of the parts."""


@final
class Transfer:
    """A pending exchange with all members; :meth:`result` waits for it."""

    def __init__(self, handle: Handle | None, received: Received, device: torch.device) -> None:
        self._handle, self._received, self._device = handle, received, device

    def result(self) -> Received:
        """Return what all members sent.

        Raises:
            PeerError: a rank is dead or did not take part within the time-out.
        """
        if self._handle is not None:
            self._handle.wait()
            self._handle = None
            self._received = [one.to(self._device) for one in self._received]
        return self._received


@final
class AsyncExchange:
    """Exchanges tensors between the members of a group without blocking the caller."""

    def __init__(self, session: Session, group: Group) -> None:
        self._group = group
        # Pulls and pushes may overtake each other on the wire.
        self._pulls = GlooExchange(session, tag=1, span="pull")
        self._pushes = GlooExchange(session, tag=2, span="push gradient")

    def pull(self, shares: Sequence[Tensor], phase: str, batch: int | None = None) -> Transfer:
        """Send each owner its share of this part; receive the shares of all parts for the own block.

        ``shares`` are N_f tensors by owner, of the shapes that owner expects.
        """
        part = self._group.part
        received = [_empty_like(shares[part]) for _ in shares]
        received[part] = shares[part].detach()
        return self._post(self._pulls, shares, received, phase, batch)

    def push(self, own: Tensor, like: Sequence[Tensor], phase: str, batch: int | None = None) -> Transfer:
        """Send ``own`` to every part; receive the tensors of all owners.

        ``like`` are N_f tensors of the shapes and dtypes that come from the owners.
        """
        received = [_empty_like(tensor) for tensor in like]
        received[self._group.part] = own.detach()
        return self._post(self._pushes, [own] * self._group.size, received, phase, batch)

    def _post(
        self,
        exchange: GlooExchange,
        sent: Sequence[Tensor],
        received: Received,
        phase: str,
        batch: int | None,
    ) -> Transfer:
        """Send ``sent[p]`` to each other member p and receive ``received[p]``."""
        handle = None
        if others := self._group.others:
            outgoing = [
                Outgoing(rank=rank, rows=sent[part].detach().contiguous().cpu()) for part, rank in others
            ]
            incoming = [Incoming(rank=rank, rows=received[part]) for part, rank in others]
            name = phase if batch is None else f"{phase} of batch {batch}"
            handle = exchange.post(outgoing, incoming, name, phase=phase, layer=1, batch=batch)
        return Transfer(handle, received, sent[self._group.part].device)


def _empty_like(tensor: Tensor) -> Tensor:
    # On the CPU, whatever the device of the tensor.
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def add_in_order(received: Received) -> Tensor:
    """Return the sum over the parts, added in their order, so that the bits do not depend on arrival.

    Half precision is summed in float32.
    """
    first, *rest = received
    total = first.to(torch.float32) if first.dtype in _SUMMED_IN_FLOAT32 else first.clone()
    for share in rest:
        total += share
    return total.to(first.dtype)


def share_edge_values(
    values: Mapping[str, Tensor], inputs: Sequence[PartInput], group: Group, exchange: AsyncExchange
) -> list[dict[str, Tensor]]:
    """Return every owner's values by name, like ``values`` of the own block; every member must call it.

    ``values`` maps names to (E1, ...) of the own block, in the order of its edges, without gradients;
    ``inputs`` are by owner.
    """
    by_owner: list[dict[str, Tensor]] = [{} for _ in inputs]
    for name, own in values.items():
        like = [own.new_empty((one.block.num_edges(), *own.shape[1:])) for one in inputs]
        pushed = exchange.push(_in_csc_order(own, inputs[group.part].block), like, STRUCTURE)
        for of_owner, received in zip(by_owner, pushed.result(), strict=True):
            of_owner[name] = received
        by_owner[group.part][name] = own
    return by_owner


def _in_csc_order(values: Tensor, block: DGLBlock) -> Tensor:
    # Other parts number the edges by their position in the CSC.
    *_, edge_ids = block.adj_tensors("csc")
    return values[edge_ids.long()] if len(edge_ids) else values


def sum_to_owner(shares: Sequence[Tensor], exchange: AsyncExchange) -> Tensor:
    """Return the sum over the parts of their shares for this rank's own block; every member must call it.

    ``shares`` are this part's for each owner's block: N_f tensors, (n of that owner, ...).
    """
    return cast("Tensor", _SumToOwner.apply(exchange, *shares))  # type: ignore[no-untyped-call]  # torch leaves it bare


def send_to_parts(own: Tensor, like: Sequence[Tensor], exchange: AsyncExchange) -> tuple[Tensor, ...]:
    """Return the tensors of all owners, N_f of them, this rank's ``own`` included; every member must call it.

    ``like`` are N_f tensors with the shapes and dtypes that come from the owners.
    """
    return cast("tuple[Tensor, ...]", _SendToParts.apply(exchange, own, *like))  # type: ignore[no-untyped-call]  # torch leaves it bare


class _SumToOwner(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: AsyncExchange, *shares: Tensor) -> Tensor:
        ctx.exchange, ctx.like = exchange, [share.detach() for share in shares]
        return add_in_order(exchange.pull(shares, FORWARD).result())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, *ctx.exchange.push(gradient, ctx.like, BACKWARD).result()


class _SendToParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: AsyncExchange, own: Tensor, *like: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange, ctx.num_like = exchange, len(like)
        received = exchange.push(own, like, FORWARD).result()
        # The own one is the input itself, which autograd must not see as an output.
        return tuple(tensor.clone() if tensor.data_ptr() == own.data_ptr() else tensor for tensor in received)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, add_in_order(ctx.exchange.pull(gradients, BACKWARD).result()), *[None] * ctx.num_like
