"""Workers as processes: alone with their package, throttled, and gone when their graph server is."""

import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from dglx_dist.errors import ConfigError
from dglx_dist.strategies.serverless.aws.package import stage_paths, stages_of
from dglx_dist.strategies.serverless.executors import local
from dglx_dist.strategies.serverless.executors.base import ExecutorContext, Invocation
from dglx_dist.strategies.serverless.executors.local import LocalExecutor
from dglx_dist.strategies.serverless.program import Gather, Program, Vertex
from dglx_dist.strategies.serverless.stages.base import register_stage
from dglx_dist.strategies.serverless.tasks import Direction, TaskKey

from .programs import gcn
from .servers import Bench, keys_of, serve, until

ROOT = Path(__file__).parents[2]
FORWARD = TaskKey(0, 1, 0, Direction.FORWARD)
STAGE = '''
import sys

import numpy as np

from dglx_dist.strategies.serverless.stages.base import Backward, Forward, StageShapes, VertexStage


class Scaled(VertexStage):
    """y = w x, by column."""

    def __init__(self, config):
        width = (config["width"],)
        self.shapes = StageShapes({"scale": width}, width, width)

    def forward(self, weights, inputs):
        print("what a stage prints goes nowhere near the answers")
        if len(inputs[0]) and inputs[0].flat[0] == 0.125:
            raise ValueError(f"sees {sys.path} {sorted(sys.modules)}")
        return Forward((inputs[0] * weights[0],), ())

    def backward(self, weights, inputs, gradients, *, saved=None, wanted=None):
        return Backward((gradients[0] * weights[0],), ((gradients[0] * inputs[0]).sum(0),))
'''


def children(of: int) -> list[int]:
    return [child.pid for child in psutil.Process(of).children()]


def workers() -> list[int]:
    return [
        pid for pid in children(os.getpid()) if b"worker_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


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
    for name in local._DECIDES_BITS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NPY_DISABLE_CPU_FEATURES", "")
    for name in ("AWS_SECRET_ACCESS_KEY", "OPENBLAS_PASSWORD", "MKL_TOKEN"):
        monkeypatch.setenv(name, "sesame")
    bench = waiting_bench()
    with serve(bench), LocalExecutor(ExecutorContext(folder=tmp_path), {}) as executor:
        executor.invoke(bench.task(FORWARD).to_event())
        until(lambda: ("pull", "r0.e0.s1.i0.f/0") in bench.calls, "asked for rows")
        (pid,) = workers()
        variables = Path(f"/proc/{pid}/environ").read_bytes()
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        assert b"sesame" not in variables + command
        names = {entry.partition(b"=")[0] for entry in variables.split(b"\0")}
        threads = {b"OMP_NUM_THREADS", b"OPENBLAS_NUM_THREADS", b"MKL_NUM_THREADS"}
        assert names == {b"", b"LANG", b"NPY_DISABLE_CPU_FEATURES"} | threads
        assert os.readlink(f"/proc/{pid}/cwd") == "/"
        (tree,) = tmp_path.iterdir()
        inside = {path.name for path in tree.iterdir()}
        assert inside - {"numpy.libs", "pyzmq.libs"} == {"dglx_dist", "numpy", "zmq", "dglx_stages.json"}
        assert not (tree / "dglx_dist" / "graph").exists()
    # Closed in the middle of a task: nothing is left, and the task is nobody's news.
    assert not is_alive(pid)
    assert list(tmp_path.iterdir()) == []
    assert executor.take_lost() == []


PARENT = """
import os, sys, time
from dglx_dist.strategies.serverless.executors.base import ExecutorContext
from dglx_dist.strategies.serverless.executors.local import LocalExecutor

executor = LocalExecutor(ExecutorContext(), {})
executor.invoke(sys.stdin.read().encode())
# A fork in the middle of Popen would keep its pipes open, and Popen waits for their end.
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
            (worker,) = [pid for pid in children(parent.pid) if pid != forked]
            parent.kill()
            parent.wait()
            parent.stdout.close()
            until(lambda: not is_alive(worker), "ended")
        finally:
            os.kill(forked, signal.SIGKILL)


def make_scaled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """A program whose one step is a user's own stage, in a module of its own."""
    (tmp_path / "my_scaled.py").write_text(STAGE)
    monkeypatch.syspath_prepend(str(tmp_path))
    register_stage("my_scaled", "my_scaled:Scaled")
    gather = Gather(name="GA", source="x", output=replace(gcn().slots["x"], name="a"), edges=None)
    out = replace(gather.output, name="y")
    vertex = Vertex(
        name="AV", stage="my_scaled", config={"width": 5}, inputs=("a",), outputs=(out,), weights=("w",)
    )
    return Program(steps=(gather, vertex), features=5, classes=5, num_train=3, dtype="float64")


def test_local_workers_run_a_users_own_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(make_scaled(tmp_path, monkeypatch), [4])
    stages = stages_of(bench.program.steps)
    assert stages == {"my_scaled": "my_scaled:Scaled"}
    message = threading.Event()
    context = ExecutorContext(stages=stages, notice=message.set)
    with serve(bench), LocalExecutor(context, {}) as executor:
        keys = keys_of(bench.program)
        for key in keys:
            executor.invoke(bench.task(key).to_event())
        assert bench.wait_for(executor, keys) == []
        for key in keys:
            bench.check(key)
        # Asked by a number that the stage knows, it tells what it sees: the folder and the standard library.
        bench.arrays = lambda key: [np.full((4, 5), 0.125)]  # type: ignore[method-assign]
        executor.invoke(bench.task(replace(keys[0], epoch=1)).to_event())
        assert message.wait(30)
        (lost,) = executor.take_lost()
        assert "ValueError: sees ['/tmp" in lost.reason.replace(str(tmp_path.parent.parent.parent), "/tmp")
        assert "site-packages" not in lost.reason
        assert "torch" not in lost.reason


def test_a_stage_that_cannot_go_along_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="move its class to a module"):
        LocalExecutor(ExecutorContext(folder=tmp_path, stages={"mine": "__main__:Mine"}), {})
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="move it to the top level of 'mine'"):
        LocalExecutor(ExecutorContext(folder=tmp_path, stages={"mine": "mine:make.<locals>.Mine"}), {})
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="no_such_module"):
        stage_paths({"mine": "no_such_module.inner:Mine"})


def test_a_package_that_does_not_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_broken.py").write_text("import no_such_library\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    bench, message = Bench(gcn(), [7]), threading.Event()
    context = ExecutorContext(stages={"broken": "my_broken:Stage"}, notice=message.set)
    with serve(bench), LocalExecutor(context, {}) as executor:
        executor.invoke(bench.task(FORWARD).to_event())
        assert message.wait(30)
        (lost,) = executor.take_lost()
    assert "no_such_library" in lost.reason
    assert "ended with exit code 1" in lost.reason


def test_bandwidth_and_processor_are_those_of_a_small_function() -> None:
    # 5000 rows of 40 bytes down, of 32 bytes up: 200 kB and 160 kB.
    bench, keys, billed = Bench(gcn(), [5000]), [FORWARD, replace(FORWARD, epoch=1)], list[Invocation]()
    options = {"bytes_per_s": 1e6, "cpu_share": 0.9}
    with serve(bench), LocalExecutor(ExecutorContext(), options) as executor:
        for key in keys:
            executor.invoke(bench.task(key).to_event())
        assert bench.wait_for(executor, keys) == []
        until(lambda: billed.extend(executor.take_billed()) or len(billed) == 2, "billed")
    assert all(item.duration_s > 0.2 for item in billed)
    for key in keys:
        bench.check(key)
