"""How a worker asks graph servers and parameter servers: by sockets, or directly where it runs inside one."""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TypeAlias, final

import numpy as np
import zmq

import dglx_dist
from dglx_dist.comm.auth import Credentials
from dglx_dist.comm.rpc import Call, Client, Handler, PeerAddress, ServeConfig, run_handler
from dglx_dist.errors import ConfigError, DglxError, PeerError, RemoteError
from dglx_dist.records import Array
from dglx_dist.serverless.json_fields import Fields, Json, printable, read_json
from dglx_dist.serverless.program import MAX_PROGRAM_BYTES, Program
from dglx_dist.serverless.stages.base import register_stage
from dglx_dist.serverless.tasks import (
    MAX_ATTEMPT,
    Address,
    Computed,
    Direction,
    Secrets,
    Task,
    TaskKey,
    Work,
    add_gradients,
    attempt_name,
    half_name,
    half_rows,
    kernels,
)

MAX_ANSWER_BYTES = 64 * 1024
_LONGEST_ERROR = 4000


@final
@dataclass(frozen=True, kw_only=True)
class WorkerAnswer:
    """How a task ended in a worker that is still alive."""

    key: TaskKey
    attempt: int
    accepted: bool
    """Whether the graph server took the rows; False: it had them already."""
    seconds: float
    """From the event to the end."""
    cold: bool
    """Whether it was the first task of its worker."""
    error: str = ""
    """Why it failed; "" where it did not."""

    def as_json(self) -> dict[str, Json]:
        """Return what JSON has room for."""
        return {**vars(self), "key": str(self.key), "error": printable(self.error, _LONGEST_ERROR)}

    @classmethod
    def from_json(cls, text: bytes | str) -> WorkerAnswer:
        """Read the JSON text of :meth:`as_json`.

        Raises:
            ConfigError: it is none.
        """
        fields = Fields(read_json(text, MAX_ANSWER_BYTES, "a worker's answer"), "a worker's answer")
        error = fields.any("error")
        if not isinstance(error, str):
            raise ConfigError("a worker's answer has an 'error' that is no text")
        answer = cls(
            key=TaskKey.parse(fields.text("key", 64)),
            attempt=fields.whole("attempt", 0, MAX_ATTEMPT),
            accepted=fields.flag("accepted"),
            seconds=fields.number("seconds", 0, 1e9),
            cold=fields.flag("cold"),
            error=printable(error, _LONGEST_ERROR),
        )
        fields.end()
        return answer


_IDLE_S = 5.0
"""Connections unused for longer are opened anew: a function's container is frozen between invocations, and
the other side has given up a silent one by then."""


class Answer(ABC):
    """What was asked for, or will be."""

    @abstractmethod
    def wait(self, timeout_s: float) -> list[Array]:
        """Return the arrays, on the thread that asked; ``timeout_s`` counts from then.

        Raises:
            PeerError: whom was asked is dead, silent, or refuses this worker.
            RemoteError: the handler there raised.
        """


class Caller(ABC):
    """Asks the servers of a job."""

    @abstractmethod
    def begin(self) -> None:
        """Make ready for a task: nothing is under way, and connections may have died since the last one."""

    @abstractmethod
    def send(self, to: Address, secrets: Secrets, op: str, name: str, arrays: Sequence[Array] = ()) -> Answer:
        """Ask ``to`` for ``op``; ``arrays`` must not change until the answer is there.

        Raises:
            PeerError: it cannot be asked at all.
            ConfigError: ``secrets`` do not fit ``to``.
        """

    @abstractmethod
    def close(self) -> None:
        """End all connections; calls under way end with a PeerError."""


@final
class RemoteCaller(Caller):
    """Asks by sockets; connections stay open for the next task of the same job.

    Args:
        through: Endpoint to the endpoint that stands for it, such as ``Relay.endpoint``; None: itself.
    """

    def __init__(self, through: Callable[[str], str] | None = None) -> None:
        self._through = through
        self._job: _Job | None = None

    def begin(self) -> None:
        """See Caller."""
        if self._job is not None and self._job.idle_s > _IDLE_S:
            self.close()

    def send(self, to: Address, secrets: Secrets, op: str, name: str, arrays: Sequence[Array] = ()) -> Answer:
        """See Caller."""
        if secrets.secret_key is not None and to.public_key is None:
            raise ConfigError(
                f"rank {to.rank} on {to.host} comes without a public key, and this job's connections are "
                "encrypted; set DGLX_CURVE alike on all ranks"
            )
        if self._job is None or self._job.secrets != secrets:
            self.close()
            self._job = _Job(secrets, self._through)
        return self._job.send(to, op, name, arrays)

    def close(self) -> None:
        """See Caller."""
        if self._job is not None:
            self._job.close()
            self._job = None


@final
class DirectCaller(Caller):
    """Asks functions of this process, with no socket and no copy.

    Args:
        handlers: Operation to what answers it, whoever is asked.
    """

    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        self._handlers = handlers
        self._closed = False

    def begin(self) -> None:
        """See Caller."""

    def send(self, to: Address, secrets: Secrets, op: str, name: str, arrays: Sequence[Array] = ()) -> Answer:
        """See Caller. ``secrets`` are not looked at: nobody comes from outside."""
        if self._closed:
            raise PeerError("the executor was closed while a task was under way")
        try:
            return _Given(run_handler(self._handlers, op, name, arrays))
        except Exception as error:
            text = f"rank {to.rank} on {to.host} failed at {op} {name!r}: {type(error).__name__}: {error}"
            raise RemoteError(text) from error

    def close(self) -> None:
        """See Caller."""
        self._closed = True


@final
class _Given(Answer):
    def __init__(self, arrays: list[Array]) -> None:
        self._arrays = arrays

    def wait(self, timeout_s: float) -> list[Array]:
        return self._arrays


@final
class _Asked(Answer):
    def __init__(self, call: Call) -> None:
        self._call = call

    def wait(self, timeout_s: float) -> list[Array]:
        return self._call.wait(timeout_s)


@final
class _Job:
    """The connections of one job."""

    def __init__(self, secrets: Secrets, through: Callable[[str], str] | None) -> None:
        self.secrets, self._through = secrets, through
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # By a number of their own: a rank may come back at another address after a restart.
        self._peers: dict[int, PeerAddress] = {}
        self._numbers: dict[Address, int] = {}
        self._next = itertools.count()
        self._used_at = time.time()
        credentials = Credentials(
            secret=secrets.secret.encode(),
            public_key=_bytes(secrets.public_key),
            secret_key=_bytes(secrets.secret_key),
        )
        self._client = Client(self._context, self._peers, credentials, ServeConfig())

    @property
    def idle_s(self) -> float:
        """Seconds since the last call, by the wall clock: others may stand still in a frozen container."""
        return time.time() - self._used_at

    def send(self, to: Address, op: str, name: str, arrays: Sequence[Array]) -> Answer:
        self._used_at = time.time()
        number = self._numbers.get(to)
        if number is None:
            number = self._numbers[to] = next(self._next)
            endpoint = to.endpoint if self._through is None else self._through(to.endpoint)
            self._peers[number] = PeerAddress(
                rank=to.rank, host=to.host, endpoint=endpoint, public_key=_bytes(to.public_key)
            )
        return _Asked(self._client.send(number, op, name, arrays))

    def close(self) -> None:
        self._client.close()
        self._context.destroy(linger=0)


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else text.encode()


PROGRAM, PULL, GIVE = "lambda.program", "lambda.pull", "lambda.give"
"""Of graph servers; see :class:`Exchange`."""
WEIGHTS, GRADIENTS = "lambda.weights", "lambda.gradients"
"""Of parameter servers."""

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.02


@final
class Exchange:
    """The calls of one task.

    ``lambda.pull`` answered without arrays means "not yet": a worker may be started before its rows are
    there, and asks again rather than hold a thread of the server.
    """

    def __init__(self, caller: Caller, task: Task) -> None:
        self._caller, self._task = caller, task
        self._given: list[Answer] = []
        self._weights: Answer | None = None
        self._halves: list[Answer | None] = [None, None]

    def program(self) -> bytes:
        """Fetch the program's JSON, and say which kernels this worker computes with.

        Raises:
            ConfigError: something else came.
        """
        arrays = self._from_graph_server(PROGRAM, kernels()).wait(self._task.timeout_s)
        if len(arrays) != 1 or arrays[0].nbytes > MAX_PROGRAM_BYTES:
            raise self._wrong_answer(PROGRAM, f"one program of at most {MAX_PROGRAM_BYTES} bytes")
        return arrays[0].tobytes()

    def ask_weights(self) -> None:
        """Ask for the weights of the task's step."""
        task = self._task
        self._weights = self._caller.send(task.parameter_server, task.secrets, WEIGHTS, str(task.key))

    def weights(self) -> list[Array]:
        """Return the weights asked for; none where none were."""
        return [] if self._weights is None else self._weights.wait(self._task.timeout_s)

    def ask_half(self, half: int) -> None:
        """Ask for the rows of half 0 or 1."""
        self._halves[half] = self._from_graph_server(PULL, half_name(self._task.key, half))

    def half(self, half: int) -> list[Array]:
        """Return the rows asked for, once the graph server has them.

        Raises:
            PeerError: it had none in time.
        """
        task, asked = self._task, self._halves[half]
        assert asked is not None
        asked_at = time.monotonic()
        while not (arrays := asked.wait(task.timeout_s)):
            waited_s = time.monotonic() - asked_at
            if waited_s > task.timeout_s:
                server, name = task.graph_server, half_name(task.key, half)
                raise PeerError(
                    f"rank {server.rank} on {server.host} had no rows for {PULL} {name!r} "
                    f"within {task.timeout_s:g} s; what comes before this task is late, or raise timeout_s"
                )
            # In proportion to what it waited, so that few calls are made and rows do not lie there for long:
            # a worker that comes late to each task costs more than the pipeline gains.
            time.sleep(min(max(waited_s / 2, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S))
            asked = self._from_graph_server(PULL, half_name(task.key, half))
        self._halves[half] = None
        return arrays

    def push(self, gradients: Sequence[Array]) -> None:
        """Push the gradients and wait until the parameter server has them."""
        task = self._task
        asked = self._caller.send(task.parameter_server, task.secrets, GRADIENTS, str(task.key), gradients)
        asked.wait(task.timeout_s)

    def give(self, half: int, rows: Sequence[Array]) -> None:
        """Send the rows of half 0 or 1 and return at once."""
        name = attempt_name(self._task.key, half, self._task.attempt)
        self._given.append(self._from_graph_server(GIVE, name, rows))

    def accepted(self) -> bool:
        """Wait for the answers to what was given; return whether all of it was taken."""
        found = [asked.wait(self._task.timeout_s) for asked in self._given]
        for arrays in found:
            if len(arrays) != 1 or arrays[0].shape != (1,) or arrays[0].dtype != np.int64:
                raise self._wrong_answer(GIVE, "yes or no")
        return all(arrays[0][0] == 1 for arrays in found)

    def _wrong_answer(self, op: str, wanted: str) -> ConfigError:
        server = self._task.graph_server
        return ConfigError(
            f"rank {server.rank} on {server.host} answered {op} without {wanted}: does it run another "
            "version of dglx_dist?"
        )

    def _from_graph_server(self, op: str, name: str, arrays: Sequence[Array] = ()) -> Answer:
        return self._caller.send(self._task.graph_server, self._task.secrets, op, name, arrays)


class Place(str, Enum):
    """How far a worker has come with its task."""

    BEFORE_PULL = "before_pull"
    """Nothing was asked for."""
    HALF = "half"
    """One half is computed."""
    COMPUTED = "computed"
    """Both are; nothing was pushed, and of a backward task nothing given."""
    PUSHED = "pushed"
    """The parameter server has the gradients, the graph server lacks rows."""
    END = "end"
    """Everything is given."""


At: TypeAlias = Callable[[Place], None]
"""Called at each place; what it raises ends the task."""


def go_on(_place: Place) -> None:
    """Do nothing."""


@final
class Worker:
    """Does tasks one after another, and keeps only what saves time: connections and the last program.

    Gradients are pushed, and acknowledged, before the last rows are given. The graph server takes a task as
    done by its rows alone, so a worker that dies anywhere loses nothing: the next attempt pushes the same
    bits under the same key, which count once.

    Args:
        caller: How servers are asked.
        at: Called at each place of a task's course.
    """

    def __init__(self, caller: Caller, at: At = go_on) -> None:
        self._caller, self._at = caller, at
        self._kept: _Kept | None = None
        self._cold = True

    def handle(self, event: object, context: object = None) -> dict[str, Json]:
        """Do the task that ``event`` describes; return ``WorkerAnswer.as_json``.

        Args:
            event: What ``Task.to_event`` wrote, as text or as the object a functions service made of it.
            context: What such a service adds; not looked at.

        Raises:
            ConfigError: the event is no task, or names what this worker does not know.
            DglxError: it went wrong; the message names the task, the attempt, and what was asked of whom.
        """
        started = time.perf_counter()
        task = Task.from_event(event)
        cold, self._cold = self._cold, False
        try:
            accepted = self._do(task)
        except DglxError as error:
            raise type(error)(f"task {task.key}, attempt {task.attempt}: {error}") from error
        except Exception as error:
            text = f"task {task.key}, attempt {task.attempt}: {type(error).__name__}: {error}"
            raise RemoteError(text) from error
        seconds = time.perf_counter() - started
        answer = WorkerAnswer(
            key=task.key, attempt=task.attempt, accepted=accepted, seconds=seconds, cold=cold
        )
        return answer.as_json()

    def _do(self, task: Task) -> bool:
        self._caller.begin()
        exchange = Exchange(self._caller, task)
        work = self._work(task, exchange)
        self._at(Place.BEFORE_PULL)
        if task.options.streaming:
            computed = self._streamed(task, work, exchange)
        else:
            computed = self._at_once(task, work, exchange)
        self._at(Place.COMPUTED)
        if work.pushes and work.weights:
            exchange.push(add_gradients(computed[0].gradients, computed[1].gradients))
        self._at(Place.PUSHED)
        for half, one in enumerate(computed):
            if not _given_early(task, half):
                exchange.give(half, one.rows)
        accepted = exchange.accepted()
        self._at(Place.END)
        return accepted

    def _streamed(self, task: Task, work: Work, exchange: Exchange) -> list[Computed]:
        """Compute the first half while the second comes, and where nothing is pushed while the first goes."""
        _ask_first(work, exchange)
        first = exchange.half(0)
        exchange.ask_half(1)
        weights = exchange.weights()
        computed = [self._half(task, work, 0, weights, first)]
        if _given_early(task, 0):
            exchange.give(0, computed[0].rows)
        computed.append(self._half(task, work, 1, weights, exchange.half(1)))
        return computed

    def _at_once(self, task: Task, work: Work, exchange: Exchange) -> list[Computed]:
        _ask_first(work, exchange)
        first = exchange.half(0)
        exchange.ask_half(1)
        halves, weights = [first, exchange.half(1)], exchange.weights()
        return [self._half(task, work, half, weights, arrays) for half, arrays in enumerate(halves)]

    def _half(self, task: Task, work: Work, half: int, weights: list[Array], arrays: list[Array]) -> Computed:
        nodes = half_rows(task.rows, half)
        computed = work.half(weights, arrays, nodes.stop - nodes.start)
        self._at(Place.HALF)
        return computed

    def _work(self, task: Task, exchange: Exchange) -> Work:
        kept, run = self._kept, (task.secrets, task.key.run)
        # Anew for each run, though programs may be equal: with this call a worker introduces itself.
        if kept is None or kept.program.digest != task.program or kept.run != run:
            program = Program.from_json(exchange.program())
            if program.digest != task.program:
                raise ConfigError(
                    f"rank {task.graph_server.rank} on {task.graph_server.host} gave program "
                    f"{program.digest[:12]}, not {task.program[:12]}: it is of another run"
                )
            kept = self._kept = _Kept(program, run)
        return kept.work(task)


@final
@dataclass(frozen=True)
class _Kept:
    """A program, and the kinds of task that were asked for so far."""

    program: Program
    run: tuple[Secrets, int]
    _works: dict[tuple[int, Direction, bool], Work] = field(default_factory=dict)

    def work(self, task: Task) -> Work:
        key = task.key
        kind = (key.step, key.direction, task.options.rematerialise)
        if kind not in self._works:
            # How many intervals there are is the graph server's to know and check.
            key.check(self.program, key.interval + 1)
            self._works[kind] = Work(self.program, *kind)
        return self._works[kind]


def _ask_first(work: Work, exchange: Exchange) -> None:
    if work.weights:
        exchange.ask_weights()
    exchange.ask_half(0)


def _given_early(task: Task, half: int) -> bool:
    """Whether rows of ``half`` leave before the other half is computed."""
    return half == 0 and task.options.streaming and task.key.direction is Direction.FORWARD


STAGES_FILE = "dglx_stages.json"
"""Beside the package ``dglx_dist``: name of a stage to its ``module:Class``."""
_MAX_BYTES, _MAX_PATH = 64 * 1024, 1024


def register_packaged_stages() -> None:
    """Make the stages of the list known in this process; none where there is no list.

    Raises:
        ConfigError: the list is no such mapping, or there is no such stage.
    """
    file = Path(dglx_dist.__file__).parent.parent / STAGES_FILE
    if not file.is_file():
        return
    found = read_json(file.read_bytes(), _MAX_BYTES, STAGES_FILE)
    fields = Fields(found, STAGES_FILE)
    for name in found if isinstance(found, dict) else ():
        register_stage(name, fields.text(name, _MAX_PATH))
