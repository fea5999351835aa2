"""GraphConv with the symmetric norm of the whole graph, as stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias, final

import dgl
import torch
from dgl.heterograph import DGLBlock
from torch import Tensor

from dglx_dist.layers.aggregate import narrows_first, sum_in_edges
from dglx_dist.layers.staged import Staged, StageInput, Sums
from dglx_dist.strategies.bounded.declared import DeclaredStage

if TYPE_CHECKING:
    from dglx_dist.graph import DistGraph

Degrees: TypeAlias = Callable[[DGLBlock], tuple[Tensor, Tensor]]
"""A block to the degrees in the whole graph: in-degrees of its destinations, out-degrees of its sources."""

_NORM = "symmetric_norm"


@final
class SymmetricConv(Staged):
    """GraphConv with Kipf's symmetric norm, taken from the degrees of the whole graph.

    ``GraphConv(norm="both")`` on a block divides by the degrees inside the block, so its result depends on
    how seeds are cut into batches. Here a destination v of global in-degree d_v and source u of out-degree
    o_u get ``sqrt(d_v) / (k_v sqrt(o_u))`` per edge, k_v being the edges that were drawn: the exact norm
    with the full neighbourhood, and its unbiased estimate with a sample. A degree of 0 counts as 1.

    Blocks carry ``dgl.NID`` on both sides. Where the layer is split, their owner computes the norm of each
    edge, and the parts get it.
    """

    edge_arguments = ()

    def __init__(self, in_dim: int, out_dim: int, graph: DistGraph) -> None:
        super().__init__()
        self.conv = dgl.nn.GraphConv(in_dim, out_dim, norm="none", allow_zero_in_degree=True)
        self.cut = {"conv.weight": 0}
        # A function, which a copy of the layer shares: a copy must not copy the graph.
        self._degrees = _degrees_of(graph)

    def own_edges(self, block: DGLBlock) -> dict[str, Tensor]:
        """Return (E1,), the norm of each edge."""
        d, o = (one.clamp(min=1).to(self.conv.weight.dtype) for one in self._degrees(block))
        k = block.in_degrees().clamp(min=1).to(d)
        source, destination = (ends.long() for ends in block.edges())
        return {_NORM: (d.sqrt() / k)[destination] * o.rsqrt()[source]}

    def transform(self, given: StageInput) -> Tensor:
        """Project the source rows, where that is cheaper than after the sum."""
        first = narrows_first(given.block, *self.conv.weight.shape)
        return given.x @ self.conv.weight if first else given.x

    def gather(self, given: StageInput, transformed: Tensor, scattered: Sums) -> Sums:
        """Return one (D1, H): the normalized sum over in-edges, projected."""
        total = sum_in_edges(given.block, transformed, given.edges[_NORM].to(transformed))
        first = narrows_first(given.block, *self.conv.weight.shape)
        return (total if first else total @ self.conv.weight,)

    def apply_nodes(self, block: DGLBlock, gathered: Sums) -> Tensor:
        """Add the bias."""
        return gathered[0] + self.conv.bias

    def vertex_stage(self) -> DeclaredStage:
        """Return what strategy ``lambda`` runs on workers in its place."""
        wide, narrow = self.conv.weight.shape
        return DeclaredStage(
            stage="dense",
            config={"in": wide, "out": narrow, "bias": True},
            weights=("conv.weight", "conv.bias"),
            around="both",
            depends_on_the_graph=True,
            takes_activation=True,
        )


def _degrees_of(graph: DistGraph) -> Degrees:
    def degrees(block: DGLBlock) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            return graph.in_degrees(block.dstdata[dgl.NID]), graph.out_degrees(block.srcdata[dgl.NID])

    return degrees
