"""What leaves at once and is waited for later: sums over the parts for an owner, and the way back.

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
"""The ledger's names of these bytes (algorithms 2.4: forward pull, backward push)."""

_PULL, _PUSH = 1, 2
"""Tags: what is pulled and what is pushed may overtake each other on the wire."""

_SUMMED_WIDER = (torch.float16, torch.bfloat16)

Received: TypeAlias = list[Tensor]
"""(N_f,) what each member sent, the own piece among them, in the order of the parts."""


@final
class Transfer:
    """Something on its way; :meth:`result` waits for it."""

    def __init__(self, session: Session, what: str, device: torch.device) -> None:
        self._session, self._what, self._device = session, what, device
        self._done = threading.Event()
        self._received: Received = []
        self._error: RuntimeError | None = None

    def finish(self, received: Received, error: RuntimeError | None = None) -> None:
        """Note what came, or what went wrong."""
        self._received, self._error = received, error
        self._done.set()

    def result(self) -> Received:
        """Return what all members sent.

        Raises:
            PeerError: a rank is dead or did not take part within the time-out.
        """
        with peers_named(self._session, self._what):
            # The waits behind it end by the session's time-out, one after the other; this is a last resort.
            if not self._done.wait(4 * self._session.timeout_s):
                raise PeerError(f"nothing was heard of {self._what} for {4 * self._session.timeout_s:g} s")
            if self._error is not None:
                raise self._error
        self._received = [one.to(self._device) for one in self._received]
        return self._received


@dataclass(frozen=True, kw_only=True)
class _Posted:
    """What a lane waits for."""

    transfer: Transfer
    works: list[Any]
    received: Received
    kept: Sequence[Tensor]
    """What is sent, which must live until it is."""
    done: Callable[[], None]


@dataclass(kw_only=True)
class _WaiterThread:
    """A thread that waits for transfers of one kind, in their order, so that compute need not."""

    jobs: queue.SimpleQueue[_Posted | None] = field(default_factory=queue.SimpleQueue)
    thread: threading.Thread | None = None

    def start(self, name: str) -> None:
        # A daemon: a rank that fails must not wait, at its end, for messages that never come.
        self.thread = threading.Thread(target=_wait_for, args=(self.jobs,), name=name, daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """End the thread when what it waits for is there; a thread of torch must not outlive the process."""
        self.jobs.put(None)
        if self.thread is not None:
            self.thread.join()


@final
class AsyncExchange:
    """Sends between the members of a group without keeping the caller.

    What lies on a GPU goes through the host's memory: gloo then waits on a thread of its own and matches
    messages by tag, where NCCL would order all of them on one stream.

    Args:
        session: The run.
        group: Who takes part.
    """

    def __init__(self, session: Session, group: Group) -> None:
        self._session, self._group = session, group
        self._lanes = {_PULL: _WaiterThread(), _PUSH: _WaiterThread()}
        if group.size > 1:
            for tag, name in ((_PULL, "dglx-pull"), (_PUSH, "dglx-push")):
                self._lanes[tag].start(name)
                ended = weakref.finalize(self, self._lanes[tag].jobs.put, None)
                # At exit a lane that is woken runs into the interpreter's end.
                ended.atexit = False
            session.before_close.append(if_alive(self.close))

    def close(self) -> None:
        """End the threads, once what was posted has come."""
        for lane in self._lanes.values():
            lane.stop()
        self._lanes = {}

    def pull(self, shares: Sequence[Tensor], phase: str, batch: int | None = None) -> Transfer:
        """Send each owner its share of this part; brings what all parts have for the own block.

        Args:
            shares: (N_f,) by owner, of the shapes that owner expects.
            phase: For the ledger.
            batch: For the timeline.
        """
        part = self._group.part
        received = [_room_like(shares[part]) for _ in shares]
        received[part] = shares[part].detach()
        return self._swap(_PULL, shares, received, phase, batch)

    def push(self, own: Tensor, like: Sequence[Tensor], phase: str, batch: int | None = None) -> Transfer:
        """Send ``own`` to every part; brings what all owners sent.

        Args:
            own: This owner's tensor.
            like: (N_f,) tensors of the shapes and dtypes that come from the owners.
            phase: For the ledger.
            batch: For the timeline.
        """
        received = [_room_like(other) for other in like]
        received[self._group.part] = own.detach()
        return self._swap(_PUSH, [own] * self._group.size, received, phase, batch)

    def _swap(
        self, tag: int, sent: Sequence[Tensor], received: Received, phase: str, batch: int | None
    ) -> Transfer:
        """Send ``sent[p]`` to each other member p while ``received[p]`` arrives; nothing where empty."""
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
            session.timeline.add(_NAMES[tag], NETWORK, begin, time.perf_counter(), batch)

        self._lanes[tag].jobs.put(
            _Posted(transfer=transfer, works=works, received=received, kept=[*outgoing.values()], done=done)
        )
        return transfer


def _room_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)


_NAMES = {_PULL: "pull", _PUSH: "push gradient"}


def add_in_order(received: Received) -> Tensor:
    """Return the sum over the parts, added in their order, so that the bits do not depend on who was first.

    Halves are added up in float32.
    """
    first, *rest = received
    total = first.to(torch.float32) if first.dtype in _SUMMED_WIDER else first.clone()
    for share in rest:
        total += share
    return total.to(first.dtype)


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
        # Or it would live until the next one comes.
        del posted


def share_edge_values(
    values: Mapping[str, Tensor], inputs: Sequence[PartInput], group: Group, courier: AsyncExchange
) -> list[dict[str, Tensor]]:
    """Return every owner's values by name, like ``values`` of the own block; every member must call it.

    Args:
        values: Name to (E1, ...) of the own block, in the order of its edges; carries no gradient.
        inputs: (N_f,) by owner.
        group: Who takes part.
        courier: Of the group.

    Raises:
        PeerError: a rank is dead or did not take part within the time-out.
    """
    by_owner: list[dict[str, Tensor]] = [{} for _ in inputs]
    for name, own in values.items():
        like = [own.new_empty((one.block.num_edges(), *own.shape[1:])) for one in inputs]
        received = courier.push(_by_column(own, inputs[group.part].block), like, STRUCTURE).result()
        for mine, other in zip(by_owner, received, strict=True):
            mine[name] = other
        by_owner[group.part][name] = own
    return by_owner


def _by_column(values: Tensor, block: DGLBlock) -> Tensor:
    """Return ``values`` as the parts number the edges: as the columns of the matrix have them."""
    *_, edge_ids = block.adj_tensors("csc")
    return values[edge_ids.long()] if len(edge_ids) else values


def sum_to_owner(shares: Sequence[Tensor], courier: AsyncExchange, phase: str = FORWARD) -> Tensor:
    """Return the sum over the parts of their shares for this rank's own block; every member must call it.

    Args:
        shares: This part's share for each owner's block: N_f tensors, (n of that owner, ...).
        courier: Of the group.
        phase: For the ledger; of the way back, BACKWARD.

    Raises:
        PeerError: a rank is dead or did not take part within the time-out.
    """
    return cast("Tensor", _SumToOwner.apply(courier, phase, *shares))  # type: ignore[no-untyped-call]  # torch leaves it bare


def hand_to_parts(own: Tensor, like: Sequence[Tensor], courier: AsyncExchange) -> tuple[Tensor, ...]:
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
    def forward(ctx: Any, courier: AsyncExchange, phase: str, *shares: Tensor) -> Tensor:
        ctx.courier, ctx.like = courier, [share.detach() for share in shares]
        return add_in_order(courier.pull(shares, phase).result())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, None, *ctx.courier.push(gradient, ctx.like, BACKWARD).result()


class _HandToParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, courier: AsyncExchange, own: Tensor, *like: Tensor) -> tuple[Tensor, ...]:
        ctx.courier, ctx.num_like = courier, len(like)
        received = courier.push(own, like, FORWARD).result()
        # The own one is the input itself, which autograd must not see as an output.
        return tuple(tensor.clone() if tensor.data_ptr() == own.data_ptr() else tensor for tensor in received)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, add_in_order(ctx.courier.pull(gradients, BACKWARD).result()), *[None] * ctx.num_like
