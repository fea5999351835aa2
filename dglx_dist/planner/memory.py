"""How much memory a rank needs at its peak, before anything of it is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dglx_dist.planner.full_work import FullWork
from dglx_dist.planner.model_shape import ModelShape
from dglx_dist.planner.records import Cluster, GraphStats
from dglx_dist.records import Array

if TYPE_CHECKING:
    from dglx_dist.strategies.granndis.rehearsal import Rehearsal

PROGRAM_BYTES = 690 * 10**6
"""Of a rank that has imported everything, compiled its kernels and evaluated once (torch 2.13, Linux)."""
_OF_ADAM = 4
"""Parameters, their gradients, and Adam's two moments."""
_KEPT = 1.3
"""Freed memory is kept for the next step (cluster/allocator.py), by each thread what it freed itself: so much
is held for what is in use."""
_BLOCK_EDGE_BYTES, _BLOCK_ROW_BYTES = 28, 24
"""Of a sampled block: ids, positions and the formats that message passing makes of them."""
_PLAN_EDGE_BYTES = 44
"""Of the plan and block of a full-graph layer, as ``granndis.memory.structure_bytes`` has it."""


@dataclass(frozen=True, kw_only=True)
class MemoryModel:
    """What is the same for all candidates."""

    graph: GraphStats
    shape: ModelShape
    cluster: Cluster
    program_bytes: int
    replicated: bool
    """Whether every server maps the structure of the whole graph."""
    of_batches: Rehearsal | None = None
    """Allocations of a step on sampled blocks; None: from widths alone."""
    of_graphs: Rehearsal | None = None
    """The same for layers that exchange rows."""
    batches_ahead: int = 1

    @property
    def fixed(self) -> int:
        """The program, the model and its optimizer."""
        return self.program_bytes + _OF_ADAM * self.shape.parameters * self.shape.itemsize

    def batches(
        self, largest: Sequence[Sequence[int]], *, held: int, owners: int = 1, in_flight: int = 1
    ) -> int:
        """Return the peak of a rank that trains on mini-batches.

        Args:
            largest: (3, L) sources, targets and edges of the largest batch.
            held: Bytes of features, beside the structure, that are mapped or kept.
            owners: Whose blocks of layer 1 belong to a batch (push-pull's N_f); each comes with its part of
                the columns, together as many as an own whole row has.
            in_flight: Batches that are trained at a time.
        """
        sources, targets, edges = largest
        inputs = round(sources[0] * self.shape.features * self.shape.itemsize)
        blocks = _BLOCK_EDGE_BYTES * sum(edges) + _BLOCK_ROW_BYTES * sum(sources)
        blocks += (owners - 1) * (_BLOCK_EDGE_BYTES * edges[0] + _BLOCK_ROW_BYTES * sources[0])
        step = self._step(self.of_batches, [sources[0], *targets], sources, edges)
        return (
            self.fixed
            + held
            + self.structure
            + round(_KEPT * (step + (self.batches_ahead + 1 + in_flight) * (inputs + blocks)))
        )

    def full(self, work: FullWork, *, ahead: int = 0) -> int:
        """Return the peak of a rank that trains on whole graphs; ``ahead``: co-batches loaded meanwhile."""
        inputs = work.rows[0] * self.shape.features * self.shape.itemsize
        # Layers that are alike share one block.
        distinct = dict.fromkeys(zip(work.sources, work.rows[1:], work.edges, strict=True))
        blocks = sum(_PLAN_EDGE_BYTES * edges + 16 * sources + 8 * rows for sources, rows, edges in distinct)
        step = self._step(self.of_graphs, work.rows, work.sources, work.edges)
        own = self.graph.nodes // self.cluster.servers * self.graph.feature_bytes
        return self.fixed + own + round(_KEPT * (step + (1 + ahead) * (inputs + blocks)))

    @property
    def structure(self) -> int:
        """Bytes of the in-edges that a rank maps."""
        share = 1.0 if self.replicated else 1.0 / self.cluster.servers
        each = 4 if self.graph.nodes < 2**31 else 8
        return round(share * (8 * self.graph.nodes + each * self.graph.edges))

    @property
    def own_features(self) -> int:
        """Bytes of the feature rows of a server, which its ranks share."""
        return -(-self.graph.nodes // self.cluster.servers) * self.graph.feature_bytes

    def _step(
        self,
        rehearsal: Rehearsal | None,
        rows: Sequence[int],
        sources: Sequence[int],
        edges: Sequence[int],
    ) -> int:
        """Return the peak of a step beyond its inputs and its blocks."""
        if rehearsal is not None:
            counts: Array = np.array([1, *rows, *sources, *edges], np.int64)
            return int(rehearsal.running(counts).max())
        kept = [
            rows[place + 1] * (layer.summed + 3 * layer.outputs) + sources[place] * layer.outputs
            for place, layer in enumerate(self.shape.layers)
        ]
        return self.shape.itemsize * (sum(kept) + 2 * max(kept))
