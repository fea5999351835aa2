"""Nodes dealt out at random, the same number to each part."""

from __future__ import annotations

from typing import final

import numpy as np

from dglx_dist.partition.base import Partitioner
from dglx_dist.partition.contiguous import cut_ranges
from dglx_dist.partition.flat import check_request, describe, to_assignment
from dglx_dist.partition.weights import balance_weights
from dglx_dist.records import Assignment, RawGraph


@final
class Random(Partitioner):
    """A random deal: a part misses its share by at most one node, a neighbour is remote with (P-1)/P."""

    honours = frozenset({"target_weights"})

    def assign(self, graph: RawGraph, num_parts: int, seed: int) -> Assignment:
        """Shuffle the nodes and cut the row into parts; see :meth:`Partitioner.assign`."""
        check_request(num_parts, seed)
        weights = balance_weights(graph, self.options, num_parts, self.max_constraints)
        order = np.random.default_rng(seed).permutation(graph.total_nodes)
        part_of_node = np.empty(graph.total_nodes, dtype=np.int32)
        part_of_node[order] = cut_ranges(weights.columns[0], weights.shares)
        return to_assignment(
            graph,
            part_of_node,
            num_parts,
            method="random",
            seed=seed,
            parameters=describe(self.options, weights),
        )
