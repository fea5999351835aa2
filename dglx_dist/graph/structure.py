"""The in-edges of one edge type as samplers read them: whole on every server, or cut over the servers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import final

import numpy as np

from dglx_dist.cluster.rpc import Pending
from dglx_dist.cluster.serve import Handler
from dglx_dist.cluster.session import Session
from dglx_dist.graph.in_edges import (
    NO_EDGES,
    CSCShard,
    Draw,
    InEdges,
    Piece,
    from_wire,
    join_pieces,
    to_wire,
)
from dglx_dist.graph.local_shards import LocalShards
from dglx_dist.graph.placement import Placement
from dglx_dist.graph.remote_plan import RemotePlan, plan_remote
from dglx_dist.graph.rows import Answered, Request, requests_of, submit_to_owners
from dglx_dist.records import Array, EdgeType


class Structure(ABC):
    """In-edges of one edge type over global ids. Nothing here is collective but :meth:`serve`."""

    etype: EdgeType
    num_sources: int
    num_destinations: int
    num_edges: int
    shards: tuple[CSCShard, ...]
    """What lies in this server's memory, in order of the ids; read-only."""

    @property
    @abstractmethod
    def is_whole(self) -> bool:
        """Whether every edge is in :attr:`shards`, which then has one element."""

    @abstractmethod
    def serve(self, op: str, draw: Draw) -> None:
        """Let :meth:`submit` answer ``op`` with ``draw``. All ranks must call it, with the same function.

        Raises:
            ConfigError: ``op`` is taken.
        """

    @abstractmethod
    def serves(self, op: str) -> bool:
        """Whether :meth:`serve` was called with ``op``; on all ranks the same."""

    @abstractmethod
    def submit(
        self,
        op: str,
        nodes: Array,
        parameters: str = "",
        *,
        exclude: Array = NO_EDGES,
        layer: int = 0,
        phase: str = "sampling",
    ) -> PendingInEdges:
        """Ask for in-edges of nodes and return at once; requests leave before local nodes are drawn.

        Sends 8 bytes per distinct remote node and receives 24 per edge (algorithms 1.3), counted under
        ``phase``; every request also has 8 per excluded edge of the server that is asked.

        Args:
            op: A name given to :meth:`serve`; ``in_edges`` (all of them) is always there.
            nodes: (K,) int64 global destination ids, each existing, any order, repeats allowed.
            parameters: Handed to the draw function as it is.
            exclude: (X,) int64 ascending ids of edges that the draw function shall leave out.
            layer, phase: Under which the bytes are counted.

        Raises:
            ConfigError: ``op`` is not served.
        """

    def ask(
        self,
        op: str,
        nodes: Array,
        parameters: str = "",
        *,
        exclude: Array = NO_EDGES,
        layer: int = 0,
        phase: str = "sampling",
    ) -> InEdges:
        """Return in-edges of the (K,) int64 ``nodes``; as :meth:`submit`, and waits."""
        return self.submit(op, nodes, parameters, exclude=exclude, layer=layer, phase=phase).result()

    @abstractmethod
    def close(self) -> None:
        """Answer other ranks no more: a barrier belongs before it."""

    @abstractmethod
    def in_degrees(self, nodes: Array) -> Array:
        """Return the (K,) int64 numbers of in-edges of existing destinations."""

    @abstractmethod
    def out_degrees(self, nodes: Array) -> Array:
        """Return the (K,) int64 numbers of out-edges of existing sources."""

    def find_edges(self, edge_ids: Array) -> tuple[Array, Array]:
        """Return (sources, destinations), (K,) int64 each, of existing edges."""
        sources, destinations = self.submit_find_edges(edge_ids)()
        return sources, destinations

    @abstractmethod
    def submit_find_edges(self, edge_ids: Array) -> Answered:
        """Ask for the sources and destinations of existing edges, and return at once."""


class PendingInEdges:
    """In-edges under way. :meth:`result` belongs to the thread that submitted."""

    def __init__(
        self,
        nodes: Array,
        local: Callable[[], list[Piece]],
        plan: RemotePlan | None = None,
        calls: Sequence[tuple[Pending, Request]] = (),
    ) -> None:
        self._nodes = nodes
        self._local = local
        self._plan = plan
        self._calls = calls

    def result(self) -> InEdges:
        """Draw for the own server's nodes, wait for the others, and return all in the order of the nodes.

        Raises:
            PeerError: an owner is dead or silent.
            RemoteError: an owner could not answer.
        """
        pieces = self._local()
        for pending, call in self._calls:
            assert self._plan is not None
            asked = self._plan.ids[call.first : call.last]
            starts = self._plan.starts[call.first : call.last + 1]
            edges = from_wire(asked, pending.result())
            pieces.append(Piece(edges=edges, starts=starts, positions=self._plan.positions))
        return join_pieces(len(self._nodes), pieces)


@final
class ReplicatedStructure(Structure):
    """The whole structure in this server's memory: positions are edge ids, and nothing is sent."""

    def __init__(self, etype: EdgeType, num_sources: int, indptr: Array, indices: Array) -> None:
        self.etype = etype
        self.num_sources = num_sources
        self.num_destinations = len(indptr) - 1
        self.num_edges = len(indices)
        self.indptr = indptr
        self.indices = indices
        self.shards = (CSCShard(indptr=indptr, indices=indices, first_node=0, first_edge=0),)
        self._local = LocalShards(self.shards, num_sources)

    @property
    def is_whole(self) -> bool:
        """True."""
        return True

    def serve(self, op: str, draw: Draw) -> None:
        """See :meth:`Structure.serve`."""
        self._local.serve(op, draw)

    def serves(self, op: str) -> bool:
        """See :meth:`Structure.serves`."""
        return self._local.serves(op)

    def submit(
        self,
        op: str,
        nodes: Array,
        parameters: str = "",
        *,
        exclude: Array = NO_EDGES,
        layer: int = 0,
        phase: str = "sampling",
    ) -> PendingInEdges:
        """See :meth:`Structure.submit`."""
        draw = self._local.draw_of(op)
        return PendingInEdges(nodes, lambda: self._local.pieces(draw, nodes, parameters, exclude))

    def close(self) -> None:
        """Nothing to do: nobody is answered."""

    def in_degrees(self, nodes: Array) -> Array:
        """See :meth:`Structure.in_degrees`."""
        return self._local.in_degrees(nodes)[0]

    def out_degrees(self, nodes: Array) -> Array:
        """See :meth:`Structure.out_degrees`."""
        return self._local.out_degrees(nodes)[0]

    def submit_find_edges(self, edge_ids: Array) -> Answered:
        """See :meth:`Structure.submit_find_edges`."""
        return lambda: list(self._local.find_edges(edge_ids))


@final
class PartitionedStructure(Structure):
    """The own server's parts in memory, the others asked for by one-sided calls.

    Args:
        session: The run.
        placement: Which rank answers for a server.
        label: Tells the structures of one run apart; the same on all ranks.
        etype: The edge type.
        num_sources: Nodes of the source type.
        shards: The own server's parts, in order.
        bounds: ((S + 1,), (S + 1,)) int64 id ranges of the servers: destinations and edges.
    """

    def __init__(
        self,
        session: Session,
        placement: Placement,
        label: str,
        etype: EdgeType,
        num_sources: int,
        shards: tuple[CSCShard, ...],
        bounds: tuple[Array, Array],
    ) -> None:
        self.etype = etype
        self.num_sources = num_sources
        self._node_bounds, self._edge_bounds = bounds
        self.num_destinations, self.num_edges = int(bounds[0][-1]), int(bounds[1][-1])
        self.shards = shards
        self._session = session
        self._placement = placement
        self._label = f"{label}.{':'.join(etype)}"
        self._local = LocalShards(shards, num_sources)
        self._ops: list[str] = []
        self._serve_draw("in_edges")
        for op, compute in (
            ("in_degrees", self._local.in_degrees),
            ("out_degrees", self._local.out_degrees),
            ("find_edges", self._local.find_edges),
        ):
            self._serve_compute(op, compute)

    @property
    def is_whole(self) -> bool:
        """False."""
        return False

    def serve(self, op: str, draw: Draw) -> None:
        """See :meth:`Structure.serve`."""
        self._local.serve(op, draw)
        self._serve_draw(op)

    def serves(self, op: str) -> bool:
        """See :meth:`Structure.serves`."""
        return self._local.serves(op)

    def submit(
        self,
        op: str,
        nodes: Array,
        parameters: str = "",
        *,
        exclude: Array = NO_EDGES,
        layer: int = 0,
        phase: str = "sampling",
    ) -> PendingInEdges:
        """See :meth:`Structure.submit`."""
        draw = self._local.draw_of(op)
        plan = plan_remote(nodes, self._node_bounds, self._placement.topology.server)
        calls = [
            (
                self._session.rpc.submit(
                    call.rank,
                    self._op(op),
                    parameters,
                    [plan.ids[call.first : call.last], *self._excluded_at(call.rank, exclude)],
                    phase=phase,
                    layer=layer,
                ),
                call,
            )
            for call in requests_of(plan, self._placement)
        ]
        return PendingInEdges(
            nodes, lambda: self._local.pieces(draw, nodes, parameters, exclude), plan, calls
        )

    def _excluded_at(self, rank: int, exclude: Array) -> list[Array]:
        """Return the excluded edges that lie with the server of ``rank``: no array when there are none."""
        server = self._placement.topology.server_of_rank[rank]
        first, last = np.searchsorted(exclude, self._edge_bounds[server : server + 2])
        return [exclude[first:last]] if last > first else []

    def close(self) -> None:
        """See :meth:`Structure.close`."""
        for op in self._ops:
            self._session.rpc.unregister(op)
        self._ops.clear()

    def in_degrees(self, nodes: Array) -> Array:
        """See :meth:`Structure.in_degrees`; asks the owners."""
        return self._submit("in_degrees", nodes, self._node_bounds, self._local.in_degrees)()[0]

    def out_degrees(self, nodes: Array) -> Array:
        """See :meth:`Structure.out_degrees`; asks every server: out-edges lie with their destinations."""
        topology = self._placement.topology
        calls = [
            self._session.rpc.submit(
                self._placement.serving_rank(server), self._op("out_degrees"), "", [nodes], phase="structure"
            )
            for server in range(topology.num_servers)
            if server != topology.server
        ]
        total = self._local.out_degrees(nodes)[0]
        return sum((call.result()[0] for call in calls), total)

    def submit_find_edges(self, edge_ids: Array) -> Answered:
        """See :meth:`Structure.submit_find_edges`; asks the owners."""
        return self._submit("find_edges", edge_ids, self._edge_bounds, self._local.find_edges)

    def _submit(
        self, op: str, ids: Array, bounds: Array, compute: Callable[[Array], Sequence[Array]]
    ) -> Answered:
        return submit_to_owners(self._session, self._placement, self._op(op), ids, bounds, compute)

    def _op(self, op: str) -> str:
        return f"{self._label}.{op}"

    def _serve_draw(self, op: str) -> None:
        draw = self._local.draw_of(op)

        def answer(parameters: str, arrays: Sequence[Array]) -> list[Array]:
            nodes, exclude = arrays[0], arrays[1] if len(arrays) > 1 else NO_EDGES
            own = self._placement.topology.server
            first, last = self._node_bounds[own], self._node_bounds[own + 1]
            if len(nodes) and (nodes.min() < first or nodes.max() >= last):
                raise IndexError(f"server {own} owns the nodes {first} to {last - 1} of {self.etype[2]!r}")
            return to_wire(
                nodes, join_pieces(len(nodes), self._local.pieces(draw, nodes, parameters, exclude))
            )

        self._register(op, answer)

    def _serve_compute(self, op: str, compute: Callable[[Array], Sequence[Array]]) -> None:
        self._register(op, lambda _, arrays: compute(arrays[0]))

    def _register(self, op: str, handler: Handler) -> None:
        self._session.rpc.register(self._op(op), handler)
        self._ops.append(self._op(op))
