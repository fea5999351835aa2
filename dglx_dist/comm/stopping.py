"""End ranks in order: signals, agreement on the step after which all stop, and lost parents."""

import contextlib
import ctypes
import os
import signal
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TypeVar, final

import numpy as np

from dglx_dist.comm.rpc import Rpc
from dglx_dist.comm.topology import take_parent
from dglx_dist.records import Array

SAME_INTERRUPT_S = 1.0
"""Seconds within which two SIGINT count as one, because a terminal and a launcher may both send Ctrl-C."""
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Let the kernel send SIGTERM when the parent process ends, even if it is killed.

    The signal is sent at once if the parent was one of our processes and has already ended.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if take_parent() not in (None, os.getppid()):
        os.kill(os.getpid(), signal.SIGTERM)


_T = TypeVar("_T")


def call_if_alive(method: Callable[[], _T]) -> Callable[[], _T | None]:
    """Return a function that calls the bound ``method`` while its object exists, and then returns None.

    The function holds only a weak reference to the object.
    """
    reference = weakref.WeakMethod(method)

    def call() -> _T | None:
        bound_method = reference()
        return None if bound_method is None else bound_method()

    return call


def call_at_fork(release: Callable[[], object], list_signals: Callable[[], Sequence[int] | None]) -> None:
    """Call ``release`` in every process that is forked from now on, before signals can reach that process.

    A forked process shares the pipe of :class:`SignalPipe` with its parent until it has released the pipe. A
    signal to the forked process would be written there and end the parent. So the signals that
    ``list_signals`` returns stay blocked from before the fork until then. They must be those of a
    :class:`SignalPipe`. Its handlers raise no errors, which Python would drop in the callbacks of a fork.
    """
    masks = threading.local()

    def block_signals() -> None:
        masks.previous = None
        # The handler of another signal may raise an error in either call. Read the mask before it changes.
        masks.previous = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        signal.pthread_sigmask(signal.SIG_BLOCK, list_signals() or ())

    def restore_signals() -> None:
        previous = getattr(masks, "previous", None)
        if previous is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)

    def release_and_restore_signals() -> None:
        try:
            release()
        finally:
            restore_signals()

    os.register_at_fork(
        before=block_signals, after_in_parent=restore_signals, after_in_child=release_and_restore_signals
    )


@final
class SignalPipe:
    """Calls ``action`` with a signal's number on a thread, even while the main thread is blocked.

    Python runs signal handlers only between two steps of the main thread. But the interpreter's C handler
    writes to the wake-up descriptor at once, and this class reads it on a thread. It handles the signals in
    ``numbers`` that have their default handler. Handlers that the user sets later stay in effect.
    """

    def __init__(self, numbers: Sequence[int], action: Callable[[int], None]) -> None:
        """Take over the signals in ``numbers`` that have their default handler.

        Outside the main thread nothing is done, because only that thread may set handlers.
        """
        self._previous: dict[int, object] = {}
        if threading.current_thread() is not threading.main_thread():
            return

        default_handlers = (signal.SIG_DFL, signal.default_int_handler)
        for number in numbers:
            handler = signal.getsignal(number)
            if handler in default_handlers:
                self._previous[number] = handler
        if not self._previous:
            return

        self._action = action
        self._read, self._write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._write, False)
        self._previous_wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in self._previous:
            signal.signal(number, self._handle)
        threading.Thread(target=self._listen, name="dglx-signals", daemon=True).start()

    def list_signals(self) -> list[int]:
        """Return the signals that this object handles now."""
        return [number for number in self._previous if signal.getsignal(number) == self._handle]

    def close(self, *, forked: bool = False) -> None:
        """Restore the handlers. If this is not the main thread, signals end the process from now on."""
        if not self._previous:
            return
        if not forked and threading.current_thread() is not threading.main_thread():
            # Only the main thread may set handlers, so the pipe must stay.
            self._action = end_process
            return

        for number in self.list_signals():
            handler = self._previous[number]
            signal.signal(number, handler)  # type: ignore[arg-type]  # the handler comes from getsignal
        self._previous = {}

        current = signal.set_wakeup_fd(self._previous_wakeup)
        if current != self._write:
            # The descriptor has another owner now.
            signal.set_wakeup_fd(current)
        os.close(self._write)
        if forked:
            # Otherwise the listening thread closes it. A forked process does not have this thread.
            os.close(self._read)

    def _listen(self) -> None:
        """Call the action for each signal that arrives in the pipe, until the pipe is closed."""
        # The interpreter writes a signal, and later the handler writes it again. It must count once.
        num_seen: Counter[int] = Counter()
        num_handled: Counter[int] = Counter()
        while data := os.read(self._read, 64):
            for byte in data:
                number = byte & ~_HANDLER_FLAG
                if byte & _HANDLER_FLAG:
                    num_handled[number] += 1
                    if num_handled[number] <= num_seen[number]:
                        continue
                elif self._previous_wakeup >= 0:
                    # The previous owner of the wake-up descriptor must get the signal, too.
                    with contextlib.suppress(OSError):
                        os.write(self._previous_wakeup, bytes([byte]))

                num_seen[number] += 1
                is_handled_here = signal.getsignal(number) == self._handle
                if number in self._previous and is_handled_here:
                    self._action(number)
        os.close(self._read)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        # This replaces the default action, which would end the process without a message. The interpreter has
        # already written to the pipe, unless the wake-up descriptor has another owner.
        with contextlib.suppress(BlockingIOError):
            os.write(self._write, bytes([number | _HANDLER_FLAG]))


_HANDLER_FLAG = 0x80


def end_process(number: int) -> None:
    """End this process, whatever its threads do, with the shell's exit code for signal ``number``."""
    os._exit(128 + number)


_ASK = "stop.ask"
_HOLD = "stop.hold"
_STOP = "stop.at"
_ANSWER_TIMEOUT_S = 10.0
"""Seconds for answers from serving threads on a busy machine. A dead process is noticed at once."""
_NO_POINT = -1
"""Stands for a point if there is none, because a rank is not in training."""


@final
class StopPoint:
    """Lets all ranks agree at which point in training they stop.

    Training passes the same points in the same order on all ranks. When a rank asks to stop, rank 0 holds all
    ranks at their next point and collects how many points they have passed. All ranks stop at the maximum
    plus one. Until then they continue, because a rank may wait for others in a collective. The serving
    threads answer these calls. As long as no rank asks, training only reads an attribute.
    """

    def __init__(self, rpc: Rpc, num_ranks: int) -> None:
        self._rpc = rpc
        self._ranks = range(num_ranks)
        self.is_open = False
        """Whether training is under way."""
        self.is_over = False
        """Whether training has stopped since somebody asked."""
        self._num_passed = 0
        """Number of points that training has passed."""
        self._holds = False
        """Whether training waits at its next point until rank 0 names the point to stop at."""
        self._stop_at = _NO_POINT
        self._num_decisions = 0
        """Number of times that rank 0 has named a point, or none."""
        self._changed = threading.Condition()
        self._coordinates = threading.Lock()
        """Lock that rank 0 holds while it asks the ranks."""

        rpc.register(_ASK, self._on_ask)
        rpc.register(_HOLD, self._on_hold)
        rpc.register(_STOP, self._on_stop)

    def open(self) -> None:
        """Note that training begins. :meth:`close` notes its end."""
        with self._changed:
            self.is_open = True
            self.is_over = False
            self._holds = False
            self._stop_at = _NO_POINT
            # After a failure, ranks may have taken different numbers of steps.
            self._num_passed = 0

    def should_stop(self) -> bool:
        """Pass a point. Return whether all ranks stop here."""
        # Increase the count before reading the flag. A rank that is not held here is counted with this point.
        self._num_passed += 1
        return self._holds and self._stops()

    def close(self, *, failed: bool = False) -> None:
        """End training. Waits only if somebody has asked and training did not fail. May be called twice."""
        with self._changed:
            was_open, self.is_open = self.is_open, False
        if was_open and self._holds and not failed:
            self._stops(last=True)
        self._holds = False

    def ask(self) -> bool:
        """Ask all ranks to stop. Return whether they will. Do not call this on the training thread.

        The result is False if a rank is dead or not in training.
        """
        if self._stop_at != _NO_POINT:
            peers = [rank for rank in self._ranks if rank != self._rpc.rank]
            return not self._rpc.find_silent(peers, _ANSWER_TIMEOUT_S)

        num_decisions = self._num_decisions
        if not self.is_open or self._call([0], _ASK, _NO_POINT) is None:
            return False

        # Rank 0 may answer another rank's request before it gets this rank's request.
        def has_decision() -> bool:
            return self._stop_at != _NO_POINT or self._num_decisions > num_decisions

        with self._changed:
            self._changed.wait_for(has_decision, 3 * _ANSWER_TIMEOUT_S)
            return self._stop_at != _NO_POINT

    def _stops(self, *, last: bool = False) -> bool:
        """Wait for rank 0's decision. Return whether training stops here, or at its ``last`` point."""
        with self._changed:
            while self._holds and self._stop_at == _NO_POINT:
                is_answered = self._changed.wait(_ANSWER_TIMEOUT_S)
                # Rank 0 answers in time, unless it has died.
                if not is_answered and self._rpc.find_silent([0], _ANSWER_TIMEOUT_S):
                    self._holds = False
            is_at_stop = last or self._num_passed >= self._stop_at
            self.is_over = self._holds and is_at_stop
            return self.is_over

    def _on_ask(self, _name: str, _arrays: Sequence[Array]) -> list[Array]:
        if self._stop_at == _NO_POINT and self._coordinates.acquire(blocking=False):
            threading.Thread(target=self._coordinate, name="dglx-stop", daemon=True).start()
        return [np.array([0])]

    def _coordinate(self) -> None:
        """Pause all ranks, and tell them after how many steps they can all stop."""
        try:
            counts = self._call(self._ranks, _HOLD, _NO_POINT)
            stop_at = _NO_POINT
            if counts is not None and _NO_POINT not in counts:
                stop_at = max(counts) + 1
            self._call(self._ranks, _STOP, stop_at)
        finally:
            self._coordinates.release()

    def _on_hold(self, _name: str, _arrays: Sequence[Array]) -> list[Array]:
        with self._changed:
            # Set the flag before reading the count. See `should_stop`.
            self._holds = self.is_open
            count = self._num_passed if self.is_open else _NO_POINT
            return [np.array([count])]

    def _on_stop(self, _name: str, arrays: Sequence[Array]) -> list[Array]:
        with self._changed:
            self._stop_at = int(arrays[0][0])
            self._holds = self._stop_at != _NO_POINT
            self._num_decisions += 1
            self._changed.notify_all()
        return [np.array([0])]

    def _call(self, ranks: Sequence[int], op: str, value: int) -> list[int] | None:
        """Call all ``ranks`` at once. Return their answers, or None unless all ranks answered."""
        answers = self._rpc.ask(ranks, op, "", [np.array([value])], _ANSWER_TIMEOUT_S, phase=None)
        if len(answers) < len(ranks):
            return None
        return [int(count[0]) for (count,) in answers.values()]
