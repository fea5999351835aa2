"""Vertex and edge stages of graph attention: projection, edge softmax and the end of the layer."""

from __future__ import annotations

from typing import final

import numpy as np

from dglx_dist.data.json_fields import Fields
from dglx_dist.records import Array
from dglx_dist.serverless.stages.base import (
    Arrays,
    Backward,
    Config,
    EdgeStage,
    Forward,
    Mask,
    Rows,
    Shapes,
    StageShapes,
    VertexStage,
    column_sums,
    is_wanted,
    leaky_relu,
    read_activation,
    read_width,
)

MAX_HEADS = 1024
_RESIDUALS = ("none", "identity", "linear")


@final
class AttentionEdges(EdgeStage):
    """a = softmax over in-edges of leaky_relu(el of the source + er of the target), per head: (E, K).

    Args:
        config: ``heads`` K; ``slope`` of the leaky ReLU.
    """

    def __init__(self, config: Config) -> None:
        fields = Fields(config, "stage attention_edges")
        self._heads = fields.whole("heads", 1, MAX_HEADS)
        self._leaky = leaky_relu(fields.number("slope", -1e6, 1e6))
        fields.end()

    @property
    def width(self) -> int:
        return self._heads

    def forward(self, sources: Array, targets: Array, indptr: Array) -> Array:
        degrees = np.diff(indptr)
        out = self._leaky.apply(_logits(sources, targets, degrees))
        starts, lengths = _segments(indptr, degrees)
        if not len(starts):
            return out
        out -= np.repeat(np.maximum.reduceat(out, starts, axis=0), lengths, axis=0)
        np.exp(out, out=out)
        out /= np.repeat(np.add.reduceat(out, starts, axis=0), lengths, axis=0)
        return out

    def backward(
        self, sources: Array, targets: Array, indptr: Array, values: Array, gradients: Array
    ) -> Array:
        degrees = np.diff(indptr)
        out = values * gradients
        starts, lengths = _segments(indptr, degrees)
        if not len(starts):
            return out
        sums = np.repeat(np.add.reduceat(out, starts, axis=0), lengths, axis=0)
        np.multiply(values, np.subtract(gradients, sums, out=sums), out=out)
        return self._leaky.pull_back(_logits(sources, targets, degrees), out)


def _logits(sources: Array, targets: Array, degrees: Array) -> Array:
    logits = np.repeat(targets, degrees, axis=0)
    logits += sources
    return logits


def _segments(indptr: Array, degrees: Array) -> tuple[Array, Array]:
    # First edge and number of edges of each target with in-edges: reduceat does not support empty segments.
    has_edges = degrees > 0
    return indptr[:-1][has_edges], degrees[has_edges]


@final
class AttentionFinish(VertexStage):
    """The end of ``dgl.nn.GATConv``: h = after(merge(activation(sums + residual + bias))).

    Weights: ``bias`` (K x H,) if configured. Inputs: sums (n, K x H), residual (n, K x H) if configured.
    Outputs: h (n, K x H), or (n, H) if heads are averaged. Saved: nothing.

    Args:
        config: ``heads`` K, ``width`` H: columns of one head; ``bias``, ``residual``: flags; ``merge``:
            ``flatten`` or ``mean``; ``activation``; ``after``: the activation after the merge.
    """

    def __init__(self, config: Config) -> None:
        fields = Fields(config, "stage attention_finish")
        self._num_heads, width = fields.whole("heads", 1, MAX_HEADS), read_width(fields, "width")
        self._width, columns = width, self._num_heads * width
        self._bias, self._residual = fields.flag("bias"), fields.maybe("residual", fields.flag, False)
        self._mean = fields.choice("merge", ("flatten", "mean")) == "mean"
        self._activation, self._after = read_activation(fields), read_activation(fields, "after")
        fields.end()
        weights: Shapes = {"bias": (columns,)} if self._bias else {}
        inputs, merged = (columns,) * (1 + self._residual), width if self._mean else columns
        # Nothing is saved: recomputing additions is cheaper than moving their results.
        self.shapes = StageShapes(weights, inputs, (merged,))

    def forward(self, weights: Rows, inputs: Rows) -> Forward:
        merged = self._merged(self._activation.apply(self._before(weights, inputs)))
        return Forward((self._after.apply(merged),), ())

    def backward(
        self, weights: Rows, inputs: Rows, gradients: Rows, *, saved: Rows | None = None, wanted: Mask = None
    ) -> Backward:
        before = self._before(weights, inputs)
        merged = self._merged(self._activation.apply(before))
        spread = self._spread(self._after.pull_back(merged, gradients[0]))
        d_sums = self._activation.pull_back(before, spread)
        of_inputs = tuple(d_sums if is_wanted(wanted, index) else None for index in range(len(inputs)))
        return Backward(of_inputs, (column_sums(d_sums),) if self._bias else ())

    def _before(self, weights: Rows, inputs: Rows) -> Array:
        out = inputs[0]
        if self._residual:
            out = out + inputs[1]
        if self._bias:
            out = np.add(out, weights[0], out=out if self._residual else None)
        return out

    def _merged(self, rows: Array) -> Array:
        if not self._mean:
            return rows
        return np.add.reduce(rows.reshape(-1, self._num_heads, self._width), axis=1) / self._num_heads

    def _spread(self, gradient: Array) -> Array:
        return np.tile(gradient / self._num_heads, (1, self._num_heads)) if self._mean else gradient


@final
class AttentionProject(VertexStage):
    """The start of ``dgl.nn.GATConv``: z = h W^T, el = <z, attn_l>, er = <z, attn_r> per head.

    If the layer has a residual, the output r is the projected or unchanged h.

    Weights: ``fc.weight`` (K x H, in), ``attn_l`` and ``attn_r`` (1, K, H), ``res_fc.weight`` (K x H, in),
    ``res_fc.bias`` (K x H,); residuals as configured. Inputs: h (n, in). Outputs: z (n, K x H), el (n, K),
    er (n, K), and r (n, K x H) with a residual. Saved: z.

    Args:
        config: ``in``, ``heads`` K, ``width`` H; ``residual``: none (default), identity or linear;
            ``residual_bias``: flag, false by default.
    """

    def __init__(self, config: Config) -> None:
        fields = Fields(config, "stage attention_project")
        num_in, self._heads = read_width(fields, "in"), fields.whole("heads", 1, MAX_HEADS)
        self._width = read_width(fields, "width")
        self._columns = columns = self._heads * self._width
        kind = fields.maybe("residual", lambda name: fields.choice(name, _RESIDUALS), "none")
        self._has_residual, self._projects_residual = kind != "none", kind == "linear"
        self._residual_bias = fields.maybe("residual_bias", fields.flag, False)
        fields.end()
        if self._has_residual and not self._projects_residual and num_in != columns:
            raise fields.wrong("residual", f"'linear': the input has {num_in} columns, not {columns}")
        if self._residual_bias and not self._projects_residual:
            raise fields.wrong("residual_bias", "false: only a linear residual has a bias")
        matrix, vector = (columns, num_in), (1, self._heads, self._width)
        weights: Shapes = {"fc.weight": matrix, "attn_l": vector, "attn_r": vector}
        if self._projects_residual:
            weights["res_fc.weight"] = matrix
        if self._residual_bias:
            weights["res_fc.bias"] = (columns,)
        outputs = (columns, self._heads, self._heads, *((columns,) if self._has_residual else ()))
        self.shapes = StageShapes(weights, (num_in,), outputs, saved=(columns,))

    def forward(self, weights: Rows, inputs: Rows) -> Forward:
        (matrix, left, right), residual, (h,) = weights[:3], weights[3:], inputs
        z = h @ matrix.T
        logits = z @ self._logit_weights(left, right)
        outputs = (z, _part(logits, 0, self._heads), _part(logits, self._heads, None))
        if not self._has_residual:
            return Forward(outputs, (z,))
        r = h @ residual[0].T if self._projects_residual else h
        if self._residual_bias:
            r += residual[-1]
        return Forward((*outputs, r), (z,))

    def backward(
        self, weights: Rows, inputs: Rows, gradients: Rows, *, saved: Rows | None = None, wanted: Mask = None
    ) -> Backward:
        (matrix, left, right), residual, (h,) = weights[:3], weights[3:], inputs
        z = h @ matrix.T if saved is None else saved[0]
        d_logits = np.concatenate(gradients[1:3], axis=1)
        dz = d_logits @ self._logit_weights(left, right).T
        dz += gradients[0]
        d_weights: list[Array] = [dz.T @ h, *self._vector_gradients(z, d_logits)]
        if self._projects_residual:
            d_weights.append(gradients[3].T @ h)
        if self._residual_bias:
            d_weights.append(column_sums(gradients[3]))
        if not is_wanted(wanted, 0):
            return Backward((None,), tuple(d_weights))
        dh: Array = dz @ matrix
        if self._has_residual:
            dh += gradients[3] @ residual[0] if self._projects_residual else gradients[3]
        return Backward((dh,), tuple(d_weights))

    def _logit_weights(self, left: Array, right: Array) -> Array:
        # (K x H, 2K): z times this matrix gives el and er side by side, in one product.
        both = np.zeros((self._heads, self._width, 2, self._heads), dtype=left.dtype)
        head = np.arange(self._heads)
        both[head, :, 0, head] = left[0]
        both[head, :, 1, head] = right[0]
        return both.reshape(self._columns, 2 * self._heads)

    def _vector_gradients(self, z: Array, d_logits: Array) -> Arrays:
        gradients = (z.T @ d_logits).reshape(self._heads, self._width, 2, self._heads)
        head = np.arange(self._heads)
        return gradients[head, :, 0, head][None], gradients[head, :, 1, head][None]


def _part(rows: Array, first: int, last: int | None) -> Array:
    return np.ascontiguousarray(rows[:, first:last])
