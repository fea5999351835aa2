"""Holds a worker to a share of a core where no control group does: after work it rests."""

from __future__ import annotations

import time
from typing import final


@final
class Duty:
    """Rests so that processor time is at most ``share`` of the time that passed.

    It rests at the places of a task's course, not within a half: sums over a task are right, pauses are
    longer than the kernel's. The first rest is for the start of the process, too.

    Args:
        share: Of one core, in (0, 1].
    """

    def __init__(self, share: float) -> None:
        self._rest_per_s = 1 / share - 1
        self._used_s = 0.0

    def rest(self) -> None:
        """Sleep for what was used since the last call."""
        used_s = time.process_time()
        time.sleep((used_s - self._used_s) * self._rest_per_s)
        self._used_s = used_s
