"""ApplyVertex behind the last attention layer: bias, activation, heads joined or averaged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from dglx_dist.offload.fields import Fields
from dglx_dist.offload.stages.base import Backward, Config, Forward, Shapes, VertexStage
from dglx_dist.offload.stages.heads import Heads
from dglx_dist.offload.stages.linear import is_wanted
from dglx_dist.records import Array


@final
class AttentionFinish(VertexStage):
    """h = after(merge(activation(sums + residual + bias))), as ``dgl.nn.GATConv`` ends; see Heads.

    Weights: ``bias`` (K x H,) where there is one. Inputs: sums (n, K x H), residual (n, K x H) where
    there is one. Outputs: h (n, K x H), or (n, H) where heads are averaged. Saved: nothing.

    Args:
        config: The fields of Heads.

    Raises:
        ConfigError: a field is missing, unknown or wrong.
    """

    def __init__(self, config: Config) -> None:
        fields = Fields(config, "stage attention_finish")
        self._heads = Heads(fields)
        fields.end()

    @property
    def weight_shapes(self) -> Shapes:
        """``bias``."""
        return {"bias": (self._heads.columns,)} if self._heads.bias else {}

    @property
    def input_widths(self) -> tuple[int, ...]:
        """K x H, once or twice."""
        return self._heads.input_widths

    @property
    def output_widths(self) -> tuple[int, ...]:
        """(K x H,) or (H,)."""
        return (self._heads.merged_columns,)

    @property
    def saved_widths(self) -> tuple[int, ...]:
        """Nothing: additions are not worth their bytes."""
        return ()

    def forward(self, weights: Sequence[Array], inputs: Sequence[Array]) -> Forward:
        """Return (h,) and nothing."""
        return Forward((self._heads.forward(weights, inputs),), ())

    def backward(
        self,
        weights: Sequence[Array],
        inputs: Sequence[Array],
        gradients: Sequence[Array],
        *,
        saved: Sequence[Array] | None = None,
        wanted: Sequence[bool] | None = None,
    ) -> Backward:
        """Return the gradients of the inputs and of the bias."""
        found = self._heads.backward(weights, inputs, gradients[0])
        kept = (slope if is_wanted(wanted, index) else None for index, slope in enumerate(found.inputs))
        return Backward(tuple(kept), found.bias)
