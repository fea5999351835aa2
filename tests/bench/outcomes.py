"""Small records of the bench for tests."""

from __future__ import annotations

from typing import Any

from dglx_dist.planner.records import Rate
from dglx_dist.records import EpochRecord
from scripts.bench.records import (
    Claim,
    Experiment,
    ExperimentPlan,
    Job,
    MatchedPhi,
    Measurement,
    Outcome,
    Ratio,
    Shape,
    Variant,
)

TWO = Shape(servers=2)
CLAIM = Claim(paper="A paper (2020)", says="B is twice as fast as A", setting="4 machines")


def epoch(number: int = 0, seconds: float = 2.0, **fields: Any) -> EpochRecord:
    values: dict[str, Any] = {
        "loss": 0.5,
        "train_accuracy": 0.75,
        "val_accuracy": None,
        "num_samples": 100,
        "sample_s": 0.1,
        "fetch_s": 0.2,
        "wait_s": 0.3,
        "compute_s": 0.4,
        "exchange_s": 0.5,
        "bytes_inside": 10,
        "bytes_outside": 2_000_000,
    }
    return EpochRecord(epoch=number, seconds=seconds, **values | fields)


def plan_of(*names: str, **fields: Any) -> ExperimentPlan:
    """Variants of one shape at matched phi 0.5 of the first, and the ratio of the first two."""
    rate = MatchedPhi(phi=0.5, baseline=names[0])
    variants = tuple(
        Variant(name=name, shape=TWO, rate=rate, job=Job(kind="echo", params={"as": name}), **fields)
        for name in names
    )
    return ExperimentPlan(
        variants=variants,
        ratios=(Ratio(name="A over B", over=names[0], under=names[1], predicted=2.0, low=1.5),),
        facts={"edge cut": 0.25},
    )


def experiment_of(plan: ExperimentPlan | None, **fields: Any) -> Experiment:
    return Experiment(
        id="T1",
        title="a test",
        suites=("quick",),
        claim=CLAIM,
        prediction="2x",
        how="by hand",
        build=None if plan is None else lambda _: plan,
        **fields,
    )


def outcome_of(plan: ExperimentPlan) -> Outcome:
    """Everything that an outcome can hold, with other values in every field than the default ones."""
    odd = Variant(
        name="odd",
        shape=Shape(servers=3, ranks_per_server=2, internal=Rate(40_123_456_789), cpus=0.5),
        job=Job(kind="echo", params={"a": [1, {"b": None}]}, warm={"c": True}),
        rate=Rate(123_456_789),
        simulated="compute",
        curve=Job(kind="echo", params={"epochs": 20}),
    )
    measured = Measurement(
        variant="odd",
        repetition=4,
        epochs=(epoch(1), epoch(2, cache_hits=7)),
        bytes_outside_wire=5,
        peak_bytes=6,
        accuracy=((0.5, 0.25), (1.0, 0.5)),
        extra={"steps": 8},
    )
    return Outcome(
        experiment="T1",
        status="failed",
        reason="stopped",
        network={"odd": {"kind": "namespaces"}},
        plan=ExperimentPlan(variants=(*plan.variants, odd), ratios=plan.ratios, facts=plan.facts),
        measurements=(measured,),
        machine={"cpu": "x"},
        label="quick look",
        command="python scripts/bench --only T1 --out DIR",
        date="2026-01-02T03:04:05+00:00",
    )
