"""Tasks of workers: keys, events, payloads and the computation itself.

A task is one Apply step of one interval in one epoch and direction. Its event names the program by digest.
The worker pulls rows, weights and the program itself. Events are therefore small (AWS limits asynchronous
ones to 256 KB) and contain no code.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Annotated, NamedTuple, TypeAlias, final

import numpy as np
import torch
from torch import Tensor

from dglx_dist.data.json_fields import Fields, Within, read_json, write_json
from dglx_dist.errors import ConfigError
from dglx_dist.records import Array
from dglx_dist.strategies.serverless.program import Apply, End, Program
from dglx_dist.strategies.serverless.tensor_program import RowKeys

with warnings.catch_warnings():
    # torch warns once of arrays that cannot be written. Operations of programs only read them.
    warnings.simplefilter("ignore")
    torch.from_numpy(np.frombuffer(bytes(8)))
Arrays: TypeAlias = tuple[Array, ...]
MAX_EVENT_BYTES = 256 * 1024
MAX_ATTEMPT = 10**6 - 1
MAX_ROWS = 1 << 40
MAX_RANK = 10**6
MAX_TIMEOUT_S = 86_400.0
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
        if not isinstance(step, Apply) or step.place != "worker":
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
    """Nodes of the interval, or their in-edges."""
    first_row: Annotated[int, Within(0, MAX_ROWS)]
    """Global id of the first row, by which dropout is keyed. The others have the ids after it."""
    seed: Annotated[int, Within(0, 1 << 63)]
    """Seed of dropout."""
    program: Annotated[str, Within(64, 64)]
    """Digest of the program."""
    graph_server: Address
    parameter_server: Address
    secrets: Secrets
    timeout_s: Annotated[float, Within(1e-3, MAX_TIMEOUT_S)]
    """Time limit of each call."""
    attempt: Annotated[int, Within(0, MAX_ATTEMPT)] = 0

    def again(self) -> Task:
        """Return the next attempt."""
        return replace(self, attempt=self.attempt + 1)

    def to_event(self) -> bytes:
        """Return the task as JSON."""
        return write_json({**asdict(self), "version": _VERSION, "key": str(self.key)})

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
    """Rows of ``slot``."""
    GRADIENT = "gradient"
    """Gradient of ``slot``, pulled for outputs and sent for inputs."""
    OUTPUT = "output"
    """Computed rows of ``slot``."""
    LABELS = "labels"
    """Labels of nodes, -1 or NaN where there is none. A fused task pulls them."""
    STATISTICS = "statistics"
    """(2,) float64 of a half: sum of losses, number of correct rows. A fused task sends them."""


@final
@dataclass(frozen=True)
class Item:
    """One array of a payload: (n, width), or (n,) if the width is 0."""

    role: Role
    dtype: str
    width: int
    slot: str = ""
    end: End = "row"


def label_item(program: Program) -> Item:
    # Classes travel as int32.
    if program.label.dtype:
        return Item(Role.LABELS, "int32", 0)
    return Item(Role.LABELS, program.dtype, program.label.width)


_STATISTICS = Item(Role.STATISTICS, "float64", 0)


def pulled_items(program: Program, step: int, direction: Direction) -> tuple[Item, ...]:
    """Return the arrays that a task of ``step`` pulls from its graph server per half."""
    apply = _apply_step(program, step)
    inputs = tuple(_item(program, item.slot, Role.INPUT, item.end) for item in apply.inputs)
    if direction is Direction.FORWARD:
        return inputs
    if direction is Direction.FUSED:
        return (*inputs, label_item(program))
    return inputs + tuple(_item(program, slot.name, Role.GRADIENT) for slot in apply.outputs)


def given_items(program: Program, step: int, direction: Direction) -> tuple[Item, ...]:
    """Return the arrays that a task of ``step`` sends to its graph server per half.

    Input gradients are sent only for slots in ``program.trained_slots``, in the order of the step's inputs.
    """
    apply = _apply_step(program, step)
    if direction is Direction.FORWARD:
        return tuple(_item(program, slot.name, Role.OUTPUT) for slot in apply.outputs)
    gradients = tuple(
        _item(program, item.slot, Role.GRADIENT, item.end)
        for item in apply.inputs
        if item.slot in program.trained_slots
    )
    return (*gradients, _STATISTICS) if direction is Direction.FUSED else gradients


def half_rows(rows: int, half: int) -> slice:
    """Return the part of ``rows`` rows in half 0 or 1. The first half has the odd row."""
    middle = round_rows((rows + 1) // 2)
    return slice(middle, rows) if half else slice(0, middle)


def round_rows(rows: int) -> int:
    """Return about ``rows``, such that the row with this number is aligned in memory if row 0 is."""
    return rows // _ALIGNED_ROWS * _ALIGNED_ROWS if rows >= 8 * _ALIGNED_ROWS else rows


def half_length(rows: int, half: int) -> int:
    part = half_rows(rows, half)
    return part.stop - part.start


def check_payload(items: Sequence[Item], arrays: Sequence[Array], rows: int, where: str) -> None:
    """Raise ConfigError unless ``arrays``, of ``where``, match ``items`` for a half of ``rows`` rows."""
    if len(arrays) != len(items):
        raise ConfigError(f"{where} has {len(arrays)} arrays, not {len(items)}")
    for item, array in zip(items, arrays, strict=True):
        shape: tuple[int, ...] = (rows, item.width) if item.width or item.slot else (rows,)
        if item.role is Role.STATISTICS:
            shape = (2,)
        if array.shape != shape or array.dtype != item.dtype:
            subject = f"{item.role.value} {item.slot}".rstrip()
            raise ConfigError(
                f"{where} has {subject} of shape {array.shape} and {array.dtype}, not {shape} and "
                f"{item.dtype}"
            )


def _item(program: Program, slot: str, role: Role, end: End = "row") -> Item:
    return Item(role, program.dtype_of(slot), program.slots[slot].width, slot, end)


def _apply_step(program: Program, step: int) -> Apply:
    apply = program.steps[step]
    assert isinstance(apply, Apply)
    return apply


@functools.cache
def kernels() -> str:
    """Describe the arithmetic of this process. Others with another description may compute other bits."""
    libraries = re.findall(
        r"BLAS_INFO=\w+|oneAPI Math Kernel Library Version [\w.-]+", torch.__config__.show()
    )
    capability = torch.backends.cpu.get_cpu_capability()
    return ", ".join([f"PyTorch {torch.__version__}", capability, *libraries])


class Computed(NamedTuple):
    """Results of a half, or of both."""

    rows: Arrays
    """For the graph server: see :func:`given_items`."""
    gradients: Arrays
    """For the parameter server: one per weight of the step, summed over the rows; () forward."""


@final
class TaskComputation:
    """The computation of one kind of task, for any interval and epoch. Stateless and thread-safe."""

    def __init__(self, program: Program, step: int, direction: Direction) -> None:
        self.pulled = pulled_items(program, step, direction)
        """Arrays pulled per half."""
        self.given = given_items(program, step, direction)
        """Arrays sent per half."""
        self._program = program
        self._step = _apply_step(program, step)
        self._direction = direction
        self.weights = program.weights_of(step)
        """Shape of each weight by the user's name, in order."""
        self.drops = self._step.body.drops
        """Whether it needs keys of rows."""
        self.pushes = direction is not Direction.FORWARD
        """Whether gradients of the weights, possibly none, go to the parameter server."""

    def half(
        self, weights: Sequence[Array], arrays: Sequence[Array], rows: int, keys: RowKeys | None
    ) -> Computed:
        """Compute one half of ``rows`` rows, which may be 0, from one array per item of :attr:`pulled`.

        Raises:
            ConfigError: an argument does not fit the program.
        """
        name = self._step.name
        check_payload(self.pulled, arrays, rows, f"what step {name!r} pulled")
        actual = [(weight.shape, str(weight.dtype)) for weight in weights]
        expected = [(shape, self._program.dtype) for shape in self.weights.values()]
        if actual != expected:
            raise ConfigError(f"step {name!r} got weights {actual}, not {expected} ({list(self.weights)})")
        if not rows:
            return self._no_rows()
        matrices, tensors = (list(map(_to_tensor, array)) for array in (weights, arrays))
        if self._direction is Direction.FORWARD:
            with torch.no_grad():
                return self._forward(matrices, tensors, keys)
        return self._backward(matrices, tensors, keys)

    def compute_halves(
        self, weights: Sequence[Array], arrays: Sequence[Array], rows: int, keys: RowKeys | None
    ) -> Computed:
        """Compute a task of ``rows`` rows as a worker does: the rows of one half, then those of the other."""
        computed = []
        for half in (0, 1):
            part = half_rows(rows, half)
            of_half = [array[part] for array in arrays]
            half_keys = keys and keys._replace(ids=keys.ids[part])
            computed.append(self.half(weights, of_half, half_length(rows, half), half_keys))

        first, second = computed
        return Computed(
            join_halves(self.given, first.rows, second.rows),
            add_gradients(first.gradients, second.gradients),
        )

    def _no_rows(self) -> Computed:
        shapes = [(2,) if item.role is Role.STATISTICS else (0, item.width) for item in self.given]
        rows = tuple(np.zeros(shape, item.dtype) for shape, item in zip(shapes, self.given, strict=True))
        dtype = self._program.dtype
        gradients = (np.zeros(shape, dtype) for shape in self.weights.values() if self.pushes)
        return Computed(rows, tuple(gradients))

    def _forward(self, weights: list[Tensor], inputs: list[Tensor], keys: RowKeys | None) -> Computed:
        values = self._step.body.run(inputs, weights, keys)
        pairs = zip(self.given, self._step.body.outputs, strict=True)
        return Computed(tuple(_to_array(values[n].reshape(-1, item.width)) for item, n in pairs), ())

    def _backward(self, weights: list[Tensor], arrays: list[Tensor], keys: RowKeys | None) -> Computed:
        step, trained = self._step, self._program.trained_slots
        num_inputs = len(step.inputs)
        num_outputs = len(step.outputs)
        inputs = [
            tensor.detach().requires_grad_() if item.slot in trained else tensor
            for item, tensor in zip(step.inputs, arrays[:num_inputs], strict=True)
        ]
        leaves = [weight.requires_grad_() for weight in weights]
        leaves += [tensor for tensor in inputs if tensor.requires_grad]
        is_fused = self._direction is Direction.FUSED
        statistics = []
        with torch.enable_grad():
            values = step.body.run(inputs, weights, keys)
            outputs = [values[number] for number in step.body.outputs]
            if is_fused:
                loss = compute_loss(self._program, outputs[0], arrays[-1])
                outputs = [loss.scaled]
                cotangents = [torch.ones_like(loss.scaled)]
                statistics.append(loss.statistics)
            else:
                cotangents = list(arrays[num_inputs : num_inputs + num_outputs])

        roots = [
            (output, cotangent.reshape(output.shape))
            for output, cotangent in zip(outputs, cotangents, strict=True)
            if output.requires_grad
        ]
        gradients: Sequence[Tensor] = [torch.zeros_like(leaf) for leaf in leaves]
        if roots and leaves:
            ends, slopes = zip(*roots, strict=True)
            gradients = torch.autograd.grad(ends, leaves, slopes, allow_unused=True, materialize_grads=True)
        made = [_to_array(gradient) for gradient in gradients]
        return Computed((*made[len(weights) :], *statistics), tuple(made[: len(weights)]))


class Loss(NamedTuple):
    """Loss of n rows."""

    scaled: Tensor
    """Sum of the losses of labelled rows, divided by the number M of training nodes. It has a gradient."""
    statistics: Array
    """(2,) float64: sum of losses, number of correct rows (0 unless labels are classes)."""


def compute_loss(program: Program, scores: Tensor, labels: Tensor) -> Loss:
    """Return the loss of (n, ...) ``scores`` and :func:`label_item` labels."""
    is_class = bool(program.label.dtype)
    has_label = labels >= 0 if is_class else ~labels[:, 0].isnan()

    # Other rows first go: the loss of a made-up label may have an infinite slope.
    chosen, known = scores[has_label], labels[has_label]
    known = known.long() if is_class else known

    # Without labels the sum is 0, but backward must still reach the scores.
    total = 0 * chosen.sum()
    correct = 0
    if len(chosen):
        flat = chosen.reshape(len(chosen), program.scores.width)
        total = program.loss.run([flat, known], [], None)[program.loss.outputs[0]].sum()
    if is_class and scores.dim() == 2:
        correct = int((chosen.argmax(1) == known).sum())
    return Loss(total * (1 / program.num_train), np.array([total.item(), correct], np.float64))


def join_halves(items: Sequence[Item], first: Sequence[Array], second: Sequence[Array]) -> Arrays:
    """Return the arrays of a task from those of its halves, one for each of ``items``."""
    return tuple(
        left + right if item.role is Role.STATISTICS else _join_rows(left, right)
        for item, left, right in zip(items, first, second, strict=True)
    )


def _join_rows(first: Array, second: Array) -> Array:
    # In aligned memory.
    return _to_array(torch.cat([torch.from_numpy(first), torch.from_numpy(second)]))


def add_gradients(first: Sequence[Array], second: Sequence[Array]) -> Arrays:
    return tuple(left + right for left, right in zip(first, second, strict=True))


_ALIGNMENT = 64
"""Bytes. The last bits of MKL's products depend on the alignment of memory."""
_ALIGNED_ROWS = 16
"""So many rows of at least 4 bytes a number keep the alignment."""


def _to_tensor(array: Array) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor.clone() if tensor.data_ptr() % _ALIGNMENT else tensor.detach()


def _to_array(tensor: Tensor) -> Array:
    array: Array = tensor.detach().contiguous().numpy()
    return array
