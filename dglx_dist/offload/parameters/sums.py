"""Sums of gradients over intervals, equal to the last bit in whatever order they come."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import final

import numpy as np

from dglx_dist.records import Array


@final
class EpochSums:
    """Sums of one epoch: of each step over its intervals in ascending order.

    A gradient is added as soon as those of all intervals before it have come, and only waits until then,
    so that few are kept. Not thread-safe.

    Args:
        steps: Names of the weights of each step that has any, by the step's index.
        intervals: Those that report here, ascending.
    """

    def __init__(self, steps: Mapping[int, Sequence[str]], intervals: Sequence[int]) -> None:
        self._steps, self._intervals = steps, tuple(intervals)
        self._added = dict.fromkeys(steps, 0)
        self._early: dict[int, dict[int, Sequence[Array]]] = {step: {} for step in steps}
        self._sums: dict[int, list[Array]] = {}

    @property
    def is_complete(self) -> bool:
        """Whether every interval reported every step."""
        return all(added == len(self._intervals) for added in self._added.values())

    @property
    def is_empty(self) -> bool:
        """Whether nobody reported yet."""
        return not any(self._added.values()) and not any(self._early.values())

    def missing(self) -> dict[int, list[int]]:
        """Return the intervals that have not reported, by step; steps that lack none are left out."""
        lacking = {
            step: [one for one in self._intervals[added:] if one not in self._early[step]]
            for step, added in self._added.items()
        }
        return {step: intervals for step, intervals in lacking.items() if intervals}

    def add(self, step: int, interval: int, gradients: Sequence[Array]) -> None:
        """Take the gradients of ``step``'s weights that ``interval`` computed; they are kept, not copied."""
        early = self._early[step]
        early[interval] = gradients
        while (at := self._added[step]) < len(self._intervals) and self._intervals[at] in early:
            self._fold(step, early.pop(self._intervals[at]))
            self._added[step] += 1

    def total(self, names: Iterable[str]) -> Array:
        """Return all weights' sums as one vector in the order of ``names``; every step must be complete.

        A weight of several steps gets the sum over these, lowest first.
        """
        totals: dict[str, Array] = {}
        for step in sorted(self._steps):
            for name, value in zip(self._steps[step], self._sums[step], strict=True):
                totals[name] = totals[name] + value if name in totals else value
        return np.concatenate([totals[name].reshape(-1) for name in names])

    def _fold(self, step: int, gradients: Sequence[Array]) -> None:
        if step in self._sums:
            for total, gradient in zip(self._sums[step], gradients, strict=True):
                total += gradient
        else:
            self._sums[step] = [np.array(gradient) for gradient in gradients]
