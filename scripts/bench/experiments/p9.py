"""Push-pull by model: GraphSAGE, GCN, SGC and GAT."""

from __future__ import annotations

from dataclasses import replace

from scripts.bench.push_pull import HOW, NOTE, Case, Compared, Size, plan_of, size_of, trio
from scripts.bench.records import BenchPlan, Claim, Experiment, ExperimentPlan


def build(plan: BenchPlan) -> ExperimentPlan:
    """Train four models."""
    return plan_at(plan, replace(size_of(plan), steps=max(size_of(plan).steps // 2, 1)))


def plan_at(plan: BenchPlan, size: Size) -> ExperimentPlan:
    """Return the experiment at ``size``; makes datasets and counts bytes, which takes seconds."""
    cases: list[Case] = []
    compared: list[Compared] = []
    for name, model, heads in (
        ("sage", "sage", 1),
        ("gcn", "gcn", 1),
        ("sgc", "sgc", 1),
        ("gat, 8 heads", "gat", 8),
        ("gat, 2 heads", "gat", 2),
    ):
        more, bounded = trio(f"hash, {name}", name, hidden=32, model=model, heads=heads)
        cases += more
        compared += bounded
    return plan_of(plan, size, cases, compared)


EXPERIMENT = Experiment(
    id="P9",
    title="push-pull by model: GraphSAGE, GCN, SGC and GAT",
    suites=("papers",),
    claim=Claim(
        paper="P3 (OSDI 2021)",
        says=(
            "2.08 to 5.43x faster than DGL with hash partitioning and sampling, over GraphSAGE, GCN, SGC and "
            "GAT"
        ),
        setting="4 servers of 4 P100, 10 Gbit/s, hidden width 32, GAT of 8 heads",
    ),
    prediction=(
        "GCN moves what GraphSAGE does. SGC maps to the classes before it aggregates, so its sums are as "
        "narrow as these and its gain is larger. GAT adds 2 (L0 + D1) K logits each way: with 8 heads "
        "more than the 32 columns of its sums, so that it moves more than data parallelism and loses "
        "(formulas of docs/strategies/push_pull.md, in the report)."
    ),
    how=HOW
    + (
        " Width 32; GCN takes the mean over the drawn neighbours, GAT has 8 heads of 4 columns, and again "
        "2 of 16."
    ),
    strategies=("data_parallel", "push_pull"),
    build=build,
    note=NOTE,
)
