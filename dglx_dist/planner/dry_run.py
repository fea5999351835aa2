"""The dry run: one process counts the batches and plans of all ranks, and times the model on some of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from dglx_dist.comm.collectives import gather_json
from dglx_dist.comm.topology import Topology
from dglx_dist.errors import ConfigError
from dglx_dist.graph.cache import CacheRequest, most_wanted, vip_scores
from dglx_dist.graph.opening import together
from dglx_dist.graph.partition_book import Placement, RowOwners
from dglx_dist.graph.split import marked_ids
from dglx_dist.planner import expected
from dglx_dist.planner.candidates import EAS_FANOUT, EAS_HOPS
from dglx_dist.planner.closures import (
    FullWork,
    PartitionContext,
    RankLayers,
    gathered,
    in_numbers,
    plan_all,
    seeds_by_server,
    worth_counting,
)
from dglx_dist.planner.cost_model import PROGRAM_BYTES, Ghosts, Measured, MemoryModel, with_rehearsals
from dglx_dist.planner.model_shape import ModelShape, topology_of
from dglx_dist.planner.profile import (
    ByteRates,
    Rates,
    byte_rates,
    measured_rates,
    neighbours,
    plan_trials,
    time_batches,
    time_on_plans,
    trials,
)
from dglx_dist.planner.records import Cluster, Way
from dglx_dist.planner.workload import (
    TRAIN_MASK,
    BatchWork,
    CachedRows,
    Draws,
    RankCount,
    RowSizes,
    count_rank,
    of_dataset,
    of_manifest,
    rows_of_caches,
    work_of_counts,
)
from dglx_dist.records import FEATURE, LABEL, NODE_TYPE, Array
from dglx_dist.strategies.full_graph.expansion import EasOptions, EasSelector, Selection, compose
from dglx_dist.strategies.full_graph.plan_builder import Planner, PlanRequest

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph


def count_ghosts(indptr: Array, indices: Array, bounds: Array, topology: Topology) -> Ghosts:
    """Count the pairs over all edges, rank by rank.

    Args:
        indptr: (N + 1,) of the in-edges.
        indices: (E,) their sources.
        bounds: (S + 1,) int64 first node of each server.
        topology: Of the run.
    """
    starts = RowOwners(bounds, topology).starts
    outside = inside = 0
    for rank in range(topology.world_size):
        first, last = int(starts[rank]), int(starts[rank + 1])
        server = topology.server_of_rank[rank]
        sources = np.unique(indices[int(indptr[first]) : int(indptr[last])])
        away = np.count_nonzero((sources < bounds[server]) | (sources >= bounds[server + 1]))
        own = np.count_nonzero((sources >= first) & (sources < last))
        outside += int(away)
        inside += int(len(sources) - away - own)
    return Ghosts(outside=outside, inside=inside)


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """What is found out, and how thoroughly."""

    cluster: Cluster
    draws: Draws | None
    """Mini-batches; None: none are asked for."""
    ways: tuple[Way, ...]
    """Of whole graphs."""
    caches: tuple[float, ...] = ()
    """Sizes that are counted."""
    partitioned: bool = False
    """Whether servers will ask each other for in-edges."""
    program_bytes: int = PROGRAM_BYTES
    """That a rank has before it opens a graph; more where this process is a rank and has more."""
    clock: Callable[[], float] = time.perf_counter
    """Of what is timed: the thread's where it computes alone, so that what else runs is not counted."""
    beside: int = 0
    """Ranks that compute on the same machine meanwhile, and share its memory with this one."""
    epoch: int = 1
    assumptions: tuple[str, ...] = ()


def dry_run(
    g: DistGraph,
    module: nn.Module,
    shape: ModelShape,
    told: DryRun,
    tell: Callable[[str], None] | None = None,
) -> Measured:
    """Count and measure; ``g``'s session has one rank, and the whole graph's structure.

    Args:
        g: Of one node and edge type, with features, labels and training nodes.
        module: Called as ``module(blocks, features)``; not changed.
        shape: Of it.
        told: What to find out.
        tell: Called with what is done next.

    Raises:
        ConfigError: the graph lacks something, has fewer parts than servers, or the model fails on it.
    """
    clock = _Clock(tell)
    with clock.of("figures of the graph"):
        graph = of_dataset(g.dataset, told.cluster.servers)
        topology = topology_of(told.cluster.servers, told.cluster.ranks_per_server)
        offsets = g.dataset.manifest.node_offsets[NODE_TYPE]
        bounds = Placement(g.dataset.manifest.num_parts, topology).server_offsets(offsets)
        seeds = marked_ids(g.ndata[TRAIN_MASK], g.num_nodes())
    ground = PartitionContext(structure=g.structure(), bounds=bounds, topology=topology, seed=g.session.seed)
    batches, sampled = None, 0.0
    if told.draws is not None:
        with clock.of("batches of all ranks"):
            sizes = row_sizes(g, shape, partitioned=told.partitioned)
            batches, sampled = _batches(g, ground, seeds, told, sizes)
    with clock.of("the model on some batches"):
        rates, plan_rates = _rates(g, module, shape, told, ground, seeds, sampled)
    whole = {}
    for way in told.ways:
        with clock.of(f"plans of {_named(way, shape)}"):
            whole[way] = (
                count_way(g, ground, seeds, way, len(shape.layers))
                if worth_counting(graph.edges, len(shape.layers), way)
                else expected.closures(graph, told.cluster, way, len(shape.layers))
            )
    with clock.of("pairs of border nodes"):
        shard = g.structure().shards[0]
        ghosts = count_ghosts(shard.indptr, shard.indices, bounds, topology)
    fixed = MemoryModel(
        graph=graph,
        shape=shape,
        cluster=told.cluster,
        program_bytes=told.program_bytes,
        replicated=not told.partitioned,
    )
    return Measured(
        graph=graph,
        shape=shape,
        cluster=told.cluster,
        rates=rates,
        memory=with_rehearsals(fixed, module, whole=bool(told.ways)),
        batches=batches,
        whole=whole,
        ghosts=ghosts,
        structure_partitioned=told.partitioned,
        epoch=told.epoch,
        plan_rates=plan_rates,
        assumptions=(*told.assumptions, *expected.of_ways(whole)),
        draws=told.draws,
        seconds=clock.seconds,
    )


def count_way(g: DistGraph, ground: PartitionContext, seeds: Array, way: Way, num_layers: int) -> FullWork:
    """Return the work of one way of training on whole graphs, from the plans of all ranks."""
    hops, kind, number = way
    by_server = seeds_by_server(ground, seeds)
    eas = _selection(g, ground.seed, kind) if kind else None
    if number == 1:
        return gathered([plan_all(ground, by_server, num_layers, hops, eas=eas)], ground.topology)
    pieces = [compose(mine, number, "random", seed=ground.seed) for mine in by_server]
    steps = [
        plan_all(ground, [piece[step] for piece in pieces], num_layers, hops, eas=eas)
        for step in range(number)
    ]
    return gathered(steps, ground.topology)


def _selection(g: DistGraph, seed: int, kind: str) -> Selection:
    """Return which nodes each server may use, by the draws of training."""
    limits, selector = EasOptions(hops=EAS_HOPS[kind], fanout=EAS_FANOUT), EasSelector(g)
    # A rule remembers the nodes of one server, and here are all of them.
    return lambda structure, own, mine: selector.rule(limits, seed=seed)(structure, own, mine)


def _batches(
    g: DistGraph, ground: PartitionContext, seeds: Array, told: DryRun, sizes: RowSizes
) -> tuple[BatchWork, float]:
    """Return the work of an epoch, and the seconds of drawing one edge."""
    assert told.draws is not None
    cached = rows_of_caches(g, ground, seeds, told.draws, told.caches)
    # The first batch compiles kernels.
    count_rank(g, replace(told.draws, most_batches=1), seeds, (_of_rank(ground.topology, 0), ground.bounds))
    ranks, took = [], []
    for rank in range(ground.topology.world_size):
        here, begin = _of_rank(ground.topology, rank), told.clock()
        ranks.append(count_rank(g, told.draws, seeds, (here, ground.bounds), held=_held(cached, here.server)))
        took.append((told.clock() - begin) / max(sum(ranks[-1].edges), 1))
    # What is slower on one rank than on another was disturbed.
    per_edge = min(took)
    rows = {one.alpha: sum(int(mask.sum()) for mask in one.held) for one in cached}
    return work_of_counts(ranks, ground.topology, sizes, cached=rows), per_edge


def _held(cached: Iterable[CachedRows], server: int) -> list[Array]:
    return [one.held[server] for one in cached]


def _rates(
    g: DistGraph,
    module: nn.Module,
    shape: ModelShape,
    told: DryRun,
    ground: PartitionContext,
    seeds: Array,
    sampled: float,
) -> tuple[Rates, Rates | None]:
    """Return the rates of steps on mini-batches, and on whole graphs."""
    layers, clock = len(shape.layers), told.clock
    with neighbours(told.beside):
        moved = byte_rates(g, seeds, clock)
        neighbourhoods = list(plan_trials(ground, seeds, layers)) if told.ways else []
        found = time_on_plans(module, shape, neighbourhoods, clock) if told.ways else None
        plan_rates = None if found is None else measured_rates([found], moved, sampled, layers)
        if told.draws is None and plan_rates is not None:
            return plan_rates, plan_rates
        tried = trials(g, seeds, told.draws, layers, whole=plan_rates is None and bool(told.ways))
        of_batches = time_batches(module, shape, list(tried), clock=clock)
    return measured_rates([of_batches], moved, sampled, layers), plan_rates


def row_sizes(g: DistGraph, shape: ModelShape, *, partitioned: bool) -> RowSizes:
    """Return the bytes of rows and gradients."""

    def of(name: str) -> int:
        column = g.ndata[name]
        return int(np.prod(column.shape[1:], dtype=np.int64)) * column.dtype.itemsize

    return RowSizes(
        feature=of(FEATURE),
        label=of(LABEL) if LABEL in g.ndata else None,
        gradients=shape.gradient_bytes,
        partitioned=partitioned,
    )


def _of_rank(topology: Topology, rank: int) -> Topology:
    return Topology(rank, topology.world_size, topology.server_of_rank)


def _named(way: Way, shape: ModelShape) -> str:
    hops, kind, number = way
    batches = f" in {number} co-batches" if number > 1 else ""
    return f"{hops} of {len(shape.layers)} layers preloaded{', sampled' if kind else ''}{batches}"


class _Clock:
    """Notes how long each part takes."""

    def __init__(self, tell: Callable[[str], None] | None) -> None:
        self._tell = tell
        self._seconds: dict[str, float] = {}

    @property
    def seconds(self) -> Mapping[str, float]:
        """By part."""
        return dict(self._seconds)

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Time a part."""
        if self._tell is not None:
            self._tell(name)
        begin = time.perf_counter()
        yield
        self._seconds[name] = time.perf_counter() - begin


def live_run(
    g: DistGraph, module: nn.Module, shape: ModelShape, told: DryRun, tell: Callable[[str], None]
) -> Measured:
    """Count and measure; every rank must call it alike, and all get the same.

    Args:
        g: Of one node and edge type, with features, labels and training nodes.
        module: Called as ``module(blocks, features)``; not changed.
        shape: Of it.
        told: What to find out; the cluster is that of ``g``'s session.
        tell: Called with what is done next.

    Raises:
        ConfigError: the model fails on the graph.
        PeerError: a rank is dead or silent.
    """
    session = g.session
    seeds = marked_ids(g.ndata[TRAIN_MASK], g.num_nodes())
    batches, per_edge = None, 0.0
    if told.draws is not None:
        tell("counting batches")
        batches, per_edge = _batches_live_run(g, seeds, told, told.draws, shape)
    tell("timing the model")
    rates, plan_rates = _rates_live_run(g, module, shape, told, seeds, per_edge)
    whole: dict[Way, FullWork] = {}
    graph = of_manifest(g.dataset.manifest, session.topology.num_servers, len(seeds))
    for way in told.ways:
        tell(f"counting plans of {way[0]} of {len(shape.layers)} layers preloaded")
        whole[way] = (
            _way(g, seeds, way, len(shape.layers))
            if worth_counting(g.num_edges(), len(shape.layers), way)
            else expected.closures(graph, told.cluster, way, len(shape.layers))
        )
    pairs = whole.get((0, "", 1))
    programs = [int(str(one)) for one in gather_json(told.program_bytes, session)]
    fixed = MemoryModel(
        graph=graph,
        shape=shape,
        cluster=told.cluster,
        program_bytes=max(PROGRAM_BYTES, *programs),
        replicated=not told.partitioned,
    )
    return Measured(
        graph=graph,
        shape=shape,
        cluster=told.cluster,
        rates=rates,
        memory=with_rehearsals(fixed, module, whole=bool(told.ways)),
        batches=batches,
        whole=whole,
        ghosts=None if pairs is None else _ghosts(pairs),
        structure_partitioned=told.partitioned,
        epoch=told.epoch,
        plan_rates=plan_rates,
        assumptions=(*told.assumptions, *expected.of_ways(whole)),
        draws=told.draws,
    )


def _batches_live_run(
    g: DistGraph, seeds: Array, told: DryRun, draws: Draws, shape: ModelShape
) -> tuple[BatchWork, float]:
    """Return the work of an epoch, and the seconds of drawing one edge on the slowest rank."""
    session = g.session
    place = session.topology, g.get_node_partition_policy(g.ntypes[0]).bounds
    held, rows = _caches(g, told, draws)
    # The first batch compiles kernels.
    count_rank(g, replace(draws, most_batches=1), seeds, place)
    begin = time.perf_counter()
    mine = count_rank(g, draws, seeds, place, held=held)
    per_edge = (time.perf_counter() - begin) / max(sum(mine.edges), 1)
    requests: Sequence[Any] = gather_json([asdict(mine), per_edge, rows], session)
    ranks = [RankCount(**one[0]) for one in requests]
    leaders = [session.topology.ranks_of_server(server)[0] for server in range(session.topology.num_servers)]
    cached = {
        alpha: sum(requests[leader][2][at] for leader in leaders) for at, alpha in enumerate(told.caches)
    }
    work = work_of_counts(
        ranks,
        session.topology,
        row_sizes(g, shape, partitioned=told.partitioned),
        cached=cached if held else {},
    )
    return work, max(float(one[1]) for one in requests)


def _caches(g: DistGraph, told: DryRun, draws: Draws) -> tuple[list[Array], list[int]]:
    """Return what caches of each size would hold on this server, as masks, and how many rows."""
    topology = g.session.topology
    if topology.num_servers == 1 or not told.caches or not g.structure().is_whole:
        return [], []
    request = CacheRequest(
        name=FEATURE,
        ntype=g.ntypes[0],
        alpha=told.caches[0],
        policy="vip",
        seeds=None,
        fanouts=list(draws.fanouts),
        batch_size=draws.batch_size,
    )
    scores = vip_scores(g, request, f"scores-{g.kvstore.next_number()}")
    bounds = g.get_node_partition_policy(g.ntypes[0]).bounds
    own = int(bounds[topology.server]), int(bounds[topology.server + 1])
    held = []
    for alpha in told.caches:
        mask = np.zeros(g.num_nodes(), np.bool_)
        mask[most_wanted(scores, own, int(alpha * (own[1] - own[0])))] = True
        held.append(mask)
    return held, [int(mask.sum()) for mask in held]


def _rates_live_run(
    g: DistGraph, module: nn.Module, shape: ModelShape, told: DryRun, seeds: Array, per_edge: float
) -> tuple[Rates, Rates | None]:
    """Return the rates of a rank while all others compute too: on mini-batches, and on whole graphs."""
    session = g.session
    layers, first = len(shape.layers), _own(g)[0]
    own = seeds[(seeds >= first) & (seeds < _own(g)[1])]
    moved = asdict(byte_rates(g, own if len(own) else np.array([first])))
    every: Sequence[Any] = gather_json(moved, session)
    slowest = ByteRates(**{name: max(float(one[name]) for one in every) for name in moved})

    def of_all(tried: tuple[Array, Array, float] | None) -> Rates | None:
        mine = None if tried is None else [tried[0].tolist(), tried[1].tolist(), tried[2]]
        found: Sequence[Any] = gather_json(mine, session)
        if any(one is None for one in found):
            return None
        ranks = [(np.array(one[0]), np.array(one[1]), float(one[2])) for one in found]
        return measured_rates(ranks, slowest, per_edge, layers)

    plan_rates = None
    if told.ways and g.structure().is_whole:
        neighbourhoods = list(plan_trials(_ground(g), seeds, layers, session.topology.server))
        plan_rates = of_all(time_on_plans(module, shape, neighbourhoods, time.perf_counter))
    if told.draws is None and plan_rates is not None:
        return plan_rates, plan_rates
    tried = trials(g, seeds, told.draws, layers, whole=plan_rates is None and bool(told.ways))
    batches = list(tried)
    # A model that fails on one rank alone must not leave the others waiting.
    rates = of_all(together(session, lambda: time_batches(module, shape, batches), ConfigError))
    assert rates is not None
    return rates, plan_rates


def _ground(g: DistGraph) -> PartitionContext:
    return PartitionContext(
        structure=g.structure(),
        bounds=g.get_node_partition_policy(g.ntypes[0]).bounds,
        topology=g.session.topology,
        seed=g.session.seed,
    )


def _way(g: DistGraph, seeds: Array, way: Way, num_layers: int) -> FullWork:
    """Return the work of one way of training on whole graphs, from the very plans of training."""
    hops, kind, number = way
    first, last = _own(g)
    own = seeds[(seeds >= first) & (seeds < last)]
    session = g.session
    # One rank of a server names what all of it trains on.
    named = own if session.topology.local_rank == 0 else own[:0]
    planner = Planner(g)
    eas = None
    if kind:
        limits = EasOptions(hops=EAS_HOPS[kind], fanout=EAS_FANOUT)
        eas = EasSelector(g).rule(limits, seed=session.seed)
        g.barrier()
    pieces = [named] if number == 1 else compose(named, number, "random", seed=session.seed)
    plans = []
    for piece in pieces:
        made = planner.plan(
            PlanRequest(
                seeds=piece,
                num_layers=num_layers,
                hops=hops,
                eas=eas,
                seeds_stay=number > 1,
                show_progress=False,
            )
        )
        plans.append(asdict(in_numbers(made.layers, made.server_nodes, made.external_nodes)))
    by_rank: Sequence[Any] = gather_json(plans, session)
    steps = [[RankLayers(**one[step]) for one in by_rank] for step in range(len(pieces))]
    return gathered(steps, session.topology)


def _ghosts(work: FullWork) -> Ghosts:
    """Return the pairs that intervals exchange: they compute every node, and what is counted is what training
    needs, which is most in the first layer.
    """
    return Ghosts(outside=work.pairs.outside[0], inside=work.pairs.inside[0], counted=False)


def _own(g: DistGraph) -> tuple[int, int]:
    bounds, server = g.get_node_partition_policy(g.ntypes[0]).bounds, g.session.topology.server
    return int(bounds[server]), int(bounds[server + 1])
