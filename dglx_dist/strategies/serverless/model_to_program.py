"""Conversion of the user's model to a program, by forward passes with stand-ins for its layers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dglx_dist.errors import ConfigError
from dglx_dist.layers.tracer import MODEL_ERRORS, preserve_state, random_block, replace_forwards
from dglx_dist.serverless.program import Program
from dglx_dist.strategies.serverless.layer_kinds import (
    KNOWN,
    KNOWN_LAYERS,
    NUM_EDGES,
    NUM_NODES,
    EdgeFactor,
    Layer,
    RowFunction,
    StepsBuilder,
    equal,
    find_function,
    layer_of,
    same_gradient,
)

_REMEDY = "write a layer with vertex_stage() (docs/guides/extending.md), or use strategy='data_parallel'"
_DTYPES = {torch.float32: "float32", torch.float64: "float64"}


@dataclass(frozen=True, kw_only=True)
class Chain:
    """A model as a linear chain of steps."""

    program: Program
    """Program for one training node."""
    factors: Mapping[str, EdgeFactor]
    """Edge weights by the names that steps use."""
    want_in_edges: tuple[str, ...]
    """Names of the layers that raise for a node without in-edges."""


def chain_of(model: nn.Module, edge_columns: Mapping[str, tuple[int, ...]] | None = None) -> Chain:
    """Convert ``model``: find its layers, their order, and the functions between them.

    The model is called on a few random rows in both modes, with stand-ins for its layers. Neither it nor
    torch's random state changes. Layers may be nested.

    Args:
        model: Called as ``model(blocks, x)``, with one block for each convolution.
        edge_columns: Edge data of the graph, with the shape of one row. A layer may take one as weights.

    Raises:
        ConfigError: a part of the model cannot be a step. The message names it and a remedy.
    """
    _check_parameters(model)
    layers = find_layers(model)
    trace = partial(_Trace, model, layers, edge_columns or {})
    width = _width_of(layers, trace)
    evaluating, training = (trace(width, training=mode) for mode in (False, True))
    for seen in (evaluating, training):
        _check_order(layers, seen)
    if evaluating.order != training.order:
        raise ConfigError(
            "the model calls other layers, or gives them other blocks or edge data, in training than in "
            "evaluation; make it do the same in both, or use strategy='data_parallel'"
        )
    inside = {id(parameter) for layer in layers for parameter in layer.module.parameters()}
    outside = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and id(parameter) not in inside
    }
    functions = [
        _function_of(evaluating.where(number), call, training.calls[number], outside)
        for number, call in enumerate(evaluating.calls)
    ]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    builder = StepsBuilder(names, width)
    for call, function in zip(evaluating.calls, functions, strict=True):
        call.layer.build(builder, function, call.edge_column)
    classes, dtype = builder.finish(), _DTYPES[evaluating.x.dtype]
    return Chain(
        program=Program(
            steps=tuple(builder.steps), features=width, classes=classes, num_train=1, dtype=dtype
        ),
        factors=builder.factors,
        want_in_edges=tuple(layer.name for layer in layers if layer.wants_in_edges),
    )


def find_layers(model: nn.Module) -> list[Layer]:
    """Return the outermost modules that are layers.

    Raises:
        ConfigError: a layer is unknown, or there is none.
    """
    layers, inside = list[Layer](), set[nn.Module]()
    for name, module in model.named_modules():
        if module not in inside and (layer := layer_of(name, module)) is not None:
            layers.append(layer)
            inside.update(module.modules())
    if all(layer.width is None for layer in layers):
        raise ConfigError(
            f"{type(model).__name__} has no layer that workers know; known are {KNOWN_LAYERS}. Any model "
            "trains under strategy='data_parallel'"
        )
    return layers


def _check_parameters(model: nn.Module) -> None:
    kinds = {parameter.dtype for parameter in model.parameters()}
    if len(kinds) != 1 or not kinds <= _DTYPES.keys():
        dtypes = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds)) or "none"
        raise ConfigError(
            f"the model's parameters are {dtypes}; strategy 'lambda' trains float32 or float64, all of one "
            "dtype: call model.float()"
        )
    device = next(model.parameters()).device
    if device.type != "cpu":
        raise ConfigError(
            f"the model is on {device}, but graph servers and workers of strategy 'lambda' compute on CPUs; "
            "leave model.to(device) out, or take device='cpu' in dx.init (dglx train --device cpu)"
        )


@dataclass(kw_only=True)
class _LayerCall:
    layer: Layer
    rows: Tensor
    """(n, F) input."""
    block: int | None
    edge_column: str | None
    """Edge data given as weights."""
    result: Tensor
    """(n, ...) random leaf that stands for the result before ``own_function``."""
    then: Tensor
    """Rows of the next call, or the model's result, which the model computes from ``result``."""
    between: Sequence[str] = ()
    """Modules that are called after it, as "GroupNorm 'norm'"."""


class _Trace:
    """Calls ``model(blocks, x)`` with one block for each layer that takes one. The model does not change.

    Stand-ins for the layers return random rows, which differ by mode.

    Raises:
        ConfigError: a call is not supported.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        edge_columns: Mapping[str, tuple[int, ...]],
        width: int,
        *,
        training: bool,
    ) -> None:
        self.calls: list[_LayerCall] = []
        self.before: Sequence[str] = ()
        """Modules called before the first layer."""
        self._called: list[str] = []
        self._generator = torch.Generator().manual_seed(17 + training)
        dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        self._blocks = [self._block(dtype, edge_columns) for layer in layers if layer.takes_block]
        self.x = torch.randn(NUM_NODES, width, dtype=dtype, generator=self._generator)
        with (
            preserve_state(model, training=training),
            torch.random.fork_rng(devices=[]),
            self._replace_layers(model, layers),
        ):
            try:
                result = model(self._blocks, self.x)
            except ConfigError:
                # A stand-in raised it, with the reason.
                raise
            except MODEL_ERRORS as error:
                raise ConfigError(
                    f"the model could not be called as model(blocks, x) with {len(self._blocks)} blocks and "
                    f"x of {width} columns: {type(error).__name__}: {error}; make it support this call, or "
                    "use strategy='data_parallel'"
                ) from error
        if not isinstance(result, Tensor):
            raise ConfigError(
                f"the model returns {type(result).__name__}; strategy 'lambda' needs one tensor, (nodes, "
                "classes)"
            )
        self._end_call(result)

    @property
    def order(self) -> list[object]:
        return [(call.layer, call.block, call.edge_column) for call in self.calls]

    def where(self, number: int) -> str:
        names, between = [repr(call.layer.name) for call in self.calls], self.calls[number].between
        where = f"after the last layer, {names[-1]},"
        if number + 1 < len(names):
            where = f"between the layers {names[number]} and {names[number + 1]}"
        return where + (f" (where {', '.join(between)} is called)" if between else "")

    def _block(self, dtype: torch.dtype, edge_columns: Mapping[str, tuple[int, ...]]) -> Any:
        # All sources are destinations.
        block = random_block(NUM_NODES, NUM_NODES, NUM_EDGES, self._generator)
        for name, shape in edge_columns.items():
            rows = torch.rand((block.num_edges(), *shape), dtype=dtype, generator=self._generator)
            block.edata[name] = rows
        return block

    @contextmanager
    def _replace_layers(self, model: nn.Module, layers: Sequence[Layer]) -> Iterator[None]:
        inside = {id(module) for layer in layers for module in layer.module.modules()}
        with ExitStack() as stack:
            for name, module in model.named_modules():
                if id(module) not in inside and not any(module.children()):
                    note = partial(self._called.append, f"{type(module).__name__} {name!r}")
                    stack.callback(module.register_forward_pre_hook(lambda *_, note=note: note()).remove)
            stack.enter_context(replace_forwards({layer.module: self._stand_in(layer) for layer in layers}))
            yield

    def _end_call(self, then: Tensor) -> None:
        called, self._called[:] = tuple(self._called), []
        if self.calls:
            self.calls[-1].then, self.calls[-1].between = then, called
        else:
            self.before = called

    def _stand_in(self, layer: Layer) -> Callable[..., Tensor]:
        def call(*positional: Any, **keywords: Any) -> Tensor:
            # A dropout has no weights, so each call is a step.
            if layer.width is not None and any(earlier.layer is layer for earlier in self.calls):
                raise ConfigError(
                    f"layer {layer.name!r} is called twice, but its weights can belong to only one step; "
                    "make it two layers, or use strategy='data_parallel'"
                )
            block = None
            if layer.takes_block:
                block, positional = self._block_of(layer, positional), positional[1:]
            own, *other_positional = positional or (None,)
            rows = _rows_of(layer, own)
            other_arguments = {str(at): value for at, value in enumerate(other_positional)} | keywords
            set_arguments = {name: value for name, value in other_arguments.items() if value is not None}
            column = self._column(layer, block, set_arguments)
            shape = rows.shape if layer.row_shape is None else (len(rows), *layer.row_shape)
            result = (3 * torch.randn(shape, dtype=rows.dtype, generator=self._generator)).requires_grad_()
            self._end_call(rows)
            self.calls.append(
                _LayerCall(
                    layer=layer, rows=rows, block=block, edge_column=column, result=result, then=result
                )
            )
            # A copy, because the model may modify it in place.
            out = result.clone()
            return out if layer.own_function is None else layer.own_function(out)

        return call

    def _block_of(self, layer: Layer, arguments: tuple[Any, ...]) -> int:
        for number, block in enumerate(self._blocks):
            if arguments and block is arguments[0]:
                return number
        raise ConfigError(
            f"layer {layer.name!r} is called with "
            f"{type(arguments[0]).__name__ if arguments else 'nothing'}, not with one of the model's "
            "blocks; call it as layer(block, h)"
        )

    def _column(self, layer: Layer, block: int | None, arguments: Mapping[str, Any]) -> str | None:
        # The only other argument allowed is edge data: the edges' weights.
        if not arguments:
            return None
        (name, values), *other_arguments = arguments.items()
        if not other_arguments and block is not None and isinstance(values, Tensor):
            for column, rows in self._blocks[block].edata.items():
                if rows.numel() == values.numel() and torch.equal(rows.flatten(), values.flatten()):
                    return str(column)
        raise ConfigError(
            f"layer {layer.name!r} is given more than a block and rows ({', '.join(arguments)}), and "
            f"argument {name!r} is not edge data of its block; leave it out, or use strategy='data_parallel'"
        )


def _rows_of(layer: Layer, rows: Any) -> Tensor:
    if isinstance(rows, tuple) and len(rows) == 2 and torch.equal(rows[1], rows[0][:NUM_NODES]):
        rows = rows[0]
        if getattr(getattr(layer.module, "feat_drop", None), "p", 0):
            raise ConfigError(
                f"layer {layer.name!r} is given a pair of rows, and would drop other entries of each; call "
                "it as layer(block, h), set feat_drop to 0, or use strategy='data_parallel'"
            )
    if not isinstance(rows, Tensor) or rows.dim() != 2 or len(rows) != NUM_NODES:
        kind = tuple(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
        raise ConfigError(
            f"layer {layer.name!r} is given {kind}; it must be (nodes, columns): flatten or average heads "
            "before it, or use strategy='data_parallel'"
        )
    if layer.width is not None and rows.shape[1] != layer.width:
        raise ConfigError(
            f"layer {layer.name!r} is given {rows.shape[1]} columns but takes {layer.width}; make them "
            "equal, or use strategy='data_parallel'"
        )
    return rows


def _width_of(layers: Sequence[Layer], trace: Callable[..., _Trace]) -> int:
    # x has as many columns as the layer that is called first, which need not be defined first.
    widths = list(dict.fromkeys(layer.width for layer in layers if layer.width is not None))
    for width in widths:
        try:
            trace(width, training=False)
        except ConfigError:
            continue
        return width
    return widths[0]


def _check_order(layers: Sequence[Layer], seen: _Trace) -> None:
    called = [call.layer for call in seen.calls]
    missing = [layer.name for layer in layers if layer.width is not None and layer not in called]
    if missing:
        raise ConfigError(
            f"layer {missing[0]!r} is never called; remove it from the model, or use strategy='data_parallel'"
        )
    blocks = [call.block for call in seen.calls if call.block is not None]
    if blocks != sorted(set(blocks)):
        raise ConfigError(
            f"the layers are called with the blocks {blocks}, in this order; call them with blocks[0], "
            "blocks[1] and so on, one each"
        )
    if not equal(seen.x, seen.calls[0].rows):
        done = f" ({', '.join(seen.before)} is called before)" if seen.before else ""
        raise ConfigError(
            f"the first layer, {called[0].name!r}, does not get the unchanged features{done}; change them "
            "before partitioning, or use strategy='data_parallel'"
        )


def _function_of(
    where: str, call: _LayerCall, in_training: _LayerCall, outside: Mapping[str, nn.Parameter]
) -> RowFunction:
    function = find_function(call.result, call.then, call.layer.own_function)
    if function is None:
        sums = torch.logsumexp(call.then.detach(), -1)
        is_log_softmax = equal(sums, torch.zeros_like(sums))
        hint = "leave log_softmax out and use cross_entropy, which includes it" if is_log_softmax else _REMEDY
        raise ConfigError(
            f"{where} the model does something that no stage does; known are: {KNOWN}. Instead, {hint}"
        )
    if not equal(function(in_training.result), in_training.then):
        raise ConfigError(
            f"{where} the model does something else in training than in evaluation, as "
            "torch.nn.functional.dropout does; use nn.Dropout for it, remove it, or use "
            "strategy='data_parallel'"
        )
    if outside and call.then.requires_grad:
        gradients = torch.autograd.grad(
            call.then.sum(), [*outside.values()], allow_unused=True, retain_graph=True
        )
        for name, gradient in zip(outside, gradients, strict=True):
            if gradient is not None:
                raise ConfigError(
                    f"{where} the model trains the parameter {name!r}, which belongs to no layer that "
                    f"workers know; instead, {_REMEDY}"
                )
    if not same_gradient(call.result, call.then, function, torch.Generator().manual_seed(5)):
        raise ConfigError(
            f"{where} no gradient flows back, or not the gradient of the values, as after detach(); remove "
            "it, or use strategy='data_parallel'"
        )
    return function
