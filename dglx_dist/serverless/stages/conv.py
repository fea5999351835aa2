"""Vertex stages of graph convolutions: dense, bias-only and SAGE."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from dglx_dist.records import Array
from dglx_dist.serverless.json_fields import Fields
from dglx_dist.serverless.stages.base import (
    Backward,
    Config,
    Forward,
    ShapedStage,
    Shapes,
    StageShapes,
    column_sums,
    is_wanted,
    read_activation,
    read_width,
)


@final
class Dense(ShapedStage):
    """h = activation(x W + b), as in ``dgl.nn.GraphConv``.

    Weights: ``weight`` (in, out), or (out, in) if transposed; ``bias`` (out,) if configured.
    Inputs: x (n, in). Outputs: h (n, out). Saved: x W + b (n, out).

    Args:
        config: ``in``, ``out``: columns; ``bias``: flag; ``transposed``: flag, false by default;
            ``activation``: see read_activation.
    """

    def __init__(self, config: Config) -> None:
        fields = Fields(config, "stage dense")
        num_in, num_out = read_width(fields, "in"), read_width(fields, "out")
        self._bias = fields.flag("bias")
        self._transposed = fields.maybe("transposed", fields.flag, False)
        self._activation = read_activation(fields)
        fields.end()
        shape = (num_out, num_in) if self._transposed else (num_in, num_out)
        bias: Shapes = {"bias": (num_out,)} if self._bias else {}
        self._shapes = StageShapes({"weight": shape} | bias, (num_in,), (num_out,), saved=(num_out,))

    def forward(self, weights: Sequence[Array], inputs: Sequence[Array]) -> Forward:
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
        (x,) = inputs
        z = self._product(weights, inputs) if saved is None else saved[0]
        dz = self._activation.pull_back(z, gradients[0])
        matrix = weights[0] if self._transposed else weights[0].T
        dx = dz @ matrix if is_wanted(wanted, 0) else None
        d_weight = dz.T @ x if self._transposed else x.T @ dz
        return Backward((dx,), (d_weight, column_sums(dz)) if self._bias else (d_weight,))

    def _product(self, weights: Sequence[Array], inputs: Sequence[Array]) -> Array:
        matrix = weights[0].T if self._transposed else weights[0]
        z: Array = inputs[0] @ matrix
        if self._bias:
            z += weights[1]
        return z


@final
class Rows(ShapedStage):
    """h = activation(x + b), as in ``dgl.nn.GraphConv(weight=False)``.

    Weights: ``bias`` (width,) if configured. Inputs: x (n, width). Outputs: h (n, width). Saved: none.

    Args:
        config: ``width``: columns; ``bias``: flag; ``activation``: see read_activation.
    """

    def __init__(self, config: Config) -> None:
        fields = Fields(config, "stage rows")
        width, self._bias = read_width(fields, "width"), fields.flag("bias")
        self._activation = read_activation(fields)
        fields.end()
        # Nothing is saved: recomputing an addition is cheaper than moving its result.
        self._shapes = StageShapes({"bias": (width,)} if self._bias else {}, (width,), (width,))

    def forward(self, weights: Sequence[Array], inputs: Sequence[Array]) -> Forward:
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
        dx = self._activation.pull_back(self._sum(weights, inputs), gradients[0])
        d_weights = (column_sums(dx),) if self._bias else ()
        return Backward((dx if is_wanted(wanted, 0) else None,), d_weights)

    def _sum(self, weights: Sequence[Array], inputs: Sequence[Array]) -> Array:
        return inputs[0] + weights[0] if self._bias else inputs[0]


@final
class Sage(ShapedStage):
    """h = activation(own W_self^T + b + around W_neigh^T), as in ``dgl.nn.SAGEConv`` with its mean.

    Weights: ``fc_self.weight`` (out, in), ``fc_neigh.weight`` (out, in), ``bias`` (out,) if configured.
    Inputs: around (n, in), the gathered rows; own (n, in). Outputs: h (n, out). Saved: h before its
    activation, (n, out).

    Args:
        config: ``in``, ``out``: columns; ``bias``: flag; ``activation``: see read_activation.
    """

    def __init__(self, config: Config) -> None:
        fields = Fields(config, "stage sage")
        num_in, num_out = read_width(fields, "in"), read_width(fields, "out")
        self._bias = fields.flag("bias")
        self._activation = read_activation(fields)
        fields.end()
        weights: Shapes = {"fc_self.weight": (num_out, num_in), "fc_neigh.weight": (num_out, num_in)}
        bias: Shapes = {"bias": (num_out,)} if self._bias else {}
        self._shapes = StageShapes(weights | bias, (num_in, num_in), (num_out,), saved=(num_out,))

    def forward(self, weights: Sequence[Array], inputs: Sequence[Array]) -> Forward:
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
        around, own = inputs
        z = self._sum(weights, inputs) if saved is None else saved[0]
        dz = self._activation.pull_back(z, gradients[0])
        d_around = dz @ weights[1] if is_wanted(wanted, 0) else None
        d_own = dz @ weights[0] if is_wanted(wanted, 1) else None
        d_weights = (dz.T @ own, dz.T @ around)
        return Backward((d_around, d_own), (*d_weights, column_sums(dz)) if self._bias else d_weights)

    def _sum(self, weights: Sequence[Array], inputs: Sequence[Array]) -> Array:
        around, own = inputs
        z: Array = own @ weights[0].T
        z += around @ weights[1].T
        if self._bias:
            z += weights[2]
        return z
