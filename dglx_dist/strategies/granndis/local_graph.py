"""One graph object for scripts in the full-graph style, ``model(g, x)``, over several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, final

import torch
from dgl import DGLGraph
from dgl.base import ALL, is_all
from dgl.frame import Frame
from dgl.view import HeteroNodeView
from torch import Tensor

from dglx_dist.errors import ConfigError
from dglx_dist.records import StepShare
from dglx_dist.strategies.granndis.halo_block import HaloBlock
from dglx_dist.strategies.granndis.halo_frame import HaloFrame
from dglx_dist.strategies.granndis.one_way import OneWay
from dglx_dist.strategies.granndis.own_counts import OwnCount


@final
@dataclass(frozen=True)
class _Brought:
    """A column that was exchanged, and what it was exchanged from."""

    own: Tensor
    version: int
    """:data:`_UNKNOWN` where changes of it are not counted."""
    whole: Tensor

    def is_of(self, rows: Tensor) -> bool:
        """Whether ``rows`` are the same values, seen by autograd in the same way."""
        same = rows.data_ptr() == self.own.data_ptr() and rows.shape == self.own.shape
        with_gradient = rows.requires_grad and torch.is_grad_enabled()
        return (
            same
            and rows.dtype == self.own.dtype
            and rows.stride() == self.own.stride()
            and _version_of(rows) == self.version != _UNKNOWN
            # Two tensors on one memory may still have gradients of their own.
            and (rows is self.own or not with_gradient)
            and with_gradient == self.whole.requires_grad
        )


_UNKNOWN = -1


def _version_of(rows: Tensor) -> int:
    # Of what was made in inference mode torch counts no changes.
    return _UNKNOWN if rows.is_inference() else rows._version


def _refused(name: str, why: str) -> Callable[..., NoReturn]:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise ConfigError(f"{name} of a local graph: {why}")

    return refuse


_FIXED = "its structure is planned with all ranks; change the graph before it is partitioned"
_ENDS = (
    "the sources of its edges lie on several ranks, so they have no rows here; use update_all or "
    "apply_edges, which see both ends"
)
_ALL_EDGES = (
    "messages go along all edges at once, or the ranks would not agree on what to exchange; use update_all"
)


@final
class LocalGraph(DGLGraph):
    """This rank's nodes of a graph, as a homogeneous DGL graph that any ``dgl.nn`` module takes.

    Nodes are the rank's own, and so are the rows of ``ndata`` and of all tensors that models take and return;
    edges are all in-edges of these nodes. ``update_all`` and ``apply_edges`` exchange the columns that
    messages read of the sources, each once per value; so all layers of a model, and several hops in one layer
    (SGConv, TAGConv, ChebConv, APPNPConv), compute what they compute on the whole graph, gradients included.
    Every rank must do the same with it in the same order. In- and out-degrees are those of the whole graph.

    A column whose halo was fetched beforehand (``use_pp``) is not exchanged again, as long as a layer is
    given it as it is.

    What is refused: functions of the reversed graph (``edge_softmax(norm_by="src")``,
    ``EdgeWeightNorm("both")``, and with it edge weights of SGConv, TAGConv, APPNPConv and GCN2Conv), edges by
    their ends, subgraphs, other graphs made of it, readouts over all nodes, and ``dgl.ops`` on it, all of
    which would see this rank alone.

    Args:
        block: Of one layer whose destinations are all of its own rows.
    """

    _graph = OneWay()

    def __init__(self, block: HaloBlock) -> None:
        rows, own = block.num_dst_nodes(), block.own_rows
        if rows != own:
            raise ConfigError(
                f"a local graph needs the edges of all {own} own rows, and the block has {rows} "
                "destinations; plan one layer with every node as a seed"
            )
        (source, relation, _) = block.canonical_etypes[0]
        frames = [Frame(dict(block.dstdata.items()), num_rows=rows)]
        super().__init__(block._graph, [source], [relation], frames, [*block._edge_frames])
        self._block = block
        self._known: tuple[_Brought, ...] = ()
        self._brought: dict[str, _Brought] = {}
        self.step_share: StepShare | None = None
        """How many of all targets are among this rank's nodes; what a mean over them is weighed by."""
        self.step_number = 0
        """The training step, for dropouts that are the same on any number of ranks."""

    def keep_halo(self, name: str, halo: Tensor) -> None:
        """Let the column ``name`` have the rows ``halo``, (n_halo, ...), whenever it is read as it is now."""
        own = self.ndata[name]
        self._block.set_all(name, torch.cat([own, halo]))
        whole = self._block.srcdata.pop(name)
        self._known = (*self._known, _Brought(own, _version_of(own), whole))

    def in_degrees(self, v: Any = ALL, etype: Any = None) -> Any:
        """Return the in-degrees of this rank's nodes, as DGL does; all their in-edges are here."""
        return self._block.in_degrees(v)

    def out_degrees(self, u: Any = ALL, etype: Any = None) -> Any:
        """Return the out-degrees of this rank's nodes in the whole graph, as DGL does."""
        return self._block.out_degrees(u)[: self.num_nodes()] if is_all(u) else self._block.out_degrees(u)

    def num_nodes(self, ntype: str | None = None) -> int:
        """Return how many nodes this rank has."""
        return int(self._block.own_rows)

    def num_src_nodes(self, ntype: str | None = None) -> int:
        """Return how many nodes this rank has: sources on other ranks have no rows here."""
        return self.num_nodes()

    def num_dst_nodes(self, ntype: str | None = None) -> int:
        """Return how many nodes this rank has."""
        return self.num_nodes()

    @property
    def nodes(self) -> Any:
        """As of DGL graphs."""
        return _OwnNodes(self, self.get_ntype_id)

    srcnodes = dstnodes = nodes

    def update_all(
        self, message_func: Any, reduce_func: Any, apply_node_func: Any = None, etype: Any = None
    ) -> None:
        """Send messages along all edges and reduce them, as DGL does; the sources' columns are exchanged."""
        self._messages().update_all(message_func, reduce_func)
        if apply_node_func is not None:
            self.apply_nodes(apply_node_func)

    def apply_edges(self, func: Any, edges: Any = ALL, etype: Any = None) -> None:
        """Compute columns of all edges from their ends, as DGL does; the sources' columns are exchanged."""
        if not is_all(edges):
            raise ConfigError(f"apply_edges of a local graph on some edges: {_ALL_EDGES}")
        self._messages().apply_edges(func)

    @contextmanager
    def local_scope(self) -> Iterator[None]:
        """Forget the columns that are set inside, as DGL does, and what was exchanged of them."""
        before = self._brought
        self._brought = dict(before)
        with super().local_scope():
            yield
        self._brought = before

    def to(self, device: Any, **kwargs: Any) -> LocalGraph:
        """Return the graph on another device."""
        moved: LocalGraph = super().to(device, **kwargs)
        if moved is self:
            return self
        moved._block = self._block.to(device, **kwargs)
        moved._brought, names = {}, list(self.ndata.keys())
        moved._known = tuple(
            _Brought(rows, _version_of(rows), one.whole.to(device, **kwargs))
            for one in self._known
            for rows in [moved.ndata[name] for name in names if self.ndata[name] is one.own]
        )
        return moved

    def _messages(self) -> HaloBlock:
        """Return the block whose sources are this graph's nodes, exchanged when they are read."""
        (own,) = self._node_frames
        block: HaloBlock = self._block.__copy__()
        block._node_frames = [HaloFrame(own, self._bring, self._block.num_src_nodes()), own]
        block._edge_frames = self._edge_frames
        return block

    def _bring(self, name: str, rows: Tensor) -> Tensor:
        before = self._brought.get(name)
        for one in self._known if before is None else (*self._known, before):
            if one.is_of(rows):
                return one.whole
        whole = self._block.all_rows(rows)
        self._brought[name] = _Brought(rows, _version_of(rows), whole)
        return whole

    def _set_n_repr(self, ntid: int, u: Any, data: Any) -> None:
        if not is_all(u):
            self._node_frames[0].update_row(torch.as_tensor(u, device=self.device).long(), data)
            return
        for name, rows in data.items():
            if len(rows) != self.num_nodes():
                raise ConfigError(
                    f"{len(rows)} rows of {name!r} for a local graph of {self.num_nodes()} nodes; give it "
                    "the rows of this rank's nodes"
                )
        self._node_frames[0].update(data)

    def _pop_n_repr(self, ntid: int, key: str) -> Any:
        self._brought.pop(key, None)
        return super()._pop_n_repr(ntid, key)

    def __getitem__(self, key: Any) -> Any:
        self._block[key]  # refuses what is not the one edge type
        return self

    @property
    def batch_size(self) -> int:
        """1: this is one graph."""
        return 1

    def batch_num_nodes(self, ntype: str | None = None) -> Tensor:
        """Return (1,) how many nodes this rank has, for ``dgl.broadcast_nodes``; readouts are refused."""
        return OwnCount.of(self.num_nodes(), self.device)

    def batch_num_edges(self, etype: Any = None) -> Tensor:
        """Return (1,) how many edges this rank has, for ``dgl.broadcast_edges``; readouts are refused."""
        return OwnCount.of(self.num_edges(), self.device)

    def has_nodes(self, vid: Any, ntype: str | None = None) -> Any:
        """Return whether this rank has the nodes ``vid``, as DGL does."""
        ids = torch.as_tensor(vid)
        found = (ids >= 0) & (ids < self.num_nodes())
        return found if ids.dim() else bool(found)

    add_nodes = _refused("add_nodes", _FIXED)
    add_edges = _refused("add_edges", _FIXED)
    remove_nodes = _refused("remove_nodes", _FIXED)
    remove_edges = _refused("remove_edges", _FIXED)
    add_self_loop = _refused("add_self_loop", _FIXED)
    remove_self_loop = _refused("remove_self_loop", _FIXED)
    to_simple = _refused("to_simple", _FIXED)
    reorder_graph = _refused("reorder_graph", _FIXED)
    all_edges = _refused("all_edges", _ENDS)
    find_edges = _refused("find_edges", _ENDS)
    in_edges = _refused("in_edges", _ENDS)
    out_edges = _refused("out_edges", _ENDS)
    edge_ids = _refused("edge_ids", _ENDS)
    has_edges_between = _refused("has_edges_between", _ENDS)
    predecessors = _refused("predecessors", _ENDS)
    successors = _refused("successors", _ENDS)
    reverse = _refused("reverse", _ENDS)
    adj = _refused("adj", _ENDS)
    adj_external = _refused("adj_external", _ENDS)
    adj_tensors = _refused("adj_tensors", _ENDS)
    inc = _refused("inc", _ENDS)
    line_graph = _refused("line_graph", _ENDS)
    adjacency_matrix = _refused("adjacency_matrix", _ENDS)
    incidence_matrix = _refused("incidence_matrix", _ENDS)
    to_networkx = _refused("to_networkx", _ENDS)
    to_cugraph = _refused("to_cugraph", _ENDS)
    filter_edges = _refused("filter_edges", _ENDS)
    subgraph = _refused("subgraph", _ENDS)
    edge_subgraph = _refused("edge_subgraph", _ENDS)
    in_subgraph = _refused("in_subgraph", _ENDS)
    out_subgraph = _refused("out_subgraph", _ENDS)
    khop_in_subgraph = _refused("khop_in_subgraph", _ENDS)
    khop_out_subgraph = _refused("khop_out_subgraph", _ENDS)
    node_type_subgraph = _refused("node_type_subgraph", _ENDS)
    edge_type_subgraph = _refused("edge_type_subgraph", _ENDS)
    sample_neighbors = _refused("sample_neighbors", _ENDS)
    global_uniform_negative_sampling = _refused("global_uniform_negative_sampling", _ENDS)
    send_and_recv = _refused("send_and_recv", _ALL_EDGES)
    pull = _refused("pull", _ALL_EDGES)
    push = _refused("push", _ALL_EDGES)
    prop_nodes = _refused("prop_nodes", _ALL_EDGES)
    prop_edges = _refused("prop_edges", _ALL_EDGES)
    multi_update_all = _refused("multi_update_all", _ALL_EDGES)


@final
class _OwnNodes(HeteroNodeView):
    """``g.nodes`` of a local graph."""

    __slots__ = ()

    def __call__(self, ntype: str | None = None) -> Tensor:
        return torch.arange(self._graph.num_nodes(), dtype=self._graph.idtype, device=self._graph.device)
