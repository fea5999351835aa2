"""A worker as a process: takes tasks from its standard input, answers on its standard output, line by line.

The first line says how to run, each later one is ``{"event": ..., "fault": ...}``. Secrets come by the pipe
alone. The process ends with its input, whatever it is doing: so none outlives its graph server.
"""

from __future__ import annotations

import os
import queue
import select
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import BinaryIO, NoReturn, final

from dglx_dist.errors import ConfigError
from dglx_dist.offload.fields import Fields, Json, read_json, write_json
from dglx_dist.offload.tasks import MAX_EVENT_BYTES, Task
from dglx_dist.offload.worker.answer import WorkerAnswer
from dglx_dist.offload.worker.caller import RemoteCaller
from dglx_dist.offload.worker.duty import Duty
from dglx_dist.offload.worker.faults import Fault, FaultyPlace
from dglx_dist.offload.worker.handler import Worker
from dglx_dist.offload.worker.packaged import register_packaged_stages
from dglx_dist.offload.worker.places import Place
from dglx_dist.offload.worker.relay import Relay

_LONGEST_LINE = MAX_EVENT_BYTES + 4096
_LOOK_MS = 500
MIN_SHARE, MIN_BYTES_PER_S, MAX_BYTES_PER_S = 0.001, 1e3, 1e12


@final
@dataclass(frozen=True, kw_only=True)
class Setup:
    """How a worker process runs."""

    cpu_share: float | None = None
    """Of one core, which it keeps to by resting; None: it need not."""
    bytes_per_s: float | None = None
    """Each way; None: as fast as it goes."""

    def as_json(self) -> dict[str, Json]:
        """Return what :meth:`read` reads."""
        return dict(vars(self))

    @classmethod
    def read(cls, given: object) -> Setup:
        """Read :meth:`as_json`.

        Raises:
            ConfigError: a field is unknown or out of bounds.
        """
        fields = Fields(given, "a worker's setup")
        share = fields.maybe("cpu_share", lambda name: fields.number(name, MIN_SHARE, 1), None)
        pace = fields.maybe(
            "bytes_per_s", lambda name: fields.number(name, MIN_BYTES_PER_S, MAX_BYTES_PER_S), None
        )
        fields.end()
        return cls(cpu_share=share, bytes_per_s=pace)


def main() -> None:
    """Work until the input ends."""
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    # What a user's stage prints must not get between the answers.
    os.dup2(2, 1)
    threading.Thread(target=_read, args=(sys.stdin.buffer, lines), name="dglx-input", daemon=True).start()
    process = _Process(Setup.read(read_json(lines.get(), _LONGEST_LINE, "a worker's setup")))
    register_packaged_stages()
    while True:
        answers.write(write_json(process.answer(lines.get())) + b"\n")


@final
class _Process:
    def __init__(self, setup: Setup) -> None:
        self._cold = True
        self._faults = FaultyPlace(_die)
        self._duty = None if setup.cpu_share is None else Duty(setup.cpu_share)
        relay = None if setup.bytes_per_s is None else Relay(setup.bytes_per_s)
        self._worker = Worker(RemoteCaller(None if relay is None else relay.endpoint), self._at)

    def answer(self, line: bytes) -> Mapping[str, Json]:
        fields = Fields(read_json(line, _LONGEST_LINE, "a line of input"), "a line of input")
        event = fields.any("event")
        self._faults.next = fields.maybe("fault", lambda name: Fault.read(fields.any(name)), None)
        fields.end()
        if not isinstance(event, dict):
            raise ConfigError("a line of input has no event")
        started = time.perf_counter()
        cold, self._cold = self._cold, False
        try:
            return self._worker.handle(event)
        except Exception as error:  # noqa: BLE001 - the pool's to know, and the next task may go well
            task = Task.from_event(event)
            return WorkerAnswer(
                key=task.key,
                attempt=task.attempt,
                accepted=False,
                seconds=time.perf_counter() - started,
                cold=cold,
                error=str(error) or type(error).__name__,
            ).as_json()

    def _at(self, place: Place) -> None:
        self._faults(place)
        if self._duty is not None:
            self._duty.rest()


def _read(source: BinaryIO, lines: queue.SimpleQueue[bytes]) -> NoReturn:
    """Hand lines on; end the process with the input, or with its parent."""
    parent, buffered = os.getppid(), b""
    waiting = select.poll()
    waiting.register(source.fileno(), select.POLLIN | select.POLLHUP)
    # A process forked by the parent may hold the other end of the pipe open: so the parent is looked at.
    while os.getppid() == parent:
        if not waiting.poll(_LOOK_MS):
            continue
        piece = os.read(source.fileno(), 1 << 16)
        if not piece or len(buffered) > _LONGEST_LINE:
            break
        *whole, buffered = (buffered + piece).split(b"\n")
        for line in whole:
            lines.put(line)
    os._exit(0)


def _die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    while True:  # until the signal comes
        time.sleep(1)
