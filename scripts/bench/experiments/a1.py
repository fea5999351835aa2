"""The automatic choice beside the fastest of all ways to train, over a grid."""

from __future__ import annotations

from scripts.bench.records import BenchPlan, Claim, Experiment, ExperimentPlan
from scripts.bench.regret import SIZES, grid_of, plan_of


def build(plan: BenchPlan) -> ExperimentPlan:
    """Foretell every way in every cell, and have all of them measured."""
    return plan_of(plan, grid_of(SIZES.get(plan.suite, SIZES["papers"])))


EXPERIMENT = Experiment(
    id="A1",
    title="the automatic choice beside the fastest of all ways, over a grid",
    suites=("papers",),
    claim=Claim(
        paper="this package",
        says="what `dglx plan` chooses takes at most 1.15 x the fastest way in the median, 1.5 x at worst",
        setting="no published system chooses among all these ways to train",
    ),
    prediction=(
        "Regret, seconds of the chosen way by those of the fastest that was measured: at most 1.15 in the "
        "median of all cells and 1.5 in the worst. Predicted seconds within 25 % in the median, bytes "
        "exactly."
    ),
    how=(
        "2 servers of one rank, each with half of this machine's cores. Cells: mini-batches of 2 layers, "
        "whole graphs of 2 layers and of 14; hidden widths 8 and 256 (16 and 64 of 14 layers); random and "
        "METIS cut; 100 Mbit/s, 1 and 10 Gbit/s. For each graph, model and cut a dry run in a process of its "
        "own counts and times what `dglx plan` does; every exact way that fits is then trained at every "
        "bandwidth: an epoch to warm up, two that are measured."
    ),
    strategies=("data_parallel", "push_pull", "full_graph", "shared_preload", "cooperative"),
    build=build,
    note=(
        "Strategy `lambda` is left out, whose workers would share the cores of their servers; so are caches, "
        "of which jobs of the bench know nothing. `scripts/bench/regret.py` measures a larger grid; the "
        "result of 2026-11-22 is of it, with three repetitions."
    ),
)
