"""Asynchronous exchange of partial activations and their gradients between parts and owners.

Every rank is at once a part (it holds its columns and its rows of the layer-1 weights) and an owner (of its
own batches). All members of a group must post the same transfers in the same order.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast, final

import torch
import torch.distributed as dist
from dgl.heterograph import DGLBlock
from torch import Tensor

from dglx_dist.comm.collectives import peers_named
from dglx_dist.comm.session import Session, if_alive
from dglx_dist.comm.trace import NETWORK
from dglx_dist.errors import PeerError
from dglx_dist.strategies.push_pull.block_exchange import STRUCTURE
from dglx_dist.strategies.push_pull.options import Group, PartInput

FORWARD, BACKWARD = "activations", "activation_gradients"
"""Ledger phases (forward pull, backward push)."""

_PULL, _PUSH = 1, 2
"""Message tags: pulls and pushes may overtake each other on the wire."""

_SPAN_NAMES = {_PULL: "pull", _PUSH: "push gradient"}

_SUMMED_IN_FLOAT32 = (torch.float16, torch.bfloat16)

Received: TypeAlias = list[Tensor]
"""(N_f,) tensors of all members, the own one among them, in the order of the parts."""


@final
class Transfer:
    """A pending exchange; :meth:`result` waits for it."""

    def __init__(self, session: Session, what: str, device: torch.device) -> None:
        self._session, self._what, self._device = session, what, device
        self._done = threading.Event()
        self._received: Received = []
        self._error: RuntimeError | None = None

    def finish(self, received: Received, error: RuntimeError | None = None) -> None:
        """Store the result or the error, and wake up :meth:`result`."""
        self._received, self._error = received, error
        self._done.set()

    def result(self) -> Received:
        """Return what all members sent.

        Raises:
            PeerError: a rank is dead or did not take part within the time-out.
        """
        with peers_named(self._session, self._what):
            # Each wait behind it ends by the session's time-out, one after the other; this is a last resort.
            limit_s = 4 * self._session.timeout_s
            if not self._done.wait(limit_s):
                raise PeerError(f"the exchange of {self._what} made no progress for {limit_s:g} s")
            if self._error is not None:
                raise self._error
        self._received = [one.to(self._device) for one in self._received]
        return self._received


@dataclass(frozen=True, kw_only=True)
class _Posted:
    transfer: Transfer
    works: list[Any]
    received: Received
    sent: Sequence[Tensor]
    """Kept alive until they are sent."""
    done: Callable[[], None]


@dataclass(kw_only=True)
class _WaiterThread:
    """Waits for transfers of one kind, in their order, so that the compute thread does not have to."""

    jobs: queue.SimpleQueue[_Posted | None] = field(default_factory=queue.SimpleQueue)
    thread: threading.Thread | None = None

    def start(self, name: str) -> None:
        # A daemon: a rank that fails must not wait, at its end, for messages that never come.
        self.thread = threading.Thread(target=_wait_for, args=(self.jobs,), name=name, daemon=True)
        self.thread.start()

    def stop(self) -> None:
        # Joined, as a thread inside torch must not outlive the process.
        self.jobs.put(None)
        if self.thread is not None:
            self.thread.join()


def _wait_for(jobs: queue.SimpleQueue[_Posted | None]) -> None:
    while (posted := jobs.get()) is not None:
        try:
            for work in posted.works:
                work.wait()
        except RuntimeError as error:
            posted.transfer.finish([], error)
        else:
            posted.done()
            posted.transfer.finish(posted.received)
        # Or its tensors would live until the next one arrives.
        del posted


@final
class AsyncExchange:
    """Exchanges tensors between the members of a group without blocking the caller.

    Tensors on a GPU go through host memory: gloo then waits on a thread of its own and matches messages by
    tag, where NCCL would order all of them on one stream.
    """

    def __init__(self, session: Session, group: Group) -> None:
        self._session, self._group = session, group
        self._waiters = {_PULL: _WaiterThread(), _PUSH: _WaiterThread()}
        if group.size > 1:
            for tag, name in ((_PULL, "dglx-pull"), (_PUSH, "dglx-push")):
                self._waiters[tag].start(name)
                ended = weakref.finalize(self, self._waiters[tag].jobs.put, None)
                # A thread that is woken at exit would run while the interpreter shuts down.
                ended.atexit = False
            session.before_close.append(if_alive(self.close))

    def close(self) -> None:
        """End the threads once all posted transfers have completed."""
        for waiter in self._waiters.values():
            waiter.stop()
        self._waiters = {}

    def pull(self, shares: Sequence[Tensor], phase: str, batch: int | None = None) -> Transfer:
        """Send each owner its share of this part; receive the shares of all parts for the own block.

        ``shares`` are N_f tensors by owner, of the shapes that owner expects.
        """
        part = self._group.part
        received = [_empty_like(shares[part]) for _ in shares]
        received[part] = shares[part].detach()
        return self._post(_PULL, shares, received, phase, batch)

    def push(self, own: Tensor, like: Sequence[Tensor], phase: str, batch: int | None = None) -> Transfer:
        """Send ``own`` to every part; receive the tensors of all owners.

        ``like`` are N_f tensors of the shapes and dtypes that come from the owners.
        """
        received = [_empty_like(tensor) for tensor in like]
        received[self._group.part] = own.detach()
        return self._post(_PUSH, [own] * self._group.size, received, phase, batch)

    def _post(
        self, tag: int, sent: Sequence[Tensor], received: Received, phase: str, batch: int | None
    ) -> Transfer:
        """Send ``sent[p]`` to each other member p and receive ``received[p]``; empty tensors are skipped."""
        session, others = self._session, self._group.others
        device = sent[self._group.part].device
        transfer = Transfer(session, phase if batch is None else f"{phase} of batch {batch}", device)
        if not others:
            transfer.finish(received)
            return transfer
        outgoing = {part: sent[part].detach().contiguous().cpu() for part, _ in others}
        begin = time.perf_counter()
        with peers_named(session, phase):
            works = [dist.irecv(received[p], rank, tag=tag) for p, rank in others if received[p].numel()]
            works += [dist.isend(outgoing[p], rank, tag=tag) for p, rank in others if outgoing[p].numel()]
        for part, rank in others:
            num_bytes = outgoing[part].numel() * outgoing[part].element_size()
            session.ledger.add(phase, 1, self._group.rank, rank, num_bytes)

        def done() -> None:
            session.timeline.add(_SPAN_NAMES[tag], NETWORK, begin, time.perf_counter(), batch)

        self._waiters[tag].jobs.put(
            _Posted(transfer=transfer, works=works, received=received, sent=[*outgoing.values()], done=done)
        )
        return transfer


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
