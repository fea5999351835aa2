"""One graph server's part: local edges, halo, intervals, rows to send, features and labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, final

import numpy as np
import torch

from dglx_dist.comm.collectives import barrier, gather_int64, run_on_all_ranks
from dglx_dist.comm.mailbox import OneSidedExchange
from dglx_dist.comm.session import Session
from dglx_dist.errors import ConfigError
from dglx_dist.graph.partition_book import RowOwners
from dglx_dist.graph.row_kernels import torch_dtype
from dglx_dist.records import Array
from dglx_dist.strategies.base import Objective
from dglx_dist.strategies.serverless.cut import Captured
from dglx_dist.strategies.serverless.program import EDGE_DATA, FEATURES, Program, Slot
from dglx_dist.strategies.serverless.tasks import round_rows

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph


_MAX_LOCAL = 2**31 - 1


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class ServerGraph:
    """Graph of one server: n own nodes, m halo nodes, and E edges into own nodes.

    Own nodes have the local ids 0 to n - 1, and halo nodes have the local ids n to n + m - 1. A halo node
    belongs to another graph server and has an edge into an own node. An owner's halo nodes are ordered by
    global id, and so is the owner's list in :attr:`Part.boundary`. So a position in these lists means the
    same node on both servers.
    """

    rank: int
    starts: Array
    """(W + 1,) int64 global id of the first node on each graph server."""
    indptr: Array
    """(n + 1,) int64 positions in ``sources`` where each node's in-edges begin."""
    sources: Array
    """(E,) int32 local source ids for the in-edges."""
    halo: Array
    """(m,) int64 global ids of the halo nodes, ascending."""
    halo_starts: Array
    """(W + 1,) int64 bounds. Server r owns the halo nodes ``halo[halo_starts[r]:halo_starts[r + 1]]``."""
    out_indptr: Array
    """(n + m + 1,) int64 positions in ``out_targets`` where each local id's out-edges begin."""
    out_targets: Array
    """(E,) int32 own nodes to which the edges lead, by source."""
    out_edges: Array
    """(E,) int64 positions in ``sources`` for the same edges, by source."""
    first_edge: int = 0
    """Global id of the first edge. The next edges have the next ids, in the same order as ``sources``."""

    @property
    def own_ids(self) -> Array:
        return np.arange(self.starts[self.rank], self.starts[self.rank + 1], dtype=np.int64)

    @property
    def num_own(self) -> int:
        return len(self.indptr) - 1

    @property
    def num_halo(self) -> int:
        return len(self.halo)

    @property
    def num_local(self) -> int:
        return self.num_own + self.num_halo

    @property
    def num_servers(self) -> int:
        return len(self.starts) - 1

    def halo_ids(self, owner: int) -> Array:
        """Return the ascending global ids for halo nodes that graph server ``owner`` owns."""
        return self.halo[self.halo_starts[owner] : self.halo_starts[owner + 1]]

    def own_positions(self, ids: Array, asker: int) -> Array:
        """Return (k,) int32 local ids for the (k,) global ``ids``, which are halo nodes on server ``asker``.

        Raises ConfigError if ``ids`` are not ascending, or no nodes on this rank.
        """
        first = int(self.starts[self.rank])
        end = int(self.starts[self.rank + 1])
        is_valid = ids.dtype == np.int64 and ids.ndim == 1 and bool((np.diff(ids) > 0).all())
        if is_valid and len(ids):
            is_valid = first <= ids[0] and ids[-1] < end
        if not is_valid:
            raise ConfigError(
                f"graph server {asker} asked {self.rank} for rows that are not among its "
                f"nodes {first} to {end - 1}; check that both have the same partition"
            )

        return (ids - first).astype(np.int32)


def local_graph(
    rank: int, starts: Sequence[int] | Array, indptr: Array, sources: Array, first_edge: int = 0
) -> ServerGraph:
    """Return the local graph on ``rank``.

    Args:
        sources: (E,) global ids. The other arrays are as in :class:`ServerGraph`.

    Raises:
        ConfigError: the graph is too large for int32 local ids.
    """
    bounds = np.asarray(starts, dtype=np.int64)
    first = int(bounds[rank])
    end = int(bounds[rank + 1])
    num_own = end - first
    global_ids = sources.astype(np.int64, copy=False)
    is_own = (global_ids >= first) & (global_ids < end)
    halo = np.unique(global_ids[~is_own])
    if num_own + len(halo) > _MAX_LOCAL:
        raise ConfigError(
            f"graph server {rank} has {num_own} own nodes and {len(halo)} halo nodes, but its "
            f"limit is {_MAX_LOCAL}; use more ranks"
        )

    local_ids = np.empty(len(global_ids), dtype=np.int32)
    local_ids[is_own] = global_ids[is_own] - first
    local_ids[~is_own] = num_own + np.searchsorted(halo, global_ids[~is_own])

    # Sort the edges by source. Edges from one source stay ordered by target.
    order = np.argsort(local_ids, kind="stable")
    out_degrees = np.bincount(local_ids, minlength=num_own + len(halo))
    targets = np.repeat(np.arange(num_own, dtype=np.int32), np.diff(indptr))
    return ServerGraph(
        rank=rank,
        starts=bounds,
        indptr=np.ascontiguousarray(indptr, dtype=np.int64),
        sources=local_ids,
        halo=halo,
        halo_starts=np.searchsorted(halo, bounds),
        out_indptr=np.concatenate([[0], np.cumsum(out_degrees)]).astype(np.int64),
        out_targets=targets[order],
        out_edges=order.astype(np.int64),
        first_edge=first_edge,
    )


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """One server's graph in k intervals, with the data that the program reads."""

    graph: ServerGraph
    bounds: Array
    """(k + 1,) int64 local ids. Interval i has the nodes ``bounds[i]:bounds[i + 1]``."""
    interval_sizes: Array
    """(W k,) node counts by interval, for all graph servers."""
    boundary: Sequence[Array]
    """For each peer (b,) int32 ascending own nodes in the peer's halo. See :class:`ServerGraph`."""
    inputs: Mapping[str, Array]
    """The program's inputs by slot: (n + m, width) own rows, then halo rows, or (E, width) edge rows."""
    labels: Array
    """(n,) int32 classes or (n, width) numbers. Nodes that are not trained on have -1 or NaN."""

    @cached_property
    def boundary_bounds(self) -> list[Array]:
        """For each peer, (k + 1,) int64 bounds between the intervals in ``boundary[peer]``."""
        return [np.searchsorted(nodes, self.bounds) for nodes in self.boundary]

    @cached_property
    def returned_positions(self) -> list[list[Array]]:
        """Halo nodes whose gradients each interval sends, by peer and then by interval.

        Several intervals may have an edge from the same halo node. The last of these intervals sends the
        summed gradient to the peer that owns the node, because all others are done by then. An entry has (g,)
        int32 ascending positions in the peer's list of halo nodes, which is described in
        :class:`ServerGraph`.
        """
        graph = self.graph
        # A node's out-edges are ordered by target, so the last edge has the last target.
        last_edges = graph.out_indptr[graph.num_own + 1 :] - 1
        last_targets = graph.out_targets[last_edges]
        senders = np.searchsorted(self.bounds, last_targets, side="right") - 1

        positions_of_peers = []
        for peer in range(graph.num_servers):
            senders_of_peer = senders[graph.halo_starts[peer] : graph.halo_starts[peer + 1]]
            # Sort the positions by interval, and cut the result where the next interval begins.
            order = np.argsort(senders_of_peer, kind="stable").astype(np.int32)
            cuts = np.searchsorted(senders_of_peer[order], np.arange(1, self.num_intervals))
            positions_of_peers.append(np.split(order, cuts))
        return positions_of_peers

    @property
    def first_interval(self) -> int:
        """Global number of this server's interval 0."""
        return self.graph.rank * self.num_intervals

    @property
    def num_intervals(self) -> int:
        return len(self.bounds) - 1

    def nodes_of(self, interval: int) -> slice:
        return slice(int(self.bounds[interval]), int(self.bounds[interval + 1]))

    def edges_of(self, interval: int) -> slice:
        nodes = self.nodes_of(interval)
        return slice(int(self.graph.indptr[nodes.start]), int(self.graph.indptr[nodes.stop]))


def cut_intervals(indptr: Array, sources: Array, num_intervals: int) -> Array:
    """Cut n nodes into contiguous intervals that are balanced in nodes and in crossing edges.

    A crossing edge comes from another interval or a halo node. Nodes and crossing edges each make half an
    interval's load. So no interval has more than twice the mean in either, up to one node's share. The
    crossing edges depend on the cut, so the cut is refined five times, and the best one is returned.

    Args:
        indptr: (n + 1,) int64 over the in-edges.
        sources: (E,) local ids. Ids from n on are halo nodes.
        num_intervals: k >= 1. Some are empty if there are fewer nodes.

    Returns:
        (k + 1,) int64 ``bounds``. Interval i has the nodes ``bounds[i]:bounds[i + 1]``.
    """
    num_nodes = len(indptr) - 1
    even_ends = num_nodes * np.arange(1, num_intervals) // num_intervals
    bounds = _round_bounds(even_ends, num_nodes)
    best_bounds = bounds
    best_load = np.inf
    for _ in range(5):
        # All nodes' shares in the load sum to 1.
        shares = np.full(num_nodes, 1 / max(num_nodes, 1))
        num_crossing = crossing_edges(indptr, sources, bounds)
        total_crossing = num_crossing.sum()
        if total_crossing:
            shares = (shares + num_crossing / total_crossing) / 2
        share_ends = np.cumsum(shares)
        load = np.diff(np.concatenate([[0.0], share_ends])[bounds]).max()
        if load < best_load:
            best_bounds = bounds
            best_load = load

        # A node on a cut goes to the interval that contains the middle of its share.
        middles = share_ends - shares / 2
        inner_ends = np.searchsorted(middles, np.arange(1, num_intervals) / num_intervals)
        bounds = _round_bounds(inner_ends, num_nodes)
    return best_bounds


def _round_bounds(inner_ends: Array, num_nodes: int) -> Array:
    """Return bounds between intervals with aligned rows, from the ends of all intervals but the last."""
    return np.array([0, *(round_rows(int(end)) for end in inner_ends), num_nodes], np.int64)


def crossing_edges(indptr: Array, sources: Array, bounds: Array) -> Array:
    """Count each node's in-edges from other intervals or halo nodes. Return (n,) int64."""
    num_nodes = len(indptr) - 1
    interval_of_node = np.repeat(np.arange(len(bounds) - 1, dtype=np.int32), np.diff(bounds))
    targets = np.repeat(np.arange(num_nodes), np.diff(indptr))
    is_own = sources < num_nodes
    crosses = ~is_own
    crosses[is_own] = interval_of_node[sources[is_own]] != interval_of_node[targets[is_own]]
    return np.bincount(targets[crosses], minlength=num_nodes).astype(np.int64)


HALO_IDS = "lambda.ghost_ids"
PRELOAD = "preload"
"""Ledger phase with 8 bytes per halo node for the lists, and 8 + s F bytes for its features."""


def read_structure(g: DistGraph) -> ServerGraph:
    """Return this rank's local graph. A server's nodes are split evenly over its ranks."""
    rank = g.session.topology.rank
    bounds = g.get_node_partition_policy(g.ntypes[0]).bounds
    starts = RowOwners(bounds, g.session.topology).starts
    own_ids = np.arange(starts[rank], starts[rank + 1], dtype=np.int64)
    edges = g.structure(g.canonical_etypes[0]).ask("in_edges", own_ids)
    first_edge = int(edges.edge_ids[0]) if len(edges.edge_ids) else 0
    assert (np.diff(edges.edge_ids) == 1).all(), "edges are numbered by their targets"
    return local_graph(rank, starts, edges.indptr, edges.sources, first_edge)


def exchange_boundaries(session: Session, graph: ServerGraph) -> list[Array]:
    """Return for each peer the own nodes that are in the peer's halo: (b,) int32, ascending.

    Every rank must call this function.
    """
    exchange = OneSidedExchange(session, HALO_IDS, "look at its output")
    barrier(session, "listing the halo nodes of all graph servers")
    halo_of_peers = {peer: [graph.halo_ids(peer)] for peer in range(graph.num_servers)}
    exchange.post(0, "", halo_of_peers, phase=PRELOAD)
    messages = exchange.mailbox.take(0, "", halo_of_peers, "the list of its halo nodes")
    return [graph.own_positions(ids, peer) for peer, (ids,) in messages.items()]


def read_features(g: DistGraph, graph: ServerGraph, name: str, dtype: str) -> Array:
    """Return (n + m, F) features for own nodes and halo nodes from the node data ``name``."""
    ids = np.concatenate([graph.own_ids, graph.halo])
    rows = g.kvstore.pull(g.ndata[name].kvstore_key, ids, distinct=True, phase=PRELOAD)
    # torch converts, because NumPy has no bfloat16.
    return np.ascontiguousarray(rows.to(torch_dtype(dtype)).numpy())


def read_input(g: DistGraph, graph: ServerGraph, slot: Slot, dtype: str, feature: str) -> Array:
    """Return the rows for a program input: (n + m, width) for nodes, or (E, width) for edges.

    ``feature`` names the node data for the slot x. Rows on other servers are requested from them.
    """
    if slot.name == FEATURES:
        return read_features(g, graph, feature, dtype)
    if slot.per == "node":
        # The other node inputs are the degrees.
        ids = torch.from_numpy(np.concatenate([graph.own_ids, graph.halo]))
        degrees = g.in_degrees(ids) if slot.name == "in_degrees" else g.out_degrees(ids)
        return np.ascontiguousarray(degrees.numpy(), np.int64)[:, None]

    name = slot.name.removeprefix(EDGE_DATA)
    ids = torch.arange(graph.first_edge, graph.first_edge + len(graph.sources))
    rows = g.edata[name][ids].to(torch_dtype(slot.dtype or dtype))
    return np.ascontiguousarray(rows.reshape(len(ids), slot.width).numpy())


def open_part(g: DistGraph, captured: Captured, objective: Objective, targets: Array, intervals: int) -> Part:
    """Return this rank's part, with the graph data that the program reads. Every rank must call it.

    Args:
        targets: (n,) bool, True for own nodes that are trained on.
        intervals: Number of intervals.

    Raises:
        ConfigError: the graph does not fit on a rank. All ranks raise it.
    """
    session, program = g.session, captured.program
    run_on_all_ranks(session, lambda: check_columns(g, objective, program), ConfigError)
    graph = read_structure(g)
    boundary = exchange_boundaries(session, graph)
    bounds = cut_intervals(graph.indptr, graph.sources, intervals)
    sizes = gather_int64(np.diff(bounds), session).reshape(-1)

    def read() -> Part:
        # The layer itself would raise only after training, when evaluation calls it.
        isolated_nodes = np.flatnonzero(np.diff(graph.indptr) == 0)
        if captured.needs_in_edges and len(isolated_nodes):
            node = int(graph.own_ids[isolated_nodes[0]])
            raise ConfigError(
                f"node {node} has no in-edge, and {captured.needs_in_edges} "
                "refuses such nodes; make it with allow_zero_in_degree=True, or add self-loops to the graph"
            )
        return Part(
            graph=graph,
            boundary=boundary,
            bounds=bounds,
            interval_sizes=sizes,
            inputs={
                slot.name: read_input(g, graph, slot, program.dtype, objective.feature)
                for slot in program.inputs
            },
            labels=read_labels(g, graph.own_ids, objective.label, targets, program),
        )

    return run_on_all_ranks(session, read, ConfigError)


def check_columns(g: DistGraph, objective: Objective, program: Program) -> None:
    """Raise ConfigError if features or labels are missing, or if the features have another width."""
    for name in (objective.feature, objective.label):
        if name not in g.ndata:
            known = ", ".join(map(repr, g.ndata)) or "none"
            raise ConfigError(f"the nodes have no tensor {name!r} (known: {known})")
    shape = tuple(g.ndata[objective.feature].shape)
    if len(shape) != 2 or shape[1] != program.features:
        raise ConfigError(
            f"the features {objective.feature!r} have the shape {shape}, but the model's first layer takes "
            f"{program.features} columns; build the model for this number of columns"
        )


def read_labels(g: DistGraph, own: Array, name: str, targets: Array, program: Program) -> Array:
    """Return the labels for the ``own`` nodes. See :class:`Part`.

    Raises ConfigError if a training node's label is no class in the model, or not finite.
    """
    labels = g.ndata[name][torch.from_numpy(own)].numpy()
    # The check comes before the conversion to int32, in which a label 2**32 would become class 0.
    if program.label.dtype:
        num_classes = program.scores.shape[0]
        is_wrong = targets & ((labels < 0) | (labels >= num_classes))
        expected = f"the model has classes from 0 to {num_classes - 1}"
    else:
        labels = labels.reshape(len(own), program.label.width).astype(program.dtype)
        is_wrong = targets & ~np.isfinite(labels).all(axis=1)
        expected = "it must be finite"

    if is_wrong.any():
        node = int(is_wrong.argmax())  # the first wrong node
        raise ConfigError(
            f"training node {int(own[node])} has the label {labels[node]}, but {expected}; "
            "remove nodes without a label from the training nodes, or build the model with more classes"
        )

    if program.label.dtype:
        return np.where(targets, labels, -1).astype(np.int32)
    return np.where(targets[:, None], labels, np.nan).astype(program.dtype)
