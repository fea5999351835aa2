"""Mini-batches from seeds: sampling, block construction and feature fetching on the loader's threads."""

from __future__ import annotations

import queue
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, cast, final

import dgl
import numpy as np
import torch
from dgl.heterograph import DGLBlock
from torch import Tensor

from dglx_dist.data.times import to_times
from dglx_dist.dataloading.feature_fetch import (
    WINDOW_BYTES,
    Columns,
    EdgesOfBlock,
    fetch_on_access,
    get_edge_ids,
    submit_columns,
)
from dglx_dist.dataloading.kernels import RawBatch, SampleRequest, Schema, ThreadTable
from dglx_dist.dataloading.sampler import BatchSource, DrawSettings, LocalSource, RemoteSource
from dglx_dist.dataloading.step_loader import Maker, StepLoader, run_ahead, split_times
from dglx_dist.dataloading.trees import TreeSource, hash_rows
from dglx_dist.errors import ConfigError
from dglx_dist.internals.graphs import BlockTypes
from dglx_dist.internals.message_passing import place
from dglx_dist.internals.pytorch import Copy, ids_to_device
from dglx_dist.records import ROW_ID, SEED_ID, TIME, Array, EdgeType, StepShare

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph


NO_COLUMNS: Mapping[str, Array] = MappingProxyType({})


@final
class BatchBlockBuilder:
    """Builds the blocks for batches. Thread-safe.

    As with ``dgl.to_block``, every block has all node types on both sides, even those without a node, and all
    edge types in the graph's order. A type's destinations are also its first sources.
    """

    def __init__(self, schema: Schema, edge_weights: bool = False) -> None:
        self._schema = schema
        self._has_weights = edge_weights
        relations = [relation for _, relation, _ in schema.etypes]
        self._sources = schema.source_types.tolist()
        self._destinations = schema.destination_types.tolist()
        self._types = BlockTypes(schema.ntypes, relations, self._sources, self._destinations)

    def blocks(
        self, batch: RawBatch, node_columns: Mapping[str, Array] = NO_COLUMNS
    ) -> tuple[dict[str, Tensor], list[DGLBlock]]:
        """Return ({node type: input node ids}, blocks), with the block of layer 1 first.

        The tensors share memory with ``batch`` and the (n, ...) ``node_columns``.
        """
        tensors = {dgl.NID: torch.from_numpy(batch.nodes)}
        for name, rows in node_columns.items():
            tensors[name] = torch.from_numpy(rows)
        nodes = []
        for first, last in pairwise(batch.node_starts.tolist()):
            nodes.append({name: rows[first:last] for name, rows in tensors.items()})

        indptr = torch.from_numpy(batch.indptr)
        sources = torch.from_numpy(batch.sources)
        columns = {dgl.EID: torch.from_numpy(batch.edge_ids)}
        if self._has_weights:
            columns["edge_weights"] = torch.from_numpy(batch.edge_weights)

        # The nodes after a hop are the sources of its block, and the nodes before it are the destinations.
        edge_ends = batch.edge_ends.tolist()
        num_relations = len(self._sources)
        num_nodes_by_hop = batch.node_ends.tolist()
        blocks: list[DGLBlock] = []
        first_offset = 0
        for hop, (num_dst_by_type, num_src_by_type) in enumerate(pairwise(num_nodes_by_hop)):
            edges = []
            ends = edge_ends[hop * num_relations : (hop + 1) * num_relations + 1]
            for relation, (first, last) in enumerate(pairwise(ends)):
                num_src = num_src_by_type[self._sources[relation]]
                num_dst = num_dst_by_type[self._destinations[relation]]
                offsets = indptr[first_offset : first_offset + num_dst + 1]
                type_columns = {name: values[first:last] for name, values in columns.items()}
                edges.append((num_src, num_dst, offsets, sources[first:last], type_columns))
                first_offset += num_dst + 1
            blocks.append(self._types.block(edges, nodes, (num_src_by_type, num_dst_by_type)))

        # The kernels draw the hop at the seeds first, but layer 1 is the layer at the input nodes.
        ids = [columns[dgl.NID] for columns in nodes]
        return dict(zip(self._schema.ntypes, ids, strict=True)), blocks[::-1]


Seeds: TypeAlias = Mapping[str, Array]
"""Map from node type to (B,) int64 distinct ids. B may be 0. Types without seeds may be missing."""

Excluded: TypeAlias = Mapping[EdgeType, Array]
"""Map from edge type to (X,) int64 ascending distinct edge ids that a batch must not draw."""

NodeIds: TypeAlias = Tensor | dict[str, Tensor]
"""(n,) int64 global ids, or a dict from type to ids if the graph has more than one node type."""

NOTHING_EXCLUDED: Excluded = MappingProxyType({})


@dataclass(kw_only=True, eq=False)
class MiniBatch:
    """One batch on its way through a loader's stages."""

    seeds: Seeds
    seed_times: Seeds = field(default_factory=dict)
    """(B,) int64 time keys of the seeds by type, if the sampler needs them."""
    node_columns: Mapping[str, Array] = field(default_factory=dict)
    """(n, ...) columns for the nodes in ``raw``, which the blocks get."""
    raw: RawBatch | None = None
    """Arrays from the kernels. None after the blocks are built."""
    sources: Mapping[str, Array] = field(default_factory=dict)
    """(n,) int64 distinct input nodes by type, if the kernels sampled the batch."""
    inputs: Mapping[str, Array] = field(default_factory=dict)
    """Input nodes by column key in the store."""
    num_bytes: int = 0
    """Size in bytes until the batch's rows are requested."""
    finish_pull: Callable[[Sequence[DGLBlock]], None] | None = None
    """Function that waits for the requested columns; see :func:`submit_columns`."""
    input_nodes: NodeIds = field(init=False)
    """The first block's source nodes."""
    output_nodes: NodeIds = field(init=False)
    """The batch's seeds."""
    target_counts: tuple[int, int] = (0, 0)
    """Target counts on this rank and on all ranks, if the seeds are not the targets."""
    blocks: list[DGLBlock] = field(init=False)
    """Blocks, with the block of layer 1 first."""
    sample_s: float = 0.0
    """Seconds for sampling and block building, including features if the sampler fetches them."""
    fetch_s: float = 0.0
    """Seconds for fetching columns."""
    arrive: Callable[[], None] | None = None
    """Function that lets the consumer's stream wait for copies to a device."""

    def move(self, device: torch.device, copy: Copy) -> None:
        """Begin to copy the batch to ``device``."""
        copy_ids = partial(ids_to_device, device=device, copy=copy)
        self.input_nodes = _copy_nodes(self.input_nodes, copy_ids)
        self.output_nodes = _copy_nodes(self.output_nodes, copy_ids)
        self.blocks = [place(block, device, copy=copy) for block in self.blocks]

    def finish(self) -> None:
        """Let the current stream wait for the copies."""
        if self.arrive is not None:
            self.arrive()


def _copy_nodes(nodes: NodeIds, copy: Copy) -> NodeIds:
    if isinstance(nodes, Tensor):
        return copy(nodes)
    return {ntype: copy(ids) for ntype, ids in nodes.items()}


class NodeMaker(Maker[str, MiniBatch]):
    """Stages for batches that are sampled around seed nodes."""

    def __init__(self, g: DistGraph, columns: Columns) -> None:
        self._g = g
        self._columns = columns
        self._warned_columns: set[str] = set()

    def close(self) -> None:
        for rows in self.claimed_rows.values():
            rows.release()

    @abstractmethod
    def offline(self) -> NodeMaker: ...

    @abstractmethod
    def sample_blocks(self, batch: MiniBatch, epoch: int, exclude: Excluded, *, step: int) -> None:
        """Sample the blocks around the batch's seeds, without the edges in ``exclude``."""

    def sample_items(
        self, seeds: Seeds, epoch: int, exclude: Excluded = NOTHING_EXCLUDED, *, step: int
    ) -> MiniBatch:
        ids, times = split_times(seeds)
        batch = MiniBatch(seeds=ids, seed_times=times)
        self.sample_blocks(batch, epoch, exclude, step=step)
        return batch

    def deliver(self, batch: MiniBatch, share: StepShare) -> Any:
        self.finish(batch, share)
        return batch.input_nodes, batch.output_nodes, batch.blocks

    def finish(self, batch: MiniBatch, share: StepShare) -> None:
        """Complete the blocks on the consumer's thread and stamp them with ``share``."""
        batch.finish()
        fetch_on_access(self._g, batch.blocks, self._warned_columns)
        batch.blocks[-1].step_share = share


@final
class SamplerMaker(NodeMaker):
    """Stages that call the sampler's own code to make blocks."""

    def __init__(self, sampler: Any, g: DistGraph, columns: Columns) -> None:
        super().__init__(g, columns)
        self._sampler = sampler

    def sample_blocks(self, batch: MiniBatch, epoch: int, exclude: Excluded, *, step: int) -> None:
        begin = time.perf_counter()
        seeds = seeds_to_node_ids(batch.seeds, self._g.ntypes)
        batch.input_nodes, batch.output_nodes, batch.blocks = self._sample(seeds, exclude)
        batch.sample_s = time.perf_counter() - begin

    def fetch(self, batch: MiniBatch) -> None:
        begin = time.perf_counter()
        edges = []
        if self._columns.edges:
            edges = [get_edge_ids(block) for block in batch.blocks]

        batch.finish_pull = submit_columns(
            self._g.kvstore,
            self._columns,
            self._to_arrays(batch.input_nodes),
            self._to_arrays(batch.output_nodes),
            edges,
            # A user's sampler may repeat nodes.
            distinct=False,
        )
        batch.fetch_s = time.perf_counter() - begin

    def build(self, batch: MiniBatch) -> None:
        wait_for_columns(batch)

    def offline(self) -> NoReturn:
        raise ConfigError(
            "another rank cannot reproduce the draws of the sampler's own code. Use "
            "dgl.dataloading.NeighborSampler."
        )

    def _sample(self, seeds: NodeIds, exclude: Excluded) -> Any:
        edges = {etype: torch.from_numpy(ids) for etype, ids in exclude.items() if len(ids)}
        if not edges:
            return self._sampler.sample(self._g, seeds)

        # DGL's samplers expect a tensor instead of a dict if the graph has one edge type.
        excluded: Any = edges
        if len(self._g.canonical_etypes) == 1:
            excluded = edges[self._g.canonical_etypes[0]]
        return self._sampler.sample(self._g, seeds, exclude_eids=excluded)

    def _to_arrays(self, nodes: NodeIds) -> dict[str, Array]:
        if isinstance(nodes, Tensor):
            return {self._g.ntypes[0]: nodes.numpy()}
        return {ntype: ids.numpy() for ntype, ids in nodes.items()}


def wait_for_columns(batch: MiniBatch) -> None:
    """Wait for the columns that ``batch`` requested, and set them on its blocks."""
    begin = time.perf_counter()
    assert batch.finish_pull is not None
    batch.finish_pull(batch.blocks)
    batch.finish_pull = None
    batch.fetch_s += time.perf_counter() - begin


def unwrap_single_type(nodes: dict[str, Tensor]) -> NodeIds:
    """Return ids as DGL's loaders yield them: without a dict if there is one node type."""
    return next(iter(nodes.values())) if len(nodes) == 1 else nodes


def seeds_to_node_ids(seeds: Seeds, ntypes: Sequence[str]) -> NodeIds:
    no_ids = np.empty(0, np.int64)
    return unwrap_single_type({ntype: torch.from_numpy(seeds.get(ntype, no_ids)) for ntype in ntypes})


def count_batch_bytes(nodes: int, offsets: int, edges: int) -> int:
    """Return the size in bytes of a batch without rows. An edge takes 16 bytes: a source and an id."""
    return 8 * (nodes + offsets + 2 * edges)


@final
class KernelMaker(NodeMaker):
    """Stages that call the compiled kernels to make blocks."""

    def __init__(
        self, source: BatchSource | TreeSource, draws: DrawSettings, g: DistGraph, columns: Columns
    ) -> None:
        super().__init__(g, columns)
        self._source = source
        self._draws = draws
        self._get_source: Callable[[int], BatchSource | TreeSource] = lambda _step: source
        self._has_trees = isinstance(source, TreeSource)
        self._schema = draws.schema
        has_weights = draws.by_source is not None and draws.by_source.unequal
        self._builder = BatchBlockBuilder(draws.schema, has_weights)

        # Each thread that makes a batch takes a table from this queue and returns it afterwards.
        self._idle_tables: queue.SimpleQueue[ThreadTable] = queue.SimpleQueue()

    def offline(self) -> KernelMaker:
        if self._has_trees:
            raise ConfigError("batches with a tree for each seed are drawn by their own rank only.")
        if not isinstance(self._source, LocalSource):
            raise ConfigError(
                "this server has only a part of the graph's structure. Open the graph with "
                "structure='replicated'."
            )
        return KernelMaker(self._source, self._draws, self._g, Columns())

    def sampling_signature(self) -> str:
        trees = f", {self._source.rule}" if isinstance(self._source, TreeSource) else ""
        return self._draws.signature() + trees

    def begin(
        self, loader: StepLoader[str, MiniBatch, Any], epoch: int, steps: Callable[[], Iterator[int]]
    ) -> KernelMaker:
        stages = cast("KernelMaker", super().begin(loader, epoch, steps))
        if isinstance(self._source, RemoteSource) and self._g.kvstore.looks_ahead:
            stages._get_source = stages._draw_jointly(self._source, steps())
        return stages

    def claim(self) -> None:
        # Trees repeat input nodes, and reserved rows are for distinct nodes.
        if not self._has_trees:
            self.claimed_rows = self._columns.claim(self._g.kvstore)

    def _draw_jointly(self, source: RemoteSource, steps: Iterator[int]) -> Callable[[int], RemoteSource]:
        """Return a function from a step to its batch's source, for a partitioned graph.

        Consecutive batches form a group. A group's edges are requested together, so that a node which several
        batches reach is sent once. The group's source holds these edges.
        """
        lock = threading.Lock()
        max_batches = 1

        # Don't refer to the maker in the thread that draws, because the thread must end with the maker.
        request = self._draws.request
        get_items = self.get_items
        epoch = self.epoch
        sources: dict[int, RemoteSource] = {}

        def group_requests() -> Iterator[dict[int, SampleRequest]]:
            """Yield requests by step. Each mapping covers consecutive steps with equal random streams."""
            group: dict[int, SampleRequest] = {}
            group_streams: Array = np.empty(0, np.uint64)
            for step in steps:
                step_request = request(get_items(step), epoch, NOTHING_EXCLUDED, step)
                is_full = len(group) >= max_batches
                if group and (is_full or not np.array_equal(group_streams, step_request.streams)):
                    yield group
                    group = {}
                group[step] = step_request
                group_streams = step_request.streams

            if group:
                yield group

        def draw(group: Mapping[int, SampleRequest]) -> dict[int, RemoteSource]:
            nonlocal max_batches
            joint_source = source.draw_jointly([*group.values()])
            num_edges = sum(len(edges.sources) for hop in joint_source.known for _, edges in hop)

            # A group may use a quarter of the window. The next group has at most four times as many batches.
            # Counting one offset avoids a division by zero if no edge was drawn.
            num_bytes = count_batch_bytes(0, 1, num_edges)
            growth = min(4, WINDOW_BYTES / 4 / num_bytes)
            max_batches = max(1, int(len(group) * growth))
            return dict.fromkeys(group, joint_source)

        # The next group is drawn in the background, on a thread that ends with the maker.
        num_threads = min(1, self.loader.num_threads)
        drawn_groups = run_ahead(draw, group_requests(), depth=1, num_threads=num_threads)

        def get_source(step: int) -> RemoteSource:
            with lock:
                while step not in sources:
                    group = next(drawn_groups, None)
                    if group is None:
                        break
                    sources.update(group)

                # After an error, or if the iteration now ends elsewhere, draw this batch alone.
                return sources.pop(step, source)

        return get_source

    def sample_blocks(self, batch: MiniBatch, epoch: int, exclude: Excluded, *, step: int) -> None:
        """Draw the batch's edges and input nodes. Any thread may call this method.

        The drawn edges are kept as raw arrays. :meth:`build` turns them into blocks.
        """
        begin = time.perf_counter()
        request = self._draws.request(batch.seeds, epoch, exclude, step)
        source = self._get_source(step)
        if isinstance(source, TreeSource):
            raw = self._sample_trees(source, batch, request, exclude)
        else:
            raw = self._sample_nodes(source, request, exclude)

        batch.raw = raw

        type_bounds = pairwise(raw.node_starts)
        sources: dict[str, Array] = {}
        for ntype, (first, last) in zip(self._schema.ntypes, type_bounds, strict=True):
            sources[ntype] = raw.nodes[first:last]
        batch.sources = sources
        batch.inputs = self._columns.group_inputs(sources)
        batch.num_bytes = count_batch_bytes(len(raw.nodes), len(raw.indptr), len(raw.sources))
        batch.sample_s = time.perf_counter() - begin

    def _sample_nodes(self, source: BatchSource, request: SampleRequest, exclude: Excluded) -> RawBatch:
        # Draws need a table with an entry for each node. A thread takes an idle table and gives it back.
        try:
            table = self._idle_tables.get_nowait()
        except queue.Empty:
            table = ThreadTable(sum(self._schema.num_nodes))
        try:
            return source.sample(request, exclude, table)
        finally:
            self._idle_tables.put(table)

    def _sample_trees(
        self, source: TreeSource, batch: MiniBatch, request: SampleRequest, exclude: Excluded
    ) -> RawBatch:
        """Draw the trees for ``batch``. Set the columns that hold each row's tree and time."""
        no_times = np.empty(0, np.int64)
        times_by_type = [batch.seed_times.get(ntype, no_times) for ntype in self._schema.ntypes]
        times = np.concatenate(times_by_type)
        raw, seed_ids, tree_keys = source.sample(request, exclude, times)

        columns = {SEED_ID: seed_ids}
        if len(self._schema.ntypes) == 1:
            columns[ROW_ID] = hash_rows(tree_keys, seed_ids, raw.nodes)
        if source.rule.dtype is not None:
            columns[TIME] = to_times(times, source.rule.dtype)[seed_ids]
        batch.node_columns = columns
        return raw

    def fetch(self, batch: MiniBatch) -> None:
        begin = time.perf_counter()
        raw = batch.raw
        assert raw is not None
        edges = self._split_edge_ids(raw) if self._columns.edges else []
        batch.finish_pull = submit_columns(
            self._g.kvstore,
            self._columns,
            batch.sources,
            batch.seeds,
            edges,
            distinct=not self._has_trees,
            claimed_rows=self.claimed_rows,
        )
        batch.fetch_s = time.perf_counter() - begin

    def build(self, batch: MiniBatch) -> None:
        """Build the batch's blocks and attach its columns. Drop its raw arrays."""
        begin = time.perf_counter()
        raw = batch.raw
        batch.raw = None
        assert raw is not None
        input_nodes, batch.blocks = self._builder.blocks(raw, batch.node_columns)
        batch.input_nodes = unwrap_single_type(input_nodes)
        batch.output_nodes = seeds_to_node_ids(batch.seeds, self._schema.ntypes)
        batch.sample_s += time.perf_counter() - begin
        wait_for_columns(batch)

    def _split_edge_ids(self, batch: RawBatch) -> Sequence[EdgesOfBlock]:
        # The kernels draw the hop at the seeds first, but the last block belongs to the seeds.
        ends = batch.edge_ends
        num_relations = len(self._schema.etypes)
        blocks: list[EdgesOfBlock] = []
        for first in range(0, len(ends) - 1, num_relations):
            edges = {}
            for index, etype in enumerate(self._schema.etypes, first):
                edges[etype] = batch.edge_ids[ends[index] : ends[index + 1]]
            blocks.append(edges)

        return blocks[::-1]
