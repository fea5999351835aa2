"""From the user's model to the steps of a program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from dglx_dist.errors import ConfigError
from dglx_dist.offload.program import Program
from dglx_dist.offload.steps import Step
from dglx_dist.strategies.bounded.between import equal
from dglx_dist.strategies.bounded.edge_factors import EdgeFactor
from dglx_dist.strategies.bounded.joints import function_at, joints_of
from dglx_dist.strategies.bounded.layer_kinds import KNOWN_LAYERS, Layer, layer_of
from dglx_dist.strategies.bounded.probe import Probe, probe
from dglx_dist.strategies.bounded.steps_builder import StepsBuilder

_DTYPES = {torch.float32: "float32", torch.float64: "float64"}


@dataclass(frozen=True, kw_only=True)
class Chain:
    """A model as steps."""

    steps: tuple[Step, ...]
    features: int
    """Columns of x."""
    classes: int
    dtype: str
    factors: Mapping[str, EdgeFactor]
    """What edges weigh, by the names that steps use."""
    inputs_first: tuple[str, ...] = ()
    """Names of the weights of shape (inputs, outputs)."""
    want_in_edges: tuple[str, ...] = ()
    """Names of the layers that raise where a node has no in-edge."""

    def program(self, num_train: int) -> Program:
        """Return the program for ``num_train`` training nodes on all graph servers."""
        return Program(
            steps=self.steps,
            features=self.features,
            classes=self.classes,
            num_train=num_train,
            dtype=self.dtype,
        )


def chain_of(model: nn.Module, edge_columns: Mapping[str, tuple[int, ...]] | None = None) -> Chain:
    """Find the layers of ``model``, their order, and what stands between them.

    The model is called on a few random rows, with stand-ins for its layers, in both modes; neither it nor
    torch's random state changes. Layers may be nested as deep as one likes.

    Args:
        model: Called as ``model(blocks, x)``, one block for each convolution.
        edge_columns: Edge data of the graph, with the shape of one row; a layer may be given one as weights.

    Raises:
        ConfigError: something in it is no step; the message has the place and the way out.
    """
    _check_parameters(model)
    layers = find_layers(model)
    width = _width_of(model, layers, edge_columns or {})
    evaluating, training = (
        probe(model, layers, width, edge_columns or {}, training=mode) for mode in (False, True)
    )
    for seen in (evaluating, training):
        _check_order(layers, seen)
    others = _outside(layers, model)
    joints = joints_of(layers, evaluating, training)
    functions = [function_at(joint, others) for joint in joints]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    builder = StepsBuilder(names, width)
    for call, joint, function in zip(evaluating.calls, joints, functions, strict=True):
        joint.layer.build(builder, function, call.edge_column)
    return Chain(
        classes=builder.rows().width,
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
        ConfigError: a convolution is unknown, there is no layer, or something drops at random.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            raise ConfigError(
                f"{name!r} drops with probability {module.p}: a task that is done again, after a worker "
                "died or because backward computes forward again, would drop other values. Set it to 0 "
                "(`dglx train --dropout 0`), or use strategy='data_parallel'"
            )
    layers = _outermost("", model)
    if not layers:
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
            "kind: call model.float()"
        )


def _width_of(model: nn.Module, layers: Sequence[Layer], edge_columns: Mapping[str, tuple[int, ...]]) -> int:
    """Return the columns of x: those of the layer that is called first, wherever the model makes it."""
    for width in dict.fromkeys(layer.width for layer in layers):
        try:
            probe(model, layers, width, edge_columns, training=False)
        except ConfigError:
            continue
        return width
    return layers[0].width


def _check_order(layers: Sequence[Layer], seen: Probe) -> None:
    """Check that every layer is called, on blocks in order, and the first one with x itself."""
    missing = set(range(len(layers))) - {call.place for call in seen.calls}
    if missing:
        raise ConfigError(
            f"layer {layers[min(missing)].name!r} is never called; take it out of the model, or use "
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
            f"the first layer, {layers[first.place].name!r}, is not given the features themselves{done}; "
            "change them before partitioning, or use strategy='data_parallel'"
        )


def _outside(layers: Sequence[Layer], model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    inside = {id(parameter) for layer in layers for parameter in layer.module.parameters()}
    return [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and id(parameter) not in inside
    ]
