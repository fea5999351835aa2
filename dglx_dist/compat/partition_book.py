"""Offer DGL's partition books and policies, which wrap this package's."""

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
from dglx_dist.graph.partition_book import Ids, PartitionBook, as_array, as_ids, resolve_etype
from dglx_dist.internals.pytorch import ids_to_device
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, Array, EdgeType, IdRanges, format_type

K = TypeVar("K", str, EdgeType)


class GraphPartitionBook(Wrapper):
    """Base class for partition books, for ``isinstance`` in scripts. There is one kind."""

    inner: PartitionBook


@final
class RangePartitionBook(GraphPartitionBook, of=PartitionBook):
    """Contiguous ids per type and partition, with DGL's arguments and methods.

    Without a type, ids are *homogeneous* if the graph has several types: one numbering for all types. The
    maps have (P, 2) homogeneous ranges by type. ConfigError if they do not fit. If they overlap, or number
    ids in another way than DGL, homogeneous ids raise ConfigError and all other methods work.
    """

    _unusual = ""
    """Reason if homogeneous ids would differ from DGL's, or an empty text."""
    global_nid_dtype = global_eid_dtype = torch.int64

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
            raise ConfigError(f"part_id is {part_id}, but there are {num_parts} parts, numbered from 0")
        if not ntypes or not etypes:
            raise ConfigError("a book needs node types and edge types. Pass ntypes and etypes.")

        node_bounds, nodes_unusual = _bounds(node_map, ntypes, num_parts)
        edge_bounds, edges_unusual = _bounds(edge_map, etypes, num_parts)
        self.inner = PartitionBook(node_bounds, edge_bounds, part_id)
        self._unusual = nodes_unusual or edges_unusual
        if self._unusual:
            for name in ("map_to_per_ntype", "map_to_per_etype", "map_to_homo_nid", "map_to_homo_eid"):
                setattr(self, name, self._refuse_homogeneous)

    def _refuse_homogeneous(self, *_: object, **__: object) -> NoReturn:
        raise ConfigError(f"these ids are homogeneous, but {self._unusual}. Name a type.")

    partid: Any = InnerAttribute(PartitionBook, "partid")
    """This rank's partition."""

    @property
    def is_homogeneous(self) -> bool:
        return len(self.ntypes) == 1 and len(self.etypes) == 1

    @property
    def local_ntype_offset(self) -> list[int]:
        """(types + 1) offsets: where each node type starts among the nodes in this rank's partition."""
        return self._offsets(map(self.inner.node_bounds, self.ntypes))

    @property
    def local_etype_offset(self) -> list[int]:
        return self._offsets(map(self.inner.edge_bounds, self.canonical_etypes))

    def _offsets(self, bounds: Iterable[Array]) -> list[int]:
        sizes = [int(np.diff(type_bounds)[self.partid]) for type_bounds in bounds]
        return [0, *np.cumsum(sizes).tolist()]

    _num_nodes: Any = InnerAttribute(PartitionBook, "num_nodes")
    _num_edges: Any = InnerAttribute(PartitionBook, "num_edges")

    def shared_memory(self, graph_name: str) -> None:
        raise ConfigError("every rank has the book, which is a few numbers. Leave shared_memory() out.")

    def _find_book(self, type_name: str | EdgeType | None) -> PartitionBook:
        """Return the book for a type's ids. DGL's defaults usually mean homogeneous ids."""
        book = self.inner
        if type_name not in (NODE_TYPE, EDGE_TYPE, EDGE_TYPE[1]):
            return book
        # The graph may have a type with that name.
        if type_name in (*book.ntypes, *book.canonical_etypes, *book.etypes):
            return book
        if self._unusual:
            self._refuse_homogeneous()
        return book.homogeneous()


def _adapt_method(method: Callable[..., Any]) -> Callable[..., Any]:
    """Adapt a method of our book to DGL's signature, where a default type can mean homogeneous ids."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    def call(self: RangePartitionBook, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        _, *ids, type_name = bound.args
        return method(self._find_book(type_name), *ids, type_name)

    return call


for _name in ("nid2partid", "partid2nids", "nid2localnid", "eid2partid", "partid2eids", "eid2localeid"):
    setattr(RangePartitionBook, _name, _adapt_method(getattr(PartitionBook, _name)))


def _bounds(ranges: Mapping[K, Any], types: Mapping[K, int], num_parts: int) -> tuple[dict[K, Array], str]:
    """Return (P + 1,) first ids by type, and a text if ids are not ordered by part and then by type."""
    arrays: dict[K, Array] = {}
    bounds: dict[K, Array] = {}
    for key in sorted(types, key=types.__getitem__):
        arrays[key] = np.asarray(ranges.get(key, []), dtype=np.int64)
        if arrays[key].shape != (num_parts, 2):
            raise ConfigError(f"the map of {key!r} has shape {arrays[key].shape}, not ({num_parts}, 2)")
        bounds[key] = np.concatenate([[0], np.cumsum(np.diff(arrays[key]))])

    starts_by_type = IdRanges.from_offsets([*bounds.values()]).starts
    for (key, array), starts in zip(arrays.items(), starts_by_type, strict=True):
        # An empty range may start anywhere.
        is_filled = array[:, 1] > array[:, 0]
        if (array[:, 0] != starts)[is_filled].any():
            return bounds, f"the map of {key!r} is {array.tolist()}, which is not in order of the types"
    return bounds, ""


_GRAPHS: SessionField[list[DistGraph]] = SessionField(lambda _: [])


def remember_graph(g: DistGraph) -> None:
    """Register ``g`` as open until it is closed or the session ends."""
    graphs = _GRAPHS.get(g.session)
    graphs.append(g)
    g.on_close.append(lambda: graphs.remove(g))

    # With several parts, the partition has numbered the edges anew, and scripts know these ids.
    if g.dataset.manifest.num_parts > 1:
        return
    for etype in g.canonical_etypes:
        source_ids = np.asarray(g.dataset.part(0).original_edge_ids(etype))
        is_sorted = (source_ids[1:] >= source_ids[:-1]).all()
        if not is_sorted:
            _EDGE_IDS.get(g.session)[g.kvstore.label, etype] = EdgeIds(source_ids)


@dataclass(frozen=True)
class EdgeIds:
    """Both numberings for one edge type, if the graph is in one part."""

    source: Array
    """(E,) int64 DGL id of each of our edges. It is the id that the edge had before partitioning."""

    @cached_property
    def ours(self) -> Array:
        """(E,) int64 id in our order, by destination and source, for each of DGL's edges."""
        ours = np.empty_like(self.source)
        ours[self.source] = np.arange(len(ours))
        return ours


_EDGE_IDS: SessionField[dict[tuple[str, object], EdgeIds]] = SessionField(lambda _: {})


def get_edge_ids(store: KVStore, etype: object) -> EdgeIds | None:
    """Return a type's edge ids in the graph that ``store`` belongs to, or None if our ids equal DGL's."""
    return _EDGE_IDS.get(store.session).get((store.label, etype))


def find_our_edges(store: KVStore, etype: object, ids: Ids) -> Ids:
    """Return our ids for a script's edge ids."""
    edge_ids = get_edge_ids(store, etype)
    if edge_ids is None:
        return ids
    positions = as_ids(ids, len(edge_ids.ours), f"the edges {etype}")
    our_ids = torch.from_numpy(edge_ids.ours[positions])
    return ids_to_device(our_ids, ids.device) if isinstance(ids, Tensor) else our_ids


def map_each_type(convert: Callable[..., Any], g: DistGraph, edges: Any) -> Any:
    """Apply :func:`find_our_edges` or :func:`find_shown_edges` to ids for the only type, or by type."""
    if isinstance(edges, Mapping):
        return {key: convert(g.kvstore, g.to_canonical_etype(key), ids) for key, ids in edges.items()}
    if len(g.canonical_etypes) == 1:
        return convert(g.kvstore, g.canonical_etypes[0], edges)
    return edges


def find_shown_edges(store: KVStore, etype: object, ids: Tensor) -> Tensor:
    """Return a script's ids for our edge ids."""
    edge_ids = get_edge_ids(store, etype)
    if edge_ids is None:
        return ids
    shown_ids = torch.from_numpy(edge_ids.source[as_array(ids)])
    return ids_to_device(shown_ids, ids.device)


def find_book_graph(book: PartitionBook | None) -> DistGraph:
    """Return the open graph that ``book``, which may come from a file, describes. None: the only graph."""
    graphs = _open_graphs()
    matching = graphs
    if book is not None:
        matching = [g for g in graphs if g.get_partition_book() is book]
        if not matching:
            # A book that was read from a file knows the sizes of its graph.
            sizes = _count_rows(book)
            matching = [g for g in graphs if _count_rows(g.get_partition_book()) == sizes]

    names = ", ".join(repr(g.name) for g in graphs)
    remedy = "Pass g.get_partition_book()."
    if not matching:
        raise ConfigError(f"the partition book belongs to none of the open graphs ({names}). {remedy}")
    if len({g.dataset.manifest.checksum for g in matching}) > 1:
        raise ConfigError(f"several graphs are open ({names}). {remedy}")
    return matching[-1]


def find_store_graph(store: KVStore) -> DistGraph:
    """Return the open graph with its tensors in ``store``. Raise ConfigError if it is closed."""
    for g in _open_graphs():
        if g.kvstore is store:
            return g
    raise ConfigError("the graph of this store is closed. Use g._client of an open graph.")


def resolve_node_type(g: DistGraph, ntype: str) -> str:
    """Return ``ntype``. DGL's default stands for the only node type, whatever its name."""
    return g.ntypes[0] if ntype == NODE_TYPE and len(g.ntypes) == 1 else ntype


def resolve_edge_type(g: DistGraph, etype: str | EdgeType) -> str | EdgeType:
    """Return ``etype``. DGL's default stands for the only edge type, whatever its name."""
    if etype in (EDGE_TYPE, EDGE_TYPE[1]) and len(g.canonical_etypes) == 1:
        return g.canonical_etypes[0]
    return etype


def _open_graphs() -> Sequence[DistGraph]:
    """List the open graphs. The graph that was opened last comes last."""
    last = cast("DistGraph", get_opened_graph())
    earlier = [g for g in _GRAPHS.get(current_session()) if g is not last]
    return [*earlier, last]


def _count_rows(book: PartitionBook) -> dict[str | EdgeType, int]:
    sizes: dict[str | EdgeType, int] = {ntype: book.num_nodes(ntype) for ntype in book.ntypes}
    sizes.update((etype, book.num_edges(etype)) for etype in book.canonical_etypes)
    return sizes


class PartitionPolicy(Wrapper, of=InnerPartitionPolicy):
    """Assigns a tensor's rows to partitions, with DGL's names.

    ``policy_str`` is ``node~<type>`` or ``edge~<source>:<relation>:<destination>``. ``node`` and ``edge``
    mean a graph's only type.
    """

    inner: InnerPartitionPolicy

    def __init__(self, policy_str: str, partition_book: RangePartitionBook) -> None:
        kind, _, name = policy_str.partition("~")
        if kind not in ("node", "edge"):
            raise ConfigError(f"policy_str is {policy_str!r}, but must begin with 'node' or 'edge'")

        book = partition_book.inner
        type_name: str | EdgeType
        if kind == "node":
            type_name = name or NODE_TYPE
            bounds = book.node_bounds(type_name)
        else:
            type_name = resolve_etype(name or format_type(EDGE_TYPE), book.canonical_etypes)
            bounds = book.edge_bounds(type_name)
        self.inner = InnerPartitionPolicy(
            kind=cast("Any", kind),
            type_name=type_name,
            bounds=bounds,
            partition_book=book,
            # Only policies from an open graph have a store. inner_policy() finds the one for this book.
            store=cast("KVStore", None),
        )

    type_name: Any = InnerAttribute(InnerPartitionPolicy, "type_name")
    """Node type, or edge type as a triple."""
    partition_book: Any = InnerAttribute(InnerPartitionPolicy, "partition_book")

    @property
    def is_node(self) -> bool:
        return self.inner.kind == "node"

    def get_data_name(self, name: str) -> str:
        """Return the KVStore's name for the tensor ``name``."""
        return self.inner.key(name)


@final
class NodePartitionPolicy(PartitionPolicy):
    """Policy for the nodes of one type."""

    def __init__(self, partition_book: RangePartitionBook, ntype: str = NODE_TYPE) -> None:
        super().__init__(f"node~{ntype}", partition_book)


@final
class EdgePartitionPolicy(PartitionPolicy):
    """Policy for the edges of one type, which is a triple."""

    def __init__(self, partition_book: RangePartitionBook, etype: EdgeType = EDGE_TYPE) -> None:
        super().__init__(f"edge~{format_type(etype)}", partition_book)


def inner_policy(policy: PartitionPolicy | InnerPartitionPolicy | None) -> InnerPartitionPolicy | None:
    """Find our policy for one of DGL's, in the open graph that its book describes, or raise ConfigError."""
    if policy is None or isinstance(policy, InnerPartitionPolicy):
        return policy
    if not isinstance(policy, PartitionPolicy):
        raise ConfigError(f"part_policy is {policy!r}. Pass g.get_node_partition_policy(ntype).")

    g = find_book_graph(policy.inner.partition_book)
    type_name = policy.inner.type_name
    if isinstance(type_name, str):
        return g.get_node_partition_policy(type_name)
    return g.get_edge_partition_policy(type_name)
