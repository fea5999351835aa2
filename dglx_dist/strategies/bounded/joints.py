"""Where one layer's result becomes the next one's input: what the model does there, or why it is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dglx_dist.errors import ConfigError
from dglx_dist.strategies.bounded.between import KNOWN, RowFunction, equal, find_function, same_gradient
from dglx_dist.strategies.bounded.layer_kinds import Layer
from dglx_dist.strategies.bounded.probe import Probe

_WAY_OUT = "write a layer with vertex_stage() (docs/extending.md), or use strategy='data_parallel'"


@dataclass(frozen=True, kw_only=True)
class Joint:
    """One joint, as two probes saw it."""

    layer: Layer
    """Before it."""
    where: str
    """For messages."""
    given: tuple[Tensor, Tensor]
    """The layer's result in evaluation and in training: random leaves."""
    rows: tuple[Tensor, Tensor]
    """What the model made of it."""


def joints_of(layers: Sequence[Layer], evaluating: Probe, training: Probe) -> list[Joint]:
    """Return the joints in the order of the calls; the last one is at the end of the model.

    Raises:
        ConfigError: in training the layers are called otherwise.
    """
    if _course(evaluating) != _course(training):
        raise ConfigError(
            "the model calls other layers, or gives them other blocks or edge data, in training than in "
            "evaluation; let it do the same in both, or use strategy='data_parallel'"
        )
    found = []
    for number, call in enumerate(evaluating.calls):
        layer, other = layers[call.place], training.calls[number]
        if number + 1 < len(evaluating.calls):
            after = evaluating.calls[number + 1]
            where = f"between the layers {layer.name!r} and {layers[after.place].name!r}"
            rows, between = (after.rows, training.calls[number + 1].rows), after.between
        else:
            where = f"behind the last layer, {layer.name!r},"
            rows, between = (evaluating.result, training.result), evaluating.between
        if between:
            where += f" (where {', '.join(between)} is called)"
        found.append(Joint(layer=layer, where=where, given=(call.result, other.result), rows=rows))
    return found


def function_at(joint: Joint, others: Sequence[tuple[str, nn.Parameter]]) -> RowFunction:
    """Return what the model does at a joint.

    Args:
        joint: Where.
        others: The trained parameters that belong to no layer, by name.

    Raises:
        ConfigError: it is none of the known functions, another one in training, or not what its gradients
            are of.
    """
    (z, in_training), (rows, rows_in_training) = joint.given, joint.rows
    function = find_function(z, rows, joint.layer.own_function)
    if function is None:
        hint = (
            "leave log_softmax out and use cross_entropy, which has it" if _is_log_softmax(rows) else _WAY_OUT
        )
        raise ConfigError(
            f"{joint.where} the model does something that no stage does; known are: {KNOWN}. In its "
            f"place, {hint}"
        )
    if not equal(function(in_training), rows_in_training):
        raise ConfigError(
            f"{joint.where} the model does something else in training than in evaluation, as dropout does; "
            "take it out, or use strategy='data_parallel'"
        )
    _check_others(joint, rows, others)
    if not same_gradient(z, rows, function, torch.Generator().manual_seed(5)):
        raise ConfigError(
            f"{joint.where} no gradient flows back, or another than that of the values, as after detach(); "
            "take it out, or use strategy='data_parallel'"
        )
    return function


def _course(seen: Probe) -> list[tuple[int, int | None, str | None]]:
    return [(call.place, call.block, call.edge_column) for call in seen.calls]


def _check_others(joint: Joint, rows: Tensor, others: Sequence[tuple[str, nn.Parameter]]) -> None:
    if not others or not rows.requires_grad:
        return
    parameters = [parameter for _, parameter in others]
    found = torch.autograd.grad(rows.sum(), parameters, allow_unused=True, retain_graph=True)
    for (name, _), gradient in zip(others, found, strict=True):
        if gradient is not None:
            raise ConfigError(
                f"{joint.where} the parameter {name!r} is trained, which belongs to no layer that workers "
                f"know; in its place, {_WAY_OUT}"
            )


def _is_log_softmax(rows: Tensor) -> bool:
    sums = torch.logsumexp(rows.detach(), -1)
    return equal(sums, torch.zeros_like(sums))
