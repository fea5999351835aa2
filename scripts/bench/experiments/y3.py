"""Tasks one after another beside the pipeline."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from scripts.bench.bounded import HOW, Case, Size, plan_of, size_of, slow_workers
from scripts.bench.records import BenchPlan, Claim, Experiment, ExperimentPlan, Ratio

_BALANCED: dict[str, Any] = {
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
"""So that a graph server computes about as long as its worker waits, and all else is small beside it: many
edges, few rows, short tasks, and no more processes that compute than cores. A second worker halves the waits
and lengthens what fills and empties the pipeline."""


def build(plan: BenchPlan) -> ExperimentPlan:
    """Train with one phase at a time, and with the pipeline."""
    return plan_at(plan, replace(size_of(plan), **_BALANCED))


def plan_at(plan: BenchPlan, size: Size) -> ExperimentPlan:
    """Return the experiment at ``size``; makes its dataset."""
    cases = [
        Case(
            name=mode,
            options={**slow_workers(size), "mode": mode.replace("-", "_")},
            params={"warmup": 1},
        )
        for mode in ("no-pipe", "pipe")
    ]
    ratios = [
        Ratio(name="no-pipe / pipe", over="no-pipe", under="pipe", low=1.5),
        Ratio(
            name="bytes, no-pipe / pipe",
            over="no-pipe",
            under="pipe",
            quantity="bytes_outside",
            predicted=1.0,
            low=0.999,
            high=1.001,
        ),
    ]
    return plan_of(plan, size, cases, ratios)


EXPERIMENT = Experiment(
    id="Y3",
    title="tasks one after another beside the pipeline",
    suites=("papers",),
    claim=Claim(
        paper="Dorylus (OSDI 2021)",
        says="without the pipeline 1.9x slower",
        setting="amazon on AWS Lambda",
    ),
    prediction="1.5 to 1.9x: the overlap is real on few cores too, since waiting for workers costs none.",
    how=HOW
    + (
        f" Mean in-degree {_BALANCED['degree']:g}, widths {_BALANCED['features']} and {_BALANCED['hidden']}, "
        f"{_BALANCED['intervals']} intervals, {_BALANCED['workers']} worker at a time for each graph server, "
        f"all pauses {1e3 * _BALANCED['latency_s']:g} ms: a graph server computes about as long in a phase "
        "as its worker waits, most of it for rows at 200 Mbit/s."
    ),
    strategies=("lambda",),
    build=build,
    note=(
        "The gain is largest where graph servers and workers take equally long, 2x but for the filling of "
        "the pipeline and for what workers compute: that is on the cores of their graph server here, where "
        "functions have their own, and overlaps with nothing. Other sizes gave less or scattered more: two "
        "workers 1.36x, 14 000 nodes of degree 1700 1.24x and 1.55x."
    ),
)
