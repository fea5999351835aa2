"""Outcomes made by hand: two variants of which every figure is known."""

from collections.abc import Sequence
from dataclasses import replace

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

EXPERIMENT = Experiment(
    id="D1",
    title="random or metis",
    suites=("papers",),
    claim=Claim(paper="A paper", says="metis is 2.14x faster", setting="4 machines"),
    prediction="1.5 to 2.5x",
    how="both in turn",
)
SLOW, FAST = (2.0, 2.2, 2.1, 2.4, 1.9), (1.0, 1.1, 1.05, 1.2, 0.95)


def epoch(seconds: float, *, outside: int = 40_000_000) -> EpochRecord:
    """An epoch of 1000 samples that waited for half of its time."""
    return EpochRecord(
        epoch=1,
        loss=1.0,
        train_accuracy=0.5,
        val_accuracy=None,
        seconds=seconds,
        num_samples=1000,
        sample_s=0.25 * seconds,
        fetch_s=0.5 * seconds,
        wait_s=0.5 * seconds,
        compute_s=0.375 * seconds,
        exchange_s=0.125 * seconds,
        bytes_inside=10_000_000,
        bytes_outside=outside,
    )


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
            epochs=(epoch(value, outside=outside),) * 2,
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
    wanted = ratio or Ratio(name="speed-up", over="random", under="metis", predicted=1.9, low=1.5)
    return Outcome(
        experiment="D1",
        status="measured",
        network={"random": link, "metis": link},
        plan=ExperimentPlan(
            variants=(variant("random", simulated=simulated), variant("metis", simulated=simulated)),
            ratios=(wanted,),
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
    curved = tuple(replace(one, accuracy=curve) if one.repetition == 0 else one for one in given.measurements)
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
    measured = [one for n, value in seconds.items() for one in measurements(f"{n} servers", [value] * 5)]
    experiment = replace(EXPERIMENT, id="D3", title="weak scaling on 1, 2 and 4 servers")
    return experiment, replace(
        outcome(),
        experiment="D3",
        plan=plan,
        measurements=tuple(measured),
        network={one.name: link for one in plan.variants},
    )
