"""``g.cache_rows``: choice of the remote rows that a server caches, and filling of the cache."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
from dglx_dist.comm.devices import resolve_device
from dglx_dist.data.storage.columns import IDS
from dglx_dist.errors import ConfigError
from dglx_dist.graph.column import Column, DeviceRows, LookAheadRows, RowCache, check_cacheable
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
    """Return the probability that a batch of a rank needs each node as an input (SALIENT++, section 3.2).

    A seed is in a batch with p_0 = batch size / number of seeds, and a node u in the batch draws k of its
    deg(u) in-edges at each later hop, as in DGL's blocks. Hops 1 to h miss an edge v -> u with probability

        m_h(v -> u) = 1 - q_{h-1}(u) + sum over j < h of (q_j - q_{j-1})(u) * (1 - min(1, k / deg(u)))^(h-j)

    (k may differ from hop to hop), and v is in the batch after hop h with

        q_h(v) = 1 - (1 - p_0(v)) * product over the edges v -> u of m_h(v -> u),

    assuming independent edges of all types. For the nodes that join at the previous hop, this is the
    paper's p_h(v) = 1 - prod (1 - min(1, k / deg(u)) p_{h-1}(u)). O(edges) per hop.

    Args:
        shards: Edge type to its whole structure.
        num_nodes: Node type to N.
        seeds: Node type to the (T,) int64 distinct ids that the rank trains on.
        fanouts: Edge type to k, one mapping per layer, input-most first as for the samplers; -1: all.
        batch_size: Seeds of all types in one batch.
    """
    total = sum(len(ids) for ids in seeds.values())
    first = {ntype: np.zeros(count) for ntype, count in num_nodes.items()}
    for ntype, ids in seeds.items():
        first[ntype][ids] = min(1.0, batch_size / total) if total else 0.0
    seen, joined = first, first
    not_drawn = {etype: np.zeros(num_nodes[etype[2]]) for etype in shards}
    for hop in reversed(fanouts):
        log_missed = {ntype: np.zeros(count) for ntype, count in num_nodes.items()}
        for etype, shard in shards.items():
            source, _, destination = etype
            frontier = _Frontier(seen[destination], joined[destination], not_drawn[etype])
            _add_log_missed(
                shard.indptr, shard.indices, shard.first_node, frontier, hop[etype], log_missed[source]
            )
        now = {ntype: 1.0 - (1.0 - first[ntype]) * np.exp(missed) for ntype, missed in log_missed.items()}
        joined = {ntype: now[ntype] - seen[ntype] for ntype in now}
        seen = now
    return seen


class _Frontier(NamedTuple):
    """The destinations of an edge type before a hop, each (N,) float64."""

    seen: Array
    """Probability of being in the batch."""
    joined: Array
    """Probability of having joined at the previous hop."""
    not_drawn: Array
    """Probability of having joined earlier, with one given in-edge not drawn so far; updated by the hop."""


def select_top_rows(scores: Array, own: tuple[int, int], budget: int) -> Array:
    """Return the (C,) int64 ids of the at most ``budget`` rows with the highest of (N,) scores, ascending.

    Rows of score 0 and those of the local server, ``own`` = (first, end), are left out; of equal scores the
    smaller ids are taken.
    """
    wanted = scores.copy()
    wanted[own[0] : own[1]] = 0
    budget = min(budget, int(np.count_nonzero(wanted)))
    if budget == 0:
        return np.empty(0, np.int64)
    least = np.partition(wanted, len(wanted) - budget)[len(wanted) - budget]
    above = np.flatnonzero(wanted > least)
    equal = np.flatnonzero(wanted == least)[: budget - len(above)]
    return np.sort(np.concatenate([above, equal])).astype(np.int64)


def compute_hit_rate(scores: Array, own: tuple[int, int], cached: Array) -> float | None:
    """Return the share of ``cached`` rows in the remote scores; None when all of these are 0."""
    remote = float(scores[: own[0]].sum() + scores[own[1] :].sum())
    return float(scores[cached].sum()) / remote if remote > 0 else None


@njit(cache=True, nogil=True)
def _add_log_missed(
    indptr: Array, indices: Array, first_node: int, frontier: _Frontier, fanout: int, log_missed: Array
) -> None:
    """Add the log of the probability that no edge of v has been drawn so far to ``log_missed[v]``."""
    for row in range(len(indptr) - 1):
        node = first_node + row
        degree = indptr[row + 1] - indptr[row]
        if frontier.seen[node] > 0 and degree > 0:
            share = 1.0 if fanout < 0 or fanout >= degree else fanout / degree
            frontier.not_drawn[node] = (frontier.not_drawn[node] + frontier.joined[node]) * (1.0 - share)
            # Rounding may give slightly less than 0.
            missed = max(0.0, 1.0 - frontier.seen[node] + frontier.not_drawn[node])
            log = np.log(missed)
            for edge in range(indptr[row], indptr[row + 1]):
                log_missed[np.uint64(indices[np.uint64(edge)])] += log


LOOK_AHEAD = "lookahead"
PHASE_ROW_CACHE = "cache"
"""Ledger phase of filling caches."""


@dataclass(frozen=True, kw_only=True)
class CachePlan:
    """One server's cache of one column."""

    policy: str
    rows: int
    """Rows of other servers in this server's cache; of any server in that of this rank's device. With
    ``lookahead`` the most that this rank keeps."""
    bytes: int
    """Memory for these rows and the table that finds them: the server's, or this rank's; the table of
    ``lookahead`` grows with the batches that it knows."""
    expected_hit_rate: float | None
    """Share of hits among remote rows (on a device: among all) that the policy's model predicts; None where
    it has none."""


def fill_cache(store: KVStore, column: Column, file_name: str, ids: Array) -> RowCache:
    """Fetch rows of other servers into memory that the ranks of this server share; collective.

    ``ids``: (C,) int64 distinct ids to keep, on the first rank of each server. ``file_name`` begins unused
    names of shared memory.
    """
    session = store.session
    leader = session.topology.ranks_of_server(session.topology.server)[0]
    count = int(gather_int64([len(ids)], session)[leader, 0])
    num_slots, num_keys = compute_table_sizes(count, column.num_rows) if count else (0, 0)
    pull = partial(store.pull, column.name, ids, distinct=True, phase=PHASE_ROW_CACHE)

    def filled(shape: tuple[int, ...], _dtype: torch.dtype) -> Tensor:
        slots = np.empty(shape, np.int32)
        fill_table(SlotTable(slots, keys), ids)
        return torch.from_numpy(slots)

    rows = map_shared_rows(session, f"{file_name}.rows", count, column.info, lambda *_: pull())
    keys = map_shared_rows(session, f"{file_name}.keys", num_keys, IDS)
    of_slots = ColumnInfo(dtype="int32", row_shape=())
    slots = map_shared_rows(session, f"{file_name}.slots", num_slots, of_slots, filled)
    return RowCache(table=SlotTable(slots, keys), rows=rows)


def device_rows(store: KVStore, column: Column, ids: Array, device: torch.device) -> DeviceRows:
    """Fetch (C,) int64 distinct ``ids`` of any server to ``device``. Every rank calls it, with its own ids.

    Raises:
        ConfigError: on all ranks, when the rows of one do not fit.
    """
    session = store.session
    num_slots, num_keys = compute_table_sizes(len(ids), column.num_rows) if len(ids) else (0, 0)
    table = SlotTable(np.empty(num_slots, np.int32), np.empty(num_keys, np.int64))
    fill_table(table, ids)
    rows = run_on_all_ranks(
        session, lambda: store.pull(column.name, ids, distinct=True, phase=PHASE_ROW_CACHE)
    )

    def placed() -> DeviceRows:
        try:
            return DeviceRows(table=table, rows=rows.to(device))
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(
                f"{len(ids)} rows of {column.row_bytes} bytes of {column.name!r} cannot be kept on {device} "
                f"({reason}); use a smaller alpha, or leave device= out to keep them in the server's memory"
            ) from error

    return run_on_all_ranks(session, placed, ConfigError)


POLICIES = ("vip", "degree", "halo", LOOK_AHEAD)
TRAIN_MASK = "train_mask"

Fanouts: TypeAlias = Sequence[int | Mapping[str | EdgeType, int]]
"""As a sampler's: one per layer, input-most first; a number, or one per edge type; -1: all."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CacheRequest:
    """Arguments of ``g.cache_rows``."""

    name: str
    ntype: str
    alpha: float
    policy: str
    seeds: Ids | Mapping[str, Ids] | None
    fanouts: Fanouts | None
    batch_size: int | None
    device: torch.device | str | None = None

    def check(self) -> None:
        check_budget(self.policy, self.alpha)
        if self.policy == "vip":
            self._check_vip()
        elif (self.seeds, self.fanouts, self.batch_size) != (None, None, None):
            raise ConfigError(
                f"seeds=, fanouts= and batch_size= are for policy='vip', and the policy is {self.policy!r}"
            )
        if self.policy == LOOK_AHEAD and self.device is not None:
            raise ConfigError(
                "policy='lookahead' keeps rows in host memory; leave device= out, or use another policy"
            )

    def _check_vip(self) -> None:
        if self.fanouts is None or self.batch_size is None:
            missing = "fanouts" if self.fanouts is None else "batch_size"
            raise ConfigError(
                f"policy='vip' computes how often batches need each row: give {missing}= as for the loader, "
                "or use policy='halo', which needs neither"
            )
        check_integer("batch_size", self.batch_size, least=1)
        if not len(self.fanouts):
            raise ConfigError("fanouts is empty; give one per layer, input-most first, e.g. [25, 10]")


def check_budget(policy: str, alpha: float) -> None:
    if policy not in POLICIES:
        raise ConfigError(f"policy={policy!r}; choose one of {', '.join(map(repr, POLICIES))}")
    is_number = isinstance(alpha, (int, float)) and not isinstance(alpha, bool)
    if not is_number or not 0 <= alpha < math.inf:
        raise ConfigError(
            f"alpha={alpha!r}; give the budget as a fraction of the server's own rows, 0 or more"
        )


def cache_rows(g: OpenedGraph, request: CacheRequest) -> CachePlan:
    session, store = g.session, g.kvstore
    column, device = run_on_all_ranks(session, lambda: _column_of(g, request), ConfigError)
    arguments = [request.name, request.ntype, float(request.alpha), request.policy, device and device.type]
    check_equal(session, "cache_rows", arguments, "give it the same arguments on all ranks")
    topology = session.topology
    own = int(column.bounds[topology.server]), int(column.bounds[topology.server + 1])
    budget, number = int(request.alpha * (own[1] - own[0])), store.next_number()
    if request.policy == LOOK_AHEAD:
        return _look_ahead(store, column, request.alpha, own)
    scores = _SCORES[request.policy](g, request, f"scores-{number}")
    # Rows of the local server are worth a place on a device.
    chooses, own = (True, (0, 0)) if device is not None else (topology.local_rank == 0, own)
    chosen = select_top_rows(scores, own, budget) if chooses else NO_IDS
    has_rate = chooses and request.policy == "vip"
    rate = compute_hit_rate(scores, own, chosen) if has_rate else None
    cache: RowCache | DeviceRows
    # It is set also when no row has a score, so that all ranks agree on whether there is a cache.
    if device is not None:
        # Freed first, or both would add to the peak of the device's memory.
        store.set_device_rows(column.name, None)
        column = store.column(column.name)
        cache, who = device_rows(store, column, chosen, device), f"rank {topology.rank} on {device}"
        store.set_device_rows(column.name, cache if request.alpha > 0 else None)
    else:
        cache, who = fill_cache(store, column, f"cache-{number}", chosen), f"server {topology.server}"
        store.set_cache(column.name, cache if request.alpha > 0 else None)
        rate = gather_json(rate, session)[topology.ranks_of_server(topology.server)[0]]
    plan = CachePlan(
        policy=request.policy,
        rows=len(cache.rows),
        bytes=sum(one.nbytes for one in (cache.rows, *cache.table)),
        expected_hit_rate=rate,
    )
    if chooses:
        log.info("%s caches %s: %s", who, column.name, plan)
    return plan


def count_rows_of_rank(alpha: float, own: tuple[int, int], num_rows: int, num_ranks: int) -> int:
    """Return the most remote rows that each rank of the server of rows ``own`` keeps with ``lookahead``."""
    num_own = own[1] - own[0]
    return min(int(alpha * num_own) // num_ranks, num_rows - num_own)


def _look_ahead(store: KVStore, column: Column, alpha: float, own: tuple[int, int]) -> CachePlan:
    topology, server = store.session.topology, store.session.topology.server
    ranks = [len(topology.ranks_of_server(number)) for number in range(topology.num_servers)]
    counts = [
        count_rows_of_rank(alpha, of_server, column.num_rows, num)
        for of_server, num in zip(pairwise(column.bounds.tolist()), ranks, strict=True)
    ]
    count = counts[server]

    def made() -> LookAheadRows:
        if ranks[server] * count * column.row_bytes > machine_memory()[1]:
            raise ConfigError(
                f"{ranks[server]} x {count} rows of {column.row_bytes} bytes of {column.name!r} exceed the "
                "free memory; use a smaller alpha"
            )
        return LookAheadRows(count, column.info, own, column.num_rows)

    rows = run_on_all_ranks(store.session, made, ConfigError)
    # All ranks agree on whether there is a cache; one without rows would only cost a thread.
    store.set_cache(column.name, None, rows if any(counts) else None)
    num_bytes = rows.num_bytes if any(counts) else 0
    return CachePlan(policy=LOOK_AHEAD, rows=count, bytes=num_bytes, expected_hit_rate=None)


def _column_of(g: OpenedGraph, request: CacheRequest) -> tuple[Column, torch.device | None]:
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
    return column, None if request.device is None else resolve_device(request.device, g.session.device)


def _degree_scores(g: OpenedGraph, request: CacheRequest, _file_name: str) -> Array:
    """Return each row's number of out-edges in the whole graph; (0,) on some ranks that choose no rows."""
    is_leader, total = g.session.topology.local_rank == 0, np.zeros(0, np.int64)
    for etype in _from(g, request.ntype):
        structure = g.structure(etype)
        if structure.is_replicated:
            chooses = is_leader or request.device is not None
            counts = count_sources(structure.shards, structure.num_sources) if chooses else total
        else:
            # Each server counts the edges it holds, on one of its ranks.
            held = count_sources(structure.shards if is_leader else (), structure.num_sources)
            counts = sum_over_ranks(
                torch.from_numpy(held), g.session, phase=PHASE_ROW_CACHE, in_place=True
            ).numpy()
        total = counts if not len(total) else total + counts
    return total


def _halo_scores(g: OpenedGraph, request: CacheRequest, _file_name: str) -> Array:
    server, total = g.session.topology.server, np.zeros(g.num_nodes(request.ntype), np.int64)
    if g.session.topology.local_rank == 0 or request.device is not None:
        for etype in _from(g, request.ntype):
            bounds, structure = g.get_node_partition_policy(etype[2]).bounds, g.structure(etype)
            own = int(bounds[server]), int(bounds[server + 1])
            total += count_sources(structure.shards, structure.num_sources, own)
    return total


def compute_vip_scores(g: OpenedGraph, request: CacheRequest, file_name: str) -> Array:
    """Return how many of the server's ranks need each row per step, on average; in memory that they share.

    For a cache on a device, the need of this rank alone.
    """
    local = run_on_all_ranks(g.session, lambda: _access_of_rank(g, request), ConfigError)
    if request.device is not None:
        return local
    info = ColumnInfo(dtype="float64", row_shape=())
    total = map_shared_rows(g.session, file_name, len(local), info)
    topology = g.session.topology
    for turn in range(max(len(topology.ranks_of_server(s)) for s in range(topology.num_servers))):
        if topology.local_rank == turn:
            total += local
        barrier(g.session, f"adding up what batches need ({turn})")
    return total


def _access_of_rank(g: OpenedGraph, request: CacheRequest) -> Array:
    structures = {etype: g.structure(etype) for etype in g.canonical_etypes}
    if not all(structure.is_replicated for structure in structures.values()):
        raise ConfigError(
            "policy='vip' needs all edges, and this server holds only its own; use "
            "policy='degree' or 'halo', or open the graph with structure='replicated'"
        )
    assert request.fanouts is not None
    assert request.batch_size is not None
    fanouts = [read_fanouts(fanout, g.canonical_etypes) for fanout in request.fanouts]
    wrong = [size for layer in fanouts for size in layer.values() if size < -1]
    if wrong:
        raise ConfigError(f"fanouts={request.fanouts}; {wrong[0]} must be 0 or more, or -1 for all")
    return compute_access_probability(
        {etype: structure.shards[0] for etype, structure in structures.items()},
        {ntype: g.num_nodes(ntype) for ntype in g.ntypes},
        _seeds(g, request),
        fanouts,
        request.batch_size,
    )[request.ntype]


def _seeds(g: OpenedGraph, request: CacheRequest) -> dict[str, Array]:
    counts = {ntype: g.num_nodes(ntype) for ntype in g.ntypes}
    if request.seeds is not None:
        try:
            return {
                ntype: np.unique(ids) for ntype, ids in group_by_type(request.seeds, counts, "node").items()
            }
        except IndexError as error:
            # A DglxError, so that the other ranks receive it.
            raise ConfigError(f"seeds: {error}") from error
    masked = [ntype for ntype in g.ntypes if TRAIN_MASK in g.nodes[ntype].data]
    if not masked:
        raise ConfigError(f"the nodes have no {TRAIN_MASK!r}; give seeds=, this rank's training nodes")
    book = g.get_partition_book()
    return {ntype: node_split(g.nodes[ntype].data[TRAIN_MASK], book, ntype).numpy() for ntype in masked}


def _from(g: OpenedGraph, ntype: str) -> list[EdgeType]:
    return [etype for etype in g.canonical_etypes if etype[0] == ntype]


_SCORES: Mapping[str, Callable[[OpenedGraph, CacheRequest, str], Array]] = {
    "vip": compute_vip_scores,
    "degree": _degree_scores,
    "halo": _halo_scores,
}
