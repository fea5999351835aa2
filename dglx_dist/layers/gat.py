"""The stages of graph attention, for ``dgl.nn.GATConv``: logits are summed over the parts, rows never are."""

from __future__ import annotations

import dgl.function as fn
from dgl.heterograph import DGLBlock
from dgl.nn import GATConv
from dgl.nn.functional import edge_softmax
from torch import Tensor, nn
from torch.nn import functional

from dglx_dist.errors import ConfigError
from dglx_dist.layers.aggregate import refuse_nodes_without_edges, sum_in_edges
from dglx_dist.layers.staged import Staged, StageInput, Sums


class GatStages(Staged):
    """``GATConv`` as stages; has its parameters under its names.

    A logit is linear in the input columns, el = <a_l, W x>, so each part has its share of it; the softmax
    is not, so the shares are summed (*scatter*) and every part computes the same attention. Each part then
    aggregates its own columns' share of the projected rows with it. Splitting GAT by adding up whole
    outputs of the parts would be wrong: the softmax of a part's logits is no part of the softmax.

    Args:
        conv: What to split; its parameters are shared, not copied.

    Raises:
        ConfigError: it has separate widths for sources and destinations, or an identity residual.
    """

    shared = ("attn_l", "attn_r")

    def __init__(self, conv: GATConv) -> None:
        super().__init__()
        check_gat(conv)
        self._feat_drop, self._attn_drop = conv.feat_drop.p, conv.attn_drop.p
        self.fc, self.attn_l, self.attn_r = conv.fc, conv.attn_l, conv.attn_r
        self.leaky_relu, self.res_fc, self.bias = conv.leaky_relu, conv.res_fc, conv.bias
        self.activation = conv.activation
        self._heads, self._width = conv._num_heads, conv._out_feats
        self._allow_zero_in_degree = conv._allow_zero_in_degree
        self.cut = {"fc.weight": 1} | ({"res_fc.weight": 1} if self.res_fc is not None else {})

    def transform(self, given: StageInput) -> tuple[Tensor, Tensor]:
        """Return the projected source rows (L0, K, H), and the destinations' inputs (D1, F_p)."""
        x = self.drop_inputs(given, self._feat_drop)
        rows = functional.linear(x, self.fc.weight).view(-1, self._heads, self._width)
        return rows, x[: given.block.num_dst_nodes()]

    def scatter(self, given: StageInput, transformed: tuple[Tensor, Tensor]) -> Sums:
        """Return this part's logits of sources (L0, K, 1) and destinations (D1, K, 1)."""
        rows, _ = transformed
        targets = rows[: given.block.num_dst_nodes()]
        return (
            (rows * self.attn_l).sum(-1, keepdim=True),
            (targets * self.attn_r).sum(-1, keepdim=True),
        )

    def gather(self, given: StageInput, transformed: tuple[Tensor, Tensor], scattered: Sums) -> Sums:
        """Return one (D1, K, H): rows weighted by attention, and the residual's share."""
        if not self._allow_zero_in_degree:
            refuse_nodes_without_edges(given.block)
        rows, own = transformed
        out = sum_in_edges(given.block, rows, self._attention(given, *scattered))
        if self.res_fc is not None:
            out = out + functional.linear(own, self.res_fc.weight).view_as(out)
        return (out,)

    def apply_nodes(self, block: DGLBlock, gathered: Sums) -> Tensor:
        """Add the bias, of the residual or of its own, and activate."""
        (out,) = gathered
        bias = self.bias if self.res_fc is None else self.res_fc.bias
        out = out if bias is None else out + bias.view(1, self._heads, self._width)
        return self.activation(out) if self.activation else out

    def _attention(self, given: StageInput, sources: Tensor, targets: Tensor) -> Tensor:
        """Softmax over each destination's in-edges, (E1, K, 1), from logits summed over the parts."""
        block = given.block
        with block.local_scope():
            block.srcdata["el"], block.dstdata["er"] = sources, targets
            block.apply_edges(fn.u_add_v("el", "er", "e"))
            attention: Tensor = edge_softmax(block, self.leaky_relu(block.edata["e"]))
        attention = self.drop_edges(given, attention, self._attn_drop)
        weight = given.edges.get("edge_weight")
        return attention if weight is None else attention * weight.view(-1, 1, 1)


def check_gat(conv: GATConv) -> None:
    """Raise ConfigError if something in it needs whole input rows, however its sums are taken."""
    if not isinstance(conv.fc if "fc" in conv._modules else None, nn.Linear):
        raise ConfigError(
            "GATConv with separate widths for sources and destinations cannot be the split first layer; give "
            "it one width, or use strategy='data_parallel'"
        )
    if conv.res_fc is not None and not isinstance(conv.res_fc, nn.Linear):
        raise ConfigError(
            "GATConv adds its input to its output (residual=True with equal widths): a part would need all "
            "columns; set residual=False in the first layer, or use strategy='data_parallel'"
        )
