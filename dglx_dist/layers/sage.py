"""GraphSAGE's stages, for ``dgl.nn.SAGEConv`` with the aggregators mean and gcn."""

from __future__ import annotations

from dgl.heterograph import DGLBlock
from dgl.nn import SAGEConv
from torch import Tensor
from torch.nn import functional

from dglx_dist.errors import ConfigError
from dglx_dist.layers.aggregate import mean_in_edges, narrows_first, sum_in_edges
from dglx_dist.layers.staged import Staged, StageInput, Sums

_SPLIT = ("mean", "gcn")


class SageStages(Staged):
    """``SAGEConv`` as stages; has its parameters under its names.

    Args:
        conv: What to split; its parameters are shared, not copied.

    Raises:
        ConfigError: its aggregator is not a sum of columns.
    """

    def __init__(self, conv: SAGEConv) -> None:
        super().__init__()
        self._aggregator = conv._aggre_type
        if self._aggregator not in _SPLIT:
            raise ConfigError(_reason(self._aggregator))
        self._feat_drop = conv.feat_drop.p
        self.fc_neigh = conv.fc_neigh
        self.activation, self.norm = conv.activation, conv.norm
        self.cut = {"fc_neigh.weight": 1}
        if self._aggregator == "mean":
            self.fc_self = conv.fc_self
            self.cut["fc_self.weight"] = 1
        else:
            self.bias = conv.bias

    def transform(self, given: StageInput) -> tuple[Tensor, Tensor]:
        """Return the source rows, projected where that makes them narrower, and the destinations' inputs."""
        x = self.drop_inputs(given, self._feat_drop)
        rows = functional.linear(x, self.fc_neigh.weight) if self._narrows_first(given) else x
        return rows, x[: given.block.num_dst_nodes()]

    def gather(self, given: StageInput, transformed: tuple[Tensor, Tensor], scattered: Sums) -> Sums:
        """Return one (D1, H): mean of the neighbours W_neigh + self W_self, added before the sum."""
        block, weight, (rows, own) = given.block, given.edges.get("edge_weight"), transformed
        if self._aggregator == "mean":
            around = self._projected(given, mean_in_edges(block, rows, weight))
            return (around + functional.linear(own, self.fc_self.weight),)
        total = sum_in_edges(block, rows, weight) + rows[: block.num_dst_nodes()]
        return (self._projected(given, total / (block.in_degrees().to(total).unsqueeze(-1) + 1)),)

    def apply_nodes(self, block: DGLBlock, gathered: Sums) -> Tensor:
        """Add the bias; then activation and norm, in DGL's order."""
        (out,) = gathered
        bias = self.fc_self.bias if self._aggregator == "mean" else self.bias
        out = out if bias is None else out + bias
        out = out if self.activation is None else self.activation(out)
        return out if self.norm is None else self.norm(out)

    def _projected(self, given: StageInput, rows: Tensor) -> Tensor:
        return rows if self._narrows_first(given) else functional.linear(rows, self.fc_neigh.weight)

    def _narrows_first(self, given: StageInput) -> bool:
        width, columns = self.fc_neigh.weight.shape
        return narrows_first(given.block, columns, width)


def _reason(aggregator: str) -> str:
    by_rows = "sync='inputs', which sends its projected rows, " if aggregator == "pool" else ""
    return (
        f"SAGEConv with aggregator {aggregator!r} has a nonlinear step before its sum, so it cannot be split "
        f"by input columns; use {' or '.join(_SPLIT)}, {by_rows}or strategy='data_parallel'"
    )
