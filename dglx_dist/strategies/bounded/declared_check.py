"""Whether a layer of the user's own computes what the stage computes that it declares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dglx_dist.errors import ConfigError
from dglx_dist.offload.stages.base import VertexStage
from dglx_dist.records import Array
from dglx_dist.strategies.bounded.declared import DeclaredStage
from dglx_dist.strategies.bounded.edge_factors import FACTOR_OF_NORM, power_of
from dglx_dist.strategies.bounded.probe import probe_block

_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-8}


def check_declared(name: str, module: Any, declared: DeclaredStage, stage: VertexStage) -> None:
    """Compare the module with the stage, by values and gradients, on a few random rows.

    Args:
        name: Of the layer, for messages.
        module: Called as ``module(block, h)``; it is left as it was.
        declared: What it declares.
        stage: Made from it.

    Raises:
        ConfigError: they differ; the message says in what.
    """
    generator = torch.Generator().manual_seed(3)
    weights = [module.get_parameter(weight) for weight in declared.weights]
    _check_shapes(name, declared, weights, stage)
    dtype = weights[0].dtype if weights else torch.get_default_dtype()
    block = probe_block(generator, dtype, {})
    rows = torch.randn(
        block.num_src_nodes(), stage.input_widths[0], dtype=dtype, generator=generator
    ).requires_grad_()
    out = module(block, rows)
    cotangent = torch.randn(out.shape, dtype=dtype, generator=generator)
    trained = [rows, *(weight for weight in weights if weight.requires_grad)]
    slopes = torch.autograd.grad(out, trained, cotangent, allow_unused=True)

    inputs, back = _inputs(block, rows.detach().numpy(), declared)
    own = [weight.detach().numpy() for weight in weights]
    found = stage.forward(own, inputs).outputs[0]
    _compare(name, declared, "result", out.detach(), found)
    gradients = stage.backward(own, inputs, [cotangent.numpy()])
    _compare(name, declared, "gradient of its input", slopes[0], back(gradients.inputs))
    wanted = iter(slopes[1:])
    for weight_name, weight, slope in zip(declared.weights, weights, gradients.weights, strict=True):
        if weight.requires_grad:
            _compare(name, declared, f"gradient of {weight_name!r}", next(wanted), slope)


def _inputs(
    block: Any, rows: Array, declared: DeclaredStage
) -> tuple[list[Array], Callable[[Sequence[Array | None]], Array]]:
    """Return the stage's inputs, and what adds their gradients up to that of ``rows``."""
    sources, targets = (ends.numpy() for ends in block.edges())
    number = len(rows)
    over_edges = np.zeros((number, number), dtype=rows.dtype)
    if declared.around is not None:
        factor = FACTOR_OF_NORM[declared.around]
        into = power_of(np.bincount(targets, minlength=number), factor.target)
        out_of = power_of(np.bincount(sources, minlength=number), factor.source)
        np.add.at(over_edges, (targets, sources), (into[targets] * out_of[sources]).astype(rows.dtype))
    inputs = ([over_edges @ rows] if declared.around is not None else []) + ([rows] if declared.own else [])

    def back(slopes: Sequence[Array | None]) -> Array:
        total: Array = np.zeros_like(rows)
        for index, slope in enumerate(slopes):
            assert slope is not None
            is_around = index == 0 and declared.around is not None
            total = total + (over_edges.T @ slope if is_around else slope)
        return total

    return inputs, back


def _check_shapes(
    name: str, declared: DeclaredStage, weights: Sequence[nn.Parameter], stage: VertexStage
) -> None:
    found, wanted = [tuple(weight.shape) for weight in weights], list(stage.weight_shapes.values())
    if found != wanted:
        raise ConfigError(
            f"layer {name!r} declares weights {list(declared.weights)} of shapes {found}, and its stage "
            f"{declared.stage!r} has {stage.weight_shapes}; name them in this order, with these shapes"
        )


def _compare(name: str, declared: DeclaredStage, what: str, module: Tensor | None, stage: Array) -> None:
    expected = np.zeros_like(stage) if module is None else module.numpy()
    largest = float(np.abs(expected - stage).max(initial=0.0)) if expected.shape == stage.shape else np.inf
    scale = max(1.0, float(np.abs(expected).max(initial=0.0)))
    tolerance = _TOLERANCE[torch.float64 if expected.dtype == np.float64 else torch.float32]
    if not largest <= tolerance * scale:
        raise ConfigError(
            f"layer {name!r} and the stage {declared.stage!r} that it declares differ in the {what}, by up "
            f"to {largest:.3g} (shapes {expected.shape} and {stage.shape}); let both compute the same"
        )
