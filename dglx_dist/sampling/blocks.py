"""The one place that builds blocks (message flow graphs) from compressed columns."""

from __future__ import annotations

from typing import final

import dgl
import torch
from dgl import heterograph_index
from dgl.frame import Frame
from dgl.heterograph import DGLBlock
from torch import Tensor

from dglx_dist.records import EDGE_TYPE, EdgeType
from dglx_dist.sampling.kernel import RawBatch


@final
class BlockBuilder:
    """Builds blocks of one edge type; any thread may call it.

    Args:
        etype: Canonical edge type of the blocks.
    """

    def __init__(self, etype: EdgeType = EDGE_TYPE) -> None:
        self._etype = etype
        self._identity: dict[torch.dtype, Tensor] = {}

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
        order = self._first_numbers(num_edges, indptr.dtype)
        index = heterograph_index.create_unitgraph_from_csr(
            2, num_src, num_dst, indptr, sources, order, ["coo", "csr", "csc"], transpose=True
        )
        nodes = [
            Frame({dgl.NID: src_ids}, num_rows=num_src),
            Frame({dgl.NID: src_ids[:num_dst]}, num_rows=num_dst),
        ]
        edges = [Frame({dgl.EID: edge_ids}, num_rows=num_edges)]
        source, relation, destination = self._etype
        return DGLBlock(index, ([source], [destination]), [relation], nodes, edges)

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

    def _first_numbers(self, count: int, dtype: torch.dtype) -> Tensor:
        """Return 0, 1, ... count - 1, shared by all blocks."""
        # Without explicit edge positions, DGL's SpMM kernels that read edge data refuse the block.
        numbers = self._identity.get(dtype)
        if numbers is None or len(numbers) < count:
            numbers = torch.arange(max(count, 1) * 3 // 2, dtype=dtype)
            self._identity[dtype] = numbers
        return numbers[:count]
