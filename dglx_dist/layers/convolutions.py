"""Registry of graph convolutions: how each class in ``dgl.nn`` splits by input columns, and what it costs.

A convolution is one :class:`SplittableConv` here, and one entry in :data:`CONVOLUTIONS`. It is made from the
user's module, and shares the module's parameters under the same names. The constructor raises ConfigError,
with the reason, where a configuration cannot be split.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, final

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
    LayerWidths,
    PartialSums,
    SplittableConv,
    StageInput,
    apply_to_edges,
    lacks_columns,
    mean_in_edges,
    project_rows,
    sum_in_edges,
)


def _add_bias(rows: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return rows
    return rows + bias


def _apply(function: Callable[[Tensor], Tensor] | None, rows: Tensor) -> Tensor:
    if function is None:
        return rows
    return function(rows)


@final
class GatStages(SplittableConv):
    """Stages for ``GATConv``.

    A logit is linear in the input columns, el = <a_l, W x>, so each part has a share. The softmax is not
    linear, so the shares are summed (*scatter*) and every part computes the same attention. Each part then
    aggregates its own columns' share of the projected rows. Parts cannot compute complete outputs and add
    those, because the softmax over summed logits is not a sum of softmaxes.
    """

    shared = ("attn_l", "attn_r")

    def __init__(self, conv: dglnn.GATConv) -> None:
        super().__init__(conv)
        if conv.res_fc is not None and not isinstance(conv.res_fc, nn.Linear):
            raise ConfigError(
                "GATConv adds its input to its output (residual=True with equal widths), so parts would need "
                "all columns. Set residual=False in the first layer, or use strategy='data_parallel'."
            )

        self.heads = conv._num_heads
        self._width = conv._out_feats
        source_weights = ["fc.weight"]
        target_weights = []
        # A GATConv with two input widths has separate weights for sources and destinations.
        if "fc" not in conv._modules:
            self.ends = "together"
            source_weights = ["fc_src.weight"]
            target_weights = ["fc_dst.weight"]
        if conv.res_fc is not None:
            target_weights.append("res_fc.weight")
        self.cut = dict.fromkeys(source_weights + target_weights, 1)
        self.target_cut = tuple(target_weights)

    def transform(self, inputs: StageInput) -> tuple[Tensor, Tensor]:
        """Return the projected source rows (L0, K, H), and the destinations' inputs (D1, F_p)."""
        source_rows, target_rows = self.drop_ends(inputs, self.feat_drop.p)
        layer = self.fc if inputs.targets is None else self.fc_src
        return self._project(source_rows, layer.weight), target_rows

    def _project(self, rows: Tensor, weight: Tensor) -> Tensor:
        return functional.linear(rows, weight).view(-1, self.heads, self._width)

    def scatter(self, inputs: StageInput, transformed: tuple[Tensor, Tensor]) -> PartialSums:
        """Return this part's shares of the source logits (L0, K, 1) and the destination logits (D1, K, 1)."""
        projected_sources, target_rows = transformed
        if inputs.targets is None:
            projected_targets = projected_sources[: inputs.block.num_dst_nodes()]
        else:
            projected_targets = self._project(target_rows, self.fc_dst.weight)
        source_logits = (projected_sources * self.attn_l).sum(-1, keepdim=True)
        target_logits = (projected_targets * self.attn_r).sum(-1, keepdim=True)
        return source_logits, target_logits

    def gather(
        self, inputs: StageInput, transformed: tuple[Tensor, Tensor], scattered: PartialSums
    ) -> PartialSums:
        """Return this part's share of the output before the bias, one (D1, K, H)."""
        block = inputs.block
        projected_sources, target_rows = transformed
        self.check_in_edges(block)
        logits = self.leaky_relu(apply_to_edges(block, fn.u_add_v, *scattered))
        attention = self.drop_edges(inputs, edge_softmax(block, logits), self.attn_drop.p)
        edge_weight = inputs.edges.get("edge_weight")
        if edge_weight is not None:
            attention = attention * edge_weight.view(-1, 1, 1)

        out = sum_in_edges(block, projected_sources, attention)
        if self.res_fc is not None:
            out = out + functional.linear(target_rows, self.res_fc.weight).view_as(out)
        return (out,)

    @property
    def is_affine(self) -> bool:
        return self.activation is None

    def shift(self, rows: Tensor) -> Tensor:
        # If the residual is a Linear, DGL keeps the layer's bias in it.
        bias = self.bias if self.res_fc is None else self.res_fc.bias
        if bias is None:
            return rows
        return rows + bias.view(1, self.heads, self._width)

    def apply_nodes(self, block: DGLBlock, gathered: PartialSums) -> Tensor:
        return _apply(self.activation, self.shift(*gathered))


@final
class GinStages(SplittableConv):
    """Stages for ``GINConv`` by columns. The first Linear in ``apply_func`` is split."""

    def __init__(self, conv: dglnn.GINConv) -> None:
        super().__init__(conv)
        if conv._aggregator_type == "max":
            raise ConfigError(
                "GINConv with aggregator 'max' is not a sum of columns. Use 'sum' or 'mean', or "
                "strategy='data_parallel'."
            )

        linear = self.apply_func
        name = "apply_func.weight"
        if isinstance(linear, nn.Sequential) and len(linear):
            linear = linear[0]
            name = "apply_func.0.weight"
        if type(linear) is not nn.Linear:
            raise ConfigError(
                f"GINConv's apply_func begins with {type(linear).__name__}, which is not known to be linear. "
                "Use a torch.nn.Linear, or a torch.nn.Sequential that begins with one, or "
                "strategy='data_parallel'."
            )

        self.cut = {name: 1}
        # In a tuple, the module is not registered a second time. state_dict has it under apply_func.
        self._first = (linear,)
        self._mean = conv._aggregator_type == "mean"

    @property
    def sum_width(self) -> int:
        num_sums = 2 if self.eps.requires_grad else 1
        return num_sums * int(self._first[0].out_features)

    def widths(self) -> LayerWidths:
        """Return the column counts. ``GINConv`` sums inputs before all products."""
        linears = [module for module in self.apply_func.modules() if isinstance(module, nn.Linear)]
        return LayerWidths(inputs=self.width, outputs=linears[-1].out_features, summed=self.width)

    def transform(self, inputs: StageInput) -> Tensor:
        return functional.linear(inputs.x, self._first[0].weight)

    def gather(self, inputs: StageInput, transformed: Tensor, scattered: PartialSums) -> PartialSums:
        """Return (D1, H) sums over in-edges and, if eps is trained, the nodes' own (D1, H) rows."""
        reduce = mean_in_edges if self._mean else sum_in_edges
        neighbor_sums = reduce(inputs.block, transformed, inputs.edges.get("edge_weight"))
        target_rows = transformed[: inputs.block.num_dst_nodes()]
        # A trained eps needs full sums. Otherwise its gradient would come from one part alone.
        if self.eps.requires_grad:
            return neighbor_sums, target_rows
        return (neighbor_sums + (1 + self.eps) * target_rows,)

    def apply_nodes(self, block: DGLBlock, gathered: PartialSums) -> Tensor:
        out, *target_rows = gathered
        if target_rows:
            out = out + (1 + self.eps) * target_rows[0]
        out = _add_bias(out, self._first[0].bias)
        if isinstance(self.apply_func, nn.Sequential):
            out = self.apply_func[1:](out)
        return _apply(self.activation, out)


_POWER = {"both": -0.5, "left": -1.0, "right": -1.0}


@final
class GraphConvStages(SplittableConv):
    """Stages for ``GraphConv`` by columns."""

    ends = "sources"

    def __init__(self, conv: dglnn.GraphConv) -> None:
        super().__init__(conv)
        if conv.weight is None:
            raise ConfigError(
                "GraphConv(weight=False) keeps the input's columns, so the first layer has no sum over them. "
                "Keep its weight, or use strategy='data_parallel'."
            )
        self.cut = {"weight": 0}

    def transform(self, inputs: StageInput) -> Tensor:
        rows = inputs.x
        if self._norm in ("left", "both"):
            degrees = inputs.block.out_degrees().to(rows).clamp(min=1)
            rows = rows * degrees.pow(_POWER[self._norm]).unsqueeze(-1)
        return project_rows(inputs, rows, self.weight, after_sum=False)

    def gather(self, inputs: StageInput, transformed: Tensor, scattered: PartialSums) -> PartialSums:
        self.check_in_edges(inputs.block)
        total = sum_in_edges(inputs.block, transformed, inputs.edges.get("edge_weight"))
        return (project_rows(inputs, total, self.weight, after_sum=True),)

    @property
    def is_affine(self) -> bool:
        return self._activation is None

    def scale(self, block: DGLBlock, rows: Tensor) -> Tensor:
        if self._norm not in ("right", "both"):
            return rows
        degrees = block.in_degrees().to(rows).clamp(min=1)
        return rows * degrees.pow(_POWER[self._norm]).unsqueeze(-1)

    def shift(self, rows: Tensor) -> Tensor:
        return _add_bias(rows, self.bias)

    def apply_nodes(self, block: DGLBlock, gathered: PartialSums) -> Tensor:
        return _apply(self._activation, self.shift(self.scale(block, *gathered)))


@final
class RelationalStages(SplittableConv):
    """Stages for ``RelGraphConv`` by columns."""

    edge_arguments = ("etypes", "norm")
    required_edges = ("etypes",)

    def __init__(self, conv: dglnn.RelGraphConv) -> None:
        super().__init__(conv)
        if conv.linear_r.regularizer == "bdd":
            raise ConfigError(
                "RelGraphConv(regularizer='bdd') ties weights to blocks of input columns. Use 'basis' or "
                "None in the first layer, or strategy='data_parallel'."
            )

        self.cut = {"linear_r.W": 1}
        self.shared = ("linear_r.coeff",) if conv.linear_r.regularizer == "basis" else ()
        if conv.self_loop:
            self.cut["loop_weight"] = 0

    @property
    def sum_width(self) -> int:
        num_sums = 2 if self.self_loop and self.layer_norm else 1
        return num_sums * int(self.linear_r.W.shape[2])

    def widths(self) -> LayerWidths:
        columns, width = self.linear_r.W.shape[1:]
        return LayerWidths(inputs=columns, outputs=width, summed=width)

    def gather(self, inputs: StageInput, transformed: Tensor, scattered: PartialSums) -> PartialSums:
        """Return (D1, H) message sums and the nodes' own share, added unless a norm comes between."""
        neighbor_sums = self._sum_messages(inputs, transformed)
        if not self.self_loop:
            return (neighbor_sums,)
        target_rows = transformed[: inputs.block.num_dst_nodes()] @ self.loop_weight
        if self.layer_norm:
            return neighbor_sums, target_rows
        return (neighbor_sums + target_rows,)

    def apply_nodes(self, block: DGLBlock, gathered: PartialSums) -> Tensor:
        out, *target_rows = gathered
        if self.layer_norm:
            out = self.layer_norm_weight(out)
        if self.bias:
            out = out + self.h_bias
        if target_rows:
            out = out + target_rows[0]
        return self.dropout(_apply(self.activation, out))

    def _sum_messages(self, inputs: StageInput, rows: Tensor) -> Tensor:
        """Multiply ``rows`` by their edges' relation weights, and sum them over in-edges, as (D1, H)."""
        linear = self.linear_r
        weight = linear.W
        if linear.regularizer == "basis":
            # linear.get_weight() would use the uncut width.
            weight = torch.einsum("rb,bio->rio", linear.coeff, linear.W)
        if "etypes" not in inputs.edges:
            raise ConfigError("RelGraphConv needs the relation of each edge. Pass etypes, (E,) integers.")

        sources, targets = inputs.block.edges()
        out = rows.new_zeros((inputs.block.num_dst_nodes(), weight.shape[-1]))
        if not rows.numel() or not len(sources):
            # These zeros must depend on the weights and rows, so that both get a gradient.
            return out + 0 * weight.sum() + 0 * rows.sum()

        messages = gather_mm(rows[sources.long()], weight, idx_b=inputs.edges["etypes"])
        norm = inputs.edges.get("norm")
        if norm is not None:
            messages = messages * norm.view(-1, 1)
        return out.index_add(0, targets.long(), messages)


@final
class SageStages(SplittableConv):
    """Stages for ``SAGEConv`` with aggregator mean or gcn, by columns."""

    def __init__(self, conv: dglnn.SAGEConv) -> None:
        super().__init__(conv)
        self._aggregator = conv._aggre_type
        if self._aggregator not in ("mean", "gcn"):
            raise ConfigError(
                f"SAGEConv with aggregator {self._aggregator!r} has a nonlinear step before its sum, so it "
                "cannot be split by input columns. Use mean or gcn, or strategy='data_parallel'."
            )

        self.cut = {"fc_neigh.weight": 1}
        if self._aggregator == "mean":
            self.cut["fc_self.weight"] = 1
            self.ends = "apart"
            self.target_cut = ("fc_self.weight",)

    def transform(self, inputs: StageInput) -> tuple[Tensor, Tensor]:
        """Return the source rows, projected if that is cheaper now, and the destinations' inputs."""
        source_rows, target_rows = self.drop_ends(inputs, self.feat_drop.p)
        matrix = self.fc_neigh.weight.T
        if not lacks_columns(source_rows, matrix):
            source_rows = project_rows(inputs, source_rows, matrix, after_sum=False)
        return source_rows, target_rows

    def gather(
        self, inputs: StageInput, transformed: tuple[Tensor, Tensor], scattered: PartialSums
    ) -> PartialSums:
        source_rows, target_rows = transformed
        if self._aggregator == "mean":
            return (self._sum_ends(inputs, source_rows, target_rows),)

        # The aggregator gcn counts a node among its own neighbours.
        block = inputs.block
        edge_weight = inputs.edges.get("edge_weight")
        total = sum_in_edges(block, source_rows, edge_weight) + source_rows[: block.num_dst_nodes()]
        total = total / (block.in_degrees().to(total).unsqueeze(-1) + 1)
        return (project_rows(inputs, total, self.fc_neigh.weight.T, after_sum=True),)

    def _sum_ends(self, inputs: StageInput, source_rows: Tensor, target_rows: Tensor) -> Tensor:
        """Add (D1, H) terms for the neighbours' mean and the destinations, as far as this part has them."""
        matrix = self.fc_neigh.weight.T
        if lacks_columns(source_rows, matrix):
            return functional.linear(target_rows, self.fc_self.weight)
        means = mean_in_edges(inputs.block, source_rows, inputs.edges.get("edge_weight"))
        neighbor_term = project_rows(inputs, means, matrix, after_sum=True)
        if lacks_columns(target_rows, self.fc_self.weight.T):
            return neighbor_term
        return neighbor_term + functional.linear(target_rows, self.fc_self.weight)

    @property
    def is_affine(self) -> bool:
        return self.activation is None and self.norm is None

    def shift(self, rows: Tensor) -> Tensor:
        bias = self.fc_self.bias if self._aggregator == "mean" else self.bias
        return _add_bias(rows, bias)

    def apply_nodes(self, block: DGLBlock, gathered: PartialSums) -> Tensor:
        rows = _apply(self.activation, self.shift(*gathered))
        return _apply(self.norm, rows)


@final
class SgcStages(SplittableConv):
    """Stages for ``SGConv`` with k=1, by columns.

    DGL's own class runs only on complete graphs and fails on blocks for every k above 0. The stages give the
    same result on a complete graph. On a block they apply DGL's symmetric norm within the block: an edge
    counts ``w / sqrt(out-weight of its source * in-weight of its destination)``, and weights are 1 by
    default. Each further hop is a layer ``GraphConv(weight=False)``, because the linear map may come first.
    """

    def __init__(self, conv: dglnn.SGConv) -> None:
        super().__init__(conv)
        if conv._k != 1:
            raise ConfigError(
                f"SGConv(k={conv._k}) has {conv._k} hops, but a block has one. Use k=1 in the first layer "
                "and GraphConv(weight=False) for each further hop. DGL's SGConv does not support blocks, so "
                "it does not train under strategy='data_parallel' either."
            )

        if conv._cached or conv.norm is not None:
            raise ConfigError(
                f"SGConv(cached={conv._cached}, norm={conv.norm}) caches the first batch's result or "
                "normalizes complete rows before its weights. Use cached=False and norm=None, or normalize "
                "the features with torch.nn.LayerNorm, or use strategy='data_parallel' with another "
                "convolution."
            )

        self.cut = {"fc.weight": 1}

    def transform(self, inputs: StageInput) -> Tensor:
        rows = inputs.x
        if "edge_weight" not in inputs.edges:
            block = inputs.block
            degrees = block.out_degrees() if block.is_block else block.in_degrees()
            rows = rows * degrees.to(rows).clamp(min=1).rsqrt().unsqueeze(-1)
        return project_rows(inputs, rows, self.fc.weight.T, after_sum=False)

    def gather(self, inputs: StageInput, transformed: Tensor, scattered: PartialSums) -> PartialSums:
        block = inputs.block
        self.check_in_edges(block)
        edge_weight = inputs.edges.get("edge_weight")
        if edge_weight is not None:
            factors = dglnn.EdgeWeightNorm("both")(block, edge_weight)
            total = sum_in_edges(block, transformed, factors)
        else:
            degrees = block.in_degrees().to(transformed).clamp(min=1)
            total = sum_in_edges(block, transformed) * degrees.rsqrt().unsqueeze(-1)
        return (project_rows(inputs, total, self.fc.weight.T, after_sum=True),)

    def apply_nodes(self, block: DGLBlock, gathered: PartialSums) -> Tensor:
        return _add_bias(gathered[0], self.fc.bias)


@final
@dataclass(frozen=True, kw_only=True)
class Convolution:
    """Properties of one class in ``dgl.nn``."""

    columns: Callable[[Any], SplittableConv] | None = None
    """Function that returns the class's stages by columns."""
    against: str = ""
    """Reason why the class cannot be split by columns."""
    on_blocks: bool = True
    """Whether DGL supports the class on blocks, and not only on complete graphs."""
    like: str = "gcn"
    """Ready-made model in ``training.models`` that has this convolution or a similar one."""


# The second entries are for edges between two node types.
_WIDTHS = ("one width", "separate widths for sources and destinations")
_BETWEEN = ("within one node type", "between two node types")
_SPREAD = "it takes the maximum, the minimum and the spread of messages of complete rows"

CONVOLUTIONS: Mapping[type[nn.Module], Convolution] = MappingProxyType(
    {
        dglnn.SAGEConv: Convolution(columns=SageStages, like="sage"),
        dglnn.GraphConv: Convolution(columns=GraphConvStages),
        dglnn.SGConv: Convolution(columns=SgcStages, on_blocks=False, like="sgc"),
        dglnn.GINConv: Convolution(columns=GinStages),
        dglnn.GATConv: Convolution(columns=GatStages, like="gat"),
        dglnn.RelGraphConv: Convolution(columns=RelationalStages),
        dglnn.GATv2Conv: Convolution(
            against="its logits are nonlinear in the sum of both ends, so an edge needs all columns of both",
            like="gat",
        ),
        dglnn.EdgeConv: Convolution(
            against="it takes the maximum of its messages, and a maximum of sums is not a sum of maxima"
        ),
        dglnn.PNAConv: Convolution(against=_SPREAD, on_blocks=False),
        dglnn.DGNConv: Convolution(against=_SPREAD, on_blocks=False),
        dglnn.DotGatConv: Convolution(against="its logits are products of complete rows", like="gat"),
        dglnn.AGNNConv: Convolution(against="its logits are angles between complete rows", like="gat"),
        dglnn.GatedGraphConv: Convolution(
            against="it passes complete rows through a gated unit", on_blocks=False
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
"""Known convolutions by exact class, because a subclass may compute something else."""


def sums_sources(module: nn.Module) -> bool:
    """Return whether ``module`` reads its sources only by a sum or mean over in-edges.

    A class outside DGL can set ``sums_sources = True``.
    """
    # Compare exact types, because a subclass may read more.
    if type(module) is dglnn.SAGEConv:
        return module._aggre_type in ("mean", "gcn")
    if type(module) is dglnn.GINConv:
        return module._aggregator_type in ("sum", "mean")
    return type(module) is dglnn.GraphConv or getattr(module, "sums_sources", False) is True


def make_stages(module: nn.Module, *, bipartite: bool = False) -> SplittableConv:
    """Return ``module`` as stages that share its parameters.

    Raises ConfigError, with the reason and a remedy, if the module cannot be split. With ``bipartite``, edges
    lead between two node types, and otherwise within one. Not all modules support both.
    """
    convolution = CONVOLUTIONS.get(type(module), Convolution())
    if isinstance(module, SplittableConv):
        stages = module
    elif convolution.columns is not None:
        stages = convolution.columns(module)
    else:
        reason = convolution.against or "its stages are not defined"
        names = [conv_class.__name__ for conv_class, entry in CONVOLUTIONS.items() if entry.columns]
        raise ConfigError(
            f"{type(module).__name__} cannot be cut by input columns: {reason}. Use one of "
            f"{', '.join(names)} or a subclass of dglx_dist.layers.base.SplittableConv, or "
            "strategy='data_parallel', which trains any module."
        )

    unsupported_ends = "one type" if bipartite else "together"
    if stages.ends == unsupported_ends:
        raise ConfigError(
            f"{type(module).__name__} with {_WIDTHS[not bipartite]} cannot be split on edges "
            f"{_BETWEEN[bipartite]}. Build it with {_WIDTHS[bipartite]} if it supports that, or use "
            "strategy='data_parallel'."
        )
    return stages
