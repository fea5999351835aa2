"""Builds full-graph plans from the seeds on all ranks (GraNNDis).

See docs/strategies/shared_preload.md.

Every server's first rank is its leader. It expands the seeds by one-sided requests and splits the rows among
the server's ranks, which share them in memory. Each rank then builds its own layers. From the graph, a rank
reads no more than the in-edges into its server's rows.

:func:`plan_steps` is a generator that makes one plan and yields the exchanges that it needs. Each rank runs
its own generator and sends messages (:class:`Planner`), or one process runs a generator for every rank
(:func:`make_all_plans`).
"""

import secrets
import shutil
import weakref
from collections import defaultdict
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeAlias, TypeVar, final

import numpy as np

from dglx_dist.comm.collectives import barrier, broadcast_json
from dglx_dist.comm.ledger import CONTROL
from dglx_dist.comm.mailbox import OneSidedExchange
from dglx_dist.comm.session import Session
from dglx_dist.comm.topology import Topology
from dglx_dist.data.storage.reader import StoredDataset
from dglx_dist.errors import ConfigError, PeerError, RemoteError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.partition_book import Ids, Placement, RowOwners, as_ids
from dglx_dist.graph.row_kernels import number_distinct
from dglx_dist.graph.structure import InEdges
from dglx_dist.progress import progress
from dglx_dist.records import Array, EdgeType
from dglx_dist.strategies.full_graph.expansion import (
    KHopNeighborhood,
    Selection,
    iterate_in_edges,
    keep_edges_from,
    read_neighborhood,
    split_rows,
    write_neighborhood,
)
from dglx_dist.strategies.full_graph.graph_types import (
    GraphStructure,
    UnifiedGraph,
    find_bounds,
    unify_structure,
)
from dglx_dist.strategies.full_graph.halo_plan import (
    NO_IDS,
    HaloLayer,
    PairCover,
    RankPlan,
    RowPositions,
    build_cover,
    find_covers,
    minimum_cover,
)

PLAN = "plan"
"""Ledger phase for the ids that ranks exchange while planning."""

_NOTIFY_FAILURE_TIMEOUT_S = 5.0
"""Seconds that a failed rank waits for each rank to receive its failure message."""
MIN_NODES_FOR_PROGRESS = 1 << 17
"""Minimum node count for which rank 0 shows a progress bar."""
_SHARED, _SAME_AS_PREVIOUS = "rows of the server", -1
NO_SEEDS = "no rank was given a node to compute; give the loader at least one"


@dataclass(frozen=True, kw_only=True)
class PartitionContext:
    """The graph, the partition and a run's ranks."""

    structure: GraphStructure
    bounds: Array
    """(S + 1,) int64 first node on each server."""
    topology: Topology
    """Topology as seen by this rank, or by any rank if there is no job."""
    seed: int

    @classmethod
    def from_graph(cls, g: DistGraph, mask: str | None = None) -> "PartitionContext":
        structure = unify_structure(g, mask)
        session = g.session
        return cls(structure=structure, bounds=find_bounds(g), topology=session.topology, seed=session.seed)

    def find_owners(self, nodes: Array) -> Array:
        """Return the (K,) int64 rank that owns each of the (K,) int64 ``nodes``."""
        if isinstance(self.structure, UnifiedGraph):
            return np.searchsorted(self.structure.rank_bounds, nodes, side="right") - 1
        return RowOwners(self.bounds, self.topology).find_rank(nodes)

    def own_range(self, server: int) -> tuple[int, int]:
        """Return the half-open node range that ``server`` owns."""
        return int(self.bounds[server]), int(self.bounds[server + 1])

    def for_rank(self, rank: int) -> Topology:
        return Topology(rank, self.topology.world_size, self.topology.server_of_rank)


@final
@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """Parameters for one plan. Except for the seeds, they are equal on all ranks."""

    seeds: Ids
    """(K,) ids or a node mask. The nodes may be on any server. Duplicates count once, even across ranks."""
    num_layers: int
    """L, at least 1."""
    hops: int
    """Number of layers that a server computes alone, 0..L. With L, no rows are sent between servers."""
    eas: Selection | None = None
    """Selects the nodes that a server may use. It needs hops == L. None allows all nodes."""
    cover: bool = False
    """Whether sums over in-edges have their own exchange, see :class:`Cover`."""
    show_progress: bool = True
    """Whether rank 0 shows a progress bar for large graphs."""

    def __post_init__(self) -> None:
        assert 0 <= self.hops <= self.num_layers > 0
        assert self.hops == self.num_layers or not self.eas, "needs independent servers"


@final
@dataclass(frozen=True, kw_only=True)
class PlanStep:
    """One exchange of arrays between ranks. The answer has each rank's arrays, by ascending rank."""

    name: str
    """Name that is unique within a plan."""
    among: Collection[int]
    """Ranks that take part in the step."""
    outgoing: Mapping[int, Any]
    """Arrays to send, by rank. In the step :data:`_SHARED` these are the server's rows."""


T = TypeVar("T")
PlanSteps: TypeAlias = Generator[PlanStep, dict[int, Any], T]
"""Generator that yields steps, receives their answers, and returns a result."""


def plan_steps(context: PartitionContext, request: PlanRequest) -> PlanSteps[RankPlan]:
    """Make the plan for the rank ``context.topology.rank``."""
    topology = context.topology
    seeds = yield from _gather_seeds(context, request)
    members = topology.ranks_of_server(topology.server)
    leader = members[0]
    shared_rows: dict[int, KHopNeighborhood] = {}
    if topology.rank == leader:
        leader_rows = yield from _compute_server_rows(context, request, seeds)
        shared_rows = dict.fromkeys(members, leader_rows)
    answer = yield PlanStep(name=_SHARED, among=members, outgoing=shared_rows)
    server_rows: KHopNeighborhood = answer[leader]

    own_rows = _select_own_rows(server_rows, topology.rank)
    layers = yield from _read_layers(context, request.hops, own_rows, server_rows)
    layers = yield from _finish_layers(context, own_rows, layers)
    if request.cover and not isinstance(context.structure, UnifiedGraph):
        layers = yield from _cover_layers(topology.world_size, layers)
    edge_counts = yield from _count_edges(context, layers)
    first_node, end_node = context.own_range(topology.server)
    is_external = (server_rows.nodes < first_node) | (server_rows.nodes >= end_node)
    plan = RankPlan(
        nodes=own_rows.nodes,
        layers=tuple(layers),
        external_nodes=int(np.count_nonzero(is_external)),
        edge_counts=edge_counts,
    )
    if not request.cover or not isinstance(context.structure, UnifiedGraph):
        return plan

    # Sums over different edge types cannot be added, so each type has its own covers.
    typed_layers = context.structure.split(plan).layers
    relations = [layer.relations[etype] for etype in context.structure.structures for layer in typed_layers]
    covered_layers = yield from _cover_layers(topology.world_size, relations)
    covers = [layer.cover for layer in covered_layers if layer.cover is not None]
    return replace(plan, covers=tuple(covers))


def _count_edges(context: PartitionContext, layers: Sequence[HaloLayer]) -> PlanSteps[Array]:
    """Return :attr:`RankPlan.edge_counts`. With a single type, ranks send nothing."""
    graph = context.structure
    if not isinstance(graph, UnifiedGraph):
        return NO_IDS

    counts = []
    for layer in layers:
        relations = graph.find_relations(layer.edge_ids)
        counts.append(np.bincount(relations, minlength=len(graph.structures)))
    ranks = range(context.topology.world_size)
    outgoing = {rank: [np.concatenate(counts)] for rank in ranks}
    received = yield PlanStep(name="edges by type", among=ranks, outgoing=outgoing)
    return np.sum([counts_of_rank for (counts_of_rank,) in received.values()], axis=0)


def _gather_seeds(context: PartitionContext, request: PlanRequest) -> PlanSteps[Array]:
    """Send the seeds to the leaders that compute them. Return the received seeds. Only leaders get any."""
    seeds = np.unique(as_ids(request.seeds, int(context.bounds[-1]), "the nodes"))
    seeds_by_leader = _split_by_leader(context, seeds)
    ranks = range(context.topology.world_size)
    # Every rank learns how many seeds each rank has, so all notice if there are none at all.
    num_seeds = np.array([len(seeds)])
    outgoing = {rank: [num_seeds, seeds_by_leader.get(rank, NO_IDS)] for rank in ranks}
    received = yield PlanStep(name="seeds", among=ranks, outgoing=outgoing)
    if not any(count for count, _ in received.values()):
        raise ConfigError(NO_SEEDS)
    return np.unique(np.concatenate([ids for _, ids in received.values()]))


def _find_leaders(context: PartitionContext) -> list[int]:
    """Return each server's first rank."""
    topology = context.topology
    return [topology.ranks_of_server(server)[0] for server in range(topology.num_servers)]


def _split_by_leader(context: PartitionContext, ids: Array) -> dict[int, Array]:
    return dict(zip(_find_leaders(context), split_by_server(context, ids), strict=True))


def split_by_server(context: PartitionContext, seeds: Array) -> list[Array]:
    """Split the (K,) ascending int64 ``seeds`` by the server that owns them."""
    return np.split(seeds, np.searchsorted(seeds, context.bounds[1:-1]))


def _compute_server_rows(
    context: PartitionContext, request: PlanRequest, seeds: Array
) -> PlanSteps[KHopNeighborhood]:
    """Return the rows that this server computes, each assigned to one rank. Called on leaders.

    At level ``hops`` and above, a server computes those of its own nodes that any server reads. So servers
    exchange the ids that they read from each other. Below, a server computes everything that its rows read.
    ``seeds`` are its (K,) ascending distinct int64 output rows.
    """
    topology = context.topology
    leaders = _find_leaders(context)
    own_range = context.own_range(topology.server)
    allowed_nodes = None
    if request.eas is not None:
        allowed_nodes = np.union1d(request.eas(context.structure, own_range, seeds), seeds)
    # Each level adds rows to what the levels above have.
    new_rows = [seeds]
    known_rows = seeds
    all_sources = NO_IDS
    edges: list[InEdges] = []
    is_large = context.bounds[-1] >= MIN_NODES_FOR_PROGRESS
    shows_progress = request.show_progress and topology.rank == 0 and is_large
    with progress("finding rows", request.num_layers + 1, enabled=shows_progress) as advance:
        for level in range(request.num_layers - 1, -1, -1):
            level_edges = _read_in_edges(context, new_rows[-1], allowed_nodes)
            edges += level_edges
            sources = [number_distinct(chunk.sources)[0] for chunk in level_edges]
            read_ids = np.unique(np.concatenate([NO_IDS, *sources]))

            # All levels so far contribute sources, because the levels above did not add rows on other
            # servers.
            all_sources = np.union1d(all_sources, read_ids)
            computed_rows = all_sources
            if level >= request.hops:
                outgoing = {rank: [ids] for rank, ids in _split_by_leader(context, read_ids).items()}
                received = yield PlanStep(name=f"rows of level {level}", among=leaders, outgoing=outgoing)
                computed_rows = np.unique(np.concatenate([ids for (ids,) in received.values()]))

            new_rows.append(np.setdiff1d(computed_rows, known_rows, assume_unique=True))
            known_rows = np.union1d(known_rows, new_rows[-1])
            advance(1)

        # Level 0 includes the rows from all levels, so its count comes first.
        counts = np.cumsum([len(rows_of_level) for rows_of_level in new_rows], dtype=np.int64)[::-1].copy()
        lengths = [np.diff(chunk.indptr) for chunk in edges]
        rows = KHopNeighborhood(
            nodes=np.concatenate(new_rows),
            counts=counts,
            indptr=np.cumsum(np.concatenate([np.zeros(1, np.int64), *lengths])),
            sources=np.concatenate([NO_IDS, *(chunk.sources for chunk in edges)]),
            edge_ids=np.concatenate([NO_IDS, *(chunk.edge_ids for chunk in edges)]),
        )
        if request.hops == 0:
            holders = context.find_owners(rows.nodes)
        else:
            members = topology.ranks_of_server(topology.server)
            holders = members[0] + split_rows(rows, len(members), context.seed)
        advance(1)

    return replace(rows, holders=holders.astype(np.int32))


def _read_in_edges(context: PartitionContext, nodes: Array, allowed_nodes: Array | None) -> list[InEdges]:
    """Return the in-edges into ``nodes`` in chunks. Edges from nodes that are not allowed are left out."""
    edges = []
    for _, chunk in iterate_in_edges(context.structure, nodes):
        edges.append(chunk if allowed_nodes is None else keep_edges_from(chunk, allowed_nodes))
    return edges


@final
@dataclass(frozen=True, kw_only=True)
class _RankRows:
    """The rows that one rank computes, and their in-edges."""

    nodes: Array
    """(n,) int64 global ids."""
    counts: Array
    """(L + 1,) int64. Level l has the first ``counts[l]`` rows."""
    indptr: Array
    """(counts[1] + 1,) int64."""
    edge_ids: Array
    """(E,) int64 global ids for the in-edges into level 1 rows."""
    sources: Array
    """(d,) ascending int64 global ids for the distinct sources of these edges."""
    source_of: Array
    """(E,) int64 position in :attr:`sources` for each edge."""

    def is_read_by(self, layer: int) -> Array:
        """Return a (d,) bool mask for the sources that any target in ``layer`` reads."""
        num_edges = self.indptr[self.counts[layer]]
        is_read = np.zeros(len(self.sources), dtype=bool)
        is_read[self.source_of[:num_edges]] = True
        return is_read


def _select_own_rows(server_rows: KHopNeighborhood, rank: int) -> _RankRows:
    """Return the server rows that ``rank`` computes, with their in-edges."""
    rows = np.flatnonzero(server_rows.holders == rank)
    counts = np.searchsorted(rows, server_rows.counts)
    rows_with_edges = rows[: counts[1]]
    first_edges = server_rows.indptr[rows_with_edges]
    degrees = np.diff(server_rows.indptr)[rows_with_edges]
    indptr = np.concatenate([np.zeros(1, np.int64), np.cumsum(degrees)])
    edge_indices = np.arange(indptr[-1]) + np.repeat(first_edges - indptr[:-1], degrees)

    # Sources are sorted by id, so positions by first appearance are mapped to sorted positions.
    distinct_sources, source_index = number_distinct(np.asarray(server_rows.sources[edge_indices]))
    order = np.argsort(distinct_sources)
    sorted_index = np.empty(len(order), np.int64)
    sorted_index[order] = np.arange(len(order))
    return _RankRows(
        nodes=np.asarray(server_rows.nodes[rows]),
        counts=counts,
        indptr=indptr,
        edge_ids=np.asarray(server_rows.edge_ids[edge_indices]),
        sources=distinct_sources[order],
        source_of=sorted_index[source_index],
    )


def _read_layers(
    context: PartitionContext, hops: int, own_rows: _RankRows, server_rows: KHopNeighborhood
) -> PlanSteps[list[HaloLayer]]:
    """Return a rank's L layers, input layer first, without ``send`` lists. Equal layers are one object.

    Layers up to ``hops`` read only rows on this rank's server.
    """
    num_nodes = int(context.bounds[-1])
    sources = own_rows.sources
    counts = own_rows.counts
    positions = RowPositions(server_rows.nodes, num_nodes).find(sources)
    server_holders = np.where(positions >= 0, server_rows.holders[positions], -1).astype(np.int64)
    all_holders = server_holders.copy()
    if hops < len(counts) - 1:
        first_node, end_node = context.own_range(context.topology.server)
        is_outside = (sources < first_node) | (sources >= end_node)
        outside = np.flatnonzero(is_outside & own_rows.is_read_by(hops + 1))
        all_holders[outside] = yield from _find_holders(context, hops, sources[outside], server_rows)

    own_index = RowPositions(own_rows.nodes, num_nodes).find(sources)
    layers: list[HaloLayer] = []
    for layer in range(1, len(counts)):
        # Layers with equal rows and holders are equal. The holders change after layer ``hops``.
        if layer > 1 and layer != hops + 1 and counts[layer - 2] == counts[layer - 1] == counts[layer]:
            layers.append(layers[-1])
            continue
        holders = all_holders if layer > hops else server_holders
        layers.append(_build_layer(own_rows, layer, holders, own_index, context.topology.rank))
    return layers


def _find_holders(
    context: PartitionContext, hops: int, ids: Array, server_rows: KHopNeighborhood
) -> PlanSteps[Array]:
    """Ask the servers that own the (K,) ascending ``ids`` which ranks hold these rows. Return (K,) int64."""
    topology = context.topology
    if hops == 0:
        return context.find_owners(ids)

    ranks = range(topology.world_size)
    serving_ranks = Placement(topology.num_servers, topology).serving_ranks
    requests = {rank: [NO_IDS] for rank in ranks}
    for rank, ids_of_server in zip(serving_ranks, split_by_server(context, ids), strict=True):
        requests[rank] = [ids_of_server]
    received = yield PlanStep(name="requests for holders", among=ranks, outgoing=requests)

    # The index takes as much memory as the server's rows, so it is built once for all requests.
    index = RowPositions(server_rows.nodes, int(context.bounds[-1]))
    answers = {}
    for rank, (requested,) in received.items():
        positions = index.find(requested)
        assert not (positions < 0).any(), "another server requests rows that this one does not compute"
        answers[rank] = [server_rows.holders[positions].astype(np.int64)]
    holders = yield PlanStep(name="holders of rows", among=ranks, outgoing=answers)
    return np.concatenate([holders[rank][0] for rank in serving_ranks])


def _build_layer(own_rows: _RankRows, layer: int, holders: Array, own_index: Array, rank: int) -> HaloLayer:
    """Build a layer for ``rank``, without its ``send`` lists.

    For each of the d sources, ``holders`` has the rank that holds its row, and ``own_index`` has its row's
    position among this rank's rows, or -1.
    """
    num_own = int(own_rows.counts[layer - 1])
    num_targets = int(own_rows.counts[layer])
    indptr = own_rows.indptr[: num_targets + 1]
    source_of = own_rows.source_of[: indptr[-1]]
    halo_sources = np.flatnonzero(own_rows.is_read_by(layer) & (holders != rank))

    # Sources ascend, so they still ascend within each rank after a stable sort by rank.
    halo_sources = halo_sources[np.argsort(holders[halo_sources], kind="stable")]
    row_of_source = own_index.copy()
    row_of_source[halo_sources] = num_own + np.arange(len(halo_sources))
    indices = row_of_source[source_of]
    assert not len(indices) or 0 <= indices.min() <= indices.max() < num_own + len(halo_sources)
    ranks, counts = np.unique(holders[halo_sources], return_counts=True)
    return HaloLayer(
        own_rows=num_own,
        targets=num_targets,
        indptr=indptr,
        indices=indices,
        edge_ids=own_rows.edge_ids[: indptr[-1]],
        halo_nodes=own_rows.sources[halo_sources],
        receive=tuple(zip(ranks.tolist(), counts.tolist(), strict=True)),
        send=(),
    )


def _finish_layers(
    context: PartitionContext, own_rows: _RankRows, layers: Sequence[HaloLayer]
) -> PlanSteps[list[HaloLayer]]:
    """Exchange halo requests, and return ``layers`` with their ``send`` lists.

    From this rank, each rank receives (L,) int64 counts and int64 ids for the rows that this rank needs. A
    count of -1 means the same rows as in the previous layer, and their ids are not repeated.
    """
    ranks = range(context.topology.world_size)
    index = RowPositions(own_rows.nodes, int(context.bounds[-1]))
    is_same = _find_repetitions(layers)
    requests = {}
    for rank in ranks:
        counts = []
        ids = [NO_IDS]
        for layer, is_repeated in zip(layers, is_same, strict=True):
            halo_ids = layer.halo_of(rank)
            counts.append(_SAME_AS_PREVIOUS if is_repeated else len(halo_ids))
            if not is_repeated:
                ids.append(halo_ids)
        requests[rank] = [np.array(counts, np.int64), np.concatenate(ids)]
    received = yield PlanStep(name="requested rows", among=ranks, outgoing=requests)

    sent = {rank: _find_requested_rows(own_rows, index, message) for rank, message in received.items()}
    finished_layers: list[HaloLayer] = []
    for i, layer in enumerate(layers):
        if is_same[i] and all(_are_same_rows(rows[i - 1], rows[i]) for rows in sent.values()):
            finished_layers.append(finished_layers[-1])
            continue
        send = tuple((rank, rows[i]) for rank, rows in sent.items() if len(rows[i]))
        finished_layers.append(replace(layer, send=send))
    return finished_layers


def _are_same_rows(rows: Array, previous_rows: Array) -> bool:
    return rows is previous_rows or len(rows) == len(previous_rows) == 0


def _find_repetitions(layers: Sequence[HaloLayer]) -> list[bool]:
    """Return for each layer whether it is the same object as the layer before it."""
    return [False, *(layer is previous for previous, layer in pairwise(layers))]


def _find_requested_rows(own_rows: _RankRows, index: RowPositions, message: Sequence[Array]) -> list[Array]:
    """Return the (n,) int64 own rows that a message requests for each layer. Equal rows are one object."""
    counts, ids = message
    rows = index.find(ids)
    assert not (rows < 0).any(), "another rank requests rows that this one does not hold"

    rows_by_layer: list[Array] = []
    layer_rows = NO_IDS
    offset = 0
    for layer, count in enumerate(counts.tolist()):
        if count != _SAME_AS_PREVIOUS:
            layer_rows = rows[offset : offset + count]
            offset += count
            assert not count or layer_rows.max() < own_rows.counts[layer], (
                "a requested row is not computed at the level of its layer"
            )
        rows_by_layer.append(layer_rows)
    return rows_by_layer


def _cover_layers(num_ranks: int, layers: Sequence[HaloLayer]) -> PlanSteps[list[HaloLayer]]:
    """Return ``layers`` with covers. Each rank that sends halo rows receives its :class:`PairCover`."""
    is_same = _find_repetitions(layers)
    covers: list[dict[int, PairCover]] = []
    for layer, is_repeated in zip(layers, is_same, strict=True):
        covers.append({} if is_repeated else find_covers(layer))
    outgoing = {}
    for rank in range(num_ranks):
        outgoing[rank] = [pairs[rank].to_message() if rank in pairs else NO_IDS for pairs in covers]
    answers = yield PlanStep(name="partial sums", among=range(num_ranks), outgoing=outgoing)
    for rank, arrays in answers.items():
        if len(arrays) != len(layers):
            raise PeerError(
                f"rank {rank} sends partial sums of {len(arrays)} layers, but this rank has {len(layers)}; "
                "give the sampler the same number of layers on every rank"
            )

    covered_layers: list[HaloLayer] = []
    messages: dict[int, Array] = {}
    for i, layer in enumerate(layers):
        # A rank's message is empty for a layer that is the same as its previous layer. Then its last message
        # still applies.
        messages |= {rank: arrays[i] for rank, arrays in answers.items() if len(arrays[i])}
        if is_same[i]:
            covered_layers.append(covered_layers[-1])
            continue
        sent = {}
        for rank, rows in layer.send:
            sent[rank] = PairCover.from_message(rank, messages.get(rank, NO_IDS), len(rows))
        covered_layers.append(replace(layer, cover=build_cover(layer, covers[i], sent)))
    return covered_layers


def make_all_plans(
    context: PartitionContext, seeds: Sequence[Array], num_layers: int, hops: int, **options: Any
) -> list[RankPlan]:
    """Make all W ranks' plans in this process, which must have the uncut graph's structure.

    ``seeds`` has one array for each server: ascending ids for the output nodes that this server owns.
    ``options`` are further :class:`PlanRequest` fields.
    """
    topology = context.topology
    seeds_by_leader = dict(zip(_find_leaders(context), seeds, strict=True))
    request = PlanRequest(seeds=NO_IDS, num_layers=num_layers, hops=hops, show_progress=False, **options)
    generators = []
    for rank in range(topology.world_size):
        rank_request = replace(request, seeds=seeds_by_leader.get(rank, NO_IDS))
        generators.append(plan_steps(replace(context, topology=context.for_rank(rank)), rank_request))

    waiting = {rank: next(steps) for rank, steps in enumerate(generators)}
    posted: dict[str, dict[int, PlanStep]] = defaultdict(dict)
    plans: dict[int, RankPlan] = {}
    while waiting:
        for rank, step in waiting.items():
            posted[step.name][rank] = step
        # A rank can go on when all ranks that take part have posted its step.
        ready_ranks = [rank for rank, step in waiting.items() if posted[step.name].keys() >= set(step.among)]
        assert ready_ranks, f"no rank can continue: {[step.name for step in waiting.values()]}"
        for rank in ready_ranks:
            step = waiting.pop(rank)
            messages = posted[step.name]
            answer = {sender: messages[sender].outgoing.get(rank, ()) for sender in step.among}
            try:
                waiting[rank] = generators[rank].send(answer)
            except StopIteration as finished:
                plans[rank] = finished.value
    return [plans[rank] for rank in range(topology.world_size)]


@final
class FailedOnAnotherRankError(RemoteError):
    """Another rank failed in this job and has notified all ranks."""


@final
class PlanExchange:
    """Exchanges plan steps' arrays between ranks, in numbered jobs. Every rank takes part in each job.

    All ranks must construct it before one sends. ``label`` prefixes the RPC operations.
    """

    def __init__(self, session: Session, label: str) -> None:
        self._session = session
        self._failed_op = f"{label}.failed"
        self._job_op = f"{label}.job"
        self._job = 0
        # A list, because a closure answers other ranks with the running job's number, or 0.
        current_job = [0]
        self._current_job = current_job
        self._arrays = OneSidedExchange(session, f"{label}.deliver", "create the same loaders on every rank")
        mailbox = self._arrays.mailbox
        self._mailbox = mailbox

        def fail(name: str, arrays: Sequence[Array]) -> list[Array]:
            job, source = map(int, name.split())
            text = arrays[0].tobytes().decode(errors="replace")
            message = f"rank {source} on {session.hosts[source]} failed to make its plan: {text}"
            mailbox.fail(job, lambda: FailedOnAnotherRankError(message))
            return []

        # Closures are registered, because bound methods would keep the planner alive as long as the session.
        session.rpc.register(self._failed_op, fail)
        session.rpc.register(self._job_op, lambda _name, _arrays: [np.array(current_job, dtype=np.int64)])
        for op in (self._failed_op, self._job_op):
            weakref.finalize(self, session.rpc.unregister, op)

    @contextmanager
    def job(self) -> Iterator[int]:
        """Begin the next job and yield its number. An error inside ends the job on all ranks.

        Other ranks wait without a time limit as long as this rank is inside the job.
        """
        self._job += 1
        self._mailbox.begin(self._job)
        self._current_job[0] = self._job
        try:
            yield self._job
        except FailedOnAnotherRankError:
            raise
        except Exception as error:
            self._send_failure(error)
            raise
        finally:
            self._current_job[0] = 0

    def exchange(self, step: PlanStep) -> dict[int, list[Array]]:
        """Send the arrays in ``step`` to the other ranks, and wait for theirs.

        Returns:
            The arrays that each other rank has sent, by ascending rank.

        Raises:
            FailedOnAnotherRankError: another rank failed in this job. The message has that rank's error.
            PeerError: a rank is dead, or it has not started planning within the session's time-out.
        """
        outgoing = {rank: step.outgoing.get(rank, ()) for rank in step.among}
        self._arrays.post(self._job, step.name, outgoing, phase=PLAN)
        description = f"{step.name!r} of plan {self._job}"
        received = self._mailbox.take(self._job, step.name, step.among, description, self._is_in_this_job)
        return dict(sorted(received.items()))

    def _is_in_this_job(self, rank: int) -> bool:
        (job,) = self._session.rpc.call(rank, self._job_op, "", [], phase=CONTROL)
        return int(job[0]) == self._job

    def _send_failure(self, error: Exception) -> None:
        """Send the error's text to all other ranks, which then raise FailedOnAnotherRankError."""
        topology = self._session.topology
        text = f"{type(error).__name__}: {error}".encode()[:2000]
        arrays = [np.frombuffer(text, dtype=np.uint8)]
        name = f"{self._job} {topology.rank}"
        other_ranks = set(range(topology.world_size)) - {topology.rank}
        # Some ranks may be dead or hang, so delivery has a time limit.
        self._session.rpc.ask(
            other_ranks, self._failed_op, name, arrays, _NOTIFY_FAILURE_TIMEOUT_S, phase=CONTROL
        )


def open_plan_exchange(session: Session) -> tuple[PlanExchange, str]:
    """Return a new exchange and its label. Every rank must call this."""
    label = f"full_graph.{broadcast_json(secrets.token_hex(4), session)}"
    exchange = PlanExchange(session, label)
    # No rank may send before all ranks listen.
    barrier(session, "making plans")
    return exchange, label


@final
class Planner:
    """Makes plans for ``g``, and answers requests from other ranks. Every rank must construct it.

    With ``mask``, plans have only the edges that this edge column marks.

    Raises:
        ConfigError: a server has no nodes, or there are more ranks than nodes.
    """

    def __init__(self, g: DistGraph, mask: str | None = None) -> None:
        check_graph(g)
        self._session = g.session
        self._context = PartitionContext.from_graph(g, mask)
        self._exchange, self._label = open_plan_exchange(self._session)

    def plan(self, request: PlanRequest) -> RankPlan:
        """Return this rank's plan. All ranks must call it with the same requests in the same order.

        It uses one-sided messages only, so it may be called from any thread, but only once at a time. The
        ledger counts fetched in-edges under ``preload_structure`` and exchanged ids under ``plan``.

        Raises:
            ConfigError: no rank gave a seed.
            IndexError: a seed is no node.
            RemoteError: another rank failed.
        """
        with self._exchange.job() as job:
            steps = plan_steps(self._context, request)
            step = next(steps)
            while True:
                answer = self._share(step, job) if step.name == _SHARED else self._exchange.exchange(step)
                try:
                    step = steps.send(answer)
                except StopIteration as finished:
                    plan: RankPlan = finished.value
                    return plan

    def _share(self, step: PlanStep, job: int) -> dict[int, Any]:
        """Return the leader's rows by the leader's rank. A server's ranks share them as files."""
        leader = min(step.among)
        server_rows = step.outgoing.get(self._session.topology.rank)
        if len(step.among) == 1:
            return {leader: server_rows}

        folder = self._session.scratch / f"{self._label}-{job}"
        if server_rows is not None:
            write_neighborhood(folder, server_rows)
        # The first exchange says that the file is there, and the second that all ranks have mapped it.
        self._exchange.exchange(replace(step, outgoing={}))
        shared_rows = read_neighborhood(folder) if server_rows is None else server_rows
        self._exchange.exchange(PlanStep(name="rows read", among=step.among, outgoing={}))
        if server_rows is not None:
            shutil.rmtree(folder, ignore_errors=True)
        return {leader: shared_rows}


def border_rows(dataset: StoredDataset, servers: int) -> tuple[dict[str, int], int]:
    """Count the rows that one-rank servers send for a layer over all nodes.

    Any process may call it alone. All parts must be on this machine. Memory is needed for the edges that a
    server reads from others.

    Returns:
        Row counts by node type without covers, and the row count over all types with covers.
    """
    manifest = dataset.manifest
    num_rows = dict.fromkeys(manifest.node_types, 0)
    num_covered_rows = 0
    placement = Placement(manifest.num_parts, Topology(0, servers, tuple(range(servers))))
    for server in range(servers):
        sources_by_type = defaultdict[str, list[Array]](list)
        for etype in manifest.edge_types:
            source_type, _, _ = etype
            sources, targets = _read_foreign_edges(dataset, etype, placement, server)
            sources_by_type[source_type].append(sources)
            bounds = placement.server_offsets(manifest.node_offsets[source_type])
            holders = np.searchsorted(bounds, sources, "right")
            for holder in np.unique(holders):
                is_held = holders == holder
                num_covered_rows += _count_cover_rows(sources[is_held], targets[is_held])
        for ntype, source_ids in sources_by_type.items():
            num_rows[ntype] += len(np.unique(np.concatenate(source_ids)))
    return num_rows, num_covered_rows


def _read_foreign_edges(
    dataset: StoredDataset, etype: EdgeType, placement: Placement, server: int
) -> tuple[Array, Array]:
    """Return (E,) sources and targets for in-edges into ``server`` with a source on another server."""
    source_type, _, target_type = etype
    offsets = dataset.manifest.node_offsets
    first_node, end_node = placement.server_offsets(offsets[source_type])[server : server + 2]
    foreign_sources = [NO_IDS]
    foreign_targets = [NO_IDS]
    for part in placement.parts_of_server(server):
        indptr = dataset.part(part).indptr(etype)
        sources = dataset.part(part).indices(etype)
        foreign_edges = np.flatnonzero((sources < first_node) | (sources >= end_node))
        # Each edge belongs to the last target whose edges begin at or before it.
        targets = np.searchsorted(indptr, foreign_edges, "right") - 1
        foreign_sources.append(sources[foreign_edges])
        foreign_targets.append(offsets[target_type][part] + targets)
    return np.concatenate(foreign_sources), np.concatenate(foreign_targets)


def _count_cover_rows(sources: Array, targets: Array) -> int:
    """Count the rows and sums that cover the edges between two servers."""
    source_ids, source_index = np.unique(sources, return_inverse=True)
    target_ids, target_index = np.unique(targets, return_inverse=True)
    is_sent, is_summed = minimum_cover(source_index, target_index, len(source_ids), len(target_ids))
    return int(is_sent.sum() + is_summed.sum())


def make_plans(g: DistGraph, seeds: Ids, num_layers: int, hops: int, **options: Any) -> RankPlan:
    """Make this rank's plan. Every rank must call it. The arguments are :class:`PlanRequest` fields."""
    return Planner(g).plan(PlanRequest(seeds=seeds, num_layers=num_layers, hops=hops, **options))


def check_graph(g: DistGraph) -> None:
    """Raise ConfigError unless full-graph strategies can train on ``g`` with the session's ranks."""
    topology = g.session.topology
    counts = np.diff(find_bounds(g))
    servers = topology.num_servers
    for server in np.flatnonzero(counts == 0).tolist():
        command = f"partition it again with `dglx partition DATA --parts {servers} --out DIR`, or "
        raise ConfigError(
            f"server {server} of {servers} owns none of the {counts.sum()} nodes of {g.name}; "
            f"{command if counts.sum() >= servers else ''}start fewer servers"
        )

    if topology.world_size > counts.sum():
        raise ConfigError(
            f"{g.name} has {counts.sum()} nodes for {topology.world_size} ranks; start at most as many "
            "ranks as there are nodes"
        )
