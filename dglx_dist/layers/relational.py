"""The stages of a relational graph convolution, for ``dgl.nn.RelGraphConv``."""

from __future__ import annotations

import torch
from dgl.heterograph import DGLBlock
from dgl.nn import RelGraphConv
from dgl.ops import gather_mm
from torch import Tensor

from dglx_dist.errors import ConfigError
from dglx_dist.layers.staged import Staged, StageInput, Sums


class RelationalStages(Staged):
    """``RelGraphConv`` as stages; has its parameters under its names.

    Args:
        conv: What to split; its parameters are shared, not copied.

    Raises:
        ConfigError: its weights are block-diagonal, which ties them to blocks of input columns.
    """

    edge_arguments = ("etypes", "norm")

    def __init__(self, conv: RelGraphConv) -> None:
        super().__init__()
        if conv.linear_r.regularizer == "bdd":
            raise ConfigError(
                "RelGraphConv(regularizer='bdd') ties weights to blocks of input columns; use 'basis' or "
                "None in the first layer, or strategy='data_parallel'"
            )
        self.linear_r, self.dropout = conv.linear_r, conv.dropout
        self.cut = {"linear_r.W": 1}
        self.shared = ("linear_r.coeff",) if conv.linear_r.regularizer == "basis" else ()
        if conv.self_loop:
            self.loop_weight = conv.loop_weight
            self.cut["loop_weight"] = 0
        if conv.bias:
            self.h_bias = conv.h_bias
        if conv.layer_norm:
            self.layer_norm_weight = conv.layer_norm_weight
        self.activation = conv.activation
        self._has = (conv.self_loop, conv.bias, conv.layer_norm)

    def gather(self, given: StageInput, transformed: Tensor, scattered: Sums) -> Sums:
        """Return the sum of messages (D1, H) and the node's own share, apart where a norm lies between."""
        loop, _, norm = self._has
        around = self._messages(given, transformed)
        if not loop:
            return (around,)
        own = transformed[: given.block.num_dst_nodes()] @ self.loop_weight
        return (around, own) if norm else (around + own,)

    def apply_nodes(self, block: DGLBlock, gathered: Sums) -> Tensor:
        """Norm, bias, self-loop, activation and dropout, in DGL's order."""
        _, bias, norm = self._has
        out, *own = gathered
        out = self.layer_norm_weight(out) if norm else out
        out = out + self.h_bias if bias else out
        out = out + own[0] if own else out
        out = self.activation(out) if self.activation else out
        return self.dropout(out)

    def _messages(self, given: StageInput, rows: Tensor) -> Tensor:
        """Return (D1, H) sums over in-edges of each edge's source row times its relation's weight."""
        linear = self.linear_r
        weight = linear.W
        if linear.regularizer == "basis":
            # Not linear.get_weight(): it knows the uncut width only.
            weight = torch.einsum("rb,bio->rio", linear.coeff, linear.W)
        sources, targets = given.block.edges()
        out = rows.new_zeros((given.block.num_dst_nodes(), weight.shape[-1]))
        if "etypes" not in given.edges:
            raise ConfigError("RelGraphConv needs the relation of each edge; pass etypes, (E,) whole numbers")
        if not rows.numel() or not len(sources):
            return out + 0 * weight.sum() + 0 * rows.sum()
        messages = gather_mm(rows[sources.long()], weight, idx_b=given.edges["etypes"])
        norm = given.edges.get("norm")
        messages = messages if norm is None else messages * norm.view(-1, 1)
        return out.index_add(0, targets.long(), messages)
