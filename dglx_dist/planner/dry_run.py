"""The dry run: one process counts the batches and plans of all ranks, and times the model on some of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from torch import nn

from dglx_dist.cluster.topology import Topology
from dglx_dist.graph.placement import Placement
from dglx_dist.graph.split import marked_ids
from dglx_dist.planner import expected
from dglx_dist.planner.batch_work import BatchWork, RowSizes, work_of_counts
from dglx_dist.planner.cache_rows import CachedRows, rows_of_caches
from dglx_dist.planner.candidates import EAS_FANOUT, EAS_HOPS
from dglx_dist.planner.closure_plans import Ground, plan_all, seeds_by_server
from dglx_dist.planner.full_work import FullWork, gathered, worth_counting
from dglx_dist.planner.ghosts import count_ghosts
from dglx_dist.planner.graph_stats import TRAIN_MASK, of_dataset
from dglx_dist.planner.halo_bytes import topology_of
from dglx_dist.planner.measured import Measured
from dglx_dist.planner.memory import PROGRAM_BYTES, MemoryModel
from dglx_dist.planner.model_shape import ModelShape
from dglx_dist.planner.neighbours import neighbours
from dglx_dist.planner.plan_trials import plan_trials, time_on_plans
from dglx_dist.planner.rates import Rates, measured_rates, time_batches
from dglx_dist.planner.records import Cluster, Way
from dglx_dist.planner.rehearsed import with_rehearsals
from dglx_dist.planner.survey import Draws, count_rank
from dglx_dist.planner.trials import byte_rates, trials
from dglx_dist.records import FEATURE, LABEL, NODE_TYPE, Array
from dglx_dist.strategies.granndis.batches import compose
from dglx_dist.strategies.granndis.closure import Selection
from dglx_dist.strategies.granndis.eas import EasOptions, EasSelector

if TYPE_CHECKING:
    from dglx_dist.graph import DistGraph


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
    ground = Ground(structure=g.structure(), bounds=bounds, topology=topology, seed=g.session.seed)
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


def count_way(g: DistGraph, ground: Ground, seeds: Array, way: Way, num_layers: int) -> FullWork:
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
    g: DistGraph, ground: Ground, seeds: Array, told: DryRun, sizes: RowSizes
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
    ground: Ground,
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
