"""The driver with a stage that plays the servers; what real ones do is in test_pool.py."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dglx_dist.errors import ConfigError
from dglx_dist.planner.records import Rate
from scripts.bench import driver, results
from scripts.bench.driver import read_measured, read_measurement
from scripts.bench.records import (
    BenchPlan,
    ExperimentPlan,
    Job,
    JobError,
    Outcome,
    Ratio,
    Shape,
    Variant,
    check_plan,
)
from tests.bench.helpers import TWO, epoch, experiment_of, plan_of


def test_the_machine_is_described_without_naming_host_or_user() -> None:
    record = driver.describe_machine()
    assert record["cores_usable"] == len(os.sched_getaffinity(0))
    message = json.dumps(record)
    assert f'"torch": "{torch.__version__}"' in message
    assert str(Path.home()) + "/" not in message
    assert str(Path.cwd()) not in message
    name = socket.gethostname()
    # A name like "linux" may be part of a word of the kernel's version.
    assert name not in message or len(name) < 6


(A, _) = plan_of("a", "b").variants


@pytest.mark.parametrize("report", [{"peak_bytes": 5}, {"epochs": [], "peek_bytes": 5}])
def test_reports_of_another_kind_are_refused(report: dict[str, object]) -> None:
    with pytest.raises(JobError, match="must report epochs, and may report bytes_outside_wire"):
        read_measurement(A, 0, [report])


MEGABIT = 10**6


class Played:
    """Servers on which an epoch takes 1 s, and 1 s more for each MB that goes out at 8 Mbit/s."""

    def __init__(self, *, limited: bool = True, fails_at: int | None = None) -> None:
        self.done: list[tuple[str, str]] = []
        self.shapes: list[Shape] = []
        self.closed = False
        self._limited, self._fails_at = limited, fails_at

    @contextmanager
    def open(self, shapes: Sequence[Shape]) -> Iterator[Played]:
        self.shapes = list(shapes)
        try:
            yield self
        finally:
            self.closed = True

    def do(self, shape: Shape, job: Job, rate: Rate | None) -> list[dict[str, Any]]:
        if len(self.done) == self._fails_at:
            raise JobError("rank 1 died")
        self.done.append((job.params["as"], "free" if rate is None else str(rate)))
        # 4 MB over the cards of two servers in each of two epochs, each 2 MB.
        seconds = 1.0 + (0.0 if rate is None else 16e6 / rate.bits_per_s)
        report = {"epochs": [asdict(epoch(n, seconds)) for n in range(2)], "bytes_outside_wire": 8_000_000}
        report |= {"accuracy": [[1.0, 0.5]]} if "curve" in job.params else {}
        return [report | {"peak_bytes": peak} for peak in (5, 9)]

    def describe(self, shape: Shape, rate: Rate | None) -> dict[str, Any]:
        return {"kind": "namespaces" if self._limited else "loopback", "external": rate and str(rate)}

    def limits(self, shape: Shape) -> bool:
        return self._limited


def bench(folder: Path, repetitions: int = 5) -> BenchPlan:
    return BenchPlan(suite="quick", out=folder, work=folder / "work", repetitions=repetitions)


def run(
    plan: ExperimentPlan | None, stage: Played, folder: Path, repetitions: int = 5, tell: Any = lambda _: None
) -> Outcome:
    return driver.run(experiment_of(plan), bench(folder, repetitions), tell, open_stage=stage.open)


def test_what_is_compared_takes_turns_at_the_rate_that_gives_the_phi(tmp_path: Path) -> None:
    stage, message = Played(), list[str]()
    outcome = run(plan_of("a", "b", "c"), stage, tmp_path, tell=message.append)
    assert outcome.status == "measured"
    assert results.read(tmp_path) == (outcome,)
    assert outcome.label == ""
    assert outcome.command == "python scripts/bench --suite quick --only T1 --repetitions 5 --out DIR"
    assert message[:2] == ["T1: making its datasets", "T1: warming up: a (0 of 18 jobs)"]
    # Three jobs are expected of a calibration, and two were enough.
    assert message[-1].startswith("T1: repetition 5 of 5: a (19 of 20 jobs, about")
    assert stage.shapes == [TWO]
    assert stage.closed
    # phi 0.5: as long on the wire as without it, 16e6 bit in 1 s. The first guess is exact here.
    warm_up, calibration, measured = stage.done[:3], stage.done[3:5], stage.done[5:]
    assert warm_up == [("a", "free"), ("b", "free"), ("c", "free")]
    assert calibration == [("a", "free"), ("a", "16mbit")]
    assert "".join(name for name, _ in measured) == "abc" + "bca" + "cab" + "abc" + "bca"
    assert {rate for _, rate in measured} == {"16mbit"}
    assert [(measurement.variant, measurement.repetition) for measurement in outcome.measurements[:4]] == [
        ("a", 0), ("b", 0), ("c", 0), ("b", 1),
    ]  # fmt: skip
    assert (outcome.measurements[0].seconds, outcome.measurements[0].peak_bytes) == (2.0, 9)
    assert outcome.network["b"]["external"] == "16mbit"
    assert outcome.network["b"]["phi"] == 0.5
    assert outcome.network["b"]["calibration"]["baseline"] == "a"


def test_no_path_of_the_user_is_kept(tmp_path: Path) -> None:
    data = str(tmp_path / "work" / "synthetic-1")
    job = Job(kind="echo", params={"as": "a", "data": data, "all": [{"of": data}]}, warm={"data": data})
    variant = Variant(name="a", shape=TWO, job=job, curve=job)
    run(ExperimentPlan(variants=(variant,), facts={"from": data}), Played(), tmp_path)
    assert str(tmp_path) not in results.result_path(tmp_path, "T1").read_text()
    (outcome,) = results.read(tmp_path)
    assert outcome.plan.variants[0].job.params["data"] == "WORK/synthetic-1"


def test_each_variant_has_its_servers_rate_warm_up_and_a_curve_that_is_no_repetition(tmp_path: Path) -> None:
    warmed = Job(kind="echo", params={"as": "one"}, warm={"as": "one, once"})
    variant = Variant(name="one", shape=Shape(servers=1), job=warmed)
    curve = Job(kind="echo", params={"as": "curve of two", "curve": True})
    job = Job(kind="echo", params={"as": "two"})
    two = Variant(name="two", shape=TWO, rate=Rate(100 * MEGABIT), job=job, curve=curve)
    stage = Played()
    outcome = run(ExperimentPlan(variants=(variant, two)), stage, tmp_path, repetitions=1)
    assert stage.shapes == [Shape(servers=1), TWO]
    assert stage.done == [
        ("one, once", "free"), ("two", "free"),
        ("one", "free"), ("two", "100mbit"), ("curve of two", "100mbit"),
    ]  # fmt: skip
    assert (outcome.network["one"]["external"], outcome.network["two"]["external"]) == (None, "100mbit")
    assert [bool(measurement.epochs) for measurement in outcome.measurements] == [True, True, False]
    assert outcome.measurements[-1].accuracy == ((1.0, 0.5),)


def test_on_plain_loopback_no_rate_is_asked_for_and_none_is_noted(tmp_path: Path) -> None:
    stage = Played(limited=False)
    outcome = run(plan_of("a", "b"), stage, tmp_path)
    assert outcome.status == "measured"
    assert {rate for _, rate in stage.done} == {"free"}
    assert len(stage.done) == 2 + 10
    assert outcome.network["a"] == {"kind": "loopback", "external": None}
    # Where no card counts, the payload stands in: 2 MB between two servers in each epoch.
    assert read_measured(A, [{"epochs": [asdict(epoch(n)) for n in range(3)]}] * 2).bytes_per_server == 1e6


def test_a_failure_keeps_what_was_measured_before(tmp_path: Path) -> None:
    # 2 to warm up, 2 to calibrate, 2 repetitions of 2, and the first of the third.
    stage = Played(fails_at=2 + 2 + 4 + 1)
    outcome = run(plan_of("a", "b"), stage, tmp_path)
    assert (outcome.status, outcome.reason) == ("failed", "rank 1 died")
    assert len(outcome.measurements) == 5
    assert stage.closed
    assert results.read(tmp_path) == (outcome,)


def test_an_interrupt_leaves_the_whole_repetitions_in_the_file(tmp_path: Path) -> None:
    stage = Played()

    def interrupt(line: str) -> None:
        if "repetition 3" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(plan_of("a", "b"), stage, tmp_path, tell=interrupt)
    assert stage.closed
    (kept,) = results.read(tmp_path)
    assert (kept.status, kept.reason) == ("failed", "stopped after repetition 2 of 5")
    assert len(kept.measurements) == 4


def test_what_cannot_run_here_is_absent_and_written(tmp_path: Path) -> None:
    stage = Played()
    outcome = run(None, stage, tmp_path)
    assert (outcome.status, outcome.measurements) == ("absent", ())
    assert "not written yet" in outcome.reason
    assert stage.shapes == []
    assert results.read(tmp_path) == (outcome,)


def test_what_an_experiment_does_wrong_is_its_failure_alone(tmp_path: Path) -> None:
    def build(_: BenchPlan) -> ExperimentPlan:
        raise KeyError("edge cut")

    broken = replace(experiment_of(plan_of("a", "b")), build=build)
    outcome = driver.run(broken, bench(tmp_path), lambda _: None, open_stage=Played().open)
    assert (outcome.status, outcome.reason) == ("failed", "KeyError: 'edge cut'")


def test_results_that_cannot_be_written_are_told_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    stage = Played()
    with pytest.raises(driver.DglxError, match="--out"):
        run(plan_of("a", "b"), stage, tmp_path / "file")
    assert stage.done == []


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (ExperimentPlan(variants=()), "at least one"),
        (plan_of("a", "a"), "each with its own name"),
        (
            replace(plan_of("a", "b"), ratios=(Ratio(name="r", over="a", under="c"),)),
            "no variant is called c",
        ),
        (replace(plan_of("a", "b"), variants=plan_of("a", "b").variants[1:], ratios=()), "is called a"),
    ],
)
def test_plans_that_contradict_themselves_are_refused(plan: ExperimentPlan, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_plan("T1", plan)
