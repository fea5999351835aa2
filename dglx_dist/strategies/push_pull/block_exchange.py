"""Exchange of layer-1 blocks between owners and parts: pushed, or sampled again by every part."""

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

from dglx_dist.comm.collectives import check_equal, gather_int64, run_on_all_ranks
from dglx_dist.comm.mailbox import OneSidedExchange
from dglx_dist.comm.session import Session
from dglx_dist.dataloading.minibatch import BlockBuilder
from dglx_dist.dataloading.step_loader import Items, StepLoader
from dglx_dist.errors import ConfigError
from dglx_dist.records import Array
from dglx_dist.strategies.push_pull.options import Group, StructureChoice

STRUCTURE = "structure"
"""Ledger phase: (N_f - 1) 4 [(D1 + 1) + E1 + L0] bytes per owner and batch; docs/strategies/push_pull.md."""

SEEDS = "seeds"
"""Ledger phase: 8 bytes per seed of every other member, once."""

SMALL_NODES = 1 << 31
"""Ids of graphs with fewer nodes fit into 4 bytes."""

_MEASURED = 1000
_WARM_UP = 2
"""Batches that are not measured where there are more: compiled code is loaded, connections are made."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class OwnerBlock:
    """The layer-1 block of one owner."""

    block: DGLBlock
    nodes: Tensor
    """(L0,) int64 global ids of its sources."""


@dataclass(frozen=True, kw_only=True)
class BatchPosition:
    """Identifies a batch; equal on all ranks."""

    iteration: int
    """Iterations over this loader that began before."""
    epoch: int
    step: int


@dataclass(frozen=True, kw_only=True)
class FetchedBlocks:
    """The blocks of a batch's other owners."""

    blocks: Mapping[int, OwnerBlock]
    """By owner's part."""
    seconds: float
    """Time spent, without waiting for ranks that were late."""


class StructureSource(ABC):
    """Provides the blocks of the other owners; called on the loader's threads."""

    @abstractmethod
    def begin(self, iteration: int) -> None:
        """Forget earlier iterations; called on the consumer's thread, before the first batch of this one."""

    @abstractmethod
    def fetch(self, position: BatchPosition, own: OwnerBlock) -> FetchedBlocks:
        """Return the other owners' blocks of a batch; every member of the group must call it.

        Raises:
            PeerError: a member is dead, or did not reach this batch within the time-out.
        """

    @abstractmethod
    def cancel(self, iteration: int, reason: BaseException | None = None) -> None:
        """End the waits of ``iteration``, with ``reason`` if there is one; any thread."""


@dataclass(frozen=True, kw_only=True)
class StructureDecision:
    """How the parts of a group get the blocks of other owners."""

    mode: Literal["none", "push", "resample"]
    """None in a group of one rank."""
    reason: str
    resample_s: float | None = None
    """Seconds per batch to sample for the other owners on the slowest rank, where it was compared."""
    push_s: float | None = None
    """Seconds per batch of the push there."""


@final
class AdaptiveStructure(StructureSource):
    """Uses the requested source, or after a first iteration that measures both the cheaper one.

    Construction is collective; so is :meth:`begin` until the decision is made. ``label`` is equal on all
    ranks and unique among loaders; ``wide``: ids of nodes need 8 bytes.

    Raises:
        ConfigError: on all ranks, when "resample" is requested and not possible.
    """

    def __init__(
        self,
        loader: StepLoader[Any, Any, Any],
        session: Session,
        group: Group,
        label: str,
        *,
        requested: StructureChoice,
        builder: BlockBuilder,
        wide: bool,
    ) -> None:
        self._loader, self._session, self._group, self._label = loader, session, group, label
        self._builder = builder
        self._costs: deque[tuple[float, float]] = deque(maxlen=_MEASURED)
        self._undecided = requested == "auto" and group.size > 1
        self._source: StructureSource = PushedStructure(
            session, group, f"{label}.structure", builder, wide=wide
        )
        if group.size == 1:
            self.decision = StructureDecision(mode="none", reason="a group of one rank")
        elif requested == "resample":
            self._source = self._resampled()
            self.decision = StructureDecision(mode="resample", reason="requested")
        else:
            reason = "not compared yet" if self._undecided else "requested"
            self.decision = StructureDecision(mode="push", reason=reason)

    def begin(self, iteration: int) -> None:
        if self._undecided and iteration > 0:
            self._decide()
        self._source.begin(iteration)

    def record_costs(self, sample_s: float, push_s: float) -> None:
        """Record seconds of one batch: this rank's sampling, and fetching the others' blocks; any thread."""
        if self._undecided:
            self._costs.append((sample_s, push_s))

    def fetch(self, position: BatchPosition, own: OwnerBlock) -> FetchedBlocks:
        return self._source.fetch(position, own)

    def cancel(self, iteration: int, reason: BaseException | None = None) -> None:
        self._source.cancel(iteration, reason)

    def _decide(self) -> None:
        # The slowest rank counts, as all wait for it.
        costs = list(self._costs)
        costs = costs[_WARM_UP:] or costs
        others = self._group.size - 1
        sample_s, push_s = (
            (statistics.median(column) for column in zip(*costs, strict=True)) if costs else (0.0, 0.0)
        )
        measured = [len(costs), round(sample_s * others * 1e9), round(push_s * 1e9)]
        rows = gather_int64(measured, self._session)
        if not rows[:, 0].any():
            return
        self._undecided = False
        self._costs.clear()
        resample_s, push_s = rows[:, 1].max() / 1e9, rows[:, 2].max() / 1e9
        mode: Literal["push", "resample"] = "resample" if resample_s < push_s else "push"
        reason = "costs less"
        if mode == "resample":
            try:
                self._source = self._resampled()
            except ConfigError as error:
                mode, reason = "push", f"resampling is not possible: {error}"
        self.decision = StructureDecision(mode=mode, reason=reason, resample_s=resample_s, push_s=push_s)
        if self._session.topology.rank == 0:
            log.info(
                "push_pull structure: %s (%s); per batch: sampling for %d other owners %.4f s, push %.4f s",
                mode,
                reason,
                others,
                resample_s,
                push_s,
            )

    def _resampled(self) -> ResampledStructure:
        op = f"{self._label}.seeds"
        return ResampledStructure(self._loader, self._session, self._group, op, self._builder)


@final
class PushedStructure(StructureSource):
    """Sends each batch's layer-1 block to the other members, and waits for theirs.

    All ranks must have constructed theirs before one iterates. ``op`` is the name of the remote call, equal
    on all ranks and used by nothing else.
    """

    def __init__(self, session: Session, group: Group, op: str, builder: BlockBuilder, *, wide: bool) -> None:
        self._group, self._builder, self._wide = group, builder, wide
        advice = "every rank must iterate over the loader alike"
        self._exchange = OneSidedExchange(session, op, advice, _check_block)

    def begin(self, iteration: int) -> None:
        self._exchange.mailbox.begin(iteration)

    def fetch(self, position: BatchPosition, own: OwnerBlock) -> FetchedBlocks:
        began = time.perf_counter()
        arrays = pack_block(own, wide=self._wide)
        step, ranks = str(position.step), [rank for _, rank in self._group.others]
        sent = dict.fromkeys(ranks, arrays)
        self._exchange.post(position.iteration, step, sent, phase=STRUCTURE, layer=1)
        pushed = time.perf_counter()
        what = f"the structure of step {position.step} of epoch {position.epoch}"
        received = self._exchange.mailbox.take(position.iteration, step, ranks, what)
        arrived = time.perf_counter()
        idtype = own.block.idtype
        blocks = {
            part: unpack_block(received[rank], self._builder, idtype) for part, rank in self._group.others
        }
        return FetchedBlocks(blocks=blocks, seconds=(pushed - began) + (time.perf_counter() - arrived))

    def cancel(self, iteration: int, reason: BaseException | None = None) -> None:
        self._exchange.mailbox.cancel(iteration, reason)


def pack_block(own: OwnerBlock, *, wide: bool) -> list[Array]:
    """Return source ids (L0,), indptr (D1 + 1,) and indices (E1,): int32, the ids int64 where ``wide``."""
    indptr, indices, _ = own.block.adj_tensors("csc")
    nodes = own.nodes if wide else own.nodes.to(torch.int32)
    return [nodes.numpy(), indptr.to(torch.int32).numpy(), indices.to(torch.int32).numpy()]


def unpack_block(arrays: list[Array], builder: BlockBuilder, idtype: torch.dtype) -> OwnerBlock:
    """Return the block of what :func:`pack_block` returned, a copy with its edges numbered in CSC order.

    ``idtype`` is that of the owner's block, so that all parts run the same kernels.
    """
    nodes, indptr, indices = (torch.tensor(array) for array in arrays)
    block = builder.bare(indptr.to(idtype), indices.to(idtype), len(nodes))
    return OwnerBlock(block=block, nodes=nodes.to(torch.int64))


def _check_block(arrays: Sequence[Array]) -> None:
    # The sender gets this ValueError.
    if len(arrays) != 3 or not len(arrays[1]) or int(arrays[1][-1]) != len(arrays[2]):
        raise ValueError(f"{len(arrays)} arrays of {[len(array) for array in arrays]} values are no block")


@final
class ResampledStructure(StructureSource):
    """Samples what the other owners sample: draws are keyed by (seed, epoch, hop, node), so bits are equal.

    The constructor exchanges the seeds of the group by the remote call ``op``; it is collective.

    Raises:
        ConfigError: on all ranks, when others cannot repeat the draws of one; the message has the reason.
    """

    def __init__(
        self,
        loader: StepLoader[Any, Any, Any],
        session: Session,
        group: Group,
        op: str,
        builder: BlockBuilder,
    ) -> None:
        self._loader, self._group, self._builder = loader, group, builder
        self._sample = run_on_all_ranks(session, loader.offline, ConfigError)
        # Servers with the whole structure may each leave out other edges, or draw by another seed.
        check_equal(session, "the sampler", loader.sampling_signature())
        kinds, arrays = list(loader.items.ids), list(loader.items.ids.values())
        # Collective: all ranks answer before one asks.
        run_on_all_ranks(session, lambda: session.rpc.register(op, lambda _name, _arrays: arrays))
        weakref.finalize(self, session.rpc.unregister, op)
        self._items: dict[int, Items[Any]] = {
            rank: Items(ids=dict(zip(kinds, session.rpc.call(rank, op, "", [], phase=SEEDS), strict=True)))
            for _, rank in group.others
        }
        self._epoch = -1
        self._seeds: dict[int, Callable[[int], dict[Any, Array]]] = {}
        self._lock = threading.Lock()

    def begin(self, iteration: int) -> None:
        pass

    def fetch(self, position: BatchPosition, own: OwnerBlock) -> FetchedBlocks:
        began = time.perf_counter()
        seeds = self._seeds_of_epoch(position.epoch)
        blocks = {
            part: self._sampled(seeds[rank](position.step), position.epoch)
            for part, rank in self._group.others
        }
        return FetchedBlocks(blocks=blocks, seconds=time.perf_counter() - began)

    def cancel(self, iteration: int, reason: BaseException | None = None) -> None:
        pass

    def _sampled(self, items: Mapping[Any, Array], epoch: int) -> OwnerBlock:
        batch = self._sample(items, epoch)
        indptr, indices, _ = batch.blocks[0].adj_tensors("csc")
        block = self._builder.bare(indptr, indices, len(batch.input_nodes))
        return OwnerBlock(block=block, nodes=batch.input_nodes)

    def _seeds_of_epoch(self, epoch: int) -> dict[int, Callable[[int], dict[Any, Array]]]:
        # The seeds of an epoch are sorted once, not for every batch.
        with self._lock:
            if epoch != self._epoch:
                self._seeds = {
                    rank: self._loader.seeds_of_step(epoch, items, rank)
                    for rank, items in self._items.items()
                }
                self._epoch = epoch
            return self._seeds
