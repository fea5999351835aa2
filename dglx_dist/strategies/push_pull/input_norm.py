"""LayerNorm of the input rows by column: mean and variance of a row are constants of the features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from dglx_dist.errors import ConfigError
from dglx_dist.layers.columns import Columns
from dglx_dist.layers.parts import cut_out
from dglx_dist.strategies.push_pull.origins import InputModule, Origin, Origins
from dglx_dist.strategies.push_pull.visit import OwnersInput


@final
class ColumnLayerNorm(InputModule):
    """Stands for ``nn.LayerNorm`` of the uncut input rows: has the part's entries of weight and bias.

    A node's row has the same mean and variance in every batch, so they are computed once, over all parts.

    Args:
        norm: What it stands for; its parameters are copied.
        runs: The part's columns.
        mean: (V,) float64 of every node's uncut row.
        variance: (V,) float64, biased.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, norm: nn.LayerNorm, runs: Sequence[Columns], mean: Tensor, variance: Tensor) -> None:
        super().__init__()
        named = dict(norm.named_parameters(recurse=False))
        self.cut, self.runs, self.origins = dict.fromkeys(named, 0), tuple(runs), Origins()
        for name in ("weight", "bias"):
            whole = named.get(name)
            part = None if whole is None else cut_out(whole.detach(), self.runs, 0)
            own = None if whole is None or part is None else nn.Parameter(part, whole.requires_grad)
            self.register_parameter(name, own)
        self.eps = norm.eps
        self._mean, self._variance = mean, variance
        self.train(norm.training)

    def forward(self, x: Tensor) -> Tensor:
        """Return the own columns of the normalized rows.

        Raises:
            ConfigError: ``x`` is not the features of a batch; or something has changed them before.
        """
        origin, own = self.origins.find(x), self.origins.own
        if origin is None or own is None:
            raise ConfigError(
                f"LayerNorm({self.width}) was cut by input columns, for it is as wide as the features, and "
                f"was given rows of shape {tuple(x.shape)} that are not the features of the batch. If it "
                "normalizes a later layer of that width, register it after the first layer; to normalize "
                "anything but the features as they came, use strategy='data_parallel'"
            )
        if not origin.plain or origin.runs != self.runs:
            raise ConfigError(
                f"LayerNorm({self.width}) was given features that something has changed before: mean and "
                "variance of what comes out need all columns in every batch; let the norm come first, or use "
                "strategy='data_parallel'"
            )
        with torch.no_grad():
            rows = self.normalized(x, own.nodes)
        self.origins.add(rows, Normalized(origin=origin, norm=self))
        return rows

    @property
    def width(self) -> int:
        """Columns of the uncut rows."""
        return self.runs[0].width

    def normalized(self, x: Tensor, nodes: Tensor) -> Tensor:
        """Return the normalized (L0, F_p) of the features ``x`` of ``nodes`` ((L0,) int64)."""
        # They stay where they were made: the nodes may be on a device.
        places = nodes.to(self._mean.device)
        mean, scale = self._mean[places], (self._variance[places] + self.eps).rsqrt()
        rows = (x - mean.to(x).unsqueeze(1)) * scale.to(x).unsqueeze(1)
        rows = rows if self.weight is None else rows * self.weight
        return rows if self.bias is None else rows + self.bias

    def extra_repr(self) -> str:
        """Like that of ``nn.LayerNorm``."""
        return f"({self.width},), eps={self.eps}"


@final
@dataclass(frozen=True, kw_only=True)
class Normalized(Origin):
    """The rows of another origin, normalized; with the weights that the module has when asked."""

    origin: Origin
    norm: ColumnLayerNorm

    @property
    def runs(self) -> tuple[Columns, ...]:
        """See :attr:`Origin.runs`."""
        return self.origin.runs

    def rows(self, owners: OwnersInput) -> Tensor:
        """See :meth:`Origin.rows`."""
        return self.norm.normalized(self.origin.rows(owners), owners.nodes)
