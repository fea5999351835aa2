"""The dry run in a running job: every rank counts its own, beside the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from dglx_dist.cluster.collectives import gather_json
from dglx_dist.errors import ConfigError
from dglx_dist.graph.access import most_wanted
from dglx_dist.graph.caching import CacheRequest, vip_scores
from dglx_dist.graph.opening import together
from dglx_dist.graph.split import marked_ids
from dglx_dist.planner import expected
from dglx_dist.planner.batch_work import BatchWork, work_of_counts
from dglx_dist.planner.candidates import EAS_FANOUT, EAS_HOPS
from dglx_dist.planner.closure_plans import Ground, in_numbers
from dglx_dist.planner.dry_run import DryRun, row_sizes
from dglx_dist.planner.full_work import FullWork, RankLayers, gathered, worth_counting
from dglx_dist.planner.graph_stats import TRAIN_MASK, of_manifest
from dglx_dist.planner.measured import Ghosts, Measured
from dglx_dist.planner.memory import PROGRAM_BYTES, MemoryModel
from dglx_dist.planner.model_shape import ModelShape
from dglx_dist.planner.plan_trials import plan_trials, time_on_plans
from dglx_dist.planner.rates import ByteRates, Rates, measured_rates, time_batches
from dglx_dist.planner.records import Way
from dglx_dist.planner.rehearsed import with_rehearsals
from dglx_dist.planner.survey import Draws, RankCount, count_rank
from dglx_dist.planner.trials import byte_rates, trials
from dglx_dist.records import FEATURE, Array
from dglx_dist.strategies.granndis.batches import compose
from dglx_dist.strategies.granndis.eas import EasOptions, EasSelector
from dglx_dist.strategies.granndis.planning import Planner, PlanRequest

if TYPE_CHECKING:
    from dglx_dist.graph import DistGraph


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
        batches, per_edge = _batches(g, seeds, told, told.draws, shape)
    tell("timing the model")
    rates, plan_rates = _rates(g, module, shape, told, seeds, per_edge)
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


def _batches(
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
    told_by_all: Sequence[Any] = gather_json([asdict(mine), per_edge, rows], session)
    ranks = [RankCount(**one[0]) for one in told_by_all]
    leaders = [session.topology.ranks_of_server(server)[0] for server in range(session.topology.num_servers)]
    cached = {
        alpha: sum(told_by_all[leader][2][at] for leader in leaders) for at, alpha in enumerate(told.caches)
    }
    work = work_of_counts(
        ranks,
        session.topology,
        row_sizes(g, shape, partitioned=told.partitioned),
        cached=cached if held else {},
    )
    return work, max(float(one[1]) for one in told_by_all)


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


def _rates(
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


def _ground(g: DistGraph) -> Ground:
    return Ground(
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
