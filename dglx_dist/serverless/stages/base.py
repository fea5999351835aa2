"""Contracts of vertex and edge stages, activations, the loss, and the registry of stages.

A stage is the tensor part of one step of a layer, computed row by row without state. Stages use NumPy only,
so a worker needs nothing else. n is the number of node rows, E the number of edges. All arrays of one call
have the program's dtype, float32 or float64, and are C-contiguous. A stage must not write to its arguments
and may return views of them.
"""

import importlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from dglx_dist.data.json_fields import Fields, Json
from dglx_dist.errors import ConfigError
from dglx_dist.records import Array
from dglx_dist.registry import Registry

_LARGE = 1e6
MAX_WIDTH = 1 << 20
"""Most columns of a row."""
_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)


class Activation(NamedTuple):
    """An elementwise function of arrays of any shape; arguments are never written to."""

    apply: Callable[[Array], Array]
    """Maps z to the function's values, of the shape and dtype of z; may return z itself."""
    pull_back: Callable[[Array, Array], Array]
    """Maps z and a gradient to the gradient times the derivative at z; may return the gradient itself."""


def leaky_relu(slope: float) -> Activation:
    """Return the function h = z where z > 0, else slope z."""

    def apply(z: Array) -> Array:
        out = np.multiply(z, slope)
        # For slopes up to 1 the maximum is z where z > 0; this is faster than np.where.
        return np.maximum(out, z, out=out) if slope <= 1 else np.minimum(out, z, out=out)

    return Activation(apply, lambda z, gradient: np.where(z > 0, gradient, np.multiply(gradient, slope)))


def _elu(alpha: float) -> Activation:
    # h = z where z > 0, else alpha (exp(z) - 1)
    def apply(z: Array) -> Array:
        # One of the two is 0.
        return np.expm1(np.minimum(z, 0)) * alpha + np.maximum(z, 0)

    def pull_back(z: Array, gradient: Array) -> Array:
        slope = np.exp(np.minimum(z, 0))
        return (slope if alpha == 1 else np.where(z > 0, z.dtype.type(1), slope * alpha)) * gradient

    return Activation(apply, pull_back)


def _pull_back_tanh(z: Array, gradient: Array) -> Array:
    return (1 - np.square(np.tanh(z))) * gradient


def _sigmoid(z: Array) -> Array:
    # From exp(-|z|), which never overflows and keeps small values.
    small = np.exp(-np.abs(z))
    return np.where(z >= 0, z.dtype.type(1), small) / (small + 1)


def _pull_back_sigmoid(z: Array, gradient: Array) -> Array:
    out = _sigmoid(z)
    return out * (1 - out) * gradient


_PLAIN = {
    "identity": Activation(lambda z: z, lambda z, gradient: gradient),
    "relu": Activation(lambda z: np.maximum(z, 0), lambda z, gradient: np.multiply(gradient, z > 0)),
    "tanh": Activation(np.tanh, _pull_back_tanh),
    "sigmoid": Activation(_sigmoid, _pull_back_sigmoid),
}
_WITH_PARAMETER = {"leaky_relu": ("slope", leaky_relu), "elu": ("alpha", _elu)}
ACTIVATIONS = (*_PLAIN, *_WITH_PARAMETER)
"""Names that :func:`read_activation` knows."""


def read_activation(fields: Fields, name: str = "activation") -> Activation:
    """Make the activation that the field ``name`` describes; a missing field is the identity.

    Written ``{"name": "relu"}``, ``{"name": "leaky_relu", "slope": 0.2}``, ``{"name": "elu", "alpha": 1.0}``.
    """
    if not fields.has(name):
        return _PLAIN["identity"]
    inner = fields.nested_fields(name)
    kind = inner.choice("name", ACTIVATIONS)
    if kind in _PLAIN:
        activation = _PLAIN[kind]
    else:
        parameter, make = _WITH_PARAMETER[kind]
        activation = make(inner.number(parameter, -_LARGE, _LARGE))
    inner.reject_unread()
    return activation


Config: TypeAlias = Mapping[str, Json]
Shapes: TypeAlias = dict[str, tuple[int, ...]]
Arrays: TypeAlias = tuple[Array, ...]
Rows: TypeAlias = Sequence[Array]
Mask: TypeAlias = Sequence[bool] | None
"""Whether the gradient of each input is needed; None: all are."""


class Forward(NamedTuple):
    """Result of :meth:`VertexStage.forward`."""

    outputs: Arrays
    """One (n, width) per output."""
    saved: Arrays
    """Intermediate results for :meth:`VertexStage.backward`: one (n, width) per saved width."""


class Backward(NamedTuple):
    """Gradients of a vertex stage."""

    inputs: tuple[Array | None, ...]
    """One (n, width) per input, None where it was not wanted."""
    weights: Arrays
    """One per weight, of its shape: the sum over the n rows."""


class Stage(ABC):
    """Base of all stages; use :class:`VertexStage` or :class:`EdgeStage`.

    Raises:
        ConfigError: a field of ``config`` is missing, unknown or wrong.
    """

    @abstractmethod
    def __init__(self, config: Config) -> None: ...


class StageShapes(NamedTuple):
    """Columns of the arrays that a vertex stage takes and returns."""

    weights: Shapes
    """Shape of each weight by the stage's own name, in the order of ``weights`` of a call."""
    inputs: tuple[int, ...]
    """Columns of each input."""
    outputs: tuple[int, ...]
    saved: tuple[int, ...] = ()


class VertexStage(Stage):
    """ApplyVertex and its gradient: every row of the outputs comes from the same row of the inputs.

    A worker computes a task in two halves of its rows, and adds the weights' gradients of both.
    """

    shapes: StageShapes
    """Set by the constructor."""

    @abstractmethod
    def forward(self, weights: Rows, inputs: Rows) -> Forward:
        """Compute the outputs of n rows, n >= 0.

        Args:
            weights: One per weight of :attr:`shapes`.
            inputs: One (n, width) per input.
        """

    @abstractmethod
    def backward(
        self, weights: Rows, inputs: Rows, gradients: Rows, *, saved: Rows | None = None, wanted: Mask = None
    ) -> Backward:
        """Compute the gradients of inputs and weights from those of the outputs.

        Args:
            weights, inputs: As in forward.
            gradients: One (n, width) per output.
            saved: What forward saved; None: recompute it, bit for bit.
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

        The graph server sums it by source and by target.

        Args:
            sources, targets, indptr: As in forward.
            values: (E, k), the result of forward.
            gradients: (E, k) of the values.
        """


def read_width(fields: Fields, name: str) -> int:
    return fields.integer(name, 1, MAX_WIDTH)


def half_rows(rows: int, half: int) -> slice:
    """Return the part of ``rows`` rows in half 0 or 1; the first half has the odd row."""
    middle = (rows + 1) // 2
    return slice(middle, rows) if half else slice(0, middle)


def is_wanted(wanted: Mask, index: int) -> bool:
    return wanted is None or wanted[index]


class LossResult(NamedTuple):
    """Loss of n rows, and its gradient."""

    loss_sum: float
    """Sum over the rows with a label, not scaled."""
    correct: int
    """Labelled rows whose first largest output is the label's."""
    gradient: Array
    """(n, C) of the outputs, scaled; zero in rows without a label."""


def loss_in_halves(outputs: Array, labels: Array, scale: float) -> LossResult:
    """Return the sum of :func:`cross_entropy` of both halves of the rows, bit-identical to a worker's."""
    halves = half_rows(len(labels), 0), half_rows(len(labels), 1)
    first, second = (cross_entropy(outputs[half], labels[half], scale) for half in halves)
    gradient = np.concatenate([first.gradient, second.gradient])
    return LossResult(first.loss_sum + second.loss_sum, first.correct + second.correct, gradient)


def cross_entropy(outputs: Array, labels: Array, scale: float) -> LossResult:
    """Compute softmax cross entropy of the rows with a label, and its gradient times ``scale``.

    Args:
        outputs: (n, C) float32 or float64.
        labels: (n,) integers; -1 in rows that are not training nodes. ConfigError outside [-1, C).
        scale: 1 / M, where M is the number of training nodes on all graph servers.
    """
    rows = np.nonzero(labels >= 0)[0]
    classes = outputs.shape[1]
    if len(labels) and not -1 <= labels.min() <= labels.max() < classes:
        raise ConfigError(
            f"labels from {labels.min()} to {labels.max()} are not all in [-1, {classes}); number the "
            "classes from 0, and use -1 for rows without a label"
        )
    gradient = np.zeros_like(outputs)
    logits, targets = outputs[rows], labels[rows]
    index = np.arange(len(rows))
    correct = int(np.count_nonzero(logits.argmax(axis=1) == targets))
    logits -= logits.max(axis=1, keepdims=True)
    target_logits = logits[index, targets]
    # In place from here on: first exponentials, then probabilities, then the gradient.
    np.exp(logits, out=logits)
    sums = logits.sum(axis=1, keepdims=True)
    loss_sum = float(np.sum(np.log(sums[:, 0]) - target_logits, dtype=np.float64))
    logits /= sums
    logits[index, targets] -= 1
    logits *= scale
    gradient[rows] = logits
    return LossResult(loss_sum, correct, gradient)


STAGES: Registry[Stage] = Registry(
    "stage",
    Stage,  # type: ignore[type-abstract]  # the registry only asks for subclasses of it
    builtin={
        "attention_edges": "dglx_dist.serverless.stages.conv:AttentionEdges",
        "attention_finish": "dglx_dist.serverless.stages.conv:AttentionFinish",
        "attention_project": "dglx_dist.serverless.stages.conv:AttentionProject",
        "dense": "dglx_dist.serverless.stages.conv:Dense",
        "layer_norm": "dglx_dist.serverless.stages.conv:LayerNorm",
        "rows": "dglx_dist.serverless.stages.conv:BiasOnly",
        "sage": "dglx_dist.serverless.stages.conv:Sage",
        "sequence": "dglx_dist.serverless.stages.conv:StageSequence",
    },
    group="dglx_dist.stages",
)


def register_stage(name: str, stage: type[Stage] | str) -> None:
    """Register ``stage`` as ``name`` in this process; registering the same class again does nothing.

    A program can name registered stages only: nothing named in a message is ever imported. A worker gets
    the list of a user's stages when its package is built or its process starts.

    Raises:
        ConfigError: the name belongs to another class, the class does not exist, or it is not a stage.
    """
    kind = _import_stage(stage) if isinstance(stage, str) else stage
    if name in STAGES.names() and STAGES.get(name) is kind:
        return
    STAGES.register(name)(kind)  # type: ignore[arg-type]  # the registry refuses anything else


def vertex_stage(name: str, config: Config) -> VertexStage:
    """Create the vertex stage ``name``; UnknownNameError or ConfigError if that is impossible."""
    stage = STAGES.get(name)(config)
    if not isinstance(stage, VertexStage):
        raise ConfigError(f"stage {name!r} is an edge stage; use a vertex stage such as 'dense' in this step")
    return stage


def edge_stage(name: str, config: Config) -> EdgeStage:
    """Create the edge stage ``name``; UnknownNameError or ConfigError if that is impossible."""
    stage = STAGES.get(name)(config)
    if not isinstance(stage, EdgeStage):
        raise ConfigError(f"stage {name!r} is a vertex stage; use an edge stage such as 'attention_edges'")
    return stage


def _import_stage(path: str) -> object:
    if _PATH.fullmatch(path) is None:
        raise ConfigError(f"{path!r} is not the path of a class; write 'module:Class'")
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"the stage {path!r} cannot be imported: {error}; put its module on the import path"
        ) from None
