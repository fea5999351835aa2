"""Where the plans of an epoch's steps come from: one for all, or one for each co-batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import final

from dglx_dist.records import StepShare
from dglx_dist.strategies.granndis.plan import RankPlan
from dglx_dist.strategies.granndis.row_files import RowFiles


class PlanSource(ABC):
    """The plans of this rank. All ranks have as many steps and ask for the same ones in the same order.

    Nothing here is collective, so that a loader's thread may ask while the model trains.
    """

    @abstractmethod
    def __len__(self) -> int:
        """Steps of an epoch, equal on all ranks."""

    @abstractmethod
    def plan(self, epoch: int, step: int) -> RankPlan:
        """Return the plan of a step; the same object as before where the plan is the same.

        Raises:
            PeerError: a rank that has to do with it is dead, or did not make its part within the time-out.
        """

    @abstractmethod
    def share(self, epoch: int, step: int) -> StepShare:
        """Return how many seeds this rank and all ranks have in a step; for steps that were planned."""

    @property
    def row_files(self) -> RowFiles | None:
        """Where the columns of the plans' rows are kept on disk; None: nowhere, or the loader holds them."""
        return None

    def close(self) -> None:
        """End what is under way; nothing is asked for afterwards. May be called twice."""
        return


@final
class OnePlan(PlanSource):
    """One step an epoch, always the same.

    Args:
        plan: The plan.
        share: How many seeds this rank and all ranks have.
    """

    def __init__(self, plan: RankPlan, share: StepShare) -> None:
        self._plan, self._share = plan, share

    def __len__(self) -> int:
        """See :meth:`PlanSource.__len__`: 1."""
        return 1

    def plan(self, epoch: int, step: int) -> RankPlan:
        """See :meth:`PlanSource.plan`."""
        return self._plan

    def share(self, epoch: int, step: int) -> StepShare:
        """See :meth:`PlanSource.share`."""
        return self._share
