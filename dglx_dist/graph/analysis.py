"""Analyses on a complete graph: how far servers' neighborhoods expand, and which edges are reversed."""

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
    """Sizes of all servers' k-hop in-neighborhoods. See docs/strategies/shared_preload.md."""

    nodes: Array
    """(K + 1, S) int64 node counts within h hops from a server's own nodes. Row 0 counts the own nodes."""
    edges: Array
    """(K + 1, S) int64 in-edge counts at these nodes. A layer that computes the nodes aggregates them."""

    @property
    def hops(self) -> int:
        return len(self.nodes) - 1

    @property
    def factors(self) -> Array:
        """(K + 1, S) float64 expansion: nodes per own node on each server, D_i for a model with h layers."""
        return np.asarray(self.nodes / np.maximum(self.nodes[0], 1))

    @property
    def foreign(self) -> Array:
        """(K + 1, S) int64 counts of remote nodes. Their features are preloaded for a model with h layers."""
        return np.asarray(self.nodes - self.nodes[0])

    @property
    def work(self) -> Array:
        """(K + 1, S) float64 edges that a preloaded model with h layers aggregates, relative to no replicas.

        The layers compute the neighborhoods at 0 to h - 1 hops. The value is 1 for no layers.
        """
        num_layers = np.arange(1, self.hops + 1)[:, np.newaxis]
        edges_without_replicas = num_layers * np.maximum(self.edges[0], 1)
        relative_work = self.edges[:-1].cumsum(axis=0) / edges_without_replicas
        # A server without in-edges has no work to divide by.
        relative_work[:, self.edges[0] == 0] = 1.0
        return np.concatenate([np.ones((1, self.nodes.shape[1])), relative_work])


def measure_expansion(dataset: StoredDataset, servers: int, hops: int) -> Expansion:
    """Measure the k-hop in-neighborhoods of ``servers`` servers. Any process can call this alone.

    The dataset has one node and one edge type, and all its parts are on this machine. Memory is a few bytes
    per node. A hop reads only the in-edges of the nodes that the previous hop reached. Raises ConfigError if
    there are several types, no servers, fewer parts than servers, or negative ``hops``. Raises StorageError
    if a part is damaged or not on this machine.
    """
    manifest = dataset.manifest
    num_types = len(manifest.node_types), len(manifest.edge_types)
    if num_types != (1, 1):
        raise ConfigError(
            f"{dataset.location} has {num_types[0]} node and {num_types[1]} edge types, but neighborhoods "
            "are preloaded for graphs with one of each. Partition one relation of it."
        )
    if hops < 0 or servers < 1:
        raise ConfigError(f"hops={hops} must be at least 0 and servers={servers} at least 1")

    (etype,) = manifest.edge_types
    placement = Placement(manifest.num_parts, Topology(0, servers, tuple(range(servers))))
    bounds = placement.server_offsets(manifest.node_offsets[etype[2]])
    first_servers = range(0, servers, _SERVERS_PER_PASS)
    num_edges = manifest.num_edges(etype)
    is_long = num_edges * hops > _MIN_EDGES_FOR_PROGRESS
    counts_by_pass = []
    with progress("Following in-edges", num_edges * len(first_servers), enabled=is_long) as advance:
        for first in first_servers:
            pass_bounds = bounds[first : first + _SERVERS_PER_PASS + 1]
            counts_by_pass.append(_count_neighborhoods(dataset, etype, pass_bounds, hops))
            advance(num_edges)
    nodes, edges = np.concatenate(counts_by_pass, axis=2)
    return Expansion(nodes=nodes, edges=edges)


def _count_neighborhoods(dataset: StoredDataset, etype: EdgeType, bounds: Array, hops: int) -> Array:
    """Count nodes and in-edges within 0 to K ``hops`` from at most 64 servers, as (2, K + 1, S)."""
    num_servers = len(bounds) - 1
    offsets = dataset.manifest.node_offsets[etype[2]].tolist()
    dtypes = (np.uint8, np.uint16, np.uint32, np.uint64)
    dtype = next(dtype for dtype in dtypes if np.iinfo(dtype).bits >= num_servers)
    # A node's bit s tells whether the node is in server s's neighborhood.
    bits: Array = np.zeros(offsets[-1], dtype)
    for server in range(num_servers):
        bits[bounds[server] : bounds[server + 1]] = dtype(1 << server)

    new_bits = bits
    counts_by_hop = []
    for hop in range(hops + 1):
        # Hop 0 counts the own nodes. A later hop follows the in-edges of the new nodes.
        if hop > 0:
            previous_bits = bits
            bits = bits.copy()
            for part_id, (first, end) in enumerate(pairwise(offsets)):
                part = dataset.part(part_id)
                indptr = part.indptr(etype)
                _set_bits_of_sources(indptr, part.indices(etype), new_bits[first:end], bits)
            new_bits = bits & ~previous_bits
        counts = np.zeros((2, _SERVERS_PER_PASS), np.int64)
        for part_id, (first, end) in enumerate(pairwise(offsets)):
            _count(dataset.part(part_id).indptr(etype), bits[first:end], counts)
        counts_by_hop.append(counts[:, :num_servers])
    return np.stack(counts_by_hop, axis=1)


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
"""Id for a missing reverse edge."""


def reverse_edge_ids(
    g: DistGraph,
    etype: str | EdgeType | None = None,
    *,
    reverse_etype: str | EdgeType | None = None,
    by: Matching = "endpoints",
) -> DistTensor:
    """Find the reverse edge for every edge. Every rank must call this.

    Partitioning gives edges new ids, so reverse edges by the source's ids are wrong here. Pass the result as
    ``reverse_eids``. A second call with the same arguments only compares them between the ranks.

    Args:
        etype: Edge type. It may be None if there is one.
        reverse_etype: Type that the reverse edges have. The default is ``etype``.
        by: How edges are matched.

            * ``endpoints``: v -> u is the reverse of u -> v. Parallel edges are matched in the order of the
              source's list. One rank per server sorts all edges of both types once.
            * ``half``: edge i in the source matches i + E/2, as ``dgl.add_reverse_edges`` appends them.
            * ``position``: edge i in the source matches edge i of type ``reverse_etype``, as in DGL's
              ``exclude="reverse_types"``.

    Returns:
        (E,) int64 edge ids of type ``reverse_etype``, distributed like the edges. -1 means that there is
        none.

    Raises:
        ConfigError: on all ranks, if their arguments differ, or the types do not join the same node types in
            opposite directions. ``half`` needs one type and an even edge count. ``position`` needs two types
            with equal edge counts.
    """

    def check_types() -> tuple[EdgeType, EdgeType]:
        forward = g.to_canonical_etype(etype)
        back = forward if reverse_etype is None else g.to_canonical_etype(reverse_etype)
        _check_matching(g, forward, back, by)
        return forward, back

    forward, back = run_on_all_ranks(g.session, check_types, ConfigError)
    remedy = "pass the same arguments on all ranks"
    check_equal(g.session, "reverse_edges", [list(forward), list(back), by], remedy)
    policy = g.get_edge_partition_policy(forward)

    def compute(_shape: tuple[int, ...], _dtype: torch.dtype) -> Tensor:
        first, end = policy.bounds[policy.part_id : policy.part_id + 2].tolist()
        if by == "endpoints":
            edges = _list_edges(g, forward)
            back_edges = edges if back == forward else _list_edges(g, back)
            return torch.from_numpy(match_reverse(edges, back_edges)[first:end])
        return torch.from_numpy(_match_positions(g, forward, back, (first, end), by))

    name = f"reverse-{by}-{':'.join(back)}"
    shape = (g.num_edges(forward),)
    return DistTensor(shape, torch.int64, name, compute, policy, is_gdata=False, graph=g)


def _match_positions(
    g: DistGraph, forward: EdgeType, back: EdgeType, edge_range: tuple[int, int], by: Matching
) -> Array:
    """Return reverse edges for the edges ``edge_range`` (first, end), for ``half`` and ``position``."""
    positions = g.orig_edge_ids(np.arange(*edge_range), forward).numpy()
    if by == "half":
        half = g.num_edges(forward) // 2
        positions = np.where(positions < half, positions + half, positions - half)
    ids = np.arange(g.num_edges(back))
    id_of_position = np.empty_like(ids)
    id_of_position[g.orig_edge_ids(ids, back).numpy()] = ids
    return id_of_position[positions]


def match_reverse(forward: tuple[Array, Array, Array], backward: tuple[Array, Array, Array]) -> Array:
    """Find a backward edge v -> u for each forward edge u -> v. Return its position, or -1 if there is none.

    Both are (sources, destinations, order among parallel edges), int64. No backward edge is chosen twice.
    """
    # An edge u -> v and its reverse have the same key u * width + v.
    sources, destinations, edge_order = forward
    back_sources, back_destinations, back_edge_order = backward
    width = max(int(ids.max(initial=0)) for ids in (destinations, back_sources)) + 1
    order, keys = _sort_edges(sources * width + destinations, edge_order)
    back_order, back_keys = _sort_edges(back_destinations * width + back_sources, back_edge_order)

    # The n-th parallel edge matches the n-th backward edge with the same key, if there is one.
    index_among_parallel = np.arange(len(keys)) - np.searchsorted(keys, keys)
    candidates = np.searchsorted(back_keys, keys) + index_among_parallel
    has_reverse = candidates < len(back_keys)
    has_reverse[has_reverse] = back_keys[candidates[has_reverse]] == keys[has_reverse]
    reverse_positions = np.full(len(keys), NO_REVERSE, np.int64)
    reverse_positions[order[has_reverse]] = back_order[candidates[has_reverse]]
    return reverse_positions


def _sort_edges(keys: Array, edge_order: Array) -> tuple[Array, Array]:
    """Sort edges by key, and parallel edges by ``edge_order``. Return the permutation and sorted keys."""
    # Two stable sorts, each by one column, are several times faster than lexsort.
    permutation = np.argsort(edge_order, kind="stable")
    permutation = permutation[np.argsort(keys[permutation], kind="stable")]
    return permutation, keys[permutation]


def _list_edges(g: DistGraph, etype: EdgeType) -> tuple[Array, Array, Array]:
    ids = np.arange(g.num_edges(etype))
    sources, destinations = g.find_edges(ids, etype)
    return sources.numpy(), destinations.numpy(), g.orig_edge_ids(ids, etype).numpy()


def _check_matching(g: DistGraph, etype: EdgeType, back: EdgeType, by: str) -> None:
    """Raise ConfigError if ``by`` is unknown, or cannot match these edge types."""
    if by not in ("endpoints", "half", "position"):
        raise ConfigError(f"by={by!r}. Choose 'endpoints', 'half' or 'position'.")
    if (back[0], back[2]) != (etype[2], etype[0]):
        raise ConfigError(
            f"edges of {back} cannot be the reverse of {etype}. They must lead from "
            f"{etype[2]!r} to {etype[0]!r}."
        )

    num_edges = g.num_edges(etype)
    num_back = g.num_edges(back)
    if by == "half" and (etype != back or num_edges % 2):
        raise ConfigError(
            f"by='half' pairs the first half of one edge type with its second, but {etype} "
            f"has {num_edges} edges (reverse type {back}). Use by='endpoints'."
        )
    if by == "position" and (etype == back or num_edges != num_back):
        raise ConfigError(
            f"by='position' pairs edges of two types one to one, but {etype} has {num_edges} "
            f"edges and {back} has {num_back}. Use by='endpoints'."
        )
