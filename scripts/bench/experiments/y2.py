"""Bounded asynchrony: time per epoch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from scripts.bench.bounded import HOW, Case, Size, plan_of, size_of, slow_workers
from scripts.bench.records import BenchPlan, Claim, Experiment, ExperimentPlan, Ratio

_LIGHT: dict[str, Any] = {"nodes": 8000, "features": 64, "latency_s": 0.06}
"""So that pauses, which vary, take most of an epoch, and computing on shared cores little."""
_MODES: dict[str, dict[str, Any]] = {
    "pipe": {"mode": "pipe"},
    "async, S=0": {"mode": "async", "staleness": 0},
    "async, S=1": {"mode": "async", "staleness": 1},
}


def build(plan: BenchPlan) -> ExperimentPlan:
    """Train with pauses that vary, and with pauses that do not."""
    return plan_at(plan, replace(size_of(plan), **_LIGHT))


def plan_at(plan: BenchPlan, size: Size) -> ExperimentPlan:
    """Return the experiment at ``size``; makes its dataset."""
    cases, ratios = [], []
    for sigma, words in ((size.latency_sigma, "jitter"), (0.0, "no jitter")):
        for mode, options in _MODES.items():
            slow = slow_workers(replace(size, latency_sigma=sigma))
            cases.append(Case(name=f"{mode}, {words}", options={**slow, **options}))
        high = 0.9 if sigma else None
        ratios += [
            Ratio(name=f"{mode} / pipe, {words}", over=f"{mode}, {words}", under=f"pipe, {words}", high=high)
            for mode in ("async, S=0", "async, S=1")
        ]
    return plan_of(plan, size, cases, ratios)


EXPERIMENT = Experiment(
    id="Y2",
    title="bounded asynchrony: time per epoch",
    suites=("papers",),
    claim=Claim(
        paper="Dorylus (OSDI 2021)",
        says="async epochs are about 15 % shorter than those of the pipeline with a barrier",
        setting="AWS Lambda",
    ),
    prediction="0.80 to 0.90 of the pipeline's time; the gain vanishes without jitter of the workers.",
    how=HOW
    + (
        " 8 intervals and 8 workers for each graph server, so that all tasks of a phase can be under way at "
        "once; pauses with a median of 60 ms. All three modes with log-normal pauses of sigma 0.5, drawn by "
        "the task and so equal in all modes, and again with all pauses alike."
    ),
    strategies=("lambda",),
    build=build,
    note=(
        "What a barrier costs goes with the slowest of the tasks before it, so it grows with the number of "
        "intervals that are under way at once."
    ),
)
