"""P3's placement: structure by hash, features by column."""

from __future__ import annotations

from typing import final

from dglx_dist.partition.base import Partitioner
from dglx_dist.partition.flat import check_request, describe, to_assignment
from dglx_dist.partition.hash import hash_parts
from dglx_dist.records import Assignment, RawGraph


@final
class Feature(Partitioner):
    """Owners by hash, with ``parameters["features"] == "columns"``: features are meant to be cut by column.

    On disk rows still lie with their owner; a strategy that wants columns reshapes at load (P3, section 2.1).
    """

    def assign(self, graph: RawGraph, num_parts: int, seed: int) -> Assignment:
        """Hash the ids as ``hash`` does; ``seed`` changes nothing. See :meth:`Partitioner.assign`."""
        check_request(num_parts, seed)
        return to_assignment(
            graph,
            hash_parts(graph.total_nodes, num_parts),
            num_parts,
            method="feature",
            seed=seed,
            parameters={**describe(self.options, None), "features": "columns"},
        )
