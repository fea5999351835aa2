"""How many seeds come in which step: pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from dglx_dist.records import StepShare


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How the seeds of every rank spread over the steps of an epoch.

    All ranks run ``num_steps``; one that has run out of seeds takes part with none.
    """

    batch_size: int
    """Seeds per rank and step."""
    drop_last: bool
    """Whether a rank's last batch is left out when it is not full."""
    counts: tuple[int, ...]
    """(W,) seeds of each rank."""
    rank: int

    @property
    def num_steps(self) -> int:
        """Steps of an epoch, the same on every rank."""
        return max(self._steps_of(count) for count in self.counts)

    def slice_of(self, step: int) -> slice:
        """Return which of this rank's seeds, in the order of the epoch, step ``step`` has; maybe none."""
        first = step * self.batch_size
        return slice(first, first + self._size(self.counts[self.rank], step))

    def share(self, step: int) -> StepShare:
        """Return how many seeds this rank and all ranks have in ``step``."""
        sizes = [self._size(count, step) for count in self.counts]
        return StepShare(num_local=sizes[self.rank], num_global=sum(sizes))

    def targets(self) -> tuple[int, int]:
        """Return the seeds of an epoch: (on this rank, on all ranks)."""
        used = [self._used(count) for count in self.counts]
        return used[self.rank], sum(used)

    def _used(self, count: int) -> int:
        return count - count % self.batch_size if self.drop_last else count

    def _steps_of(self, count: int) -> int:
        return -(-self._used(count) // self.batch_size)

    def _size(self, count: int, step: int) -> int:
        return min(max(self._used(count) - step * self.batch_size, 0), self.batch_size)
