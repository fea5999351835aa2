"""ResGCN+ (DeeperGCN's res+ blocks; algorithms 3.6): dozens of narrow layers, computed again in backward.

What a layer does before its convolution works on a node's own row, so where rows are exchanged between ranks
it is the convolution's input that travels, ``hidden`` numbers a node in every layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, final

import dgl
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dglx_dist.errors import ConfigError
from dglx_dist.training.kinds import check_recompute
from dglx_dist.training.symmetric import SymmetricConv

if TYPE_CHECKING:
    from dglx_dist.graph import DistGraph


@final
class ResGCN(nn.Module):
    """A linear encoder, ``h <- h + conv(dropout(relu(norm(h))))`` per layer, and a linear decoder.

    Args:
        in_dim: Feature columns.
        classes: Width of the result.
        convs: One module per layer, called as ``conv(block, h)``: (num_src, H) to (num_dst, H).
        hidden: H.
        dropout: Probability, before every convolution and before the decoder.
        recompute: What backward computes again, one of ``training.kinds.RECOMPUTE``; the gradients are the
            same.

    Raises:
        ConfigError: there is no such way to recompute.
    """

    def __init__(
        self,
        in_dim: int,
        classes: int,
        convs: Sequence[nn.Module],
        *,
        hidden: int,
        dropout: float,
        recompute: str = "none",
    ) -> None:
        super().__init__()
        check_recompute(recompute)
        self.encoder = nn.Linear(in_dim, hidden)
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(len(convs) + 1))
        self.layers = nn.ModuleList(convs)
        self.dropout = nn.Dropout(dropout)
        self.decoder = nn.Linear(hidden, classes)
        self.recompute = recompute

    def forward(self, blocks: Any, h: Tensor) -> Tensor:
        """Map (num_src, F) rows of the first block to (num_dst, C) scores of the last one's destinations.

        Args:
            blocks: One per layer, input-most first; or one graph for all layers.
            h: Features.
        """
        if isinstance(blocks, dgl.DGLGraph):
            blocks = [blocks] * len(self.layers)
        for layer, block in zip(self.inference_layers(), blocks, strict=True):
            h = layer(block, h)
        return h

    def inference_layers(self) -> list[Callable[[Any, Tensor], Tensor]]:
        """Return one ``(block, h) -> h`` per layer, first layer first, which encodes; the last decodes."""
        return [partial(self._layer, depth) for depth in range(len(self.layers))]

    def _layer(self, depth: int, block: Any, h: Tensor) -> Tensor:
        if depth == 0:
            h = self.encoder(h)
        residual = partial(self._residual, depth, block, _Halo(block, keep=self.recompute == "keep"))
        if self.recompute == "none" or not torch.is_grad_enabled():
            h = residual(h)
        else:
            h = checkpoint(residual, h, use_reentrant=False)
        return self.decoder(self._activated(h, depth + 1)) if depth == len(self.layers) - 1 else h

    def _residual(self, depth: int, block: Any, halo: _Halo, h: Tensor) -> Tensor:
        out = self.layers[depth](block, halo.all_rows(self._activated(h, depth)))
        return h[: block.num_dst_nodes()] + out

    def _activated(self, h: Tensor, depth: int) -> Tensor:
        out: Tensor = self.dropout(torch.relu(self.norms[depth](h)))
        return out


class _Halo:
    """The halo's rows of one layer in one step, kept for when it is computed again.

    Args:
        block: Of the layer; those of strategies that exchange rows have a method ``all_rows``.
        keep: Whether to keep them; else the convolution's own exchange is left alone.
    """

    def __init__(self, block: Any, *, keep: bool) -> None:
        self._ask = getattr(block, "all_rows", None) if keep else None
        self._kept: Tensor | None = None

    def all_rows(self, h: Tensor) -> Tensor:
        """Return the rows of all sources where they are kept, else ``h``."""
        if self._ask is None:
            return h
        rows: Tensor = self._ask(h, kept=self._kept)
        if rows is not h and self._kept is None:
            # A view would keep the own rows too.
            self._kept = rows[len(h) :].detach().clone()
        return rows


def build_resgcn(
    in_dim: int,
    hidden: int,
    classes: int,
    layers: int,
    dropout: float = 0.5,
    *,
    conv: str = "sage",
    graph: DistGraph | None = None,
    recompute: str = "none",
) -> ResGCN:
    """Build a ResGCN+; initial weights come from torch's global generator.

    Args:
        in_dim: Feature columns.
        hidden: Width of all layers.
        classes: Width of the result.
        layers: At least 1; 28, 56 or 112 in the paper.
        dropout: Probability in [0, 1).
        conv: ``sage`` (mean; the paper's) or ``gcn``.
        graph: For ``gcn``: as in :func:`dglx_dist.training.models.build_model`.
        recompute: See :class:`ResGCN`.

    Raises:
        ConfigError: a number is out of range, or there is no such convolution or way to recompute.
    """
    if layers < 1 or min(in_dim, hidden, classes) < 1 or not 0.0 <= dropout < 1.0:
        raise ConfigError(
            "ResGCN+ needs widths and layers of at least 1 and a dropout in [0, 1), but got "
            f"in_dim={in_dim}, hidden={hidden}, classes={classes}, layers={layers}, dropout={dropout}"
        )
    if conv not in ("sage", "gcn"):
        raise ConfigError(f"conv={conv!r} of ResGCN+ must be 'sage' or 'gcn'")
    convs = [_conv(conv, hidden, graph) for _ in range(layers)]
    return ResGCN(in_dim, classes, convs, hidden=hidden, dropout=dropout, recompute=recompute)


def _conv(kind: str, width: int, graph: DistGraph | None) -> nn.Module:
    if kind == "sage":
        return dgl.nn.SAGEConv(width, width, "mean")
    if graph is not None:
        return SymmetricConv(width, width, graph)
    return dgl.nn.GraphConv(width, width, norm="right", allow_zero_in_degree=True)
