"""How long a worker may take before another does its work (Dorylus, section 4: five times what is usual)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from dglx_dist.errors import ConfigError

MAX_BACKOFF = 8.0


@final
@dataclass(frozen=True, kw_only=True)
class RelaunchRule:
    """Time-out = max(``least_s``, ``factor`` x moving average), more for further attempts.

    Raises:
        ConfigError: a number is out of its bounds.
    """

    least_s: float = 0.5
    factor: float = 5.0
    keep: float = 0.95
    """Weight of the past in the moving average."""
    first_s: float = 10.0
    """Time-out while no worker of the kind has finished: it may have to start, and import."""
    retries: int = 8
    """How often one piece of work is launched again before the run gives up."""

    def __post_init__(self) -> None:
        if not (self.least_s > 0 and self.first_s > 0 and self.factor >= 1 and 0 <= self.keep < 1):
            raise ConfigError(
                f"{self} makes no time-out; give least_s and first_s above 0, a factor of at least 1 and "
                "keep in [0, 1)"
            )
        if self.retries < 0:
            raise ConfigError(f"retries is {self.retries}; give at least 0")


@final
class Durations:
    """Moving averages of how long each kind of work takes, and the time-outs that follow. Not thread-safe."""

    def __init__(self, rule: RelaunchRule) -> None:
        self._rule = rule
        self._average: dict[tuple[int, str], float] = {}

    def add(self, kind: tuple[int, str], seconds: float) -> None:
        """Count one piece of work of ``kind`` (step, direction) that took ``seconds``."""
        before, keep = self._average.get(kind), self._rule.keep
        self._average[kind] = seconds if before is None else keep * before + (1 - keep) * seconds

    def average(self, kind: tuple[int, str]) -> float | None:
        """Return the moving average in seconds; None before the first."""
        return self._average.get(kind)

    def timeout_s(self, kind: tuple[int, str], attempt: int = 0) -> float:
        """Return how long attempt 0, 1, ... at ``kind`` may take, in seconds.

        Each further attempt has twice the time, up to 8 times: where the machine is slow, and not the
        worker dead, launching again makes it slower still.
        """
        average, rule = self._average.get(kind), self._rule
        usual = rule.first_s if average is None else max(rule.least_s, rule.factor * average)
        return usual * min(2.0**attempt, MAX_BACKOFF)
