"""Nodes in the order of their ids, cut into ranges of equal weight."""

from __future__ import annotations

from typing import final

import numpy as np

from dglx_dist.partition.base import Partitioner
from dglx_dist.partition.flat import check_request, describe, to_assignment
from dglx_dist.partition.weights import balance_weights
from dglx_dist.records import Array, Assignment, RawGraph


@final
class Contiguous(Partitioner):
    """Ranges of ids, for data that is already ordered well (by crawl, by community, by an earlier partition).

    Honours one balance weight and target weights. No range exceeds its share by more than one node.
    """

    honours = frozenset({"balance", "target_weights", "tolerance"})

    def assign(self, graph: RawGraph, num_parts: int, seed: int) -> Assignment:
        """Cut the ids into P ranges; ``seed`` changes nothing. See :meth:`Partitioner.assign`."""
        check_request(num_parts, seed)
        weights = balance_weights(graph, self.options, num_parts, self.max_constraints)
        return to_assignment(
            graph,
            cut_ranges(weights.columns[0], weights.shares),
            num_parts,
            method="contiguous",
            seed=seed,
            parameters=describe(self.options, weights),
        )


def cut_ranges(weights: Array, shares: Array) -> Array:
    """Return (N,) int32 ascending parts of the (N,) int64 ``weights``, close to the (P,) ``shares``.

    A node goes where its middle lies on the line of all weights, so a range misses each of its two ends
    by at most half a node.
    """
    ends = np.cumsum(weights, dtype=np.float64)
    total = ends[-1] if len(ends) else 0.0
    middles = ends - weights / 2.0
    borders = np.cumsum(shares)[:-1] * total
    return np.searchsorted(borders, middles, side="right").astype(np.int32)
