"""Main program of a worker process: reads tasks from standard input, answers on standard output.

The first line is the :class:`Setup`; each later one is ``{"event": ..., "fault": ...}``. Secrets arrive over
the pipe only. The process ends when its input ends, even in the middle of a task, so it never outlives its
graph server.
"""

import contextlib
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, BinaryIO, NoReturn, final

import torch

from dglx_dist.comm.topology import format_endpoint
from dglx_dist.data.json_fields import Fields, Within, read_json, read_record, write_json
from dglx_dist.strategies.serverless.tasks import MAX_EVENT_BYTES
from dglx_dist.strategies.serverless.tensor_program import RowKeys, drop_rows
from dglx_dist.strategies.serverless.worker import RemoteCaller, TaskPhase, Worker

MAX_SECONDS = 3600.0
_PIECE_S, _BURST_S, _CONNECT_S = 0.002, 0.002, 10.0
_LEAST_PIECE, _MOST_PIECE = 1024, 64 * 1024
_LONGEST_LINE = MAX_EVENT_BYTES + 4096
_POLL_MS = 500
MIN_SHARE, MIN_BYTES_PER_S, MAX_BYTES_PER_S = 0.001, 1e3, 1e12


@final
class CpuThrottle:
    """Sleeps so that processor time is at most ``share``, in (0, 1], of the elapsed time of a core.

    It sleeps between the phases of a task, not within a half: totals per task are right, but pauses are
    longer than those of a kernel's quota. The first pause also accounts for the start of the process.
    """

    def __init__(self, share: float) -> None:
        self._rest_per_s = 1 / share - 1
        self._used_s = 0.0

    def rest(self) -> None:
        """Sleep in proportion to the processor time since the last call."""
        used_s = time.process_time()
        time.sleep((used_s - self._used_s) * self._rest_per_s)
        self._used_s = used_s


@final
@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault of a worker."""

    place: TaskPhase
    seconds: Annotated[float, Within(0, MAX_SECONDS)] | None = None
    """Length of a pause; None: the worker dies."""


@final
class FaultInjector:
    """Phase hook of a Worker that triggers the next fault."""

    def __init__(self, die: Callable[[], NoReturn]) -> None:
        self._die = die
        self.next: Fault | None = None
        """Fault of the current or next task; reset once it has happened."""

    def __call__(self, phase: TaskPhase) -> None:
        fault = self.next
        if fault is None or fault.place is not phase:
            return
        self.next = None
        if fault.seconds is None:
            self._die()
        time.sleep(fault.seconds)


@final
class Relay:
    """Proxy that limits the rate of all its connections together, in each direction."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        # Small enough for a smooth rate, large enough to use little processor time.
        self._piece_bytes = int(min(max(bytes_per_s * _PIECE_S, _LEAST_PIECE), _MOST_PIECE))
        self._lock = threading.Lock()
        self._free_at = {"up": 0.0, "down": 0.0}
        self._endpoints: dict[str, str] = {}

    def endpoint(self, remote: str) -> str:
        """Return the local endpoint that forwards to ``remote`` (``tcp://HOST:PORT``)."""
        if remote not in self._endpoints:
            listener = socket.create_server(("127.0.0.1", 0))
            self._endpoints[remote] = format_endpoint("127.0.0.1", listener.getsockname()[1])
            _start(self._accept, listener, remote)
        return self._endpoints[remote]

    def _accept(self, listener: socket.socket, remote: str) -> None:
        host, _, port = remote.removeprefix("tcp://").rpartition(":")
        while True:
            near, _ = listener.accept()
            try:
                far = socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S)
            except OSError:
                near.close()  # to the worker this looks like a dead server
                continue
            far.settimeout(None)
            for connection in (near, far):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _start(self._forward, near, far, "up")
            _start(self._forward, far, near, "down")

    def _forward(self, source: socket.socket, target: socket.socket, way: str) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(self._piece_bytes):
                # An idle period earns credit of _BURST_S at most.
                with self._lock:
                    start = max(self._free_at[way], time.monotonic() - _BURST_S)
                    due = self._free_at[way] = start + len(piece) / self._bytes_per_s
                time.sleep(max(due - time.monotonic(), 0.0))
                target.sendall(piece)
        for connection in (source, target):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()


def _start(target: object, *args: object) -> None:
    threading.Thread(target=target, args=args, name="dglx-relay", daemon=True).start()  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Limits that a worker process enforces itself."""

    cpu_share: Annotated[float, Within(MIN_SHARE, 1)] | None = None
    """Share of one core, kept by sleeping; 0.11 is AWS's share of 192 MB. None: no limit."""
    bytes_per_s: Annotated[float, Within(MIN_BYTES_PER_S, MAX_BYTES_PER_S)] | None = None
    """Network rate in each direction; None: no limit."""


def serve_starts(number: int) -> None:
    """Start workers as copies of this process, as the socket ``number`` asks, until it closes.

    A request is JSON: ``{"start": true}`` with two files, the worker's stream and its standard error, or
    ``{"wait": pid}``. With one thread for torch, this process has no other thread that a copy would lack.
    """
    requests, parent = socket.socket(fileno=number), os.getppid()
    _warm_up()
    while True:
        # A process forked by the parent may keep the socket open.
        while not select.select([requests], [], [], _POLL_MS / 1e3)[0]:
            if os.getppid() != parent:
                os._exit(0)
        content, files, _, _ = socket.recv_fds(requests, 4096, 2)
        if not content:
            os._exit(0)
        request = read_json(content, 4096, "a request")
        assert isinstance(request, dict)
        if "wait" in request:
            _, status = os.waitpid(int(str(request["wait"])), 0)
            requests.send(write_json({"code": os.waitstatus_to_exitcode(status)}))
        elif pid := os.fork():
            for file in files:
                os.close(file)
            requests.send(write_json({"pid": pid}))
        else:
            requests.close()
            stream, errors = files
            for source, target in ((stream, 0), (stream, 1), (errors, 2)):
                os.dup2(source, target)
            try:
                main()
            except BaseException:  # noqa: BLE001 - the last words of this process
                traceback.print_exc()
                sys.stderr.flush()
            os._exit(1)


def _warm_up() -> None:
    # What the first operations import and compile, copies have from the start.
    rows = torch.ones(2, 2, requires_grad=True)
    loss = drop_rows(rows.mm(rows).relu(), 0.5, 0, RowKeys(0, 0, torch.arange(2))).sum()
    torch.autograd.grad(loss, rows, allow_unused=True, materialize_grads=True)


def main() -> None:
    """Run tasks until the input ends."""
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    # What a library prints must not mix with the answers.
    os.dup2(2, 1)
    threading.Thread(target=_read, args=(sys.stdin.buffer, lines), name="dglx-input", daemon=True).start()
    values = read_json(lines.get(), _LONGEST_LINE, "a worker's setup")
    setup, faults = read_record(Setup, values, "a worker's setup"), FaultInjector(_die)
    throttle = None if setup.cpu_share is None else CpuThrottle(setup.cpu_share)

    def at_phase(phase: TaskPhase) -> None:
        faults(phase)
        if throttle is not None:
            throttle.rest()

    through = str if setup.bytes_per_s is None else Relay(setup.bytes_per_s).endpoint
    worker = Worker(RemoteCaller(through), at_phase)

    def answer(line: bytes) -> bytes:
        fields = Fields.parse(line, "a line of input", _LONGEST_LINE)
        event = fields.nested_fields("event").mapping
        faults.next = fields.optional("fault", lambda name: fields.value(name, Fault), None)
        fields.reject_unread()
        return write_json(worker.attempt(event)[0].as_json()) + b"\n"

    while True:
        answers.write(answer(lines.get()))


def _read(source: BinaryIO, lines: queue.SimpleQueue[bytes]) -> NoReturn:
    # Ends the process when the input or the parent ends.
    parent, buffered = os.getppid(), b""
    waiting = select.poll()
    waiting.register(source.fileno(), select.POLLIN | select.POLLHUP)
    # A process forked by the parent may keep the pipe open, so end of input alone is not enough.
    while os.getppid() == parent:
        if not waiting.poll(_POLL_MS):
            continue
        piece = os.read(source.fileno(), 1 << 16)
        if not piece or len(buffered) > _LONGEST_LINE:
            break
        *lines_read, buffered = (buffered + piece).split(b"\n")
        for line in lines_read:
            lines.put(line)
    os._exit(0)


def _die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    while True:  # until the signal arrives
        time.sleep(1)
