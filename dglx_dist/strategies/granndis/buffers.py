"""Memory that exchanges need while they run, kept from one to the next."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor


@final
class KeptBuffer:
    """Room in the host's memory for one tensor at a time, of any shape and dtype; grows, never shrinks.

    Fresh pages cost more than copying into them. What :meth:`room` gave is void once it is asked again.
    """

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return self._bytes.numel()

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised contiguous CPU tensor in the kept memory."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes > self._bytes.numel():
            # The old one goes first: both together would be the peak.
            self._bytes = torch.empty(0, dtype=torch.uint8)
            self._bytes = torch.empty(num_bytes, dtype=torch.uint8)
        return self._bytes[:num_bytes].view(dtype).view(tuple(shape))


def bytes_of(tensor: Tensor) -> memoryview:
    """View a contiguous CPU tensor without gradient as its bytes, writable; no copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def is_on_host(tensor: Tensor) -> bool:
    """Whether a socket can read and write the memory of ``tensor``."""
    return tensor.device.type == "cpu"
