"""The loader of push-pull: the batches of data parallel training, with columns in place of rows."""

from __future__ import annotations

import copy
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, cast, final

import torch
from dgl.dataloading import EdgePredictionSampler
from dgl.heterograph import DGLBlock
from torch import Tensor

from dglx_dist.comm.session import Session
from dglx_dist.comm.trace import LOADER
from dglx_dist.dataloading.edge_loader import DistEdgeDataLoader
from dglx_dist.dataloading.loader import DataLoader, check_alike
from dglx_dist.dataloading.minibatch import BlockBuilder
from dglx_dist.dataloading.row_buffers import Precision, RowMemory
from dglx_dist.dataloading.sampler_spec import read_sampler
from dglx_dist.dataloading.step_loader import LoaderTimes, StepLoader
from dglx_dist.errors import ConfigError
from dglx_dist.graph.opening import together
from dglx_dist.records import StepShare
from dglx_dist.strategies.push_pull.block_exchange import (
    SMALL_NODES,
    AdaptiveStructure,
    StructureDecision,
    OwnerBlock,
    BatchPosition,
)
from dglx_dist.strategies.push_pull.feature_columns import ColumnStore, open_columns
from dglx_dist.strategies.push_pull.options import (
    PIPELINES,
    Group,
    GroupBatch,
    PartInput,
    PushPullOptions,
    StructureChoice,
)

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph


class Rows(Protocol):
    """Where this part's columns are."""

    def rows(self, name: str, nodes: Tensor, memory: RowMemory | None = None) -> Tensor:
        """Return (K, F_p) of (K,) int64 ids, in ``memory``; any thread."""


@dataclass(frozen=True, kw_only=True)
class ColumnFetcher:
    """What a loader of push-pull brings, beside what the inner one does."""

    group: Group
    names: tuple[str, ...]
    """Features that come as this part's columns."""
    store: Rows | None
    """Where they are; None when there are no names."""
    structure: StructureChoice = "auto"
    look_ahead: bool = False
    """Whether batch i + 1 is there when batch i is yielded."""
    precision: Precision = field(default_factory=Precision)
    """What the columns become."""
    memory: RowMemory = field(default_factory=RowMemory)
    """Where they lie."""


@final
class GroupBatchFetcher:
    """One iteration's inputs, made on the loader's threads and taken by the consumer.

    Args:
        session: The run.
        feed: What to bring.
        structure: Where other owners' blocks come from.
        visit: The iteration.
        num_steps: Steps of an epoch.
    """

    def __init__(
        self,
        session: Session,
        fetcher: ColumnFetcher,
        structure: AdaptiveStructure,
        group_batch: int,
        num_steps: int,
    ) -> None:
        self._session, self._fetcher, self._structure = session, fetcher, structure
        self._group_batch, self._num_steps = group_batch, num_steps
        self._ready: dict[int, tuple[PartInput, ...]] = {}

    def take(self, step: int) -> tuple[PartInput, ...]:
        """Return every owner's input of a batch that was made, by part."""
        return self._ready.pop(step)

    def close(self) -> None:
        """Let go of batches that nobody took, and of the memory that is lent; no thread may be at work."""
        self._ready.clear()
        # The inner loader names this iteration until the next one, and this one names it through the
        # structure: memory would stay, after the last use of a loader, until Python looks for such circles.
        self._fetcher = replace(self._fetcher, precision=Precision(), memory=RowMemory())

    def around(self, epoch: int, step: int, make: Callable[[], Any]) -> Any:
        """Make a batch and what belongs to it; on the loader's threads."""
        try:
            batch = make()
            begin = time.perf_counter()
            self._ready[step] = self._inputs(
                BatchPosition(group_batch=self._group_batch, epoch=epoch, step=step), batch
            )
        except BaseException as error:
            # Other threads of this loader wait for ranks that now wait for this one.
            self._structure.leave(self._group_batch, error)
            raise
        return replace(batch, fetch_s=batch.fetch_s + time.perf_counter() - begin)

    def _inputs(self, place: BatchPosition, batch: Any) -> tuple[PartInput, ...]:
        """Return every owner's input, by part."""
        number = place.epoch * self._num_steps + place.step
        own = OwnerBlock(block=batch.blocks[0], nodes=batch.input_nodes.to(torch.int64))
        group, timeline = self._fetcher.group, self._session.timeline
        with timeline.span("push structure", LOADER, number):
            brought = self._structure.of_others(place, own)
        self._structure.measured(batch.sample_s, brought.seconds)
        with timeline.span("gather columns", LOADER, number):
            return tuple(
                self._input(own if part == group.part else brought.blocks[part], number)
                for part in range(group.size)
            )

    def _input(self, owner: OwnerBlock, number: int) -> PartInput:
        fetcher = self._fetcher
        columns: dict[str, Tensor] = {}
        if fetcher.store is not None:
            for name in fetcher.names:
                rows = fetcher.store.rows(name, owner.nodes, fetcher.memory)
                columns[name] = fetcher.precision.converted(rows)
        return PartInput(block=owner.block, nodes=owner.nodes, columns=columns, number=number)


_LOADERS = "push_pull.loaders"

_ALIVE = 5
"""Batches that may be alive beside those made ahead: in flight, looked at, and held by the training loop."""


class Drained(Protocol):
    """Something that may have work left at the end of an epoch."""

    def drain(self) -> None:
        """Do it; every rank must call it."""


@final
class _Batch(GroupBatch):
    """A batch that was yielded, or the next one."""

    def __init__(self, number: int, inputs: tuple[PartInput, ...]) -> None:
        self.number, self.inputs = number, inputs
        self._following: GroupBatch | None = None

    def following(self) -> GroupBatch | None:
        """See :meth:`GroupBatch.following`; None as well when the loader has gone on."""
        return self._following

    def link(self, following: GroupBatch | None) -> None:
        """Say what comes next."""
        self._following = following


@dataclass(frozen=True, kw_only=True)
class _Item:
    """What is yielded, and what belongs to it."""

    handed: Any
    group_batch: _Batch
    share: StepShare | None
    position: dict[str, int]


@final
class PushPullLoader:
    """Yields what ``inner`` does, with ``blocks[0].push_pull`` set to the batch as all parts see it.

    ``blocks[0].srcdata`` has this rank's columns, (L0, F_p), under the name of each feature. Making one is
    collective, and all ranks must iterate alike; structure moves from the loader's threads without a
    collective. At the normal end of an epoch the pipelines of the session are drained, which is collective.

    Args:
        inner: A loader of nodes or edges of one type, which brings no row of the features.
        session: The run.
        feed: What to add.
        num_nodes: V.
        builder: Of the blocks.

    Raises:
        ConfigError: on all ranks, when they were given other depths or features, or structure="resample"
            cannot be.
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
        self._structure = AdaptiveStructure(
            inner,
            session,
            fetcher.group,
            _next_label(session),
            asked=fetcher.structure,
            builder=builder,
            wide=num_nodes >= SMALL_NODES,
        )
        told = (
            f"depth={inner.depth}, features={fetcher.names}, structure={fetcher.structure!r}, "
            f"look_ahead={fetcher.look_ahead}"
        )
        # Nobody leaves before all have registered what the others will call.
        check_alike(session, "loaders of push_pull", told)
        self._group_batches = 0
        self._position: dict[str, int] | None = None

    def __len__(self) -> int:
        """Steps of an epoch, the same on every rank."""
        return len(self._inner)

    @property
    def structure_choice(self) -> StructureDecision:
        """How this rank knows the blocks of other owners, and what was measured for that."""
        return self._structure.choice

    @property
    def epoch(self) -> int:
        """The epoch of the current iteration, or of the next one when none is under way."""
        return self._inner.epoch if self._position is None else self._position["epoch"]

    @property
    def num_targets_of_epoch(self) -> tuple[int, int]:
        """Items of an epoch: (on this rank, on all ranks)."""
        return self._inner.num_targets_of_epoch

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one; see :meth:`StepLoader.set_epoch`."""
        self._inner.set_epoch(epoch)
        self._position = None

    def times(self, *, reset: bool = False) -> LoaderTimes:
        """Return the seconds since the start or the last reset; structure and columns are fetched."""
        return self._inner.times(reset=reset)

    def state_dict(self) -> dict[str, int]:
        """Return the position of the batch that was yielded last; see :meth:`StepLoader.state_dict`."""
        return dict(self._position) if self._position is not None else self._inner.state_dict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on after the position ``state``; see :meth:`StepLoader.load_state_dict`."""
        self._inner.load_state_dict(state)
        self._position = None

    def __iter__(self) -> Iterator[Any]:
        """Yield what is left of the current epoch; see :meth:`StepLoader.__iter__`.

        Raises:
            PeerError: a rank is dead, or did not come to a batch within the time-out.
        """
        group_batch, self._group_batches = self._group_batches, self._group_batches + 1
        self._structure.begin(group_batch)
        fetcher = GroupBatchFetcher(self._session, self._fetcher, self._structure, group_batch, len(self))
        self._inner.batch_hook(fetcher.around)
        stream = iter(self._inner)
        try:
            yield from self._one_after_the_other(lambda: self._next(stream, fetcher))
        finally:
            # First, or the inner loader would wait for threads that wait for the other ranks.
            self._structure.leave(group_batch)
            cast("Any", stream).close()
            fetcher.close()
            self._session.step_share = None
        _drain(self._session)
        self._position = None

    def _one_after_the_other(self, bring: Callable[[], _Item | None]) -> Iterator[Any]:
        item, look_ahead = bring(), self._fetcher.look_ahead
        while item is not None:
            coming = bring() if look_ahead else None
            item.group_batch.link(coming.group_batch if coming is not None else None)
            # Fetching the next one has moved both on.
            self._session.step_share, self._position = item.share, item.position
            yield item.handed
            # Or who keeps one batch would keep all that follow.
            item.group_batch.link(None)
            item = coming if look_ahead else bring()

    def _next(self, stream: Iterator[Any], fetcher: GroupBatchFetcher) -> _Item | None:
        handed = next(stream, None)
        if handed is None:
            return None
        position, block = self._inner.state_dict(), handed[-1][0]
        inputs, part = self._beside(block, fetcher.take(position["step"] - 1)), self._fetcher.group.part
        for name, columns in inputs[part].columns.items():
            block.srcdata[name] = columns
        # A view, and not the user's block itself, which is to name the batch: both would hold each other, so
        # that the rows stayed in memory until Python looks for such circles.
        own = replace(inputs[part], block=block.local_var())
        group_batch = _Batch(own.number, (*inputs[:part], own, *inputs[part + 1 :]))
        block.push_pull = group_batch
        return _Item(
            handed=handed, group_batch=group_batch, share=self._session.step_share, position=position
        )

    def _beside(self, block: DGLBlock, inputs: tuple[PartInput, ...]) -> tuple[PartInput, ...]:
        """Return ``inputs`` on the device of the user's block, which is to take the place of the own one."""
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


def node_loader(
    g: DistGraph,
    indices: Any,
    sampler: Any,
    store: ColumnStore | None,
    group: Group,
    options: PushPullOptions,
    loader_options: Mapping[str, Any],
) -> PushPullLoader:
    """Return a loader of nodes, as the room ``dataloading`` makes it, for push-pull; collective.

    Args:
        g: A graph of one node and one edge type.
        indices: This rank's seeds.
        sampler: Of ``dgl.dataloading``; matrices that it prefetches for the input come as columns, too.
        store: The features that the strategy names; None: there are none.
        group: The ranks that hold all columns together.
        options: The strategy's.
        loader_options: What ``DataLoader`` takes.

    Raises:
        ConfigError: as :class:`PushPullLoader`; several types; or as ``DataLoader``.
    """
    without, named = _without_matrices(g, sampler, store)
    inner = DataLoader(g, indices, without, **loader_options)
    return _fed(g, inner, _fetcher(g, named, store, group, options), loader_options)


def edge_loader(
    g: DistGraph,
    eids: Any,
    sampler: Any,
    store: ColumnStore | None,
    group: Group,
    options: PushPullOptions,
    loader_options: Mapping[str, Any],
) -> PushPullLoader:
    """Return a loader of edges, as ``DistEdgeDataLoader``; see :func:`node_loader`."""
    without, named = _without_matrices(g, sampler, store)
    inner = DistEdgeDataLoader(g, eids, without, **loader_options)
    return _fed(g, inner, _fetcher(g, named, store, group, options), loader_options)


def _fed(
    g: DistGraph, inner: StepLoader[Any, Any, Any], fetcher: ColumnFetcher, loader_options: Mapping[str, Any]
) -> PushPullLoader:
    (etype,) = g.canonical_etypes
    alive = (inner.depth + _ALIVE) * fetcher.group.size
    # The inner loader has checked it.
    precision = Precision(loader_options.get("feature_dtype"), alive)
    return PushPullLoader(
        inner,
        g.session,
        replace(fetcher, precision=precision, memory=RowMemory(alive)),
        num_nodes=g.num_nodes(),
        builder=BlockBuilder(etype),
    )


def _fetcher(
    g: DistGraph,
    names: tuple[str, ...],
    store: ColumnStore | None,
    group: Group,
    options: PushPullOptions,
) -> ColumnFetcher:
    """Return what brings ``names``. Collective."""
    if names and (store is None or store.names != names):
        store = open_columns(g, names, group, cache=options.cache_columns)
    return ColumnFetcher(
        group=group,
        names=names,
        store=store,
        structure=options.structure,
        look_ahead=options.in_flight > 1,
    )


def _without_matrices(g: DistGraph, sampler: Any, store: ColumnStore | None) -> tuple[Any, tuple[str, ...]]:
    """Return a copy of ``sampler`` that prefetches no input matrix, and these with those of ``store``.

    Collective.

    Raises:
        ConfigError: on all ranks, when the graph has several types, or the sampler cannot be honoured.
    """
    named = () if store is None else store.names
    return together(g.session, lambda: _parted(g, sampler, named), ConfigError)


def _parted(g: DistGraph, sampler: Any, named: tuple[str, ...]) -> tuple[Any, tuple[str, ...]]:
    if len(g.ntypes) != 1 or len(g.canonical_etypes) != 1:
        raise ConfigError(
            f"push_pull trains on graphs of one node and one edge type, and this one has the nodes "
            f"{', '.join(g.ntypes)} and the edges {', '.join(map(str, g.canonical_etypes))}; use "
            "strategy='data_parallel'"
        )
    if isinstance(sampler, EdgePredictionSampler):
        outer = copy.copy(sampler)
        outer.sampler, names = _parted(g, sampler.sampler, named)
        return outer, names
    asked = read_sampler(sampler).node_feats
    wanted = [name for names in asked.values() for name in names] if isinstance(asked, Mapping) else asked
    matrices = [name for name in wanted if name in g.ndata and len(g.ndata[name].shape) == 2]
    names = tuple(dict.fromkeys([*named, *matrices]))
    without = copy.copy(sampler)
    without.prefetch_node_feats = [name for name in wanted if name not in names]
    return without, names


def _next_label(session: Session) -> str:
    """Return a name that the ranks' loaders have in common, as all make theirs in the same order."""
    number = cast("int", session.attached.get(_LOADERS, 0))
    session.attached[_LOADERS] = number + 1
    return f"push_pull.{number}"


def _drain(session: Session) -> None:
    pipelines = cast("Iterable[weakref.ref[Drained]]", session.attached.get(PIPELINES, ()))
    for pipeline in [reference() for reference in pipelines]:
        if pipeline is not None:
            pipeline.drain()
