"""Partition a graph on disk on several levels, with memory for its nodes only.

Label propagation clusters nodes, and clusters become the nodes in the next graph, until that fits in memory.
See Meyerhenke, Sanders, Schulz, "Partitioning Complex Networks via Size-constrained Clustering", SEA 2014.
"""

import functools
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numba import njit

from dglx_dist.data.external_memory import SHOWN_FROM, Ranks, Workspace, map_spill, spill
from dglx_dist.data.partition.graph_views import BalanceWeights, SymmetricGraph, write_rows
from dglx_dist.data.partition.one_pass import stream
from dglx_dist.data.storage.columns import id_dtype
from dglx_dist.errors import PeerError
from dglx_dist.keyed_random import mix
from dglx_dist.progress import progress
from dglx_dist.records import Array

log = logging.getLogger(__name__)

_SWEEPS = 5
_STREAMS = 60
"""Node ranges that are swept side by side and shared by ranks."""
_MIN_STREAM_NODES = 4096
"""Minimum number of nodes in a range."""
_ROUNDS = 64
"""Rounds in a sweep."""
_ROUNDS_BEFORE_MARKS = 8
"""Rounds after which ranks exchange which nodes have moved neighbours."""
_TOLERANCE = 0.6
"""Share of the tolerance that clusters, and parts made from them, may use. Refinement needs the rest."""
_MIN_SHRINKING = 0.95
_NODE_BYTES = 40
"""Memory per node on one level."""
_WEIGHT_BYTES = 24
"""Additional memory per node and balance weight on one level."""


def partition(
    graph: SymmetricGraph,
    weights: BalanceWeights,
    solve: Callable[[SymmetricGraph, BalanceWeights], Array],
    fits: Callable[[SymmetricGraph], bool],
    workspace: Workspace,
    seed: int,
) -> Array:
    """Partition a graph that is larger than memory. Return (N,) int32 parts.

    Nodes are merged into clusters, level by level, until the cluster graph ``fits`` in memory. ``solve``
    partitions this graph, and the parts are refined on each level. Each level's graph and parts are stages in
    ``workspace``. Parts exceed their capacities only if those from ``solve`` do. The result is deterministic
    if ``solve`` is. Raises ConfigError if the node arrays do not fit in the workspace.
    """
    # The names differ from the original ones, because a cluster has the weight of all its nodes.
    names = tuple(f"{name} of clusters" for name in weights.names)
    levels = [(graph, weights)]
    while not fits(levels[-1][0]):
        fine, columns = levels[-1]
        make_level = functools.partial(_coarsen, fine, columns, workspace, seed)
        folder = workspace.stage(f"level{len(levels)}", make_level, shared=True)
        coarse = SymmetricGraph.open(folder)
        num_pairs = len(coarse.indices) // 2
        log.info("level %d has %d nodes, %d pairs", len(levels), coarse.num_nodes, num_pairs)
        cluster_columns = tuple(map_spill(folder, f"column{c}") for c in range(len(weights.columns)))
        levels.append((coarse, replace(weights, names=names, columns=cluster_columns)))

        fine_size = len(fine.indices) + fine.num_nodes
        coarse_size = len(coarse.indices) + coarse.num_nodes
        if coarse_size > _MIN_SHRINKING * fine_size:
            break

    def partition_coarsest() -> Array:
        coarsest, columns = levels[-1]
        if len(levels) == 1:
            return solve(graph, weights)

        columns = replace(columns, tolerance=_TOLERANCE * columns.tolerance)
        if fits(coarsest):
            return solve(coarsest, columns)
        # Clusters have reached their maximum weight, but their graph is still too large.
        return stream(coarsest, None, columns, passes=1, fennel=False)

    # The name counts the levels, because another memory limit may stop at another level.
    parts = workspace.array(f"parts{len(levels) - 1}", partition_coarsest)
    for level in range(len(levels) - 1, 0, -1):
        coarse_of = map_spill(workspace.folder / f"level{level}", "coarse_of")
        # The original graph's capacities also hold for single nodes.
        refine = functools.partial(
            _refine, *levels[level - 1], parts[coarse_of], weights.capacities(), workspace.ranks
        )
        parts = workspace.array(f"parts{level - 1}", refine, shared=True)
    return parts


def _coarsen(
    graph: SymmetricGraph, weights: BalanceWeights, workspace: Workspace, seed: int, folder: Path
) -> None:
    """Write the cluster graph for ``graph`` to ``folder``, with its weights and the (N,) ``coarse_of``.

    All ranks in the workspace call the function.
    """
    num_nodes = graph.num_nodes
    num_bytes = (_NODE_BYTES + _WEIGHT_BYTES * len(weights.columns)) * num_nodes
    workspace.remaining(num_bytes, 0, f"a graph of {num_nodes} nodes")
    coarse_of = _find_clusters(graph, weights, np.uint64(seed % 2**64), workspace.ranks)
    num_coarse = int(coarse_of.max(initial=-1)) + 1
    if workspace.ranks.is_first:
        spill(folder, "coarse_of", coarse_of.dtype, [coarse_of])
        for c, column in enumerate(weights.columns):
            spill(folder, f"column{c}", np.int64, [np.bincount(coarse_of, column, num_coarse)])

    starts = np.zeros(num_coarse + 1, dtype=np.int64)
    adjacency = _make_adjacency(graph)
    # The entries' total weight bounds each entry's weight, so its dtype fits both.
    total_weight = _count_coarse_edges(adjacency, coarse_of, starts[1:])
    np.cumsum(starts, out=starts)
    fill_rows = functools.partial(_write_coarse_edges, adjacency, coarse_of)
    held_bytes = (coarse_of.itemsize + 8 * len(weights.columns)) * num_nodes
    workspace = workspace.with_reserved(held_bytes)
    write_rows(folder, starts, fill_rows, id_dtype(total_weight), workspace, "Contracting")


_Adjacency: TypeAlias = tuple[Array, Array, Array]
"""Row starts, neighbours, and edge weights. A single weight is for all edges."""


def _make_adjacency(graph: SymmetricGraph) -> _Adjacency:
    weights = np.ones(1, np.int32) if graph.edge_weights is None else graph.edge_weights
    return graph.indptr, graph.indices, weights


def _find_clusters(graph: SymmetricGraph, weights: BalanceWeights, key: np.uint64, ranks: Ranks) -> Array:
    """Return each node's cluster, (N,). Clusters are numbered by their first members' ids."""
    num_nodes = graph.num_nodes
    matrix = weights.matrix()
    share = _TOLERANCE * float(weights.shares.min())

    # A cluster may weigh at most a part's allowed excess. Otherwise capacities would grow with clusters. A
    # heavier node stays alone, because clusters with its weight could not be balanced.
    limits = share * weights.tolerance * [float(column.sum()) for column in weights.columns]
    limit = np.broadcast_to(limits, (num_nodes, len(limits)))
    labels = np.arange(num_nodes, dtype=id_dtype(num_nodes))
    loads = matrix.copy()
    _propagate(graph, (labels, loads, matrix, limit), ranks, key=key, refining=False)

    num_members = np.bincount(labels, minlength=num_nodes).astype(labels.dtype)
    has_few_clusters = 2 * int(np.count_nonzero(num_members)) <= num_nodes
    _join_single(_make_adjacency(graph), labels, num_members, loads, matrix, limit, has_few_clusters)
    del loads

    # Clusters are numbered by a cumulative sum over the labels in use.
    new_labels = np.zeros(num_nodes, dtype=labels.dtype)
    new_labels[labels] = 1
    np.cumsum(new_labels, out=new_labels)
    return new_labels[labels] - 1


def _refine(
    graph: SymmetricGraph, weights: BalanceWeights, parts: Array, capacities: Array, ranks: Ranks
) -> Array:
    """Move nodes to their neighbours' parts, and return the (N,) parts. ``parts`` is changed."""
    matrix = weights.matrix()
    loads = np.ascontiguousarray(weights.loads(parts).T.astype(np.int64))
    # A capacity allows for the heaviest node. Only one part has it, so other parts need not grow so large.
    even_limit = (1 + weights.tolerance) * np.outer(weights.shares, loads.sum(axis=0))
    limit = np.minimum(capacities.T, np.maximum(even_limit, loads))
    _propagate(graph, (parts, loads, matrix, limit), ranks, key=np.uint64(0), refining=True)
    return parts


_Labelling: TypeAlias = tuple[Array, Array, Array, Array]
"""(N,) int labels in [0, L), (L, C) int64 loads, (N, C) int64 weights, and (L, C) float64 load limits."""


def _propagate(
    graph: SymmetricGraph, labelling: _Labelling, ranks: Ranks, *, key: np.uint64, refining: bool
) -> None:
    """Move each node to the label that most neighbours have. All ``ranks`` make the same moves.

    Nodes are swept in streams, which are id ranges with equally many neighbours. A round takes a block of
    consecutive nodes from each stream. A node sees the moves in its own block. In other blocks it sees the
    state before the round. Then all moves that no limit forbids are made in id order. So the result does not
    depend on which rank sweeps which streams. Labels and loads change equally on all ranks.

    Args:
        graph: The graph to sweep.
        labelling: Labels, loads and limits.
        ranks: The ranks that share the sweep.
        key: Random key that decides between labels with equally many neighbours.
        refining: Whether labels are parts with loads that should be even, instead of clusters.
    """
    num_nodes = graph.num_nodes
    num_labels = len(labelling[1])
    adjacency = _make_adjacency(graph)
    active = np.ones(num_nodes, np.bool_)
    marked = np.zeros(num_nodes, np.bool_)
    rating = np.zeros(num_labels, np.int64)
    move_dtype = id_dtype(max(num_nodes, num_labels))
    bounds = _cut_streams(graph)
    num_streams = len(bounds) - 1
    first_stream = num_streams * ranks.rank // ranks.count
    end_stream = num_streams * (ranks.rank + 1) // ranks.count
    label = "Refining" if refining else "Clustering"
    shows_progress = ranks.is_first and num_nodes >= SHOWN_FROM
    with progress(label, _SWEEPS * _ROUNDS, enabled=shows_progress) as advance:
        for _ in range(_SWEEPS):
            num_moved = 0
            for round_index in range(_ROUNDS):
                # Each stream takes a block at a different position. Otherwise neighbours at the same position
                # in two streams would move in the same round and swap labels.
                index = (round_index + np.arange(num_streams)) % _ROUNDS
                block_starts = bounds[:-1] + np.diff(bounds) * index // _ROUNDS
                block_ends = bounds[:-1] + np.diff(bounds) * (index + 1) // _ROUNDS
                blocks = np.stack([block_starts, block_ends], axis=1)[first_stream:end_stream]

                moves = np.empty((np.diff(blocks).sum(), 3), move_dtype)
                state = (rating, active, marked)
                num_proposed = _propose(adjacency, blocks, labelling, state, key, refining, moves)
                for rank, rank_moves in enumerate(ranks.gather(moves[:num_proposed, :2].copy())):
                    _check_moves(rank_moves, rank, num_nodes, num_labels)
                    num_moved += _apply(rank_moves, labelling, marked)

                if (round_index + 1) % _ROUNDS_BEFORE_MARKS == 0:
                    active |= ranks.union(marked)
                    marked[:] = False
                advance(1)

            # The last sweeps are short, because nodes without a moved neighbour are skipped.
            if num_moved <= num_nodes // 1000:
                break


def _cut_streams(graph: SymmetricGraph) -> Array:
    """Return the bounds of S streams: each stream's first node, and then the node count."""
    num_streams = min(max(graph.num_nodes // _MIN_STREAM_NODES, 1), _STREAMS)
    num_entries = len(graph.indices)
    cuts = np.searchsorted(graph.indptr, num_entries * np.arange(1, num_streams) // num_streams)
    return np.array([0, *cuts, graph.num_nodes])


def _check_moves(moves: Array, rank: int, num_nodes: int, num_labels: int) -> None:
    has_negative = moves.min(initial=0) < 0
    is_too_large = moves.max(axis=0, initial=-1) >= (num_nodes, num_labels)
    if has_negative or is_too_large.any():
        raise PeerError(
            f"rank {rank} has sent moves of unknown nodes or to unknown labels; run the same "
            "version on all ranks, on the same files"
        )


@njit(cache=True, nogil=True)
def _propose(
    adjacency: _Adjacency,
    blocks: Array,
    labelling: _Labelling,
    state: tuple[Array, Array, Array],
    key: np.uint64,
    refining: bool,
    moves: Array,
) -> int:
    """Write (node, new label, old label) into the (M, 3) ``moves``. Return how many moves there are.

    ``blocks`` (B, 2) has each block's first and end node. Labels and loads are restored at the end. The
    nodes' neighbours are marked.
    """
    indptr, indices, edge_weights = adjacency
    labels, loads, matrix, limit = labelling
    rating, active, marked = state
    num_moves = 0
    has_weights = len(edge_weights) > 1
    for block in range(len(blocks)):
        first_move = num_moves
        for u in range(blocks[block, 0], blocks[block, 1]):
            if not active[u]:
                continue
            active[u] = False
            home = labels[u]

            for e in range(indptr[u], indptr[u + 1]):
                rating[labels[indices[e]]] += edge_weights[e] if has_weights else 1

            best, best_rating, best_key = home, rating[home], np.uint64(0)
            key_of_node = mix(key ^ np.uint64(u))
            for e in range(indptr[u], indptr[u + 1]):
                label = labels[indices[e]]
                links = rating[label]

                # A rating of 0 marks labels that were seen.
                rating[label] = 0
                if links == 0 or links < best_rating or not _has_room(matrix[u], loads[label], limit[label]):
                    continue

                # Among equal labels a lighter part wins, then the current label, then the largest key.
                tie_key = mix(key_of_node ^ np.uint64(label))
                if best == home:
                    wins = refining and _is_lighter(
                        matrix[u], loads[label], limit[label], loads[home], limit[home]
                    )
                else:
                    wins = tie_key > best_key

                if links > best_rating or wins:
                    best, best_rating, best_key = label, links, tie_key

            if best == home:
                continue
            _move(u, best, labels, loads, matrix)
            moves[num_moves, 0] = u
            moves[num_moves, 1] = best
            moves[num_moves, 2] = home
            num_moves += 1
            for e in range(indptr[u], indptr[u + 1]):
                marked[indices[e]] = True

        # The next block must see the state before the round.
        for move in range(first_move, num_moves):
            _move(moves[move, 0], moves[move, 2], labels, loads, matrix)
    return num_moves


@njit(cache=True, nogil=True)
def _apply(moves: Array, labelling: _Labelling, marked: Array) -> int:
    """Make the (M, 2) ``moves`` that no limit forbids. Return their number, and mark the other nodes."""
    labels, loads, matrix, limit = labelling
    num_moved = 0
    for move in range(len(moves)):
        u = moves[move, 0]
        label = moves[move, 1]
        if _has_room(matrix[u], loads[label], limit[label]):
            _move(u, label, labels, loads, matrix)
            num_moved += 1
        else:
            # Other nodes in the same round took the room, so the node is marked to try again.
            marked[u] = True
    return num_moved


@njit(cache=True, nogil=True)
def _move(u: int, label: int, labels: Array, loads: Array, matrix: Array) -> None:
    for c in range(matrix.shape[1]):
        loads[labels[u], c] -= matrix[u, c]
        loads[label, c] += matrix[u, c]
    labels[u] = label


@njit(cache=True, nogil=True)
def _is_lighter(weight: Array, load: Array, limit: Array, home_load: Array, home_limit: Array) -> bool:
    is_lighter = True
    for c in range(len(weight)):
        is_lighter &= weight[c] == 0 or (load[c] + weight[c]) * home_limit[c] < home_load[c] * limit[c]
    return is_lighter


@njit(cache=True, nogil=True)
def _has_room(weight: Array, load: Array, limit: Array) -> bool:
    has_room = True
    for c in range(len(weight)):
        has_room &= weight[c] == 0 or load[c] + weight[c] <= limit[c]
    return has_room


@njit(cache=True, nogil=True)
def _join_single(
    adjacency: _Adjacency,
    labels: Array,
    num_members: Array,
    loads: Array,
    matrix: Array,
    limit: Array,
    isolated_only: bool,
) -> None:
    """Join nodes without neighbours to one cluster, and single nodes that prefer the same full cluster.

    ``num_members`` counts the nodes with each label. With ``isolated_only``, only nodes without neighbours
    are joined.
    """
    indptr, indices, edge_weights = adjacency
    num_nodes = len(labels)
    has_weights = len(edge_weights) > 1
    rating = np.zeros(num_nodes, dtype=np.int64)

    # Entry c is the cluster that takes the next node with best cluster c. The last is for isolated nodes.
    open_label = np.full(num_nodes + 1, -1, dtype=labels.dtype)
    for u in range(num_nodes):
        if num_members[labels[u]] != 1 or (isolated_only and indptr[u + 1] > indptr[u]):
            continue

        best, best_rating = num_nodes, np.int64(0)
        for e in range(indptr[u], indptr[u + 1]):
            label = labels[indices[e]]
            rating[label] += edge_weights[e] if has_weights else 1
            if rating[label] > best_rating:
                best, best_rating = label, rating[label]

        for e in range(indptr[u], indptr[u + 1]):
            rating[labels[indices[e]]] = 0

        open_cluster = open_label[best]
        if open_cluster < 0 or not _has_room(matrix[u], loads[open_cluster], limit[open_cluster]):
            open_label[best] = labels[u]
            continue

        num_members[labels[u]] -= 1
        num_members[open_cluster] += 1
        _move(u, open_cluster, labels, loads, matrix)


@njit(cache=True, nogil=True)
def _count_coarse_edges(adjacency: _Adjacency, coarse_of: Array, num_entries: Array) -> int:
    """Count the entries between clusters by row, and return their total weight."""
    indptr, indices, edge_weights = adjacency
    total = 0
    has_weights = len(edge_weights) > 1
    for u in range(len(coarse_of)):
        row = coarse_of[u]
        for e in range(indptr[u], indptr[u + 1]):
            if coarse_of[indices[e]] != row:
                num_entries[row] += 1
                total += edge_weights[e] if has_weights else 1
    return total


@njit(cache=True, nogil=True)
def _write_coarse_edges(
    adjacency: _Adjacency,
    coarse_of: Array,
    first_row: int,
    end_row: int,
    next_positions: Array,
    coarse_indices: Array,
    coarse_weights: Array,
) -> None:
    """Write the edges between clusters that belong to the coarse rows ``first_row`` to ``end_row - 1``.

    ``next_positions`` has the next edge's position in each of these rows, and is advanced.
    """
    indptr, indices, edge_weights = adjacency
    # An array with one element means that all weights are 1.
    has_weights = len(edge_weights) > 1
    for u in range(len(coarse_of)):
        row = coarse_of[u]
        if not first_row <= row < end_row:
            continue
        for e in range(indptr[u], indptr[u + 1]):
            neighbour_row = coarse_of[indices[e]]
            if neighbour_row != row:
                position = next_positions[row - first_row]
                coarse_indices[position] = neighbour_row
                coarse_weights[position] = edge_weights[e] if has_weights else 1
                next_positions[row - first_row] += 1
