"""Bounded asynchrony: epochs to the same accuracy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dglx_dist.prepare import PartitionPlan
from scripts.bench import data
from scripts.bench.bounded import SERVERS, SETTING, Case, Size, graph_of, size_of, variant_of
from scripts.bench.coauthors import FILE, cut_coauthors
from scripts.bench.records import BenchPlan, Claim, Experiment, ExperimentPlan, Ratio, Shape

_PIPE = "pipe"
_MODES: dict[str, dict[str, Any]] = {
    _PIPE: {"mode": "pipe"},
    "async, S=0": {"mode": "async", "staleness": 0},
    "async, S=1": {"mode": "async", "staleness": 1},
}
_BOUNDS = {"async, S=0": (1.0, 1.15), "async, S=1": (1.0, 1.6)}
_SEEDS = 5
_SMALL: dict[str, Any] = {"nodes": 8000, "features": 64, "latency_s": 0.004}
"""Epochs are counted, not timed: short ones will do."""
_SHAPE = Shape(servers=1, ranks_per_server=SERVERS)
"""Both graph servers on one emulated machine: no link is part of the question."""


@dataclass(frozen=True, kw_only=True)
class _Goal:
    """What is trained for on one graph."""

    target: float
    """Training accuracy that the synchronous runs come to in about half of the epochs."""
    lr: float
    """Of learning: one that takes tens of epochs to the target, so that one epoch is a few percent."""
    epochs: int


_GOALS: Mapping[str, _Goal] = {
    "built-in": _Goal(target=0.88, lr=0.003, epochs=80),
    "coauthor_physics": _Goal(target=0.9, lr=0.02, epochs=80),
}


def build(plan: BenchPlan) -> ExperimentPlan:
    """Train from several seeds on the built-in graph and, where its file is, on coauthor_physics."""
    return plan_at(plan, replace(size_of(plan), **_SMALL))


def plan_at(plan: BenchPlan, size: Size) -> ExperimentPlan:
    """Return the experiment at ``size``; makes its datasets."""
    folders = _folders(plan, size)
    turns = tuple({"seed": plan.seed + number} for number in range(max(_SEEDS, plan.repetitions)))
    variants = [
        replace(variant_of(_case(graph, mode, size, turns), folder, size, plan.seed), shape=_SHAPE)
        for graph, folder in folders.items()
        for mode in _MODES
    ]
    ratios = [_ratio(graph, mode) for graph in folders for mode in _BOUNDS]
    facts = {"datasets": {graph: data.facts(folder) for graph, folder in folders.items()}}
    return ExperimentPlan(variants=tuple(variants), ratios=tuple(ratios), facts=facts)


def _folders(plan: BenchPlan, size: Size) -> dict[str, Path]:
    cut = PartitionPlan(num_parts=SERVERS, method="metis")
    folders = {"built-in": data.prepare(graph_of(size, plan.seed), {"metis": cut}, plan.work)["metis"]}
    if (plan.work / FILE).is_file():
        folders["coauthor_physics"] = cut_coauthors(plan.work, cut, size.features)
    return folders


def _case(graph: str, mode: str, size: Size, turns: tuple[dict[str, Any], ...]) -> Case:
    goal = _GOALS[graph]
    return Case(
        name=f"{graph}, {mode}",
        options={"executor": "inline", "latency_s": size.latency_s, **_MODES[mode]},
        params={
            "epochs": goal.epochs,
            "warmup": 0,
            "target": goal.target,
            "accuracy": True,
            "lr": goal.lr,
        },
        turns=turns,
        simulated="workers are threads, their latency is slept",
    )


def _ratio(graph: str, mode: str) -> Ratio:
    low, high = _BOUNDS[mode]
    over, under = f"{graph}, {mode}", f"{graph}, {_PIPE}"
    return Ratio(name=f"R, {over}", over=over, under=under, quantity="epochs_to_target", low=low, high=high)


EXPERIMENT = Experiment(
    id="Y1",
    title="bounded asynchrony: epochs to the same accuracy",
    suites=("papers",),
    claim=Claim(
        paper="Dorylus (OSDI 2021)",
        says=(
            "epochs of async over pipe: at staleness 0 1.00, 1.09 and 1.14, at staleness 1 1.07, 1.57 and "
            "1.58"
        ),
        setting="reddit-small, amazon, reddit-large on AWS Lambda",
    ),
    prediction=(
        "1.0 to 1.15 at staleness 0, 1.0 to 1.6 at staleness 1; the same bytes per epoch. Independent of "
        "the hardware."
    ),
    how=SETTING
    + (
        " 8 intervals for each graph server; workers are its threads, with a log-normal pause of each task. "
        "Each repetition has another seed of the first weights, equal for all modes. Epochs are counted to "
        "a training accuracy, as the forward passes of the epoch had it, which the synchronous runs come to "
        f"in about half of the epochs: {_GOALS['built-in'].target:g} on the built-in graph, "
        f"{_GOALS['coauthor_physics'].target:g} on coauthor_physics, there with 64 random projections of "
        "its features and a random 66 % of the nodes to train on. Where a seed does not come there, there "
        "is no R."
    ),
    strategies=("lambda",),
    build=build,
    note=(
        "The training accuracy of an asynchronous epoch is that of values partly one epoch old. Which "
        "values are old depends on pauses and threads, so an R is known to an epoch or two."
    ),
)
