"""Worker processes: copies of one process that read tasks from a stream and answer on it.

An input line is ``{"event": ..., "fault": ...}``. Secrets arrive over the stream only. A worker ends with the
process that starts workers, and the starting process ends with its graph server.
"""

import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, NoReturn, final

import torch

from dglx_dist.comm.stopping import end_with_parent
from dglx_dist.data.json_fields import Fields, Within, write_json
from dglx_dist.strategies.serverless.tasks import MAX_EVENT_BYTES, Task
from dglx_dist.strategies.serverless.tensor_program import RowKeys, drop_rows
from dglx_dist.strategies.serverless.worker import RemoteCaller, TaskPhase, Worker

MAX_SECONDS = 3600.0
_LONGEST_LINE = MAX_EVENT_BYTES + 4096
_POLL_INTERVAL_S = 0.5


@final
@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault to inject into a worker."""

    place: TaskPhase
    seconds: Annotated[float, Within(0, MAX_SECONDS)] | None = None
    """Length of a pause in seconds. If None, the worker dies."""


@final
class FaultInjector:
    """Phase hook for a Worker, which triggers the next fault."""

    def __init__(self, die: Callable[[], NoReturn]) -> None:
        self._die = die
        self.next: Fault | None = None
        """Fault for the current or next task. It is reset once the fault has happened."""

    def __call__(self, phase: TaskPhase) -> None:
        fault = self.next
        if fault is None or fault.place is not phase:
            return
        self.next = None
        if fault.seconds is None:
            self._die()
        time.sleep(fault.seconds)


def serve_starts(socket_number: int) -> None:
    """Start a worker, a copy of this process, for each request on a socket. End when the socket closes.

    A request has two files: the worker's stream and its standard error. The answer is the worker's process
    id. A copy has only the thread that forks, so torch must run with one thread in this process.
    """
    requests = socket.socket(fileno=socket_number)
    parent = os.getppid()
    _warm_up()

    # The system removes workers that end.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        # The socket may stay open after the parent's end, because a process that the parent forked has it.
        while not select.select([requests], [], [], _POLL_INTERVAL_S)[0]:
            if os.getppid() != parent:
                os._exit(0)
        content, files, _, _ = socket.recv_fds(requests, 64, 2)
        if not content:
            os._exit(0)

        pid = os.fork()
        if pid == 0:
            requests.close()
            _serve_tasks(*files)
        for file in files:
            os.close(file)
        requests.send(str(pid).encode())


def _serve_tasks(stream: int, errors: int) -> NoReturn:
    """Run the tasks from ``stream`` in a new worker process, and end the process."""
    end_with_parent()
    # Library output goes to ``errors``, because it must not mix with the answers.
    os.dup2(stream, 0)
    os.dup2(errors, 1)
    os.dup2(errors, 2)
    try:
        _run_tasks(stream)
    except BaseException:  # noqa: BLE001 - the last words of this process
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(1)


def _warm_up() -> None:
    """Run typical operations. Workers then need not repeat a first run's imports and compilations."""
    rows = torch.ones(2, 2, requires_grad=True)
    loss = drop_rows(rows.mm(rows).relu(), 0.5, 0, RowKeys(0, 0, torch.arange(2))).sum()
    torch.autograd.grad(loss, rows, allow_unused=True, materialize_grads=True)


def _run_tasks(stream: int) -> None:
    faults = FaultInjector(_die)
    worker = Worker(RemoteCaller(), faults)
    with open(stream, "r+b", buffering=0) as answers:
        while line := sys.stdin.buffer.readline(_LONGEST_LINE):
            task, faults.next = _parse_line(line)
            answer, _ = worker.attempt(task)
            answers.write(write_json(answer.as_json()) + b"\n")


def _parse_line(line: bytes) -> tuple[Task, Fault | None]:
    fields = Fields.parse(line, "a line of input", _LONGEST_LINE)
    event = fields.nested_fields("event").mapping
    fault = fields.optional("fault", lambda name: fields.value(name, Fault), None)
    fields.reject_unread()
    return Task.from_event(event), fault


def _die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    while True:  # until the signal arrives
        time.sleep(1)
