"""When a rank fails or dies: the others say which, and end."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import FrameType, TracebackType
from typing import final

from dglx_dist.cluster.rpc import Rpc
from dglx_dist.cluster.store import JobStore

log = logging.getLogger(__name__)

_PROBE_S = 5.0
_PROBE_AT_END_S = 2.0
_EXIT_CODE = 128 + signal.SIGTERM


@final
class FailureWatch:
    """Reports this rank's first error to the others, and says who is dead when something goes wrong.

    While it is open, an uncaught exception is left in the store before Python ends, and SIGTERM (which
    torchrun sends to the survivors of a dead rank) ends the process with status 143 after naming who does
    not answer, even while the main thread hangs in a collective. A handler of the user's own is left alone.
    """

    def __init__(self, store: JobStore, rpc: Rpc, hosts: Sequence[str]) -> None:
        self._store, self._rpc, self._hosts = store, rpc, hosts
        self.failed = False
        self._hook_before = sys.excepthook
        sys.excepthook = self._hook
        self._terminal = _SignalPipe(self._terminate)

    def close(self) -> None:
        """Put everything back as it was."""
        if sys.excepthook == self._hook:
            sys.excepthook = self._hook_before
        self._terminal.close()

    def describe(self, doing: str, probe_s: float = _PROBE_S) -> str:
        """Say what is known of the others: who failed first and why, who does not answer."""
        failure = self._store.first_failure()
        others = [rank for rank in range(self._store.world_size) if rank != self._store.rank]
        with ThreadPoolExecutor(min(len(others), 16)) as pool:
            answers = pool.map(lambda rank: self._rpc.alive(rank, probe_s), others)
            dead = [rank for rank, alive in zip(others, answers, strict=True) if not alive]
        parts = []
        if failure is not None and failure[0] != self._store.rank:
            parts.append(f"rank {failure[0]} failed first: {failure[1]}")
        if dead:
            names = ", ".join(f"rank {rank} on {self._hosts[rank]}" for rank in dead)
            parts.append(f"{names} did not answer within {probe_s:g} s and is probably dead")
        return f"{doing}: " + ("; ".join(parts) if parts else "all ranks still answer")

    def _hook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self.failed = True
        self._store.report_failure(f"{kind.__name__}: {error}")
        self._hook_before(kind, error, trace)

    def _terminate(self) -> None:
        text = self.describe(f"rank {self._store.rank} was told to end (SIGTERM)", _PROBE_AT_END_S)
        log.error("%s", text)
        sys.stdout.flush()
        sys.stderr.flush()
        # The main thread may hang in a collective for ever, so there is no way back through it.
        os._exit(_EXIT_CODE)


@final
class _SignalPipe:
    """Runs ``action`` on a thread when SIGTERM arrives, whatever the main thread is doing.

    Python runs signal handlers between two steps of the main thread only; the wake-up descriptor is written
    by the interpreter's C handler at once.
    """

    def __init__(self, action: Callable[[], None]) -> None:
        self._installed = False
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        self._action = action
        self._read, self._write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._write, False)
        self._wakeup_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, _do_nothing)
        self._installed = True
        threading.Thread(target=self._listen, name="dglx-signals", daemon=True).start()

    def close(self) -> None:
        if not self._installed:
            return
        self._installed = False
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._write)

    def _listen(self) -> None:
        while received := os.read(self._read, 64):
            if signal.SIGTERM in received:
                self._action()
        os.close(self._read)


def _do_nothing(_number: int, _frame: FrameType | None) -> None:
    """Stand in for the default action, which would end the process before it said why."""
