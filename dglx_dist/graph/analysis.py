"""How a server's neighbourhood grows with each hop, from the parts on disk: the price of preloading it.

The dataset is streamed: memory is a few bytes per node, and a hop reads the in-edges of those nodes only that
the hop before has found.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import torch
from numba import njit
from torch import Tensor

from dglx_dist.comm.collectives import gather_json
from dglx_dist.comm.session import Session
from dglx_dist.comm.topology import Topology
from dglx_dist.data.storage.reader import StoredDataset
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.dist_tensor import DistTensor
from dglx_dist.graph.opening import together
from dglx_dist.graph.partition_book import Placement
from dglx_dist.progress import progress
from dglx_dist.records import Array, EdgeType

_TOGETHER = 64
"""Servers whose marks fit a word."""
_WORTH_TELLING = 1 << 24
"""Edges from which on one wants to see how far it is."""


@dataclass(frozen=True, kw_only=True)
class Expansion:
    """The closures of all servers, hop by hop: R_i^L, R_i^(L-1), ... of algorithms 3.1, for all own nodes."""

    nodes: Array
    """(K + 1, S) int64 nodes within h hops of a server's own, its own included; row 0 are its own."""
    edges: Array
    """(K + 1, S) int64 in-edges of these: what a layer that computes them aggregates."""

    @property
    def hops(self) -> int:
        """K."""
        return len(self.nodes) - 1

    @property
    def factors(self) -> Array:
        """(K + 1, S) float64: nodes per node of the server's own, D_i of a model of h layers."""
        return np.asarray(self.nodes / np.maximum(self.nodes[0], 1))

    @property
    def foreign(self) -> Array:
        """(K + 1, S) int64: nodes of other servers, whose features are preloaded for h layers."""
        return np.asarray(self.nodes - self.nodes[0])

    @property
    def work(self) -> Array:
        """(K + 1, S) float64: edges that a preloaded model of h layers aggregates, by those without replicas.

        Its layers compute the closures of 0 to h - 1 hops; 1 for no layers.
        """
        layers = np.arange(1, self.hops + 1)[:, np.newaxis]
        summed = self.edges[:-1].cumsum(axis=0) / (layers * np.maximum(self.edges[0], 1))
        # A server without in-edges has no work to compare with.
        summed[:, self.edges[0] == 0] = 1.0
        return np.concatenate([np.ones((1, self.nodes.shape[1])), summed])


def measure_expansion(dataset: StoredDataset, servers: int, hops: int) -> Expansion:
    """Return how the in-neighbourhoods of ``servers`` servers grow; any process alone.

    Args:
        dataset: With all its parts on this machine; of one node and one edge type.
        servers: Each has an equal number of consecutive parts, as far as it goes.
        hops: K, at least 0.

    Raises:
        ConfigError: there are several types, no servers, fewer parts than servers, or ``hops`` is below 0.
        StorageError: a part is not on this machine, or damaged.
    """
    etype = _only_etype(dataset)
    if hops < 0 or servers < 1:
        raise ConfigError(f"hops={hops} must be at least 0 and servers={servers} at least 1")
    placement = Placement(dataset.manifest.num_parts, Topology(0, servers, tuple(range(servers))))
    bounds = placement.server_offsets(dataset.manifest.node_offsets[etype[2]])
    passes = -(-servers // _TOGETHER)
    edges = dataset.manifest.num_edges(etype)
    with progress("Following in-edges", edges * passes, enabled=edges * hops > _WORTH_TELLING) as advance:
        found = []
        for first in range(0, servers, _TOGETHER):
            some = bounds[first : first + _TOGETHER + 1]
            found.append(_Marks(dataset, etype, some).follow(hops))
            advance(edges)
    nodes, counted = (np.concatenate(parts, axis=1) for parts in zip(*found, strict=True))
    return Expansion(nodes=nodes, edges=counted)


def _only_etype(dataset: StoredDataset) -> EdgeType:
    manifest = dataset.manifest
    if len(manifest.node_types) != 1 or len(manifest.edge_types) != 1:
        raise ConfigError(
            f"{dataset.folder} has {len(manifest.node_types)} node and {len(manifest.edge_types)} edge "
            "types, and neighbourhoods are preloaded for graphs of one of each; partition one relation of it"
        )
    return manifest.edge_types[0]


class _Marks:
    """Which servers need a node, a bit for each.

    Args:
        dataset: With all its parts.
        etype: Whose edges are followed.
        bounds: (S + 1,) first own nodes of at most 64 servers.
    """

    def __init__(self, dataset: StoredDataset, etype: EdgeType, bounds: Array) -> None:
        self._dataset, self._etype = dataset, etype
        self._offsets = dataset.manifest.node_offsets[etype[2]]
        self._servers = len(bounds) - 1
        dtype = next(
            kind
            for kind in (np.uint8, np.uint16, np.uint32, np.uint64)
            if np.iinfo(kind).bits >= self._servers
        )
        self._marks: Array = np.zeros(int(self._offsets[-1]), dtype)
        for server in range(self._servers):
            self._marks[bounds[server] : bounds[server + 1]] = dtype(1 << server)
        self._fresh: Array = self._marks.copy()

    def follow(self, hops: int) -> tuple[Array, Array]:
        """Return (K + 1, S) int64 nodes and in-edges within 0 to ``hops`` hops."""
        nodes, edges = [], []
        for hop in range(hops + 1):
            if hop:
                self._spread()
            counts = np.zeros((2, _TOGETHER), np.int64)
            for part in range(self._dataset.manifest.num_parts):
                own = slice(int(self._offsets[part]), int(self._offsets[part + 1]))
                _count(self._dataset.part(part).indptr(self._etype), self._marks[own], counts)
            nodes.append(counts[0, : self._servers])
            edges.append(counts[1, : self._servers])
        return np.stack(nodes), np.stack(edges)

    def _spread(self) -> None:
        """Mark the sources of all in-edges of nodes that were marked in the hop before."""
        marks = self._marks.copy()
        for number in range(self._dataset.manifest.num_parts):
            part = self._dataset.part(number)
            fresh = self._fresh[int(self._offsets[number]) : int(self._offsets[number + 1])]
            _mark_sources(part.indptr(self._etype), part.indices(self._etype), fresh, marks)
        self._fresh = marks & ~self._marks
        self._marks = marks


@njit(cache=True, nogil=True)
def _mark_sources(indptr: Array, indices: Array, fresh: Array, marks: Array) -> None:
    for node in range(len(fresh)):
        if fresh[node]:
            for edge in range(indptr[node], indptr[node + 1]):
                marks[indices[edge]] |= fresh[node]


@njit(cache=True, nogil=True)
def _count(indptr: Array, marks: Array, counts: Array) -> None:
    for node in range(len(marks)):
        bits = np.uint64(marks[node])
        server = 0
        while bits != np.uint64(0):
            if bits & np.uint64(1):
                counts[0, server] += 1
                counts[1, server] += indptr[node + 1] - indptr[node]
            bits >>= np.uint64(1)
            server += 1


Matching: TypeAlias = Literal["endpoints", "half", "position"]
"""How reverse edges are found: by their ends, or by their place in the source's list of edges."""

NO_REVERSE = -1
"""In place of a reverse edge where there is none."""


def reverse_edge_ids(
    g: DistGraph,
    etype: str | EdgeType | None = None,
    *,
    reverse_etype: str | EdgeType | None = None,
    by: Matching = "endpoints",
) -> DistTensor:
    """Return, for every edge, the id of its reverse. Every rank must call it.

    Partitioning gives edges new ids, so a list of reverse edges made for the source's ids is wrong here. Use
    what this returns as ``reverse_eids``. The second call for the same compares what the ranks ask for, and
    costs no more than that.

    * ``endpoints``: the reverse of u -> v is v -> u; of parallel edges the first in the source's list goes
      with the first, and so on. One rank of each server sorts all edges of both types once.
    * ``half``: the source's edge i goes with i + E/2, as ``dgl.add_reverse_edges`` appends them.
    * ``position``: the source's edge i of ``etype`` goes with edge i of ``reverse_etype``, as DGL's
      ``exclude="reverse_types"`` has it.

    Args:
        g: The distributed graph.
        etype: Edge type; None when there is one.
        reverse_etype: Type of the reverse edges; None: the same.
        by: How.

    Returns:
        (E,) int64 edge ids of ``reverse_etype``, -1 where there is none; it lies with the edges.

    Raises:
        ConfigError: on all ranks: ranks ask for different ones; the types do not join the same node types
            the other way round; ``half`` with an odd number of edges or two types; ``position`` with one
            type or different numbers of edges.
    """

    def asked() -> tuple[EdgeType, EdgeType]:
        kind = _only(g) if etype is None else g.to_canonical_etype(etype)
        back = kind if reverse_etype is None else g.to_canonical_etype(reverse_etype)
        _check(g, kind, back, by)
        return kind, back

    kind, back = together(g.session, asked, ConfigError)
    _check_alike(g.session, [list(kind), list(back), by])

    def compute(_shape: tuple[int, ...], _dtype: torch.dtype) -> Tensor:
        first, last = (int(at) for at in policy.bounds[policy.part_id : policy.part_id + 2])
        if by == "endpoints":
            return torch.from_numpy(_by_endpoints(g, kind, back)[first:last])
        places = g.orig_edge_ids(np.arange(first, last), kind).numpy()
        if by == "half":
            half = g.num_edges(kind) // 2
            places = np.where(places < half, places + half, places - half)
        return torch.from_numpy(_id_at(g, back)[places])

    policy = g.get_edge_partition_policy(kind)
    name = f"reverse-{by}-{':'.join(back)}"
    return DistTensor((g.num_edges(kind),), torch.int64, name, compute, policy, is_gdata=False, graph=g)


def match_reverse(forward: tuple[Array, Array, Array], backward: tuple[Array, Array, Array]) -> Array:
    """Return, for each forward edge u -> v, the position of a backward edge v -> u, or -1.

    Args:
        forward: (sources, destinations, rank among parallel edges), (E,) int64 each.
        backward: The same of the (E',) edges to choose from; each is chosen at most once.
    """
    width = max(int(ends.max(initial=0)) for ends in (forward[1], backward[0])) + 1
    ordered, keys = _sorted(forward[0] * width + forward[1], forward[2])
    against, found = _sorted(backward[1] * width + backward[0], backward[2])
    nth = np.arange(len(keys)) - np.searchsorted(keys, keys)
    places = np.searchsorted(found, keys) + nth
    exists = places < len(found)
    exists[exists] = found[places[exists]] == keys[exists]
    out = np.full(len(keys), NO_REVERSE, np.int64)
    out[ordered[exists]] = against[places[exists]]
    return out


def _sorted(keys: Array, rank: Array) -> tuple[Array, Array]:
    """Return the order of ``keys``, equal ones by ``rank``, and the keys in it."""
    # Two stable sorts of one column each are several times faster than lexsort.
    by_rank = np.argsort(rank, kind="stable")
    order = by_rank[np.argsort(keys[by_rank], kind="stable")]
    return order, keys[order]


def _by_endpoints(g: DistGraph, etype: EdgeType, back: EdgeType) -> Array:
    """Return the (E,) reverse of every edge, found by their ends."""
    forward = _all_edges(g, etype)
    return match_reverse(forward, forward if back == etype else _all_edges(g, back))


def _all_edges(g: DistGraph, etype: EdgeType) -> tuple[Array, Array, Array]:
    ids = np.arange(g.num_edges(etype))
    sources, destinations = g.find_edges(ids, etype)
    return sources.numpy(), destinations.numpy(), g.orig_edge_ids(ids, etype).numpy()


def _id_at(g: DistGraph, etype: EdgeType) -> Array:
    """Return the (E,) id of the edge at each position of the source's list."""
    ids = np.arange(g.num_edges(etype))
    at = np.empty_like(ids)
    at[g.orig_edge_ids(ids, etype).numpy()] = ids
    return at


def _only(g: DistGraph) -> EdgeType:
    if len(g.canonical_etypes) != 1:
        raise ConfigError(
            f"the graph has the edge types {', '.join(g.etypes)}; say which with etype= (and reverse_etype=)"
        )
    return g.canonical_etypes[0]


def _check_alike(session: Session, mine: list[object]) -> None:
    """Look whether all ranks ask for the same; collective."""
    for rank, other in enumerate(gather_json(mine, session)):
        if other != mine:
            raise ConfigError(
                f"rank {session.topology.rank} asks for the reverse edges {mine} while rank {rank} asks for "
                f"{other}; ask alike on all ranks"
            )


def _check(g: DistGraph, etype: EdgeType, back: EdgeType, by: str) -> None:
    if by not in ("endpoints", "half", "position"):
        raise ConfigError(f"by={by!r}; choose 'endpoints', 'half' or 'position'")
    if (back[0], back[2]) != (etype[2], etype[0]):
        raise ConfigError(
            f"edges of {back} cannot be the reverse of {etype}: they must lead from {etype[2]!r} to "
            f"{etype[0]!r}"
        )
    edges, others = g.num_edges(etype), g.num_edges(back)
    if by == "half" and (etype != back or edges % 2):
        raise ConfigError(
            f"by='half' pairs the first half of one edge type with its second, and {etype} has {edges} edges "
            f"(reverse type {back}); use by='endpoints'"
        )
    if by == "position" and (etype == back or edges != others):
        raise ConfigError(
            f"by='position' pairs edges of two types one to one, and {etype} has {edges} edges, {back} "
            f"{others}; use by='endpoints'"
        )
