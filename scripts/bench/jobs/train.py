"""The job ``train``: what a user's script does, under any strategy, with everything measured.

Reports are what the driver reads; those of the ranks agree but for ``peak_bytes``.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, cast, final

import dgl
import torch
from torch import nn

from dglx_dist.api import DataLoader, choose_strategy, init, wrap
from dglx_dist.comm.collectives import gather_int64, gather_json
from dglx_dist.comm.ledger import LedgerRow
from dglx_dist.comm.session import Session
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.split import node_split
from dglx_dist.memory import peak_bytes
from dglx_dist.records import FEATURE, LABEL, NODE_TYPE, EpochRecord
from dglx_dist.registry import AUTO
from dglx_dist.training.inference import evaluate
from dglx_dist.training.loop import Accumulation, Step, TrainingLoader, train_pass
from dglx_dist.training.models import build_model
from dglx_dist.training.tasks import NodeClassification
from dglx_dist.training.tracing import gather_figures
from scripts.bench.jobs.params import TrainParams, read_params
from scripts.bench.simulate import SleepingModel
from scripts.bench.worker import JobContext

_VALIDATION = "val_mask"
_LONGEST_WAIT_S = 300.0


def run(params: Mapping[str, Any], context: JobContext) -> dict[str, Any]:
    """Train as ``params`` (fields of :class:`TrainParams`) say.

    The same seed gives the same weights at the start and the same sampled blocks, whatever the strategy.
    """
    job = read_params(TrainParams, params)
    timeout_s, began = min(_LONGEST_WAIT_S, context.timeout_s), time.perf_counter()
    with init(job.strategy, timeout=timeout_s, seed=job.seed, **dict(job.options)) as session:
        g = DistGraph(job.data, structure=job.structure, session=session)
        if job.strategy == AUTO:
            _choose(job, g)
        report = _measure(_make(job, g), job, context, began)
        g.close()
        return report


def _choose(job: TrainParams, g: DistGraph) -> None:
    """Let the ranks choose a strategy for the mini-batches, or whole graphs, that ``job`` asks for."""
    is_full_graph = job.options.get("unit") == "full_graph"
    batches: dict[str, Any] = {} if is_full_graph else {"fanouts": job.fanouts, "batch_size": job.batch_size}
    choose_strategy(model_of(job, g).to(g.session.device), g, **batches)


@dataclass(frozen=True, kw_only=True)
class _Training:
    """Graph, loader, model and optimizer of a training job."""

    g: DistGraph
    loader: CountingLoader
    step: Step


def model_of(job: TrainParams, g: DistGraph) -> nn.Module:
    """Return the model that ``job`` asks for on ``g``, never simulated."""
    classes, width = int(g.num_classes(NODE_TYPE) or 0), g.ndata[FEATURE].shape[1]
    graph = g if job.norm == "graph" else None
    model: nn.Module = build_model(
        job.model, width, job.hidden, classes, len(job.fanouts), job.dropout, job.heads, graph=graph
    )
    return model


def sampler_of(job: TrainParams) -> dgl.dataloading.NeighborSampler:
    """Return the sampler that ``job`` asks for."""
    return dgl.dataloading.NeighborSampler(
        list(job.fanouts), prefetch_node_feats=[FEATURE], prefetch_labels=[LABEL]
    )


def _make(job: TrainParams, g: DistGraph) -> _Training:
    nodes = node_split(g.ndata["train_mask"], g.get_partition_book(), force_even=job.seeds == "even")
    sampler, nodes = sampler_of(job), nodes[: job.max_seeds]
    if job.cache:
        vip = {"seeds": nodes, "fanouts": list(job.fanouts), "batch_size": job.batch_size}
        more: dict[str, Any] = vip if job.cache == "vip" else {}
        g.cache_rows(FEATURE, alpha=job.alpha, policy=job.cache, **more)
    loader = DataLoader(g, nodes, sampler, batch_size=job.batch_size, shuffle=True, **dict(job.loader))
    model = model_of(job, g).to(g.session.device)
    if job.simulated is not None:
        model = SleepingModel(model, job.simulated, int(g.num_classes(NODE_TYPE) or 0))
    wrapped = wrap(model, g)
    optimizer = torch.optim.Adam(wrapped.parameters(), lr=job.lr)
    bounds = g.get_node_partition_policy(NODE_TYPE).bounds
    first, last = bounds[g.session.topology.server :][:2]
    return _Training(
        g=g,
        loader=CountingLoader(loader, int(first), int(last)),
        step=Step(
            model=wrapped,
            optimizer=optimizer,
            task=NodeClassification(),
            accumulation=Accumulation(1, g.session),
        ),
    )


def _measure(training: _Training, job: TrainParams, context: JobContext, began: float) -> dict[str, Any]:
    session, g = training.g.session, training.g
    curve: list[tuple[float, float]] = []
    trained_s = 0.0
    for epoch in range(job.warmup):
        trained_s += _epoch(training, job, epoch).seconds
        _follow(curve, training, job, epoch, trained_s)
    training.loader.reset()
    g.barrier()
    # What is done once: all since the job began, without the epochs that warmed up.
    once_s, once = time.perf_counter() - began - trained_s, session.ledger.rows()
    card, ledger = context.card_sent(), session.ledger.snapshot()
    g.barrier()
    records = []
    for epoch in range(job.warmup, job.warmup + job.epochs):
        records.append(_epoch(training, job, epoch))
        trained_s += records[-1].seconds
        _follow(curve, training, job, epoch, trained_s)
    g.barrier()
    sent = session.ledger.since(ledger)
    return {
        "epochs": [asdict(record) for record in records],
        # What evaluation sends is not of the epochs.
        "bytes_outside_wire": None if job.accuracy else _sent_by_cards(card, context, session),
        "peak_bytes": peak_bytes(),
        "accuracy": curve,
        "extra": {
            **_facts(training, session),
            "bytes_outside_by_phase": bytes_by_phase(sent, session),
            "seconds_before": int(gather_int64([int(1e6 * once_s)], session).max()) / 1e6,
            "bytes_outside_before": bytes_by_phase(once, session),
        },
    }


def _follow(
    curve: list[tuple[float, float]], training: _Training, job: TrainParams, epoch: int, seconds: float
) -> None:
    # Collective. Adds (seconds of training so far, validation accuracy) after epochs for which it is asked.
    is_due = (epoch + 1) % job.accuracy_every == 0 or epoch + 1 == job.warmup + job.epochs
    if job.accuracy and is_due:
        # Each rank's nodes at once: what several batches of them need is then pulled once, not by each.
        g = training.g
        scores = evaluate(training.step.model, g, [_VALIDATION], batch_size=g.num_nodes())
        curve.append((seconds, scores[_VALIDATION]))


def _epoch(training: _Training, job: TrainParams, epoch: int) -> EpochRecord:
    # So that a rank that was late does not lengthen what the others measure.
    training.g.barrier()
    loader, session = cast("TrainingLoader", training.loader), training.g.session
    figures, _ = train_pass(training.step, loader, session, lambda: None, {})
    record = gather_figures(gather_json(figures, session), epoch)
    if job.simulated is None:
        return record
    return replace(record, loss=math.nan, train_accuracy=math.nan)


def _sent_by_cards(before: int | None, context: JobContext, session: Session) -> int | None:
    now = context.card_sent()
    sent = -1 if now is None or before is None else now - before
    return sum_by_server(gather_int64([context.server, sent], session).tolist())


def sum_by_server(rows: Iterable[tuple[int, int]]) -> int | None:
    """Return the sum of (server, bytes) over servers, whose ranks read one card; None: one is below 0."""
    by_server = dict(rows)
    return None if min(by_server.values()) < 0 else sum(by_server.values())


def _facts(training: _Training, session: Session) -> dict[str, Any]:
    loader, topology = training.loader, session.topology
    counts = [loader.rows, loader.remote, loader.edges, loader.num_targets, loader.input_ids]
    rows = gather_int64(counts, session)
    seeds = Counter[int]()
    for rank, count in enumerate(rows[:, 3].tolist()):
        seeds[topology.server_of_rank[rank]] += count
    per_server = [seeds[server] for server in range(topology.num_servers)]
    mean = sum(per_server) / len(per_server)
    total, remote, edges, _, input_ids = (int(rows[:, column].sum()) for column in range(len(counts)))
    return {
        "steps": len(loader),
        "input_rows": total,
        "remote_rows": remote,
        "remote_share": remote / total if total else 0.0,
        "edges": edges,
        "input_ids": input_ids,
        "seeds_per_server": per_server,
        "seeds_max_over_mean": max(per_server) / mean if mean else 1.0,
    }


def bytes_by_phase(
    sent: Iterable[LedgerRow], session: Session, *, without: frozenset[str] = frozenset()
) -> dict[str, int]:
    """Return payload bytes between servers, to and from workers too, by phase; of all ranks, collective."""
    counts = Counter[str]()
    for row in sent:
        if not row.inside and row.phase not in without:
            counts[row.phase] += row.num_bytes
    total = Counter[str]()
    for rank_counts in gather_json(dict(counts), session):
        assert isinstance(rank_counts, dict)
        total.update(rank_counts)
    return dict(sorted(total.items()))


@final
class CountingLoader:
    """A loader that counts what passes through; ``first`` to ``last`` are the nodes of this server."""

    def __init__(self, inner: TrainingLoader, first: int, last: int) -> None:
        self._inner, self._first, self._last = inner, first, last
        self.reset()

    def reset(self) -> None:
        """Count anew."""
        # Of the ids of input rows the sum, which tells one draw from another.
        self.rows = self.remote = self.edges = self.input_ids = self.num_targets = 0

    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._inner:
            nodes, targets, blocks = batch
            self.rows += len(nodes)
            self.input_ids += int(nodes.sum())
            self.remote += int(((nodes < self._first) | (nodes >= self._last)).sum())
            self.edges += sum(block.num_edges() for block in blocks)
            self.num_targets += len(targets)
            yield batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
