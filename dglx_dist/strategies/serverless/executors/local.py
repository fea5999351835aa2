"""Executors on this machine.

``local`` workers are isolated processes. ``inline`` workers are threads in the graph server (the paper's
CPU-only servers).
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NoReturn, final

import psutil

import dglx_dist
from dglx_dist.comm.topology import copy_environment
from dglx_dist.data.json_fields import read_record, write_json
from dglx_dist.errors import ConfigError, PeerError
from dglx_dist.strategies.serverless.executors.base import (
    DEFAULT_MEMORY_MB,
    Executor,
    ExecutorContext,
    MemoryMb,
    WorkerHandle,
    names_of,
)
from dglx_dist.strategies.serverless.tasks import Task
from dglx_dist.strategies.serverless.worker import MAX_ANSWER_BYTES, DirectCaller, Worker, WorkerAnswer
from dglx_dist.strategies.serverless.worker_process import Fault, FaultInjector

_BOOT = """
import sys
number, folder = sys.argv[1:]
sys.path.append(folder)
from dglx_dist.strategies.serverless.worker_process import serve_starts
serve_starts(int(number))
"""
# A function has less than one core, so BLAS threads would only compete.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "LANG": "C.UTF-8",
    # Workers compute on CPUs. With a GPU, torch's autograd would start threads, which a copy lacks.
    "CUDA_VISIBLE_DEVICES": "",
}
_BIT_DECIDING_VARIABLES = (
    *("OPENBLAS_CORETYPE", "OPENBLAS_BLOCK_FACTOR", "OPENBLAS_L2_SIZE", "GOTO_BLOCK_FACTOR"),
    *("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "MKL_DEBUG_CPU_TYPE"),
    *("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "NPY_DISABLE_CPU_FEATURES"),
    *("NPY_ENABLE_CPU_FEATURES", "GLIBC_TUNABLES"),
)
"""Variables by which torch and its libraries choose kernels.

Other variables may contain secrets, and are never passed to workers.
"""
_MAX_OUTPUT, _START_S = 2000, 120.0


def arithmetic_variables() -> dict[str, str]:
    """Return this process's environment variables that affect a result's bits."""
    return {name: value for name, value in copy_environment().items() if name in _BIT_DECIDING_VARIABLES}


@final
@dataclass(frozen=True, kw_only=True)
class LocalOptions:
    """Options of executor ``local``."""

    memory_mb: MemoryMb = DEFAULT_MEMORY_MB
    """For the bill."""


@final
class LocalExecutor(Executor):
    """Starts worker processes on demand and keeps them warm. The workers end with this process.

    Workers are copies of one process that has imported torch, so that a start takes milliseconds. Their
    environment has only :func:`arithmetic_variables` and constants. Options: :class:`LocalOptions`.
    """

    option_names = names_of(LocalOptions)

    def __init__(self, context: ExecutorContext, options: Mapping[str, object]) -> None:
        settings = read_record(LocalOptions, options, "executor 'local'", defaults=True)
        _find_starter()  # The starter begins to import torch.
        super().__init__(_Process, context.notice, memory_mb=settings.memory_mb)


_START_LOCK = threading.Lock()
_starters: dict[tuple[tuple[str, str], ...], _Starter] = {}


def _find_starter() -> _Starter:
    """Return the process that starts workers. It serves all runs, and lives as long as this process."""
    variables = arithmetic_variables()
    key = tuple(sorted(variables.items()))
    with _START_LOCK:
        if key not in _starters or not _starters[key].is_alive:
            _starters[key] = _Starter(variables)
        return _starters[key]


@final
class _Starter:
    """The process that starts workers by copying itself. Thread-safe."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._socket, child_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(_START_S)
        self._lock = threading.Lock()

        # The option -I keeps out the user's environment and folder. In its own session the process does not
        # get Ctrl-C, which is meant for the graph server. Workers end with the graph server.
        package_folder = Path(dglx_dist.__file__).parent.parent
        arguments = [str(child_socket.fileno()), str(package_folder)]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", _BOOT, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            cwd="/",
            env={**variables, **_ENVIRONMENT},
            pass_fds=[child_socket.fileno()],
            start_new_session=True,
        )
        child_socket.close()

    def start(self) -> tuple[psutil.Process, socket.socket, IO[bytes]]:
        """Return a new worker, its stream, and a file with its messages.

        Raises PeerError if the starting process has ended or does not answer in time.
        """
        output = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process runs
        stream, worker_stream = socket.socketpair()
        with worker_stream, self._lock:
            try:
                files = [worker_stream.fileno(), output.fileno()]
                socket.send_fds(self._socket, [b"start"], files)
                pid = self._socket.recv(64)
            except OSError as error:
                # A late answer would be taken for the answer to the next request.
                self._process.kill()
                raise PeerError(f"the process that starts workers does not answer: {error}") from error

        if not pid:
            raise PeerError(f"the process that starts workers ended with code {self._process.wait()}")
        return psutil.Process(int(pid)), stream, output

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None


@final
class _Process(WorkerHandle):
    def __init__(self) -> None:
        self._process: psutil.Process | None = None
        self._stream: socket.socket
        self._answers: IO[bytes]
        self._output: IO[bytes]
        self._lock = threading.Lock()
        self._is_stopped = False

    def invoke(self, task: Task, fault: Fault | None) -> WorkerAnswer:
        self._start()
        fault_json = write_json(None if fault is None else vars(fault))
        # A line ends at a newline. The event may lose its newlines, because JSON strings contain none.
        event_json = task.to_event().replace(b"\n", b" ")
        answer = b""
        with contextlib.suppress(ConnectionError):
            self._stream.sendall(b'{"event":' + event_json + b',"fault":' + fault_json + b"}\n")
            answer = self._answers.readline(MAX_ANSWER_BYTES)

        # A worker that dies leaves no line, or an incomplete one.
        if not answer.endswith(b"\n"):
            raise PeerError(f"task {task.key}, attempt {task.attempt}: {self._report_end()}")
        return WorkerAnswer.from_json(answer)

    def stop(self) -> None:
        with self._lock:
            self._is_stopped = True
            if self._process is not None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    self._process.kill()

    def end(self) -> None:
        self.stop()
        self._release()

    def _start(self) -> None:
        """Start the process if there is none. Raises PeerError after :meth:`stop`."""
        with self._lock:
            if self._is_stopped:
                raise PeerError("the executor is closed")
            if self._process is None:
                self._process, self._stream, self._output = _find_starter().start()
                self._answers = self._stream.makefile("rb")

    def _release(self) -> None:
        with self._lock:
            if self._process is not None:
                for file in (self._answers, self._stream, self._output):
                    file.close()
            self._process = None

    def _report_end(self) -> str:
        """Return how the dead process's output ends, and release its files."""
        process = self._process
        assert process is not None
        output_bytes = self._output.seek(0, 2)
        self._output.seek(max(output_bytes - _MAX_OUTPUT, 0))
        output = self._output.read().decode(errors="replace").strip()

        # The process is alive if it only closed its stream.
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
        self._release()
        return f"worker process {process.pid} died: {output or 'no output, as if it was killed'}"


@final
class InlineExecutor(Executor):
    """Runs workers as threads without sockets. Nothing is billed.

    A thread finishes its computation after :meth:`close`, but its results are rejected.
    """

    in_process = True

    def __init__(self, context: ExecutorContext, options: Mapping[str, object]) -> None:
        handlers = context.handlers
        if not handlers:
            raise ConfigError("executor 'inline' needs the graph server's handlers; pass them in its context")
        super().__init__(lambda: _Thread(DirectCaller(handlers)), context.notice, memory_mb=0, billed=False)


@final
class _Thread(WorkerHandle):
    def __init__(self, caller: DirectCaller) -> None:
        self._caller = caller
        self._faults = FaultInjector(_die)
        self._worker = Worker(caller, self._faults)

    def invoke(self, task: Task, fault: Fault | None) -> WorkerAnswer:
        self._faults.next = fault
        return self._worker.attempt(task)[0]

    def stop(self) -> None:
        self._caller.close()


def _die() -> NoReturn:
    raise PeerError("the worker was killed by an injected fault")
