"""Ready-made models on unchanged ``dgl.nn``.

A custom model gains exact layer-wise inference by one method. ``inference_layers()`` returns one callable per
layer, first layer first. It maps ``(block, h)`` to the next ``h``, where ``h`` are (num_src, F) rows for the
block's sources and the result is (num_dst, H) rows for its destinations. If activation, norm and dropout are
between two convolutions, they belong to one of the two callables. ``forward(blocks, h)`` then applies the
callables in order, like :class:`Stack`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias, final

import dgl
import torch
from dgl.heterograph import DGLBlock
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dglx_dist.errors import ConfigError
from dglx_dist.internals.pytorch import to_device
from dglx_dist.layers.base import PartialSums, SplittableConv, StageInput, project_rows, sum_in_edges
from dglx_dist.training.model_kinds import KINDS, WEIGHTED, check_kind, has_option, list_kinds

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph


InferenceLayer: TypeAlias = Callable[[Any, Any], Any]
"""Maps (block, h) to the next h: tensors, or dictionaries and tuples for several types or outputs."""

RECOMPUTE = ("none", "exchange", "keep")
"""Values that a layer in a deep model saves for backward: all (``none``), only its input (``exchange``), or
its input and the rows from other ranks (``keep``). The rest is recomputed, and ``exchange`` also repeats the
row exchange.
"""

_NORM = "symmetric_norm"


@final
class SymmetricConv(SplittableConv):
    """GraphConv with Kipf's symmetric norm from the degrees in the whole graph.

    ``GraphConv(norm="both")`` on a block divides by the degrees inside the block, so its result depends on
    the batches. Here an edge from u with out-degree o_u to v with in-degree d_v has the norm ``sqrt(d_v) /
    (k_v sqrt(o_u))`` if k_v of the edges into v are drawn. This is the exact norm for the full neighbourhood,
    and its unbiased estimate for a sample. A degree 0 counts as 1.

    Blocks need ``dgl.NID`` on both sides. If the layer is split, the owner computes the norms.
    """

    sums_sources = True

    def __init__(self, in_dim: int, out_dim: int, graph: DistGraph) -> None:
        super().__init__()
        self.conv = dgl.nn.GraphConv(in_dim, out_dim, norm="none", allow_zero_in_degree=True)
        self.cut = {"conv.weight": 0}
        self._graph = graph

    def own_edges(self, block: DGLBlock) -> dict[str, Tensor]:
        source_factors, target_factors = self._compute_norm_factors(block, block.num_src_nodes())
        source, destination = (ends.long() for ends in block.edges())
        return {_NORM: target_factors[destination] * source_factors[source]}

    def _compute_norm_factors(self, block: DGLBlock, num_sources: int) -> tuple[Tensor, Tensor]:
        """Return the norm's factors: (num_sources,) for the first sources and (num_dst,) for the
        destinations.
        """
        weight = self.conv.weight
        in_degrees = self._graph.in_degrees(block.dstdata[dgl.NID]).clamp(min=1)
        out_degrees = self._graph.out_degrees(block.srcdata[dgl.NID]).clamp(min=1)
        in_degrees = to_device(in_degrees, weight.device).to(weight)
        out_degrees = to_device(out_degrees, weight.device).to(weight)

        num_drawn = block.in_degrees().clamp(min=1).to(in_degrees)
        return out_degrees[:num_sources].rsqrt(), in_degrees.sqrt() / num_drawn

    def forward(self, block: DGLBlock, x: Any, *edges: Tensor | None, **named: Tensor | None) -> Tensor:
        if self.run_parts is not None or edges or named:
            return super().forward(block, x, *edges, **named)

        # A strategy that exchanges sums passes only this rank's rows.
        rows = self._read_sources(block, x)
        weight = self.conv.weight
        source_factors, target_factors = self._compute_norm_factors(block, len(rows))
        rows = rows * source_factors.to(rows).unsqueeze(-1)

        # The order depends on widths only, because all ranks must send equally many columns.
        projects_first = weight.shape[0] > weight.shape[1]
        if projects_first:
            rows = rows @ weight
        total = sum_in_edges(block, rows)
        total = total * target_factors.to(total).unsqueeze(-1)
        if not projects_first:
            total = total @ weight
        return self.apply_nodes(block, (total,))

    def transform(self, inputs: StageInput) -> Tensor:
        return project_rows(inputs, inputs.x, self.conv.weight, after_sum=False)

    def gather(self, inputs: StageInput, transformed: Tensor, scattered: PartialSums) -> PartialSums:
        norm = inputs.edges[_NORM].to(transformed) * inputs.edges.get(WEIGHTED, 1.0)
        total = sum_in_edges(inputs.block, transformed, norm)
        return (project_rows(inputs, total, self.conv.weight, after_sum=True),)

    def apply_nodes(self, block: DGLBlock, gathered: PartialSums) -> Tensor:
        return gathered[0] + self.conv.bias


class Layered(nn.Module, ABC):
    """A model with one layer for each block."""

    num_layers: int
    target_scale: Tensor | None
    edge_weight: str | None = None
    """Edge data on the blocks that multiplies messages. None: messages are not weighed."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("target_scale", None)

    def standardise(self, mean: Tensor, deviation: Tensor) -> None:
        """From now on, multiply scores with C columns by (C,) ``deviation`` and add (C,) ``mean``.

        The layers then learn standardised regression targets, and scores keep the labels' unit.
        ``target_scale`` is (2, C) int64 with the bits of both in float64.
        """
        # An integer buffer keeps its bits under half(), and when floating-point buffers are averaged over
        # ranks.
        bits = torch.stack([mean, deviation]).double().view(torch.int64)
        self.target_scale = bits.to(next(self.parameters()).device)

    def forward(self, blocks: Any, h: Any) -> Any:
        """Map (num_src, F) rows for the first block to (num_dst, C) scores for the last block's destinations.

        ``blocks`` are one per layer, input-most first, or one graph for all layers. Any other number of
        blocks raises ConfigError.
        """
        if isinstance(blocks, dgl.DGLGraph):
            blocks = [blocks] * self.num_layers
        if len(blocks) != self.num_layers:
            raise ConfigError(
                f"{self.num_layers} layers need {self.num_layers} blocks, not {len(blocks)}. "
                "Use one fan-out per layer in the sampler."
            )

        for layer, block in zip(self.inference_layers(), blocks, strict=True):
            h = layer(block, h)
        return h

    def inference_layers(self) -> list[InferenceLayer]:
        """Return one ``(block, h) -> h`` per layer, first layer first."""
        layers: list[InferenceLayer] = [partial(self._layer, depth) for depth in range(self.num_layers)]
        if self.target_scale is not None:
            layers[-1] = partial(self._rescale_result, layers[-1])
        return layers

    def _rescale_result(self, last: InferenceLayer, block: Any, h: Any) -> Any:
        """Call the last layer, and return its rows on the targets' scale (rows * deviation + mean)."""
        assert self.target_scale is not None
        mean, deviation = self.target_scale.view(torch.float64)

        def rescale(rows: Tensor) -> Tensor:
            if rows.shape[1:] != mean.shape:
                return rows  # the loss raises the error for this shape
            # Under autocast rows are bfloat16, which is too coarse for a large mean.
            precise_rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
            return precise_rows * deviation.to(precise_rows) + mean.to(precise_rows)

        scores = last(block, h)
        if isinstance(scores, dict):
            return {ntype: rescale(rows) for ntype, rows in scores.items()}
        return rescale(scores)

    def _weights(self, block: Any, rows: Tensor) -> dict[str, Tensor]:
        """Return the keyword argument with edge weights for DGL's layers, or {} without ``edge_weight``."""
        if self.edge_weight is None:
            return {}
        return {WEIGHTED: block.edata[self.edge_weight].to(rows).reshape(-1)}

    @abstractmethod
    def _layer(self, depth: int, block: Any, h: Any) -> Any:
        """Return one layer's (num_dst, H) result on (num_src, F) rows."""


@final
class ResGCN(Layered):
    """ResGCN+: linear encoder, ``h <- h + conv(dropout(relu(norm(h))))`` per layer, linear decoder.

    The paper has 28, 56 or 112 ``layers``. Here they are SAGE layers with the mean. ``dropout`` comes before
    every convolution and the decoder. ``recompute`` is one of :data:`RECOMPUTE`, with the same gradients.
    Initial weights come from torch's global generator. ConfigError if a number is out of range or
    ``recompute`` is unknown.
    """

    def __init__(
        self,
        in_dim: int,
        hidden: int,
        classes: int,
        layers: int,
        dropout: float = 0.5,
        *,
        recompute: str = "none",
    ) -> None:
        super().__init__()
        _check_sizes("ResGCN+", in_dim, hidden, classes, layers, dropout)
        if recompute not in RECOMPUTE:
            raise ConfigError(f"recompute={recompute!r} must be one of {', '.join(RECOMPUTE)}")
        convs = [dgl.nn.SAGEConv(hidden, hidden, "mean") for _ in range(layers)]
        self.encoder = nn.Linear(in_dim, hidden)
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(layers + 1))
        self.layers = nn.ModuleList(convs)
        self.num_layers = layers
        self.dropout = nn.Dropout(dropout)
        self.decoder = nn.Linear(hidden, classes)
        self.recompute = recompute

    def _layer(self, depth: int, block: Any, h: Tensor) -> Tensor:
        if depth == 0:
            h = self.encoder(h)
        append_halo = _make_appender(block, keep=self.recompute == "keep")
        residual = partial(self._residual, depth, block, append_halo)
        if self.recompute == "none" or not torch.is_grad_enabled():
            h = residual(h)
        else:
            h = checkpoint(residual, h, use_reentrant=False)

        if depth == self.num_layers - 1:
            return self.decoder(self._activate(h, depth + 1))
        return h

    def _residual(self, depth: int, block: Any, append_halo: Callable[[Tensor], Tensor], h: Tensor) -> Tensor:
        rows = append_halo(self._activate(h, depth))
        out = self.layers[depth](block, rows, **self._weights(block, h))
        return h[: block.num_dst_nodes()] + out

    def _activate(self, h: Tensor, depth: int) -> Tensor:
        return self.dropout(torch.relu(self.norms[depth](h)))


def _make_appender(block: Any, *, keep: bool) -> Callable[[Tensor], Tensor]:
    """Return a function that appends halo rows to local rows, and exchanges the halo only once.

    Later calls, which recompute a layer in backward, use the halo rows from the first call. Without ``keep``,
    or for blocks without halo rows, the function returns its argument.
    """
    exchange = getattr(block, "all_rows", None)
    if not keep or exchange is None:
        return lambda h: h
    saved_halo: Tensor | None = None

    def append_halo(h: Tensor) -> Tensor:
        nonlocal saved_halo
        rows: Tensor = exchange(h, kept=saved_halo)
        if rows is not h and saved_halo is None:
            # The halo is copied, because a view would hold the local rows in memory, too.
            saved_halo = rows[len(h) :].detach().clone()
        return rows

    return append_halo


@final
class Stack(Layered):
    """Stacks convolutions, with norm, activation and dropout after all except the last.

    A convolution is called as ``conv(block, h)`` and returns (num_dst, H) rows, or (num_dst, heads, H) rows
    for attention.

    The following options need ``widths``, the columns in the features and in all results. ``residual`` adds a
    layer's input to its result, with a linear map if widths differ. It starts at the second layer, because
    the first layer may be split by input columns. With ``jk`` (jumping knowledge), a linear map on all
    layers' results gives the scores. The results are concatenated (``cat``), or reduced to their maximum
    (``max``). A layer then returns a tuple with the rows from all layers so far. ConfigError if ``norm`` or
    ``jk`` is unknown.
    """

    def __init__(
        self,
        convs: Sequence[nn.Module],
        activation: Callable[[Tensor], Tensor],
        dropout: float,
        *,
        widths: Sequence[int] = (),
        norm: str = "none",
        residual: bool = False,
        jk: str = "none",
    ) -> None:
        super().__init__()
        if norm not in ("none", "layer") or jk not in ("none", "cat", "max"):
            raise ConfigError(f"norm={norm!r} and jk={jk!r} must be none or layer, and none, cat or max")
        self.layers = nn.ModuleList(convs)
        self.num_layers = len(convs)
        self.dropout = nn.Dropout(dropout)
        self._activation, self._jk = activation, jk

        # Norms follow the layers, because a norm before the first layer would be split with it.
        norm_widths = widths[1:-1] if norm == "layer" else ()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for width in norm_widths)
        self.skips = nn.ModuleList()
        if residual:
            for in_dim, out_dim in list(pairwise(widths))[1 : len(convs)]:
                is_same = in_dim == out_dim
                self.skips.append(nn.Identity() if is_same else nn.Linear(in_dim, out_dim, bias=False))

        self.head = None
        if jk != "none":
            head_width = sum(widths[1:-1]) if jk == "cat" else widths[-2]
            self.head = nn.Linear(head_width, widths[-1])

    def _layer(self, depth: int, block: Any, h: Any) -> Any:
        """Compute layer ``depth``, and its residual connection, norm, activation, dropout and head.

        With a head (jumping knowledge), each layer passes on a tuple with the rows from all layers so far.
        """
        inputs = h if isinstance(h, tuple) else (h,)
        newest_input = inputs[-1]
        out = self.layers[depth](block, newest_input, **self._weights(block, newest_input))
        num_dst = block.num_dst_nodes()
        is_last = depth == self.num_layers - 1
        gives_scores = is_last and self.head is None
        if out.dim() == 3:
            # Attention has a row for each head.
            out = out.mean(1) if gives_scores else out.flatten(1)
        if depth and self.skips:
            out = out + self.skips[depth - 1](newest_input[:num_dst])
        if gives_scores:
            return out

        if self.norms:
            out = self.norms[depth](out)
        out = self.dropout(self._activation(out))
        if self.head is None:
            return out

        # The first layer's input are features, which the head does not get.
        earlier_rows = [rows[:num_dst] for rows in inputs] if depth else []
        rows_of_layers = (*earlier_rows, out)
        if not is_last:
            return rows_of_layers
        if self._jk == "cat":
            return self.head(torch.cat(rows_of_layers, 1))
        return self.head(torch.stack(rows_of_layers).amax(0))


@final
class APPNP(Layered):
    """APPNP (Gasteiger et al. 2019): two linear maps score a node's own row, and each layer is a hop.

    ``h <- (1 - teleport) mean(h) + teleport h_0``, with the mean over in-neighbours and the first scores h_0.
    Initial weights come from torch's global generator. ConfigError if a number is out of range.
    """

    def __init__(
        self, in_dim: int, hidden: int, classes: int, layers: int, dropout: float = 0.5, teleport: float = 0.1
    ) -> None:
        super().__init__()
        _check_sizes("APPNP", in_dim, hidden, classes, layers, dropout)
        if not 0.0 <= teleport <= 1.0:
            raise ConfigError(f"teleport={teleport} must be between 0 and 1")
        self.encoder = nn.Sequential(
            nn.Linear(in_dim, hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, classes)
        )
        self.layers = nn.ModuleList(_make_hops(classes, layers))
        self.num_layers = layers
        self.teleport = teleport

    def _layer(self, depth: int, block: Any, h: Any) -> Any:
        if depth == 0:
            initial_scores = h = self.encoder(h)
        else:
            initial_scores, h = h
        initial_scores = initial_scores[: block.num_dst_nodes()]
        means = self.layers[depth](block, h, **self._weights(block, h))
        scores = (1 - self.teleport) * means + self.teleport * initial_scores
        return scores if depth == self.num_layers - 1 else (initial_scores, scores)


class OwnRows(nn.Module):
    """A linear layer on the destinations' rows: a convolution without neighbours."""

    def __init__(self, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(in_dim, out_dim)

    def forward(self, block: Any, h: Tensor) -> Tensor:
        """Map (num_src, F) to (num_dst, H). Destinations come first among a block's sources."""
        return self.linear(h[: block.num_dst_nodes()])


def build_model(  # noqa: PLR0913 - all but four have defaults
    kind: str,
    in_dim: int,
    hidden: int,
    classes: int,
    layers: int = 2,
    dropout: float = 0.5,
    heads: int = 4,
    graph: DistGraph | None = None,
    *,
    teleport: float = 0.1,
    **between: Any,
) -> Stack | ResGCN | APPNP:
    """Build a model. Initial weights come from torch's global generator.

    Args:
        kind: ``sage`` (mean), ``gcn``, ``gat``, ``gatv2``, ``gin`` (sum, two linear maps), ``mlp``; ``sgc``
            (one linear map to the classes and a mean per layer, without ``hidden``), ``appnp`` or ``resgcn``.
        in_dim: Number of feature columns.
        hidden: Width between layers. For attention, over all heads together.
        classes: Width of the result.
        layers: Number of layers, at least 1.
        dropout: Probability in [0, 1).
        heads: Attention heads in ``gat`` and ``gatv2``. Must divide ``hidden``.
        graph: For ``gcn``, the graph with the degrees for the symmetric norm (:class:`SymmetricConv`).
            Without it a node takes the mean over its in-neighbours (``GraphConv(norm="right")``).
        teleport: Share that the first scores have in :class:`APPNP`. Other kinds ignore it.
        between: ``norm``, ``residual`` and ``jk`` for :class:`Stack`, for the first kinds up to ``mlp``.

    Raises:
        UnknownNameError: If ``kind`` is unknown.
        ConfigError: If a value is out of range, or ``kind`` does not support an option in ``between``.
    """
    check_kind(kind)
    _check_sizes(f"model {kind!r}", in_dim, hidden, classes, layers, dropout)
    active_options = [name for name, value in between.items() if value not in ("none", False)]
    unsupported = [name for name in active_options if not has_option(kind, name)]
    if unsupported:
        raise ConfigError(
            f"model {kind!r} takes no {' and no '.join(unsupported)}, because only {list_kinds('jk')} have "
            "norm, residual and jk. Remove these options."
        )

    if has_option(kind, "heads") and (heads < 1 or hidden % heads):
        raise ConfigError(f"heads={heads} must divide hidden={hidden}. Choose another number of heads.")
    options = {"heads": heads, "graph": graph, "teleport": teleport, **between}
    options = {name: value for name, value in options.items() if has_option(kind, name)}
    return KINDS[kind].build(in_dim, hidden, classes, layers, dropout, **options)


def _check_sizes(owner: str, in_dim: int, hidden: int, classes: int, layers: int, dropout: float) -> None:
    if layers < 1 or min(in_dim, hidden, classes) < 1 or not 0.0 <= dropout < 1.0:
        raise ConfigError(
            f"{owner} needs widths and layers of at least 1 and a dropout in [0, 1), but in_dim={in_dim}, "
            f"hidden={hidden}, classes={classes}, layers={layers}, dropout={dropout}"
        )


# Nodes without in-neighbours are normal in a graph, not an error.
_MEAN = {"norm": "right", "allow_zero_in_degree": True}


def _make_hops(width: int, count: int) -> list[nn.Module]:
    return [dgl.nn.GraphConv(width, width, weight=False, bias=False, **_MEAN) for _ in range(count)]


Conv: TypeAlias = Callable[..., nn.Module]
"""Maps (source columns, result columns, is last, ``heads`` or ``graph``) to a layer."""


def _make_builder(conv: Conv, activation: Callable[[Tensor], Tensor] = torch.relu) -> Callable[..., Stack]:
    """Return a function that builds a :class:`Stack` from the layers that ``conv`` makes."""

    def build(
        in_dim: int,
        hidden: int,
        classes: int,
        layers: int,
        dropout: float,
        *,
        norm: str = "none",
        residual: bool = False,
        jk: str = "none",
        **conv_options: Any,
    ) -> Stack:
        # With jumping knowledge, the last pair of widths belongs to the linear map.
        widths = [in_dim, *[hidden] * (layers - 1 + (jk != "none")), classes]
        pairs = list(pairwise(widths))
        last = len(pairs) - 1
        convs = [conv(*pair, depth == last, **conv_options) for depth, pair in enumerate(pairs[:layers])]
        return Stack(convs, activation, dropout, widths=widths, norm=norm, residual=residual, jk=jk)

    return build


def _gcn(in_dim: int, out_dim: int, _is_last: bool, graph: DistGraph | None) -> nn.Module:
    if graph is None:
        return dgl.nn.GraphConv(in_dim, out_dim, **_MEAN)
    return SymmetricConv(in_dim, out_dim, graph)


def _make_attention(layer: Callable[..., nn.Module]) -> Conv:
    def conv(in_dim: int, out_dim: int, is_last: bool, heads: int) -> nn.Module:
        return layer(in_dim, out_dim if is_last else out_dim // heads, heads, allow_zero_in_degree=True)

    return conv


def _gin(in_dim: int, out_dim: int, _is_last: bool) -> nn.Module:
    # There is no batch norm, because its means would cover one rank's rows only.
    maps = nn.Sequential(nn.Linear(in_dim, out_dim), nn.ReLU(), nn.Linear(out_dim, out_dim))
    return dgl.nn.GINConv(maps, "sum")


build_sage = _make_builder(lambda in_dim, out_dim, _last: dgl.nn.SAGEConv(in_dim, out_dim, "mean"))
build_gcn = _make_builder(_gcn)
build_gat = _make_builder(_make_attention(dgl.nn.GATConv), nn.functional.elu)
build_gatv2 = _make_builder(_make_attention(dgl.nn.GATv2Conv), nn.functional.elu)
build_gin = _make_builder(_gin)
build_mlp = _make_builder(lambda in_dim, out_dim, _last: OwnRows(in_dim, out_dim))


def build_sgc(in_dim: int, _hidden: int, classes: int, layers: int, dropout: float) -> Stack:
    """Build one linear map to the classes, followed by a mean per layer."""
    convs = [dgl.nn.GraphConv(in_dim, classes, **_MEAN), *_make_hops(classes, layers - 1)]
    return Stack(convs, torch.nn.Identity(), dropout)
