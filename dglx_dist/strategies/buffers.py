"""Running statistics of a replicated model, equal on all ranks."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

from dglx_dist.cluster.collectives import sum_over_ranks
from dglx_dist.cluster.session import Session
from dglx_dist.strategies.base import Reduction


@final
class BufferMeans:
    """Makes floating-point buffers the mean of what the ranks made of them, weighed like the gradients.

    Args:
        model: Whose buffers.
        session: The run.
        reduction: What the user's loss is.
    """

    def __init__(self, model: nn.Module, session: Session, reduction: Reduction) -> None:
        self._model, self._session, self._reduction = model, session, reduction
        self._before: list[Tensor] = []
        self.note()

    @property
    def needed(self) -> bool:
        """Whether there is anything to average."""
        return bool(self._before) and self._session.topology.world_size > 1

    def note(self) -> None:
        """Take the values of now as equal on all ranks: after loading or moving the model."""
        self._before = [buffer.detach().clone() for buffer in self._floats()]

    def average(self, weight: float) -> None:
        """Exchange what changed since the last time; every rank must call it.

        Args:
            weight: What this rank counts in a step whose loss is a mean.
        """
        if not self.needed:
            return
        if self._reduction == "sum":
            weight = 1.0 / self._session.topology.world_size
        for buffer, before in zip(self._floats(), self._before, strict=True):
            # The mean of the changes, not of the values: constants stay equal to the last bit.
            change = (buffer - before) * weight if weight else torch.zeros_like(buffer)
            before.add_(sum_over_ranks(change, self._session, phase="buffers", in_place=True))
            buffer.copy_(before)

    def _floats(self) -> list[Tensor]:
        return [buffer for buffer in self._model.buffers() if buffer.is_floating_point()]
