"""Collective construction of full-graph plans from the seeds of all ranks (GraNNDis).

See docs/strategies/shared_preload.md.

The first rank of every server is its leader. It expands the seeds by one-sided requests, splits the rows
among the ranks of the server and writes them to shared memory. Each rank then builds its own layers. No rank
reads more of the graph than the in-edges of the rows of its server.
"""

from __future__ import annotations

import contextlib
import secrets
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, final

import numpy as np

from dglx_dist.comm.collectives import barrier, broadcast_json, gather_int64
from dglx_dist.comm.mailbox import OneSidedExchange
from dglx_dist.comm.session import Session
from dglx_dist.errors import ConfigError, PeerError, RemoteError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.ids import Ids, as_ids
from dglx_dist.graph.partition_book import RowOwners
from dglx_dist.graph.row_kernels import number_distinct
from dglx_dist.graph.structure import Structure
from dglx_dist.keyed_random import hash_ids, stream_key
from dglx_dist.progress import progress
from dglx_dist.records import Array, StepShare
from dglx_dist.strategies.full_graph.expansion import (
    AUTO,
    EasOptions,
    EasSelector,
    HeldNeighborhood,
    KHopNeighborhood,
    NeighborhoodExpander,
    Selection,
    check_split,
    read_held,
    remove_held,
    split_rows,
    write_held,
)
from dglx_dist.strategies.full_graph.halo_plan import HaloLayer, PlanSource, RankPlan, RowIndex

PLAN = "plan"
"""Ledger phase of the ids that ranks exchange while planning."""

_NOTIFY_FAILURE_S = 5.0
"""Time that a failed rank waits for the delivery of its failure message, per rank."""


@final
class FailedOnAnotherRankError(RemoteError):
    """Another rank failed in this job and has notified all ranks."""


@final
class PlanExchange:
    """Steps in which ranks exchange arrays, grouped into numbered jobs: sequential, with every rank in each.

    All ranks must construct it before one sends. ``label`` prefixes the RPC operations.
    """

    def __init__(self, session: Session, label: str) -> None:
        self._session = session
        self._failed_op, self._job_op = f"{label}.failed", f"{label}.job"
        self._job, self._current = 0, (current := [0])
        self._arrays = OneSidedExchange(session, f"{label}.deliver", "create the same loaders on every rank")
        self._mailbox = mailbox = self._arrays.mailbox

        def fail(name: str, arrays: Sequence[Array]) -> list[Array]:
            job, source = map(int, name.split())
            text = arrays[0].tobytes().decode(errors="replace")
            who = f"rank {source} on {session.hosts[source]}"
            message = f"{who} failed to make its plan: {text}"
            mailbox.fail(job, lambda: FailedOnAnotherRankError(message))
            return []

        # Closures, not methods: bound methods would keep the planner alive as long as the session.
        session.rpc.register(self._failed_op, fail)
        session.rpc.register(self._job_op, lambda _name, _arrays: [np.array(current, dtype=np.int64)])
        for op in (self._failed_op, self._job_op):
            weakref.finalize(self, session.rpc.unregister, op)

    @contextmanager
    def job(self) -> Iterator[int]:
        """Begin the next job and yield its number; an error inside ends the job on all ranks.

        Other ranks wait without a time limit as long as this rank is inside the job.
        """
        self._job += 1
        self._mailbox.begin(self._job)
        self._current[0] = self._job
        try:
            yield self._job
        except FailedOnAnotherRankError:
            raise
        except Exception as error:
            self._tell_failure(error)
            raise
        finally:
            self._current[0] = 0

    def exchange(
        self,
        step: str,
        outgoing: Mapping[int, Sequence[Array]],
        among: Collection[int],
        empty: Sequence[Array] = (),
    ) -> dict[int, list[Array]]:
        """Send arrays to each rank of ``among``, and return theirs by ascending rank; all of them call it.

        ``step`` is unique within a job; ranks that are not in ``outgoing`` get ``empty``.

        Raises:
            RemoteError: another rank failed in this job; the error has its text.
            PeerError: a rank is dead, or is not planning within the session's time-out; it is named.
        """
        sent = {rank: outgoing.get(rank, empty) for rank in among}
        self._arrays.post(self._job, step, sent, phase=PLAN)
        what = f"{step!r} of plan {self._job}"
        received = self._mailbox.take(self._job, step, among, what, self._is_in_this_job)
        return dict(sorted(received.items()))

    def _is_in_this_job(self, rank: int) -> bool:
        (job,) = self._session.rpc.call(rank, self._job_op, "", [], phase="control")
        return int(job[0]) == self._job

    def _tell_failure(self, error: Exception) -> None:
        # Delivery to dead or hanging ranks is not awaited beyond the time limit.
        topology, calls = self._session.topology, []
        text = np.frombuffer(f"{type(error).__name__}: {error}".encode()[:2000], dtype=np.uint8)
        name = f"{self._job} {topology.rank}"
        for rank in range(topology.world_size):
            with contextlib.suppress(PeerError, RemoteError):
                if rank != topology.rank:
                    calls.append(
                        self._session.rpc.submit(rank, self._failed_op, name, [text], phase="control")
                    )
        for call in calls:
            with contextlib.suppress(PeerError, RemoteError):
                call.result(_NOTIFY_FAILURE_S)


@final
@dataclass(frozen=True, kw_only=True)
class ServerLeaders:
    """The first rank of every server, and the node ranges of the servers."""

    ranks: tuple[int, ...]
    """(S,) rank by server."""
    server: int
    """The server of this rank."""
    bounds: Array
    """(S + 1,) int64; server s owns the nodes ``bounds[s]:bounds[s + 1]``."""

    @property
    def own(self) -> tuple[int, int]:
        """Half-open node range of this rank's server."""
        return int(self.bounds[self.server]), int(self.bounds[self.server + 1])

    def split(self, ids: Array) -> dict[int, Array]:
        """Split the (n,) ascending int64 ``ids`` by owning server; keys are leader ranks."""
        at = np.searchsorted(ids, self.bounds)
        return {rank: ids[at[server] : at[server + 1]] for server, rank in enumerate(self.ranks)}


def grow_levels(
    structure: Structure,
    seeds: Array,
    depth: tuple[int, int],
    leaders: ServerLeaders,
    exchange: PlanExchange,
    *,
    eas: Selection | None = None,
    advance: Callable[[int], None],
) -> KHopNeighborhood:
    """Return the rows that this server computes; all leaders must call it in a job of ``exchange``.

    At level ``hops`` and above, a server computes its own nodes that any server reads, so servers exchange
    the ids that they read from each other. Below, a server computes whatever its rows read. ``seeds`` are its
    (K,) ascending distinct int64 output rows, ``depth`` is (L, hops). ``eas`` selects the nodes that the
    server may use, only with hops equal to L. ``advance`` is called with 1 after each level.
    """
    num_layers, hops = depth
    allowed = None if eas is None else np.union1d(eas(structure, leaders.own, seeds), seeds)
    expander = NeighborhoodExpander(structure, seeds, allowed)
    met = np.empty(0, np.int64)
    for level in range(num_layers - 1, -1, -1):
        sources = expander.sources()
        met = np.union1d(met, sources) if len(sources) else met
        if level >= hops:
            outgoing = {rank: [ids] for rank, ids in leaders.split(sources).items()}
            incoming = exchange.exchange(f"rows of level {level}", outgoing, leaders.ranks)
            expander.add(np.unique(np.concatenate([ids for (ids,) in incoming.values()])))
        else:
            # All sources met so far: at the levels above, rows of other servers were not added.
            expander.add(met)
        advance(1)
    return expander.finish()


@final
@dataclass(frozen=True, kw_only=True)
class RankRows:
    """The rows that one rank holds, in the order of the server's rows."""

    nodes: Array
    """(n,) int64 global ids."""
    counts: Array
    """(L + 1,) int64; the rows of level l are the first ``counts[l]`` rows."""
    indptr: Array
    """(counts[1] + 1,) int64."""
    edge_ids: Array
    """(E,) int64 global ids of the in-edges of the rows of level 1."""
    sources: Array
    """(d,) ascending int64 global ids of the distinct sources of these edges."""
    source_of: Array
    """(E,) int64 position of each edge's source in :attr:`sources`."""


HoldersOf: TypeAlias = Callable[[Array], Array]
"""Maps (k,) ascending int64 ids of other servers' nodes to the (k,) int64 ranks that hold them."""


def own_rows(held: HeldNeighborhood, rank: int) -> RankRows:
    closure = held.closure
    rows = np.flatnonzero(held.holders == rank)
    counts = np.searchsorted(rows, closure.counts)
    with_edges = rows[: counts[1]]
    first, lengths = closure.indptr[with_edges], np.diff(closure.indptr)[with_edges]
    indptr = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    at = np.arange(indptr[-1]) + np.repeat(first - indptr[:-1], lengths)
    distinct, number = number_distinct(np.asarray(closure.sources[at]))
    order = np.argsort(distinct)
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    return RankRows(
        nodes=np.asarray(closure.nodes[rows]),
        counts=counts,
        indptr=indptr,
        edge_ids=np.asarray(closure.edge_ids[at]),
        sources=distinct[order],
        source_of=place[number],
    )


def read_layers(
    own: RankRows, held: HeldNeighborhood, hops: int, inner: tuple[int, int], rank: int, holders_of: HoldersOf
) -> list[HaloLayer]:
    """Return the L layers of ``rank``, input layer first, without ``send`` lists; equal ones are one object.

    ``own`` are the rows of the rank, ``held`` those of its server, whose half-open node range is ``inner``;
    layers up to ``hops`` read only rows of the own server. ``holders_of`` is called once, for sources above.
    """
    num_layers = len(own.counts) - 1
    inside = (own.sources >= inner[0]) & (own.sources < inner[1])
    in_server = _holders_in_server(own, held)
    anywhere = in_server.copy()
    if hops < num_layers:
        outside = np.flatnonzero(~inside & _read_by(own, hops + 1))
        anywhere[outside] = holders_of(own.sources[outside])
    place = RowIndex(own.nodes, _num_ids(own)).places(own.sources)
    layers: list[HaloLayer] = []
    for layer in range(1, num_layers + 1):
        same_as_before = (
            layer > 1
            and (layer > hops) == (layer - 1 > hops)
            and own.counts[layer] == own.counts[layer - 1]
            and own.counts[layer - 1] == own.counts[layer - 2]
        )
        if same_as_before:
            layers.append(layers[-1])
        else:
            layers.append(_layer_of(own, layer, anywhere if layer > hops else in_server, place, rank))
    return layers


def _layer_of(own: RankRows, layer: int, holders: Array, place: Array, rank: int) -> HaloLayer:
    """Return layer ``layer``; (d,) ``holders`` and ``place`` give the rank and own row of each source."""
    num_own, targets = int(own.counts[layer - 1]), int(own.counts[layer])
    indptr = own.indptr[: targets + 1]
    source_of = own.source_of[: indptr[-1]]
    halo = np.flatnonzero(_read_by(own, layer) & (holders != rank))
    # Sources ascend, so a stable sort by rank leaves them ascending within each rank.
    halo = halo[np.argsort(holders[halo], kind="stable")]
    position = place.copy()
    position[halo] = num_own + np.arange(len(halo))
    indices = position[source_of]
    assert not len(indices) or 0 <= indices.min() <= indices.max() < num_own + len(halo)
    ranks, counts = np.unique(holders[halo], return_counts=True)
    return HaloLayer(
        own_rows=num_own,
        targets=targets,
        indptr=indptr,
        indices=indices,
        edge_ids=own.edge_ids[: indptr[-1]],
        halo_nodes=own.sources[halo],
        receive=tuple(zip(ranks.tolist(), counts.tolist(), strict=True)),
        send=(),
    )


def _read_by(own: RankRows, layer: int) -> Array:
    """Return (d,) bool: whether a target of ``layer`` reads the source."""
    read = np.zeros(len(own.sources), dtype=bool)
    read[own.source_of[: own.indptr[own.counts[layer]]]] = True
    return read


def _holders_in_server(own: RankRows, held: HeldNeighborhood) -> Array:
    """Return (d,) int64 ranks of the server that hold each source; -1 for sources outside the server."""
    places = RowIndex(held.closure.nodes, _num_ids(own, held)).places(own.sources)
    return np.where(places >= 0, held.holders[places], -1).astype(np.int64)


def _num_ids(own: RankRows, held: HeldNeighborhood | None = None) -> int:
    nodes = own.nodes if held is None else held.closure.nodes
    return int(max(nodes.max(initial=-1), own.sources.max(initial=-1))) + 1


_SAME_AS_BEFORE = -1


def finish_layers(
    own: RankRows, layers: Sequence[HaloLayer], exchange: PlanExchange, world_size: int
) -> list[HaloLayer]:
    """Exchange halo requests, and return ``layers`` with their ``send`` lists; collective in a job.

    Sends 8 bytes per layer and rank, and 8 bytes per halo row of each layer that differs from the previous
    one.
    """
    ranks = range(world_size)
    requests = {rank: encode_requested_rows(layers, rank) for rank in ranks}
    received = exchange.exchange("requested rows", requests, ranks)
    sent = {rank: decode_requested_rows(own, message) for rank, message in received.items()}
    finished: list[HaloLayer] = []
    for number, layer in enumerate(layers):
        same = number > 0 and layer is layers[number - 1]
        pairs = ((rows[number - 1], rows[number]) for rows in sent.values() if number)
        if same and all(one is other or not len(one) + len(other) for one, other in pairs):
            finished.append(finished[-1])
            continue
        send = tuple((rank, rows[number]) for rank, rows in sorted(sent.items()) if len(rows[number]))
        finished.append(replace(layer, send=send))
    return finished


def encode_requested_rows(layers: Sequence[HaloLayer], rank: int) -> list[Array]:
    """Return [(L,) int64 row counts, -1 for the same rows as one layer before; int64 ids] for ``rank``."""
    counts = np.full(len(layers), _SAME_AS_BEFORE, dtype=np.int64)
    requested = [np.empty(0, np.int64)]
    for number, layer in enumerate(layers):
        if number == 0 or layer is not layers[number - 1]:
            requested.append(layer.halo_of(rank))
            counts[number] = len(requested[-1])
    return [counts, np.concatenate(requested)]


def decode_requested_rows(own: RankRows, message: Sequence[Array]) -> list[Array]:
    """Return, for each of L layers, the (n,) int64 own rows of a request; equal ones are one object."""
    counts, ids = message
    if not len(ids):
        return [np.empty(0, np.int64)] * len(counts)
    highest = int(max(own.nodes.max(initial=-1), ids.max())) + 1
    rows = RowIndex(own.nodes, highest).places(ids)
    assert not (rows < 0).any(), "another rank requests rows that this one does not hold"
    requested: list[Array] = []
    first = 0
    for number, count in enumerate(counts.tolist()):
        if count == _SAME_AS_BEFORE:
            requested.append(requested[-1])
            continue
        requested.append(rows[first : first + count])
        assert not count or requested[-1].max() < own.counts[number], "requested rows of too low a level"
        first += count
    return requested


MIN_NODES_FOR_PROGRESS = 1 << 17
"""Rank 0 shows a progress bar for graphs of at least this size."""


@final
@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """Parameters of a plan; equal on all ranks except for the seeds."""

    seeds: Ids
    """(K,) ids or a mask, nodes of any server. Duplicates, also across ranks, count once."""
    num_layers: int
    """L, at least 1."""
    hops: int
    """k in 0..L: number of layers that a server computes alone; 0: full_graph, L: no rows cross servers."""
    eas: Selection | None = None
    """Selects the nodes that a server may use (expansion-aware sampling); needs hops == L. None: all."""
    split: str = AUTO
    """Partitioner that splits the rows of a server among its ranks; ``auto``: METIS. Unused with hops 0,
    where a rank computes the rows that it owns."""
    seeds_stay: bool = False
    """Whether a server computes the seeds given by its ranks (needs hops == L), or the seeds that it owns."""
    show_progress: bool = True
    """Whether rank 0 shows a progress bar for large graphs."""


@final
class Planner:
    """Makes plans for ``g``, of one node and edge type. Every rank must construct it, and answers with it.

    ConfigError: several types, a server without nodes, or more ranks than nodes.
    """

    def __init__(self, g: DistGraph) -> None:
        check_graph(g)
        self._g, self._session = g, g.session
        topology = self._topology = g.session.topology
        policy = g.get_node_partition_policy(g.ntypes[0])
        self._bounds, self._owners = policy.bounds, RowOwners(policy.bounds, topology)
        self._leaders = ServerLeaders(
            ranks=tuple(topology.ranks_of_server(server)[0] for server in range(topology.num_servers)),
            server=topology.server,
            bounds=policy.bounds,
        )
        label = str(broadcast_json(secrets.token_hex(4), self._session))
        self._label = f"full_graph.{label}"
        self._exchange = PlanExchange(self._session, self._label)
        # No rank may send before all listen.
        barrier(self._session, "making plans")

    def plan(self, request: PlanRequest) -> RankPlan:
        """Return this rank's plan; all ranks must call it with the same requests in the same order.

        One call at a time, from any thread: it uses one-sided messages only. The ledger counts fetched
        in-edges under ``preload_structure`` and exchanged ids under ``plan``. ConfigError: the request is
        invalid, or differs between ranks; IndexError: a seed is no node; RemoteError: another rank failed.
        """
        with self._exchange.job() as job:
            check_request(request)
            seeds = self._seeds_of_server(request)
            held = self._rows_of_server(request, seeds, job)
            return self._plan_of_rank(request, held)

    def _seeds_of_server(self, request: PlanRequest) -> Array:
        """Send the seeds to the leaders that compute them; return those received (none unless a leader)."""
        given = as_ids(request.seeds, self._g.num_nodes(), "the nodes")
        seeds = np.unique(given)
        asked = np.array([request.num_layers, request.hops, request.eas is not None, request.seeds_stay])
        header = np.concatenate([asked.astype(np.int64), [len(seeds)]])
        nothing = np.empty(0, np.int64)
        if request.seeds_stay:
            pieces = {self._leaders.ranks[self._topology.server]: seeds}
        else:
            pieces = self._leaders.split(seeds)
        ranks = range(self._topology.world_size)
        received = self._exchange.exchange(
            "seeds", {rank: [header, pieces.get(rank, nothing)] for rank in ranks}, ranks
        )
        _check_headers({rank: message[0] for rank, message in received.items()}, self._topology.rank)
        return np.unique(np.concatenate([message[1] for message in received.values()]))

    def _rows_of_server(self, request: PlanRequest, seeds: Array, job: int) -> HeldNeighborhood:
        members = self._topology.ranks_of_server(self._topology.server)
        folder = self._session.scratch / f"{self._label}-{job}"
        held = self._find_rows(request, seeds) if self._topology.rank == members[0] else None
        if held is not None and len(members) > 1:
            write_held(folder, held)
        if len(members) > 1:
            self._exchange.exchange("rows of the server", {}, members)
        found = read_held(folder) if held is None else held
        if len(members) > 1:
            self._exchange.exchange("rows read", {}, members)
        if held is not None:
            remove_held(folder)
        return found

    def _find_rows(self, request: PlanRequest, seeds: Array) -> HeldNeighborhood:
        """On a leader: return the rows of the server, each assigned to one of its ranks."""
        depth = request.num_layers, request.hops
        is_large = self._g.num_nodes() >= MIN_NODES_FOR_PROGRESS
        shown = request.show_progress and is_large and self._topology.rank == 0
        members = self._topology.ranks_of_server(self._topology.server)
        with progress("finding rows", request.num_layers + 1, enabled=shown) as advance:
            closure = grow_levels(
                self._g.structure(),
                seeds,
                depth,
                self._leaders,
                self._exchange,
                eas=request.eas,
                advance=advance,
            )
            if request.hops == 0:
                holders = self._owners.rank_of(closure.nodes).astype(np.int32)
            else:
                local = split_rows(closure, len(members), request.split, self._session.seed)
                holders = local.astype(np.int32) + np.int32(members[0])
            advance(1)
        return HeldNeighborhood(closure=closure, holders=holders)

    def _plan_of_rank(self, request: PlanRequest, held: HeldNeighborhood) -> RankPlan:
        first, last = self._leaders.own
        own = own_rows(held, self._topology.rank)
        layers = read_layers(
            own,
            held,
            request.hops,
            (first, last),
            self._topology.rank,
            lambda ids: self._holders_of(ids, request.hops, held),
        )
        nodes = held.closure.nodes
        return RankPlan(
            nodes=own.nodes,
            layers=tuple(finish_layers(own, layers, self._exchange, self._topology.world_size)),
            hops=request.hops,
            server_nodes=len(nodes),
            inner_nodes=last - first,
            external_nodes=int(np.count_nonzero((nodes < first) | (nodes >= last))),
        )

    def _holders_of(self, ids: Array, hops: int, held: HeldNeighborhood) -> Array:
        """Return the ranks that hold the (k,) ascending ``ids`` of other servers; collective in a job."""
        if hops == 0:
            return self._owners.rank_of(ids)
        placement, topology = self._g.placement, self._topology
        ranks = range(topology.world_size)
        at = np.searchsorted(ids, self._bounds)
        requests = {
            placement.serving_rank(server): [ids[at[server] : at[server + 1]]]
            for server in range(topology.num_servers)
        }
        nothing = [np.empty(0, np.int64)]
        received = self._exchange.exchange("requests for holders", requests, ranks, nothing)
        answers = _holders(held, {rank: requested for rank, (requested,) in received.items()})
        holders = self._exchange.exchange("holders of rows", answers, ranks)
        return np.concatenate([np.empty(0, np.int64), *(holders[rank][0] for rank in requests)])


def make_plans(g: DistGraph, seeds: Ids, num_layers: int, hops: int, **options: Any) -> RankPlan:
    """Return this rank's plan; every rank must call it. ``options`` are further fields of a PlanRequest."""
    return Planner(g).plan(PlanRequest(seeds=seeds, num_layers=num_layers, hops=hops, **options))


def check_one_type(strategy: str, g: DistGraph) -> None:
    if len(g.ntypes) != 1 or len(g.canonical_etypes) != 1:
        raise ConfigError(
            f"{strategy} trains on graphs of one node and one edge type, but this graph has the node types "
            f"{', '.join(g.ntypes)} and the edge types {', '.join(map(str, g.canonical_etypes))}; use "
            "strategy='data_parallel'"
        )


def check_graph(g: DistGraph) -> None:
    """Raise ConfigError unless full-graph strategies can train on ``g`` with the ranks of the session."""
    check_one_type("a full-graph strategy", g)
    topology = g.session.topology
    counts = np.diff(g.get_node_partition_policy(g.ntypes[0]).bounds)
    servers = topology.num_servers
    for server in np.flatnonzero(counts == 0).tolist():
        raise ConfigError(
            f"server {server} of {servers} owns no node of {g.name}; partition it again with "
            f"`dglx partition DATA --parts {servers} --out DIR`, or start fewer servers"
        )
    if topology.world_size > counts.sum():
        raise ConfigError(
            f"{g.name} has {counts.sum()} nodes for {topology.world_size} ranks; start at most as many "
            "ranks as there are nodes"
        )


def check_request(request: PlanRequest) -> None:
    if request.num_layers < 1:
        raise ConfigError(f"the model has {request.num_layers} layers; it needs at least 1")
    if not 0 <= request.hops <= request.num_layers:
        raise ConfigError(
            f"hops is {request.hops}; with {request.num_layers} layers it is 0 (nothing preloaded) to "
            f"{request.num_layers} (nothing crosses between servers)"
        )
    for name, given in (("eas", request.eas is not None), ("seeds_stay", request.seeds_stay)):
        if given and request.hops != request.num_layers:
            raise ConfigError(
                f"hops is {request.hops} with {name}, which needs independent servers; set hops to the "
                f"number of layers, {request.num_layers}"
            )
    check_split(request.split)


def _check_headers(headers: dict[int, Array], rank: int) -> None:
    names = ("num_layers", "hops", "eas", "seeds_stay")
    local = headers[rank]
    for other, header in headers.items():
        for place, name in enumerate(names):
            if header[place] != local[place]:
                raise ConfigError(
                    f"rank {rank} plans with {name} {local[place]} and rank {other} with {header[place]}; "
                    "use the same value on all ranks"
                )
    if not sum(int(header[-1]) for header in headers.values()):
        raise ConfigError("no rank was given a node to compute; give the loader at least one")


def _holders(held: HeldNeighborhood, requests: dict[int, Array]) -> dict[int, list[Array]]:
    """Return, by requesting rank, [(k,) int64 ranks of this server that hold the requested rows]."""
    highest = max(int(ids.max(initial=-1)) for ids in requests.values())
    if highest < 0:
        return {rank: [np.empty(0, np.int64)] for rank in requests}
    # The index costs as much as the server's rows, so it is built once for all requests.
    index = RowIndex(held.closure.nodes, max(highest, int(held.closure.nodes.max())) + 1)
    answers = {}
    for rank, ids in requests.items():
        places = index.places(ids)
        assert not (places < 0).any(), "another server requests rows that this one does not compute"
        answers[rank] = [held.holders[places].astype(np.int64)]
    return answers


@final
class WholeGraphPlans(PlanSource):
    """One step per epoch, on all nodes or on a sample of the external ones; construction is collective.

    With ``options`` of the sampling, the plans are those of the graph induced by a server's nodes and its
    sample, which is reproducible by ``seed``, for example after a restart. ``request`` has no ``eas``.
    """

    def __init__(
        self, g: DistGraph, request: PlanRequest, options: EasOptions | None = None, *, seed: int = 0
    ) -> None:
        self._request, self._options, self._seed = request, options, seed
        self._planner = Planner(g)
        if options is not None:
            self._selector = EasSelector(g)
            # No rank may send requests before all answer.
            barrier(g.session, "choosing external nodes")
        self._draw = -1
        self._plan: RankPlan = self.plan(0, 0)
        # All samples have the same seeds in total, though distributed differently over the ranks.
        self._num_global = int(gather_int64([self._plan.seeds], g.session).sum())

    def __len__(self) -> int:
        return 1

    def plan(self, epoch: int, step: int) -> RankPlan:
        draw = 0 if self._options is None else self._options.draw(epoch)
        if draw != self._draw:
            request = self._request
            if self._options is not None:
                rule = self._selector.rule(self._options, seed=self._seed, draw=draw)
                request = replace(request, eas=rule)
            self._plan = self._planner.plan(request)
            # Set only after success: a failed plan must be made again at the next request.
            self._draw = draw
        return self._plan

    def share(self, epoch: int, step: int) -> StepShare:
        return StepShare(num_local=self._plan.seeds, num_global=self._num_global)


@final
@dataclass(frozen=True, kw_only=True)
class ServerSeeds:
    """The seeds of this server, and the number of seeds of all servers."""

    own: Array
    """(n,) int64 ascending distinct seeds that this server owns, given by any rank."""
    counts: tuple[int, ...]
    """(S,) seeds of each server."""
    digest: int
    """Hash of the seeds of all servers."""

    def sizes(self, num_batches: int) -> Array:
        """Return (R, S) int64 seeds of each server in each of R cooperative batches."""
        counts, step = np.array(self.counts, np.int64), np.arange(num_batches)[:, None]
        return counts // num_batches + (step < counts % num_batches)


def gather_seeds(g: DistGraph, seeds: Array) -> ServerSeeds:
    """Gather the existing ids ``seeds`` of all ranks and return those of this server. Collective.

    Each rank temporarily holds the seeds of all ranks, 8 bytes each.
    """
    most = int(gather_int64([len(seeds)], g.session).max())
    padded = np.full(most, -1, np.int64)
    padded[: len(seeds)] = seeds
    distinct = np.unique(gather_int64(padded, g.session))
    distinct = distinct[distinct >= 0]
    bounds = g.get_node_partition_policy(g.ntypes[0]).bounds
    at = np.searchsorted(distinct, bounds)
    server = g.session.topology.server
    digest = np.bitwise_xor.reduce(hash_ids(distinct, stream_key(0, 0, 0)), initial=np.uint64(0))
    return ServerSeeds(
        own=distinct[at[server] : at[server + 1]].copy(),
        counts=tuple(np.diff(at).tolist()),
        digest=int(digest),
    )
