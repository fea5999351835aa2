"""Runs one experiment: what is compared takes turns on servers that are all up at once."""

from __future__ import annotations

import json
import logging
import os
import platform
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeAlias, final

from dglx_dist.errors import DglxError
from dglx_dist.planner.records import Rate
from scripts.bench import results, suites
from scripts.bench.pool import OpenStage, Stage, open_stage
from scripts.bench.records import (
    BenchPlan,
    Experiment,
    ExperimentPlan,
    Job,
    JobError,
    MatchedPhi,
    Measurement,
    Outcome,
    Shape,
    Variant,
    check_plan,
)
from scripts.json_records import read_record
from scripts.netlab.calibrate import Calibration, Measured, find_rate
from scripts.out_files import make_folder

log = logging.getLogger(__name__)
Tell: TypeAlias = Callable[[str], None]
"""Called with a line before each job."""

FEWEST = 5
"""Repetitions without which a median says little."""
QUICK_LOOK = f"quick look, fewer than {FEWEST} repetitions"
_CALIBRATION_JOBS, _RECENT = 3, 4
"""Jobs that a calibration is expected to take; those that tell how long the next ones take."""
_PACKAGES = ("dglx-dist", "torch", "dgl", "numpy", "numba", "pyzmq", "pyarrow", "torch-geometric")


def describe_machine() -> dict[str, object]:
    """Return JSON values: cpu, cores (all and usable ones), memory in bytes, kernel, versions."""
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    named = re.search(r"(?m)^model name\s*: (.*)$", cpuinfo)
    return {
        "cpu": named[1].strip() if named else platform.machine(),
        "cores": os.cpu_count() or 1,
        "cores_usable": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.system(),
        "kernel": platform.release(),
        "versions": {"python": platform.python_version(), **suites.installed(_PACKAGES)},
    }


KEYS = ("epochs", "bytes_outside_wire", "peak_bytes", "accuracy", "extra")
"""Of a report, as in :class:`Measurement`. All but ``peak_bytes`` are over all ranks, and rank 0's count."""


def read_measurement(variant: Variant, repetition: int, reports: Sequence[Mapping[str, Any]]) -> Measurement:
    """Put the reports, by rank, together; JobError: one lacks the epochs, or has a key not in ``KEYS``."""
    first = reports[0]
    if "epochs" not in first or not set(first) <= set(KEYS):
        raise JobError(
            f"job {variant.job.kind} of {variant.name} reports {', '.join(first)}; it must report epochs, "
            f"and of others only {', '.join(KEYS[1:])}"
        )
    peak = max(int(report.get("peak_bytes", 0)) for report in reports)
    told = {**first, "variant": variant.name, "repetition": repetition, "peak_bytes": peak}
    measurement: Measurement = read_record(Measurement, told)
    return measurement


def read_measured(variant: Variant, reports: Sequence[Mapping[str, Any]]) -> Measured:
    """Return what a calibration needs to know of one job: of an epoch, and of a server with an even share.

    Where no card counts, the payload between servers stands in.
    """
    measurement = read_measurement(variant, 0, reports)
    payload = sum(epoch.bytes_outside for epoch in measurement.epochs)
    wire = payload if measurement.bytes_outside_wire is None else measurement.bytes_outside_wire
    parts = max(len(measurement.epochs), 1) * variant.shape.servers
    return Measured(seconds=measurement.seconds, bytes_per_server=wire / parts)


def run(
    experiment: Experiment, plan: BenchPlan, tell: Tell, *, open_stage: OpenStage = open_stage
) -> Outcome:
    """Measure ``experiment`` as ``plan`` says, and write ``<plan.out>/<ID>.json`` after every repetition.

    First every variant runs once to warm up, of those that differ by their rate alone the first; then the
    rates are found at which a baseline communicates as long as is wanted; then come the repetitions, each
    with one job per variant, whose order moves on by one each time so that nobody is always first; last come
    the accuracy curves that variants ask for. Return what was written: what goes wrong in the experiment
    makes it "failed", with the measurements so far.
    """
    make_folder(plan.out)
    running = _Running(experiment, plan, tell)
    reason = suites.why_absent(experiment)
    if reason:
        return running.write("absent", reason)
    try:
        with open_stage(running.build()) as stage:
            running.measure(stage)
    except DglxError as error:
        return running.write("failed", str(error))
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError, RuntimeError) as error:
        # A mistake in one experiment shall not cost the results of the next.
        log.exception("%s failed", experiment.id)
        return running.write("failed", f"{type(error).__name__}: {error}")
    return running.write("measured")


@final
class _Running:
    """One experiment while it is measured, and what is known of it so far."""

    def __init__(self, experiment: Experiment, bench: BenchPlan, tell: Tell) -> None:
        self._experiment, self._bench, self._tell = experiment, bench, tell
        self._plan = ExperimentPlan(variants=())
        self._network: dict[str, dict[str, Any]] = {}
        self._measurements: list[Measurement] = []
        self._total, self._seconds = 0, list[float]()
        """Jobs that are expected; seconds of each that has ended."""

    def build(self) -> list[Shape]:
        """Have the experiment make its datasets and say what to run; return distinct shapes, in order."""
        assert self._experiment.build is not None
        self._tell(f"{self._experiment.id}: making its datasets")
        plan = self._experiment.build(self._bench)
        check_plan(self._experiment.id, plan)
        self._plan = plan
        return list(dict.fromkeys(variant.shape for variant in plan.variants))

    def measure(self, stage: Stage) -> None:
        """Warm up, calibrate, repeat and draw curves."""
        variants, repetitions = self._plan.variants, self._bench.repetitions
        colds = differing(variants)
        self._total = len(colds) + len(variants) * repetitions + sum(bool(one.curve) for one in variants)
        for variant in colds:
            warmed = replace(variant.job, params={**variant.job.params, **variant.job.warm})
            self._do(stage, f"warming up: {variant.name}", variant, warmed, None)
        rates = self._find_rates(stage)
        for repetition in range(repetitions):
            for variant in in_turn(variants, repetition):
                doing = f"repetition {repetition + 1} of {repetitions}: {variant.name}"
                job = variant.job.turn(repetition)
                reports = self._do(stage, doing, variant, job, rates[variant.name])
                self._measurements.append(read_measurement(variant, repetition, reports))
            self.write("failed", f"stopped after repetition {repetition + 1} of {repetitions}")
        for variant in variants:
            if variant.curve is not None:
                doing = f"accuracy over time: {variant.name}"
                reports = self._do(stage, doing, variant, variant.curve, rates[variant.name])
                # Its epochs stand between evaluations, and are none of those that are compared.
                curve = replace(read_measurement(variant, repetitions, reports), epochs=())
                self._measurements.append(curve)

    def write(self, status: Any, reason: str = "") -> Outcome:
        """Write and return what is known."""
        bench, plan = self._bench, self._plan
        told = f"--suite {bench.suite} --only {self._experiment.id} --repetitions {bench.repetitions}"
        told += f" --seed {bench.seed}" if bench.seed else ""
        outcome = Outcome(
            experiment=self._experiment.id,
            status=status,
            reason=reason,
            network=self._network,
            plan=without_paths(plan, str(bench.work)) if plan.variants else None,
            measurements=tuple(self._measurements),
            machine=describe_machine(),
            label=QUICK_LOOK if bench.repetitions < FEWEST else "",
            command=f"python scripts/bench {told} --out DIR",
            date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )
        results.write(bench.out, outcome)
        return outcome

    def _do(
        self, stage: Stage, doing: str, variant: Variant, job: Job, rate: Rate | None
    ) -> list[dict[str, Any]]:
        done, recent = len(self._seconds), self._seconds[-_RECENT:]
        left_s = sum(recent) / len(recent) * (self._total - done) if recent else 0.0
        left = f", about {left_s:.0f} s left" if 0 < left_s < 100 else f", about {left_s / 60:.0f} min left"
        jobs = f"({done} of {self._total} jobs{left if recent else ''})"
        self._tell(f"{self._experiment.id}: {doing} {jobs}")
        begin = time.monotonic()
        reports = stage.do(variant.shape, job, rate)
        self._seconds.append(time.monotonic() - begin)
        return reports

    def _find_rates(self, stage: Stage) -> dict[str, Rate | None]:
        by_name = {variant.name: variant for variant in self._plan.variants}
        found: dict[MatchedPhi, Calibration] = {}
        rates: dict[str, Rate | None] = {}
        for variant in by_name.values():
            rate, noted = variant.rate, dict[str, Any]()
            if not stage.limits(variant.shape):
                rate = None
            if isinstance(rate, MatchedPhi):
                if rate not in found:
                    found[rate] = self._calibrate(stage, by_name[rate.baseline], rate.phi)
                calibration = {"baseline": rate.baseline, **found[rate].to_json()}
                noted = {"phi": found[rate].phi, "calibration": calibration}
                rate = found[rate].rate
            rates[variant.name] = rate
            self._network[variant.name] = stage.describe(variant.shape, rate) | noted
        return rates

    def _calibrate(self, stage: Stage, baseline: Variant, phi: float) -> Calibration:
        expected = len(self._seconds), self._total
        self._total += _CALIBRATION_JOBS

        def measure(rate: Rate | None) -> Measured:
            at = "without limit" if rate is None else f"at {rate}"
            doing = f"finding the rate at which {baseline.name} has phi {phi:g}: {at}"
            return read_measured(baseline, self._do(stage, doing, baseline, baseline.job, rate))

        calibration = find_rate(measure, phi)
        self._total = expected[1] + len(self._seconds) - expected[0]
        return calibration


def differing(variants: Sequence[Variant]) -> list[Variant]:
    """Return those that do something else than all before them, or on other servers; rates do not count."""
    works = [(one.shape, one.job) for one in variants]
    return [one for number, one in enumerate(variants) if works[number] not in works[:number]]


def in_turn(variants: Sequence[Variant], repetition: int) -> list[Variant]:
    """Return ``variants`` in the order of this repetition: A B C, B C A, C A B, A B C, ..."""
    first = repetition % max(len(variants), 1)
    return [*variants[first:], *variants[:first]]


def without_paths(plan: ExperimentPlan, work: str) -> ExperimentPlan:
    """Return ``plan`` as it is kept: with the word WORK in place of the user's folder of datasets."""
    text = json.dumps(results.plain(asdict(plan))).replace(json.dumps(work)[1:-1], "WORK")
    kept: ExperimentPlan = read_record(ExperimentPlan, json.loads(text))
    return kept
