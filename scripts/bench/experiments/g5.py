"""Servers cut at random in place of METIS."""

from __future__ import annotations

from scripts.bench.full_graph import (
    BASE,
    BASE_PP,
    EAS,
    HOW,
    NOTE,
    PRELOAD,
    PRELOAD_PP,
    Bound,
    Setting,
    Size,
    plan_of,
    size_of,
)
from scripts.bench.records import BenchPlan, Claim, Experiment, ExperimentPlan

_PHI = 0.87
_CUTS = ("random", "metis")
_BOUNDS = (
    Bound(over=BASE, under=EAS, low=1.65),
    Bound(over=BASE, under=PRELOAD),
    Bound(over=BASE_PP, under=PRELOAD_PP),
)


def build(plan: BenchPlan) -> ExperimentPlan:
    """Train on the random and on the METIS cut, each at its own rate."""
    return plan_at(plan, size_of(plan))


def plan_at(plan: BenchPlan, size: Size) -> ExperimentPlan:
    """Return the experiment at ``size``; makes datasets and counts bytes, which takes seconds."""
    settings = [
        Setting(phi=_PHI, features=100, layers=3, cut=cut, label=cut, raw=(), curve=False) for cut in _CUTS
    ]
    return plan_of(plan, size, settings, _BOUNDS)


EXPERIMENT = Experiment(
    id="G5",
    title="servers cut at random in place of METIS",
    suites=("papers",),
    claim=Claim(
        paper="GraNNDis, preprint",
        says=(
            "expansion-aware sampling 1.65x, 2.85x and 2.75x faster than full-graph training at 3, 28 and "
            "56 layers"
        ),
        setting="4 servers of 4 A6000, random partition",
    ),
    prediction=(
        "The boundary between servers grows, which is measured, and full-graph training's bytes with it: "
        "1.65 to 2.85x."
    ),
    how=(
        HOW
        + (
            " GraphSAGE of 3 convolutions, 100 features, hidden width 64, on servers that are cut at "
            "random and by METIS."
        )
    ),
    strategies=("full_graph", "shared_preload", "cooperative"),
    build=build,
    note=NOTE,
)
