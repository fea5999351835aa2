"""Shared preloading and its sampling beside full-graph training, arxiv-like (128 features)."""

from __future__ import annotations

from dglx_dist.bench.records import Claim, Experiment

EXPERIMENT = Experiment(
    id="G3",
    title="shared preloading and its sampling beside full-graph training, arxiv-like (128 features)",
    suites=("papers",),
    claim=Claim(
        paper="GraNNDis (PACT 2024), README of its artifact",
        says=(
            "arxiv, 100 epochs: 15.4 s full-graph, 8.6 s with preloading (1.79x), 11.7 s with expansion-"
            "aware sampling (1.32x)"
        ),
        setting="2 servers of 4 A6000, 10 Gbit/s Ethernet",
    ),
    prediction=(
        "1.6 to 1.8x and 1.3 to 1.6x at phi 0.64 with 1.12 times the compute; 1.4x with cached layer-0 rows"
        " on both sides. A loss where phi is below 1 - 1 / 1.12."
    ),
    how=(
        "2 servers of 2 ranks; the link between servers is limited, the one inside is not. The baseline "
        "exchanges the boundary in every layer, once without and once with layer-0 rows cached (its cheap "
        "optimisation)."
    ),
    strategies=("full_graph", "shared_preload"),
)
