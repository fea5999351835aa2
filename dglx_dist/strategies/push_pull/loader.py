"""Loaders for push-pull. They yield data parallel batches, but with columns instead of rows.

Every part needs the layer-1 block from every owner in its group. Owners push their blocks, or parts sample
them again.
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
"""Ledger phase for exchanged seeds: 8 bytes per seed on every other member, once."""

SMALL_NODES = 1 << 31
"""Node count from which ids need 8 bytes. In smaller graphs they fit into 4."""

_EXTRA_BATCHES = 5
"""Number of batches in use besides those made ahead: in flight, looked ahead, or in the training loop."""

T = TypeVar("T")
log = logging.getLogger(__name__)


class OwnerBlock(NamedTuple):
    """One owner's layer-1 block."""

    block: DGLBlock
    nodes: Mapping[str, Tensor]
    """(L0,) int64 global ids for its source nodes, by node type."""


OwnerBlocks: TypeAlias = dict[int, OwnerBlock]
"""Blocks from the other owners, by part."""

Resampler: TypeAlias = Callable[[int], OwnerBlocks]
"""Samples the other owners' blocks for a step in one epoch."""


@final
class BlockSchema:
    """Node and edge types in a block, and the arrays that describe such a block.

    For each node type the arrays hold the source ids (L0,). For each edge type they hold indptr (D1 + 1,) and
    indices (E1,). Several node types need their destination counts too, because edges may not reach all
    destinations.
    """

    def __init__(self, ntypes: Sequence[str], etypes: Sequence[EdgeType]) -> None:
        self._ntypes = tuple(ntypes)
        self._etypes = tuple(etypes)
        self._sources = [self._ntypes.index(source) for source, _, _ in etypes]
        self._targets = [self._ntypes.index(target) for _, _, target in etypes]
        relations = [relation for _, relation, _ in etypes]
        self._types = BlockTypes(self._ntypes, relations, self._sources, self._targets)

    def key_by_type(self, nodes: Tensor | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return ids by node type. Loaders yield a tensor if there is only one type."""
        if isinstance(nodes, Tensor):
            return {self._ntypes[0]: nodes}
        return nodes

    def pack(self, owner: OwnerBlock, *, wide: bool) -> list[Array]:
        """Return a block's arrays as int32. With ``wide``, node ids are int64."""
        id_dtype = torch.int64 if wide else torch.int32
        tensors = [owner.nodes[ntype].to(id_dtype) for ntype in self._ntypes]
        for etype in self._etypes:
            indptr, indices, _ = owner.block.adj_tensors("csc", etype)
            tensors += [indptr.to(torch.int32), indices.to(torch.int32)]
        if len(self._ntypes) > 1:
            num_targets = [owner.block.num_dst_nodes(ntype) for ntype in self._ntypes]
            tensors.append(torch.tensor(num_targets, dtype=torch.int32))
        return [tensor.numpy() for tensor in tensors]

    def unpack(self, arrays: Sequence[Array], idtype: torch.dtype) -> OwnerBlock:
        """Rebuild a block from the arrays that :meth:`pack` returned. Its edges are numbered in CSC order.

        ``idtype`` is the id type in the owner's block, so that all parts run the same kernels.
        """
        num_types = len(self._ntypes)
        tensors = [torch.tensor(array) for array in arrays]
        nodes = [ids.to(torch.int64) for ids in tensors[:num_types]]
        end = num_types + 2 * len(self._etypes)
        edges = [values.to(idtype) for values in tensors[num_types:end]]

        # With a single node type, indptr has an entry for every destination.
        num_targets = tensors[-1].tolist() if num_types > 1 else [len(edges[0]) - 1]
        return self._build(nodes, num_targets, edges)

    def rebuild(self, block: DGLBlock, nodes: Mapping[str, Tensor]) -> OwnerBlock:
        """Return the block as :meth:`unpack` would return it, without other data."""
        edges: list[Tensor] = []
        for etype in self._etypes:
            indptr, indices, _ = block.adj_tensors("csc", etype)
            edges += [indptr, indices]

        ids = [nodes[ntype].to(torch.int64) for ntype in self._ntypes]
        num_targets = [block.num_dst_nodes(ntype) for ntype in self._ntypes]
        return self._build(ids, num_targets, edges)

    def check(self, arrays: Sequence[Array]) -> None:
        """Raise ValueError, which the sender gets, if kernels would read outside the arrays."""
        num_types = len(self._ntypes)
        end = num_types + 2 * len(self._etypes)
        # Blocks with several node types have one more array, the destination counts.
        num_arrays = end if num_types == 1 else end + 1
        if len(arrays) != num_arrays or any(a.ndim != 1 or a.dtype.kind != "i" for a in arrays):
            descriptions = [f"{array.dtype} {array.shape}" for array in arrays]
            raise ValueError(
                f"arrays {descriptions} are no block; it has {num_arrays} one-dimensional integer arrays"
            )

        num_sources = [len(ids) for ids in arrays[:num_types]]
        num_targets = arrays[-1].tolist() if num_types > 1 else [len(arrays[1]) - 1]
        has_all_types = len(num_targets) == num_types
        pairs = zip(num_targets, num_sources, strict=False)
        if not has_all_types or any(not 0 <= targets <= sources for targets, sources in pairs):
            raise ValueError(f"{num_targets} destinations of {num_sources} sources are no block")

        for source, target, (indptr, indices) in self._pair_edges(arrays[num_types:end]):
            if not _is_csc(indptr, indices, num_targets[target], num_sources[source]):
                raise ValueError(
                    f"{[len(array) for array in arrays]} source ids, bounds and indices of in-edges are no "
                    "block: bounds rise from 0 to the number of edges, and indices are positions of source "
                    "ids"
                )

    def _pair_edges(self, arrays: Sequence[T]) -> Iterator[tuple[int, int, tuple[T, T]]]:
        """Yield each edge type's source type, destination type, and (indptr, indices)."""
        pairs = zip(arrays[::2], arrays[1::2], strict=True)
        return zip(self._sources, self._targets, pairs, strict=True)

    def _build(self, nodes: Sequence[Tensor], num_targets: list[int], arrays: Sequence[Tensor]) -> OwnerBlock:
        """Build a block from int64 source ids and destination counts by node type, and edge arrays."""
        num_sources = [len(ids) for ids in nodes]
        if len(nodes) == len(self._etypes) == 1:
            # For a single type, this takes a third of the time.
            indptr, indices = arrays
            block = build_block(indptr, indices, num_sources[0], self._etypes[0])
        else:
            edges: list[Any] = [
                (num_sources[source], num_targets[target], indptr, indices, {})
                for source, target, (indptr, indices) in self._pair_edges(arrays)
            ]
            block = self._types.block(edges, None, (num_sources, num_targets))
        return OwnerBlock(block, dict(zip(self._ntypes, nodes, strict=True)))


def _is_csc(indptr: Array, indices: Array, num_targets: int, num_sources: int) -> bool:
    """Return whether the arrays are in-edges of ``num_targets`` nodes from ``num_sources`` nodes."""
    if len(indptr) != num_targets + 1:
        return False
    if indptr[0] != 0 or indptr[-1] != len(indices) or (indptr[1:] < indptr[:-1]).any():
        return False
    return not len(indices) or bool(indices.min() >= 0 and indices.max() < num_sources)


@dataclass(kw_only=True, eq=False)
class GroupedBatch:
    """A batch that the inner loader made, on its way through the stages, with the blocks from all owners."""

    batch: Any
    """The inner loader's batch. On the consumer's thread it becomes the user's batch."""
    own_block: OwnerBlock
    """This rank's block."""
    number: int
    """Batch number, counted from the loader's first epoch."""
    sample_s: float
    fetch_s: float
    other_blocks: OwnerBlocks = field(default_factory=dict)
    group_batch: GroupBatch = field(init=False)
    share: StepShare | None = None
    """This rank's share of the targets, set on the consumer's thread."""


@final
class PushPullLoader(EpochLoader[GroupedBatch, Any]):
    """Yields the batches that ``inner`` makes. ``blocks[0].push_pull`` is the batch as all parts see it.

    In ``blocks[0]``, source nodes have this rank's (L0, F_p) columns under each feature's name. Construction
    is collective, and all ranks must iterate over the same steps. The loader's threads exchange structure
    without collectives. When an epoch ends normally, the loader drains the ``pipelines`` that models have for
    it, which is collective.

    Args:
        inner: A loader that yields node or edge batches. It must not fetch the features in ``stores``.
        stores: The columns by node type.

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
        num_buffers = (inner.depth + _EXTRA_BATCHES) * group.size
        self._memory = RowMemory(num_buffers, feature_dtype, inner.device)
        self._looks_ahead = options.depth > 1
        _warn_of_caches(g, stores)

        # All ranks construct their loaders in the same order, so matching loaders get the same label.
        self._label = f"push_pull.{session.next_number('push_pull')}"
        self._wide = max(map(g.num_nodes, g.ntypes)) >= SMALL_NODES
        advice = (
            "every rank must iterate over the loader alike, even in evaluation; move such calls out of `if "
            "rank == 0`"
        )
        self._pushes = OneSidedExchange(session, f"{self._label}.structure", advice, self.schema.check)
        self._make_resampler: Callable[[int], Resampler] | None = None
        super().__init__(session, seed=inner.seed, depth=inner.depth, num_threads=inner.num_threads)
        if options.structure == "resample" and group.size > 1:
            self._make_resampler = self._open_resampling()

        settings = {
            "depth": inner.depth,
            "features": {ntype: store.names for ntype, store in stores.items()},
            "structure": options.structure,
            "look_ahead": self._looks_ahead,
        }
        # The check is also a barrier. All ranks have registered their remote calls before one iterates.
        check_equal(session, "a loader of push_pull", settings)
        self._iteration = -1

    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Iterator[Any]:
        """Yield an epoch's batches. After the last one, drain the wrapped models' pipelines.

        If no model is wrapped yet, calling one raises ConfigError. A loop that ends early releases its
        batches.
        """
        self._iteration += 1
        iteration = self._iteration
        stream = cast("Generator[Any, None, None]", super().__iter__())
        hook = None
        if not self._has_model():
            hook = register_module_forward_pre_hook(self._refuse_unwrapped)

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
            # The mailbox comes first, because the threads that ``close`` waits for may wait for other ranks.
            self._pushes.mailbox.begin(iteration + 1)
            stream.close()
            if hook is not None:
                hook.remove()

        for reference in self._pipelines:
            pipeline = reference()
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
        resample = None if self._make_resampler is None else self._make_resampler(epoch)
        return GroupStages(self, epoch, inner, resample, self._iteration)

    def end(self, iteration: int, error: BaseException) -> None:
        """Make the threads in ``iteration`` stop waiting for ranks that now wait for this one."""
        self._pushes.mailbox.begin(iteration + 1, error)

    def exchange_blocks(self, grouped: GroupedBatch, iteration: int) -> OwnerBlocks:
        """Push the own block to the other owners, and return theirs."""
        epoch, step = divmod(grouped.number, len(self))
        own_block = grouped.own_block
        ranks = [rank for _, rank in self._group.peers]
        arrays = self.schema.pack(own_block, wide=self._wide)
        messages = dict.fromkeys(ranks, arrays)
        self._pushes.post(iteration, str(step), messages, phase=STRUCTURE, layer=1)

        description = f"the structure of step {step} of epoch {epoch}"
        received = self._pushes.mailbox.take(iteration, str(step), ranks, description)
        idtype = own_block.block.idtype
        return {part: self.schema.unpack(received[rank], idtype) for part, rank in self._group.peers}

    def _open_resampling(self) -> Callable[[int], Resampler]:
        """Exchange the group's seeds. Return a function that makes a resampler for an epoch.

        Random numbers are keyed by (seed, epoch, hop, node), so all ranks sample equal blocks. Every rank
        must call this. Raises ConfigError on all ranks if other ranks cannot repeat a rank's sampling.
        """
        loader = self._inner
        session = self._session
        group = self._group
        schema = self.schema
        sample = run_on_all_ranks(session, loader.offline, ConfigError)
        # The ranks' samplers may exclude different edges, or have different seeds.
        check_equal(session, "the sampler", loader.sampling_signature())

        op = f"{self._label}.seeds"
        types = list(loader.items.ids)
        arrays = list(loader.items.ids.values())

        def answer(_name: str, _arrays: Sequence[Array]) -> list[Array]:
            return arrays

        # The registration is collective, so that all ranks can answer before one asks.
        run_on_all_ranks(session, lambda: session.rpc.register(op, answer))
        weakref.finalize(self, session.rpc.unregister, op)
        items_of_rank: dict[int, Items[Any]] = {}
        for _, rank in group.peers:
            seeds = session.rpc.call(rank, op, "", [], phase=SEEDS)
            items_of_rank[rank] = Items(ids=dict(zip(types, seeds, strict=True)))

        def make_resampler(epoch: int) -> Resampler:
            # The seeds are sorted once per epoch, not for every batch.
            items = items_of_rank
            orders = {part: loader.order_items(epoch, items[rank], rank) for part, rank in group.peers}

            def sample_blocks(step: int) -> OwnerBlocks:
                blocks = {}
                for part, get_items in orders.items():
                    batch = sample(get_items(step), epoch, step)
                    nodes = schema.key_by_type(batch.input_nodes)
                    blocks[part] = schema.rebuild(batch.blocks[0], nodes)
                return blocks

            return sample_blocks

        return make_resampler

    def gather_inputs(self, grouped: GroupedBatch) -> tuple[PartInput, ...]:
        """Return the batches from all owners, with this part's columns."""
        number = self.first_number + grouped.number
        owners = {self._group.part: grouped.own_block, **grouped.other_blocks}
        inputs = []
        for part in range(self._group.size):
            owner = owners[part]
            columns = {}
            for ntype, store in self._stores.items():
                nodes = owner.nodes[ntype]
                columns[ntype] = {name: store.rows(name, nodes, self._memory) for name in store.names}
            inputs.append(PartInput(block=owner.block, nodes=owner.nodes, columns=columns, number=number))
        return tuple(inputs)

    def wrap_batches(self, batches: Iterator[GroupedBatch]) -> Iterator[GroupedBatch]:
        delivered_batches = map(self._deliver_batch, batches)
        if not self._looks_ahead:
            yield from delivered_batches
            return

        grouped = next(delivered_batches, None)
        while grouped is not None:
            next_grouped = next(delivered_batches, None)
            if next_grouped is not None:
                grouped.group_batch.following = next_grouped.group_batch
            yield grouped
            grouped = next_grouped

    def deliver(self, step: int, grouped: GroupedBatch) -> Any:
        self._session.step_share = grouped.share
        return grouped.batch

    def _deliver_batch(self, grouped: GroupedBatch) -> GroupedBatch:
        """Deliver the own block to the user, with the group batch as ``block.push_pull``.

        ``grouped`` is changed and returned. The own input gets nodes and the block on the model's device.
        """
        group_batch = grouped.group_batch
        part = self._group.part
        own_input = group_batch.inputs[part]
        epoch, step = divmod(group_batch.number, len(self))

        # The inner loader is not iterated, but it numbers the steps of the batches that it delivers.
        self._inner.first_number = self.first_number
        self._inner.set_epoch(epoch)
        grouped.batch = self._inner.deliver(step, grouped.batch)
        grouped.share = self._session.step_share
        input_nodes, *_, blocks = grouped.batch
        block = blocks[0]

        nodes = own_input.nodes
        if self._inner.moves_batches:
            # All names refer to one tensor. So a model's nodes are recognised without reading the device.
            moved_nodes = self.schema.key_by_type(input_nodes)
            nodes = {ntype: ids.long() for ntype, ids in moved_nodes.items()}
            for ntype, ids in nodes.items():
                block.srcnodes[ntype].data[dgl.NID] = ids
        for ntype, columns in own_input.columns.items():
            block.srcnodes[ntype].data.update(columns)

        # The batch gets a view of the user's block, because the user's block refers to the batch. A reference
        # cycle would keep the rows in memory until the garbage collector finds it.
        inputs = list(group_batch.inputs)
        inputs[part] = replace(own_input, block=block.local_var(), nodes=nodes)
        group_batch.inputs = tuple(inputs)
        block.push_pull = group_batch
        return grouped

    def move(self, grouped: GroupedBatch) -> None:
        """Begin to copy the batch to the device. The own block is copied with the user's batch."""
        device = self._inner.device
        group_batch = grouped.group_batch

        def move(copy: Copy) -> None:
            grouped.batch.move(device, copy)
            moved_inputs = []
            for part, part_input in enumerate(group_batch.inputs):
                columns = {}
                for ntype, columns_by_name in part_input.columns.items():
                    columns[ntype] = {name: copy(rows) for name, rows in columns_by_name.items()}
                moved_input = replace(part_input, columns=columns)
                if part != self._group.part:
                    moved_input = replace(
                        moved_input,
                        block=place(part_input.block, device, copy=copy),
                        nodes={t: ids_to_device(ids, device, copy) for t, ids in part_input.nodes.items()},
                    )
                moved_inputs.append(moved_input)
            group_batch.inputs = tuple(moved_inputs)

        _, grouped.batch.arrive = copy_async(self._inner.copies, device, move)

    @property
    def moves_batches(self) -> bool:
        return self._inner.moves_batches


@final
class GroupStages(Stages[GroupedBatch]):
    """Stages for a batch: the own block, the blocks from other owners, and the columns for all blocks."""

    loader: PushPullLoader

    def __init__(
        self,
        loader: PushPullLoader,
        epoch: int,
        inner: Maker[Any, Any],
        resample: Resampler | None,
        iteration: int,
    ) -> None:
        self.loader = loader
        self.epoch = epoch
        self._inner = inner
        self._resample = resample
        self._iteration = iteration

    def sample(self, step: int) -> GroupedBatch:
        batch = self._inner.make(step)
        input_nodes = self.loader.schema.key_by_type(batch.input_nodes)
        nodes = {ntype: ids.long() for ntype, ids in input_nodes.items()}
        return GroupedBatch(
            batch=batch,
            own_block=OwnerBlock(batch.blocks[0], nodes),
            number=self.epoch * len(self.loader) + step,
            sample_s=batch.sample_s,
            fetch_s=batch.fetch_s,
        )

    def fetch(self, grouped: GroupedBatch) -> None:
        begin_s = time.perf_counter()
        step = grouped.number % len(self.loader)
        with self.span("push structure", step):
            if self._resample is None:
                grouped.other_blocks = self.loader.exchange_blocks(grouped, self._iteration)
            else:
                grouped.other_blocks = self._resample(step)
        grouped.fetch_s += time.perf_counter() - begin_s

    def build(self, grouped: GroupedBatch) -> None:
        begin_s = time.perf_counter()
        with self.span("gather columns", grouped.number % len(self.loader)):
            grouped.group_batch = GroupBatch(grouped.number, self.loader.gather_inputs(grouped))
        grouped.fetch_s += time.perf_counter() - begin_s

    def move(self, grouped: GroupedBatch, step: int) -> None:
        if not self.loader.moves_batches:
            return
        begin_s = time.perf_counter()
        with self.span("copy to the device", step):
            self.loader.move(grouped)
        grouped.fetch_s += time.perf_counter() - begin_s

    def fail(self, error: BaseException) -> None:
        self.loader.end(self._iteration, error)


def _warn_of_caches(g: DistGraph, stores: Mapping[str, ColumnStore]) -> None:
    """Warn in the log if columns in ``stores`` have a row cache, because this loader does not use it."""
    is_replicated = all(g.structure(etype).is_replicated for etype in g.canonical_etypes)
    for ntype, store in stores.items():
        for name in store.names:
            column = g.kvstore.column(g.nodes[ntype].data[name].kvstore_key)
            if column.cache or (column.ahead and is_replicated):
                log.warning("push_pull fetches no features; policy='lookahead' is for partitioned structure")
                return


def split_prefetch(
    g: DistGraph, sampler: Any, names: Mapping[str, tuple[str, ...]], disjoint: object = False
) -> tuple[Any, dict[str, tuple[str, ...]]]:
    """Return ``sampler`` without prefetched feature matrices, and ``names`` by type with those matrices.

    With several types, only those that have names lose their matrices. Raises ConfigError if the sampler
    gives blocks edge weights, or if it samples by time or the loader is ``disjoint``.
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

    cut_names = dict(names)
    has_one_type = len(names) == 1
    if not has_one_type and not isinstance(plan.node_feats, Mapping):
        return sampler, cut_names  # The inner loader refuses names without a type.

    kept_names = {}
    for ntype, prefetched_names in _key_by_type(plan.node_feats, list(names)).items():
        if has_one_type or cut_names.get(ntype):
            data = g.nodes[ntype].data
            matrices = [name for name in prefetched_names if name in data and len(data[name].shape) == 2]
            # A dict keeps the order, and drops names that occur twice.
            cut_names[ntype] = tuple(dict.fromkeys([*cut_names[ntype], *matrices]))
        kept_names[ntype] = [name for name in prefetched_names if name not in cut_names.get(ntype, ())]

    reduced_sampler = copy.copy(sampler)
    reduced_sampler.prefetch_node_feats = kept_names
    if has_one_type:
        (reduced_sampler.prefetch_node_feats,) = kept_names.values()
    return reduced_sampler, cut_names


def _key_by_type(features: Any, ntypes: Sequence[str]) -> dict[str, list[str]]:
    """Return the feature names that a sampler prefetches, by node type. One type gets all names."""
    if not isinstance(features, Mapping):
        return {ntypes[0]: list(features)}
    if len(ntypes) == 1:
        return {ntypes[0]: [name for names in features.values() for name in names]}
    return {str(ntype): list(names) for ntype, names in features.items()}
