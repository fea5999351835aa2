"""Ready-made models on unchanged ``dgl.nn``, for the command line and as patterns for one's own.

A model of one's own gains exact layer-wise inference by one method: ``inference_layers()`` returns, first
layer first, one callable per layer that maps ``(block, h)`` to the next ``h``, where ``h`` are (num_src, F)
rows of the block's sources and the result (num_dst, H) rows of its destinations. Whatever stands between two
convolutions (activation, norm, dropout) belongs to one of the two callables. ``forward(blocks, h)`` is then
those callables applied in order, as in :class:`Stack`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias, final

import dgl
import torch
from torch import Tensor, nn

from dglx_dist.errors import ConfigError
from dglx_dist.strategies.bounded.declared import DeclaredStage
from dglx_dist.training.deep import ResGCN, build_resgcn
from dglx_dist.training.kinds import check_kind
from dglx_dist.training.symmetric import SymmetricConv

if TYPE_CHECKING:
    from dglx_dist.graph import DistGraph

InferenceLayer: TypeAlias = Callable[[Any, Any], Any]
"""(block, h) to the next h; tensors, or with several types or outputs dictionaries and tuples of them."""


@final
class Stack(nn.Module):
    """Convolutions one after another, with activation and dropout between them.

    Args:
        convs: One module per layer, called as ``conv(block, h)``; (num_dst, H) or, for attention,
            (num_dst, heads, H) comes out.
        activation: Applied after all layers but the last.
        dropout: Probability, applied after the activation.
    """

    def __init__(
        self, convs: Sequence[nn.Module], activation: Callable[[Tensor], Tensor], dropout: float
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(convs)
        self.dropout = nn.Dropout(dropout)
        self._activation = activation

    def forward(self, blocks: Sequence[Any], h: Tensor) -> Tensor:
        """Map (num_src, F) rows of the first block to (num_dst, C) scores of the last one's destinations."""
        for layer, block in zip(self.inference_layers(), blocks, strict=True):
            h = layer(block, h)
        return h

    def inference_layers(self) -> list[InferenceLayer]:
        """Return one ``(block, h) -> h`` per layer, first layer first."""
        return [partial(self._layer, depth) for depth in range(len(self.layers))]

    def _layer(self, depth: int, block: Any, h: Tensor) -> Tensor:
        h = self.layers[depth](block, h)
        last = depth == len(self.layers) - 1
        if h.dim() == 3:
            h = h.mean(1) if last else h.flatten(1)
        return h if last else self.dropout(self._activation(h))


class OwnRows(nn.Module):
    """A linear layer on the destinations' own rows: a convolution that looks at no neighbour."""

    def __init__(self, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(in_dim, out_dim)

    def forward(self, block: Any, h: Tensor) -> Tensor:
        """Map (num_src, F) to (num_dst, H); destinations come first among a block's sources."""
        return self.linear(h[: block.num_dst_nodes()])

    def vertex_stage(self) -> DeclaredStage:
        """Return what strategy ``lambda`` runs on workers in its place."""
        config = {"in": self.linear.in_features, "out": self.linear.out_features}
        return DeclaredStage(
            stage="dense",
            config={**config, "bias": True, "transposed": True},
            weights=("linear.weight", "linear.bias"),
            around=None,
            own=True,
            takes_activation=True,
        )


def build_model(
    kind: str,
    in_dim: int,
    hidden: int,
    classes: int,
    layers: int = 2,
    dropout: float = 0.5,
    heads: int = 4,
    graph: DistGraph | None = None,
) -> Stack | ResGCN:
    """Build a model; initial weights come from torch's global generator.

    Args:
        kind: ``sage`` (mean), ``gcn``, ``sgc`` (one linear map to the classes and a mean per layer, nothing
            between them, so that ``hidden`` is not used), ``gat``, ``mlp`` or ``resgcn`` (many layers with
            skip connections, :mod:`dglx_dist.training.deep`).
        in_dim: Feature columns.
        hidden: Width between layers; for ``gat`` of all heads together.
        classes: Width of the result.
        layers: At least 1.
        dropout: Probability in [0, 1).
        heads: Attention heads of ``gat``; must divide ``hidden``.
        graph: For ``gcn``: take the symmetric norm from this graph's degrees (:class:`SymmetricConv`).
            Without it a node takes the mean over its in-neighbours (``GraphConv(norm="right")``), which
            needs no degrees beyond the block's.

    Raises:
        UnknownNameError: no such kind.
        ConfigError: a number is out of range.
    """
    check_kind(kind)
    if layers < 1 or min(in_dim, hidden, classes) < 1 or not 0.0 <= dropout < 1.0:
        raise ConfigError(
            f"model {kind!r} needs widths and layers of at least 1 and a dropout in [0, 1), but got "
            f"in_dim={in_dim}, hidden={hidden}, classes={classes}, layers={layers}, dropout={dropout}"
        )
    if kind == "resgcn":
        return build_resgcn(in_dim, hidden, classes, layers, dropout)
    if kind == "gat" and (heads < 1 or hidden % heads):
        raise ConfigError(f"heads={heads} must divide hidden={hidden}; choose another number of heads")
    if kind == "sgc":
        return Stack(_simplified(in_dim, classes, layers), torch.nn.Identity(), dropout)
    widths = [in_dim, *[hidden] * (layers - 1), classes]
    pairs = list(pairwise(widths))
    convs = [_conv(kind, a, b, heads, depth == layers - 1, graph) for depth, (a, b) in enumerate(pairs)]
    return Stack(convs, torch.nn.functional.elu if kind == "gat" else torch.relu, dropout)


def _simplified(in_dim: int, classes: int, layers: int) -> list[nn.Module]:
    """Return the layers of SGC; the linear map comes first, so that all hops aggregate few columns."""
    mean = {"norm": "right", "allow_zero_in_degree": True}
    hops = [dgl.nn.GraphConv(classes, classes, weight=False, bias=False, **mean) for _ in range(layers - 1)]
    return [dgl.nn.GraphConv(in_dim, classes, **mean), *hops]


def _conv(kind: str, in_dim: int, out_dim: int, heads: int, last: bool, graph: DistGraph | None) -> nn.Module:
    # A node whose in-neighbours are none is a fact of the graph, not a mistake of the user.
    if kind == "sage":
        return dgl.nn.SAGEConv(in_dim, out_dim, "mean")
    if kind == "gcn" and graph is not None:
        return SymmetricConv(in_dim, out_dim, graph)
    if kind == "gcn":
        return dgl.nn.GraphConv(in_dim, out_dim, norm="right", allow_zero_in_degree=True)
    if kind == "gat":
        width = out_dim if last else out_dim // heads
        return dgl.nn.GATConv(in_dim, width, heads, allow_zero_in_degree=True)
    return OwnRows(in_dim, out_dim)
