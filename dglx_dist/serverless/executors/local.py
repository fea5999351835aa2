"""Workers as processes on this machine: isolated as functions are, throttled like small ones if wanted."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, final

from dglx_dist.comm import system as cgroups
from dglx_dist.comm.topology import inherited_environment
from dglx_dist.errors import LabError, PeerError
from dglx_dist.serverless.aws.package import LIBRARIES, code_of, library_place, package_root, worker_files
from dglx_dist.serverless.executors.base import (
    Executor,
    ExecutorContext,
    Faults,
    Hand,
    Invocation,
    Latency,
    Lost,
    Pool,
    PoolPlan,
)
from dglx_dist.serverless.json_fields import Fields, write_json
from dglx_dist.serverless.tasks import Task
from dglx_dist.serverless.worker import MAX_ANSWER_BYTES, STAGES_FILE, WorkerAnswer
from dglx_dist.serverless.worker_process import MAX_BYTES_PER_S, MIN_BYTES_PER_S, MIN_SHARE, Fault, Setup

_PREFIX = "dglx-worker"


@final
class CpuGroup:
    """Holds one process to a share of a core; :meth:`close` it once that has ended.

    Args:
        folder: Of the group.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def close(self) -> None:
        """Remove the group."""
        with contextlib.suppress(LabError):  # it is empty, and the next executor sweeps it away
            cgroups.remove(self._folder)


def hold(pid: int, share: float) -> CpuGroup | None:
    """Hold process ``pid`` to ``share`` of a core; None where this machine does not let us."""
    folder = cgroups.make(f"{_PREFIX}-{os.getpid()}-{pid}", share)
    if folder is None:
        return None
    try:
        (folder / "cgroup.procs").write_text(str(pid))
    except OSError:
        # It ended already, or another executor took the group for one that was left behind.
        with contextlib.suppress(OSError):
            folder.rmdir()
        return None
    return CpuGroup(folder)


def sweep() -> None:
    """Remove groups whose graph server was killed: those without processes."""
    for folder in cgroups.find(f"{_PREFIX}-*"):
        with contextlib.suppress(OSError):  # processes are in it
            folder.rmdir()


def make_tree(folder: Path, stages: Mapping[str, str]) -> None:
    """Fill the empty ``folder``.

    Args:
        folder: Goes into ``sys.path`` of the workers.
        stages: The user's own, name to ``module:Class``.

    Raises:
        ConfigError: a stage, or a library, has no place to be linked from.
    """
    root = package_root()
    for file in worker_files(root):
        link = folder / file
        if not link.parent.is_dir():
            link.parent.mkdir(parents=True)
            # Compiled once for all: a worker's start would else compile all of it again.
            (link.parent / "__pycache__").symlink_to((root / file).parent / "__pycache__")
        link.symlink_to(root / file)
    for name, project in LIBRARIES.items():
        place = library_place(name)
        shared_objects = place.parent / f"{project}.libs"  # there where the library came as a wheel
        for target in (place, *([shared_objects] if shared_objects.is_dir() else [])):
            (folder / target.name).symlink_to(target)
    for place in code_of(stages):
        (folder / place.name).symlink_to(place)
    (folder / STAGES_FILE).write_bytes(write_json(dict(stages)))


DEFAULT_MEMORY_MB, MAX_MEMORY_MB = 192, 1 << 20
_BOOT = """
import sys
sys.path.insert(0, sys.argv.pop())
from dglx_dist.serverless.worker_process import main
main()
"""
# A function has less than one core; threads of the linear algebra would only get in each other's way.
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
"""By these a BLAS, NumPy and the C library choose kernels. No other goes along: it may be a secret."""
_LAST_WORDS, _LAST_BREATH_S = 2000, 0.5


def arithmetic_variables() -> dict[str, str]:
    """Return the variables of this process's environment that decide the bits of a result."""
    return {name: value for name, value in inherited_environment().items() if name in _DECIDES_BITS}


@final
class LocalExecutor(Executor):
    """Starts processes when they are first needed and keeps them warm; they end with this one.

    A process sees no environment but :func:`arithmetic_variables`, and imports from a folder that holds the
    package of a worker only.

    Options:
        memory_mb: For the bill; 192 by default, as in the paper.
        cpu_share: Of one core, in (0, 1]; 0.11 is AWS's share of 192 MB. None: all of one. By a control group
            where this machine lets one be made, else the worker rests in proportion to its work.
        bytes_per_s: Of a worker's network, each way; None: unlimited.
        latency_s, latency_sigma: Of a log-normal pause of each invocation once it has computed, the median in
            seconds and the spread of the logarithm, 0.5 by default: emulates what functions take beyond work.
        faults: See :class:`~dglx_dist.serverless.executors.base.Faults`; for tests.
    """

    option_names = ("memory_mb", "cpu_share", "bytes_per_s", "faults", "latency_s", "latency_sigma")

    def __init__(self, context: ExecutorContext, options: Mapping[str, object]) -> None:
        fields = Fields(options, "executor 'local'")
        memory_mb = fields.maybe(
            "memory_mb", lambda name: fields.whole(name, 1, MAX_MEMORY_MB), DEFAULT_MEMORY_MB
        )
        setup = Setup(
            cpu_share=fields.maybe("cpu_share", lambda name: fields.number(name, MIN_SHARE, 1), None),
            bytes_per_s=fields.maybe(
                "bytes_per_s", lambda name: fields.number(name, MIN_BYTES_PER_S, MAX_BYTES_PER_S), None
            ),
        )
        faults = fields.maybe("faults", lambda name: Faults.read(fields.any(name)), None)
        latency = Latency.read(fields)
        fields.end()
        self._tree = Path(tempfile.mkdtemp(prefix="dglx-workers-", dir=context.folder))
        try:
            sweep()
            make_tree(self._tree, context.stages)
        except BaseException:
            shutil.rmtree(self._tree)
            raise
        tree = self._tree
        self._pool = Pool(
            PoolPlan(
                make=lambda: _Process(tree, setup),
                notice=context.notice,
                memory_mb=memory_mb,
                faults=faults,
                latency=latency,
            )
        )

    def invoke(self, event: bytes) -> None:
        """See Executor."""
        self._pool.invoke(event)

    def size(self, workers: int) -> None:
        """See Executor."""
        self._pool.size(workers)

    def lost(self) -> list[Lost]:
        """See Executor."""
        return self._pool.lost()

    def billed(self) -> list[Invocation]:
        """See Executor."""
        return self._pool.billed()

    @property
    def workers(self) -> int:
        """See Executor."""
        return self._pool.workers

    def close(self) -> None:
        """See Executor."""
        self._pool.close()
        shutil.rmtree(self._tree, ignore_errors=True)


@final
class _Process(Hand):
    def __init__(self, tree: Path, setup: Setup) -> None:
        self._tree, self._setup = tree, setup
        self._process: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None
        self._group: CpuGroup | None = None
        self._stopping = threading.Lock()
        self._stopped = False

    def invoke(self, event: bytes, fault: Fault | None) -> WorkerAnswer:
        given = write_json(None if fault is None else fault.as_json())
        line = event.replace(b"\n", b" ")  # JSON has none in its texts
        process = self._running()
        answer = _ask(process, b'{"event":' + line + b',"fault":' + given + b"}\n")
        if not answer.endswith(b"\n"):
            task = Task.from_event(event)
            raise PeerError(f"task {task.key}, attempt {task.attempt}: {self._obituary(process)}")
        return WorkerAnswer.from_json(answer)

    def stop(self) -> None:
        with self._stopping:
            self._stopped = True
            process = self._process
            if process is not None:
                process.kill()

    def end(self) -> None:
        self.stop()
        self._bury()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._bury()
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
                start_new_session=True,  # Ctrl-C is the graph server's, with whom it ends
            )
        _write(self._process, write_json(self._hold(self._process).as_json()) + b"\n")
        return self._process

    def _hold(self, process: subprocess.Popen[bytes]) -> Setup:
        """Return what the process has to see to itself."""
        share = self._setup.cpu_share
        if share is not None and share < 1:
            self._group = hold(process.pid, share)
        return self._setup if self._group is None else replace(self._setup, cpu_share=None)

    def _bury(self) -> None:
        """Let go of a process that has ended, or is about to."""
        if self._process is None:
            return
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._output):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what was still to be written to it
                    pipe.close()
        if self._group is not None:
            self._group.close()
        self._process = self._group = None

    def _obituary(self, process: subprocess.Popen[bytes]) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_LAST_BREATH_S)
        process.kill()  # where it closed its output and lives on
        code, said = process.wait(), b""
        if self._output is not None:
            self._output.seek(max(self._output.seek(0, 2) - _LAST_WORDS, 0))
            said = self._output.read()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        last = said.decode(errors="replace").strip() or "it said nothing"
        return f"worker process {process.pid} {how}: {last}"


def _ask(process: subprocess.Popen[bytes], line: bytes) -> bytes:
    """Write ``line``; return the line that answers it, without its end where the process ended."""
    _write(process, line)
    assert process.stdout is not None
    return process.stdout.readline(MAX_ANSWER_BYTES)


def _write(process: subprocess.Popen[bytes], line: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it is dead, as the next read tells
        process.stdin.write(line)
        process.stdin.flush()
