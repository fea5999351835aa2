"""Bytes and work of an epoch of mini-batches, counted from the draws of training; statistics of graphs.

Draws are keyed by seed, epoch and global id, so one process can make the batches of every rank, and the bytes
that follow from them are exactly those of the run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import dgl
import numpy as np
from torch import Tensor

from dglx_dist.comm.topology import Topology
from dglx_dist.data.partition.base import PARTITIONERS
from dglx_dist.data.storage.columns import numpy_dtype
from dglx_dist.data.storage.manifest import Manifest
from dglx_dist.data.storage.reader import StoredDataset
from dglx_dist.dataloading.loader import DataLoader
from dglx_dist.errors import ConfigError
from dglx_dist.graph.cache import access_probability, most_wanted
from dglx_dist.graph.partition_book import Placement
from dglx_dist.graph.split import split_ids
from dglx_dist.planner.closures import PartitionContext
from dglx_dist.planner.model_shape import topology_of
from dglx_dist.planner.records import GraphStats
from dglx_dist.records import FEATURE, NODE_TYPE, Array

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph


_ID_BYTES, _EDGE_BYTES = 8, 24
"""A requested id; source, destination and id of a returned edge."""


@dataclass(frozen=True, kw_only=True)
class Draws:
    """Parameters of the counted batches."""

    fanouts: tuple[int, ...]
    """Input-most first; -1: all."""
    batch_size: int
    """Seeds per rank and step."""
    epoch: int = 1
    force_even: bool = True
    most_seeds: int | None = None
    """Per rank; others are left out."""
    most_batches: int | None = None
    """Per rank; None: all of the epoch."""


@dataclass(frozen=True, kw_only=True)
class RankCount:
    """Counts of one rank's batches. JSON values."""

    seeds: int
    steps: int
    """Batches of this rank, counted or not."""
    counted: int
    remote_rows: list[int]
    """(S,) input rows by the server that owns them; 0 for its own."""
    remote_seeds: int
    """Targets of the last layer whose labels another server has."""
    sources: list[int]
    """(L,) input rows of each layer, input-most first."""
    targets: list[int]
    """(L,) output rows of each layer."""
    edges: list[int]
    """(L,)."""
    requested: int
    """Nodes of other servers whose in-edges were drawn."""
    returned: int
    """In-edges drawn for them."""
    largest: list[list[int]]
    """(3, L) sources, targets and edges of the batch with most input rows."""
    hits: list[int] = field(default_factory=list)
    """Remote rows held by caches of several sizes, in the order of the sizes."""


@dataclass(frozen=True, kw_only=True)
class Survey:
    """Totals of an epoch of mini-batches over all ranks."""

    steps: int
    """Of every rank: as many as the rank with most seeds needs."""
    input_rows: int
    remote_rows: int
    """Of these, rows of another server."""
    edges: int
    seeds_per_rank: list[int]
    feature_bytes: int
    """(8 + F s) for each remote row."""
    sampling_bytes: int
    """8 for each remote node asked for in-edges, 24 for each returned edge; 0 with the whole structure."""
    label_bytes: int
    gradient_bytes: int
    """2 (W - 1) (|theta| s + a flag of s bytes for each parameter tensor) for each step."""
    first_targets: int = 0
    """D1: destinations of the layer-1 blocks; their sources, L0, are ``input_rows``."""
    first_edges: int = 0
    ranks_per_server: int = 1

    @property
    def ranks(self) -> int:
        return len(self.seeds_per_rank)

    @property
    def payload_bytes(self) -> int:
        """Payload between ranks; between servers if each has one rank."""
        return self.feature_bytes + self.sampling_bytes + self.label_bytes + self.gradient_bytes

    @property
    def seeds_per_server(self) -> list[int]:
        size = self.ranks_per_server
        return [sum(self.seeds_per_rank[first : first + size]) for first in range(0, self.ranks, size)]

    @property
    def seeds_max_over_mean(self) -> float:
        """Over the servers; 1 is balanced."""
        servers = self.seeds_per_server
        return max(servers) * len(servers) / max(sum(servers), 1)


def count_rank(
    g: DistGraph,
    draws: Draws,
    seeds: Array,
    place: tuple[Topology, Array],
    *,
    held: Sequence[Array] = (),
    keep: list[list[Any]] | None = None,
) -> RankCount:
    """Make the batches of one rank and count them. Collective.

    Args:
        g: Of one node and edge type; its session may have one rank, and the batches be those of another.
        draws: Which batches.
        seeds: (K,) int64 all marked nodes, ascending; the rank's share is taken from them.
        place: Topology of the rank, and the (S + 1,) int64 first node of each server.
        held: (N,) bool masks: rows that caches of different sizes hold on the rank's server.
        keep: Receives the blocks; None: they are dropped.
    """
    topology, bounds = place
    own_seeds = split_ids(seeds, bounds, topology, force_even=draws.force_even)[: draws.most_seeds]
    sampler = dgl.dataloading.NeighborSampler(list(draws.fanouts))
    loader = DataLoader(g, own_seeds, sampler, batch_size=draws.batch_size, shuffle=True, num_threads=0)
    loader.set_epoch(draws.epoch)
    count = _Count(len(draws.fanouts), bounds, topology.server, held)
    for number, (inputs, targets, blocks) in enumerate(loader):
        if draws.most_batches is not None and number >= draws.most_batches:
            break
        assert isinstance(inputs, Tensor)
        assert isinstance(targets, Tensor)
        count.add(inputs, targets, blocks)
        if keep is not None:
            keep.append(blocks)
    return count.total(len(own_seeds), -(-len(own_seeds) // draws.batch_size))


class _Count:
    def __init__(self, layers: int, bounds: Array, server: int, held: Sequence[Array]) -> None:
        self._bounds, self._held = bounds, held
        self._own_range = int(bounds[server]), int(bounds[server + 1])
        self._remote: Array = np.zeros(len(bounds) - 1, np.int64)
        self._sizes: Array = np.zeros((3, layers), np.int64)
        self._largest: Array = np.zeros((3, layers), np.int64)
        self._hits = [0] * len(held)
        self._seeds, self._requested, self._returned, self._batches = 0, 0, 0, 0

    def add(self, inputs: Tensor, targets: Tensor, blocks: Sequence[Any]) -> None:
        self._batches += 1
        rows = inputs.numpy()
        remote = rows[_outside(rows, *self._own_range)]
        owners = np.searchsorted(self._bounds, remote, side="right") - 1
        self._remote += np.bincount(owners, minlength=len(self._remote))
        self._seeds += int(_outside(targets.numpy(), *self._own_range).sum())
        for place, mask in enumerate(self._held):
            self._hits[place] += int(mask[remote].sum())
        sizes = np.array(
            [
                [block.num_src_nodes() for block in blocks],
                [block.num_dst_nodes() for block in blocks],
                [block.num_edges() for block in blocks],
            ]
        )
        self._sizes += sizes
        self._largest = max(self._largest, sizes, key=lambda one: int(one[0, 0]))
        for block in blocks:
            away = _outside(block.dstdata[dgl.NID], *self._own_range)
            self._requested += int(away.sum())
            self._returned += int(block.in_degrees()[away].sum())

    def total(self, seeds: int, steps: int) -> RankCount:
        return RankCount(
            seeds=seeds,
            steps=steps,
            counted=self._batches,
            remote_rows=self._remote.tolist(),
            remote_seeds=self._seeds,
            sources=self._sizes[0].tolist(),
            targets=self._sizes[1].tolist(),
            edges=self._sizes[2].tolist(),
            requested=self._requested,
            returned=self._returned,
            largest=self._largest.tolist(),
            hits=self._hits,
        )


def summed(
    ranks: Sequence[RankCount],
    *,
    row_bytes: Mapping[str, int],
    parameter_bytes: int,
    partitioned: bool,
    ranks_per_server: int = 1,
) -> Survey:
    """Return the sum over the ranks.

    Args:
        ranks: (W,).
        row_bytes: Of a row of ``feat`` and of ``label``.
        parameter_bytes: Of all gradients, with a flag of one element for each tensor.
        partitioned: Whether servers ask each other for in-edges.
        ranks_per_server: G.
    """
    steps = max(one.steps for one in ranks)
    world_size = len(ranks)
    sampling = sum(_ID_BYTES * one.requested + _EDGE_BYTES * one.returned for one in ranks)
    remote = sum(sum(one.remote_rows) for one in ranks)
    spread = partitioned and world_size > ranks_per_server
    return Survey(
        steps=steps,
        input_rows=sum(one.sources[0] for one in ranks),
        remote_rows=remote,
        edges=sum(sum(one.edges) for one in ranks),
        seeds_per_rank=[one.seeds for one in ranks],
        feature_bytes=(_ID_BYTES + row_bytes["feat"]) * remote,
        sampling_bytes=sampling if spread else 0,
        label_bytes=(_ID_BYTES + row_bytes["label"]) * sum(one.remote_seeds for one in ranks),
        gradient_bytes=2 * (world_size - 1) * parameter_bytes * steps,
        first_targets=sum(one.targets[0] for one in ranks),
        first_edges=sum(one.edges[0] for one in ranks),
        ranks_per_server=ranks_per_server,
    )


def _outside(nodes: Any, first: int, last: int) -> Any:
    return (nodes < first) | (nodes >= last)


@dataclass(frozen=True, kw_only=True)
class CacheHits:
    """Size and hits of a cache of remote rows."""

    alpha: float
    """Its size as a fraction of the server's own nodes."""
    rows: int
    hits: int
    """Remote rows of an epoch found in a cache, of all ranks."""


@dataclass(frozen=True, kw_only=True)
class BatchWork:
    """Work of one epoch of mini-batches."""

    survey: Survey
    worked: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    """(L,) sources, targets and edges of the rank with most edges, over the epoch."""
    first: tuple[int, int, int]
    """Sources, targets and edges of layer 1, of all ranks."""
    largest: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    """(L,) the same of the largest batch."""
    card_share: float
    """Remote rows through the busiest card, relative to those of all ranks."""
    caches: tuple[CacheHits, ...] = ()
    counted: bool = True
    """Whether every batch of the epoch was counted."""

    @property
    def steps(self) -> int:
        return self.survey.steps


@dataclass(frozen=True, kw_only=True)
class RowSizes:
    """Bytes of rows and gradients."""

    feature: int
    label: int | None
    gradients: int
    """Of all gradients of a step, with their flags."""
    partitioned: bool


def work_of_counts(
    ranks: Sequence[RankCount],
    topology: Topology,
    sizes: RowSizes,
    *,
    cached: Mapping[float, int] | None = None,
) -> BatchWork:
    """Return the work of the ranks' counts, scaled to the epoch if only part of it was counted.

    Args:
        ranks: (W,).
        topology: Of the run.
        sizes: Bytes of rows and gradients.
        cached: Cache size to the rows of all caches, in the order in which hits were counted.
    """
    scaled = [_scaled_to_epoch(one) for one in ranks]
    found = summed(
        scaled,
        row_bytes={"feat": sizes.feature, "label": sizes.label or 0},
        parameter_bytes=sizes.gradients,
        partitioned=sizes.partitioned,
        ranks_per_server=len(topology.ranks_of_server(0)),
    )
    if sizes.label is None:
        found = replace(found, label_bytes=0)
    busiest = max(scaled, key=lambda one: sum(one.edges))
    largest = max(scaled, key=lambda one: one.largest[0][0]).largest
    rows = [(alpha, count) for alpha, count in (cached or {}).items()]
    return BatchWork(
        survey=found,
        worked=(tuple(busiest.sources), tuple(busiest.targets), tuple(busiest.edges)),
        first=(found.input_rows, found.first_targets, found.first_edges),
        largest=(tuple(largest[0]), tuple(largest[1]), tuple(largest[2])),
        card_share=_card_share(scaled, topology),
        caches=tuple(
            CacheHits(alpha=alpha, rows=count, hits=sum(one.hits[place] for one in scaled))
            for place, (alpha, count) in enumerate(rows)
        ),
        counted=all(one.counted >= one.steps for one in ranks),
    )


def _card_share(ranks: Sequence[RankCount], topology: Topology) -> float:
    pairs: Array = np.zeros((topology.num_servers, topology.num_servers))
    for rank, one in enumerate(ranks):
        pairs[topology.server_of_rank[rank]] += one.remote_rows
    total = float(pairs.sum())
    if not total:
        return 1.0 / topology.num_servers
    return float(max(pairs.sum(axis=0).max(), pairs.sum(axis=1).max())) / total


def _scaled_to_epoch(one: RankCount) -> RankCount:
    if one.counted >= one.steps or not one.counted:
        return one
    # By targets rather than batches, because the last batch of an epoch may be smaller.
    factor = one.seeds / max(one.targets[-1], 1)

    def scaled(values: Sequence[int]) -> list[int]:
        return [round(factor * value) for value in values]

    return replace(
        one,
        remote_rows=scaled(one.remote_rows),
        remote_seeds=round(factor * one.remote_seeds),
        sources=scaled(one.sources),
        targets=scaled(one.targets),
        edges=scaled(one.edges),
        requested=round(factor * one.requested),
        returned=round(factor * one.returned),
        hits=scaled(one.hits),
    )


_MOST_EDGES = 2_000_000_000
"""Largest number of edges to follow, over ranks and hops; above it no cache is counted."""


@dataclass(frozen=True, kw_only=True)
class CachedRows:
    """Rows in caches of one size."""

    alpha: float
    """Size as a fraction of the server's own nodes."""
    held: tuple[Array, ...]
    """(S,) masks (N,) bool."""


def rows_of_caches(
    g: DistGraph, context: PartitionContext, seeds: Array, draws: Draws, sizes: Sequence[float]
) -> list[CachedRows]:
    """Return the rows in caches of ``sizes`` under policy ``vip``; none if there is one server.

    Args:
        g: Whose structure is whole here.
        context: Of the run.
        seeds: (K,) int64 all training nodes.
        draws: Of the batches.
        sizes: As fractions of the server's own nodes.
    """
    topology = context.topology
    work = g.num_edges() * len(draws.fanouts) * topology.world_size
    if topology.num_servers == 1 or not sizes or work > _MOST_EDGES:
        return []
    held: list[list[Array]] = [[] for _ in sizes]
    for server in range(topology.num_servers):
        scores = _scores(g, context, seeds, draws, server)
        first, last = context.own_range(server)
        for place, alpha in enumerate(sizes):
            mask = np.zeros(g.num_nodes(), np.bool_)
            mask[most_wanted(scores, (first, last), int(alpha * (last - first)))] = True
            held[place].append(mask)
    return [CachedRows(alpha=alpha, held=tuple(masks)) for alpha, masks in zip(sizes, held, strict=True)]


def _scores(g: DistGraph, context: PartitionContext, seeds: Array, draws: Draws, server: int) -> Array:
    """Return (N,) float64: the expected number of the server's ranks that need each row in a step."""
    etype, ntype = g.canonical_etypes[0], g.ntypes[0]
    total = np.zeros(g.num_nodes())
    fanouts = [{etype: fanout} for fanout in draws.fanouts]
    for rank in context.topology.ranks_of_server(server):
        here = Topology(rank, context.topology.world_size, context.topology.server_of_rank)
        own_seeds = split_ids(seeds, context.bounds, here, force_even=draws.force_even)[: draws.most_seeds]
        shards, counts = {etype: g.structure(etype).shards[0]}, {ntype: g.num_nodes()}
        total += access_probability(shards, counts, {ntype: own_seeds}, fanouts, draws.batch_size)[ntype]
    return total


TRAIN_MASK = "train_mask"
METIS_CUT, METIS_FLOOR = 0.35, 0.05
"""METIS's cut relative to a random partition's, on graphs with communities; and the least cut as a fraction
of all edges. For graphs without a dataset only."""
_MOST_NODES, _MOST_DEGREE, _MOST_COLUMNS = 10**15, 10**6, 10**6
"""Larger values are typing errors."""


def stats_of_dataset(dataset: StoredDataset, servers: int) -> GraphStats:
    """Return the statistics of a dataset on ``servers`` servers; reads all its edges once.

    Args:
        dataset: With all its parts, of one node and edge type, with ``feat`` and ``train_mask``.
        servers: Each has an equal number of consecutive parts, up to one.

    Raises:
        ConfigError: several types, missing columns, or fewer parts than servers.
        StorageError: a part is missing or damaged.
    """
    manifest = dataset.manifest
    check_plannable(manifest, str(dataset.folder))
    etype = manifest.edge_types[0]
    placement = Placement(manifest.num_parts, topology_of(servers, 1))
    bounds = placement.server_offsets(manifest.node_offsets[NODE_TYPE])
    cut, squares, train = 0, 0.0, 0
    for number in range(manifest.num_parts):
        part, server = dataset.part(number), int(placement.server_of_part[number])
        indices = part.indices(etype)
        cut += int(np.count_nonzero((indices < bounds[server]) | (indices >= bounds[server + 1])))
        degrees = np.diff(part.indptr(etype)).astype(np.float64)
        squares += float(degrees @ degrees)
        train += int(np.count_nonzero(part.node_data(NODE_TYPE, TRAIN_MASK)))
    nodes, edges = manifest.num_nodes(NODE_TYPE), manifest.num_edges(etype)
    return replace(
        stats_of_manifest(manifest, servers, train),
        edge_cut=cut / max(edges, 1),
        degree_spread=squares * nodes / max(edges, 1) ** 2,
    )


def stats_of_manifest(manifest: Manifest, servers: int, train_nodes: int) -> GraphStats:
    """Return the statistics of a dataset without reading it: the cut of its parts, default spread of degrees.

    Args:
        manifest: Of one node and edge type, with ``feat``.
        servers: S.
        train_nodes: Number of training nodes.
    """
    info, etype = manifest.node_columns[NODE_TYPE][FEATURE], manifest.edge_types[0]
    cut, parts = float(str(manifest.quality.get("edge_cut", 0.0))), manifest.num_parts
    # With P parts on fewer servers, edges between parts of one server are not cut.
    fewer = (servers - 1) / servers * parts / max(parts - 1, 1)
    return GraphStats(
        name=manifest.name,
        nodes=manifest.num_nodes(NODE_TYPE),
        edges=manifest.num_edges(etype),
        features=math.prod(info.row_shape),
        feature_bytes=numpy_dtype(info.dtype).itemsize * math.prod(info.row_shape),
        classes=int(manifest.num_classes.get(NODE_TYPE, 0)),
        train_nodes=train_nodes,
        edge_cut=cut * fewer,
        method=manifest.method,
    )


@dataclass(frozen=True, kw_only=True)
class Figures:
    """User-given statistics of a graph without a dataset."""

    nodes: float
    edges: float
    features: int
    classes: int = 50
    train_share: float = 0.1
    """Fraction of the nodes that are trained on."""
    method: str = "metis"
    """Name of a partitioner."""
    edge_cut: float | None = None
    """Fraction of edges between servers; None: assumed from the method."""
    degree_spread: float = 4.0
    """E[d^2] / E[d]^2 of the in-degrees."""
    feature_itemsize: int = 4


def stats_of_figures(figures: Figures, servers: int) -> GraphStats:
    """Return the statistics of a graph given by ``figures``, on ``servers`` servers.

    Raises:
        ConfigError: a figure is out of range.
    """
    for name, value, least, most in (
        ("nodes", figures.nodes, 1, _MOST_NODES),
        ("edges", figures.edges, 0, _MOST_NODES * _MOST_DEGREE),
        ("features", figures.features, 1, _MOST_COLUMNS),
        ("classes", figures.classes, 1, _MOST_COLUMNS),
        ("degree-spread", figures.degree_spread, 1, _MOST_NODES),
    ):
        if not least <= value <= most:
            raise ConfigError(f"--{name} {value} must be from {least} to {most:g}")
    random = (servers - 1) / servers
    kept = max(METIS_CUT * random, METIS_FLOOR * (servers > 1))
    assumed_cut = random if PARTITIONERS.get(figures.method).scatters else kept
    # With one server no edge is cut, whatever the user says.
    cut = assumed_cut if figures.edge_cut is None or servers == 1 else figures.edge_cut
    if not 0 < figures.train_share <= 1:
        raise ConfigError(f"--train-share {figures.train_share:g} must be above 0 and at most 1")
    if not 0 <= cut <= 1:
        raise ConfigError(f"--edge-cut {cut:g} must be from 0 to 1: a share of the edges")
    return GraphStats(
        name="told by figures",
        nodes=int(figures.nodes),
        edges=int(figures.edges),
        features=figures.features,
        feature_bytes=figures.feature_itemsize * figures.features,
        classes=figures.classes,
        train_nodes=max(int(figures.train_share * figures.nodes), 1),
        edge_cut=cut,
        method=figures.method,
        degree_spread=figures.degree_spread,
        counted=False,
    )


def check_plannable(manifest: Manifest, where: str) -> None:
    """Raise ConfigError unless a plan can be made for the dataset."""
    if len(manifest.node_types) != 1 or len(manifest.edge_types) != 1:
        raise ConfigError(
            f"{where} has {len(manifest.node_types)} node and {len(manifest.edge_types)} edge types, and "
            "only data_parallel trains on several: there is nothing to choose; use --strategy data_parallel"
        )
    columns = manifest.node_columns[manifest.node_types[0]]
    for name in (FEATURE, TRAIN_MASK):
        if name not in columns:
            raise ConfigError(
                f"{where} has no node data {name!r} (known: {', '.join(columns) or 'none'}); partition a "
                "graph that has it"
            )


def check_train_nodes(count: int, where: str) -> None:
    """Raise ConfigError if there is no training node."""
    if not count:
        raise ConfigError(
            f"node data {TRAIN_MASK!r} of {where} marks no node: there is nothing to plan for; partition a "
            "graph with training nodes"
        )
