"""ApplyVertex of graph attention, first part: rows projected, and their shares of the attention logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np

from dglx_dist.offload.fields import Fields
from dglx_dist.offload.stages.base import Arrays, Backward, Config, Forward, Shapes, VertexStage
from dglx_dist.offload.stages.heads import MAX_HEADS, Heads
from dglx_dist.offload.stages.linear import column_sums, is_wanted, read_width
from dglx_dist.records import Array

_RESIDUALS = ("none", "identity", "linear")


@final
class AttentionProject(VertexStage):
    """z = h W^T, el = <z, attn_l>, er = <z, attn_r> by head, as ``dgl.nn.GATConv`` begins.

    Where ``before`` is given, the stage finishes the attention layer before (see Heads) to get h; else its
    input is h. Where this layer has a residual, the projected or unchanged h leaves as the output r.

    Weights: ``before.bias`` (columns before,) where there is one, ``fc.weight`` (K x H, in), ``attn_l``
    and ``attn_r`` (1, K, H), ``res_fc.weight`` (K x H, in) and ``res_fc.bias`` (K x H,) where there are some.
    Inputs: h (n, in), or the sums, and residual, of the layer before. Outputs: z (n, K x H), el (n, K),
    er (n, K), r (n, K x H) where there is a residual. Saved: z.

    Args:
        config: ``in``, ``heads`` K, ``width`` H; ``before``: the fields of Heads, or null; ``residual``: none
            (default), identity or linear; ``residual_bias``: flag, false by default.

    Raises:
        ConfigError: a field is missing, unknown or wrong.
    """

    def __init__(self, config: Config) -> None:
        fields = Fields(config, "stage attention_project")
        self._in, self._heads = read_width(fields, "in"), fields.whole("heads", 1, MAX_HEADS)
        self._width = read_width(fields, "width")
        self._columns = self._heads * self._width
        self._before = fields.maybe("before", lambda name: _read_heads(fields, name), None)
        kind = fields.maybe("residual", lambda name: fields.choice(name, _RESIDUALS), "none")
        self._has_residual, self._projects_residual = kind != "none", kind == "linear"
        self._residual_bias = fields.maybe("residual_bias", fields.flag, False)
        fields.end()
        self._check(fields)

    @property
    def weight_shapes(self) -> Shapes:
        """``before.bias``, ``fc.weight``, ``attn_l``, ``attn_r``, ``res_fc.weight``, ``res_fc.bias``."""
        matrix, vector = (self._columns, self._in), (1, self._heads, self._width)
        shapes: Shapes = {}
        if self._before is not None and self._before.bias:
            shapes["before.bias"] = (self._before.columns,)
        shapes |= {"fc.weight": matrix, "attn_l": vector, "attn_r": vector}
        if self._projects_residual:
            shapes["res_fc.weight"] = matrix
        if self._residual_bias:
            shapes["res_fc.bias"] = (self._columns,)
        return shapes

    @property
    def input_widths(self) -> tuple[int, ...]:
        """(in,), or what the layer before left."""
        return (self._in,) if self._before is None else self._before.input_widths

    @property
    def output_widths(self) -> tuple[int, ...]:
        """(K x H, K, K), and K x H with a residual."""
        widths = (self._columns, self._heads, self._heads)
        return (*widths, self._columns) if self._has_residual else widths

    @property
    def saved_widths(self) -> tuple[int, ...]:
        """(K x H,)."""
        return (self._columns,)

    def forward(self, weights: Sequence[Array], inputs: Sequence[Array]) -> Forward:
        """Return (z, el, er[, r]) and (z,)."""
        bias, (matrix, left, right), residual = self._split(weights)
        h = self._finished(bias, inputs)
        z = h @ matrix.T
        logits = z @ self._both(left, right)
        outputs = (z, _part(logits, 0, self._heads), _part(logits, self._heads, None))
        if not self._has_residual:
            return Forward(outputs, (z,))
        r = h @ residual[0].T if self._projects_residual else h
        if self._residual_bias:
            r += residual[-1]
        return Forward((*outputs, r), (z,))

    def backward(
        self,
        weights: Sequence[Array],
        inputs: Sequence[Array],
        gradients: Sequence[Array],
        *,
        saved: Sequence[Array] | None = None,
        wanted: Sequence[bool] | None = None,
    ) -> Backward:
        """Return the gradients of the inputs and of the weights."""
        bias, (matrix, left, right), residual = self._split(weights)
        h = self._finished(bias, inputs)
        z = h @ matrix.T if saved is None else saved[0]
        d_logits = np.concatenate(gradients[1:3], axis=1)
        dz = d_logits @ self._both(left, right).T
        dz += gradients[0]
        slopes: list[Array] = [dz.T @ h, *self._vector_slopes(z, d_logits)]
        if self._projects_residual:
            slopes.append(gradients[3].T @ h)
        if self._residual_bias:
            slopes.append(column_sums(gradients[3]))
        if self._before is None:
            dh = self._back_to_h(dz, gradients, matrix, residual) if is_wanted(wanted, 0) else None
            return Backward((dh,), tuple(slopes))
        dh = self._back_to_h(dz, gradients, matrix, residual)
        first = self._before.backward(bias, inputs, dh)
        kept = (slope if is_wanted(wanted, index) else None for index, slope in enumerate(first.inputs))
        return Backward(tuple(kept), (*first.bias, *slopes))

    def _check(self, fields: Fields) -> None:
        if self._before is not None and self._before.merged_columns != self._in:
            fields.refuse("in", f"{self._before.merged_columns}, the columns that the layer before leaves")
        if self._has_residual and not self._projects_residual and self._in != self._columns:
            fields.refuse("residual", f"'linear': the input has {self._in} columns, not {self._columns}")
        if self._residual_bias and not self._projects_residual:
            fields.refuse("residual_bias", "false: only a linear residual has a bias")

    def _split(self, weights: Sequence[Array]) -> tuple[Sequence[Array], Sequence[Array], Sequence[Array]]:
        """Return the weights of the layer before, of the projection, and of the residual."""
        first = 1 if self._before is not None and self._before.bias else 0
        return weights[:first], weights[first : first + 3], weights[first + 3 :]

    def _finished(self, bias: Sequence[Array], inputs: Sequence[Array]) -> Array:
        return inputs[0] if self._before is None else self._before.forward(bias, inputs)

    def _back_to_h(
        self, dz: Array, gradients: Sequence[Array], matrix: Array, residual: Sequence[Array]
    ) -> Array:
        dh: Array = dz @ matrix
        if self._has_residual:
            dh += gradients[3] @ residual[0] if self._projects_residual else gradients[3]
        return dh

    def _both(self, left: Array, right: Array) -> Array:
        """(K x H, 2K): z times it gives el and er side by side, in one product."""
        both = np.zeros((self._heads, self._width, 2, self._heads), dtype=left.dtype)
        head = np.arange(self._heads)
        both[head, :, 0, head] = left[0]
        both[head, :, 1, head] = right[0]
        return both.reshape(self._columns, 2 * self._heads)

    def _vector_slopes(self, z: Array, d_logits: Array) -> Arrays:
        slopes = (z.T @ d_logits).reshape(self._heads, self._width, 2, self._heads)
        head = np.arange(self._heads)
        return slopes[head, :, 0, head][None], slopes[head, :, 1, head][None]


def _read_heads(fields: Fields, name: str) -> Heads:
    inner = Fields(fields.any(name), f"{fields.where} {name!r}")
    heads = Heads(inner)
    inner.end()
    return heads


def _part(rows: Array, first: int, last: int | None) -> Array:
    return np.ascontiguousarray(rows[:, first:last])
