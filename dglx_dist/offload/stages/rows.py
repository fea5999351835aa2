"""ApplyVertex of a graph convolution without a weight: gathered rows, bias, activation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from dglx_dist.offload.fields import Fields
from dglx_dist.offload.stages.activation import read_activation
from dglx_dist.offload.stages.base import Backward, Config, Forward, Shapes, VertexStage
from dglx_dist.offload.stages.linear import column_sums, is_wanted, read_width
from dglx_dist.records import Array


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
