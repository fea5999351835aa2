"""A worker as a process: takes tasks from its standard input, answers on its standard output, line by line.

The first line says how to run, each later one is ``{"event": ..., "fault": ...}``. Secrets come by the pipe
alone. The process ends with its input, whatever it is doing: so none outlives its graph server.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import BinaryIO, NoReturn, final

from dglx_dist.comm.topology import endpoint_of
from dglx_dist.errors import ConfigError
from dglx_dist.serverless.json_fields import Fields, Json, read_json, write_json
from dglx_dist.serverless.tasks import MAX_EVENT_BYTES, Task
from dglx_dist.serverless.worker import Place, RemoteCaller, Worker, WorkerAnswer, register_packaged_stages


@final
class Duty:
    """Rests so that processor time is at most ``share`` of the time that passed.

    It rests at the places of a task's course, not within a half: sums over a task are right, pauses are
    longer than the kernel's. The first rest is for the start of the process, too.

    Args:
        share: Of one core, in (0, 1].
    """

    def __init__(self, share: float) -> None:
        self._rest_per_s = 1 / share - 1
        self._used_s = 0.0

    def rest(self) -> None:
        """Sleep for what was used since the last call."""
        used_s = time.process_time()
        time.sleep((used_s - self._used_s) * self._rest_per_s)
        self._used_s = used_s


MAX_SECONDS = 3600.0


@final
@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that goes wrong, once."""

    place: Place
    seconds: float | None = None
    """How long to stand still there; None: die."""

    def as_json(self) -> dict[str, Json]:
        """Return what :meth:`read` reads."""
        return {"place": self.place.value, "seconds": self.seconds}

    @classmethod
    def read(cls, given: object) -> Fault:
        """Read :meth:`as_json`.

        Raises:
            ConfigError: it is none.
        """
        fields = Fields(given, "a fault")
        place = Place(fields.choice("place", [place.value for place in Place]))
        seconds = fields.maybe("seconds", lambda name: fields.number(name, 0, MAX_SECONDS), None)
        fields.end()
        return cls(place=place, seconds=seconds)


@final
class FaultyPlace:
    """Lets the next fault happen, at its place; give it to a Worker as ``at``.

    Args:
        die: Ends the worker.
    """

    def __init__(self, die: Callable[[], NoReturn]) -> None:
        self._die = die
        self.next: Fault | None = None
        """Of the task that runs, or is about to; forgotten once it happened."""

    def __call__(self, place: Place) -> None:
        """Do what the fault says if this is its place."""
        fault = self.next
        if fault is None or fault.place is not place:
            return
        self.next = None
        if fault.seconds is None:
            self._die()
        time.sleep(fault.seconds)


_PIECE_S, _BURST_S, _CONNECT_S = 0.002, 0.002, 10.0
_LEAST_PIECE, _MOST_PIECE = 1024, 64 * 1024


@final
class Relay:
    """Passes connections on. Its threads end with the process, or with their connections.

    Args:
        bytes_per_s: Most that all connections together carry, in each direction.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self._up, self._down = _Pace(bytes_per_s), _Pace(bytes_per_s)
        self._endpoints: dict[str, str] = {}

    def endpoint(self, remote: str) -> str:
        """Return the endpoint of this machine that stands for ``remote`` (``tcp://HOST:PORT``)."""
        if remote not in self._endpoints:
            authenticator = socket.create_server(("127.0.0.1", 0))
            self._endpoints[remote] = endpoint_of("127.0.0.1", authenticator.getsockname()[1])
            _start(self._accept, authenticator, remote)
        return self._endpoints[remote]

    def _accept(self, authenticator: socket.socket, remote: str) -> None:
        host, _, port = remote.removeprefix("tcp://").rpartition(":")
        while True:
            near, _ = authenticator.accept()
            try:
                far = socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S)
            except OSError:
                near.close()  # the worker sees it as it would see a server that is gone
                continue
            far.settimeout(None)
            for one in (near, far):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _start(_pass_on, near, far, self._up)
            _start(_pass_on, far, near, self._down)


@final
class _Pace:
    """When the next bytes are due."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self.piece_bytes = int(min(max(bytes_per_s * _PIECE_S, _LEAST_PIECE), _MOST_PIECE))
        """Passed on at a time: as few as go without jerks, for each costs the processor that others need."""
        self._lock = threading.Lock()
        self._free_at = 0.0

    def wait(self, num_bytes: int) -> None:
        """Wait as long as ``num_bytes`` take after those before; only a short pause before is made up for."""
        with self._lock:
            start = max(self._free_at, time.monotonic() - _BURST_S)
            self._free_at = start + num_bytes / self._bytes_per_s
            due = self._free_at
        time.sleep(max(due - time.monotonic(), 0.0))


def _pass_on(source: socket.socket, target: socket.socket, pace: _Pace) -> None:
    with contextlib.suppress(OSError):
        while piece := source.recv(pace.piece_bytes):
            pace.wait(len(piece))
            target.sendall(piece)
    for one in (source, target):
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        one.close()


def _start(target: object, *args: object) -> None:
    threading.Thread(target=target, args=args, name="dglx-relay", daemon=True).start()  # type: ignore[arg-type]


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
