"""What a worker computes for a half of a task, the same wherever it runs: process, function, or graph server.

Every task is computed in two halves of its rows, whether they are streamed or not, and the weights' gradients
of both are added: so that streaming, fusion and rematerialisation change no bit.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple, final

import numpy as np

from dglx_dist.errors import ConfigError
from dglx_dist.offload.payload import (
    check_payload,
    given_items,
    half_rows,
    join_halves,
    pulled_items,
    take_half,
)
from dglx_dist.offload.program import Program
from dglx_dist.offload.stages.base import Arrays
from dglx_dist.offload.stages.loss import cross_entropy
from dglx_dist.offload.steps import Vertex
from dglx_dist.offload.tasks import Direction
from dglx_dist.records import Array

_OPENBLAS = [f"{prefix}openblas_get_config{end}" for prefix in ("scipy_", "") for end in ("64_", "")]
"""What OpenBLAS calls the function that describes it, as the wheels of NumPy and others build it."""


@functools.cache
def kernels() -> str:
    """Return what the arithmetic of this process runs on: NumPy, its BLAS with the kernels, its SIMD loops.

    Processes that return different texts may compute different bits. Kernels are known of an OpenBLAS; of
    another BLAS its name and version are told.
    """
    built: Any = np.show_config(mode="dicts")
    # A look-up by the handle of a library searches that library and what it depends on: so this is the BLAS
    # of NumPy, and none that torch or SciPy have in the same process.
    library = ctypes.CDLL(importlib.import_module("numpy.linalg._umath_linalg").__file__)
    described = next((getattr(library, name) for name in _OPENBLAS if hasattr(library, name)), None)
    if described is None:
        blas = " ".join(str(built["Build Dependencies"]["blas"].get(key)) for key in ("name", "version"))
    else:
        described.restype = ctypes.c_char_p
        blas = " ".join(described().decode(errors="replace").split())
    return f"NumPy {np.__version__}; {blas}; {' '.join(built['SIMD Extensions'].get('found', ()))}"


class Computed(NamedTuple):
    """What one half, or a whole task, gives."""

    rows: Arrays
    """For the graph server: see ``payload.given_items``."""
    gradients: Arrays
    """For the parameter server: one per weight of the step, summed over the rows; () forward."""


@final
class Work:
    """One kind of task, ready for any interval and epoch; keeps nothing between calls, any thread may call.

    Args:
        program: What is trained.
        step: Index of a Vertex or Edge step.
        direction: Which way.
        rematerialise: See TaskOptions.

    Raises:
        ConfigError: no worker does such a step in this direction.
    """

    def __init__(self, program: Program, step: int, direction: Direction, rematerialise: bool) -> None:
        self.pulled = pulled_items(program, step, direction, rematerialise)
        """What each half pulls."""
        self.given = given_items(program, step, direction, rematerialise)
        """What each half gives."""
        found = program.steps[step]
        self._is_vertex = isinstance(found, Vertex)
        self.weights = program.weights_of(step) if isinstance(found, Vertex) else {}
        """The user's names of the weights to their shapes, in order."""
        self.pushes = self._is_vertex and direction is not Direction.FORWARD
        """Whether gradients of weights, be it none, go to the parameter server."""
        self._name, self._dtype = found.name, program.dtype
        self._direction, self._scale = direction, 1 / program.num_train
        if isinstance(found, Vertex):
            self._vertex = program.vertex_stage(step)
            self._outputs = given_items(program, step, Direction.FORWARD, True)
            self._num_inputs, self._num_outputs = len(found.inputs), len(found.outputs)
            self._wanted = [name in program.trained for name in found.inputs]
            self._rematerialise = rematerialise
        else:
            self._edge = program.edge_stage(step)

    def half(self, weights: Sequence[Array], arrays: Sequence[Array], rows: int) -> Computed:
        """Compute one half.

        Args:
            weights: One per name of :attr:`weights`.
            arrays: As :attr:`pulled` says, for this half.
            rows: Rows of this half; may be 0.

        Raises:
            ConfigError: an array, or a label, is not what the program says, or a user's own stage returned
                something else.
        """
        check_payload(self.pulled, arrays, rows, f"what step {self._name!r} pulled")
        self._check_weights(weights, "got weights")
        found = self._compute(_read_only(weights), _read_only(arrays), rows)
        check_payload(self.given, found.rows, rows, self._returned, num_edges=len(arrays[0]))
        if self.pushes:
            self._check_weights(found.gradients, "returned gradients")
        return found

    def whole(self, weights: Sequence[Array], arrays: Sequence[Array], rows: int) -> Computed:
        """Compute a whole task of ``rows`` rows, in its two halves; to the bit what a worker gives."""
        halves = [
            self.half(weights, take_half(self.pulled, arrays, rows, half), _length(rows, half))
            for half in (0, 1)
        ]
        joined = tuple(join_halves(self.given, halves[0].rows, halves[1].rows))
        return Computed(joined, add_gradients(halves[0].gradients, halves[1].gradients))

    @property
    def _returned(self) -> str:
        return f"what the stage of step {self._name!r} returned"

    def _compute(self, weights: Sequence[Array], arrays: Sequence[Array], rows: int) -> Computed:
        if not self._is_vertex:
            return Computed((self._edge_half(arrays),), ())
        if self._direction is Direction.FORWARD:
            outputs, saved = self._vertex.forward(weights, arrays)
            return Computed(outputs if self._rematerialise else outputs + saved, ())
        if self._direction is Direction.FUSED:
            return self._fused_half(weights, arrays, rows)
        inputs, others = arrays[: self._num_inputs], arrays[self._num_inputs :]
        saved_rows = None if self._rematerialise else others[self._num_outputs :]
        return self._backward(weights, inputs, others[: self._num_outputs], saved_rows)

    def _edge_half(self, arrays: Sequence[Array]) -> Array:
        sources, targets, indptr = arrays[:3]
        if self._direction is Direction.FORWARD:
            return self._edge.forward(sources, targets, indptr)
        return self._edge.backward(sources, targets, indptr, *arrays[3:])

    def _fused_half(self, weights: Sequence[Array], arrays: Sequence[Array], rows: int) -> Computed:
        inputs, labels = arrays[:-1], arrays[-1]
        outputs, saved = self._vertex.forward(weights, inputs)
        # They are given to nobody, who would look at them.
        check_payload(self._outputs, outputs, rows, self._returned)
        loss = cross_entropy(outputs[0], labels, self._scale)
        found = self._backward(weights, inputs, (loss.gradient,), saved)
        return Computed((*found.rows, np.array([loss.loss_sum, loss.correct])), found.gradients)

    def _backward(
        self,
        weights: Sequence[Array],
        inputs: Sequence[Array],
        gradients: Sequence[Array],
        saved: Sequence[Array] | None,
    ) -> Computed:
        found = self._vertex.backward(weights, inputs, gradients, saved=saved, wanted=self._wanted)
        pairs = zip(found.inputs, self._wanted, strict=True)
        return Computed(tuple(row for row, wanted in pairs if wanted and row is not None), found.weights)

    def _check_weights(self, weights: Sequence[Array], what: str) -> None:
        found = [(np.shape(weight), str(getattr(weight, "dtype", "no array"))) for weight in weights]
        wanted = [(shape, self._dtype) for shape in self.weights.values()]
        if found != wanted:
            raise ConfigError(f"step {self._name!r} {what} {found}, not {wanted} ({list(self.weights)})")


def add_gradients(first: Sequence[Array], second: Sequence[Array]) -> Arrays:
    """Return the gradients of a task's weights from those of its halves, in this order."""
    return tuple(one + other for one, other in zip(first, second, strict=True))


def _read_only(arrays: Sequence[Array]) -> list[Array]:
    """Views that a user's stage cannot write to: inside a graph server they are its own rows."""
    views = [array.view() for array in arrays]
    for view in views:
        view.flags.writeable = False
    return views


def _length(rows: int, half: int) -> int:
    nodes = half_rows(rows, half)
    return nodes.stop - nodes.start
