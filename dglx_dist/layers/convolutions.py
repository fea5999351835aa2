"""Convolutions that are nonlinear before their sum over edges, but begin with a linear map of each row.

A part maps its columns of every source row; the owner adds up the parts' rows and does all the rest. That
is exact, and sends (L0, width) where a layer that splits sends (D1, H): rarely less than the features.
Chosen by ``sync="inputs"``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import dgl.function as fn
import torch
from dgl.heterograph import DGLBlock
from dgl.nn import (
    EdgeConv,
    EdgeWeightNorm,
    GATConv,
    GATv2Conv,
    GINConv,
    GraphConv,
    RelGraphConv,
    SAGEConv,
    SGConv,
)
from dgl.nn.functional import edge_softmax
from dgl.ops import gather_mm
from torch import Tensor, nn
from torch.nn import functional

from dglx_dist.errors import ConfigError
from dglx_dist.layers.base import (
    PartialSums,
    SplittableConv,
    StageInput,
    mean_in_edges,
    narrows_first,
    refuse_nodes_without_edges,
    sum_in_edges,
)


class GatStages(SplittableConv):
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

    def scatter(self, given: StageInput, transformed: tuple[Tensor, Tensor]) -> PartialSums:
        """Return this part's logits of sources (L0, K, 1) and destinations (D1, K, 1)."""
        rows, _ = transformed
        targets = rows[: given.block.num_dst_nodes()]
        return (
            (rows * self.attn_l).sum(-1, keepdim=True),
            (targets * self.attn_r).sum(-1, keepdim=True),
        )

    def gather(
        self, given: StageInput, transformed: tuple[Tensor, Tensor], scattered: PartialSums
    ) -> PartialSums:
        """Return one (D1, K, H): rows weighted by attention, and the residual's share."""
        if not self._allow_zero_in_degree:
            refuse_nodes_without_edges(given.block)
        rows, own = transformed
        out = sum_in_edges(given.block, rows, self._attention(given, *scattered))
        if self.res_fc is not None:
            out = out + functional.linear(own, self.res_fc.weight).view_as(out)
        return (out,)

    def apply_nodes(self, block: DGLBlock, gathered: PartialSums) -> Tensor:
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


class GinStages(SplittableConv):
    """``GINConv`` as stages: its function's first Linear is split, everything after it is applied to sums.

    Args:
        conv: What to split; its parameters are shared, not copied. ``apply_func`` is a Linear or a
            Sequential that begins with one.

    Raises:
        ConfigError: its aggregator is max, or its function begins with something else.
    """

    def __init__(self, conv: GINConv) -> None:
        super().__init__()
        if conv._aggregator_type == "max":
            raise ConfigError(
                "GINConv with aggregator 'max' is not a sum of columns; use 'sum' or 'mean', or "
                "strategy='data_parallel'"
            )
        self.apply_func = conv.apply_func
        first, name = self.apply_func, "apply_func.weight"
        if isinstance(first, nn.Sequential) and len(first):
            first, name = first[0], "apply_func.0.weight"
        if type(first) is not nn.Linear:
            raise ConfigError(
                f"GINConv's apply_func begins with {type(first).__name__}, which is not known to be linear; "
                "give it a torch.nn.Linear, or a torch.nn.Sequential that begins with one, or use "
                "strategy='data_parallel'"
            )
        self.cut = {name: 1}
        # Not registered a second time: state_dict has it under apply_func.
        self._first = (first,)
        self._mean = conv._aggregator_type == "mean"
        self.activation = conv.activation
        if isinstance(conv.eps, nn.Parameter):
            self.eps = conv.eps
        else:
            # A buffer, as in DGL's own layer: so that checkpoints of either have it.
            self.register_buffer("eps", conv.eps)

    def transform(self, given: StageInput) -> Tensor:
        """Project the source rows by the first Linear, without its bias."""
        return functional.linear(given.x, self._first[0].weight)

    def gather(self, given: StageInput, transformed: Tensor, scattered: PartialSums) -> PartialSums:
        """Return two (D1, H): what comes over edges, and the node itself, which eps weighs in full."""
        reduce = mean_in_edges if self._mean else sum_in_edges
        around = reduce(given.block, transformed, given.edges.get("edge_weight"))
        own = transformed[: given.block.num_dst_nodes()]
        # A trained eps must see full sums: its gradient would be one part's alone.
        return (around, own) if self.eps.requires_grad else (around + (1 + self.eps) * own,)

    def apply_nodes(self, block: DGLBlock, gathered: PartialSums) -> Tensor:
        """Add up and add the bias; then the rest of the function, and the activation."""
        around, *own = gathered
        out = around + (1 + self.eps) * own[0] if own else around
        bias = self._first[0].bias
        out = out if bias is None else out + bias
        if isinstance(self.apply_func, nn.Sequential):
            out = self.apply_func[1:](out)
        return out if self.activation is None else self.activation(out)


_POWER = {"both": -0.5, "left": -1.0, "right": -1.0}


class GraphConvStages(SplittableConv):
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

    def gather(self, given: StageInput, transformed: Tensor, scattered: PartialSums) -> PartialSums:
        """Return one (D1, H): the weighted sum over in-edges, projected."""
        if not self._allow_zero_in_degree:
            refuse_nodes_without_edges(given.block)
        total = sum_in_edges(given.block, transformed, given.edges.get("edge_weight"))
        return (total if narrows_first(given.block, *self.weight.shape) else total @ self.weight,)

    def apply_nodes(self, block: DGLBlock, gathered: PartialSums) -> Tensor:
        """Scale by in-degrees (norms right and both), add the bias, activate."""
        (out,) = gathered
        if self._norm in ("right", "both"):
            degrees = block.in_degrees().to(out).clamp(min=1)
            out = out * degrees.pow(_POWER[self._norm]).unsqueeze(-1)
        out = out if self.bias is None else out + self.bias
        return out if self._activation is None else self._activation(out)


class RelationalStages(SplittableConv):
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

    def gather(self, given: StageInput, transformed: Tensor, scattered: PartialSums) -> PartialSums:
        """Return the sum of messages (D1, H) and the node's own share, apart where a norm lies between."""
        loop, _, norm = self._has
        around = self._messages(given, transformed)
        if not loop:
            return (around,)
        own = transformed[: given.block.num_dst_nodes()] @ self.loop_weight
        return (around, own) if norm else (around + own,)

    def apply_nodes(self, block: DGLBlock, gathered: PartialSums) -> Tensor:
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


_SPLIT = ("mean", "gcn")


class SageStages(SplittableConv):
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

    def gather(
        self, given: StageInput, transformed: tuple[Tensor, Tensor], scattered: PartialSums
    ) -> PartialSums:
        """Return one (D1, H): mean of the neighbours W_neigh + self W_self, added before the sum."""
        block, weight, (rows, own) = given.block, given.edges.get("edge_weight"), transformed
        if self._aggregator == "mean":
            around = self._projected(given, mean_in_edges(block, rows, weight))
            return (around + functional.linear(own, self.fc_self.weight),)
        total = sum_in_edges(block, rows, weight) + rows[: block.num_dst_nodes()]
        return (self._projected(given, total / (block.in_degrees().to(total).unsqueeze(-1) + 1)),)

    def apply_nodes(self, block: DGLBlock, gathered: PartialSums) -> Tensor:
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


def sage_of_rows(conv: SAGEConv) -> SplittableConv:
    """Return stages of any ``SAGEConv`` but that of an LSTM: of pool by rows, of the others by columns."""
    return PoolStages(conv) if conv._aggre_type == "pool" else SageStages(conv)


@final
class PoolStages(SplittableConv):
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

    def gather(self, given: StageInput, transformed: Tensor, scattered: PartialSums) -> PartialSums:
        """Return the shares of all sources (L0, F), and of the destinations' own part (D1, H)."""
        own = transformed[: given.block.num_dst_nodes()]
        pooled = functional.linear(transformed, self.fc_pool.weight)
        return pooled, functional.linear(own, self.fc_self.weight)

    def apply_edges(self, given: StageInput, gathered: PartialSums) -> Tensor:
        """Take the largest over in-edges, as DGL does; then weights, bias, activation and norm."""
        rows, own = gathered
        rows = functional.relu(_plus(rows, self.fc_pool.bias))
        out = _plus(own, self.fc_self.bias) + self.fc_neigh(_largest(given, rows))
        out = out if self.activation is None else self.activation(out)
        return out if self.norm is None else self.norm(out)

    def apply_nodes(self, block: DGLBlock, gathered: PartialSums) -> Tensor:
        """See :meth:`apply_edges`; here without edge weights."""
        return self.apply_edges(StageInput(block=block, x=gathered[0], edges={}), gathered)


@final
class GatRowStages(SplittableConv):
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

    def gather(self, given: StageInput, transformed: Tensor, scattered: PartialSums) -> PartialSums:
        """Return the shares of the projected sources (L0, K H), and of the residual (D1, K H)."""
        rows = functional.linear(transformed, self.fc.weight)
        own = transformed[: given.block.num_dst_nodes()]
        return (rows,) if self.res_fc is None else (rows, functional.linear(own, self.res_fc.weight))

    def apply_edges(self, given: StageInput, gathered: PartialSums) -> Tensor:
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

    def apply_nodes(self, block: DGLBlock, gathered: PartialSums) -> Tensor:
        """See :meth:`apply_edges`; here without edge weights."""
        return self.apply_edges(StageInput(block=block, x=gathered[0], edges={}), gathered)


@final
class GatV2Stages(SplittableConv):
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

    def gather(self, given: StageInput, transformed: Tensor, scattered: PartialSums) -> PartialSums:
        """Return the shares of sources (L0, K H), of destinations and of the residual (D1, K H)."""
        own = transformed[: given.block.num_dst_nodes()]
        rows = functional.linear(transformed, self.fc_src.weight)
        shares = (rows, functional.linear(own, self.fc_dst.weight))
        return shares if self.res_fc is None else (*shares, functional.linear(own, self.res_fc.weight))

    def apply_nodes(self, block: DGLBlock, gathered: PartialSums) -> Tensor:
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
class EdgeConvStages(SplittableConv):
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

    def gather(self, given: StageInput, transformed: Tensor, scattered: PartialSums) -> PartialSums:
        """Return the shares of theta of all sources (L0, H), and of phi of the destinations (D1, H)."""
        own = transformed[: given.block.num_dst_nodes()]
        rows = functional.linear(transformed, self.theta.weight)
        return rows, functional.linear(own, self.phi.weight)

    def apply_nodes(self, block: DGLBlock, gathered: PartialSums) -> Tensor:
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


@final
class SgcStages(SplittableConv):
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

    def gather(self, given: StageInput, transformed: Tensor, scattered: PartialSums) -> PartialSums:
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

    def apply_nodes(self, block: DGLBlock, gathered: PartialSums) -> Tensor:
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
