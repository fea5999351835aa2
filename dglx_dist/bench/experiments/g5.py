"""Servers cut at random in place of METIS."""

from __future__ import annotations

from dglx_dist.bench.records import Claim, Experiment

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
        "2 servers of 2 ranks; the link between servers is limited, the one inside is not. The baseline "
        "exchanges the boundary in every layer, once without and once with layer-0 rows cached (its cheap "
        "optimisation). The parts of servers are drawn at random."
    ),
    strategies=("full_graph", "shared_preload"),
)
