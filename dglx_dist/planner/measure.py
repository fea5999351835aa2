"""Count an epoch, by one process or by a job's ranks, and measure how fast the model and the links are."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import dgl
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dglx_dist.comm.collectives import barrier, check_equal, gather_json
from dglx_dist.comm.devices import synchronize
from dglx_dist.comm.exchange import Incoming, Outgoing, row_exchanges
from dglx_dist.comm.session import Session
from dglx_dist.dataloading.loader import DataLoader
from dglx_dist.errors import ConfigError
from dglx_dist.graph.cache import TRAIN_MASK
from dglx_dist.graph.partition_book import Placement
from dglx_dist.graph.split import read_marked_ids
from dglx_dist.internals.message_passing import place
from dglx_dist.layers.dropout import find_pass_ids, install_node_dropouts
from dglx_dist.layers.tracer import MODEL_ERRORS
from dglx_dist.planner.choose import enumerate_candidates, has_costs, list_works, predict
from dglx_dist.planner.costs.base import EpochCounts, PlannedRun, Work
from dglx_dist.planner.model_shape import build_topology
from dglx_dist.planner.records import Cluster, Draws, ModelShape, Prediction
from dglx_dist.planner.workload import count_batches, estimate_graph_stats, read_graph_stats, read_row_sizes
from dglx_dist.records import Array
from dglx_dist.strategies.base import find_float_parameter
from dglx_dist.strategies.candidate import CACHE_SIZES, Candidate, CandidateContext
from dglx_dist.strategies.full_graph.graph_types import GraphStructure, UnifiedGraph
from dglx_dist.strategies.full_graph.plan_builder import PartitionContext

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph

PROGRAM_BYTES = 690 * 10**6
"""Memory that a rank takes after it imported all modules and evaluated once (torch 2.13, Linux)."""
_NO_COST_MODEL = "it has no cost model, so only a running job with strategy auto can measure it"
_REPETITIONS = 3
_TIMED_BATCHES = 3
_FIRST_BYTES = 32 * 1024
_MAX_BYTES = 64 * 2**20
_MIN_MEASUREMENT_S = 0.1
"""Minimum length of a round. The first round is ignored, because it begins with a burst."""
_ROUNDS = 3
_EXCHANGE_NAME = "probe of the links"
PROBE_PHASE = "link_probe"
"""Ledger phase for the probe."""


@dataclass(frozen=True, kw_only=True)
class CountConfig:
    """Options of :func:`count`."""

    cluster: Cluster
    draws: Draws | None
    """Parameters for mini-batches. None: mini-batches are not counted."""
    is_offered: Callable[[Candidate], bool] = lambda _: True
    """Tells whether a candidate is counted."""
    caches: bool = True
    """Whether caches for remote rows are offered. ``vip`` needs the whole structure on each server."""
    partitioned: bool = False
    """Whether servers ask each other for in-edges."""
    in_job: bool = False
    """Whether the session's ranks count together. Otherwise this process counts for all ranks."""
    program_bytes: int = PROGRAM_BYTES
    """Memory that a rank takes before it opens a graph. If this process is a rank, it may take more."""
    epoch: int = 1
    assumptions: tuple[str, ...] = ()
    ntype: str | None = None
    """Node type to train on. None: the only one."""
    num_edges: int | None = None
    """Number of training edges. None: the training is on nodes."""


def count(
    g: DistGraph, shape: ModelShape, config: CountConfig, notify: Callable[[str], None] | None = None
) -> tuple[EpochCounts, tuple[Candidate, ...]]:
    """Count an epoch and return the counts and the candidates. The ranks in a job must all call this.

    Nothing is counted for a model without known widths. Outside a job, the session of ``g`` has one rank, and
    ``g`` has the whole graph's structure. ``notify`` is called with each step's name.

    Raises:
        ConfigError: If the graph lacks data or has fewer parts than servers, or the ranks know different
            candidates.
        PeerError: If a rank is dead or silent.
    """
    notify = notify or (lambda _: None)
    notify("figures of the graph")
    run = _plan_run(g, shape, config)
    if not len(run.seeds):
        raise ConfigError(
            f"node data {TRAIN_MASK!r} of {g.dataset.folder} marks no node, so there is nothing to plan for. "
            "Partition a graph with training nodes."
        )

    context = _make_context(run, config)
    candidates = tuple(filter(config.is_offered, enumerate_candidates(context)))
    # Counting is collective, but each rank has its own registry.
    descriptions = [f"{candidate.name} {list_works([candidate], context)}" for candidate in candidates]
    check_equal(run.g.session, "a candidate of strategy", descriptions, "load the same plugins on every rank")

    batches = None
    if shape.has_widths:
        if config.draws is not None:
            notify("batches of all ranks")
            sizes = read_row_sizes(g, shape.gradient_bytes, run.ntype, partitioned=config.partitioned)
            batches = count_batches(run, config.draws, _list_caches(candidates), sizes)
        trainable = [candidate for candidate in candidates if candidate.strategy not in shape.refusals]
        for work in list_works(trainable, context):
            notify(work.describe(run.num_layers))
            run.works[work] = work.count(run)

    counts = EpochCounts(
        graph=run.graph,
        shape=shape,
        cluster=config.cluster,
        context=context,
        program_bytes=max(PROGRAM_BYTES, *gather_json(config.program_bytes, g.session)),
        batches=batches,
        works=run.works,
        structure_partitioned=config.partitioned,
        epoch=config.epoch,
        assumptions=config.assumptions,
        draws=config.draws,
    )
    return counts, candidates


def _list_caches(candidates: Sequence[Candidate]) -> list[tuple[str, float]]:
    """List each cache that ``candidates`` use, as (policy, size), without duplicates."""
    caches: list[tuple[str, float]] = []
    for candidate in candidates:
        cache = (candidate.cache, candidate.cache_alpha)
        if candidate.cache and cache not in caches:
            caches.append((candidate.cache, candidate.cache_alpha))
    return caches


def _make_context(run: PlannedRun, config: CountConfig) -> CandidateContext:
    """Collect what strategies must know about the run to list their candidates."""
    cluster = config.cluster
    num_steps = 0
    if config.draws is not None:
        seeds_per_rank = math.ceil(len(run.seeds) / cluster.ranks)
        num_steps = math.ceil(seeds_per_rank / config.draws.batch_size)
    cache_sizes: tuple[float, ...] = ()
    if config.caches and not config.partitioned:
        cache_sizes = CACHE_SIZES

    return CandidateContext(
        ranks=cluster.ranks,
        servers=cluster.servers,
        num_layers=run.num_layers,
        steps=num_steps,
        caches=cache_sizes,
    )


def _plan_run(g: DistGraph, shape: ModelShape, config: CountConfig) -> PlannedRun:
    """Prepare the run to count: its graph, cluster and training nodes."""
    manifest = g.dataset.manifest
    cluster = config.cluster
    topology = build_topology(cluster.servers, cluster.ranks_per_server)
    if config.in_job:
        topology = g.session.topology
    placement = Placement(manifest.num_parts, topology)
    bounds = {name: placement.server_offsets(manifest.node_offsets[name]) for name in g.ntypes}
    structure: GraphStructure = g.structure(g.canonical_etypes[0])
    if not g.is_homogeneous:
        structure = UnifiedGraph.from_graph(g, bounds=bounds, topology=topology)
    partition = PartitionContext(
        structure=structure,
        bounds=np.sum([*bounds.values()], axis=0),
        topology=topology,
        seed=g.session.seed,
    )

    ntype = config.ntype or manifest.node_types[0]
    if config.num_edges is None:
        seeds = read_marked_ids(g.nodes[ntype].data[TRAIN_MASK], g.num_nodes(ntype))
    else:
        # Only their number is used, because batches with edges are not counted.
        seeds = np.arange(config.num_edges)
    trained_types: frozenset[str] = frozenset()
    if shape.feature_widths is not None:
        trained_types = frozenset(g.ntypes) - shape.feature_widths.keys()

    # A job does not read all edges, because that takes too long.
    if config.in_job:
        graph = estimate_graph_stats(manifest, cluster.servers, len(seeds))
    else:
        graph = read_graph_stats(g.dataset, cluster.servers)
    return PlannedRun(
        g=g,
        partition=partition,
        ntype=ntype,
        bounds=bounds,
        seeds=seeds,
        trained_types=trained_types,
        graph=graph,
        cluster=cluster,
        num_layers=len(shape.layers),
        in_job=config.in_job,
    )


def predict_and_time(
    g: DistGraph,
    model: nn.Module,
    counts: EpochCounts,
    candidates: Sequence[Candidate],
    ntype: str | None = None,
) -> list[Prediction]:
    """Predict each candidate's costs, with the seconds that its steps compute here.

    Steps with mini-batches are timed on a few drawn batches. Steps on whole graphs are timed on the plan that
    belongs to the rank with the largest step. If ranks have less than a core each, the seconds are multiplied
    accordingly. ``ntype`` is the node type to train on. None: the only one.
    """
    predictions = [predict(candidate, counts) for candidate in candidates]
    slowdown = 1.0 / min(counts.cluster.cores, 1.0)
    batch_seconds = _time_mini_batches(g, model, counts, ntype) * slowdown
    work_seconds: dict[Work, float] = {}
    timed = []
    for prediction in predictions:
        if not prediction.feasible:
            timed.append(prediction)
            continue
        if not has_costs(prediction.candidate):
            timed.append(replace(prediction, why_not=_NO_COST_MODEL))
            continue

        seconds = batch_seconds
        works = list_works([prediction.candidate], counts.context)
        if works:
            # A candidate without mini-batches trains on the plans of its first work.
            work = works[0]
            if work not in work_seconds:
                work_seconds[work] = _time_work(g, model, counts, work, ntype) * slowdown
            seconds = work_seconds[work]
        timed.append(replace(prediction, compute_s=seconds))
    return timed


def _time_work(g: DistGraph, model: nn.Module, counts: EpochCounts, work: Work, ntype: str | None) -> float:
    """Time ``work`` and return its seconds per epoch, or 0 if it has no blocks to time."""
    step = work.blocks(counts.works[work])
    if step is None:
        return 0.0
    blocks, num_steps = step
    return num_steps * time_step(model, blocks, _list_input_widths(g, counts.shape), ntype)


def _list_input_widths(g: DistGraph, shape: ModelShape) -> int | dict[str, int]:
    """Return the number of input columns, by node type for a model with several types."""
    widths = shape.feature_widths
    if widths is None:
        return shape.features
    return {ntype: widths.get(ntype, shape.hidden) for ntype in g.ntypes}


def _time_mini_batches(g: DistGraph, model: nn.Module, counts: EpochCounts, ntype: str | None) -> float:
    """Time mini-batches and return their seconds per epoch, or 0 if none were requested."""
    draws = counts.draws
    if draws is None:
        return 0.0
    ntype = ntype or g.ntypes[0]
    seeds = read_marked_ids(g.nodes[ntype].data[TRAIN_MASK], g.num_nodes(ntype))
    batch_size = min(draws.batch_size, math.ceil(len(seeds) / counts.cluster.ranks))
    widths = _list_input_widths(g, counts.shape)

    step_seconds = []
    for offset in range(min(_TIMED_BATCHES, len(seeds))):
        # Each batch begins with another node, so that the batches differ.
        blocks = sample_blocks(g, seeds[offset:], batch_size, draws.fanouts, ntype)
        step_seconds.append(time_step(model, blocks, widths, ntype))
    return statistics.median(step_seconds) * counts.mini_batches.steps


def sample_blocks(
    g: DistGraph, seeds: Array, size: int, fanouts: Sequence[int], ntype: str | None = None
) -> list[Any]:
    """Sample one batch. Its ``size`` seeds are taken from (K,) ``seeds`` at equal distances.

    ``ntype`` is the seeds' type. None: the only one.
    """
    positions = np.linspace(0, len(seeds) - 1, min(size, len(seeds))).astype(np.int64)
    batch_seeds: Any = seeds[np.unique(positions)]
    options: dict[str, Any] = {"batch_size": len(batch_seeds), "num_threads": 0, "device": "cpu"}
    if ntype is not None:
        batch_seeds = {ntype: batch_seeds}

    sampler = dgl.dataloading.NeighborSampler(list(fanouts))
    ((_, _, blocks),) = list(DataLoader(g, batch_seeds, sampler, **options))
    return list(blocks)


def time_step(
    model: nn.Module, blocks: Sequence[Any], widths: int | Mapping[str, int], ntype: str | None = None
) -> float:
    """Return the seconds that a copy of ``model`` takes for a training step on ``blocks``, on its device.

    The result is the median over three steps, after one that is not timed. Dropout is keyed by node, like
    under the strategies.

    Args:
        model: The model, which does not change.
        blocks: One block per layer, input-most first.
        widths: Number of input columns, by node type if it is a mapping.
        ntype: Type of the targets.

    Raises:
        ConfigError: If the model fails on the blocks.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(f"the {type(model).__name__} has no parameters to train: nothing to choose")
    weight = find_float_parameter(model)
    device_blocks = [place(block, weight.device) for block in blocks]
    step_seconds = []
    try:
        model_copy = copy.deepcopy(model).train()
        dropouts = install_node_dropouts(model_copy, 0)
        dropouts.begin(0, find_pass_ids(device_blocks[0]))
        optimizer = make_optimizer(model_copy)
        rows = _make_ones(device_blocks[0], widths, weight)

        for _ in range(1 + _REPETITIONS):
            synchronize(weight.device)
            begin = time.perf_counter()
            take_step(model_copy, optimizer, device_blocks, rows, ntype)
            synchronize(weight.device)
            step_seconds.append(time.perf_counter() - begin)
    except MODEL_ERRORS as error:
        raise ConfigError(
            f"the model could not be timed on a batch ({type(error).__name__}: {error}). It is called as "
            f"model(blocks, features) with {len(blocks)} blocks, one per fan-out, and must return a row of "
            "scores for each target."
        ) from error

    # The first step compiles kernels and allocates memory.
    return statistics.median(step_seconds[1:])


def _make_ones(block: Any, widths: int | Mapping[str, int], weight: Tensor) -> Any:
    """Return input rows that are all 1, with the dtype and on the device of ``weight``."""
    if isinstance(widths, int):
        return weight.new_ones(block.num_src_nodes(), widths)
    rows = {}
    for ntype, width in widths.items():
        rows[ntype] = weight.new_ones(block.num_src_nodes(ntype), width)
    return rows


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer that hardly changes ``model``: Adam, or SGD if row gradients are sparse."""
    # Adam does not support sparse gradients.
    is_sparse = any(getattr(module, "sparse", False) for module in model.modules())
    optimizer_class = torch.optim.SGD if is_sparse else torch.optim.Adam
    return optimizer_class(model.parameters(), lr=1e-9)


def take_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    blocks: Sequence[Any],
    rows: Any,
    ntype: str | None = None,
) -> None:
    """Train ``model`` for a step, with classes or values that are all 0.

    ``rows`` are (N, F), or such rows by node type. If the scores are by node type, the loss takes those for
    ``ntype``.
    """
    scores = model(blocks, rows)
    if isinstance(scores, dict):
        scores = scores[ntype or blocks[-1].dsttypes[0]]
    if scores.dim() == 2:
        loss = cross_entropy(scores, scores.new_zeros(len(scores), dtype=torch.int64))
    else:
        loss = scores.square().mean()
    update_weights(optimizer, loss)


def update_weights(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """Compute the gradients for ``loss`` and let ``optimizer`` take a step."""
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it bare
    optimizer.step()


@dataclass(frozen=True, kw_only=True)
class Links:
    """Payload per second in both directions at once."""

    external_bytes_per_s: float
    """Rate that the slowest server's card sends."""
    internal_bytes_per_s: float
    """Rate that all ranks on a server send in total."""


def probe(session: Session, *, seconds: float = 2.0) -> Links:
    """Time messages around rings of ranks, first between servers and then within them, for about ``seconds``.

    It is collective, and the result is the same on all ranks. With one rank, the links have no limits. The
    session should be idle. The ledger counts the messages as :data:`PROBE_PHASE`.
    """
    topology = session.topology
    if topology.world_size == 1:
        return Links(external_bytes_per_s=1e12, internal_bytes_per_s=1e12)

    ranks_by_server = [topology.ranks_of_server(server) for server in range(topology.num_servers)]
    external = None
    if len(ranks_by_server) > 1:
        first_ranks = [ranks[0] for ranks in ranks_by_server]
        external = _measure_bandwidth(session, _ring_neighbours(first_ranks, topology.rank), seconds / 2)
    internal = None
    if max(map(len, ranks_by_server)) > 1:
        server_ranks = ranks_by_server[topology.server]
        rank_rate = _measure_bandwidth(session, _ring_neighbours(server_ranks, topology.rank), seconds / 2)
        # All ranks in the ring within a server send at this rate.
        internal = rank_rate * len(server_ranks)

    # If one kind of link does not exist, nothing is sent over it, and it gets the other kind's rate.
    rate = external or internal
    assert rate is not None
    return Links(external_bytes_per_s=rate, internal_bytes_per_s=internal or rate)


def _ring_neighbours(members: Sequence[int], rank: int) -> tuple[int, int] | None:
    """Return the members before and after ``rank`` in a ring, or None if ``rank`` has no neighbours."""
    if rank not in members or len(members) == 1:
        return None
    index = members.index(rank)
    return members[index - 1], members[(index + 1) % len(members)]


def _measure_bandwidth(session: Session, neighbors: tuple[int, int] | None, seconds: float) -> float:
    """Return the median bytes per second over the rounds within about ``seconds``. Every rank must call this.

    ``neighbors`` are the ranks before and after this rank in its ring. None: this rank sends nothing.
    """
    num_bytes = _FIRST_BYTES
    elapsed_s = 0.0
    rounds_s: list[float] = []
    # The first timed round does not count, because it begins with a burst.
    while len(rounds_s) <= _ROUNDS and (elapsed_s < seconds or not rounds_s):
        swap_seconds = gather_json(_time_swap(session, neighbors, num_bytes), session)
        round_s = max(map(float, swap_seconds))
        elapsed_s += round_s

        cannot_grow = elapsed_s >= seconds / 2 or num_bytes >= _MAX_BYTES
        if rounds_s or round_s >= _MIN_MEASUREMENT_S or cannot_grow:
            rounds_s.append(round_s)
            continue
        # The next round should last long enough, but grow at most eightfold, because bursts look too fast.
        target_bytes = num_bytes * 1.2 * _MIN_MEASUREMENT_S / max(round_s, 1e-9)
        num_bytes = int(min(max(target_bytes, 2 * num_bytes), 8 * num_bytes, _MAX_BYTES))

    return num_bytes / max(statistics.median(rounds_s[1:] or rounds_s), 1e-9)


def _time_swap(session: Session, neighbors: tuple[int, int] | None, num_bytes: int) -> float:
    """Send ``num_bytes`` to the next rank, receive as many from the previous one, and return the seconds."""
    streams = row_exchanges(session).streams
    barrier(session, _EXCHANGE_NAME)
    begin = time.perf_counter()

    if neighbors is not None:
        previous_rank, next_rank = neighbors
        outgoing = [Outgoing(rank=next_rank, rows=torch.zeros(num_bytes, dtype=torch.uint8))]
        incoming = [Incoming(rank=previous_rank, rows=torch.empty(num_bytes, dtype=torch.uint8))]
        finish = streams.post(outgoing, incoming, _EXCHANGE_NAME, phase=PROBE_PHASE)
        finish()
    return time.perf_counter() - begin
