"""Convolutions that are nonlinear before their sum over edges, but begin with a linear map of each row.

A part maps its columns of every source row; the owner adds up the parts' rows and does all the rest. That
is exact, and sends (L0, width) where a layer that splits sends (D1, H): rarely less than the features.
Chosen by ``sync="inputs"``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import dgl.function as fn
from dgl.heterograph import DGLBlock
from dgl.nn import EdgeConv, GATConv, GATv2Conv, SAGEConv
from dgl.nn.functional import edge_softmax
from torch import Tensor, nn
from torch.nn import functional

from dglx_dist.errors import ConfigError
from dglx_dist.layers.aggregate import refuse_nodes_without_edges, sum_in_edges
from dglx_dist.layers.gat import check_gat
from dglx_dist.layers.sage import SageStages
from dglx_dist.layers.staged import Staged, StageInput, Sums


def sage_of_rows(conv: SAGEConv) -> Staged:
    """Return stages of any ``SAGEConv`` but that of an LSTM: of pool by rows, of the others by columns."""
    return PoolStages(conv) if conv._aggre_type == "pool" else SageStages(conv)


@final
class PoolStages(Staged):
    """``SAGEConv`` with aggregator pool: rows of ``fc_pool`` are added up, the owner finds the largest.

    Args:
        conv: What to split; its parameters are shared, not copied.
    """

    edges_after_sync = True

    def __init__(self, conv: SAGEConv) -> None:
        super().__init__()
        self._feat_drop = conv.feat_drop.p
        self.fc_pool, self.fc_neigh, self.fc_self = conv.fc_pool, conv.fc_neigh, conv.fc_self
        self.activation, self.norm = conv.activation, conv.norm
        self.cut = {"fc_pool.weight": 1, "fc_self.weight": 1}

    def transform(self, given: StageInput) -> Tensor:
        """Drop inputs."""
        return self.drop_inputs(given, self._feat_drop)

    def gather(self, given: StageInput, transformed: Tensor, scattered: Sums) -> Sums:
        """Return the shares of all sources (L0, F), and of the destinations' own part (D1, H)."""
        own = transformed[: given.block.num_dst_nodes()]
        pooled = functional.linear(transformed, self.fc_pool.weight)
        return pooled, functional.linear(own, self.fc_self.weight)

    def apply_edges(self, given: StageInput, gathered: Sums) -> Tensor:
        """Take the largest over in-edges, as DGL does; then weights, bias, activation and norm."""
        rows, own = gathered
        rows = functional.relu(_plus(rows, self.fc_pool.bias))
        out = _plus(own, self.fc_self.bias) + self.fc_neigh(_largest(given, rows))
        out = out if self.activation is None else self.activation(out)
        return out if self.norm is None else self.norm(out)

    def apply_nodes(self, block: DGLBlock, gathered: Sums) -> Tensor:
        """See :meth:`apply_edges`; here without edge weights."""
        return self.apply_edges(StageInput(block=block, x=gathered[0], edges={}), gathered)


@final
class GatRowStages(Staged):
    """``GATConv`` by rows: attention is the owner's alone; to compare with :class:`gat.GatStages`.

    Args:
        conv: What to split; its parameters are shared, not copied.

    Raises:
        ConfigError: as for :class:`gat.GatStages`.
    """

    edges_after_sync = True

    def __init__(self, conv: GATConv) -> None:
        super().__init__()
        check_gat(conv)
        self._feat_drop, self.attn_drop = conv.feat_drop.p, conv.attn_drop
        self.fc, self.attn_l, self.attn_r = conv.fc, conv.attn_l, conv.attn_r
        self.leaky_relu, self.res_fc, self.bias = conv.leaky_relu, conv.res_fc, conv.bias
        self.activation = conv.activation
        self._heads, self._width = conv._num_heads, conv._out_feats
        self._allow_zero_in_degree = conv._allow_zero_in_degree
        self.cut = {"fc.weight": 1} | ({"res_fc.weight": 1} if self.res_fc is not None else {})

    def transform(self, given: StageInput) -> Tensor:
        """Drop inputs."""
        return self.drop_inputs(given, self._feat_drop)

    def gather(self, given: StageInput, transformed: Tensor, scattered: Sums) -> Sums:
        """Return the shares of the projected sources (L0, K H), and of the residual (D1, K H)."""
        rows = functional.linear(transformed, self.fc.weight)
        own = transformed[: given.block.num_dst_nodes()]
        return (rows,) if self.res_fc is None else (rows, functional.linear(own, self.res_fc.weight))

    def apply_edges(self, given: StageInput, gathered: Sums) -> Tensor:
        """Attend, sum, add residual and bias, and activate."""
        block = given.block
        if not self._allow_zero_in_degree:
            refuse_nodes_without_edges(block)
        rows = gathered[0].view(-1, self._heads, self._width)
        sources = (rows * self.attn_l).sum(-1, keepdim=True)
        targets = (rows[: block.num_dst_nodes()] * self.attn_r).sum(-1, keepdim=True)
        logits = self.leaky_relu(_on_edges(block, fn.u_add_v, sources, targets))
        attention = self.attn_drop(edge_softmax(block, logits))
        weight = given.edges.get("edge_weight")
        attention = attention if weight is None else attention * weight.view(-1, 1, 1)
        out = sum_in_edges(block, rows, attention)
        out = out if self.res_fc is None else out + gathered[1].view_as(out)
        bias = self.bias if self.res_fc is None else self.res_fc.bias
        out = out if bias is None else out + bias.view(1, self._heads, self._width)
        return self.activation(out) if self.activation else out

    def apply_nodes(self, block: DGLBlock, gathered: Sums) -> Tensor:
        """See :meth:`apply_edges`; here without edge weights."""
        return self.apply_edges(StageInput(block=block, x=gathered[0], edges={}), gathered)


@final
class GatV2Stages(Staged):
    """``GATv2Conv`` by rows: both projections are added up, everything after them is the owner's.

    Args:
        conv: What to split; its parameters are shared, not copied.

    Raises:
        ConfigError: separate widths, an identity residual, or one weight under two names.
    """

    edge_arguments = ()

    def __init__(self, conv: GATv2Conv) -> None:
        super().__init__()
        _check_gatv2(conv)
        self._feat_drop, self.attn_drop = conv.feat_drop.p, conv.attn_drop
        self.fc_src, self.fc_dst, self.attn = conv.fc_src, conv.fc_dst, conv.attn
        self.leaky_relu, self.res_fc, self.activation = conv.leaky_relu, conv.res_fc, conv.activation
        self._heads, self._width = conv._num_heads, conv._out_feats
        self._allow_zero_in_degree = conv._allow_zero_in_degree
        self.cut = {"fc_src.weight": 1, "fc_dst.weight": 1}
        if self.res_fc is not None:
            self.cut["res_fc.weight"] = 1

    def transform(self, given: StageInput) -> Tensor:
        """Drop inputs."""
        return self.drop_inputs(given, self._feat_drop)

    def gather(self, given: StageInput, transformed: Tensor, scattered: Sums) -> Sums:
        """Return the shares of sources (L0, K H), of destinations and of the residual (D1, K H)."""
        own = transformed[: given.block.num_dst_nodes()]
        rows = functional.linear(transformed, self.fc_src.weight)
        shares = (rows, functional.linear(own, self.fc_dst.weight))
        return shares if self.res_fc is None else (*shares, functional.linear(own, self.res_fc.weight))

    def apply_nodes(self, block: DGLBlock, gathered: Sums) -> Tensor:
        """Attend, sum, add the residual, and activate."""
        if not self._allow_zero_in_degree:
            refuse_nodes_without_edges(block)
        sources, targets, *residual = gathered
        rows = _plus(sources, self.fc_src.bias).view(-1, self._heads, self._width)
        own = _plus(targets, self.fc_dst.bias).view(-1, self._heads, self._width)
        edges = self.leaky_relu(_on_edges(block, fn.u_add_v, rows, own))
        logits = (edges * self.attn).sum(-1, keepdim=True)
        out = sum_in_edges(block, rows, self.attn_drop(edge_softmax(block, logits)))
        if residual:
            out = out + _plus(residual[0], self.res_fc.bias).view_as(out)
        return self.activation(out) if self.activation else out


@final
class EdgeConvStages(Staged):
    """``EdgeConv`` by rows: theta and phi are linear, the largest message is the owner's to find.

    Args:
        conv: What to split; its parameters are shared, not copied.
    """

    edge_arguments = ()

    def __init__(self, conv: EdgeConv) -> None:
        super().__init__()
        self.theta, self.phi = conv.theta, conv.phi
        self._allow_zero_in_degree, self._batch_norm = conv._allow_zero_in_degree, conv.batch_norm
        if conv.batch_norm:
            self.bn = conv.bn
        self.cut = {"theta.weight": 1, "phi.weight": 1}

    def gather(self, given: StageInput, transformed: Tensor, scattered: Sums) -> Sums:
        """Return the shares of theta of all sources (L0, H), and of phi of the destinations (D1, H)."""
        own = transformed[: given.block.num_dst_nodes()]
        rows = functional.linear(transformed, self.theta.weight)
        return rows, functional.linear(own, self.phi.weight)

    def apply_nodes(self, block: DGLBlock, gathered: Sums) -> Tensor:
        """Take the largest of theta (x_v - x_u) + phi x_v over in-edges."""
        if not self._allow_zero_in_degree:
            refuse_nodes_without_edges(block)
        rows, own = gathered
        targets = _plus(_plus(rows[: block.num_dst_nodes()] + own, self.theta.bias), self.phi.bias)
        messages = _on_edges(block, fn.v_sub_u, rows, targets)
        messages = self.bn(messages) if self._batch_norm else messages
        with block.local_scope():
            block.edata["message"] = messages
            block.update_all(fn.copy_e("message", "m"), fn.max("m", "out"))
            return block.dstdata["out"]


def _plus(rows: Tensor, bias: Tensor | None) -> Tensor:
    return rows if bias is None else rows + bias


def _on_edges(
    block: DGLBlock, what: Callable[[str, str, str], object], sources: Tensor, targets: Tensor
) -> Tensor:
    """Return (E1, ...), what DGL's function ``what`` makes of each edge's ends."""
    with block.local_scope():
        block.srcdata["end"], block.dstdata["end"] = sources, targets
        block.apply_edges(what("end", "end", "out"))
        out: Tensor = block.edata["out"]
        return out


def _largest(given: StageInput, rows: Tensor) -> Tensor:
    """Return (D1, ...) the largest of weighted source rows over in-edges, 0 where there are none."""
    block, weight = given.block, given.edges.get("edge_weight")
    if block.num_edges() == 0:
        return rows.new_zeros((block.num_dst_nodes(), rows.shape[1])) + 0 * rows.sum()
    with block.local_scope():
        block.srcdata["row"] = rows
        message = fn.copy_u("row", "m")
        if weight is not None:
            block.edata["weight"] = weight
            message = fn.u_mul_e("row", "weight", "m")
        block.update_all(message, fn.max("m", "out"))
        return block.dstdata["out"]


def _check_gatv2(conv: GATv2Conv) -> None:
    if conv._in_src_feats != conv._in_dst_feats or conv.share_weights:
        raise ConfigError(
            "GATv2Conv with separate widths, or with share_weights=True (one weight under two names), cannot "
            "be the split first layer; give it one width and share_weights=False, or use "
            "strategy='data_parallel'"
        )
    if conv.res_fc is not None and not isinstance(conv.res_fc, nn.Linear):
        raise ConfigError(
            "GATv2Conv adds its input to its output (residual=True with equal widths): a part would need all "
            "columns; set residual=False in the first layer, or use strategy='data_parallel'"
        )
