"""Who did what when, for pictures of a run; costs nothing while nobody looks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

COMPUTE, NETWORK, LOADER = "compute", "network", "loader"
"""Rows: what the training loop does; what is on its way; what the loader's threads do."""
GRAPH_SERVER, WORKER, PARAMETER_SERVER = "graph server", "worker", "parameter server"
"""Rows of training in intervals: moves of a graph server; tasks of its workers; updates of weights."""
WAIT = "wait"
"""How the name of a span begins in which a row stands still: it is no work, though it lies in the row."""
MAX_SPANS = 50_000


@dataclass(frozen=True, kw_only=True)
class Span:
    """One stretch of work."""

    name: str
    """What: "forward M", "pull", "wait for the pull", ..."""
    row: str
    """Where it is drawn: "compute", "network", "loader", "graph server", "worker", "parameter server"."""
    begin_s: float
    """time.perf_counter() of this process."""
    end_s: float
    batch: int | None
    """Number of the mini-batch, where it belongs to one; of the epoch, where all nodes are one batch."""
    interval: int | None = None
    """Of the graph's nodes, over all graph servers, where it belongs to one."""


@final
class Timeline:
    """Collects spans of this rank while it is on; any thread.

    Args:
        max_spans: How many are kept; later ones are counted in ``dropped`` alone.
    """

    def __init__(self, max_spans: int = MAX_SPANS) -> None:
        self.on = False
        self.spans: list[Span] = []
        self.dropped = 0
        self._max_spans = max_spans
        self._lock = threading.Lock()

    def start(self) -> None:
        """Forget what was collected, and collect from now on."""
        with self._lock:
            self.spans, self.dropped = [], 0
        self.on = True

    @contextmanager
    def span(
        self, name: str, row: str, batch: int | None = None, interval: int | None = None
    ) -> Iterator[None]:
        """Note how long the block takes, also when it raises; any thread."""
        if not self.on:
            yield
            return
        begin = time.perf_counter()
        try:
            yield
        finally:
            end = time.perf_counter()
            self.note(Span(name=name, row=row, begin_s=begin, end_s=end, batch=batch, interval=interval))

    def add(self, name: str, row: str, begin_s: float, end_s: float, batch: int | None = None) -> None:
        """Note a stretch that was timed elsewhere; any thread."""
        self.note(Span(name=name, row=row, begin_s=begin_s, end_s=end_s, batch=batch))

    def note(self, span: Span) -> None:
        """Keep ``span``, if it is on; any thread."""
        if not self.on:
            return
        with self._lock:
            if len(self.spans) < self._max_spans:
                self.spans.append(span)
            else:
                self.dropped += 1
