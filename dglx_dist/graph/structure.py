"""In-edges by destination, for one edge type: replicated on every server, or partitioned over the servers."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, final

import numpy as np
from numba import njit

from dglx_dist.comm.collectives import run_on_all_ranks
from dglx_dist.comm.rpc import Handler
from dglx_dist.comm.session import Session
from dglx_dist.data.storage.reader import StoredDataset
from dglx_dist.errors import ConfigError
from dglx_dist.graph.partition_book import Placement
from dglx_dist.graph.row_kernels import MAX_IDS, find_first_outside, plan_remote, spread_rows
from dglx_dist.records import Array, EdgeType


@dataclass(frozen=True, kw_only=True)
class CSCShard:
    """In-edges of consecutive destinations, for compiled kernels."""

    indptr: Array
    """(n + 1,) int64 row starts, beginning with 0."""
    indices: Array
    """(E,) int32 or int64 global source ids."""
    first_node: int
    """Global id of the first destination."""
    first_edge: int
    """Global id of the first edge. The edge at position i has the id ``first_edge + i``."""

    @property
    def last_node(self) -> int:
        return self.first_node + len(self.indptr) - 1

    @property
    def last_edge(self) -> int:
        return self.first_edge + len(self.indices)


@dataclass(frozen=True, kw_only=True)
class InEdges:
    """Some in-edges of K nodes, node by node."""

    indptr: Array
    """(K + 1,) int64 row starts. Node k has the edges ``indptr[k]:indptr[k + 1]``."""
    sources: Array
    """(e,) int64 global source ids."""
    edge_ids: Array
    """(e,) int64 global edge ids."""

    def keep(self, mask: Array) -> "InEdges":
        """Return the edges that the (e,) bool ``mask`` marks."""
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(mask)])
        return InEdges(indptr=offsets[self.indptr], sources=self.sources[mask], edge_ids=self.edge_ids[mask])


NO_EDGES: Array = np.empty(0, dtype=np.int64)

PendingAnswers: TypeAlias = Callable[[], list[Array]]
"""Function that computes local answers, waits for remote ones and returns all. Only one thread calls it."""

Draw: TypeAlias = Callable[[CSCShard, Array, str, Array], InEdges]
"""Function that draws in-edges. Its arguments are a shard, (k,) int64 global node ids in the shard,
parameters, and (X,) int64 ascending edge ids that must not be drawn. For requests with rows, (C, k) int64
rows replace the node ids, see :meth:`Structure.submit`.
"""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """In-edges of some distinct nodes, and where these nodes occur among the requested nodes."""

    edges: InEdges
    starts: Array
    """(nodes + 1,) int64 starts. Node i of ``edges`` is at ``positions[starts[i]:starts[i + 1]]``."""
    positions: Array
    """(P,) int64 positions among the requested nodes, sorted by node."""


def join_pieces(num_nodes: int, pieces: Sequence[Piece]) -> InEdges:
    """Join in-edges of ``num_nodes`` requested nodes. Each node is in exactly one of ``pieces``."""
    if len(pieces) == 1 and np.array_equal(pieces[0].positions, np.arange(num_nodes)):
        return pieces[0].edges

    degrees = np.zeros(num_nodes, dtype=np.int64)
    for piece in pieces:
        sizes = np.diff(piece.edges.indptr)
        spread_rows(sizes, degrees, piece.starts, piece.positions, 0, len(sizes))

    indptr = np.concatenate([np.zeros(1, np.int64), np.cumsum(degrees)])
    sources = np.empty(indptr[-1], np.int64)
    edge_ids = np.empty(indptr[-1], np.int64)
    for piece in pieces:
        edges = piece.edges
        targets = piece.starts, piece.positions, indptr
        _copy_to_positions(edges.indptr, edges.sources, *targets, sources)
        _copy_to_positions(edges.indptr, edges.edge_ids, *targets, edge_ids)
    return InEdges(indptr=indptr, sources=sources, edge_ids=edge_ids)


def to_wire(nodes: Array, edges: InEdges) -> list[Array]:
    """Return [sources, destinations, edge ids], (e,) int64 each. They take 24 bytes per edge."""
    destinations = np.repeat(nodes, np.diff(edges.indptr))
    return [edges.sources.astype(np.int64, copy=False), destinations, edges.edge_ids]


def from_wire(
    nodes: Array, arrays: Sequence[Array], num_sources: int, edge_range: Array | tuple[int, int]
) -> InEdges:
    """Undo :func:`to_wire`.

    Args:
        nodes: Distinct (k,) int64 ids that were requested.
        arrays: The answer.
        num_sources: Sources must be in [0, ``num_sources``).
        edge_range: First edge id of the answering server, and the end of its ids.

    Raises:
        ValueError: the answer has malformed arrays, other nodes, or sources or edges outside these ranges.
    """
    # All values are checked, because compiled code uses them as indices without checks.
    sources, destinations, edge_ids = arrays
    if any(array.dtype != np.int64 or array.shape != (len(sources),) for array in arrays):
        descriptions = ", ".join(f"{array.dtype} of shape {array.shape}" for array in arrays)
        raise ValueError(f"the answer must have three (e,) int64 arrays of one length, not {descriptions}")

    _check_answer_ids("source", sources, 0, num_sources)
    _check_answer_ids("edge", edge_ids, int(edge_range[0]), int(edge_range[1]))
    indptr = np.empty(len(nodes) + 1, dtype=np.int64)
    if _find_row_starts(nodes, destinations, indptr) != len(destinations):
        raise ValueError("the answer has edges of nodes that were not requested, or in another order")
    return InEdges(indptr=indptr, sources=sources, edge_ids=edge_ids)


def _check_answer_ids(name: str, ids: Array, first: int, end: int) -> None:
    """Raise ValueError if an id is outside [``first``, ``end``)."""
    position = find_first_outside(ids - first, end - first)
    if position >= 0:
        raise ValueError(f"the answer has the {name} {ids[position]}, but ids are {first} to {end - 1}")


def rows_to_wire(edges: InEdges) -> list[Array]:
    """Return [in-degrees, sources, edge ids] as int64: 8 bytes per row and 16 per edge."""
    return [np.diff(edges.indptr), edges.sources.astype(np.int64, copy=False), edges.edge_ids]


def rows_from_wire(
    num_rows: int, arrays: Sequence[Array], num_sources: int, edge_range: Array | tuple[int, int]
) -> InEdges:
    """Rebuild the in-edges of ``num_rows`` nodes from the arrays that :func:`rows_to_wire` made.

    Raises ValueError if the arrays do not fit each other, or as :func:`from_wire` does.
    """
    degrees, sources, edge_ids = arrays
    destinations = np.arange(num_rows)
    if degrees.shape != (num_rows,) or degrees.dtype != np.int64:
        raise ValueError(
            f"the answer must have {num_rows} int64 in-degrees, not {degrees.dtype} of shape {degrees.shape}"
        )
    # Check each in-degree before their sum, because the sum of wrong ones may overflow.
    if len(degrees) and (degrees.min() < 0 or degrees.max() > len(sources)):
        raise ValueError(f"the answer has an in-degree that is not between 0 and {len(sources)}")
    if degrees.sum() != len(sources):
        raise ValueError(f"the answer has {len(sources)} edges, but its counts add up to {degrees.sum()}")
    return from_wire(
        destinations, [sources, np.repeat(destinations, degrees), edge_ids], num_sources, edge_range
    )


def all_in_edges(shard: CSCShard, nodes: Array, _parameters: str = "", exclude: Array = NO_EDGES) -> InEdges:
    """Return all in-edges of the (k,) int64 ``nodes``. Each node's edges are ascending by id.

    A draw that takes all edges cannot leave some out, so ``exclude`` must be empty.
    """
    assert not len(exclude), "a draw of all in-edges cannot leave edges out"
    rows = nodes - shard.first_node
    starts = shard.indptr[rows]
    degrees = shard.indptr[rows + 1] - starts
    indptr = np.concatenate([np.zeros(1, np.int64), np.cumsum(degrees)])
    # An edge's index in the result is as far from its node's start there as the edge is from `starts`.
    edges = np.arange(indptr[-1]) + np.repeat(starts - indptr[:-1], degrees)
    sources = shard.indices[edges].astype(np.int64)
    return InEdges(indptr=indptr, sources=sources, edge_ids=edges + shard.first_edge)


def count_sources(
    shards: Sequence[CSCShard], num_sources: int, nodes: tuple[int, int] | None = None
) -> Array:
    """Count the edges from each source, as (N,). With ``nodes``, only edges into this id range count."""
    counts = np.zeros(num_sources, np.int64)
    for shard in shards:
        shard_range = shard.first_node, shard.last_node
        begin, end = np.clip(nodes or shard_range, *shard_range) - shard.first_node
        _count(shard.indices[shard.indptr[begin] : shard.indptr[end]], counts)
    return counts


@njit(cache=True, nogil=True)
def _count(sources: Array, counts: Array) -> None:
    for edge in range(len(sources)):
        counts[np.uint64(sources[edge])] += 1


@njit(cache=True, nogil=True)
def _copy_to_positions(
    indptr: Array, values: Array, starts: Array, positions: Array, out_ptr: Array, out: Array
) -> None:
    """Copy each node's edge values to every position where the node was requested, see `Piece`."""
    for node in range(len(indptr) - 1):
        for request in range(starts[node], starts[node + 1]):
            index = out_ptr[positions[request]]
            for edge in range(indptr[node], indptr[node + 1]):
                out[index] = values[edge]
                index += 1


@njit(cache=True, nogil=True)
def _find_row_starts(nodes: Array, destinations: Array, indptr: Array) -> int:
    """Write the (k + 1,) row starts to ``indptr``, if the (e,) ``destinations`` have the order of ``nodes``.

    Return how many edges precede the first one that is out of order. This is e if all are in order.
    """
    edge = 0
    indptr[0] = 0
    for k in range(len(nodes)):
        while edge < len(destinations) and destinations[edge] == nodes[k]:
            edge += 1
        indptr[k + 1] = edge
    return edge


@njit(cache=True, nogil=True)
def _count_outside(indptr: Array, indices: Array, rows: Array, first: int, last: int) -> Array:
    """Count, for each of the (k,) ``rows``, the edges with a source outside [first, last)."""
    counts = np.zeros(len(rows), np.int64)
    for i in range(len(rows)):
        for edge in range(indptr[rows[i]], indptr[rows[i] + 1]):
            if indices[edge] < first or indices[edge] >= last:
                counts[i] += 1
    return counts


class Structure:
    """In-edges by destination, for one edge type and global ids. Only :meth:`serve` is collective.

    Args:
        num_sources: Number of nodes that have the source type.
        shards: Structure in this server's memory, in id order. Read-only.
    """

    num_destinations: int
    num_edges: int
    is_replicated: bool
    """Whether every edge is in :attr:`shards`, which then has one shard."""

    def __init__(self, etype: EdgeType, num_sources: int, shards: tuple[CSCShard, ...]) -> None:
        self.etype = etype
        self.num_sources = num_sources
        self.shards = shards
        self._draws: dict[str, Draw] = {"in_edges": all_in_edges}
        self._local_out_degrees: Array | None = None

    def serve(self, op: str, draw: Draw) -> None:
        """Let :meth:`submit` answer ``op`` with ``draw``. All ranks must call this with the same function."""
        if op in self._draws:
            raise ConfigError(f"{op!r} is already served. Choose another name.")
        self._draws[op] = draw

    def serves(self, op: str) -> bool:
        return op in self._draws

    def submit(
        self,
        op: str,
        nodes: Array,
        parameters: str = "",
        *,
        exclude: Array = NO_EDGES,
        layer: int = 0,
        phase: str = "sampling",
    ) -> Callable[[], InEdges]:
        """Request in-edges of nodes and return at once, before local nodes are drawn.

        Sends 8 bytes per distinct remote node and receives 24 bytes per edge. A request also has 8 bytes for
        each excluded edge that the answering server owns. A request with (C, K) rows sends 8 C bytes per
        remote row, and receives 8 bytes per row and 16 per edge.

        Args:
            op: Name that was passed to :meth:`serve`, or ``in_edges`` for all in-edges.
            nodes: (K,) int64 global ids of existing destinations in any order. Ids may be repeated. Or (C, K)
                int64 values: the ids first, and then C - 1 other values that each draw depends on.
            parameters: Parameters for the draw function.
            exclude: (X,) int64 ascending ids of edges that the draw function leaves out.
            layer, phase: Keys of the traffic ledger.

        Returns:
            Function that draws for the local server's nodes, waits for the others, and returns all in-edges,
            in node order. The submitting thread must call it. It raises PeerError if an owner is dead or
            silent, and RemoteError if an owner cannot answer.
        """
        draw = self._get_draw(op)
        submit = self._submit_remote if nodes.ndim == 1 else self._submit_remote_rows
        wait_for_remote = submit(op, nodes, parameters, exclude, layer=layer, phase=phase)

        def wait() -> InEdges:
            local_pieces = self._draw_pieces(draw, nodes, parameters, exclude)
            return join_pieces(nodes.shape[-1], [*local_pieces, *wait_for_remote()])

        return wait

    def ask(self, op: str, nodes: Array, parameters: str = "", **options: Any) -> InEdges:
        """Return in-edges of the (K,) int64 ``nodes``. :meth:`submit` describes ``options``."""
        return self.submit(op, nodes, parameters, **options)()

    def close(self) -> None:
        """Stop answering other ranks. Call a barrier first."""

    def in_degrees(self, nodes: Array, outside: tuple[int, int] | None = None) -> Array:
        """Count the in-edges of each node, as (K,) int64. Sources in the range ``outside`` do not count."""
        return self._count_in_edges(nodes, outside)[0]

    def count_edges_before(self, node: int) -> int:
        """Count the in-edges in :attr:`shards` into all destinations below ``node``."""
        total = 0
        for shard in self.shards:
            row = min(max(node, shard.first_node), shard.last_node) - shard.first_node
            total += int(shard.indptr[row])
        return total

    def out_degrees(self, nodes: Array) -> Array:
        """Count the out-edges at each existing source, as (K,) int64."""
        return self._count_out_edges(nodes)[0]

    def submit_find_edges(self, edge_ids: Array) -> PendingAnswers:
        """Request [sources, destinations], (K,) int64 each, for existing edges, and return at once."""
        return lambda: list(self._find_edges(edge_ids))

    def _submit_remote(
        self, op: str, nodes: Array, parameters: str, exclude: Array, *, layer: int, phase: str
    ) -> Callable[[], list[Piece]]:
        return list

    def _submit_remote_rows(
        self, op: str, rows: Array, parameters: str, exclude: Array, *, layer: int, phase: str
    ) -> Callable[[], list[Piece]]:
        return list

    def _get_draw(self, op: str) -> Draw:
        if op not in self._draws:
            raise ConfigError(f"{op!r} is not served (known: {', '.join(self._draws)}). Call serve() first.")
        return self._draws[op]

    def _draw_pieces(self, draw: Draw, nodes: Array, parameters: str, exclude: Array) -> list[Piece]:
        """Draw in-edges of the nodes on this server. Return one piece per shard that has such nodes.

        Args:
            draw: Function that draws in a shard.
            nodes: (K,) ids, or (C, K) values with the ids first.
            parameters, exclude: Arguments for ``draw``.
        """
        pieces = []
        for shard, positions in self._find_local_nodes(nodes):
            if not len(positions):
                continue
            local_nodes = nodes
            if len(positions) < nodes.shape[-1]:
                local_nodes = np.ascontiguousarray(nodes[..., positions])
            edges = draw(shard, local_nodes, parameters, exclude)
            # Here every node is asked for once. Pieces from other servers may answer several positions.
            starts = np.arange(len(positions) + 1)
            pieces.append(Piece(edges=edges, starts=starts, positions=positions))
        return pieces

    def _find_local_nodes(self, nodes: Array) -> Iterator[tuple[CSCShard, Array]]:
        ids = nodes if nodes.ndim == 1 else nodes[0]
        for shard in self.shards:
            yield shard, np.flatnonzero((ids >= shard.first_node) & (ids < shard.last_node))

    def _count_in_edges(self, nodes: Array, outside: tuple[int, int] | None = None) -> Sequence[Array]:
        """Return a list with one (K,) int64 array: the in-degrees, or 0 for nodes that are not local."""
        degrees = np.zeros(len(nodes), dtype=np.int64)
        for shard, positions in self._find_local_nodes(nodes):
            rows = nodes[positions] - shard.first_node
            if outside is None:
                degrees[positions] = shard.indptr[rows + 1] - shard.indptr[rows]
            else:
                degrees[positions] = _count_outside(shard.indptr, shard.indices, rows, *outside)
        return [degrees]

    def _count_out_edges(self, nodes: Array) -> Sequence[Array]:
        """Return a list with one (K,) int64 array: how many edges lead from each node to local nodes."""
        if self._local_out_degrees is None:
            # Count at the first request and not earlier, because counting reads every edge.
            self._local_out_degrees = count_sources(self.shards, self.num_sources)
        return [self._local_out_degrees[nodes]]

    def _find_edges(self, edge_ids: Array) -> Sequence[Array]:
        """Return [sources, destinations], (K,) int64 each, 0 for edges that are not local."""
        sources = np.zeros(len(edge_ids), dtype=np.int64)
        destinations = np.zeros(len(edge_ids), dtype=np.int64)
        for shard in self.shards:
            is_local = (edge_ids >= shard.first_edge) & (edge_ids < shard.last_edge)
            positions = np.flatnonzero(is_local)
            edges = edge_ids[positions] - shard.first_edge
            # Search from the right. Nodes without edges start at the same edge as the next node.
            rows = np.searchsorted(shard.indptr, edges, side="right") - 1
            sources[positions] = shard.indices[edges]
            destinations[positions] = shard.first_node + rows
        return [sources, destinations]


@final
class ReplicatedStructure(Structure):
    """The complete structure in each server's memory. An edge's index is its id."""

    is_replicated = True

    def __init__(self, etype: EdgeType, num_sources: int, indptr: Array, indices: Array) -> None:
        shard = CSCShard(indptr=indptr, indices=indices, first_node=0, first_edge=0)
        super().__init__(etype, num_sources, (shard,))
        self.num_destinations = len(indptr) - 1
        self.num_edges = len(indices)


@final
class PartitionedStructure(Structure):
    """The local server's parts in memory. One-sided calls to other servers return the other in-edges.

    The constructor is collective. It raises StorageError on all ranks if a part cannot be opened on its
    server. All ranks pass the same ``label``, which is unique in the session.
    """

    is_replicated = False

    def __init__(
        self, session: Session, dataset: StoredDataset, placement: Placement, label: str, etype: EdgeType
    ) -> None:
        manifest = dataset.manifest
        node_offsets = manifest.node_offsets[etype[2]]
        edge_offsets = manifest.edge_offsets[etype]

        def open_shards() -> tuple[CSCShard, ...]:
            return tuple(
                CSCShard(
                    indptr=dataset.part(part).indptr(etype),
                    indices=dataset.part(part).indices(etype),
                    first_node=int(node_offsets[part]),
                    first_edge=int(edge_offsets[part]),
                )
                for part in placement.local_parts
            )

        shards = run_on_all_ranks(session, open_shards)
        super().__init__(etype, manifest.num_nodes(etype[0]), shards)
        self._node_bounds = placement.server_offsets(node_offsets)
        self._edge_bounds = placement.server_offsets(edge_offsets)
        self.num_destinations = int(self._node_bounds[-1])
        self.num_edges = int(self._edge_bounds[-1])
        self._session = session
        self._placement = placement
        self._label = f"{label}.{':'.join(etype)}"
        self._ops: list[str] = []
        self._serve_draw("in_edges")
        self._register("in_degrees", self._answer_in_degrees)
        self._register("out_degrees", lambda _, arrays: self._count_out_edges(*arrays))
        self._register("find_edges", lambda _, arrays: self._find_edges(*arrays))

    def serve(self, op: str, draw: Draw) -> None:
        super().serve(op, draw)
        self._serve_draw(op)

    def _submit_remote(
        self, op: str, nodes: Array, parameters: str, exclude: Array, *, layer: int, phase: str
    ) -> Callable[[], list[Piece]]:
        """Request in-edges of nodes on other servers, with the same parameters as :meth:`submit`.

        Return a function that waits for the answers and returns one piece per request.
        """
        plan = plan_remote(nodes, self._node_bounds, self._placement.topology.server)
        submit = self._session.rpc.submit
        calls = []
        for rank, first, end in plan.requests(self._placement.serving_ranks):
            edge_range, excluded = self._find_excluded(rank, exclude)
            arrays = [plan.ids[first:end], *excluded]
            call = submit(rank, self._name_op(op), parameters, arrays, phase=phase, layer=layer)
            calls.append((call, first, end, edge_range))

        def wait() -> list[Piece]:
            pieces = []
            for call, first, end, edge_range in calls:
                edges = from_wire(plan.ids[first:end], call.result(), self.num_sources, edge_range)
                starts = plan.starts[first : end + 1]
                pieces.append(Piece(edges=edges, starts=starts, positions=plan.positions))
            return pieces

        return wait

    def _submit_remote_rows(
        self, op: str, rows: Array, parameters: str, exclude: Array, *, layer: int, phase: str
    ) -> Callable[[], list[Piece]]:
        """Request draws for rows on other servers, as :meth:`_submit_remote` does for nodes."""
        servers = np.searchsorted(self._node_bounds, rows[0], side="right") - 1
        calls = []
        for server, rank in enumerate(self._placement.serving_ranks):
            edge_range, excluded = self._find_excluded(rank, exclude)
            all_positions = np.flatnonzero(servers == server)
            is_own = server == self._placement.topology.server
            for first in range(0, 0 if is_own else len(all_positions), MAX_IDS):
                positions = all_positions[first : first + MAX_IDS]
                arrays = [np.ascontiguousarray(rows[:, positions]), *excluded]
                submit = self._session.rpc.submit
                call = submit(rank, self._name_op(op), parameters, arrays, phase=phase, layer=layer)
                calls.append((call, positions, edge_range))

        def wait() -> list[Piece]:
            return [
                Piece(
                    edges=rows_from_wire(len(positions), call.result(), self.num_sources, edge_range),
                    starts=np.arange(len(positions) + 1),
                    positions=positions,
                )
                for call, positions, edge_range in calls
            ]

        return wait

    def _find_excluded(self, rank: int, exclude: Array) -> tuple[Array, list[Array]]:
        """Return the edge range that a rank's server owns, and the excluded edges to send to it, if any."""
        server = self._placement.topology.server_of_rank[rank]
        edge_range = self._edge_bounds[server : server + 2]
        begin, end = np.searchsorted(exclude, edge_range)
        return edge_range, [exclude[begin:end]] if end > begin else []

    def close(self) -> None:
        for op in self._ops:
            self._session.rpc.unregister(op)
        self._ops.clear()

    def in_degrees(self, nodes: Array, outside: tuple[int, int] | None = None) -> Array:
        parameters = ""
        if outside is not None:
            parameters = f"{outside[0]} {outside[1]}"
        count_local = partial(self._count_in_edges, outside=outside)
        wait = self._submit_to_owners("in_degrees", nodes, self._node_bounds, count_local, parameters)
        return wait()[0]

    def _answer_in_degrees(self, parameters: str, arrays: Sequence[Array]) -> list[Array]:
        outside = None
        if parameters:
            first, end = parameters.split()
            outside = int(first), int(end)
        return [*self._count_in_edges(arrays[0], outside)]

    def out_degrees(self, nodes: Array) -> Array:
        # Every server is asked, because out-edges are stored with their destinations.
        op = self._name_op("out_degrees")
        own_rank = self._placement.topology.rank
        other_ranks = [rank for rank in self._placement.serving_ranks if rank != own_rank]
        submit = self._session.rpc.submit
        calls = [submit(rank, op, "", [nodes], phase="structure") for rank in other_ranks]
        (degrees,) = self._count_out_edges(nodes)
        return sum((call.result()[0] for call in calls), degrees)

    def submit_find_edges(self, edge_ids: Array) -> PendingAnswers:
        return self._submit_to_owners("find_edges", edge_ids, self._edge_bounds, self._find_edges)

    def _submit_to_owners(
        self, op: str, ids: Array, bounds: Array, compute: Callable[[Array], Any], parameters: str = ""
    ) -> PendingAnswers:
        """Call ``op`` on the servers that own ``ids``, and return at once.

        Sends 8 bytes per distinct remote id and receives 8 bytes per answer.

        Args:
            ids: (K,) int64 ids.
            bounds: (S + 1,) int64. Server s owns the ids ``bounds[s]:bounds[s + 1]``.
            compute: Function that answers for local ids.

        Returns:
            Function that waits for as many (K,) int64 arrays as ``compute`` returns, ordered like ``ids``.
        """
        server = self._placement.topology.server
        plan = plan_remote(ids, bounds, server)
        submit = self._session.rpc.submit
        op = self._name_op(op)
        calls = []
        for rank, first, end in plan.requests(self._placement.serving_ranks):
            call = submit(rank, op, parameters, [plan.ids[first:end]], phase="structure")
            calls.append((call, first, end))

        def wait() -> list[Array]:
            is_local = (ids >= bounds[server]) & (ids < bounds[server + 1])
            local_answers = compute(ids[is_local])
            results = [np.empty(len(ids), dtype=np.int64) for _ in local_answers]
            for result, values in zip(results, local_answers, strict=True):
                result[is_local] = values
            for call, first, end in calls:
                for result, values in zip(results, call.result(), strict=True):
                    spread_rows(values, result, plan.starts, plan.positions, first, end)
            return results

        return wait

    def _name_op(self, op: str) -> str:
        return f"{self._label}.{op}"

    def _serve_draw(self, op: str) -> None:
        """Answer other ranks' draws for nodes that this server owns, after checking each request."""
        draw = self._get_draw(op)

        def answer(parameters: str, arrays: Sequence[Array]) -> list[Array]:
            nodes = arrays[0]
            exclude = arrays[1] if len(arrays) > 1 else NO_EDGES
            server = self._placement.topology.server
            first = self._node_bounds[server]
            end = self._node_bounds[server + 1]
            if any(array.dtype != np.int64 for array in arrays) or (np.diff(exclude) < 0).any():
                raise ValueError("a request must have int64 nodes and ascending int64 edges")
            ids = nodes if nodes.ndim == 1 else nodes[0]
            if len(ids) and (ids.min() < first or ids.max() >= end):
                raise IndexError(f"server {server} owns the nodes {first} to {end - 1} of {self.etype[2]!r}")

            edges = join_pieces(len(ids), self._draw_pieces(draw, nodes, parameters, exclude))
            return to_wire(nodes, edges) if nodes.ndim == 1 else rows_to_wire(edges)

        self._register(op, answer)

    def _register(self, op: str, handler: Handler) -> None:
        self._session.rpc.register(self._name_op(op), handler)
        self._ops.append(self._name_op(op))
