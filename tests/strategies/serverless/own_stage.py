"""A stage of a user's own, NumPy alone, as workers import it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dglx_dist.data.json_fields import Fields
from dglx_dist.records import Array
from dglx_dist.strategies.serverless.stages.base import Backward, Config, Forward, StageShapes, VertexStage


class Gate(VertexStage):
    """h = tanh(around W) * own[:, :out] + around W."""

    def __init__(self, config: Config) -> None:
        fields = Fields(config, "stage gate")
        wide, self._out = fields.integer("in", 1, 1000), fields.integer("out", 1, 1000)
        fields.reject_unread()
        self.shapes = StageShapes({"weight": (wide, self._out)}, (wide, wide), (self._out,))

    def forward(self, weights: Sequence[Array], inputs: Sequence[Array]) -> Forward:
        z = inputs[0] @ weights[0]
        return Forward((np.tanh(z) * inputs[1][:, : self._out] + z,), ())

    def backward(
        self,
        weights: Sequence[Array],
        inputs: Sequence[Array],
        gradients: Sequence[Array],
        *,
        saved: Sequence[Array] | None = None,
        wanted: Sequence[bool] | None = None,
    ) -> Backward:
        (around, own), (slope,) = inputs, gradients
        gate = np.tanh(around @ weights[0])
        dz = slope * own[:, : self._out] * (1 - gate * gate) + slope
        d_own = np.zeros_like(own)
        d_own[:, : self._out] = slope * gate
        return Backward((dz @ weights[0].T, d_own), (around.T @ dz,))
