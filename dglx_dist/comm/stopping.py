"""Orderly end of ranks: signals, agreement on the step after which all stop, lost parents."""

import contextlib
import ctypes
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from types import FrameType
from typing import final

import numpy as np

from dglx_dist.comm.rpc import Rpc
from dglx_dist.comm.topology import take_parent
from dglx_dist.records import Array

SAME_KEY_S = 1.0
"""A terminal and a launcher may both send the same Ctrl-C."""
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Receive SIGTERM from the kernel when the parent process ends, even if it is killed.

    At once if the parent has ended already and is one of ours, which say who they are.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if take_parent() not in (None, os.getppid()):
        os.kill(os.getpid(), signal.SIGTERM)


@final
class SignalPipe:
    """Calls ``action`` with the number of a signal on a thread, even while the main thread is blocked.

    Python runs signal handlers only between two steps of the main thread; the interpreter's C handler writes
    to the wake-up descriptor at once. Takes those of ``numbers`` that have their default handler, and later
    ones of the user stay in effect.
    """

    def __init__(self, numbers: Sequence[int], action: Callable[[int], None]) -> None:
        self._previous: dict[int, object] = {}
        if threading.current_thread() is not threading.main_thread():
            return
        defaults = (signal.SIG_DFL, signal.default_int_handler)
        self._previous = {one: now for one in numbers if (now := signal.getsignal(one)) in defaults}
        if not self._previous:
            return
        self._action = action
        self._read, self._write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._write, False)
        self._previous_wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for one in self._previous:
            signal.signal(one, self._handle)
        threading.Thread(target=self._listen, name="dglx-signals", daemon=True).start()

    def close(self, *, forked: bool = False) -> None:
        """Restore the handlers; closed from another thread than the main one, the signals end the process."""
        if not self._previous:
            return
        if not forked and threading.current_thread() is not threading.main_thread():
            self._action = end_process  # only the main thread may set handlers, so the pipe must stay
            return
        for one, handler in self._previous.items():
            if signal.getsignal(one) == self._handle:
                signal.signal(one, handler)  # type: ignore[arg-type]  # as getsignal gave it
        self._previous = {}
        in_place = signal.set_wakeup_fd(self._previous_wakeup)
        if in_place != self._write:
            signal.set_wakeup_fd(in_place)  # another owner's by now
        os.close(self._write)
        if forked:
            os.close(self._read)  # else the thread does, which a forked process lacks

    def _listen(self) -> None:
        # A signal is written by the interpreter, and later by the handler: it counts once.
        seen: Counter[int] = Counter()
        handled: Counter[int] = Counter()
        while received := os.read(self._read, 64):
            for byte in received:
                number = byte & ~_BY_HANDLER
                if byte & _BY_HANDLER:
                    handled[number] += 1
                    if handled[number] <= seen[number]:
                        continue
                elif self._previous_wakeup >= 0:
                    with contextlib.suppress(OSError):
                        os.write(self._previous_wakeup, bytes([byte]))
                seen[number] += 1
                if number in self._previous and signal.getsignal(number) == self._handle:
                    self._action(number)
        os.close(self._read)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        # Replaces the default action, which would end the process without a message. The interpreter has
        # written to the pipe already, unless the wake-up descriptor has another owner by now.
        with contextlib.suppress(BlockingIOError):
            os.write(self._write, bytes([number | _BY_HANDLER]))


_BY_HANDLER = 0x80


def end_process(number: int) -> None:
    """End this process, whatever its threads do, with the exit code of a shell for signal ``number``."""
    os._exit(128 + number)


_ASK, _HOLD, _STOP = "stop.ask", "stop.hold", "stop.at"
_ANSWER_S = 10.0
"""For answers from the threads that serve, on a busy machine; a dead process is noticed at once."""
_NOWHERE = -1


@final
class StopPoint:
    """Agreement of all ranks on the point of training at which they stop.

    Training passes the same points in the same order on all ranks. When one rank asks, rank 0 has all of them
    hold at their next point and return how many they have passed; all stop at the most of these plus one.
    Until there the others go on, as a rank may wait for them in a collective. These calls are answered by the
    threads that serve: as long as nobody asks, training only reads an attribute.
    """

    def __init__(self, rpc: Rpc, num_ranks: int) -> None:
        self._rpc, self._ranks = rpc, range(num_ranks)
        self.is_open = False
        """Whether training is under way."""
        self.is_over = False
        """Whether training has stopped since somebody asked."""
        self._passed, self._holds, self._at = 0, False, _NOWHERE
        self._answers = 0
        """Times that rank 0 has named a point, or none."""
        self._changed = threading.Condition()
        self._coordinates = threading.Lock()
        rpc.register(_ASK, self._on_ask)
        rpc.register(_HOLD, self._on_hold)
        rpc.register(_STOP, self._on_stop)

    def open(self) -> None:
        """Begin training; :meth:`close` ends it."""
        with self._changed:
            self.is_open, self.is_over, self._holds, self._at = True, False, False, _NOWHERE
            # Training that failed may have ended elsewhere on another rank.
            self._passed = 0

    def should_stop(self) -> bool:
        """Pass a point; return whether all ranks stop here."""
        # In this order: a rank that is not held here is counted with this point.
        self._passed += 1
        return self._holds and self._stops()

    def close(self, *, failed: bool = False) -> None:
        """End training; waits only if somebody has asked, and not if it ``failed``. May be called twice."""
        with self._changed:
            was_open, self.is_open = self.is_open, False
        if was_open and self._holds and not failed:
            self._stops(last=True)
        self._holds = False

    def ask(self) -> bool:
        """Ask all ranks to stop and return whether they will; not on the thread that trains.

        False: a rank is dead or not in training.
        """
        if self._at != _NOWHERE:
            others = [rank for rank in self._ranks if rank != self._rpc.rank]
            return not self._rpc.silent(others, _ANSWER_S)
        answers = self._answers
        if not self.is_open or self._call([0], _ASK, _NOWHERE) is None:
            return False
        with self._changed:
            # Another rank's request may be answered before this one is made.
            self._changed.wait_for(lambda: self._at != _NOWHERE or self._answers > answers, 3 * _ANSWER_S)
            return self._at != _NOWHERE

    def _stops(self, *, last: bool = False) -> bool:
        with self._changed:
            while self._holds and self._at == _NOWHERE:
                # Rank 0 answers in time, unless it has died.
                if not self._changed.wait(_ANSWER_S) and self._rpc.silent([0], _ANSWER_S):
                    self._holds = False
            self.is_over = self._holds and (last or self._passed >= self._at)
            return self.is_over

    def _on_ask(self, _name: str, _arrays: Sequence[Array]) -> list[Array]:
        if self._at == _NOWHERE and self._coordinates.acquire(blocking=False):
            threading.Thread(target=self._coordinate, name="dglx-stop", daemon=True).start()
        return [np.array([0])]

    def _coordinate(self) -> None:
        try:
            counts = self._call(self._ranks, _HOLD, _NOWHERE)
            together = counts is not None and _NOWHERE not in counts
            self._call(self._ranks, _STOP, max(counts or ()) + 1 if together else _NOWHERE)
        finally:
            self._coordinates.release()

    def _on_hold(self, _name: str, _arrays: Sequence[Array]) -> list[Array]:
        with self._changed:
            # Before the count is read, see `passed`.
            self._holds = self.is_open
            return [np.array([self._passed if self.is_open else _NOWHERE])]

    def _on_stop(self, _name: str, arrays: Sequence[Array]) -> list[Array]:
        with self._changed:
            self._at = int(arrays[0][0])
            self._holds = self._at != _NOWHERE
            self._answers += 1
            self._changed.notify_all()
        return [np.array([0])]

    def _call(self, ranks: Sequence[int], op: str, value: int) -> list[int] | None:
        """Return the answers of ``ranks``, all asked at once; None: not all answered."""
        found = self._rpc.ask(ranks, op, "", [np.array([value])], _ANSWER_S, phase=None)
        return [int(number[0]) for (number,) in found.values()] if len(found) == len(ranks) else None
