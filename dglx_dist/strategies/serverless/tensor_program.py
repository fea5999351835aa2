"""Tensor programs: what a model computes row by row between graph operations, as data.

A tensor program is a list of ATen operations. It travels to workers as JSON. A worker runs only operations in
an allow-list, and evaluates and unpickles nothing. In shapes, n is the number of node or edge rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, NamedTuple, TypeAlias, final

import torch
from torch import Tensor

from dglx_dist.data.json_fields import Within
from dglx_dist.errors import ConfigError
from dglx_dist.layers.masks import ColumnRange, draw_kept_entries

MAX_OPERATIONS = 4096
"""Maximum number of operations."""
MAX_ARRAYS = 256
"""Maximum number of arrays of a kind."""
MAX_DIMENSIONS = 8
"""Maximum number of dimensions in a row."""
MAX_WIDTH = 1 << 20
"""Maximum number of columns in a dimension."""
MAX_CONSTANT = 1 << 14
"""Maximum number of elements in a constant."""

DROP = "drop"
"""Name for dropout with keyed masks. Its arguments are the rows, the probability and the random stream."""

_NAMES = """
abs acos acosh add addcdiv addcmul addmm alias all amax amin any argmax argmin asin asinh atan atan2 atanh
baddbmm bitwise_and bitwise_not bitwise_or bmm cat ceil celu clamp clamp_max clamp_min clone constant_pad_nd
copy cos cosh cummax cummin cumprod cumsum detach div elu embedding eq erf erfc exp exp2 expand expm1 fill
flip floor fmod full full_like gather ge gelu glu gt hardsigmoid hardswish hardtanh huber_loss index
index_select isfinite isinf isnan le leaky_relu lerp lgamma lift_fresh linalg_vector_norm log log10 log1p
log2 logical_and logical_not logical_or logical_xor log_sigmoid_forward _log_softmax logsumexp lt
masked_fill max maximum mean min minimum mish mm mse_loss mul native_group_norm native_layer_norm ne neg
new_full new_ones new_zeros norm ones ones_like permute pow _prelu_kernel prod reciprocal relu remainder
repeat round rsqrt rsub scalar_tensor scatter scatter_add select sgn sigmoid sign silu sin sinh slice
smooth_l1_loss _softmax softplus softshrink split split_with_sizes sqrt square squeeze stack sub sum t tan
tanh threshold _to_copy topk transpose trunc unbind unsafe_split unsqueeze _unsafe_view var var_mean view
where xlogy zeros zeros_like
"""
ALLOWED = frozenset(_NAMES.split())
"""ATen operations that workers run. Each is a function: it neither writes to arguments nor draws numbers."""
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.float64, torch.int64, torch.int32, torch.bool)
}

_Size: TypeAlias = Annotated[int, Within(0, MAX_WIDTH)]
Shape: TypeAlias = Annotated[tuple[_Size, ...], Within(0, MAX_DIMENSIONS)]


class RowKeys(NamedTuple):
    """Keys for the dropout masks on n rows."""

    seed: int
    epoch: int
    ids: Tensor
    """(n,) int64 global node or edge ids."""


@final
@dataclass(frozen=True, kw_only=True)
class Constant:
    """A small tensor in the model that is no parameter, such as a buffer."""

    dtype: str
    shape: Shape
    numbers: tuple[float, ...] = field(repr=False)


@final
@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation. Its arguments are JSON.

    ``{"value": 3}`` is the program's value 3, ``{"rows": 2}`` is twice the row count, and ``{"dtype":
    "float32"}`` is a dtype.
    """

    name: str
    """ATen name with its overload, such as ``add.Tensor``, or :data:`DROP`."""
    arguments: tuple[Any, ...] = field(hash=False)
    keywords: Mapping[str, Any] = field(hash=False)
    results: tuple[int, ...]
    """Numbers for the values that the operation computes."""


@final
@dataclass(frozen=True, kw_only=True)
class TensorProgram:
    """Operations on rows. Values are numbered in the order inputs, weights, constants and results.

    Raises ConfigError if an operation is not allowed, or reads a value that is not computed before.
    """

    inputs: tuple[Shape, ...]
    """One row's shape in each input."""
    weights: tuple[Shape, ...]
    constants: tuple[Constant, ...]
    operations: tuple[Operation, ...]
    outputs: tuple[int, ...]

    def __post_init__(self) -> None:
        sizes = len(self.operations), len(self.inputs), len(self.weights), len(self.constants)
        if sizes[0] > MAX_OPERATIONS or max(sizes[1:]) > MAX_ARRAYS:
            raise ConfigError(f"a tensor program has {sizes} operations, inputs, weights and constants")
        for constant in self.constants:
            if constant.dtype not in DTYPES or math.prod(constant.shape) != len(constant.numbers):
                raise ConfigError(f"{constant} has another number of elements, or an unknown dtype")

        known_values = set(range(self.first_result))
        for operation in self.operations:
            if operation.name != DROP:
                find_operation(operation.name)
            read_values = set(_list_values([*operation.arguments, *operation.keywords.values()]))
            missing = read_values - known_values
            if missing:
                raise ConfigError(
                    f"operation {operation.name!r} reads the values {sorted(missing)} before they exist"
                )
            known_values.update(operation.results)

        missing = {*self.outputs} - known_values
        if missing:
            raise ConfigError(f"no operation makes the outputs {sorted(missing)}")

    @property
    def first_result(self) -> int:
        return len(self.inputs) + len(self.weights) + len(self.constants)

    @cached_property
    def drops(self) -> bool:
        """Whether an operation is dropout, which needs the rows' ids."""
        return any(operation.name == DROP for operation in self.operations)

    @cached_property
    def _calls(self) -> list[_Call]:
        # Arguments are parsed once, because a task has few rows and runs many times.
        calls = []
        for operation in self.operations:
            function = None if operation.name == DROP else find_operation(operation.name)
            readers = [_make_reader(argument) for argument in operation.arguments]
            keyword_readers = {name: _make_reader(value) for name, value in operation.keywords.items()}
            calls.append(_Call(function, readers, keyword_readers, operation.results))
        return calls

    @cached_property
    def _constants(self) -> list[Tensor]:
        tensors = []
        for constant in self.constants:
            tensor = torch.tensor(constant.numbers, dtype=DTYPES[constant.dtype])
            tensors.append(tensor.reshape(constant.shape))
        return tensors

    def run(
        self, inputs: Sequence[Tensor], weights: Sequence[Tensor], keys: RowKeys | None
    ) -> dict[int, Tensor]:
        """Return all values by number.

        Args:
            inputs: (n, width) rows for each input.
            keys: Row keys, or None to run without dropout.
        """
        num_rows = len(inputs[0]) if inputs else 0
        shapes = zip(inputs, self.inputs, strict=True)
        shaped_inputs = [rows.reshape(num_rows, *shape) for rows, shape in shapes]
        values = dict(enumerate([*shaped_inputs, *weights, *self._constants]))
        for call in self._calls:
            arguments = [read(values, num_rows) for read in call.arguments]
            results: Any
            if call.function is None:
                rows, probability, stream = arguments
                results = drop_rows(rows, probability, stream, keys)
            else:
                keywords = {name: read(values, num_rows) for name, read in call.keywords.items()}
                results = call.function(*arguments, **keywords)

            # Operations such as torch.split return several values.
            if not isinstance(results, tuple | list):
                results = (results,)
            values.update(zip(call.results, results, strict=True))
        return values


def find_operation(name: str) -> Any:
    """Return the function for an operation in the allow-list. Raises ConfigError for any other name."""
    base, _, overload = name.partition(".")
    packet = getattr(torch.ops.aten, base, None) if base in ALLOWED else None
    if packet is None or overload not in packet.overloads():
        raise ConfigError(
            f"operation {name[:80]!r} is not one that workers run, or this version of PyTorch "
            "does not have it; run the same version everywhere"
        )

    function = getattr(packet, overload)
    if function._schema.is_mutable:
        raise ConfigError(f"operation {name!r} writes to its arguments")
    return function


def _list_values(arguments: Any) -> Iterator[int]:
    """Yield the numbers of all values in the arguments' JSON."""
    if isinstance(arguments, Mapping):
        if "value" in arguments:
            yield arguments["value"]
    elif isinstance(arguments, list | tuple):
        for argument in arguments:
            yield from _list_values(argument)


_Reader: TypeAlias = Callable[[Mapping[int, Tensor], int], Any]
"""Returns an argument from the values and the row count."""


class _Call(NamedTuple):
    """An operation that is ready to run."""

    function: Callable[..., Any] | None
    """Torch operation, or None for dropout."""
    arguments: list[_Reader]
    keywords: dict[str, _Reader]
    results: tuple[int, ...]


def _make_reader(argument: Any) -> _Reader:
    """Return the reader for an argument in JSON. See :class:`Operation`."""
    if isinstance(argument, list | tuple):
        readers = [_make_reader(item) for item in argument]
        return lambda values, rows: [read(values, rows) for read in readers]
    if not isinstance(argument, Mapping):
        return lambda _values, _rows: argument
    ((key, content),) = argument.items()
    if key == "value":
        return lambda values, _rows: values[content]
    if key == "rows":
        return lambda _values, rows: content * rows
    # A number that JSON lacks, such as infinity, is written as a text.
    constant = DTYPES[content] if key == "dtype" else float(content)
    return lambda _values, _rows: constant


def drop_rows(rows: Tensor, probability: float, stream: int, keys: RowKeys | None) -> Tensor:
    """Return (n, ...) ``rows`` with entries dropped, with masks as in :mod:`dglx_dist.layers.dropout`."""
    if keys is None:
        return rows.clone()
    width = math.prod(rows.shape[1:])
    columns = ColumnRange(first=0, last=width, width=width)
    is_kept = draw_kept_entries(keys.seed, keys.epoch, stream, keys.ids, (columns,), probability)
    # Kept entries grow, so that the expected sum stays the same. With probability 1 no entry is kept.
    scale = 1 / (1 - probability) if probability < 1 else 0.0
    return rows * is_kept.to(rows.dtype).mul_(scale).reshape(rows.shape)
