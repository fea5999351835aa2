"""How far each interval of one graph server is, and which may go on: gate, barriers, modes (section 5)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from dglx_dist.errors import ConfigError
from dglx_dist.offload.tasks import Direction
from dglx_dist.strategies.bounded.course import Barrier, Kind, Move
from dglx_dist.strategies.bounded.pace import Pace
from dglx_dist.strategies.bounded.switch import Switch


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
        self._course, self.pace = tuple(course), pace
        self.switch = Switch(pace, len(peers) + 1)
        """Hears how many answers of each epoch were right, where the pace has a target."""
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
        self._answer = next(at for at, move in enumerate(self._course) if _has_loss(move))
        self._answered = pace.first_epoch

    @property
    def is_done(self) -> bool:
        """Whether all intervals, and the weights, are at the end, and nobody waits for a count of answers."""
        over = self.floor >= self.end * len(self._course) and self.updates >= self.end
        return over and self.switch.has_judged(self.end)

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
        if epoch >= self.end or (index == 0 and not self._may_begin(epoch)):
            return False
        if not self.pace.is_synchronous(epoch):
            return True
        barrier = self._course[index].barrier
        if self.floor < position and (barrier is not Barrier.NONE or self.pace.mode == "no_pipe"):
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
            if self._course[index].barrier is Barrier.GLOBAL and self.pace.is_synchronous(epoch):
                self._told = position
                return position
        self._told = self.floor
        return None

    def answered(self) -> range:
        """Return the epochs whose losses all own intervals have by now, without those returned before.

        Empty where nobody asks how many answers were right.
        """
        if self.switch.is_over:
            return range(0)
        end = (self.floor - self._answer - 1) // len(self._course) + 1
        found = range(self._answered, end)
        self._answered = max(self._answered, end)
        return found

    def hear(self, peer: int, position: int) -> None:
        """Note that all intervals of ``peer`` came to ``position``.

        Raises:
            ConfigError: there is no such peer.
        """
        if peer not in self._heard:
            raise ConfigError(f"graph server {peer} is none of the peers {sorted(self._heard)}")
        self._heard[peer] = max(self._heard[peer], position)

    def _may_begin(self, epoch: int) -> bool:
        return self.switch.is_known(epoch) and epoch <= self.updates + self.pace.lead(epoch)


def _has_loss(move: Move) -> bool:
    return move.kind is Kind.LOSS or move.direction is Direction.FUSED
