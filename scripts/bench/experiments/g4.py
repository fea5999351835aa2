"""Deep models: 3 and 28 layers."""

from __future__ import annotations

from scripts.bench.full_graph import (
    BASE,
    BASE_PP,
    COOPERATIVE,
    EAS,
    GIGABIT,
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

_SHALLOW = 3
_PHI = 0.8
"""The paper does not say it of deep models; that of its arxiv and products lies on both sides."""


def build(plan: BenchPlan) -> ExperimentPlan:
    """Train ResGCN+ of 3 and 28 layers, each at its own rate."""
    return plan_at(plan, size_of(plan))


def plan_at(plan: BenchPlan, size: Size) -> ExperimentPlan:
    """Return the experiment at ``size``; makes datasets and counts bytes, which takes seconds."""
    settings = [_setting(layers) for layers in (_SHALLOW, size.deep_layers)]
    bounds = (
        Bound(over=BASE, under=PRELOAD),
        Bound(over=BASE_PP, under=PRELOAD_PP, low=2.0, only=settings[-1].label),
        Bound(over=BASE_PP, under=EAS),
        Bound(over=BASE_PP, under=COOPERATIVE),
    )
    return plan_of(plan, size, settings, bounds)


def _setting(layers: int) -> Setting:
    return Setting(
        phi=_PHI,
        features=128,
        scale=1.25,
        degree=10.0,
        layers=layers,
        model="resgcn",
        # What deep ones cost differs by their bytes and work alone, and each takes long on two cores.
        curve=layers == _SHALLOW,
        raw=(GIGABIT,) if layers != _SHALLOW else (),
        epochs=1,
        label=f"{layers} layers",
    )


EXPERIMENT = Experiment(
    id="G4",
    title="deep models: 3 and 28 layers",
    suites=("papers",),
    claim=Claim(
        paper="GraNNDis, preprint",
        says=(
            "preloading over full-graph training at 56 layers: arxiv 1.65x over PCIe and 1.80x over NVLink,"
            " products 0.86x and 1.77x; with expansion-aware sampling at 3, 28 and 56 layers over PCIe: "
            "arxiv 1.64x, 1.84x, 1.89x, products 1.63x, 1.23x, 1.23x, reddit 1.66x, 1.95x, 1.59x"
        ),
        setting="4 servers of 4 A6000, InfiniBand of 32 Gbit/s",
    ),
    prediction=(
        "2 to 3x: full-graph bytes grow about linearly in the layers, preloading's stay (deep models in the"
        " later paper: 2.91x)."
    ),
    how=(
        HOW
        + (
            " ResGCN+ of width 64 with 3 and 28 layers, mean degree 10, each at its own rate. Behind its "
            "encoder the rows of layer 1 are as wide as all others."
        )
    ),
    strategies=("full_graph", "shared_preload", "cooperative"),
    build=build,
    note=NOTE,
)
