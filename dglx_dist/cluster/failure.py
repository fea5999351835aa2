"""When a rank fails or dies: the others say which, and end."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
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
    not answer, even while the main thread hangs in a collective. A handler of the user's own is left alone,
    whether it was there before or came later.

    ``leave`` is called before SIGTERM ends the process, to let go of what would stay on the machine.
    """

    def __init__(self, store: JobStore, rpc: Rpc, hosts: Sequence[str], leave: Callable[[], None]) -> None:
        self._store, self._rpc, self._hosts, self._leave = store, rpc, hosts, leave
        self.failed = False
        self._hook_before = sys.excepthook
        sys.excepthook = self._hook
        self._terminal = _SignalPipe(self._terminate)

    def close(self) -> None:
        """Put everything back as it was."""
        if sys.excepthook == self._hook:
            sys.excepthook = self._hook_before
        self._terminal.close()

    def forget(self) -> None:
        """In a forked process: put everything back, so that nothing of it reaches the parent."""
        if sys.excepthook == self._hook:
            sys.excepthook = self._hook_before
        self._terminal.forget()

    def describe(self, doing: str, probe_s: float = _PROBE_S) -> str:
        """Say what is known of the others: who failed first and why, who is silent, who is elsewhere."""
        failure = self._store.first_failure()
        others = [rank for rank in range(self._store.world_size) if rank != self._store.rank]
        told = self._rpc.what_they_do(others, probe_s)
        dead = [rank for rank, at in told.items() if at is None]
        elsewhere = {rank: at for rank, at in told.items() if at is not None and at != self._rpc.doing}
        parts = []
        if failure is not None and failure[0] != self._store.rank:
            parts.append(f"rank {failure[0]} failed first: {failure[1]}")
        if dead:
            names = ", ".join(f"rank {rank} on {self._hosts[rank]}" for rank in dead)
            parts.append(f"{names} did not answer within {probe_s:g} s and is probably dead")
        if not parts:
            # Everybody lives, so the ranks do not agree on what comes next.
            parts = [
                f"rank {rank} on {self._hosts[rank]} is not in it, but "
                + (f"waits at {at!r}" if at else "computes")
                for rank, at in elsewhere.items()
            ]
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
        with contextlib.suppress(OSError):
            self._leave()
        # The main thread may hang in a collective for ever, so there is no way back through it.
        _end_process()


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
        signal.signal(signal.SIGTERM, self._handle)
        self._installed = True
        threading.Thread(target=self._listen, name="dglx-signals", daemon=True).start()

    def close(self) -> None:
        """Give the signal back; from another thread than the main one, SIGTERM just ends the process."""
        if not self._installed:
            return
        if threading.current_thread() is not threading.main_thread():
            self._action = _end_process  # only the main thread may set handlers, so the pipe must stay
            return
        self._give_back()
        os.close(self._write)

    def forget(self) -> None:
        """In a forked process: a signal to it must not be told to the parent's thread."""
        if self._installed:
            self._give_back()
            os.close(self._write)
            os.close(self._read)

    def _give_back(self) -> None:
        self._installed = False
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        in_place = signal.set_wakeup_fd(self._wakeup_before)
        if in_place != self._write:
            signal.set_wakeup_fd(in_place)  # somebody else's by now

    def _listen(self) -> None:
        while received := os.read(self._read, 64):
            if self._wakeup_before >= 0:
                with contextlib.suppress(OSError):
                    os.write(self._wakeup_before, received)
            if signal.SIGTERM in received and signal.getsignal(signal.SIGTERM) == self._handle:
                self._action()
        os.close(self._read)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        """Take the place of the default action, which would end the process before it said why."""
        # The interpreter has told the pipe already, unless the wake-up descriptor is somebody else's by now.
        with contextlib.suppress(BlockingIOError):
            os.write(self._write, bytes([number]))


def _end_process() -> None:
    os._exit(_EXIT_CODE)
