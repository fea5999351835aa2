"""One command, run on a lab at one rate after another: the measuring half of matched phi."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import final

from dglx_dist.errors import CommandError, ConfigError, LabError
from dglx_dist.planner.records import Rate
from scripts.netlab.base import Lab
from scripts.netlab.launch import run
from scripts.netlab.phi import Calibration, Measured
from scripts.netlab.traces import Trace, read

FILE = "calibration.json"
_SHOWN_LINES = 20


@dataclass(frozen=True, kw_only=True)
class CalibrationPlan:
    """What is run, and how."""

    command: Sequence[str]
    ranks_per_server: int = 1
    timeout_s: float | None = None
    """Of one run of the command."""


@final
class CommandMeasure:
    """Measures a command's epochs at a rate; what :func:`scripts.netlab.phi.find_rate` calls.

    Args:
        lab: Up, idle, of namespaces.
        plan: What is run.
        folder: Each run leaves its output and its trace in ``run-<i>`` there.
        tell: Called with a line before each run and after it.

    Raises:
        LabError: the lab is plain loopback, where no link is limited.
    """

    def __init__(self, lab: Lab, plan: CalibrationPlan, folder: Path, tell: Callable[[str], None]) -> None:
        if lab.kind == "loopback":
            raise LabError(
                f"a rate can only be found where links can be limited: {lab.missing or 'this is loopback'}"
            )
        self._lab, self._plan, self._folder, self._tell = lab, plan, folder, tell
        self._runs = 0

    def __call__(self, rate: Rate | None) -> Measured:
        """Run the command with ``rate`` between servers.

        Returns:
            The median epoch without the first, which warms up, and what a server sent in one, on average.

        Raises:
            CommandError: the command failed.
            ConfigError: it noted fewer than two epochs.
            StorageError: what its ranks left cannot be read.
        """
        self._lab.set_rates(rate, self._lab.spec.internal)
        at = "without a limit" if rate is None else f"at {rate}"
        self._tell(f"running the command {at}")
        folder = self._folder / f"run-{self._runs}"
        self._runs += 1
        _clear(folder)
        done = run(
            self._lab,
            self._plan.command,
            ranks_per_server=self._plan.ranks_per_server,
            trace=folder / "trace",
            log_folder=folder,
            show=False,
            timeout_s=self._plan.timeout_s,
        )
        if done.exit_code:
            why = done.failure or f"exit code {done.exit_code}"
            raise CommandError(f"the command failed {at}: {why}\n{_last_lines(folder)}")
        measured = measured_of(read(folder / "trace"))
        self._tell(f"{measured.seconds:.3g} s per epoch {at}")
        return measured


def measured_of(trace: Trace) -> Measured:
    """Return the median epoch of ``trace`` without the first, and the payload that a server sent in one.

    Raises:
        ConfigError: there are fewer than two epochs.
    """
    seconds = trace.epoch_seconds()
    if len(seconds) < 2:
        raise ConfigError(
            f"the command noted {len(seconds)} epochs and two are needed, as the first only warms up: give "
            "it more (--epochs), and let it train with dglx_dist (`dglx train`, dx.fit, or a dx.DataLoader "
            "that is gone through as a whole)"
        )
    return Measured(seconds=median(seconds[1:]), bytes_per_server=_bytes_per_epoch(trace) / trace.num_servers)


def _bytes_per_epoch(trace: Trace) -> float:
    """Payload between servers in one epoch; of a loop of one's own, all that was sent over the passes."""
    records = [record for ranks in trace.sessions for record in ranks[0].epochs]
    if records:
        return median(record.bytes_outside for record in records)
    sent = sum(sent for sent, _ in trace.ledger_outside_by_server().values())
    return sent / len(trace.epoch_seconds())


def write(folder: Path, found: Calibration, lab: Lab, plan: CalibrationPlan) -> Path:
    """Write ``calibration.json`` to ``folder``, whole or not at all; return its path."""
    values = {
        "rate": str(found.rate),
        "phi": found.phi,
        "wanted": found.wanted,
        "within_tolerance": found.within_tolerance,
        "seconds_free": found.seconds_free,
        "seconds_at_rate": found.seconds_at_rate,
        "bytes_per_server": found.bytes_per_server,
        "tries": [asdict(one) | {"rate": str(one.rate)} for one in found.tries],
        "command": list(plan.command),
        "ranks_per_server": plan.ranks_per_server,
        "lab": lab.describe(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"{FILE}.part"
    unfinished.write_text(json.dumps(values, indent=2) + "\n")
    return unfinished.replace(folder / FILE)


def _clear(folder: Path) -> None:
    """Make ``folder`` and remove what an earlier run left in it."""
    (folder / "trace").mkdir(parents=True, exist_ok=True)
    for earlier in [*folder.glob("trace/rank-*"), *folder.glob("server-*.log")]:
        earlier.unlink()


def _last_lines(folder: Path) -> str:
    lines = []
    for log in sorted(folder.glob("server-*.log")):
        last = log.read_text(errors="replace").splitlines()[-_SHOWN_LINES:]
        lines += [f"{log.stem} | {line}" for line in last]
    return "\n".join(lines)
