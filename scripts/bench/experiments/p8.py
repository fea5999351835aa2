"""Push-pull without sampling."""

from __future__ import annotations

from scripts.bench.push_pull import HOW, NOTE, Size, plan_of, size_of, trio
from scripts.bench.records import BenchPlan, Claim, Experiment, ExperimentPlan


def build(plan: BenchPlan) -> ExperimentPlan:
    """Train with fan-out 10,25 and with all neighbours."""
    return plan_at(plan, size_of(plan))


def plan_at(plan: BenchPlan, size: Size) -> ExperimentPlan:
    """Return the experiment at ``size``; makes datasets and counts bytes, which takes seconds."""
    sampled = trio("hash, sampled", "sampled", hidden=32)
    seeds = max(size.batch_size // 8, 1)
    whole = trio("hash, all", "all", hidden=32, fanouts=(-1, -1), batch_size=seeds, low=2.0)
    return plan_of(plan, size, [*sampled[0], *whole[0]], [*sampled[1], *whole[1]])


EXPERIMENT = Experiment(
    id="P8",
    title="push-pull without sampling",
    suites=("papers",),
    claim=Claim(
        paper="P3 (OSDI 2021)",
        says=(
            "6.45 to 7.69x faster than DGL with hash partitioning where all neighbours are taken, 2.08 to "
            "5.43x with sampling"
        ),
        setting="4 servers of 4 P100, 10 Gbit/s, 5 graphs, 4 models",
    ),
    prediction=(
        "With all neighbours a batch has many more input rows for each row of layer 1 (in the report), "
        "and the gain is larger than with sampling: at phi 0.8 at most 5x, for computing stays; 1 / ((1 - "
        "phi) + phi beta) from counted bytes."
    ),
    how=HOW + (" Width 32; with fan-out 10,25, and with all neighbours and an eighth of the seeds."),
    strategies=("data_parallel", "push_pull"),
    build=build,
    note=NOTE,
)
