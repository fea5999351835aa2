"""The stages of a graph convolution, for ``dgl.nn.GraphConv`` with every norm and edge weights."""

from __future__ import annotations

from dgl.heterograph import DGLBlock
from dgl.nn import GraphConv
from torch import Tensor

from dglx_dist.errors import ConfigError
from dglx_dist.layers.aggregate import narrows_first, refuse_nodes_without_edges, sum_in_edges
from dglx_dist.layers.staged import Staged, StageInput, Sums

_POWER = {"both": -0.5, "left": -1.0, "right": -1.0}


class GraphConvStages(Staged):
    """``GraphConv`` as stages; has its parameters under its names.

    Args:
        conv: What to split; its parameters are shared, not copied.

    Raises:
        ConfigError: it has no weight: its output has the input's columns, so there is nothing to add up.
    """

    def __init__(self, conv: GraphConv) -> None:
        super().__init__()
        if conv.weight is None:
            raise ConfigError(
                "GraphConv(weight=False) keeps the input's columns, so the first layer has no sum over them; "
                "let it have its weight, or use strategy='data_parallel'"
            )
        self.weight, self.bias = conv.weight, conv.bias
        self.cut = {"weight": 0}
        self._norm, self._activation = conv._norm, conv._activation
        self._allow_zero_in_degree = conv._allow_zero_in_degree

    def transform(self, given: StageInput) -> Tensor:
        """Scale by out-degrees (norms left and both); project, where that is cheaper than after the sum."""
        rows = given.x
        if self._norm in ("left", "both"):
            degrees = given.block.out_degrees().to(rows).clamp(min=1)
            rows = rows * degrees.pow(_POWER[self._norm]).unsqueeze(-1)
        return rows @ self.weight if narrows_first(given.block, *self.weight.shape) else rows

    def gather(self, given: StageInput, transformed: Tensor, scattered: Sums) -> Sums:
        """Return one (D1, H): the weighted sum over in-edges, projected."""
        if not self._allow_zero_in_degree:
            refuse_nodes_without_edges(given.block)
        total = sum_in_edges(given.block, transformed, given.edges.get("edge_weight"))
        return (total if narrows_first(given.block, *self.weight.shape) else total @ self.weight,)

    def apply_nodes(self, block: DGLBlock, gathered: Sums) -> Tensor:
        """Scale by in-degrees (norms right and both), add the bias, activate."""
        (out,) = gathered
        if self._norm in ("right", "both"):
            degrees = block.in_degrees().to(out).clamp(min=1)
            out = out * degrees.pow(_POWER[self._norm]).unsqueeze(-1)
        out = out if self.bias is None else out + self.bias
        return out if self._activation is None else self._activation(out)
