"""Runs one experiment. Its variants take turns on servers that are all up at once."""

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
"""Callback that receives a line of progress before each job."""

FEWEST = 5
"""Smallest number of repetitions for a meaningful median."""
QUICK_LOOK = f"quick look, fewer than {FEWEST} repetitions"
_CALIBRATION_JOBS, _RECENT = 3, 4
"""Expected number of jobs of a calibration, and number of recent jobs used to estimate the time left."""
_PACKAGES = ("dglx-dist", "torch", "dgl", "numpy", "numba", "pyzmq", "pyarrow", "torch-geometric")


def describe_machine() -> dict[str, object]:
    """Return the CPU, cores (all and usable), memory in bytes, kernel and versions as JSON values."""
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    cpu_match = re.search(r"(?m)^model name\s*: (.*)$", cpuinfo)
    return {
        "cpu": cpu_match[1].strip() if cpu_match else platform.machine(),
        "cores": os.cpu_count() or 1,
        "cores_usable": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.system(),
        "kernel": platform.release(),
        "versions": {"python": platform.python_version(), **suites.find_versions(_PACKAGES)},
    }


KEYS = ("epochs", "bytes_outside_wire", "peak_bytes", "accuracy", "extra")
"""Keys of a rank's report, as in :class:`Measurement`. Only ``peak_bytes`` differs by rank. Rank 0's report
counts for the others."""


def read_measurement(variant: Variant, repetition: int, reports: Sequence[Mapping[str, Any]]) -> Measurement:
    """Combine the reports of all ranks into one measurement.

    Raises:
        JobError: the first report has no epochs, or a key that is not in ``KEYS``.
    """
    first = reports[0]
    if "epochs" not in first or not set(first) <= set(KEYS):
        raise JobError(
            f"job {variant.job.kind} of {variant.name} reports {', '.join(first)}. It must report epochs, "
            f"and may report {', '.join(KEYS[1:])}"
        )
    peak = max(int(report.get("peak_bytes", 0)) for report in reports)
    fields = {**first, "variant": variant.name, "repetition": repetition, "peak_bytes": peak}
    measurement: Measurement = read_record(Measurement, fields)
    return measurement


def read_measured(variant: Variant, reports: Sequence[Mapping[str, Any]]) -> Measured:
    """Return the seconds of an epoch and the mean bytes per server, as a calibration needs them.

    Bytes on the wire are used where network cards count them, and the payload between servers otherwise.
    """
    measurement = read_measurement(variant, 0, reports)
    payload = sum(epoch.bytes_outside for epoch in measurement.epochs)
    wire = payload if measurement.bytes_outside_wire is None else measurement.bytes_outside_wire
    parts = max(len(measurement.epochs), 1) * variant.shape.servers
    return Measured(seconds=measurement.seconds, bytes_per_server=wire / parts)


def run(
    experiment: Experiment, plan: BenchPlan, tell: Tell, *, open_stage: OpenStage = open_stage
) -> Outcome:
    """Measure ``experiment`` and write ``<plan.out>/<ID>.json`` after every repetition.

    1. Each distinct variant runs once to warm up. Variants that differ only by their rate count as one.
    2. Calibration finds the rates at which a baseline spends the requested share of time on the network.
    3. Each repetition runs one job per variant. The order rotates, so that no variant is always first.
    4. Accuracy curves are recorded for the variants that ask for them.

    An error makes the outcome "failed" and keeps the measurements so far.
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
        # An error in one experiment must not cost the results of the next one.
        log.exception("%s failed", experiment.id)
        return running.write("failed", f"{type(error).__name__}: {error}")
    return running.write("measured")


@final
class _Running:
    """State of an experiment while it is measured."""

    def __init__(self, experiment: Experiment, bench: BenchPlan, tell: Tell) -> None:
        self._experiment, self._bench, self._tell = experiment, bench, tell
        self._plan = ExperimentPlan(variants=())
        self._network: dict[str, dict[str, Any]] = {}
        self._measurements: list[Measurement] = []
        self._total, self._seconds = 0, list[float]()
        """Expected number of jobs, and the seconds of each finished job."""

    def build(self) -> list[Shape]:
        """Build the plan and its datasets. Return the distinct shapes in order."""
        assert self._experiment.build is not None
        self._tell(f"{self._experiment.id}: making its datasets")
        plan = self._experiment.build(self._bench)
        check_plan(self._experiment.id, plan)
        self._plan = plan
        return list(dict.fromkeys(variant.shape for variant in plan.variants))

    def measure(self, stage: Stage) -> None:
        """Warm up, calibrate, repeat and record curves."""
        variants, repetitions = self._plan.variants, self._bench.repetitions
        distinct = find_distinct(variants)
        self._total = (
            len(distinct) + len(variants) * repetitions + sum(bool(variant.curve) for variant in variants)
        )
        for variant in distinct:
            warm_up = replace(variant.job, params={**variant.job.params, **variant.job.warm})
            self._do(stage, f"warming up: {variant.name}", variant, warm_up, None)
        rates = self._find_rates(stage)
        for repetition in range(repetitions):
            for variant in rotate(variants, repetition):
                activity = f"repetition {repetition + 1} of {repetitions}: {variant.name}"
                job = variant.job.turn(repetition)
                reports = self._do(stage, activity, variant, job, rates[variant.name])
                self._measurements.append(read_measurement(variant, repetition, reports))
            self.write("failed", f"stopped after repetition {repetition + 1} of {repetitions}")
        for variant in variants:
            if variant.curve is not None:
                activity = f"accuracy over time: {variant.name}"
                reports = self._do(stage, activity, variant, variant.curve, rates[variant.name])
                # Evaluations run between its epochs, so their times are not compared.
                curve = replace(read_measurement(variant, repetitions, reports), epochs=())
                self._measurements.append(curve)

    def write(self, status: Any, reason: str = "") -> Outcome:
        """Write and return the outcome so far."""
        bench, plan = self._bench, self._plan
        options = f"--suite {bench.suite} --only {self._experiment.id} --repetitions {bench.repetitions}"
        options += f" --seed {bench.seed}" if bench.seed else ""
        outcome = Outcome(
            experiment=self._experiment.id,
            status=status,
            reason=reason,
            network=self._network,
            plan=without_paths(plan, str(bench.work)) if plan.variants else None,
            measurements=tuple(self._measurements),
            machine=describe_machine(),
            label=QUICK_LOOK if bench.repetitions < FEWEST else "",
            command=f"python scripts/bench {options} --out DIR",
            date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )
        results.write(bench.out, outcome)
        return outcome

    def _do(
        self, stage: Stage, activity: str, variant: Variant, job: Job, rate: Rate | None
    ) -> list[dict[str, Any]]:
        finished, recent = len(self._seconds), self._seconds[-_RECENT:]
        left_s = sum(recent) / len(recent) * (self._total - finished) if recent else 0.0
        left = f", about {left_s:.0f} s left" if 0 < left_s < 100 else f", about {left_s / 60:.0f} min left"
        jobs = f"({finished} of {self._total} jobs{left if recent else ''})"
        self._tell(f"{self._experiment.id}: {activity} {jobs}")
        begin = time.monotonic()
        reports = stage.do(variant.shape, job, rate)
        self._seconds.append(time.monotonic() - begin)
        return reports

    def _find_rates(self, stage: Stage) -> dict[str, Rate | None]:
        variants = {variant.name: variant for variant in self._plan.variants}
        calibrations: dict[MatchedPhi, Calibration] = {}
        rates: dict[str, Rate | None] = {}
        for variant in variants.values():
            rate, note = variant.rate, dict[str, Any]()
            if not stage.limits(variant.shape):
                rate = None
            if isinstance(rate, MatchedPhi):
                if rate not in calibrations:
                    calibrations[rate] = self._calibrate(stage, variants[rate.baseline], rate.phi)
                calibration = {"baseline": rate.baseline, **calibrations[rate].to_json()}
                note = {"phi": calibrations[rate].phi, "calibration": calibration}
                rate = calibrations[rate].rate
            rates[variant.name] = rate
            self._network[variant.name] = stage.describe(variant.shape, rate) | note
        return rates

    def _calibrate(self, stage: Stage, baseline: Variant, phi: float) -> Calibration:
        expected = len(self._seconds), self._total
        self._total += _CALIBRATION_JOBS

        def measure(rate: Rate | None) -> Measured:
            limit = "without limit" if rate is None else f"at {rate}"
            activity = f"finding the rate at which {baseline.name} has phi {phi:g}: {limit}"
            return read_measured(baseline, self._do(stage, activity, baseline, baseline.job, rate))

        calibration = find_rate(measure, phi)
        self._total = expected[1] + len(self._seconds) - expected[0]
        return calibration


def find_distinct(variants: Sequence[Variant]) -> list[Variant]:
    """Return the variants whose job or shape differs from all earlier ones. Rates are ignored."""
    workloads = [(variant.shape, variant.job) for variant in variants]
    return [variant for index, variant in enumerate(variants) if workloads[index] not in workloads[:index]]


def rotate(variants: Sequence[Variant], repetition: int) -> list[Variant]:
    """Return ``variants`` in the order of this repetition: A B C, B C A, C A B, A B C and so on."""
    first = repetition % max(len(variants), 1)
    return [*variants[first:], *variants[:first]]


def without_paths(plan: ExperimentPlan, work: str) -> ExperimentPlan:
    """Return ``plan`` with the folder of datasets replaced by the word WORK."""
    text = json.dumps(results.plain(asdict(plan))).replace(json.dumps(work)[1:-1], "WORK")
    portable: ExperimentPlan = read_record(ExperimentPlan, json.loads(text))
    return portable
