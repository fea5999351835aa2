"""Task fusion and rematerialisation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from scripts.bench.bounded import HOW, Case, Size, plan_of, size_of, slow_workers
from scripts.bench.phase_table import PREDICTED_BYTES
from scripts.bench.records import BenchPlan, Claim, Experiment, ExperimentPlan, Ratio

ON = "all on"
_OFF: dict[str, dict[str, Any]] = {
    ON: {},
    "without fusion": {"fusion": False},
    "without rematerialisation": {"rematerialise": False},
    "without streaming": {"streaming": False},
    "all off": {"fusion": False, "rematerialise": False, "streaming": False},
}
_LOW = {"all off": 1.1}


def build(plan: BenchPlan) -> ExperimentPlan:
    """Train with each of the three options off, with none and with all of them."""
    size = size_of(plan)
    return plan_at(plan, replace(size, hidden=64, workers=4, epochs=4))


def plan_at(plan: BenchPlan, size: Size) -> ExperimentPlan:
    """Return the experiment at ``size``; makes its dataset."""
    cases = [Case(name=name, options={**slow_workers(size), **off}) for name, off in _OFF.items()]
    names = [name for name in _OFF if name != ON]
    ratios = [Ratio(name=f"{name} / on", over=name, under=ON, low=_LOW.get(name)) for name in names]
    made = plan_of(plan, size, cases, ratios)
    foretold = {name: sum(of.values()) for name, of in made.facts[PREDICTED_BYTES].items()}
    of_bytes = [_bytes(name, foretold[name] / foretold[ON]) for name in names]
    return replace(made, ratios=(*made.ratios, *of_bytes))


def _bytes(name: str, predicted: float) -> Ratio:
    """Return a ratio that must be the formula's; what ranks tell each other to agree is in it."""
    return Ratio(
        name=f"bytes, {name} / on",
        over=name,
        under=ON,
        quantity="bytes_outside",
        predicted=predicted,
        low=0.998 * predicted,
        high=1.002 * predicted,
    )


EXPERIMENT = Experiment(
    id="Y4",
    title="task fusion and rematerialisation",
    suites=("papers",),
    claim=Claim(
        paper="Dorylus (OSDI 2021)",
        says="both save traffic between graph servers and workers; no figure is quoted here",
        setting="AWS Lambda",
    ),
    prediction=(
        "1.1 to 1.4x; rematerialisation halves what the vertex task sends up, fusion saves one round trip."
    ),
    how=HOW
    + (
        " Each of fusion, rematerialisation and streaming off, none and all, at hidden width 64 with 8 "
        "intervals and 4 workers for each graph server and log-normal pauses with a median of 40 ms."
    ),
    strategies=("lambda",),
    build=build,
    note=(
        "Bytes by phase are compared to the byte; the ratios of bytes hold, beside them, what ranks tell "
        "each other to agree. A task that is launched again pulls its rows again."
    ),
)
