"""Helpers for a stage of the user's own that is written with tensors: torch finds its gradients.

Only workers of ``executor="inline"`` can run such a stage: the others have NumPy, and no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from dglx_dist.offload.stages.base import Backward, Forward
from dglx_dist.records import Array

Compute: TypeAlias = Callable[[Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]]
"""Weights and inputs, one (n, width) each, to outputs, one (n, width) each; the same at every call."""


def forward_by_torch(compute: Compute, weights: Sequence[Array], inputs: Sequence[Array]) -> Forward:
    """Return what ``VertexStage.forward`` must; nothing is saved for the way back."""
    with torch.no_grad():
        outputs = compute(_tensors(weights), _tensors(inputs))
    return Forward(tuple(one.contiguous().numpy() for one in outputs), ())


def backward_by_torch(
    compute: Compute,
    weights: Sequence[Array],
    inputs: Sequence[Array],
    gradients: Sequence[Array],
    *,
    wanted: Sequence[bool] | None = None,
) -> Backward:
    """Return what ``VertexStage.backward`` must: ``compute`` is called again, and torch goes back through it.

    What ``compute`` does not depend on has gradient 0.
    """
    asked = [True] * len(inputs) if wanted is None else wanted
    of_weights = [one.requires_grad_() for one in _tensors(weights)]
    of_inputs = [one.requires_grad_(is_asked) for one, is_asked in zip(_tensors(inputs), asked, strict=True)]
    with torch.enable_grad():
        outputs = compute(of_weights, of_inputs)
    leaves = [*of_weights, *(one for one in of_inputs if one.requires_grad)]
    roots = [
        (one, slope) for one, slope in zip(outputs, _tensors(gradients), strict=True) if one.requires_grad
    ]
    found: list[Array] = [torch.zeros_like(leaf).numpy() for leaf in leaves]
    if roots and leaves:
        slopes = torch.autograd.grad(
            [one for one, _ in roots], leaves, [slope for _, slope in roots], allow_unused=True
        )
        found = [
            zeros if slope is None else slope.contiguous().numpy()
            for zeros, slope in zip(found, slopes, strict=True)
        ]
    rest = iter(found[len(of_weights) :])
    return Backward(
        tuple(next(rest) if is_asked else None for is_asked in asked), tuple(found[: len(of_weights)])
    )


def _tensors(arrays: Sequence[Array]) -> list[Tensor]:
    # Copies: rows may be views that others write or that must not be written, of which torch would warn.
    return [torch.from_numpy(array.copy()) for array in arrays]
