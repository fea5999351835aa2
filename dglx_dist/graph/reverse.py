"""Which edge is the reverse of which, in the ids of a partitioned graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from dglx_dist.cluster.collectives import gather_json
from dglx_dist.cluster.session import Session
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_tensor import DistTensor
from dglx_dist.graph.opening import together
from dglx_dist.records import Array, EdgeType

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph

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
