"""Shared rows of a graph server and compiled sums over its edges.

Arrays of the kernels, for n own nodes, m ghosts, E edges into own nodes, K heads:

- ``indptr`` (n + 1,) int64, ``sources`` (E,) int32 local ids in [0, n + m): in-edges in CSC order, those of
  node v from ``indptr[v]`` to ``indptr[v + 1]``.
- ``out_indptr`` (n + m + 1,) int64, ``out_targets`` (E,) int32, ``out_edges`` (E,) positions in CSC order:
  the same edges by source, those of local id u from ``out_indptr[u]`` to ``out_indptr[u + 1]``.
- ``rows`` (n + m, w) of sources; ``values`` (E, K) of edges in CSC order, where K divides w; None: all 1.
- ``first`` is the first of the nodes of ``out``; ``nodes`` (k,) int32 are local ids.

Every sum runs in the order of the edges, so equal rows give equal bits. Kernels release the interpreter lock,
and are compiled apart for values and None.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import final

import numpy as np
from numba import njit

from dglx_dist.graph.row_kernels import read_ahead
from dglx_dist.records import Array
from dglx_dist.serverless.program import FEATURES, Edge, Gather, Program, Scatter, drops_features, outputs_of
from dglx_dist.strategies.serverless.graph_partition import Part

_AHEAD = 8
"""Rows are prefetched this many edges ahead, because sources are scattered in memory."""


@njit(cache=True, nogil=True)
def gather(indptr: Array, sources: Array, values: Array | None, rows: Array, first: int, out: Array) -> None:
    """Write to ``out[i]``, (nodes, w), the sum of the source rows of node ``first + i``, times the values."""
    heads = 1 if values is None else values.shape[1]
    width = rows.shape[1] // heads
    last_edge = indptr[first + out.shape[0]]
    for i in range(out.shape[0]):
        out[i, :] = 0
        for edge in range(indptr[first + i], indptr[first + i + 1]):
            if edge + _AHEAD < last_edge:
                read_ahead(rows, sources[edge + _AHEAD])
            for head in range(heads):
                # Slices, because indices that might be negative keep the loop from becoming vector code.
                total = out[i, head * width : (head + 1) * width]
                row = rows[sources[edge], head * width : (head + 1) * width]
                if values is None:
                    for column in range(width):
                        total[column] += row[column]
                else:
                    value = values[edge, head]
                    for column in range(width):
                        total[column] += value * row[column]


@njit(cache=True, nogil=True)
def pull_back(
    out_indptr: Array,
    places: Array,
    out_edges: Array,
    values: Array | None,
    gradients: Array,
    nodes: Array,
    out: Array,
) -> None:
    """Add to ``out[i]``, (k, w), the gradients at the ``places`` of the out-edges of ``nodes[i]``.

    Gather transposed: ``places`` are ``out_targets`` for the gradients of nodes, each times the value of its
    edge, and ``out_edges`` for those of edges.
    """
    heads = 1 if values is None else values.shape[1]
    width = gradients.shape[1] // heads
    for i in range(len(nodes)):
        for at in range(out_indptr[nodes[i]], out_indptr[nodes[i] + 1]):
            for head in range(heads):
                total = out[i, head * width : (head + 1) * width]
                row = gradients[places[at], head * width : (head + 1) * width]
                if values is None:
                    for column in range(width):
                        total[column] += row[column]
                else:
                    value = values[out_edges[at], head]
                    for column in range(width):
                        total[column] += value * row[column]


@njit(cache=True, nogil=True)
def edge_products(
    indptr: Array, sources: Array, gradients: Array, rows: Array, first: int, out: Array
) -> None:
    """Write to ``out``, (edges, K), the product of the target's gradient and the source's row, by head.

    ``gradients`` is (nodes, w), and ``out`` has the in-edges of these nodes.
    """
    width = rows.shape[1] // out.shape[1]
    begin = indptr[first]
    for i in range(gradients.shape[0]):
        for edge in range(indptr[first + i], indptr[first + i + 1]):
            source = sources[edge]
            for head in range(out.shape[1]):
                total = out.dtype.type(0)
                for column in range(head * width, (head + 1) * width):
                    total += gradients[i, column] * rows[source, column]
                out[edge - begin, head] = total


@final
class SharedRows:
    """An array of rows behind a readers-writer lock; waiting writers go before new readers."""

    def __init__(self, array: Array) -> None:
        self.array = array
        """Accessed only inside :meth:`reading` and :meth:`writing`, except by a row's only writer."""
        self._changed = threading.Condition(threading.Lock())
        self._readers, self._writers_waiting, self._is_written = 0, 0, False

    @contextmanager
    def reading(self) -> Iterator[Array]:
        """Yield the array while nobody writes to it. Not reentrant."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_written and not self._writers_waiting)
            self._readers += 1
        try:
            yield self.array
        finally:
            with self._changed:
                self._readers -= 1
                self._changed.notify_all()

    @contextmanager
    def writing(self) -> Iterator[Array]:
        """Yield the array while nobody else reads or writes it."""
        with self._changed:
            self._writers_waiting += 1
            self._changed.wait_for(lambda: not self._is_written and not self._readers)
            self._writers_waiting -= 1
            self._is_written = True
        try:
            yield self.array
        finally:
            with self._changed:
                self._is_written = False
                self._changed.notify_all()

    def write(self, where: slice, *parts: Array) -> None:
        """Overwrite the rows ``where`` with the concatenated ``parts``."""
        with self.writing() as array:
            np.concatenate(parts, out=array[where])


_PIECE_NUMBERS = 1 << 22
"""A sum releases its rows for a moment after this many numbers. Otherwise writers, which are the threads that
serve workers and other graph servers, would wait tens of milliseconds for an interval's whole sum."""


@final
class Stores:
    """The latest rows of all slots, and sums over edges. Thread-safe; only its interval writes an own row."""

    def __init__(self, part: Part, program: Program) -> None:
        self._part, self._program = part, program
        edges = len(part.graph.sources)
        scattered = {name for step in program.steps if isinstance(step, Scatter) for name in step.slots}
        self.slots = {
            name: SharedRows(array) for name, array in (*part.fixed.items(), (FEATURES, part.features))
        }
        """Slot of nodes -> (n, width), or (n + m, width) if ghosts have rows; slot of edges, or name of fixed
        values -> (E, width)."""
        self.gradients: dict[int, SharedRows] = {}
        """Step -> gradient that sources read: of a Gather's output (n, width), of an Edge step's logits
        (E, width)."""
        self.received: dict[tuple[str, int], SharedRows] = {}
        """(slot, peer) -> (b, width), the last gradient of boundary rows from the peer."""
        self._readers: dict[str, list[int]] = {}
        for index, step in enumerate(program.steps):
            for slot in outputs_of(step):
                has_ghosts = slot.name in scattered or drops_features(step)
                length = part.graph.num_local if has_ghosts else part.graph.num_own
                length = edges if slot.name in program.edge_slots else length
                self.slots[slot.name] = self._zeros(length, slot.width)
            source = {Gather: "source", Edge: "sources"}.get(type(step))
            if source and {name := getattr(step, source), outputs_of(step)[0].name} <= program.trained:
                length = edges if isinstance(step, Edge) else part.graph.num_own
                self.gradients[index] = self._zeros(length, outputs_of(step)[0].width)
                self._readers.setdefault(name, []).append(index)
        for name in scattered & program.trained:
            for peer, nodes in enumerate(part.boundary):
                self.received[name, peer] = self._zeros(len(nodes), program.slots[name].width)

    def _zeros(self, length: int, width: int) -> SharedRows:
        return SharedRows(np.zeros((length, width), dtype=self._program.dtype))

    def gather(self, step: Gather, interval: int) -> Array:
        """Return the sums over the in-edges of ``interval``, (nodes, width)."""
        nodes, graph = self._part.nodes_of(interval), self._part.graph
        # Only this interval writes the values of its in-edges.
        values = None if step.edges is None else self.slots[step.edges].array
        out = np.empty((nodes.stop - nodes.start, step.output.width), dtype=self._program.dtype)
        for first, end in self._pieces(nodes, step.output.width):
            with self.slots[step.source].reading() as rows:
                gather(
                    graph.indptr,
                    graph.sources,
                    values,
                    rows,
                    first,
                    out[first - nodes.start : end - nodes.start],
                )
        return out

    def _pieces(self, nodes: slice, width: int) -> Iterator[tuple[int, int]]:
        # Runs of nodes, each with the in-edges of one piece and those of its last node.
        indptr, first = self._part.graph.indptr, nodes.start
        while first < nodes.stop:
            enough = indptr[first] + max(_PIECE_NUMBERS // width, 1)
            end = int(np.searchsorted(indptr[: nodes.stop], enough))
            yield first, end
            first = end

    def products(self, step: Gather, edge_slot: str, interval: int, gradients: Array) -> Array:
        """Return the gradient of the edge values of a Gather, (edges, K), from that of its sums."""
        edges, nodes, graph = self._part.edges_of(interval), self._part.nodes_of(interval), self._part.graph
        heads = self._program.slots[edge_slot].width
        out = np.empty((edges.stop - edges.start, heads), dtype=gradients.dtype)
        with self.slots[step.source].reading() as rows:
            edge_products(graph.indptr, graph.sources, gradients, rows, nodes.start, out)
        return out

    def source_rows(self, slot: str, interval: int) -> Array:
        """Return the row of each in-edge's source, (edges, width)."""
        with self.slots[slot].reading() as rows:
            return rows.take(self._part.graph.sources[self._part.edges_of(interval)], axis=0)

    def sum_to_targets(self, interval: int, values: Array) -> Array:
        """Return the sum of (edges, k) ``values`` over the in-edges of each node of ``interval``."""
        nodes = self._part.nodes_of(interval)
        out = np.empty((nodes.stop - nodes.start, values.shape[1]), dtype=values.dtype)
        bounds = self._part.graph.indptr[nodes.start : nodes.stop + 1]
        # Each edge is a source of its own, in the same order.
        gather(bounds - bounds[0], np.arange(len(values), dtype=np.int32), None, values, 0, out)
        return out

    def pull_back(self, slot: str, nodes: Array, out: Array) -> None:
        """Add to ``out``, (k, width), the gradients of ``slot`` over the out-edges of the (k,) ``nodes``."""
        graph = self._part.graph
        for index in self._readers.get(slot, ()):
            step = self._program.steps[index]
            places = graph.out_targets if isinstance(step, Gather) else graph.out_edges
            held: AbstractContextManager[Array | None] = nullcontext()
            if isinstance(step, Gather) and step.edges is not None:
                held = self.slots[step.edges].reading()
            with self.gradients[index].reading() as gradients, held as values:
                pull_back(graph.out_indptr, places, graph.out_edges, values, gradients, nodes, out)
