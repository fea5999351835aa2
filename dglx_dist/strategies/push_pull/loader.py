"""Loaders of push-pull: the batches of data parallel training, with feature columns in place of rows."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast, final

import torch
from dgl.dataloading import EdgePredictionSampler
from dgl.heterograph import DGLBlock
from torch import Tensor

from dglx_dist.comm.collectives import check_equal, run_on_all_ranks
from dglx_dist.comm.session import Session, SessionField
from dglx_dist.comm.trace import LOADER
from dglx_dist.dataloading.minibatch import BlockBuilder
from dglx_dist.dataloading.row_buffers import Precision, RowMemory
from dglx_dist.dataloading.sampler_spec import read_sampler
from dglx_dist.dataloading.step_loader import LoaderTimes, StepLoader
from dglx_dist.errors import ConfigError
from dglx_dist.records import StepShare
from dglx_dist.strategies.push_pull.block_exchange import (
    SMALL_NODES,
    AdaptiveStructure,
    BatchPosition,
    OwnerBlock,
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
    from dglx_dist.dataloading.edge_loader import DistEdgeDataLoader
    from dglx_dist.dataloading.loader import DataLoader
    from dglx_dist.graph.dist_graph import DistGraph


_LOADER_NUMBERS: SessionField[Iterator[int]] = SessionField(lambda _: itertools.count())

_EXTRA_BATCHES = 5
"""Batches that may be alive beside those made ahead: in flight, looked at, and held by the training loop."""


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


@final
class IterationFetcher:
    """The inputs of one iteration, made on the loader's threads and taken by the consumer."""

    def __init__(
        self,
        session: Session,
        fetcher: ColumnFetcher,
        structure: AdaptiveStructure,
        iteration: int,
        num_steps: int,
    ) -> None:
        self._session, self._fetcher, self._structure = session, fetcher, structure
        self._iteration, self._num_steps = iteration, num_steps
        self._ready: dict[int, tuple[PartInput, ...]] = {}

    def take(self, step: int) -> tuple[PartInput, ...]:
        """Return and forget every owner's input of a batch, by part."""
        return self._ready.pop(step)

    def close(self) -> None:
        """Release batches that nobody took, and the lent memory; no thread may be at work."""
        self._ready.clear()
        # The inner loader refers to this iteration until the next one, and this one to the loader through
        # the structure: without this the memory would stay, after the last use of a loader, until the
        # garbage collector finds the cycle.
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
            self._structure.cancel(self._iteration, error)
            raise
        return replace(batch, fetch_s=batch.fetch_s + time.perf_counter() - begin)

    def _inputs(self, position: BatchPosition, batch: Any) -> tuple[PartInput, ...]:
        number = position.epoch * self._num_steps + position.step
        own = OwnerBlock(block=batch.blocks[0], nodes=batch.input_nodes.to(torch.int64))
        group, timeline = self._fetcher.group, self._session.timeline
        with timeline.span("push structure", LOADER, number):
            fetched = self._structure.fetch(position, own)
        self._structure.record_costs(batch.sample_s, fetched.seconds)
        with timeline.span("gather columns", LOADER, number):
            return tuple(
                self._input(own if part == group.part else fetched.blocks[part], number)
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


@final
class _Batch(GroupBatch):
    """A batch that was yielded, or the next one."""

    def __init__(self, number: int, inputs: tuple[PartInput, ...]) -> None:
        self.number, self.inputs = number, inputs
        self.next: GroupBatch | None = None
        """Set while the user has this batch."""

    def following(self) -> GroupBatch | None:
        return self.next


@dataclass(frozen=True, kw_only=True)
class _Item:
    """A batch of the inner loader with the state that belongs to it."""

    yielded: Any
    group_batch: _Batch
    share: StepShare | None
    position: dict[str, int]


@final
class PushPullLoader:
    """Yields the batches of ``inner``, with ``blocks[0].push_pull`` set to the batch as all parts see it.

    ``blocks[0].srcdata`` has this rank's columns, (L0, F_p), under the name of each feature. Construction is
    collective, and all ranks must iterate alike; structure moves from the loader's threads without a
    collective. At the normal end of an epoch the pipelines of the session are drained, which is collective.

    ``inner`` is a loader of nodes or edges of one type, which fetches no row of the features.

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
        self._structure = AdaptiveStructure(
            inner,
            session,
            fetcher.group,
            _next_label(session),
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
        """Steps of an epoch, the same on every rank."""
        return len(self._inner)

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
        """Return the seconds since the start or the last reset; structure and columns count as fetching."""
        return self._inner.times(reset=reset)

    def state_dict(self) -> dict[str, int]:
        """Return the position of the batch that was yielded last; see :meth:`StepLoader.state_dict`."""
        return dict(self._position) if self._position is not None else self._inner.state_dict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Resume after the position ``state``; see :meth:`StepLoader.load_state_dict`."""
        self._inner.load_state_dict(state)
        self._position = None

    def __iter__(self) -> Iterator[Any]:
        """Yield what is left of the current epoch; see :meth:`StepLoader.__iter__`.

        Raises:
            PeerError: a rank is dead, or did not reach a batch within the time-out.
        """
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
        _drain(self._session)
        self._position = None

    def _linked(self, fetch_next: Callable[[], _Item | None]) -> Iterator[Any]:
        """Yield the batches one after the other, each with a link to the next if the loader looks ahead."""
        item, look_ahead = fetch_next(), self._fetcher.look_ahead
        while item is not None:
            coming = fetch_next() if look_ahead else None
            item.group_batch.next = coming.group_batch if coming is not None else None
            # Fetching the next one has advanced both.
            self._session.step_share, self._position = item.share, item.position
            yield item.yielded
            # Or a user who keeps one batch would keep all that follow.
            item.group_batch.next = None
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
        group_batch = _Batch(own.number, (*inputs[:part], own, *inputs[part + 1 :]))
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
    without, names = _without_matrices(g, sampler, store)
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


def _without_matrices(g: DistGraph, sampler: Any, store: ColumnStore | None) -> tuple[Any, tuple[str, ...]]:
    """Return a copy of ``sampler`` without prefetched input matrices, and their names and ``store``'s."""
    names = () if store is None else store.names
    return run_on_all_ranks(g.session, lambda: _split_prefetch(g, sampler, names), ConfigError)


def _split_prefetch(g: DistGraph, sampler: Any, names: tuple[str, ...]) -> tuple[Any, tuple[str, ...]]:
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


def _next_label(session: Session) -> str:
    """Return a name that the ranks' loaders share, as all construct theirs in the same order."""
    return f"push_pull.{next(_LOADER_NUMBERS.of(session))}"


def _drain(session: Session) -> None:
    for pipeline in [reference() for reference in PIPELINES.of(session)]:
        if pipeline is not None:
            pipeline.drain()
