"""The job ``calibrate``: what a batch costs on one core, for compute that is slept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dgl

from dglx_dist.api import DataLoader, init
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.split import node_split
from dglx_dist.records import FEATURE, LABEL, NODE_TYPE
from dglx_dist.training.models import build_model
from scripts.bench.jobs.context import JobContext
from scripts.bench.jobs.train_params import read_params
from scripts.bench.simulate import calibrate

_PARTS_OF_A_BATCH = (1, 2, 4)
"""Sizes measured: the whole batch, a half and a quarter."""
_BATCHES = 2
"""Of each size."""


def run(params: Mapping[str, Any], context: JobContext) -> dict[str, Any]:
    """Return ``ComputeCost.to_json()`` of the model on the dataset; one process with one thread runs it.

    Args:
        params: Those of the job ``train``.
        context: Of the only rank.

    Raises:
        ConfigError: a parameter is unknown or out of range.
        StorageError: the dataset is missing or damaged.
    """
    told = read_params(params)
    with init(timeout=context.timeout_s, seed=told.seed) as session:
        g = DistGraph(told.data, session=session)
        seeds = node_split(g.ndata["train_mask"], g.get_partition_book())
        sampler = dgl.dataloading.NeighborSampler(
            list(told.fanouts), prefetch_node_feats=[FEATURE], prefetch_labels=[LABEL]
        )
        batches = []
        for part in _PARTS_OF_A_BATCH:
            size = max(told.batch_size // part, 1)
            loader = DataLoader(g, seeds[: size * _BATCHES], sampler, batch_size=size, num_threads=0)
            batches += [blocks for _, _, blocks in loader]
        classes, width = int(g.num_classes(NODE_TYPE) or 0), g.ndata[FEATURE].shape[1]
        graph = g if told.norm == "graph" else None
        model = build_model(
            told.model, width, told.hidden, classes, len(told.fanouts), told.dropout, told.heads, graph=graph
        )
        cost = calibrate(model, batches)
        g.close()
    return cost.to_json()
