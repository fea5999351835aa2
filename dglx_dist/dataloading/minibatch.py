"""Mini-batches from seeds, on the loader's threads: sampling, block construction, feature fetch."""

from __future__ import annotations

import queue
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple, TypeAlias, final

import dgl
import numpy as np
import torch
from dgl import graph_index, heterograph_index, utils
from dgl.frame import Frame
from dgl.heterograph import DGLBlock
from dgl.heterograph_index import HeteroGraphIndex
from torch import Tensor

from dglx_dist.dataloading.feature_fetch import Columns, EdgesOfBlock, Fetch, edges_of
from dglx_dist.dataloading.kernels import RawBatch, Schema, Workspace
from dglx_dist.dataloading.sampler import BatchSource, Draws
from dglx_dist.errors import ConfigError
from dglx_dist.graph.kvstore import KVStore
from dglx_dist.records import EDGE_TYPE, Array, EdgeType


@final
class BlockBuilder:
    """Builds blocks of one edge type. Thread-safe."""

    def __init__(self, etype: EdgeType = EDGE_TYPE) -> None:
        self._etype = etype
        self._positions = _EdgePositions()

    def block(self, indptr: Tensor, sources: Tensor, num_src: int) -> DGLBlock:
        """Build a block without data that shares the given arrays.

        Args:
            indptr: (D + 1,) int32 or int64, CSC offsets of the D >= 0 destinations, the first sources.
            sources: (E,) of the dtype of ``indptr``, in [0, ``num_src``).
            num_src: Number of sources.
        """
        num_dst, num_edges = len(indptr) - 1, len(sources)
        index = self._positions.bipartite(num_src, num_dst, indptr, sources)
        nodes = [Frame(num_rows=num_src), Frame(num_rows=num_dst)]
        source, relation, destination = self._etype
        return DGLBlock(index, ([source], [destination]), [relation], nodes, [Frame(num_rows=num_edges)])


@final
class BatchBlockBuilder:
    """Builds the blocks of batches. Thread-safe.

    As with ``dgl.to_block``, every block has all node types on both sides, even those without a node, and all
    edge types in the graph's order; the destinations of a type are the first of its sources.
    """

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._relations = [relation for _, relation, _ in schema.etypes]
        self._sources = schema.source_types.tolist()
        self._destinations = schema.destination_types.tolist()
        self._num_types = len(schema.ntypes)
        targets = [self._num_types + node_type for node_type in self._destinations]
        self._metagraph = graph_index.from_coo(2 * self._num_types, self._sources, targets, True)
        self._positions = _EdgePositions()

    def blocks(self, batch: RawBatch) -> tuple[dict[str, Tensor], list[DGLBlock]]:
        """Return ({node type: input node ids}, blocks), the input-most first; they share its arrays."""
        all_nodes, starts = torch.from_numpy(batch.nodes), batch.node_starts.tolist()
        nodes = [all_nodes[first:last] for first, last in pairwise(starts)]
        arrays = [torch.from_numpy(array) for array in (batch.indptr, batch.sources, batch.edge_ids)]
        node_ends, edge_ends = batch.node_ends.tolist(), batch.edge_ends.tolist()
        blocks: list[DGLBlock] = []
        row, num_relations = 0, len(self._relations)
        for hop, (targets, sources) in enumerate(pairwise(node_ends)):
            ends = edge_ends[hop * num_relations : (hop + 1) * num_relations + 1]
            sizes = _Sizes(sources, targets, ends)
            blocks.append(self._block(nodes, sizes, row, arrays))
            row += sum(targets[node_type] + 1 for node_type in self._destinations)
        return dict(zip(self._schema.ntypes, nodes, strict=True)), blocks[::-1]

    def _block(self, nodes: list[Tensor], sizes: _Sizes, row: int, arrays: list[Tensor]) -> DGLBlock:
        indptr, sources, edge_ids = arrays
        indices, edge_frames = [], []
        for relation, (first, last) in enumerate(pairwise(sizes.edge_ends)):
            num_src = sizes.sources[self._sources[relation]]
            num_dst = sizes.targets[self._destinations[relation]]
            rows = indptr[row : row + num_dst + 1]
            indices.append(self._positions.bipartite(num_src, num_dst, rows, sources[first:last]))
            edge_frames.append(Frame({dgl.EID: edge_ids[first:last]}, num_rows=last - first))
            row += num_dst + 1
        index = heterograph_index.create_heterograph_from_relations(
            self._metagraph, indices, utils.toindex(sizes.sources + sizes.targets, "int64")
        )
        node_frames = [
            Frame({dgl.NID: ids[:count]}, num_rows=count)
            for counts in (sizes.sources, sizes.targets)
            for ids, count in zip(nodes, counts, strict=True)
        ]
        # Copies, because DGL keeps the lists.
        ntypes = list(self._schema.ntypes), list(self._schema.ntypes)
        return DGLBlock(index, ntypes, list(self._relations), node_frames, edge_frames)


class _Sizes(NamedTuple):
    """Of one block: nodes by type on either side, and the edge offsets of the types."""

    sources: list[int]
    targets: list[int]
    edge_ends: list[int]


class _EdgePositions:
    """The range 0, 1, ... by dtype, shared by all blocks as edge positions."""

    def __init__(self) -> None:
        self._ranges: dict[torch.dtype, Tensor] = {}

    def bipartite(self, num_src: int, num_dst: int, indptr: Tensor, sources: Tensor) -> HeteroGraphIndex:
        # Without explicit edge positions, DGL's SpMM kernels that read edge data reject the block.
        positions = self._range(len(sources), indptr.dtype)
        return heterograph_index.create_unitgraph_from_csr(
            2, num_src, num_dst, indptr, sources, positions, ["coo", "csr", "csc"], transpose=True
        )

    def _range(self, count: int, dtype: torch.dtype) -> Tensor:
        positions = self._ranges.get(dtype)
        if positions is None or len(positions) < count:
            positions = torch.arange(max(count, 1) * 3 // 2, dtype=dtype)
            self._ranges[dtype] = positions
        return positions[:count]


Seeds: TypeAlias = Mapping[str, Array]
"""Node type to (B,) int64 distinct ids, B may be 0; a type without seeds may be missing."""

Excluded: TypeAlias = Mapping[EdgeType, Array]
"""Edge type to (X,) int64 ascending distinct ids of edges that a batch must not draw."""

NodeIds: TypeAlias = Tensor | dict[str, Tensor]
"""(n,) int64 global ids; a dict of them by type when the graph has more than one node type."""

SampleBlocks: TypeAlias = Callable[[NodeIds, Excluded], tuple[NodeIds, NodeIds, list[DGLBlock]]]
"""Seeds and excluded edges to input nodes, output nodes and blocks."""

NOTHING_EXCLUDED: Excluded = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class MiniBatch:
    """One batch of a node loader, and the time it took."""

    input_nodes: NodeIds
    """The sources of the first block."""
    output_nodes: NodeIds
    """The seeds."""
    blocks: list[DGLBlock]
    """Layer 1 first."""
    sample_s: float
    """Seconds of sampling and building blocks; includes features if one call does both."""
    fetch_s: float
    """Seconds of fetching columns."""


class BatchMaker(ABC):
    """The :class:`dglx_dist.dataloading.step_loader.Maker` of blocks around nodes."""

    @abstractmethod
    def make(self, seeds: Seeds, epoch: int, exclude: Excluded = NOTHING_EXCLUDED) -> MiniBatch:
        """Make the batch of ``seeds`` in ``epoch``, without the edges ``exclude``.

        Raises:
            ConfigError: a seed is repeated.
            PeerError: another rank is dead or silent.
        """

    def offline(self) -> BatchMaker:
        raise ConfigError(
            "draws of the sampler's own code cannot be reproduced by another rank; use "
            "dgl.dataloading.NeighborSampler"
        )

    def sampling_signature(self) -> str:
        return ""


@final
class SamplerMaker(BatchMaker):
    """Makes batches with a sampler's own code."""

    def __init__(self, sample: SampleBlocks, store: KVStore, columns: Columns, ntypes: Sequence[str]) -> None:
        self._sample, self._store, self._columns, self._ntypes = sample, store, columns, tuple(ntypes)

    def make(self, seeds: Seeds, epoch: int, exclude: Excluded = NOTHING_EXCLUDED) -> MiniBatch:
        begin = time.perf_counter()
        targets = {ntype: torch.from_numpy(seeds.get(ntype, np.empty(0, np.int64))) for ntype in self._ntypes}
        input_nodes, output_nodes, blocks = self._sample(ids_by_type(targets), exclude)
        sampled = time.perf_counter()
        # Nodes of a user's sampler may be repeated.
        fetch = Fetch(self._store, self._columns, distinct=False)
        edges = [edges_of(block) for block in blocks] if self._columns.edges else []
        fetch.start(self._arrays(input_nodes), self._arrays(output_nodes), edges)
        fetch.finish(blocks)
        end = time.perf_counter()
        return MiniBatch(
            input_nodes=input_nodes,
            output_nodes=output_nodes,
            blocks=blocks,
            sample_s=sampled - begin,
            fetch_s=end - sampled,
        )

    def _arrays(self, nodes: NodeIds) -> dict[str, Array]:
        if isinstance(nodes, Tensor):
            return {self._ntypes[0]: nodes.numpy()}
        return {ntype: ids.numpy() for ntype, ids in nodes.items()}


@final
class Workspaces:
    """The workspaces of a loader, one for each thread that makes a batch."""

    def __init__(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes
        self._idle: queue.SimpleQueue[Workspace] = queue.SimpleQueue()

    @contextmanager
    def borrowed(self) -> Iterator[Workspace]:
        """Yield a workspace for the calling thread."""
        try:
            workspace = self._idle.get_nowait()
        except queue.Empty:
            workspace = Workspace(self._num_nodes)
        try:
            yield workspace
        finally:
            self._idle.put(workspace)


def ids_by_type(nodes: dict[str, Tensor]) -> NodeIds:
    """Return ids as DGL's loaders yield them: without a dict if there is one node type."""
    return next(iter(nodes.values())) if len(nodes) == 1 else nodes


@final
class KernelMaker(BatchMaker):
    """Makes batches with the compiled kernels."""

    def __init__(self, source: BatchSource, draws: Draws, store: KVStore, columns: Columns) -> None:
        self._source, self._draws, self._store, self._columns = source, draws, store, columns
        self._schema = draws.schema
        self._builder = BatchBlockBuilder(draws.schema)
        self._workspaces = Workspaces(sum(draws.schema.num_nodes))

    def offline(self) -> BatchMaker:
        if not self._source.is_whole:
            raise ConfigError(
                "this server has only a part of the graph's structure; open the graph with "
                "structure='replicated'"
            )
        return KernelMaker(self._source, self._draws, self._store, Columns())

    def sampling_signature(self) -> str:
        return self._draws.signature()

    def make(self, seeds: Seeds, epoch: int, exclude: Excluded = NOTHING_EXCLUDED) -> MiniBatch:
        begin = time.perf_counter()
        request = self._draws.request(seeds, epoch, exclude)
        with self._workspaces.borrowed() as workspace:
            batch = self._source.sample(request, exclude, workspace)
        fetch = Fetch(self._store, self._columns)
        sampled = time.perf_counter()
        inputs = {
            ntype: batch.nodes[batch.node_starts[number] : batch.node_starts[number + 1]]
            for number, ntype in enumerate(self._schema.ntypes)
        }
        fetch.start(inputs, seeds, self._edges(batch) if self._columns.edges else [])
        building = time.perf_counter()
        nodes, blocks = self._builder.blocks(batch)
        built = time.perf_counter()
        fetch.finish(blocks)
        targets = {
            ntype: torch.from_numpy(seeds.get(ntype, np.empty(0, np.int64))) for ntype in self._schema.ntypes
        }
        end = time.perf_counter()
        return MiniBatch(
            input_nodes=ids_by_type(nodes),
            output_nodes=ids_by_type(targets),
            blocks=blocks,
            sample_s=(sampled - begin) + (built - building),
            fetch_s=(building - sampled) + (end - built),
        )

    def _edges(self, batch: RawBatch) -> Sequence[EdgesOfBlock]:
        ends, num_relations = batch.edge_ends, len(self._schema.etypes)
        return [
            {
                etype: batch.edge_ids[ends[first + number] : ends[first + number + 1]]
                for number, etype in enumerate(self._schema.etypes)
            }
            for first in range(0, len(ends) - 1, num_relations)
        ][::-1]
