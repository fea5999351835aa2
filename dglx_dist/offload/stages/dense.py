"""ApplyVertex of a graph convolution: gathered rows times weight, bias, activation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from dglx_dist.offload.fields import Fields
from dglx_dist.offload.stages.activation import read_activation
from dglx_dist.offload.stages.base import Backward, Config, Forward, Shapes, VertexStage
from dglx_dist.offload.stages.linear import column_sums, is_wanted, read_width
from dglx_dist.records import Array


@final
class Dense(VertexStage):
    """h = activation(x W + b), as in ``dgl.nn.GraphConv``.

    Weights: ``weight`` (in, out), or (out, in) where transposed; ``bias`` (out,) where there is one.
    Inputs: x (n, in). Outputs: h (n, out). Saved: x W + b (n, out).

    Args:
        config: ``in``, ``out``: columns; ``bias``: flag; ``transposed``: flag, false by default;
            ``activation``: see read_activation.

    Raises:
        ConfigError: a field is missing, unknown or wrong.
    """

    def __init__(self, config: Config) -> None:
        fields = Fields(config, "stage dense")
        self._in, self._out = read_width(fields, "in"), read_width(fields, "out")
        self._bias = fields.flag("bias")
        self._transposed = fields.maybe("transposed", fields.flag, False)
        self._activation = read_activation(fields)
        fields.end()

    @property
    def weight_shapes(self) -> Shapes:
        """``weight``, ``bias``."""
        shape = (self._out, self._in) if self._transposed else (self._in, self._out)
        bias: Shapes = {"bias": (self._out,)} if self._bias else {}
        return {"weight": shape} | bias

    @property
    def input_widths(self) -> tuple[int, ...]:
        """(in,)."""
        return (self._in,)

    @property
    def output_widths(self) -> tuple[int, ...]:
        """(out,)."""
        return (self._out,)

    @property
    def saved_widths(self) -> tuple[int, ...]:
        """(out,)."""
        return (self._out,)

    def forward(self, weights: Sequence[Array], inputs: Sequence[Array]) -> Forward:
        """Return (h,) and (z,)."""
        z = self._product(weights, inputs)
        return Forward((self._activation.apply(z),), (z,))

    def backward(
        self,
        weights: Sequence[Array],
        inputs: Sequence[Array],
        gradients: Sequence[Array],
        *,
        saved: Sequence[Array] | None = None,
        wanted: Sequence[bool] | None = None,
    ) -> Backward:
        """Return the gradients of x, and of weight and bias."""
        (x,) = inputs
        z = self._product(weights, inputs) if saved is None else saved[0]
        dz = self._activation.pull_back(z, gradients[0])
        matrix = weights[0] if self._transposed else weights[0].T
        dx = dz @ matrix if is_wanted(wanted, 0) else None
        slope = dz.T @ x if self._transposed else x.T @ dz
        return Backward((dx,), (slope, column_sums(dz)) if self._bias else (slope,))

    def _product(self, weights: Sequence[Array], inputs: Sequence[Array]) -> Array:
        matrix = weights[0].T if self._transposed else weights[0]
        z: Array = inputs[0] @ matrix
        if self._bias:
            z += weights[1]
        return z
