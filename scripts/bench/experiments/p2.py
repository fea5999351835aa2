"""Push-pull with its pipeline of depth 3."""

from __future__ import annotations

from dataclasses import replace

from scripts.bench.push_pull import HOW, NOTE, Case, Compared, Size, matched, plan_of, push_pull, size_of
from scripts.bench.records import BenchPlan, Claim, Experiment, ExperimentPlan, MatchedPhi

_WIDTHS = (16, 64)
_STEPS = 3
"""Times as many as elsewhere: filling and emptying a pipeline of 3 costs two steps of every epoch."""


def build(plan: BenchPlan) -> ExperimentPlan:
    """Train with 1 and 3 batches in flight, with one version of the weights for both sides and with two."""
    return plan_at(plan, size_of(plan))


def plan_at(plan: BenchPlan, size: Size) -> ExperimentPlan:
    """Return the experiment at ``size``; makes datasets and counts bytes, which takes seconds."""
    size = replace(size, steps=_STEPS * size.steps)
    cases, compared = _at_a_rate_for_itself(16)
    for width in _WIDTHS:
        hashed, depth_1, depth_3 = f"hash, {width}", f"depth 1, {width}", f"depth 3, {width}"
        split = f"depth 3, split, {width}"
        rate = matched(hashed)
        cases += [
            Case(name=hashed, rate=rate, hidden=width),
            Case(name=depth_1, rate=rate, hidden=width, **push_pull()),
            Case(name=depth_3, rate=rate, hidden=width, **push_pull(3)),
            Case(name=split, rate=rate, hidden=width, **push_pull(3, weights="split")),
        ]
        compared += [
            Compared(over=depth_1, under=depth_3, low=1.25),
            Compared(over=depth_1, under=split, low=1.25),
            Compared(over=hashed, under=depth_3),
            Compared(
                over=depth_3, under=depth_1, quantity="bytes_outside", low=0.999, high=1.001,
                name=f"bytes, depth 3 / depth 1, {width}",
            ),
        ]  # fmt: skip
    return plan_of(plan, size, cases, compared)


def _at_a_rate_for_itself(width: int) -> tuple[list[Case], list[Compared]]:
    """Return both depths where push-pull itself waits half its time: there is most to hide."""
    one, three, split = (f"{name}, {width}, own phi 0.5" for name in ("depth 1", "depth 3", "depth 3, split"))
    rate = MatchedPhi(phi=0.5, baseline=one)
    cases = [
        Case(name=one, rate=rate, hidden=width, **push_pull()),
        Case(name=three, rate=rate, hidden=width, **push_pull(3)),
        Case(name=split, rate=rate, hidden=width, **push_pull(3, weights="split")),
    ]
    return cases, [Compared(over=one, under=three, low=1.25), Compared(over=one, under=split, low=1.25)]


EXPERIMENT = Experiment(
    id="P2",
    title="push-pull with its pipeline of depth 3",
    suites=("papers",),
    claim=Claim(
        paper="P3 (OSDI 2021)",
        says="pipelining gains 30 to 50 %",
        setting="4 servers of 4 P100, 10 Gbit/s",
    ),
    prediction=(
        "Over hashed data parallelism at phi 0.8 at most 4.7 to 5x, 2.9 to 3.7x, 1.6 to 1.9x and 1.1x at "
        "hidden widths 16, 32, 64 and 100: 1.3 to 1.5x on top of P1."
    ),
    how=(
        HOW
        + " Depth 3 with both sides of a batch on one version of the weights, and split, at widths 16 and "
        "64; three times the steps an epoch, for a pipeline is filled and emptied in each. Depths are "
        "compared, too, at the rate at which depth 1 itself has phi 0.5."
    ),
    strategies=("data_parallel", "push_pull"),
    build=build,
    note=(
        NOTE + " At depth 1 structure already travels beside computing, and servers compute while others "
        "send: the link is busy for 0.8 of the time and more, so that nothing hides more than the last 0.2."
    ),
)
