"""Shows now and then what this rank's graph server and its workers do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import final

from dglx_dist.strategies.bounded.account import Account, progress_line
from dglx_dist.strategies.bounded.running import Running
from dglx_dist.strategies.bounded.settings import LambdaSettings

_EVERY_S = 0.5


@final
class Live:
    """A thread that shows a line every half a second, inside a ``with`` block; none where nobody looks.

    Args:
        running: What is shown.
        settings: For the bill.
        past: What was done before, which the bill has too.
        show: Called with each line; None: nobody looks.
    """

    def __init__(
        self,
        running: Running,
        settings: LambdaSettings,
        past: Account,
        show: Callable[[str], None] | None,
    ) -> None:
        self._running, self._settings, self._past, self._show = running, settings, past, show
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def line(self, seconds: float) -> str:
        """Return the line, ``seconds`` after the block was entered."""
        crew = self._running.crew
        counts = crew.counts
        so_far = self._past + Account(counts=counts, server_seconds=seconds)
        settings = self._settings
        bill = so_far.bill(settings.server, settings.prices, simulated=crew.simulated, alone=settings.alone)
        return progress_line(self._running.engine.snapshot(), so_far.counts, crew.controller.workers, bill)

    def __enter__(self) -> Live:
        if self._show is not None:
            self._thread = threading.Thread(target=self._repeat, name="lambda-progress", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _repeat(self) -> None:
        assert self._show is not None
        began = time.perf_counter()
        while not self._over.wait(_EVERY_S):
            self._show(self.line(time.perf_counter() - began))
