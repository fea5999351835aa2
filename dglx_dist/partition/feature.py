"""P3's placement: structure by hash, features by column."""

from __future__ import annotations

from typing import final

from dglx_dist.partition.base import Partitioner
from dglx_dist.partition.flat import check_request, describe, to_assignment
from dglx_dist.partition.hash import hash_parts
from dglx_dist.records import Assignment, RawGraph

FEATURES, COLUMNS = "features", "columns"
"""The key and the value in ``Assignment.parameters`` of those who ask for features by column."""


@final
class Feature(Partitioner):
    """Owners by hash, with ``parameters["features"] == "columns"``: features are meant to be cut by column.

    On disk rows still lie with their owner, so that every strategy can train; who writes the dataset adds,
    for that parameter, files of the columns of as many ranks as parts (P3, section 3.2).
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
            parameters={**describe(self.options, None), FEATURES: COLUMNS},
        )
