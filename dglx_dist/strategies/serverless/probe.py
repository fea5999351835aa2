"""One forward pass of a model on a few random rows, with stand-ins for its layers: what each is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import dgl
import torch
from torch import Tensor, nn
from torch.nn import functional

from dglx_dist.errors import ConfigError
from dglx_dist.serverless.json_fields import Json
from dglx_dist.serverless.stages.base import Config

Merge: TypeAlias = Literal["none", "flatten", "mean"]
"""What becomes of the heads of (n, K, H) rows."""


@dataclass(frozen=True)
class Activation:
    """A function of single numbers that stages know."""

    name: str
    parameter: str = ""
    """``slope`` or ``alpha``, of those that have one."""
    value: float = 0.0

    def json(self) -> dict[str, Json]:
        """Return it as stages read it: ``{"name": "leaky_relu", "slope": 0.2}``."""
        return {"name": self.name} | ({self.parameter: self.value} if self.parameter else {})

    def __call__(self, z: Tensor) -> Tensor:
        """Apply it."""
        if self.name == "leaky_relu":
            return functional.leaky_relu(z, self.value)
        return functional.elu(z, self.value) if self.name == "elu" else _PLAIN[self.name](z)


IDENTITY = Activation("identity")
KNOWN = "identity, relu, leaky_relu, elu, tanh, sigmoid, gelu, each alone; heads flattened or averaged"
"""For messages."""

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
        """The only activation, of rows without heads."""
        return self.inside

    def __call__(self, z: Tensor) -> Tensor:
        """Apply it to (n, H), or to (n, K, H) where heads are merged."""
        return self.after(_MERGES[self.merge](self.inside(z)))


def find_function(
    z: Tensor, rows: Tensor, own: Callable[[Tensor], Tensor] | None = None
) -> RowFunction | None:
    """Return the function that made ``rows`` of ``z``, by values alone; None: it is none of the known ones.

    Args:
        z: (n, H) or (n, K, H), random numbers of both signs.
        rows: What the model made of them; of any shape.
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
    """Whether gradients flow from ``rows`` back to the leaf ``z`` as through ``function``."""
    if not rows.requires_grad:
        return False
    cotangent = torch.randn(rows.shape, dtype=rows.dtype, generator=generator)
    (found,) = torch.autograd.grad(rows, z, cotangent, allow_unused=True, retain_graph=True)
    (wanted,) = torch.autograd.grad(function(z), z, cotangent)
    return found is not None and equal(found, wanted)


def equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same function's values, up to rounding."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    scale = torch.clamp(one.abs(), min=1.0)
    return bool(((one - other).abs() <= 16 * torch.finfo(one.dtype).eps * scale).all())


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
    """Yield all activations, those with a number with the one that fits."""
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
        # What the user wrote is a short decimal; the fit has rounding in its last digits.
        for digits in (2, 4, 7, 16):
            yield Activation(name, key, round(fitted, digits))


Around: TypeAlias = Literal["sum", "mean", "left", "both"]
"""How rows of in-neighbours are summed: plainly, divided by the node's in-degree, by the sources'
out-degrees, or by the square roots of both, as ``norm`` of ``dgl.nn.GraphConv``. Degrees of 0 count as 1."""


@dataclass(frozen=True, kw_only=True)
class DeclaredStage:
    """One layer as a sum over in-edges, done by graph servers, and a stage, done by workers."""

    stage: str
    """Name in the registry of stages: see ``dglx_dist.serverless.stages.base.register_stage``."""
    config: Config
    """What the stage is made from; JSON values."""
    weights: tuple[str, ...]
    """Names of the module's parameters, in the order in which the stage declares its weights."""
    around: Around | None = "sum"
    """The stage's first input is this sum; None: the layer looks at no neighbour."""
    own: bool = False
    """Whether the node's own row is the stage's next input; without ``around`` it is the only one."""
    depends_on_the_graph: bool = False
    """Whether the module looks into the distributed graph, so that it cannot be compared with its stage on a
    few random rows."""
    takes_activation: bool = False
    """Whether a function of the model's behind the layer may be put into ``config`` as ``activation``."""


@runtime_checkable
class Declares(Protocol):
    """A module, called as ``layer(block, h)``, whose work is that of a stage."""

    def vertex_stage(self) -> DeclaredStage:
        """Return the stage; (num_dst, width) must come out of both, with the same gradients."""
        ...


NUM_NODES, NUM_EDGES = 12, 40
_OF_THE_MODEL = (
    RuntimeError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    AssertionError,
    dgl.DGLError,
)
"""What a model raises that was not written to be called so."""


class Probed(Protocol):
    """A layer for which a stand-in is called."""

    name: str
    module: nn.Module
    takes_block: bool

    @property
    def width(self) -> int:
        """Input columns."""
        ...

    own_function: Callable[[Tensor], Tensor] | None
    """What the layer applies to its result at the end."""

    def row_shape(self, width: int) -> tuple[int, ...]:
        """Shape of one row of its result before ``own_function``, from ``width`` input columns."""
        ...


@dataclass(frozen=True, kw_only=True)
class Call:
    """One layer's call."""

    place: int
    """Of the layer among those probed."""
    rows: Tensor
    """(n, F) what it was given."""
    block: int | None
    """Which of the blocks."""
    edge_column: str | None
    """Edge data it was given as weights."""
    result: Tensor
    """(n, ...) random leaf that stood for its result, before ``own_function``."""
    between: tuple[str, ...]
    """Modules that were called since the layer before, as "LayerNorm 'norm'"."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What was seen."""

    x: Tensor
    calls: tuple[Call, ...]
    result: Tensor
    between: tuple[str, ...]
    """Modules that were called after the last layer."""


def probe(
    model: nn.Module,
    layers: Sequence[Probed],
    width: int,
    edge_columns: Mapping[str, tuple[int, ...]],
    *,
    training: bool,
) -> Probe:
    """Call ``model(blocks, x)``, one block for each layer that takes one; nothing of the model changes.

    Args:
        model: The user's module.
        layers: For which stand-ins are called, that return random rows.
        width: Columns of x.
        edge_columns: Edge data that blocks have, with the shape of one row.
        training: In which mode the model is; the draws differ as well.

    Raises:
        ConfigError: the model cannot be called so, or calls a layer in a way that nobody knows.
    """
    generator = torch.Generator().manual_seed(17 + training)
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    blocks = [probe_block(generator, dtype, edge_columns) for layer in layers if layer.takes_block]
    x = torch.randn(NUM_NODES, width, dtype=dtype, generator=generator)
    watch = _Recorder(blocks, layers, generator)
    with _restored(model, training), torch.random.fork_rng(devices=[]), watch.layers_replaced(model):
        try:
            result = model(blocks, x)
        except _OF_THE_MODEL as error:
            raise ConfigError(
                f"the model could not be called as model(blocks, x) with {len(blocks)} blocks and x of "
                f"{width} columns: {type(error).__name__}: {error}; write it so, or use "
                "strategy='data_parallel'"
            ) from error
    if not isinstance(result, Tensor):
        raise ConfigError(
            f"the model returns {type(result).__name__}; strategy 'lambda' needs one tensor, (nodes, classes)"
        )
    return Probe(x=x, calls=tuple(watch.calls), result=result, between=watch.take_modules())


class _Recorder:
    """Stands in for the layers and writes down what happens."""

    def __init__(self, blocks: Sequence[Any], layers: Sequence[Probed], generator: torch.Generator) -> None:
        self.calls: list[Call] = []
        self._blocks, self._layers, self._generator = blocks, layers, generator
        self._between: list[str] = []

    @contextmanager
    def layers_replaced(self, model: nn.Module) -> Iterator[None]:
        """Replace the layers' forward meanwhile."""
        kept = [(layer.module, layer.module.__dict__.get("forward")) for layer in self._layers]
        inside = {id(module) for layer in self._layers for module in layer.module.modules()}
        hooks = [
            module.register_forward_pre_hook(self._name_recorder(name, module))
            for name, module in model.named_modules()
            if id(module) not in inside and not any(module.children())
        ]
        try:
            for place, layer in enumerate(self._layers):
                layer.module.__dict__["forward"] = self._stand_in(place, layer)
            yield
        finally:
            for module, forward in kept:
                del module.__dict__["forward"]
                if forward is not None:
                    module.__dict__["forward"] = forward
            for hook in hooks:
                hook.remove()

    def take_modules(self) -> tuple[str, ...]:
        """Return the modules called since this was last asked."""
        found, self._between = tuple(self._between), []
        return found

    def _name_recorder(self, name: str, module: nn.Module) -> Callable[[nn.Module, Any], None]:
        def note(_module: nn.Module, _given: Any) -> None:
            self._between.append(f"{type(module).__name__} {name!r}")

        return note

    def _stand_in(self, place: int, layer: Probed) -> Callable[..., Tensor]:
        def call(*given: Any, **named: Any) -> Tensor:
            if any(one.place == place for one in self.calls):
                raise ConfigError(
                    f"layer {layer.name!r} is called twice; its weights can belong to one step only, so make "
                    "it two layers, or use strategy='data_parallel'"
                )
            block, rows, rest = self._read(layer, given, named)
            column = self._column(layer, block, rest)
            shape = (len(rows), *layer.row_shape(rows.shape[1]))
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
            # A copy: what the model does in place must not change the leaf.
            out = result.clone()
            return out if layer.own_function is None else layer.own_function(out)

        return call

    def _read(
        self, layer: Probed, given: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[int | None, Tensor, dict[str, Any]]:
        """Return the block's number, the rows, and what else there is."""
        block = None
        if layer.takes_block:
            if not given:
                raise ConfigError(f"layer {layer.name!r} must be called as layer(block, h)")
            block = next((n for n, one in enumerate(self._blocks) if one is given[0]), None)
            if block is None:
                raise ConfigError(
                    f"layer {layer.name!r} is called with {type(given[0]).__name__}, not with one of the "
                    "blocks that the model is given; call it as layer(block, h)"
                )
            given = given[1:]
        rows = given[0] if given else None
        if isinstance(rows, tuple) and len(rows) == 2 and torch.equal(rows[1], rows[0][:NUM_NODES]):
            rows = rows[0]
        if not isinstance(rows, Tensor) or rows.dim() != 2 or len(rows) != NUM_NODES:
            kind = tuple(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
            raise ConfigError(f"layer {layer.name!r} is given {kind}; it must be (nodes, columns)")
        if rows.shape[1] != layer.width:
            raise ConfigError(
                f"layer {layer.name!r} is given {rows.shape[1]} columns and takes {layer.width}; make it "
                "with as many, or use strategy='data_parallel'"
            )
        others = {str(number): value for number, value in enumerate(given[1:])} | named
        return block, rows, {name: value for name, value in others.items() if value is not None}

    def _column(self, layer: Probed, block: int | None, rest: dict[str, Any]) -> str | None:
        """Return the edge data that is the only other argument, the edges' weights."""
        if not rest:
            return None
        (name, values), *others = rest.items()
        if not others and block is not None and isinstance(values, Tensor):
            for column, rows in self._blocks[block].edata.items():
                if rows.numel() == values.numel() and torch.equal(rows.flatten(), values.flatten()):
                    return str(column)
        raise ConfigError(
            f"layer {layer.name!r} is given more than a block and rows ({', '.join(rest)}), and argument "
            f"{name!r} is no edge data of its block; leave it out, or use strategy='data_parallel'"
        )


def probe_block(
    generator: torch.Generator, dtype: torch.dtype, edge_columns: Mapping[str, tuple[int, ...]]
) -> Any:
    """Return a random block whose destinations are all its sources, in the same order.

    Args:
        generator: Of the draws.
        dtype: Of the edge data.
        edge_columns: Edge data that it has, with the shape of one row.
    """
    # Every node has an in-edge, as some convolutions want.
    loops = torch.arange(NUM_NODES)
    ends = torch.randint(NUM_NODES, (2, NUM_EDGES), generator=generator)
    block = dgl.create_block((torch.cat([loops, ends[0]]), torch.cat([loops, ends[1]])), NUM_NODES, NUM_NODES)
    block.srcdata[dgl.NID] = block.dstdata[dgl.NID] = loops
    for name, shape in edge_columns.items():
        block.edata[name] = torch.rand((block.num_edges(), *shape), dtype=dtype, generator=generator)
    return block


@contextmanager
def _restored(model: nn.Module, training: bool) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    norms = [module for module in modes if isinstance(module, nn.modules.batchnorm._NormBase)]
    means = [(buffer, buffer.clone()) for norm in norms for buffer in norm.buffers()]
    model.train(training)
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        for buffer, before in means:
            buffer.copy_(before)
