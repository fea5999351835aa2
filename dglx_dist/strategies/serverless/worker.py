"""The worker: runs tasks, and exchanges rows, weights and gradients with the servers of a job."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, TypeAlias, final

import torch
import zmq

from dglx_dist.comm.auth import Credentials
from dglx_dist.comm.rpc import Client, Handler, PeerAddress, run_handler
from dglx_dist.data.json_fields import Fields, Json, Within, printable
from dglx_dist.errors import ConfigError, DglxError, PeerError, RemoteError
from dglx_dist.records import Array
from dglx_dist.strategies.serverless.program import MAX_PROGRAM_BYTES, Program
from dglx_dist.strategies.serverless.tasks import (
    MAX_ATTEMPT,
    TASK_OVER,
    Address,
    Computed,
    Direction,
    Secrets,
    Task,
    TaskComputation,
    TaskKey,
    add_gradients,
    attempt_name,
    half_length,
    half_name,
    half_rows,
    kernels,
)
from dglx_dist.strategies.serverless.tensor_program import RowKeys

MAX_ANSWER_BYTES = 64 * 1024
_LONGEST_ERROR = 4000
_IDLE_S = 5.0
"""Connections idle for longer are reopened: a function's container is frozen between invocations, and its
peers have dropped a silent connection by then."""
# Operations of graph servers, see :class:`_Calls`.
PROGRAM = "lambda.program"
PULL = "lambda.pull"
GIVE = "lambda.give"
WEIGHTS, GRADIENTS = "lambda.weights", "lambda.gradients"
"""Operations of parameter servers."""
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.02


@final
@dataclass(frozen=True, kw_only=True)
class WorkerAnswer:
    """Outcome of a task, reported by its worker."""

    key: TaskKey
    attempt: Annotated[int, Within(0, MAX_ATTEMPT)]
    seconds: Annotated[float, Within(0, 1e9)]
    cold: bool
    """Whether it was the first task of its worker."""
    error: str = ""
    """Why the task failed; "" on success."""

    def as_json(self) -> dict[str, Json]:
        return {**vars(self), "key": str(self.key), "error": printable(self.error, _LONGEST_ERROR)}

    @classmethod
    def from_json(cls, text: bytes | str) -> WorkerAnswer:
        """Read the JSON text of :meth:`as_json`; ConfigError if it is invalid."""
        fields = Fields.parse(text, "a worker's answer", MAX_ANSWER_BYTES)
        answer = fields.record(
            cls,
            key=lambda name: TaskKey.parse(fields.text(name, 1, 64)),
            error=lambda name: printable(fields.text(name), _LONGEST_ERROR),
        )
        fields.reject_unread()
        return answer


Answer: TypeAlias = Callable[[float], list[Array]]
"""Waits for the answer to a call, on the calling thread, so many seconds from :meth:`Caller.send`.

PeerError: the server is dead, silent, or rejects this worker. RemoteError: the handler raised.
"""


class Caller(ABC):
    """Calls the servers of a job."""

    @abstractmethod
    def send(self, to: Address, secrets: Secrets, op: str, name: str, arrays: Sequence[Array] = ()) -> Answer:
        """Call ``op`` of ``to``; ``arrays`` must not change until the answer has arrived."""

    @abstractmethod
    def close(self) -> None:
        """Close all connections; pending calls end with a PeerError."""

    def begin(self) -> None:  # noqa: B027 - most have nothing to do
        """Prepare for a task: no call is pending, and connections may have died since the last one."""


@final
class RemoteCaller(Caller):
    """Calls over sockets; connections stay open for the next task of the same job."""

    def __init__(self) -> None:
        self._secrets: Secrets | None = None
        """Secrets of the open connections; None: there are none."""
        self._used_at = 0.0

    def begin(self) -> None:
        # By the wall clock: a monotonic clock may stop in a frozen container.
        if time.time() - self._used_at > _IDLE_S:
            self.close()

    def send(self, to: Address, secrets: Secrets, op: str, name: str, arrays: Sequence[Array] = ()) -> Answer:
        if secrets.secret_key is not None and to.public_key is None:
            raise ConfigError(
                f"rank {to.rank} on {to.host} has no public key, but this job's connections are "
                "encrypted; set DGLX_CURVE to the same value on all ranks"
            )

        if self._secrets != secrets:
            self.close()
            self._open(secrets)
        self._used_at = time.time()

        # Numbered here: after a restart a rank may come back at another address.
        number = self._numbers.setdefault(to, len(self._numbers))
        if number not in self._peers:
            key = _bytes(to.public_key)
            self._peers[number] = PeerAddress(
                rank=to.rank, host=to.host, endpoint=to.endpoint, public_key=key
            )

        return self._client.send(number, op, name, arrays).result

    def close(self) -> None:
        if self._secrets is not None:
            self._client.close()
            self._context.destroy(linger=0)
            self._secrets = None

    def _open(self, secrets: Secrets) -> None:
        self._numbers = dict[Address, int]()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._peers: dict[int, PeerAddress] = {}
        credentials = Credentials(
            secret=secrets.secret.encode(),
            public_key=_bytes(secrets.public_key),
            secret_key=_bytes(secrets.secret_key),
        )
        self._client = Client(self._context, self._peers, credentials)
        self._secrets = secrets


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else text.encode()


@final
class DirectCaller(Caller):
    """Calls handlers of this process, without sockets and copies; secrets are ignored."""

    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        self._handlers = handlers
        self._closed = False

    def send(self, to: Address, secrets: Secrets, op: str, name: str, arrays: Sequence[Array] = ()) -> Answer:
        if self._closed:
            raise PeerError("the executor was closed while a task was running")
        try:
            answer = run_handler(self._handlers, op, name, arrays)
        except Exception as error:
            text = f"rank {to.rank} on {to.host} failed at {op} {name!r}: {type(error).__name__}: {error}"
            raise RemoteError(text) from error
        return lambda _timeout_s: answer

    def close(self) -> None:
        self._closed = True


class _TaskOver(Exception):
    """Another attempt has done the task."""


@final
class _Calls:
    """The calls of one task.

    ``lambda.pull`` answered without arrays means "not yet". A worker may start before its rows are ready, and
    polls so that it does not block a thread of the server.
    """

    def __init__(self, caller: Caller, task: Task) -> None:
        self._caller, self._task = caller, task

    def program(self) -> bytes:
        """Fetch the program's JSON, and report this worker's numerical kernels."""
        arrays = self._graph_server(PROGRAM, kernels())(self._task.timeout_s)
        if len(arrays) != 1 or arrays[0].nbytes > MAX_PROGRAM_BYTES:
            server = self._task.graph_server
            raise ConfigError(
                f"rank {server.rank} on {server.host} answered {PROGRAM} without one program of at most "
                f"{MAX_PROGRAM_BYTES} bytes; run the same version of dglx_dist everywhere"
            )
        return arrays[0].tobytes()

    def pull(self, half: int) -> Answer:
        return self._graph_server(PULL, half_name(self._task.key, half))

    def rows(self, answer: Answer, half: int) -> list[Array]:
        """Wait for the answer to :meth:`pull`; PeerError if the graph server lacks the rows for too long."""
        task = self._task
        requested_at = time.monotonic()
        while not (arrays := answer(task.timeout_s)):
            waited_s = time.monotonic() - requested_at
            if waited_s > task.timeout_s:
                server = task.graph_server
                name = half_name(task.key, half)
                raise PeerError(
                    f"rank {server.rank} on {server.host} had no rows for {PULL} {name!r} "
                    f"within {task.timeout_s:g} s; check the tasks before this one, or raise timeout_s"
                )
            # Proportional to the waiting time: few calls, and ready rows are fetched soon. Workers that
            # fetch late would cost more than the pipeline gains.
            time.sleep(min(max(waited_s / 2, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S))
            answer = self.pull(half)

        if [array.dtype for array in arrays] == [TASK_OVER.dtype]:
            raise _TaskOver
        return arrays

    def parameters(self, op: str, arrays: Sequence[Array] = ()) -> Answer:
        task = self._task
        return self._caller.send(task.parameter_server, task.secrets, op, str(task.key), arrays)

    def submit(self, half: int, rows: Sequence[Array]) -> Answer:
        return self._graph_server(GIVE, attempt_name(self._task.key, half, self._task.attempt), rows)

    def _graph_server(self, op: str, name: str, arrays: Sequence[Array] = ()) -> Answer:
        return self._caller.send(self._task.graph_server, self._task.secrets, op, name, arrays)


class TaskPhase(str, Enum):
    """Point that a worker has reached in its task."""

    BEFORE_PULL = "before_pull"
    HALF = "half"
    """One half is computed."""
    COMPUTED = "computed"
    """Both halves are computed; nothing is pushed, and of a backward task nothing is sent."""
    PUSHED = "pushed"
    """The parameter server has the gradients; the graph server lacks rows."""
    END = "end"
    """All rows are sent."""


PhaseHook: TypeAlias = Callable[[TaskPhase], None]
"""Called at each phase; an exception from it ends the task."""


@final
class Worker:
    """Runs tasks one after another; keeps only connections and the last program in between.

    Gradients are pushed and acknowledged before the last rows are sent. For the graph server a task is done
    when its rows have arrived, so a worker may die at any point without loss: the next attempt pushes the
    same bits under the same key, and they count once.
    """

    def __init__(self, caller: Caller, hook: PhaseHook = lambda phase: None) -> None:
        self._caller, self._hook = caller, hook
        self._cold = True
        self._run_of_program: object = None
        self._program: Program
        self._works: dict[tuple[int, Direction], TaskComputation] = {}

    def handle(self, event: object, context: object = None) -> dict[str, Json]:
        """Run the task of ``event`` (``Task.to_event``, or its parsed JSON); return ``WorkerAnswer.as_json``.

        A functions service adds ``context``. Raises what :meth:`attempt` returns.
        """
        answer, failure = self.attempt(Task.from_event(event))
        if failure is not None:
            raise failure
        return answer.as_json()

    def attempt(self, task: Task) -> tuple[WorkerAnswer, DglxError | None]:
        """Run ``task``; return its answer, and why it failed, with task, attempt and call."""
        started = time.perf_counter()
        cold, self._cold = self._cold, False
        failure = None
        try:
            self._run(task)
        except _TaskOver:
            pass
        except Exception as error:  # noqa: BLE001 - reported to the caller; the next task may succeed
            kind = type(error) if isinstance(error, DglxError) else RemoteError
            text = str(error) if isinstance(error, DglxError) else f"{type(error).__name__}: {error}"
            failure = kind(f"task {task.key}, attempt {task.attempt}: {text}")
            failure.__cause__ = error

        answer = WorkerAnswer(
            key=task.key,
            attempt=task.attempt,
            seconds=time.perf_counter() - started,
            cold=cold,
            error=str(failure or ""),
        )
        return answer, failure

    def _run(self, task: Task) -> None:
        self._caller.begin()
        calls = _Calls(self._caller, task)
        work = self._work(task, calls)
        self._hook(TaskPhase.BEFORE_PULL)
        requested = calls.parameters(WEIGHTS) if work.weights else None
        pulled = [calls.rows(calls.pull(0), 0)]
        second = calls.pull(1)
        weights = [] if requested is None else requested(task.timeout_s)
        computed: list[Computed] = []
        submitted: list[Answer] = []

        # The first half is computed while the second arrives. Forward, it is also sent meanwhile.
        for half in (0, 1):
            if half:
                pulled.append(calls.rows(second, 1))
            keys = _keys_of_half(task, half, len(pulled[half][0])) if work.drops and pulled[half] else None
            computed.append(work.half(weights, pulled[half], half_length(task.rows, half), keys))
            self._hook(TaskPhase.HALF)
            if half == 0 and task.key.direction is Direction.FORWARD:
                submitted.append(calls.submit(0, computed[0].rows))

        self._hook(TaskPhase.COMPUTED)
        if work.pushes and work.weights:
            gradients = add_gradients(computed[0].gradients, computed[1].gradients)
            calls.parameters(GRADIENTS, gradients)(task.timeout_s)
        self._hook(TaskPhase.PUSHED)
        for half in range(len(submitted), 2):
            submitted.append(calls.submit(half, computed[half].rows))
        for answer in submitted:
            answer(task.timeout_s)
        self._hook(TaskPhase.END)

    def _work(self, task: Task, calls: _Calls) -> TaskComputation:
        key = task.key
        run = (task.program, task.secrets, task.key.run)

        # Fetched again for each run even if programs are equal: the call also reports the worker's kernels.
        if self._run_of_program != run:
            program = Program.from_json(calls.program())
            if program.digest != task.program:
                raise ConfigError(
                    f"rank {task.graph_server.rank} on {task.graph_server.host} gave program "
                    f"{program.digest[:12]} instead of {task.program[:12]}: it belongs to another run"
                )

            self._run_of_program = run
            self._program = program
            self._works = {}

        kind = (key.step, key.direction)
        if kind not in self._works:
            key.check(self._program)
            self._works[kind] = TaskComputation(self._program, *kind)
        return self._works[kind]


def _keys_of_half(task: Task, half: int, num_rows: int) -> RowKeys:
    # As many as there are rows, whatever the event says.
    first = task.first_row + half_rows(task.rows, half).start
    return RowKeys(task.seed, task.key.epoch, torch.arange(first, first + num_rows))
