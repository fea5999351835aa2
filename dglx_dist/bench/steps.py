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
        self._done = 0
        self._seconds = 0.0
        self._started: float | None = None

    def expect(self, jobs: int) -> None:
        """Count ``jobs`` more (or fewer, below 0) to come."""
        self._total += jobs

    def begin(self, doing: str) -> None:
        """Tell what is done now; the job before, if any, has ended."""
        self.end()
        self._started = time.monotonic()
        left = self._seconds / self._done * (self._total - self._done) if self._done else None
        self._tell(
            Step(
                experiment=self._experiment,
                doing=doing,
                done=self._done,
                total=self._total,
                seconds_left=left,
            )
        )

    def end(self) -> None:
        """Count the job that runs, if any, as ended."""
        if self._started is not None:
            self._seconds += time.monotonic() - self._started
            self._done += 1
            self._started = None

    def say(self, doing: str) -> None:
        """Tell what is done now and is no job, such as making datasets."""
        self._tell(
            Step(
                experiment=self._experiment,
                doing=doing,
                done=self._done,
                total=self._total,
                seconds_left=None,
            )
        )
