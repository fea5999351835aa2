"""The one place that builds blocks (message flow graphs) from compressed columns."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple, final

import dgl
import torch
from dgl import graph_index, heterograph_index, utils
from dgl.frame import Frame
from dgl.heterograph import DGLBlock
from dgl.heterograph_index import HeteroGraphIndex
from torch import Tensor

from dglx_dist.records import EDGE_TYPE, EdgeType
from dglx_dist.sampling.kernel import RawBatch
from dglx_dist.sampling.relational import TypedBatch
from dglx_dist.sampling.relations import Schema


@final
class BlockBuilder:
    """Builds blocks of one edge type; any thread may call it.

    Args:
        etype: Canonical edge type of the blocks.
    """

    def __init__(self, etype: EdgeType = EDGE_TYPE) -> None:
        self._etype = etype
        self._positions = _Positions()

    def block(self, indptr: Tensor, sources: Tensor, src_ids: Tensor, edge_ids: Tensor) -> DGLBlock:
        """Build a block; the arrays are shared, not copied.

        Args:
            indptr: (D + 1,) int32 or int64, in-edges of each of the D >= 0 destinations.
            sources: (E,) of the dtype of ``indptr``, rows of ``src_ids``.
            src_ids: (num_src,) int64 global ids; the first D are the destinations.
            edge_ids: (E,) global edge ids.

        Returns:
            The block, with ``dgl.NID`` on both sides and ``dgl.EID`` on the edges.
        """
        num_src, num_dst, num_edges = len(src_ids), len(indptr) - 1, len(sources)
        index = self._positions.bipartite(num_src, num_dst, indptr, sources)
        nodes = [
            Frame({dgl.NID: src_ids}, num_rows=num_src),
            Frame({dgl.NID: src_ids[:num_dst]}, num_rows=num_dst),
        ]
        edges = [Frame({dgl.EID: edge_ids}, num_rows=num_edges)]
        source, relation, destination = self._etype
        return DGLBlock(index, ([source], [destination]), [relation], nodes, edges)

    def bare(self, indptr: Tensor, sources: Tensor, num_src: int) -> DGLBlock:
        """Build a block as :meth:`block` does, without any data."""
        num_dst, num_edges = len(indptr) - 1, len(sources)
        index = self._positions.bipartite(num_src, num_dst, indptr, sources)
        nodes = [Frame(num_rows=num_src), Frame(num_rows=num_dst)]
        source, relation, destination = self._etype
        return DGLBlock(index, ([source], [destination]), [relation], nodes, [Frame(num_rows=num_edges)])

    def blocks(self, batch: RawBatch) -> tuple[Tensor, list[DGLBlock]]:
        """Return (input node ids, blocks), the input-most block first as a model consumes them.

        Args:
            batch: Its arrays become the blocks' and must not be written afterwards.
        """
        nodes = torch.from_numpy(batch.nodes)
        indptr, sources = torch.from_numpy(batch.indptr), torch.from_numpy(batch.sources)
        edge_ids = torch.from_numpy(batch.edge_ids)
        node_ends, edge_ends = batch.node_ends.tolist(), batch.edge_ends.tolist()
        blocks: list[DGLBlock] = []
        row = 0
        for hop, num_dst in enumerate(node_ends[:-1]):
            edges = slice(edge_ends[hop], edge_ends[hop + 1])
            rows = indptr[row : row + num_dst + 1]
            blocks.append(self.block(rows, sources[edges], nodes[: node_ends[hop + 1]], edge_ids[edges]))
            row += num_dst + 1
        return nodes, blocks[::-1]


@final
class TypedBlockBuilder:
    """Builds blocks of several node and edge types; any thread may call it.

    As of ``dgl.to_block``, every block has all node types on both sides, those without a node as well, and
    all edge types in the graph's order; the destinations of a type are the first of its sources.

    Args:
        schema: The graph's types.
    """

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._relations = [relation for _, relation, _ in schema.etypes]
        self._sources = schema.source_types.tolist()
        self._destinations = schema.destination_types.tolist()
        self._num_types = len(schema.ntypes)
        targets = [self._num_types + node_type for node_type in self._destinations]
        self._metagraph = graph_index.from_coo(2 * self._num_types, self._sources, targets, True)
        self._positions = _Positions()

    def blocks(self, batch: TypedBatch) -> tuple[dict[str, Tensor], list[DGLBlock]]:
        """Return ({node type: input node ids}, blocks), the input-most block first.

        Args:
            batch: Its arrays become the blocks' and must not be written afterwards.
        """
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
        # Lists of its own, because DGL keeps those it is given.
        ntypes = list(self._schema.ntypes), list(self._schema.ntypes)
        return DGLBlock(index, ntypes, list(self._relations), node_frames, edge_frames)


class _Sizes(NamedTuple):
    """Of one block: nodes by type on either side, and where the edges of each type end."""

    sources: list[int]
    targets: list[int]
    edge_ends: list[int]


class _Positions:
    """The numbers 0, 1, ... that all blocks share as positions of their edges."""

    def __init__(self) -> None:
        self._numbers: dict[torch.dtype, Tensor] = {}

    def bipartite(self, num_src: int, num_dst: int, indptr: Tensor, sources: Tensor) -> HeteroGraphIndex:
        """Return the index of one edge type, as :meth:`BlockBuilder.block` takes it."""
        # Without explicit edge positions, DGL's SpMM kernels that read edge data refuse the block.
        order = self._first(len(sources), indptr.dtype)
        return heterograph_index.create_unitgraph_from_csr(
            2, num_src, num_dst, indptr, sources, order, ["coo", "csr", "csc"], transpose=True
        )

    def _first(self, count: int, dtype: torch.dtype) -> Tensor:
        numbers = self._numbers.get(dtype)
        if numbers is None or len(numbers) < count:
            numbers = torch.arange(max(count, 1) * 3 // 2, dtype=dtype)
            self._numbers[dtype] = numbers
        return numbers[:count]
