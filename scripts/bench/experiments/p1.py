"""Push-pull without its pipeline beside hashed data parallelism, by hidden width."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from scripts.bench.push_pull import (
    GIGABIT,
    HOW,
    NOTE,
    Case,
    Compared,
    Size,
    matched,
    plan_of,
    push_pull,
    size_of,
)
from scripts.bench.push_pull_stock import STOCK, stock
from scripts.bench.records import BenchPlan, Claim, Experiment, ExperimentPlan, Ratio

_WIDTHS = (16, 32, 64, 100)
_BOUNDS = {16: (2.4, None), 32: (1.8, None), 64: (1.2, None), 100: (None, 1.0)}
"""Of the ratio of times at each width: 2.4 to 3.0, 1.8 to 2.1, 1.2 to 1.4 and 0.9 are predicted."""


def build(plan: BenchPlan) -> ExperimentPlan:
    """Train at four widths on the hash cut, at the rate of each and at 1 Gbit/s; and on 2 servers."""
    return plan_at(plan, size_of(plan))


def plan_at(plan: BenchPlan, size: Size) -> ExperimentPlan:
    """Return the experiment at ``size``; makes datasets and counts bytes, which takes seconds."""
    cases: list[Case] = []
    compared: list[Compared] = []
    for width in _WIDTHS:
        low, high = _BOUNDS[width]
        hashed, ours = f"hash, {width}", f"push_pull, {width}"
        cases += _pair(hashed, ours, width)
        compared += [
            Compared(over=hashed, under=ours, low=low, high=high),
            Compared(over=ours, under=hashed, quantity="bytes_outside", name=f"bytes, {ours} / {hashed}"),
        ]
    cases.append(
        Case(name="push_pull, 16, resampled", rate=matched("hash, 16"), **push_pull(structure="resample"))
    )
    compared.append(Compared(over="hash, 16", under="push_pull, 16, resampled"))
    for width in (_WIDTHS[0], _WIDTHS[-1]):
        hashed, ours = f"hash, {width}, {GIGABIT}", f"push_pull, {width}, {GIGABIT}"
        cases += [
            Case(name=hashed, rate=GIGABIT, hidden=width),
            Case(name=ours, rate=GIGABIT, hidden=width, **push_pull()),
        ]
        compared.append(Compared(over=hashed, under=ours))
    apart = "hash, 16, structure apart", "push_pull, 16, structure apart"
    cases += _pair(*apart, 16, structure="partitioned")
    compared.append(Compared(over=apart[0], under=apart[1]))
    two = "hash, 16, 2 servers", "push_pull, 16, 2 servers"
    cases += _pair(*two, 16, servers=2)
    compared.append(Compared(over=two[0], under=two[1]))
    crews = plan_of(plan, size, cases, compared)
    beside = Ratio(name="stock DistDGL, hash, 16 / push_pull, 16", over=STOCK, under="push_pull, 16")
    return replace(
        crews,
        variants=(*crews.variants, stock(plan, size, rate=matched("hash, 16"))),
        ratios=(*crews.ratios, beside),
    )


def _pair(hashed: str, ours: str, width: int, **more: Any) -> list[Case]:
    rate = matched(hashed)
    return [
        Case(name=hashed, rate=rate, hidden=width, **more),
        Case(name=ours, rate=rate, hidden=width, **push_pull(), **more),
    ]


EXPERIMENT = Experiment(
    id="P1",
    title="push-pull without its pipeline beside hashed data parallelism, by hidden width",
    suites=("papers",),
    claim=Claim(
        paper="P3 (OSDI 2021)",
        says=(
            "2.08 to 5.43x faster than DGL with hash partitioning and sampling; the gain shrinks with the "
            "hidden width and turns into a loss"
        ),
        setting="4 servers of 4 P100, 10 Gbit/s, 5 graphs, 4 models",
    ),
    prediction=(
        "Bytes 0.17, 0.34, 0.67 and 1.05 of the baseline's at hidden widths 16, 32, 64 and 100 (+0.10 for "
        "int32 structure). Time at phi 0.8: 2.4 to 3.0x, 1.8 to 2.1x, 1.2 to 1.4x, 0.9x; the sign changes "
        "near a width of 86 to 95."
    ),
    how=(
        HOW
        + (
            " Hidden widths 16, 32, 64 and 100, each at its own rate; 16 also with every part drawing all "
            "blocks itself in place of being sent their structure, with the graph's structure kept where the "
            "nodes are, and on 2 servers; 16 and 100 also at 1 Gbit/s. Stock DistDGL (DGL 1.1.3) is launched "
            "anew for every repetition, on the same hash cut at the rate of width 16."
        )
    ),
    strategies=("data_parallel", "push_pull"),
    build=build,
    note=NOTE,
)
