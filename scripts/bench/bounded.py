"""What the experiments with training in intervals share: graph and cut, who is compared, bytes foretold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dglx_dist.data.storage.reader import open_dataset
from dglx_dist.data.synthetic import SyntheticConfig
from dglx_dist.planner.cost_model import ServerlessSetting, serverless_bytes
from dglx_dist.prepare import PartitionPlan
from scripts.bench import data
from scripts.bench.phase_table import PREDICTED_BYTES
from scripts.bench.records import BenchPlan, ExperimentPlan, Job, Ratio, Shape, Variant

SERVERS = 2
SETTING = (
    "2 graph servers, each with half of this machine's cores and one of them the parameter server too, a "
    "graph cut by METIS, GCN of 2 layers and Adam, all nodes in every epoch."
)
HOW = SETTING + (
    " Workers are processes of this machine, on the cores of their graph server. Their work is small beside "
    "what slows them down, which is real waiting: a pause of each task, and connections of 200 Mbit/s each "
    "way, through which all rows and weights pass."
)
EMULATED = "workers are processes of this machine, their latency is slept"
MEGABIT = 1e6 / 8
LAMBDA_BYTES_PER_S = 200 * MEGABIT
"""Of a function, when there are 100 of them (Dorylus, section 6)."""


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
    """Tasks under way at most, per graph server."""
    epochs: int = 8
    latency_s: float = 0.04
    """Median pause of a task."""
    latency_sigma: float = 0.5
    """Spread of its logarithm; 0: all pauses alike."""


SIZES: Mapping[str, Size] = {"quick": Size(nodes=8000, epochs=4), "papers": Size()}


def size_of(plan: BenchPlan) -> Size:
    """Return the size that the suite asks for."""
    return SIZES.get(plan.suite, SIZES["papers"])


@dataclass(frozen=True, kw_only=True)
class Case:
    """One of those that are compared."""

    name: str
    options: Mapping[str, Any]
    """Of the strategy, beside intervals and workers."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Of the job, beside what the size says."""
    turns: tuple[Mapping[str, Any], ...] = ()
    """Of the job's params, by repetition."""
    simulated: str = EMULATED
    counted: bool = True
    """Whether its bytes are foretold: not of threads, whose tasks send none."""


def graph_of(size: Size, seed: int, **changed: Any) -> SyntheticConfig:
    """Return the built-in graph of these experiments: communities, half of the nodes to train on."""
    told = {"train_rate": 0.5, "homophily": 0.9, "locality": 0.95, **changed}
    return SyntheticConfig(
        nodes=size.nodes,
        degree=size.degree,
        classes=size.classes,
        features=size.features,
        seed=seed + 1,
        **told,
    )


def plan_of(
    plan: BenchPlan, size: Size, cases: Sequence[Case], ratios: Sequence[Ratio], **facts: Any
) -> ExperimentPlan:
    """Return the experiment that compares ``cases`` on the built-in graph; makes its dataset.

    Raises:
        ConfigError: the graph cannot be made or cut so.
    """
    graph, cut = graph_of(size, plan.seed), PartitionPlan(num_parts=SERVERS, method="metis")
    folder = data.prepare(graph, {"metis": cut}, plan.work)["metis"]
    counted = [case for case in cases if case.counted]
    return ExperimentPlan(
        variants=tuple(variant_of(case, folder, size, plan.seed) for case in cases),
        ratios=tuple(ratios),
        facts={
            "dataset": data.facts(folder),
            PREDICTED_BYTES: {case.name: foretold(case, folder, size, graph.classes) for case in counted},
            **facts,
        },
    )


def variant_of(case: Case, folder: Path, size: Size, seed: int) -> Variant:
    """Return ``case`` on the dataset in ``folder``."""
    options = {"intervals": size.intervals, "workers": size.workers, **case.options}
    params = {
        "data": str(folder),
        "options": options,
        "hidden": size.hidden,
        "epochs": size.epochs,
        "warmup": 2,
        "seed": seed,
        **case.params,
    }
    job = Job(kind="bounded", params=params, warm={"epochs": 1, "warmup": 1}, turns=case.turns)
    return Variant(name=case.name, shape=Shape(servers=SERVERS), job=job, simulated=case.simulated)


def foretold(case: Case, folder: Path, size: Size, classes: int) -> dict[str, int]:
    """Return the bytes of an epoch by phase."""
    manifest = open_dataset(folder).manifest
    halo = manifest.quality["halo_nodes"]
    assert isinstance(halo, Sequence)
    return serverless_bytes(
        ServerlessSetting(
            widths=(size.features, size.hidden, classes),
            nodes=sum(manifest.num_nodes(kind) for kind in manifest.node_types),
            ghosts=sum(int(count) for count in halo),
            intervals=SERVERS * size.intervals,
            fusion=bool(case.options.get("fusion", True)),
            rematerialise=bool(case.options.get("rematerialise", True)),
        )
    )


def slow_workers(size: Size) -> dict[str, Any]:
    """Return the options of worker processes with latency and the bandwidth of functions."""
    return {
        "executor": "local",
        "latency_s": size.latency_s,
        "latency_sigma": size.latency_sigma,
        "bytes_per_s": LAMBDA_BYTES_PER_S,
    }
