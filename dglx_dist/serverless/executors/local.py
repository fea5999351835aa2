"""Executors on this machine: ``local``, whose workers are isolated processes, throttled on request, and
``inline``, whose workers are threads of the graph server (the paper's CPU-only servers)."""

import contextlib
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NoReturn, final

from dglx_dist.comm.topology import copy_environment
from dglx_dist.data.json_fields import Json, read_record, write_json
from dglx_dist.errors import ConfigError, PeerError
from dglx_dist.options import select_common_fields
from dglx_dist.serverless.aws.package import (
    LIBRARIES,
    library_folder,
    package_root,
    stage_paths,
    worker_files,
)
from dglx_dist.serverless.executors.base import (
    DEFAULT_MEMORY_MB,
    ExecutorContext,
    Latency,
    MemoryMb,
    PoolExecutor,
    WorkerHandle,
    names_of,
)
from dglx_dist.serverless.tasks import Task
from dglx_dist.serverless.worker import MAX_ANSWER_BYTES, STAGES_FILE, DirectCaller, Worker, WorkerAnswer
from dglx_dist.serverless.worker_process import Fault, FaultInjector, Setup

_BOOT = """
import sys
sys.path.insert(0, sys.argv.pop())
from dglx_dist.serverless.worker_process import main
main()
"""
# A function has less than one core, so BLAS threads would only compete.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "LANG": "C.UTF-8",
}
_DECIDES_BITS = (
    *("OPENBLAS_CORETYPE", "OPENBLAS_BLOCK_FACTOR", "OPENBLAS_L2_SIZE", "GOTO_BLOCK_FACTOR"),
    *("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "MKL_DEBUG_CPU_TYPE"),
    *("BLIS_ARCH_TYPE", "BLIS_MODEL_TYPE", "AOCL_ENABLE_INSTRUCTIONS", "NVPL_BLAS_DEBUG_CPU_TYPE"),
    *("NPY_DISABLE_CPU_FEATURES", "NPY_ENABLE_CPU_FEATURES", "GLIBC_TUNABLES"),
)
"""Variables by which BLAS, NumPy and the C library choose kernels. Others may be secrets: never pass them."""
_MAX_OUTPUT, _EXIT_WAIT_S = 2000, 0.5


def make_tree(folder: Path, stages: Mapping[str, str]) -> None:
    """Link everything that a worker with these user's stages imports into the empty ``folder``.

    It is the only entry of the workers' ``sys.path`` beside the standard library.
    """
    root = package_root()
    for file in worker_files(root):
        link = folder / file
        if not link.parent.is_dir():
            link.parent.mkdir(parents=True)
            # Shared bytecode: otherwise every worker would compile all files at its start.
            (link.parent / "__pycache__").symlink_to((root / file).parent / "__pycache__")
        link.symlink_to(root / file)
    for name, project in LIBRARIES.items():
        library = library_folder(name)
        shared_objects = library.parent / f"{project}.libs"  # present if installed from a wheel
        for target in (library, *([shared_objects] if shared_objects.is_dir() else [])):
            (folder / target.name).symlink_to(target)
    for path in stage_paths(stages):
        (folder / path.name).symlink_to(path)
    (folder / STAGES_FILE).write_bytes(write_json(dict(stages)))


def arithmetic_variables() -> dict[str, str]:
    """Return the environment variables of this process that affect the bits of a result."""
    return {name: value for name, value in copy_environment().items() if name in _DECIDES_BITS}


@final
@dataclass(frozen=True, kw_only=True)
class LocalOptions(Latency, Setup):
    """Options of executor ``local``, besides latency and the limits of a process."""

    memory_mb: MemoryMb = DEFAULT_MEMORY_MB
    """For the bill."""


@final
class LocalExecutor(PoolExecutor):
    """Starts processes on demand and keeps them warm; they end with this process.

    A worker process has no environment but :func:`arithmetic_variables`, and imports from a folder that
    contains only the package of a worker. Options: :class:`LocalOptions`.
    """

    option_names = names_of(LocalOptions)

    def __init__(self, context: ExecutorContext, options: Mapping[str, object]) -> None:
        settings = read_record(LocalOptions, options, "executor 'local'", defaults=True)
        setup = select_common_fields(settings, Setup)
        self._tree = Path(tempfile.mkdtemp(prefix="dglx-workers-", dir=context.folder))
        try:
            make_tree(self._tree, context.stages)
        except BaseException:
            shutil.rmtree(self._tree)
            raise
        super().__init__(
            lambda: _Process(self._tree, setup),
            context.notice,
            memory_mb=settings.memory_mb,
            latency=settings,
        )

    def close(self) -> None:
        super().close()
        shutil.rmtree(self._tree, ignore_errors=True)


@final
class _Process(WorkerHandle):
    def __init__(self, tree: Path, setup: Mapping[str, Json]) -> None:
        self._tree, self._setup = tree, setup
        self._process: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None
        self._stopping = threading.Lock()
        self._stopped = False

    def invoke(self, event: bytes, fault: Fault | None) -> WorkerAnswer:
        fault_json = write_json(None if fault is None else vars(fault))
        line = event.replace(b"\n", b" ")  # JSON strings contain no raw newline
        process = self._running()
        _write(process, b'{"event":' + line + b',"fault":' + fault_json + b"}\n")
        assert process.stdout is not None
        answer = process.stdout.readline(MAX_ANSWER_BYTES)
        if not answer.endswith(b"\n"):  # it died
            task = Task.from_event(event)
            raise PeerError(f"task {task.key}, attempt {task.attempt}: {self._exit_report(process)}")
        return WorkerAnswer.from_json(answer)

    def stop(self) -> None:
        with self._stopping:
            self._stopped = True
            process = self._process
            if process is not None:
                process.kill()

    def end(self) -> None:
        self.stop()
        self._release()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._release()
        with self._stopping:
            if self._stopped:
                raise PeerError("the executor is closed")
            self._output = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process runs
            # -I -S: nothing of the user's environment, folder or installed packages.
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _BOOT, str(self._tree)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._output,
                cwd="/",
                env={**arithmetic_variables(), **_ENVIRONMENT},
                start_new_session=True,  # Ctrl-C is for the graph server; workers end with it
            )
        _write(self._process, write_json(self._setup) + b"\n")
        return self._process

    def _release(self) -> None:
        # Only for a process that has ended or is about to.
        if self._process is None:
            return
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._output):
            if pipe is not None:
                with contextlib.suppress(OSError):  # unwritten input
                    pipe.close()
        self._process = None

    def _exit_report(self, process: subprocess.Popen[bytes]) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_EXIT_WAIT_S)
        process.kill()  # in case it only closed its output
        code, output = process.wait(), b""
        if self._output is not None:
            self._output.seek(max(self._output.seek(0, 2) - _MAX_OUTPUT, 0))
            output = self._output.read()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        last = output.decode(errors="replace").strip() or "no output"
        return f"worker process {process.pid} {how}: {last}"


def _write(process: subprocess.Popen[bytes], line: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it died; the next read reports that
        process.stdin.write(line)
        process.stdin.flush()


@final
class InlineExecutor(PoolExecutor):
    """Runs workers as threads without sockets; nothing is billed. Options: :class:`Latency`.

    A thread finishes its computation after :meth:`close`; its results are rejected.
    """

    in_process = True
    option_names = names_of(Latency)

    def __init__(self, context: ExecutorContext, options: Mapping[str, object]) -> None:
        latency = read_record(Latency, options, "executor 'inline'", defaults=True)
        handlers = context.handlers
        if not handlers:
            raise ConfigError("executor 'inline' needs the graph server's handlers; pass them in its context")
        super().__init__(
            lambda: _Thread(DirectCaller(handlers)),
            context.notice,
            memory_mb=0,
            billed=False,
            latency=latency,
        )


@final
class _Thread(WorkerHandle):
    def __init__(self, caller: DirectCaller) -> None:
        self._caller = caller
        self._faults = FaultInjector(_die)
        self._worker = Worker(caller, self._faults)

    def invoke(self, event: bytes, fault: Fault | None) -> WorkerAnswer:
        self._faults.next = fault
        return self._worker.attempt(event)[0]

    def stop(self) -> None:
        self._caller.close()


def _die() -> NoReturn:
    raise PeerError("the worker was killed by an injected fault")
