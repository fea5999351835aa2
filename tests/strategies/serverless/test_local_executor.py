"""Workers as processes: alone with their package, and gone when their graph server is."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from dglx_dist.strategies.serverless.executors import local
from dglx_dist.strategies.serverless.executors.base import ExecutorContext
from dglx_dist.strategies.serverless.executors.local import LocalExecutor
from dglx_dist.strategies.serverless.tasks import Direction, TaskKey

from .programs import gcn
from .servers import Bench, serve, until

ROOT = Path(__file__).parents[3]
FORWARD = TaskKey(0, 1, 0, Direction.FORWARD)


def children(of: int) -> list[int]:
    return [child.pid for child in psutil.Process(of).children()]


def workers(of: int | None = None) -> list[int]:
    """Workers are children of the process that starts them, which is a child of ``of``, this process."""
    starters = [pid for pid in children(of or os.getpid()) if is_starter(pid)]
    return [pid for starter in starters for pid in children(starter) if is_alive(pid)]


def is_starter(pid: int) -> bool:
    return b"worker_process" in Path(f"/proc/{pid}/cmdline").read_bytes()


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def waiting_bench() -> Bench:
    bench = Bench(gcn(), [7])
    bench.late = 1 << 60
    return bench


def test_a_process_shows_no_secret_and_sees_nothing_of_its_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in local._BIT_DECIDING_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NPY_DISABLE_CPU_FEATURES", "")
    for name in ("AWS_SECRET_ACCESS_KEY", "OPENBLAS_PASSWORD", "MKL_TOKEN"):
        monkeypatch.setenv(name, "sesame")
    bench = waiting_bench()
    with serve(bench), LocalExecutor(ExecutorContext(folder=tmp_path), {}) as executor:
        executor.invoke(bench.task(FORWARD))
        until(lambda: ("pull", "r0.e0.s1.i0.f/0") in bench.calls, "asked for rows")
        (pid,) = workers()
        variables = Path(f"/proc/{pid}/environ").read_bytes()
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        assert b"sesame" not in variables + command
        names = {entry.partition(b"=")[0] for entry in variables.split(b"\0")}
        threads = {b"OMP_NUM_THREADS", b"OPENBLAS_NUM_THREADS", b"MKL_NUM_THREADS"}
        assert names == {b"", b"LANG", b"NPY_DISABLE_CPU_FEATURES", b"CUDA_VISIBLE_DEVICES"} | threads
        assert os.readlink(f"/proc/{pid}/cwd") == "/"
    # Closed in the middle of a task: nothing is left, and the task is nobody's news.
    until(lambda: not is_alive(pid), "the worker to end")
    assert list(tmp_path.iterdir()) == []
    assert executor.take_lost() == []


PARENT = """
import os, sys, time
from dglx_dist.strategies.serverless.executors.base import ExecutorContext
from dglx_dist.strategies.serverless.executors.local import LocalExecutor
from dglx_dist.strategies.serverless.tasks import Task

executor = LocalExecutor(ExecutorContext(), {})
executor.invoke(Task.from_event(sys.stdin.read()))
while not any(worker._process for worker, _ in list(executor._busy.values())):
    time.sleep(0.01)
forked = os.fork()
if forked:
    print(forked, flush=True)
time.sleep(60)
"""


def test_workers_end_with_their_graph_server_however_it_ends(tmp_path: Path) -> None:
    bench = waiting_bench()
    with serve(bench):
        parent = subprocess.Popen(
            [sys.executable, "-c", PARENT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path)},
        )
        assert parent.stdin is not None
        assert parent.stdout is not None
        parent.stdin.write(bench.task(FORWARD, timeout_s=60).to_event())
        parent.stdin.close()
        # It holds the worker's pipe open, too, as a loader's processes may.
        forked = int(parent.stdout.readline())
        try:
            until(lambda: ("pull", "r0.e0.s1.i0.f/0") in bench.calls, "asked for rows")
            (worker,) = workers(parent.pid)
            (starter,) = [pid for pid in children(parent.pid) if pid != forked]
            parent.kill()
            parent.wait()
            parent.stdout.close()
            until(lambda: not is_alive(worker) and not is_alive(starter), "ended")
        finally:
            os.kill(forked, signal.SIGKILL)


def test_a_worker_that_dies_is_replaced_and_the_reason_is_known() -> None:
    bench, noticed = waiting_bench(), threading.Event()
    with serve(bench), LocalExecutor(ExecutorContext(notice=noticed.set), {}) as executor:
        executor.invoke(bench.task(FORWARD))
        until(lambda: ("pull", "r0.e0.s1.i0.f/0") in bench.calls, "asked for rows")
        (pid,) = workers()
        os.kill(pid, signal.SIGKILL)
        assert noticed.wait(30)
        (lost,) = executor.take_lost()
        assert f"worker process {pid} died: no output" in lost.reason
        bench.late = 0
        executor.invoke(bench.task(FORWARD).again())
        assert bench.wait_for(executor, [FORWARD]) == []
    bench.check(FORWARD)
    until(lambda: not workers(), "ended")
