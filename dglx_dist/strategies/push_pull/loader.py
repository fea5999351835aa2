"""Loaders of push-pull: the batches of data parallel training, with feature columns in place of rows.

Every part needs the layer-1 block of every owner of its group: owners push them, or parts sample them again.
"""

from __future__ import annotations

import copy
import itertools
import logging
import statistics
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast, final

import torch
from dgl.dataloading import EdgePredictionSampler
from dgl.heterograph import DGLBlock
from torch import Tensor

from dglx_dist.comm.collectives import check_equal, gather_int64, run_on_all_ranks
from dglx_dist.comm.mailbox import OneSidedExchange
from dglx_dist.comm.session import Session, SessionField
from dglx_dist.comm.trace import LOADER
from dglx_dist.dataloading.minibatch import BlockBuilder
from dglx_dist.dataloading.row_buffers import Precision, RowMemory
from dglx_dist.dataloading.sampler_spec import read_sampler
from dglx_dist.dataloading.step_loader import Items, StepLoader
from dglx_dist.errors import ConfigError
from dglx_dist.records import Array, StepShare
from dglx_dist.strategies.push_pull.exchange import STRUCTURE, Group, GroupBatch, PartInput
from dglx_dist.strategies.push_pull.feature_columns import ColumnStore, open_columns
from dglx_dist.strategies.push_pull.options import PushPullOptions, StructureChoice
from dglx_dist.strategies.push_pull.pipeline import PIPELINES

if TYPE_CHECKING:
    from dglx_dist.dataloading.edge_loader import DistEdgeDataLoader
    from dglx_dist.dataloading.loader import DataLoader
    from dglx_dist.graph.dist_graph import DistGraph

SEEDS = "seeds"
"""Ledger phase: 8 bytes per seed of every other member, once."""

SMALL_NODES = 1 << 31
"""Ids of graphs with fewer nodes fit into 4 bytes."""

_MEASURED = 1000
_WARM_UP = 2
"""Batches that are not measured where there are more: compiled code is loaded, connections are made."""

_EXTRA_BATCHES = 5
"""Batches that may be alive beside those made ahead: in flight, looked at, and held by the training loop."""

_LOADER_NUMBERS: SessionField[Iterator[int]] = SessionField(lambda _: itertools.count())

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


FetchedBlocks: TypeAlias = tuple[Mapping[int, OwnerBlock], float]
"""The other owners' blocks by part, and the seconds spent, without waiting for ranks that were late."""


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
class BlockExchange:
    """Provides the blocks of the other owners, as requested or, after a first iteration, what is cheaper.

    Construction is collective; so is :meth:`begin` until the decision is made, and all ranks must have
    constructed theirs before one iterates. ``label`` is equal on all ranks and unique among loaders;
    ``wide``: ids of nodes need 8 bytes.

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
        self._builder, self._wide = builder, wide
        self._costs: deque[tuple[float, float]] = deque(maxlen=_MEASURED)
        self._undecided = requested == "auto" and group.size > 1
        advice = "every rank must iterate over the loader alike"
        self._pushes = OneSidedExchange(session, f"{label}.structure", advice, _check_block)
        self._resampler: Resampler | None = None
        if group.size == 1:
            self.decision = StructureDecision(mode="none", reason="a group of one rank")
        elif requested == "resample":
            self._resampler = self._make_resampler()
            self.decision = StructureDecision(mode="resample", reason="requested")
        else:
            reason = "not compared yet" if self._undecided else "requested"
            self.decision = StructureDecision(mode="push", reason=reason)

    def begin(self, iteration: int) -> None:
        """Forget earlier iterations; on the consumer's thread, before the first batch of this one."""
        if self._undecided and iteration > 0:
            self._decide()
        self._pushes.mailbox.begin(iteration)

    def fetch(self, position: BatchPosition, own: OwnerBlock, sample_s: float) -> Mapping[int, OwnerBlock]:
        """Return the other owners' blocks of a batch; every member of the group must call it, on any thread.

        ``sample_s`` are the seconds that sampling the own batch took.

        Raises:
            PeerError: a member is dead, or did not reach this batch within the time-out.
        """
        fetch = self._pushed if self._resampler is None else self._resampler.fetch
        blocks, seconds = fetch(position, own)
        self.record_costs(sample_s, seconds)
        return blocks

    def record_costs(self, sample_s: float, push_s: float) -> None:
        """Record seconds of one batch: this rank's sampling, and fetching the others' blocks."""
        if self._undecided:
            self._costs.append((sample_s, push_s))

    def cancel(self, iteration: int, reason: BaseException | None = None) -> None:
        """End the waits of ``iteration``, with ``reason`` if there is one; any thread."""
        self._pushes.mailbox.cancel(iteration, reason)

    def _pushed(self, position: BatchPosition, own: OwnerBlock) -> FetchedBlocks:
        began = time.perf_counter()
        arrays = pack_block(own, wide=self._wide)
        step, ranks = str(position.step), [rank for _, rank in self._group.others]
        sent = dict.fromkeys(ranks, arrays)
        self._pushes.post(position.iteration, step, sent, phase=STRUCTURE, layer=1)
        pushed = time.perf_counter()
        what = f"the structure of step {position.step} of epoch {position.epoch}"
        received = self._pushes.mailbox.take(position.iteration, step, ranks, what)
        arrived = time.perf_counter()
        idtype = own.block.idtype
        blocks = {
            part: unpack_block(received[rank], self._builder, idtype) for part, rank in self._group.others
        }
        return blocks, (pushed - began) + (time.perf_counter() - arrived)

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
                self._resampler = self._make_resampler()
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

    def _make_resampler(self) -> Resampler:
        return Resampler(self._loader, self._session, self._group, f"{self._label}.seeds", self._builder)


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
    block = builder.block(indptr.to(idtype), indices.to(idtype), len(nodes))
    return OwnerBlock(block=block, nodes=nodes.to(torch.int64))


def _check_block(arrays: Sequence[Array]) -> None:
    # The sender gets this ValueError; kernels would read outside of the arrays.
    if len(arrays) != 3 or any(one.ndim != 1 or one.dtype.kind != "i" for one in arrays):
        found = [f"{one.dtype} {one.shape}" for one in arrays]
        raise ValueError(f"arrays {found} are no block; it has three of whole numbers, of one dimension")
    nodes, indptr, indices = arrays
    if (
        not len(indptr)
        or (int(indptr[0]), int(indptr[-1])) != (0, len(indices))
        or len(indptr) - 1 > len(nodes)
        or (indptr[1:] < indptr[:-1]).any()
        or (len(indices) and not 0 <= indices.min() <= indices.max() < len(nodes))
    ):
        raise ValueError(
            f"{[len(one) for one in arrays]} source ids, bounds and indices of in-edges are no block: bounds "
            "rise from 0 to the number of edges, and indices are positions of source ids"
        )


@final
class Resampler:
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

    def fetch(self, position: BatchPosition, own: OwnerBlock) -> FetchedBlocks:
        began = time.perf_counter()
        seeds = self._seeds_of_epoch(position.epoch)
        blocks = {
            part: self._sampled(seeds[rank](position.step), position.epoch)
            for part, rank in self._group.others
        }
        return blocks, time.perf_counter() - began

    def _sampled(self, items: Mapping[Any, Array], epoch: int) -> OwnerBlock:
        batch = self._sample(items, epoch)
        indptr, indices, _ = batch.blocks[0].adj_tensors("csc")
        block = self._builder.block(indptr, indices, len(batch.input_nodes))
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


@dataclass(frozen=True, kw_only=True)
class ColumnFetcher:
    """What a loader of push-pull adds to the batches of the inner one."""

    group: Group
    names: tuple[str, ...]
    """Features that come as this part's columns."""
    store: ColumnStore | None
    """Their columns; None when there are no names."""
    structure: StructureChoice = "auto"
    look_ahead: bool = False
    """Whether batch i + 1 is there when batch i is yielded."""
    precision: Precision = field(default_factory=Precision)
    """Dtype of the columns in a batch."""
    memory: RowMemory = field(default_factory=RowMemory)
    """Buffers of the columns."""

    def input_of(self, owner: OwnerBlock, number: int) -> PartInput:
        columns: dict[str, Tensor] = {}
        if self.store is not None:
            for name in self.names:
                rows = self.store.rows(name, owner.nodes, self.memory)
                columns[name] = self.precision.converted(rows)
        return PartInput(block=owner.block, nodes=owner.nodes, columns=columns, number=number)


@final
class IterationFetcher:
    """The inputs of one iteration, made on the loader's threads and taken by the consumer."""

    def __init__(
        self, session: Session, fetcher: ColumnFetcher, blocks: BlockExchange, iteration: int, num_steps: int
    ) -> None:
        self._session, self._fetcher, self._blocks = session, fetcher, blocks
        self._iteration, self._num_steps = iteration, num_steps
        self._ready: dict[int, tuple[PartInput, ...]] = {}

    def take(self, step: int) -> tuple[PartInput, ...]:
        """Return and forget every owner's input of a batch, by part."""
        return self._ready.pop(step)

    def close(self) -> None:
        """Release batches that nobody took, and the lent memory; no thread may be at work."""
        self._ready.clear()
        # The inner loader refers to this iteration until the next one, and this one to the loader through
        # the blocks: without this the memory would stay, after the last use of a loader, until the garbage
        # collector finds the cycle.
        self._fetcher = replace(self._fetcher, precision=Precision(), memory=RowMemory())

    def around(self, epoch: int, step: int, make: Callable[[], Any]) -> Any:
        """Make a batch and its inputs; on the loader's threads."""
        try:
            batch = make()
            begin = time.perf_counter()
            position = BatchPosition(iteration=self._iteration, epoch=epoch, step=step)
            self._ready[step] = self._inputs(position, batch)
        except BaseException as error:
            # Other threads of this loader wait for ranks that now wait for this one.
            self._blocks.cancel(self._iteration, error)
            raise
        return replace(batch, fetch_s=batch.fetch_s + time.perf_counter() - begin)

    def _inputs(self, position: BatchPosition, batch: Any) -> tuple[PartInput, ...]:
        number = position.epoch * self._num_steps + position.step
        own = OwnerBlock(block=batch.blocks[0], nodes=batch.input_nodes.to(torch.int64))
        group, timeline = self._fetcher.group, self._session.timeline
        with timeline.span("push structure", LOADER, number):
            blocks = {group.part: own, **self._blocks.fetch(position, own, batch.sample_s)}
        with timeline.span("gather columns", LOADER, number):
            return tuple(self._fetcher.input_of(blocks[part], number) for part in range(group.size))


@dataclass(frozen=True, kw_only=True)
class _Item:
    """A batch of the inner loader with the state that belongs to it."""

    yielded: Any
    group_batch: GroupBatch
    share: StepShare | None
    position: dict[str, int]


@final
class PushPullLoader:
    """Yields the batches of ``inner``, with ``blocks[0].push_pull`` set to the batch as all parts see it.

    ``blocks[0].srcdata`` has this rank's columns, (L0, F_p), under the name of each feature. Construction is
    collective, and all ranks must iterate alike; structure moves from the loader's threads without a
    collective. At the normal end of an epoch the pipelines of the session are drained, which is collective.

    ``inner`` is a loader of nodes or edges of one type, which fetches no row of the features. Positions,
    times and the like are those of a :class:`StepLoader`.

    Raises:
        ConfigError: on all ranks, when they were given other depths or features, or structure="resample" is
            not possible.
        PeerError: a rank did not take part.
    """

    def __init__(
        self,
        inner: StepLoader[Any, Any, Any],
        session: Session,
        fetcher: ColumnFetcher,
        *,
        num_nodes: int,
        builder: BlockBuilder,
    ) -> None:
        self._inner, self._session, self._fetcher = inner, session, fetcher
        self._structure = BlockExchange(
            inner,
            session,
            fetcher.group,
            # The ranks' loaders share a name, as all construct theirs in the same order.
            f"push_pull.{next(_LOADER_NUMBERS.of(session))}",
            requested=fetcher.structure,
            builder=builder,
            wide=num_nodes >= SMALL_NODES,
        )
        settings = {
            "depth": inner.depth,
            "features": fetcher.names,
            "structure": fetcher.structure,
            "look_ahead": fetcher.look_ahead,
        }
        # Also a barrier: all ranks have registered their remote calls before one iterates.
        check_equal(session, "a loader of push_pull", settings)
        self._iterations = 0
        self._position: dict[str, int] | None = None

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        # What does not depend on the batch that was yielded last.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._inner, name)

    @property
    def epoch(self) -> int:
        """The epoch of the current iteration, or of the next one when none is under way."""
        return self._inner.epoch if self._position is None else self._position["epoch"]

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one; see :meth:`StepLoader.set_epoch`."""
        self._inner.set_epoch(epoch)
        self._position = None

    def state_dict(self) -> dict[str, int]:
        """Return the position of the batch that was yielded last; see :meth:`StepLoader.state_dict`."""
        return dict(self._position) if self._position is not None else self._inner.state_dict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Resume after the position ``state``; see :meth:`StepLoader.load_state_dict`."""
        self._inner.load_state_dict(state)
        self._position = None

    def __iter__(self) -> Iterator[Any]:
        iteration, self._iterations = self._iterations, self._iterations + 1
        self._structure.begin(iteration)
        fetcher = IterationFetcher(self._session, self._fetcher, self._structure, iteration, len(self))
        self._inner.batch_hook(fetcher.around)
        stream = iter(self._inner)
        try:
            yield from self._linked(lambda: self._next(stream, fetcher))
        finally:
            # First, or the inner loader would wait for threads that wait for the other ranks.
            self._structure.cancel(iteration)
            cast("Any", stream).close()
            fetcher.close()
            self._session.step_share = None
        for pipeline in [reference() for reference in PIPELINES.of(self._session)]:
            if pipeline is not None:
                pipeline.drain()
        self._position = None

    def _linked(self, fetch_next: Callable[[], _Item | None]) -> Iterator[Any]:
        """Yield the batches one after the other, each with a link to the next if the loader looks ahead."""
        item, look_ahead = fetch_next(), self._fetcher.look_ahead
        while item is not None:
            coming = fetch_next() if look_ahead else None
            item.group_batch.following = coming.group_batch if coming is not None else None
            # Fetching the next one has advanced both.
            self._session.step_share, self._position = item.share, item.position
            yield item.yielded
            # Or a user who keeps one batch would keep all that follow.
            item.group_batch.following = None
            item = coming if look_ahead else fetch_next()

    def _next(self, stream: Iterator[Any], fetcher: IterationFetcher) -> _Item | None:
        yielded = next(stream, None)
        if yielded is None:
            return None
        position, block = self._inner.state_dict(), yielded[-1][0]
        inputs, part = self._on_device(block, fetcher.take(position["step"] - 1)), self._fetcher.group.part
        for name, columns in inputs[part].columns.items():
            block.srcdata[name] = columns
        # A view, and not the user's block itself, which gets a reference to the batch: the cycle would keep
        # the rows in memory until the garbage collector finds it.
        own = replace(inputs[part], block=block.local_var())
        group_batch = GroupBatch(own.number, (*inputs[:part], own, *inputs[part + 1 :]))
        block.push_pull = group_batch
        return _Item(
            yielded=yielded, group_batch=group_batch, share=self._session.step_share, position=position
        )

    def _on_device(self, block: DGLBlock, inputs: tuple[PartInput, ...]) -> tuple[PartInput, ...]:
        """Return ``inputs`` on the device of the user's block, but for the own block, which it replaces."""
        if block.device.type == "cpu":
            return inputs
        own = self._fetcher.group.part
        return tuple(
            replace(
                one,
                block=one.block if part == own else one.block.to(block.device),
                nodes=one.nodes.to(block.device),
                columns={name: rows.to(block.device) for name, rows in one.columns.items()},
            )
            for part, one in enumerate(inputs)
        )


def open_loader(
    inner_class: type[DataLoader] | type[DistEdgeDataLoader],
    g: DistGraph,
    seeds: Any,
    sampler: Any,
    store: ColumnStore | None,
    group: Group,
    options: PushPullOptions,
    loader_options: Mapping[str, Any],
) -> PushPullLoader:
    """Return a loader like ``inner_class`` for push-pull; collective.

    Matrices that ``sampler`` prefetches for the input come as columns, too, beside the features of ``store``.

    Raises:
        ConfigError: as :class:`PushPullLoader`; several types; or as ``inner_class``.
    """
    opened = () if store is None else store.names
    without, names = run_on_all_ranks(g.session, lambda: _split_prefetch(g, sampler, opened), ConfigError)
    inner = inner_class(g, seeds, without, **loader_options)
    if names and (store is None or store.names != names):
        store = open_columns(g, names, group, cache=options.cache_columns)
    (etype,) = g.canonical_etypes
    num_alive = (inner.depth + _EXTRA_BATCHES) * group.size
    fetcher = ColumnFetcher(
        group=group,
        names=names,
        store=store,
        structure=options.structure,
        look_ahead=options.in_flight > 1,
        # The inner loader has checked the dtype.
        precision=Precision(loader_options.get("feature_dtype"), num_alive),
        memory=RowMemory(num_alive),
    )
    return PushPullLoader(inner, g.session, fetcher, num_nodes=g.num_nodes(), builder=BlockBuilder(etype))


def _split_prefetch(g: DistGraph, sampler: Any, names: tuple[str, ...]) -> tuple[Any, tuple[str, ...]]:
    """Return a copy of ``sampler`` without prefetched input matrices, and ``names`` with theirs."""
    if len(g.ntypes) != 1 or len(g.canonical_etypes) != 1:
        raise ConfigError(
            f"push_pull trains on graphs of one node and one edge type, and this one has the nodes "
            f"{', '.join(g.ntypes)} and the edges {', '.join(map(str, g.canonical_etypes))}; use "
            "strategy='data_parallel'"
        )
    if isinstance(sampler, EdgePredictionSampler):
        outer = copy.copy(sampler)
        outer.sampler, names = _split_prefetch(g, sampler.sampler, names)
        return outer, names
    feats = read_sampler(sampler).node_feats
    prefetched = (
        [name for of_type in feats.values() for name in of_type] if isinstance(feats, Mapping) else feats
    )
    matrices = [name for name in prefetched if name in g.ndata and len(g.ndata[name].shape) == 2]
    names = tuple(dict.fromkeys([*names, *matrices]))
    without = copy.copy(sampler)
    without.prefetch_node_feats = [name for name in prefetched if name not in names]
    return without, names
