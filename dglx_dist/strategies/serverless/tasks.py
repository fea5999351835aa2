"""Worker tasks: keys, events, payloads and the computation itself.

A task is one Apply step for one interval in one epoch and direction. Its event names the program by digest.
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
    # torch warns once about read-only arrays, which is done here without a message. Programs only read
    # arrays.
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
"""Answer to a pull in place of rows, if another attempt has done the task."""


class Direction(str, Enum):
    """Direction that a task runs in. The value is its text in a key."""

    FORWARD = "f"
    BACKWARD = "b"
    FUSED = "fb"
    """The last step forward, the loss and the last step backward in one task."""


@final
@dataclass(frozen=True, order=True)
class TaskKey:
    """Identifies a task. Keys are ordered by epoch, step, interval, direction text, and run."""

    epoch: int
    step: int
    """Index in the program."""
    interval: int
    """The interval's global number."""
    direction: Direction
    run: int = 0
    """Run number within its session. Workers from an earlier run may still be active in the same epochs."""

    def __str__(self) -> str:
        return f"r{self.run}.e{self.epoch}.s{self.step}.i{self.interval}.{self.direction.value}"

    @classmethod
    def parse(cls, text: str) -> TaskKey:
        """Read a key's text, such as ``r1.e3.s2.i7.f``. Raises ConfigError if the text is invalid."""
        match = _KEY.fullmatch(text)
        if match is None:
            raise ConfigError(f"{text[:80]!r} is no key of a task; write it like r1.e3.s2.i7.f")
        run, epoch, step, interval, direction = match.groups()
        return cls(int(epoch), int(step), int(interval), Direction(direction), int(run))

    def check_run(self, run: int) -> None:
        """Raise ConfigError if this task belongs to another run than ``run``."""
        if self.run != run:
            raise ConfigError(
                f"task {self} is of run {self.run} of this session, and this is run {run}; "
                "the call comes from a worker that was given up"
            )

    def check(self, program: Program) -> None:
        """Raise ConfigError if workers for ``program`` have no such task in any interval."""
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
    """Return the key and the half in a :func:`half_name`. Raises ConfigError if ``name`` is invalid."""
    key_text, _, half = name.partition("/")
    if half not in ("0", "1"):
        raise ConfigError(f"{name[:80]!r} names no half of a task; write it like r1.e3.s2.i7.f/0")
    return TaskKey.parse(key_text), int(half)


def attempt_name(key: TaskKey, half: int, attempt: int) -> str:
    """Return the name under which a worker sends half 0 or 1 of a task's results."""
    return f"{half_name(key, half)}/{attempt}"


def parse_attempt(name: str) -> tuple[TaskKey, int, int]:
    """Return key, half and attempt in an :func:`attempt_name`. Raises ConfigError if ``name`` is invalid."""
    name_of_half, slash, attempt = name.rpartition("/")
    if not slash or not _ATTEMPT.fullmatch(attempt):
        raise ConfigError(f"{name[:80]!r} names no attempt at a task; write it like r1.e3.s2.i7.f/0/1")
    key, half = parse_half(name_of_half)
    return key, half, int(attempt)


@final
@dataclass(frozen=True, kw_only=True)
class Address:
    """Address at which a server answers workers. Raises ConfigError if the protocol is not TCP."""

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
    """A worker's credentials: its secret, and a key pair (Z85) if connections are encrypted."""

    secret: _Text = field(repr=False)
    public_key: _Z85Key | None = None
    secret_key: _Z85Key | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if (self.public_key is None) != (self.secret_key is None):
            raise ConfigError("only one key of a pair is given; give both keys or none")


@final
@dataclass(frozen=True, kw_only=True)
class Task:
    """All that a worker must know about a task."""

    key: TaskKey
    rows: Annotated[int, Within(0, MAX_ROWS)]
    """Nodes in the interval, or their in-edges."""
    first_row: Annotated[int, Within(0, MAX_ROWS)]
    """Global id of the first row, by which dropout is keyed. The later rows have the ids after it."""
    seed: Annotated[int, Within(0, 1 << 63)]
    """Random seed for dropout."""
    program: Annotated[str, Within(64, 64)]
    """The program's digest."""
    graph_server: Address
    parameter_server: Address
    secrets: Secrets
    timeout_s: Annotated[float, Within(1e-3, MAX_TIMEOUT_S)]
    """Time limit for each call."""
    attempt: Annotated[int, Within(0, MAX_ATTEMPT)] = 0

    def again(self) -> Task:
        """Return the next attempt."""
        return replace(self, attempt=self.attempt + 1)

    def to_event(self) -> bytes:
        """Return the task as JSON."""
        return write_json({**asdict(self), "version": _VERSION, "key": str(self.key)})

    @classmethod
    def from_event(cls, event: object) -> Task:
        """Read a task from :meth:`to_event`'s result, as text or parsed. Raises ConfigError if invalid."""
        if isinstance(event, bytes | str):
            event = read_json(event, MAX_EVENT_BYTES, "a task")
        fields = Fields(event, "a task")
        fields.integer("version", _VERSION, _VERSION)
        task = fields.record(cls, key=lambda name: TaskKey.parse(fields.text(name, 1, 64)))
        fields.reject_unread()
        if not _DIGEST.fullmatch(task.program):
            raise fields.field_error("program", "a digest of 64 hexadecimal characters")
        return task


class Role(Enum):
    """Role of an array in its task."""

    INPUT = "input"
    """Rows in ``slot``."""
    GRADIENT = "gradient"
    """Gradient for ``slot``. Output gradients are pulled, and input gradients are sent."""
    OUTPUT = "output"
    """Rows computed for ``slot``."""
    LABELS = "labels"
    """Node labels, pulled by a fused task. A node without a label has -1 or NaN."""
    STATISTICS = "statistics"
    """(2,) float64 summed losses and correct row count in a half. Fused tasks send them."""


@final
@dataclass(frozen=True)
class Item:
    """One array in a payload: (n, width), or (n,) if the width is 0."""

    role: Role
    dtype: str
    width: int
    slot: str = ""
    end: End = "row"


def label_item(program: Program) -> Item:
    """Return the label item. Labels are classes if the label's slot has a dtype."""
    if program.label.dtype:
        return Item(Role.LABELS, "int32", 0)
    return Item(Role.LABELS, program.dtype, program.label.width)


_STATISTICS = Item(Role.STATISTICS, "float64", 0)


def list_pulled_items(program: Program, step: int, direction: Direction) -> tuple[Item, ...]:
    """Describe the arrays that a task pulls from its graph server, separately for each half of its rows.

    The task computes the program's ``step`` in ``direction``.
    """
    tensor_step = _get_tensor_step(program, step)
    items = []
    for step_input in tensor_step.inputs:
        items.append(_make_item(program, step_input.slot, Role.INPUT, step_input.end))
    if direction is Direction.FUSED:
        items.append(label_item(program))
    elif direction is Direction.BACKWARD:
        items += [_make_item(program, slot.name, Role.GRADIENT) for slot in tensor_step.outputs]
    return tuple(items)


def list_submitted_items(program: Program, step: int, direction: Direction) -> tuple[Item, ...]:
    """Describe the arrays that a task sends to its graph server, separately for each half of its rows.

    A forward task sends its outputs. Other tasks send gradients for those inputs that are in
    ``program.trained_slots``, in input order. A fused task also sends loss and accuracy.
    """
    tensor_step = _get_tensor_step(program, step)
    if direction is Direction.FORWARD:
        return tuple(_make_item(program, slot.name, Role.OUTPUT) for slot in tensor_step.outputs)

    items = []
    for step_input in tensor_step.inputs:
        if step_input.slot in program.trained_slots:
            items.append(_make_item(program, step_input.slot, Role.GRADIENT, step_input.end))
    if direction is Direction.FUSED:
        items.append(_STATISTICS)
    return tuple(items)


def half_rows(rows: int, half: int) -> slice:
    """Return which rows out of ``rows`` are in half 0 or 1. The first half has the odd row."""
    middle = round_rows((rows + 1) // 2)
    return slice(middle, rows) if half else slice(0, middle)


def round_rows(rows: int) -> int:
    """Return about ``rows``, such that the row with this number is aligned in memory if row 0 is."""
    if rows < 8 * _ALIGNED_ROWS:
        # Rounding would make such halves or intervals too uneven.
        return rows
    return rows // _ALIGNED_ROWS * _ALIGNED_ROWS


def half_length(rows: int, half: int) -> int:
    selection = half_rows(rows, half)
    return selection.stop - selection.start


def check_payload(items: Sequence[Item], arrays: Sequence[Array], rows: int, where: str) -> None:
    """Raise ConfigError if ``arrays`` do not match ``items`` for a half that has ``rows`` rows.

    ``where`` describes the arrays in the message.
    """
    if len(arrays) != len(items):
        raise ConfigError(f"{where} has {len(arrays)} arrays, not {len(items)}")
    for item, array in zip(items, arrays, strict=True):
        shape: tuple[int, ...] = (rows,)
        if item.role is Role.STATISTICS:
            shape = (2,)
        elif item.width or item.slot:
            shape = (rows, item.width)
        if array.shape != shape or array.dtype != item.dtype:
            subject = f"{item.role.value} {item.slot}".rstrip()
            raise ConfigError(
                f"{where} has {subject} of shape {array.shape} and {array.dtype}, not {shape} "
                f"and {item.dtype}"
            )


def _make_item(program: Program, slot: str, role: Role, end: End = "row") -> Item:
    return Item(role, program.dtype_of(slot), program.slots[slot].width, slot, end)


def _get_tensor_step(program: Program, step: int) -> Apply:
    apply = program.steps[step]
    assert isinstance(apply, Apply)
    return apply


@functools.cache
def kernels() -> str:
    """Describe this process's arithmetic. A process with a different text may compute other bits."""
    pattern = r"BLAS_INFO=\w+|oneAPI Math Kernel Library Version [\w.-]+"
    libraries = re.findall(pattern, torch.__config__.show())
    capability = torch.backends.cpu.get_cpu_capability()
    return ", ".join([f"PyTorch {torch.__version__}", capability, *libraries])


class Computed(NamedTuple):
    """Results for one half of a task, or for both halves."""

    rows: Arrays
    """Arrays for the graph server, see :func:`list_submitted_items`."""
    gradients: Arrays
    """Gradients for the parameter server, summed over the rows: one per weight, or () for a forward task."""


@final
class TaskComputation:
    """Computes the tasks with one step and direction, in any interval and epoch. Thread-safe."""

    def __init__(self, program: Program, step: int, direction: Direction) -> None:
        self.pulled = list_pulled_items(program, step, direction)
        """Arrays pulled per half."""
        self.given = list_submitted_items(program, step, direction)
        """Arrays sent per half."""
        self._program = program
        self._step = _get_tensor_step(program, step)
        self._direction = direction
        self.weights = program.weights_of(step)
        """Weight shapes by the user's names, in order."""
        self.drops = self._step.body.drops
        """Whether the computation needs row keys."""
        self.pushes = direction is not Direction.FORWARD
        """Whether the computation returns gradients for its weights, even if it has none."""

    def half(
        self, weights: Sequence[Array], arrays: Sequence[Array], rows: int, keys: RowKeys | None
    ) -> Computed:
        """Compute one half with ``rows`` rows, which may be 0, from one array per item in :attr:`pulled`.

        Raises ConfigError if an argument does not fit the program.
        """
        name = self._step.name
        check_payload(self.pulled, arrays, rows, f"what step {name!r} pulled")
        actual = [(weight.shape, str(weight.dtype)) for weight in weights]
        expected = [(shape, self._program.dtype) for shape in self.weights.values()]
        if actual != expected:
            raise ConfigError(f"step {name!r} got weights {actual}, not {expected} ({list(self.weights)})")
        if not rows:
            # Some operations fail without rows.
            return self._make_empty_result()

        weight_tensors = [_to_tensor(weight) for weight in weights]
        tensors = [_to_tensor(array) for array in arrays]
        if self._direction is Direction.FORWARD:
            with torch.no_grad():
                return self._forward(weight_tensors, tensors, keys)
        return self._backward(weight_tensors, tensors, keys)

    def compute_halves(
        self, weights: Sequence[Array], arrays: Sequence[Array], rows: int, keys: RowKeys | None
    ) -> Computed:
        """Compute a task with ``rows`` rows as a worker does, first one half and then the other."""
        results = []
        for half in (0, 1):
            selection = half_rows(rows, half)
            arrays_of_half = [array[selection] for array in arrays]
            keys_of_half = None if keys is None else keys._replace(ids=keys.ids[selection])
            results.append(self.half(weights, arrays_of_half, half_length(rows, half), keys_of_half))

        first, second = results
        joined_rows = join_halves(self.given, first.rows, second.rows)
        return Computed(joined_rows, add_gradients(first.gradients, second.gradients))

    def _make_empty_result(self) -> Computed:
        rows = []
        for item in self.given:
            shape = (2,) if item.role is Role.STATISTICS else (0, item.width)
            rows.append(np.zeros(shape, item.dtype))
        gradients = []
        if self.pushes:
            gradients = [np.zeros(shape, self._program.dtype) for shape in self.weights.values()]
        return Computed(tuple(rows), tuple(gradients))

    def _forward(self, weights: list[Tensor], inputs: list[Tensor], keys: RowKeys | None) -> Computed:
        values = self._step.body.run(inputs, weights, keys)
        rows = []
        for item, output in zip(self.given, self._step.body.outputs, strict=True):
            rows.append(_to_array(values[output].reshape(-1, item.width)))
        return Computed(tuple(rows), ())

    def _backward(self, weights: list[Tensor], arrays: list[Tensor], keys: RowKeys | None) -> Computed:
        """Run the step with autograd, and return gradients for trained inputs and for all weights.

        ``arrays`` has the inputs, and then the outputs' gradients. A fused task has labels instead, and
        returns statistics after the inputs' gradients.
        """
        # Gradients are needed for all weights, and then for the inputs that depend on a weight.
        inputs = arrays[: len(self._step.inputs)]
        leaves = [weight.requires_grad_() for weight in weights]
        for position, item in enumerate(self._step.inputs):
            if item.slot in self._program.trained_slots:
                inputs[position] = inputs[position].detach().requires_grad_()
                leaves.append(inputs[position])

        statistics = []
        with torch.enable_grad():
            values = self._step.body.run(inputs, weights, keys)
            outputs = [values[number] for number in self._step.body.outputs]
            output_gradients = arrays[len(inputs) :]
            if self._direction is Direction.FUSED:
                loss = compute_loss(self._program, outputs[0], arrays[-1])
                statistics.append(loss.statistics)
                outputs = [loss.scaled]
                output_gradients = [torch.ones_like(loss.scaled)]

        leaf_gradients = [
            _to_array(gradient) for gradient in _differentiate(outputs, output_gradients, leaves)
        ]
        weight_gradients = leaf_gradients[: len(weights)]
        input_gradients = leaf_gradients[len(weights) :]
        return Computed((*input_gradients, *statistics), tuple(weight_gradients))


def _differentiate(
    outputs: Sequence[Tensor], output_gradients: Sequence[Tensor], leaves: Sequence[Tensor]
) -> Sequence[Tensor]:
    """Return each leaf's gradient, which is zero if no output depends on the leaf."""
    # torch differentiates only outputs that depend on a leaf.
    roots = []
    root_gradients = []
    for output, gradient in zip(outputs, output_gradients, strict=True):
        if output.requires_grad:
            roots.append(output)
            root_gradients.append(gradient.reshape(output.shape))

    if not roots or not leaves:
        return [torch.zeros_like(leaf) for leaf in leaves]
    options = {"allow_unused": True, "materialize_grads": True}
    return torch.autograd.grad(roots, leaves, root_gradients, **options)


class Loss(NamedTuple):
    """Loss over n rows."""

    scaled: Tensor
    """Losses summed over labelled rows, divided by M, the number of training nodes. It has a gradient."""
    statistics: Array
    """(2,) float64 summed losses and correct row count, which is 0 if labels are no classes."""


def compute_loss(program: Program, scores: Tensor, labels: Tensor) -> Loss:
    """Return the loss for (n, ...) ``scores`` and :func:`label_item` labels."""
    is_class = bool(program.label.dtype)
    has_label = labels >= 0 if is_class else ~labels[:, 0].isnan()

    # Rows without a label are removed, because the loss for an invented label may have an infinite slope.
    scores = scores[has_label]
    labels = labels[has_label]
    if is_class:
        labels = labels.long()

    # Without labels the sum is 0, but backward must still reach the scores.
    loss_sum = 0 * scores.sum()
    num_correct = 0
    if len(scores):
        flat_scores = scores.reshape(len(scores), program.scores.width)
        values = program.loss.run([flat_scores, labels], [], None)
        loss_sum = values[program.loss.outputs[0]].sum()
    if is_class and scores.dim() == 2:
        num_correct = int((scores.argmax(1) == labels).sum())
    statistics = np.array([loss_sum.item(), num_correct], np.float64)
    return Loss(loss_sum * (1 / program.num_train), statistics)


def join_halves(items: Sequence[Item], first: Sequence[Array], second: Sequence[Array]) -> Arrays:
    """Join the arrays from a task's halves into one array for each item in ``items``."""
    joined_arrays = []
    for item, left, right in zip(items, first, second, strict=True):
        if item.role is Role.STATISTICS:
            joined_arrays.append(left + right)
        else:
            # torch allocates aligned memory.
            rows = torch.cat([torch.from_numpy(left), torch.from_numpy(right)])
            joined_arrays.append(_to_array(rows))
    return tuple(joined_arrays)


def add_gradients(first: Sequence[Array], second: Sequence[Array]) -> Arrays:
    return tuple(left + right for left, right in zip(first, second, strict=True))


_ALIGNMENT = 64
"""Memory alignment in bytes. The last bits in MKL's products depend on the alignment."""
_ALIGNED_ROWS = 16
"""Number of rows, with at least 4 bytes a number, after which the alignment is the same again."""


def _to_tensor(array: Array) -> Tensor:
    """Return ``array`` as an aligned tensor, which is a copy only if ``array`` is not aligned."""
    tensor = torch.from_numpy(array)
    return tensor.clone() if tensor.data_ptr() % _ALIGNMENT else tensor.detach()


def _to_array(tensor: Tensor) -> Array:
    array: Array = tensor.detach().contiguous().numpy()
    return array
