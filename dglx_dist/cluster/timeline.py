"""Who did what when, for pictures of a run; costs nothing while nobody looks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final


@dataclass(frozen=True, kw_only=True)
class Span:
    """One stretch of work."""

    name: str
    """What: "forward M", "pull", ..."""
    row: str
    """Where it is drawn: "compute", "network", "loader"."""
    begin_s: float
    """time.perf_counter() of this process."""
    end_s: float
    batch: int | None
    """Number of the mini-batch, where it belongs to one."""


@final
class Timeline:
    """Collects spans of this rank while it is on."""

    def __init__(self) -> None:
        self.on = False
        self.spans: list[Span] = []

    @contextmanager
    def span(self, name: str, row: str, batch: int | None = None) -> Iterator[None]:
        """Note how long the block takes; any thread."""
        if not self.on:
            yield
            return
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, row, begin, time.perf_counter(), batch)

    def add(self, name: str, row: str, begin_s: float, end_s: float, batch: int | None = None) -> None:
        """Note a stretch that was timed elsewhere; any thread."""
        if self.on:
            self.spans.append(Span(name=name, row=row, begin_s=begin_s, end_s=end_s, batch=batch))
