"""What a worker is asked to do: one step of one interval in one epoch and direction, and whom to ask for it.

A task names the program by its digest; rows, weights and the program itself are pulled. So an event is small
(AWS invokes asynchronously with at most 256 KB), and holds nothing that is run.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import final

from dglx_dist.errors import ConfigError
from dglx_dist.offload.fields import Fields, Json, read_json, write_json
from dglx_dist.offload.program import Program
from dglx_dist.offload.steps import Edge, Vertex

MAX_EVENT_BYTES = 256 * 1024
MAX_EPOCH, MAX_STEP, MAX_INTERVAL, MAX_ATTEMPT = 10**9 - 1, 10**4 - 1, 10**9 - 1, 10**6 - 1
MAX_RUN, MAX_ROWS, MAX_RANK, MAX_TIMEOUT_S = 10**9 - 1, 1 << 40, 10**6, 86_400.0
_LONGEST = 1024
_VERSION = 1
_NUMBER = r"(0|[1-9][0-9]{0,8})"
_KEY = re.compile(rf"r{_NUMBER}\.e{_NUMBER}\.s(0|[1-9][0-9]{{0,3}})\.i{_NUMBER}\.(fb|f|b)")
_ATTEMPT = re.compile(r"0|[1-9][0-9]{0,5}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Direction(str, Enum):
    """Which way a task goes; the value is its text in a key."""

    FORWARD = "f"
    BACKWARD = "b"
    FUSED = "fb"
    """The last step forward, the loss, and backward, in one task."""


@final
@dataclass(frozen=True, order=True)
class TaskKey:
    """Names one piece of work; order is by epoch, step, interval, text of the direction, and run.

    Raises:
        ConfigError: a number is outside its bounds.
    """

    epoch: int
    step: int
    """Index in the program."""
    interval: int
    """Global number of the interval."""
    direction: Direction
    run: int = 0
    """Number of the run in its session: a worker of an earlier one, which began at the same epoch too, may
    still be at work."""

    def __post_init__(self) -> None:
        fields = Fields(vars(self), "a task's key")
        fields.whole("run", 0, MAX_RUN)
        fields.whole("epoch", 0, MAX_EPOCH)
        fields.whole("step", 0, MAX_STEP)
        fields.whole("interval", 0, MAX_INTERVAL)
        if not isinstance(self.direction, Direction):
            fields.refuse("direction", "a Direction")

    def __str__(self) -> str:
        """Return the text form, such as ``r1.e3.s2.i7.f``."""
        return f"r{self.run}.e{self.epoch}.s{self.step}.i{self.interval}.{self.direction.value}"

    @classmethod
    def parse(cls, text: str) -> TaskKey:
        """Read the text form; there is one for each key.

        Raises:
            ConfigError: it is no key.
        """
        found = _KEY.fullmatch(text)
        if found is None:
            raise ConfigError(f"{text[:80]!r} is no key of a task; one looks like r1.e3.s2.i7.f")
        run, epoch, step, interval, direction = found.groups()
        return cls(int(epoch), int(step), int(interval), Direction(direction), int(run))

    def check_run(self, run: int) -> None:
        """Raise ConfigError unless this is a task of ``run``."""
        if self.run != run:
            raise ConfigError(
                f"task {self} is of run {self.run} of this session, and this is run {run}; the call comes "
                "from a worker that was given up"
            )

    def check(self, program: Program, num_intervals: int) -> None:
        """Raise ConfigError unless ``program`` has such a task for a worker, and the run such an interval."""
        if self.interval >= num_intervals:
            raise ConfigError(f"task {self} names interval {self.interval} of {num_intervals}")
        if self.step >= len(program.steps):
            raise ConfigError(f"task {self} names step {self.step} of {len(program.steps)}")
        step = program.steps[self.step]
        if not isinstance(step, Vertex | Edge):
            raise ConfigError(f"task {self} is step {step.name!r}, which graph servers do themselves")
        if self.direction is Direction.FUSED and self.step != program.last:
            raise ConfigError(f"task {self} fuses step {step.name!r}; only the last, {program.last}, can be")


def half_name(key: TaskKey, half: int) -> str:
    """Name under which a worker pulls half 0 or 1 of a task's rows."""
    return f"{key}/{half}"


def parse_half(name: str) -> tuple[TaskKey, int]:
    """Read :func:`half_name`.

    Raises:
        ConfigError: it is none.
    """
    key, slash, half = name.partition("/")
    if not slash or half not in ("0", "1"):
        raise ConfigError(f"{name[:80]!r} names no half of a task; one looks like r1.e3.s2.i7.f/0")
    return TaskKey.parse(key), int(half)


def attempt_name(key: TaskKey, half: int, attempt: int) -> str:
    """Name under which a worker gives half 0 or 1 of what a task computed."""
    return f"{half_name(key, half)}/{attempt}"


def parse_attempt(name: str) -> tuple[TaskKey, int, int]:
    """Read :func:`attempt_name`.

    Raises:
        ConfigError: it is none.
    """
    front, slash, attempt = name.rpartition("/")
    if not slash or not _ATTEMPT.fullmatch(attempt):
        raise ConfigError(f"{name[:80]!r} names no attempt; one looks like r1.e3.s2.i7.f/0/1")
    return (*parse_half(front), int(attempt))


@final
@dataclass(frozen=True, kw_only=True)
class Address:
    """Where a graph server or parameter server answers."""

    rank: int
    host: str
    """Name of its machine, for messages."""
    endpoint: str
    """``tcp://HOST:PORT``."""
    public_key: str | None = None
    """Its key where connections are encrypted (Z85)."""


@final
@dataclass(frozen=True, kw_only=True)
class Secrets:
    """What a worker shows to be let in by the door of workers: its secret, or a key pair (Z85)."""

    secret: str = field(repr=False)
    public_key: str | None = None
    secret_key: str | None = field(default=None, repr=False)


@final
@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """How a task runs; any choice gives the same bits."""

    streaming: bool = True
    """Compute the first half while the second arrives."""
    rematerialise: bool = True
    """Compute again in the backward pass what the forward pass would else send up, and down again."""


@final
@dataclass(frozen=True, kw_only=True)
class Task:
    """One task description; a worker needs nothing else."""

    key: TaskKey
    rows: int
    """Nodes of the interval; for an Edge step the targets."""
    program: str
    """Digest of the program."""
    graph_server: Address
    parameter_server: Address
    secrets: Secrets
    timeout_s: float
    """How long each pull, push or gift may take."""
    attempt: int = 0
    options: TaskOptions = TaskOptions()

    def again(self) -> Task:
        """Return the next attempt at the same work."""
        return replace(self, attempt=self.attempt + 1)

    def to_event(self) -> bytes:
        """Return the task as JSON.

        Raises:
            ConfigError: it is larger than 256 KB, or a field is outside its bounds.
        """
        event = write_json(self._as_json())
        Task.from_event(event)
        return event

    @classmethod
    def from_event(cls, event: object) -> Task:
        """Read what :meth:`to_event` wrote, or the object that a functions service made of its JSON.

        Raises:
            ConfigError: it is larger than 256 KB, no JSON, or a field is missing, unknown or out of bounds.
        """
        given = read_json(event, MAX_EVENT_BYTES, "a task") if isinstance(event, bytes | str) else event
        fields = Fields(given, "a task")
        fields.whole("version", _VERSION, _VERSION)
        program = fields.text("program", 64)
        if not _DIGEST.fullmatch(program):
            fields.refuse("program", "a digest of 64 hexadecimal characters")
        task = cls(
            key=TaskKey.parse(fields.text("key", 64)),
            rows=fields.whole("rows", 0, MAX_ROWS),
            program=program,
            graph_server=_read_address(fields, "graph_server"),
            parameter_server=_read_address(fields, "parameter_server"),
            secrets=_read_secrets(fields),
            timeout_s=fields.number("timeout_s", 1e-3, MAX_TIMEOUT_S),
            attempt=fields.whole("attempt", 0, MAX_ATTEMPT),
            options=_read_options(fields),
        )
        fields.end()
        return task

    def _as_json(self) -> dict[str, Json]:
        return {
            "version": _VERSION,
            "key": str(self.key),
            "rows": self.rows,
            "program": self.program,
            "graph_server": dict(vars(self.graph_server)),
            "parameter_server": dict(vars(self.parameter_server)),
            "secrets": dict(vars(self.secrets)),
            "timeout_s": self.timeout_s,
            "attempt": self.attempt,
            "options": dict(vars(self.options)),
        }


def _read_address(fields: Fields, name: str) -> Address:
    inner = Fields(fields.any(name), f"{fields.where} {name!r}")
    address = Address(
        rank=inner.whole("rank", 0, MAX_RANK),
        host=inner.text("host", _LONGEST),
        endpoint=inner.text("endpoint", _LONGEST),
        public_key=_read_key(inner, "public_key"),
    )
    inner.end()
    if not address.endpoint.startswith("tcp://"):
        inner.refuse("endpoint", "tcp://HOST:PORT")
    return address


def _read_secrets(fields: Fields) -> Secrets:
    inner = Fields(fields.any("secrets"), f"{fields.where} 'secrets'", hidden=True)
    keys = _read_key(inner, "public_key"), _read_key(inner, "secret_key")
    secrets = Secrets(secret=inner.text("secret", _LONGEST), public_key=keys[0], secret_key=keys[1])
    inner.end()
    if (secrets.public_key is None) != (secrets.secret_key is None):
        inner.refuse("public_key", "both keys or none")
    return secrets


def _read_key(fields: Fields, name: str) -> str | None:
    key = fields.maybe(name, lambda field: fields.text(field, 40), None)
    if key is not None and len(key) != 40:
        raise ConfigError(f"{fields.where} has a {name} of {len(key)} characters; a Z85 key has 40")
    return key


def _read_options(fields: Fields) -> TaskOptions:
    inner = Fields(fields.any("options"), f"{fields.where} 'options'")
    options = TaskOptions(streaming=inner.flag("streaming"), rematerialise=inner.flag("rematerialise"))
    inner.end()
    return options
