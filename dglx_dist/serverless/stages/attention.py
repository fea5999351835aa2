"""ApplyVertex of graph attention, first part: rows projected, and their shares of the attention logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, final

import numpy as np

from dglx_dist.records import Array
from dglx_dist.serverless.json_fields import Fields
from dglx_dist.serverless.stages.base import (
    Arrays,
    Backward,
    Config,
    EdgeStage,
    Forward,
    LeakyRelu,
    Shapes,
    VertexStage,
    column_sums,
    is_wanted,
    read_activation,
    read_width,
)

MAX_HEADS = 1024


class HeadsGradient(NamedTuple):
    """Gradients of what :class:`Heads` was given."""

    inputs: tuple[Array, ...]
    """Of the sums and, where there is one, of the residual: (n, heads x width) each, maybe one array."""
    bias: tuple[Array, ...]
    """Of the bias, (heads x width,); empty without one."""


@final
class Heads:
    """h = after(merge(activation(sums + residual + bias))), heads side by side in a row of the sums.

    Args:
        fields: ``heads``, ``width``: columns of one head; ``bias``, ``residual``: flags; ``merge``:
            ``flatten`` or ``mean``; ``activation``; ``after``: the activation behind the merge.

    Raises:
        ConfigError: a field is missing or wrong.
    """

    def __init__(self, fields: Fields) -> None:
        self.heads, self.width = fields.whole("heads", 1, MAX_HEADS), read_width(fields, "width")
        self.bias = fields.flag("bias")
        self.residual = fields.maybe("residual", fields.flag, False)
        self._mean = fields.choice("merge", ("flatten", "mean")) == "mean"
        self._activation, self._after = read_activation(fields), read_activation(fields, "after")

    @property
    def columns(self) -> int:
        """Columns of the sums."""
        return self.heads * self.width

    @property
    def merged_columns(self) -> int:
        """Columns of h."""
        return self.width if self._mean else self.columns

    @property
    def input_widths(self) -> tuple[int, ...]:
        """Of the sums, then of the residual where there is one."""
        return (self.columns,) * (1 + self.residual)

    def forward(self, bias: Sequence[Array], inputs: Sequence[Array]) -> Array:
        """Return h (n, merged columns) from one bias or none, and the sums with or without a residual."""
        return self._after.apply(self._merged(self._activation.apply(self._before(bias, inputs))))

    def backward(self, bias: Sequence[Array], inputs: Sequence[Array], gradient: Array) -> HeadsGradient:
        """Return the gradients, from that of h (n, merged columns)."""
        before = self._before(bias, inputs)
        merged = self._merged(self._activation.apply(before))
        spread = self._spread(self._after.pull_back(merged, gradient))
        slope = self._activation.pull_back(before, spread)
        return HeadsGradient((slope,) * (1 + self.residual), (column_sums(slope),) if self.bias else ())

    def _before(self, bias: Sequence[Array], inputs: Sequence[Array]) -> Array:
        out = inputs[0]
        if self.residual:
            out = out + inputs[1]
        if self.bias:
            out = np.add(out, bias[0], out=out if self.residual else None)
        return out

    def _merged(self, rows: Array) -> Array:
        if not self._mean:
            return rows
        return np.add.reduce(rows.reshape(-1, self.heads, self.width), axis=1) / self.heads

    def _spread(self, gradient: Array) -> Array:
        return np.tile(gradient / self.heads, (1, self.heads)) if self._mean else gradient


@final
class AttentionEdges(EdgeStage):
    """a = softmax over in-edges of leaky_relu(el of the source + er of the target), by head.

    Args:
        config: ``heads`` K; ``slope`` of the leaky ReLU.

    Raises:
        ConfigError: a field is missing, unknown or wrong.
    """

    def __init__(self, config: Config) -> None:
        fields = Fields(config, "stage attention_edges")
        self._heads = fields.whole("heads", 1, MAX_HEADS)
        self._leaky = LeakyRelu(fields.number("slope", -1e6, 1e6))
        fields.end()

    @property
    def width(self) -> int:
        """K."""
        return self._heads

    def forward(self, sources: Array, targets: Array, indptr: Array) -> Array:
        """Return the attention, (E, K): it sums to 1 over each target's in-edges."""
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
        """Return the gradient of (el + er) of every edge, (E, K)."""
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
    """First edge and number of edges of each target that has some: reduceat knows no empty segments."""
    some = degrees > 0
    return indptr[:-1][some], degrees[some]


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
        of_weights: list[Array] = [dz.T @ h, *self._vector_gradients(z, d_logits)]
        if self._projects_residual:
            of_weights.append(gradients[3].T @ h)
        if self._residual_bias:
            of_weights.append(column_sums(gradients[3]))
        if self._before is None:
            dh = self._back_to_h(dz, gradients, matrix, residual) if is_wanted(wanted, 0) else None
            return Backward((dh,), tuple(of_weights))
        dh = self._back_to_h(dz, gradients, matrix, residual)
        first = self._before.backward(bias, inputs, dh)
        kept = (slope if is_wanted(wanted, index) else None for index, slope in enumerate(first.inputs))
        return Backward(tuple(kept), (*first.bias, *of_weights))

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

    def _vector_gradients(self, z: Array, d_logits: Array) -> Arrays:
        gradients = (z.T @ d_logits).reshape(self._heads, self._width, 2, self._heads)
        head = np.arange(self._heads)
        return gradients[head, :, 0, head][None], gradients[head, :, 1, head][None]


def _read_heads(fields: Fields, name: str) -> Heads:
    inner = Fields(fields.any(name), f"{fields.where} {name!r}")
    heads = Heads(inner)
    inner.end()
    return heads


def _part(rows: Array, first: int, last: int | None) -> Array:
    return np.ascontiguousarray(rows[:, first:last])
