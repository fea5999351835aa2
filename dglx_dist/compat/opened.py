"""Which of the open graphs is meant: that of a book or a store, else the only one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from dglx_dist.cluster.session import current_session
from dglx_dist.errors import ConfigError
from dglx_dist.graph import DistGraph
from dglx_dist.graph.dist_tensor import opened_graph
from dglx_dist.graph.kvstore import KVStore
from dglx_dist.graph.partition_book import PartitionBook
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, EdgeType

_GRAPHS = "compat.graphs"


def remember_graph(g: DistGraph) -> None:
    """Note that ``g`` is open, until it is closed or the session ends."""
    graphs = cast("list[DistGraph]", g.session.attached.setdefault(_GRAPHS, []))
    graphs.append(g)
    g.on_close.append(lambda: graphs.remove(g))


def graph_of_book(book: PartitionBook | None) -> DistGraph:
    """Return the open graph whose book this is.

    Args:
        book: Of a graph, or read from a file, whose partitions then are not the servers of this run; None:
            of the only graph.

    Raises:
        ConfigError: no graph is open, ``book`` is of none of them, or several could be meant.
    """
    graphs = _open_graphs()
    own = [g for g in graphs if g.get_partition_book() is book]
    alike = own or [g for g in graphs if book is None or _rows(g.get_partition_book()) == _rows(book)]
    names = ", ".join(repr(g.name) for g in graphs)
    if not alike:
        raise ConfigError(
            f"the partition book is of none of the open graphs ({names}); give g.get_partition_book()"
        )
    if len({g.dataset.manifest.checksum for g in alike}) > 1:
        raise ConfigError(f"several graphs are open ({names}); say which: give g.get_partition_book()")
    return alike[-1]


def graph_of_store(store: KVStore) -> DistGraph:
    """Return the open graph whose tensors are in ``store``.

    Raises:
        ConfigError: it is closed.
    """
    for g in _open_graphs():
        if g.kvstore is store:
            return g
    raise ConfigError("the graph of this store is closed; ask the store of one that is open, g._client")


def node_type(g: DistGraph, ntype: str) -> str:
    """Return ``ntype``; of a graph of one type, whatever it is called, that one for DGL's default."""
    return g.ntypes[0] if ntype == NODE_TYPE and len(g.ntypes) == 1 else ntype


def edge_type(g: DistGraph, etype: str | EdgeType) -> str | EdgeType:
    """Return ``etype``; of a graph of one type, whatever it is called, that one for DGL's default."""
    of_dgl = etype in (EDGE_TYPE, EDGE_TYPE[1])
    return g.canonical_etypes[0] if of_dgl and len(g.canonical_etypes) == 1 else etype


def _open_graphs() -> Sequence[DistGraph]:
    last = opened_graph()
    graphs = cast("list[DistGraph]", current_session().attached.get(_GRAPHS, []))
    return [*(g for g in graphs if g is not last), last]


def _rows(book: PartitionBook) -> dict[str | EdgeType, int]:
    """Return the number of rows of each type."""
    nodes: dict[str | EdgeType, int] = {ntype: book.num_nodes(ntype) for ntype in book.ntypes}
    return {**nodes, **{etype: book.num_edges(etype) for etype in book.canonical_etypes}}
