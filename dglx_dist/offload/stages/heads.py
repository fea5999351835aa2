"""What becomes of the sums of graph attention: residual, bias, activation, heads joined or averaged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, final

import numpy as np

from dglx_dist.offload.fields import Fields
from dglx_dist.offload.stages.activation import read_activation
from dglx_dist.offload.stages.linear import column_sums, read_width
from dglx_dist.records import Array

MAX_HEADS = 1024


class HeadsGradient(NamedTuple):
    """Gradients of what :class:`Heads` was given."""

    inputs: tuple[Array, ...]
    """Of the sums and, where there is one, of the residual: (n, heads x width) each, maybe one array."""
    bias: tuple[Array, ...]
    """Of the bias, (heads x width,); empty without one."""


@final
class Heads:
    """h = after(merge(activation(sums + residual + bias))), heads side by side in a row of the sums.

    Args:
        fields: ``heads``, ``width``: columns of one head; ``bias``, ``residual``: flags; ``merge``:
            ``flatten`` or ``mean``; ``activation``; ``after``: the activation behind the merge.

    Raises:
        ConfigError: a field is missing or wrong.
    """

    def __init__(self, fields: Fields) -> None:
        self.heads, self.width = fields.whole("heads", 1, MAX_HEADS), read_width(fields, "width")
        self.bias = fields.flag("bias")
        self.residual = fields.maybe("residual", fields.flag, False)
        self._mean = fields.choice("merge", ("flatten", "mean")) == "mean"
        self._activation, self._after = read_activation(fields), read_activation(fields, "after")

    @property
    def columns(self) -> int:
        """Columns of the sums."""
        return self.heads * self.width

    @property
    def merged_columns(self) -> int:
        """Columns of h."""
        return self.width if self._mean else self.columns

    @property
    def input_widths(self) -> tuple[int, ...]:
        """Of the sums, then of the residual where there is one."""
        return (self.columns,) * (1 + self.residual)

    def forward(self, bias: Sequence[Array], inputs: Sequence[Array]) -> Array:
        """Return h (n, merged columns) from one bias or none, and the sums with or without a residual."""
        return self._after.apply(self._merged(self._activation.apply(self._before(bias, inputs))))

    def backward(self, bias: Sequence[Array], inputs: Sequence[Array], gradient: Array) -> HeadsGradient:
        """Return the gradients, from that of h (n, merged columns)."""
        before = self._before(bias, inputs)
        merged = self._merged(self._activation.apply(before))
        spread = self._spread(self._after.pull_back(merged, gradient))
        slope = self._activation.pull_back(before, spread)
        return HeadsGradient((slope,) * (1 + self.residual), (column_sums(slope),) if self.bias else ())

    def _before(self, bias: Sequence[Array], inputs: Sequence[Array]) -> Array:
        out = inputs[0]
        if self.residual:
            out = out + inputs[1]
        if self.bias:
            out = np.add(out, bias[0], out=out if self.residual else None)
        return out

    def _merged(self, rows: Array) -> Array:
        if not self._mean:
            return rows
        return np.add.reduce(rows.reshape(-1, self.heads, self.width), axis=1) / self.heads

    def _spread(self, gradient: Array) -> Array:
        return np.tile(gradient / self.heads, (1, self.heads)) if self._mean else gradient
