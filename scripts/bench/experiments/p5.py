"""Push-pull with cached column groups (4 to 2)."""

from __future__ import annotations

from scripts.bench.push_pull import HOW, NOTE, Case, Compared, Size, matched, plan_of, push_pull, size_of
from scripts.bench.records import BenchPlan, Claim, Experiment, ExperimentPlan


def build(plan: BenchPlan) -> ExperimentPlan:
    """Train with all columns in groups of 4, 2 and 1 servers."""
    return plan_at(plan, size_of(plan))


def plan_at(plan: BenchPlan, size: Size) -> ExperimentPlan:
    """Return the experiment at ``size``; makes datasets and counts bytes, which takes seconds."""
    rate = matched("hash")
    cases = [Case(name="hash", rate=rate)]
    cases += [
        Case(name=f"groups of {members}", rate=rate, **push_pull(group_size=members)) for members in (4, 2, 1)
    ]
    compared = [
        Compared(over="groups of 4", under="groups of 2", low=1.3),
        Compared(over="groups of 4", under="groups of 1"),
        Compared(over="hash", under="groups of 4"),
        Compared(over="hash", under="groups of 2"),
        Compared(
            over="groups of 2", under="groups of 4", quantity="bytes_outside", name="bytes, groups of 2 / 4"
        ),
    ]
    return plan_of(plan, size, cases, compared)


EXPERIMENT = Experiment(
    id="P5",
    title="push-pull with cached column groups (4 to 2)",
    suites=("papers",),
    claim=Claim(
        paper="P3 (OSDI 2021)",
        says="caching gains up to 1.7x (3.6x to 5.23x over DGL)",
        setting="4 servers of 4 P100, 10 Gbit/s",
    ),
    prediction=(
        "Bytes of the exchange (2 - 1) / (4 - 1) = 0.33 of P1's, 1.3 to 1.7x faster than P1, for twice the "
        "memory."
    ),
    how=(HOW + " Width 16; all columns within groups of 4, 2 and 1 servers."),
    strategies=("data_parallel", "push_pull"),
    build=build,
    note=NOTE,
)
