"""From which epoch on asynchronous training is synchronous: all graph servers find the same one."""

from __future__ import annotations

from typing import final

from dglx_dist.errors import ConfigError
from dglx_dist.strategies.bounded.pace import Pace


@final
class Switch:
    """Adds up the right answers of each epoch, and sets :attr:`Pace.synchronous_from`. Not thread-safe.

    When those of epoch e are known, intervals may be S epochs further, so the first epoch that nobody can
    have begun is e + S + 1. It is not begun before they are known: else a graph server could begin it
    otherwise than another.

    Args:
        pace: Of this graph server.
        num_servers: W graph servers, this one among them.
    """

    def __init__(self, pace: Pace, num_servers: int) -> None:
        self._pace, self._num_servers = pace, num_servers
        self._judged = pace.first_epoch
        self._counts: dict[int, dict[int, int]] = {}

    @property
    def is_over(self) -> bool:
        """Whether nothing is to be found out: nobody asked, or the epoch is known."""
        return self._pace.target is None or self._pace.synchronous_from is not None

    def is_known(self, epoch: int) -> bool:
        """Whether it is known if ``epoch`` is synchronous."""
        return self.is_over or epoch - self._pace.staleness - 1 < self._judged

    def has_judged(self, end: int) -> bool:
        """Whether no count of an epoch before ``end`` is waited for."""
        return self.is_over or self._judged >= end

    def missing(self) -> list[int]:
        """Return the graph servers whose count of the next epoch to judge is waited for."""
        known = self._counts.get(self._judged, {})
        return [server for server in range(self._num_servers) if server not in known]

    def hear(self, server: int, epoch: int, correct: int) -> None:
        """Note that ``server`` has ``correct`` right answers in ``epoch``, which may come in any order.

        Raises:
            ConfigError: there is no such graph server, or it said so before.
        """
        known = self._counts.setdefault(epoch, {})
        if not 0 <= server < self._num_servers or server in known:
            raise ConfigError(
                f"graph server {server} of {self._num_servers} counted the answers of epoch {epoch} twice, "
                "or is none of them"
            )
        known[server] = correct
        while not self.is_over and len(self._counts.get(self._judged, ())) == self._num_servers:
            self._judge(sum(self._counts.pop(self._judged).values()))

    def _judge(self, correct: int) -> None:
        assert self._pace.target is not None
        if correct >= self._pace.target:
            self._pace.synchronous_from = self._judged + self._pace.staleness + 1
        self._judged += 1
