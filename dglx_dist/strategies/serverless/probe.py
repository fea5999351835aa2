"""Tracing of a model by forward passes on random rows, with stand-ins for its layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from dglx_dist.errors import ConfigError
from dglx_dist.layers.tracer import MODEL_ERRORS, random_block, restored, stand_ins
from dglx_dist.serverless.json_fields import Json

Merge: TypeAlias = Literal["none", "flatten", "mean"]
"""How the heads of (n, K, H) rows are merged."""


@dataclass(frozen=True)
class Activation:
    """An elementwise function that stages know."""

    name: str
    parameter: str = ""
    """``slope`` or ``alpha``, for those that have one."""
    value: float = 0.0

    def json(self) -> dict[str, Json]:
        """Return it in the format of stages: ``{"name": "leaky_relu", "slope": 0.2}``."""
        return {"name": self.name} | ({self.parameter: self.value} if self.parameter else {})

    def __call__(self, z: Tensor) -> Tensor:
        if self.name == "leaky_relu":
            return functional.leaky_relu(z, self.value)
        return functional.elu(z, self.value) if self.name == "elu" else _PLAIN[self.name](z)


IDENTITY = Activation("identity")
KNOWN = "identity, relu, leaky_relu, elu, tanh, sigmoid, gelu, each alone; heads flattened or averaged"

_PLAIN: Mapping[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda z: z,
    "relu": torch.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "gelu": functional.gelu,
    "gelu_tanh": lambda z: functional.gelu(z, approximate="tanh"),
}
_MERGES: Mapping[Merge, Callable[[Tensor], Tensor]] = {
    "none": lambda z: z,
    "flatten": lambda z: z.flatten(1),
    "mean": lambda z: z.mean(1),
}


@dataclass(frozen=True, kw_only=True)
class RowFunction:
    """after(merge(inside(z)))."""

    inside: Activation = IDENTITY
    merge: Merge = "none"
    after: Activation = IDENTITY

    @property
    def activation(self) -> Activation:
        """The only activation of rows without heads."""
        return self.inside

    def __call__(self, z: Tensor) -> Tensor:
        """Apply to (n, H), or to (n, K, H) if heads are merged."""
        return self.after(_MERGES[self.merge](self.inside(z)))


def find_function(
    z: Tensor, rows: Tensor, own: Callable[[Tensor], Tensor] | None = None
) -> RowFunction | None:
    """Return the known function that computed ``rows`` from ``z``, by values alone; None: there is none.

    Args:
        z: (n, H) or (n, K, H), random numbers of both signs.
        rows: The model's result, of any shape.
        own: What the layer itself applied first, to each head, before the model merged them.
    """
    merges: tuple[Merge, ...] = ("flatten", "mean") if z.dim() == 3 else ("none",)
    with torch.no_grad():
        for merge in merges:
            for function in _candidates(z, rows, merge, own):
                if equal(function(z), rows):
                    return function
    return None


def same_gradient(z: Tensor, rows: Tensor, function: RowFunction, generator: torch.Generator) -> bool:
    """Return True if gradients flow from ``rows`` back to the leaf ``z`` as through ``function``."""
    if not rows.requires_grad:
        return False
    cotangent = torch.randn(rows.shape, dtype=rows.dtype, generator=generator)
    (found,) = torch.autograd.grad(rows, z, cotangent, allow_unused=True, retain_graph=True)
    (wanted,) = torch.autograd.grad(function(z), z, cotangent)
    return found is not None and equal(found, wanted)


def equal(left: Tensor, right: Tensor) -> bool:
    """Return True if two tensors are equal up to rounding."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    scale = torch.clamp(left.abs(), min=1.0)
    return bool(((left - right).abs() <= 16 * torch.finfo(left.dtype).eps * scale).all())


def _candidates(
    z: Tensor, rows: Tensor, merge: Merge, own: Callable[[Tensor], Tensor] | None
) -> Iterator[RowFunction]:
    for inside in _activations(z, rows, _MERGES[merge]):
        yield RowFunction(inside=inside, merge=merge)
    if merge != "mean":
        return
    first = None if own is None else find_function(z, own(z).flatten(1))
    inside = IDENTITY if first is None else first.inside
    merged = _MERGES[merge](inside(z))
    for after in _activations(merged, rows, _MERGES["none"]):
        yield RowFunction(inside=inside, merge=merge, after=after)


def _activations(z: Tensor, rows: Tensor, merge: Callable[[Tensor], Tensor]) -> Iterator[Activation]:
    # All activations; those with a parameter with the value that fits.
    yield from (Activation(name) for name in _PLAIN)
    if merge(z).shape != rows.shape:
        return
    rest = rows - merge(torch.relu(z))
    for name, key, low in (
        ("leaky_relu", "slope", z.clamp(max=0)),
        ("elu", "alpha", torch.expm1(z.clamp(max=0))),
    ):
        basis = merge(low)
        fitted = float((rest * basis).sum() / (basis * basis).sum())
        # The user's value is a short decimal; the fit has rounding errors in its last digits.
        for digits in (2, 4, 7, 16):
            yield Activation(name, key, round(fitted, digits))


NUM_NODES, NUM_EDGES = 12, 40


class Probed(Protocol):
    """A layer that is replaced by a stand-in."""

    name: str
    module: nn.Module
    takes_block: bool
    dropouts: tuple[str, ...]
    """Dropouts inside the module that become steps, by their names in it."""
    width: int | None
    """Columns of its input; None, for a dropout: any."""
    row_shape: tuple[int, ...] | None
    """Shape of one row of its result before ``own_function``; None: that of its input."""
    own_function: Callable[[Tensor], Tensor] | None
    """The activation that the layer applies to its result."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """Call of one layer."""

    place: int
    rows: Tensor
    """(n, F) input."""
    block: int | None
    edge_column: str | None
    """Edge data given as weights."""
    result: Tensor
    """(n, ...) random leaf that stands for the result before ``own_function``."""
    between: tuple[str, ...]
    """Modules called since the layer before, as "LayerNorm 'norm'"."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Trace of one forward pass."""

    x: Tensor
    calls: tuple[Call, ...]
    result: Tensor
    between: tuple[str, ...]
    """Modules called after the last layer."""


def probe(
    model: nn.Module,
    layers: Sequence[Probed],
    width: int,
    edge_columns: Mapping[str, tuple[int, ...]],
    *,
    training: bool,
) -> Probe:
    """Call ``model(blocks, x)``, one block for each layer that takes one; the model does not change.

    Args:
        layers: Replaced by stand-ins that return random rows.
        width: Columns of x.
        edge_columns: Edge data of the blocks, with the shape of one row.
        training: Mode of the model; random rows differ as well.

    Raises:
        ConfigError: the model cannot be called this way, or calls a layer in an unknown way.
    """
    generator = torch.Generator().manual_seed(17 + training)
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    blocks = [probe_block(generator, dtype, edge_columns) for layer in layers if layer.takes_block]
    x = torch.randn(NUM_NODES, width, dtype=dtype, generator=generator)
    recorder = _Recorder(blocks, layers, generator)
    with (
        restored(model, training=training),
        torch.random.fork_rng(devices=[]),
        recorder.layers_replaced(model),
    ):
        try:
            result = model(blocks, x)
        except ConfigError:
            # Of a stand-in: it has the reason.
            raise
        except MODEL_ERRORS as error:
            raise ConfigError(
                f"the model could not be called as model(blocks, x) with {len(blocks)} blocks and x of "
                f"{width} columns: {type(error).__name__}: {error}; make it support this call, or use "
                "strategy='data_parallel'"
            ) from error
    if not isinstance(result, Tensor):
        raise ConfigError(
            f"the model returns {type(result).__name__}; strategy 'lambda' needs one tensor, (nodes, classes)"
        )
    return Probe(x=x, calls=tuple(recorder.calls), result=result, between=recorder.take_modules())


class _Recorder:
    def __init__(self, blocks: Sequence[Any], layers: Sequence[Probed], generator: torch.Generator) -> None:
        self.calls: list[Call] = []
        self._blocks, self._layers, self._generator = blocks, layers, generator
        self._between: list[str] = []

    @contextmanager
    def layers_replaced(self, model: nn.Module) -> Iterator[None]:
        inside = {id(module) for layer in self._layers for module in layer.module.modules()}
        stand_in = {layer.module: self._stand_in(place, layer) for place, layer in enumerate(self._layers)}
        with ExitStack() as stack:
            for name, module in model.named_modules():
                if id(module) not in inside and not any(module.children()):
                    note = partial(self._between.append, f"{type(module).__name__} {name!r}")
                    stack.callback(module.register_forward_pre_hook(lambda *_, note=note: note()).remove)
            stack.enter_context(stand_ins(stand_in))
            yield

    def take_modules(self) -> tuple[str, ...]:
        """Return the modules called since the last call of this method."""
        found = tuple(self._between)
        self._between.clear()
        return found

    def _stand_in(self, place: int, layer: Probed) -> Callable[..., Tensor]:
        def call(*given: Any, **named: Any) -> Tensor:
            # A dropout has no weights, and is a step for each call.
            if layer.width is not None and any(one.place == place for one in self.calls):
                raise ConfigError(
                    f"layer {layer.name!r} is called twice, but its weights can belong to only one step; "
                    "make it two layers, or use strategy='data_parallel'"
                )
            block, rows, rest = self._read(layer, given, named)
            column = self._column(layer, block, rest)
            shape = rows.shape if layer.row_shape is None else (len(rows), *layer.row_shape)
            result = (3 * torch.randn(shape, dtype=rows.dtype, generator=self._generator)).requires_grad_()
            self.calls.append(
                Call(
                    place=place,
                    rows=rows,
                    block=block,
                    edge_column=column,
                    result=result,
                    between=self.take_modules(),
                )
            )
            # A copy, because the model may modify it in place.
            out = result.clone()
            return out if layer.own_function is None else layer.own_function(out)

        return call

    def _read(
        self, layer: Probed, given: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[int | None, Tensor, dict[str, Any]]:
        """Return the index of the block, the rows, and the other arguments."""
        block = None
        if layer.takes_block:
            if not given:
                raise ConfigError(f"layer {layer.name!r} must be called as layer(block, h)")
            block = next((n for n, one in enumerate(self._blocks) if one is given[0]), None)
            if block is None:
                raise ConfigError(
                    f"layer {layer.name!r} is called with {type(given[0]).__name__}, not with one of the "
                    "model's blocks; call it as layer(block, h)"
                )
            given = given[1:]
        rows = given[0] if given else None
        if isinstance(rows, tuple) and len(rows) == 2 and torch.equal(rows[1], rows[0][:NUM_NODES]):
            rows = rows[0]
            if getattr(getattr(layer.module, "feat_drop", None), "p", 0):
                raise ConfigError(
                    f"layer {layer.name!r} is given a pair of rows, and would drop other entries of each; "
                    "call it as layer(block, h), set feat_drop to 0, or use strategy='data_parallel'"
                )
        if not isinstance(rows, Tensor) or rows.dim() != 2 or len(rows) != NUM_NODES:
            kind = tuple(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
            raise ConfigError(
                f"layer {layer.name!r} is given {kind}; it must be (nodes, columns): flatten or average "
                "heads before it, or use strategy='data_parallel'"
            )
        if layer.width is not None and rows.shape[1] != layer.width:
            raise ConfigError(
                f"layer {layer.name!r} is given {rows.shape[1]} columns but takes {layer.width}; make them "
                "equal, or use strategy='data_parallel'"
            )
        others = {str(number): value for number, value in enumerate(given[1:])} | named
        return block, rows, {name: value for name, value in others.items() if value is not None}

    def _column(self, layer: Probed, block: int | None, rest: dict[str, Any]) -> str | None:
        # The only other argument allowed is edge data: the edges' weights.
        if not rest:
            return None
        (name, values), *others = rest.items()
        if not others and block is not None and isinstance(values, Tensor):
            for column, rows in self._blocks[block].edata.items():
                if rows.numel() == values.numel() and torch.equal(rows.flatten(), values.flatten()):
                    return str(column)
        raise ConfigError(
            f"layer {layer.name!r} is given more than a block and rows ({', '.join(rest)}), and argument "
            f"{name!r} is not edge data of its block; leave it out, or use strategy='data_parallel'"
        )


def probe_block(
    generator: torch.Generator, dtype: torch.dtype, edge_columns: Mapping[str, tuple[int, ...]]
) -> Any:
    """Return a random block whose destinations are all its sources, with edge data of these row shapes."""
    block = random_block(NUM_NODES, NUM_NODES, NUM_EDGES, generator)
    for name, shape in edge_columns.items():
        block.edata[name] = torch.rand((block.num_edges(), *shape), dtype=dtype, generator=generator)
    return block
