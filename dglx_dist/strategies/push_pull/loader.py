"""Loaders of push-pull: the batches of data parallel training, with feature columns in place of rows.

Every part needs the layer-1 block of every owner of its group: owners push them, or parts sample them again.
"""

from __future__ import annotations

import copy
import logging
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast, final

import dgl
import torch
from dgl.dataloading import EdgePredictionSampler
from dgl.heterograph import DGLBlock
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from dglx_dist.comm.collectives import check_equal, report_status, run_on_all_ranks
from dglx_dist.comm.devices import copy_async
from dglx_dist.comm.mailbox import OneSidedExchange
from dglx_dist.comm.session import NEXT_BATCH
from dglx_dist.dataloading.feature_fetch import RowMemory
from dglx_dist.dataloading.sampler_spec import read_sampler
from dglx_dist.dataloading.step_loader import EpochLoader, Items, Maker, Stages, StepLoader
from dglx_dist.errors import ConfigError
from dglx_dist.internals.graphs import build_block
from dglx_dist.internals.message_passing import place
from dglx_dist.internals.pytorch import Copy, ids_to_device
from dglx_dist.records import Array, EdgeType, StepShare
from dglx_dist.strategies.base import flatten_arguments
from dglx_dist.strategies.push_pull.exchange import STRUCTURE, Group, GroupBatch, PartInput
from dglx_dist.strategies.push_pull.feature_columns import ColumnStore
from dglx_dist.strategies.push_pull.options import PushPullOptions
from dglx_dist.strategies.push_pull.pipeline import Pipeline

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph

SEEDS = "seeds"
"""Ledger phase: 8 bytes per seed of every other member, once."""

SMALL_NODES = 1 << 31
"""Ids of graphs with fewer nodes fit into 4 bytes."""

_EXTRA_BATCHES = 5
"""Batches that may be alive beside those made ahead: in flight, looked at, and held by the training loop."""

log = logging.getLogger(__name__)


class OwnerBlock(NamedTuple):
    """The layer-1 block of one owner."""

    block: DGLBlock
    nodes: Tensor
    """(L0,) int64 global ids of its sources."""


OwnerBlocks: TypeAlias = dict[int, OwnerBlock]
"""Those of the other owners, by part."""


def pack_block(own: OwnerBlock, *, wide: bool) -> list[Array]:
    """Return source ids (L0,), indptr (D1 + 1,) and indices (E1,): int32, the ids int64 where ``wide``."""
    indptr, indices, _ = own.block.adj_tensors("csc")
    nodes = own.nodes if wide else own.nodes.to(torch.int32)
    return [nodes.numpy(), indptr.to(torch.int32).numpy(), indices.to(torch.int32).numpy()]


def unpack_block(arrays: list[Array], etype: EdgeType, idtype: torch.dtype) -> OwnerBlock:
    """Return the block of what :func:`pack_block` returned, a copy with its edges numbered in CSC order.

    ``idtype`` is that of the owner's block, so that all parts run the same kernels.
    """
    nodes, indptr, indices = (torch.tensor(array) for array in arrays)
    block = build_block(indptr.to(idtype), indices.to(idtype), len(nodes), etype)
    return OwnerBlock(block, nodes.to(torch.int64))


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


@dataclass(kw_only=True, eq=False)
class GroupedBatch:
    """A batch of the inner loader on its way through the stages, and that of every owner."""

    batch: Any
    """Of the inner loader; as the user gets it, once the consumer's thread has it."""
    own: OwnerBlock
    number: int
    """Steps since the loader's first epoch."""
    sample_s: float
    fetch_s: float
    others: OwnerBlocks = field(default_factory=dict)
    group_batch: GroupBatch = field(init=False)
    share: StepShare | None = None
    """Set once the consumer's thread has the batch."""


@final
class PushPullLoader(EpochLoader[GroupedBatch, Any]):
    """Yields the batches of ``inner``, with ``blocks[0].push_pull`` set to the batch as all parts see it.

    ``blocks[0].srcdata`` has this rank's columns, (L0, F_p), under the name of each feature. Construction is
    collective, and all ranks must iterate alike; structure moves from the loader's threads without a
    collective. At the normal end of an epoch ``pipelines`` are drained, those of the models wrapped for this
    loader's batches, which is collective.

    ``inner`` is a loader of nodes or edges of one type, which fetches no row of the features.

    Raises:
        ConfigError: on all ranks, when they were given other depths or features, or structure="resample" is
            not possible.
        PeerError: a rank did not take part.
    """

    def __init__(
        self,
        inner: StepLoader[Any, Any, Any],
        g: DistGraph,
        store: ColumnStore,
        group: Group,
        options: PushPullOptions,
        pipelines: Sequence[weakref.ref[Pipeline]] = (),
        feature_dtype: torch.dtype | None = None,
    ) -> None:
        session, (self._etype,) = g.session, g.canonical_etypes
        self._inner, self._store, self._group, self._pipelines = inner, store, group, pipelines
        self._memory = RowMemory((inner.depth + _EXTRA_BATCHES) * group.size, feature_dtype, inner.device)
        self._looks_ahead = options.depth > 1
        columns = [g.kvstore.column(g.ndata[name].kvstore_key) for name in store.names]
        if any(one.cache or one.on_device or (one.ahead and g.structure().is_replicated) for one in columns):
            log.warning("push_pull fetches no features; policy='lookahead' is for partitioned structure")
        # The ranks' loaders share a name, as all construct theirs in the same order.
        self._label = f"push_pull.{session.next_number('push_pull')}"
        self._wide = g.num_nodes() >= SMALL_NODES
        advice = (
            "every rank must iterate over the loader alike, in evaluation too; move such calls out of `if "
            "rank == 0`"
        )
        self._pushes = OneSidedExchange(session, f"{self._label}.structure", advice, _check_block)
        self._resampled: Callable[[int], Callable[[int], OwnerBlocks]] | None = None
        super().__init__(session, seed=inner.seed, depth=inner.depth, num_threads=inner.num_threads)
        if options.structure == "resample" and group.size > 1:
            self._resampled = self._open_resampling()
        settings = {
            "depth": inner.depth,
            "features": store.names,
            "structure": options.structure,
            "look_ahead": self._looks_ahead,
        }
        # Also a barrier: all ranks have registered their remote calls before one iterates.
        check_equal(session, "a loader of push_pull", settings)
        self._iteration = -1

    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Iterator[Any]:
        self._iteration = iteration = self._iteration + 1
        stream = cast("Generator[Any, None, None]", super().__iter__())
        hook = None if self._has_model() else register_module_forward_pre_hook(self._refuse_unwrapped)
        try:
            while True:
                with report_status(self._session, NEXT_BATCH):
                    batch = next(stream, None)
                if batch is None:
                    break
                group_batch: GroupBatch = batch[-1][0].push_pull
                yield batch
                # Or a user who keeps one batch would keep all that follow.
                group_batch.following = None
        finally:
            # First, or the loader would wait for threads that wait for the other ranks.
            self._pushes.mailbox.begin(iteration + 1)
            stream.close()
            if hook is not None:
                hook.remove()
        for pipeline in [reference() for reference in self._pipelines]:
            if pipeline is not None:
                pipeline.drain()

    def close(self) -> None:
        # First, or the threads would wait for other ranks.
        self._pushes.mailbox.begin(self._iteration + 1)
        super().close()
        self._pushes.close()

    def _has_model(self) -> bool:
        return self._group.size == 1 or any(pipeline() for pipeline in self._pipelines)

    def _refuse_unwrapped(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        if any(hasattr(one, "push_pull") for one in flatten_arguments(arguments)) and not self._has_model():
            raise ConfigError(
                f"{type(module).__name__} was called on a batch of push_pull, which has this rank's share of "
                "the feature columns only; call model = dx.wrap(model, g) before the loop"
            )

    def open_stages(self, epoch: int, steps: Callable[[], Iterator[int]]) -> GroupStages:
        inner = self._inner.open_stages(epoch, steps, claims=False)
        self._pushes.mailbox.begin(self._iteration)
        resample = None if self._resampled is None else self._resampled(epoch)
        return GroupStages(self, epoch, inner, resample, self._iteration)

    def end(self, iteration: int, error: BaseException) -> None:
        """Let threads stop waiting, in ``iteration``, for ranks that now wait for this one."""
        self._pushes.mailbox.begin(iteration + 1, error)

    def exchange_blocks(self, made: GroupedBatch, iteration: int) -> OwnerBlocks:
        """Push the own block to the other owners, and return theirs."""
        epoch, step = divmod(made.number, len(self))
        own = made.own
        ranks = [rank for _, rank in self._group.others]
        sent = dict.fromkeys(ranks, pack_block(own, wide=self._wide))
        self._pushes.post(iteration, str(step), sent, phase=STRUCTURE, layer=1)
        what = f"the structure of step {step} of epoch {epoch}"
        received = self._pushes.mailbox.take(iteration, str(step), ranks, what)
        return {
            part: unpack_block(received[rank], self._etype, own.block.idtype)
            for part, rank in self._group.others
        }

    def _open_resampling(self) -> Callable[[int], Callable[[int], OwnerBlocks]]:
        """Return a function of epoch to one of step that samples what the other owners sample. Collective.

        Draws are keyed by (seed, epoch, hop, node), so bits are equal. Exchanges the seeds of the group.

        Raises:
            ConfigError: on all ranks, when others cannot repeat the draws of one; the message has the reason.
        """
        loader, session, group, etype = self._inner, self._session, self._group, self._etype
        sample = run_on_all_ranks(session, loader.offline, ConfigError)
        # Servers with the whole structure may each leave out other edges, or draw by another seed.
        check_equal(session, "the sampler", loader.sampling_signature())
        op, kinds, arrays = f"{self._label}.seeds", list(loader.items.ids), list(loader.items.ids.values())
        # Collective: all ranks answer before one asks.
        run_on_all_ranks(session, lambda: session.rpc.register(op, lambda _name, _arrays: arrays))
        weakref.finalize(self, session.rpc.unregister, op)
        items: dict[int, Items[Any]] = {
            rank: Items(ids=dict(zip(kinds, session.rpc.call(rank, op, "", [], phase=SEEDS), strict=True)))
            for _, rank in group.others
        }

        def of_epoch(epoch: int) -> Callable[[int], OwnerBlocks]:
            # The seeds of an epoch are sorted once, not for every batch.
            seeds = {part: loader.order_items(epoch, items[rank], rank) for part, rank in group.others}

            def sampled(items: Mapping[Any, Array], step: int) -> OwnerBlock:
                batch = sample(items, epoch, step)
                indptr, indices, _ = batch.blocks[0].adj_tensors("csc")
                block = build_block(indptr, indices, len(batch.input_nodes), etype)
                return OwnerBlock(block, batch.input_nodes)

            return lambda step: {part: sampled(of_step(step), step) for part, of_step in seeds.items()}

        return of_epoch

    def gather_inputs(self, made: GroupedBatch) -> tuple[PartInput, ...]:
        """Return the batches of all owners with this part's columns."""
        store, keyed = self._store, self.first_number + made.number
        blocks = {self._group.part: made.own, **made.others}
        return tuple(
            PartInput(
                block=owner.block,
                nodes=owner.nodes,
                columns={name: store.rows(name, owner.nodes, self._memory) for name in store.names},
                number=keyed,
            )
            for _, owner in sorted(blocks.items())
        )

    def in_order(self, batches: Iterator[GroupedBatch]) -> Iterator[GroupedBatch]:
        delivered = map(self._delivered, batches)
        if not self._looks_ahead:
            yield from delivered
            return
        made = next(delivered, None)
        while made is not None:
            following = next(delivered, None)
            made.group_batch.following = None if following is None else following.group_batch
            yield made
            made = following

    def deliver(self, step: int, batch: GroupedBatch) -> Any:
        self._session.step_share = batch.share
        return batch.batch

    def _delivered(self, made: GroupedBatch) -> GroupedBatch:
        group_batch, part = made.group_batch, self._group.part
        made.batch = self._inner.deliver(group_batch.number % len(self), made.batch)
        made.share, block = self._session.step_share, made.batch[-1][0]
        inputs, nodes = group_batch.inputs, group_batch.inputs[part].nodes
        if self._inner.moves_batches:
            # Under all its names one tensor: which nodes a model asks for is known without reading a device.
            nodes = block.srcdata[dgl.NID] = made.batch[0].long()
        for name, columns in inputs[part].columns.items():
            block.srcdata[name] = columns
        # A view, and not the user's block itself, which gets a reference to the batch: the cycle would keep
        # the rows in memory until the garbage collector finds it.
        own = replace(inputs[part], block=block.local_var(), nodes=nodes)
        group_batch.inputs = (*inputs[:part], own, *inputs[part + 1 :])
        block.push_pull = group_batch
        return made

    def move(self, made: GroupedBatch) -> None:
        """Begin to copy the batch to the device, without the own block: that will be the user's."""
        own, device, group_batch = self._group.part, self._inner.device, made.group_batch

        def move(copy: Copy) -> None:
            made.batch.move(device, copy)
            group_batch.inputs = tuple(
                replace(
                    one,
                    block=one.block if part == own else place(one.block, device, copy=copy),
                    nodes=one.nodes if part == own else ids_to_device(one.nodes, device, copy),
                    columns={name: copy(rows) for name, rows in one.columns.items()},
                )
                for part, one in enumerate(group_batch.inputs)
            )

        _, made.batch.arrive = copy_async(self._inner.copies, device, move)

    @property
    def moves_batches(self) -> bool:
        return self._inner.moves_batches


@final
class GroupStages(Stages[GroupedBatch]):
    """The stages of a batch of all owners: the own one, the blocks of the others, and the columns of all."""

    loader: PushPullLoader

    def __init__(
        self,
        loader: PushPullLoader,
        epoch: int,
        inner: Maker[Any, Any],
        resample: Callable[[int], OwnerBlocks] | None,
        iteration: int,
    ) -> None:
        self.loader, self.epoch, self._inner = loader, epoch, inner
        self._resample, self._iteration = resample, iteration

    def sample(self, step: int) -> GroupedBatch:
        batch = self._inner.make(step)
        own = OwnerBlock(batch.blocks[0], batch.input_nodes.to(torch.int64))
        number = self.epoch * len(self.loader) + step
        return GroupedBatch(
            batch=batch, own=own, number=number, sample_s=batch.sample_s, fetch_s=batch.fetch_s
        )

    def fetch(self, made: GroupedBatch) -> None:
        begin, step = time.perf_counter(), made.number % len(self.loader)
        with self.span("push structure", step):
            made.others = (
                self.loader.exchange_blocks(made, self._iteration)
                if self._resample is None
                else self._resample(step)
            )
        made.fetch_s += time.perf_counter() - begin

    def build(self, made: GroupedBatch) -> None:
        begin = time.perf_counter()
        with self.span("gather columns", made.number % len(self.loader)):
            made.group_batch = GroupBatch(made.number, self.loader.gather_inputs(made))
        made.fetch_s += time.perf_counter() - begin

    def move(self, made: GroupedBatch, step: int) -> None:
        if not self.loader.moves_batches:
            return
        begin = time.perf_counter()
        with self.span("copy to the device", step):
            self.loader.move(made)
        made.fetch_s += time.perf_counter() - begin

    def fail(self, error: BaseException) -> None:
        self.loader.end(self._iteration, error)


def split_prefetch(g: DistGraph, sampler: Any, names: tuple[str, ...]) -> tuple[Any, tuple[str, ...]]:
    """Return ``sampler`` without the matrices of node features, and ``names`` with those: all are columns.

    ConfigError: it gives blocks edge weights.
    """
    if isinstance(sampler, EdgePredictionSampler):
        outer = copy.copy(sampler)
        outer.sampler, names = split_prefetch(g, sampler.sampler, names)
        return outer, names
    plan = read_sampler(sampler)
    if plan.has_edge_weights:
        raise ConfigError(
            "LaborSampler with prob= or importance_sampling= gives blocks edge_weights, which push_pull does "
            "not send to other ranks; leave both out, or use strategy='data_parallel'"
        )
    feats = plan.node_feats
    prefetched = (
        [name for of_type in feats.values() for name in of_type] if isinstance(feats, Mapping) else feats
    )
    matrices = [name for name in prefetched if name in g.ndata and len(g.ndata[name].shape) == 2]
    names = tuple(dict.fromkeys([*names, *matrices]))
    without = copy.copy(sampler)
    without.prefetch_node_feats = [name for name in prefetched if name not in names]
    return without, names
