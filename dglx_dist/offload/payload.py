"""Which arrays a task pulls and gives, in which order and form: the one place that knows.

A graph server lays out what it is asked for by it, a worker checks what it got, and the other way round.
n rows of nodes in a half, E in-edges of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import final

import numpy as np

from dglx_dist.errors import ConfigError
from dglx_dist.offload.program import Program
from dglx_dist.offload.stages.linear import first_of_second_half
from dglx_dist.offload.steps import Edge, Vertex
from dglx_dist.offload.tasks import Direction
from dglx_dist.records import Array


class Role(Enum):
    """What an array is to its task."""

    INPUT = "input"
    """Own rows of ``slot``, (n, width)."""
    GRADIENT = "gradient"
    """Gradient of ``slot``, pulled for outputs and given for inputs; (n, width), or (E, width) of edges."""
    OUTPUT = "output"
    """Rows of ``slot`` just computed, (n, width), or (E, width) of edges; pulled back by an Edge step."""
    SAVED = "saved"
    """What a stage saved, (n, width): given forward and pulled backward unless rematerialised."""
    LABELS = "labels"
    """(n,) int32, -1 without one; to a fused task."""
    STATISTICS = "statistics"
    """(2,) float64: sum of losses, number of correct rows; of a fused task."""
    SOURCES = "sources"
    """Rows of ``slot`` at each edge's source, (E, width)."""
    INDPTR = "indptr"
    """(n + 1,) int64 from 0 to E."""


class Per(Enum):
    """What an array has one row for."""

    NODE = "node"
    EDGE = "edge"
    BOUND = "bound"
    """A node, and one more."""
    HALF = "half"
    """Nothing: one array for the half."""


@final
@dataclass(frozen=True)
class Item:
    """One array of a payload."""

    role: Role
    per: Per
    dtype: str
    slot: str = ""
    """Of the program, where the role has one."""
    width: int = 0
    """Columns; 0: the array has one dimension."""


def pulled_items(program: Program, step: int, direction: Direction, rematerialise: bool) -> tuple[Item, ...]:
    """Return what a task of ``step`` pulls from its graph server for a half.

    Raises:
        ConfigError: no worker does such a step in this direction.
    """
    found = program.steps[step]
    indptr = Item(Role.INDPTR, Per.BOUND, "int64")
    if isinstance(found, Edge):
        sources = _item(program, found.sources, Role.SOURCES, Per.EDGE)
        both = (sources, _item(program, found.targets, Role.INPUT, Per.NODE), indptr)
        out = found.output.name
        values = (_item(program, out, Role.OUTPUT, Per.EDGE), _item(program, out, Role.GRADIENT, Per.EDGE))
        return both if _edge_direction(direction) is Direction.FORWARD else both + values
    inputs = tuple(_item(program, name, Role.INPUT) for name in _vertex(program, step).inputs)
    if direction is Direction.FORWARD:
        return inputs
    if direction is Direction.FUSED:
        return (*inputs, Item(Role.LABELS, Per.NODE, "int32"))
    gradients = tuple(_item(program, slot.name, Role.GRADIENT) for slot in _vertex(program, step).outputs)
    return inputs + gradients + (() if rematerialise else _saved(program, step))


def given_items(program: Program, step: int, direction: Direction, rematerialise: bool) -> tuple[Item, ...]:
    """Return what a task of ``step`` gives its graph server for a half.

    Input gradients come only for slots in ``program.trained``, in the order of the step's inputs.

    Raises:
        ConfigError: no worker does such a step in this direction.
    """
    found = program.steps[step]
    if isinstance(found, Edge):
        forward = _edge_direction(direction) is Direction.FORWARD
        role = Role.OUTPUT if forward else Role.GRADIENT
        return (_item(program, found.output.name, role, Per.EDGE),)
    vertex = _vertex(program, step)
    if direction is Direction.FORWARD:
        outputs = tuple(_item(program, slot.name, Role.OUTPUT) for slot in vertex.outputs)
        return outputs + (() if rematerialise else _saved(program, step))
    trained = [name for name in vertex.inputs if name in program.trained]
    gradients = tuple(_item(program, name, Role.GRADIENT) for name in trained)
    if direction is Direction.FUSED:
        return (*gradients, Item(Role.STATISTICS, Per.HALF, "float64"))
    return gradients


def half_rows(rows: int, half: int) -> slice:
    """Return which of ``rows`` rows half 0 or 1 has."""
    middle = first_of_second_half(rows)
    return slice(middle, rows) if half else slice(0, middle)


def take_half(items: Sequence[Item], arrays: Sequence[Array], rows: int, half: int) -> list[Array]:
    """Cut half 0 or 1 out of the arrays of a whole task of ``rows`` rows; views, but for indptr."""
    nodes = half_rows(rows, half)
    bounds = [array for item, array in zip(items, arrays, strict=True) if item.role is Role.INDPTR]
    edges = slice(int(bounds[0][nodes.start]), int(bounds[0][nodes.stop])) if bounds else slice(0, 0)
    cut = {
        Per.NODE: nodes,
        Per.EDGE: edges,
        Per.BOUND: slice(nodes.start, nodes.stop + 1),
        Per.HALF: slice(None),
    }
    found = [array[cut[item.per]] for item, array in zip(items, arrays, strict=True)]
    return [
        part - part[0] if item.per is Per.BOUND else part for item, part in zip(items, found, strict=True)
    ]


def join_halves(items: Sequence[Item], first: Sequence[Array], second: Sequence[Array]) -> list[Array]:
    """Return the arrays of a whole task from what both halves gave; statistics are added."""
    return [
        one + other if item.per is Per.HALF else np.concatenate([one, other])
        for item, one, other in zip(items, first, second, strict=True)
    ]


def check_payload(
    items: Sequence[Item], arrays: Sequence[Array], rows: int, where: str, *, num_edges: int | None = None
) -> None:
    """Raise ConfigError unless ``arrays`` are exactly what ``items`` say for a half of ``rows`` rows.

    Args:
        items: What is expected.
        arrays: What came.
        rows: Rows n of the half.
        where: What came, for the message.
        num_edges: Edges E of the half where indptr is not among ``arrays``.
    """
    if len(arrays) != len(items):
        raise ConfigError(f"{where} has {len(arrays)} arrays, not {len(items)}")
    edges = num_edges
    for item, array in zip(items, arrays, strict=True):
        if item.role is Role.INDPTR:
            edges = _edges_of(array, rows, where)
    for item, array in zip(items, arrays, strict=True):
        length = {Per.NODE: rows, Per.EDGE: edges, Per.BOUND: rows + 1, Per.HALF: 2}[item.per]
        wanted = (length, item.width) if item.width else (length,)
        if not isinstance(array, np.ndarray) or array.shape != wanted or array.dtype != item.dtype:
            what = f"{item.role.value} {item.slot}".rstrip()
            raise ConfigError(f"{where} has {what} of {_form(array)}, not {wanted} and {item.dtype}")


def _form(array: object) -> str:
    # What a user's own stage returns may be anything.
    if isinstance(array, np.ndarray):
        return f"shape {array.shape} and {array.dtype}"
    return f"type {type(array).__name__}"


def _edges_of(indptr: Array, rows: int, where: str) -> int:
    good = indptr.dtype == np.int64 and indptr.shape == (rows + 1,)
    # Compared and not subtracted: the difference of two int64 may be none.
    if not good or indptr[0] != 0 or (indptr[1:] < indptr[:-1]).any():
        raise ConfigError(f"{where} has an indptr that is not {rows + 1} ascending int64 from 0")
    return int(indptr[-1])


def _item(program: Program, slot: str, role: Role, per: Per = Per.NODE) -> Item:
    return Item(role, per, program.dtype, slot, program.slots[slot].width)


def _saved(program: Program, step: int) -> tuple[Item, ...]:
    widths = program.vertex_stage(step).saved_widths
    return tuple(Item(Role.SAVED, Per.NODE, program.dtype, "", width) for width in widths)


def _vertex(program: Program, step: int) -> Vertex:
    found = program.steps[step]
    if not isinstance(found, Vertex):
        raise ConfigError(f"step {step} ({found.name}) is done by graph servers; no worker takes it")
    return found


def _edge_direction(direction: Direction) -> Direction:
    if direction is Direction.FUSED:
        raise ConfigError("an Edge step has no loss to be fused with; take it forward and backward")
    return direction
