"""From the seeds of all ranks to what each of them computes and exchanges (GraNNDis; algorithms 3.1, 3.2).

The first rank of every server, its head, finds the rows of the server by one-sided asks, splits them among
the server's ranks and leaves them in shared memory; each rank then makes its own layers. No rank reads
more of the graph than the in-edges of its server's rows.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeAlias, final

import numpy as np

from dglx_dist.comm.collectives import barrier, broadcast_json, gather_int64
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
from dglx_dist.strategies.full_graph.halo_plan import HaloLayer, PlanSource, RankPlan, RowIndex, Sent

PLAN = "plan"
"""Phase under which the ids that ranks tell each other are counted."""

_CHECK_EVERY_S = 1.0
"""How often a waiting rank asks whether those it waits for are still there."""

_TELL_S = 5.0
"""How long a rank that fails waits until another one knows."""

_FAILED = "failed"


@final
class FailedOnAnotherRankError(RemoteError):
    """Another rank ended the job, and has told everybody."""


@final
class Mailbox:
    """Rounds of messages among ranks, by the number of the job that they belong to.

    All ranks must have made theirs before one sends. Jobs follow each other; every rank takes part in each.

    Args:
        session: The run.
        label: Name of the remote calls, the same on all ranks and of nobody else.
    """

    def __init__(self, session: Session, label: str) -> None:
        self._session, self._op, self._busy = session, f"{label}.mail", f"{label}.busy"
        self._box = box = _Box()
        self._job = 0

        def receive(name: str, arrays: Sequence[Array]) -> list[Array]:
            job, source, step = name.split(" ", 2)
            box.put(int(job), int(source), step, arrays)
            return []

        # Not methods: the planner would live as long as the session.
        session.rpc.register(self._op, receive)
        session.rpc.register(self._busy, lambda _name, _arrays: [np.array([box.job], dtype=np.int64)])
        for op in (self._op, self._busy):
            weakref.finalize(self, session.rpc.unregister, op)

    @contextmanager
    def job(self) -> Iterator[int]:
        """Begin the next job, and yield its number; an error inside ends it on all ranks.

        Ranks that wait for this one go on waiting while it is inside, however long that takes.
        """
        self._job += 1
        self._box.begin(self._job)
        try:
            yield self._job
        except FailedOnAnotherRankError:
            raise
        except Exception as error:
            self._tell_failure(error)
            raise
        finally:
            self._box.end()

    def exchange(
        self,
        step: str,
        outgoing: Mapping[int, Sequence[Array]],
        among: Collection[int],
        empty: Sequence[Array] = (),
    ) -> dict[int, list[Array]]:
        """Send each rank of ``among`` its arrays, and wait for theirs; all of ``among`` must call it.

        Args:
            step: What it is about, for messages; not used twice in a job.
            outgoing: Arrays by rank; the own rank gets its own without a copy.
            among: Who takes part.
            empty: What those of ``among`` get who are not in ``outgoing``.

        Returns:
            By rank, what each of ``among`` sent.

        Raises:
            RemoteError: another rank failed in this job; its text is told.
            PeerError: a rank is dead, or is not planning within the session's time-out; it is named.
        """
        self._send(step, {rank: outgoing.get(rank, empty) for rank in among})
        return self._take(step, among)

    def _send(self, step: str, outgoing: Mapping[int, Sequence[Array]]) -> None:
        """Send arrays by rank, and return when they are there."""
        topology = self._session.topology
        # Beginning with the next rank, so that not all send to the same one first.
        order = sorted(outgoing, key=lambda rank: (rank - topology.rank) % topology.world_size)
        name = f"{self._job} {topology.rank} {step}"
        sent = [
            self._session.rpc.submit(rank, self._op, name, list(outgoing[rank]), phase=PLAN) for rank in order
        ]
        for call in sent:
            call.result()

    def _take(self, step: str, ranks: Collection[int]) -> dict[int, list[Array]]:
        """Wait for what each of ``ranks`` sent in ``step``, and return it by rank."""
        deadline = time.monotonic() + self._session.timeout_s
        while missing := self._box.missing(step, ranks, _CHECK_EVERY_S):
            self._check(step, missing, late=time.monotonic() >= deadline)
            if time.monotonic() >= deadline:
                deadline = time.monotonic() + self._session.timeout_s
        return self._box.pop(step, ranks)

    def _check(self, step: str, missing: list[int], *, late: bool) -> None:
        """Raise what came of the ranks ``missing``; who is late but at work on this job has more time."""
        session, what = self._session, f"{step!r} of plan {self._job}"
        if (failure := self._box.failure()) is not None:
            who = f"rank {failure[0]} on {session.hosts[failure[0]]}"
            raise FailedOnAnotherRankError(f"{who} could not make its plan: {failure[1]}")
        reported = session.store.first_failure() if session.store is not None else None
        if reported is not None and reported[0] in missing:
            raise PeerError(f"rank {reported[0]} failed before it sent {what}: {reported[1]}")
        session.raise_for_dead(missing, what)
        absent = [rank for rank in missing if late and self._job_of(rank) != self._job]
        if absent:
            names = ", ".join(f"rank {rank} on {session.hosts[rank]}" for rank in absent)
            raise PeerError(
                f"{names} did not come to {what} within {session.timeout_s:g} s; every rank must make its "
                "loaders alike, or raise timeout_s (DGLX_TIMEOUT)"
            )

    def _job_of(self, rank: int) -> int:
        (job,) = self._session.rpc.call(rank, self._busy, "", [], phase="control")
        return int(job[0])

    def _tell_failure(self, error: Exception) -> None:
        """Let the others end the job too; who is dead or hangs is not waited for."""
        topology, told = self._session.topology, []
        text = np.frombuffer(f"{type(error).__name__}: {error}".encode()[:2000], dtype=np.uint8)
        name = f"{self._job} {topology.rank} {_FAILED}"
        for rank in range(topology.world_size):
            with contextlib.suppress(PeerError, RemoteError):
                if rank != topology.rank:
                    told.append(self._session.rpc.submit(rank, self._op, name, [text], phase="control"))
        for call in told:
            with contextlib.suppress(PeerError, RemoteError):
                call.result(_TELL_S)


@final
class _Box:
    """What arrived, by job, step and rank; any thread."""

    def __init__(self) -> None:
        self.job = 0
        """At which this rank is; 0 while it is at none."""
        self._first_job = 0
        self._arrived: dict[tuple[int, str], dict[int, list[Array]]] = {}
        self._changed = threading.Condition()

    def put(self, job: int, source: int, step: str, arrays: Sequence[Array]) -> None:
        with self._changed:
            if job >= self._first_job:
                self._arrived.setdefault((job, step), {})[source] = list(arrays)
                self._changed.notify_all()

    def begin(self, job: int) -> None:
        """Drop what is left of earlier jobs."""
        with self._changed:
            self.job = self._first_job = job
            self._arrived = {key: value for key, value in self._arrived.items() if key[0] >= job}

    def end(self) -> None:
        self.job = 0

    def missing(self, step: str, ranks: Collection[int], timeout_s: float) -> list[int]:
        """Wait until all are there, one failed, or for ``timeout_s``; return the ranks that are missing."""
        key = (self._first_job, step)

        def ready() -> bool:
            return not (set(ranks) - self._arrived.get(key, {}).keys()) or self.failure() is not None

        with self._changed:
            self._changed.wait_for(ready, timeout_s)
            return sorted(set(ranks) - self._arrived.get(key, {}).keys())

    def pop(self, step: str, ranks: Collection[int]) -> dict[int, list[Array]]:
        with self._changed:
            arrived = self._arrived.pop((self._first_job, step), {})
            return {rank: arrived[rank] for rank in sorted(ranks)}

    def failure(self) -> tuple[int, str] | None:
        """Return the lowest rank that failed in this job, and why."""
        failed = self._arrived.get((self._first_job, _FAILED), {})
        if not failed:
            return None
        rank = min(failed)
        return rank, failed[rank][0].tobytes().decode(errors="replace")


@final
@dataclass(frozen=True, kw_only=True)
class ServerLeaders:
    """The first rank of every server, and which nodes the servers own."""

    ranks: tuple[int, ...]
    """(S,)."""
    server: int
    """Of this rank."""
    bounds: Array
    """(S + 1,) int64; server s owns the nodes ``bounds[s]:bounds[s + 1]``."""

    @property
    def own(self) -> tuple[int, int]:
        """First node of this rank's server, and the one after its last."""
        return int(self.bounds[self.server]), int(self.bounds[self.server + 1])

    def split(self, ids: Array) -> dict[int, Array]:
        """Cut the (n,) ascending int64 ``ids`` by owner: head to its ids."""
        at = np.searchsorted(ids, self.bounds)
        return {rank: ids[at[server] : at[server + 1]] for server, rank in enumerate(self.ranks)}


def grow_levels(
    structure: Structure,
    seeds: Array,
    depth: tuple[int, int],
    heads: ServerLeaders,
    mailbox: Mailbox,
    *,
    eas: Selection | None = None,
    advance: Callable[[int], None],
) -> KHopNeighborhood:
    """Return what this server computes; the heads of all servers must call it, in a job of ``mail``.

    At level ``hops`` and above a server computes those of its own nodes that anybody needs, so what its
    rows read from others' nodes is told to these; below it takes in whatever its rows read.

    Args:
        structure: Of the only edge type.
        seeds: (K,) ascending int64 ids without repeats, what this server computes of the output.
        depth: (L, hops).
        heads: Of this rank; it must be one of them.
        mail: Between the ranks.
        eas: Which nodes the server may use; only with hops equal to L.
        advance: Called with 1 after each level.

    Raises:
        PeerError: a rank is dead or silent.
        RemoteError: another head failed.
    """
    num_layers, hops = depth
    allowed = None if eas is None else np.union1d(eas(structure, heads.own, seeds), seeds)
    expander = NeighborhoodExpander(structure, seeds, allowed)
    met = np.empty(0, np.int64)
    for level in range(num_layers - 1, -1, -1):
        sources = expander.sources()
        met = np.union1d(met, sources) if len(sources) else met
        if level >= hops:
            expander.add(_wanted_of_own(sources, level, heads, mailbox))
        else:
            # All that was met, not only now: above, others' rows were not taken in.
            expander.add(met)
        advance(1)
    return expander.finish()


def _wanted_of_own(sources: Array, level: int, heads: ServerLeaders, mailbox: Mailbox) -> Array:
    """Tell the other servers which of their nodes are read; return which of the own ones anybody reads."""
    outgoing: dict[int, Sequence[Array]] = {rank: [ids] for rank, ids in heads.split(sources).items()}
    told = mailbox.exchange(f"rows of level {level}", outgoing, heads.ranks)
    return np.unique(np.concatenate([ids for (ids,) in told.values()]))


@final
@dataclass(frozen=True, kw_only=True)
class OwnRows:
    """The rows that a rank holds, in the order of its server's."""

    nodes: Array
    """(n,) int64 global ids."""
    counts: Array
    """(L + 1,) int64; the rows of level l are the first ``counts[l]``."""
    indptr: Array
    """(counts[1] + 1,) int64."""
    edge_ids: Array
    """(E,) int64 global ids of the in-edges of the rows of level 1."""
    sources: Array
    """(d,) ascending int64 global ids of all sources of these edges."""
    source_of: Array
    """(E,) int64 place of each edge's source in :attr:`sources`."""


HoldersOf: TypeAlias = Callable[[Array], Array]
"""(k,) ascending int64 ids of other servers' nodes to the (k,) int64 ranks that hold them."""


def own_rows(held: HeldNeighborhood, rank: int) -> OwnRows:
    """Return the rows of ``rank`` and their in-edges."""
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
    return OwnRows(
        nodes=np.asarray(closure.nodes[rows]),
        counts=counts,
        indptr=indptr,
        edge_ids=np.asarray(closure.edge_ids[at]),
        sources=distinct[order],
        source_of=place[number],
    )


def read_layers(
    own: OwnRows, held: HeldNeighborhood, hops: int, inner: tuple[int, int], rank: int, holders_of: HoldersOf
) -> list[HaloLayer]:
    """Return the L layers of ``rank``, input-most first, but for what others need of them: they send nothing.

    Those that are alike are the same object.

    Args:
        own: Its rows.
        held: The rows of its server.
        hops: Layers up to this one read rows of the own server only.
        inner: First node of the server, and the one after its last.
        rank: Whose.
        holders_of: Called once, for sources of the layers above ``hops``.
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
        alike = (
            layer > 1
            and (layer > hops) == (layer - 1 > hops)
            and own.counts[layer] == own.counts[layer - 1]
            and own.counts[layer - 1] == own.counts[layer - 2]
        )
        if alike:
            layers.append(layers[-1])
        else:
            layers.append(_reading(own, layer, anywhere if layer > hops else in_server, place, rank))
    return layers


def _reading(own: OwnRows, layer: int, holders: Array, place: Array, rank: int) -> HaloLayer:
    """Return layer ``layer``, whose (d,) sources ``holders`` hold; (d,) ``place`` among the own rows."""
    num_own, targets = int(own.counts[layer - 1]), int(own.counts[layer])
    indptr = own.indptr[: targets + 1]
    source_of = own.source_of[: indptr[-1]]
    halo = np.flatnonzero(_read_by(own, layer) & (holders != rank))
    # Sources ascend, so a stable sort by rank leaves them ascending within.
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


def _read_by(own: OwnRows, layer: int) -> Array:
    """Return (d,) bool: which sources the targets of ``layer`` read."""
    read = np.zeros(len(own.sources), dtype=bool)
    read[own.source_of[: own.indptr[own.counts[layer]]]] = True
    return read


def _holders_in_server(own: OwnRows, held: HeldNeighborhood) -> Array:
    """Return (d,) int64: which rank of the server holds each source, -1 where none does."""
    places = RowIndex(held.closure.nodes, _num_ids(own, held)).places(own.sources)
    return np.where(places >= 0, held.holders[places], -1).astype(np.int64)


def _num_ids(own: OwnRows, held: HeldNeighborhood | None = None) -> int:
    """Return one more than the largest id in question."""
    nodes = own.nodes if held is None else held.closure.nodes
    return int(max(nodes.max(initial=-1), own.sources.max(initial=-1))) + 1


_AS_BEFORE = -1


def finish_layers(
    own: OwnRows, layers: Sequence[HaloLayer], mailbox: Mailbox, world_size: int
) -> list[HaloLayer]:
    """Tell every rank what is wanted of it, and return the layers with what others want of this one.

    All ranks must call it, in a job of ``mail``. Sends 8 bytes per layer and rank, and per row of a halo
    that differs from the layer's before.

    Raises:
        PeerError: a rank is dead or silent.
        RemoteError: another rank failed.
    """
    ranks = range(world_size)
    told = mailbox.exchange("wanted rows", {rank: requested_rows_of(layers, rank) for rank in ranks}, ranks)
    sent = {rank: wanted_rows(own, message) for rank, message in told.items()}
    finished: list[HaloLayer] = []
    for number, layer in enumerate(layers):
        same = number > 0 and layer is layers[number - 1] and _all_as_before(sent, number)
        finished.append(finished[-1] if same else _finish(layer, number, sent))
    return finished


def requested_rows_of(layers: Sequence[HaloLayer], rank: int) -> list[Array]:
    """Return [(L,) int64 rows wanted, -1 for the same as one layer before; their ids] for ``rank``."""
    counts = np.full(len(layers), _AS_BEFORE, dtype=np.int64)
    wanted = [np.empty(0, np.int64)]
    for number, layer in enumerate(layers):
        if number == 0 or layer is not layers[number - 1]:
            wanted.append(layer.halo_of(rank))
            counts[number] = len(wanted[-1])
    return [counts, np.concatenate(wanted)]


def wanted_rows(own: OwnRows, message: Sequence[Array]) -> list[Array]:
    """Return L arrays (n,) int64 of own rows of ``requested_rows_of``; equal ones are one object."""
    counts, ids = message
    if not len(ids):
        return [np.empty(0, np.int64)] * len(counts)
    highest = int(max(own.nodes.max(initial=-1), ids.max())) + 1
    rows = RowIndex(own.nodes, highest).places(ids)
    assert not (rows < 0).any(), "another rank wants rows that this one does not hold"
    wanted: list[Array] = []
    first = 0
    for number, count in enumerate(counts.tolist()):
        if count == _AS_BEFORE:
            wanted.append(wanted[-1])
            continue
        wanted.append(rows[first : first + count])
        assert not count or wanted[-1].max() < own.counts[number], "wanted rows of too low a level"
        first += count
    return wanted


def _all_as_before(sent: Mapping[int, list[Array]], number: int) -> bool:
    return all(
        rows[number] is rows[number - 1] or not len(rows[number]) + len(rows[number - 1])
        for rows in sent.values()
    )


def _finish(layer: HaloLayer, number: int, sent: Mapping[int, list[Array]]) -> HaloLayer:
    send: Sent = tuple((rank, rows[number]) for rank, rows in sorted(sent.items()) if len(rows[number]))
    return replace(layer, send=send)


WORTH_SHOWING = 1 << 17
"""Nodes of a graph from which on rank 0 shows how far it is."""


@final
@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What to plan; all but the seeds alike on all ranks."""

    seeds: Ids
    """This rank's (K,) ids, or a mask; any server's nodes. What is given twice, also by two ranks, counts
    once."""
    num_layers: int
    """L, at least 1."""
    hops: int
    """k in 0..L: how many layers a server computes without others; 0: full_graph, L: nothing crosses."""
    eas: Selection | None = None
    """Which nodes a server may use (algorithms 3.3); needs hops == L. None: all."""
    split: str = AUTO
    """The partitioner that gives rows to the ranks of a server; ``auto``: METIS. Without effect for hops 0,
    where a rank has the rows that it owns."""
    seeds_stay: bool = False
    """Whether a server computes the seeds that its ranks gave; needs hops == L. False: those it owns."""
    show_progress: bool = True
    """Whether rank 0 shows a bar, where the graph is not small."""


@final
class Planner:
    """Makes plans for one graph. Every rank must make it; it answers until it is let go.

    Args:
        g: Of one node type and one edge type.

    Raises:
        ConfigError: several types, a server without nodes, or more ranks than nodes.
    """

    def __init__(self, g: DistGraph) -> None:
        check_graph(g)
        self._g, self._session = g, g.session
        topology = self._topology = g.session.topology
        policy = g.get_node_partition_policy(g.ntypes[0])
        self._bounds = policy.bounds
        self._heads = ServerLeaders(
            ranks=tuple(topology.ranks_of_server(server)[0] for server in range(topology.num_servers)),
            server=topology.server,
            bounds=policy.bounds,
        )
        label = str(broadcast_json(secrets.token_hex(4), self._session))
        self._label = f"granndis.{label}"
        self._mailbox = Mailbox(self._session, self._label)
        # Nobody may send before all listen.
        barrier(self._session, "making plans")

    def plan(self, request: PlanRequest) -> RankPlan:
        """Return this rank's plan; all ranks must call it, for the same requests in the same order.

        One call at a time, from any thread: it talks by one-sided messages only. Counted under
        ``preload_structure`` (asked in-edges) and ``plan`` (ids that ranks tell each other).

        Raises:
            ConfigError: the request makes no sense, or ranks ask for different things.
            IndexError: a seed is no node.
            RemoteError: another rank failed.
            PeerError: a rank is dead or silent; it is named.
        """
        with self._mailbox.job() as job:
            check_request(request)
            seeds = self._seeds_of_server(request)
            held = self._held(request, seeds, job)
            return self._plan_of_rank(request, held)

    def _seeds_of_server(self, request: PlanRequest) -> Array:
        """Send the seeds to the heads that compute them; return those of this rank's server, if it is one."""
        given = as_ids(request.seeds, self._g.num_nodes(), "the nodes")
        seeds = np.unique(given)
        asked = np.array([request.num_layers, request.hops, request.eas is not None, request.seeds_stay])
        header = np.concatenate([asked.astype(np.int64), [len(seeds)]])
        nothing = np.empty(0, np.int64)
        if request.seeds_stay:
            pieces = {self._heads.ranks[self._topology.server]: seeds}
        else:
            pieces = self._heads.split(seeds)
        ranks = range(self._topology.world_size)
        told = self._mailbox.exchange(
            "seeds", {rank: [header, pieces.get(rank, nothing)] for rank in ranks}, ranks
        )
        _check_headers({rank: message[0] for rank, message in told.items()}, self._topology.rank)
        return np.unique(np.concatenate([message[1] for message in told.values()]))

    def _held(self, request: PlanRequest, seeds: Array, job: int) -> HeldNeighborhood:
        """Return the rows of this server and who holds them: found by its head, mapped by the others."""
        members = self._topology.ranks_of_server(self._topology.server)
        folder = self._session.scratch / f"{self._label}-{job}"
        if self._topology.rank == members[0]:
            held = self._find_rows(request, seeds)
            if len(members) > 1:
                write_held(folder, held)
                self._mailbox.exchange("rows of the server", {}, members)
                self._mailbox.exchange("rows read", {}, members)
                remove_held(folder)
            return held
        self._mailbox.exchange("rows of the server", {}, members)
        held = read_held(folder)
        self._mailbox.exchange("rows read", {}, members)
        return held

    def _find_rows(self, request: PlanRequest, seeds: Array) -> HeldNeighborhood:
        """On a head: return the rows of its server, and give each to one of its ranks."""
        depth = request.num_layers, request.hops
        worth = self._g.num_nodes() >= WORTH_SHOWING
        shown = request.show_progress and worth and self._topology.rank == 0
        members = self._topology.ranks_of_server(self._topology.server)
        with progress("finding rows", request.num_layers + 1, enabled=shown) as advance:
            closure = grow_levels(
                self._g.structure(),
                seeds,
                depth,
                self._heads,
                self._mailbox,
                eas=request.eas,
                advance=advance,
            )
            if request.hops == 0:
                holders = self._owners().rank_of(closure.nodes).astype(np.int32)
            else:
                local = split_rows(closure, len(members), request.split, self._session.seed)
                holders = local.astype(np.int32) + np.int32(members[0])
            advance(1)
        return HeldNeighborhood(closure=closure, holders=holders)

    def _plan_of_rank(self, request: PlanRequest, held: HeldNeighborhood) -> RankPlan:
        first, last = self._heads.own
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
            layers=tuple(finish_layers(own, layers, self._mailbox, self._topology.world_size)),
            hops=request.hops,
            server_nodes=len(nodes),
            inner_nodes=last - first,
            external_nodes=int(np.count_nonzero((nodes < first) | (nodes >= last))),
        )

    def _holders_of(self, ids: Array, hops: int, held: HeldNeighborhood) -> Array:
        """Return the ranks that hold the (k,) ascending ``ids`` of other servers; all ranks must call it."""
        if hops == 0:
            return self._owners().rank_of(ids)
        placement, topology = self._g.placement, self._topology
        ranks = range(topology.world_size)
        at = np.searchsorted(ids, self._bounds)
        asked = {
            placement.serving_rank(server): [ids[at[server] : at[server + 1]]]
            for server in range(topology.num_servers)
        }
        nothing = [np.empty(0, np.int64)]
        questions = self._mailbox.exchange("who holds rows", asked, ranks, nothing)
        answers = _holders(held, {rank: wanted for rank, (wanted,) in questions.items()})
        told = self._mailbox.exchange("holders of rows", answers, ranks)
        return np.concatenate([np.empty(0, np.int64), *(told[rank][0] for rank in asked)])

    def _owners(self) -> RowOwners:
        return RowOwners(self._bounds, self._topology)


def make_plans(
    g: DistGraph,
    seeds: Ids,
    num_layers: int,
    hops: int,
    *,
    eas: Selection | None = None,
    split: str = AUTO,
    seeds_stay: bool = False,
) -> RankPlan:
    """Return this rank's plan; every rank must call it. See :class:`PlanRequest` and :class:`Planner`.

    Raises:
        ConfigError: arguments or graph make no sense, or ranks ask for different things.
        IndexError: a seed is no node.
        RemoteError: another rank failed.
        PeerError: a rank is dead or silent; it is named.
    """
    return Planner(g).plan(
        PlanRequest(
            seeds=seeds, num_layers=num_layers, hops=hops, eas=eas, split=split, seeds_stay=seeds_stay
        )
    )


def check_one_type(strategy: str, g: DistGraph) -> None:
    """Raise ConfigError unless ``g`` has one node and one edge type."""
    if len(g.ntypes) != 1 or len(g.canonical_etypes) != 1:
        raise ConfigError(
            f"{strategy} trains on graphs of one node and one edge type, and this one has the nodes "
            f"{', '.join(g.ntypes)} and the edges {', '.join(map(str, g.canonical_etypes))}; use "
            "strategy='data_parallel'"
        )


def check_graph(g: DistGraph) -> None:
    """Raise ConfigError unless full-graph strategies can train on ``g`` with the ranks there are."""
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
    """Raise ConfigError unless number of layers, hops and the rest go together."""
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
                f"hops is {request.hops} with {name}, for which servers must not depend on each other; "
                f"set hops to the number of layers, {request.num_layers}"
            )
    check_split(request.split)


def _check_headers(headers: dict[int, Array], rank: int) -> None:
    names = ("num_layers", "hops", "eas", "seeds_stay")
    mine = headers[rank]
    for other, header in headers.items():
        for place, name in enumerate(names):
            if header[place] != mine[place]:
                raise ConfigError(
                    f"rank {rank} plans with {name} {mine[place]} and rank {other} with {header[place]}; "
                    "give the same on all ranks"
                )
    if not sum(int(header[-1]) for header in headers.values()):
        raise ConfigError("no rank was given a node to compute; give the loader at least one")


def _holders(held: HeldNeighborhood, questions: dict[int, Array]) -> dict[int, list[Array]]:
    """Return, by who asks, [(k,) int64 ranks of this server that hold the rows asked for]."""
    highest = max(int(ids.max(initial=-1)) for ids in questions.values())
    if highest < 0:
        return {rank: [np.empty(0, np.int64)] for rank in questions}
    # It costs as much as the server's rows: once for all who ask.
    index = RowIndex(held.closure.nodes, max(highest, int(held.closure.nodes.max())) + 1)
    answers = {}
    for rank, ids in questions.items():
        places = index.places(ids)
        assert not (places < 0).any(), "another server wants rows that this one does not compute"
        answers[rank] = [held.holders[places].astype(np.int64)]
    return answers


@final
class SampledPlans(PlanSource):
    """Plans on the graph that a server's nodes and its chosen external ones span; every rank makes one.

    The choice is the same whenever an epoch comes round again, as after a checkpoint.

    Args:
        g: A graph of one node and one edge type.
        request: What is planned, without the choice of nodes.
        options: Of the choice.
        seed: Of its draws.

    Raises:
        ConfigError: see :class:`Planner`.
        PeerError: a rank did not take part.
    """

    def __init__(self, g: DistGraph, request: PlanRequest, options: EasOptions, *, seed: int) -> None:
        self._request, self._options, self._seed = request, options, seed
        self._planner, self._selector = Planner(g), EasSelector(g)
        # Nobody may ask before all answer.
        barrier(g.session, "choosing external nodes")
        self._draw = options.draw(0)
        self._plan = self._planned(self._draw)
        # Every choice has the same seeds, though other ranks may compute them.
        self._num_global = int(gather_int64([self._plan.seeds], g.session).sum())

    def __len__(self) -> int:
        """See :meth:`PlanSource.__len__`: 1."""
        return 1

    def plan(self, epoch: int, step: int) -> RankPlan:
        """See :meth:`PlanSource.plan`."""
        draw = self._options.draw(epoch)
        if draw != self._draw:
            self._plan = self._planned(draw)
            # Only now: a plan that failed is not that of this draw when it is asked for again.
            self._draw = draw
        return self._plan

    def share(self, epoch: int, step: int) -> StepShare:
        """See :meth:`PlanSource.share`."""
        return StepShare(num_local=self._plan.seeds, num_global=self._num_global)

    def _planned(self, draw: int) -> RankPlan:
        rule = self._selector.rule(self._options, seed=self._seed, draw=draw)
        return self._planner.plan(replace(self._request, eas=rule))


@final
@dataclass(frozen=True, kw_only=True)
class ServerSeeds:
    """What a server trains on, and how much the others have."""

    own: Array
    """(n,) int64 ascending distinct seeds that this server owns, whichever rank of the run named them."""
    counts: tuple[int, ...]
    """(S,) seeds of each server."""
    digest: int
    """Differs, almost surely, when the seeds of all servers do."""

    @property
    def total(self) -> int:
        """Seeds of all servers."""
        return sum(self.counts)

    def sizes(self, num_batches: int) -> Array:
        """Return (R, S) int64: how many seeds each server has in each of R co-batches."""
        counts, step = np.array(self.counts, np.int64), np.arange(num_batches)[:, None]
        return counts // num_batches + (step < counts % num_batches)


def gather_seeds(g: DistGraph, seeds: Array) -> ServerSeeds:
    """Return this server's seeds of those of all ranks; every rank must call it.

    A rank holds the seeds of all for a moment, 8 bytes each.

    Args:
        g: A graph of one node type.
        seeds: (K,) int64 existing ids of this rank; other ranks may have some of them too.

    Raises:
        PeerError: a rank did not take part.
    """
    most = int(gather_int64([len(seeds)], g.session).max())
    mine = np.full(most, -1, np.int64)
    mine[: len(seeds)] = seeds
    everyone = np.unique(gather_int64(mine, g.session))
    everyone = everyone[everyone >= 0]
    bounds = g.get_node_partition_policy(g.ntypes[0]).bounds
    at = np.searchsorted(everyone, bounds)
    server = g.session.topology.server
    digest = np.bitwise_xor.reduce(hash_ids(everyone, stream_key(0, 0, 0)), initial=np.uint64(0))
    return ServerSeeds(
        own=everyone[at[server] : at[server + 1]].copy(),
        counts=tuple(np.diff(at).tolist()),
        digest=int(digest),
    )
