"""DGL's partition books and policies around ours."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast, final

import numpy as np
import torch
from torch import Tensor

from dglx_dist.comm.session import SessionField, current_session
from dglx_dist.compat.wrappers import Forward
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.dist_tensor import opened_graph
from dglx_dist.graph.ids import Ids, as_ids
from dglx_dist.graph.kvstore import KVStore
from dglx_dist.graph.partition_book import PartitionBook
from dglx_dist.graph.partition_policy import PartitionPolicy as InnerPartitionPolicy
from dglx_dist.graph.partition_policy import type_text
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, Array, EdgeType

K = TypeVar("K")


class GraphPartitionBook(ABC):  # noqa: B024 - for isinstance; there is one kind
    """Base class of partition books, as scripts name it in ``isinstance``."""


@final
class RangePartitionBook(GraphPartitionBook):
    """Contiguous ids per type and partition, with DGL's methods.

    Without a type, ids of a graph of several types are *homogeneous*: one numbering for all types.

    Args:
        part_id: The own partition.
        num_parts: P.
        node_map: Node type to its (P, 2) homogeneous id ranges.
        edge_map: Edge type to its (P, 2).
        ntypes: Node type to its number.
        etypes: Edge type to its number.

    Raises:
        ConfigError: the maps do not fit each other, or do not number ids as DGL does.
    """

    def __init__(
        self,
        part_id: int,
        num_parts: int,
        node_map: Mapping[str, Any],
        edge_map: Mapping[EdgeType, Any],
        ntypes: Mapping[str, int],
        etypes: Mapping[EdgeType, int],
    ) -> None:
        if not 0 <= part_id < num_parts:
            raise ConfigError(f"part_id is {part_id}; there are {num_parts} parts, numbered from 0")
        if not ntypes or not etypes:
            raise ConfigError("a book needs node types and edge types; give ntypes and etypes")
        nodes = {ntype: _bounds(node_map, ntype, num_parts) for ntype in _by_number(ntypes)}
        edges = {etype: _bounds(edge_map, etype, num_parts) for etype in _by_number(etypes)}
        self.inner = PartitionBook(nodes, edges, part_id)
        for kind, ids in ((node_map, self.inner.map_to_homo_nid), (edge_map, self.inner.map_to_homo_eid)):
            _check_numbering(kind, ids)

    @staticmethod
    def over(book: PartitionBook) -> RangePartitionBook:
        """Return DGL's view of one of our books."""
        made = RangePartitionBook.__new__(RangePartitionBook)
        made.inner = book
        return made

    @property
    def partid(self) -> int:
        """The partition of this rank."""
        return self.inner.partid

    ntypes = Forward(PartitionBook.ntypes)
    etypes = Forward(PartitionBook.etypes)
    canonical_etypes = Forward(PartitionBook.canonical_etypes)
    num_partitions = Forward(PartitionBook.num_partitions)
    metadata = Forward(PartitionBook.metadata)
    to_canonical_etype = Forward(PartitionBook.to_canonical_etype)
    map_to_per_ntype = Forward(PartitionBook.map_to_per_ntype)
    map_to_per_etype = Forward(PartitionBook.map_to_per_etype)
    map_to_homo_nid = Forward(PartitionBook.map_to_homo_nid)
    map_to_homo_eid = Forward(PartitionBook.map_to_homo_eid)

    @property
    def is_homogeneous(self) -> bool:
        return len(self.ntypes) == 1 and len(self.etypes) == 1

    @property
    def global_nid_dtype(self) -> torch.dtype:
        """int64; newer versions of DGL have it."""
        return torch.int64

    @property
    def global_eid_dtype(self) -> torch.dtype:
        return torch.int64

    @property
    def local_ntype_offset(self) -> list[int]:
        """(types + 1) offsets of the node types among the own partition's nodes."""
        return _offsets([self.inner.node_bounds(ntype) for ntype in self.ntypes], self.partid)

    @property
    def local_etype_offset(self) -> list[int]:
        return _offsets([self.inner.edge_bounds(etype) for etype in self.canonical_etypes], self.partid)

    def shared_memory(self, graph_name: str) -> None:
        """Refused: always a ConfigError."""
        raise ConfigError("every rank has the book, which is a few numbers; leave shared_memory() out")

    def nid2partid(self, nids: Ids, ntype: str = NODE_TYPE) -> Tensor:
        if self._homogeneous_nodes(ntype):
            return _owner(nids, self._ends(nodes=True))
        return self.inner.nid2partid(nids, ntype)

    def eid2partid(self, eids: Ids, etype: str | EdgeType = EDGE_TYPE) -> Tensor:
        if self._homogeneous_edges(etype):
            return _owner(eids, self._ends(nodes=False))
        return self.inner.eid2partid(eids, etype)

    def partid2nids(self, partid: int, ntype: str = NODE_TYPE) -> Tensor:
        if self._homogeneous_nodes(ntype):
            return torch.arange(*self._range(partid, nodes=True))
        return self.inner.partid2nids(int(partid), ntype)

    def partid2eids(self, partid: int, etype: str | EdgeType = EDGE_TYPE) -> Tensor:
        if self._homogeneous_edges(etype):
            return torch.arange(*self._range(partid, nodes=False))
        return self.inner.partid2eids(int(partid), etype)

    def nid2localnid(self, nids: Ids, partid: int, ntype: str = NODE_TYPE) -> Tensor:
        """Return the ids counted from the first node of ``partid``, which owns them."""
        if self._homogeneous_nodes(ntype):
            return _local(nids, self._range(partid, nodes=True))
        return self.inner.nid2localnid(nids, int(partid), ntype)

    def eid2localeid(self, eids: Ids, partid: int, etype: str | EdgeType = EDGE_TYPE) -> Tensor:
        """Return the ids counted from the first edge of ``partid``, which owns them."""
        if self._homogeneous_edges(etype):
            return _local(eids, self._range(partid, nodes=False))
        return self.inner.eid2localeid(eids, int(partid), etype)

    def _homogeneous_nodes(self, ntype: str) -> bool:
        return ntype == NODE_TYPE and NODE_TYPE not in self.ntypes

    def _homogeneous_edges(self, etype: str | EdgeType) -> bool:
        return etype in (EDGE_TYPE, EDGE_TYPE[1]) and EDGE_TYPE not in self.canonical_etypes

    def _ends(self, *, nodes: bool) -> Array:
        name = "num_nodes" if nodes else "num_edges"
        return np.cumsum([one[name] for one in self.metadata()])

    def _range(self, partid: int, *, nodes: bool) -> tuple[int, int]:
        ends = self._ends(nodes=nodes)
        if not 0 <= partid < len(ends):
            raise ConfigError(f"there is no partition {partid}; they are 0 to {len(ends) - 1}")
        return int(ends[partid - 1]) if partid else 0, int(ends[partid])


def _by_number(numbers: Mapping[K, int]) -> list[K]:
    return sorted(numbers, key=numbers.__getitem__)


def _bounds(ranges: Mapping[Any, Any], key: object, num_parts: int) -> Array:
    given = np.asarray(ranges[key], dtype=np.int64) if key in ranges else np.empty(0, np.int64)
    if given.shape != (num_parts, 2):
        raise ConfigError(f"the map of {key!r} has shape {given.shape}; give ({num_parts}, 2) ranges")
    return np.concatenate([[0], np.cumsum(given[:, 1] - given[:, 0])])


def _check_numbering(ranges: Mapping[Any, Any], to_homogeneous: Callable[[Ids, Any], Tensor]) -> None:
    """Raise ConfigError unless homogeneous ids run through the partitions, and in each through the types."""
    for key, given in ranges.items():
        found = np.asarray(given, dtype=np.int64)
        sizes = found[:, 1] - found[:, 0]
        firsts = np.cumsum(sizes) - sizes
        expected = to_homogeneous(torch.from_numpy(firsts[sizes > 0]), key).numpy()
        if not np.array_equal(found[sizes > 0, 0], expected):
            raise ConfigError(
                f"the map of {key!r} is {found.tolist()}; ids must be numbered partition by partition, and "
                "in each type by type"
            )


def _offsets(bounds: list[Array], partition: int) -> list[int]:
    sizes = [int(one[partition + 1] - one[partition]) for one in bounds]
    return [0, *np.cumsum(sizes).tolist()]


def _owner(ids: Ids, ends: Array) -> Tensor:
    asked = as_ids(ids, int(ends[-1]), "the ids of all types")
    return torch.from_numpy(np.searchsorted(ends, asked, side="right"))


def _local(ids: Ids, own: tuple[int, int]) -> Tensor:
    asked = as_ids(ids, own[1], "the ids of all types") - own[0]
    return torch.from_numpy(asked)


_GRAPHS: SessionField[list[DistGraph]] = SessionField(lambda _: [])


def remember_graph(g: DistGraph) -> None:
    """Register ``g`` as open, until it is closed or the session ends."""
    graphs = _GRAPHS.of(g.session)
    graphs.append(g)
    g.on_close.append(lambda: graphs.remove(g))


def graph_of_book(book: PartitionBook | None) -> DistGraph:
    """Return the open graph to which a partition book belongs.

    Args:
        book: Of a graph; or read from a file, so that its partitions are not the servers of this run; None:
            that of the only open graph.

    Raises:
        ConfigError: no graph is open, ``book`` belongs to none of them, or several match.
    """
    graphs = _open_graphs()
    own = [g for g in graphs if g.get_partition_book() is book]
    matching = own or [g for g in graphs if book is None or _rows(g.get_partition_book()) == _rows(book)]
    names = ", ".join(repr(g.name) for g in graphs)
    if not matching:
        raise ConfigError(
            f"the partition book is of none of the open graphs ({names}); give g.get_partition_book()"
        )
    if len({g.dataset.manifest.checksum for g in matching}) > 1:
        raise ConfigError(f"several graphs are open ({names}); say which: give g.get_partition_book()")
    return matching[-1]


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
    """Return ``ntype``; DGL's default stands for the only node type, whatever its name."""
    return g.ntypes[0] if ntype == NODE_TYPE and len(g.ntypes) == 1 else ntype


def edge_type(g: DistGraph, etype: str | EdgeType) -> str | EdgeType:
    """Return ``etype``; DGL's default stands for the only edge type, whatever its name."""
    is_default = etype in (EDGE_TYPE, EDGE_TYPE[1])
    return g.canonical_etypes[0] if is_default and len(g.canonical_etypes) == 1 else etype


def _open_graphs() -> Sequence[DistGraph]:
    last = cast("DistGraph", opened_graph())
    graphs = _GRAPHS.of(current_session())
    return [*(g for g in graphs if g is not last), last]


def _rows(book: PartitionBook) -> dict[str | EdgeType, int]:
    nodes: dict[str | EdgeType, int] = {ntype: book.num_nodes(ntype) for ntype in book.ntypes}
    return {**nodes, **{etype: book.num_edges(etype) for etype in book.canonical_etypes}}


class PartitionPolicy:
    """Assignment of the rows of a tensor to partitions, under DGL's names.

    Args:
        policy_str: ``node~<type>`` or ``edge~<source>:<relation>:<destination>``; ``node`` and ``edge`` mean
            those of a graph of one type.
        partition_book: DGL's view of a book.

    Raises:
        ConfigError: ``policy_str`` begins with neither, or the book has no such type.
    """

    def __init__(self, policy_str: str, partition_book: RangePartitionBook) -> None:
        kind, _, name = policy_str.partition("~")
        if kind not in ("node", "edge"):
            raise ConfigError(f"policy_str is {policy_str!r}; it must begin with 'node' or 'edge'")
        self._kind, self._book = kind, partition_book
        if kind == "node":
            self._type: str | EdgeType = name or NODE_TYPE
        else:
            pieces = tuple(name.split(":")) if ":" in name else name or EDGE_TYPE
            self._type = partition_book.to_canonical_etype(cast("str | EdgeType", pieces))
        bounds = partition_book.inner
        self._bounds = (
            bounds.node_bounds(cast("str", self._type)) if kind == "node" else bounds.edge_bounds(self._type)
        )

    @property
    def policy_str(self) -> str:
        return f"{self._kind}~{type_text(self._type)}"

    @property
    def type_name(self) -> str | EdgeType:
        """The node type, or the edge type as a triple."""
        return self._type

    @property
    def part_id(self) -> int:
        """The own partition."""
        return self._book.partid

    @property
    def partition_book(self) -> RangePartitionBook:
        return self._book

    @property
    def is_node(self) -> bool:
        return self._kind == "node"

    def get_data_name(self, name: str) -> str:
        """Return the name of the tensor ``name`` in the KVStore."""
        return f"{self.policy_str}~{name}"

    def to_local(self, id_tensor: Ids) -> Tensor:
        """Return the ids counted from the own partition's first."""
        if self.is_node:
            return self._book.nid2localnid(id_tensor, self.part_id, cast("str", self._type))
        return self._book.eid2localeid(id_tensor, self.part_id, self._type)

    def to_partid(self, id_tensor: Ids) -> Tensor:
        if self.is_node:
            return self._book.nid2partid(id_tensor, cast("str", self._type))
        return self._book.eid2partid(id_tensor, self._type)

    def get_part_size(self) -> int:
        return int(self._bounds[self.part_id + 1] - self._bounds[self.part_id])

    def get_size(self) -> int:
        return int(self._bounds[-1])


@final
class NodePartitionPolicy(PartitionPolicy):
    """The policy of the nodes of a type."""

    def __init__(self, partition_book: RangePartitionBook, ntype: str = NODE_TYPE) -> None:
        super().__init__(f"node~{ntype}", partition_book)


@final
class EdgePartitionPolicy(PartitionPolicy):
    """The policy of the edges of a type, given as a triple."""

    def __init__(self, partition_book: RangePartitionBook, etype: EdgeType = EDGE_TYPE) -> None:
        super().__init__(f"edge~{type_text(etype)}", partition_book)


def inner_policy(policy: PartitionPolicy | InnerPartitionPolicy | None) -> InnerPartitionPolicy | None:
    """Return our policy for one of DGL's, from the open graph whose book it has.

    Raises:
        ConfigError: ``policy`` is no policy, its book belongs to no open graph, or the graph lacks the type.
    """
    if policy is None or isinstance(policy, InnerPartitionPolicy):
        return policy
    if not isinstance(policy, PartitionPolicy):
        raise ConfigError(f"part_policy is {policy!r}; give what g.get_node_partition_policy(ntype) returns")
    g = graph_of_book(policy.partition_book.inner)
    if policy.is_node:
        return g.get_node_partition_policy(cast("str", policy.type_name))
    return g.get_edge_partition_policy(policy.type_name)


def outer_policy(policy: InnerPartitionPolicy) -> PartitionPolicy:
    """Return DGL's view of one of our policies of nodes or edges."""
    return PartitionPolicy(policy.policy_str, RangePartitionBook.over(policy.partition_book))
