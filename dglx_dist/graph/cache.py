"""Implements ``g.cache_rows``: chooses the remote rows that a server caches, and fills the cache."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numba import njit
from torch import Tensor

from dglx_dist.comm.collectives import (
    barrier,
    check_equal,
    gather_int64,
    gather_json,
    run_on_all_ranks,
    sum_over_ranks,
)
from dglx_dist.data.storage.columns import IDS
from dglx_dist.errors import ConfigError
from dglx_dist.graph.column import Column, LookAheadRows, RowCache, check_cacheable
from dglx_dist.graph.dist_tensor import OpenedGraph
from dglx_dist.graph.kvstore import KVStore
from dglx_dist.graph.partition_book import Ids
from dglx_dist.graph.row_kernels import SlotTable, compute_table_sizes, fill_table
from dglx_dist.graph.sampling import NO_IDS, group_by_type, read_fanouts
from dglx_dist.graph.shared_memory import map_shared_rows
from dglx_dist.graph.split import node_split
from dglx_dist.graph.structure import CSCShard, count_sources
from dglx_dist.memory import machine_memory
from dglx_dist.options import check_integer
from dglx_dist.records import Array, ColumnInfo, EdgeType


def compute_access_probability(
    shards: Mapping[EdgeType, CSCShard],
    num_nodes: Mapping[str, int],
    seeds: Mapping[str, Array],
    fanouts: Sequence[Mapping[EdgeType, int]],
    batch_size: int,
) -> dict[str, Array]:
    """Return the probability that a rank's batch needs each node as an input (SALIENT++, section 3.2).

    A seed is in a batch with p_0 = batch size / number of seeds. A node u in the batch draws k of its deg(u)
    in-edges at each later hop, as in DGL's blocks. Hops 1 to h miss an edge v -> u with probability

        m_h(v -> u) = 1 - q_{h-1}(u) + sum over j < h of (q_j - q_{j-1})(u) * (1 - min(1, k / deg(u)))^(h-j)

    where k may differ from hop to hop. The node v is in the batch after hop h with probability

        q_h(v) = 1 - (1 - p_0(v)) * product over the edges v -> u of m_h(v -> u),

    assuming that all edges are independent. For the nodes that join at the previous hop, this is the paper's
    p_h(v), 1 - prod (1 - min(1, k / deg(u)) p_{h-1}(u)). The cost is O(edges) per hop.

    Args:
        shards: Edge type to its complete structure.
        num_nodes: Node type to its node count N.
        seeds: Node type to the (T,) int64 distinct ids that the rank trains on.
        fanouts: Edge type to k, one mapping per layer, input-most first as in the samplers. -1 draws all
            edges.
        batch_size: Number of seeds in one batch, over all types.
    """
    num_seeds = sum(len(ids) for ids in seeds.values())
    seed_probability = {ntype: np.zeros(count) for ntype, count in num_nodes.items()}
    for ntype, ids in seeds.items():
        seed_probability[ntype][ids] = min(1.0, batch_size / max(num_seeds, 1))
    in_batch, joined_last = seed_probability, seed_probability
    not_drawn = {etype: np.zeros(num_nodes[etype[2]]) for etype in shards}
    for fanout_of_type in reversed(fanouts):
        # Add up the logarithms of m_h over each node's edges.
        log_missed = {ntype: np.zeros(count) for ntype, count in num_nodes.items()}
        for etype, shard in shards.items():
            source, _, destination = etype
            frontier = _Frontier(in_batch[destination], joined_last[destination], not_drawn[etype])
            csc = shard.indptr, shard.indices, shard.first_node
            _add_log_missed(*csc, frontier, fanout_of_type[etype], log_missed[source])

        probability = {}
        joined_last = {}
        for ntype, log in log_missed.items():
            probability[ntype] = 1.0 - (1.0 - seed_probability[ntype]) * np.exp(log)
            joined_last[ntype] = probability[ntype] - in_batch[ntype]
        in_batch = probability
    return in_batch


class _Frontier(NamedTuple):
    """State of an edge type's destinations before a hop, each (N,) float64."""

    in_batch: Array
    """Probability that the node is in the batch."""
    joined_last: Array
    """Probability that it joined at the previous hop."""
    not_drawn: Array
    """Probability that it joined earlier and has not drawn a given in-edge so far. The hop updates it."""


def select_top_rows(scores: Array, local_range: tuple[int, int], budget: int) -> Array:
    """Return the (C,) int64 ids with the highest (N,) scores, ascending. C is at most ``budget``.

    Rows with score 0 and the local server's rows are left out. ``local_range`` holds the local ids as (first,
    end). If scores are equal, the smaller ids are chosen.
    """
    remote_scores = scores.copy()
    remote_scores[local_range[0] : local_range[1]] = 0
    budget = min(budget, int(np.count_nonzero(remote_scores)))
    if budget == 0:
        return np.empty(0, np.int64)

    # `threshold` is the lowest score that is still cached. If many rows have this score, only some fit.
    index = len(remote_scores) - budget
    threshold = np.partition(remote_scores, index)[index]
    higher_ids = np.flatnonzero(remote_scores > threshold)
    equal_ids = np.flatnonzero(remote_scores == threshold)[: budget - len(higher_ids)]
    return np.sort(np.concatenate([higher_ids, equal_ids])).astype(np.int64)


def compute_hit_rate(scores: Array, local_range: tuple[int, int], cached_ids: Array) -> float | None:
    """Return the cached rows' share of all remote scores, or None if all remote scores are 0."""
    first, end = local_range
    remote_sum = float(scores[:first].sum() + scores[end:].sum())
    return float(scores[cached_ids].sum()) / remote_sum if remote_sum > 0 else None


@njit(cache=True, nogil=True)
def _add_log_missed(
    indptr: Array, indices: Array, first_node: int, frontier: _Frontier, fanout: int, log_missed: Array
) -> None:
    """Add to ``log_missed[v]`` the log of the probability that no edge from v has been drawn so far."""
    in_batch, joined_last, not_drawn = frontier
    for row in range(len(indptr) - 1):
        node = first_node + row
        degree = indptr[row + 1] - indptr[row]
        if in_batch[node] > 0 and degree > 0:
            share = 1.0 if fanout < 0 or fanout >= degree else fanout / degree
            not_drawn[node] = (not_drawn[node] + joined_last[node]) * (1.0 - share)
            # Rounding may give a value slightly below 0.
            probability = max(0.0, 1.0 - in_batch[node] + not_drawn[node])
            log = np.log(probability)
            for edge in range(indptr[row], indptr[row + 1]):
                log_missed[np.uint64(indices[np.uint64(edge)])] += log


LOOK_AHEAD = "lookahead"
PHASE_ROW_CACHE = "cache"
"""Ledger phase for filling caches."""


@dataclass(frozen=True, kw_only=True)
class CachePlan:
    """Result of ``g.cache_rows``: one column's cache."""

    policy: str
    rows: int
    """Number of rows that the server caches. With ``lookahead``, the maximum for this rank."""
    bytes: int
    """Size in bytes with the lookup table. With ``lookahead``, the table grows with the known batches."""
    expected_hit_rate: float | None
    """Share of hits among remote rows that the policy's model predicts, or None if it has no model."""


def fill_cache(store: KVStore, column: Column, file_name: str, ids: Array) -> RowCache:
    """Fetch rows from other servers into memory that this server's ranks share. Every rank must call this.

    Args:
        file_name: Prefix for unused names in shared memory.
        ids: (C,) int64 distinct ids to keep. Only the first rank on each server needs to pass them.
    """
    session = store.session
    leader = session.topology.ranks_of_server(session.topology.server)[0]
    num_rows = int(gather_int64([len(ids)], session)[leader, 0])
    num_slots, num_keys = compute_table_sizes(num_rows, column.num_rows) if num_rows else (0, 0)

    def fetch_rows(_shape: tuple[int, ...], _dtype: torch.dtype) -> Tensor:
        return store.pull(column.name, ids, distinct=True, phase=PHASE_ROW_CACHE)

    def fill_slots(shape: tuple[int, ...], _dtype: torch.dtype) -> Tensor:
        slots = np.empty(shape, np.int32)
        fill_table(SlotTable(slots, keys), ids)
        return torch.from_numpy(slots)

    rows = map_shared_rows(session, f"{file_name}.rows", num_rows, column.info, fetch_rows)
    keys = map_shared_rows(session, f"{file_name}.keys", num_keys, IDS)
    slot_info = ColumnInfo(dtype="int32", row_shape=())
    slots = map_shared_rows(session, f"{file_name}.slots", num_slots, slot_info, fill_slots)
    return RowCache(table=SlotTable(slots, keys), rows=rows)


def find_halo(g: OpenedGraph, ntype: str) -> Array:
    """Return the (C,) ids of remote nodes with edges to this server. Only its first rank finds them."""
    return np.flatnonzero(_count_halo_edges(g, ntype))


@contextmanager
def hold_halo(
    g: OpenedGraph, names_of: Mapping[str, Sequence[str]], find_ids: Callable[[str], Array]
) -> Iterator[None]:
    """Keep the rows of other servers that in-edges of local nodes start from. Every rank must call this.

    Inside the block, no rank may write these tensors. A tensor with a cache keeps it. The servers of a
    machine keep no rows that together take more than a quarter of its free memory.

    Args:
        names_of: Node type to the keys of its tensors in the store.
        find_ids: Returns the result of :func:`find_halo` for a node type.
    """
    session, store = g.session, g.kvstore
    held_names: list[str] = []
    try:
        for ntype, names in names_of.items() if session.topology.num_servers > 1 else ():
            halo = find_ids(ntype)
            for name in names:
                column = store.column(name)
                if column.cache is not None or column.ahead is not None:
                    continue
                num_bytes = session.num_servers_on_machine * len(halo) * column.row_bytes
                is_too_large = 4 * num_bytes > machine_memory()[1]
                if not gather_int64([int(is_too_large)], session).any():
                    cache = fill_cache(store, column, f"halo-{store.next_number()}", halo)
                    store.set_cache(name, cache, is_frozen=True)
                    held_names.append(name)
        yield
    finally:
        for name in held_names:
            store.set_cache(name, None, is_frozen=True)


POLICIES = ("vip", "degree", "halo", LOOK_AHEAD)
TRAIN_MASK = "train_mask"

Fanouts: TypeAlias = Sequence[int | Mapping[str | EdgeType, int]]
"""Fan-outs as in a sampler: one per layer, input-most first, each a number or a dict by edge type."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CacheRequest:
    """Arguments that ``g.cache_rows`` received."""

    name: str
    ntype: str
    alpha: float
    policy: str
    seeds: Ids | Mapping[str, Ids] | None
    fanouts: Fanouts | None
    batch_size: int | None

    def check(self) -> None:
        check_budget(self.policy, self.alpha)
        if self.policy == "vip":
            self._check_vip()
        elif (self.seeds, self.fanouts, self.batch_size) != (None, None, None):
            raise ConfigError(f"seeds=, fanouts= and batch_size= are for policy='vip', not {self.policy!r}.")

    def _check_vip(self) -> None:
        if self.fanouts is None or self.batch_size is None:
            missing = "fanouts" if self.fanouts is None else "batch_size"
            raise ConfigError(
                f"policy='vip' computes how often batches need each row. Pass the loader's {missing}=, or "
                "use policy='halo', which needs neither fanouts nor batch_size."
            )
        check_integer("batch_size", self.batch_size, least=1)
        if not len(self.fanouts):
            raise ConfigError("fanouts is empty. Pass one per layer, input-most first, e.g. [25, 10].")


def check_budget(policy: str, alpha: float) -> None:
    if policy not in POLICIES:
        raise ConfigError(f"policy={policy!r}. Choose one of {', '.join(map(repr, POLICIES))}.")
    is_number = isinstance(alpha, (int, float)) and not isinstance(alpha, bool)
    if not is_number or not 0 <= alpha < math.inf:
        raise ConfigError(f"alpha={alpha!r}. Pass the budget as a fraction of the server's rows, 0 or more.")


def cache_rows(g: OpenedGraph, request: CacheRequest) -> CachePlan:
    """Cache the rows on other servers that batches need most. Every rank passes the same request."""
    session, store = g.session, g.kvstore
    column = run_on_all_ranks(session, lambda: _find_column(g, request), ConfigError)
    arguments = [request.name, request.ntype, float(request.alpha), request.policy]
    check_equal(session, "cache_rows", arguments, "pass the same arguments on all ranks")
    topology = session.topology
    first, end = column.bounds[topology.server : topology.server + 2].tolist()
    cache_id = store.next_number()
    if request.policy == LOOK_AHEAD:
        return _open_look_ahead(store, column, request.alpha, (first, end))
    scores = _SCORES[request.policy](g, request, f"scores-{cache_id}")
    is_leader = topology.local_rank == 0
    top_ids = NO_IDS
    hit_rate = None
    if is_leader:
        top_ids = select_top_rows(scores, (first, end), int(request.alpha * (end - first)))
        if request.policy == "vip":
            hit_rate = compute_hit_rate(scores, (first, end), top_ids)

    cache = fill_cache(store, column, f"cache-{cache_id}", top_ids)
    # Set the cache even if no row has a score, so that all ranks agree on whether there is a cache.
    store.set_cache(column.name, cache if request.alpha > 0 else None)
    hit_rate = gather_json(hit_rate, session)[topology.ranks_of_server(topology.server)[0]]
    plan = CachePlan(
        policy=request.policy,
        rows=len(cache.rows),
        bytes=sum(array.nbytes for array in (cache.rows, *cache.table)),
        expected_hit_rate=hit_rate,
    )
    if is_leader:
        log.info("server %d caches %s: %s", topology.server, column.name, plan)
    return plan


def count_rows_of_rank(alpha: float, local_range: tuple[int, int], num_rows: int, num_ranks: int) -> int:
    """Return the maximum number of rows that each rank on a server keeps with ``lookahead``.

    ``local_range`` holds the server's first row and end.
    """
    num_local_rows = local_range[1] - local_range[0]
    return min(int(alpha * num_local_rows) // num_ranks, num_rows - num_local_rows)


def _open_look_ahead(store: KVStore, column: Column, alpha: float, local_range: tuple[int, int]) -> CachePlan:
    """Give each rank its own space for rows in announced batches. Every rank must call it.

    Raises ConfigError on all ranks if a server's space does not fit in its free memory.
    """
    topology = store.session.topology
    max_rows = []
    for server, server_range in enumerate(pairwise(column.bounds.tolist())):
        num_ranks = len(topology.ranks_of_server(server))
        max_rows.append(count_rows_of_rank(alpha, server_range, column.num_rows, num_ranks))
    num_rows = max_rows[topology.server]

    def allocate() -> LookAheadRows:
        num_ranks = len(topology.ranks_of_server(topology.server))
        _, free_bytes = machine_memory()
        if num_ranks * num_rows * column.row_bytes > free_bytes:
            raise ConfigError(
                f"{num_ranks} x {num_rows} rows of {column.row_bytes} bytes of "
                f"{column.name!r} exceed the free memory. Use a smaller alpha."
            )
        return LookAheadRows(num_rows, column.info, local_range, column.num_rows)

    rows = run_on_all_ranks(store.session, allocate, ConfigError)
    # Set a cache on all ranks or on none. If no rank keeps rows, a cache has no use and would only cost a
    # thread.
    keeps_rows = any(max_rows)
    store.set_cache(column.name, None, rows if keeps_rows else None)
    num_bytes = rows.num_bytes if keeps_rows else 0
    return CachePlan(policy=LOOK_AHEAD, rows=num_rows, bytes=num_bytes, expected_hit_rate=None)


def _find_column(g: OpenedGraph, request: CacheRequest) -> Column:
    """Return the column to cache. Raise ConfigError if the request is invalid or the column is writable."""
    request.check()
    policy = g.get_node_partition_policy(request.ntype)
    data = g.nodes[request.ntype].data
    if request.name not in data:
        raise ConfigError(
            f"nodes of type {request.ntype!r} have no tensor {request.name!r} "
            f"(known: {', '.join(map(repr, data)) or 'none'})"
        )
    column = policy.store.column(policy.key(request.name))
    check_cacheable(column)
    return column


def _degree_scores(g: OpenedGraph, request: CacheRequest, _file_name: str) -> Array:
    """Count the out-edges at each row, as (N,). Ranks that do not choose rows may return (0,)."""
    is_leader = g.session.topology.local_rank == 0
    total = np.zeros(0, np.int64)
    for etype in _select_etypes_from(g, request.ntype):
        structure = g.structure(etype)
        # One rank per server counts the edges that the server holds.
        counts = count_sources(structure.shards if is_leader else (), structure.num_sources)
        if not structure.is_replicated:
            tensor = torch.from_numpy(counts)
            counts = sum_over_ranks(tensor, g.session, phase=PHASE_ROW_CACHE, in_place=True).numpy()
        total = counts if not len(total) else total + counts
    return total


def _halo_scores(g: OpenedGraph, request: CacheRequest, _file_name: str) -> Array:
    return _count_halo_edges(g, request.ntype)


def _count_halo_edges(g: OpenedGraph, ntype: str) -> Array:
    """Return the (N,) number of edges from each remote node to this server. Only its first rank counts."""
    server = g.session.topology.server
    total = np.zeros(g.num_nodes(ntype), np.int64)
    if g.session.topology.local_rank == 0:
        for etype in _select_etypes_from(g, ntype):
            bounds = g.get_node_partition_policy(etype[2]).bounds
            structure = g.structure(etype)
            local_range = int(bounds[server]), int(bounds[server + 1])
            total += count_sources(structure.shards, structure.num_sources, local_range)
        first, end = g.get_node_partition_policy(ntype).bounds[server : server + 2]
        total[first:end] = 0
    return total


def compute_vip_scores(g: OpenedGraph, request: CacheRequest, file_name: str) -> Array:
    """Return how many ranks on the server need each row per step on average, in memory that they share."""
    rank_scores = run_on_all_ranks(g.session, lambda: _compute_local_access(g, request), ConfigError)
    info = ColumnInfo(dtype="float64", row_shape=())
    total = map_shared_rows(g.session, file_name, len(rank_scores), info)
    topology = g.session.topology
    max_ranks = max(len(topology.ranks_of_server(server)) for server in range(topology.num_servers))
    # A server's ranks add one after the other. All servers take part in the same number of barriers.
    for local_rank in range(max_ranks):
        if topology.local_rank == local_rank:
            total += rank_scores
        barrier(g.session, f"adding up what batches need ({local_rank})")
    return total


def _compute_local_access(g: OpenedGraph, request: CacheRequest) -> Array:
    """Return the probability that this rank's batch needs each row. Not collective."""
    structures = {etype: g.structure(etype) for etype in g.canonical_etypes}
    if not all(structure.is_replicated for structure in structures.values()):
        raise ConfigError(
            "policy='vip' needs all edges, but this server holds only its own. Use "
            "policy='degree' or 'halo', or open the graph with structure='replicated'."
        )
    assert request.fanouts is not None
    assert request.batch_size is not None
    fanouts = [read_fanouts(fanout, g.canonical_etypes) for fanout in request.fanouts]
    for layer in fanouts:
        for fanout in layer.values():
            if fanout < -1:
                raise ConfigError(f"fanouts={request.fanouts} contains {fanout}. Use -1 for all edges.")

    shards = {etype: structure.shards[0] for etype, structure in structures.items()}
    num_nodes = {ntype: g.num_nodes(ntype) for ntype in g.ntypes}
    seeds = _find_seeds(g, request)
    probability = compute_access_probability(shards, num_nodes, seeds, fanouts, request.batch_size)
    return probability[request.ntype]


def _find_seeds(g: OpenedGraph, request: CacheRequest) -> dict[str, Array]:
    """Return this rank's training nodes by node type, from the request's seeds or from the mask."""
    if request.seeds is not None:
        num_nodes = {ntype: g.num_nodes(ntype) for ntype in g.ntypes}
        try:
            seeds = group_by_type(request.seeds, num_nodes, "node")
        except IndexError as error:
            # Raise a DglxError, because other ranks receive only errors of this class.
            raise ConfigError(f"seeds: {error}") from error
        return {ntype: np.unique(ids) for ntype, ids in seeds.items()}

    book = g.get_partition_book()
    seeds = {}
    for ntype in g.ntypes:
        data = g.nodes[ntype].data
        if TRAIN_MASK in data:
            seeds[ntype] = node_split(data[TRAIN_MASK], book, ntype).numpy()
    if not seeds:
        raise ConfigError(f"the nodes have no {TRAIN_MASK!r}. Pass this rank's training nodes as seeds=.")
    return seeds


def _select_etypes_from(g: OpenedGraph, ntype: str) -> list[EdgeType]:
    return [etype for etype in g.canonical_etypes if etype[0] == ntype]


_SCORES: Mapping[str, Callable[[OpenedGraph, CacheRequest, str], Array]] = {
    "vip": compute_vip_scores,
    "degree": _degree_scores,
    "halo": _halo_scores,
}
