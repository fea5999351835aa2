"""Show partitioners a graph as balance weights, symmetric adjacency, induced subgraphs and assignments."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit

from dglx_dist.data.external_memory import (
    SHOWN_FROM,
    Workspace,
    concatenate_chunks,
    join_rank_pieces,
    map_spill,
    spill,
)
from dglx_dist.data.partition.base import PARTITIONERS, Partitioner, PartitionOptions
from dglx_dist.data.storage.columns import id_dtype
from dglx_dist.errors import ConfigError
from dglx_dist.progress import progress
from dglx_dist.records import Array, Assignment, EdgeType, NodeColumn, RawGraph, SparseRows
from dglx_dist.registry import suggest_name

MASKS = {"train": "train_mask", "val": "val_mask", "test": "test_mask"}
COUNT_EDGES = ("degree", "etype")
"""Constraints with weights that count edges."""


@dataclass(frozen=True, kw_only=True)
class BalanceWeights:
    """C balance constraints for all N nodes of all types and P parts."""

    names: tuple[str, ...]
    columns: tuple[Array, ...]
    """C arrays with (N,) int64 non-negative weights."""
    tolerance: Array
    """(C,) float64 tolerances."""
    shares: Array
    """(P,) float64 target share by part. They sum to 1."""

    def matrix(self) -> Array:
        """Return the (N, C) int64 weights. With one constraint it is a view of the column."""
        if len(self.columns) == 1:
            return np.ascontiguousarray(self.columns[0]).reshape(-1, 1)
        return np.stack(self.columns, axis=1)

    def loads(self, part_of_node: Array) -> Array:
        """Return the (C, P) float64 loads on the parts for the (N,) int assignment."""
        return np.stack([sum_by_part(part_of_node, column, len(self.shares)) for column in self.columns])

    def capacities(self) -> Array:
        """Return the (C, P) float64 capacities: share x (1 + tolerance), or more if heavy nodes need it.

        Nodes are indivisible. A part that takes a node with weight w may therefore hold w more than its
        share, counted over all nodes with weight w or more. If the heaviest nodes are placed first, no part
        needs more.
        """
        rows = []
        for column, tolerance in zip(self.columns, self.tolerance.tolist(), strict=True):
            total = float(column.sum())
            # Lighter nodes fit into every part's tolerance.
            is_heavy = column > tolerance * total * self.shares.min()
            heavy_weights, num_heavy = np.unique(column[is_heavy], return_counts=True)

            # Total over all nodes with this weight or more: a cumulative sum from the heaviest weight.
            descending_totals = np.cumsum((heavy_weights * num_heavy)[::-1])
            totals = descending_totals[::-1]
            minima = []
            for share in self.shares.tolist():
                needed = share * totals + heavy_weights
                minima.append(float(needed.max(initial=0)))
            rows.append(np.maximum(total * self.shares * (1.0 + tolerance), minima))
        return np.stack(rows)

    def find_unmet(self, part_of_node: Array) -> dict[str, float]:
        """Return the constraints that have a part above its capacity.

        Each constraint's value is the largest load / share of a part.
        """
        loads = self.loads(part_of_node)
        capacities = self.capacities()
        unmet = {}
        for c, name in enumerate(self.names):
            # Shares are rounded, so a full part may seem slightly overloaded.
            if (loads[c] > capacities[c] * (1 + 1e-9)).any():
                unmet[name] = imbalance(loads[c], self.shares)
        return unmet


def sum_by_part(part_of_node: Array, column: Array, num_parts: int) -> Array:
    """Sum the (N,) integer ``column`` over the nodes in each part. Return (P,) float64."""
    sums = np.zeros(num_parts)
    # Slices limit the memory, because np.bincount copies its arguments.
    for rows in iterate_slices(len(column), 1 << 20):
        sums += np.bincount(part_of_node[rows], column[rows], num_parts)
    return sums


def imbalance(loads: Array, shares: Array) -> float:
    """Return the largest load / (total x share) among (P,) loads, or 1.0 if the total is 0."""
    total = float(loads.sum())
    if total <= 0:
        return 1.0
    ratios = loads / (total * shares)
    return float(ratios.max())


def balance_weights(
    graph: RawGraph, options: PartitionOptions, num_parts: int, max_constraints: int | None
) -> BalanceWeights:
    """Turn the constraints in ``options`` into node weights for ``graph``.

    Raise ConfigError if there are more than ``max_constraints`` weights. None is no limit.
    """
    names: list[str] = []
    columns: list[Array] = []
    tolerances: list[float] = []
    for constraint in options.constraints:
        for name, column in constraint_columns(graph, constraint):
            names.append(name)
            columns.append(column)
            tolerances.append(options.tolerance_of(constraint))

    if max_constraints is not None and len(names) > max_constraints:
        raise ConfigError(
            f"this method balances {max_constraints} weight at a time, but {len(names)} are given "
            f"({', '.join(names)}); choose method metis, or balance one of nodes, degree"
        )

    return BalanceWeights(
        names=tuple(names),
        columns=tuple(columns),
        tolerance=np.array(tolerances),
        shares=part_shares(options.target_weights, num_parts),
    )


def part_shares(target_weights: Sequence[float] | None, num_parts: int) -> Array:
    """Return the (P,) float64 shares, with sum 1. Raise ConfigError unless there is one weight per part."""
    if target_weights is None:
        return np.full(num_parts, 1.0 / num_parts)
    if len(target_weights) != num_parts:
        raise ConfigError(
            f"target_weights has {len(target_weights)} values for {num_parts} parts; give one per part"
        )
    weights = np.asarray(target_weights, dtype=np.float64)
    return weights / weights.sum()


def constraint_columns(graph: RawGraph, constraint: str) -> Iterator[tuple[str, Array]]:
    """Yield the names and (N,) int64 weights for ``constraint``.

    ``ntype`` and ``etype`` yield one column for each type. Other constraints yield a single column.
    """
    if constraint == "nodes":
        yield "nodes", np.ones(graph.total_nodes, dtype=np.int64)
    elif constraint == "degree":
        yield "degree", in_degrees(graph)
    elif constraint == "ntype":
        for name, rows in node_slices(graph).items():
            column = np.zeros(graph.total_nodes, dtype=np.int64)
            column[rows] = 1
            yield f"ntype:{name}", column
    elif constraint == "etype":
        for etype in graph.edges:
            yield f"etype:{'.'.join(etype)}", in_degrees(graph, [etype])
    else:
        yield constraint, _get_data_column(graph, constraint, MASKS.get(constraint, constraint))


def node_slices(graph: RawGraph) -> dict[str, slice]:
    """Return where each type's nodes are if all types are concatenated."""
    slices = {}
    for ntype, first_id in first_ids(graph).items():
        slices[ntype] = slice(first_id, first_id + graph.num_nodes[ntype])
    return slices


def in_degrees(graph: RawGraph, etypes: Collection[EdgeType] | None = None) -> Array:
    """Return the (N,) int64 in-degrees over ``etypes``, or over all edge types if it is None."""
    degrees = np.zeros(graph.total_nodes, np.int64)
    rows = node_slices(graph)
    for etype in graph.edges if etypes is None else etypes:
        destinations = graph.edges[etype][1]
        type_degrees = degrees[rows[etype[2]]]
        for edges in iterate_slices(len(destinations)):
            # np.bincount would copy the ids, and return counts for all nodes for each slice.
            _count_ids(destinations[edges], type_degrees)
    return degrees


@njit(cache=True, nogil=True)
def _count_ids(ids: Array, num_occurrences: Array) -> None:
    for i in ids:
        num_occurrences[i] += 1


def iterate_slices(length: int, size: int = 1 << 24) -> Iterator[slice]:
    """Yield consecutive slices, each at most ``size`` long, that cover ``range(length)``."""
    for first in range(0, length, size):
        yield slice(first, min(first + size, length))


def has_node_column(graph: RawGraph, column: str) -> bool:
    return any(column in columns for columns in graph.node_data.values())


def _get_data_column(graph: RawGraph, constraint: str, column: str) -> Array:
    """Return a node column's (N,) int64 weights. Types without the column have weight 0."""
    if not has_node_column(graph, column):
        column_names = {name for columns in graph.node_data.values() for name in columns}
        existing = sorted(column_names)
        hint = suggest_name(constraint, ["nodes", "degree", "ntype", "etype", *MASKS, *existing])
        raise ConfigError(
            f"cannot balance {constraint!r}: {graph.name} has no node column {column!r}{hint} "
            f"(node columns: {', '.join(existing) or 'none'}; besides these: nodes, degree, ntype, etype)"
        )

    weights = np.zeros(graph.total_nodes, np.int64)
    for ntype, rows in node_slices(graph).items():
        values = graph.node_data.get(ntype, {}).get(column)
        if values is not None:
            weights[rows] = _compute_weight(values, constraint, ntype)
    return weights


def _compute_weight(values: NodeColumn, constraint: str, node_type: str) -> Array:
    """Convert ``values`` to int64 weights. Raise ConfigError unless they are integers from 0 on."""
    if isinstance(values, SparseRows) or values.ndim != 1 or values.dtype.kind not in "biu":
        raise ConfigError(
            f"cannot balance {constraint!r}: it is {values.dtype} of shape {values.shape} "
            f"for node type {node_type!r}; a weight is one integer or bool per node"
        )
    if values.dtype.kind == "i" and len(values) and values.min() < 0:
        row = int(np.argmax(values < 0))
        raise ConfigError(
            f"cannot balance {constraint!r}: node {row} of type {node_type!r} has the weight "
            f"{values[row]}; weights are 0 or more"
        )
    return values.astype(np.int64)


def assign_parts(
    partitioner: Partitioner,
    graph: RawGraph,
    num_parts: int,
    seed: int,
    parts: Array,
    weights: BalanceWeights | None = None,
    **parameters: object,
) -> Assignment:
    """Build the assignment that ``partitioner`` has computed.

    Args:
        partitioner: Partitioner with its options. The assignment records its name and options.
        graph: The partitioned graph.
        num_parts: Number of parts P.
        seed: The partitioner's seed.
        parts: (N,) integer part by node, one node type after the other.
        weights: Weights that the method balances. The assignment promises the tolerances for them only.
        parameters: Further parameters to record.
    """
    assert len(parts) == graph.total_nodes, "a method assigns every node once"
    owners = parts.astype(np.int32)
    return Assignment(
        num_parts=num_parts,
        part_of={ntype: owners[rows] for ntype, rows in node_slices(graph).items()},
        method=PARTITIONERS.name_of(type(partitioner)),
        seed=seed,
        parameters=describe(partitioner.options, weights) | parameters,
    )


def concatenate_owners(graph: RawGraph, assignment: Assignment) -> Array:
    """Return (N,) int32 owners for all node types, in the order of ``graph.num_nodes``."""
    owners = [np.empty(0, np.int32)]
    for ntype in graph.num_nodes:
        owners.append(np.asarray(assignment.part_of[ntype], dtype=np.int32))
    return np.concatenate(owners)


def describe(options: PartitionOptions, weights: BalanceWeights | None) -> dict[str, object]:
    """Return options and promised tolerances as JSON values for ``Assignment.parameters``.

    ``weights`` are the constraints that the partitioner guarantees, or None if it guarantees no balance.
    Options with their default value are left out.
    """
    description: dict[str, object] = {"tolerance": {}}
    if weights is not None:
        tolerances = weights.tolerance.tolist()
        description["tolerance"] = dict(zip(weights.names, tolerances, strict=True))

    if options.balance:
        description["balance"] = list(options.balance)
    if options.target_weights is not None:
        description["target_weights"] = list(options.target_weights)
    if options.objective != "cut":
        description["objective"] = options.objective
    if options.fast:
        description["fast"] = True
    return description


@dataclass(frozen=True, kw_only=True)
class SymmetricGraph:
    """Undirected adjacency without self-loops and repetitions. Each pair is stored in both rows."""

    indptr: Array
    """(N + 1,) int64."""
    indices: Array
    """(M,) int32 or int64 neighbours, in no particular order within a row."""
    edge_weights: Array | None
    """(M,) int32 or int64: how many directed edges a pair has. None if 99 % of these numbers are equal."""

    @property
    def num_nodes(self) -> int:
        return len(self.indptr) - 1

    @staticmethod
    def open(folder: Path) -> SymmetricGraph:
        """Return the memory-mapped graph that :func:`write_rows` wrote."""
        weights = None
        if any(folder.glob("weights.*")):
            weights = map_spill(folder, "weights")
        indptr = map_spill(folder, "indptr")
        indices = map_spill(folder, "indices")
        return SymmetricGraph(indptr=indptr, indices=indices, edge_weights=weights)


def symmetrise(
    graph: RawGraph,
    *,
    dtype: Any = None,
    weighted: bool = True,
    workspace: Workspace | None = None,
    reserved_bytes: int = 0,
) -> SymmetricGraph:
    """Return all edge types as one symmetric graph over the concatenated node types.

    It takes memory for 2 E ids, 2 E int32 weights if ``weighted``, and two int64 arrays with N values.

    Args:
        graph: The graph.
        dtype: Dtype for the indices. By default int32 if N fits, else int64.
        weighted: Whether to count parallel and opposite edges.
        workspace: If the graph and ``reserved_bytes`` do not fit in its memory, the graph is written there
            and memory-mapped, with indices in the default dtype.
    """
    num_nodes = graph.total_nodes
    index_dtype = np.dtype(dtype or id_dtype(num_nodes))
    entry_bytes = index_dtype.itemsize
    if weighted:
        entry_bytes += 4

    num_bytes = 2 * graph.total_edges * entry_bytes + 16 * num_nodes
    if workspace is not None and not workspace.fits(num_bytes + reserved_bytes):
        folder = workspace.stage(
            "symmetric" if weighted else "neighbours",
            lambda folder: _write_symmetric(graph, folder, weighted, workspace),
            shared=True,
        )
        return SymmetricGraph.open(folder)

    # indptr[v + 1] is the free position in row v. After the rows are filled, it is where row v ends.
    indptr = _compute_starts(graph)
    indices = np.empty(indptr[-1], dtype=index_dtype)
    weights = np.ones(len(indices) if weighted else 0, dtype=np.int32)
    _fill_rows(graph, 0, num_nodes, indptr[1:-1], indices, weights)

    indptr = indptr[:-1]
    positions = np.full(num_nodes, -1, dtype=np.int64)
    num_entries = _merge(indptr, indices, weights, weighted, positions, 0)

    # resize shrinks the array in place if the allocator can, without copying the largest array.
    indices.resize(num_entries, refcheck=False)
    if not weighted:
        return SymmetricGraph(indptr=indptr, indices=indices, edge_weights=None)
    weights.resize(num_entries, refcheck=False)
    if _is_nearly_uniform(weights):
        return SymmetricGraph(indptr=indptr, indices=indices, edge_weights=None)
    return SymmetricGraph(indptr=indptr, indices=indices, edge_weights=weights)


def _compute_starts(graph: RawGraph) -> Array:
    """Return (N + 2,) int64 row starts, one slot later than in an indptr: row v starts at [v + 1].

    The extra slot lets [v + 1] be the next free position in row v while rows are filled.
    """
    first_id = first_ids(graph)
    indptr = np.zeros(graph.total_nodes + 2, dtype=np.int64)
    for (src_type, _, dst_type), (src, dst) in graph.edges.items():
        _count(src, dst, first_id[src_type], first_id[dst_type], indptr)
    return np.cumsum(indptr, out=indptr)


def _fill_rows(graph: RawGraph, first: int, last: int, free: Array, indices: Array, _weights: Array) -> None:
    """Write the neighbours in the rows ``first`` to ``last - 1``, see :func:`write_rows`."""
    first_id = first_ids(graph)
    for (src_type, _, dst_type), (src, dst) in graph.edges.items():
        _fill(src, dst, first_id[src_type], first_id[dst_type], first, last, free, indices)


def _write_symmetric(graph: RawGraph, folder: Path, weighted: bool, workspace: Workspace) -> None:
    """Write the graph to ``folder``, without weights if they are nearly uniform. All ranks call it."""
    starts = _compute_starts(graph)[1:]
    weight_dtype = np.int32 if weighted else None
    write_rows(folder, starts, partial(_fill_rows, graph), weight_dtype, workspace, "Symmetrising")
    if not workspace.ranks.is_first:
        return
    for path in folder.glob("weights.*"):
        if _is_nearly_uniform(map_spill(folder, "weights")):
            path.unlink()


NODE_BYTES = 32
"""Memory for each node while rows are written: row starts (twice), free positions and last positions."""
_MAX_PASSES = 64
"""Maximum number of row ranges. Each range needs a pass over all edges."""


def write_rows(
    folder: Path,
    starts: Array,
    fill: Callable[[int, int, Array, Array, Array], None],
    weight_dtype: Any,
    workspace: Workspace,
    label: str,
) -> None:
    """Write a :class:`SymmetricGraph` to ``folder``, with as many rows at a time as fit in memory.

    All ranks in the workspace call the function. Each rank fills rows with about equally many entries.

    Args:
        folder: Folder for the files, see :meth:`SymmetricGraph.open`.
        starts: (N + 1,) int64 row starts before repeated neighbours are merged.
        fill: Called once for each range with (first, last, free, indices, weights). It writes the neighbours
            and weights in the rows ``first`` to ``last - 1`` at their ``free`` positions, and advances these.
            Weights are initialised with 1.
        weight_dtype: Dtype for the edge weights, or None for no weights.
        workspace: Memory budget and ranks.
        label: Name for the progress.

    Raises:
        ConfigError: If the memory is too small for the node arrays, or for one row.
    """
    num_rows = len(starts) - 1
    dtype = np.dtype(id_dtype(num_rows))
    weighted = weight_dtype is not None
    entry_bytes = dtype.itemsize
    if weighted:
        entry_bytes += np.dtype(weight_dtype).itemsize

    # Entries in a range that fit in memory beside the node arrays.
    largest = int(np.diff(starts).max(initial=0))
    min_bytes = entry_bytes * max(int(starts[-1]) // _MAX_PASSES, largest)
    purpose = f"a graph of {num_rows} nodes of up to {largest} neighbours"
    free_bytes = workspace.remaining(2 * NODE_BYTES * num_rows, min_bytes, purpose)
    step = free_bytes // entry_bytes
    position = np.full(num_rows, -1, dtype=np.int64)
    ranks = workspace.ranks
    first, end = _get_rank_rows(starts, ranks.rank, ranks.count)
    with (
        join_rank_pieces(folder, ranks) as piece,
        progress(label, end - first, enabled=ranks.is_first and num_rows >= SHOWN_FROM) as advance,
    ):
        indptr = spill(piece, "indptr", np.int64, [np.zeros(int(ranks.is_first))])
        all_indices = spill(piece, "indices", dtype)
        all_weights = spill(piece, "weights", weight_dtype) if weighted else None
        while first < end:
            last = int(np.searchsorted(starts, starts[first] + step, side="right")) - 1
            # A range has at least one row, and ends with this rank's rows.
            last = min(max(last, first + 1), end)
            local_starts = starts[first : last + 1] - starts[first]
            num_entries = local_starts[-1]
            indices = np.empty(num_entries, dtype)
            weights = np.ones(num_entries if weighted else 0, weight_dtype)
            fill(first, last, local_starts[:-1].copy(), indices, weights)

            num_written = all_indices.num_rows
            size = _merge(local_starts, indices, weights, weighted, position, num_written)
            all_indices.append(indices[:size])
            if all_weights is not None:
                all_weights.append(weights[:size])
            indptr.append(local_starts[1:] + num_written)
            advance(last - first)
            first = last

            # This range's arrays are freed before those for the next range are allocated.
            del indices, weights


def _get_rank_rows(starts: Array, rank: int, num_ranks: int) -> tuple[int, int]:
    """Return the first and the end row for ``rank``. All ranks have about equally many entries."""
    num_entries = starts[-1]
    inner_bounds = np.searchsorted(starts, num_entries * np.arange(1, num_ranks) // num_ranks)
    bounds = [0, *inner_bounds.tolist(), len(starts) - 1]
    return bounds[rank], bounds[rank + 1]


def first_ids(graph: RawGraph) -> dict[str, int]:
    """Return the id of each type's first node if all types are concatenated."""
    ends = np.cumsum([0, *graph.num_nodes.values()]).tolist()
    return dict(zip(graph.num_nodes, ends, strict=False))


def _is_nearly_uniform(weights: Array) -> bool:
    # If 99 % of the pairs have equal weights, these take memory and hardly change the cut.
    if len(weights) == 0:
        return True
    # About 1,000 samples are enough to tell the weight that 99 % of the pairs have.
    samples = weights[:: max(len(weights) // 1000, 1)]
    commonest = int(np.median(samples))
    num_different = 0
    for rows in iterate_slices(len(weights)):
        num_different += int(np.count_nonzero(weights[rows] != commonest))
    return num_different <= len(weights) // 100


@njit(cache=True, nogil=True)
def _count(src: Array, dst: Array, first_src: int, first_dst: int, indptr: Array) -> None:
    for e in range(len(src)):
        u = src[e] + first_src
        v = dst[e] + first_dst
        if u != v:
            indptr[u + 2] += 1
            indptr[v + 2] += 1


@njit(cache=True, nogil=True)
def _fill(
    src: Array,
    dst: Array,
    first_src: int,
    first_dst: int,
    first: int,
    last: int,
    free: Array,
    indices: Array,
) -> None:
    # An edge is written to both its rows, as far as they are in the range.
    for e in range(len(src)):
        u = src[e] + first_src
        v = dst[e] + first_dst
        if u != v:
            if first <= u < last:
                indices[free[u - first]] = v
                free[u - first] += 1
            if first <= v < last:
                indices[free[v - first]] = u
                free[v - first] += 1


@njit(cache=True, nogil=True)
def _merge(
    indptr: Array, indices: Array, weights: Array, weighted: bool, position: Array, offset: int
) -> int:
    """Merge repeated neighbours in place, compact the rows, and return how many entries remain.

    ``position`` has each neighbour's last position. Positions include the ``offset`` entries from earlier
    calls.
    """
    num_written = 0
    begin = indptr[0]
    for u in range(len(indptr) - 1):
        end = indptr[u + 1]
        row_start = num_written
        for e in range(begin, end):
            v = indices[e]
            # Positions only grow, so a position before this row belongs to another row.
            local_position = position[v] - offset
            if local_position >= row_start:
                if weighted:
                    weights[local_position] += weights[e]
                continue

            position[v] = offset + num_written
            indices[num_written] = v
            if weighted:
                weights[num_written] = weights[e]
            num_written += 1

        begin = end
        indptr[u + 1] = num_written
    return num_written


def induced_graph(
    graph: RawGraph, nodes: Array, constraints: Sequence[str], workspace: Workspace | None = None
) -> RawGraph:
    """Return the renumbered subgraph on ``nodes``, (K,) int64 ascending ids over all types.

    The subgraph has only the node columns that ``constraints`` name. With a ``workspace`` its edges are
    memory-mapped.
    """
    new_id = np.full(graph.total_nodes, -1, dtype=id_dtype(graph.total_nodes))
    num_nodes: dict[str, int] = {}
    node_data: dict[str, dict[str, NodeColumn]] = {}
    column_names = {MASKS.get(c, c) for c in constraints}
    first_id = first_ids(graph)
    for node_type, first in first_id.items():
        low, high = np.searchsorted(nodes, (first, first + graph.num_nodes[node_type]))
        rows = nodes[low:high] - first
        new_id[nodes[low:high]] = np.arange(len(rows))
        num_nodes[node_type] = len(rows)

        node_data[node_type] = {}
        for name, column in graph.node_data.get(node_type, {}).items():
            if name in column_names and isinstance(column, np.ndarray):
                node_data[node_type][name] = column[rows]

    def iterate_ends(edge_type: EdgeType, end: int) -> Iterator[Array]:
        # Views are used, because adding the first id to int32 ids may overflow.
        source_ids = new_id[first_id[edge_type[0]] :]
        destination_ids = new_id[first_id[edge_type[2]] :]
        src, dst = graph.edges[edge_type]
        for edges in iterate_slices(max(len(src), 1), 1 << 17):
            ends = np.stack([source_ids[src[edges]], destination_ids[dst[edges]]])
            has_both_ends = (ends >= 0).all(axis=0)
            yield ends[end, has_both_ends]

    makers = [partial(iterate_ends, edge_type, end) for edge_type in graph.edges for end in (0, 1)]
    ends = iter(concatenate_chunks(workspace, "edges", makers, 2 * graph.total_edges))
    edges = {edge_type: (next(ends), next(ends)) for edge_type in graph.edges}
    return RawGraph(name=f"a piece of {graph.name}", num_nodes=num_nodes, edges=edges, node_data=node_data)
