"""Rows that several threads read and write: a row is never seen half written."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

from dglx_dist.records import Array


@final
class SharedRows:
    """An array of rows with a lock: many readers at once, or one writer; whoever writes goes first.

    Args:
        array: (rows, columns), kept and written to.
    """

    def __init__(self, array: Array) -> None:
        self.array = array
        """Only touched inside :meth:`reading` and :meth:`writing`; rows that nobody else writes may be read
        without either."""
        self._changed = threading.Condition(threading.Lock())
        self._readers, self._writers_waiting, self._is_written = 0, 0, False

    @contextmanager
    def reading(self) -> Iterator[Array]:
        """Hand out the array while nobody writes to it. Not twice at once in one thread."""
        with self._changed:
            while self._is_written or self._writers_waiting:
                self._changed.wait()
            self._readers += 1
        try:
            yield self.array
        finally:
            with self._changed:
                self._readers -= 1
                if not self._readers:
                    self._changed.notify_all()

    @contextmanager
    def writing(self) -> Iterator[Array]:
        """Hand out the array while nobody else reads or writes it."""
        with self._changed:
            self._writers_waiting += 1
            while self._is_written or self._readers:
                self._changed.wait()
            self._writers_waiting -= 1
            self._is_written = True
        try:
            yield self.array
        finally:
            with self._changed:
                self._is_written = False
                self._changed.notify_all()
