"""Servers first, then the workers inside each: the expensive border is cut best."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import final

import numpy as np

from dglx_dist.errors import ConfigError
from dglx_dist.partition.base import Partitioner
from dglx_dist.partition.flat import check_request, describe, from_assignment, to_assignment
from dglx_dist.partition.induced import induced_graph
from dglx_dist.partition.options import PartitionOptions
from dglx_dist.partition.registry import PARTITIONERS, default_partitioner
from dglx_dist.partition.repair import settle
from dglx_dist.partition.symmetric import symmetrise
from dglx_dist.partition.weights import COUNT_EDGES, balance_weights, constraint_columns
from dglx_dist.records import Array, Assignment, NodeColumn, RawGraph

OF_THE_WHOLE = "in the whole graph"


@final
class Hierarchical(Partitioner):
    """Splits over ``options.servers``, then each piece over ``options.workers``, with ``options.inner``.

    Parts are numbered server by server: server s has the parts s x workers to (s + 1) x workers - 1.
    Everything else in the options is handed to the inner method, which may refuse it.
    """

    honours = frozenset(
        {"balance", "tolerance", "target_weights", "objective", "fast", "threads"}
        | {"servers", "workers", "inner"}
    )
    max_constraints = None

    def assign(self, graph: RawGraph, num_parts: int, seed: int) -> Assignment:
        """Partition at both levels; see :meth:`Partitioner.assign`.

        Raises:
            ConfigError: as there, or num_parts is not servers x workers.
        """
        check_request(num_parts, seed)
        servers, workers = self._shape(num_parts)
        weights = balance_weights(graph, self.options, num_parts, self.max_constraints)
        inner = self._inner()
        plugin = PARTITIONERS.get(inner)
        whole, options = _with_whole_weights(graph, _inner_options(self.options, plugin.honours))
        shares = weights.shares.reshape(servers, workers)
        of_server = options
        if self.options.target_weights is not None:
            of_server = replace(options, target_weights=tuple(shares.sum(axis=1)))
        upper = plugin(of_server).assign(whole, servers, seed)
        first = from_assignment(whole, upper)
        part_of_node = np.empty(len(first), dtype=np.int32)
        for server in range(servers):
            mine = np.flatnonzero(first == server)
            of_worker = options
            if self.options.target_weights is not None:
                of_worker = replace(options, target_weights=tuple(shares[server]))
            piece = induced_graph(whole, mine, options.constraints)
            second = plugin(of_worker).assign(piece, workers, seed)
            part_of_node[mine] = server * workers + from_assignment(piece, second)
        promised = weights if upper.parameters.get("tolerance") else None
        parameters = describe(self.options, promised)
        parameters |= {"servers": servers, "workers": workers, "inner": inner}
        if promised is not None and weights.missed(part_of_node):
            # Two levels may each be one heavy node above their share.
            part_of_node, missed = settle(symmetrise(graph), weights, part_of_node, "hierarchical")
            if missed:
                parameters["missed"] = missed
        return to_assignment(
            graph, part_of_node, num_parts, method="hierarchical", seed=seed, parameters=parameters
        )

    def _shape(self, num_parts: int) -> tuple[int, int]:
        """Return (servers, workers); what was not said follows from the other one."""
        servers, workers = self.options.servers, self.options.workers
        if servers is None and workers is None:
            raise ConfigError(
                "method hierarchical needs the number of servers or of workers in each; set one"
            )
        if servers is None:
            servers = max(num_parts // (workers or 1), 1)
        if workers is None:
            workers = max(num_parts // servers, 1)
        if servers * workers != num_parts:
            raise ConfigError(
                f"{num_parts} parts are not {servers} servers x {workers} workers = {servers * workers}; "
                f"ask for {servers * workers} parts or another number of servers"
            )
        return servers, workers

    def _inner(self) -> str:
        inner = PARTITIONERS.resolve(self.options.inner or default_partitioner(self.options))
        if inner in ("hierarchical", "file"):
            raise ConfigError(f"hierarchical cannot use {inner!r} at its two levels; use metis or kaminpar")
        return inner


def _inner_options(options: PartitionOptions, honours: frozenset[str]) -> PartitionOptions:
    """Return what each of the two levels is told: the same, at a tolerance that compounds to the whole."""
    inner = replace(options, servers=None, workers=None, inner=None)
    if "tolerance" not in honours and not options.tolerance:
        return inner
    tolerance = {c: float(np.sqrt(1.0 + options.tolerance_of(c)) - 1.0) for c in options.constraints}
    return replace(inner, tolerance=tolerance)


def _with_whole_weights(graph: RawGraph, options: PartitionOptions) -> tuple[RawGraph, PartitionOptions]:
    """Make weights that count edges node columns: a piece of the graph has lost the edges from outside."""
    names = {constraint: [constraint] for constraint in options.constraints}
    added: dict[str, Array] = {}
    for constraint in [name for name in names if name in COUNT_EDGES]:
        columns = constraint_columns(graph, constraint)
        names[constraint] = [f"{name} {OF_THE_WHOLE}" for name, _ in columns]
        added |= dict(zip(names[constraint], (column for _, column in columns), strict=True))
    if not added:
        return graph, options
    node_data: dict[str, dict[str, NodeColumn]] = {}
    first = 0
    for node_type, count in graph.num_nodes.items():
        mine: dict[str, NodeColumn] = {name: column[first : first + count] for name, column in added.items()}
        node_data[node_type] = {**graph.node_data.get(node_type, {}), **mine}
        first += count
    tolerance = options.tolerance
    if isinstance(tolerance, Mapping):
        tolerance = {name: t for constraint, t in tolerance.items() for name in names[constraint]}
    balance = tuple(name for constraint in options.constraints for name in names[constraint])
    return replace(graph, node_data=node_data), replace(options, balance=balance, tolerance=tolerance)
