"""Tries a function with real tasks: it must call back here, and give the bits that this process computes."""

from __future__ import annotations

import base64
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final
from urllib.parse import urlsplit

import numpy as np

from dglx_dist.cluster.auth import Credentials
from dglx_dist.cluster.ledger import Ledger
from dglx_dist.cluster.rpc import Rpc
from dglx_dist.cluster.serve import Handler
from dglx_dist.cluster.topology import Topology
from dglx_dist.errors import ConfigError, RemoteError
from dglx_dist.offload.aws.clients import Client, Place, explained
from dglx_dist.offload.aws.deployment import MAX_TIMEOUT_S
from dglx_dist.offload.fields import Json
from dglx_dist.offload.payload import join_halves, take_half
from dglx_dist.offload.program import Program
from dglx_dist.offload.steps import FEATURES, Slot, Vertex
from dglx_dist.offload.tasks import (
    Address,
    Direction,
    Secrets,
    Task,
    TaskKey,
    TaskOptions,
    parse_attempt,
    parse_half,
)
from dglx_dist.offload.work import Work
from dglx_dist.offload.worker import exchange as ops
from dglx_dist.offload.worker.answer import WorkerAnswer
from dglx_dist.records import Array

ROWS, FEATURES_IN, CLASSES = 101, 16, 4
TASK_TIMEOUT_S = 20.0
_LAST_WORDS = 1500


@final
@dataclass(frozen=True, kw_only=True)
class Tried:
    """One task that a function did as it should."""

    seconds: float
    """From the invocation to its answer."""
    worker_s: float
    """Of these, inside the worker."""
    cold: bool


def try_function(
    name: str, place: Place, say: Callable[[str], None], *, address: str | None = None, times: int = 2
) -> list[Tried]:
    """Invoke the function ``name`` with a small task, wait for the answer, and compare what it gave.

    Args:
        name: The function.
        place: Where it is.
        say: Told of the address at which this process serves.
        address: Numeric address of this machine that the function can reach; None: the one by which this
            machine reaches AWS.
        times: How often; the second finds a warm container.

    Raises:
        ConfigError: there is no such function, or no permission; or the function computes other bits.
        RemoteError: the function failed; the message ends with its log.
        PeerError: AWS cannot be reached.
    """
    # The result is waited for: for as long as a function may take at most.
    client = place.client("lambda", timeout_s=MAX_TIMEOUT_S + 10)
    with _served(address or _own_address(client)) as trial:
        say(f"serving one interval of {ROWS} nodes at {trial.endpoint}")
        return [trial.run(client, name, epoch) for epoch in range(times)]


@contextmanager
def _served(address: str) -> Iterator[_Trial]:
    _check_own(address)
    rpc = Rpc(0, Ledger(Topology(rank=0, world_size=1, server_of_rank=(0,))), TASK_TIMEOUT_S)
    secret = secrets.token_hex(32)
    try:
        endpoint = rpc.listen(address, Credentials(secret=secret.encode()))
        trial = _Trial(endpoint, secret)
        for op, handler in trial.handlers().items():
            rpc.register(op, handler)
        yield trial
    finally:
        rpc.close()


@final
class _Trial:
    """Serves one interval and the weights of one layer, and takes what a worker gives."""

    def __init__(self, endpoint: str, secret: str) -> None:
        self.endpoint, self._secret = endpoint, secret
        config: dict[str, Json] = {"in": FEATURES_IN, "out": CLASSES, "bias": True}
        layer = Vertex(
            name="AV1",
            stage="dense",
            config=config,
            inputs=(FEATURES,),
            outputs=(Slot("h1", CLASSES),),
            weights=("weight", "bias"),
        )
        self._program = Program(steps=(layer,), features=FEATURES_IN, classes=CLASSES, num_train=ROWS)
        self._work = Work(self._program, 0, Direction.FUSED, True)
        rng = np.random.default_rng(0)
        self._weights = [rng.normal(size=shape).astype(np.float32) for shape in self._work.weights.values()]
        rows = rng.normal(size=(ROWS, FEATURES_IN)).astype(np.float32)
        self._arrays: list[Array] = [rows, rng.integers(0, CLASSES, size=ROWS, dtype=np.int32)]
        self._lock = threading.Lock()
        self._given: dict[tuple[TaskKey, int], list[Array]] = {}
        self._pushed: dict[TaskKey, list[Array]] = {}

    def handlers(self) -> dict[str, Handler]:
        """Operation of a worker to what answers it."""
        return {
            ops.PROGRAM: lambda _name, _arrays: [np.frombuffer(self._program.to_json(), np.uint8)],
            ops.PULL: lambda name, _arrays: take_half(
                self._work.pulled, self._arrays, ROWS, parse_half(name)[1]
            ),
            ops.WEIGHTS: lambda _name, _arrays: self._weights,
            ops.GRADIENTS: self._take_gradients,
            ops.GIVE: self._take_rows,
        }

    def run(self, client: Client, name: str, epoch: int) -> Tried:
        """Invoke the function with the task of ``epoch`` and check what it did."""
        key, begun = TaskKey(epoch, 0, 0, Direction.FUSED), time.perf_counter()
        with explained(f"could not invoke the function {name}"):
            answer = client.invoke(
                FunctionName=name,
                InvocationType="RequestResponse",
                LogType="Tail",
                Payload=self._task(key).to_event(),
            )
            told = answer["Payload"].read()
        seconds = time.perf_counter() - begun
        if "FunctionError" in answer:
            raise RemoteError(f"the function {name} failed: {_reason(told)}\n{_tail(answer)}")
        worker = WorkerAnswer.from_json(told)
        self._check(name, key)
        return Tried(seconds=seconds, worker_s=worker.seconds, cold=worker.cold)

    def _task(self, key: TaskKey) -> Task:
        here = Address(rank=0, host=socket.gethostname(), endpoint=self.endpoint)
        return Task(
            key=key,
            rows=ROWS,
            program=self._program.digest,
            graph_server=here,
            parameter_server=here,
            secrets=Secrets(secret=self._secret),
            timeout_s=TASK_TIMEOUT_S,
            options=TaskOptions(),
        )

    def _check(self, name: str, key: TaskKey) -> None:
        wanted = self._work.whole(self._weights, self._arrays, ROWS)
        with self._lock:
            halves = [self._given.get((key, half)) for half in (0, 1)]
            pushed = self._pushed.get(key)
        if halves[0] is None or halves[1] is None or pushed is None:
            raise ConfigError(f"the function {name} answered, and gave no rows or gradients; deploy it again")
        found = [*join_halves(self._work.given, halves[0], halves[1]), *pushed]
        # Another processor may round sums otherwise in the last bits: its BLAS has other kernels.
        for one, other in zip(found, [*wanted.rows, *wanted.gradients], strict=True):
            if not np.allclose(one, other, rtol=1e-4, atol=1e-5):
                worst = float(np.max(np.abs(one - other)))
                raise ConfigError(
                    f"the function {name} computes other numbers than this machine, by up to {worst:.3g}; "
                    "package and deploy this version"
                )

    def _take_rows(self, name: str, arrays: Sequence[Array]) -> list[Array]:
        key, half, _attempt = parse_attempt(name)
        with self._lock:
            self._given[key, half] = list(arrays)
        return [np.array([1])]

    def _take_gradients(self, name: str, arrays: Sequence[Array]) -> list[Array]:
        with self._lock:
            self._pushed[TaskKey.parse(name)] = list(arrays)
        return []


def _check_own(address: str) -> None:
    """Raise ConfigError unless ``address`` is one of this machine."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind((address, 0))
    except OSError as error:
        raise ConfigError(
            f"nothing can listen at {address!r} here: {error}; give a numeric address of this machine"
        ) from error


def _own_address(client: Client) -> str:
    """Return the address of this machine on the way to AWS."""
    url = urlsplit(client.meta.endpoint_url)
    try:
        family, kind, *_, target = socket.getaddrinfo(url.hostname, url.port or 443, type=socket.SOCK_DGRAM)[
            0
        ]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # Chooses the route; nothing is sent.
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"no address of this machine leads to {url.hostname}: {error}; give one with --address"
        ) from error


def _reason(told: bytes) -> str:
    try:
        found = json.loads(told)
    except ValueError:
        return told[:_LAST_WORDS].decode(errors="replace")
    return str(found.get("errorMessage", found) if isinstance(found, dict) else found)[:_LAST_WORDS]


def _tail(answer: dict[str, str]) -> str:
    return base64.b64decode(answer.get("LogResult", "")).decode(errors="replace")[-_LAST_WORDS:].strip()
