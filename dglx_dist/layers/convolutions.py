"""Convolutions of ``dgl.nn`` as stages; each shares the parameters of its convolution, under the same names.

Most are split by columns. Convolutions that are nonlinear before their sum over edges are split by rows
(``sync="inputs"``): a part projects its columns of every source row, and the owner sums the parts' rows and
computes the rest. That is exact, but sends (L0, width) instead of (D1, H), rarely less than the features.
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
    max_in_edges,
    mean_in_edges,
    narrows_first,
    refuse_nodes_without_edges,
    sum_in_edges,
)


class GatStages(SplittableConv):
    """``GATConv`` by columns.

    A logit is linear in the input columns, el = <a_l, W x>, so each part has its share of it; the softmax
    is not, so the shares are summed (*scatter*) and every part computes the same attention. Each part then
    aggregates its own columns' share of the projected rows with it. A sum of the parts' whole outputs would
    be wrong, since a softmax is not the sum of the softmaxes of the parts' logits.

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
        (out,) = gathered
        bias = self.bias if self.res_fc is None else self.res_fc.bias
        out = out if bias is None else out + bias.view(1, self._heads, self._width)
        return self.activation(out) if self.activation else out

    def _attention(self, given: StageInput, sources: Tensor, targets: Tensor) -> Tensor:
        # (E1, K, 1), from logits that are summed over the parts.
        block = given.block
        with block.local_scope():
            block.srcdata["el"], block.dstdata["er"] = sources, targets
            block.apply_edges(fn.u_add_v("el", "er", "e"))
            attention: Tensor = edge_softmax(block, self.leaky_relu(block.edata["e"]))
        attention = self.drop_edges(given, attention, self._attn_drop)
        weight = given.edges.get("edge_weight")
        return attention if weight is None else attention * weight.view(-1, 1, 1)


def check_gat(conv: GATConv) -> None:
    """Raise ConfigError if the layer needs whole input rows under either ``sync``."""
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
    """``GINConv`` by columns: the first Linear of ``apply_func`` is split, the rest is applied to the sums.

    Raises:
        ConfigError: its aggregator is max, or ``apply_func`` does not begin with a Linear.
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
        # In a tuple, so that it is not registered twice: state_dict has it under apply_func.
        self._first = (first,)
        self._mean = conv._aggregator_type == "mean"
        self.activation = conv.activation
        if isinstance(conv.eps, nn.Parameter):
            self.eps = conv.eps
        else:
            # A buffer, as in DGL's own layer: so that checkpoints of either have it.
            self.register_buffer("eps", conv.eps)

    def transform(self, given: StageInput) -> Tensor:
        return functional.linear(given.x, self._first[0].weight)

    def gather(self, given: StageInput, transformed: Tensor, scattered: PartialSums) -> PartialSums:
        """Return (D1, H) sums over in-edges and, if eps is trained, (D1, H) the nodes' own rows."""
        reduce = mean_in_edges if self._mean else sum_in_edges
        around = reduce(given.block, transformed, given.edges.get("edge_weight"))
        own = transformed[: given.block.num_dst_nodes()]
        # A trained eps needs full sums: its gradient would be that of one part.
        return (around, own) if self.eps.requires_grad else (around + (1 + self.eps) * own,)

    def apply_nodes(self, block: DGLBlock, gathered: PartialSums) -> Tensor:
        around, *own = gathered
        out = around + (1 + self.eps) * own[0] if own else around
        bias = self._first[0].bias
        out = out if bias is None else out + bias
        if isinstance(self.apply_func, nn.Sequential):
            out = self.apply_func[1:](out)
        return out if self.activation is None else self.activation(out)


_POWER = {"both": -0.5, "left": -1.0, "right": -1.0}


class GraphConvStages(SplittableConv):
    """``GraphConv`` by columns.

    Raises:
        ConfigError: it has no weight, so its output is not a sum over columns.
    """

    def __init__(self, conv: GraphConv) -> None:
        super().__init__()
        if conv.weight is None:
            raise ConfigError(
                "GraphConv(weight=False) keeps the input's columns, so the first layer has no sum over them; "
                "keep its weight, or use strategy='data_parallel'"
            )
        self.weight, self.bias = conv.weight, conv.bias
        self.cut = {"weight": 0}
        self._norm, self._activation = conv._norm, conv._activation
        self._allow_zero_in_degree = conv._allow_zero_in_degree

    def transform(self, given: StageInput) -> Tensor:
        rows = given.x
        if self._norm in ("left", "both"):
            degrees = given.block.out_degrees().to(rows).clamp(min=1)
            rows = rows * degrees.pow(_POWER[self._norm]).unsqueeze(-1)
        return rows @ self.weight if narrows_first(given.block, *self.weight.shape) else rows

    def gather(self, given: StageInput, transformed: Tensor, scattered: PartialSums) -> PartialSums:
        if not self._allow_zero_in_degree:
            refuse_nodes_without_edges(given.block)
        total = sum_in_edges(given.block, transformed, given.edges.get("edge_weight"))
        return (total if narrows_first(given.block, *self.weight.shape) else total @ self.weight,)

    def apply_nodes(self, block: DGLBlock, gathered: PartialSums) -> Tensor:
        (out,) = gathered
        if self._norm in ("right", "both"):
            degrees = block.in_degrees().to(out).clamp(min=1)
            out = out * degrees.pow(_POWER[self._norm]).unsqueeze(-1)
        out = out if self.bias is None else out + self.bias
        return out if self._activation is None else self._activation(out)


class RelationalStages(SplittableConv):
    """``RelGraphConv`` by columns.

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
        self._loop, self._bias, self._norm = conv.self_loop, conv.bias, conv.layer_norm

    def gather(self, given: StageInput, transformed: Tensor, scattered: PartialSums) -> PartialSums:
        """Return (D1, H) sums of messages plus the nodes' own share, apart if a norm lies between them."""
        around = self._messages(given, transformed)
        if not self._loop:
            return (around,)
        own = transformed[: given.block.num_dst_nodes()] @ self.loop_weight
        return (around, own) if self._norm else (around + own,)

    def apply_nodes(self, block: DGLBlock, gathered: PartialSums) -> Tensor:
        out, *own = gathered
        out = self.layer_norm_weight(out) if self._norm else out
        out = out + self.h_bias if self._bias else out
        out = out + own[0] if own else out
        out = self.activation(out) if self.activation else out
        return self.dropout(out)

    def _messages(self, given: StageInput, rows: Tensor) -> Tensor:
        linear = self.linear_r
        weight = linear.W
        if linear.regularizer == "basis":
            # Not linear.get_weight(), which uses the uncut width.
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
    """``SAGEConv`` with aggregator mean or gcn, by columns.

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
        """Return the source rows, projected if that is cheaper now, and the destinations' inputs."""
        x = self.drop_inputs(given, self._feat_drop)
        rows = functional.linear(x, self.fc_neigh.weight) if self._narrows_first(given) else x
        return rows, x[: given.block.num_dst_nodes()]

    def gather(
        self, given: StageInput, transformed: tuple[Tensor, Tensor], scattered: PartialSums
    ) -> PartialSums:
        block, weight, (rows, own) = given.block, given.edges.get("edge_weight"), transformed
        if self._aggregator == "mean":
            around = self._projected(given, mean_in_edges(block, rows, weight))
            return (around + functional.linear(own, self.fc_self.weight),)
        total = sum_in_edges(block, rows, weight) + rows[: block.num_dst_nodes()]
        return (self._projected(given, total / (block.in_degrees().to(total).unsqueeze(-1) + 1)),)

    def apply_nodes(self, block: DGLBlock, gathered: PartialSums) -> Tensor:
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
    other = "sync='inputs', which sends its projected rows, " if aggregator == "pool" else ""
    return (
        f"SAGEConv with aggregator {aggregator!r} has a nonlinear step before its sum, so it cannot be split "
        f"by input columns; use {' or '.join(_SPLIT)}, {other}or strategy='data_parallel'"
    )


def sage_of_rows(conv: SAGEConv) -> SplittableConv:
    """Return stages of a ``SAGEConv``: by rows for aggregator pool, else by columns."""
    return PoolStages(conv) if conv._aggre_type == "pool" else SageStages(conv)


@final
class PoolStages(SplittableConv):
    """``SAGEConv`` with aggregator pool, by rows: ``fc_pool``'s are summed, the owner takes the max."""

    edges_after_sync = True

    def __init__(self, conv: SAGEConv) -> None:
        super().__init__()
        self._feat_drop = conv.feat_drop.p
        self.fc_pool, self.fc_neigh, self.fc_self = conv.fc_pool, conv.fc_neigh, conv.fc_self
        self.activation, self.norm = conv.activation, conv.norm
        self.cut = {"fc_pool.weight": 1, "fc_self.weight": 1}

    def transform(self, given: StageInput) -> Tensor:
        return self.drop_inputs(given, self._feat_drop)

    def gather(self, given: StageInput, transformed: Tensor, scattered: PartialSums) -> PartialSums:
        """Return the shares of ``fc_pool`` (L0, F) and of ``fc_self`` (D1, H)."""
        own = transformed[: given.block.num_dst_nodes()]
        pooled = functional.linear(transformed, self.fc_pool.weight)
        return pooled, functional.linear(own, self.fc_self.weight)

    def apply_edges(self, given: StageInput, gathered: PartialSums) -> Tensor:
        rows, own = gathered
        rows = functional.relu(_plus(rows, self.fc_pool.bias))
        largest = max_in_edges(given.block, rows, given.edges.get("edge_weight"))
        out = _plus(own, self.fc_self.bias) + self.fc_neigh(largest)
        out = out if self.activation is None else self.activation(out)
        return out if self.norm is None else self.norm(out)

    def apply_nodes(self, block: DGLBlock, gathered: PartialSums) -> Tensor:
        return self.apply_edges(StageInput(block=block, x=gathered[0], edges={}), gathered)


@final
class GatRowStages(SplittableConv):
    """``GATConv`` by rows: only the owner computes attention. For comparison with :class:`GatStages`.

    Raises:
        ConfigError: as for :class:`GatStages`.
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
        return self.drop_inputs(given, self._feat_drop)

    def gather(self, given: StageInput, transformed: Tensor, scattered: PartialSums) -> PartialSums:
        """Return the shares of the projected sources (L0, K H) and of the residual (D1, K H)."""
        rows = functional.linear(transformed, self.fc.weight)
        own = transformed[: given.block.num_dst_nodes()]
        return (rows,) if self.res_fc is None else (rows, functional.linear(own, self.res_fc.weight))

    def apply_edges(self, given: StageInput, gathered: PartialSums) -> Tensor:
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
        return self.apply_edges(StageInput(block=block, x=gathered[0], edges={}), gathered)


@final
class GatV2Stages(SplittableConv):
    """``GATv2Conv`` by rows: both projections are summed over the parts.

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
        return self.drop_inputs(given, self._feat_drop)

    def gather(self, given: StageInput, transformed: Tensor, scattered: PartialSums) -> PartialSums:
        """Return the shares of sources (L0, K H), destinations and residual (D1, K H)."""
        own = transformed[: given.block.num_dst_nodes()]
        rows = functional.linear(transformed, self.fc_src.weight)
        shares = (rows, functional.linear(own, self.fc_dst.weight))
        return shares if self.res_fc is None else (*shares, functional.linear(own, self.res_fc.weight))

    def apply_nodes(self, block: DGLBlock, gathered: PartialSums) -> Tensor:
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
    """``EdgeConv`` by rows: theta and phi are summed over the parts, the owner takes the largest message."""

    edge_arguments = ()

    def __init__(self, conv: EdgeConv) -> None:
        super().__init__()
        self.theta, self.phi = conv.theta, conv.phi
        self._allow_zero_in_degree, self._batch_norm = conv._allow_zero_in_degree, conv.batch_norm
        if conv.batch_norm:
            self.bn = conv.bn
        self.cut = {"theta.weight": 1, "phi.weight": 1}

    def gather(self, given: StageInput, transformed: Tensor, scattered: PartialSums) -> PartialSums:
        """Return the shares of theta for the sources (L0, H) and of phi for the destinations (D1, H)."""
        own = transformed[: given.block.num_dst_nodes()]
        rows = functional.linear(transformed, self.theta.weight)
        return rows, functional.linear(own, self.phi.weight)

    def apply_nodes(self, block: DGLBlock, gathered: PartialSums) -> Tensor:
        # The largest of theta (x_v - x_u) + phi x_v over in-edges.
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
    block: DGLBlock, message: Callable[[str, str, str], object], sources: Tensor, targets: Tensor
) -> Tensor:
    with block.local_scope():
        block.srcdata["end"], block.dstdata["end"] = sources, targets
        block.apply_edges(message("end", "end", "out"))
        out: Tensor = block.edata["out"]
        return out


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
    """``SGConv`` with k=1, by columns.

    DGL's own runs only on whole graphs: on a block it fails for every k above 0. The stages give the same
    result on a whole graph; on a block they apply DGL's symmetric norm of edge weights within the block: an
    edge counts ``w / sqrt(out-weight of its source * in-weight of its destination)``, with weights of 1 by
    default. Each further hop is a layer ``GraphConv(weight=False)``, since the linear map may come first.

    Raises:
        ConfigError: it has several hops, a norm before its weights, or caches its first result.
    """

    def __init__(self, conv: SGConv) -> None:
        super().__init__()
        _check_sgc(conv)
        self.fc = conv.fc
        self.cut = {"fc.weight": 1}
        self._allow_zero_in_degree = conv._allow_zero_in_degree

    def transform(self, given: StageInput) -> Tensor:
        rows = given.x
        if "edge_weight" not in given.edges:
            block = given.block
            degrees = block.out_degrees() if block.is_block else block.in_degrees()
            rows = rows * degrees.to(rows).clamp(min=1).rsqrt().unsqueeze(-1)
        return functional.linear(rows, self.fc.weight) if self._narrows_first(given.block) else rows

    def gather(self, given: StageInput, transformed: Tensor, scattered: PartialSums) -> PartialSums:
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
        (out,) = gathered
        return out if self.fc.bias is None else out + self.fc.bias

    def _narrows_first(self, block: DGLBlock) -> bool:
        width, columns = self.fc.weight.shape
        return narrows_first(block, columns, width)


def _check_sgc(conv: SGConv) -> None:
    if conv._k != 1:
        raise ConfigError(
            f"SGConv(k={conv._k}) has {conv._k} hops, but a block has one: use k=1 in the first layer and "
            "GraphConv(weight=False) for each further hop. DGL's SGConv does not support blocks, so it does "
            "not train under strategy='data_parallel' either"
        )
    if conv._cached or conv.norm is not None:
        raise ConfigError(
            f"SGConv(cached={conv._cached}, norm={conv.norm}) caches the first batch's result or normalizes "
            "whole rows before its weights; use cached=False and norm=None, or normalize the features with "
            "torch.nn.LayerNorm, or use strategy='data_parallel' with another convolution"
        )
