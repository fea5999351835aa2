"""A stage of a user's own that torch computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dglx_dist.records import Array
from dglx_dist.strategies.serverless.stages.base import Backward, Forward
from dglx_dist.strategies.serverless.trainer import backward_by_torch, forward_by_torch

from .own_stage import Gate


class TensorGate(Gate):
    """The same function; nobody wrote its gradient."""

    def _compute(self, weights: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
        z = inputs[0] @ weights[0]
        return [torch.tanh(z) * inputs[1][:, : self._out] + z]

    def forward(self, weights: Sequence[Array], inputs: Sequence[Array]) -> Forward:
        return forward_by_torch(self._compute, weights, inputs)

    def backward(
        self,
        weights: Sequence[Array],
        inputs: Sequence[Array],
        gradients: Sequence[Array],
        *,
        saved: Any = None,
        wanted: Sequence[bool] | None = None,
    ) -> Backward:
        return backward_by_torch(self._compute, weights, inputs, gradients, wanted=wanted)
