"""Sums over the edges of one graph server, with the latest rows: Gather, its transpose, edges' own rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import final

import numpy as np

from dglx_dist.offload.program import Program
from dglx_dist.offload.steps import Edge, Gather
from dglx_dist.records import Array
from dglx_dist.strategies.bounded import kernels
from dglx_dist.strategies.bounded.part import Part
from dglx_dist.strategies.bounded.stores import Stores

_PIECE_NUMBERS = 1 << 22
"""A sum over so many numbers lets go of its rows for a moment: who writes them waits, and it is the threads
that serve workers and other graph servers who do. Milliseconds, where an interval's whole sum takes tens."""


@final
class OverEdges:
    """What the moves of a graph server read over its edges; any thread.

    Args:
        part: Structure.
        program: Its steps.
        stores: Rows.
    """

    def __init__(self, part: Part, program: Program, stores: Stores) -> None:
        self._part, self._graph, self._program, self._stores = part, part.graph, program, stores
        self._readers: dict[str, list[int]] = {}
        for index, step in enumerate(program.steps):
            if index in stores.slopes:
                source = step.source if isinstance(step, Gather) else _edge(step).sources
                self._readers.setdefault(source, []).append(index)

    def gather(self, step: Gather, interval: int) -> Array:
        """Return the sums over the in-edges of ``interval``, (nodes, width)."""
        nodes = self._part.nodes_of(interval)
        out = np.empty((nodes.stop - nodes.start, step.output.width), dtype=self._program.dtype)
        for first, end in self._pieces(nodes, step.output.width):
            self._gather(step, first, out[first - nodes.start : end - nodes.start])
        return out

    def _gather(self, step: Gather, first: int, out: Array) -> None:
        graph = self._graph
        with ExitStack() as held:
            rows = held.enter_context(self._stores.rows[step.source].reading())
            if step.edges is None:
                kernels.gather_sums(graph.indptr, graph.sources, rows, first, out)
            else:
                values = held.enter_context(self._stores.values[step.edges].reading())
                kernels.gather_weighted(graph.indptr, graph.sources, values, rows, first, out)

    def _pieces(self, nodes: slice, width: int) -> Iterator[tuple[int, int]]:
        """Yield runs of ``nodes``, each with the in-edges of one piece and those of its last node."""
        indptr, first = self._graph.indptr, nodes.start
        while first < nodes.stop:
            enough = indptr[first] + max(_PIECE_NUMBERS // width, 1)
            end = int(np.searchsorted(indptr[: nodes.stop], enough))
            yield first, end
            first = end

    def products(self, step: Gather, interval: int, slopes: Array) -> Array:
        """Return the gradient of the edge values of a Gather, (edges, K), from that of its sums."""
        edges, nodes, graph = self._part.edges_of(interval), self._part.nodes_of(interval), self._graph
        assert step.edges is not None
        heads = self._program.slots[step.edges].width
        out = np.empty((edges.stop - edges.start, heads), dtype=slopes.dtype)
        with self._stores.rows[step.source].reading() as rows:
            kernels.edge_products(graph.indptr, graph.sources, slopes, rows, nodes.start, out)
        return out

    def source_rows(self, slot: str, interval: int) -> Array:
        """Return the row of each in-edge's source, (edges, width)."""
        edges, width = self._part.edges_of(interval), self._program.slots[slot].width
        out = np.empty((edges.stop - edges.start, width), dtype=self._program.dtype)
        with self._stores.rows[slot].reading() as rows:
            kernels.take_sources(self._graph.sources, rows, edges.start, out)
        return out

    def sum_to_targets(self, interval: int, values: Array) -> Array:
        """Return the sum of (edges, k) ``values`` over the in-edges of each node of ``interval``."""
        nodes = self._part.nodes_of(interval)
        out = np.empty((nodes.stop - nodes.start, values.shape[1]), dtype=values.dtype)
        kernels.segment_sums(self._graph.indptr, values, nodes.start, out)
        return out

    def pull_back(self, slot: str, nodes: Array, out: Array) -> None:
        """Add to ``out`` what flows to ``slot`` over the out-edges of the local ids ``nodes``.

        Args:
            slot: Of nodes.
            nodes: (k,) int32, own nodes or ghosts.
            out: (k, width).
        """
        for index in self._readers.get(slot, ()):
            step = self._program.steps[index]
            if isinstance(step, Gather):
                self._pull_back_sums(index, step, nodes, out)
            else:
                with self._stores.slopes[index].reading() as slopes:
                    kernels.pull_back_edges(self._graph.out_indptr, self._graph.out_edges, slopes, nodes, out)

    def _pull_back_sums(self, index: int, step: Gather, nodes: Array, out: Array) -> None:
        graph = self._graph
        with ExitStack() as held:
            slopes = held.enter_context(self._stores.slopes[index].reading())
            if step.edges is None:
                kernels.pull_back_sums(graph.out_indptr, graph.out_targets, slopes, nodes, out)
            else:
                values = held.enter_context(self._stores.values[step.edges].reading())
                kernels.pull_back_weighted(
                    graph.out_indptr, graph.out_targets, graph.out_edges, values, slopes, nodes, out
                )


def _edge(step: object) -> Edge:
    assert isinstance(step, Edge)
    return step
