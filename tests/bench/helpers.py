"""Helpers of the tests of the bench: a small graph, the context of a rank, outcomes made by hand."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dglx_dist.comm.topology import read_topology
from dglx_dist.data.partition.base import PartitionPlan
from dglx_dist.data.synthetic import SyntheticConfig
from dglx_dist.planner.costs.base import Survey
from dglx_dist.records import EpochRecord
from scripts.bench.jobs.params import TrainParams, read_params
from scripts.bench.peers.launch import KIND as PROGRAM
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
    check_plan,
)
from scripts.bench.worker import KINDS, JobContext

SMALL = SyntheticConfig(nodes=600, degree=8, classes=4, features=12, communities=8, train_rate=0.2, seed=3)
HALVES = PartitionPlan(num_parts=2, method="random")


def params_of(folder: Path, **changed: object) -> dict[str, object]:
    return {"data": str(folder), "hidden": 8, "fanouts": [3, 2], "batch_size": 16, **changed}


def context() -> JobContext:
    """The context of this rank; every rank is a server of its own, on plain loopback."""
    topology = read_topology()
    return JobContext(
        rank=topology.rank,
        server=topology.rank,
        device=None,
        folder=Path("unused"),
        number=0,
        timeout_s=100.0,
    )


EXPERIMENT = Experiment(
    id="D1",
    title="random or metis",
    suites=("papers",),
    claim=Claim(paper="A paper", says="metis is 2.14x faster", setting="4 machines"),
    prediction="1.5 to 2.5x",
)
SLOW, FAST = (2.0, 2.2, 2.1, 2.4, 1.9), (1.0, 1.1, 1.05, 1.2, 0.95)


def epoch_of(seconds: float, *, outside: int = 40_000_000) -> EpochRecord:
    """An epoch of 1000 samples that waited for half of its time."""
    shares = {"sample_s": 0.25, "fetch_s": 0.5, "wait_s": 0.5, "compute_s": 0.375, "exchange_s": 0.125}
    phases = {name: share * seconds for name, share in shares.items()}
    counts = {"num_samples": 1000, "bytes_inside": 10_000_000, "bytes_outside": outside}
    return epoch(1, seconds, **phases, **counts)


def variant(name: str, *, servers: int = 2, simulated: str = "") -> Variant:
    """A variant whose rate was matched to the first one's phi."""
    return Variant(
        name=name,
        shape=Shape(servers=servers),
        job=Job(kind="train"),
        rate=MatchedPhi(phi=0.65, baseline="random"),
        simulated=simulated,
    )


def measurements(
    name: str, seconds: Sequence[float], *, outside: int = 40_000_000, wire: int | None = 42_000_000
) -> tuple[Measurement, ...]:
    """One repetition per item of ``seconds``, each of two equal epochs."""
    return tuple(
        Measurement(
            variant=name,
            repetition=number,
            epochs=(epoch_of(value, outside=outside),) * 2,
            bytes_outside_wire=None if wire is None else 2 * wire,
            peak_bytes=300_000_000 + number,
        )
        for number, value in enumerate(seconds)
    )


def outcome(
    *,
    slow: Sequence[float] = SLOW,
    fast: Sequence[float] = FAST,
    ratio: Ratio | None = None,
    kind: str = "namespaces",
    simulated: str = "",
) -> Outcome:
    """random and metis, measured five times; by default exactly twice as fast, 40 MB and 10 MB outside."""
    loopback = {"kind": "loopback", "missing": "needs root; start it with sudo"}
    link = {"kind": kind, "external": "96mbit", "phi": 0.65} if kind == "namespaces" else loopback
    expected = ratio or Ratio(name="speed-up", over="random", under="metis", predicted=1.9, low=1.5)
    return Outcome(
        experiment="D1",
        status="measured",
        network={"random": link, "metis": link},
        plan=ExperimentPlan(
            variants=(variant("random", simulated=simulated), variant("metis", simulated=simulated)),
            ratios=(expected,),
            facts={"edge cut": {"random": 0.75, "metis": 0.125}},
        ),
        measurements=(
            *measurements("random", slow),
            *measurements("metis", fast, outside=10_000_000, wire=11_000_000),
        ),
        machine={"cpu": "A processor", "cores": 2, "versions": {"torch": "2.13.0"}},
        command="python scripts/bench --suite papers --only D1 --out results",
        date="2026-11-21T10:00:00Z",
    )


def with_curves(given: Outcome) -> Outcome:
    """The same with an accuracy curve in the first repetition of each variant."""
    curve = ((1.0, 0.5), (2.0, 0.75), (3.0, 0.875))
    curved = tuple(
        replace(measurement, accuracy=curve) if measurement.repetition == 0 else measurement
        for measurement in given.measurements
    )
    return replace(given, measurements=curved)


def scaling() -> tuple[Experiment, Outcome]:
    """Weak scaling on 1, 2, 4 servers: 1000 / s, 1900 / s, 3200 / s, all simulated."""
    seconds = {1: 1.0, 2: 1000 / 1900, 4: 1000 / 3200}
    plan = ExperimentPlan(
        variants=tuple(variant(f"{n} servers", servers=n, simulated="compute is slept") for n in seconds),
        ratios=tuple(
            Ratio(
                name=f"{n} servers over one",
                over=f"{n} servers",
                under="1 servers",
                quantity="samples_per_second",
                predicted=float(n),
                low=0.8 * n,
            )
            for n in (2, 4)
        ),
    )
    link = {"kind": "namespaces", "external": "1gbit"}
    measured = [
        measurement
        for n, value in seconds.items()
        for measurement in measurements(f"{n} servers", [value] * 5)
    ]
    experiment = replace(EXPERIMENT, id="D3", title="weak scaling on 1, 2 and 4 servers")
    return experiment, replace(
        outcome(),
        experiment="D3",
        plan=plan,
        measurements=tuple(measured),
        network={item.name: link for item in plan.variants},
    )


TWO = Shape(servers=2)


def survey(**changed: Any) -> Survey:
    fields = {
        "steps": 10, "input_rows": 0, "remote_rows": 0, "edges": 0, "seeds_per_rank": [5, 5],
        "feature_bytes": 0, "sampling_bytes": 0, "label_bytes": 0, "gradient_bytes": 0,
    }  # fmt: skip
    return Survey(**{**fields, **changed})


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
    return replace(EXPERIMENT, id="T1", build=None if plan is None else lambda _: plan, **fields)


def jobs_of(name: str, plan: ExperimentPlan) -> list[tuple[Variant, TrainParams]]:
    """Check what every experiment keeps; return its training jobs, as they warm up and draw curves."""
    check_plan(name, plan)
    assert plan.ratios
    assert plan.facts
    results = []
    for variant in plan.variants:
        if variant.job.kind == PROGRAM:
            # A peer, whose data is a file of its own format.
            assert Path(variant.job.params["data"]).is_file()
            continue
        for job in filter(None, (variant.job, variant.curve)):
            assert job.kind in KINDS
            params = read_params(TrainParams, {**job.params, **job.warm})
            assert Path(params.data).is_dir()
            assert bool(variant.simulated) == (params.simulated is not None)
            results.append((variant, params))
    return results
