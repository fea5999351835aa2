"""Jobs that one process does beforehand: cost of compute, bytes of training, predictions of the planner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from dglx_dist.api import DataLoader, init
from dglx_dist.cli.plan_job import build_cluster, measure, read_constraints
from dglx_dist.comm.topology import Topology
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.partition_book import Placement
from dglx_dist.graph.split import node_split, read_marked_ids
from dglx_dist.planner.choose import predict
from dglx_dist.planner.config import PlanConfig
from dglx_dist.planner.costs.base import Survey
from dglx_dist.planner.records import Draws, Prediction, Rate
from dglx_dist.planner.workload import count_rank, read_row_sizes, sum_counts
from dglx_dist.records import NODE_TYPE
from dglx_dist.strategies.base import STRATEGIES
from dglx_dist.strategies.candidate import Candidate
from scripts.bench.jobs.params import TrainParams, read_params
from scripts.bench.jobs.train import model_of, sampler_of
from scripts.bench.simulate import calibrate
from scripts.bench.worker import JobContext

_PARTS_OF_A_BATCH = (1, 2, 4)
"""Sizes measured: the whole batch, a half and a quarter."""
_BATCHES = 2
"""Number of batches of each size."""


def calibrate_compute(params: Mapping[str, Any], context: JobContext) -> dict[str, Any]:
    """Return the fields of the :class:`ComputeCost` of the job ``train``; one process with one thread."""
    job = read_params(TrainParams, params)
    with init(timeout=context.timeout_s, seed=job.seed) as session:
        g = DistGraph(job.data, session=session)
        seeds, sampler = node_split(g.ndata["train_mask"], g.get_partition_book()), sampler_of(job)
        batches = []
        for part in _PARTS_OF_A_BATCH:
            size = max(job.batch_size // part, 1)
            loader = DataLoader(g, seeds[: size * _BATCHES], sampler, batch_size=size, num_threads=0)
            batches += [blocks for _, _, blocks in loader]
        cost = calibrate(model_of(job, g).to(g.session.device), batches)
        g.close()
    return asdict(cost)


def survey(params: Mapping[str, Any], context: JobContext) -> dict[str, Any]:
    """Return the fields of a :class:`Survey` by name of a run: of the job ``train``, on ``servers``."""
    return {name: asdict(_survey(query, context)) for name, query in params.items()}


def _survey(params: Mapping[str, Any], context: JobContext) -> Survey:
    job, servers = read_params(TrainParams, params["train"]), int(params["servers"])
    draws = Draws(
        fanouts=job.fanouts,
        batch_size=job.batch_size,
        epoch=job.warmup,
        force_even=job.seeds == "even",
        most_seeds=job.max_seeds,
    )
    with init(timeout=context.timeout_s, seed=job.seed) as session:
        g = DistGraph(job.data, session=session)
        manifest = g.dataset.manifest
        ranks = [Topology(rank, servers, tuple(range(servers))) for rank in range(servers)]
        bounds = Placement(manifest.num_parts, ranks[0]).server_offsets(manifest.node_offsets[NODE_TYPE])
        seeds = read_marked_ids(g.ndata["train_mask"], g.num_nodes())
        totals = sum_counts(
            [count_rank(g, draws, seeds, topology, {NODE_TYPE: bounds}) for topology in ranks],
            # With each tensor goes a flag of one element, that somebody has its gradient.
            read_row_sizes(
                g,
                sum(
                    (parameter.numel() + 1) * parameter.element_size()
                    for parameter in model_of(job, g).parameters()
                ),
                partitioned=job.structure == "partitioned",
            ),
        )
        g.close()
    return totals


def plan(params: Mapping[str, Any], _context: JobContext) -> dict[str, Any]:
    """Return by name and rate the ways to train that fit: options, exact bytes, and seconds to expect."""
    return {name: _list_ways(query) for name, query in params.items()}


def _list_ways(params: Mapping[str, Any]) -> dict[str, Any]:
    fanouts = params["plan"].get("fanouts")
    config = PlanConfig(**params["plan"] | {"fanouts": fanouts and tuple(fanouts)})
    counted, predictions = measure(config)
    unit = read_constraints(config).unit
    compared = [
        prediction
        for prediction in predictions
        if prediction.feasible and _is_compared(prediction.candidate, unit)
    ]
    ways = {}
    for rate in params["rates"]:
        cluster = build_cluster(replace(config, external=Rate.parse(rate)))
        of_rate = replace(counted, cluster=cluster)
        costs = [
            replace(predict(prediction.candidate, of_rate), compute_s=prediction.compute_s)
            for prediction in compared
        ]
        ways[rate] = {prediction.candidate.name: _in_json(prediction) for prediction in costs}
    return ways


def _is_compared(one: Candidate, unit: str) -> bool:
    # Workers on the cores of their servers only slow each other down, and jobs of the bench have no cache.
    own_loop = STRATEGIES.get(one.strategy).traits.own_loop
    return one.exact and one.unit == unit and own_loop and one.cache is None


def _in_json(one: Prediction) -> dict[str, Any]:
    return {
        "strategy": one.candidate.strategy,
        "options": dict(one.candidate.options),
        "whole": STRATEGIES.get(one.candidate.strategy).traits.unit == "full_graph",
        "seconds": one.epoch_seconds,
        "bytes": one.inter_server_bytes + one.intra_server_bytes if one.bytes_exact else None,
    }
