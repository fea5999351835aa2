"""One rank's nodes in a distributed graph, as one DGL graph."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, final

import dgl
import numpy as np
import torch
from dgl import DGLGraph
from torch import Tensor

from dglx_dist.comm.collectives import check_equal, run_on_all_ranks
from dglx_dist.dataloading.feature_fetch import RowMemory
from dglx_dist.errors import ConfigError
from dglx_dist.internals.graphs import (
    ALL,
    Frame,
    InEdgesOnlyGraph,
    OwnNodes,
    get_block_parts,
    is_all,
    make_fetched_frame,
)
from dglx_dist.internals.message_passing import copy_frame, place
from dglx_dist.internals.pytorch import get_version
from dglx_dist.options import list_names
from dglx_dist.records import Array, StepShare
from dglx_dist.strategies.base import STRATEGIES, check_one_type, count_targets
from dglx_dist.strategies.full_graph.halo_block import HaloBlock, OwnCount, halo_block
from dglx_dist.strategies.full_graph.halo_exchange import HaloExchange
from dglx_dist.strategies.full_graph.loader import PHASE
from dglx_dist.strategies.full_graph.plan_builder import check_graph, make_plans

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph
    from dglx_dist.graph.dist_tensor import DataView


@final
class LocalGraph(InEdgesOnlyGraph, DGLGraph):
    """This rank's nodes, as a homogeneous DGL graph for any ``dgl.nn`` module.

    All node rows belong to this rank, both in ``ndata`` and in what models read and return. The edges are all
    in-edges into these nodes. In- and out-degrees count all edges in the distributed graph.

    ``update_all`` and ``apply_edges`` exchange the source columns that messages read. Each value is exchanged
    once. So all layers in a model, and several hops in one layer (SGConv, TAGConv, ChebConv, APPNPConv),
    compute the same results and gradients as on the uncut graph. Every rank must run the same operations in
    the same order. A column with a prefetched halo (``use_pp``) is not exchanged as long as it is unchanged.

    The following would see this rank only and are not supported: functions that need the reversed graph
    (``edge_softmax(norm_by="src")``, ``EdgeWeightNorm("both")``, and edge weights in SGConv, TAGConv,
    APPNPConv and GCN2Conv), edges by their ends, subgraphs, derived graphs, readouts over all nodes, and
    ``dgl.ops``.

    Args:
        block: A block for one layer. Its destinations are all own rows.
    """

    has_layer_rows = True

    def __init__(self, block: HaloBlock) -> None:
        rows = block.num_dst_nodes()
        assert rows == block.own_rows, "the plan must have one layer and every node as a seed"
        structure, (ntypes, _), etypes, _, edge_frames = get_block_parts(block)
        frames = [Frame(dict(block.dstdata.items()), num_rows=rows)]
        super().__init__(structure, ntypes, etypes, frames, [*edge_frames])
        self._block = block
        self._prefetched: tuple[_ExchangedColumn, ...] = ()
        self._exchanged: dict[str, _ExchangedColumn] = {}
        self.step_share: StepShare | None = None
        """Target counts on this rank and on all ranks. They weight a mean over this rank's targets."""
        self.step_number = 0
        """Training step number, by which dropouts are keyed."""

    def keep_halo(self, name: str, halo: Tensor) -> None:
        """Use the (n_halo, ...) ``halo`` for the column ``name`` until its values change."""
        rows = self.ndata[name]
        self._block.set_all(name, torch.cat([rows, halo]))
        sources = self._block.srcdata.pop(name)
        self._prefetched = (*self._prefetched, _ExchangedColumn(rows, get_version(rows), sources))

    def in_degrees(self, v: Any = ALL, etype: Any = None) -> Any:
        return self._block.in_degrees(v)

    def out_degrees(self, u: Any = ALL, etype: Any = None) -> Any:
        degrees = self._block.out_degrees(u)
        # The block knows degrees for halo nodes, too.
        return degrees[: self.num_nodes()] if is_all(u) else degrees

    def num_nodes(self, ntype: str | None = None) -> int:
        return int(self._block.own_rows)

    # Sources on other ranks have no rows here.
    num_src_nodes = num_dst_nodes = num_nodes

    @property
    def nodes(self) -> Any:
        return OwnNodes(self, self.get_ntype_id)

    srcnodes = dstnodes = nodes

    def update_all(
        self, message_func: Any, reduce_func: Any, apply_node_func: Any = None, etype: Any = None
    ) -> None:
        block = self._make_message_block()
        columns = block.sums(message_func, reduce_func, self._get_unexchanged)
        if columns:
            self.ndata.update(columns)
        else:
            block.update_all(message_func, reduce_func)
        if apply_node_func is not None:
            self.apply_nodes(apply_node_func)

    def apply_edges(self, func: Any, edges: Any = ALL, etype: Any = None) -> None:
        if not is_all(edges):
            raise ConfigError(f"apply_edges of a local graph cannot be limited to some edges: {_ALL_EDGES}")
        self._make_message_block().apply_edges(func)

    @contextmanager
    def local_scope(self) -> Iterator[None]:
        """Discard columns that are set inside, as DGL does, and their exchanged rows."""
        outer_columns = self._exchanged
        self._exchanged = dict(outer_columns)
        with super().local_scope():
            yield
        self._exchanged = outer_columns

    def to(self, device: Any, **kwargs: Any) -> LocalGraph:
        graph: LocalGraph = copy.copy(self)
        graph._block = self._block.to(device, **kwargs)
        if graph._block is self._block:
            return self

        graph.take_structure(graph._block)
        target_device = graph._block.device
        move = partial(Tensor.to, device=target_device, **kwargs)
        graph.node_frames = [copy_frame(column, target_device, move) for column in self.node_frames]
        graph.edge_frames = [copy_frame(column, target_device, move) for column in self.edge_frames]
        graph._exchanged = {}

        prefetched = []
        for column in self._prefetched:
            names = [name for name in list(self.ndata.keys()) if self.ndata[name] is column.own_rows]
            for name in names:
                # The version shows later whether the moved column was changed after the exchange.
                moved_rows = graph.ndata[name]
                sources = column.sources.to(device, **kwargs)
                prefetched.append(_ExchangedColumn(moved_rows, get_version(moved_rows), sources))
        graph._prefetched = tuple(prefetched)
        return graph

    def _make_message_block(self) -> HaloBlock:
        """Return a block with this graph's columns, which exchanges the source columns that are read."""
        (frame,) = self.node_frames
        block: HaloBlock = self._block.__copy__()
        source_frame = make_fetched_frame(frame, self._get_sources, self._block.num_src_nodes())
        block.node_frames = [source_frame, frame]
        block.edge_frames = self.edge_frames
        return block

    def _get_unexchanged(self, name: str) -> Tensor | None:
        """Return the column ``name``, or None if its halo is already here."""
        rows = self.node_frames[0][name]
        return rows if self._find_exchanged(name, rows) is None else None

    def _find_exchanged(self, name: str, rows: Tensor) -> Tensor | None:
        """Return all source rows for the column ``rows``, or None if they were not exchanged."""
        columns = list(self._prefetched)
        if name in self._exchanged:
            columns.append(self._exchanged[name])
        for column in columns:
            if column.matches(rows):
                return column.sources
        return None

    def _get_sources(self, name: str, rows: Tensor) -> Tensor:
        """Return all source rows for the column ``rows``. They are exchanged once."""
        sources = self._find_exchanged(name, rows)
        if sources is None:
            sources = self._block.all_rows(rows)
            self._exchanged[name] = _ExchangedColumn(rows, get_version(rows), sources)
        return sources

    def set_columns(self, side: int, rows: Any, data: Any) -> None:
        if not is_all(rows):
            positions = torch.as_tensor(rows, device=self.device).long()
            self.node_frames[0].update_row(positions, data)
            return
        for name, column in data.items():
            if len(column) != self.num_nodes():
                raise ConfigError(
                    f"{len(column)} rows of {name!r} for a local graph of {self.num_nodes()} nodes; pass the "
                    "rows of this rank's nodes"
                )
        self.node_frames[0].update(data)

    def pop_column(self, side: int, name: str) -> Any:
        self._exchanged.pop(name, None)
        return super().pop_column(side, name)

    def __getitem__(self, key: Any) -> Any:
        self._block[key]  # raises unless it is the only edge type
        return self

    @property
    def batch_size(self) -> int:
        return 1

    def batch_num_nodes(self, ntype: str | None = None) -> Tensor:
        # dgl.broadcast_nodes needs it. Readouts over all nodes raise ConfigError.
        return OwnCount.from_count(self.num_nodes(), self.device)

    def batch_num_edges(self, etype: Any = None) -> Tensor:
        return OwnCount.from_count(self.num_edges(), self.device)

    def has_nodes(self, vid: Any, ntype: str | None = None) -> Any:
        ids = torch.as_tensor(vid)
        is_node = (ids >= 0) & (ids < self.num_nodes())
        return is_node if ids.dim() else bool(is_node)


def _make_refusal(name: str, reason: str) -> Callable[..., NoReturn]:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise ConfigError(f"{name} of a local graph is not supported: {reason}")

    return refuse


_FIXED = "its structure is planned with all ranks; change the graph before it is partitioned"
_EDGE_ENDS = (
    "the sources of its edges are on several ranks, so they have no rows here; use update_all or "
    "apply_edges, which see both ends"
)
_ALL_EDGES = "messages must go along all edges at once, so that ranks exchange the same rows; use update_all"
_REFUSED: Mapping[str, str] = {
    _FIXED: """
        add_nodes add_edges remove_nodes remove_edges add_self_loop remove_self_loop to_simple
        reorder_graph
    """,
    _EDGE_ENDS: """
        all_edges find_edges in_edges out_edges edge_ids has_edges_between predecessors successors
        reverse adj adj_external adj_tensors inc line_graph adjacency_matrix incidence_matrix
        to_networkx to_cugraph filter_edges subgraph edge_subgraph in_subgraph out_subgraph
        khop_in_subgraph khop_out_subgraph node_type_subgraph edge_type_subgraph sample_neighbors
        global_uniform_negative_sampling
    """,
    _ALL_EDGES: """
        send_and_recv pull push prop_nodes prop_edges multi_update_all
    """,
}
for _reason, _names in _REFUSED.items():
    for _name in _names.split():
        setattr(LocalGraph, _name, _make_refusal(_name, _reason))


def local_graph(
    g: DistGraph,
    *,
    columns: Sequence[str] | None = None,
    edge_columns: Sequence[str] = (),
    targets: str | None = "train_mask",
    use_pp: bool = True,
) -> LocalGraph:
    """Return this rank's nodes and their in-edges as one graph for ``model(g, x)``. Every rank must call it.

    The model sees only own rows. Its input is ``x = lg.ndata["feat"]``, and the loss is over
    ``lg.ndata["train_mask"]``. Wrap the model with a full-graph strategy (``dx.init(strategy="full_graph")``,
    ``dx.wrap``), which sums the gradients. ``dgl.NID`` and ``dgl.EID`` have the global ids.

    In each epoch, each layer sends the source columns that messages read once to each rank that needs them,
    and the gradients back. With ``use_pp``, layer 1 sends nothing if its input is the unchanged features.

    Args:
        g: A graph with one node type and one edge type.
        columns: Names in ``g.ndata``. By default all of them.
        edge_columns: Names in ``g.edata``.
        targets: Mask column for the loss targets. If the graph has no such column, set ``lg.step_share =
            count_targets(...)``, or wrap with reduction="sum".
        use_pp: Whether to fetch and keep the halo for floating-point matrices.

    Raises:
        ConfigError: the session's strategy trains on mini-batches, the graph has several types, a column is
            unknown, or the arguments differ between ranks. It is raised on all ranks.
        PeerError: a rank is dead or silent.
    """

    def check_columns() -> tuple[Mapping[str, str], Mapping[str, str]]:
        if STRATEGIES.get(g.session.strategy).traits.unit != "full_graph":
            raise ConfigError(
                "dx.local_graph has rows of other ranks in its gradients, which strategy "
                f"{g.session.strategy!r} would weight like own rows; use dx.distribute(graph, "
                "strategy='full_graph'), or the same strategy in dx.init"
            )

        check_one_type("dx.local_graph", g)
        check_graph(g)
        names = list(g.ndata) if columns is None else columns
        return _find_keys(g.ndata, names, "ndata"), _find_keys(g.edata, edge_columns, "edata")

    node_keys, edge_keys = run_on_all_ranks(g.session, check_columns, ConfigError)
    arguments = {"columns": [*node_keys], "edge_columns": [*edge_keys], "targets": targets, "use_pp": use_pp}
    cover = g.session.options.get("aggregate") == "cover"
    wire_dtype: Any = g.session.options.get("wire_dtype", "same")
    check_equal(g.session, "a local graph", {**arguments, "cover": cover, "wire_dtype": wire_dtype})

    own_nodes = np.arange(*g.get_node_partition_policy(g.ntypes[0]).owned_range)
    plan = make_plans(g, own_nodes, num_layers=1, hops=0, cover=cover)
    (layer,) = plan.layers
    exchange = HaloExchange(g.session, layer, 1, wire_dtype)
    etype = g.canonical_etypes[0]
    graph_data: dict[str, Any] = {"out_degrees": g.out_degrees, "edge_order": g.orig_edge_ids}
    block = halo_block(layer, torch.from_numpy(plan.nodes), exchange, etype=etype, **graph_data)

    graph = LocalGraph(block)
    graph.edata.update(_pull_rows(g, edge_keys, layer.edge_ids))
    memory = RowMemory()
    for name, rows in _pull_rows(g, node_keys, plan.nodes).items():
        graph.ndata[name] = memory.convert(rows)
        if use_pp and rows.is_floating_point() and rows.dim() > 1:
            # Rows are sent in the stored type, which may be half as wide as the compute type.
            graph.keep_halo(name, memory.convert(exchange.fetch(rows, phase=PHASE)))

    if targets is not None and targets in graph.ndata:
        graph.step_share = count_targets(int(graph.ndata[targets].sum()), g.session)
    return place(graph, g.session.device)


def _find_keys(view: DataView, names: Sequence[str], view_name: str) -> dict[str, str]:
    columns = list(view)
    names = list_names(names)
    for name in names:
        if name not in columns or name in (dgl.NID, dgl.EID):
            raise ConfigError(f"g.{view_name} has no column {name!r} (known: {', '.join(columns) or 'none'})")
    return {name: view[name].kvstore_key for name in names}


def _pull_rows(g: DistGraph, keys: Mapping[str, str], ids: Array) -> dict[str, Tensor]:
    """Return the rows at ``ids`` by column name. All columns are requested at once."""
    pulls = {}
    for name, key in keys.items():
        pulls[name] = g.kvstore.submit_pull(key, ids, distinct=True, phase=PHASE)
    return {name: pull() for name, pull in pulls.items()}


@final
@dataclass(frozen=True)
class _ExchangedColumn:
    own_rows: Tensor
    version: int | None
    """Version counter of ``own_rows``, or None if changes are not tracked."""
    sources: Tensor

    def matches(self, rows: Tensor) -> bool:
        """Return whether ``rows`` have the same values and the same role in autograd."""
        is_same_memory = (
            rows.data_ptr() == self.own_rows.data_ptr()
            and rows.shape == self.own_rows.shape
            and rows.dtype == self.own_rows.dtype
            and rows.stride() == self.own_rows.stride()
        )
        if not is_same_memory or self.version is None or get_version(rows) != self.version:
            return False

        # Two tensors with shared memory may have separate gradients.
        with_gradient = rows.requires_grad and torch.is_grad_enabled()
        if with_gradient and rows is not self.own_rows:
            return False
        return with_gradient == self.sources.requires_grad
