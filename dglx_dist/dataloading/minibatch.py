"""Mini-batches from seeds, on the loader's threads: sampling, block construction, feature fetch."""

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

from dglx_dist.dataloading.feature_fetch import (
    WINDOW_BYTES,
    Columns,
    EdgesOfBlock,
    SplitColumn,
    fetch_on_access,
    get_edge_ids,
    submit_columns,
)
from dglx_dist.dataloading.kernels import RawBatch, SampleRequest, Schema, ThreadTable
from dglx_dist.dataloading.sampler import BatchSource, DrawSettings, LocalSource, RemoteSource
from dglx_dist.dataloading.step_loader import Maker, StepLoader, run_ahead
from dglx_dist.errors import ConfigError
from dglx_dist.internals.graphs import BlockTypes
from dglx_dist.internals.message_passing import place
from dglx_dist.internals.pytorch import Copy, ids_to_device
from dglx_dist.records import Array, EdgeType, StepShare

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph


@final
class BatchBlockBuilder:
    """Builds the blocks of batches. Thread-safe.

    As with ``dgl.to_block``, every block has all node types on both sides, even those without a node, and all
    edge types in the graph's order; the destinations of a type are the first of its sources.
    """

    def __init__(self, schema: Schema, edge_weights: bool = False) -> None:
        self._schema, self._weighted = schema, edge_weights
        relations = [relation for _, relation, _ in schema.etypes]
        self._sources = schema.source_types.tolist()
        self._destinations = schema.destination_types.tolist()
        self._types = BlockTypes(schema.ntypes, relations, self._sources, self._destinations)

    def blocks(self, batch: RawBatch) -> tuple[dict[str, Tensor], list[DGLBlock]]:
        """Return ({node type: input node ids}, blocks), the input-most first; they share its arrays."""
        all_nodes = torch.from_numpy(batch.nodes)
        nodes = [all_nodes[first:last] for first, last in pairwise(batch.node_starts.tolist())]
        indptr, sources, edge_ids = map(torch.from_numpy, (batch.indptr, batch.sources, batch.edge_ids))
        columns = {dgl.EID: edge_ids}
        if self._weighted:
            columns["edge_weights"] = torch.from_numpy(batch.edge_weights)
        edge_ends, num_relations = batch.edge_ends.tolist(), len(self._sources)
        blocks: list[DGLBlock] = []
        row = 0
        for hop, (num_dst_of, num_src_of) in enumerate(pairwise(batch.node_ends.tolist())):
            edges = []
            ends = edge_ends[hop * num_relations : (hop + 1) * num_relations + 1]
            for relation, (first, last) in enumerate(pairwise(ends)):
                num_src = num_src_of[self._sources[relation]]
                num_dst = num_dst_of[self._destinations[relation]]
                offsets = indptr[row : row + num_dst + 1]
                of_type = {name: values[first:last] for name, values in columns.items()}
                edges.append((num_src, num_dst, offsets, sources[first:last], of_type))
                row += num_dst + 1
            blocks.append(self._types.block(edges, nodes, (num_src_of, num_dst_of)))
        return dict(zip(self._schema.ntypes, nodes, strict=True)), blocks[::-1]


Seeds: TypeAlias = Mapping[str, Array]
"""Node type to (B,) int64 distinct ids, B may be 0; a type without seeds may be missing."""

Excluded: TypeAlias = Mapping[EdgeType, Array]
"""Edge type to (X,) int64 ascending distinct ids of edges that a batch must not draw."""

NodeIds: TypeAlias = Tensor | dict[str, Tensor]
"""(n,) int64 global ids; a dict of them by type when the graph has more than one node type."""

NOTHING_EXCLUDED: Excluded = MappingProxyType({})


@dataclass(kw_only=True, eq=False)
class MiniBatch:
    """One batch on its way through the stages of a loader, and the time it took."""

    seeds: Seeds
    raw: RawBatch | None = None
    """What the kernels drew, until the blocks are built."""
    sources: Mapping[str, Array] = field(default_factory=dict)
    """(n,) int64 distinct input nodes by type, where the kernels drew them."""
    inputs: Mapping[str, Array] = field(default_factory=dict)
    """The same by column."""
    num_bytes: int = 0
    """Memory that the batch takes until its rows are requested."""
    pulled: Callable[[Sequence[DGLBlock]], Sequence[SplitColumn]] | None = None
    """Waits for the requested columns, see :func:`submit_columns`."""
    input_nodes: NodeIds = field(init=False)
    """The sources of the first block."""
    output_nodes: NodeIds = field(init=False)
    """The seeds."""
    blocks: list[DGLBlock] = field(init=False)
    """Layer 1 first."""
    sample_s: float = 0.0
    """Seconds of sampling and building blocks; includes features if one call does both."""
    fetch_s: float = 0.0
    """Seconds of fetching columns."""
    split: Sequence[SplitColumn] = ()
    """Columns that are set when the batch is delivered."""
    arrive: Callable[[], None] | None = None
    """Lets the consumer's stream wait for copies to a device."""

    def move(self, device: torch.device, copy: Copy) -> None:
        """Begin to copy the batch to ``device``; :meth:`finish` sets the rest there."""
        copied = partial(ids_to_device, device=device, copy=copy)
        self.input_nodes = _moved_nodes(self.input_nodes, copied)
        self.output_nodes = _moved_nodes(self.output_nodes, copied)
        self.blocks = [place(block, device, copy=copy) for block in self.blocks]
        self.split = [column.move(copy) for column in self.split]

    def finish(self) -> None:
        """Let the current stream wait for the copies, and set the columns that are partly cached there."""
        if self.arrive is not None:
            self.arrive()
        for column in self.split:
            column.attach(self.blocks)


def _moved_nodes(nodes: NodeIds, copy: Copy) -> NodeIds:
    return copy(nodes) if isinstance(nodes, Tensor) else {ntype: copy(ids) for ntype, ids in nodes.items()}


class NodeMaker(Maker[str, MiniBatch]):
    """The stages of batches of nodes."""

    def __init__(self, g: DistGraph, columns: Columns) -> None:
        self._g, self._columns = g, columns
        self._warned: set[str] = set()

    def close(self) -> None:
        for rows in self.claimed.values():
            rows.release()

    @abstractmethod
    def offline(self) -> NodeMaker: ...

    @abstractmethod
    def sample_blocks(self, batch: MiniBatch, epoch: int, exclude: Excluded, *, step: int) -> None:
        """Sample what is around the seeds of ``batch``, without the edges to ``exclude``."""

    def sample_items(
        self, seeds: Seeds, epoch: int, exclude: Excluded = NOTHING_EXCLUDED, *, step: int
    ) -> MiniBatch:
        batch = MiniBatch(seeds=seeds)
        self.sample_blocks(batch, epoch, exclude, step=step)
        return batch

    def deliver(self, batch: MiniBatch, share: StepShare) -> Any:
        self.finish(batch, share)
        return batch.input_nodes, batch.output_nodes, batch.blocks

    def finish(self, batch: MiniBatch, share: StepShare) -> None:
        """Complete the blocks on the consumer's thread, and stamp them with ``share``."""
        batch.finish()
        fetch_on_access(self._g, batch.blocks, self._warned)
        batch.blocks[-1].step_share = share


@final
class SamplerMaker(NodeMaker):
    """The stages of blocks around nodes by a sampler's own code."""

    def __init__(self, sampler: Any, g: DistGraph, columns: Columns) -> None:
        super().__init__(g, columns)
        self._sampler = sampler

    def sample_blocks(self, batch: MiniBatch, epoch: int, exclude: Excluded, *, step: int) -> None:
        begin = time.perf_counter()
        found = self._sample(_node_ids(batch.seeds, self._g.ntypes), exclude)
        batch.input_nodes, batch.output_nodes, batch.blocks = found
        batch.sample_s = time.perf_counter() - begin

    def fetch(self, batch: MiniBatch) -> None:
        begin = time.perf_counter()
        edges = [get_edge_ids(block) for block in batch.blocks] if self._columns.edges else []
        inputs, targets = self._arrays(batch.input_nodes), self._arrays(batch.output_nodes)
        # Nodes of a user's sampler may be repeated.
        batch.pulled = submit_columns(self._g.kvstore, self._columns, inputs, targets, edges, distinct=False)
        batch.fetch_s = time.perf_counter() - begin

    def build(self, batch: MiniBatch) -> None:
        wait_for_columns(batch)

    def offline(self) -> NoReturn:
        raise ConfigError(
            "draws of the sampler's own code cannot be reproduced by another rank; use "
            "dgl.dataloading.NeighborSampler"
        )

    def _sample(self, seeds: NodeIds, exclude: Excluded) -> Any:
        edges = {etype: torch.from_numpy(ids) for etype, ids in exclude.items() if len(ids)}
        if not edges:
            return self._sampler.sample(self._g, seeds)
        # DGL's samplers take plain ids where there is one edge type.
        excluded = edges if len(self._g.canonical_etypes) > 1 else next(iter(edges.values()))
        return self._sampler.sample(self._g, seeds, exclude_eids=excluded)

    def _arrays(self, nodes: NodeIds) -> dict[str, Array]:
        if isinstance(nodes, Tensor):
            return {self._g.ntypes[0]: nodes.numpy()}
        return {ntype: ids.numpy() for ntype, ids in nodes.items()}


def wait_for_columns(batch: MiniBatch) -> None:
    """Set the requested columns on the blocks of ``batch``."""
    begin = time.perf_counter()
    assert batch.pulled is not None
    batch.split, batch.pulled = batch.pulled(batch.blocks), None
    batch.fetch_s += time.perf_counter() - begin


def unwrap_single_type(nodes: dict[str, Tensor]) -> NodeIds:
    """Return ids as DGL's loaders yield them: without a dict if there is one node type."""
    return next(iter(nodes.values())) if len(nodes) == 1 else nodes


def _node_ids(seeds: Seeds, ntypes: Sequence[str]) -> NodeIds:
    nothing = np.empty(0, np.int64)
    return unwrap_single_type({ntype: torch.from_numpy(seeds.get(ntype, nothing)) for ntype in ntypes})


def count_batch_bytes(nodes: int, offsets: int, edges: int) -> int:
    """Return the bytes of a drawn batch that waits for its rows; an edge has a source and an id."""
    return 8 * (nodes + offsets + 2 * edges)


@final
class KernelMaker(NodeMaker):
    """The stages of blocks around nodes by the compiled kernels."""

    def __init__(self, source: BatchSource, draws: DrawSettings, g: DistGraph, columns: Columns) -> None:
        super().__init__(g, columns)
        self._source, self._draws = source, draws
        self._source_of: Callable[[int], BatchSource] = lambda _step: source
        self._schema = draws.schema
        weighted = draws.by_source is not None and draws.by_source.unequal
        self._builder = BatchBlockBuilder(draws.schema, weighted)
        # One for each thread that makes a batch.
        self._idle: queue.SimpleQueue[ThreadTable] = queue.SimpleQueue()

    def offline(self) -> KernelMaker:
        if not isinstance(self._source, LocalSource):
            raise ConfigError(
                "this server has only a part of the graph's structure; open the graph with "
                "structure='replicated'"
            )
        return KernelMaker(self._source, self._draws, self._g, Columns())

    def sampling_signature(self) -> str:
        return self._draws.signature()

    def begin(
        self, loader: StepLoader[str, MiniBatch, Any], epoch: int, steps: Callable[[], Iterator[int]]
    ) -> KernelMaker:
        begun = cast("KernelMaker", super().begin(loader, epoch, steps))
        if isinstance(self._source, RemoteSource) and self._g.kvstore.looks_ahead:
            begun._source_of = begun._draw_jointly(self._source, steps())
        return begun

    def claim(self) -> None:
        self.claimed = self._columns.claim(self._g.kvstore)

    def _draw_jointly(self, source: RemoteSource, steps: Iterator[int]) -> Callable[[int], RemoteSource]:
        """Return the source of each step, which has drawn several batches at a time."""
        lock, most = threading.Lock(), 1
        # Without a reference to the maker, with which the thread of draws shall end.
        request, get_items, epoch = self._draws.request, self.get_items, self.epoch
        held: dict[int, RemoteSource] = {}

        def groups() -> Iterator[dict[int, SampleRequest]]:
            group: dict[int, SampleRequest] = {}
            for step in steps:
                new = request(get_items(step), epoch, NOTHING_EXCLUDED, step)
                if len(group) >= most or any((one.streams != new.streams).any() for one in group.values()):
                    yield group
                    group = {}
                group[step] = new
            if group:
                yield group

        def draw(group: Mapping[int, SampleRequest]) -> dict[int, RemoteSource]:
            nonlocal most
            joint = source.draw_jointly([*group.values()])
            num_edges = sum(len(edges.sources) for hop in joint.known for _, edges in hop)
            most = max(1, int(len(group) * min(4, WINDOW_BYTES / 4 / count_batch_bytes(0, 1, num_edges))))
            return dict.fromkeys(group, joint)

        # The next ones are drawn meanwhile, on a thread that ends with the maker.
        drawn = run_ahead(draw, groups(), depth=1, num_threads=min(1, self.loader.num_threads))

        def source_of(step: int) -> RemoteSource:
            with lock:
                while step not in held and (more := next(drawn, None)) is not None:
                    held.update(more)
                # After an error, or where the end has moved, a batch is drawn by itself.
                return held.pop(step, source)

        return source_of

    def sample_blocks(self, batch: MiniBatch, epoch: int, exclude: Excluded, *, step: int) -> None:
        begin = time.perf_counter()
        request = self._draws.request(batch.seeds, epoch, exclude, step)
        source = self._source_of(step)
        try:
            table = self._idle.get_nowait()
        except queue.Empty:
            table = ThreadTable(sum(self._schema.num_nodes))
        try:
            raw = batch.raw = source.sample(request, exclude, table)
        finally:
            self._idle.put(table)
        batch.sources = {
            ntype: raw.nodes[raw.node_starts[number] : raw.node_starts[number + 1]]
            for number, ntype in enumerate(self._schema.ntypes)
        }
        batch.inputs = self._columns.group_inputs(batch.sources)
        batch.num_bytes = count_batch_bytes(len(raw.nodes), len(raw.indptr), len(raw.sources))
        batch.sample_s = time.perf_counter() - begin

    def fetch(self, batch: MiniBatch) -> None:
        begin, store, raw = time.perf_counter(), self._g.kvstore, batch.raw
        assert raw is not None
        edges = self._edges(raw) if self._columns.edges else []
        batch.pulled = submit_columns(
            store, self._columns, batch.sources, batch.seeds, edges, claimed=self.claimed
        )
        batch.fetch_s = time.perf_counter() - begin

    def build(self, batch: MiniBatch) -> None:
        begin = time.perf_counter()
        raw, batch.raw = batch.raw, None
        assert raw is not None
        nodes, batch.blocks = self._builder.blocks(raw)
        batch.input_nodes = unwrap_single_type(nodes)
        batch.output_nodes = _node_ids(batch.seeds, self._schema.ntypes)
        batch.sample_s += time.perf_counter() - begin
        wait_for_columns(batch)

    def _edges(self, batch: RawBatch) -> Sequence[EdgesOfBlock]:
        ends, num_relations = batch.edge_ends, len(self._schema.etypes)
        return [
            {
                etype: batch.edge_ids[ends[first + number] : ends[first + number + 1]]
                for number, etype in enumerate(self._schema.etypes)
            }
            for first in range(0, len(ends) - 1, num_relations)
        ][::-1]
