"""A loader that cannot be opened before there is a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import final

from torch import nn

from dglx_dist.errors import ConfigError
from dglx_dist.sampling.stepping import LoaderTimes
from dglx_dist.strategies.granndis.loader import Batch, FullGraphLoader
from dglx_dist.strategies.granndis.memory import MemoryEstimate
from dglx_dist.strategies.granndis.plan import RankPlan


@final
class AwaitingLoader:
    """A :class:`FullGraphLoader` whose number of steps follows from what a model needs.

    All but :meth:`settle` is as there, and may be called once there is a model: the next that is wrapped, or
    an earlier one when iterating begins without.

    Args:
        opened: Opens the loader for a model, and says what it needs; collective.
        earlier: Returns the model that was wrapped last, equally on all ranks; None: none.
    """

    def __init__(
        self,
        opened: Callable[[nn.Module], tuple[FullGraphLoader, MemoryEstimate]],
        earlier: Callable[[], nn.Module | None],
    ) -> None:
        self._opened, self._earlier = opened, earlier
        self._loader: FullGraphLoader | None = None
        self._memory: MemoryEstimate | None = None

    @property
    def is_settled(self) -> bool:
        """Whether it has got its model."""
        return self._loader is not None

    @property
    def memory(self) -> MemoryEstimate | None:
        """What the largest co-batch needs on this rank; None: there is no model yet."""
        return self._memory

    @property
    def plan(self) -> RankPlan | None:
        """See :attr:`FullGraphLoader.plan`."""
        return self._settled.plan

    def settle(self, model: nn.Module) -> None:
        """Open the loader for the user's ``model``; every rank must call it, once."""
        self._loader, self._memory = self._opened(model)

    def __len__(self) -> int:
        """See :meth:`FullGraphLoader.__len__`."""
        return len(self._settled)

    @property
    def epoch(self) -> int:
        """See :attr:`FullGraphLoader.epoch`."""
        return self._settled.epoch

    @property
    def num_targets_of_epoch(self) -> tuple[int, int]:
        """See :attr:`FullGraphLoader.num_targets_of_epoch`."""
        return self._settled.num_targets_of_epoch

    def set_epoch(self, epoch: int) -> None:
        """See :meth:`FullGraphLoader.set_epoch`."""
        self._settled.set_epoch(epoch)

    def times(self, *, reset: bool = False) -> LoaderTimes:
        """See :meth:`FullGraphLoader.times`."""
        return self._settled.times(reset=reset)

    def state_dict(self) -> dict[str, int]:
        """See :meth:`FullGraphLoader.state_dict`."""
        return self._settled.state_dict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """See :meth:`FullGraphLoader.load_state_dict`."""
        self._settled.load_state_dict(state)

    def __iter__(self) -> Iterator[Batch]:
        """See :meth:`FullGraphLoader.__iter__`."""
        model = self._earlier()
        if not self.is_settled and model is not None:
            self.settle(model)
        return iter(self._settled)

    @property
    def _settled(self) -> FullGraphLoader:
        if self._loader is None:
            raise ConfigError(
                "how many co-batches fit into option memory depends on the model; call dx.wrap(model, g) "
                "before using the loader, or give batches=R in place of memory"
            )
        return self._loader
