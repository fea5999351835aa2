"""Tensor programs: what a model computes row by row between operations of the graph, as data.

A tensor program is a list of ATen operations. It travels to workers as JSON. A worker runs only operations
of an allow-list, and evaluates and unpickles nothing. Letters of shapes: n rows of nodes or edges.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, NamedTuple, TypeAlias, final

import torch
from torch import Tensor
from torch.autograd import Function

from dglx_dist.data.json_fields import Within
from dglx_dist.errors import ConfigError
from dglx_dist.layers.masks import ColumnRange, draw_kept_entries

MAX_OPERATIONS, MAX_ARRAYS, MAX_DIMENSIONS, MAX_WIDTH = 4096, 256, 8, 1 << 20
"""Largest number of operations, of arrays of a kind, of dimensions of a row, and of columns."""
MAX_CONSTANT = 1 << 14
"""Largest number of elements of a constant."""

DROP = "drop"
"""Dropout with keyed masks: arguments are the rows, the probability and the stream of draws."""

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
_SAVED_PRODUCTS = ("mm.default", "addmm.default")
"""Products whose results forward tasks send where backward tasks do not compute them again."""
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.float64, torch.int64, torch.int32, torch.bool)
}

_Size: TypeAlias = Annotated[int, Within(0, MAX_WIDTH)]
Shape: TypeAlias = Annotated[tuple[_Size, ...], Within(0, MAX_DIMENSIONS)]


class RowKeys(NamedTuple):
    """Keys of the dropout masks of n rows."""

    seed: int
    epoch: int
    ids: Tensor
    """(n,) int64 global ids of nodes or edges."""


@final
@dataclass(frozen=True, kw_only=True)
class Constant:
    """A small tensor of the model that is no parameter, such as a buffer."""

    dtype: str
    shape: Shape
    numbers: tuple[float, ...] = field(repr=False)


@final
@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation. Its arguments are JSON.

    ``{"value": 3}`` is the value 3 of the program, ``{"rows": 2}`` is twice the number of rows, and
    ``{"dtype": "float32"}`` is a dtype.
    """

    name: str
    """Name of ATen with its overload, such as ``add.Tensor``, or :data:`DROP`."""
    arguments: tuple[Any, ...] = field(hash=False)
    keywords: Mapping[str, Any] = field(hash=False)
    results: tuple[int, ...]
    """Numbers of the values that it makes."""


@final
@dataclass(frozen=True, kw_only=True)
class TensorProgram:
    """Operations on rows. Values are numbered: first inputs, then weights, constants, and results.

    Raises:
        ConfigError: an operation is not allowed, or reads a value that no earlier one makes.
    """

    inputs: tuple[Shape, ...]
    """Shape of one row of each input."""
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
        made = set(range(self.first_result))
        for operation, (_, name) in zip(self.operations, self._steps, strict=True):
            if missing := {*_values_in([*operation.arguments, *operation.keywords.values()])} - made:
                raise ConfigError(f"operation {name!r} reads the values {sorted(missing)} before they exist")
            made.update(operation.results)
        if missing := {*self.outputs} - made:
            raise ConfigError(f"no operation makes the outputs {sorted(missing)}")

    @property
    def first_result(self) -> int:
        return len(self.inputs) + len(self.weights) + len(self.constants)

    @cached_property
    def _steps(self) -> list[tuple[Any, str]]:
        return [(None if op.name == DROP else find_operation(op.name), op.name) for op in self.operations]

    @cached_property
    def _constants(self) -> list[Tensor]:
        return [
            torch.tensor(constant.numbers, dtype=DTYPES[constant.dtype]).reshape(constant.shape)
            for constant in self.constants
        ]

    @cached_property
    def products(self) -> tuple[int, ...]:
        """Results of products of rows and a matrix, which a backward task may get ready-made."""
        with_rows = set(range(len(self.inputs)))
        numbers: list[int] = []
        for operation in self.operations:
            if not with_rows.isdisjoint(_values_in([*operation.arguments, *operation.keywords.values()])):
                with_rows.update(operation.results)
            if operation.name in _SAVED_PRODUCTS and not operation.keywords:
                *bias, left, right = (next(_values_in(argument)) for argument in operation.arguments)
                is_vector = all(self._is_vector(number) for number in bias)
                if left in with_rows and right not in with_rows and is_vector:
                    numbers.append(operation.results[0])
        return tuple(numbers)

    def _is_vector(self, number: int) -> bool:
        first = len(self.inputs)
        return first <= number < first + len(self.weights) and len(self.weights[number - first]) == 1

    def run(
        self,
        inputs: Sequence[Tensor],
        weights: Sequence[Tensor],
        keys: RowKeys | None,
        saved: Sequence[Tensor] | None = None,
    ) -> dict[int, Tensor]:
        """Return all values by number.

        Args:
            inputs: (n, width) rows of each input.
            keys: None leaves out dropout.
            saved: (n, width) results of :attr:`products`. They are not computed again then.
        """
        rows = len(inputs[0]) if inputs else 0
        shaped = [array.reshape(rows, *shape) for array, shape in zip(inputs, self.inputs, strict=True)]
        values = dict(enumerate([*shaped, *weights, *self._constants]))
        known = iter(saved or ())
        for operation, (function, name) in zip(self.operations, self._steps, strict=True):
            arguments = [_resolve(argument, values, rows) for argument in operation.arguments]
            keywords = {key: _resolve(value, values, rows) for key, value in operation.keywords.items()}
            if name == DROP:
                results = drop_rows(arguments[0], arguments[1], arguments[2], keys)
            elif saved is not None and operation.results[0] in self.products:
                results = _KnownProduct.apply(next(known), *arguments)  # type: ignore[no-untyped-call]
            else:
                results = function(*arguments, **keywords)
            made = results if isinstance(results, tuple | list) else (results,)
            values |= zip(operation.results, made, strict=True)
        return values

    def shapes_of(self, dtypes: Sequence[str], dtype: str) -> tuple[list[tuple[int, ...]], list[int]]:
        """Return the shapes of a row of the outputs, and the widths of the products, of zeros.

        Args:
            dtypes: Names of the dtypes of the inputs.
            dtype: Name of the dtype of the weights.

        Raises:
            ConfigError: the operations do not fit the inputs.
        """
        rows = 2
        inputs = [
            torch.zeros(rows, math.prod(shape), dtype=DTYPES[name])
            for shape, name in zip(self.inputs, dtypes, strict=True)
        ]
        weights = [torch.zeros(shape, dtype=DTYPES[dtype]) for shape in self.weights]
        try:
            values = self.run(inputs, weights, None)
        except (RuntimeError, TypeError, ValueError, IndexError, KeyError) as error:
            raise ConfigError(f"a tensor program does not fit its inputs: {error}") from error
        outputs = [tuple(values[number].shape) for number in self.outputs]
        if any(not shape or shape[0] != rows for shape in outputs):
            raise ConfigError(f"a tensor program makes the shapes {outputs} from {rows} rows")
        return [shape[1:] for shape in outputs], [values[n].numel() // rows for n in self.products]


def find_operation(name: str) -> Any:
    """Return the function of an operation of the allow-list. ConfigError for any other name."""
    base, _, overload = name.partition(".")
    packet = getattr(torch.ops.aten, base, None) if base in ALLOWED else None
    if packet is None or overload not in packet.overloads():
        raise ConfigError(
            f"operation {name[:80]!r} is not one that workers run, or this version of PyTorch does not have "
            "it; run the same version everywhere"
        )
    function = getattr(packet, overload)
    if function._schema.is_mutable:
        raise ConfigError(f"operation {name!r} writes to its arguments")
    return function


def _values_in(arguments: Any) -> Iterator[int]:
    if isinstance(arguments, Mapping):
        if "value" in arguments:
            yield arguments["value"]
    elif isinstance(arguments, list | tuple):
        for argument in arguments:
            yield from _values_in(argument)


def _resolve(argument: Any, values: Mapping[int, Tensor], rows: int) -> Any:
    if isinstance(argument, list | tuple):
        return [_resolve(item, values, rows) for item in argument]
    if not isinstance(argument, Mapping):
        return argument
    ((kind, content),) = argument.items()
    if kind == "value":
        return values[content]
    if kind == "rows":
        return content * rows
    return DTYPES[content] if kind == "dtype" else float(content)


def drop_rows(rows: Tensor, probability: float, stream: int, keys: RowKeys | None) -> Tensor:
    """Return (n, ...) ``rows`` with entries dropped. Masks are those of :mod:`dglx_dist.layers.dropout`."""
    if keys is None:
        return rows.clone()
    width = math.prod(rows.shape[1:])
    columns = ColumnRange(first=0, last=width, width=width)
    kept = draw_kept_entries(keys.seed, keys.epoch, stream, keys.ids, (columns,), probability)
    scale = 1 / (1 - probability) if probability < 1 else 0.0
    return rows * kept.to(rows.dtype).mul_(scale).reshape(rows.shape)


class _KnownProduct(Function):
    """``mm(x, w)`` or ``addmm(bias, x, w)`` whose result is known, so that only its gradient is computed."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, *arguments: Tensor) -> Tensor:
        *bias, left, right = arguments
        ctx.save_for_backward(left, right)
        ctx.bias = bool(bias)
        return result.reshape(len(left), right.shape[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        left, right = ctx.saved_tensors
        of_left = gradient.mm(right.t()) if ctx.needs_input_grad[-2] else None
        bias = (gradient.sum(0),) if ctx.bias else ()
        # As torch computes it for a transposed matrix, to the bit.
        is_transposed = right.stride() == (1, len(right))
        of_right = gradient.t().mm(left).t() if is_transposed else left.t().mm(gradient)
        return None, *bias, of_left, of_right
