"""Weights by version, and which of them an interval in flight still needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from dglx_dist.records import Array


@final
class Versions:
    """The latest weights, and the older ones that intervals stashed; intervals share equal versions.

    Version v is what v updates made. An interval keeps the version with which its newest epoch began until
    it begins the next one: a worker that died after its last gradient is replaced by one that asks for
    these weights once more. Not thread-safe.

    Args:
        weights: The first version; must not be changed afterwards.
        number: Its number.
        staleness: S: an interval begins epoch e with version e - S or later, and no update is made before
            all intervals have begun its epoch, so that at most S + 2 versions are alive.
    """

    def __init__(self, weights: Sequence[Array], number: int, staleness: int) -> None:
        self.latest = number
        self._limit = staleness + 2
        self._weights: dict[int, tuple[Array, ...]] = {number: tuple(weights)}
        self._holders: dict[int, int] = {number: 0}
        self._stash_of: dict[int, tuple[int, int]] = {}

    @property
    def alive(self) -> tuple[int, ...]:
        """Numbers of the versions that are kept, ascending; the last is the latest."""
        return tuple(sorted(self._weights))

    @property
    def stashes(self) -> dict[int, tuple[int, int]]:
        """(epoch, version) of each interval that keeps one."""
        return dict(self._stash_of)

    def newest(self) -> tuple[Array, ...]:
        """Return the latest weights."""
        return self._weights[self.latest]

    def epoch_of(self, interval: int) -> int:
        """Return the epoch for which ``interval`` keeps a version, -1 for none."""
        return self._stash_of.get(interval, (-1, -1))[0]

    def stashed(self, interval: int, epoch: int) -> tuple[Array, ...]:
        """Return the weights of ``interval`` in ``epoch``: the latest the first time, then the same.

        What it kept for an earlier epoch is let go; the caller never goes back to one.
        """
        if self.epoch_of(interval) != epoch:
            self._release(interval)
            self._stash_of[interval] = (epoch, self.latest)
            self._holders[self.latest] += 1
        return self._weights[self._stash_of[interval][1]]

    def add(self, weights: Sequence[Array]) -> None:
        """Make ``weights`` the latest."""
        before, self.latest = self.latest, self.latest + 1
        self._weights[self.latest] = tuple(weights)
        self._holders[self.latest] = 0
        self._drop_unless_held(before)
        assert len(self._weights) <= self._limit, f"versions {self.alive} are more than {self._limit}"

    def release_all(self) -> None:
        """Forget all stashes: nothing is in flight."""
        for interval in list(self._stash_of):
            self._release(interval)

    def _release(self, interval: int) -> None:
        if interval in self._stash_of:
            _, version = self._stash_of.pop(interval)
            self._holders[version] -= 1
            self._drop_unless_held(version)

    def _drop_unless_held(self, version: int) -> None:
        if version != self.latest and self._holders[version] == 0:
            del self._weights[version], self._holders[version]
