"""The rows of one graph server: activations, values of edges, and gradients that others read."""

from __future__ import annotations

from typing import final

import numpy as np

from dglx_dist.offload.program import Program
from dglx_dist.offload.steps import FEATURES, FIXED, Edge, Gather, Scatter, outputs_of
from dglx_dist.records import Array
from dglx_dist.strategies.bounded.part import Part
from dglx_dist.strategies.bounded.rows import SharedRows


@final
class Stores:
    """Always the latest rows; each own row is written by its interval alone.

    Args:
        part: n own nodes, m ghosts, E edges.
        program: Whose slots are kept.
    """

    def __init__(self, part: Part, program: Program) -> None:
        graph, edges = part.graph, len(part.graph.sources)
        scattered = {name for step in program.steps if isinstance(step, Scatter) for name in step.slots}
        self._dtype = program.dtype
        self.rows: dict[str, SharedRows] = {FEATURES: SharedRows(part.features)}
        """Slot of nodes -> (n, width), (n + m, width) where ghosts have rows."""
        self.values: dict[str, SharedRows] = {
            name: SharedRows(array) for name, array in part.fixed.items() if name.startswith(FIXED)
        }
        """Slot of edges, or name of fixed values -> (E, width)."""
        self.slopes: dict[int, SharedRows] = {}
        """Step -> gradient that sources pull: of a Gather's output (n, width), of an Edge step's logits
        (E, width)."""
        self.received: dict[tuple[str, int], SharedRows] = {}
        """(slot, peer) -> (b, width), the gradient of boundary rows that the peer sent last."""
        for index, step in enumerate(program.steps):
            for slot in outputs_of(step):
                if isinstance(step, Edge):
                    self.values[slot.name] = self._zeros(edges, slot.width)
                else:
                    has_ghosts = slot.name in scattered
                    length = graph.num_local if has_ghosts else graph.num_own
                    self.rows[slot.name] = self._zeros(length, slot.width)
            if isinstance(step, Gather) and {step.source, step.output.name} <= program.trained:
                self.slopes[index] = self._zeros(graph.num_own, step.output.width)
            elif isinstance(step, Edge) and step.sources in program.trained:
                self.slopes[index] = self._zeros(edges, step.output.width)
        for name in scattered & program.trained:
            for peer, nodes in enumerate(part.routes.boundary):
                self.received[name, peer] = self._zeros(len(nodes), program.slots[name].width)

    def _zeros(self, length: int, width: int) -> SharedRows:
        return SharedRows(np.zeros((length, width), dtype=self._dtype))

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows, features included."""
        kept = (*self.rows.values(), *self.values.values(), *self.slopes.values(), *self.received.values())
        return sum(one.array.nbytes for one in kept)

    def own(self, slot: str, nodes: slice) -> Array:
        """Return the rows of own ``nodes``, a view; for the interval that writes them."""
        return self.rows[slot].array[nodes]

    def write(self, slot: str, nodes: slice, *parts: Array) -> None:
        """Replace the rows of own ``nodes`` by ``parts``, one after another."""
        with self.rows[slot].writing() as array:
            _fill(array[nodes], parts)

    def write_values(self, slot: str, edges: slice, *parts: Array) -> None:
        """Replace the values of ``edges`` by ``parts``, one after another."""
        with self.values[slot].writing() as array:
            _fill(array[edges], parts)

    def publish(self, step: int, where: slice, *parts: Array) -> None:
        """Replace the gradient rows ``where`` of ``step`` by ``parts``, one after another."""
        with self.slopes[step].writing() as array:
            _fill(array[where], parts)


def _fill(out: Array, parts: tuple[Array, ...]) -> None:
    at = 0
    for part in parts:
        out[at : at + len(part)] = part
        at += len(part)
