"""Deep models: 3 to 28 layers."""

from __future__ import annotations

from dglx_dist.bench.records import Claim, Experiment

EXPERIMENT = Experiment(
    id="G4",
    title="deep models: 3 to 28 layers",
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
        "ResGCN+ of width 64 on a graph of 10 to 20 thousand nodes, 3 to 28 layers; 2 servers of 2 ranks, "
        "the link between servers limited."
    ),
    strategies=("full_graph", "shared_preload"),
)
