"""One step an epoch on external nodes that are chosen anew every few epochs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, final

from dglx_dist.cluster.collectives import barrier, gather_int64
from dglx_dist.records import StepShare
from dglx_dist.strategies.granndis.eas import EasOptions, EasSelector
from dglx_dist.strategies.granndis.plan import RankPlan
from dglx_dist.strategies.granndis.plan_source import PlanSource
from dglx_dist.strategies.granndis.planning import Planner, PlanRequest

if TYPE_CHECKING:
    from dglx_dist.graph import DistGraph


@final
class SampledPlans(PlanSource):
    """Plans on the graph that a server's nodes and its chosen external ones span; every rank makes one.

    The choice is the same whenever an epoch comes round again, as after a checkpoint.

    Args:
        g: A graph of one node and one edge type.
        request: What is planned, without the choice of nodes.
        options: Of the choice.
        seed: Of its draws.

    Raises:
        ConfigError: see :class:`Planner`.
        PeerError: a rank did not take part.
    """

    def __init__(self, g: DistGraph, request: PlanRequest, options: EasOptions, *, seed: int) -> None:
        self._request, self._options, self._seed = request, options, seed
        self._planner, self._selector = Planner(g), EasSelector(g)
        # Nobody may ask before all answer.
        barrier(g.session, "choosing external nodes")
        self._draw = options.draw(0)
        self._plan = self._planned(self._draw)
        # Every choice has the same seeds, though other ranks may compute them.
        self._num_global = int(gather_int64([self._plan.seeds], g.session).sum())

    def __len__(self) -> int:
        """See :meth:`PlanSource.__len__`: 1."""
        return 1

    def plan(self, epoch: int, step: int) -> RankPlan:
        """See :meth:`PlanSource.plan`."""
        draw = self._options.draw(epoch)
        if draw != self._draw:
            self._plan = self._planned(draw)
            # Only now: a plan that failed is not that of this draw when it is asked for again.
            self._draw = draw
        return self._plan

    def share(self, epoch: int, step: int) -> StepShare:
        """See :meth:`PlanSource.share`."""
        return StepShare(num_local=self._plan.seeds, num_global=self._num_global)

    def _planned(self, draw: int) -> RankPlan:
        rule = self._selector.rule(self._options, seed=self._seed, draw=draw)
        return self._planner.plan(replace(self._request, eas=rule))
