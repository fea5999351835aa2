"""What a stage is: the tensor part of one step of a layer, by rows, with nothing kept between calls.

Stages are NumPy only, so that a worker needs nothing else. n rows of nodes, E edges; all arrays of one call
have the program's dtype, float32 or float64, and are C-contiguous. A stage cannot write to what it is
given, and may return views of it.
"""

from __future__ import annotations

import importlib
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias, final

import numpy as np

from dglx_dist.errors import ConfigError
from dglx_dist.records import Array
from dglx_dist.registry import Registry
from dglx_dist.serverless.json_fields import Fields, Json

_BLOCK = 1 << 14
"""Elements at a time, so that what is computed on the way stays in the cache."""
_PER_UNIT, _LIMIT, _TERMS = 16, 6, 9
"""Points of the table per unit; beyond this |x| erf is 1 in float64; terms of the series after the first."""


def erf(x: Array) -> Array:
    """Return erf of every element, to 3e-16 in float64.

    erf is expanded around the nearest point of a table; at most 1/32 away, nine terms are enough.

    Args:
        x: float32 or float64, any shape; NaN gives NaN.
    """
    series = _TABLE.astype(x.dtype, copy=False)
    flat = x.reshape(-1)
    out = np.empty_like(flat)
    for first in range(0, len(flat), _BLOCK):
        out[first : first + _BLOCK] = _block(flat[first : first + _BLOCK], series)
    return out.reshape(x.shape)


def _block(x: Array, series: Array) -> Array:
    inside = np.clip(x, -_LIMIT, _LIMIT)
    nearest = np.rint(inside * _PER_UNIT)
    np.subtract(inside, nearest / _PER_UNIT, out=inside)
    # A NaN has no place in the table: it takes any and stays a NaN, because its distance is one.
    with np.errstate(invalid="ignore"):
        place = nearest.astype(np.intp)
    place += _LIMIT * _PER_UNIT
    out = series[_TERMS].take(place, mode="clip")
    for term in range(_TERMS - 1, -1, -1):
        out *= inside
        out += series[term].take(place, mode="clip")
    return out


def _table() -> Array:
    """(terms + 1, points): coefficients of erf's Taylor series at every point.

    From erf' = 2/sqrt(pi) exp(-x^2) follows erf'' = -2x erf', and so on: with f = erf', the coefficients of f
    obey (k + 1) f[k + 1] = -2 (x f[k] + f[k - 1]).
    """
    points = np.arange(-_LIMIT * _PER_UNIT, _LIMIT * _PER_UNIT + 1) / _PER_UNIT
    slope = [2 / math.sqrt(math.pi) * np.exp(-points * points)]
    slope.append(-2 * points * slope[0])
    for k in range(1, _TERMS - 1):
        slope.append(-2 * (points * slope[k] + slope[k - 1]) / (k + 1))
    first = np.array([math.erf(point) for point in points.tolist()])
    table = np.stack([first, *(slope[k] / (k + 1) for k in range(_TERMS))])
    table.flags.writeable = False
    return table


_TABLE = _table()


_INNER, _CUBIC = math.sqrt(2.0 / math.pi), 0.044715
"""GELU's tanh form: z/2 (1 + tanh(_INNER (z + _CUBIC z^3)))."""


class Activation(ABC):
    """A function of single numbers. Arrays of any shape; what is given is never written to."""

    @abstractmethod
    def apply(self, z: Array) -> Array:
        """Return the function's values, of the shape and dtype of ``z``; may be ``z`` itself."""

    @abstractmethod
    def pull_back(self, z: Array, gradient: Array) -> Array:
        """Return ``gradient`` times the derivative at ``z``; may be ``gradient`` itself."""


@final
class Identity(Activation):
    """h = z."""

    def apply(self, z: Array) -> Array:
        """Return ``z``."""
        return z

    def pull_back(self, z: Array, gradient: Array) -> Array:
        """Return ``gradient``."""
        return gradient


@final
class Relu(Activation):
    """h = max(z, 0)."""

    def apply(self, z: Array) -> Array:
        """Return max(z, 0)."""
        return np.maximum(z, 0)

    def pull_back(self, z: Array, gradient: Array) -> Array:
        """Return the gradient where z > 0, else 0."""
        return np.multiply(gradient, z > 0)


@final
class LeakyRelu(Activation):
    """h = z where z > 0, else slope z."""

    def __init__(self, slope: float) -> None:
        self._slope = slope

    def apply(self, z: Array) -> Array:
        """Return z where z > 0, else slope z."""
        out = np.multiply(z, self._slope)
        # The larger one is z where z > 0, for slopes up to 1; faster than to look at each.
        return np.maximum(out, z, out=out) if self._slope <= 1 else np.minimum(out, z, out=out)

    def pull_back(self, z: Array, gradient: Array) -> Array:
        """Return the gradient where z > 0, else slope times the gradient."""
        return np.where(z > 0, gradient, np.multiply(gradient, self._slope))


@final
class Elu(Activation):
    """h = z where z > 0, else alpha (exp(z) - 1)."""

    def __init__(self, alpha: float) -> None:
        self._alpha = alpha

    def apply(self, z: Array) -> Array:
        """Return z where z > 0, else alpha (exp(z) - 1)."""
        out = np.minimum(z, 0)
        np.expm1(out, out=out)
        out *= self._alpha
        out += np.maximum(z, 0)  # one of the two is 0
        return out

    def pull_back(self, z: Array, gradient: Array) -> Array:
        """Return the gradient where z > 0, else alpha exp(z) times the gradient."""
        out = np.minimum(z, 0)
        np.exp(out, out=out)
        if self._alpha != 1:
            out = np.where(z > 0, z.dtype.type(1), np.multiply(out, self._alpha, out=out))
        out *= gradient
        return out


@final
class Tanh(Activation):
    """h = tanh(z)."""

    def apply(self, z: Array) -> Array:
        """Return tanh(z)."""
        return np.tanh(z)

    def pull_back(self, z: Array, gradient: Array) -> Array:
        """Return the gradient times 1 - tanh(z)^2."""
        out = np.tanh(z)
        np.multiply(out, out, out=out)
        np.subtract(1, out, out=out)
        out *= gradient
        return out


@final
class Sigmoid(Activation):
    """h = 1 / (1 + exp(-z)), by the exponential of -|z|, which overflows nowhere and keeps small values."""

    def apply(self, z: Array) -> Array:
        """Return 1 / (1 + exp(-z))."""
        small = np.exp(-np.abs(z))
        out = np.where(z >= 0, z.dtype.type(1), small)
        small += 1
        out /= small
        return out

    def pull_back(self, z: Array, gradient: Array) -> Array:
        """Return the gradient times h (1 - h)."""
        out = self.apply(z)
        out *= 1 - out
        out *= gradient
        return out


@final
class GeluTanh(Activation):
    """GELU in its tanh form, ``approximate="tanh"``."""

    def apply(self, z: Array) -> Array:
        """Return z/2 (1 + tanh(...))."""
        out = self._tanh(z)
        out += 1
        out *= z
        out *= 0.5
        return out

    def pull_back(self, z: Array, gradient: Array) -> Array:
        """Return the gradient times the derivative of the tanh form."""
        tanh = self._tanh(z)
        inner = np.multiply(z, z)
        inner *= 3 * _CUBIC * _INNER
        inner += _INNER
        inner *= z
        inner *= 1 - tanh * tanh
        inner += tanh
        inner += 1
        inner *= 0.5
        inner *= gradient
        return inner

    def _tanh(self, z: Array) -> Array:
        out = np.multiply(z, z)
        out *= _CUBIC
        out += 1
        out *= z
        out *= _INNER
        return np.tanh(out, out=out)


@final
class Gelu(Activation):
    """GELU, z Phi(z) with the normal distribution Phi."""

    def apply(self, z: Array) -> Array:
        """Return z Phi(z)."""
        out = self._phi(z)
        out *= z
        return out

    def pull_back(self, z: Array, gradient: Array) -> Array:
        """Return the gradient times Phi(z) + z phi(z)."""
        out = np.multiply(z, z)
        out *= -0.5
        np.exp(out, out=out)
        out *= z
        out *= 1 / math.sqrt(2 * math.pi)
        out += self._phi(z)
        out *= gradient
        return out

    def _phi(self, z: Array) -> Array:
        out = erf(np.multiply(z, math.sqrt(0.5)))
        out += 1
        out *= 0.5
        return out


_LARGE = 1e6
_MAKERS: Mapping[str, Callable[[Fields], Activation]] = {
    "identity": lambda fields: Identity(),
    "relu": lambda fields: Relu(),
    "leaky_relu": lambda fields: LeakyRelu(fields.number("slope", -_LARGE, _LARGE)),
    "elu": lambda fields: Elu(fields.number("alpha", -_LARGE, _LARGE)),
    "tanh": lambda fields: Tanh(),
    "sigmoid": lambda fields: Sigmoid(),
    "gelu": lambda fields: Gelu(),
    "gelu_tanh": lambda fields: GeluTanh(),
}
ACTIVATIONS = tuple(_MAKERS)
"""Names that :func:`read_activation` knows."""


def read_activation(fields: Fields, name: str = "activation") -> Activation:
    """Make the activation that the field ``name`` describes; a missing field is the identity.

    Written ``{"name": "relu"}``, ``{"name": "leaky_relu", "slope": 0.2}``, ``{"name": "elu", "alpha": 1.0}``.

    Raises:
        ConfigError: no activation is so described.
    """
    identity: object = {"name": "identity"}
    given = fields.maybe(name, fields.any, identity)
    inner = Fields(given, f"{fields.where} {name!r}")
    activation = _MAKERS[inner.choice("name", ACTIVATIONS)](inner)
    inner.end()
    return activation


Config: TypeAlias = Mapping[str, Json]
Shapes: TypeAlias = dict[str, tuple[int, ...]]
Arrays: TypeAlias = tuple[Array, ...]


class Forward(NamedTuple):
    """What a vertex stage computed."""

    outputs: Arrays
    """One (n, width) per output."""
    saved: Arrays
    """What :meth:`VertexStage.backward` would otherwise compute again: one (n, width) per saved width."""


class Backward(NamedTuple):
    """Gradients of a vertex stage."""

    inputs: tuple[Array | None, ...]
    """One (n, width) per input, None where it was not wanted."""
    weights: Arrays
    """One per weight, of its shape: the sum over the n rows."""


class Stage(ABC):
    """Anything that a program may name and a worker may run.

    Args:
        config: JSON that describes it; whoever makes one checks it.

    Raises:
        ConfigError: a field of ``config`` is missing, unknown or wrong.
    """

    @abstractmethod
    def __init__(self, config: Config) -> None: ...


class VertexStage(Stage):
    """ApplyVertex and its gradient: every row of the outputs comes from the same row of the inputs.

    A worker computes a task in two halves of its rows, and adds the weights' gradients of both.
    """

    @property
    @abstractmethod
    def weight_shapes(self) -> Shapes:
        """The stage's own names of its weights to their shapes, in the order of ``weights`` below."""

    @property
    @abstractmethod
    def input_widths(self) -> tuple[int, ...]:
        """Columns of each input."""

    @property
    @abstractmethod
    def output_widths(self) -> tuple[int, ...]:
        """Columns of each output."""

    @property
    @abstractmethod
    def saved_widths(self) -> tuple[int, ...]:
        """Columns of each saved array."""

    @abstractmethod
    def forward(self, weights: Sequence[Array], inputs: Sequence[Array]) -> Forward:
        """Compute the outputs of n rows, n >= 0.

        Args:
            weights: One per :attr:`weight_shapes`.
            inputs: One (n, width) per :attr:`input_widths`.
        """

    @abstractmethod
    def backward(
        self,
        weights: Sequence[Array],
        inputs: Sequence[Array],
        gradients: Sequence[Array],
        *,
        saved: Sequence[Array] | None = None,
        wanted: Sequence[bool] | None = None,
    ) -> Backward:
        """Compute the gradients of inputs and weights from those of the outputs.

        Args:
            weights: As in forward.
            inputs: As in forward.
            gradients: One (n, width) per output.
            saved: What forward saved; None: it is computed again, to the same bits.
            wanted: Per input, whether its gradient is needed; None: all are.
        """


class EdgeStage(Stage):
    """ApplyEdge and its gradient, for the in-edges of n targets in CSC order.

    Edges of target t are at ``indptr[t]:indptr[t + 1]``; targets without edges are allowed.
    """

    @property
    @abstractmethod
    def width(self) -> int:
        """Columns k of sources, targets and edges."""

    @abstractmethod
    def forward(self, sources: Array, targets: Array, indptr: Array) -> Array:
        """Return (E, k) values of edges.

        Args:
            sources: (E, k) rows of each edge's source.
            targets: (n, k) rows of the targets.
            indptr: (n + 1,) int64, from 0 to E.
        """

    @abstractmethod
    def backward(
        self, sources: Array, targets: Array, indptr: Array, values: Array, gradients: Array
    ) -> Array:
        """Return (E, k), the gradient of (source row + target row) of each edge.

        The graph server adds it up by source and by target.

        Args:
            sources: As in forward.
            targets: As in forward.
            indptr: As in forward.
            values: (E, k), what forward returned.
            gradients: (E, k) of the values.
        """


MAX_WIDTH = 1 << 20
"""Most columns of a row."""


def read_width(fields: Fields, name: str) -> int:
    """Return the number of columns that the field ``name`` holds."""
    return fields.whole(name, 1, MAX_WIDTH)


def first_of_second_half(rows: int) -> int:
    """Return where the second half of ``rows`` rows begins: the first one has the odd row."""
    return (rows + 1) // 2


def column_sums(rows: Array) -> Array:
    """Return the sum of all rows, (width,); zeros where there are none."""
    return np.add.reduce(rows, axis=0)


def is_wanted(wanted: Sequence[bool] | None, index: int) -> bool:
    """Whether the gradient of input ``index`` is needed."""
    return wanted is None or wanted[index]


class LossResult(NamedTuple):
    """Loss of n rows."""

    loss_sum: float
    """Sum over the rows with a label, not scaled."""
    correct: int
    """Rows with a label whose largest output is at it, the first of equals."""
    gradient: Array
    """(n, C) of the outputs, scaled; zeros in rows without a label."""


def loss_in_halves(outputs: Array, labels: Array, scale: float) -> LossResult:
    """Return :func:`cross_entropy` of both halves of the rows: to the bit what a worker adds up."""
    middle = first_of_second_half(len(labels))
    first = cross_entropy(outputs[:middle], labels[:middle], scale)
    second = cross_entropy(outputs[middle:], labels[middle:], scale)
    gradient = np.concatenate([first.gradient, second.gradient])
    return LossResult(first.loss_sum + second.loss_sum, first.correct + second.correct, gradient)


def cross_entropy(outputs: Array, labels: Array, scale: float) -> LossResult:
    """Compute softmax cross entropy of the rows with a label, and its gradient times ``scale``.

    Args:
        outputs: (n, C) float32 or float64.
        labels: (n,) of any integer dtype in [0, C), -1 where the row has none (is no training node).
        scale: 1 / M, with M training nodes on all graph servers.

    Raises:
        ConfigError: a label is outside [-1, C).
    """
    rows = np.nonzero(labels >= 0)[0]
    classes = outputs.shape[1]
    if len(labels) and not -1 <= labels.min() <= labels.max() < classes:
        raise ConfigError(
            f"labels from {labels.min()} to {labels.max()} are not all in [-1, {classes}); give classes from "
            "0, and -1 to rows without one"
        )
    gradient = np.zeros_like(outputs)
    if not len(rows):
        return LossResult(0.0, 0, gradient)
    picked, at = outputs[rows], labels[rows]
    index = np.arange(len(rows))
    correct = int(np.count_nonzero(picked.argmax(axis=1) == at))
    picked -= picked.max(axis=1, keepdims=True)
    own = picked[index, at]
    np.exp(picked, out=picked)
    sums = picked.sum(axis=1, keepdims=True)
    loss_sum = float(np.sum(np.log(sums[:, 0]) - own, dtype=np.float64))
    picked /= sums
    picked[index, at] -= 1
    picked *= scale
    gradient[rows] = picked
    return LossResult(loss_sum, correct, gradient)


STAGES: Registry[Stage] = Registry(
    "stage",
    Stage,  # type: ignore[type-abstract]  # the registry only asks for subclasses of it
    builtin={
        "attention_edges": "dglx_dist.serverless.stages.attention:AttentionEdges",
        "attention_finish": "dglx_dist.serverless.stages.attention:AttentionFinish",
        "attention_project": "dglx_dist.serverless.stages.attention:AttentionProject",
        "dense": "dglx_dist.serverless.stages.conv:Dense",
        "rows": "dglx_dist.serverless.stages.conv:Rows",
        "sage": "dglx_dist.serverless.stages.conv:Sage",
    },
    group="dglx_dist.stages",
)

_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)


def register_stage(name: str, stage: type[Stage] | str) -> None:
    """Make ``stage`` known as ``name`` in this process; again with the same class does nothing.

    A program can name only what is registered: what a message says is never imported. So a worker is
    told of a user's stages when its package is made or its process is started.

    Args:
        name: What programs call it.
        stage: A class, or ``"module:Class"``, which is imported now.

    Raises:
        ConfigError: the name is taken by another class, there is no such class, or it is no stage.
    """
    found = _imported(stage) if isinstance(stage, str) else stage
    if name in STAGES.names() and STAGES.get(name) is found:
        return
    STAGES.register(name)(found)  # type: ignore[arg-type]  # the registry refuses what is no Stage


def vertex_stage(name: str, config: Config) -> VertexStage:
    """Make the vertex stage ``name``.

    Raises:
        UnknownNameError: it is not registered.
        ConfigError: it is no vertex stage, or refuses ``config``.
    """
    stage = STAGES.get(name)(config)
    if not isinstance(stage, VertexStage):
        raise ConfigError(f"stage {name!r} works on edges; name a vertex stage such as 'dense' in this step")
    return stage


def edge_stage(name: str, config: Config) -> EdgeStage:
    """Make the edge stage ``name``.

    Raises:
        UnknownNameError: it is not registered.
        ConfigError: it is no edge stage, or refuses ``config``.
    """
    stage = STAGES.get(name)(config)
    if not isinstance(stage, EdgeStage):
        raise ConfigError(f"stage {name!r} works on vertices; name an edge stage such as 'attention_edges'")
    return stage


def _imported(path: str) -> object:
    if _PATH.fullmatch(path) is None:
        raise ConfigError(f"{path!r} names no class; write 'module:Class'")
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"the stage {path!r} cannot be imported: {error}; put its module where Python finds it"
        ) from None
