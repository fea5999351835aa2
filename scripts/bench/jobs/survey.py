"""The job ``survey``: what data-parallel training will move, counted by one process from the same draws."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from dglx_dist.api import init
from dglx_dist.comm.topology import Topology
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.partition_book import Placement
from dglx_dist.graph.split import marked_ids
from dglx_dist.planner.workload import Draws, Survey, count_rank, summed
from dglx_dist.records import FEATURE, LABEL, NODE_TYPE
from dglx_dist.training.models import build_model
from scripts.bench.jobs.context import JobContext
from scripts.bench.jobs.train_params import TrainParams, read_params


def run(params: Mapping[str, Any], context: JobContext) -> dict[str, Any]:
    """Return the fields of a :class:`Survey` by name of a run; one process counts them all.

    Args:
        params: Name to ``train``: parameters of the job ``train``; and ``servers``: on how many it will run,
            one rank on each.
        context: Of the only rank.

    Raises:
        ConfigError: a parameter is unknown or out of range.
        StorageError: a dataset is missing or damaged.
    """
    return {name: asdict(_survey(one, context)) for name, one in params.items()}


def _survey(params: Mapping[str, Any], context: JobContext) -> Survey:
    told, servers = read_params(params["train"]), int(params["servers"])
    draws = Draws(
        fanouts=tuple(told.fanouts),
        batch_size=told.batch_size,
        epoch=told.warmup,
        force_even=told.seeds == "even",
        most_seeds=told.max_seeds,
    )
    with init(timeout=context.timeout_s, seed=told.seed) as session:
        g = DistGraph(told.data, session=session)
        manifest = g.dataset.manifest
        ranks = [Topology(rank, servers, tuple(range(servers))) for rank in range(servers)]
        bounds = Placement(manifest.num_parts, ranks[0]).server_offsets(manifest.node_offsets[NODE_TYPE])
        seeds = marked_ids(g.ndata["train_mask"], g.num_nodes())
        found = summed(
            [count_rank(g, draws, seeds, (topology, bounds)) for topology in ranks],
            row_bytes={name: _row_bytes(g, name) for name in (FEATURE, LABEL)},
            parameter_bytes=_parameter_bytes(told, g),
            partitioned=told.structure == "partitioned",
        )
        g.close()
    return found


def _row_bytes(g: DistGraph, name: str) -> int:
    column = g.ndata[name]
    return int(np.prod(column.shape[1:], dtype=np.int64)) * column.dtype.itemsize


def _parameter_bytes(told: TrainParams, g: DistGraph) -> int:
    classes, width = int(g.num_classes(NODE_TYPE) or 0), g.ndata[FEATURE].shape[1]
    graph = g if told.norm == "graph" else None
    model = build_model(
        told.model, width, told.hidden, classes, len(told.fanouts), heads=told.heads, graph=graph
    )
    # With each tensor goes a flag of one element, that somebody has its gradient.
    return sum((parameter.numel() + 1) * parameter.element_size() for parameter in model.parameters())
