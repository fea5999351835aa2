"""Growing features: 16 to 512 columns at hidden width 32."""

from __future__ import annotations

from dataclasses import replace

from scripts.bench.push_pull import HOW, NOTE, Case, Compared, Size, matched, plan_of, push_pull, size_of
from scripts.bench.records import BenchPlan, Claim, Experiment, ExperimentPlan

_COLUMNS = (16, 64, 128, 512)
_HIDDEN = 32
_AT = 128
"""The columns at which the baseline has phi 0.8; the rate is the same for all."""


def build(plan: BenchPlan) -> ExperimentPlan:
    """Train on the same graph with more and more columns of features, at one rate."""
    return plan_at(plan, replace(size_of(plan), steps=max(size_of(plan).steps // 2, 1)))


def plan_at(plan: BenchPlan, size: Size) -> ExperimentPlan:
    """Return the experiment at ``size``; makes datasets and counts bytes, which takes seconds."""
    rate = matched(f"hash, F {_AT}")
    cases: list[Case] = []
    compared: list[Compared] = []
    for columns in _COLUMNS:
        hashed, ours = f"hash, F {columns}", f"push_pull, F {columns}"
        cases += [
            Case(name=hashed, rate=rate, features=columns, hidden=_HIDDEN),
            Case(name=ours, rate=rate, features=columns, hidden=_HIDDEN, **push_pull()),
        ]
        compared.append(Compared(over=hashed, under=ours, low=2.0 if columns == _COLUMNS[-1] else None))
    least, most = _COLUMNS[0], _COLUMNS[-1]
    compared += [
        Compared(over=f"push_pull, F {most}", under=f"push_pull, F {least}", high=2.0),
        Compared(over=f"hash, F {most}", under=f"hash, F {least}"),
        Compared(
            over=f"push_pull, F {most}", under=f"push_pull, F {least}", quantity="bytes_outside", high=1.001,
            name=f"bytes, push_pull, F {most} / F {least}",
        ),
    ]  # fmt: skip
    return plan_of(plan, size, cases, compared)


EXPERIMENT = Experiment(
    id="P4",
    title="growing features: 16 to 512 columns at hidden width 32",
    suites=("papers",),
    claim=Claim(
        paper="P3 (OSDI 2021)",
        says="P3's epoch only doubles from 16 to 512 features; its gain grows to 4.77x",
        setting="4 servers of 4 P100, 10 Gbit/s",
    ),
    prediction=(
        "The baseline's feature bytes grow 32 times, push-pull's stay; its epoch at most doubles while the "
        "baseline's grows many times over."
    ),
    how=(
        HOW
        + " Width 32; 16, 64, 128 and 512 columns at the rate that gives phi 0.8 at 128, half as many steps."
    ),
    strategies=("data_parallel", "push_pull"),
    build=build,
    note=NOTE,
)
