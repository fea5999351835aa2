"""Value: performance per dollar beside CPU servers alone."""

from __future__ import annotations

from typing import Any

from dglx_dist.serverless.cost import prices
from scripts.bench.bounded import EMULATED, HOW, Case, Size, plan_of, size_of, slow_workers
from scripts.bench.records import BenchPlan, Claim, Experiment, ExperimentPlan, Ratio

ALONE = "servers alone"
_SIMULATED = EMULATED + "; dollars are those of a price table, nothing was paid"
_MODES: dict[str, dict[str, Any]] = {
    "functions, pipe": {"mode": "pipe"},
    "functions, async, S=0": {"mode": "async", "staleness": 0},
}


def build(plan: BenchPlan) -> ExperimentPlan:
    """Train with functions, and with all tensor work on the graph servers."""
    return plan_at(plan, size_of(plan))


def plan_at(plan: BenchPlan, size: Size) -> ExperimentPlan:
    """Return the experiment at ``size``; makes its dataset."""
    cases = [Case(name=ALONE, options={"executor": "inline"}, simulated=_SIMULATED, counted=False)]
    ratios = []
    for name, options in _MODES.items():
        cases.append(Case(name=name, options={**slow_workers(size), **options}, simulated=_SIMULATED))
        ratios += [
            Ratio(name=f"value, {name} / alone", over=name, under=ALONE, quantity="value", low=1.11),
            Ratio(name=f"time, alone / {name}", over=ALONE, under=name),
            Ratio(name=f"dollars, {name} / alone", over=name, under=ALONE, quantity="dollars"),
        ]
    return plan_of(plan, size, cases, ratios, prices=_prices())


def _prices() -> str:
    # Only here: it imports torch, which takes seconds, also where experiments are only listed.
    from dglx_dist.strategies.serverless.options import DEFAULT_SERVER

    table = prices()
    return f"{table.name} of {table.date}, a graph server is a {DEFAULT_SERVER}"


EXPERIMENT = Experiment(
    id="Y5",
    title="value: performance per dollar beside CPU servers alone",
    suites=("papers",),
    claim=Claim(
        paper="Dorylus (OSDI 2021)",
        says=(
            "1.17 to 2.56x faster and 1.11 to 2.76x the value of CPU servers alone; friendster 1133 s for "
            "13.8 $ against 1991 s for 15.3 $"
        ),
        setting="graph servers and Lambda on AWS, table 4",
    ),
    prediction=(
        "1.1 to 2.8x the value, by simulation from a price table only; to be labelled simulated cost."
    ),
    how=HOW
    + (
        " 8 intervals and 8 workers for each graph server, log-normal pauses with a median of 40 ms. Seconds "
        "are measured, calls and their durations counted, dollars those of a table of prices."
    ),
    strategies=("lambda",),
    build=build,
    note=(
        "Simulated cost. Servers alone compute on all cores that functions share with them here, where in a "
        "cloud functions bring cores of their own; so the time is no cloud's, and neither is the value."
    ),
)
