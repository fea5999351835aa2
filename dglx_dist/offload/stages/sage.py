"""ApplyVertex of GraphSAGE: gathered rows and the node's own, each times its weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from dglx_dist.offload.fields import Fields
from dglx_dist.offload.stages.activation import read_activation
from dglx_dist.offload.stages.base import Backward, Config, Forward, Shapes, VertexStage
from dglx_dist.offload.stages.linear import column_sums, is_wanted, read_width
from dglx_dist.records import Array


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
        slopes = (dz.T @ own, dz.T @ around)
        return Backward((d_around, d_own), (*slopes, column_sums(dz)) if self._bias else slopes)

    def _sum(self, weights: Sequence[Array], inputs: Sequence[Array]) -> Array:
        around, own = inputs
        z: Array = own @ weights[0].T
        z += around @ weights[1].T
        if self._bias:
            z += weights[2]
        return z
