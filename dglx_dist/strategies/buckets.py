"""Parameters laid out in flat buffers, so that few large sums cross the network instead of many small."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Bucket:
    """The gradients of some parameters of one dtype and device, back to back, then one flag for each.

    A flag is 1 where this rank computed the gradient; after the sum over ranks, 0 means that nobody did
    and that the parameter must be left alone, as it would be in one process.

    Args:
        indices: Positions of the parameters in the whole list.
        parameters: The parameters, same order; one dtype and device.
    """

    def __init__(self, indices: Sequence[int], parameters: Sequence[nn.Parameter]) -> None:
        sizes = [parameter.numel() for parameter in parameters]
        total = sum(sizes) + len(sizes)
        self.indices = tuple(indices)
        self.flat = torch.zeros(total, dtype=parameters[0].dtype, device=parameters[0].device)
        pieces = torch.split(self.flat, [*sizes, len(sizes)])
        self._views = {
            index: piece.view(parameter.shape)
            for index, piece, parameter in zip(indices, pieces, parameters, strict=False)
        }
        self._flags = pieces[-1]
        self._slot = {index: slot for slot, index in enumerate(indices)}
        self._missing = len(sizes)

    @property
    def num_bytes(self) -> int:
        """Bytes of gradients and flags together."""
        return self.flat.numel() * self.flat.element_size()

    @property
    def complete(self) -> bool:
        """Whether every gradient was put since the last :meth:`clear`."""
        return self._missing == 0

    def clear(self) -> None:
        """Forget all gradients: zero, and computed by nobody."""
        self.flat.zero_()
        self._missing = len(self.indices)

    def put(self, index: int, gradient: Tensor, weight: float) -> None:
        """Store ``weight * gradient``; with weight 0 exact zeros, even if the gradient is not finite."""
        self._missing -= 1
        if weight != 0.0:
            torch.mul(gradient, weight, out=self._views[index])
            self._flags[self._slot[index]] = 1

    def get(self, index: int) -> Tensor:
        """Return the (possibly summed) gradient of a parameter, a view."""
        return self._views[index]

    def used(self) -> dict[int, bool]:
        """Return for each parameter whether any rank put a gradient."""
        return dict(zip(self.indices, (self._flags > 0).tolist(), strict=True))


def make_buckets(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> list[Bucket]:
    """Cut ``parameters`` into buckets of about ``bucket_bytes``, the last ones first.

    Backward reaches the last layers first, so their bucket can leave while the others are computed.
    A parameter larger than ``bucket_bytes`` gets a bucket of its own.
    """
    groups: list[list[int]] = []
    size = 0
    kind: tuple[torch.dtype, torch.device] | None = None
    for index in reversed(range(len(parameters))):
        parameter = parameters[index]
        num_bytes = parameter.numel() * parameter.element_size()
        if not groups or size + num_bytes > bucket_bytes or kind != (parameter.dtype, parameter.device):
            groups.append([])
            size, kind = 0, (parameter.dtype, parameter.device)
        groups[-1].append(index)
        size += num_bytes
    return [Bucket(group, [parameters[index] for index in group]) for group in groups]
