"""How far an experiment is."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, final


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
