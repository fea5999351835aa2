"""Counted bytes and work of an epoch of mini-batches, and statistics of graphs.

The draws of training are keyed by seed, epoch and global id, so one process can build the batches of every
rank. The bytes that follow from them are exactly those of the run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias, final

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


Inputs: TypeAlias = tuple[Array, int]
"""Remote input rows of a batch, and the bytes of the batch without columns."""

EDGE_BYTES = 24
"""Bytes of a returned edge: source, destination and id."""


@dataclass(frozen=True, kw_only=True)
class RankCount:
    """Counts of one rank's batches. JSON values."""

    seeds: int
    steps: int
    """Number of batches of the rank's loader, counted or not. In a job it is equal on all ranks."""
    counted_steps: int
    remote_rows: dict[str, int]
    """Number of input rows that other servers own, by node type."""
    peer_rows: dict[str, int] = field(default_factory=dict)
    """Number of input rows that other ranks of the same server own, by node type."""
    remote_seeds: int
    """Number of targets of the last layer with labels on another server."""
    sources: list[int]
    """(L,) input rows of each layer, input-most first."""
    targets: list[int]
    """(L,) output rows of each layer."""
    edges: list[int]
    """(L,) edges of each layer."""
    requested: int
    """Number of nodes of other servers for which in-edges were drawn."""
    returned: int
    """Number of in-edges drawn for them."""
    largest: list[list[int]]
    """(3, L) sources, targets and edges of the batch with the most input rows."""
    first_sources: dict[str, int] = field(default_factory=dict)
    """Number of sources of layer 1 by node type."""
    first_targets: dict[str, int] = field(default_factory=dict)
    first_edges: list[int] = field(default_factory=list)
    """(R,) edges of layer 1 by edge type."""
    caches: list[dict[str, Any]] = field(default_factory=list)
    """The :class:`CacheHits` of this rank for each counted cache."""


@dataclass(frozen=True, kw_only=True)
class RowSizes:
    """Bytes of rows and gradients."""

    features: Mapping[str, int]
    """Bytes of the features of a node, for the node types that have features."""
    label: int | None
    """Bytes of a label. None: labels are not sent."""
    gradients: int
    """Bytes of all gradients of a step, with a flag of one element for each tensor."""
    partitioned: bool
    """Whether servers ask each other for in-edges."""
    etypes: tuple[EdgeType, ...] = ()
    """The R edge types, in the order of :attr:`RankCount.first_edges`."""


def read_row_sizes(g: DistGraph, gradients: int, ntype: str | None = None, *, partitioned: bool) -> RowSizes:
    """Return the sizes of the rows of ``g``. Labels are those of ``ntype``, by default the only type."""

    def read_size(ntype: str, name: str) -> int:
        column = g.nodes[ntype].data[name]
        return math.prod(column.shape[1:]) * column.dtype.itemsize

    ntype = ntype or g.ntypes[0]
    return RowSizes(
        features={name: read_size(name, FEATURE) for name in g.ntypes if FEATURE in g.nodes[name].data},
        label=read_size(ntype, LABEL) if LABEL in g.nodes[ntype].data else None,
        gradients=gradients,
        partitioned=partitioned,
        etypes=tuple(g.canonical_etypes),
    )


def count_rank(
    g: DistGraph,
    draws: Draws,
    seeds: Array,
    placement: tuple[Topology, Mapping[str, Array]],
    *,
    ntype: str | None = None,
    inputs_of: list[Inputs] | None = None,
) -> RankCount:
    """Build and count the batches of one rank. ``g`` may be open on one rank. All ranks call this.

    Args:
        seeds: (K,) int64 marked nodes of all ranks, ascending. The rank counts its share.
        placement: Topology of the rank, and the (S + 1,) int64 first node of each server by node type.
        ntype: Type of the seeds. None: the only one.
        inputs_of: The remote inputs of each batch of a graph of one type are appended to this list.
    """
    topology, bounds = placement
    ntype = ntype or g.ntypes[0]
    own_seeds = split_ids(seeds, bounds[ntype], topology, force_even=draws.force_even)[: draws.most_seeds]
    sampler = dgl.dataloading.NeighborSampler(list(draws.fanouts))
    options: dict[str, Any] = {"shuffle": True, "num_threads": 0, "device": "cpu"}
    loader = DataLoader(g, {ntype: own_seeds}, sampler, batch_size=draws.batch_size, **options)
    counter = _BatchCounter(g, ntype, placement, len(draws.fanouts))
    steps = range(len(loader))[: draws.most_batches]
    stages = loader.open_stages(draws.epoch, lambda: iter(steps), claims=False)
    for step in steps:
        inputs = counter.add(stages.make(step))
        if inputs_of is not None:
            inputs_of.append(inputs)

    sources, targets, edges = counter.sizes.tolist()
    return RankCount(
        seeds=len(own_seeds),
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
    """Sums over the batches of one rank."""

    def __init__(
        self, g: DistGraph, ntype: str, placement: tuple[Topology, Mapping[str, Array]], num_layers: int
    ) -> None:
        topology, bounds = placement
        server = topology.server
        self._g = g
        self._ntype = ntype
        self._server_ranges = {
            name: (int(starts[server]), int(starts[server + 1])) for name, starts in bounds.items()
        }
        self._rank_ranges = {
            name: RowOwners(starts, topology).get_range(topology.rank) for name, starts in bounds.items()
        }
        self.sizes = np.zeros((3, num_layers), np.int64)
        """Sources, targets and edges of each layer, summed over the batches."""
        self.largest = np.zeros((3, num_layers), np.int64)
        """The same numbers of the batch with the most input rows."""
        self.remote_rows = dict.fromkeys(g.ntypes, 0)
        self.peer_rows = dict.fromkeys(g.ntypes, 0)
        self.remote_seeds = 0
        self.requested = 0
        self.returned = 0
        self.first_sources = dict.fromkeys(g.ntypes, 0)
        self.first_targets = dict.fromkeys(g.ntypes, 0)
        self.first_edges = np.zeros(len(g.canonical_etypes), np.int64)

    def add(self, batch: MiniBatch) -> Inputs:
        """Count ``batch``. Return its remote input rows of the type of the seeds, and its size in bytes."""
        ntype = self._ntype
        inputs = _by_type(batch.input_nodes, self._g)
        for name, ids in inputs.items():
            num_remote = int(_is_outside(ids, self._server_ranges[name]).sum())
            self.remote_rows[name] += num_remote
            self.peer_rows[name] += int(_is_outside(ids, self._rank_ranges[name]).sum()) - num_remote

        targets = _by_type(batch.output_nodes, self._g)[ntype]
        self.remote_seeds += int(_is_outside(targets, self._server_ranges[ntype]).sum())

        sizes = np.array(count_block_sizes(batch.blocks))
        self.sizes += sizes
        self.largest = max(self.largest, sizes, key=lambda sizes: int(sizes[0, 0]))
        self._add_first_block(batch.blocks[0])
        for block in batch.blocks:
            self._add_requests(block)

        num_offsets = int(sizes[1].sum()) + sizes.shape[1]
        remote_ids = inputs[ntype][_is_outside(inputs[ntype], self._server_ranges[ntype])]
        return remote_ids, count_batch_bytes(len(inputs[ntype]), num_offsets, int(sizes[2].sum()))

    def _add_first_block(self, block: Any) -> None:
        for name in self._g.ntypes:
            self.first_sources[name] += int(block.num_src_nodes(name))
            self.first_targets[name] += int(block.num_dst_nodes(name))
        self.first_edges += [int(block.num_edges(etype)) for etype in self._g.canonical_etypes]

    def _add_requests(self, block: Any) -> None:
        """Count the nodes of other servers for which in-edges were drawn, and these edges."""
        for etype in self._g.canonical_etypes:
            nodes = block.dstnodes[etype[2]].data[dgl.NID].numpy()
            is_remote = _is_outside(nodes, self._server_ranges[etype[2]])
            self.requested += int(is_remote.sum())
            self.returned += int(block.in_degrees(etype=etype).numpy()[is_remote].sum())


def _by_type(nodes: Tensor | Mapping[str, Tensor], g: DistGraph) -> dict[str, Array]:
    """Return (K,) int64 ids by node type. A tensor has the ids of the only type."""
    tensors = {g.ntypes[0]: nodes} if isinstance(nodes, Tensor) else nodes
    return {ntype: ids.numpy() for ntype, ids in tensors.items()}


def simulate_look_ahead(
    epochs: Sequence[Sequence[Inputs]], alpha: float, placement: tuple[Topology, Array], row_bytes: int
) -> tuple[int, int]:
    """Return (hits in the last epoch, bytes) of a rank's look-ahead cache.

    The simulation runs the loader's code on the input nodes of each batch in ``epochs``, but fetches no rows.
    The caches of a server's ranks have ``alpha`` times as many rows as the server owns. ``placement`` is the
    topology of the rank, and the (S + 1,) bounds of the rows of the servers.
    """
    (topology, bounds), server = placement, placement[0].server
    own_range = (int(bounds[server]), int(bounds[server + 1]))
    num_rows = int(bounds[-1])
    count = count_rows_of_rank(alpha, own_range, num_rows, len(topology.ranks_of_server(server)))
    rows = LookAheadRows(count, ColumnInfo(dtype="uint8", row_shape=(0,)), own_range, num_rows)
    waiting = 0
    extra = 0
    hits = 0

    def announce(epoch: Sequence[Inputs]) -> Iterator[_Announced]:
        nonlocal waiting
        for ids, num_bytes in epoch:
            waiting += num_bytes
            yield _Announced(inputs={FEATURE: ids}, num_bytes=num_bytes)

    def fetch(batch: _Announced) -> None:
        nonlocal waiting, extra
        plan = plan_remote(batch.inputs[FEATURE], bounds, server, rows.table, distinct=True)
        store = rows.admit(plan)
        extra = max(extra, waiting + rows.num_bytes)
        waiting = waiting - batch.num_bytes
        store(rows.rows)
        batch.hits = len(plan.hit_positions)

    for epoch in epochs:
        rows.claim()
        hits = sum(batch.hits for batch in look_ahead(announce(epoch), {FEATURE: rows}, fetch))
        rows.release()

    return hits, count * row_bytes + extra


@dataclass(kw_only=True)
class _Announced:
    inputs: Mapping[str, Array]
    num_bytes: int
    hits: int = 0


def _is_outside(nodes: Any, own_range: tuple[int, int]) -> Any:
    return (nodes < own_range[0]) | (nodes >= own_range[1])


def count_block_sizes(blocks: Sequence[Any]) -> tuple[list[int], list[int], list[int]]:
    """Return three lists of L numbers: sources, targets and edges of each block."""
    return (
        [int(block.num_src_nodes()) for block in blocks],
        [int(block.num_dst_nodes()) for block in blocks],
        [int(block.num_edges()) for block in blocks],
    )


def sum_counts(ranks: Sequence[RankCount], sizes: RowSizes, *, ranks_per_server: int = 1) -> Survey:
    """Return the totals of the counts of all W ranks."""
    steps = max(rank.steps for rank in ranks)
    world_size = len(ranks)
    remote, peers, sources, targets = (
        _sum_by_type([getattr(rank, name) for rank in ranks])
        for name in ("remote_rows", "peer_rows", "first_sources", "first_targets")
    )
    edges = np.sum([rank.first_edges for rank in ranks], axis=0).astype(np.int64).tolist()
    sampling = sum(ID_BYTES * rank.requested + EDGE_BYTES * rank.returned for rank in ranks)
    label_bytes = 0 if sizes.label is None else ID_BYTES + sizes.label
    return Survey(
        steps=steps,
        input_rows=sum(rank.sources[0] for rank in ranks),
        remote_rows=sum(remote.values()),
        edges=sum(sum(rank.edges) for rank in ranks),
        seeds_per_rank=[rank.seeds for rank in ranks],
        feature_bytes=sum((ID_BYTES + sizes.features[name]) * remote[name] for name in sizes.features),
        sampling_bytes=sampling if sizes.partitioned and world_size > ranks_per_server else 0,
        label_bytes=label_bytes * sum(rank.remote_seeds for rank in ranks),
        gradient_bytes=2 * (world_size - 1) * sizes.gradients * steps,
        first_targets=sum(rank.targets[0] for rank in ranks),
        first_edges=sum(rank.edges[0] for rank in ranks),
        trained_rows=TrainedRows(
            outside=sum(count for name, count in remote.items() if name not in sizes.features),
            inside=sum(count for name, count in peers.items() if name not in sizes.features),
        ),
        first_layer=TypedCounts(
            batches=world_size * steps,
            sources=sources,
            targets=targets,
            edges=dict(zip(sizes.etypes, edges, strict=False)),
        ),
    )


def _sum_by_type(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    return {name: sum(count[name] for count in counts) for name in counts[0]}


def combine_counts(ranks: Sequence[RankCount], topology: Topology, sizes: RowSizes) -> BatchWork:
    """Return the work of an epoch. Counts of a part of the epoch are scaled to the whole epoch."""
    scaled = [_scale_to_epoch(rank) for rank in ranks]
    largest = max(scaled, key=lambda rank: rank.largest[0][0]).largest
    return BatchWork(
        survey=sum_counts(scaled, sizes, ranks_per_server=len(topology.ranks_of_server(0))),
        largest=(tuple(largest[0]), tuple(largest[1]), tuple(largest[2])),
        caches=tuple(map(_join_cache_hits, zip(*(rank.caches for rank in scaled), strict=True))),
        is_complete=all(rank.counted_steps >= rank.steps for rank in ranks),
    )


def _join_cache_hits(ranks: Sequence[Mapping[str, Any]]) -> CacheHits:
    sums = {name: sum(rank[name] for rank in ranks) for name in ("hits", "once_rows")}
    maxima = {name: max(rank[name] for rank in ranks) for name in ("server_bytes", "rank_bytes")}
    return CacheHits(**{**ranks[0], **sums, **maxima})


def _scale_to_epoch(count: RankCount) -> RankCount:
    if count.counted_steps >= count.steps or not count.counted_steps:
        return count
    # The factor compares targets, not steps, because the last batch of an epoch may be smaller.
    factor = count.seeds / max(count.targets[-1], 1)

    def scale(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: scale(count) for name, count in value.items()}
        return [scale(item) for item in value] if isinstance(value, list) else round(factor * value)

    unscaled = ("seeds", "steps", "counted_steps", "largest", "caches")
    values = {name: value if name in unscaled else scale(value) for name, value in vars(count).items()}
    values["caches"] = [{**cache, "hits": scale(cache["hits"])} for cache in count.caches]
    return RankCount(**values)


_MOST_EDGES = 2_000_000_000
"""Largest number of edges to follow, over ranks and hops. Above it ``vip`` is not counted."""


def count_batches(
    run: PlannedRun, draws: Draws, caches: Sequence[tuple[str, float]], sizes: RowSizes
) -> BatchWork:
    """Count an epoch of mini-batches, and the hits of several caches. Every rank must call this.

    If all batches are counted, a cache that looks ahead begins with rows of the previous epoch.
    """
    partition = run.partition
    edges = run.g.num_edges() * len(draws.fanouts) * partition.topology.world_size
    policies = (LOOK_AHEAD, "vip") if run.in_job or edges <= _MOST_EDGES else (LOOK_AHEAD,)
    caches = [cache for cache in caches if cache[0] in policies]
    looks_ahead = any(policy == LOOK_AHEAD for policy, _ in caches)
    cached_rows = _mask_rows(run, draws, [alpha for policy, alpha in caches if policy == "vip"])
    counts = []
    for rank in run.ranks_here:
        topology = partition.for_rank(rank)
        placement = (topology, run.bounds)
        inputs = list[Inputs]()
        options: dict[str, Any] = {"ntype": run.ntype, "inputs_of": inputs if caches else None}
        count = count_rank(run.g, draws, run.seeds, placement, **options)
        previous: list[Inputs] = []

        # Counting is collective, and the condition is equal on all ranks.
        if draws.epoch and count.counted_steps >= count.steps and looks_ahead:
            count_rank(run.g, replace(draws, epoch=draws.epoch - 1), run.seeds, placement, inputs_of=previous)
        rows = [previous, inputs]
        location = (topology, partition.bounds)
        cache_hits = [
            _count_cache(cache, location, rows, cached_rows, sizes.features[run.ntype]) for cache in caches
        ]
        counts.append(replace(count, caches=list(map(asdict, cache_hits))))

    gathered = gather_json([asdict(count) for count in counts], run.g.session)
    ranks = [RankCount(**count) for counts_here in gathered for count in counts_here]
    return combine_counts(ranks, partition.topology, sizes)


def _count_cache(
    cache: tuple[str, float],
    location: tuple[Topology, Array],
    epochs: Sequence[Sequence[Inputs]],
    cached_rows: Mapping[tuple[int, float], Array],
    row_bytes: int,
) -> CacheHits:
    (policy, alpha), (topology, _) = cache, location
    if policy == LOOK_AHEAD:
        hits, rank_bytes = simulate_look_ahead(epochs, alpha, location, row_bytes)
        return CacheHits(policy=policy, alpha=alpha, hits=hits, rank_bytes=rank_bytes)
    mask = cached_rows[topology.server, alpha]
    rows = int(mask.sum())
    return CacheHits(
        policy=policy,
        alpha=alpha,
        hits=sum(int(mask[remote].sum()) for remote, _ in epochs[-1]),
        # The first rank of a server fetches for all. A slot of the table takes 4 bytes.
        once_rows=0 if topology.local_rank else rows,
        server_bytes=rows * (row_bytes + 4),
    )


def _mask_rows(run: PlannedRun, draws: Draws, alphas: Sequence[float]) -> dict[tuple[int, float], Array]:
    """Return (N,) masks of rows in caches of ``vip``, by (server counted here, size). All ranks call it."""
    g = run.g
    topology = run.partition.topology
    masks = {}
    for server in dict.fromkeys(topology.server_of_rank[rank] for rank in run.ranks_here) if alphas else ():
        scores = _score_in_job(g, draws) if run.in_job else _score_alone(run, draws, server)
        own_range = run.partition.own_range(server)
        for alpha in alphas:
            masks[server, alpha] = mask = np.zeros(g.num_nodes(), np.bool_)
            mask[select_top_rows(scores, own_range, int(alpha * (own_range[1] - own_range[0])))] = True

    return masks


def _score_in_job(g: DistGraph, draws: Draws) -> Array:
    """Return (N,) float64: the expected number of this server's ranks that need each row in a step."""
    request = CacheRequest(FEATURE, g.ntypes[0], 0.0, "vip", None, list(draws.fanouts), draws.batch_size)
    return compute_vip_scores(g, request, f"scores-{g.kvstore.next_number()}")


def _score_alone(run: PlannedRun, draws: Draws, server: int) -> Array:
    g, partition = run.g, run.partition
    etype = g.canonical_etypes[0]
    ntype = g.ntypes[0]
    total = np.zeros(g.num_nodes())
    fanouts = [{etype: fanout} for fanout in draws.fanouts]
    shards = {etype: g.structure().shards[0]}
    counts = {ntype: g.num_nodes()}
    for rank in partition.topology.ranks_of_server(server):
        seeds = split_ids(run.seeds, partition.bounds, partition.for_rank(rank), force_even=draws.force_even)
        rank_seeds = {ntype: seeds[: draws.most_seeds]}
        total += compute_access_probability(shards, counts, rank_seeds, fanouts, draws.batch_size)[ntype]

    return total


_EDGES_AT_ONCE = 1 << 20


def read_graph_stats(dataset: StoredDataset, servers: int) -> GraphStats:
    """Return the statistics of a dataset on ``servers`` servers. All its edges are read once.

    Raises ConfigError if columns are missing, or there are fewer parts than servers, and StorageError if a
    part is missing or damaged.
    """
    manifest = dataset.manifest
    ntype = check_plannable(manifest, str(dataset.folder))
    placement = Placement(manifest.num_parts, build_topology(servers, 1))
    bounds = {name: placement.server_offsets(offsets) for name, offsets in manifest.node_offsets.items()}
    cut = train = 0
    for part_id in range(manifest.num_parts):
        part = dataset.part(part_id)
        server = int(placement.server_of_part[part_id])
        for etype in manifest.edge_types:
            first, end = bounds[etype[0]][server : server + 2].tolist()
            indices = part.indices(etype)
            for start in range(0, len(indices), _EDGES_AT_ONCE):
                piece = indices[start : start + _EDGES_AT_ONCE]
                cut += int(np.count_nonzero(_is_outside(piece, (first, end))))
        train += int(np.count_nonzero(part.node_data(ntype, TRAIN_MASK)))

    stats = estimate_graph_stats(manifest, servers, train)
    return replace(stats, edge_cut=cut / max(stats.edges, 1))


def estimate_graph_stats(manifest: Manifest, servers: int, train_nodes: int) -> GraphStats:
    """Return the statistics of a dataset without reading it."""
    infos = {name: columns[FEATURE] for name, columns in manifest.node_columns.items() if FEATURE in columns}
    row_bytes = {
        name: numpy_dtype(info.dtype).itemsize * math.prod(info.row_shape) for name, info in infos.items()
    }
    cut = float(str(manifest.quality.get("edge_cut", 0.0)))
    parts = manifest.num_parts

    # If P parts are on fewer servers, edges between parts of one server are not cut.
    cut_factor = (servers - 1) / servers * parts / max(parts - 1, 1)
    return GraphStats(
        name=manifest.name,
        nodes=sum(map(manifest.num_nodes, manifest.node_types)),
        edges=sum(map(manifest.num_edges, manifest.edge_types)),
        features=sum(math.prod(info.row_shape) for info in infos.values()),
        feature_bytes=sum(row_bytes.values()),
        all_feature_bytes=sum(size * manifest.num_nodes(name) for name, size in row_bytes.items()),
        classes=max(map(int, manifest.num_classes.values()), default=0),
        train_nodes=train_nodes,
        edge_cut=cut * cut_factor,
        method=manifest.method,
    )


def check_plannable(manifest: Manifest, where: str) -> str:
    """Return the type of the training nodes. Raise ConfigError unless a plan can be made for the dataset."""
    if manifest.is_homogeneous:
        ntype = manifest.node_types[0]
        _check_columns(manifest, where, ntype, (FEATURE, TRAIN_MASK))
        return ntype

    trained = [ntype for ntype, columns in manifest.node_columns.items() if TRAIN_MASK in columns]
    if len(trained) != 1:
        raise ConfigError(
            f"{where} has training nodes of {len(trained)} types ({', '.join(trained) or 'none'}), but a "
            "plan is for nodes of one type. Partition a graph with a split of one node type, or "
            "compare strategies in a run with `dglx train --strategy auto`."
        )

    return trained[0]


def check_choosable(manifest: Manifest, where: str, ntype: str | None = None) -> None:
    """Raise ConfigError unless a running job can compare strategies on the dataset.

    ``ntype`` is the type of the training nodes. None: it is not known yet.
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
