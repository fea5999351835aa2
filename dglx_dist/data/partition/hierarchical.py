"""Partition on two levels: over servers first, then over the workers on each server."""

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
        num_servers, num_workers = self._choose_level_sizes(num_parts)
        weights = balance_weights(graph, self.options, num_parts, self.max_constraints)
        method = PARTITIONERS.resolve(self.options.inner or default_partitioner(self.options))
        if method in ("hierarchical", "file"):
            raise ConfigError(f"hierarchical cannot use {method!r} at its two levels; use metis or kaminpar")

        plugin = PARTITIONERS.get(method)
        inner_options = _make_inner_options(self.options, plugin.honours)
        weighted, options = _with_weight_columns(graph, inner_options)
        shares = weights.shares.reshape(num_servers, num_workers)

        def split(graph: RawGraph, shares: Array, workspace: Workspace | None) -> Assignment:
            level_options = options
            if options.target_weights is not None:
                level_options = replace(options, target_weights=tuple(shares))
            return plugin(level_options).within(workspace, graph).assign(graph, len(shares), seed)

        def split_servers() -> Array:
            assignment = split(weighted, shares.sum(axis=1), self._open_level("servers"))
            return concatenate_owners(weighted, assignment)

        if self.workspace is None:
            servers = split_servers()
        else:
            # The result is stored, because a method may give other parts with another memory limit.
            servers = self.workspace.array("servers", split_servers, shared=True)

        part_of_node = np.empty(len(servers), dtype=np.int32)
        for server in range(num_servers):
            nodes = np.flatnonzero(servers == server)
            workspace = self._open_level(f"server{server}")
            subgraph = induced_graph(weighted, nodes, options.constraints, workspace)
            assignment = split(subgraph, shares[server], workspace)
            part_of_node[nodes] = server * num_workers + concatenate_owners(subgraph, assignment)

        parameters: dict[str, object] = {"servers": num_servers, "workers": num_workers, "inner": method}
        if not assignment.parameters.get("tolerance"):
            # The inner method promises no balance, so this method promises none either.
            return assign_parts(self, graph, num_parts, seed, part_of_node, None, **parameters)

        if weights.find_unmet(part_of_node):
            # Each level may exceed its share by one heavy node.
            symmetric = symmetrise(graph, workspace=self.workspace)
            part_of_node, missed = enforce_capacities(symmetric, weights, part_of_node, "hierarchical")
            if missed:
                parameters["missed"] = missed
        return assign_parts(self, graph, num_parts, seed, part_of_node, weights, **parameters)

    def _open_level(self, name: str) -> Workspace | None:
        # Each partitioning on a level has its own folder for its stages.
        if self.workspace is None:
            return None
        return replace(self.workspace, folder=self.workspace.folder / f"{name}.work")

    def _choose_level_sizes(self, num_parts: int) -> tuple[int, int]:
        """Return how many servers and workers per server there are. A missing option follows from the other.

        Raise ConfigError if both are missing, or if they do not match ``num_parts``.
        """
        servers = self.options.servers
        workers = self.options.workers
        if servers is None and workers is None:
            raise ConfigError("method hierarchical needs the number of servers or workers per server; set it")
        if servers is None:
            servers = max(num_parts // (workers or 1), 1)
        if workers is None:
            workers = max(num_parts // servers, 1)
        if servers * workers != num_parts:
            raise ConfigError(
                f"{servers} servers with {workers} workers each need {servers * workers} "
                f"parts, not {num_parts}; change the number of parts, servers or workers"
            )

        return servers, workers


def _make_inner_options(options: PartitionOptions, honours: frozenset[str]) -> PartitionOptions:
    """Return one level's options. Both levels together then keep the requested tolerance."""
    inner_options = replace(options, servers=None, workers=None, inner=None)
    if "tolerance" not in honours and not options.tolerance:
        return inner_options

    tolerance = {}
    for constraint in options.constraints:
        # The excess factors of both levels are multiplied, so each level gets the square root.
        factor = float(np.sqrt(1.0 + options.tolerance_of(constraint)))
        tolerance[constraint] = factor - 1.0
    return replace(inner_options, tolerance=tolerance)


def _with_weight_columns(graph: RawGraph, options: PartitionOptions) -> tuple[RawGraph, PartitionOptions]:
    """Replace constraints that count edges by node columns, and return the graph and options.

    A subgraph lacks the edges from outside, so its in-degrees would be too small.
    """
    names = {constraint: [constraint] for constraint in options.constraints}
    new_columns: dict[str, Array] = {}
    for constraint in options.constraints:
        if constraint not in COUNT_EDGES:
            continue
        names[constraint] = []
        for name, column in constraint_columns(graph, constraint):
            column_name = f"{name} in the whole graph"
            names[constraint].append(column_name)
            new_columns[column_name] = column

    if not new_columns:
        return graph, options

    node_data: dict[str, dict[str, NodeColumn]] = {}
    for ntype, rows in node_slices(graph).items():
        node_data[ntype] = dict(graph.node_data.get(ntype, {}))
        for name, column in new_columns.items():
            node_data[ntype][name] = column[rows]

    tolerance = options.tolerance
    if isinstance(tolerance, Mapping):
        tolerance = {name: t for constraint, t in tolerance.items() for name in names[constraint]}
    balance = tuple(name for constraint in options.constraints for name in names[constraint])
    return replace(graph, node_data=node_data), replace(options, balance=balance, tolerance=tolerance)


_EDGES_AT_ONCE = 1 << 20
TRAINER_ID = "trainer_id"
"""DGL's name for the node and edge data with the trainer."""
TRAINERS_PER_PART = "trainers_per_part"
"""Key for the number of trainers in ``Assignment.parameters`` and in the manifest."""


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

    ``level_sizes`` is (P, t). The constraints in ``options`` apply at both levels, and
    ``parameters["missed"]`` has each level's constraints that are not met. ``target_weights`` are the shares
    for the parts. The trainers in a part get equal shares.
    """
    num_parts, per_part = level_sizes
    if options.servers is not None or options.workers is not None or options.inner is not None:
        raise ConfigError(
            f"servers, workers and inner are for method hierarchical only, and {per_part} "
            "trainers per part already need two levels; leave them out"
        )

    for name, columns in (*graph.node_data.items(), *graph.edge_data.items()):
        if TRAINER_ID in columns:
            raise ConfigError(
                f"{graph.name} already has {TRAINER_ID!r} as data of {name!r}; remove it, or "
                "partition for one trainer per part"
            )

    # The check comes first, because a message should count the parts and not the trainers.
    part_shares(options.target_weights, num_parts)
    targets = None
    if options.target_weights is not None:
        targets = tuple(np.repeat(np.asarray(options.target_weights) / per_part, per_part).tolist())
    two_level_options = replace(
        options, servers=num_parts, workers=per_part, inner=method, target_weights=targets
    )
    partitioner = Hierarchical(two_level_options).within(workspace, graph)
    trainers = partitioner.assign(graph, num_parts * per_part, seed)

    part_of = {ntype: owners // np.int32(per_part) for ntype, owners in trainers.part_of.items()}
    parameters = dict(trainers.parameters)
    for name in ("servers", "workers", "inner", "missed", "target_weights"):
        parameters.pop(name, None)
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
    """Return ``graph`` with int32 columns that name the trainer of each node and of each edge's destination.

    Edge columns are memory-mapped from a stage in ``workspace``.
    """
    node_data: dict[str, dict[str, NodeColumn]] = {}
    for ntype in graph.num_nodes:
        node_data[ntype] = {**graph.node_data.get(ntype, {}), TRAINER_ID: trainers.part_of[ntype]}

    def iterate_edge_trainers(etype: EdgeType) -> Iterator[Array]:
        part_of = trainers.part_of[etype[2]]
        destinations = graph.edges[etype][1]
        for first in range(0, max(len(destinations), 1), _EDGES_AT_ONCE):
            yield part_of[destinations[first : first + _EDGES_AT_ONCE]]

    makers = [partial(iterate_edge_trainers, etype) for etype in graph.edges]
    columns = concatenate_chunks(workspace, "trainers", makers, graph.total_edges)
    edge_data: dict[EdgeType, dict[str, Array]] = {}
    for etype, column in zip(graph.edges, columns, strict=True):
        edge_data[etype] = {**graph.edge_data.get(etype, {}), TRAINER_ID: column}
    return replace(graph, node_data=node_data, edge_data=edge_data)
