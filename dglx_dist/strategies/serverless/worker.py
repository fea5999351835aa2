"""The worker: runs tasks, and exchanges rows, weights and gradients with a job's servers."""

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
_RECONNECT_AFTER_S = 5.0
"""Idle seconds after which connections are reopened.

A function's container is frozen between invocations, and peers drop silent connections.
"""
# Operations on graph servers, see :class:`_TaskCalls`.
PROGRAM = "lambda.program"
PULL = "lambda.pull"
SUBMIT = "lambda.give"
WEIGHTS, GRADIENTS = "lambda.weights", "lambda.gradients"
"""Operations on parameter servers."""
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.02


@final
@dataclass(frozen=True, kw_only=True)
class WorkerAnswer:
    """A task's outcome, as its worker reports it."""

    key: TaskKey
    attempt: Annotated[int, Within(0, MAX_ATTEMPT)]
    seconds: Annotated[float, Within(0, 1e9)]
    cold: bool
    """Whether the task was its worker's first."""
    error: str = ""
    """Why the task failed; "" on success."""

    def as_json(self) -> dict[str, Json]:
        return {**vars(self), "key": str(self.key), "error": printable(self.error, _LONGEST_ERROR)}

    @classmethod
    def from_json(cls, text: bytes | str) -> WorkerAnswer:
        """Read JSON text that :meth:`as_json` returned. Raises ConfigError if the text is invalid."""
        fields = Fields.parse(text, "a worker's answer", MAX_ANSWER_BYTES)
        answer = fields.record(
            cls,
            key=lambda name: TaskKey.parse(fields.text(name, 1, 64)),
            error=lambda name: printable(fields.text(name), _LONGEST_ERROR),
        )
        fields.reject_unread()
        return answer


Answer: TypeAlias = Callable[[float], list[Array]]
"""Waits for a call's answer and returns its arrays.

The argument is the time limit in seconds, counted from :meth:`Caller.send`. Raises PeerError if the server is
dead, silent, or rejects this worker, and RemoteError if the handler raised.
"""


class Caller(ABC):
    """Calls a job's servers."""

    @abstractmethod
    def send(self, to: Address, secrets: Secrets, op: str, name: str, arrays: Sequence[Array] = ()) -> Answer:
        """Call ``op`` on the server ``to``. ``arrays`` must not change until the answer has arrived."""

    @abstractmethod
    def close(self) -> None:
        """Close all connections. Pending calls end with a PeerError."""

    def begin(self) -> None:  # noqa: B027 - a caller without connections has nothing to do
        """Prepare for a task. No call is pending, but connections may have died since the last task."""


@final
class RemoteCaller(Caller):
    """Calls over sockets. Connections stay open for the same job's next task."""

    def __init__(self) -> None:
        self._secrets: Secrets | None = None
        """Secrets for the open connections, or None if no connection is open."""
        self._last_call_at = 0.0

    def begin(self) -> None:
        # The wall clock is used because a monotonic clock may stop in a frozen container.
        if time.time() - self._last_call_at > _RECONNECT_AFTER_S:
            self.close()

    def send(self, to: Address, secrets: Secrets, op: str, name: str, arrays: Sequence[Array] = ()) -> Answer:
        if secrets.secret_key is not None and to.public_key is None:
            raise ConfigError(
                f"rank {to.rank} on {to.host} has no public key, but this job's connections "
                "are encrypted; set DGLX_CURVE to the same value on all ranks"
            )

        if self._secrets != secrets:
            self.close()
            self._open(secrets)
        self._last_call_at = time.time()

        # Peers are known by their address and not by their rank, because a restarted rank may have a new one.
        peer_index = self._peer_indices.setdefault(to, len(self._peer_indices))
        if peer_index not in self._peers:
            self._peers[peer_index] = PeerAddress(
                rank=to.rank,
                host=to.host,
                endpoint=to.endpoint,
                public_key=_encode_key(to.public_key),
            )

        return self._client.send(peer_index, op, name, arrays).result

    def close(self) -> None:
        if self._secrets is not None:
            self._client.close()
            self._context.destroy(linger=0)
            self._secrets = None

    def _open(self, secrets: Secrets) -> None:
        self._peer_indices = dict[Address, int]()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._peers: dict[int, PeerAddress] = {}
        credentials = Credentials(
            secret=secrets.secret.encode(),
            public_key=_encode_key(secrets.public_key),
            secret_key=_encode_key(secrets.secret_key),
        )
        # The client sees each peer that is added to `_peers` later.
        self._client = Client(self._context, self._peers, credentials)
        self._secrets = secrets


def _encode_key(key: str | None) -> bytes | None:
    return None if key is None else key.encode()


@final
class DirectCaller(Caller):
    """Calls handlers in this process, without sockets and copies. Secrets are ignored."""

    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        self._handlers = handlers
        self._closed = False

    def send(self, to: Address, secrets: Secrets, op: str, name: str, arrays: Sequence[Array] = ()) -> Answer:
        if self._closed:
            raise PeerError("the executor was closed while a task was running")
        try:
            answer = run_handler(self._handlers, op, name, arrays)
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
            raise RemoteError(f"rank {to.rank} on {to.host} failed at {op} {name!r}: {cause}") from error

        # The handler has already run, so there is nothing to wait for.
        return lambda _timeout_s: answer

    def close(self) -> None:
        self._closed = True


class _TaskOver(Exception):
    """Raised when another attempt has done the task."""


@final
class _TaskCalls:
    """The calls that a worker makes for one task.

    A worker may start before its rows are ready. The graph server then answers ``lambda.pull`` without
    arrays, and the worker asks again later, so that it does not block a server thread.
    """

    def __init__(self, caller: Caller, task: Task) -> None:
        self._caller = caller
        self._task = task

    def fetch_program(self) -> bytes:
        """Fetch the program's JSON, and report this worker's numerical kernels."""
        arrays = self._call_graph_server(PROGRAM, kernels())(self._task.timeout_s)
        if len(arrays) != 1 or arrays[0].nbytes > MAX_PROGRAM_BYTES:
            server = self._task.graph_server
            raise ConfigError(
                f"rank {server.rank} on {server.host} answered {PROGRAM} without one program of at most "
                f"{MAX_PROGRAM_BYTES} bytes; run the same version of dglx_dist everywhere"
            )
        return arrays[0].tobytes()

    def pull(self, half: int) -> Answer:
        return self._call_graph_server(PULL, half_name(self._task.key, half))

    def wait_for_rows(self, answer: Answer, half: int) -> list[Array]:
        """Return the rows for ``half``, where ``answer`` comes from :meth:`pull`.

        Raises PeerError if the graph server does not have the rows within the time limit, and _TaskOver if
        another attempt has done the task.
        """
        task = self._task
        requested_at = time.monotonic()
        while True:
            arrays = answer(task.timeout_s)
            if arrays:
                break

            waited_s = time.monotonic() - requested_at
            if waited_s > task.timeout_s:
                server = task.graph_server
                name = half_name(task.key, half)
                raise PeerError(
                    f"rank {server.rank} on {server.host} had no rows for {PULL} {name!r} "
                    f"within {task.timeout_s:g} s; check the tasks before this one, or raise timeout_s"
                )
            # The pause grows with the waiting time. So there are few calls, and rows that become ready soon
            # are fetched soon. Workers that fetch late would cost more than the pipeline gains.
            time.sleep(min(max(waited_s / 2, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S))
            answer = self.pull(half)

        if len(arrays) == 1 and arrays[0].dtype == TASK_OVER.dtype:
            raise _TaskOver
        return arrays

    def call_parameter_server(self, op: str, arrays: Sequence[Array] = ()) -> Answer:
        task = self._task
        return self._caller.send(task.parameter_server, task.secrets, op, str(task.key), arrays)

    def submit(self, half: int, rows: Sequence[Array]) -> Answer:
        name = attempt_name(self._task.key, half, self._task.attempt)
        return self._call_graph_server(SUBMIT, name, rows)

    def _call_graph_server(self, op: str, name: str, arrays: Sequence[Array] = ()) -> Answer:
        return self._caller.send(self._task.graph_server, self._task.secrets, op, name, arrays)


class TaskPhase(str, Enum):
    """Point that a worker has reached in its task."""

    BEFORE_PULL = "before_pull"
    HALF = "half"
    """One half is computed."""
    COMPUTED = "computed"
    """Both halves are computed. No gradient is pushed yet, and a backward task has sent no rows."""
    PUSHED = "pushed"
    """The parameter server has the gradients. The graph server still lacks rows."""
    END = "end"
    """All rows are sent."""


PhaseHook: TypeAlias = Callable[[TaskPhase], None]
"""Called at each phase. An exception from the hook ends the task."""


@final
class Worker:
    """Runs tasks one after another. Between tasks it keeps only connections and the last program.

    Gradients are pushed and acknowledged before the last rows are sent, and a task is done when the graph
    server has its rows. So a worker may die at any point without loss: the next attempt pushes equal
    gradients under the same key, and the parameter server counts them once.
    """

    def __init__(self, caller: Caller, hook: PhaseHook = lambda phase: None) -> None:
        self._caller = caller
        self._call_hook = hook
        self._is_cold = True
        self._run_of_program: tuple[str, Secrets, int] | None = None
        """Digest, secrets and run number that the program was fetched for."""
        self._program: Program
        self._computations: dict[tuple[int, Direction], TaskComputation] = {}

    def handle(self, event: object, context: object = None) -> dict[str, Json]:
        """Run the task in ``event`` and return its :class:`WorkerAnswer` fields as JSON.

        ``event`` comes from :meth:`Task.to_event`, as text or as parsed JSON. A functions service adds
        ``context``, which is not used. Raises the failure that :meth:`attempt` returns.
        """
        answer, failure = self.attempt(Task.from_event(event))
        if failure is not None:
            raise failure
        return answer.as_json()

    def attempt(self, task: Task) -> tuple[WorkerAnswer, DglxError | None]:
        """Run ``task``. Return its answer, and the failure or None.

        A failure's message names the task and the attempt. If another attempt has already done the task, this
        one succeeds.
        """
        start_s = time.perf_counter()
        was_cold = self._is_cold
        self._is_cold = False
        failure = None
        try:
            self._run(task)
        except _TaskOver:
            # Another attempt's rows have arrived, so there is nothing left to do.
            pass
        except Exception as error:  # noqa: BLE001 - reported to the caller; the next task may succeed
            failure = _explain_failure(task, error)

        answer = WorkerAnswer(
            key=task.key,
            attempt=task.attempt,
            seconds=time.perf_counter() - start_s,
            cold=was_cold,
            error="" if failure is None else str(failure),
        )
        return answer, failure

    def _run(self, task: Task) -> None:
        self._caller.begin()
        calls = _TaskCalls(self._caller, task)
        computation = self._find_computation(task, calls)
        results, answers = self._compute(task, computation, calls)

        # The parameter server must have the gradients before the last rows are sent, see the class.
        self._call_hook(TaskPhase.COMPUTED)
        if computation.pushes and computation.weights:
            gradients = add_gradients(results[0].gradients, results[1].gradients)
            calls.call_parameter_server(GRADIENTS, gradients)(task.timeout_s)

        self._call_hook(TaskPhase.PUSHED)
        for half in range(len(answers), 2):
            answers.append(calls.submit(half, results[half].rows))
        for wait_for_answer in answers:
            wait_for_answer(task.timeout_s)
        self._call_hook(TaskPhase.END)

    def _compute(
        self, task: Task, computation: TaskComputation, calls: _TaskCalls
    ) -> tuple[list[Computed], list[Answer]]:
        """Return the results for both halves, and the pending calls that send rows in the first half.

        The first half is computed while the second half's rows arrive. A forward task also sends the first
        half before it computes the second one. Other tasks send nothing here.
        """
        self._call_hook(TaskPhase.BEFORE_PULL)
        # The weights travel while the graph server prepares the rows.
        weights_answer = None
        if computation.weights:
            weights_answer = calls.call_parameter_server(WEIGHTS)
        first_rows = calls.wait_for_rows(calls.pull(0), 0)
        second_answer = calls.pull(1)
        weights: list[Array] = []
        if weights_answer is not None:
            weights = weights_answer(task.timeout_s)

        first_result = _compute_half(task, computation, weights, first_rows, 0)
        self._call_hook(TaskPhase.HALF)
        answers = []
        if task.key.direction is Direction.FORWARD:
            answers.append(calls.submit(0, first_result.rows))

        second_rows = calls.wait_for_rows(second_answer, 1)
        second_result = _compute_half(task, computation, weights, second_rows, 1)
        self._call_hook(TaskPhase.HALF)
        return [first_result, second_result], answers

    def _find_computation(self, task: Task, calls: _TaskCalls) -> TaskComputation:
        """Return the computation for ``task``. Fetch the program if ``task`` is the first in its run."""
        key = task.key
        run = (task.program, task.secrets, key.run)

        # Each run fetches its program, even an equal one, because the call also reports the worker's kernels.
        if self._run_of_program != run:
            program = Program.from_json(calls.fetch_program())
            if program.digest != task.program:
                raise ConfigError(
                    f"rank {task.graph_server.rank} on {task.graph_server.host} gave program "
                    f"{program.digest[:12]} instead of {task.program[:12]}: it belongs to another run"
                )

            self._run_of_program = run
            self._program = program
            self._computations = {}

        step_and_direction = (key.step, key.direction)
        if step_and_direction not in self._computations:
            key.check(self._program)
            computation = TaskComputation(self._program, *step_and_direction)
            self._computations[step_and_direction] = computation
        return self._computations[step_and_direction]


def _explain_failure(task: Task, error: Exception) -> DglxError:
    """Return an error that names ``task`` and its attempt, and has ``error`` as its cause."""
    where = f"task {task.key}, attempt {task.attempt}"
    failure: DglxError = RemoteError(f"{where}: {type(error).__name__}: {error}")
    if isinstance(error, DglxError):
        failure = type(error)(f"{where}: {error}")
    failure.__cause__ = error
    return failure


def _compute_half(
    task: Task, computation: TaskComputation, weights: list[Array], rows: list[Array], half: int
) -> Computed:
    keys = None
    if computation.drops:
        # There are as many keys as rows, even if the event states another row count.
        first_id = task.first_row + half_rows(task.rows, half).start
        ids = torch.arange(first_id, first_id + len(rows[0]))
        keys = RowKeys(task.seed, task.key.epoch, ids)
    return computation.half(weights, rows, half_length(task.rows, half), keys)
