"""How far each interval of one graph server is, and which may go on: gate, barriers, modes (section 5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, final

from dglx_dist.errors import ConfigError
from dglx_dist.strategies.bounded.course import Barrier, Move

Mode: TypeAlias = Literal["no_pipe", "pipe", "async"]


@final
@dataclass(kw_only=True)
class Pace:
    """How epochs may overlap; the one object of a run that says so, changed only while nothing runs."""

    mode: Mode = "pipe"
    staleness: int = 0
    """S: an interval may begin epoch e once e - S updates were made. Only where epochs are asynchronous."""
    first_epoch: int = 0
    """Always synchronous: there are no values yet to be stale."""
    synchronous_from: int | None = None
    """The epoch from which on all are synchronous; None: never."""

    def __post_init__(self) -> None:
        if self.staleness < 0:
            raise ConfigError(f"staleness={self.staleness} must be at least 0")

    def is_synchronous(self, epoch: int) -> bool:
        """Whether ``epoch`` has a barrier at every Scatter."""
        late = self.synchronous_from is not None and epoch >= self.synchronous_from
        return self.mode != "async" or epoch <= self.first_epoch or late

    def lead(self, epoch: int) -> int:
        """How many updates may be missing when an interval begins ``epoch``."""
        return 0 if self.is_synchronous(epoch) else self.staleness


@final
class Progress:
    """Positions of the intervals of one graph server. A position is epoch x moves + move. Not thread-safe.

    Args:
        course: The moves of an epoch.
        num_intervals: k of this graph server, at least 1.
        pace: See there.
        peers: Numbers of the other graph servers.
    """

    def __init__(self, course: Sequence[Move], num_intervals: int, pace: Pace, peers: Sequence[int]) -> None:
        self._course, self._pace = tuple(course), pace
        start = pace.first_epoch * len(course)
        self.position = [start] * num_intervals
        """Of the next move, or of the one that is under way, of each interval."""
        self.running: set[int] = set()
        """Intervals with a move under way."""
        self.updates = pace.first_epoch
        """Updates of the weights that all parameter servers have made."""
        self.end = pace.first_epoch
        """The epoch before which everybody stops."""
        self.floor = start
        """The least position of an interval."""
        self._at_floor = num_intervals
        self._heard = dict.fromkeys(peers, start)
        self._told = start

    @property
    def is_done(self) -> bool:
        """Whether all intervals, and the weights, are at the end."""
        return self.floor >= self.end * len(self._course) and self.updates >= self.end

    def move_of(self, interval: int) -> tuple[int, Move]:
        """Return the epoch of ``interval`` and its next move, or the one under way."""
        epoch, index = divmod(self.position[interval], len(self._course))
        return epoch, self._course[index]

    def following(self, interval: int) -> Move | None:
        """Return the move after that, if it is of the same epoch."""
        index = self.position[interval] % len(self._course) + 1
        return self._course[index] if index < len(self._course) else None

    def may_go(self, interval: int) -> bool:
        """Whether ``interval`` may take its next move now."""
        if interval in self.running:
            return False
        position = self.position[interval]
        epoch, index = divmod(position, len(self._course))
        if epoch >= self.end or (index == 0 and epoch > self.updates + self._pace.lead(epoch)):
            return False
        if not self._pace.is_synchronous(epoch):
            return True
        barrier = self._course[index].barrier
        if self.floor < position and (barrier is not Barrier.NONE or self._pace.mode == "no_pipe"):
            return False
        return barrier is not Barrier.GLOBAL or not self.behind(position)

    def able(self) -> list[int]:
        """Return all intervals that may go."""
        return [interval for interval in range(len(self.position)) if self.may_go(interval)]

    def behind(self, position: int) -> list[int]:
        """Return the peers that have not said that they came to ``position``."""
        return [peer for peer, floor in self._heard.items() if floor < position]

    def start(self, interval: int) -> tuple[int, Move]:
        """Note that ``interval`` begins its next move; return its epoch and the move."""
        assert self.may_go(interval), f"interval {interval} may not go"
        self.running.add(interval)
        return self.move_of(interval)

    def finish(self, interval: int) -> bool:
        """Note that ``interval`` ended its move; return whether all intervals came further by that."""
        self.running.remove(interval)
        before = self.position[interval]
        self.position[interval] += 1
        if before > self.floor:
            return False
        self._at_floor -= 1
        if self._at_floor:
            return False
        self.floor = min(self.position)
        self._at_floor = self.position.count(self.floor)
        return True

    def news(self) -> int | None:
        """Return the furthest barrier of all graph servers that this one came to, if it is not told yet."""
        moves = len(self._course)
        for position in range(self.floor, self._told, -1):
            epoch, index = divmod(position, moves)
            if self._course[index].barrier is Barrier.GLOBAL and self._pace.is_synchronous(epoch):
                self._told = position
                return position
        self._told = self.floor
        return None

    def hear(self, peer: int, position: int) -> None:
        """Note that all intervals of ``peer`` came to ``position``.

        Raises:
            ConfigError: there is no such peer.
        """
        if peer not in self._heard:
            raise ConfigError(f"graph server {peer} is none of the peers {sorted(self._heard)}")
        self._heard[peer] = max(self._heard[peer], position)
