"""Counting of an epoch and timing of the model: in one process for a planned run, or in a running job."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from dglx_dist.comm.collectives import gather_json, run_on_all_ranks
from dglx_dist.comm.topology import Topology
from dglx_dist.errors import ConfigError
from dglx_dist.graph.cache import CacheRequest, most_wanted, vip_scores
from dglx_dist.graph.partition_book import Placement, RowOwners
from dglx_dist.graph.split import marked_ids
from dglx_dist.planner import expected
from dglx_dist.planner.candidates import EAS_FANOUT, EAS_HOPS
from dglx_dist.planner.closures import (
    FullWork,
    PartitionContext,
    RankLayers,
    full_work_of,
    plan_all,
    rank_layers,
    seeds_by_server,
    worth_counting,
)
from dglx_dist.planner.cost_model import PROGRAM_BYTES, Ghosts, Measured, MemoryModel, with_memory_traces
from dglx_dist.planner.model_shape import ModelShape, topology_of
from dglx_dist.planner.profile import (
    ByteRates,
    Rates,
    batch_trials,
    busy_cores,
    byte_rates,
    measured_rates,
    plan_trials,
    time_batches,
    time_on_plans,
)
from dglx_dist.planner.records import Cluster, FullGraphScheme, GraphStats
from dglx_dist.planner.workload import (
    TRAIN_MASK,
    BatchWork,
    Draws,
    RankCount,
    RowSizes,
    count_rank,
    rows_of_caches,
    stats_of_dataset,
    stats_of_manifest,
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
class DryRunConfig:
    """What to count and measure."""

    cluster: Cluster
    draws: Draws | None
    """Mini-batches; None: not requested."""
    schemes: tuple[FullGraphScheme, ...]
    caches: tuple[float, ...] = ()
    partitioned: bool = False
    """Whether servers will ask each other for in-edges."""
    program_bytes: int = PROGRAM_BYTES
    """Memory of a rank before it opens a graph; larger if this process is a rank and uses more."""
    clock: Callable[[], float] = time.perf_counter
    """For timing: the thread's if it computes alone, so that other programs are not counted."""
    other_ranks: int = 0
    """Ranks that compute on the same machine at the same time and share its memory."""
    epoch: int = 1
    assumptions: tuple[str, ...] = ()


def dry_run(
    g: DistGraph,
    module: nn.Module,
    shape: ModelShape,
    config: DryRunConfig,
    on_step: Callable[[str], None] | None = None,
) -> Measured:
    """Count and measure in one process; ``g``'s session has one rank, and the whole graph's structure.

    Args:
        g: Of one node and edge type, with features, labels and training nodes.
        module: Called as ``module(blocks, features)``; not changed.
        shape: Of it.
        config: What to count.
        on_step: Called with a description of each step.

    Raises:
        ConfigError: the graph lacks data, has fewer parts than servers, or the model fails on it.
    """
    clock = _Clock(on_step)
    with clock.of("figures of the graph"):
        graph = stats_of_dataset(g.dataset, config.cluster.servers)
        topology = topology_of(config.cluster.servers, config.cluster.ranks_per_server)
        offsets = g.dataset.manifest.node_offsets[NODE_TYPE]
        bounds = Placement(g.dataset.manifest.num_parts, topology).server_offsets(offsets)
        seeds = marked_ids(g.ndata[TRAIN_MASK], g.num_nodes())
    context = PartitionContext(structure=g.structure(), bounds=bounds, topology=topology, seed=g.session.seed)
    batches, sampled = None, 0.0
    if config.draws is not None:
        with clock.of("batches of all ranks"):
            sizes = row_sizes(g, shape, partitioned=config.partitioned)
            batches, sampled = _count_dry(g, context, seeds, config, sizes)
    with clock.of("the model on some batches"):
        rates = _rates_dry(g, module, shape, config, context, seeds, sampled)
    whole = {}
    for scheme in config.schemes:
        with clock.of(f"plans of {_describe(scheme, shape)}"):
            whole[scheme] = (
                count_scheme(g, context, seeds, scheme, len(shape.layers))
                if worth_counting(graph.edges, len(shape.layers), scheme)
                else expected.closures(graph, config.cluster, scheme, len(shape.layers))
            )
    with clock.of("pairs of border nodes"):
        shard = g.structure().shards[0]
        ghosts = count_ghosts(shard.indptr, shard.indices, bounds, topology)
    measured = _measured(config, module, graph, shape, rates, batches, whole, ghosts)
    return replace(measured, seconds=clock.seconds)


def _measured(
    config: DryRunConfig,
    module: nn.Module,
    graph: GraphStats,
    shape: ModelShape,
    rates: tuple[Rates, Rates | None],
    batches: BatchWork | None,
    whole: Mapping[FullGraphScheme, FullWork],
    ghosts: Ghosts | None,
) -> Measured:
    memory = MemoryModel(
        graph=graph,
        shape=shape,
        cluster=config.cluster,
        program_bytes=config.program_bytes,
        replicated=not config.partitioned,
    )
    return Measured(
        graph=graph,
        shape=shape,
        cluster=config.cluster,
        rates=rates[0],
        memory=with_memory_traces(memory, module, whole=bool(config.schemes)),
        batches=batches,
        whole=whole,
        ghosts=ghosts,
        structure_partitioned=config.partitioned,
        epoch=config.epoch,
        plan_rates=rates[1],
        assumptions=(*config.assumptions, *expected.plan_assumptions(whole)),
        draws=config.draws,
    )


def count_scheme(
    g: DistGraph, context: PartitionContext, seeds: Array, scheme: FullGraphScheme, num_layers: int
) -> FullWork:
    """Return the work of a full-graph scheme, from the plans of all ranks."""
    hops, limit, number = scheme
    by_server = seeds_by_server(context, seeds)
    eas = _selection(g, context.seed, limit) if limit else None
    if number == 1:
        return full_work_of([plan_all(context, by_server, num_layers, hops, eas=eas)], context.topology)
    pieces = [compose(own_seeds, number, "random", seed=context.seed) for own_seeds in by_server]
    steps = [
        plan_all(context, [piece[step] for piece in pieces], num_layers, hops, eas=eas)
        for step in range(number)
    ]
    return full_work_of(steps, context.topology)


def _selection(g: DistGraph, seed: int, limit: str) -> Selection:
    limits, selector = EasOptions(hops=EAS_HOPS[limit], fanout=EAS_FANOUT), EasSelector(g)
    # A new rule for each call, because a rule keeps the nodes of one server.
    return lambda structure, own, seeds: selector.rule(limits, seed=seed)(structure, own, seeds)


def _count_dry(
    g: DistGraph, context: PartitionContext, seeds: Array, config: DryRunConfig, sizes: RowSizes
) -> tuple[BatchWork, float]:
    """Return the work of an epoch, and the seconds of drawing one edge."""
    assert config.draws is not None
    cached = rows_of_caches(g, context, seeds, config.draws, config.caches)
    # The first batch compiles kernels.
    count_rank(
        g, replace(config.draws, most_batches=1), seeds, (_of_rank(context.topology, 0), context.bounds)
    )
    ranks, seconds_per_edge = [], []
    for rank in range(context.topology.world_size):
        here, begin = _of_rank(context.topology, rank), config.clock()
        ranks.append(
            count_rank(
                g, config.draws, seeds, (here, context.bounds), held=[one.held[here.server] for one in cached]
            )
        )
        seconds_per_edge.append((config.clock() - begin) / max(sum(ranks[-1].edges), 1))
    rows = {one.alpha: sum(int(mask.sum()) for mask in one.held) for one in cached}
    # The minimum, because slower ranks were disturbed.
    return work_of_counts(ranks, context.topology, sizes, cached=rows), min(seconds_per_edge)


def _rates_dry(
    g: DistGraph,
    module: nn.Module,
    shape: ModelShape,
    config: DryRunConfig,
    context: PartitionContext,
    seeds: Array,
    sampled: float,
) -> tuple[Rates, Rates | None]:
    """Return the rates of steps on mini-batches, and on whole graphs."""
    layers, clock = len(shape.layers), config.clock
    with busy_cores(config.other_ranks):
        moved = byte_rates(g, seeds, clock)
        neighbourhoods = list(plan_trials(context, seeds, layers)) if config.schemes else []
        found = time_on_plans(module, shape, neighbourhoods, clock) if config.schemes else None
        plan_rates = None if found is None else measured_rates([found], moved, sampled, layers)
        if config.draws is None and plan_rates is not None:
            return plan_rates, plan_rates
        tried = batch_trials(
            g, seeds, config.draws, layers, whole=plan_rates is None and bool(config.schemes)
        )
        of_batches = time_batches(module, shape, list(tried), clock=clock)
    return measured_rates([of_batches], moved, sampled, layers), plan_rates


def row_sizes(g: DistGraph, shape: ModelShape, *, partitioned: bool) -> RowSizes:
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


def _describe(scheme: FullGraphScheme, shape: ModelShape) -> str:
    batches = (
        f" in {scheme.cooperative_batches} cooperative batches" if scheme.cooperative_batches > 1 else ""
    )
    sampled = ", sampled" if scheme.limit else ""
    return f"{scheme.hops} of {len(shape.layers)} layers preloaded{sampled}{batches}"


class _Clock:
    def __init__(self, on_step: Callable[[str], None] | None) -> None:
        self._on_step = on_step
        self.seconds: dict[str, float] = {}

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        if self._on_step is not None:
            self._on_step(name)
        begin = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - begin


def live_run(
    g: DistGraph, module: nn.Module, shape: ModelShape, config: DryRunConfig, on_step: Callable[[str], None]
) -> Measured:
    """Count and measure in a running job. Collective; all ranks get the same.

    Args:
        g: Of one node and edge type, with features, labels and training nodes.
        module: Called as ``module(blocks, features)``; not changed.
        shape: Of it.
        config: What to count; the cluster is that of ``g``'s session.
        on_step: Called with a description of each step.

    Raises:
        ConfigError: the model fails on the graph.
        PeerError: a rank is dead or silent.
    """
    session = g.session
    seeds = marked_ids(g.ndata[TRAIN_MASK], g.num_nodes())
    batches, per_edge = None, 0.0
    if config.draws is not None:
        on_step("counting batches")
        batches, per_edge = _count_live(g, seeds, config, config.draws, shape)
    on_step("timing the model")
    rates = _rates_live(g, module, shape, config, seeds, per_edge)
    whole: dict[FullGraphScheme, FullWork] = {}
    graph = stats_of_manifest(g.dataset.manifest, session.topology.num_servers, len(seeds))
    for scheme in config.schemes:
        on_step(f"counting plans of {scheme.hops} of {len(shape.layers)} layers preloaded")
        whole[scheme] = (
            _count_scheme_live(g, seeds, scheme, len(shape.layers))
            if worth_counting(g.num_edges(), len(shape.layers), scheme)
            else expected.closures(graph, config.cluster, scheme, len(shape.layers))
        )
    programs = [int(str(one)) for one in gather_json(config.program_bytes, session)]
    config = replace(config, program_bytes=max(PROGRAM_BYTES, *programs))
    ghosts, exchanged = None, whole.get(FullGraphScheme(0))
    if exchanged is not None:
        # Only rows that training needs, mostly in the first layer; intervals compute every node.
        outside, inside = exchanged.pairs.outside[0], exchanged.pairs.inside[0]
        ghosts = Ghosts(outside=outside, inside=inside, counted=False)
    return _measured(config, module, graph, shape, rates, batches, whole, ghosts)


def _count_live(
    g: DistGraph, seeds: Array, config: DryRunConfig, draws: Draws, shape: ModelShape
) -> tuple[BatchWork, float]:
    """Return the work of an epoch, and the seconds of drawing one edge on the slowest rank."""
    session = g.session
    place = session.topology, g.get_node_partition_policy(g.ntypes[0]).bounds
    held, rows = _caches(g, config, draws)
    # The first batch compiles kernels.
    count_rank(g, replace(draws, most_batches=1), seeds, place)
    begin = time.perf_counter()
    local = count_rank(g, draws, seeds, place, held=held)
    per_edge = (time.perf_counter() - begin) / max(sum(local.edges), 1)
    per_rank: Sequence[Any] = gather_json([asdict(local), per_edge, rows], session)
    ranks = [RankCount(**one[0]) for one in per_rank]
    leaders = [session.topology.ranks_of_server(server)[0] for server in range(session.topology.num_servers)]
    cached = {
        alpha: sum(per_rank[leader][2][at] for leader in leaders) for at, alpha in enumerate(config.caches)
    }
    work = work_of_counts(
        ranks,
        session.topology,
        row_sizes(g, shape, partitioned=config.partitioned),
        cached=cached if held else {},
    )
    return work, max(float(one[1]) for one in per_rank)


def _caches(g: DistGraph, config: DryRunConfig, draws: Draws) -> tuple[list[Array], list[int]]:
    """Return the rows that caches of each size would hold on this server, as masks, and their numbers."""
    topology = g.session.topology
    if topology.num_servers == 1 or not config.caches or not g.structure().is_whole:
        return [], []
    request = CacheRequest(
        name=FEATURE,
        ntype=g.ntypes[0],
        alpha=config.caches[0],
        policy="vip",
        seeds=None,
        fanouts=list(draws.fanouts),
        batch_size=draws.batch_size,
    )
    scores = vip_scores(g, request, f"scores-{g.kvstore.next_number()}")
    bounds = g.get_node_partition_policy(g.ntypes[0]).bounds
    own = int(bounds[topology.server]), int(bounds[topology.server + 1])
    held = []
    for alpha in config.caches:
        mask = np.zeros(g.num_nodes(), np.bool_)
        mask[most_wanted(scores, own, int(alpha * (own[1] - own[0])))] = True
        held.append(mask)
    return held, [int(mask.sum()) for mask in held]


def _rates_live(
    g: DistGraph, module: nn.Module, shape: ModelShape, config: DryRunConfig, seeds: Array, per_edge: float
) -> tuple[Rates, Rates | None]:
    session = g.session
    layers, first = len(shape.layers), _own_range(g)[0]
    own = seeds[(seeds >= first) & (seeds < _own_range(g)[1])]
    moved = asdict(byte_rates(g, own if len(own) else np.array([first])))
    every: Sequence[Any] = gather_json(moved, session)
    slowest = ByteRates(**{name: max(float(one[name]) for one in every) for name in moved})

    def of_all(tried: tuple[Array, Array, float] | None) -> Rates | None:
        local = None if tried is None else [tried[0].tolist(), tried[1].tolist(), tried[2]]
        found: Sequence[Any] = gather_json(local, session)
        if any(one is None for one in found):
            return None
        ranks = [(np.array(one[0]), np.array(one[1]), float(one[2])) for one in found]
        return measured_rates(ranks, slowest, per_edge, layers)

    plan_rates = None
    if config.schemes and g.structure().is_whole:
        neighbourhoods = list(plan_trials(_context_of(g), seeds, layers, session.topology.server))
        plan_rates = of_all(time_on_plans(module, shape, neighbourhoods, time.perf_counter))
    if config.draws is None and plan_rates is not None:
        return plan_rates, plan_rates
    tried = batch_trials(g, seeds, config.draws, layers, whole=plan_rates is None and bool(config.schemes))
    batches = list(tried)
    # A model that fails on one rank alone must not leave the others waiting.
    rates = of_all(run_on_all_ranks(session, lambda: time_batches(module, shape, batches), ConfigError))
    assert rates is not None
    return rates, plan_rates


def _context_of(g: DistGraph) -> PartitionContext:
    return PartitionContext(
        structure=g.structure(),
        bounds=g.get_node_partition_policy(g.ntypes[0]).bounds,
        topology=g.session.topology,
        seed=g.session.seed,
    )


def _count_scheme_live(g: DistGraph, seeds: Array, scheme: FullGraphScheme, num_layers: int) -> FullWork:
    # From the same plans as in training.
    hops, limit, number = scheme
    first, last = _own_range(g)
    own = seeds[(seeds >= first) & (seeds < last)]
    session = g.session
    # One rank of a server gives the seeds of all of it.
    server_seeds = own if session.topology.local_rank == 0 else own[:0]
    planner = Planner(g)
    eas = None
    if limit:
        limits = EasOptions(hops=EAS_HOPS[limit], fanout=EAS_FANOUT)
        eas = EasSelector(g).rule(limits, seed=session.seed)
        g.barrier()
    pieces = [server_seeds] if number == 1 else compose(server_seeds, number, "random", seed=session.seed)
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
        plans.append(asdict(rank_layers(made.layers, made.server_nodes, made.external_nodes)))
    by_rank: Sequence[Any] = gather_json(plans, session)
    steps = [[RankLayers(**one[step]) for one in by_rank] for step in range(len(pieces))]
    return full_work_of(steps, session.topology)


def _own_range(g: DistGraph) -> tuple[int, int]:
    bounds, server = g.get_node_partition_policy(g.ntypes[0]).bounds, g.session.topology.server
    return int(bounds[server]), int(bounds[server + 1])
