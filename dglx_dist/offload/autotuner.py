"""How many workers a graph server should have, from the trend of its own queue (Dorylus, section 6)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from dglx_dist.errors import ConfigError

MOST_WORKERS = 100
WORKER_BYTES_PER_S = 25e6
"""200 Mbit/s: what one of 100 functions has left of a server's network."""
_LEAST_POWER = 1 / 16


@final
@dataclass(frozen=True, kw_only=True)
class TunerLimits:
    """What bounds the number of workers of one graph server.

    Raises:
        ConfigError: a number is not above 0.
    """

    intervals: int
    """Intervals of the graph server: more workers than work help nobody. 0 counts as 1."""
    link_bytes_per_s: float | None = None
    """What the server's network carries; None: it is no bound."""
    worker_bytes_per_s: float = WORKER_BYTES_PER_S
    """What one worker should have of it."""

    def __post_init__(self) -> None:
        if self.intervals < 0:
            raise ConfigError(f"there are {self.intervals} intervals; give at least 0")
        for name in ("link_bytes_per_s", "worker_bytes_per_s"):
            rate = getattr(self, name)
            if rate is not None and not rate > 0:
                raise ConfigError(f"{name} is {rate}; give bytes per second above 0")

    @property
    def most(self) -> int:
        """Most workers that can be of use, in [1, 100]."""
        network = math.inf
        if self.link_bytes_per_s is not None:
            network = self.link_bytes_per_s / self.worker_bytes_per_s
        return int(max(1, min(self.intervals, MOST_WORKERS, network)))


@final
class Autotuner:
    """Moves the number of workers by the trend of the graph server's queue of tasks.

    A queue that grows says that workers give more than the server's cores take: fewer. One that is empty or
    shrinks fast says that the cores wait: more. Else the number stays. It is halved or doubled at first; each
    turn takes the root of the factor and three moves one way square it, so the number settles where both
    keep up, and still follows a change.

    Args:
        limits: Bounds; the number starts at the upper one, min(intervals, 100).
    """

    def __init__(self, limits: TunerLimits) -> None:
        self._most = limits.most
        self.workers = self._most
        """How many there should be now."""
        self._power = 1.0
        self._last: float | None = None
        self._way, self._same = 0, 0

    def observe(self, queue: float) -> int:
        """Take the length of the queue, at equal intervals of time; return the number of workers.

        Raises:
            ConfigError: the length is negative.
        """
        if not queue >= 0:
            raise ConfigError(f"a queue of {queue} tasks; give at least 0")
        before, self._last = self._last, queue
        # One length is no trend.
        way = 0 if before is None else self._judge(before, queue)
        if way:
            self._turn(way)
            target = round(self.workers * 2.0 ** (way * self._power))
            moved = max(target, self.workers + 1) if way > 0 else min(target, self.workers - 1)
            self.workers = min(max(moved, 1), self._most)
        return self.workers

    def _judge(self, before: float, queue: float) -> int:
        """Return -1 for fewer, 1 for more, 0 to stay."""
        # A tenth of the workers' tasks more or less is how a full pipeline breathes.
        noise = max(1.0, self.workers / 10)
        if queue - before > noise:
            return -1
        shrinks_fast = before - queue > max(noise, queue)
        return 1 if queue == 0 or shrinks_fast else 0

    def _turn(self, way: int) -> None:
        if self._way and way != self._way:
            self._power, self._same = max(_LEAST_POWER, self._power / 2), 0
        self._same += 1
        if self._same > 3:
            self._power, self._same = min(2 * self._power, 1.0), 1
        self._way = way
