"""Tasks of workers: keys, events, payloads and the computation itself.

A task is one step of one interval in one epoch and direction. Its event names the program by digest; the
worker pulls rows, weights and the program itself. Events are therefore small (AWS limits asynchronous ones to
256 KB) and contain no code.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Annotated, Any, NamedTuple, TypeAlias, final

import numpy as np

from dglx_dist.data.json_fields import Fields, Within, read_json, write_json
from dglx_dist.errors import ConfigError
from dglx_dist.records import Array
from dglx_dist.serverless.program import Edge, Program, Vertex
from dglx_dist.serverless.stages.base import (
    Arrays,
    EdgeStage,
    Rows,
    Shapes,
    VertexStage,
    cross_entropy,
    edge_stage,
    half_rows,
    vertex_stage,
)

MAX_EVENT_BYTES = 256 * 1024
MAX_ATTEMPT, MAX_ROWS, MAX_RANK, MAX_TIMEOUT_S = 10**6 - 1, 1 << 40, 10**6, 86_400.0
_VERSION = 1
_Text: TypeAlias = Annotated[str, Within(1, 1024)]
_Z85Key: TypeAlias = Annotated[str, Within(40, 40)]
_NUMBER = r"(0|[1-9][0-9]{0,8})"
_KEY = re.compile(rf"r{_NUMBER}\.e{_NUMBER}\.s(0|[1-9][0-9]{{0,3}})\.i{_NUMBER}\.(fb|f|b)")
_ATTEMPT = re.compile(r"0|[1-9][0-9]{0,5}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


TASK_OVER: Array = np.zeros(0, np.bool_)
"""Answer to a pull in place of rows: another attempt has done the task."""


class Direction(str, Enum):
    """Direction of a task; the value is its text in a key."""

    FORWARD = "f"
    BACKWARD = "b"
    FUSED = "fb"
    """The last step forward, the loss and the last step backward in one task."""


@final
@dataclass(frozen=True, order=True)
class TaskKey:
    """Identifies a task; ordered by epoch, step, interval, text of the direction, and run."""

    epoch: int
    step: int
    """Index in the program."""
    interval: int
    """Global number of the interval."""
    direction: Direction
    run: int = 0
    """Number of the run in its session: workers of an earlier run may still be active in the same epochs."""

    def __str__(self) -> str:
        return f"r{self.run}.e{self.epoch}.s{self.step}.i{self.interval}.{self.direction.value}"

    @classmethod
    def parse(cls, text: str) -> TaskKey:
        """Read the text form, such as ``r1.e3.s2.i7.f``; ConfigError if it is invalid."""
        match = _KEY.fullmatch(text)
        if match is None:
            raise ConfigError(f"{text[:80]!r} is no key of a task; write it like r1.e3.s2.i7.f")
        run, epoch, step, interval, direction = match.groups()
        return cls(int(epoch), int(step), int(interval), Direction(direction), int(run))

    def check_run(self, run: int) -> None:
        """Raise ConfigError unless this is a task of ``run``."""
        if self.run != run:
            raise ConfigError(
                f"task {self} is of run {self.run} of this session, and this is run {run}; the call comes "
                "from a worker that was given up"
            )

    def check(self, program: Program) -> None:
        """Raise ConfigError unless ``program`` has such a task for a worker, of any interval."""
        if self.step >= len(program.steps):
            raise ConfigError(f"task {self} names step {self.step} of {len(program.steps)}")
        step = program.steps[self.step]
        if not isinstance(step, Vertex | Edge):
            raise ConfigError(f"task {self} is step {step.name!r}, which graph servers do themselves")
        if self.direction is Direction.FUSED and self.step != program.last:
            raise ConfigError(
                f"task {self} fuses step {step.name!r}; only the last, {program.last}, can be fused"
            )


def half_name(key: TaskKey, half: int) -> str:
    """Return the name under which a worker pulls half 0 or 1 of a task's rows."""
    return f"{key}/{half}"


def parse_half(name: str) -> tuple[TaskKey, int]:
    """Read :func:`half_name`; ConfigError if it is invalid."""
    key, slash, half = name.partition("/")
    if not slash or half not in ("0", "1"):
        raise ConfigError(f"{name[:80]!r} names no half of a task; write it like r1.e3.s2.i7.f/0")
    return TaskKey.parse(key), int(half)


def attempt_name(key: TaskKey, half: int, attempt: int) -> str:
    """Return the name under which a worker sends half 0 or 1 of a task's results."""
    return f"{half_name(key, half)}/{attempt}"


def parse_attempt(name: str) -> tuple[TaskKey, int, int]:
    """Read :func:`attempt_name`; ConfigError if it is invalid."""
    front, slash, attempt = name.rpartition("/")
    if not slash or not _ATTEMPT.fullmatch(attempt):
        raise ConfigError(f"{name[:80]!r} names no attempt at a task; write it like r1.e3.s2.i7.f/0/1")
    return (*parse_half(front), int(attempt))


@final
@dataclass(frozen=True, kw_only=True)
class Address:
    """Address of a graph server or parameter server; ConfigError if the endpoint has another protocol."""

    rank: Annotated[int, Within(0, MAX_RANK)]
    host: _Text
    """Host name, for messages."""
    endpoint: _Text
    """``tcp://HOST:PORT``."""
    public_key: _Z85Key | None = None
    """Key (Z85) if connections are encrypted."""

    def __post_init__(self) -> None:
        if not self.endpoint.startswith("tcp://"):
            raise ConfigError(f"endpoint={self.endpoint!r} is no address of a server; give tcp://HOST:PORT")


@final
@dataclass(frozen=True, kw_only=True)
class Secrets:
    """Credentials of a worker: its secret, and a key pair (Z85) if connections are encrypted."""

    secret: _Text = field(repr=False)
    public_key: _Z85Key | None = None
    secret_key: _Z85Key | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if (self.public_key is None) != (self.secret_key is None):
            raise ConfigError("only one key of a pair is given; give both keys or none")


@final
@dataclass(frozen=True, kw_only=True)
class Task:
    """Complete description of a task for a worker."""

    key: TaskKey
    rows: Annotated[int, Within(0, MAX_ROWS)]
    """Nodes of the interval; the targets of an Edge step."""
    program: Annotated[str, Within(64, 64)]
    """Digest of the program."""
    graph_server: Address
    parameter_server: Address
    secrets: Secrets
    timeout_s: Annotated[float, Within(1e-3, MAX_TIMEOUT_S)]
    """Time limit of each call."""
    attempt: Annotated[int, Within(0, MAX_ATTEMPT)] = 0
    # Every choice of these gives the same bits.
    streaming: bool = True
    """Compute the first half while the second arrives."""
    rematerialise: bool = True
    """Recompute intermediate results in the backward pass instead of transferring them."""

    def again(self) -> Task:
        """Return the next attempt."""
        return replace(self, attempt=self.attempt + 1)

    def to_event(self) -> bytes:
        """Return the task as JSON; ConfigError if it is larger than 256 KB or a field is out of bounds."""
        event = write_json({**asdict(self), "version": _VERSION, "key": str(self.key)})
        Task.from_event(event)
        return event

    @classmethod
    def from_event(cls, event: object) -> Task:
        """Read the result of :meth:`to_event`, as text or parsed JSON; ConfigError if it is invalid."""
        values = read_json(event, MAX_EVENT_BYTES, "a task") if isinstance(event, bytes | str) else event
        fields = Fields(values, "a task")
        fields.integer("version", _VERSION, _VERSION)
        task = fields.record(cls, key=lambda name: TaskKey.parse(fields.text(name, 1, 64)))
        fields.reject_unread()
        if not _DIGEST.fullmatch(task.program):
            raise fields.field_error("program", "a digest of 64 hexadecimal characters")
        return task


class Role(Enum):
    """Role of an array in its task."""

    INPUT = "input"
    """Own rows of ``slot``, (n, width)."""
    GRADIENT = "gradient"
    """Gradient of ``slot``, pulled for outputs and sent for inputs; (n, width), or (E, width) of edges."""
    OUTPUT = "output"
    """Computed rows of ``slot``, (n, width), or (E, width) of edges; an Edge step pulls them backward."""
    SAVED = "saved"
    """Saved by a stage, (n, width): sent forward and pulled backward unless rematerialised."""
    LABELS = "labels"
    """(n,) int32, -1 without a label; pulled by a fused task."""
    STATISTICS = "statistics"
    """(2,) float64: sum of losses, number of correct rows; sent by a fused task."""
    SOURCES = "sources"
    """Rows of ``slot`` at each edge's source, (E, width)."""
    INDPTR = "indptr"
    """(n + 1,) int64 from 0 to E."""


class Per(Enum):
    """Unit of a graph that one row of an array stands for."""

    NODE = "node"
    EDGE = "edge"
    BOUND = "bound"
    """Node boundaries: one row more than nodes."""
    HALF = "half"
    """The half as a whole: its length is fixed."""


@final
@dataclass(frozen=True)
class Item:
    """One array of a payload."""

    role: Role
    per: Per
    dtype: str
    slot: str = ""
    """Slot of the program, for roles that have one."""
    width: int = 0
    """Columns; 0: a one-dimensional array."""


def pulled_items(program: Program, step: int, direction: Direction, rematerialise: bool) -> tuple[Item, ...]:
    """Return the arrays that a task of ``step`` pulls from its graph server per half."""
    program_step = program.steps[step]
    if isinstance(program_step, Edge):
        sources = _item(program, program_step.sources, Role.SOURCES, Per.EDGE)
        indptr = Item(Role.INDPTR, Per.BOUND, "int64")
        both = (sources, _item(program, program_step.targets, Role.INPUT), indptr)
        out = program_step.output.name
        values = (_item(program, out, Role.OUTPUT, Per.EDGE), _item(program, out, Role.GRADIENT, Per.EDGE))
        return both if direction is Direction.FORWARD else both + values
    assert isinstance(program_step, Vertex)
    inputs = tuple(_item(program, name, Role.INPUT) for name in program_step.inputs)
    if direction is Direction.FORWARD:
        return inputs
    if direction is Direction.FUSED:
        return (*inputs, Item(Role.LABELS, Per.NODE, "int32"))
    gradients = tuple(_item(program, slot.name, Role.GRADIENT) for slot in program_step.outputs)
    return inputs + gradients + (() if rematerialise else _list_saved(program, program_step))


def given_items(program: Program, step: int, direction: Direction, rematerialise: bool) -> tuple[Item, ...]:
    """Return the arrays that a task of ``step`` sends to its graph server per half.

    Input gradients are sent only for slots in ``program.trained_slots``, in the order of the step's inputs.
    """
    program_step = program.steps[step]
    if isinstance(program_step, Edge):
        role = Role.OUTPUT if direction is Direction.FORWARD else Role.GRADIENT
        return (_item(program, program_step.output.name, role, Per.EDGE),)
    assert isinstance(program_step, Vertex)
    if direction is Direction.FORWARD:
        outputs = tuple(_item(program, slot.name, Role.OUTPUT) for slot in program_step.outputs)
        return outputs + (() if rematerialise else _list_saved(program, program_step))
    trained = [name for name in program_step.inputs if name in program.trained_slots]
    gradients = tuple(_item(program, name, Role.GRADIENT) for name in trained)
    statistics = (Item(Role.STATISTICS, Per.HALF, "float64"),)
    return gradients + (statistics if direction is Direction.FUSED else ())


def half_length(rows: int, half: int) -> int:
    nodes = half_rows(rows, half)
    return nodes.stop - nodes.start


def take_half(items: Sequence[Item], arrays: Sequence[Array], rows: int, half: int) -> list[Array]:
    """Return half 0 or 1 of a task's arrays; views, except for indptr."""
    nodes = half_rows(rows, half)
    bounds = [array for item, array in zip(items, arrays, strict=True) if item.role is Role.INDPTR]
    edges = slice(int(bounds[0][nodes.start]), int(bounds[0][nodes.stop])) if bounds else slice(0, 0)
    cut = {
        Per.NODE: nodes,
        Per.EDGE: edges,
        Per.BOUND: slice(nodes.start, nodes.stop + 1),
        Per.HALF: slice(None),
    }
    pairs = [(item.per, array[cut[item.per]]) for item, array in zip(items, arrays, strict=True)]
    return [part - part[0] if per is Per.BOUND else part for per, part in pairs]


def check_payload(
    items: Sequence[Item], arrays: Sequence[Array], rows: int, where: str, *, num_edges: int | None = None
) -> None:
    """Raise ConfigError unless ``arrays``, of ``where``, match ``items`` for a half of ``rows`` rows.

    Args:
        num_edges: Edges E of the half if ``arrays`` do not contain indptr.
    """
    if len(arrays) != len(items):
        raise ConfigError(f"{where} has {len(arrays)} arrays, not {len(items)}")
    edges = num_edges
    for item, array in zip(items, arrays, strict=True):
        if item.role is Role.INDPTR:
            edges = _edges_of(array, rows, where)
    for item, array in zip(items, arrays, strict=True):
        length = {Per.NODE: rows, Per.EDGE: edges, Per.BOUND: rows + 1, Per.HALF: 2}[item.per]
        shape = (length, item.width) if item.width else (length,)
        if not isinstance(array, np.ndarray) or array.shape != shape or array.dtype != item.dtype:
            subject, actual = f"{item.role.value} {item.slot}".rstrip(), f"type {type(array).__name__}"
            # A user's own stage may return anything.
            if isinstance(array, np.ndarray):
                actual = f"shape {array.shape} and {array.dtype}"
            raise ConfigError(f"{where} has {subject} of {actual}, not {shape} and {item.dtype}")


def _edges_of(indptr: Array, rows: int, where: str) -> int:
    good = indptr.dtype == np.int64 and indptr.shape == (rows + 1,)
    # Compared, not subtracted: the difference of two int64 may overflow.
    if not good or indptr[0] != 0 or (indptr[1:] < indptr[:-1]).any():
        raise ConfigError(f"{where} has an indptr that is not {rows + 1} ascending int64 from 0")
    return int(indptr[-1])


def _item(program: Program, slot: str, role: Role, per: Per = Per.NODE) -> Item:
    return Item(role, per, program.dtype, slot, program.slots[slot].width)


def _list_saved(program: Program, step: Vertex) -> tuple[Item, ...]:
    widths = vertex_stage(step.stage, step.config).shapes.saved
    return tuple(Item(Role.SAVED, Per.NODE, program.dtype, "", width) for width in widths)


_OPENBLAS = [f"{prefix}openblas_get_config{end}" for prefix in ("scipy_", "") for end in ("64_", "")]
"""Names of OpenBLAS's function that describes its build, as the wheels of NumPy and others export it."""


@functools.cache
def kernels() -> str:
    """Describe the arithmetic of this process: NumPy, its BLAS with kernels, its SIMD loops.

    Processes with different descriptions may compute different bits. Kernels are known for OpenBLAS only;
    another BLAS is described by name and version.
    """
    built: Any = np.show_config(mode="dicts")
    # A lookup by library handle searches that library and its dependencies, so this finds NumPy's BLAS and
    # not one that torch or SciPy loaded into the same process.
    library = ctypes.CDLL(importlib.import_module("numpy.linalg._umath_linalg").__file__)
    described = next((getattr(library, name) for name in _OPENBLAS if hasattr(library, name)), None)
    if described is None:
        blas_build = built.get("Build Dependencies", {}).get("blas", {})
        blas = " ".join(str(blas_build.get(key)) for key in ("name", "version"))
    else:
        described.restype = ctypes.c_char_p
        blas = " ".join(described().decode(errors="replace").split())
    return f"NumPy {np.__version__}; {blas}; {' '.join(built.get('SIMD Extensions', {}).get('found', ()))}"


class Computed(NamedTuple):
    """Results of a half, or of both."""

    rows: Arrays
    """For the graph server: see :func:`given_items`."""
    gradients: Arrays
    """For the parameter server: one per weight of the step, summed over the rows; () forward."""


@final
class TaskComputation:
    """The computation of one kind of task, for any interval and epoch. Stateless and thread-safe."""

    def __init__(self, program: Program, step: int, direction: Direction, rematerialise: bool) -> None:
        self.pulled = pulled_items(program, step, direction, rematerialise)
        """Arrays pulled per half."""
        self.given = given_items(program, step, direction, rematerialise)
        """Arrays sent per half."""
        program_step = program.steps[step]
        assert isinstance(program_step, Vertex | Edge)
        self._name, self._dtype = program_step.name, program.dtype
        self._returned = f"what the stage of step {program_step.name!r} returned"
        self._direction, self._rematerialise = direction, rematerialise
        self._scale = 1 / program.num_train
        self._stage: VertexStage | EdgeStage
        self.weights: Shapes = {}
        """Shape of each weight by the user's name, in order."""
        self.pushes = isinstance(program_step, Vertex) and direction is not Direction.FORWARD
        """Whether gradients of the weights, possibly none, go to the parameter server."""
        if isinstance(program_step, Edge):
            self._stage = edge_stage(program_step.stage, program_step.config)
        else:
            self._stage = vertex_stage(program_step.stage, program_step.config)
            self.weights = program.weights_of(step)
            self._outputs = given_items(program, step, Direction.FORWARD, True)
            self._wanted = [name in program.trained_slots for name in program_step.inputs]

    def half(self, weights: Sequence[Array], arrays: Sequence[Array], rows: int) -> Computed:
        """Compute one half of ``rows`` rows, which may be 0, from one array per item of :attr:`pulled`.

        Raises:
            ConfigError: an argument, a label, or the result of a user's own stage does not fit the program.
        """
        check_payload(self.pulled, arrays, rows, f"what step {self._name!r} pulled")
        self._check_weights(weights, "got weights")
        results = self._compute(_read_only(weights), _read_only(arrays), rows)
        check_payload(self.given, results.rows, rows, self._returned, num_edges=len(arrays[0]))
        if self.pushes:
            self._check_weights(results.gradients, "returned gradients")
        return results

    def compute_halves(self, weights: Sequence[Array], arrays: Sequence[Array], rows: int) -> Computed:
        """Compute a task of ``rows`` rows as a worker does: the rows of one half, then those of the other."""
        first, second = (
            self.half(weights, take_half(self.pulled, arrays, rows, half), half_length(rows, half))
            for half in (0, 1)
        )
        return Computed(first.rows + second.rows, add_gradients(first.gradients, second.gradients))

    def _compute(self, weights: Rows, arrays: Rows, rows: int) -> Computed:
        stage, direction = self._stage, self._direction
        if isinstance(stage, EdgeStage):
            run = stage.forward if direction is Direction.FORWARD else stage.backward
            return Computed((run(*arrays),), ())
        inputs, tail = arrays[: len(self._wanted)], arrays[len(self._wanted) :]
        gradients: Rows = tail[: len(self._outputs)]
        saved: Rows | None = None if self._rematerialise else tail[len(self._outputs) :]
        statistics: Arrays = ()
        if direction is not Direction.BACKWARD:
            outputs, saved = stage.forward(weights, inputs)
            if direction is Direction.FORWARD:
                return Computed(outputs if self._rematerialise else outputs + saved, ())
            # Nothing else checks them: they are not sent.
            check_payload(self._outputs, outputs, rows, self._returned)
            loss = cross_entropy(outputs[0], tail[0], self._scale)
            gradients, statistics = (loss.gradient,), (np.array([loss.loss_sum, loss.correct]),)
        slopes = stage.backward(weights, inputs, gradients, saved=saved, wanted=self._wanted)
        pairs = zip(slopes.inputs, self._wanted, strict=True)
        row_slopes = tuple(row for row, is_wanted in pairs if is_wanted and row is not None)
        return Computed(row_slopes + statistics, slopes.weights)

    def _check_weights(self, weights: Sequence[Array], subject: str) -> None:
        actual = [(np.shape(weight), str(getattr(weight, "dtype", "no array"))) for weight in weights]
        expected = [(shape, self._dtype) for shape in self.weights.values()]
        if actual != expected:
            raise ConfigError(
                f"step {self._name!r} {subject} {actual}, not {expected} ({list(self.weights)})"
            )


def add_gradients(first: Sequence[Array], second: Sequence[Array]) -> Arrays:
    return tuple(left + right for left, right in zip(first, second, strict=True))


def _read_only(arrays: Sequence[Array]) -> list[Array]:
    # A user's stage must not write: inside a graph server these are the server's own rows.
    views = [array.view() for array in arrays]
    for view in views:
        view.flags.writeable = False
    return views
