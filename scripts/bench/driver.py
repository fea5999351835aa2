"""Runs one experiment: what is compared takes turns on servers that are all up at once."""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeAlias, final

from dglx_dist.errors import ConfigError, DglxError, JobError
from dglx_dist.planner.records import Rate
from scripts.bench import results, suites
from scripts.bench.pool import OpenStage, Stage, open_stage
from scripts.bench.records import (
    BenchPlan,
    Experiment,
    ExperimentPlan,
    Job,
    MatchedPhi,
    Measurement,
    Outcome,
    Variant,
)
from scripts.bench.results import read_epoch
from scripts.netlab.calibrate import Calibration, Measured, find_rate

_PACKAGES = ("dglx-dist", "torch", "dgl", "numpy", "numba", "pyzmq", "pyarrow", "torch-geometric")


def describe_machine() -> dict[str, object]:
    """Return JSON values: cpu, cores (all and usable ones), memory in bytes, kernel, versions."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count() or 1,
        "cores_usable": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.system(),
        "kernel": platform.release(),
        "versions": {"python": platform.python_version(), **_versions()},
    }


def _cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.is_file() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


@dataclass(frozen=True, kw_only=True)
class Step:
    """What is being done now."""

    experiment: str
    """Its id."""
    doing: str
    """E.g. "repetition 2 of 5: metis"."""
    done: int
    """Jobs that have ended."""
    total: int
    """Jobs of the experiment, as far as it is known."""
    seconds_left: float | None
    """For the jobs that have not; None: nothing is known yet."""


Tell: TypeAlias = Callable[[Step], None]

_RECENT = 4


@final
class Steps:
    """Counts the jobs of an experiment and tells which one comes.

    Args:
        experiment: Its id.
        tell: Called before each job.
    """

    def __init__(self, experiment: str, tell: Tell) -> None:
        self._experiment = experiment
        self._tell = tell
        self._total = 0
        self._seconds: list[float] = []
        """Of each job that has ended."""
        self._started: float | None = None

    def expect(self, jobs: int) -> None:
        """Count ``jobs`` more (or fewer, below 0) to come."""
        self._total += jobs

    def begin(self, doing: str) -> None:
        """Tell what is done now; the job before, if any, has ended."""
        self.end()
        self._started = time.monotonic()
        # The first jobs start processes and compile; the last ones are like those that come.
        recent = self._seconds[-_RECENT:]
        left = sum(recent) / len(recent) * (self._total - len(self._seconds)) if recent else None
        self._say(doing, left)

    def end(self) -> None:
        """Count the job that runs, if any, as ended."""
        if self._started is not None:
            self._seconds.append(time.monotonic() - self._started)
            self._started = None

    def say(self, doing: str) -> None:
        """Tell what is done now and is no job, such as making datasets."""
        self._say(doing, None)

    def _say(self, doing: str, seconds_left: float | None) -> None:
        step = Step(
            experiment=self._experiment,
            doing=doing,
            done=len(self._seconds),
            total=self._total,
            seconds_left=seconds_left,
        )
        self._tell(step)


KEYS = ("epochs", "bytes_outside_wire", "peak_bytes", "accuracy", "extra")
"""Of a report, as in :class:`Measurement`. All but ``peak_bytes`` are over all ranks, and rank 0's count."""


def read_measurement(variant: Variant, repetition: int, reports: Sequence[Mapping[str, Any]]) -> Measurement:
    """Put the reports, by rank, together.

    Raises:
        JobError: a report lacks the epochs, or has a key that is not in ``KEYS``.
    """
    first = reports[0]
    if "epochs" not in first or not set(first) <= set(KEYS):
        raise JobError(
            f"job {variant.job.kind} of {variant.name} reports {', '.join(first)}; it must report epochs, "
            f"and of others only {', '.join(KEYS[1:])}"
        )
    wire = first.get("bytes_outside_wire")
    return Measurement(
        variant=variant.name,
        repetition=repetition,
        epochs=tuple(read_epoch(epoch) for epoch in first["epochs"]),
        bytes_outside_wire=None if wire is None else int(wire),
        peak_bytes=max(int(report.get("peak_bytes", 0)) for report in reports),
        accuracy=tuple((float(seconds), float(share)) for seconds, share in first.get("accuracy", [])),
        extra=first.get("extra", {}),
    )


def read_measured(variant: Variant, reports: Sequence[Mapping[str, Any]]) -> Measured:
    """Return what a calibration needs to know of one job: of an epoch, and of a server with an even share.

    Where no card counts, the payload between servers stands in.
    """
    measurement = read_measurement(variant, 0, reports)
    payload = sum(epoch.bytes_outside for epoch in measurement.epochs)
    wire = payload if measurement.bytes_outside_wire is None else measurement.bytes_outside_wire
    parts = max(len(measurement.epochs), 1) * variant.shape.servers
    return Measured(seconds=measurement.seconds, bytes_per_server=wire / parts)


log = logging.getLogger(__name__)

FEWEST = 5
"""Repetitions without which a median says little."""
QUICK_LOOK = f"quick look, fewer than {FEWEST} repetitions"
_CALIBRATION_JOBS = 3
"""How many a calibration is expected to take, for the estimate of the time left."""


def run(
    experiment: Experiment, plan: BenchPlan, tell: Tell, *, open_stage: OpenStage = open_stage
) -> Outcome:
    """Measure ``experiment`` as ``plan`` says, and write ``<plan.out>/<ID>.json`` after every repetition.

    First every variant runs once to warm up, of those that differ by their rate alone the first; then the
    rates are found at which a baseline communicates as long as is wanted; then come the repetitions, each
    with one job per variant, whose order moves on by one each time so that nobody is always first; last come
    the accuracy curves that variants ask for.

    Args:
        experiment: What is to be measured.
        plan: How often, and where results and datasets are put.
        tell: Called with every step.
        open_stage: What brings up servers and ranks.

    Returns:
        What was written. What goes wrong in the experiment makes it "failed", with the measurements so far.

    Raises:
        StorageError: results cannot be written.
    """
    results.make_folder(plan.out)
    reason = suites.why_absent(experiment)
    if reason:
        return _written(plan, _outcome(experiment, plan, status="absent", reason=reason))
    steps = Steps(experiment.id, tell)
    running = _Running(experiment, plan, steps)
    try:
        running.build()
        with open_stage(running.shapes) as stage:
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

    def __init__(self, experiment: Experiment, bench: BenchPlan, steps: Steps) -> None:
        self._experiment, self._bench, self._steps = experiment, bench, steps
        self._plan: ExperimentPlan | None = None
        self._network: dict[str, dict[str, Any]] = {}
        self._measurements: list[Measurement] = []

    @property
    def variants(self) -> tuple[Variant, ...]:
        """What is compared."""
        return self._plan.variants if self._plan else ()

    @property
    def shapes(self) -> list[Any]:
        """Distinct shapes, in the order of the variants."""
        return list(dict.fromkeys(variant.shape for variant in self.variants))

    def build(self) -> None:
        """Have the experiment make its datasets and say what to run.

        Raises:
            ConfigError: its plan contradicts itself.
        """
        if self._experiment.build is None:
            raise ConfigError(f"{self._experiment.id} has no build; see suites.why_absent")
        self._steps.say("making its datasets")
        plan = self._experiment.build(self._bench)
        check_plan(self._experiment.id, plan)
        self._plan = plan

    def measure(self, stage: Stage) -> None:
        """Warm up, calibrate, repeat and draw curves.

        Raises:
            JobError: a job failed.
            ConfigError: no rate gives the phi that is wanted.
        """
        repetitions = self._bench.repetitions
        curves = [variant for variant in self.variants if variant.curve is not None]
        colds = differing(self.variants)
        self._steps.expect(len(colds) + len(self.variants) * repetitions + len(curves))
        for variant in colds:
            self._steps.begin(f"warming up: {variant.name}")
            stage.do(variant.shape, variant.job.warmed(), None)
        rates = self._find_rates(stage)
        for repetition in range(repetitions):
            for variant in in_turn(self.variants, repetition):
                self._steps.begin(f"repetition {repetition + 1} of {repetitions}: {variant.name}")
                reports = stage.do(variant.shape, variant.job.turn(repetition), rates[variant.name])
                self._measurements.append(read_measurement(variant, repetition, reports))
            self._steps.end()
            self.write("failed", f"stopped after repetition {repetition + 1} of {repetitions}")
        for variant in curves:
            self._draw_curve(stage, variant, rates[variant.name])
        self._steps.end()

    def write(self, status: Any, reason: str = "") -> Outcome:
        """Write and return what is known."""
        outcome = _outcome(
            self._experiment,
            self._bench,
            status=status,
            reason=reason,
            network=self._network,
            plan=None if self._plan is None else without_paths(self._plan, str(self._bench.work)),
            measurements=tuple(self._measurements),
        )
        return _written(self._bench, outcome)

    def _draw_curve(self, stage: Stage, variant: Variant, rate: Rate | None) -> None:
        if variant.curve is None:
            return
        self._steps.begin(f"accuracy over time: {variant.name}")
        reports = stage.do(variant.shape, variant.curve, rate)
        curve = read_measurement(variant, self._bench.repetitions, reports)
        # Its epochs stand between evaluations, and are none of those that are compared.
        self._measurements.append(replace(curve, epochs=()))

    def _find_rates(self, stage: Stage) -> dict[str, Rate | None]:
        by_name = {variant.name: variant for variant in self.variants}
        found: dict[MatchedPhi, Calibration] = {}
        rates: dict[str, Rate | None] = {}
        for variant in self.variants:
            rate, calibrated = variant.rate, {}
            if not stage.limits(variant.shape):
                rate = None
            if isinstance(rate, MatchedPhi):
                if rate not in found:
                    found[rate] = self._calibrate(stage, by_name[rate.baseline], rate.phi)
                calibration = found[rate]
                rate = calibration.rate
                calibrated = _calibration_note(calibration, variant)
            rates[variant.name] = rate
            self._network[variant.name] = stage.describe(variant.shape, rate) | calibrated
        return rates

    def _calibrate(self, stage: Stage, baseline: Variant, phi: float) -> Calibration:
        self._steps.expect(_CALIBRATION_JOBS)
        taken = 0

        def measure(rate: Rate | None) -> Measured:
            nonlocal taken
            taken += 1
            self._steps.expect(int(taken > _CALIBRATION_JOBS))
            at = "without limit" if rate is None else f"at {rate}"
            self._steps.begin(f"finding the rate at which {baseline.name} has phi {phi:g}: {at}")
            return read_measured(baseline, stage.do(baseline.shape, baseline.job, rate))

        calibration = find_rate(measure, phi)
        self._steps.expect(min(taken - _CALIBRATION_JOBS, 0))
        return calibration


def differing(variants: Sequence[Variant]) -> list[Variant]:
    """Return those that do something else than all before them, or on other servers; rates do not count."""
    found: list[Variant] = []
    for variant in variants:
        if not any((one.shape, one.job) == (variant.shape, variant.job) for one in found):
            found.append(variant)
    return found


def in_turn(variants: Sequence[Variant], repetition: int) -> list[Variant]:
    """Return ``variants`` in the order of this repetition: A B C, B C A, C A B, A B C, ..."""
    first = repetition % max(len(variants), 1)
    return [*variants[first:], *variants[:first]]


def check_plan(experiment: str, plan: ExperimentPlan) -> None:
    """Raise ConfigError where names in ``plan`` are double or belong to nobody."""
    names = [variant.name for variant in plan.variants]
    if not names or len(set(names)) != len(names):
        raise ConfigError(
            f"{experiment}: its variants are {names}; give it at least one, each with its own name"
        )
    asked = {variant.rate.baseline for variant in plan.variants if isinstance(variant.rate, MatchedPhi)}
    asked |= {name for ratio in plan.ratios for name in (ratio.over, ratio.under)}
    asked |= {name for ratio in plan.ratios for cell in ratio.cells for name in (cell.chosen, *cell.ways)}
    unknown = sorted(asked - set(names))
    if unknown:
        raise ConfigError(
            f"{experiment}: no variant is called {', '.join(unknown)} (there are: {', '.join(names)})"
        )


def without_paths(plan: ExperimentPlan, work: str) -> ExperimentPlan:
    """Return ``plan`` as it is kept: with the word WORK in place of the user's folder of datasets."""

    def kept(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: kept(inner) for name, inner in value.items()}
        if isinstance(value, list | tuple):
            return [kept(inner) for inner in value]
        return value.replace(work, "WORK") if isinstance(value, str) else value

    def job(given: Job) -> Job:
        turns = tuple(kept(one) for one in given.turns)
        return replace(given, params=kept(given.params), warm=kept(given.warm), turns=turns)

    variants = (
        replace(one, job=job(one.job), curve=None if one.curve is None else job(one.curve))
        for one in plan.variants
    )
    return replace(plan, variants=tuple(variants), facts=kept(plan.facts))


def _calibration_note(calibration: Calibration, variant: Variant) -> dict[str, Any]:
    tries = [{"rate": str(one.rate), "seconds": one.seconds, "phi": one.phi} for one in calibration.tries]
    known: Mapping[str, Any] = asdict(calibration) | {"rate": str(calibration.rate), "tries": tries}
    baseline = variant.rate.baseline if isinstance(variant.rate, MatchedPhi) else ""
    return {"phi": calibration.phi, "calibration": {"baseline": baseline, **known}}


def _outcome(experiment: Experiment, bench: BenchPlan, **fields: Any) -> Outcome:
    few = bench.repetitions < FEWEST
    return Outcome(
        experiment=experiment.id,
        machine=describe_machine(),
        label=QUICK_LOOK if few else "",
        command=repeats(experiment, bench),
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **fields,
    )


def repeats(experiment: Experiment, bench: BenchPlan) -> str:
    """Return the command that does the same again."""
    told = ["--suite", bench.suite, "--only", experiment.id, "--repetitions", str(bench.repetitions)]
    told += ["--seed", str(bench.seed)] if bench.seed else []
    return " ".join(["python scripts/bench", *told, "--out DIR"])


def _written(plan: BenchPlan, outcome: Outcome) -> Outcome:
    results.write(plan.out, outcome)
    return outcome
