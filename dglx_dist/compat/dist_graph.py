"""Offer DGL's ``DistGraph``, which wraps this package's graph."""

import warnings
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any, cast, final

import dgl
import torch
from torch import Tensor

from dglx_dist.comm.topology import read_settings, read_topology
from dglx_dist.compat.dist_tensor import DistTensor, KVClient, add_user, inner_tensor
from dglx_dist.compat.partition_book import (
    find_our_edges,
    find_shown_edges,
    get_edge_ids,
    map_each_type,
    remember_graph,
    resolve_edge_type,
    resolve_node_type,
)
from dglx_dist.compat.wrappers import UnknownTypeError, Wrapper
from dglx_dist.data.storage.columns import MANIFEST
from dglx_dist.data.storage.dgl_format import part_structure
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_graph import DistGraph as InnerDistGraph
from dglx_dist.graph.dist_tensor import DataView as InnerDataView
from dglx_dist.graph.dist_tensor import DistTensor as InnerTensor
from dglx_dist.graph.dist_tensor import TypedViews
from dglx_dist.graph.partition_book import Ids
from dglx_dist.internals.graphs import Scheme, remove_empty_types
from dglx_dist.records import EdgeType, IdRanges


def show_ids(g: InnerDistGraph, graph: dgl.DGLGraph) -> dgl.DGLGraph:
    """Give a graph or block with edges from ``g`` the edge ids that scripts know, and return it."""
    for etype in graph.canonical_etypes:
        data = graph.edges[etype].data
        if get_edge_ids(g.kvstore, etype) is not None and dgl.EID in data:
            data[dgl.EID] = find_shown_edges(g.kvstore, etype, data[dgl.EID])
    return graph


@final
class DataView(Wrapper, MutableMapping[str, DistTensor], of=InnerDataView):
    """Named tensors on the nodes or edges of one type."""

    def __getitem__(self, key: str) -> DistTensor:
        return DistTensor.over(self.inner[key])

    def __setitem__(self, key: str, val: DistTensor) -> None:
        self.inner[key] = cast("InnerTensor", inner_tensor(val))
        # The view holds a reference to the tensor, so that it outlives the script's variable.
        add_user(self.inner[key], self.inner[key])

    def __delitem__(self, key: str) -> None:
        del self.inner[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.inner)

    def __len__(self) -> int:
        return len(self.inner)

    def __repr__(self) -> str:
        return repr({name: repr(self.inner[name]) for name in self.inner})


@final
class DistGraph(Wrapper, of=InnerDistGraph):
    """A partitioned graph with DGL's methods. Other attributes are those of ``.inner``, our graph.

    Opening one is collective, and opens the session if there is none. ``gpb`` is ignored with a warning.
    ``part_config`` is DGL's JSON file or a folder with our dataset. None: DGL_CONF_PATH. There is a warning
    if it holds a graph with another name, and a ConfigError if there is no partition.

    With one part, edges keep the ids that they had before partitioning. DGL does not number them anew either.
    """

    def __init__(self, graph_name: str, gpb: object = None, part_config: str | Path | None = None) -> None:
        if gpb is not None and read_topology().rank == 0:
            warnings.warn("gpb is not used, because the partition has its own book", stacklevel=2)

        path = read_settings().part_config
        if part_config is not None:
            path = Path(part_config)
        if path is None:
            raise ConfigError(
                "part_config is missing, and there are no servers to ask for it. Pass the "
                "JSON file that partition_graph wrote: DistGraph(..., part_config=)."
            )

        is_our_dataset = (path / MANIFEST).is_file()
        self.inner = InnerDistGraph(path) if is_our_dataset else InnerDistGraph(part_config=path)
        remember_graph(self.inner)
        self.graph_name = graph_name
        # A folder may have any name, but DGL's file names its graph.
        if not path.is_dir() and self.inner.name != graph_name and self.inner.rank() == 0:
            message = f"{path} holds the graph {self.inner.name!r}, not {graph_name!r}; it is opened anyway"
            warnings.warn(message, stacklevel=2)

    inner: InnerDistGraph

    @property
    def _client(self) -> KVClient:
        return KVClient.over(self.inner.kvstore)

    @property
    def local_partition(self) -> dgl.DGLGraph:
        """Graph with the own server's nodes, their in-edges, and these edges' remote sources.

        Own nodes come first. Ids are homogeneous. ``ndata`` has ``dgl.NID``, ``part_id`` and ``inner_node``.
        ``edata`` has ``dgl.EID`` and ``inner_edge``, which is 1. With several types there are ``dgl.NTYPE``
        and ``dgl.ETYPE`` too.
        """
        book = self.inner.get_partition_book()
        nodes = IdRanges.from_offsets([*map(book.node_bounds, book.ntypes)])
        edges = IdRanges.from_offsets([*map(book.edge_bounds, book.canonical_etypes)])
        first_edge, end = edges.part_range(book.partid)
        sources, destinations = find_edges(self, torch.arange(first_edge, end))
        return part_structure(nodes, edges, book.partid, (sources.numpy(), destinations.numpy()))

    @property
    def nodes(self) -> TypedViews[str, DataView]:
        return self.inner.nodes.map(DataView.over, UnknownTypeError)

    @property
    def edges(self) -> TypedViews[str | EdgeType, DataView]:
        return self.inner.edges.map(DataView.over, UnknownTypeError)

    def is_pinned(self) -> bool:
        return False

    def num_nodes(self, ntype: str | None = None) -> int:
        if ntype is not None:
            ntype = resolve_node_type(self.inner, ntype)
        return self.inner.num_nodes(ntype)

    def num_edges(self, etype: str | EdgeType | None = None) -> int:
        if etype is not None:
            etype = resolve_edge_type(self.inner, etype)
        return self.inner.num_edges(etype)

    number_of_nodes, number_of_edges = num_nodes, num_edges

    def get_ntype_id(self, ntype: str | None) -> int:
        """Return a node type's number. None stands for the only type, otherwise it is a ConfigError."""
        if ntype is None and len(self.ntypes) == 1:
            return 0
        if ntype not in self.ntypes:
            raise ConfigError(f"there is no node type {ntype!r} (known: {', '.join(self.ntypes)})")
        type_id: int = self.ntypes.index(ntype)
        return type_id

    def get_etype_id(self, etype: str | EdgeType | None) -> int:
        """Return an edge type's number. None stands for the only type, otherwise it is a ConfigError."""
        return self.canonical_etypes.index(self.to_canonical_etype(etype))

    def node_attr_schemes(self) -> dict[str, Scheme]:
        return {name: Scheme(column.shape[1:], column.dtype) for name, column in self.ndata.items()}

    def edge_attr_schemes(self) -> dict[str, Scheme]:
        return {name: Scheme(column.shape[1:], column.dtype) for name, column in self.edata.items()}

    def edge_subgraph(
        self, edges: Tensor | Mapping[Any, Tensor], relabel_nodes: bool = True, store_ids: bool = True
    ) -> dgl.DGLGraph:
        """Return a graph with only these edges, and ``dgl.EID``. Relabelled nodes have ``dgl.NID``."""
        if not store_ids:
            raise ConfigError("edge_subgraph always stores the ids. Leave store_ids out.")

        by_type = edges if isinstance(edges, Mapping) else {None: edges}
        ids, ends = {}, {}
        for key, edge_ids in by_type.items():
            etype = self.to_canonical_etype(key)
            ids[etype] = torch.as_tensor(edge_ids)
            ends[etype] = self.find_edges(ids[etype], etype)
        num_nodes = {ntype: self.num_nodes(ntype) for ntype in self.ntypes}
        graph = dgl.heterograph(ends, num_nodes)
        for etype, edge_ids in ids.items():
            graph.edges[etype].data[dgl.EID] = edge_ids
        return dgl.compact_graphs(graph) if relabel_nodes else graph

    def sample_neighbors(
        self,
        seed_nodes: Any,
        fanout: int | Mapping[Any, int],
        edge_dir: str = "in",
        prob: str | None = None,
        exclude_edges: Any = None,
        replace: bool = False,
        etype_sorted: bool = True,
        output_device: torch.device | str | None = None,
    ) -> dgl.DGLGraph:
        """Sample in-edges of nodes, without the edges in ``exclude_edges``. DGL 1.1.3 samples them, too."""
        if exclude_edges is not None:
            exclude_edges = map_each_type(find_our_edges, self.inner, exclude_edges)
        options = (edge_dir, prob, exclude_edges, replace, etype_sorted, output_device)
        sampled = self.inner.sample_neighbors(seed_nodes, fanout, *options)
        return show_ids(self.inner, remove_empty_types(sampled))

    def find_edges(self, edges: Ids, etype: str | EdgeType | None = None) -> tuple[Tensor, Tensor]:
        canonical = self.to_canonical_etype(etype)
        return self.inner.find_edges(find_our_edges(self.inner.kvstore, canonical, edges), canonical)

    def orig_edge_ids(self, ids: Ids, etype: str | EdgeType | None = None) -> Tensor:
        canonical = self.to_canonical_etype(etype)
        return self.inner.orig_edge_ids(find_our_edges(self.inner.kvstore, canonical, ids), canonical)

    def add_edge_attribute(self, name: str, padding: Any = None) -> None:
        """Do nothing: every edge tensor can be used as ``prob=`` or ``mask=``."""


def inner_graph(g: object) -> InnerDistGraph:
    """Return our graph behind DGL's view, or our graph itself. ConfigError for anything else."""
    if isinstance(g, DistGraph):
        return g.inner
    if isinstance(g, InnerDistGraph):
        return g
    raise ConfigError(f"the graph is a {type(g).__name__}. Pass a dgl.distributed.DistGraph.")


def find_edges(g: object, edge_ids: Ids) -> tuple[Tensor, Tensor]:
    """Return the edges' (sources, destinations). With several types all ids are homogeneous."""
    inner: Any = g if isinstance(g, DistGraph) else inner_graph(g)
    book = inner.get_partition_book()
    if len(book.etypes) == 1 and len(book.ntypes) == 1:
        return inner.find_edges(edge_ids)

    type_ids, ids_of_type = book.map_to_per_etype(edge_ids)
    sources = torch.empty_like(ids_of_type)
    destinations = torch.empty_like(ids_of_type)
    for type_id, etype in enumerate(book.canonical_etypes):
        is_of_type = type_ids == type_id
        u, v = inner.find_edges(ids_of_type[is_of_type], etype)
        sources[is_of_type] = book.map_to_homo_nid(u, etype[0])
        destinations[is_of_type] = book.map_to_homo_nid(v, etype[2])
    return sources, destinations
