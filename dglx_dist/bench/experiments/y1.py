"""Bounded asynchrony: epochs to the same accuracy."""

from __future__ import annotations

from typing import Any

from dglx_dist.bench import data
from dglx_dist.bench.bounded import HOW, SERVERS, Case, Size, graph_of, size_of, variant_of
from dglx_dist.bench.coauthors import FILE, cut_coauthors
from dglx_dist.bench.records import BenchPlan, Claim, Experiment, ExperimentPlan, Ratio
from dglx_dist.run.prepare import PartitionPlan

_MODES: dict[str, dict[str, Any]] = {
    "pipe": {"mode": "pipe"},
    "async, S=0": {"mode": "async", "staleness": 0},
    "async, S=1": {"mode": "async", "staleness": 1},
}
_BOUNDS = {"async, S=0": (1.0, 1.15), "async, S=1": (1.0, 1.6)}
_SEEDS = 5
_TARGETS = {"built-in": 0.88, "coauthor_physics": 0.94}
"""Training accuracies: a little below what the synchronous runs end with."""
_RATES = {"built-in": 0.003, "coauthor_physics": 0.01}
"""Of learning: one that takes the built-in graph to its target in tens of epochs, not in a few."""
_EPOCHS, _LATENCY_S = 80, 0.008


def build(plan: BenchPlan) -> ExperimentPlan:
    """Train from several seeds on the built-in graph and, where its file is, on coauthor_physics."""
    return plan_at(plan, size_of(plan))


def plan_at(plan: BenchPlan, size: Size, epochs: int = _EPOCHS) -> ExperimentPlan:
    """Return the experiment at ``size``; makes its datasets."""
    cut = PartitionPlan(num_parts=SERVERS, method="metis")
    folders = {"built-in": data.prepare(graph_of(size, plan.seed), {"metis": cut}, plan.work)["metis"]}
    if (plan.work / FILE).is_file():
        folders["coauthor_physics"] = cut_coauthors(plan.work, cut, size.features)
    turns = tuple({"seed": plan.seed + number} for number in range(max(_SEEDS, plan.repetitions)))
    variants, ratios = [], []
    for graph, folder in folders.items():
        params = {
            "epochs": epochs,
            "warmup": 0,
            "target": _TARGETS[graph],
            "accuracy": True,
            "lr": _RATES[graph],
        }
        for mode, options in _MODES.items():
            options = {"executor": "inline", "latency_s": _LATENCY_S, **options}
            case = Case(name=f"{graph}, {mode}", options=options, params=params, turns=turns)
            variants.append(variant_of(case, folder, size, plan.seed))
        for mode, (low, high) in _BOUNDS.items():
            over, under = f"{graph}, {mode}", f"{graph}, pipe"
            ratios.append(
                Ratio(
                    name=f"R, {over}", over=over, under=under, quantity="epochs_to_target", low=low, high=high
                )
            )
    facts = {"datasets": {graph: data.facts(folder) for graph, folder in folders.items()}}
    return ExperimentPlan(variants=tuple(variants), ratios=tuple(ratios), facts=facts)


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
        "1.0 to 1.15 at staleness 0, 1.05 to 1.6 at staleness 1; the same bytes per epoch. Independent of "
        "the hardware."
    ),
    how=HOW
    + (
        " Workers are threads with a pause. Each repetition has another seed of the first weights, equal "
        "for all modes. Epochs are counted to a training accuracy, as the forward passes of the epoch had "
        "it: 0.88 on the built-in graph, 0.94 on coauthor_physics, there with 128 random projections of its "
        "features and a random 66 % of the nodes to train on."
    ),
    strategies=("lambda",),
    build=build,
    note=(
        "The training accuracy of an asynchronous epoch is that of values partly one epoch old. Which "
        "values are old depends on pauses and threads."
    ),
)
