"""How many nodes a local graph has, for what spreads rows over them but not for what sums over them."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from dglx_dist.errors import ConfigError


@final
class OwnCount(Tensor):
    """(1,) int64 what ``batch_num_nodes`` of a local graph returns.

    DGL repeats rows of a graph for its nodes by it (``broadcast_nodes``), which is right on every rank; and
    it sums, averages and normalises over all nodes by it, which would be over this rank's alone.
    """

    @classmethod
    def of(cls, count: int, device: torch.device) -> OwnCount:
        """Return the count of this rank."""
        return torch.tensor([count], device=device).as_subclass(cls)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Allow repetition.

        Raises:
            ConfigError: anything else is done with the count.
        """
        if func is not torch.repeat_interleave:
            raise ConfigError(
                "a function of all nodes or edges of a local graph would be one of this rank's alone; reduce "
                "the rows of ndata, and sum over the ranks with torch.distributed.all_reduce"
            )
        plain = [one.as_subclass(Tensor) if isinstance(one, OwnCount) else one for one in args]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*plain, **(kwargs or {}))
