"""Push-pull beside data parallelism on a METIS partition."""

from __future__ import annotations

from scripts.bench.push_pull import HOW, NOTE, Case, Compared, Size, matched, plan_of, push_pull, size_of
from scripts.bench.records import BenchPlan, Claim, Experiment, ExperimentPlan

_WIDTHS = (16, 32)


def build(plan: BenchPlan) -> ExperimentPlan:
    """Train on the METIS cut by data parallelism and on the hash cut by push-pull."""
    return plan_at(plan, size_of(plan))


def plan_at(plan: BenchPlan, size: Size) -> ExperimentPlan:
    """Return the experiment at ``size``; makes datasets and counts bytes, which takes seconds."""
    cases: list[Case] = []
    compared: list[Compared] = []
    for width in _WIDTHS:
        hashed, metis = f"hash, {width}", f"metis, {width}"
        depth_1, depth_3 = f"push_pull, {width}", f"push_pull, depth 3, {width}"
        rate = matched(hashed)
        cases += [
            Case(name=hashed, rate=rate, hidden=width),
            Case(name=metis, rate=rate, hidden=width, cut="metis"),
            Case(name=depth_1, rate=rate, hidden=width, **push_pull()),
            Case(name=depth_3, rate=rate, hidden=width, **push_pull(3)),
        ]
        compared += [
            Compared(over=metis, under=depth_1, low=1.0 if width == _WIDTHS[0] else None),
            Compared(over=metis, under=depth_3),
            Compared(over=hashed, under=metis),
            Compared(over=depth_1, under=metis, quantity="bytes_outside", name=f"bytes, {depth_1} / {metis}"),
        ]
    return plan_of(plan, size, cases, compared)


EXPERIMENT = Experiment(
    id="P6",
    title="push-pull beside data parallelism on a METIS partition",
    suites=("papers",),
    claim=Claim(
        paper="P3 (OSDI 2021)",
        says="1.7x faster than DGL on METIS (3.85x than on hash)",
        setting="GraphSAGE, 4 servers of 4 P100, 10 Gbit/s",
    ),
    prediction=(
        "1.0 to 1.7x, by the measured share rho of remote input rows; slower where rho is below 0.15 at "
        "hidden width 16."
    ),
    how=(HOW + " Widths 16 and 32; push-pull on the hash cut, at depths 1 and 3."),
    strategies=("data_parallel", "push_pull"),
    build=build,
    note=NOTE,
)
