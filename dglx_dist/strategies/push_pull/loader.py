"""Loaders of push-pull. They yield the batches of data parallel training with columns instead of rows.

Every part needs the layer-1 block of every owner of its group. Owners push them, or parts sample them again.
"""

from __future__ import annotations

import copy
import logging
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar, cast, final

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
from dglx_dist.internals.graphs import BlockTypes, build_block
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
"""Number of batches in use beside those made ahead: in flight, looked ahead, and in the training loop."""

T = TypeVar("T")
log = logging.getLogger(__name__)


class OwnerBlock(NamedTuple):
    """The layer-1 block of one owner."""

    block: DGLBlock
    nodes: Mapping[str, Tensor]
    """(L0,) int64 global ids of its sources by node type."""


OwnerBlocks: TypeAlias = dict[int, OwnerBlock]
"""Blocks of the other owners, by part."""


@final
class BlockSchema:
    """Node and edge types of blocks, and the arrays of a block of these types.

    The arrays are the source ids (L0,) of each node type, and indptr (D1 + 1,) and indices (E1,) of each edge
    type. Several node types need their numbers of destinations too, because edges may not reach all of them.
    """

    def __init__(self, ntypes: Sequence[str], etypes: Sequence[EdgeType]) -> None:
        self._ntypes = tuple(ntypes)
        self._etypes = tuple(etypes)
        self._sources = [self._ntypes.index(source) for source, _, _ in etypes]
        self._targets = [self._ntypes.index(target) for _, _, target in etypes]
        relations = [relation for _, relation, _ in etypes]
        self._types = BlockTypes(self._ntypes, relations, self._sources, self._targets)

    def key_by_type(self, nodes: Tensor | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return ids by node type. Loaders yield a tensor if there is only one."""
        return {self._ntypes[0]: nodes} if isinstance(nodes, Tensor) else nodes

    def pack(self, own: OwnerBlock, *, wide: bool) -> list[Array]:
        """Return the arrays as int32. With ``wide``, ids are int64."""
        ids = [own.nodes[ntype] for ntype in self._ntypes]
        arrays = [(nodes if wide else nodes.to(torch.int32)).numpy() for nodes in ids]
        for etype in self._etypes:
            indptr, indices, _ = own.block.adj_tensors("csc", etype)
            arrays += [indptr.to(torch.int32).numpy(), indices.to(torch.int32).numpy()]
        if len(self._ntypes) > 1:
            counts = [own.block.num_dst_nodes(ntype) for ntype in self._ntypes]
            arrays.append(torch.tensor(counts, dtype=torch.int32).numpy())
        return arrays

    def unpack(self, arrays: Sequence[Array], idtype: torch.dtype) -> OwnerBlock:
        """Rebuild the block from the arrays of :meth:`pack`. Its edges are numbered in CSC order.

        ``idtype`` is the id type of the owner's block, so that all parts run the same kernels.
        """
        tensors = [torch.tensor(array) for array in arrays]
        nodes = [ids.to(torch.int64) for ids in tensors[: len(self._ntypes)]]
        edges = [values.to(idtype) for values in tensors[len(nodes) : len(nodes) + 2 * len(self._etypes)]]
        counts = tensors[-1].tolist() if len(nodes) > 1 else [len(edges[0]) - 1]
        return self._build(nodes, counts, edges)

    def rebuild(self, block: DGLBlock, nodes: Mapping[str, Tensor]) -> OwnerBlock:
        """Return the block as :meth:`unpack` returns it, without other data."""
        edges = [values for etype in self._etypes for values in block.adj_tensors("csc", etype)[:2]]
        counts = [block.num_dst_nodes(ntype) for ntype in self._ntypes]
        return self._build([nodes[ntype].to(torch.int64) for ntype in self._ntypes], counts, edges)

    def check(self, arrays: Sequence[Array]) -> None:
        """Raise ValueError, which the sender gets, if kernels would read outside of the arrays."""
        num_types = len(self._ntypes)
        num_arrays = len(self._ntypes) + 2 * len(self._etypes)
        has_counts = num_types > 1
        if len(arrays) != num_arrays + has_counts or any(a.ndim != 1 or a.dtype.kind != "i" for a in arrays):
            descriptions = [f"{array.dtype} {array.shape}" for array in arrays]
            raise ValueError(
                f"arrays {descriptions} are no block; it has {num_arrays + has_counts} one-dimensional "
                "integer arrays"
            )

        num_sources = [len(ids) for ids in arrays[:num_types]]
        counts = arrays[-1].tolist() if has_counts else [len(arrays[1]) - 1]
        if len(counts) != num_types or any(not 0 <= n <= m for n, m in zip(counts, num_sources, strict=True)):
            raise ValueError(f"{counts} destinations of {num_sources} sources are no block")

        for source, target, (indptr, indices) in self._pair_edges(arrays[num_types:num_arrays]):
            if (
                not len(indptr)
                or (int(indptr[0]), int(indptr[-1])) != (0, len(indices))
                or len(indptr) - 1 != counts[target]
                or (indptr[1:] < indptr[:-1]).any()
                or (len(indices) and not 0 <= indices.min() <= indices.max() < num_sources[source])
            ):
                raise ValueError(
                    f"{[len(array) for array in arrays]} source ids, bounds and indices of in-edges are no "
                    "block: bounds rise from 0 to the number of edges, and indices are positions of source "
                    "ids"
                )

    def _pair_edges(self, arrays: Sequence[T]) -> Iterator[tuple[int, int, tuple[T, T]]]:
        pairs = zip(arrays[::2], arrays[1::2], strict=True)
        return zip(self._sources, self._targets, pairs, strict=True)

    def _build(self, nodes: Sequence[Tensor], counts: list[int], arrays: Sequence[Tensor]) -> OwnerBlock:
        num_sources = [len(ids) for ids in nodes]
        edges: list[Any] = [
            (num_sources[source], counts[target], indptr, indices, {})
            for source, target, (indptr, indices) in self._pair_edges(arrays)
        ]
        if len(nodes) == len(self._etypes) == 1:
            # This takes a third of the time.
            indptr, indices = arrays
            block = build_block(indptr, indices, num_sources[0], self._etypes[0])
        else:
            block = self._types.block(edges, None, (num_sources, counts))

        return OwnerBlock(block, dict(zip(self._ntypes, nodes, strict=True)))


@dataclass(kw_only=True, eq=False)
class GroupedBatch:
    """A batch of the inner loader on its way through the stages, with the blocks of all owners."""

    batch: Any
    """Batch of the inner loader. On the consumer's thread it becomes the user's batch."""
    own: OwnerBlock
    number: int
    """Number of the batch since the loader's first epoch."""
    sample_s: float
    fetch_s: float
    other_blocks: OwnerBlocks = field(default_factory=dict)
    group_batch: GroupBatch = field(init=False)
    share: StepShare | None = None
    """Share of the targets, set on the consumer's thread."""


@final
class PushPullLoader(EpochLoader[GroupedBatch, Any]):
    """Yields the batches of ``inner``. ``blocks[0].push_pull`` is the batch as all parts see it.

    The data of its sources has this rank's (L0, F_p) columns under the name of each feature. Construction is
    collective, and all ranks must iterate over the same steps. Its threads exchange structure without
    collectives. At the normal end of an epoch, the ``pipelines`` of the models for this loader are drained,
    which is collective.

    ``inner`` is a loader of nodes or edges. It must not fetch the features in ``stores``, which are the
    columns by node type.

    Raises:
        ConfigError: the ranks have different depths or features, or structure="resample" is not possible. It
            is raised on all ranks.
        PeerError: a rank did not take part.
    """

    def __init__(
        self,
        inner: StepLoader[Any, Any, Any],
        g: DistGraph,
        stores: Mapping[str, ColumnStore],
        group: Group,
        options: PushPullOptions,
        pipelines: Sequence[weakref.ref[Pipeline]] = (),
        feature_dtype: torch.dtype | None = None,
    ) -> None:
        session = g.session
        self.schema = BlockSchema(g.ntypes, g.canonical_etypes)
        self._inner = inner
        self._stores = stores
        self._group = group
        self._pipelines = pipelines
        self._memory = RowMemory((inner.depth + _EXTRA_BATCHES) * group.size, feature_dtype, inner.device)
        self._looks_ahead = options.depth > 1
        columns = [
            g.kvstore.column(g.nodes[ntype].data[name].kvstore_key)
            for ntype, store in stores.items()
            for name in store.names
        ]
        is_replicated = all(g.structure(etype).is_replicated for etype in g.canonical_etypes)
        if any(column.cache or (column.ahead and is_replicated) for column in columns):
            log.warning("push_pull fetches no features; policy='lookahead' is for partitioned structure")

        # All ranks construct their loaders in the same order, so the loaders have the same label.
        self._label = f"push_pull.{session.next_number('push_pull')}"
        self._wide = max(map(g.num_nodes, g.ntypes)) >= SMALL_NODES
        advice = (
            "every rank must iterate over the loader alike, even in evaluation; move such calls out of `if "
            "rank == 0`"
        )
        self._pushes = OneSidedExchange(session, f"{self._label}.structure", advice, self.schema.check)
        self._resampled: Callable[[int], Callable[[int], OwnerBlocks]] | None = None
        super().__init__(session, seed=inner.seed, depth=inner.depth, num_threads=inner.num_threads)
        if options.structure == "resample" and group.size > 1:
            self._resampled = self._open_resampling()
        settings = {
            "depth": inner.depth,
            "features": {ntype: store.names for ntype, store in stores.items()},
            "structure": options.structure,
            "look_ahead": self._looks_ahead,
        }

        # This is also a barrier, so that all ranks have registered their remote calls before one iterates.
        check_equal(session, "a loader of push_pull", settings)
        self._iteration = -1

    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of an epoch, and drain the pipelines of the wrapped models after the last one.

        While no model is wrapped, calling one raises ConfigError. A loop that is left early releases its
        batches.
        """
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
                # A user who keeps one batch must not keep all following ones.
                group_batch.following = None
        finally:
            # This comes first, because the threads that the loader waits for may wait for other ranks.
            self._pushes.mailbox.begin(iteration + 1)
            stream.close()
            if hook is not None:
                hook.remove()

        for pipeline in [reference() for reference in self._pipelines]:
            if pipeline is not None:
                pipeline.drain()

    def close(self) -> None:
        # The mailbox comes first, because the loader's threads may wait there for other ranks.
        self._pushes.mailbox.begin(self._iteration + 1)
        super().close()
        self._pushes.close()

    def _has_model(self) -> bool:
        return self._group.size == 1 or any(pipeline() for pipeline in self._pipelines)

    def _refuse_unwrapped(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        has_batch = any(hasattr(value, "push_pull") for value in flatten_arguments(arguments))
        if has_batch and not self._has_model():
            raise ConfigError(
                f"{type(module).__name__} was called on a batch of push_pull, which only has this rank's "
                "share of the feature columns; call model = dx.wrap(model, g) before the loop"
            )

    def open_stages(self, epoch: int, steps: Callable[[], Iterator[int]]) -> GroupStages:
        inner = self._inner.open_stages(epoch, steps, claims=False)
        self._pushes.mailbox.begin(self._iteration)
        resample = None if self._resampled is None else self._resampled(epoch)
        return GroupStages(self, epoch, inner, resample, self._iteration)

    def end(self, iteration: int, error: BaseException) -> None:
        """Make the threads of ``iteration`` stop waiting for ranks that now wait for this one."""
        self._pushes.mailbox.begin(iteration + 1, error)

    def exchange_blocks(self, made: GroupedBatch, iteration: int) -> OwnerBlocks:
        """Push the own block to the other owners, and return theirs."""
        epoch, step = divmod(made.number, len(self))
        own_block = made.own
        ranks = [rank for _, rank in self._group.peers]
        messages = dict.fromkeys(ranks, self.schema.pack(own_block, wide=self._wide))
        self._pushes.post(iteration, str(step), messages, phase=STRUCTURE, layer=1)
        description = f"the structure of step {step} of epoch {epoch}"
        received = self._pushes.mailbox.take(iteration, str(step), ranks, description)
        return {
            part: self.schema.unpack(received[rank], own_block.block.idtype)
            for part, rank in self._group.peers
        }

    def _open_resampling(self) -> Callable[[int], Callable[[int], OwnerBlocks]]:
        """Exchange the seeds of the group, and return a function that samples the blocks of other owners.

        The function maps an epoch to a function of the step. Random numbers are keyed by (seed, epoch, hop,
        node), so all ranks sample equal blocks. Every rank must call this. Raises ConfigError if the sampling
        of a rank cannot be repeated by others. It is raised on all ranks.
        """
        loader = self._inner
        session = self._session
        group = self._group
        schema = self.schema
        sample = run_on_all_ranks(session, loader.offline, ConfigError)

        # The samplers of the ranks may exclude other edges, or have another seed.
        check_equal(session, "the sampler", loader.sampling_signature())
        op = f"{self._label}.seeds"
        types = list(loader.items.ids)
        arrays = list(loader.items.ids.values())

        # This is collective, so that all ranks can answer before one asks.
        run_on_all_ranks(session, lambda: session.rpc.register(op, lambda _name, _arrays: arrays))
        weakref.finalize(self, session.rpc.unregister, op)
        items: dict[int, Items[Any]] = {
            rank: Items(ids=dict(zip(types, session.rpc.call(rank, op, "", [], phase=SEEDS), strict=True)))
            for _, rank in group.peers
        }

        def make_resampler(epoch: int) -> Callable[[int], OwnerBlocks]:
            # The seeds of an epoch are sorted once, not for every batch.
            seeds = {part: loader.order_items(epoch, items[rank], rank) for part, rank in group.peers}

            def sample_block(items: Mapping[Any, Array], step: int) -> OwnerBlock:
                batch = sample(items, epoch, step)
                return schema.rebuild(batch.blocks[0], schema.key_by_type(batch.input_nodes))

            return lambda step: {part: sample_block(items_of(step), step) for part, items_of in seeds.items()}

        return make_resampler

    def gather_inputs(self, made: GroupedBatch) -> tuple[PartInput, ...]:
        """Return the batches of all owners with this part's columns."""
        batch_number = self.first_number + made.number
        blocks = {self._group.part: made.own, **made.other_blocks}
        return tuple(
            PartInput(
                block=owner.block,
                nodes=owner.nodes,
                columns={
                    ntype: {name: store.rows(name, owner.nodes[ntype], self._memory) for name in store.names}
                    for ntype, store in self._stores.items()
                },
                number=batch_number,
            )
            for _, owner in sorted(blocks.items())
        )

    def wrap_batches(self, batches: Iterator[GroupedBatch]) -> Iterator[GroupedBatch]:
        delivered = map(self._deliver_batch, batches)
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

    def _deliver_batch(self, made: GroupedBatch) -> GroupedBatch:
        """Deliver the own block of a group's batch to the user, with its group batch as ``block.push_pull``.

        ``made`` is changed and returned. Its inputs get the nodes and the block on the device of the model.
        """
        group_batch, part = made.group_batch, self._group.part
        epoch, step = divmod(group_batch.number, len(self))

        # The inner loader is not iterated, but it numbers the steps of the batches that it delivers.
        self._inner.first_number = self.first_number
        self._inner.set_epoch(epoch)
        made.batch = self._inner.deliver(step, made.batch)
        made.share, block = self._session.step_share, made.batch[-1][0]
        inputs, nodes = group_batch.inputs, group_batch.inputs[part].nodes
        if self._inner.moves_batches:
            # All names refer to one tensor, so that a model's nodes are recognised without reading the
            # device.
            moved_nodes = self.schema.key_by_type(made.batch[0])
            nodes = {ntype: ids.long() for ntype, ids in moved_nodes.items()}
            for ntype, ids in nodes.items():
                block.srcnodes[ntype].data[dgl.NID] = ids

        for ntype, columns in inputs[part].columns.items():
            block.srcnodes[ntype].data.update(columns)
        # The batch gets a view of the user's block, because that refers to the batch. A reference cycle would
        # keep the rows in memory until the garbage collector finds it.
        own_input = replace(inputs[part], block=block.local_var(), nodes=nodes)
        group_batch.inputs = (*inputs[:part], own_input, *inputs[part + 1 :])
        block.push_pull = group_batch
        return made

    def move(self, made: GroupedBatch) -> None:
        """Begin to copy the batch to the device. The own block is copied with the user's batch."""
        own = self._group.part
        device = self._inner.device
        group_batch = made.group_batch

        def move(copy: Copy) -> None:
            made.batch.move(device, copy)
            group_batch.inputs = tuple(
                replace(
                    part_input,
                    block=part_input.block if part == own else place(part_input.block, device, copy=copy),
                    nodes=part_input.nodes
                    if part == own
                    else {t: ids_to_device(ids, device, copy) for t, ids in part_input.nodes.items()},
                    columns={
                        ntype: {name: copy(rows) for name, rows in columns.items()}
                        for ntype, columns in part_input.columns.items()
                    },
                )
                for part, part_input in enumerate(group_batch.inputs)
            )

        _, made.batch.arrive = copy_async(self._inner.copies, device, move)

    @property
    def moves_batches(self) -> bool:
        return self._inner.moves_batches


@final
class GroupStages(Stages[GroupedBatch]):
    """The stages of a batch: the own block, the blocks of other owners, and the columns of all."""

    loader: PushPullLoader

    def __init__(
        self,
        loader: PushPullLoader,
        epoch: int,
        inner: Maker[Any, Any],
        resample: Callable[[int], OwnerBlocks] | None,
        iteration: int,
    ) -> None:
        self.loader = loader
        self.epoch = epoch
        self._inner = inner
        self._resample, self._iteration = resample, iteration

    def sample(self, step: int) -> GroupedBatch:
        batch = self._inner.make(step)
        nodes = self.loader.schema.key_by_type(batch.input_nodes)
        own = OwnerBlock(batch.blocks[0], {ntype: ids.to(torch.int64) for ntype, ids in nodes.items()})
        number = self.epoch * len(self.loader) + step
        return GroupedBatch(
            batch=batch, own=own, number=number, sample_s=batch.sample_s, fetch_s=batch.fetch_s
        )

    def fetch(self, made: GroupedBatch) -> None:
        begin = time.perf_counter()
        step = made.number % len(self.loader)
        with self.span("push structure", step):
            made.other_blocks = (
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


def split_prefetch(
    g: DistGraph, sampler: Any, names: Mapping[str, tuple[str, ...]], disjoint: object = False
) -> tuple[Any, dict[str, tuple[str, ...]]]:
    """Return ``sampler`` without prefetched feature matrices, and ``names`` by type with those matrices.

    Of several types, only those that have names lose their matrices. Raises ConfigError if the sampler gives
    blocks edge weights, or if it samples by time or the loader is ``disjoint``.
    """
    if isinstance(sampler, EdgePredictionSampler):
        edge_sampler = copy.copy(sampler)
        edge_sampler.sampler, cut_names = split_prefetch(g, sampler.sampler, names, disjoint)
        return edge_sampler, cut_names

    plan = read_sampler(sampler)
    plan.refuse_trees("push_pull", disjoint)
    if plan.has_edge_weights:
        raise ConfigError(
            "LaborSampler with prob= or importance_sampling= sets edge_weights on blocks, but push_pull does "
            "not send them to other ranks; leave both out, or use strategy='data_parallel'"
        )

    feats = plan.node_feats
    cut_names = dict(names)
    if len(names) == 1:
        (ntype,) = names
        prefetched = (
            [name for keys in feats.values() for name in keys] if isinstance(feats, Mapping) else feats
        )
        names_by_type = {ntype: prefetched}
    elif isinstance(feats, Mapping):
        names_by_type = {str(ntype): columns for ntype, columns in feats.items()}
    else:
        return sampler, cut_names  # The inner loader refuses names without a type.

    kept: dict[str, list[str]] = {}
    for ntype, prefetched in names_by_type.items():
        if len(names) == 1 or cut_names.get(ntype):
            data = g.nodes[ntype].data
            matrices = [name for name in prefetched if name in data and len(data[name].shape) == 2]
            cut_names[ntype] = tuple(dict.fromkeys([*cut_names[ntype], *matrices]))
        kept[ntype] = [name for name in prefetched if name not in cut_names.get(ntype, ())]

    reduced_sampler = copy.copy(sampler)
    reduced_sampler.prefetch_node_feats = kept if len(names) > 1 else kept[ntype]
    return reduced_sampler, cut_names
