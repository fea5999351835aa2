"""Shared preloading beside full-graph training, products-like (100 features)."""

from __future__ import annotations

from dglx_dist.bench.records import Claim, Experiment

EXPERIMENT = Experiment(
    id="G2",
    title="shared preloading beside full-graph training, products-like (100 features)",
    suites=("papers",),
    claim=Claim(
        paper="GraNNDis (PACT 2024), README of its artifact",
        says=(
            "products, 100 epochs: 79.7 s full-graph, 20.0 s with preloading (3.98x), 18.2 s with "
            "expansion-aware sampling (4.37x)"
        ),
        setting="2 servers of 4 A6000, 10 Gbit/s Ethernet",
    ),
    prediction=(
        "2.5 to 4x at phi 0.87 with 1.30 times the compute; 2.9x with cached layer-0 rows on both sides."
    ),
    how=(
        "2 servers of 2 ranks; the link between servers is limited, the one inside is not. The baseline "
        "exchanges the boundary in every layer, once without and once with layer-0 rows cached (its cheap "
        "optimisation)."
    ),
    strategies=("full_graph", "shared_preload"),
)
