"""Y1 to Y3 and Y5: training in intervals under strategy ``lambda``, with the bytes predicted by phase."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch.nn.functional import cross_entropy

from dglx_dist.data.partition.base import PartitionPlan
from dglx_dist.data.partition.prepare import partition_to_disk
from dglx_dist.data.sources import load_dataset
from dglx_dist.data.storage.columns import MANIFEST
from dglx_dist.data.storage.reader import open_dataset
from dglx_dist.data.synthetic import SyntheticConfig
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.planner.costs.serverless import PartSizes, serverless_bytes
from dglx_dist.records import FEATURE, LABEL, NODE_TYPE, Array, NodeColumn, RawGraph, SparseRows
from dglx_dist.strategies.serverless.cost import prices
from dglx_dist.strategies.serverless.cut import CLASS_LABEL, capture
from dglx_dist.training.models import build_model
from scripts.bench import data
from scripts.bench.experiments.common import builds, bytes_quotient, clustered_graph, quotient
from scripts.bench.records import PREDICTED_BYTES, BenchPlan, ExperimentPlan, Job, Ratio, Shape, Variant

SERVERS = 2
CUT = PartitionPlan(num_parts=SERVERS, method="metis")
COAUTHORS = "coauthor_physics.npz"
"""A graph in the work folder; nothing is fetched."""
ALONE = "servers alone"
"""Variant that Y5 compares with."""
EMULATED = "workers are processes of this machine, their latency is slept"
_LOCAL: Mapping[str, Any] = {"executor": "local"}
_ASYNC = {f"async, S={number}": {"mode": "async", "staleness": number} for number in (0, 1)}
_MODES: Mapping[str, Mapping[str, Any]] = {"pipe": {"mode": "pipe"}, **_ASYNC}


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large, by suite."""

    nodes: int = 16_000
    degree: float = 25.0
    classes: int = 10
    features: int = 128
    hidden: int = 16
    intervals: int = 8
    """Per graph server."""
    workers: int = 8
    """Most tasks under way, per graph server."""
    epochs: int = 8
    latency_s: float = 0.04
    """Median pause of a task."""
    latency_sigma: float = 0.5
    """Spread of its logarithm; 0: all pauses alike."""


SIZES: Mapping[str, Size] = {"quick": Size(nodes=8000, epochs=4), "papers": Size()}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One of those that are compared."""

    name: str
    options: Mapping[str, Any]
    """Options of the strategy besides intervals and workers."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of the job besides those of the size."""
    turns: tuple[Mapping[str, Any], ...] = ()
    """Parameters that change with the repetition."""
    simulated: str = EMULATED
    counted: bool = True
    """Whether its bytes are predicted: not of threads, whose tasks send none."""


_GOALS: Mapping[str, Mapping[str, float]] = {
    "built-in": {"target": 0.88, "lr": 0.003, "epochs": 80},
    "coauthor_physics": {"target": 0.9, "lr": 0.02, "epochs": 80},
}
"""Target accuracies of Y1 with learning rate and epochs. Synchronous runs reach the target after about half
of the epochs. The learning rate is small, so that one epoch is a few percent of the time."""
_SEEDS = 5


def _y1(plan: BenchPlan, size: Size) -> ExperimentPlan:
    folders = {"built-in": data.prepare(graph_of(plan, size), {"metis": CUT}, plan.work)["metis"]}
    if (plan.work / COAUTHORS).is_file():
        folders["coauthor_physics"] = cut_coauthors(plan.work, size.features)
    turns = tuple({"seed": plan.seed + number} for number in range(max(_SEEDS, plan.repetitions)))
    # Both graph servers on one emulated machine: no link is part of the question.
    shape = Shape(servers=1, ranks_per_server=SERVERS)
    variants = [
        replace(variant_of(_counting(graph, mode, size, turns), folder, size, plan.seed), shape=shape)
        for graph, folder in folders.items()
        for mode in _MODES
    ]
    ratios = [
        quotient(
            over=f"{graph}, {mode}",
            under=f"{graph}, pipe",
            name=f"R, {graph}, {mode}",
            quantity="epochs_to_target",
            low=1.0,
            high=high,
        )
        for graph in folders
        for mode, high in (("async, S=0", 1.15), ("async, S=1", 1.6))
    ]
    facts = {"datasets": {graph: data.facts(folder) for graph, folder in folders.items()}}
    return ExperimentPlan(variants=tuple(variants), ratios=tuple(ratios), facts=facts)


def _counting(graph: str, mode: str, size: Size, turns: tuple[dict[str, Any], ...]) -> Case:
    return Case(
        name=f"{graph}, {mode}",
        options={"executor": "inline", **_MODES[mode]},
        params={**_GOALS[graph], "warmup": 0, "accuracy": True},
        turns=turns,
        simulated="workers are threads, their latency is slept",
    )


def _y2(plan: BenchPlan, size: Size) -> ExperimentPlan:
    cases, ratios = [], []
    for sigma, words in ((size.latency_sigma, "jitter"), (0.0, "no jitter")):
        pauses, high = {"latency_sigma": sigma}, 0.9 if sigma else None
        names = {mode: f"{mode}, {words}" for mode in _MODES}
        cases += [
            Case(name=names[mode], options={**_LOCAL, **of}, params=pauses) for mode, of in _MODES.items()
        ]
        for mode in _ASYNC:
            name = f"{mode} / pipe, {words}"
            ratios.append(quotient(over=names[mode], under=names["pipe"], name=name, high=high))
    return plan_of(plan, size, cases, ratios)


def _y3(plan: BenchPlan, size: Size) -> ExperimentPlan:
    cases = [
        Case(name=name, options={**_LOCAL, "mode": mode}, params={"warmup": 1})
        for name, mode in (("no-pipe", "no_pipe"), ("pipe", "pipe"))
    ]
    ratios = [quotient(over="no-pipe", under="pipe", low=1.5), _bytes("no-pipe", "pipe", 1.0, 0.001)]
    return plan_of(plan, size, cases, ratios)


def _bytes(over: str, under: str, predicted: float, tolerance: float) -> Ratio:
    around = {"low": (1 - tolerance) * predicted, "high": (1 + tolerance) * predicted}
    return bytes_quotient(over, under, f"bytes, {over} / {under}", predicted=predicted, **around)


def _y5(plan: BenchPlan, size: Size) -> ExperimentPlan:
    simulated = EMULATED + "; dollars are those of a price table, nothing was paid"
    alone = {"executor": "inline"}
    cases = [Case(name=ALONE, options=alone, params={"latency_s": 0.0}, simulated=simulated, counted=False)]
    ratios = []
    for mode in ("pipe", "async, S=0"):
        name = f"functions, {mode}"
        cases.append(Case(name=name, options={**_LOCAL, **_MODES[mode]}, simulated=simulated))
        ratios += [
            Ratio(name=f"value, {name} / alone", over=name, under=ALONE, quantity="value", low=1.11),
            Ratio(name=f"time, alone / {name}", over=ALONE, under=name),
            Ratio(name=f"dollars, {name} / alone", over=name, under=ALONE, quantity="dollars"),
        ]
    # Only here: it imports torch, which takes seconds, also where experiments are only listed.
    from dglx_dist.strategies.serverless.options import DEFAULT_SERVER

    table = prices()
    price_line = f"{table.name} of {table.date}, a graph server is a {DEFAULT_SERVER}"
    return plan_of(plan, size, cases, ratios, prices=price_line)


_BALANCED: Mapping[str, Any] = {
    "nodes": 10_000,
    "degree": 2400.0,
    "classes": 2,
    "features": 256,
    "hidden": 256,
    "intervals": 16,
    "workers": 1,
    "epochs": 3,
    "latency_s": 0.01,
    "latency_sigma": 0.0,
}
"""Size at which a graph server computes about as long as its worker waits, and other costs are small: many
edges, few rows, short tasks, and at most one computing process per core. A second worker would halve the
waits and take longer to fill and empty the pipeline."""
_PLANS: Mapping[str, tuple[Callable[[BenchPlan, Size], ExperimentPlan], Mapping[str, Any]]] = {
    # Y1 counts epochs and does not time them, so short epochs are enough.
    "Y1": (_y1, {"nodes": 8000, "features": 64, "latency_s": 0.004}),
    # Random pauses take most of an epoch, and computing on shared cores takes little.
    "Y2": (_y2, {"nodes": 8000, "features": 64, "latency_s": 0.06}),
    "Y3": (_y3, _BALANCED),
    "Y5": (_y5, {}),
}
"""Id -> what builds it, and what of the size is different."""


def plan_at(name: str, plan: BenchPlan, size: Size) -> ExperimentPlan:
    """Return the experiment ``name`` at ``size``; makes its datasets."""
    return _PLANS[name][0](plan, size)


def plan_of(
    plan: BenchPlan, size: Size, cases: Sequence[Case], ratios: Sequence[Ratio], **facts: Any
) -> ExperimentPlan:
    """Return the experiment that compares ``cases`` on the built-in graph; makes its dataset."""
    graph = graph_of(plan, size)
    folder = data.prepare(graph, {"metis": CUT}, plan.work)["metis"]
    counted = [case for case in cases if case.counted]
    return ExperimentPlan(
        variants=tuple(variant_of(case, folder, size, plan.seed) for case in cases),
        ratios=tuple(ratios),
        facts={
            "dataset": data.facts(folder),
            PREDICTED_BYTES: {case.name: _predict_bytes(folder, size, graph.classes) for case in counted},
            **facts,
        },
    )


def graph_of(plan: BenchPlan, size: Size) -> SyntheticConfig:
    """Return the built-in graph of these experiments: communities, half of the nodes to train on."""
    names = ("nodes", "degree", "classes", "features")
    fields = {name: getattr(size, name) for name in names}
    return clustered_graph(plan, **fields, train_rate=0.5, homophily=0.9, locality=0.95)


def variant_of(case: Case, folder: Path, size: Size, seed: int) -> Variant:
    """Return ``case`` on the dataset in ``folder``."""
    params = {
        "data": str(folder),
        "options": {"intervals": size.intervals, "workers": size.workers, **case.options},
        "hidden": size.hidden,
        "epochs": size.epochs,
        "latency_s": size.latency_s,
        "latency_sigma": size.latency_sigma,
        "warmup": 2,
        "seed": seed,
        **case.params,
    }
    job = Job(kind="bounded", params=params, warm={"epochs": 1, "warmup": 1}, turns=case.turns)
    return Variant(name=case.name, shape=Shape(servers=SERVERS), job=job, simulated=case.simulated)


def _predict_bytes(folder: Path, size: Size, classes: int) -> dict[str, int]:
    manifest = open_dataset(folder).manifest
    halo = manifest.quality["halo_nodes"]
    assert isinstance(halo, Sequence)
    sizes = PartSizes(
        nodes=sum(manifest.num_nodes(kind) for kind in manifest.node_types),
        edges=sum(manifest.num_edges(kind) for kind in manifest.edge_types),
        pairs=sum(int(count) for count in halo),
        intervals=SERVERS * size.intervals,
        remote_intervals=(SERVERS - 1) * size.intervals,
    )
    # Its degrees are asked for by name only while a model is captured.
    graph = object.__new__(DistGraph)
    model = build_model("gcn", size.features, size.hidden, classes, 2, 0.0, graph=graph)
    captured = capture(model, size.features).with_loss(cross_entropy, CLASS_LABEL)
    return serverless_bytes(captured.program, sizes)


_SHARES = (0.66, 0.10)
"""Shares of training and validation nodes, as in Dorylus. The remaining nodes are test nodes."""
_ROWS_AT_ONCE = 1024


def cut_coauthors(work: Path, columns: int) -> Path:
    """Return the folder of coauthor_physics with ``columns`` random projections of its 8415 features."""
    folder = work / f"coauthor_physics-{columns}-{CUT.partitioner}-{CUT.num_parts}"
    if not (folder / MANIFEST).is_file():
        partition_to_disk(project_features(load_dataset(work / COAUTHORS), columns), folder, CUT)
    return folder


def project_features(graph: RawGraph, columns: int, seed: int = 0) -> RawGraph:
    """Return ``graph`` with Gaussian projections of its features, (N, columns) float32, and random splits."""
    draw = np.random.default_rng(seed)
    columns_of: dict[str, NodeColumn] = dict(graph.node_data[NODE_TYPE])
    features, labels = columns_of[FEATURE], columns_of[LABEL]
    assert not isinstance(labels, SparseRows)
    matrix = draw.standard_normal((features.shape[1], columns)).astype(np.float32) / np.sqrt(columns)
    number = features.shape[0]
    pieces = [
        _unit_rows(features, np.arange(first, min(first + _ROWS_AT_ONCE, number))) @ matrix
        for first in range(0, number, _ROWS_AT_ONCE)
    ]
    place = draw.permutation(number) / number
    train, validation = place < _SHARES[0], (place >= _SHARES[0]) & (place < sum(_SHARES))
    columns_of |= {
        FEATURE: np.concatenate(pieces).astype(np.float32),
        "train_mask": train & (labels >= 0),
        "val_mask": validation,
        "test_mask": ~train & ~validation,
    }
    return replace(graph, node_data={**graph.node_data, NODE_TYPE: columns_of})


def _unit_rows(features: NodeColumn, rows: Array) -> Array:
    dense: Array = features.dense(rows) if isinstance(features, SparseRows) else features[rows]
    # Rows of unit length: papers of busy authors would drown the others.
    norms = np.linalg.norm(dense, axis=1, keepdims=True)
    return dense.astype(np.float32) / np.maximum(norms, 1e-12)


BUILDS = builds(_PLANS, lambda name, plan, size: plan_at(name, plan, replace(size, **_PLANS[name][1])), SIZES)
