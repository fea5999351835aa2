"""Vertex stages: dense, bias-only, SAGE, LayerNorm, and sequences of stages."""

import itertools
from collections.abc import Sequence
from itertools import pairwise
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
    is_wanted,
    leaky_relu,
    read_activation,
    read_width,
    vertex_stage,
)

MAX_STAGES = 16
"""Most stages of a sequence."""


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
        self._bias, self._activation = fields.boolean("bias"), read_activation(fields)
        bias: Shapes = {"bias": (num_out,)} if self._bias else {}
        saved = (num_out,) if matrices else ()
        self.shapes = StageShapes(matrices | bias, (num_in,) * max(len(inputs), 1), (num_out,), saved)
        fields.reject_unread()

    def forward(self, weights: Rows, inputs: Rows) -> Forward:
        z = self._sum(weights, inputs)
        return Forward((self._activation.apply(z),), (z,) if self._inputs else ())

    def backward(
        self, weights: Rows, inputs: Rows, gradients: Rows, *, saved: Rows | None = None, wanted: Mask = None
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
        return Backward(tuple(of_inputs), (*of_weights, *([dz.sum(axis=0)] if self._bias else [])))

    def _sum(self, weights: Rows, inputs: Rows) -> Array:
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
        transposed = fields.optional("transposed", fields.boolean, False)
        shape = (num_out, num_in) if transposed else widths
        super().__init__(fields, {"weight": shape}, widths, (0,), transposed)


@final
class BiasOnly(_Affine):
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


@final
class LayerNorm(VertexStage):
    """h = activation(y weight + bias) with y = (x - mean) / sqrt(variance + eps) by row: ``nn.LayerNorm``.

    Weights: ``weight``, ``bias`` (width,), both as configured. Inputs: x (n, width). Outputs: h (n, width).
    Saved: none.

    Args:
        config: ``width``: columns; ``eps``; ``scale``, ``bias``: flags; ``activation``: see read_activation.
    """

    def __init__(self, config: Config) -> None:
        fields = Fields(config, "stage layer_norm")
        width, self._eps = read_width(fields, "width"), fields.number("eps", 0, 1)
        self._scale, self._bias = fields.boolean("scale"), fields.boolean("bias")
        self._activation = read_activation(fields)
        fields.reject_unread()
        names = [*(["weight"] if self._scale else []), *(["bias"] if self._bias else [])]
        self.shapes = StageShapes(dict.fromkeys(names, (width,)), (width,), (width,))

    def forward(self, weights: Rows, inputs: Rows) -> Forward:
        y, _ = self._normalise(inputs[0])
        return Forward((self._activation.apply(self._scale_rows(weights, y)),), ())

    def backward(
        self, weights: Rows, inputs: Rows, gradients: Rows, *, saved: Rows | None = None, wanted: Mask = None
    ) -> Backward:
        y, deviations = self._normalise(inputs[0])
        dz = self._activation.pull_back(self._scale_rows(weights, y), gradients[0])
        of_weights = [
            *([(dz * y).sum(axis=0)] if self._scale else []),
            *([dz.sum(axis=0)] if self._bias else []),
        ]
        if not is_wanted(wanted, 0):
            return Backward((None,), tuple(of_weights))
        dy = dz * weights[0] if self._scale else dz
        dx = dy - dy.mean(axis=1, keepdims=True)
        dx -= y * (dy * y).mean(axis=1, keepdims=True)
        dx /= deviations
        return Backward((dx,), tuple(of_weights))

    def _normalise(self, x: Array) -> tuple[Array, Array]:
        # y (n, width), and the deviations (n, 1) by which it was divided.
        y = x - x.mean(axis=1, keepdims=True)
        deviations = np.sqrt(np.square(y).mean(axis=1, keepdims=True) + x.dtype.type(self._eps))
        y /= deviations
        return y, deviations

    def _scale_rows(self, weights: Sequence[Array], y: Array) -> Array:
        z = y * weights[0] if self._scale else y
        return z + weights[-1] if self._bias else z


@final
class StageSequence(VertexStage):
    """Stages one after another in one task; each but the first reads the only output of the one before it.

    Weights: those of all stages, by their number: ``0.weight``. Inputs: those of the first stage. Outputs,
    saved: those of the last stage; backward computes the stages before it again.

    Args:
        config: ``stages``: 2 to 16 objects of ``stage``, a name, and its ``config``.
    """

    def __init__(self, config: Config) -> None:
        fields = Fields(config, "stage sequence")
        self._stages = list(map(_stage_of, fields.nested_list("stages", 2, MAX_STAGES)))
        fields.reject_unread()
        for at, (stage, following) in enumerate(pairwise(self._stages)):
            if len(stage.shapes.outputs) != 1 or stage.shapes.outputs != following.shapes.inputs:
                columns, expected = stage.shapes.outputs, following.shapes.inputs
                raise fields.field_error(
                    "stages", f"a stage {at + 1} of the columns {columns} of stage {at}, not {expected}"
                )
        weights: Shapes = {
            f"{at}.{name}": shape
            for at, stage in enumerate(self._stages)
            for name, shape in stage.shapes.weights.items()
        }
        first, last = self._stages[0], self._stages[-1]
        self.shapes = StageShapes(weights, first.shapes.inputs, last.shapes.outputs, last.shapes.saved)

    def forward(self, weights: Rows, inputs: Rows) -> Forward:
        rows, _ = self._before_last(weights, inputs)[-1]
        return self._stages[-1].forward(self._split(weights)[-1], rows)

    def backward(
        self, weights: Rows, inputs: Rows, gradients: Rows, *, saved: Rows | None = None, wanted: Mask = None
    ) -> Backward:
        passes = self._before_last(weights, inputs)
        passes[-1] = passes[-1][0], saved
        of_weights: list[Array] = []
        of_inputs: Sequence[Array | None] = gradients
        own = self._split(weights)
        for at in reversed(range(len(self._stages))):
            rows, kept = passes[at]
            slopes = [slope for slope in of_inputs if slope is not None]
            result = self._stages[at].backward(
                own[at], rows, slopes, saved=kept, wanted=wanted if at == 0 else None
            )
            of_weights[:0], of_inputs = result.weights, result.inputs
        return Backward(tuple(of_inputs), tuple(of_weights))

    def _before_last(
        self, weights: Rows, inputs: Rows
    ) -> list[tuple[Sequence[Array], Sequence[Array] | None]]:
        # Of each stage its inputs, and of all but the last what it saved.
        passes: list[tuple[Sequence[Array], Sequence[Array] | None]] = []
        rows = inputs
        for stage, own in zip(self._stages[:-1], self._split(weights), strict=False):
            forward = stage.forward(own, rows)
            passes.append((rows, forward.saved))
            rows = forward.outputs
        return [*passes, (rows, None)]

    def _split(self, weights: Sequence[Array]) -> list[Sequence[Array]]:
        ends = list(itertools.accumulate(len(stage.shapes.weights) for stage in self._stages))
        return [weights[first:end] for first, end in zip([0, *ends], ends, strict=False)]


def _stage_of(fields: Fields) -> VertexStage:
    name, config = fields.text("stage", 1, 512), fields.nested_fields("config").mapping
    fields.reject_unread()
    if name == "sequence":
        raise fields.field_error("stage", "a stage other than 'sequence'")
    return vertex_stage(name, config)


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
        self._heads = fields.integer("heads", 1, MAX_HEADS)
        self._leaky = leaky_relu(fields.number("slope", -1e6, 1e6))
        fields.reject_unread()

    @property
    def width(self) -> int:
        return self._heads

    def forward(self, sources: Array, targets: Array, indptr: Array) -> Array:
        degrees = np.diff(indptr)
        out = self._leaky.apply(_logits(sources, targets, degrees))
        starts, lengths = _segments(indptr, degrees)
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
        self._num_heads, width = fields.integer("heads", 1, MAX_HEADS), read_width(fields, "width")
        self._width, columns = width, self._num_heads * width
        self._bias = fields.boolean("bias")
        self._residual = fields.optional("residual", fields.boolean, False)
        self._mean = fields.choice("merge", ("flatten", "mean")) == "mean"
        self._activation, self._after = read_activation(fields), read_activation(fields, "after")
        fields.reject_unread()
        weights: Shapes = {"bias": (columns,)} if self._bias else {}
        inputs, merged = (columns,) * (1 + self._residual), width if self._mean else columns
        # Nothing is saved: recomputing additions is cheaper than moving their results.
        self.shapes = StageShapes(weights, inputs, (merged,))

    def forward(self, weights: Rows, inputs: Rows) -> Forward:
        merged = self._merge_heads(self._activation.apply(self._before(weights, inputs)))
        return Forward((self._after.apply(merged),), ())

    def backward(
        self, weights: Rows, inputs: Rows, gradients: Rows, *, saved: Rows | None = None, wanted: Mask = None
    ) -> Backward:
        before = self._before(weights, inputs)
        merged = self._merge_heads(self._activation.apply(before))
        spread = self._spread(self._after.pull_back(merged, gradients[0]))
        d_sums = self._activation.pull_back(before, spread)
        of_inputs = tuple(d_sums if is_wanted(wanted, index) else None for index in range(len(inputs)))
        return Backward(of_inputs, (d_sums.sum(axis=0),) if self._bias else ())

    def _before(self, weights: Rows, inputs: Rows) -> Array:
        out = inputs[0]
        if self._residual:
            out = out + inputs[1]
        if self._bias:
            out = np.add(out, weights[0], out=out if self._residual else None)
        return out

    def _merge_heads(self, rows: Array) -> Array:
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
        num_in, self._heads = read_width(fields, "in"), fields.integer("heads", 1, MAX_HEADS)
        self._width = read_width(fields, "width")
        self._columns = columns = self._heads * self._width
        kind = fields.optional("residual", lambda name: fields.choice(name, _RESIDUALS), "none")
        self._has_residual, self._projects_residual = kind != "none", kind == "linear"
        self._residual_bias = fields.optional("residual_bias", fields.boolean, False)
        fields.reject_unread()
        if self._has_residual and not self._projects_residual and num_in != columns:
            raise fields.field_error("residual", f"'linear': the input has {num_in} columns, not {columns}")
        if self._residual_bias and not self._projects_residual:
            raise fields.field_error("residual_bias", "false: only a linear residual has a bias")
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
        outputs = (z, *map(np.ascontiguousarray, np.split(logits, 2, axis=1)))
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
            d_weights.append(gradients[3].sum(axis=0))
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
