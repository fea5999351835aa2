"""Two-level partitioning: over servers first, then over the workers of each server."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import final

import numpy as np

from dglx_dist.data.external_memory import Workspace, concatenate_chunks
from dglx_dist.data.partition.balance import enforce_capacities
from dglx_dist.data.partition.base import PARTITIONERS, Partitioner, PartitionOptions, default_partitioner
from dglx_dist.data.partition.graph_views import (
    COUNT_EDGES,
    assign_parts,
    balance_weights,
    concatenate_owners,
    constraint_columns,
    induced_graph,
    node_slices,
    part_shares,
    symmetrise,
)
from dglx_dist.errors import ConfigError
from dglx_dist.records import Array, Assignment, EdgeType, NodeColumn, RawGraph


@final
class Hierarchical(Partitioner):
    """Partitions over ``options.servers``, then each piece over ``options.workers``, with ``options.inner``.

    Server s has the parts s x workers to (s + 1) x workers - 1. The inner method gets all other options, and
    may reject them.
    """

    honours = frozenset(
        {"balance", "tolerance", "target_weights", "objective", "fast", "threads", "passes"}
        | {"servers", "workers", "inner"}
    )
    max_constraints = None
    external = True

    def assign(self, graph: RawGraph, num_parts: int, seed: int) -> Assignment:
        servers, workers = self._choose_shape(num_parts)
        weights = balance_weights(graph, self.options, num_parts, self.max_constraints)
        method = PARTITIONERS.resolve(self.options.inner or default_partitioner(self.options))
        if method in ("hierarchical", "file"):
            raise ConfigError(f"hierarchical cannot use {method!r} at its two levels; use metis or kaminpar")
        plugin = PARTITIONERS.get(method)
        weighted, options = _with_weight_columns(graph, _make_inner_options(self.options, plugin.honours))
        shares = weights.shares.reshape(servers, workers)

        def split(graph: RawGraph, shares: Array, workspace: Workspace | None) -> Assignment:
            has_targets = options.target_weights is not None
            level_options = replace(options, target_weights=tuple(shares)) if has_targets else options
            return plugin(level_options).within(workspace, graph).assign(graph, len(shares), seed)

        def split_servers() -> Array:
            return concatenate_owners(
                weighted, split(weighted, shares.sum(axis=1), self._open_level("servers"))
            )

        # The result is stored, because a method may give other parts with another memory limit.
        work = self.workspace
        owners = split_servers() if work is None else work.array("servers", split_servers, shared=True)
        part_of_node = np.empty(len(owners), dtype=np.int32)
        for server in range(servers):
            local_nodes = np.flatnonzero(owners == server)
            server_workspace = self._open_level(f"server{server}")
            piece = induced_graph(weighted, local_nodes, options.constraints, server_workspace)
            assignment = split(piece, shares[server], server_workspace)
            part_of_node[local_nodes] = server * workers + concatenate_owners(piece, assignment)

        promised_weights = weights if assignment.parameters.get("tolerance") else None
        parameters: dict[str, object] = {"servers": servers, "workers": workers, "inner": method}
        if promised_weights is not None and weights.find_unmet(part_of_node):
            # Each level may exceed its share by one heavy node.
            part_of_node, missed = enforce_capacities(
                symmetrise(graph, workspace=self.workspace), weights, part_of_node, "hierarchical"
            )
            if missed:
                parameters["missed"] = missed

        return assign_parts(self, graph, num_parts, seed, part_of_node, promised_weights, **parameters)

    def _open_level(self, name: str) -> Workspace | None:
        # Each partitioning has its own stages.
        work = self.workspace
        return None if work is None else replace(work, folder=work.folder / f"{name}.work")

    def _choose_shape(self, num_parts: int) -> tuple[int, int]:
        # It returns (servers, workers). A missing number is computed from the other one.
        servers, workers = self.options.servers, self.options.workers
        if servers is None and workers is None:
            raise ConfigError("method hierarchical needs the number of servers or workers per server; set it")
        if servers is None:
            servers = max(num_parts // (workers or 1), 1)
        if workers is None:
            workers = max(num_parts // servers, 1)
        if servers * workers != num_parts:
            raise ConfigError(
                f"{servers} servers with {workers} workers each need {servers * workers} parts, not "
                f"{num_parts}; change the number of parts, servers or workers"
            )

        return servers, workers


def _make_inner_options(options: PartitionOptions, honours: frozenset[str]) -> PartitionOptions:
    # The tolerance of each level is chosen so that two levels together have the requested one.
    inner_options = replace(options, servers=None, workers=None, inner=None)
    if "tolerance" not in honours and not options.tolerance:
        return inner_options
    tolerance = {c: float(np.sqrt(1.0 + options.tolerance_of(c)) - 1.0) for c in options.constraints}
    return replace(inner_options, tolerance=tolerance)


def _with_weight_columns(graph: RawGraph, options: PartitionOptions) -> tuple[RawGraph, PartitionOptions]:
    # Weights that count edges become node columns, because a piece of the graph lacks edges from outside.
    names = {constraint: [constraint] for constraint in options.constraints}
    new_columns: dict[str, Array] = {}
    for constraint in [name for name in names if name in COUNT_EDGES]:
        columns = list(constraint_columns(graph, constraint))
        names[constraint] = [f"{name} in the whole graph" for name, _ in columns]
        new_columns |= dict(zip(names[constraint], (column for _, column in columns), strict=True))

    if not new_columns:
        return graph, options
    node_data: dict[str, dict[str, NodeColumn]] = {}
    for ntype, rows in node_slices(graph).items():
        type_columns: dict[str, NodeColumn] = {name: column[rows] for name, column in new_columns.items()}
        node_data[ntype] = {**graph.node_data.get(ntype, {}), **type_columns}
    tolerance = options.tolerance
    if isinstance(tolerance, Mapping):
        tolerance = {name: t for constraint, t in tolerance.items() for name in names[constraint]}
    balance = tuple(name for constraint in options.constraints for name in names[constraint])
    return replace(graph, node_data=node_data), replace(options, balance=balance, tolerance=tolerance)


_EDGES_AT_ONCE = 1 << 20
TRAINER_ID = "trainer_id"
"""DGL's name of the node and edge data with the trainer."""
TRAINERS_PER_PART = "trainers_per_part"
"""Key of the number of trainers in ``Assignment.parameters`` and in the manifest."""


@dataclass(frozen=True, kw_only=True)
class TwoLevelSplit:
    """Assignments to P parts and to P x t trainers. Part p has the trainers p x t to (p + 1) x t - 1."""

    parts: Assignment
    trainers: Assignment


def assign_two_levels(
    graph: RawGraph,
    method: str,
    options: PartitionOptions,
    level_sizes: tuple[int, int],
    seed: int,
    workspace: Workspace | None = None,
) -> TwoLevelSplit:
    """Partition ``graph`` over P parts, and each part over t trainers, with the same method.

    ``level_sizes`` is (P, t). The constraints of ``options`` apply at both levels, and
    ``parameters["missed"]`` of each level has those that are not met. Its ``target_weights`` are the shares
    of the parts. The trainers of a part get equal shares.
    """
    num_parts, per_part = level_sizes
    if options.servers is not None or options.workers is not None or options.inner is not None:
        raise ConfigError(
            f"servers, workers and inner are for method hierarchical only, and {per_part} trainers per part "
            "already need two levels; leave them out"
        )

    for name, columns in (*graph.node_data.items(), *graph.edge_data.items()):
        if TRAINER_ID in columns:
            raise ConfigError(
                f"{graph.name} already has {TRAINER_ID!r} as data of {name!r}; remove it, or partition for "
                "one trainer per part"
            )

    part_shares(options.target_weights, num_parts)
    targets = None
    if options.target_weights is not None:
        targets = tuple(weight / per_part for weight in options.target_weights for _ in range(per_part))
    two_level_options = replace(
        options, servers=num_parts, workers=per_part, inner=method, target_weights=targets
    )
    partitioner = Hierarchical(two_level_options).within(workspace, graph)
    trainers = partitioner.assign(graph, num_parts * per_part, seed)
    part_of = {ntype: owners // np.int32(per_part) for ntype, owners in trainers.part_of.items()}
    level_parameters = ("servers", "workers", "inner", "missed", "target_weights")
    parameters = {name: value for name, value in trainers.parameters.items() if name not in level_parameters}
    parameters[TRAINERS_PER_PART] = per_part
    if options.target_weights is not None:
        parameters["target_weights"] = list(options.target_weights)
    parts = Assignment(num_parts=num_parts, part_of=part_of, method=method, seed=seed, parameters=parameters)
    if parameters.get("tolerance"):
        weights = balance_weights(graph, options, num_parts, None)
        missed = weights.find_unmet(concatenate_owners(graph, parts))
        if missed:
            parts = replace(parts, parameters={**parameters, "missed": missed})

    return TwoLevelSplit(parts=parts, trainers=trainers)


def with_trainer_ids(graph: RawGraph, trainers: Assignment, workspace: Workspace | None = None) -> RawGraph:
    """Return ``graph`` with int32 columns of the trainer of each node and of each edge's destination.

    Edge columns are memory-mapped from a stage of ``workspace``.
    """
    node_data: dict[str, dict[str, NodeColumn]] = {
        ntype: {**graph.node_data.get(ntype, {}), TRAINER_ID: trainers.part_of[ntype]}
        for ntype in graph.num_nodes
    }

    def iterate_edge_trainers(etype: EdgeType) -> Iterator[Array]:
        part_of = trainers.part_of[etype[2]]
        destinations = graph.edges[etype][1]
        for first in range(0, max(len(destinations), 1), _EDGES_AT_ONCE):
            yield part_of[destinations[first : first + _EDGES_AT_ONCE]]

    makers = [partial(iterate_edge_trainers, etype) for etype in graph.edges]
    columns = concatenate_chunks(workspace, "trainers", makers, graph.total_edges)
    edge_data: dict[EdgeType, dict[str, Array]] = {
        etype: {**graph.edge_data.get(etype, {}), TRAINER_ID: column}
        for etype, column in zip(graph.edges, columns, strict=True)
    }
    return replace(graph, node_data=node_data, edge_data=edge_data)
