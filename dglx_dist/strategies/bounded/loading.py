"""What a graph server reads of the graph before the first epoch: structure, boundary lists, features.

Ghosts' features come here once; no epoch sends them (Dorylus, section 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from dglx_dist.cluster.collectives import barrier
from dglx_dist.cluster.session import Session
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dtypes import torch_dtype
from dglx_dist.graph.owners import RowOwners
from dglx_dist.records import Array
from dglx_dist.strategies.bounded.local_graph import LocalGraph, local_graph

if TYPE_CHECKING:
    from dglx_dist.graph import DistGraph

GHOST_IDS = "lambda.ghost_ids"
PRELOAD = "preload"
"""Phase of the ledger: 8 bytes per ghost for the lists, 8 + s F per ghost of another server for features."""


def read_structure(g: DistGraph) -> LocalGraph:
    """Return this rank's part of ``g``, of one edge type: a server's nodes are cut evenly over its ranks.

    Raises:
        ConfigError: the graph has several node or edge types.
    """
    if len(g.canonical_etypes) != 1 or len(g.ntypes) != 1:
        raise ConfigError(
            f"strategy 'lambda' trains on one node and one edge type, not on {g.ntypes} and "
            f"{g.canonical_etypes}; use strategy='data_parallel'"
        )
    rank = g.session.topology.rank
    starts = RowOwners(g.get_node_partition_policy(g.ntypes[0]).bounds, g.session.topology).starts
    own = np.arange(starts[rank], starts[rank + 1], dtype=np.int64)
    edges = g.structure(g.canonical_etypes[0]).ask("in_edges", own)
    return local_graph(rank, starts, edges.indptr, edges.sources)


def exchange_boundaries(session: Session, graph: LocalGraph) -> list[Array]:
    """Return, per peer, (b,) int32 own nodes that it has as ghosts, ascending. Collective.

    Raises:
        PeerError: a rank is dead or silent.
        ConfigError: the ranks do not have the same partition.
    """

    def answer(name: str, _arrays: Sequence[Array]) -> list[Array]:
        if not name.isdecimal() or int(name) >= graph.num_servers:
            raise ConfigError(f"{name[:20]!r} is no graph server; there are {graph.num_servers}")
        return [graph.ghost_ids(int(name))]

    session.rpc.register(GHOST_IDS, answer)
    barrier(session, "listing the ghosts of all graph servers")
    mine = str(graph.rank)
    asked = [
        session.rpc.submit(peer, GHOST_IDS, mine, [], phase=PRELOAD) for peer in range(graph.num_servers)
    ]
    lists = [pending.result()[0] for pending in asked]
    barrier(session, "exchanging the ghosts of all graph servers")
    session.rpc.unregister(GHOST_IDS)
    return [graph.own_positions(ids, peer) for peer, ids in enumerate(lists)]


def read_features(g: DistGraph, graph: LocalGraph, name: str, dtype: str) -> Array:
    """Return (n + m, F) features of own nodes and ghosts.

    Args:
        g: The graph.
        graph: This rank's part.
        name: Of the node data, (N, F).
        dtype: Of the result.

    Raises:
        ConfigError: the data has not one row of numbers per node.
    """
    column = g.ndata[name]
    if len(column.shape) != 2:
        raise ConfigError(f"node data {name!r} has the shape {tuple(column.shape)}; features are (N, F)")
    own = np.arange(graph.starts[graph.rank], graph.starts[graph.rank + 1], dtype=np.int64)
    ids = np.concatenate([own, graph.ghosts])
    rows = g.kvstore.pull(column.kvstore_key, ids, distinct=True, phase=PRELOAD)
    # torch converts: NumPy has no bfloat16.
    return np.ascontiguousarray(rows.to(torch_dtype(dtype)).numpy())
