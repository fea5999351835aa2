"""The stages of a simplified graph convolution of one hop, for ``dgl.nn.SGConv``."""

from __future__ import annotations

from typing import final

from dgl.heterograph import DGLBlock
from dgl.nn import EdgeWeightNorm, SGConv
from torch import Tensor
from torch.nn import functional

from dglx_dist.errors import ConfigError
from dglx_dist.layers.aggregate import narrows_first, refuse_nodes_without_edges, sum_in_edges
from dglx_dist.layers.staged import Staged, StageInput, Sums


@final
class SgcStages(Staged):
    """``SGConv`` with k=1 as stages; has its parameters under its names.

    DGL's own runs on whole graphs only: on a block it fails for every k above 0. The stages give the same on
    a whole graph, and on a block what DGL's symmetric norm of edge weights means there: an edge counts
    ``w / sqrt(out-weight of its source * in-weight of its destination)``, weights inside the block, 1 each
    when none are given. More hops are more layers, one block each; SGC of K layers is this one and then
    ``GraphConv(weight=False)``, for the linear map may as well come first.

    Args:
        conv: What to split; its parameters are shared, not copied.

    Raises:
        ConfigError: it has several hops, a norm before its weights, or keeps its first result.
    """

    def __init__(self, conv: SGConv) -> None:
        super().__init__()
        _check(conv)
        self.fc = conv.fc
        self.cut = {"fc.weight": 1}
        self._allow_zero_in_degree = conv._allow_zero_in_degree

    def transform(self, given: StageInput) -> Tensor:
        """Scale by the sources' degrees, if edges have no weights; project, if cheaper now than later."""
        rows = given.x
        if "edge_weight" not in given.edges:
            block = given.block
            degrees = block.out_degrees() if block.is_block else block.in_degrees()
            rows = rows * degrees.to(rows).clamp(min=1).rsqrt().unsqueeze(-1)
        return functional.linear(rows, self.fc.weight) if self._narrows_first(given.block) else rows

    def gather(self, given: StageInput, transformed: Tensor, scattered: Sums) -> Sums:
        """Return one (D1, H): the normalized sum over in-edges, projected."""
        if not self._allow_zero_in_degree:
            refuse_nodes_without_edges(given.block)
        weight = given.edges.get("edge_weight")
        if weight is not None:
            total = sum_in_edges(given.block, transformed, EdgeWeightNorm("both")(given.block, weight))
        else:
            degrees = given.block.in_degrees().to(transformed).clamp(min=1)
            total = sum_in_edges(given.block, transformed) * degrees.rsqrt().unsqueeze(-1)
        return (total if self._narrows_first(given.block) else functional.linear(total, self.fc.weight),)

    def apply_nodes(self, block: DGLBlock, gathered: Sums) -> Tensor:
        """Add the bias."""
        (out,) = gathered
        return out if self.fc.bias is None else out + self.fc.bias

    def _narrows_first(self, block: DGLBlock) -> bool:
        width, columns = self.fc.weight.shape
        return narrows_first(block, columns, width)


def _check(conv: SGConv) -> None:
    if conv._k != 1:
        raise ConfigError(
            f"SGConv(k={conv._k}) goes {conv._k} hops, and a block is one: use k=1 in the first layer and "
            "GraphConv(weight=False) for each further hop. DGL's SGConv runs on no block, so it does not "
            "train under strategy='data_parallel' either"
        )
    if conv._cached or conv.norm is not None:
        raise ConfigError(
            f"SGConv(cached={conv._cached}, norm={conv.norm}) keeps the first batch's result, or normalizes "
            "whole rows before its weights; use cached=False and norm=None, or normalize the features with "
            "torch.nn.LayerNorm, or use strategy='data_parallel' with another convolution"
        )
