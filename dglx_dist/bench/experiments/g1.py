"""Shared preloading beside full-graph training, reddit-like (602 features)."""

from __future__ import annotations

from dglx_dist.bench.records import Claim, Experiment

EXPERIMENT = Experiment(
    id="G1",
    title="shared preloading beside full-graph training, reddit-like (602 features)",
    suites=("papers",),
    claim=Claim(
        paper="GraNNDis (PACT 2024), README of its artifact",
        says=(
            "reddit, 100 epochs: 449 s full-graph, 87.6 s with preloading (5.13x), 75.2 s with expansion-"
            "aware sampling (5.98x)"
        ),
        setting="2 servers of 4 A6000, 10 Gbit/s Ethernet",
    ),
    prediction=(
        "3 to 5x at phi 0.94 over the plain baseline; over the baseline with cached layer-0 rows 1.15x, and"
        " 2.2x with that cache on both sides at the same rate. No activations cross between servers; a "
        "nearly free link inside bounds the ratio by 11.8x."
    ),
    how=(
        "2 servers of 2 ranks; the link between servers is limited, the one inside is not. The baseline "
        "exchanges the boundary in every layer, once without and once with layer-0 rows cached (its cheap "
        "optimisation). 2 convolutions and a linear layer, 602 features, hidden width 64."
    ),
    strategies=("full_graph", "shared_preload"),
)
