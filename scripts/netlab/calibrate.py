"""Matched phi: the link rate at which a command spends a wanted share of its time on the network.

    phi = 1 - seconds with links that are not limited / seconds at the rate

is the part of the time that the network costs; docs/development/netlab.md, "Matched phi",
says why shares are compared.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, final

from dglx_dist.errors import ConfigError
from dglx_dist.planner.records import Rate
from scripts.netlab.base import Lab, LabError
from scripts.netlab.launch import run
from scripts.netlab.traces import Trace, make_out, read_trace
from scripts.out_files import last_lines, write_text

MIN_RATE, MAX_RATE = Rate(100_000), Rate(100_000_000_000)
_MIN_BYTES = 1_000
_ROUNDED_TO = 3  # digits of a rate
_FARTHEST = 8.0
"""One try moves the rate by this factor at most, so that noise throws none far away."""
_NO_COST = 1.02
"""A rate at which the work takes at most so many times its time at no limit tells nothing of others."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Result of one measurement."""

    seconds: float
    """Seconds of one unit of work, such as an epoch."""
    bytes_per_server: float
    """Bytes that the busiest card sent or received in that time."""


@dataclass(frozen=True, kw_only=True)
class Try:
    """One rate that was tried."""

    rate: Rate
    seconds: float
    phi: float


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The rate to use."""

    rate: Rate
    phi: float
    """Measured at this rate."""
    wanted: float
    within_tolerance: bool
    seconds_free: float
    """With links that are not limited."""
    seconds_at_rate: float
    bytes_per_server: float
    """In ``seconds_free``."""
    tries: tuple[Try, ...]
    """In their order."""

    def to_json(self) -> dict[str, Any]:
        """Return JSON values, rates in words."""
        tries = [asdict(attempt) | {"rate": str(attempt.rate)} for attempt in self.tries]
        return asdict(self) | {"rate": str(self.rate), "tries": tries}


def find_rate(
    measure: Callable[[Rate | None], Measured], phi: float, tolerance: float = 0.03, max_tries: int = 6
) -> Calibration:
    """Find the rate at which ``measure`` takes ``1 / (1 - phi)`` of its time at no limit.

    The first guess takes the time on the wire to be added to that of computing; then secant steps follow, in
    seconds over 1 / rate, which is a line where the two are added and where the wire hides all computing.

    ``measure`` runs the work with links of the given rate, None: not limited; at that first. After
    ``max_tries`` rates the nearest is returned, ``within_tolerance`` False. ConfigError: an argument is out
    of range, or the work does not communicate.
    """
    check_arguments(phi, tolerance, max_tries)
    free = measure(None)
    if not 0 < free.seconds < math.inf:
        raise ConfigError(f"the command took {free.seconds} s without limits: there is no time to measure")
    if free.bytes_per_server < _MIN_BYTES:
        raise ConfigError(
            f"the command does not communicate: {free.bytes_per_server:.0f} bytes per server and unit of "
            "work; at no rate does the network take its time. Does it run on more than one server?"
        )
    tries: list[Try] = []
    rate = _round(free.bytes_per_server * 8 / (phi / (1 - phi) * free.seconds))
    while True:
        seconds = measure(rate).seconds
        tries.append(Try(rate=rate, seconds=seconds, phi=1 - free.seconds / seconds))
        if abs(tries[-1].phi - phi) <= tolerance or len(tries) == max_tries:
            break
        rate = _next_rate(tries, free, phi)
        if any(attempt.rate == rate for attempt in tries):
            break  # at the end of what is possible, or no finer step is left
    best = min(tries, key=lambda attempt: abs(attempt.phi - phi))
    return Calibration(
        rate=best.rate,
        phi=best.phi,
        wanted=phi,
        within_tolerance=abs(best.phi - phi) <= tolerance,
        seconds_free=free.seconds,
        seconds_at_rate=best.seconds,
        bytes_per_server=free.bytes_per_server,
        tries=tuple(tries),
    )


def check_arguments(phi: float, tolerance: float, max_tries: int) -> None:
    """Raise ConfigError where :func:`find_rate` would refuse them, before anything is measured."""
    if not 0 < phi < 1:
        raise ConfigError(f"phi={phi} must lie between 0 and 1, e.g. 0.65: a share of the time")
    if not 0 < tolerance < 1:
        raise ConfigError(f"tolerance={tolerance} must lie between 0 and 1, e.g. 0.03")
    if max_tries < 1:
        raise ConfigError(f"max_tries={max_tries} must be at least 1")


def _next_rate(tries: Sequence[Try], free: Measured, phi: float) -> Rate:
    wanted_s = free.seconds / (1 - phi)
    # Points (1 / rate, seconds), the rate in bits per second.
    points = sorted((1 / attempt.rate.bits_per_s, attempt.seconds) for attempt in tries)
    quick = [point for point in points if point[1] <= wanted_s]
    slow = [point for point in points if point[1] > wanted_s]
    if quick and slow and quick[-1][0] < slow[0][0]:
        share = (wanted_s - quick[-1][1]) / (slow[0][1] - quick[-1][1])
        return _round(1 / (quick[-1][0] + min(max(share, 0.1), 0.9) * (slow[0][0] - quick[-1][0])))
    # The outermost; where noise has made a slow link quicker than a fast one, whichever is nearest.
    ends = [*quick[-1:], *slow[:1]]
    nearest = min(ends, key=lambda point: abs(point[1] - wanted_s))
    factor = _extrapolate(points, free, wanted_s) / nearest[0]
    # Away from what was too quick, or too slow, whatever noise makes of the line.
    least, most = (1.02, _FARTHEST) if nearest[1] <= wanted_s else (1 / _FARTHEST, 1 / 1.02)
    return _round(1 / (nearest[0] * min(max(factor, least), most)))


def _extrapolate(points: Sequence[tuple[float, float]], free: Measured, wanted_s: float) -> float:
    telling = [point for point in points if point[1] > _NO_COST * free.seconds]
    if not telling:
        # The wire was hidden behind computing: at this rate it alone takes as long as wanted.
        return max(wanted_s / (free.bytes_per_server * 8), 2 * points[-1][0])
    nearest = sorted(telling, key=lambda point: abs(point[1] - wanted_s))
    if len(nearest) > 1 and nearest[0][0] != nearest[1][0]:
        slope = (nearest[0][1] - nearest[1][1]) / (nearest[0][0] - nearest[1][0])
        if slope > 0:
            return nearest[0][0] + (wanted_s - nearest[0][1]) / slope
    inverse, seconds = nearest[0]
    if seconds > wanted_s:
        return inverse * (wanted_s - free.seconds) / (seconds - free.seconds)
    return inverse * wanted_s / seconds


def _round(bits_per_s: float) -> Rate:
    inside = min(max(bits_per_s, MIN_RATE.bits_per_s), MAX_RATE.bits_per_s)
    return Rate(int(float(f"{inside:.{_ROUNDED_TO}g}")))


_SHOWN_LINES = 20


@final
class CommandMeasure:
    """Measures a command's epochs at a rate, as :func:`find_rate` calls it, on an idle lab of namespaces.

    Each run leaves its output and its trace in ``folder``/run-<i>; ``tell`` gets a line before and after it.
    """

    def __init__(
        self,
        lab: Lab,
        command: Sequence[str],
        folder: Path,
        tell: Callable[[str], None],
        *,
        ranks_per_server: int = 1,
        timeout_s: float | None = None,
    ) -> None:
        if lab.kind == "loopback":
            raise LabError(
                f"a rate can only be found where links can be limited: {lab.missing or 'this is loopback'}"
            )
        self.lab, self.command, self.ranks_per_server = lab, command, ranks_per_server
        self._folder, self._tell, self._timeout_s = folder, tell, timeout_s
        self._runs = 0

    def __call__(self, rate: Rate | None) -> Measured:
        """Return what :func:`measured_of` says of a run; LabError: it failed."""
        self.lab.set_rates(rate, self.lab.spec.internal)
        at = "without a limit" if rate is None else f"at {rate}"
        self._tell(f"running the command {at}")
        folder = self._folder / f"run-{self._runs}"
        self._runs += 1
        make_out(folder)
        done = run(
            self.lab,
            self.command,
            ranks_per_server=self.ranks_per_server,
            trace=folder / "trace",
            log_folder=folder,
            show=False,
            timeout_s=self._timeout_s,
        )
        if done.exit_code:
            why = done.failure or f"exit code {done.exit_code}"
            logs = last_lines(sorted(folder.glob("server-*.log")), _SHOWN_LINES)
            raise LabError(f"the command failed {at}: {why}{logs}")
        measured = measured_of(read_trace(folder / "trace"))
        self._tell(f"{measured.seconds:.3g} s per epoch {at}")
        return measured


def measured_of(trace: Trace) -> Measured:
    """Return the median epoch of ``trace`` without the first, which warms up, and what a server sent."""
    seconds = trace.epoch_seconds()
    if len(seconds) < 2:
        raise ConfigError(
            f"the command noted {len(seconds)} epochs and two are needed, as the first only warms up: give "
            "it more (--epochs), and let it train with dglx_dist (`dglx train`, dx.fit, or a dx.DataLoader "
            "that is gone through as a whole)"
        )
    records = [record for ranks in trace.sessions for record in ranks[0].epochs]
    if records:
        sent = float(median(record.bytes_outside for record in records))
    else:
        sent = sum(sent for sent, _ in trace.ledger_outside_by_server().values()) / len(seconds)
    return Measured(seconds=median(seconds[1:]), bytes_per_server=sent / trace.num_servers)


def write_calibration(folder: Path, found: Calibration, measure: CommandMeasure) -> Path:
    """Write ``calibration.json`` to ``folder``, whole or not at all; return its path."""
    values = found.to_json() | {
        "command": list(measure.command),
        "ranks_per_server": measure.ranks_per_server,
        "lab": measure.lab.describe(),
    }
    return write_text(folder / "calibration.json", json.dumps(values, indent=2) + "\n")
