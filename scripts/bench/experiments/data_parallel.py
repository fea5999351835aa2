"""D1 to D3: what a partition and its balance are worth to data parallelism, and how far it scales."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

from dglx_dist.data.partition.base import PartitionOptions, PartitionPlan
from dglx_dist.planner.costs.base import Survey
from dglx_dist.planner.records import Rate
from scripts.bench import data
from scripts.bench.data import measure_compute_cost, survey
from scripts.bench.experiments.common import GIGABIT, clustered_graph, predicted_time, training_variant
from scripts.bench.records import BenchPlan, ExperimentPlan, MatchedPhi, Ratio, Shape

SERVERS = 4
SHAPE = Shape(servers=SERVERS)
PHI = 0.65
_COUNTS = (1, 2, 4)
"""Servers of D3."""
_SIMULATED = (
    "forward and backward are slept for as long as the server's share of a core would take; the rest is real"
)
_CUTS = {
    "metis": PartitionPlan(num_parts=SERVERS, method="metis", options=PartitionOptions(balance=("nodes",))),
    "metis + constraints": PartitionPlan(
        num_parts=SERVERS, method="metis", options=PartitionOptions(balance=("nodes", "degree", "train"))
    ),
}


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large, by suite."""

    nodes: int = 100_000
    degree: float = 25.0
    train_rate: float = 0.01536
    hidden: int = 64
    batch_size: int = 64
    epochs: int = 1
    curve_epochs: int = 5
    """Number of epochs of the accuracy curves of D1."""
    with_unskewed: bool = False
    """Whether D2 measures the same where training nodes are spread evenly."""
    steps: int | None = None
    """Number of steps of an epoch of D3, on any number of servers. 4 servers have enough seeds for them."""

    def graph(self, plan: BenchPlan, **more: Any) -> Any:
        return clustered_graph(plan, nodes=self.nodes, degree=self.degree, train_rate=self.train_rate, **more)

    def params(self, seed: int, **more: Any) -> dict[str, Any]:
        same = {"hidden": self.hidden, "batch_size": self.batch_size, "epochs": self.epochs}
        return {**same, "fanouts": [15, 10, 5], "seed": seed, **more}


_QUICK = Size()
_LARGE = Size(nodes=400_000, hidden=256, batch_size=250, train_rate=0.02, epochs=2, curve_epochs=10)
_SCALING = Size(train_rate=0.06144, hidden=256, batch_size=128, steps=12)
SIZES: Mapping[str, Mapping[str, Size]] = {
    "D1": {"quick": _QUICK, "papers": _LARGE},
    "D2": {"quick": _QUICK, "papers": replace(_LARGE, with_unskewed=True)},
    "D3": {"quick": _SCALING, "papers": replace(_SCALING, nodes=400_000, batch_size=250, steps=24, epochs=2)},
}


def _of_each(found: Mapping[str, Survey], value: Callable[[Survey], Any]) -> dict[str, Any]:
    return {name: value(survey) for name, survey in found.items()}


def _payload(found: Survey) -> int:
    return found.feature_bytes + found.sampling_bytes + found.label_bytes + found.gradient_bytes


def partition(plan: BenchPlan, size: Size) -> ExperimentPlan:
    """Return D1: one graph cut in two ways, the same model on both, at a matched rate and at 1 Gbit/s."""
    cuts = {name: PartitionPlan(num_parts=SERVERS, method=name) for name in ("random", "metis")}
    folders = data.prepare(size.graph(plan), cuts, plan.work)
    params = size.params(plan.seed)
    surveys = survey({name: {"data": str(folder), **params} for name, folder in folders.items()}, SERVERS)
    bytes_ratio = _payload(surveys["metis"]) / _payload(surveys["random"])
    curve = {"warmup": 0, "epochs": size.curve_epochs}
    matched = MatchedPhi(phi=PHI, baseline="random")
    variants = [
        training_variant(*dataset, params, shape=SHAPE, rate=matched, curve=curve)
        for dataset in folders.items()
    ]
    variants += [
        training_variant(f"{name}, {GIGABIT}", folder, params, shape=SHAPE, rate=GIGABIT)
        for name, folder in folders.items()
    ]
    # One after the other, and with a network that is always busy while computing overlaps with it.
    added, hidden = 1.0 / predicted_time(PHI, 1.0, bytes_ratio), 1.0 / max(1.0 - PHI, bytes_ratio)
    both: Any = {"over": "random", "under": "metis"}
    at_gigabit: Any = {name: f"{variant}, {GIGABIT}" for name, variant in both.items()}
    return ExperimentPlan(
        variants=tuple(variants),
        ratios=(
            Ratio(name=f"random / metis at phi {PHI}", **both, predicted=added, low=1.5),
            Ratio(name=f"random / metis at {GIGABIT}", **at_gigabit),
            Ratio(
                name="bytes, random / metis", **both, quantity="bytes_outside", predicted=1.0 / bytes_ratio
            ),
        ),
        facts={
            "datasets": {name: data.facts(folder) for name, folder in folders.items()},
            "remote share of input rows": _of_each(
                surveys, lambda dataset: round(dataset.remote_rows / dataset.input_rows, 3)
            ),
            "payload bytes of an epoch": _of_each(surveys, _payload),
            "bytes ratio metis / random": round(bytes_ratio, 3),
            "predicted at phi 0.65, nothing overlapped": round(added, 2),
            "predicted at phi 0.65, all overlapped": round(hidden, 2),
        },
    )


def balance(plan: BenchPlan, size: Size) -> ExperimentPlan:
    """Return D2: training nodes in a tenth of the communities, cut without constraints and with."""
    skewed = size.graph(plan, classes=4, communities=12, skew=0.9)
    folders = data.prepare(skewed, _CUTS, plan.work)
    kinds = [
        ("", "own training nodes, skewed", "own", folders),
        (", even shares", "even shares, skewed", "even", folders),
    ]
    if size.with_unskewed:
        spread = data.prepare(replace(skewed, skew=0.0), _CUTS, plan.work)
        kinds.append((", spread", "own training nodes, spread evenly", "own", spread))
        folders = {**folders, **{f"{name}, spread": folder for name, folder in spread.items()}}
    jobs = {
        f"{name}{suffix}": {"data": str(folder), **size.params(plan.seed, seeds=seeds)}
        for suffix, _, seeds, cut in kinds
        for name, folder in cut.items()
    }
    surveys = survey(jobs, SERVERS)
    uneven = _of_each(surveys, lambda one: max(one.seeds_per_rank) / fmean(one.seeds_per_rank))
    plain, balanced = _CUTS
    return ExperimentPlan(
        variants=tuple(
            training_variant(name, params["data"], params, shape=SHAPE, rate=GIGABIT)
            for name, params in jobs.items()
        ),
        ratios=tuple(
            Ratio(
                name=f"{plain} / {balanced}: {title}",
                over=f"{plain}{suffix}",
                under=f"{balanced}{suffix}",
                # The slowest server sets the pace, and its time goes with its seeds.
                predicted=uneven[f"{plain}{suffix}"] / uneven[f"{balanced}{suffix}"],
                low=1.5 if not suffix else None,
            )
            for suffix, title, _, _ in kinds
        ),
        facts={
            "datasets": {name: data.facts(folder) for name, folder in folders.items()},
            "max / mean seeds of a server": {name: round(value, 2) for name, value in uneven.items()},
            "steps of an epoch": _of_each(surveys, lambda one: one.steps),
            "payload bytes of an epoch": _of_each(surveys, _payload),
        },
    )


def scaling(plan: BenchPlan, size: Size) -> ExperimentPlan:
    """Return D3: one cut into 4 parts for 1, 2 and 4 servers, with what a batch costs on one core."""
    # One cut for all: a rank's share then begins with the training nodes of one part of 4. From all over the
    # graph as many seeds reach more nodes and edges, and one server would have more to do.
    cut = {"metis": PartitionPlan(num_parts=max(_COUNTS), method="metis")}
    folder = data.prepare(size.graph(plan), cut, plan.work)["metis"]
    params = {"data": str(folder), **size.params(plan.seed, max_steps=size.steps)}
    servers = {f"{count} server" + ("s" if count > 1 else ""): count for count in _COUNTS}
    surveys = survey(dict.fromkeys(servers, params), servers)
    # The same for each, so that what is real is not slower on more servers because they share the cores.
    cpus = len(os.sched_getaffinity(0)) / max(_COUNTS)
    on_a_core = measure_compute_cost(params)
    cost = on_a_core.scale(1.0 / min(cpus, 1.0))
    params["simulated"] = asdict(cost)
    edges = _of_each(surveys, lambda survey_: survey_.edges // (survey_.steps * survey_.ranks))
    step_s = {name: cost.forward.seconds(many) + cost.backward.seconds(many) for name, many in edges.items()}
    expected = {name: weak_scaling(step_s[name], survey_, GIGABIT) for name, survey_ in surveys.items()}
    one_server, *more = servers
    shapes = {name: Shape(servers=count, cpus=cpus) for name, count in servers.items()}
    return ExperimentPlan(
        variants=tuple(
            training_variant(name, folder, params, shape=shape, rate=GIGABIT, simulated=_SIMULATED)
            for name, shape in shapes.items()
        ),
        ratios=tuple(
            Ratio(
                name=f"samples per second, {name} / {one_server}",
                over=name,
                under=one_server,
                quantity="samples_per_second",
                predicted=expected[name] / expected[one_server],
                low=0.75 * servers[name],
            )
            for name in more
        ),
        facts={
            "dataset": data.facts(folder),
            "simulated": _SIMULATED,
            "cores of a server": cpus,
            "calibrated on one core, seconds by edges of a batch": asdict(on_a_core),
            "edges of a batch": edges,
            "compute slept for a step, s": {name: round(seconds, 4) for name, seconds in step_s.items()},
            "payload bytes of a step and server": _of_each(
                surveys, lambda survey_: _payload(survey_) // (survey_.steps * survey_.ranks)
            ),
            "steps of an epoch": _of_each(surveys, lambda survey_: survey_.steps),
        },
    )


def weak_scaling(one_step_s: float, found: Survey, rate: Rate) -> float:
    """Return the expected samples per second of a run relative to one server that moves nothing."""
    # A step lasts as long as its compute or its pulls, which are made ahead, and then the gradients.
    bytes_per_s = rate.bits_per_s / 8 * found.ranks * found.steps
    pull_s = (_payload(found) - found.gradient_bytes) / bytes_per_s
    return found.ranks * one_step_s / (max(one_step_s, pull_s) + found.gradient_bytes / bytes_per_s)


def _build(name: str, plan: BenchPlan) -> ExperimentPlan:
    build = {"D1": partition, "D2": balance, "D3": scaling}[name]
    return build(plan, SIZES[name].get(plan.suite, SIZES[name]["quick"]))


BUILDS = {name: partial(_build, name) for name in SIZES}
