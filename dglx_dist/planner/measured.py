"""All that the formulas take: counted and measured in a dry run, or expected from figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dglx_dist.planner.batch_work import BatchWork
from dglx_dist.planner.full_work import FullWork
from dglx_dist.planner.memory import MemoryModel
from dglx_dist.planner.model_shape import ModelShape
from dglx_dist.planner.rates import Rates
from dglx_dist.planner.records import Cluster, GraphStats, Way
from dglx_dist.planner.survey import Draws


@dataclass(frozen=True, kw_only=True)
class Ghosts:
    """Pairs of a node and another rank that reads it, of the whole graph: what intervals exchange."""

    outside: int
    inside: int
    counted: bool = True
    """Whether over all nodes of the graph; False: expected, or of those only that training needs."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Of one graph, model and cluster."""

    graph: GraphStats
    shape: ModelShape
    cluster: Cluster
    rates: Rates
    """Of steps on mini-batches; of whole graphs where there are none."""
    memory: MemoryModel
    batches: BatchWork | None
    """None: nobody asked for mini-batches."""
    whole: Mapping[Way, FullWork]
    ghosts: Ghosts | None
    structure_partitioned: bool
    """Whether servers ask each other for in-edges."""
    epoch: int
    """Whose batches were counted."""
    plan_rates: Rates | None = None
    """Of steps on whole graphs and co-batches, whose blocks are others; None: as :attr:`rates`."""
    assumptions: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    """What finding all that out took."""
    draws: Draws | None = None
    """Of the mini-batches."""

    @property
    def trained(self) -> str:
        """What is trained, in words."""
        if self.draws is None:
            return self.shape.words
        fanouts = ",".join(map(str, self.draws.fanouts))
        return f"{self.shape.words}; mini-batches of {self.draws.batch_size} a rank, fan-outs {fanouts}"
