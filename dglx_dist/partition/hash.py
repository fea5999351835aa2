"""Nodes by a hash of their id: nothing to compute, nothing to store."""

from __future__ import annotations

from typing import final

import numpy as np

from dglx_dist.draws.rng import splitmix64
from dglx_dist.partition.base import Partitioner
from dglx_dist.partition.flat import check_request, describe, to_assignment
from dglx_dist.records import Array, Assignment, RawGraph


@final
class Hash(Partitioner):
    """splitmix64(id) mod P, so that order or pattern in the ids does not show in the parts (P3, section 2.1).

    It promises no balance: sizes vary like those of a random draw.
    """

    def assign(self, graph: RawGraph, num_parts: int, seed: int) -> Assignment:
        """Hash the ids (node types one after the other); ``seed`` changes nothing. See the base class."""
        check_request(num_parts, seed)
        return to_assignment(
            graph,
            hash_parts(graph.total_nodes, num_parts),
            num_parts,
            method="hash",
            seed=seed,
            parameters=describe(self.options, None),
        )


def hash_parts(num_nodes: int, num_parts: int) -> Array:
    """Return (N,) int32: splitmix64(id) mod P of the ids 0..N-1."""
    ids = np.arange(num_nodes, dtype=np.uint64)
    return (splitmix64(ids) % np.uint64(num_parts)).astype(np.int32)
