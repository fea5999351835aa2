"""The steps of a program: what graph servers and workers do in turn.

A graph server gathers rows over edges and scatters rows to ghosts; a worker applies a stage to the rows of
vertices or edges. The nine tasks of Dorylus (section 4 of its paper) are these four forward, the same four
backward, and the update of the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias, final

from dglx_dist.offload.stages.base import Config

FEATURES = "x"
"""The slot that holds the features; its ghost rows are fetched once, before the first epoch."""
FIXED = "fixed:"
"""What names of edge values that no step computes begin with."""


@final
@dataclass(frozen=True)
class Slot:
    """Rows that steps hand on: (n, width) of nodes, or (E, width) of in-edges where an Edge step makes it."""

    name: str
    width: int


@final
@dataclass(frozen=True, kw_only=True)
class Gather:
    """Sum source rows over each node's in-edges (GA), on the graph server."""

    name: str
    source: str
    """Slot of nodes; own rows and ghosts are read."""
    output: Slot
    edges: str | None = None
    """What edges weigh: ``fixed:<n>``, or the slot of an Edge step, by head; None: 1."""


@final
@dataclass(frozen=True, kw_only=True)
class Vertex:
    """Apply a vertex stage to rows of nodes (AV), on a worker."""

    name: str
    stage: str
    """Name in the registry of stages."""
    config: Config = field(hash=False)
    inputs: tuple[str, ...]
    """Slots of nodes; own rows are read."""
    outputs: tuple[Slot, ...]
    weights: tuple[str, ...] = ()
    """The user's names (state_dict), in the order in which the stage declares its own."""


@final
@dataclass(frozen=True, kw_only=True)
class Scatter:
    """Send boundary rows to the graph servers that have them as ghosts (SC)."""

    name: str
    slots: tuple[str, ...]


@final
@dataclass(frozen=True, kw_only=True)
class Edge:
    """Apply an edge stage to the in-edges of nodes (AE), on a worker."""

    name: str
    stage: str
    config: Config = field(hash=False)
    sources: str
    """Slot of nodes, whose rows are read at each edge's source: own rows and ghosts."""
    targets: str
    """Slot of nodes; own rows are read."""
    output: Slot


Step: TypeAlias = Gather | Vertex | Scatter | Edge


def inputs_of(step: Step) -> Iterator[str]:
    """Yield the slots that ``step`` reads; the names of fixed edge values are none."""
    if isinstance(step, Gather):
        yield step.source
        if step.edges is not None and not step.edges.startswith(FIXED):
            yield step.edges
    elif isinstance(step, Vertex):
        yield from step.inputs
    elif isinstance(step, Scatter):
        yield from step.slots
    else:
        yield from (step.sources, step.targets)


def outputs_of(step: Step) -> tuple[Slot, ...]:
    """Return the slots that ``step`` makes."""
    if isinstance(step, Vertex):
        return step.outputs
    return () if isinstance(step, Scatter) else (step.output,)
