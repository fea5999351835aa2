"""Push-pull with 2, 3 and 4 layers."""

from __future__ import annotations

from dataclasses import replace

from scripts.bench.push_pull import HOW, NOTE, Case, Compared, Size, plan_of, size_of, trio
from scripts.bench.records import BenchPlan, Claim, Experiment, ExperimentPlan

_FANOUTS = {2: (10, 25), 3: (10, 5, 5), 4: (10, 5, 3, 2)}


def build(plan: BenchPlan) -> ExperimentPlan:
    """Train GraphSAGE of 2, 3 and 4 layers."""
    return plan_at(plan, replace(size_of(plan), steps=max(size_of(plan).steps // 2, 1)))


def plan_at(plan: BenchPlan, size: Size) -> ExperimentPlan:
    """Return the experiment at ``size``; makes datasets and counts bytes, which takes seconds."""
    cases: list[Case] = []
    compared: list[Compared] = []
    for layers, fanouts in _FANOUTS.items():
        of_layers = f"{layers} layers"
        more, bounded = trio(f"hash, {of_layers}", of_layers, hidden=32, fanouts=fanouts)
        cases += more
        compared += bounded
    return plan_of(plan, size, cases, compared)


EXPERIMENT = Experiment(
    id="P7",
    title="push-pull with 2, 3 and 4 layers",
    suites=("papers",),
    claim=Claim(
        paper="P3 (OSDI 2021)",
        says=("the gain grows with the layers, up to 6.07x"),
        setting="4 servers of 4 P100, 10 Gbit/s, hidden width 32",
    ),
    prediction=(
        "Bytes and times by the formulas of docs/strategies/push_pull.md from counted blocks: the "
        "deeper, the nearer come the input rows to the rows of layer 1 on a graph this small, so that "
        "here the gain shrinks with the layers, where on graphs that a batch never covers it grows."
    ),
    how=HOW
    + (
        " Width 32. Fan-outs 10,25; 10,5,5; 10,5,3,2, input-most first, so that a batch reaches about as far."
    ),
    strategies=("data_parallel", "push_pull"),
    build=build,
    note=NOTE,
)
