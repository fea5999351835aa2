"""METIS, with as many balance constraints as one likes."""

from __future__ import annotations

from typing import final

import numpy as np

from dglx_dist.partition.base import Partitioner
from dglx_dist.partition.dgl_metis import part_graph_with_dgl, what_dgl_lacks
from dglx_dist.partition.flat import check_request, describe, to_assignment, trivial_parts
from dglx_dist.partition.metis_library import MetisRequest, library_path, part_graph
from dglx_dist.partition.repair import deal, settle
from dglx_dist.partition.symmetric import SymmetricGraph, symmetrise
from dglx_dist.partition.weights import BalanceWeights, balance_weights
from dglx_dist.records import Array, Assignment, RawGraph


@final
class Metis(Partitioner):
    """Multilevel k-way partitioning of the symmetrised graph (DistDGL, section 1.1).

    Honours any number of constraints, a tolerance for each, target weights, the objective and ``fast``:
    DistDGL's cheap variant, one initial partition and one refinement pass, by DGL's own build of METIS.
    With tolerances, target weights or weights above 1 of one's own, which that build does not know, fast is
    one refinement pass instead of ten. METIS aims at the tolerances; what it misses is moved to where
    there is room, and what cannot be is logged and listed in ``parameters["missed"]``. About 200 bytes
    of memory per directed edge.
    """

    honours = frozenset({"balance", "tolerance", "target_weights", "objective", "fast"})
    max_constraints = None

    def assign(self, graph: RawGraph, num_parts: int, seed: int) -> Assignment:
        """Partition with METIS; see :meth:`Partitioner.assign`.

        Raises:
            ConfigError: as there, METIS runs out of memory, or pymetis is not installed and DGL's own METIS
                knows neither tolerances nor target weights.
        """
        check_request(num_parts, seed)
        weights = balance_weights(graph, self.options, num_parts, self.max_constraints)
        parameters = describe(self.options, weights)
        part_of_node = trivial_parts(graph.total_nodes, num_parts)
        if part_of_node is None:
            symmetric = symmetrise(graph, dtype=np.int64)
            part_of_node, missed = settle(
                symmetric, weights, self._compute(symmetric, weights, seed), "metis"
            )
            if missed:
                parameters["missed"] = missed
        return to_assignment(graph, part_of_node, num_parts, method="metis", seed=seed, parameters=parameters)

    def _compute(self, symmetric: SymmetricGraph, weights: BalanceWeights, seed: int) -> Array:
        if len(symmetric.indices) == 0:
            # METIS has nothing to coarsen, and complains on standard output; any even deal is as good.
            return deal(weights)
        path = library_path()
        if path is None or (self.options.fast and what_dgl_lacks(self.options, weights) is None):
            return part_graph_with_dgl(symmetric, self.options, weights)
        request = MetisRequest(
            num_parts=len(weights.shares),
            seed=seed,
            volume=self.options.objective == "vol",
            num_refinements=1 if self.options.fast else 10,
        )
        return part_graph(path, symmetric, weights, request)
