"""The job ``bounded``: whole epochs under strategy ``lambda``, with bytes, dollars and epochs to a target.

Reports are what the driver reads; those of the ranks agree but for ``peak_bytes``.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from statistics import NormalDist
from typing import Any
from unittest.mock import patch

import dgl
import torch
import torch.nn.functional as F

from dglx_dist.api import DataLoader, init, wrap
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.split import node_split
from dglx_dist.memory import peak_bytes
from dglx_dist.records import FEATURE, NODE_TYPE, EpochRecord
from dglx_dist.strategies.base import Objective
from dglx_dist.strategies.serverless.executors.base import Executor
from dglx_dist.strategies.serverless.parameter_service import READ
from dglx_dist.strategies.serverless.tasks import Task
from dglx_dist.strategies.serverless.worker import TaskPhase
from dglx_dist.strategies.serverless.worker_process import Fault
from dglx_dist.training.inference import evaluate
from dglx_dist.training.models import build_model
from scripts.bench.jobs.params import IntervalParams, read_params
from scripts.bench.jobs.train import bytes_by_phase
from scripts.bench.worker import JobContext

_LONGEST_WAIT_S = 300.0
_COUNTED = ("invocations", "relaunched", "gb_s", "server_seconds", "dollars", "dollars_functions")
"""Fields of an account, which are sums since the start of the run."""


def run(params: Mapping[str, Any], context: JobContext) -> dict[str, Any]:
    """Train as ``params`` (fields of :class:`IntervalParams`) say; ConfigError where a loop is needed."""
    job = read_params(IntervalParams, params)
    timeout_s = min(_LONGEST_WAIT_S, context.timeout_s)
    emulated = patch.object(Executor, "fault_of", lambda _, task: draw_pause(job, task))
    with emulated, init(job.strategy, timeout=timeout_s, seed=job.seed, **dict(job.options)) as session:
        g = DistGraph(job.data, structure="partitioned", session=session)
        report = _train(g, job) | {"peak_bytes": peak_bytes()}
        g.close()
        return report


def draw_pause(job: IntervalParams, task: Task) -> Fault | None:
    """Return the log-normal pause of one attempt between computing and submitting its results.

    It stands for the latency of a function, and does not depend on the order of invocations.
    """
    if job.latency_s == 0:
        return None
    digest = hashlib.sha256(f"latency/{task.key}/{task.attempt}".encode()).digest()
    # The middle of its cell, so that neither end of the distribution is drawn.
    share = (int.from_bytes(digest[:6], "little") + 0.5) / (1 << 48)
    factor = math.exp(NormalDist(0.0, job.latency_sigma).inv_cdf(share)) if job.latency_sigma else 1.0
    return Fault(place=TaskPhase.COMPUTED, seconds=job.latency_s * factor)


def _train(g: DistGraph, job: IntervalParams) -> dict[str, Any]:
    session = g.session
    torch.manual_seed(job.seed)
    classes = int(g.num_classes(NODE_TYPE) or 0)
    width = g.ndata[FEATURE].shape[1]
    model = build_model(job.model, width, job.hidden, classes, job.layers, 0.0, graph=g)
    nodes = node_split(g.ndata["train_mask"], g.get_partition_book(), force_even=True)
    loader = DataLoader(g, nodes, dgl.dataloading.MultiLayerFullNeighborSampler(job.layers))
    wrapped = wrap(model, g)
    optimizer = torch.optim.Adam(wrapped.parameters(), lr=job.lr)
    trainer = wrapped.trainer(loader, optimizer, Objective(loss=F.cross_entropy))
    if trainer is None:
        raise ConfigError(f"strategy {job.strategy!r} trains in a loop; use the job 'train' for it")
    with ExitStack() as closing:
        closing.push(lambda kind, *_: trainer.close(failed=kind is not None))
        if job.warmup:
            trainer.run(0, job.warmup)
        before: Mapping[str, Any] = trainer.account()
        records, moved = trainer.run(job.warmup, job.epochs)
        after: Mapping[str, Any] = trainer.account()
    spent = {name: (after[name] - before[name]) / job.epochs for name in _COUNTED if name in before}
    worth = spent["dollars"] * sum(record.seconds for record in records) / job.epochs
    accuracy = {"test_accuracy": evaluate(wrapped, g, ["test_mask"])["test_mask"]} if job.accuracy else {}
    return {
        "epochs": [asdict(record) for record in records],
        "bytes_outside_wire": None,
        "extra": {
            # What brings the weights to the user's model, once at the end, is of no epoch.
            "bytes_outside_by_phase": bytes_by_phase(moved, session, without=frozenset({READ})),
            "epochs_to_target": epochs_to(records, job.target),
            "losses": [record.loss for record in records],
            "train_accuracy": [record.train_accuracy for record in records],
            **accuracy,
            **spent,
            "value": 1 / worth if worth > 0 else None,
            "dollars_are": str(after["label"]),
        },
    }


def epochs_to(records: Sequence[EpochRecord], target: float | None) -> int | None:
    """Return after how many of these epochs the training accuracy was ``target``; None: it never was."""
    if target is None:
        return None
    reached = (count for count, record in enumerate(records, start=1) if record.train_accuracy >= target)
    return next(reached, None)
