"""Conversion of the user's model to the steps of a program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dglx_dist.errors import ConfigError
from dglx_dist.serverless.program import Program, Step
from dglx_dist.strategies.serverless.layer_kinds import (
    KNOWN_LAYERS,
    EdgeFactor,
    Layer,
    StepsBuilder,
    layer_of,
)
from dglx_dist.strategies.serverless.probe import (
    KNOWN,
    Probe,
    RowFunction,
    equal,
    find_function,
    probe,
    same_gradient,
)

_REMEDY = "write a layer with vertex_stage() (docs/extending.md), or use strategy='data_parallel'"


@dataclass(frozen=True, kw_only=True)
class Joint:
    """The function between one layer and the next, as seen by two probes."""

    layer: Layer
    """The layer before it."""
    where: str
    results: tuple[Tensor, Tensor]
    """The layer's result in evaluation and in training: random leaves."""
    rows: tuple[Tensor, Tensor]
    """What the model computed from it."""


def find_joints(layers: Sequence[Layer], evaluating: Probe, training: Probe) -> list[Joint]:
    """Return the joints in the order of the calls; the last one is at the end of the model.

    Raises:
        ConfigError: the model calls its layers differently in training.
    """
    if _call_order(evaluating) != _call_order(training):
        raise ConfigError(
            "the model calls other layers, or gives them other blocks or edge data, in training than in "
            "evaluation; make it do the same in both, or use strategy='data_parallel'"
        )
    found = []
    for number, call in enumerate(evaluating.calls):
        layer, in_training = layers[call.place], training.calls[number]
        if number + 1 < len(evaluating.calls):
            after = evaluating.calls[number + 1]
            where = f"between the layers {layer.name!r} and {layers[after.place].name!r}"
            rows, between = (after.rows, training.calls[number + 1].rows), after.between
        else:
            where = f"after the last layer, {layer.name!r},"
            rows, between = (evaluating.result, training.result), evaluating.between
        if between:
            where += f" (where {', '.join(between)} is called)"
        results = (call.result, in_training.result)
        found.append(Joint(layer=layer, where=where, results=results, rows=rows))
    return found


def function_of(joint: Joint, outside: Sequence[tuple[str, nn.Parameter]]) -> RowFunction:
    """Return the function that the model applies at a joint.

    Raises:
        ConfigError: it is not a known function, it differs in training, or its gradients are not its own.
    """
    (z, in_training), (rows, rows_in_training) = joint.results, joint.rows
    function = find_function(z, rows, joint.layer.own_function)
    if function is None:
        hint = (
            "leave log_softmax out and use cross_entropy, which includes it"
            if _is_log_softmax(rows)
            else _REMEDY
        )
        raise ConfigError(
            f"{joint.where} the model does something that no stage does; known are: {KNOWN}. Instead, {hint}"
        )
    if not equal(function(in_training), rows_in_training):
        raise ConfigError(
            f"{joint.where} the model does something else in training than in evaluation, as "
            "torch.nn.functional.dropout does; use nn.Dropout for it, remove it, or use "
            "strategy='data_parallel'"
        )
    _check_outside(joint, rows, outside)
    if not same_gradient(z, rows, function, torch.Generator().manual_seed(5)):
        raise ConfigError(
            f"{joint.where} no gradient flows back, or not the gradient of the values, as after detach(); "
            "remove it, or use strategy='data_parallel'"
        )
    return function


def _call_order(seen: Probe) -> list[tuple[int, int | None, str | None]]:
    return [(call.place, call.block, call.edge_column) for call in seen.calls]


def _check_outside(joint: Joint, rows: Tensor, outside: Sequence[tuple[str, nn.Parameter]]) -> None:
    if not outside or not rows.requires_grad:
        return
    parameters = [parameter for _, parameter in outside]
    found = torch.autograd.grad(rows.sum(), parameters, allow_unused=True, retain_graph=True)
    for (name, _), gradient in zip(outside, found, strict=True):
        if gradient is not None:
            raise ConfigError(
                f"{joint.where} the model trains the parameter {name!r}, which belongs to no layer that "
                f"workers know; instead, {_REMEDY}"
            )


def _is_log_softmax(rows: Tensor) -> bool:
    sums = torch.logsumexp(rows.detach(), -1)
    return equal(sums, torch.zeros_like(sums))


_DTYPES = {torch.float32: "float32", torch.float64: "float64"}


@dataclass(frozen=True, kw_only=True)
class Chain:
    """A model as a linear chain of steps."""

    steps: tuple[Step, ...]
    features: int
    """Columns of x."""
    classes: int
    dtype: str
    factors: Mapping[str, EdgeFactor]
    """Edge weights by the names that steps use."""
    inputs_first: tuple[str, ...] = ()
    """Names of the weights of shape (inputs, outputs)."""
    want_in_edges: tuple[str, ...] = ()
    """Names of the layers that raise for a node without in-edges."""

    def program(self, num_train: int) -> Program:
        return Program(
            steps=self.steps,
            features=self.features,
            classes=self.classes,
            num_train=num_train,
            dtype=self.dtype,
        )


def chain_of(model: nn.Module, edge_columns: Mapping[str, tuple[int, ...]] | None = None) -> Chain:
    """Convert ``model``: find its layers, their order, and the functions between them.

    The model is called on a few random rows, with stand-ins for its layers, in both modes; neither it nor
    torch's random state changes. Layers may be nested.

    Args:
        model: Called as ``model(blocks, x)``, one block for each convolution.
        edge_columns: Edge data of the graph, with the shape of one row; a layer may be given one as weights.

    Raises:
        ConfigError: something in it cannot be a step; the message has the place and a remedy.
    """
    _check_parameters(model)
    layers = find_layers(model)
    width = _width_of(model, layers, edge_columns or {})
    evaluating, training = (
        probe(model, layers, width, edge_columns or {}, training=mode) for mode in (False, True)
    )
    for seen in (evaluating, training):
        _check_order(layers, seen)
    outside = _parameters_outside(layers, model)
    joints = find_joints(layers, evaluating, training)
    functions = [function_of(joint, outside) for joint in joints]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    builder = StepsBuilder(names, width)
    for call, joint, function in zip(evaluating.calls, joints, functions, strict=True):
        joint.layer.build(builder, function, call.edge_column)
    classes = builder.finish()
    return Chain(
        classes=classes,
        steps=tuple(builder.steps),
        features=width,
        dtype=_DTYPES[evaluating.x.dtype],
        factors=dict(builder.factors),
        inputs_first=tuple(names[id(weight)] for layer in layers for weight in layer.inputs_first),
        want_in_edges=tuple(layer.name for layer in layers if layer.wants_in_edges),
    )


def find_layers(model: nn.Module) -> list[Layer]:
    """Return the outermost modules that are layers, in the order of the model's modules.

    Raises:
        ConfigError: a convolution, norm or dropout is unknown, or there is no layer.
    """
    layers = _outermost("", model)
    if all(layer.width is None for layer in layers):
        raise ConfigError(
            f"{type(model).__name__} has no layer that workers know; known are {KNOWN_LAYERS}. Any model "
            "trains under strategy='data_parallel'"
        )
    return layers


def _outermost(name: str, module: nn.Module) -> list[Layer]:
    layer = layer_of(name, module)
    if layer is not None:
        return [layer]
    prefix = f"{name}." if name else ""
    return [found for child, inner in module.named_children() for found in _outermost(prefix + child, inner)]


def _check_parameters(model: nn.Module) -> None:
    kinds = {parameter.dtype for parameter in model.parameters()}
    if len(kinds) != 1 or not kinds <= _DTYPES.keys():
        found = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds)) or "none"
        raise ConfigError(
            f"the model's parameters are {found}; strategy 'lambda' trains float32 or float64, all of one "
            "dtype: call model.float()"
        )


def _width_of(model: nn.Module, layers: Sequence[Layer], edge_columns: Mapping[str, tuple[int, ...]]) -> int:
    # The columns of x are those of the layer that is called first, which need not be defined first.
    widths = list(dict.fromkeys(layer.width for layer in layers if layer.width is not None))
    for width in widths:
        try:
            probe(model, layers, width, edge_columns, training=False)
        except ConfigError:
            continue
        return width
    return widths[0]


def _check_order(layers: Sequence[Layer], seen: Probe) -> None:
    called = {call.place for call in seen.calls}
    missing = [layer for at, layer in enumerate(layers) if layer.width is not None and at not in called]
    if missing:
        raise ConfigError(
            f"layer {missing[0].name!r} is never called; remove it from the model, or use "
            "strategy='data_parallel'"
        )
    blocks = [call.block for call in seen.calls if call.block is not None]
    if blocks != sorted(set(blocks)):
        raise ConfigError(
            f"the layers are called with the blocks {blocks}, in this order; call them with blocks[0], "
            "blocks[1] and so on, one each"
        )
    first = seen.calls[0]
    if not equal(seen.x, first.rows):
        done = f" ({', '.join(first.between)} is called before)" if first.between else ""
        raise ConfigError(
            f"the first layer, {layers[first.place].name!r}, does not get the unchanged features{done}; "
            "change them before partitioning, or use strategy='data_parallel'"
        )


def _parameters_outside(layers: Sequence[Layer], model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    inside = {id(parameter) for layer in layers for parameter in layer.module.parameters()}
    return [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and id(parameter) not in inside
    ]
