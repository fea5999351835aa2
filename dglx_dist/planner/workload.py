"""Count the bytes and work that an epoch with mini-batches needs, and collect statistics of graphs.

Training draws its batches by seed, epoch and global id, so one process can build every rank's batches. The
bytes computed from them are exactly the bytes that the run sends.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, final

import dgl
import numpy as np
from torch import Tensor

from dglx_dist.comm.collectives import gather_json
from dglx_dist.comm.topology import Topology
from dglx_dist.data.storage.columns import numpy_dtype
from dglx_dist.data.storage.manifest import Manifest
from dglx_dist.data.storage.reader import StoredDataset
from dglx_dist.dataloading.feature_fetch import look_ahead
from dglx_dist.dataloading.loader import DataLoader
from dglx_dist.dataloading.minibatch import MiniBatch, count_batch_bytes
from dglx_dist.errors import ConfigError
from dglx_dist.graph.cache import (
    LOOK_AHEAD,
    TRAIN_MASK,
    CacheRequest,
    compute_access_probability,
    compute_vip_scores,
    count_rows_of_rank,
    select_top_rows,
)
from dglx_dist.graph.column import LookAheadRows
from dglx_dist.graph.partition_book import Placement, RowOwners, split_ids
from dglx_dist.graph.row_kernels import plan_remote
from dglx_dist.planner.costs.base import (
    ID_BYTES,
    BatchWork,
    CacheHits,
    PlannedRun,
    Survey,
    TrainedRows,
    TypedCounts,
)
from dglx_dist.planner.model_shape import build_topology
from dglx_dist.planner.records import Draws, GraphStats
from dglx_dist.records import FEATURE, LABEL, Array, ColumnInfo, EdgeType

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph


class Inputs(NamedTuple):
    """Facts that a cache must know about a batch's inputs, on a graph with one type."""

    remote_ids: Array
    """(K,) int64 input nodes on other servers."""
    num_bytes: int
    """The batch's bytes without columns."""


EDGE_BYTES = 24
"""Bytes per returned edge: source, destination and id."""


@dataclass(frozen=True, kw_only=True)
class RankCount:
    """Counts for one rank's batches, as JSON values."""

    seeds: int
    steps: int
    """Batches in the rank's loader, counted or not. All ranks in a job have equally many."""
    counted_steps: int
    remote_rows: dict[str, int]
    """Input rows that other servers own, by node type."""
    peer_rows: dict[str, int] = field(default_factory=dict)
    """Input rows that other ranks on the same server own, by node type."""
    remote_seeds: int
    """Targets in the last layer with labels on another server."""
    sources: list[int]
    """(L,) input rows by layer, input-most first."""
    targets: list[int]
    """(L,) output rows by layer."""
    edges: list[int]
    """(L,) edges by layer."""
    requested: int
    """Nodes on other servers for which in-edges were drawn."""
    returned: int
    """In-edges drawn for these nodes."""
    largest: list[list[int]]
    """(3, L) sources, targets and edges in the batch with the most input rows."""
    first_sources: dict[str, int] = field(default_factory=dict)
    """Sources in layer 1 by node type."""
    first_targets: dict[str, int] = field(default_factory=dict)
    first_edges: list[int] = field(default_factory=list)
    """(R,) edges in layer 1 by edge type."""
    caches: list[dict[str, Any]] = field(default_factory=list)
    """This rank's :class:`CacheHits` for each counted cache."""


@dataclass(frozen=True, kw_only=True)
class RowSizes:
    """Bytes that rows and gradients take."""

    features: Mapping[str, int]
    """Feature bytes per node, for the node types that have features."""
    label: int | None
    """Bytes per label. None: labels are not sent."""
    gradients: int
    """Bytes of all gradients in a step, including a flag (one element) for each tensor."""
    partitioned: bool
    """Whether servers ask each other for in-edges."""
    etypes: tuple[EdgeType, ...] = ()
    """The R edge types, in the order of :attr:`RankCount.first_edges`."""


def read_row_sizes(g: DistGraph, gradients: int, ntype: str | None = None, *, partitioned: bool) -> RowSizes:
    """Read how many bytes the rows in ``g`` take. Labels are on ``ntype``, by default the only type."""
    feature_bytes = {}
    for name in g.ntypes:
        if FEATURE in g.nodes[name].data:
            feature_bytes[name] = _get_row_bytes(g.nodes[name].data[FEATURE])
    label_bytes = None
    label_data = g.nodes[ntype or g.ntypes[0]].data
    if LABEL in label_data:
        label_bytes = _get_row_bytes(label_data[LABEL])

    return RowSizes(
        features=feature_bytes,
        label=label_bytes,
        gradients=gradients,
        partitioned=partitioned,
        etypes=tuple(g.canonical_etypes),
    )


def _get_row_bytes(column: Any) -> int:
    row_bytes: int = math.prod(column.shape[1:]) * column.dtype.itemsize
    return row_bytes


def count_rank(
    g: DistGraph,
    draws: Draws,
    seeds: Array,
    topology: Topology,
    bounds: Mapping[str, Array],
    *,
    ntype: str | None = None,
    inputs_of: list[Inputs] | None = None,
) -> RankCount:
    """Build and count one rank's batches. Every rank calls this, unless ``g`` is open in one process alone.

    Args:
        g: The graph, which has the structure that the batches need.
        draws: How the batches are drawn.
        seeds: (K,) int64 marked nodes on all ranks, ascending. The rank counts its share.
        topology: The rank's topology.
        bounds: (S + 1,) int64 first node on each server, by node type.
        ntype: Type of the seeds. None: the only one.
        inputs_of: On a graph with one type, each batch's inputs are appended to this list.
    """
    ntype = ntype or g.ntypes[0]
    rank_seeds = split_ids(seeds, bounds[ntype], topology, force_even=draws.force_even)[: draws.most_seeds]
    sampler = dgl.dataloading.NeighborSampler(list(draws.fanouts))
    options: dict[str, Any] = {"shuffle": True, "num_threads": 0, "device": "cpu"}
    loader = DataLoader(g, {ntype: rank_seeds}, sampler, batch_size=draws.batch_size, **options)

    # The loader's stages draw a run's batches, but fetch no rows here.
    counter = _BatchCounter(g, ntype, topology, bounds, len(draws.fanouts))
    steps = range(len(loader))[: draws.most_batches]
    stages = loader.open_stages(draws.epoch, lambda: iter(steps), claims=False)
    for step in steps:
        inputs = counter.add(stages.make(step))
        if inputs_of is not None:
            inputs_of.append(inputs)

    sources, targets, edges = counter.sizes.tolist()
    return RankCount(
        seeds=len(rank_seeds),
        steps=len(loader),
        counted_steps=len(steps),
        remote_rows=dict(counter.remote_rows),
        peer_rows=dict(counter.peer_rows),
        remote_seeds=counter.remote_seeds,
        sources=sources,
        targets=targets,
        edges=edges,
        requested=counter.requested,
        returned=counter.returned,
        largest=counter.largest.tolist(),
        first_sources=dict(counter.first_sources),
        first_targets=dict(counter.first_targets),
        first_edges=counter.first_edges.tolist(),
    )


@final
class _BatchCounter:
    """Adds up one rank's batches."""

    def __init__(
        self, g: DistGraph, ntype: str, topology: Topology, bounds: Mapping[str, Array], num_layers: int
    ) -> None:
        self._g = g
        self._ntype = ntype
        # Nodes on this rank's server, and on this rank, as (first, end) by type.
        self._server_ranges: dict[str, tuple[int, int]] = {}
        self._rank_ranges: dict[str, tuple[int, int]] = {}
        for name, starts in bounds.items():
            first, end = starts[topology.server : topology.server + 2].tolist()
            self._server_ranges[name] = (first, end)
            self._rank_ranges[name] = RowOwners(starts, topology).get_range(topology.rank)

        self.sizes = np.zeros((3, num_layers), np.int64)
        """Sources, targets and edges by layer, summed over the batches."""
        self.largest = np.zeros((3, num_layers), np.int64)
        """The same numbers for the batch with the most input rows."""
        self.remote_rows = dict.fromkeys(g.ntypes, 0)
        self.peer_rows = dict.fromkeys(g.ntypes, 0)
        self.remote_seeds = 0
        self.requested = 0
        self.returned = 0
        self.first_sources = dict.fromkeys(g.ntypes, 0)
        self.first_targets = dict.fromkeys(g.ntypes, 0)
        self.first_edges = np.zeros(len(g.canonical_etypes), np.int64)

    def add(self, batch: MiniBatch) -> Inputs:
        """Count ``batch``, and return its inputs with the seeds' type."""
        ntype = self._ntype
        input_ids = _by_type(batch.input_nodes, self._g)
        for name, ids in input_ids.items():
            num_remote = int(_is_outside(ids, self._server_ranges[name]).sum())
            num_foreign = int(_is_outside(ids, self._rank_ranges[name]).sum())
            self.remote_rows[name] += num_remote
            self.peer_rows[name] += num_foreign - num_remote
        targets = _by_type(batch.output_nodes, self._g)[ntype]
        self.remote_seeds += int(_is_outside(targets, self._server_ranges[ntype]).sum())

        sizes = np.array(count_block_sizes(batch.blocks))
        self.sizes += sizes
        if sizes[0, 0] > self.largest[0, 0]:
            self.largest = sizes
        self._add_first_block(batch.blocks[0])
        for block in batch.blocks:
            self._add_requests(block)

        ids = input_ids[ntype]
        _, num_targets, num_edges = sizes.sum(axis=1).tolist()
        # A block has an offset for each target, and one more.
        num_offsets = num_targets + len(batch.blocks)
        num_bytes = count_batch_bytes(len(ids), num_offsets, num_edges)
        return Inputs(ids[_is_outside(ids, self._server_ranges[ntype])], num_bytes)

    def _add_first_block(self, block: Any) -> None:
        for name in self._g.ntypes:
            self.first_sources[name] += int(block.num_src_nodes(name))
            self.first_targets[name] += int(block.num_dst_nodes(name))
        self.first_edges += [int(block.num_edges(etype)) for etype in self._g.canonical_etypes]

    def _add_requests(self, block: Any) -> None:
        """Count the nodes on other servers for which in-edges were drawn, and these edges."""
        for etype in self._g.canonical_etypes:
            target_type = etype[2]
            nodes = block.dstnodes[target_type].data[dgl.NID].numpy()
            is_remote = _is_outside(nodes, self._server_ranges[target_type])
            self.requested += int(is_remote.sum())
            self.returned += int(block.in_degrees(etype=etype).numpy()[is_remote].sum())


def _by_type(nodes: Tensor | Mapping[str, Tensor], g: DistGraph) -> dict[str, Array]:
    """Return (K,) int64 ids by node type. A tensor holds ids for the only type."""
    if isinstance(nodes, Tensor):
        return {g.ntypes[0]: nodes.numpy()}
    return {ntype: ids.numpy() for ntype, ids in nodes.items()}


def simulate_look_ahead(
    epochs: Sequence[Sequence[Inputs]], alpha: float, topology: Topology, bounds: Array, row_bytes: int
) -> tuple[int, int]:
    """Simulate a rank's look-ahead cache, and return its hits in the last epoch and its bytes.

    The simulation runs the loader's code on each batch's input nodes, but fetches no rows.

    Args:
        epochs: By epoch, the batches' inputs.
        alpha: Rows in the caches on a server, relative to the rows that the server owns.
        topology: The rank's topology.
        bounds: (S + 1,) first row on each server.
        row_bytes: Size of a row.
    """
    first, end = bounds[topology.server : topology.server + 2].tolist()
    num_rows = int(bounds[-1])
    ranks_of_server = topology.ranks_of_server(topology.server)
    capacity = count_rows_of_rank(alpha, (first, end), num_rows, len(ranks_of_server))

    # Rows in the simulated cache are empty.
    info = ColumnInfo(dtype="uint8", row_shape=(0,))
    simulation = _CacheSimulation(LookAheadRows(capacity, info, (first, end), num_rows), topology, bounds)
    num_hits = 0
    for epoch in epochs:
        num_hits = simulation.run_epoch(epoch)
    return num_hits, capacity * row_bytes + simulation.max_bytes


@final
class _CacheSimulation:
    """A look-ahead cache on one rank that takes rows without values."""

    def __init__(self, rows: LookAheadRows, topology: Topology, bounds: Array) -> None:
        self._rows = rows
        self._server = topology.server
        self._bounds = bounds
        self._waiting_bytes = 0
        self.max_bytes = 0
        """Largest size that the tables for the cache and for the prefetched batches had."""

    def run_epoch(self, epoch: Sequence[Inputs]) -> int:
        """Return how many remote rows in ``epoch`` the cache has."""
        self._rows.claim()
        batches = look_ahead(self._announce(epoch), {FEATURE: self._rows}, self._fetch)
        num_hits = sum(batch.hits for batch in batches)
        self._rows.release()
        return num_hits

    def _announce(self, epoch: Sequence[Inputs]) -> Iterator[_Announced]:
        for inputs in epoch:
            self._waiting_bytes += inputs.num_bytes
            yield _Announced(inputs={FEATURE: inputs.remote_ids}, num_bytes=inputs.num_bytes)

    def _fetch(self, batch: _Announced) -> None:
        plan = plan_remote(batch.inputs[FEATURE], self._bounds, self._server, self._rows.table, distinct=True)
        store_rows = self._rows.admit(plan)
        self.max_bytes = max(self.max_bytes, self._waiting_bytes + self._rows.num_bytes)
        self._waiting_bytes -= batch.num_bytes
        store_rows(self._rows.rows)
        batch.hits = len(plan.hit_positions)


@dataclass(kw_only=True)
class _Announced:
    """A simulated batch, with the fields that the loader's code reads."""

    inputs: Mapping[str, Array]
    num_bytes: int
    hits: int = 0


def _is_outside(nodes: Any, id_range: tuple[int, int]) -> Any:
    first, end = id_range
    return (nodes < first) | (nodes >= end)


def count_block_sizes(blocks: Sequence[Any]) -> tuple[list[int], list[int], list[int]]:
    """Return three lists with L numbers: each block's sources, targets and edges."""
    return (
        [int(block.num_src_nodes()) for block in blocks],
        [int(block.num_dst_nodes()) for block in blocks],
        [int(block.num_edges()) for block in blocks],
    )


def sum_counts(ranks: Sequence[RankCount], sizes: RowSizes, *, ranks_per_server: int = 1) -> Survey:
    """Add up the counts from all W ranks."""
    world_size = len(ranks)
    num_steps = max(rank.steps for rank in ranks)
    remote_rows = _sum_by_type([rank.remote_rows for rank in ranks])
    peer_rows = _sum_by_type([rank.peer_rows for rank in ranks])

    # Rows for types without features are trained.
    feature_bytes = 0
    trained_outside = 0
    trained_inside = 0
    for ntype, num_rows in remote_rows.items():
        if ntype in sizes.features:
            feature_bytes += (ID_BYTES + sizes.features[ntype]) * num_rows
        else:
            trained_outside += num_rows
            trained_inside += peer_rows.get(ntype, 0)

    # Without other servers, nobody is asked for in-edges.
    sampling_bytes = 0
    if sizes.partitioned and world_size > ranks_per_server:
        for rank in ranks:
            sampling_bytes += ID_BYTES * rank.requested + EDGE_BYTES * rank.returned
    label_bytes = 0
    if sizes.label is not None:
        label_bytes = (ID_BYTES + sizes.label) * sum(rank.remote_seeds for rank in ranks)

    first_edges = np.sum([rank.first_edges for rank in ranks], axis=0).astype(np.int64).tolist()
    first_layer = TypedCounts(
        batches=world_size * num_steps,
        sources=_sum_by_type([rank.first_sources for rank in ranks]),
        targets=_sum_by_type([rank.first_targets for rank in ranks]),
        edges=dict(zip(sizes.etypes, first_edges, strict=False)),
    )
    return Survey(
        steps=num_steps,
        input_rows=sum(rank.sources[0] for rank in ranks),
        remote_rows=sum(remote_rows.values()),
        edges=sum(sum(rank.edges) for rank in ranks),
        seeds_per_rank=[rank.seeds for rank in ranks],
        feature_bytes=feature_bytes,
        sampling_bytes=sampling_bytes,
        label_bytes=label_bytes,
        gradient_bytes=2 * (world_size - 1) * sizes.gradients * num_steps,
        first_targets=sum(rank.targets[0] for rank in ranks),
        first_edges=sum(rank.edges[0] for rank in ranks),
        trained_rows=TrainedRows(outside=trained_outside, inside=trained_inside),
        first_layer=first_layer,
    )


def _sum_by_type(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    return {name: sum(count[name] for count in counts) for name in counts[0]}


def combine_counts(ranks: Sequence[RankCount], topology: Topology, sizes: RowSizes) -> BatchWork:
    """Combine the ranks' counts. Counts for a part of the epoch are scaled to the whole epoch."""
    scaled = [_scale_to_epoch(rank) for rank in ranks]
    sources, targets, edges = max(scaled, key=lambda rank: rank.largest[0][0]).largest
    caches = []
    for hits_of_ranks in zip(*(rank.caches for rank in scaled), strict=True):
        caches.append(_join_cache_hits(hits_of_ranks))

    return BatchWork(
        survey=sum_counts(scaled, sizes, ranks_per_server=len(topology.ranks_of_server(0))),
        largest=(tuple(sources), tuple(targets), tuple(edges)),
        caches=tuple(caches),
        is_complete=all(rank.counted_steps >= rank.steps for rank in ranks),
    )


def _join_cache_hits(ranks: Sequence[Mapping[str, Any]]) -> CacheHits:
    """Add up a cache's hits over all ``ranks``. The bytes are taken from the largest cache."""
    fields = dict(ranks[0])
    for name in ("hits", "once_rows"):
        fields[name] = sum(rank[name] for rank in ranks)
    for name in ("server_bytes", "rank_bytes"):
        fields[name] = max(rank[name] for rank in ranks)
    return CacheHits(**fields)


def _scale_to_epoch(count: RankCount) -> RankCount:
    """Scale ``count`` to the whole epoch if not all batches were counted."""
    if count.counted_steps >= count.steps or not count.counted_steps:
        return count
    # The factor compares targets, not steps, because an epoch's last batch may be smaller.
    factor = count.seeds / max(count.targets[-1], 1)

    values = {}
    for name, value in vars(count).items():
        if name in ("seeds", "steps", "counted_steps", "largest"):
            values[name] = value
        elif name == "caches":
            values[name] = [{**cache, "hits": round(factor * cache["hits"])} for cache in value]
        elif isinstance(value, dict):
            values[name] = {ntype: round(factor * number) for ntype, number in value.items()}
        elif isinstance(value, list):
            values[name] = [round(factor * number) for number in value]
        else:
            values[name] = round(factor * value)
    return RankCount(**values)


_MAX_EDGES = 2_000_000_000
"""Maximum number of edges to follow, over ranks and hops. Above it, ``vip`` is not counted."""


def count_batches(
    run: PlannedRun, draws: Draws, caches: Sequence[tuple[str, float]], sizes: RowSizes
) -> BatchWork:
    """Count an epoch with mini-batches, and several caches' hits. Every rank must call this.

    ``caches`` has each cache's policy, and its size as a fraction of the server's nodes. If all batches are
    counted, a cache that looks ahead begins with rows from the previous epoch.
    """
    num_edges = run.g.num_edges() * len(draws.fanouts) * run.partition.topology.world_size
    policies = [LOOK_AHEAD]
    if run.in_job or num_edges <= _MAX_EDGES:
        policies.append("vip")
    caches = [cache for cache in caches if cache[0] in policies]
    vip_rows = _mask_rows(run, draws, [alpha for policy, alpha in caches if policy == "vip"])

    counts = []
    for rank in run.ranks_here:
        topology = run.partition.for_rank(rank)
        count, epochs = _count_epochs(run, draws, caches, topology)
        cache_hits = []
        for policy, alpha in caches:
            row_bytes = sizes.features[run.ntype]
            if policy == LOOK_AHEAD:
                bounds = run.partition.bounds
                num_hits, rank_bytes = simulate_look_ahead(epochs, alpha, topology, bounds, row_bytes)
                hits = CacheHits(policy=policy, alpha=alpha, hits=num_hits, rank_bytes=rank_bytes)
            else:
                hits = _count_vip_hits(
                    alpha, vip_rows[topology.server, alpha], epochs[-1], topology, row_bytes
                )
            cache_hits.append(asdict(hits))
        counts.append(asdict(replace(count, caches=cache_hits)))

    ranks = []
    for counts_of_process in gather_json(counts, run.g.session):
        ranks += [RankCount(**count) for count in counts_of_process]
    return combine_counts(ranks, run.partition.topology, sizes)


def _count_epochs(
    run: PlannedRun, draws: Draws, caches: Sequence[tuple[str, float]], topology: Topology
) -> tuple[RankCount, list[list[Inputs]]]:
    """Count a rank's batches.

    Returns:
        The counts, and the inputs in the previous and in this epoch. An epoch's inputs are empty if no cache
        needs them.
    """
    inputs: list[Inputs] = []
    previous_inputs: list[Inputs] = []
    options: dict[str, Any] = {"ntype": run.ntype}
    if caches:
        options["inputs_of"] = inputs
    count = count_rank(run.g, draws, run.seeds, topology, run.bounds, **options)

    # Counting is collective, and the condition is equal on all ranks.
    looks_ahead = any(policy == LOOK_AHEAD for policy, _ in caches)
    if draws.epoch and count.counted_steps >= count.steps and looks_ahead:
        previous_draws = replace(draws, epoch=draws.epoch - 1)
        count_rank(run.g, previous_draws, run.seeds, topology, run.bounds, inputs_of=previous_inputs)
    return count, [previous_inputs, inputs]


def _count_vip_hits(
    alpha: float, is_cached: Array, epoch: Sequence[Inputs], topology: Topology, row_bytes: int
) -> CacheHits:
    """Count the hits in a rank's ``vip`` cache. ``is_cached`` is an (N,) mask that marks cached rows."""
    num_rows = int(is_cached.sum())
    num_hits = 0
    for inputs in epoch:
        num_hits += int(is_cached[inputs.remote_ids].sum())

    # The server's first rank fetches for all.
    num_fetched = 0
    if topology.local_rank == 0:
        num_fetched = num_rows
    return CacheHits(
        policy="vip",
        alpha=alpha,
        hits=num_hits,
        once_rows=num_fetched,
        # A slot in the table takes 4 bytes.
        server_bytes=num_rows * (row_bytes + 4),
    )


def _mask_rows(run: PlannedRun, draws: Draws, alphas: Sequence[float]) -> dict[tuple[int, float], Array]:
    """Mark the rows in ``vip`` caches. Every rank must call this.

    Returns:
        (N,) masks by (server, size), for the servers counted here.
    """
    masks: dict[tuple[int, float], Array] = {}
    if not alphas:
        return masks
    servers = [run.partition.topology.server_of_rank[rank] for rank in run.ranks_here]
    for server in dict.fromkeys(servers):
        scores = _score_in_job(run.g, draws) if run.in_job else _score_alone(run, draws, server)

        first, end = run.partition.own_range(server)
        for alpha in alphas:
            top_rows = select_top_rows(scores, (first, end), int(alpha * (end - first)))
            mask = np.zeros(run.g.num_nodes(), np.bool_)
            mask[top_rows] = True
            masks[server, alpha] = mask

    return masks


def _score_in_job(g: DistGraph, draws: Draws) -> Array:
    """Return (N,) float64: how many ranks on this server are expected to need each row in a step."""
    request = CacheRequest(FEATURE, g.ntypes[0], 0.0, "vip", None, list(draws.fanouts), draws.batch_size)
    return compute_vip_scores(g, request, f"scores-{g.kvstore.next_number()}")


def _score_alone(run: PlannedRun, draws: Draws, server: int) -> Array:
    """Compute what :func:`_score_in_job` returns for any ``server``, in this process alone."""
    g = run.g
    partition = run.partition
    etype = g.canonical_etypes[0]
    ntype = g.ntypes[0]
    fanouts = [{etype: fanout} for fanout in draws.fanouts]
    shards = {etype: g.structure().shards[0]}
    num_nodes = {ntype: g.num_nodes()}

    total = np.zeros(g.num_nodes())
    for rank in partition.topology.ranks_of_server(server):
        topology = partition.for_rank(rank)
        seeds = split_ids(run.seeds, partition.bounds, topology, force_even=draws.force_even)
        rank_seeds = {ntype: seeds[: draws.most_seeds]}
        scores = compute_access_probability(shards, num_nodes, rank_seeds, fanouts, draws.batch_size)
        total += scores[ntype]

    return total


_EDGES_AT_ONCE = 1 << 20


def read_graph_stats(dataset: StoredDataset, servers: int) -> GraphStats:
    """Read a dataset's statistics for ``servers`` servers. All its edges are read once.

    Raises:
        ConfigError: If columns are missing, or there are fewer parts than servers.
        StorageError: If a part is missing or damaged.
    """
    manifest = dataset.manifest
    ntype = check_plannable(manifest, str(dataset.folder))
    placement = Placement(manifest.num_parts, build_topology(servers, 1))
    bounds = {name: placement.server_offsets(offsets) for name, offsets in manifest.node_offsets.items()}
    num_cut = 0
    num_train = 0
    for part_id in range(manifest.num_parts):
        part = dataset.part(part_id)
        server = int(placement.server_of_part[part_id])
        for etype in manifest.edge_types:
            first, end = bounds[etype[0]][server : server + 2].tolist()
            sources = part.indices(etype)
            # A part's edges may not fit in memory, so they are read in pieces.
            for start in range(0, len(sources), _EDGES_AT_ONCE):
                is_cut = _is_outside(sources[start : start + _EDGES_AT_ONCE], (first, end))
                num_cut += int(np.count_nonzero(is_cut))
        num_train += int(np.count_nonzero(part.node_data(ntype, TRAIN_MASK)))

    stats = estimate_graph_stats(manifest, servers, num_train)
    return replace(stats, edge_cut=num_cut / max(stats.edges, 1))


def estimate_graph_stats(manifest: Manifest, servers: int, train_nodes: int) -> GraphStats:
    """Estimate a dataset's statistics with ``train_nodes`` training nodes, without reading the graph."""
    num_columns = 0
    feature_bytes = 0
    all_feature_bytes = 0
    for ntype, columns in manifest.node_columns.items():
        if FEATURE not in columns:
            continue
        info = columns[FEATURE]
        width = math.prod(info.row_shape)
        row_bytes = numpy_dtype(info.dtype).itemsize * width
        num_columns += width
        feature_bytes += row_bytes
        all_feature_bytes += row_bytes * manifest.num_nodes(ntype)

    # The manifest counts edges between parts. If P parts are on fewer servers, edges between parts on the
    # same server are not cut.
    cut = float(str(manifest.quality.get("edge_cut", 0.0)))
    num_parts = manifest.num_parts
    cut_factor = (servers - 1) / servers * num_parts / max(num_parts - 1, 1)
    return GraphStats(
        name=manifest.name,
        nodes=sum(map(manifest.num_nodes, manifest.node_types)),
        edges=sum(map(manifest.num_edges, manifest.edge_types)),
        features=num_columns,
        feature_bytes=feature_bytes,
        all_feature_bytes=all_feature_bytes,
        classes=max(map(int, manifest.num_classes.values()), default=0),
        train_nodes=train_nodes,
        edge_cut=cut * cut_factor,
        method=manifest.method,
    )


def check_plannable(manifest: Manifest, where: str) -> str:
    """Return the training nodes' type. ``where`` names the dataset in errors.

    Raises:
        ConfigError: If no plan can be made for the dataset.
    """
    if manifest.is_homogeneous:
        ntype = manifest.node_types[0]
        _check_columns(manifest, where, ntype, (FEATURE, TRAIN_MASK))
        return ntype

    train_types = [ntype for ntype, columns in manifest.node_columns.items() if TRAIN_MASK in columns]
    if len(train_types) != 1:
        raise ConfigError(
            f"{where} has training nodes of {len(train_types)} types ({', '.join(train_types) or 'none'}), "
            "but a plan is for nodes of one type. Partition a graph with a split of one node type, or "
            "compare strategies in a run with `dglx train --strategy auto`."
        )
    return train_types[0]


def check_choosable(manifest: Manifest, where: str, ntype: str | None = None) -> None:
    """Raise ConfigError if a running job cannot compare strategies on the dataset.

    ``ntype`` is the training nodes' type. None: it is not known yet.
    """
    if manifest.is_homogeneous:
        check_plannable(manifest, where)
    elif ntype is not None:
        _check_columns(manifest, where, ntype, (TRAIN_MASK,))


def _check_columns(manifest: Manifest, where: str, ntype: str, names: Sequence[str]) -> None:
    columns = manifest.node_columns[ntype]
    for name in names:
        if name not in columns:
            raise ConfigError(
                f"{where} has no node data {name!r} (known: {', '.join(columns) or 'none'}). Partition a "
                "graph with this column."
            )
