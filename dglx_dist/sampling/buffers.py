"""Feature memory that is used again once nobody holds what was in it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import final

import numpy as np

from dglx_dist.records import Array


@final
class BufferPool:
    """Lends (n, words) arrays; a fresh one costs as much to be paged in as to be filled.

    There is no giving back: an array is free again when every view of it, every tensor over it included, is
    gone. Any thread may call it.

    Args:
        words: Columns of each array.
        dtype: Of each array.
        most: How many arrays are kept at most; what is needed beyond is not kept.
    """

    def __init__(self, words: int, dtype: np.dtype[np.generic], most: int) -> None:
        self._empty = np.empty((0, words), dtype)
        self._most = most
        self._kept: list[Array] = []
        self._lock = threading.Lock()
        # Interpreters differ in how many references a loop itself holds, so it is measured.
        self._references_of_idle = _references([np.empty(0)])[0]

    def borrow(self) -> Array:
        """Return the longest kept array that nobody uses; one of no rows when there is none."""
        with self._lock:
            idle = self._idle()
            return max((self._kept[place] for place in idle), key=len, default=self._empty)

    def keep(self, array: Array) -> None:
        """Remember ``array`` for later, in the place of a shorter idle one if there is no other."""
        with self._lock:
            if any(kept is array for kept in self._kept):
                return
            shorter = [place for place in self._idle() if len(self._kept[place]) < len(array)]
            if shorter:
                self._kept[shorter[0]] = array
            elif len(self._kept) < self._most:
                self._kept.append(array)

    def _idle(self) -> list[int]:
        counts = _references(self._kept)
        return [place for place, count in enumerate(counts) if count == self._references_of_idle]


def _references(arrays: Sequence[Array]) -> list[int]:
    """Return how many references each array has, those of this loop included."""
    counts = []
    for array in arrays:
        counts.append(sys.getrefcount(array))
    return counts
