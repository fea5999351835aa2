"""Whether structure is pushed or drawn again by every part: what the user says, or what costs less."""

from __future__ import annotations

import logging
import statistics
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from dgl.heterograph import DGLBlock
from torch import Tensor

from dglx_dist.comm.collectives import gather_int64, raise_for_missing
from dglx_dist.comm.session import Session
from dglx_dist.dataloading.loader import check_alike
from dglx_dist.dataloading.minibatch import BlockBuilder
from dglx_dist.dataloading.step_loader import Items, StepLoader
from dglx_dist.errors import ConfigError, DglxError
from dglx_dist.graph.opening import together
from dglx_dist.records import Array
from dglx_dist.strategies.push_pull.options import Group, StructureChoice

STRUCTURE = "structure"
"""The ledger's name of these bytes: (N_f - 1) 4 [(D1 + 1) + E1 + L0] per owner and batch (algorithms 2.4)."""

SMALL_NODES = 1 << 31
"""Graphs of fewer nodes have ids that fit into 4 bytes."""


@dataclass(frozen=True, kw_only=True)
class OwnersBlock:
    """The layer-1 block of one owner."""

    block: DGLBlock
    nodes: Tensor
    """(L0,) int64 global ids of its sources."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A batch, alike on all ranks."""

    group_batch: int
    """How many iterations of this loader began before."""
    epoch: int
    step: int


@dataclass(frozen=True, kw_only=True)
class Brought:
    """The blocks of a batch's other owners."""

    blocks: Mapping[int, OwnersBlock]
    """By owner's part."""
    seconds: float
    """What it cost, without waiting for ranks that were late."""


class StructureSource(ABC):
    """Brings the blocks of the other owners; called on the loader's threads."""

    @abstractmethod
    def begin(self, group_batch: int) -> None:
        """Forget earlier iterations; on the consumer's thread, before a batch of this one is asked for."""

    @abstractmethod
    def of_others(self, place: Place, own: OwnersBlock) -> Brought:
        """Bring the blocks of a batch; every member of the group must call it.

        Raises:
            PeerError: a member is dead, or did not come to this batch within the time-out.
        """

    @abstractmethod
    def leave(self, group_batch: int, reason: BaseException | None = None) -> None:
        """Let threads that wait for the others end, with ``reason`` if there is one; any thread."""


def packed(own: OwnersBlock, *, wide: bool) -> list[Array]:
    """Return source ids (L0,), indptr (D1 + 1,) and indices (E1,): int32, the ids int64 where ``wide``."""
    indptr, indices, _ = own.block.adj_tensors("csc")
    nodes = own.nodes if wide else own.nodes.to(torch.int32)
    return [nodes.numpy(), indptr.to(torch.int32).numpy(), indices.to(torch.int32).numpy()]


def unpacked(arrays: list[Array], builder: BlockBuilder, idtype: torch.dtype) -> OwnersBlock:
    """Return the block of what :func:`packed` made, its edges numbered as the columns have them.

    Args:
        arrays: Copied, where they are not converted.
        builder: Makes it.
        idtype: Of the owner's block, so that all parts run the same kernels.
    """
    nodes, indptr, indices = (torch.tensor(array) for array in arrays)
    block = builder.bare(indptr.to(idtype), indices.to(idtype), len(nodes))
    return OwnersBlock(block=block, nodes=nodes.to(torch.int64))


SEEDS = "seeds"
"""The ledger's name of these bytes: 8 per seed of every other member, once."""


@final
class ResampledStructure(StructureSource):
    """Draws what the other owners draw: draws belong to (seed, epoch, hop, node), so they are the same bits.

    Args:
        loader: This rank's.
        make: What makes any rank's batches: ``loader.offline()``.
        items: Rank to what it visits, of the other members.
        group: Who they are.
        builder: Of the blocks.
    """

    def __init__(
        self,
        loader: StepLoader[Any, Any, Any],
        make: Callable[[Mapping[Any, Any], int], Any],
        items: Mapping[int, Items[Any]],
        group: Group,
        builder: BlockBuilder,
    ) -> None:
        self._loader, self._make, self._items = loader, make, dict(items)
        self._group, self._builder = group, builder
        self._epoch = -1
        self._group_batches: dict[int, Callable[[int], dict[Any, Array]]] = {}
        self._lock = threading.Lock()

    def begin(self, group_batch: int) -> None:
        """See :meth:`StructureSource.begin`."""

    def of_others(self, place: Place, own: OwnersBlock) -> Brought:
        """See :meth:`StructureSource.of_others`; waits for nobody."""
        began = time.perf_counter()
        visits = self._of_epoch(place.epoch)
        blocks = {
            part: self._drawn(visits[rank](place.step), place.epoch) for part, rank in self._group.others
        }
        return Brought(blocks=blocks, seconds=time.perf_counter() - began)

    def leave(self, group_batch: int, reason: BaseException | None = None) -> None:
        """See :meth:`StructureSource.leave`."""

    def _drawn(self, items: Mapping[Any, Array], epoch: int) -> OwnersBlock:
        batch = self._make(items, epoch)
        indptr, indices, _ = batch.blocks[0].adj_tensors("csc")
        block = self._builder.bare(indptr, indices, len(batch.input_nodes))
        return OwnersBlock(block=block, nodes=batch.input_nodes)

    def _of_epoch(self, epoch: int) -> dict[int, Callable[[int], dict[Any, Array]]]:
        # Sorting the seeds of an epoch is for once, not for every batch.
        with self._lock:
            if epoch != self._epoch:
                self._group_batches = {
                    rank: self._loader.seeds_of_step(epoch, items, rank)
                    for rank, items in self._items.items()
                }
                self._epoch = epoch
            return self._group_batches


def open_resampled(
    loader: StepLoader[Any, Any, Any], session: Session, group: Group, op: str, builder: BlockBuilder
) -> ResampledStructure:
    """Exchange the seeds of a group; every rank must call it.

    Args:
        loader: Of nodes or edges, of one type.
        session: The run.
        group: Whose seeds are needed.
        op: Name of the remote call, the same on all ranks and of nobody else.
        builder: Of the blocks.

    Raises:
        ConfigError: on all ranks, when the draws of one cannot be done by others; the message has the reason.
        PeerError: a rank is dead or did not take part within the time-out.
    """
    make = together(session, loader.offline, ConfigError)
    # Servers with the whole structure may each leave out other edges, or draw by another seed.
    check_alike(session, "draws", loader.sampling_signature())
    items, kinds = loader.items, list(loader.items.ids)
    served = _serve(session, op, items)
    found = {
        rank: Items(ids=dict(zip(kinds, session.rpc.call(rank, op, "", [], phase=SEEDS), strict=True)))
        for _, rank in group.others
    }
    made = ResampledStructure(loader, make, found, group, builder)
    weakref.finalize(made, served)
    return made


def _serve(session: Session, op: str, items: Items[Any]) -> Callable[[], None]:
    """Tell others this rank's items from now on, all ranks at once; return what ends it. Collective."""

    def tell(_name: str, _arrays: Sequence[Array]) -> list[Array]:
        return list(items.ids.values())

    together(session, lambda: session.rpc.register(op, tell))
    return lambda: session.rpc.unregister(op)


_CHECK_EVERY_S = 1.0
"""How often a waiting thread asks whether those it waits for are still there."""


class IterationLeft(DglxError):
    """The loop over a loader ended while its threads waited; nobody sees it who did not leave."""


@final
class StructureInbox:
    """What arrived, by iteration, step and owner.

    Loaders of all ranks run equally far ahead and none without the others, so that no more than twice their
    depth of batches wait here.

    Args:
        session: The run.
        group: Who sends.
    """

    def __init__(self, session: Session, group: Group) -> None:
        self._session, self._group = session, group
        self._arrived: dict[tuple[int, int], dict[int, list[Array]]] = {}
        self._changed = threading.Condition()
        self._first_group_batch = 0
        self._reason: BaseException | None = None

    def __len__(self) -> int:
        """Batches of which something waits here."""
        return len(self._arrived)

    def put(self, group_batch: int, step: int, part: int, arrays: Sequence[Array]) -> None:
        """Add what the owner ``part`` sent; any thread. What is for an iteration that ended is dropped."""
        with self._changed:
            if group_batch >= self._first_group_batch:
                self._arrived.setdefault((group_batch, step), {})[part] = list(arrays)
                self._changed.notify_all()

    def begin(self, group_batch: int) -> None:
        """Drop what is of earlier iterations, and let who waits for it end."""
        with self._changed:
            self._forget_before(group_batch, None)

    def leave(self, group_batch: int, reason: BaseException | None = None) -> None:
        """Let who waits for something of iteration ``visit`` end with ``reason``; any thread."""
        with self._changed:
            self._forget_before(group_batch + 1, reason)

    def take(self, place: Place) -> dict[int, list[Array]]:
        """Wait for what all other members sent for a batch, and return it by part.

        Raises:
            PeerError: a rank is dead, or sent nothing within the session's time-out; it is named.
            IterationLeft: the iteration was left meanwhile; or the reason that was given for that.
        """
        deadline = time.monotonic() + self._session.timeout_s
        while missing := self._missing(place, min(_CHECK_EVERY_S, deadline - time.monotonic())):
            self._check(place, missing, late=time.monotonic() >= deadline)
        with self._changed:
            return self._arrived.pop((place.group_batch, place.step), {})

    def _forget_before(self, group_batch: int, reason: BaseException | None) -> None:
        if group_batch > self._first_group_batch:
            self._first_group_batch, self._reason = group_batch, reason
            self._arrived = {key: value for key, value in self._arrived.items() if key[0] >= group_batch}
        self._changed.notify_all()

    def _missing(self, place: Place, timeout_s: float) -> list[int]:
        """Wait until all are there, or for ``timeout_s``; return the ranks that are missing."""

        def missing() -> list[int]:
            here = self._arrived.get((place.group_batch, place.step), {})
            return [rank for part, rank in self._group.others if part not in here]

        def ready() -> bool:
            return place.group_batch < self._first_group_batch or not missing()

        with self._changed:
            self._changed.wait_for(ready, max(timeout_s, 0.0))
            if place.group_batch < self._first_group_batch:
                raise self._reason or IterationLeft(f"iteration {place.group_batch} of the loader was left")
            return missing()

    def _check(self, place: Place, missing: list[int], *, late: bool) -> None:
        what = f"the structure of step {place.step} of epoch {place.epoch}"
        raise_for_missing(
            self._session,
            missing,
            what,
            before=f"before it sent {what}",
            undone=f"did not send {what}",
            advice="every rank must iterate over the loader alike",
            late=late,
        )


@final
class PushedStructure(StructureSource):
    """Sends each batch's layer-1 block to the other members, and waits for theirs (algorithms 2.2).

    All ranks must have made theirs before one iterates.

    Args:
        session: The run.
        group: Who sends to whom.
        op: Name of the remote call, the same on all ranks and of nobody else.
        builder: Of the blocks.
        wide: Whether ids of nodes need 8 bytes.
    """

    def __init__(self, session: Session, group: Group, op: str, builder: BlockBuilder, *, wide: bool) -> None:
        self._session, self._group, self._op = session, group, op
        self._builder, self._wide = builder, wide
        self.inbox = inbox = StructureInbox(session, group)

        def receive(name: str, arrays: Sequence[Array]) -> list[Array]:
            group_batch, step, part = map(int, name.split())
            _check(arrays)
            inbox.put(group_batch, step, part, arrays)
            return []

        # Not a method: the loader would live as long as the session.
        session.rpc.register(op, receive)
        weakref.finalize(self, session.rpc.unregister, op)

    def begin(self, group_batch: int) -> None:
        """See :meth:`StructureSource.begin`."""
        self.inbox.begin(group_batch)

    def of_others(self, place: Place, own: OwnersBlock) -> Brought:
        """See :meth:`StructureSource.of_others`; returns when the others have this rank's block, too."""
        began = time.perf_counter()
        arrays, name = packed(own, wide=self._wide), f"{place.group_batch} {place.step} {self._group.part}"
        size = self._group.size
        # Beginning with the next part, so that not all ranks send to the same one first.
        others = sorted(self._group.others, key=lambda other: (other[0] - self._group.part) % size)
        sent = [
            self._session.rpc.submit(rank, self._op, name, arrays, phase=STRUCTURE, layer=1)
            for _, rank in others
        ]
        for call in sent:
            call.result()
        pushed = time.perf_counter()
        received = self.inbox.take(place)
        arrived = time.perf_counter()
        idtype = own.block.idtype
        blocks = {part: unpacked(found, self._builder, idtype) for part, found in received.items()}
        return Brought(blocks=blocks, seconds=(pushed - began) + (time.perf_counter() - arrived))

    def leave(self, group_batch: int, reason: BaseException | None = None) -> None:
        """See :meth:`StructureSource.leave`."""
        self.inbox.leave(group_batch, reason)


def _check(arrays: Sequence[Array]) -> None:
    """Raise ValueError, which the sender is told, unless this is a block."""
    if len(arrays) != 3 or not len(arrays[1]) or int(arrays[1][-1]) != len(arrays[2]):
        raise ValueError(f"{len(arrays)} arrays of {[len(array) for array in arrays]} values are no block")


log = logging.getLogger(__name__)

_MEASURED = 1000
_WARM_UP = 2
"""Batches that are not measured where there are more: compiled code is loaded, connections are made."""


@dataclass(frozen=True, kw_only=True)
class ChosenStructure:
    """How the parts of a group know the blocks of other owners."""

    way: Literal["none", "push", "resample"]
    """None in a group of one rank."""
    reason: str
    resample_s: float | None = None
    """Seconds a batch that drawing for the other owners takes on the slowest rank, where it was compared."""
    push_s: float | None = None
    """Seconds a batch that the push takes there."""


@final
class ChoosingStructure(StructureSource):
    """Goes the way that was asked for, or after a first iteration that measures both, the cheaper one.

    Making one is collective; so is :meth:`begin` until the choice is made.

    Args:
        loader: This rank's.
        session: The run.
        group: Whose blocks are needed.
        label: Of the loader, the same on all ranks and of no other one.
        asked: What the user says.
        builder: Of the blocks.
        wide: Whether ids of nodes need 8 bytes.

    Raises:
        ConfigError: on all ranks, when "resample" is asked for and cannot be.
    """

    def __init__(
        self,
        loader: StepLoader[Any, Any, Any],
        session: Session,
        group: Group,
        label: str,
        *,
        asked: StructureChoice,
        builder: BlockBuilder,
        wide: bool,
    ) -> None:
        self._loader, self._session, self._group, self._label = loader, session, group, label
        self._builder = builder
        self._costs: deque[tuple[float, float]] = deque(maxlen=_MEASURED)
        self._open = asked == "auto" and group.size > 1
        self._source: StructureSource = PushedStructure(
            session, group, f"{label}.structure", builder, wide=wide
        )
        self.choice = ChosenStructure(
            way="none" if group.size == 1 else "push",
            reason="a group of one rank"
            if group.size == 1
            else "not compared yet"
            if self._open
            else "asked for",
        )
        if asked == "resample" and group.size > 1:
            self._source = self._resampled()
            self.choice = ChosenStructure(way="resample", reason="asked for")

    def begin(self, group_batch: int) -> None:
        """See :meth:`StructureSource.begin`; collective while nothing is chosen.

        Raises:
            PeerError: a rank is dead or did not take part within the time-out.
        """
        if self._open and group_batch > 0:
            self._choose()
        self._source.begin(group_batch)

    def measured(self, sample_s: float, push_s: float) -> None:
        """Note seconds of one batch: this rank's sampling, and bringing the others' blocks; any thread."""
        if self._open:
            self._costs.append((sample_s, push_s))

    def of_others(self, place: Place, own: OwnersBlock) -> Brought:
        """See :meth:`StructureSource.of_others`."""
        return self._source.of_others(place, own)

    def leave(self, group_batch: int, reason: BaseException | None = None) -> None:
        """See :meth:`StructureSource.leave`."""
        self._source.leave(group_batch, reason)

    def _choose(self) -> None:
        """Compare on all ranks, and go the cheaper way: the slowest rank counts, as all wait for it."""
        costs = list(self._costs)
        costs = costs[_WARM_UP:] or costs
        others = self._group.size - 1
        sample_s, push_s = (
            (statistics.median(column) for column in zip(*costs, strict=True)) if costs else (0.0, 0.0)
        )
        mine = [len(costs), round(sample_s * others * 1e9), round(push_s * 1e9)]
        rows = gather_int64(mine, self._session)
        if not rows[:, 0].any():
            return
        self._open = False
        self._costs.clear()
        resample_s, push_s = rows[:, 1].max() / 1e9, rows[:, 2].max() / 1e9
        way: Literal["push", "resample"] = "resample" if resample_s < push_s else "push"
        reason = "costs less"
        if way == "resample":
            try:
                self._source = self._resampled()
            except ConfigError as error:
                way, reason = "push", f"the only way: {error}"
        self.choice = ChosenStructure(way=way, reason=reason, resample_s=resample_s, push_s=push_s)
        if self._session.topology.rank == 0:
            log.info(
                "push_pull structure: %s (%s); a batch: drawing for %d other owners %.4f s, push %.4f s",
                way,
                reason,
                others,
                resample_s,
                push_s,
            )

    def _resampled(self) -> ResampledStructure:
        return open_resampled(self._loader, self._session, self._group, f"{self._label}.seeds", self._builder)
