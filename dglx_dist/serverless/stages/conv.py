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
    Shapes,
    StageShapes,
    VertexStage,
    column_sums,
    is_wanted,
    read_activation,
    read_width,
)


class _Affine(VertexStage):
    """h = activation(z), where z is a sum of products of inputs and matrices, and of a bias. Saved: z.

    Args:
        fields: The config; the caller ends it.
        matrices: Shape of each matrix by name; {}: z is the input plus the bias, and nothing is saved: to
            recompute an addition is cheaper than to move its result.
        inputs: Number of the input that each matrix is multiplied by, in the order of the sum.
        transposed: Whether matrices are (outputs, inputs).
    """

    def __init__(
        self,
        fields: Fields,
        matrices: Shapes,
        widths: tuple[int, int],
        inputs: Sequence[int],
        transposed: bool,
    ) -> None:
        self._inputs, self._transposed, (num_in, num_out) = inputs, transposed, widths
        self._bias, self._activation = fields.flag("bias"), read_activation(fields)
        bias: Shapes = {"bias": (num_out,)} if self._bias else {}
        saved = (num_out,) if matrices else ()
        self.shapes = StageShapes(matrices | bias, (num_in,) * max(len(inputs), 1), (num_out,), saved)
        fields.end()

    def forward(self, weights: Sequence[Array], inputs: Sequence[Array]) -> Forward:
        z = self._sum(weights, inputs)
        return Forward((self._activation.apply(z),), (z,) if self._inputs else ())

    def backward(
        self,
        weights: Sequence[Array],
        inputs: Sequence[Array],
        gradients: Sequence[Array],
        *,
        saved: Sequence[Array] | None = None,
        wanted: Sequence[bool] | None = None,
    ) -> Backward:
        z = saved[0] if saved else self._sum(weights, inputs)
        dz = self._activation.pull_back(z, gradients[0])
        of_weights: list[Array] = []
        of_inputs: list[Array | None] = [None] * len(inputs)
        if not self._inputs and is_wanted(wanted, 0):
            of_inputs[0] = dz
        for weight, at in zip(weights, self._inputs, strict=False):
            if is_wanted(wanted, at):
                of_inputs[at] = dz @ (weight if self._transposed else weight.T)
            of_weights.append(dz.T @ inputs[at] if self._transposed else inputs[at].T @ dz)
        return Backward(tuple(of_inputs), (*of_weights, *([column_sums(dz)] if self._bias else [])))

    def _sum(self, weights: Sequence[Array], inputs: Sequence[Array]) -> Array:
        if not self._inputs:
            return inputs[0] + weights[0] if self._bias else inputs[0]
        products = (
            inputs[at] @ (weight.T if self._transposed else weight)
            for weight, at in zip(weights, self._inputs, strict=False)
        )
        z: Array = next(products)
        for product in products:
            z += product
        if self._bias:
            z += weights[-1]
        return z


@final
class Dense(_Affine):
    """h = activation(x W + b), as in ``dgl.nn.GraphConv``.

    Weights: ``weight`` (in, out), or (out, in) if transposed; ``bias`` (out,) if configured.
    Inputs: x (n, in). Outputs: h (n, out). Saved: x W + b (n, out).

    Args:
        config: ``in``, ``out``: columns; ``bias``: flag; ``transposed``: flag, false by default;
            ``activation``: see read_activation.
    """

    def __init__(self, config: Config) -> None:
        fields = Fields(config, "stage dense")
        widths = num_in, num_out = read_width(fields, "in"), read_width(fields, "out")
        transposed = fields.maybe("transposed", fields.flag, False)
        shape = (num_out, num_in) if transposed else widths
        super().__init__(fields, {"weight": shape}, widths, (0,), transposed)


@final
class Rows(_Affine):
    """h = activation(x + b), as in ``dgl.nn.GraphConv(weight=False)``.

    Weights: ``bias`` (width,) if configured. Inputs: x (n, width). Outputs: h (n, width). Saved: none.

    Args:
        config: ``width``: columns; ``bias``: flag; ``activation``: see read_activation.
    """

    def __init__(self, config: Config) -> None:
        fields = Fields(config, "stage rows")
        width = read_width(fields, "width")
        super().__init__(fields, {}, (width, width), (), False)


@final
class Sage(_Affine):
    """h = activation(own W_self^T + b + around W_neigh^T), as in ``dgl.nn.SAGEConv`` with its mean.

    Weights: ``fc_self.weight`` (out, in), ``fc_neigh.weight`` (out, in), ``bias`` (out,) if configured.
    Inputs: around (n, in), the gathered rows; own (n, in). Outputs: h (n, out). Saved: h before its
    activation, (n, out).

    Args:
        config: ``in``, ``out``: columns; ``bias``: flag; ``activation``: see read_activation.
    """

    def __init__(self, config: Config) -> None:
        fields = Fields(config, "stage sage")
        widths = num_in, num_out = read_width(fields, "in"), read_width(fields, "out")
        matrices = dict.fromkeys(("fc_self.weight", "fc_neigh.weight"), (num_out, num_in))
        super().__init__(fields, dict(matrices), widths, (1, 0), True)
