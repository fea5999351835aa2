"""Whether steps make a program: each against those before it, and against its stage."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NoReturn, final

from dglx_dist.errors import ConfigError
from dglx_dist.offload.stages.linear import MAX_WIDTH
from dglx_dist.offload.stages.registry import edge_stage, vertex_stage
from dglx_dist.offload.steps import FEATURES, FIXED, Edge, Gather, Scatter, Slot, Step, Vertex
from dglx_dist.registry import did_you_mean

MAX_STEPS, MAX_SLOTS, MAX_WEIGHTS = 512, 16, 32
"""Most steps of a program; slots and weights of one step."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_FIXED = re.compile(FIXED + r"(0|[1-9][0-9]{0,3})")


def check_steps(steps: Sequence[Step], features: int, classes: int) -> None:
    """Check that every step can be taken after those before it, and that the last ends in the loss.

    Args:
        steps: What to check.
        features: Columns of the slot ``x``.
        classes: Columns that the last step must leave.

    Raises:
        ConfigError: they cannot; the message names the step.
    """
    _bounds("number of steps", len(steps), MAX_STEPS)
    checker = _Checker(features)
    for step in steps:
        checker.take(step)
    last = steps[-1]
    if not isinstance(last, Vertex) or [slot.width for slot in last.outputs] != [classes]:
        raise ConfigError(
            f"the last step {last.name!r} must be a Vertex with one output of {classes} columns, "
            "the classes; let the program end there"
        )


@final
class _Checker:
    """Takes steps in order and remembers what is there."""

    def __init__(self, features: int) -> None:
        self._nodes = {FEATURES: features}
        self._edges: dict[str, int] = {}
        self._with_ghosts = {FEATURES}
        self._names: set[str] = set()
        self._weights: set[str] = set()

    def take(self, step: Step) -> None:
        """Check one step."""
        if not isinstance(step, Gather | Vertex | Scatter | Edge):
            raise ConfigError(f"{step!r} is no step; give Gather, Vertex, Scatter or Edge")
        if not isinstance(step.name, str) or not _NAME.fullmatch(step.name) or step.name in self._names:
            raise ConfigError(f"the step name {step.name!r} is taken or not 1 to 64 of A-Z a-z 0-9 _ . -")
        self._names.add(step.name)
        if isinstance(step, Gather):
            self._gather(step)
        elif isinstance(step, Vertex):
            self._vertex(step)
        elif isinstance(step, Scatter):
            self._scatter(step)
        else:
            self._edge(step)

    def _gather(self, step: Gather) -> None:
        width = self._width(step, step.source, self._nodes)
        self._has_ghosts(step, step.source)
        if step.output.width != width:
            _refuse(step, f"makes {step.output.width} columns of {width}; a sum keeps the columns")
        if step.edges is not None and not _FIXED.fullmatch(step.edges):
            heads = self._width(step, step.edges, self._edges)
            if width % heads:
                _refuse(step, f"weighs {width} columns by {heads} heads; give a multiple of the heads")
        self._make(step, (step.output,), self._nodes)

    def _vertex(self, step: Vertex) -> None:
        stage = vertex_stage(step.stage, step.config)
        _equal(step, "inputs", stage.input_widths, [self._width(step, n, self._nodes) for n in step.inputs])
        _equal(step, "outputs", stage.output_widths, [slot.width for slot in step.outputs])
        shapes = stage.weight_shapes
        if not len(step.weights) == len(shapes) <= MAX_WEIGHTS:
            _refuse(step, f"has weights {list(step.weights)}, its stage wants {list(shapes)}")
        for name in step.weights:
            if not isinstance(name, str) or not 0 < len(name) <= 512 or name in self._weights:
                _refuse(step, f"has the weight {name!r}, which is no name or belongs to a step already")
            self._weights.add(name)
        self._make(step, step.outputs, self._nodes)

    def _scatter(self, step: Scatter) -> None:
        if not 0 < len(step.slots) <= MAX_SLOTS:
            _refuse(step, f"sends {len(step.slots)} slots; give 1 to {MAX_SLOTS}")
        for name in step.slots:
            self._width(step, name, self._nodes)
            if name in self._with_ghosts:
                _refuse(step, f"sends {name!r} again; rows are sent once in an epoch, features never")
            self._with_ghosts.add(name)

    def _edge(self, step: Edge) -> None:
        stage = edge_stage(step.stage, step.config)
        found = [self._width(step, name, self._nodes) for name in (step.sources, step.targets)]
        _equal(step, "slots", (stage.width,) * 3, [*found, step.output.width])
        self._has_ghosts(step, step.sources)
        self._make(step, (step.output,), self._edges)

    def _width(self, step: Step, name: str, among: dict[str, int]) -> int:
        if not isinstance(name, str) or name not in among:
            kind = "nodes" if among is self._nodes else "edges"
            _refuse(
                step, f"reads {name!r}, which no step before makes of {kind}{did_you_mean(str(name), among)}"
            )
        return among[name]

    def _has_ghosts(self, step: Step, name: str) -> None:
        if name not in self._with_ghosts:
            _refuse(step, f"reads {name!r} over edges; put a Scatter of it before")

    def _make(self, step: Step, slots: Sequence[Slot], among: dict[str, int]) -> None:
        if not 0 < len(slots) <= MAX_SLOTS:
            _refuse(step, f"makes {len(slots)} slots; give 1 to {MAX_SLOTS}")
        for slot in slots:
            if not isinstance(slot.name, str) or not _NAME.fullmatch(slot.name):
                _refuse(step, f"makes {slot.name!r}; slots are named by 1 to 64 of A-Z a-z 0-9 _ . -")
            if slot.name in self._nodes or slot.name in self._edges:
                _refuse(step, f"makes {slot.name!r}, which is there already; give it a name of its own")
            _bounds(f"width of {slot.name!r}", slot.width, MAX_WIDTH)
            among[slot.name] = slot.width


def _equal(step: Step, what: str, wanted: Iterable[int], found: Iterable[int]) -> None:
    if list(wanted) != list(found):
        _refuse(step, f"has {what} of {list(found)} columns, its stage wants {list(wanted)}")


def _refuse(step: Step, reason: str) -> NoReturn:
    raise ConfigError(f"step {step.name!r} {reason}")


def _bounds(what: str, value: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
        raise ConfigError(f"the {what} of a program is {value!r}; give a whole number from 1 to {high}")
