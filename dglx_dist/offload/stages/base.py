"""What a stage is: the tensor part of one step of a layer, by rows, with nothing kept between calls.

Stages are NumPy only, so that a worker needs nothing else. n rows of nodes, E edges; all arrays of one call
have the program's dtype, float32 or float64, and are C-contiguous. A stage cannot write to what it is
given, and may return views of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from dglx_dist.offload.fields import Json
from dglx_dist.records import Array

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
