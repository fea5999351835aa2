"""What one interval does in one epoch, move by move: the tasks of Dorylus (section 4) in order.

A Scatter backward is two moves: gradients of ghosts leave (gradSC), then those that came are added to what
flows over own edges (gradGA).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import final

from dglx_dist.offload.program import Program
from dglx_dist.offload.steps import Edge, Gather, Scatter, Vertex
from dglx_dist.offload.tasks import Direction


class Kind(Enum):
    """Who does a move, and how."""

    GATHER = "gather"
    """Sum source rows over in-edges; graph server."""
    SCATTER = "scatter"
    """Send boundary rows to ghosts; graph server."""
    WORK = "work"
    """Apply a stage forward, backward or fused; worker."""
    LOSS = "loss"
    """Compute the loss where the last step is not fused; graph server."""
    PUBLISH = "publish"
    """Make the gradient of a gathered sum known to sources, and compute those of its edges; graph server."""
    SEND_BACK = "send_back"
    """Send the gradients of ghosts to their owners; graph server."""
    COLLECT = "collect"
    """Add what flows back over out-edges to the gradients of own rows; graph server."""


class Barrier(Enum):
    """What a synchronous epoch waits for before a move."""

    NONE = "none"
    LOCAL = "local"
    """All intervals of this graph server have come as far."""
    GLOBAL = "global"
    """Those of all graph servers have."""


@final
@dataclass(frozen=True)
class Move:
    """One part of an interval's epoch."""

    kind: Kind
    step: int
    """Index in the program."""
    direction: Direction = Direction.FORWARD
    barrier: Barrier = Barrier.NONE


def course_of(program: Program, fused: bool) -> tuple[Move, ...]:
    """Return the moves of an epoch.

    Args:
        program: What is trained.
        fused: Whether the last step goes forward and backward in one task (section 6, task fusion).
    """
    forward = [_forward(program, index) for index in range(program.last)]
    if fused:
        last = [Move(Kind.WORK, program.last, Direction.FUSED, _after_scatter(program, program.last))]
    else:
        last = [
            _forward(program, program.last),
            Move(Kind.LOSS, program.last, Direction.BACKWARD),
            Move(Kind.WORK, program.last, Direction.BACKWARD),
        ]
    back = [move for index in reversed(range(program.last)) for move in _backward(program, index)]
    return (*forward, *last, *back)


def _forward(program: Program, index: int) -> Move:
    step = program.steps[index]
    kind = Kind.WORK
    if isinstance(step, Gather):
        kind = Kind.GATHER
    elif isinstance(step, Scatter):
        kind = Kind.SCATTER
    return Move(kind, index, barrier=_after_scatter(program, index))


def _after_scatter(program: Program, index: int) -> Barrier:
    """Whoever comes behind a Scatter may read ghosts."""
    comes_behind = index > 0 and isinstance(program.steps[index - 1], Scatter)
    return Barrier.GLOBAL if comes_behind else Barrier.NONE


def _backward(program: Program, index: int) -> list[Move]:
    """Moves of one step back; none where no weight would get a gradient from them."""
    step = program.steps[index]
    back = Direction.BACKWARD
    if isinstance(step, Gather):
        return [Move(Kind.PUBLISH, index, back)] if step.output.name in program.trained else []
    if isinstance(step, Scatter):
        if program.trained.isdisjoint(step.slots):
            return []
        return [
            Move(Kind.SEND_BACK, index, back, Barrier.LOCAL),
            Move(Kind.COLLECT, index, back, Barrier.GLOBAL),
        ]
    if isinstance(step, Edge):
        return [Move(Kind.WORK, index, back)] if step.output.name in program.trained else []
    assert isinstance(step, Vertex)
    has_use = bool(step.weights) or not program.trained.isdisjoint(step.inputs)
    return [Move(Kind.WORK, index, back)] if has_use else []
