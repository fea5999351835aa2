"""ApplyVertex of a graph convolution: gathered rows times weight, bias, activation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from dglx_dist.records import Array
from dglx_dist.serverless.json_fields import Fields
from dglx_dist.serverless.stages.base import (
    Backward,
    Config,
    Forward,
    Shapes,
    VertexStage,
    column_sums,
    is_wanted,
    read_activation,
    read_width,
)


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


@final
class Rows(VertexStage):
    """h = activation(x + b), as in ``dgl.nn.GraphConv(weight=False)``.

    Weights: ``bias`` (width,) where there is one. Inputs: x (n, width). Outputs: h (n, width). Saved: none.

    Args:
        config: ``width``: columns; ``bias``: flag; ``activation``: see read_activation.

    Raises:
        ConfigError: a field is missing, unknown or wrong.
    """

    def __init__(self, config: Config) -> None:
        fields = Fields(config, "stage rows")
        self._width, self._bias = read_width(fields, "width"), fields.flag("bias")
        self._activation = read_activation(fields)
        fields.end()

    @property
    def weight_shapes(self) -> Shapes:
        """``bias``."""
        return {"bias": (self._width,)} if self._bias else {}

    @property
    def input_widths(self) -> tuple[int, ...]:
        """(width,)."""
        return (self._width,)

    @property
    def output_widths(self) -> tuple[int, ...]:
        """(width,)."""
        return (self._width,)

    @property
    def saved_widths(self) -> tuple[int, ...]:
        """Nothing: additions are not worth their bytes."""
        return ()

    def forward(self, weights: Sequence[Array], inputs: Sequence[Array]) -> Forward:
        """Return (h,) and nothing."""
        return Forward((self._activation.apply(self._sum(weights, inputs)),), ())

    def backward(
        self,
        weights: Sequence[Array],
        inputs: Sequence[Array],
        gradients: Sequence[Array],
        *,
        saved: Sequence[Array] | None = None,
        wanted: Sequence[bool] | None = None,
    ) -> Backward:
        """Return the gradients of x and of the bias."""
        slope = self._activation.pull_back(self._sum(weights, inputs), gradients[0])
        found = (column_sums(slope),) if self._bias else ()
        return Backward((slope if is_wanted(wanted, 0) else None,), found)

    def _sum(self, weights: Sequence[Array], inputs: Sequence[Array]) -> Array:
        return inputs[0] + weights[0] if self._bias else inputs[0]


@final
class Sage(VertexStage):
    """h = activation(own W_self^T + b + around W_neigh^T), as in ``dgl.nn.SAGEConv`` with its mean.

    Weights: ``fc_self.weight`` (out, in), ``fc_neigh.weight`` (out, in), ``bias`` (out,) where there is one.
    Inputs: around (n, in), the gathered rows; own (n, in). Outputs: h (n, out). Saved: h before its
    activation, (n, out).

    Args:
        config: ``in``, ``out``: columns; ``bias``: flag; ``activation``: see read_activation.

    Raises:
        ConfigError: a field is missing, unknown or wrong.
    """

    def __init__(self, config: Config) -> None:
        fields = Fields(config, "stage sage")
        self._in, self._out = read_width(fields, "in"), read_width(fields, "out")
        self._bias = fields.flag("bias")
        self._activation = read_activation(fields)
        fields.end()

    @property
    def weight_shapes(self) -> Shapes:
        """``fc_self.weight``, ``fc_neigh.weight``, ``bias``."""
        shape = (self._out, self._in)
        bias: Shapes = {"bias": (self._out,)} if self._bias else {}
        return {"fc_self.weight": shape, "fc_neigh.weight": shape} | bias

    @property
    def input_widths(self) -> tuple[int, ...]:
        """(in, in)."""
        return (self._in, self._in)

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
        z = self._sum(weights, inputs)
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
        """Return the gradients of around and own, and of the weights."""
        around, own = inputs
        z = self._sum(weights, inputs) if saved is None else saved[0]
        dz = self._activation.pull_back(z, gradients[0])
        d_around = dz @ weights[1] if is_wanted(wanted, 0) else None
        d_own = dz @ weights[0] if is_wanted(wanted, 1) else None
        of_weights = (dz.T @ own, dz.T @ around)
        return Backward((d_around, d_own), (*of_weights, column_sums(dz)) if self._bias else of_weights)

    def _sum(self, weights: Sequence[Array], inputs: Sequence[Array]) -> Array:
        around, own = inputs
        z: Array = own @ weights[0].T
        z += around @ weights[1].T
        if self._bias:
            z += weights[2]
        return z
