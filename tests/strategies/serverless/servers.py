"""A graph server and a parameter server that know no graph: rows by chance; what comes is kept."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import zmq

from dglx_dist.comm.auth import Credentials
from dglx_dist.comm.ledger import Ledger
from dglx_dist.comm.rpc import Handler, Rpc
from dglx_dist.comm.topology import Topology
from dglx_dist.comm.wire import payload_bytes
from dglx_dist.errors import ConfigError
from dglx_dist.records import Array
from dglx_dist.strategies.serverless import worker as ops
from dglx_dist.strategies.serverless.executors.base import Executor, Lost
from dglx_dist.strategies.serverless.program import Apply, Program
from dglx_dist.strategies.serverless.tasks import (
    Address,
    Direction,
    Item,
    Role,
    Secrets,
    Task,
    TaskComputation,
    TaskKey,
    half_rows,
    join_halves,
    parse_attempt,
    parse_half,
)
from dglx_dist.strategies.serverless.tensor_program import RowKeys

PATIENCE_S = 60.0


def until(holds: Callable[[], object], what: str = "so") -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, f"not {what} within {PATIENCE_S} s"
        time.sleep(0.002)


def other_capability() -> str:
    """A value of ATEN_CPU_CAPABILITY with which another process computes with other kernels."""
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("torch has only its plainest kernels here")
    return "default"


def keys_of(program: Program, interval: int = 0, epoch: int = 0) -> list[TaskKey]:
    results = []
    for index, step in enumerate(program.steps):
        if isinstance(step, Apply) and step.place == "worker":
            results += [
                TaskKey(epoch, index, interval, way) for way in (Direction.FORWARD, Direction.BACKWARD)
            ]
    return [*results, TaskKey(epoch, program.last, interval, Direction.FUSED)]


class Bench:
    """Answers workers' operations for one program, and counts the bytes.

    Args:
        program: What is trained.
        rows: Of each interval.
    """

    def __init__(self, program: Program, rows: Sequence[int]) -> None:
        self.program, self.rows = program, list(rows)
        self.weights = _weights(program)
        self.late = 0
        """How often a first pull is told "not yet"."""
        self.calls: list[tuple[str, str]] = []
        self.bytes = {"pull": 0, "give": 0, "weights": 0, "gradients": 0, "program": 0}
        self.given: dict[TaskKey, dict[int, list[Array]]] = {}
        self.pushed: dict[TaskKey, list[Array]] = {}
        self.pushes: list[TaskKey] = []
        self.address = Address(rank=0, host="here", endpoint="tcp://127.0.0.1:1")
        self.secrets = Secrets(secret="unused")
        self._lock = threading.Lock()

    def handlers(self) -> dict[str, Handler]:
        return {
            ops.PROGRAM: self._give_program,
            ops.PULL: self._pull,
            ops.SUBMIT: self._take,
            ops.WEIGHTS: self._give_weights,
            ops.GRADIENTS: self._take_gradients,
        }

    def work(self, key: TaskKey) -> TaskComputation:
        return TaskComputation(self.program, key.step, key.direction)

    def task(self, key: TaskKey, *, timeout_s: float = 20.0) -> Task:
        return Task(
            key=key,
            rows=self.rows[key.interval],
            first_row=100 * key.interval,
            seed=3,
            program=self.program.digest,
            graph_server=self.address,
            parameter_server=self.address,
            secrets=self.secrets,
            timeout_s=timeout_s,
        )

    def arrays(self, key: TaskKey) -> list[Array]:
        rng = np.random.default_rng([key.step, key.interval, len(key.direction.value)])
        rows = self.rows[key.interval]
        return [self._draw(rng, item, rows) for item in self.work(key).pulled]

    def check(self, key: TaskKey) -> None:
        work, task = self.work(key), self.task(key)
        weights, halves = [self.weights[name] for name in work.weights], self.given[key]
        keys = RowKeys(3, key.epoch, torch.arange(task.first_row, task.first_row + task.rows))
        expected = work.compute_halves(weights, self.arrays(key), task.rows, keys)
        results = [*join_halves(work.given, halves[0], halves[1]), *self.pushed.get(key, [])]
        for result, reference in zip(results, [*expected.rows, *expected.gradients], strict=True):
            assert result.dtype == reference.dtype
            np.testing.assert_array_equal(result, reference)

    def wait_for(self, executor: Executor, keys: Sequence[TaskKey]) -> list[Lost]:
        """Wait until all halves of ``keys`` are here; return what was lost meanwhile."""
        lost: list[Lost] = []
        deadline = time.monotonic() + PATIENCE_S
        while missing := [str(key) for key in keys if len(self.given.get(key, {})) < 2]:
            lost += executor.take_lost()
            assert time.monotonic() < deadline, f"missing {missing}; lost {lost[:2]}"
            time.sleep(0.002)
        return lost + executor.take_lost()

    def _draw(self, rng: np.random.Generator, item: Item, rows: int) -> Array:
        if item.role is Role.LABELS:
            return rng.integers(-1, self.program.scores.width, size=rows, dtype=np.int32)
        return rng.normal(size=(rows, item.width)).astype(item.dtype)

    def _give_program(self, name: str, arrays: Sequence[Array]) -> list[Array]:
        return self._note("program", name, [np.frombuffer(self.program.to_json(), np.uint8)])

    def _pull(self, name: str, arrays: Sequence[Array]) -> list[Array]:
        key, half = parse_half(name)
        key.check(self.program)
        with self._lock:
            is_late = self.late > 0
            self.late -= is_late
        part = half_rows(self.rows[key.interval], half)
        result = [] if is_late else [array[part] for array in self.arrays(key)]
        return self._note("pull", name, result)

    def _take(self, name: str, arrays: Sequence[Array]) -> list[Array]:
        key, half, _attempt = parse_attempt(name)
        key.check(self.program)
        self._note("give", name, arrays)
        with self._lock:
            self.given.setdefault(key, {}).setdefault(half, list(arrays))
        return []

    def _give_weights(self, name: str, arrays: Sequence[Array]) -> list[Array]:
        names = self.program.weights_of(TaskKey.parse(name).step)
        return self._note("weights", name, [self.weights[weight] for weight in names])

    def _take_gradients(self, name: str, arrays: Sequence[Array]) -> list[Array]:
        key = TaskKey.parse(name)
        self._note("gradients", name, arrays)
        with self._lock:
            self.pushes.append(key)
            old = self.pushed.setdefault(key, list(arrays))
        if not all(map(np.array_equal, old, arrays)):
            raise ConfigError(f"gradients {name} came again with other bits")
        return []

    def _note(self, what: str, name: str, arrays: Sequence[Array]) -> list[Array]:
        with self._lock:
            self.calls.append((what, name))
            self.bytes[what] += payload_bytes(arrays)
        return list(arrays)


@contextmanager
def serve(bench: Bench, *, curve: bool = False) -> Iterator[Rpc]:
    topology = Topology(rank=0, world_size=1, server_of_rank=(0,))
    rpc = Rpc(0, Ledger(topology), 20.0)
    public, secret = zmq.curve_keypair() if curve else (None, None)
    worker_public, worker_secret = zmq.curve_keypair() if curve else (None, None)
    accepted = frozenset(key for key in (worker_public,) if key is not None)
    endpoint = rpc.listen(
        "127.0.0.1",
        Credentials(secret=b"open sesame", public_key=public, secret_key=secret, accepted_keys=accepted),
    )
    for op, handler in bench.handlers().items():
        rpc.register(op, handler)
    bench.address = Address(rank=0, host="here", endpoint=endpoint, public_key=_text(public))
    bench.secrets = Secrets(
        secret="open sesame", public_key=_text(worker_public), secret_key=_text(worker_secret)
    )
    try:
        yield rpc
    finally:
        rpc.close()


def _text(key: bytes | None) -> str | None:
    return None if key is None else key.decode()


def _weights(program: Program) -> Mapping[str, Array]:
    rng = np.random.default_rng(1)
    return {
        name: rng.normal(size=shape).astype(program.dtype) for name, shape in program.weight_shapes.items()
    }
