"""DGL's partition books and policies around ours."""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn, TypeVar, cast, final

import numpy as np
import torch
from torch import Tensor

from dglx_dist.comm.session import SessionField, current_session
from dglx_dist.compat.wrappers import InnerAttribute, Wrapper
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.dist_tensor import PartitionPolicy as InnerPartitionPolicy
from dglx_dist.graph.dist_tensor import get_opened_graph
from dglx_dist.graph.kvstore import KVStore
from dglx_dist.graph.partition_book import Ids, PartitionBook, as_array, as_ids, canonical_etype
from dglx_dist.internals.pytorch import ids_to_device
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, Array, EdgeType, IdRanges, format_type

K = TypeVar("K", str, EdgeType)


class GraphPartitionBook(Wrapper):
    """Base class of partition books, as scripts name it in ``isinstance``; there is one kind."""

    inner: PartitionBook


@final
class RangePartitionBook(GraphPartitionBook, of=PartitionBook):
    """Contiguous ids per type and partition, with DGL's arguments and methods.

    Without a type, ids of a graph of several types are *homogeneous*: one numbering for all types. The maps
    have (P, 2) homogeneous ranges by type; ConfigError if they do not fit. If they overlap, or number ids in
    another way than DGL, homogeneous ids are a ConfigError, and all else works.
    """

    _unusual = ""
    global_nid_dtype = global_eid_dtype = torch.int64
    """Of newer versions of DGL."""

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
        nodes, nodes_unusual = _bounds(node_map, ntypes, num_parts)
        edges, edges_unusual = _bounds(edge_map, etypes, num_parts)
        self.inner, self._unusual = PartitionBook(nodes, edges, part_id), nodes_unusual or edges_unusual
        if self._unusual:
            names = "map_to_per_ntype", "map_to_per_etype", "map_to_homo_nid", "map_to_homo_eid"
            vars(self).update(dict.fromkeys(names, self._refuse_homogeneous))

    def _refuse_homogeneous(self, *_: object, **__: object) -> NoReturn:
        raise ConfigError(f"these ids are homogeneous, and {self._unusual}; name a type")

    partid: Any = InnerAttribute(PartitionBook, "partid")
    """The partition of this rank."""

    @property
    def is_homogeneous(self) -> bool:
        return len(self.ntypes) == 1 and len(self.etypes) == 1

    @property
    def local_ntype_offset(self) -> list[int]:
        """(types + 1) offsets of the node types among the own partition's nodes."""
        return self._offsets(map(self.inner.node_bounds, self.ntypes))

    @property
    def local_etype_offset(self) -> list[int]:
        return self._offsets(map(self.inner.edge_bounds, self.canonical_etypes))

    def _offsets(self, bounds: Iterable[Array]) -> list[int]:
        return [0, *np.cumsum([int(np.diff(one)[self.partid]) for one in bounds]).tolist()]

    _num_nodes: Any = InnerAttribute(PartitionBook, "num_nodes")
    _num_edges: Any = InnerAttribute(PartitionBook, "num_edges")

    def shared_memory(self, graph_name: str) -> None:
        raise ConfigError("every rank has the book, which is a few numbers; leave shared_memory() out")

    def _of(self, kind: str | EdgeType | None) -> PartitionBook:
        """Return the book of ids of ``kind``: DGL's defaults stand for homogeneous ids, unless they exist."""
        book = self.inner
        known = kind in book.ntypes or kind in (*book.canonical_etypes, *book.etypes)
        if known or kind not in (NODE_TYPE, EDGE_TYPE, EDGE_TYPE[1]):
            return book
        if self._unusual:
            self._refuse_homogeneous()
        return book.homogeneous()


def _by_kind(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of the core's book, whose last argument is a type, for both kinds of ids."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    def of_book(self: RangePartitionBook, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs)
        given.apply_defaults()
        _, *ids, kind = given.args
        return method(self._of(kind), *ids, kind)

    return of_book


for _name in ("nid2partid", "partid2nids", "nid2localnid", "eid2partid", "partid2eids", "eid2localeid"):
    setattr(RangePartitionBook, _name, _by_kind(getattr(PartitionBook, _name)))


def _bounds(ranges: Mapping[K, Any], kinds: Mapping[K, int], num_parts: int) -> tuple[dict[K, Array], str]:
    """Return (P + 1,) first ids by type, and which ids do not run through the parts and then the types."""
    given: dict[K, Array] = {}
    bounds: dict[K, Array] = {}
    for key in sorted(kinds, key=kinds.__getitem__):
        given[key] = np.asarray(ranges.get(key, []), dtype=np.int64)
        if given[key].shape != (num_parts, 2):
            what = f"the map of {key!r} has shape {given[key].shape}"
            raise ConfigError(f"{what}; give ({num_parts}, 2) ranges")
        bounds[key] = np.concatenate([[0], np.cumsum(np.diff(given[key]))])
    for (key, found), starts in zip(
        given.items(), IdRanges.from_offsets([*bounds.values()]).starts, strict=True
    ):
        if (found[:, 0] != starts)[found[:, 1] > found[:, 0]].any():
            return bounds, f"the map of {key!r} is {found.tolist()}, which is not in order of the types"
    return bounds, ""


_GRAPHS: SessionField[list[DistGraph]] = SessionField(lambda _: [])


def remember_graph(g: DistGraph) -> None:
    """Register ``g`` as open, until it is closed or the session ends."""
    graphs = _GRAPHS.get(g.session)
    graphs.append(g)
    g.on_close.append(lambda: graphs.remove(g))
    if g.dataset.manifest.num_parts == 1:
        for etype in g.canonical_etypes:
            source = np.asarray(g.dataset.part(0).original_edge_ids(etype))
            if (source[1:] < source[:-1]).any():
                _EDGE_IDS.get(g.session)[g.kvstore.label, etype] = EdgeIds(source)


@dataclass(frozen=True)
class EdgeIds:
    """Both numberings of the edges of one type in a graph in one part."""

    source: Array
    """(E,) int64: DGL's id, which is that of the source, of each of our edges."""

    @cached_property
    def ours(self) -> Array:
        """(E,) int64: our id, by destination and source, of each of DGL's edges."""
        ours = np.empty_like(self.source)
        ours[self.source] = np.arange(len(ours))
        return ours


_EDGE_IDS: SessionField[dict[tuple[str, object], EdgeIds]] = SessionField(lambda _: {})


def edge_ids(store: KVStore, etype: object) -> EdgeIds | None:
    """Return the ids of the edges of a type in the graph of ``store``; None where ours are DGL's."""
    return _EDGE_IDS.get(store.session).get((store.label, etype))


def our_edges(store: KVStore, etype: object, ids: Ids) -> Ids:
    """Return our ids of edges that a script names."""
    if (known := edge_ids(store, etype)) is None:
        return ids
    found = torch.from_numpy(known.ours[as_ids(ids, len(known.ours), f"the edges {etype}")])
    return ids_to_device(found, ids.device) if isinstance(ids, Tensor) else found


def of_each_type(number: Callable[..., Any], g: DistGraph, edges: Any) -> Any:
    """Apply :func:`our_edges` or :func:`shown_edges` to ids of the only type, or to a dict by type."""
    if isinstance(edges, Mapping):
        return {key: number(g.kvstore, g.to_canonical_etype(key), ids) for key, ids in edges.items()}
    only = len(g.canonical_etypes) == 1
    return number(g.kvstore, g.canonical_etypes[0], edges) if only else edges


def shown_edges(store: KVStore, etype: object, ids: Tensor) -> Tensor:
    """Return the ids under which a script knows our edges."""
    known = edge_ids(store, etype)
    if known is None:
        return ids
    return ids_to_device(torch.from_numpy(known.source[as_array(ids)]), ids.device)


def graph_of_book(book: PartitionBook | None) -> DistGraph:
    """Return the open graph to which ``book``, perhaps read from a file, belongs; None: the only one."""
    books = {g: g.get_partition_book() for g in _open_graphs()}
    own = [g for g in books if books[g] is book]
    matching = own or [g for g in books if book is None or _rows(books[g]) == _rows(book)]
    names, remedy = ", ".join(repr(g.name) for g in books), "give g.get_partition_book()"
    if not matching:
        raise ConfigError(f"the partition book is of none of the open graphs ({names}); {remedy}")
    if len({g.dataset.manifest.checksum for g in matching}) > 1:
        raise ConfigError(f"several graphs are open ({names}); say which: {remedy}")
    return matching[-1]


def graph_of_store(store: KVStore) -> DistGraph:
    """Return the open graph whose tensors are in ``store``; ConfigError when it is closed."""
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
    last = cast("DistGraph", get_opened_graph())
    return [*(g for g in _GRAPHS.get(current_session()) if g is not last), last]


def _rows(book: PartitionBook) -> dict[str | EdgeType, int]:
    nodes: dict[str | EdgeType, int] = {ntype: book.num_nodes(ntype) for ntype in book.ntypes}
    return {**nodes, **{etype: book.num_edges(etype) for etype in book.canonical_etypes}}


class PartitionPolicy(Wrapper, of=InnerPartitionPolicy):
    """Assignment of the rows of a tensor to partitions, under DGL's names.

    ``policy_str``: ``node~<type>`` or ``edge~<source>:<relation>:<destination>``; ``node`` and ``edge`` mean
    those of a graph of one type.
    """

    inner: InnerPartitionPolicy

    def __init__(self, policy_str: str, partition_book: RangePartitionBook) -> None:
        kind, _, name = policy_str.partition("~")
        if kind not in ("node", "edge"):
            raise ConfigError(f"policy_str is {policy_str!r}; it must begin with 'node' or 'edge'")
        book = partition_book.inner
        is_node, etype = kind == "node", name or format_type(EDGE_TYPE)
        known: Any = name or NODE_TYPE if is_node else canonical_etype(etype, book.canonical_etypes)
        self.inner = InnerPartitionPolicy(
            kind=cast("Any", kind),
            type_name=known,
            bounds=book.node_bounds(known) if is_node else book.edge_bounds(known),
            partition_book=book,
            # Only the policies of an open graph have one; inner_policy() finds that of this book.
            store=cast("KVStore", None),
        )

    type_name: Any = InnerAttribute(InnerPartitionPolicy, "type_name")
    """The node type, or the edge type as a triple."""
    partition_book: Any = InnerAttribute(InnerPartitionPolicy, "partition_book")

    @property
    def is_node(self) -> bool:
        return self.inner.kind == "node"

    def get_data_name(self, name: str) -> str:
        """Return the name of the tensor ``name`` in the KVStore."""
        return self.inner.key(name)


@final
class NodePartitionPolicy(PartitionPolicy):
    """The policy of the nodes of a type."""

    def __init__(self, partition_book: RangePartitionBook, ntype: str = NODE_TYPE) -> None:
        super().__init__(f"node~{ntype}", partition_book)


@final
class EdgePartitionPolicy(PartitionPolicy):
    """The policy of the edges of a type, given as a triple."""

    def __init__(self, partition_book: RangePartitionBook, etype: EdgeType = EDGE_TYPE) -> None:
        super().__init__(f"edge~{format_type(etype)}", partition_book)


def inner_policy(policy: PartitionPolicy | InnerPartitionPolicy | None) -> InnerPartitionPolicy | None:
    """Return our policy for one of DGL's, from the open graph whose book it has; ConfigError without one."""
    if policy is None or isinstance(policy, InnerPartitionPolicy):
        return policy
    if not isinstance(policy, PartitionPolicy):
        raise ConfigError(f"part_policy is {policy!r}; give what g.get_node_partition_policy(ntype) returns")
    g, key = graph_of_book(policy.inner.partition_book), policy.inner.type_name
    return g.get_node_partition_policy(key) if isinstance(key, str) else g.get_edge_partition_policy(key)
