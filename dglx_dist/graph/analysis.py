"""Analyses of a complete graph: neighborhood expansion of servers, and ids of reverse edges."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias

import numpy as np
import torch
from numba import njit
from torch import Tensor

from dglx_dist.comm.collectives import check_equal, run_on_all_ranks
from dglx_dist.comm.topology import Topology
from dglx_dist.data.storage.reader import StoredDataset
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.dist_tensor import DistTensor
from dglx_dist.graph.partition_book import Placement
from dglx_dist.progress import progress
from dglx_dist.records import Array, EdgeType

_SERVERS_PER_PASS = 64  # One bit of a word for each server.
_MIN_EDGES_FOR_PROGRESS = 1 << 24


@dataclass(frozen=True, kw_only=True)
class Expansion:
    """Sizes of the k-hop in-neighborhoods of all servers. See docs/strategies/shared_preload.md."""

    nodes: Array
    """(K + 1, S) int64 number of nodes within h hops of a server's own nodes. Row 0 counts the own nodes."""
    edges: Array
    """(K + 1, S) int64 number of in-edges of these nodes, which a layer that computes them aggregates."""

    @property
    def hops(self) -> int:
        return len(self.nodes) - 1

    @property
    def factors(self) -> Array:
        """(K + 1, S) float64 nodes per own node of the server: D_i of a model of h layers."""
        return np.asarray(self.nodes / np.maximum(self.nodes[0], 1))

    @property
    def foreign(self) -> Array:
        """(K + 1, S) int64 number of remote nodes. Their features are preloaded for a model of h layers."""
        return np.asarray(self.nodes - self.nodes[0])

    @property
    def work(self) -> Array:
        """(K + 1, S) float64 edges that a preloaded model of h layers aggregates, relative to no replicas.

        The layers compute the neighborhoods of 0 to h - 1 hops. The value is 1 for no layers.
        """
        layers = np.arange(1, self.hops + 1)[:, np.newaxis]
        relative_work = self.edges[:-1].cumsum(axis=0) / (layers * np.maximum(self.edges[0], 1))
        # A server without in-edges has no work to divide by.
        relative_work[:, self.edges[0] == 0] = 1.0
        return np.concatenate([np.ones((1, self.nodes.shape[1])), relative_work])


def measure_expansion(dataset: StoredDataset, servers: int, hops: int) -> Expansion:
    """Return the sizes of the k-hop in-neighborhoods of ``servers`` servers. Any process can call this alone.

    The dataset has one node and one edge type, and all its parts are on this machine. It is streamed: memory
    is a few bytes per node, and a hop reads only the in-edges of the nodes that the previous hop reached.
    Raises ConfigError if there are several types, no servers, fewer parts than servers, or negative ``hops``,
    and StorageError if a part is not on this machine, or damaged.
    """
    manifest = dataset.manifest
    if len(manifest.node_types) != 1 or len(manifest.edge_types) != 1:
        raise ConfigError(
            f"{dataset.folder} has {len(manifest.node_types)} node and {len(manifest.edge_types)} edge "
            "types, but neighborhoods are preloaded for graphs with one of each. Partition one relation of "
            "it."
        )
    (etype,) = manifest.edge_types
    if hops < 0 or servers < 1:
        raise ConfigError(f"hops={hops} must be at least 0 and servers={servers} at least 1")
    placement = Placement(manifest.num_parts, Topology(0, servers, tuple(range(servers))))
    bounds = placement.server_offsets(manifest.node_offsets[etype[2]])
    passes = -(-servers // _SERVERS_PER_PASS)
    edges = manifest.num_edges(etype)
    is_long = edges * hops > _MIN_EDGES_FOR_PROGRESS
    with progress("Following in-edges", edges * passes, enabled=is_long) as advance:
        sizes = []
        for first in range(0, servers, _SERVERS_PER_PASS):
            pass_bounds = bounds[first : first + _SERVERS_PER_PASS + 1]
            sizes.append(_count_neighborhoods(dataset, etype, pass_bounds, hops))
            advance(edges)
    num_nodes, num_edges = (np.concatenate(parts, axis=1) for parts in zip(*sizes, strict=True))
    return Expansion(nodes=num_nodes, edges=num_edges)


def _count_neighborhoods(
    dataset: StoredDataset, etype: EdgeType, bounds: Array, hops: int
) -> tuple[Array, Array]:
    """Return the (K + 1, S) int64 nodes and in-edges within 0 to ``hops`` hops of at most 64 servers.

    ``bounds`` are the (S + 1,) first own nodes. Each node has one bit per server that tells whether it is in
    the neighborhood of that server.
    """
    servers = len(bounds) - 1
    offsets = dataset.manifest.node_offsets[etype[2]].tolist()
    kinds = (np.uint8, np.uint16, np.uint32, np.uint64)
    dtype = next(kind for kind in kinds if np.iinfo(kind).bits >= servers)
    bits: Array = np.zeros(offsets[-1], dtype)
    for server in range(servers):
        bits[bounds[server] : bounds[server + 1]] = dtype(1 << server)
    new_bits = bits
    counts_by_hop = []
    for hop in range(hops + 1):
        if hop:
            previous_bits = bits
            bits = bits.copy()
            for number, (first, end) in enumerate(pairwise(offsets)):
                part = dataset.part(number)
                _set_bits_of_sources(part.indptr(etype), part.indices(etype), new_bits[first:end], bits)
            new_bits = bits & ~previous_bits
        counts = np.zeros((2, _SERVERS_PER_PASS), np.int64)
        for number, (first, end) in enumerate(pairwise(offsets)):
            _count(dataset.part(number).indptr(etype), bits[first:end], counts)
        counts_by_hop.append(counts[:, :servers])
    nodes, edges = np.stack(counts_by_hop, axis=1)
    return nodes, edges


@njit(cache=True, nogil=True)
def _set_bits_of_sources(indptr: Array, indices: Array, new_bits: Array, bits: Array) -> None:
    for node in range(len(new_bits)):
        if new_bits[node]:
            for edge in range(indptr[node], indptr[node + 1]):
                bits[indices[edge]] |= new_bits[node]


@njit(cache=True, nogil=True)
def _count(indptr: Array, bits_of_node: Array, counts: Array) -> None:
    for node in range(len(bits_of_node)):
        bits = np.uint64(bits_of_node[node])
        server = 0
        while bits != np.uint64(0):
            if bits & np.uint64(1):
                counts[0, server] += 1
                counts[1, server] += indptr[node + 1] - indptr[node]
            bits >>= np.uint64(1)
            server += 1


Matching: TypeAlias = Literal["endpoints", "half", "position"]

NO_REVERSE = -1
"""Id of a missing reverse edge."""


def reverse_edge_ids(
    g: DistGraph,
    etype: str | EdgeType | None = None,
    *,
    reverse_etype: str | EdgeType | None = None,
    by: Matching = "endpoints",
) -> DistTensor:
    """Return the id of the reverse of every edge. Every rank must call this.

    Partitioning gives edges new ids, so reverse edges by the ids of the source are wrong here. Pass the
    result as ``reverse_eids``. A second call with the same arguments only compares them between the ranks.

    Args:
        etype: Edge type. It may be None if there is one.
        reverse_etype: Type of the reverse edges. The default is ``etype``.
        by: How edges are matched.

            * ``endpoints``: the reverse of u -> v is v -> u. Parallel edges are matched in the order of the
              source's list. One rank of each server sorts all edges of both types once.
            * ``half``: edge i of the source matches i + E/2, as ``dgl.add_reverse_edges`` appends them.
            * ``position``: edge i of the source matches edge i of ``reverse_etype``, as in DGL's
              ``exclude="reverse_types"``.

    Returns:
        (E,) int64 edge ids of ``reverse_etype``, distributed like the edges. -1 means that there is none.

    Raises:
        ConfigError: on all ranks, if their arguments differ, if the types do not join the same node types in
            opposite directions, for ``half`` with an odd number of edges or two types, or for ``position``
            with one type or different numbers of edges.
    """

    def check() -> tuple[EdgeType, EdgeType]:
        kind = g.to_canonical_etype(etype)
        back = kind if reverse_etype is None else g.to_canonical_etype(reverse_etype)
        _check_matching(g, kind, back, by)
        return kind, back

    kind, back = run_on_all_ranks(g.session, check, ConfigError)
    remedy = "pass the same arguments on all ranks"
    check_equal(g.session, "reverse_edges", [list(kind), list(back), by], remedy)

    def compute(_shape: tuple[int, ...], _dtype: torch.dtype) -> Tensor:
        first, last = policy.bounds[policy.part_id : policy.part_id + 2].tolist()
        if by == "endpoints":
            forward = _list_edges(g, kind)
            backward = forward if back == kind else _list_edges(g, back)
            return torch.from_numpy(match_reverse(forward, backward)[first:last])
        places = g.orig_edge_ids(np.arange(first, last), kind).numpy()
        if by == "half":
            half = g.num_edges(kind) // 2
            places = np.where(places < half, places + half, places - half)
        ids = np.arange(g.num_edges(back))
        id_at = np.empty_like(ids)  # id by position in the source's list
        id_at[g.orig_edge_ids(ids, back).numpy()] = ids
        return torch.from_numpy(id_at[places])

    policy = g.get_edge_partition_policy(kind)
    name = f"reverse-{by}-{':'.join(back)}"
    return DistTensor((g.num_edges(kind),), torch.int64, name, compute, policy, is_gdata=False, graph=g)


def match_reverse(forward: tuple[Array, Array, Array], backward: tuple[Array, Array, Array]) -> Array:
    """Return, for each forward edge u -> v, the position of a backward edge v -> u, or -1.

    Both are (sources, destinations, rank among parallel edges), int64. No backward edge is chosen twice.
    """
    width = max(int(ends.max(initial=0)) for ends in (forward[1], backward[0])) + 1
    order, keys = _sort_edges(forward[0] * width + forward[1], forward[2])
    back_order, back_keys = _sort_edges(backward[1] * width + backward[0], backward[2])
    nth = np.arange(len(keys)) - np.searchsorted(keys, keys)
    places = np.searchsorted(back_keys, keys) + nth
    exists = places < len(back_keys)
    exists[exists] = back_keys[places[exists]] == keys[exists]
    out = np.full(len(keys), NO_REVERSE, np.int64)
    out[order[exists]] = back_order[places[exists]]
    return out


def _sort_edges(keys: Array, rank: Array) -> tuple[Array, Array]:
    # Two stable sorts of one column each are several times faster than lexsort.
    by_rank = np.argsort(rank, kind="stable")
    order = by_rank[np.argsort(keys[by_rank], kind="stable")]
    return order, keys[order]


def _list_edges(g: DistGraph, etype: EdgeType) -> tuple[Array, Array, Array]:
    ids = np.arange(g.num_edges(etype))
    sources, destinations = g.find_edges(ids, etype)
    return sources.numpy(), destinations.numpy(), g.orig_edge_ids(ids, etype).numpy()


def _check_matching(g: DistGraph, etype: EdgeType, back: EdgeType, by: str) -> None:
    if by not in ("endpoints", "half", "position"):
        raise ConfigError(f"by={by!r}. Choose 'endpoints', 'half' or 'position'.")
    if (back[0], back[2]) != (etype[2], etype[0]):
        raise ConfigError(
            f"edges of {back} cannot be the reverse of {etype}. They must lead from {etype[2]!r} to "
            f"{etype[0]!r}."
        )
    num_edges = g.num_edges(etype)
    num_back = g.num_edges(back)
    if by == "half" and (etype != back or num_edges % 2):
        raise ConfigError(
            f"by='half' pairs the first half of one edge type with its second, but {etype} has {num_edges} "
            f"edges (reverse type {back}). Use by='endpoints'."
        )
    if by == "position" and (etype == back or num_edges != num_back):
        raise ConfigError(
            f"by='position' pairs edges of two types one to one, but {etype} has {num_edges} edges and "
            f"{back} has {num_back}. Use by='endpoints'."
        )
