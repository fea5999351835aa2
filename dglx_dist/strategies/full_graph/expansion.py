"""A server's neighbourhood: k-hop expansion, expansion-aware sampling and split over ranks (GraNNDis).

This module also composes the seeds for cooperative batches. See docs/strategies/shared_preload.md.
"""

import shutil
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias, final

import numpy as np
from numba import njit

from dglx_dist.data.partition.base import PARTITIONERS, PartitionOptions
from dglx_dist.data.storage.arrays import map_array
from dglx_dist.errors import StorageError
from dglx_dist.graph.structure import InEdges
from dglx_dist.keyed_random import hash_ids, item_key, mix, stream_key
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, Array, RawGraph
from dglx_dist.strategies.full_graph.graph_types import GraphStructure, UnifiedGraph
from dglx_dist.strategies.full_graph.halo_plan import RowPositions

PRELOAD_STRUCTURE = "preload_structure"
"""Ledger phase for fetched in-edges: 8 bytes per remote row, 24 per in-edge."""

CHUNK = 1 << 16
"""Rows per request for in-edges."""

_AHEAD = 2
"""Number of requests in flight while one is processed."""

Selection: TypeAlias = Callable[[GraphStructure, tuple[int, int], Array], Array]
"""Selects the nodes that a server may use (expansion-aware sampling).

It maps (structure, half-open range with the server's own nodes, (K,) ascending int64 server seeds) to (n,)
ascending int64 ids, including the seeds. It is called on each server's leader and must not use collectives.
"""


@final
@dataclass(frozen=True, kw_only=True)
class KHopNeighborhood:
    """The rows that one server computes: R^0, R^1, ..., R^L, each a subset of the one before."""

    nodes: Array
    """(n,) int64 global ids in R^0, sorted by the last level that has them (latest first), then by id."""
    counts: Array
    """(L + 1,) int64. R^l is ``nodes[:counts[l]]``."""
    indptr: Array
    """(counts[1] + 1,) int64. Row p in R^1 has its in-edges at ``indptr[p]:indptr[p + 1]``."""
    sources: Array
    """(E,) int64 global ids. Above level ``hops`` some are rows on other servers."""
    edge_ids: Array
    """(E,) int64 global edge ids."""
    holders: Array = field(default_factory=lambda: np.empty(0, np.int32))
    """(n,) int32 rank that holds each row. Empty until the rows are split."""

    @property
    def in_degrees(self) -> Array:
        """(n,) int64 in-degrees. 0 for rows that only level 0 has, because their in-edges are not needed."""
        degrees = np.zeros(len(self.nodes), dtype=np.int64)
        degrees[: len(self.indptr) - 1] = np.diff(self.indptr)
        return degrees


def iterate_in_edges(structure: GraphStructure, nodes: Array) -> Iterator[tuple[Array, InEdges]]:
    """Yield the (K,) int64 ``nodes`` in chunks, in their order, with all their in-edges."""
    pending: deque[tuple[Array, Callable[[], InEdges]]] = deque()
    for start in range(0, len(nodes), CHUNK):
        chunk = nodes[start : start + CHUNK]
        pending.append((chunk, structure.submit("in_edges", chunk, phase=PRELOAD_STRUCTURE)))
        # Some chunks are requested ahead. After the last request, all pending chunks are due.
        is_last = start + CHUNK >= len(nodes)
        while len(pending) > (0 if is_last else _AHEAD):
            due_chunk, get_edges = pending.popleft()
            yield due_chunk, get_edges()


def keep_edges_from(edges: InEdges, allowed: Array) -> InEdges:
    """Return the ``edges`` with a source in the (n,) ascending int64 ``allowed``."""
    mask = np.zeros(len(edges.sources), dtype=bool)
    # np.isin would sort both arrays in each call.
    if len(allowed):
        # The minimum keeps sources above the last allowed id within the array. They compare as unequal.
        positions = np.minimum(np.searchsorted(allowed, edges.sources), len(allowed) - 1)
        mask = allowed[positions] == edges.sources
    return edges.keep(mask)


def _split_relations(structure: GraphStructure, edges: InEdges) -> Iterator[InEdges]:
    """Yield the ``edges`` separately for each edge type."""
    if not isinstance(structure, UnifiedGraph):
        yield edges
        return
    relations = structure.find_relations(edges.edge_ids)
    for number in range(len(structure.structures)):
        yield edges.keep(relations == number)


Composition: TypeAlias = Literal["random", "ordered"]
"""Way to group seeds into batches: at random, or with neighbouring seeds together (ordered)."""

_COMPOSITION_STREAM = (1 << 20) + (1 << 10)
"""Random stream for the composition. Samplers and external nodes use other streams."""


def compose_batches(
    seeds: Array,
    num_batches: int,
    composition: Composition,
    *,
    seed: int,
    clusters: Array | None = None,
) -> tuple[Array, ...]:
    """Split the (n,) int64 ascending distinct seeds on this server into ascending cooperative batches.

    All ranks on the server get the same result, because random numbers are keyed by (seed, node). Sizes
    differ by at most 1. With more batches than seeds, some are empty. All epochs have the same batches.

    Args:
        clusters: (n,) int64 cluster of each seed, by which ``ordered`` groups them. By default seeds are
            grouped by id, so seeds from one dataset part are together.
    """
    if composition == "ordered":
        order = np.arange(len(seeds)) if clusters is None else np.argsort(clusters, kind="stable")
    else:
        order = np.argsort(hash_ids(seeds, stream_key(seed, 0, _COMPOSITION_STREAM)), kind="stable")
    return tuple(np.sort(piece) for piece in np.array_split(seeds[order], num_batches))


def cluster_seeds(
    structure: GraphStructure, nodes: Array, seeds: Array, num_clusters: int, *, seed: int
) -> Array:
    """Return the (s,) int64 cluster of each seed. Clusters have about equally many seeds.

    METIS partitions the subgraph that the server's own ``nodes``, (n,) int64 ascending, induce. The (s,)
    ``seeds`` are a subset of these nodes. Nothing is sent, because ``structure`` has these in-edges in this
    server's memory.
    """
    if num_clusters == 1 or not len(seeds):
        return np.zeros(len(seeds), np.int64)

    sources = []
    destinations = []
    for chunk, in_edges in iterate_in_edges(structure, nodes):
        edges = keep_edges_from(in_edges, nodes)
        sources.append(np.searchsorted(nodes, edges.sources))
        destinations.append(np.repeat(np.searchsorted(nodes, chunk), np.diff(edges.indptr)))

    graph = RawGraph(
        name="the nodes of a server",
        num_nodes={NODE_TYPE: len(nodes)},
        edges={EDGE_TYPE: (np.concatenate(sources), np.concatenate(destinations))},
        node_data={NODE_TYPE: {"train_mask": np.isin(nodes, seeds, assume_unique=True)}},
    )
    options = PartitionOptions(balance=("train",), tolerance={"train": 0.1, "nodes": 1.0})
    assignment = PARTITIONERS.get("metis")(options).assign(graph, num_clusters, seed)
    return assignment.part_of[NODE_TYPE][np.searchsorted(nodes, seeds)].astype(np.int64)


@njit(cache=True, nogil=True)
def choose_external(
    indptr: Array,
    sources: Array,
    nodes: Array,
    exclude: Array,
    scores: Array,
    fanout: int,
    stream: np.uint64,
) -> Array:
    """Choose at most ``fanout`` sources for each node. Return (c,) int64 sources, possibly with duplicates.

    A node's candidates are ranked by score, then by a random number keyed by (stream, node, candidate). So a
    larger fan-out chooses a superset.

    Args:
        indptr: (K + 1,) int64.
        sources: (E,) int64, ascending for each node.
        nodes: (K,) int64 global ids.
        exclude: (T,) int64 ascending ids that are not candidates.
        scores: (E,) int64 score of each source, higher first. Empty if all scores are equal.
        fanout: Maximum number of sources per node, or -1 for all.
    """
    capacity = indptr[-1] if fanout < 0 else np.minimum(np.diff(indptr), fanout).sum()
    selected = np.empty(capacity, np.int64)
    num_slots = max(fanout, 0)
    best_sources, best_draws = np.empty(num_slots, np.int64), np.empty(num_slots, np.uint64)
    best_scores = np.empty(num_slots, np.int64)
    num_chosen = 0
    for i in range(len(nodes)):
        key = item_key(stream, nodes[i])
        count = 0
        for edge in range(indptr[i], indptr[i + 1]):
            source = sources[edge]
            # Parallel edges do not make a neighbour more probable.
            position = np.searchsorted(exclude, source)
            is_excluded = position < len(exclude) and exclude[position] == source
            if is_excluded or (edge > indptr[i] and sources[edge - 1] == source):
                continue

            if fanout < 0:
                selected[num_chosen] = source
                num_chosen += 1
                continue

            score = scores[edge] if len(scores) > 0 else 0
            draw = mix(key ^ mix(np.uint64(source)))
            if count == fanout:
                if (-score, draw) >= (-best_scores[count - 1], best_draws[count - 1]):
                    continue
                slot = count - 1
            else:
                slot = count
                count += 1

            while slot > 0 and (-score, draw) < (-best_scores[slot - 1], best_draws[slot - 1]):
                best_sources[slot], best_draws[slot] = best_sources[slot - 1], best_draws[slot - 1]
                best_scores[slot] = best_scores[slot - 1]
                slot -= 1

            best_sources[slot], best_draws[slot], best_scores[slot] = source, draw, score
        for slot in range(count):
            selected[num_chosen] = best_sources[slot]
            num_chosen += 1

    return selected[:num_chosen]


EasPolicy: TypeAlias = Literal["uniform_external", "degree"]
Inner: TypeAlias = Literal["server", "batch"]

ALL = -1
"""Fan-out that selects every external in-neighbour."""

_EAS_STREAM = 1 << 20
"""Random stream for the selection. Samplers use other streams."""


@final
@dataclass(frozen=True, kw_only=True)
class EasOptions:
    """Parameters of expansion-aware sampling."""

    hops: int = 1
    """Number of rounds of expansion (m). 0 drops every edge from another server."""
    fanout: int = 15
    """Number of external in-neighbours selected per node, edge type and round (k), or -1 for all."""
    policy: EasPolicy = "uniform_external"
    """Whether external in-neighbours are random, or those with the most in-edges from outside the server."""
    inner: Inner = "server"
    """Start of the expansion: all the server's nodes, or the seeds of a cooperative batch."""


def make_selection(options: EasOptions, *, seed: int) -> Selection:
    """Make the :data:`Selection` for plans. It selects once per server unless ``inner`` is "batch"."""
    selected_nodes: dict[tuple[int, int], Array] = {}

    def select_nodes(structure: GraphStructure, own_range: tuple[int, int], seeds: Array) -> Array:
        if options.inner == "batch":
            return select_external(structure, own_range, seeds, options, seed=seed)
        if own_range not in selected_nodes:
            inner = np.arange(*own_range)
            selected_nodes[own_range] = select_external(structure, own_range, inner, options, seed=seed)
        return selected_nodes[own_range]

    return select_nodes


def select_external(
    structure: GraphStructure, own_range: tuple[int, int], inner: Array, options: EasOptions, *, seed: int
) -> Array:
    """Expand the (n,) int64 ascending ``inner`` nodes to the (s,) int64 ascending selected nodes.

    ``own_range`` is the server's half-open node range. See "Expansion-aware sampling" in
    docs/strategies/shared_preload.md. All ranks get the same result, because random numbers are keyed by
    (seed, node). For a given seed, more hops select a superset, and so does a larger fan-out with at most 2
    hops. With more hops, a larger fan-out may reach a node in an earlier round and select others.

    Each round sends 8 bytes for each frontier node on another server and receives 24 for each in-edge into
    it. ``degree`` also sends and receives 8 bytes for each external candidate.
    """
    selected = inner
    frontier = inner
    outside = None if options.inner == "batch" else own_range

    def compute_scores(sources: Array, excluded: Array) -> Array:
        if options.policy != "degree" or options.fanout == ALL:
            return np.empty(0, np.int64)
        distinct_sources, distinct_index = np.unique(sources, return_inverse=True)
        is_candidate = ~np.isin(distinct_sources, excluded, assume_unique=True)
        values = np.zeros(len(distinct_sources), np.int64)
        values[is_candidate] = structure.in_degrees(distinct_sources[is_candidate], outside)
        return values[distinct_index]

    # A node is in one frontier only. Its choice must not depend on the round. Otherwise the selections for
    # several m and k would not contain each other.
    for _ in range(options.hops):
        external = [np.empty(0, np.int64)]
        for nodes, chunk in iterate_in_edges(structure, frontier):
            for relation, edges in enumerate(_split_relations(structure, chunk)):
                edge_scores = compute_scores(edges.sources, selected)
                stream = stream_key(seed, 0, _EAS_STREAM + relation)
                external_sources = choose_external(
                    edges.indptr, edges.sources, nodes, selected, edge_scores, options.fanout, stream
                )
                external.append(np.unique(external_sources))

        new_nodes = np.setdiff1d(np.concatenate(external), selected)
        if not len(new_nodes):
            break
        selected = np.union1d(selected, new_nodes)
        frontier = new_nodes

    return selected


def write_neighborhood(folder: Path, neighborhood: KHopNeighborhood) -> None:
    """Write ``neighborhood`` into the new ``folder``. If that fails, remove it and raise StorageError."""
    try:
        folder.mkdir()
        for name, array in vars(neighborhood).items():
            np.save(folder / f"{name}.npy", array)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        num_bytes = sum(array.nbytes for array in vars(neighborhood).values())
        raise StorageError(
            f"{folder} cannot be written ({error}); the ranks of a server need {num_bytes / 1e6:.1f} MB "
            f"there to share rows: free space in {folder.parent.parent} (in a container: --shm-size), or "
            "start one rank on each server"
        ) from error


def read_neighborhood(folder: Path) -> KHopNeighborhood:
    """Map the arrays that :func:`write_neighborhood` wrote. Their files may be removed meanwhile."""
    return KHopNeighborhood(**{path.stem: map_array(path, "r") for path in folder.iterdir()})


MAX_GROUPS = 4
"""Maximum number of layer groups that are balanced. METIS rarely satisfies more constraints."""

TOLERANCE = 0.1
"""Allowed relative imbalance within a group's work."""


def split_rows(closure: KHopNeighborhood, num_ranks: int, seed: int) -> Array:
    """Assign every row on a server to a rank. A rank may get none.

    Ranks wait for each other at every layer, so METIS balances each group of layers. All sources must be
    rows, so ``hops`` must be above 0.

    Returns:
        (n,) int32 ranks, in [0, num_ranks).
    """
    num_rows = len(closure.nodes)
    if num_ranks == 1 or num_rows == 0:
        return np.zeros(num_rows, dtype=np.int32)

    weights = group_work(closure)
    options = PartitionOptions(balance=tuple(weights), tolerance=TOLERANCE)
    id_limit = int(max(closure.nodes.max(initial=-1), closure.sources.max(initial=-1))) + 1
    sources = RowPositions(closure.nodes, id_limit).find(closure.sources)
    assert not (sources < 0).any(), "a source is not a row: split_rows needs hops above 0"
    targets = np.repeat(np.arange(len(closure.indptr) - 1), np.diff(closure.indptr))
    graph = RawGraph(
        name="closure",
        num_nodes={NODE_TYPE: num_rows},
        edges={EDGE_TYPE: (sources, targets)},
        node_data={NODE_TYPE: weights},
    )
    return PARTITIONERS.get("metis")(options).assign(graph, num_ranks, seed).part_of[NODE_TYPE]


def group_work(closure: KHopNeighborhood) -> dict[str, Array]:
    """Return the work that each row causes in each of a few layer groups.

    Layers that compute equally many rows form one group. If there are more than :data:`MAX_GROUPS` groups,
    adjacent ones are merged.

    Returns:
        By group name, the (n,) int64 work that each row causes. A layer that computes a row adds its node's
        in-degree and 1.
    """
    # Rows are sorted by hop. A layer that computes c rows computes the first c. The first count is skipped,
    # because no layer computes the inputs.
    rows_of_layer = closure.counts[1:]
    distinct_numbers = np.unique(rows_of_layer)
    groups = np.array_split(distinct_numbers, min(len(distinct_numbers), MAX_GROUPS))
    row_indices = np.arange(len(closure.nodes))
    work_per_layer = closure.in_degrees + 1

    work_by_group = {}
    for group_index, numbers in enumerate(groups):
        rows_of_group = np.sort(rows_of_layer[np.isin(rows_of_layer, numbers)])
        # Find out how many layers in the group compute more rows than the row's index.
        num_without_row = np.searchsorted(rows_of_group, row_indices, side="right")
        num_layers = len(rows_of_group) - num_without_row
        work_by_group[f"layers_{group_index}"] = num_layers * work_per_layer
    return work_by_group
