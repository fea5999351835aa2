"""DGL's ``DistGraph``, over ours."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import dgl
import torch
from dgl.frame import Scheme
from torch import Tensor

from dglx_dist.cluster.session import current_session
from dglx_dist.cluster.shared import Shared
from dglx_dist.cluster.topology import read_settings, read_topology
from dglx_dist.compat.book import RangePartitionBook
from dglx_dist.compat.drawn import without_empty_types
from dglx_dist.compat.kvstore import KVClient
from dglx_dist.compat.local_partition import local_partition
from dglx_dist.compat.opened import edge_type, node_type, remember_graph
from dglx_dist.compat.policy import PartitionPolicy, outer_policy
from dglx_dist.compat.views import DataView, Spaces
from dglx_dist.errors import ConfigError
from dglx_dist.graph import DistGraph as Inner
from dglx_dist.graph.ids import Ids
from dglx_dist.records import EdgeType
from dglx_dist.storage.layout import MANIFEST


@final
class DistGraph(Shared):
    """A partitioned graph with DGL's methods; ``.inner`` is ours, whose other attributes are here as well.

    Opening one is collective, and joins the ranks if they have not met yet.

    Args:
        graph_name: As when it was partitioned.
        gpb: Not needed, with a warning: the book is read from the partition.
        part_config: DGL's JSON file, or the folder of a dataset of ours; None: what DGL_CONF_PATH names.

    Raises:
        ConfigError: no partition is named, or it is of a graph of another name.
        StorageError: on all ranks, when it cannot be opened on one of them.
    """

    def __init__(self, graph_name: str, gpb: object = None, part_config: str | Path | None = None) -> None:
        if gpb is not None and read_topology().rank == 0:
            warnings.warn("gpb is not used: the partition has its book", stacklevel=2)
        path = Path(part_config) if part_config is not None else read_settings().part_config
        if path is None:
            raise ConfigError(
                "give DistGraph(..., part_config=), the JSON file that partition_graph wrote: there are no "
                "servers that would know it"
            )
        session = current_session()
        if (path / MANIFEST).is_file():
            self.inner = Inner(path, session=session)
        else:
            self.inner = Inner(part_config=path, session=session)
        remember_graph(self.inner)
        self.graph_name = graph_name
        if not path.is_dir() and self.inner.name != graph_name:
            raise ConfigError(f"{path} is of the graph {self.inner.name!r}, not {graph_name!r}")

    def __getattr__(self, name: str) -> Any:
        """What is ours beyond DGL's, such as ``orig_ids`` and ``cache_rows``."""
        if name.startswith("__") or name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    @property
    def _client(self) -> KVClient:
        return KVClient.over(self.inner.kvstore)

    @property
    def local_partition(self) -> dgl.DGLGraph:
        """The own server's nodes, their in-edges and the sources of these, as a homogeneous DGLGraph."""
        return local_partition(self.inner)

    @property
    def ntypes(self) -> list[str]:
        """Node types."""
        return self.inner.ntypes

    @property
    def etypes(self) -> list[str]:
        """Relations."""
        return self.inner.etypes

    @property
    def canonical_etypes(self) -> list[EdgeType]:
        """Edge types."""
        return self.inner.canonical_etypes

    @property
    def idtype(self) -> torch.dtype:
        """int64."""
        return self.inner.idtype

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return self.inner.device

    @property
    def ndata(self) -> DataView:
        """Tensors of the nodes of a graph of one node type."""
        return DataView(self.inner.ndata)

    @property
    def edata(self) -> DataView:
        """Tensors of the edges of a graph of one edge type."""
        return DataView(self.inner.edata)

    @property
    def nodes(self) -> Spaces[str]:
        """``g.nodes[ntype].data``."""
        return Spaces(lambda ntype: self.inner.nodes[ntype].data)

    @property
    def edges(self) -> Spaces[str | EdgeType]:
        """``g.edges[etype].data``."""
        return Spaces(lambda etype: self.inner.edges[etype].data)

    def is_pinned(self) -> bool:
        """Return False."""
        return False

    def num_nodes(self, ntype: str | None = None) -> int:
        """Return the number of nodes of a type, or of all."""
        return self.inner.num_nodes(None if ntype is None else node_type(self.inner, ntype))

    def num_edges(self, etype: str | EdgeType | None = None) -> int:
        """Return the number of edges of a type, or of all."""
        return self.inner.num_edges(None if etype is None else edge_type(self.inner, etype))

    number_of_nodes, number_of_edges = num_nodes, num_edges

    def in_degrees(self, v: Ids | None = None) -> Tensor:
        """Return the numbers of in-edges, of all nodes when None."""
        return self.inner.in_degrees(v)

    def out_degrees(self, u: Ids | None = None) -> Tensor:
        """Return the numbers of out-edges, of all nodes when None."""
        return self.inner.out_degrees(u)

    def to_canonical_etype(self, etype: str | EdgeType) -> EdgeType:
        """Return the triple of an edge type."""
        return self.inner.to_canonical_etype(etype)

    def get_ntype_id(self, ntype: str | None) -> int:
        """Return the number of a node type; None: of the only one.

        Raises:
            ConfigError: there is no such type, or None and several.
        """
        known = self.ntypes
        if ntype is None and len(known) == 1:
            return 0
        if ntype not in known:
            raise ConfigError(f"there is no node type {ntype!r} (known: {', '.join(known)})")
        return known.index(ntype)

    def get_etype_id(self, etype: str | EdgeType | None) -> int:
        """Return the number of an edge type; None: of the only one.

        Raises:
            ConfigError: there is no such type, or None and several.
        """
        if etype is None and len(self.etypes) == 1:
            return 0
        if etype is None:
            raise ConfigError(f"name one of the edge types {', '.join(self.etypes)}")
        return self.canonical_etypes.index(self.to_canonical_etype(etype))

    def node_attr_schemes(self) -> dict[str, Scheme]:
        """Return shape and dtype of each tensor of the nodes."""
        return {name: Scheme(tensor.shape[1:], tensor.dtype) for name, tensor in self.ndata.items()}

    def edge_attr_schemes(self) -> dict[str, Scheme]:
        """Return shape and dtype of each tensor of the edges."""
        return {name: Scheme(tensor.shape[1:], tensor.dtype) for name, tensor in self.edata.items()}

    def rank(self) -> int:
        """Return the rank of this process."""
        return self.inner.rank()

    def barrier(self) -> None:
        """Wait until every rank is here; what was written before is seen by all afterwards."""
        self.inner.barrier()

    def get_partition_book(self) -> RangePartitionBook:
        """Return who owns which ids; the partitions are the servers."""
        return RangePartitionBook.over(self.inner.get_partition_book())

    def get_node_partition_policy(self, ntype: str) -> PartitionPolicy:
        """Return how tensors of the nodes of a type are laid."""
        return outer_policy(self.inner.get_node_partition_policy(ntype))

    def get_edge_partition_policy(self, etype: str | EdgeType) -> PartitionPolicy:
        """Return how tensors of the edges of a type are laid."""
        return outer_policy(self.inner.get_edge_partition_policy(etype))

    def find_edges(self, edges: Ids, etype: str | EdgeType | None = None) -> tuple[Tensor, Tensor]:
        """Return (sources, destinations) of edges of one type."""
        return self.inner.find_edges(edges, etype)

    def edge_subgraph(
        self, edges: Tensor | Mapping[Any, Tensor], relabel_nodes: bool = True, store_ids: bool = True
    ) -> dgl.DGLGraph:
        """Return the graph of some edges, with ``dgl.EID``, and ``dgl.NID`` when nodes are relabelled.

        Raises:
            ConfigError: ``store_ids`` is False, as with DGL; or ids without a type and several types.
        """
        if not store_ids:
            raise ConfigError("edge_subgraph always stores the ids; leave store_ids out")
        by_type = edges if isinstance(edges, Mapping) else {self._only_etype(): edges}
        ids = {self.to_canonical_etype(etype): torch.as_tensor(given) for etype, given in by_type.items()}
        ends = {etype: self.find_edges(given, etype) for etype, given in ids.items()}
        graph = dgl.heterograph(ends, {ntype: self.num_nodes(ntype) for ntype in self.ntypes})
        for etype, given in ids.items():
            graph.edges[etype].data[dgl.EID] = given
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
        """Draw in-edges of nodes, none of them of ``exclude_edges``, which DGL 1.1.3 ignores."""
        drawn = self.inner.sample_neighbors(
            seed_nodes, fanout, edge_dir, prob, exclude_edges, replace, etype_sorted, output_device
        )
        return without_empty_types(drawn)

    def add_edge_attribute(self, name: str, padding: Any = None) -> None:
        """Of GraphBolt.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("there is no GraphBolt graph; every edge tensor can be used as prob= or mask=")

    def _only_etype(self) -> EdgeType:
        if len(self.canonical_etypes) != 1:
            raise ConfigError(f"give a dict of ids by edge type: {', '.join(self.etypes)}")
        return self.canonical_etypes[0]


def inner_graph(g: object) -> Inner:
    """Return our graph behind DGL's view of it, or itself.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(g, DistGraph):
        return g.inner
    if isinstance(g, Inner):
        return g
    raise ConfigError(f"the graph is a {type(g).__name__}; give a dgl.distributed.DistGraph")
