"""Registry of graph convolutions: how each one of ``dgl.nn`` splits by input columns, and its work.

Most are split by columns. Convolutions that are nonlinear before their sum over edges are split by rows
(``sync="inputs"``): a part projects its columns of every source row, and the owner sums the parts' rows and
computes the rest. That is exact, but sends (L0, width) instead of (D1, H), rarely less than the features.

A convolution is one :class:`SplittableConv` here, made from the module whose parameters it shares under the
same names, and one entry of :data:`CONVOLUTIONS`. The constructor raises ConfigError, with the reason, where
a configuration cannot be split.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, final

import dgl.function as fn
import torch
from dgl.heterograph import DGLBlock
from dgl.nn import pytorch as dglnn
from dgl.nn.functional import edge_softmax
from dgl.ops import gather_mm
from torch import Tensor, nn
from torch.nn import functional

from dglx_dist.errors import ConfigError
from dglx_dist.layers.base import (
    Around,
    DeclaredStage,
    LayerWidths,
    PartialSums,
    SplittableConv,
    StageInput,
    apply_to_edges,
    max_in_edges,
    mean_in_edges,
    project_rows,
    sum_in_edges,
)

Sync: TypeAlias = Literal["columns", "inputs"]
"""What is summed over the parts: sums over in-edges, or projected source rows where a layer needs it."""


def _plus(rows: Tensor, bias: Tensor | None) -> Tensor:
    return rows if bias is None else rows + bias


def _then(function: Callable[[Tensor], Tensor] | None, rows: Tensor) -> Tensor:
    return rows if function is None else function(rows)


_TWO_WIDTHS = "separate widths for sources and destinations"


def _check_attention(conv: Any, problem: str) -> None:
    kind = type(conv).__name__
    if problem:
        raise ConfigError(
            f"{kind} with {problem} cannot be the split first layer; build it without, or use "
            "strategy='data_parallel'"
        )
    if conv.res_fc is not None and not isinstance(conv.res_fc, nn.Linear):
        raise ConfigError(
            f"{kind} adds its input to its output (residual=True with equal widths): a part would need all "
            "columns; set residual=False in the first layer, or use strategy='data_parallel'"
        )


class GatStages(SplittableConv):
    """``GATConv``, by columns or by rows.

    By columns: a logit is linear in the input columns, el = <a_l, W x>, so each part has its share of it; the
    softmax is not, so the shares are summed (*scatter*) and every part computes the same attention. Each part
    then aggregates its own columns' share of the projected rows with it. A sum of the parts' whole outputs
    would be wrong, since a softmax is not the sum of the softmaxes of the parts' logits.

    By rows only the owner computes attention, from sums of projected rows.
    """

    def __init__(self, conv: dglnn.GATConv, *, by_rows: bool = False) -> None:
        super().__init__(conv)
        _check_attention(conv, "" if "fc" in conv._modules else _TWO_WIDTHS)
        self.heads, self._width = conv._num_heads, conv._out_feats
        self.edges_after_sync, self.shared = by_rows, () if by_rows else ("attn_l", "attn_r")
        self.cut = {"fc.weight": 1} | ({"res_fc.weight": 1} if self.res_fc is not None else {})

    def transform(self, given: StageInput) -> tuple[Tensor, Tensor]:
        """Return the projected source rows (L0, K, H), and the destinations' inputs (D1, F_p)."""
        x = self.drop_inputs(given, self.feat_drop.p)
        rows = functional.linear(x, self.fc.weight).view(-1, self.heads, self._width)
        return rows, x[: given.block.num_dst_nodes()]

    def scatter(self, given: StageInput, transformed: tuple[Tensor, Tensor]) -> PartialSums:
        return () if self.edges_after_sync else self._logits(given.block, transformed[0])

    def gather(
        self, given: StageInput, transformed: tuple[Tensor, Tensor], scattered: PartialSums
    ) -> PartialSums:
        """By columns one (D1, K, H) with the residual's share; by rows (L0, K H), and the residual apart."""
        rows, own = transformed
        residual = () if self.res_fc is None else (functional.linear(own, self.res_fc.weight),)
        if self.edges_after_sync:
            return (rows.flatten(1), *residual)
        self.check_in_edges(given.block)
        attention = self.drop_edges(given, self._attention(given.block, scattered), self.attn_drop.p)
        return (self._summed(given, rows, attention, residual),)

    def apply_edges(self, given: StageInput, gathered: PartialSums) -> Tensor:
        out, *residual = gathered
        if self.edges_after_sync:
            self.check_in_edges(given.block)
            rows = out.view(-1, self.heads, self._width)
            attention = self._attention(given.block, self._logits(given.block, rows))
            # Not by keys: only this rank computes it.
            attention = functional.dropout(attention, self.attn_drop.p, self.training)
            out = self._summed(given, rows, attention, residual)
        bias = self.bias if self.res_fc is None else self.res_fc.bias
        return _then(self.activation, out if bias is None else out + bias.view(1, self.heads, self._width))

    def _logits(self, block: DGLBlock, rows: Tensor) -> PartialSums:
        # (L0, K, 1) of sources and (D1, K, 1) of destinations.
        targets = rows[: block.num_dst_nodes()]
        return (rows * self.attn_l).sum(-1, keepdim=True), (targets * self.attn_r).sum(-1, keepdim=True)

    def _attention(self, block: DGLBlock, logits: PartialSums) -> Tensor:
        # (E1, K, 1), from logits of all parts.
        attention: Tensor = edge_softmax(block, self.leaky_relu(apply_to_edges(block, fn.u_add_v, *logits)))
        return attention

    def _summed(
        self, given: StageInput, rows: Tensor, attention: Tensor, residual: Sequence[Tensor]
    ) -> Tensor:
        weight = given.edges.get("edge_weight")
        attention = attention if weight is None else attention * weight.view(-1, 1, 1)
        out = sum_in_edges(given.block, rows, attention)
        return out + residual[0].view_as(out) if residual else out


@final
class GatV2Stages(SplittableConv):
    """``GATv2Conv`` by rows: both projections are summed over the parts."""

    edge_arguments = ()

    def __init__(self, conv: dglnn.GATv2Conv) -> None:
        super().__init__(conv)
        tied = "share_weights=True (one weight under two names)" if conv.share_weights else ""
        _check_attention(conv, tied if conv._in_src_feats == conv._in_dst_feats else _TWO_WIDTHS)
        self.heads, self._width = conv._num_heads, conv._out_feats
        residual = {} if self.res_fc is None else {"res_fc.weight": 1}
        self.cut = {"fc_src.weight": 1, "fc_dst.weight": 1, **residual}

    def transform(self, given: StageInput) -> Tensor:
        return self.drop_inputs(given, self.feat_drop.p)

    def gather(self, given: StageInput, transformed: Tensor, scattered: PartialSums) -> PartialSums:
        """Return the shares of sources (L0, K H), destinations and residual (D1, K H)."""
        own = transformed[: given.block.num_dst_nodes()]
        linears = [self.fc_dst] if self.res_fc is None else [self.fc_dst, self.res_fc]
        of_targets = [functional.linear(own, linear.weight) for linear in linears]
        return (functional.linear(transformed, self.fc_src.weight), *of_targets)

    def apply_nodes(self, block: DGLBlock, gathered: PartialSums) -> Tensor:
        self.check_in_edges(block)
        sources, targets, *residual = gathered
        rows = _plus(sources, self.fc_src.bias).view(-1, self.heads, self._width)
        own = _plus(targets, self.fc_dst.bias).view(-1, self.heads, self._width)
        edges = self.leaky_relu(apply_to_edges(block, fn.u_add_v, rows, own))
        logits = (edges * self.attn).sum(-1, keepdim=True)
        out = sum_in_edges(block, rows, self.attn_drop(edge_softmax(block, logits)))
        if residual:
            out = out + _plus(residual[0], self.res_fc.bias).view_as(out)
        return _then(self.activation, out)


@final
class GinStages(SplittableConv):
    """``GINConv`` by columns: the first Linear of ``apply_func`` is split, the rest works on the sums."""

    def __init__(self, conv: dglnn.GINConv) -> None:
        super().__init__(conv)
        if conv._aggregator_type == "max":
            raise ConfigError(
                "GINConv with aggregator 'max' is not a sum of columns; use 'sum' or 'mean', or "
                "strategy='data_parallel'"
            )
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

    @property
    def sum_width(self) -> int:
        return int(1 + self.eps.requires_grad) * self._first[0].out_features

    def widths(self) -> LayerWidths:
        """Return the columns of ``GINConv``, which sums inputs before all products."""
        linears = [one for one in self.apply_func.modules() if isinstance(one, nn.Linear)]
        return LayerWidths(
            inputs=self.width,
            outputs=linears[-1].out_features,
            summed=self.width,
        )

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
        out = _plus(out, self._first[0].bias)
        if isinstance(self.apply_func, nn.Sequential):
            out = self.apply_func[1:](out)
        return _then(self.activation, out)


_POWER = {"both": -0.5, "left": -1.0, "right": -1.0}


@final
class GraphConvStages(SplittableConv):
    """``GraphConv`` by columns."""

    def __init__(self, conv: dglnn.GraphConv) -> None:
        super().__init__(conv)
        if conv.weight is None:
            raise ConfigError(
                "GraphConv(weight=False) keeps the input's columns, so the first layer has no sum over them; "
                "keep its weight, or use strategy='data_parallel'"
            )
        self.cut = {"weight": 0}

    def transform(self, given: StageInput) -> Tensor:
        rows = given.x
        if self._norm in ("left", "both"):
            degrees = given.block.out_degrees().to(rows).clamp(min=1)
            rows = rows * degrees.pow(_POWER[self._norm]).unsqueeze(-1)
        return project_rows(given, rows, self.weight, after_sum=False)

    def gather(self, given: StageInput, transformed: Tensor, scattered: PartialSums) -> PartialSums:
        self.check_in_edges(given.block)
        total = sum_in_edges(given.block, transformed, given.edges.get("edge_weight"))
        return (project_rows(given, total, self.weight, after_sum=True),)

    def apply_nodes(self, block: DGLBlock, gathered: PartialSums) -> Tensor:
        (out,) = gathered
        if self._norm in ("right", "both"):
            degrees = block.in_degrees().to(out).clamp(min=1)
            out = out * degrees.pow(_POWER[self._norm]).unsqueeze(-1)
        return _then(self._activation, _plus(out, self.bias))


@final
class RelationalStages(SplittableConv):
    """``RelGraphConv`` by columns."""

    edge_arguments = ("etypes", "norm")
    required_edges = ("etypes",)

    def __init__(self, conv: dglnn.RelGraphConv) -> None:
        super().__init__(conv)
        if conv.linear_r.regularizer == "bdd":
            raise ConfigError(
                "RelGraphConv(regularizer='bdd') ties weights to blocks of input columns; use 'basis' or "
                "None in the first layer, or strategy='data_parallel'"
            )
        self.cut = {"linear_r.W": 1}
        self.shared = ("linear_r.coeff",) if conv.linear_r.regularizer == "basis" else ()
        if conv.self_loop:
            self.cut["loop_weight"] = 0

    @property
    def sum_width(self) -> int:
        return (1 + (self.self_loop and self.layer_norm)) * int(self.linear_r.W.shape[2])

    def widths(self) -> LayerWidths:
        columns, width = self.linear_r.W.shape[1:]
        return LayerWidths(
            inputs=columns,
            outputs=width,
            summed=width,
        )

    def gather(self, given: StageInput, transformed: Tensor, scattered: PartialSums) -> PartialSums:
        """Return (D1, H) sums of messages plus the nodes' own share, apart if a norm lies between them."""
        around = self._messages(given, transformed)
        if not self.self_loop:
            return (around,)
        own = transformed[: given.block.num_dst_nodes()] @ self.loop_weight
        return (around, own) if self.layer_norm else (around + own,)

    def apply_nodes(self, block: DGLBlock, gathered: PartialSums) -> Tensor:
        out, *own = gathered
        out = self.layer_norm_weight(out) if self.layer_norm else out
        out = out + self.h_bias if self.bias else out
        out = out + own[0] if own else out
        return self.dropout(_then(self.activation, out))

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


@final
class SageStages(SplittableConv):
    """``SAGEConv`` with aggregator mean or gcn, by columns."""

    def __init__(self, conv: dglnn.SAGEConv) -> None:
        super().__init__(conv)
        self._aggregator = conv._aggre_type
        if self._aggregator not in _SPLIT:
            other = "sync='inputs', which sends its projected rows, " if self._aggregator == "pool" else ""
            raise ConfigError(
                f"SAGEConv with aggregator {self._aggregator!r} has a nonlinear step before its sum, so it "
                f"cannot be split by input columns; use {' or '.join(_SPLIT)}, {other}or "
                "strategy='data_parallel'"
            )
        self.cut = {"fc_neigh.weight": 1}
        if self._aggregator == "mean":
            self.cut["fc_self.weight"] = 1

    def transform(self, given: StageInput) -> tuple[Tensor, Tensor]:
        """Return the source rows, projected if that is cheaper now, and the destinations' inputs."""
        x = self.drop_inputs(given, self.feat_drop.p)
        return project_rows(given, x, self.fc_neigh.weight.T, after_sum=False), x[
            : given.block.num_dst_nodes()
        ]

    def gather(
        self, given: StageInput, transformed: tuple[Tensor, Tensor], scattered: PartialSums
    ) -> PartialSums:
        block, weight, (rows, own) = given.block, given.edges.get("edge_weight"), transformed
        matrix = self.fc_neigh.weight.T
        if self._aggregator == "mean":
            around = project_rows(given, mean_in_edges(block, rows, weight), matrix, after_sum=True)
            return (around + functional.linear(own, self.fc_self.weight),)
        total = sum_in_edges(block, rows, weight) + rows[: block.num_dst_nodes()]
        total = total / (block.in_degrees().to(total).unsqueeze(-1) + 1)
        return (project_rows(given, total, matrix, after_sum=True),)

    def apply_nodes(self, block: DGLBlock, gathered: PartialSums) -> Tensor:
        (out,) = gathered
        bias = self.fc_self.bias if self._aggregator == "mean" else self.bias
        return _then(self.norm, _then(self.activation, _plus(out, bias)))


@final
class PoolStages(SplittableConv):
    """``SAGEConv`` with aggregator pool, by rows: ``fc_pool``'s are summed, the owner takes the max."""

    edges_after_sync = True

    def __init__(self, conv: dglnn.SAGEConv) -> None:
        super().__init__(conv)
        self.cut = {"fc_pool.weight": 1, "fc_self.weight": 1}

    def widths(self) -> LayerWidths:
        return LayerWidths(
            inputs=self.width,
            outputs=self.fc_neigh.out_features,
            summed=self.fc_pool.out_features,
        )

    def transform(self, given: StageInput) -> Tensor:
        return self.drop_inputs(given, self.feat_drop.p)

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
        return _then(self.norm, _then(self.activation, out))


@final
class SgcStages(SplittableConv):
    """``SGConv`` with k=1, by columns.

    DGL's own runs only on whole graphs: on a block it fails for every k above 0. The stages give the same
    result on a whole graph; on a block they apply DGL's symmetric norm of edge weights within the block: an
    edge counts ``w / sqrt(out-weight of its source * in-weight of its destination)``, with weights of 1 by
    default. Each further hop is a layer ``GraphConv(weight=False)``, since the linear map may come first.
    """

    def __init__(self, conv: dglnn.SGConv) -> None:
        super().__init__(conv)
        if conv._k != 1:
            raise ConfigError(
                f"SGConv(k={conv._k}) has {conv._k} hops, but a block has one: use k=1 in the first layer "
                "and GraphConv(weight=False) for each further hop. DGL's SGConv does not support blocks, so "
                "it does not train under strategy='data_parallel' either"
            )
        if conv._cached or conv.norm is not None:
            raise ConfigError(
                f"SGConv(cached={conv._cached}, norm={conv.norm}) caches the first batch's result or "
                "normalizes whole rows before its weights; use cached=False and norm=None, or normalize the "
                "features with torch.nn.LayerNorm, or use strategy='data_parallel' with another convolution"
            )
        self.cut = {"fc.weight": 1}

    def transform(self, given: StageInput) -> Tensor:
        rows = given.x
        if "edge_weight" not in given.edges:
            block = given.block
            degrees = block.out_degrees() if block.is_block else block.in_degrees()
            rows = rows * degrees.to(rows).clamp(min=1).rsqrt().unsqueeze(-1)
        return project_rows(given, rows, self.fc.weight.T, after_sum=False)

    def gather(self, given: StageInput, transformed: Tensor, scattered: PartialSums) -> PartialSums:
        self.check_in_edges(given.block)
        weight = given.edges.get("edge_weight")
        if weight is not None:
            total = sum_in_edges(given.block, transformed, dglnn.EdgeWeightNorm("both")(given.block, weight))
        else:
            degrees = given.block.in_degrees().to(transformed).clamp(min=1)
            total = sum_in_edges(given.block, transformed) * degrees.rsqrt().unsqueeze(-1)
        return (project_rows(given, total, self.fc.weight.T, after_sum=True),)

    def apply_nodes(self, block: DGLBlock, gathered: PartialSums) -> Tensor:
        return _plus(gathered[0], self.fc.bias)


def _graph_conv_stage(conv: dglnn.GraphConv) -> DeclaredStage:
    bias = ("bias",) if conv.bias is not None else ()
    widths = (
        {"width": conv._in_feats} if conv.weight is None else {"in": conv._in_feats, "out": conv._out_feats}
    )
    around: dict[str, Around] = {"none": "sum", "right": "mean", "left": "left", "both": "both"}
    return DeclaredStage(
        stage="rows" if conv.weight is None else "dense",
        config={**widths, "bias": bool(bias)},
        weights=bias if conv.weight is None else ("weight", *bias),
        around=around[conv._norm],
        takes_activation=True,
        activation=conv._activation,
    )


def _sage_stage(conv: dglnn.SAGEConv) -> DeclaredStage:
    if conv._aggre_type != "mean":
        raise ConfigError(f"has the aggregator {conv._aggre_type!r}, but stages know 'mean' only; use it")
    if conv.norm is not None:
        raise ConfigError("has a norm, which no stage knows; leave it out")
    own, neigh = conv.fc_self, conv.fc_neigh
    if own.in_features != neigh.in_features:
        raise ConfigError("has one width for sources and another for destinations; give it one")
    bias = ("fc_self.bias",) if own.bias is not None else ()
    return DeclaredStage(
        stage="sage",
        config={"in": neigh.in_features, "out": neigh.out_features, "bias": bool(bias)},
        weights=("fc_self.weight", "fc_neigh.weight", *bias),
        around="mean",
        own=True,
        takes_activation=True,
        activation=conv.activation,
        dropout="feat_drop",
    )


@final
@dataclass(frozen=True, kw_only=True)
class Convolution:
    """What is known of a class of ``dgl.nn``."""

    columns: Callable[[Any], SplittableConv] | None = None
    """Its stages by columns."""
    rows: Callable[[Any], SplittableConv] | None = None
    """Its stages by rows, under ``sync="inputs"``; None: those by columns."""
    against: str = ""
    """The reason where it cannot be split by columns."""
    on_workers: Callable[[Any], DeclaredStage] | None = None
    """Its stage of strategy ``lambda``; raises ConfigError with the reason where there is none."""
    on_blocks: bool = True
    """Whether DGL supports it on blocks, and not on whole graphs only."""
    like: str = "gcn"
    """The ready-made model of ``training.models`` that has it, or one alike."""


_SPREAD = "it takes the largest, the smallest and the spread of messages of whole rows"

CONVOLUTIONS: Mapping[type[nn.Module], Convolution] = MappingProxyType(
    {
        dglnn.SAGEConv: Convolution(
            columns=SageStages,
            rows=lambda conv: PoolStages(conv) if conv._aggre_type == "pool" else SageStages(conv),
            on_workers=_sage_stage,
            like="sage",
        ),
        dglnn.GraphConv: Convolution(columns=GraphConvStages, on_workers=_graph_conv_stage),
        dglnn.SGConv: Convolution(columns=SgcStages, on_blocks=False, like="sgc"),
        dglnn.GINConv: Convolution(columns=GinStages),
        dglnn.GATConv: Convolution(
            columns=GatStages, rows=lambda conv: GatStages(conv, by_rows=True), like="gat"
        ),
        dglnn.RelGraphConv: Convolution(columns=RelationalStages),
        dglnn.GATv2Conv: Convolution(
            rows=GatV2Stages,
            against="its logits are nonlinear in the sum of both ends, so an edge needs all columns of both",
            like="gat",
        ),
        dglnn.EdgeConv: Convolution(
            against="it takes the largest of its messages, and the largest of sums is no sum of the largest",
        ),
        dglnn.PNAConv: Convolution(against=_SPREAD, on_blocks=False),
        dglnn.DGNConv: Convolution(against=_SPREAD, on_blocks=False),
        dglnn.DotGatConv: Convolution(against="its logits are products of whole rows", like="gat"),
        dglnn.AGNNConv: Convolution(against="its logits are angles between whole rows", like="gat"),
        dglnn.GatedGraphConv: Convolution(
            against="it passes whole rows through a gated unit", on_blocks=False
        ),
        **dict.fromkeys(
            (
                dglnn.APPNPConv,
                dglnn.AtomicConv,
                dglnn.ChebConv,
                dglnn.EGNNConv,
                dglnn.GCN2Conv,
                dglnn.GroupRevRes,
                dglnn.TAGConv,
                dglnn.TWIRLSConv,
                dglnn.TWIRLSUnfoldingAndAttention,
            ),
            Convolution(on_blocks=False),
        ),
    }
)
"""By exact class: a subclass may compute something else."""


def sums_sources(module: nn.Module) -> bool:
    """Return whether ``module`` reads its sources by a sum or mean over in-edges only.

    A class that is not of DGL says so by ``sums_sources = True``.
    """
    # Exact types: a subclass may read more.
    if type(module) is dglnn.SAGEConv:
        return module._aggre_type in ("mean", "gcn")
    if type(module) is dglnn.GINConv:
        return module._aggregator_type in ("sum", "mean")
    return type(module) is dglnn.GraphConv or getattr(module, "sums_sources", False) is True


def make_stages(module: nn.Module, sync: Sync = "columns") -> SplittableConv:
    """Return ``module`` as stages; its parameters are shared, not copied.

    With ``sync="inputs"`` also layers that only begin with a linear map of each source row can be split.

    Raises:
        ConfigError: it cannot be split; the message has the reason and a remedy.
    """
    if isinstance(module, SplittableConv):
        return module
    known = CONVOLUTIONS.get(type(module), Convolution())
    make = known.rows or known.columns if sync == "inputs" else known.columns
    if make is not None:
        return make(module)
    other = "With sync='inputs' its projected rows are sent. " if known.rows is not None else ""
    can = [
        kind.__name__ for kind, one in CONVOLUTIONS.items() if one.columns or (one.rows and sync == "inputs")
    ]
    raise ConfigError(
        f"{type(module).__name__} cannot be cut by input columns: "
        f"{known.against or 'its stages are not defined'}. {other}These can be cut: {', '.join(can)}, and "
        "subclasses of dglx_dist.layers.base.SplittableConv; any module trains under "
        "strategy='data_parallel'"
    )
