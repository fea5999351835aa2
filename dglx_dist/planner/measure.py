"""Counting of an epoch and timing of the model: in one process for a planned run, or in a running job."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from dglx_dist.comm.collectives import check_equal, gather_json, run_on_all_ranks
from dglx_dist.comm.topology import silence_profiler
from dglx_dist.errors import ConfigError
from dglx_dist.graph.cache import TRAIN_MASK
from dglx_dist.graph.partition_book import Placement
from dglx_dist.graph.split import marked_ids
from dglx_dist.planner.choose import enumerate_candidates, works_of
from dglx_dist.planner.model_shape import topology_of
from dglx_dist.planner.profile import (
    Trials,
    batch_trials,
    busy_cores,
    log,
    measured_rates,
    time_batches,
    time_bytes,
    time_on_plans,
)
from dglx_dist.planner.workload import count_batches, row_sizes, stats_of_dataset, stats_of_manifest
from dglx_dist.records import EDGE_TYPE, Array
from dglx_dist.strategies.base import float_of
from dglx_dist.strategies.cost import (
    CACHE_SIZES,
    Candidate,
    Cluster,
    Draws,
    Measured,
    MemoryTrace,
    ModelShape,
    PartitionContext,
    PlanContext,
    PlannedRun,
    Rates,
    Work,
    trace_of_widths,
)
from dglx_dist.strategies.full_graph.memory_estimate import trace_memory

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph

PROGRAM_BYTES = 690 * 10**6
"""Of a rank that has imported everything, compiled its kernels and evaluated once (torch 2.13, Linux)."""


@dataclass(frozen=True, kw_only=True)
class MeasureConfig:
    """What to count and measure."""

    cluster: Cluster
    draws: Draws | None
    """Mini-batches; None: not requested."""
    is_offered: Callable[[Candidate], bool] = lambda _: True
    """Which candidates are counted."""
    labor: bool = False
    """Whether batches of a ``LaborSampler`` are counted."""
    caches: bool = True
    """Whether caches of remote rows are offered, if servers have the whole structure, which ``vip`` needs."""
    partitioned: bool = False
    """Whether servers will ask each other for in-edges."""
    in_job: bool = False
    """Whether the ranks of the session are those of the cluster and count together; False: this process
    counts for all of them."""
    program_bytes: int = PROGRAM_BYTES
    """Memory of a rank before it opens a graph; larger if this process is a rank and uses more."""
    other_ranks: int = 0
    """Ranks that compute on the same machine at the same time and share its memory."""
    epoch: int = 1
    assumptions: tuple[str, ...] = ()


def measure(
    g: DistGraph,
    module: nn.Module,
    shape: ModelShape,
    config: MeasureConfig,
    notify: Callable[[str], None] | None = None,
) -> tuple[Measured, tuple[Candidate, ...]]:
    """Count and measure, and return the candidates; in a job collective, and all ranks get the same.

    Outside of a job the session of ``g`` has one rank, and it has the whole graph's structure. ``module`` is
    called as ``module(blocks, features)``, and not changed.

    Raises:
        ConfigError: the graph lacks data, has fewer parts than servers, the model fails on it, or the ranks
            know other candidates.
        PeerError: a rank is dead or silent.
    """
    notify = notify or (lambda _: None)
    notify("figures of the graph")
    run = _run_of(g, len(shape.layers), config)
    if not len(run.seeds):
        raise ConfigError(
            f"node data {TRAIN_MASK!r} of {g.dataset.folder} marks no node: there is nothing to plan for; "
            "partition a graph with training nodes"
        )
    candidates = _candidates(run, config)
    works = works_of(candidates)
    # One clock on all ranks: their rates are put together.
    alone = torch.get_num_threads() == 1 and float_of(module).device.type == "cpu"
    clock = time.thread_time if all(gather_json(alone, g.session)) else time.perf_counter
    batches, per_edge, labor = None, 0.0, None
    if config.draws is not None:
        notify("batches of all ranks")
        sizes = row_sizes(g, shape.gradient_bytes, partitioned=config.partitioned)
        caches = tuple(dict.fromkeys((one.cache, one.cache_alpha) for one in candidates if one.cache))
        batches, per_edge = count_batches(run, config.draws, caches, sizes, clock)
        if any(one.labor for one in candidates):
            drawn, edge_s = count_batches(run, replace(config.draws, labor=True), (), sizes, clock)
            labor = drawn, edge_s / per_edge
    notify("the model on some batches")
    with busy_cores(config.other_ranks):
        rates, plan_rates, spread = _rates(run, module, shape, works, config.draws, per_edge, clock)
    if config.cluster.cores < 1 and (clock is time.thread_time or not config.in_job):
        # Timed alone: ranks that share a core take turns.
        slower = 1.0 / config.cluster.cores
        rates, plan_rates = rates.slowed(slower), plan_rates and plan_rates.slowed(slower)
    for work in works:
        notify(work.describe(run.num_layers))
        run.works[work] = work.count(run)
    known = Measured(
        graph=run.graph,
        shape=shape,
        cluster=config.cluster,
        rates=rates,
        program_bytes=max(PROGRAM_BYTES, *gather_json(config.program_bytes, g.session)),
        of_batches=_traced_memory(module, shape, with_halo=False),
        of_graphs=_traced_memory(module, shape, with_halo=True) if works else trace_of_widths(shape),
        batches=batches,
        works=run.works,
        structure_partitioned=config.partitioned,
        epoch=config.epoch,
        plan_rates=plan_rates,
        assumptions=config.assumptions,
        draws=config.draws,
        labor=labor,
        spread=spread,
    )
    return known, candidates


def _candidates(run: PlannedRun, config: MeasureConfig) -> tuple[Candidate, ...]:
    cluster, draws = config.cluster, config.draws
    seeds_per_rank = -(-len(run.seeds) // cluster.ranks)
    context = PlanContext(
        ranks=cluster.ranks,
        servers=cluster.servers,
        num_layers=run.num_layers,
        steps=0 if draws is None else -(-seeds_per_rank // draws.batch_size),
        caches=CACHE_SIZES if config.caches and not config.partitioned else (),
        labor=config.labor,
    )
    found = tuple(one for one in enumerate_candidates(context) if config.is_offered(one))
    # Each rank has its own registry; measuring is collective.
    offered = [f"{one.name} {one.works}" for one in found]
    check_equal(run.g.session, "a candidate of strategy", offered, "load the same plugins on every rank")
    return found


def _run_of(g: DistGraph, num_layers: int, config: MeasureConfig) -> PlannedRun:
    manifest, cluster = g.dataset.manifest, config.cluster
    topology = g.session.topology if config.in_job else topology_of(cluster.servers, cluster.ranks_per_server)
    bounds = Placement(manifest.num_parts, topology).server_offsets(
        manifest.node_offsets[manifest.node_types[0]]
    )
    seeds = marked_ids(g.ndata[TRAIN_MASK], g.num_nodes())
    return PlannedRun(
        g=g,
        partition=PartitionContext(
            structure=g.structure(), bounds=bounds, topology=topology, seed=g.session.seed
        ),
        seeds=seeds,
        graph=stats_of_manifest(manifest, cluster.servers, len(seeds))
        if config.in_job
        else stats_of_dataset(g.dataset, cluster.servers),
        cluster=cluster,
        num_layers=num_layers,
        in_job=config.in_job,
    )


def _rates(
    run: PlannedRun,
    module: nn.Module,
    shape: ModelShape,
    works: Sequence[Work],
    draws: Draws | None,
    per_edge: float,
    clock: Callable[[], float],
) -> tuple[Rates, Rates | None, float]:
    session, layers, spreads = run.g.session, run.num_layers, list[float]()
    byte_seconds = time_bytes(run.g, _owned(run), float_of(module).device, clock)
    slowest = [float(max(of_ranks)) for of_ranks in zip(*gather_json(byte_seconds, session), strict=True)]

    def of_all(tried: Trials | None) -> Rates | None:
        found = gather_json(tried, session)
        if any(one is None for one in found):
            return None
        ranks = [Trials(*one) for one in found]
        spreads.append(max(one.spread for one in ranks))
        return measured_rates(ranks, slowest, per_edge, layers)

    trials = next((found for work in works if (found := list(work.trials(run)))), [])
    plan_rates = of_all(time_on_plans(module, shape, trials, clock)) if trials else None
    if draws is None and plan_rates is not None:
        return plan_rates, plan_rates, max(spreads)
    whole = plan_rates is None and bool(works)
    batches = list(batch_trials(run.g, run.seeds, draws, layers, whole=whole))
    timed = partial(time_batches, module, shape, batches, clock=clock)
    # A model that fails on one rank alone must not leave the others waiting.
    rates = of_all(run_on_all_ranks(session, timed, ConfigError))
    assert rates is not None
    return rates, plan_rates, max(spreads)


def _owned(run: PlannedRun) -> Array:
    if not run.in_job:
        return run.seeds
    first, last = run.partition.own_range(run.partition.topology.server)
    own = run.seeds[(run.seeds >= first) & (run.seeds < last)]
    return own if len(own) else np.array([first])


def _traced_memory(module: nn.Module, shape: ModelShape, *, with_halo: bool) -> MemoryTrace:
    row = torch.zeros(1, shape.features, dtype=float_of(module).dtype)
    silence_profiler()
    try:
        return trace_memory(
            module,
            len(shape.layers),
            row,
            with_halo=with_halo,
            etype=EDGE_TYPE,
            out_degrees=lambda ids: torch.ones(len(ids), dtype=torch.int64),
        )
    except ConfigError as problem:
        log.info("memory is estimated from widths: %s", problem)
        return trace_of_widths(shape)
