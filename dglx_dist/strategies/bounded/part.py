"""What one graph server has before the first epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import numpy as np

from dglx_dist.errors import ConfigError
from dglx_dist.offload.program import Program
from dglx_dist.offload.steps import FIXED, Gather
from dglx_dist.records import Array
from dglx_dist.strategies.bounded.ghosts import Routes
from dglx_dist.strategies.bounded.local_graph import LocalGraph


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """n own nodes in k intervals, m ghosts, E in-edges; see :class:`LocalGraph`."""

    graph: LocalGraph
    bounds: Array
    """(k + 1,) int64 local ids: interval i has the nodes ``bounds[i]:bounds[i + 1]``."""
    first_interval: int
    """Number of interval 0 among those of all graph servers."""
    routes: Routes
    features: Array
    """(n + m, F) of the program's dtype: own rows, then those of ghosts."""
    labels: Array
    """(n,) int32, -1 where a node is not trained on."""
    fixed: Mapping[str, Array] = field(default_factory=dict)
    """Values of edges by name ("fixed:0"), (E, 1) of the program's dtype."""

    @property
    def num_intervals(self) -> int:
        """k."""
        return len(self.bounds) - 1

    def nodes_of(self, interval: int) -> slice:
        """Return the local ids of the nodes of ``interval``."""
        return slice(int(self.bounds[interval]), int(self.bounds[interval + 1]))

    def edges_of(self, interval: int) -> slice:
        """Return the positions of the in-edges of ``interval``."""
        nodes = self.nodes_of(interval)
        return slice(int(self.graph.indptr[nodes.start]), int(self.graph.indptr[nodes.stop]))

    def check(self, program: Program) -> None:
        """Raise ConfigError unless ``program`` can be trained on this part."""
        graph, edges = self.graph, len(self.graph.sources)
        wanted = {"features": (graph.num_local, program.features), "labels": (graph.num_own,)}
        found: dict[str, Array] = {"features": self.features, "labels": self.labels}
        for name in sorted(_fixed_names(program)):
            if name not in self.fixed:
                raise ConfigError(f"the program reads edge values {name!r}, which are not given")
            wanted[name], found[name] = (edges, 1), self.fixed[name]
        for name, array in found.items():
            dtype = "int32" if name == "labels" else program.dtype
            if array.shape != wanted[name] or array.dtype != dtype:
                raise ConfigError(
                    f"{name} of graph server {graph.rank} are {array.dtype} of shape {array.shape}, not "
                    f"{dtype} of shape {wanted[name]}"
                )
        if len(self.labels) and not -1 <= self.labels.min() <= self.labels.max() < program.classes:
            raise ConfigError(
                f"labels of graph server {graph.rank} run from {self.labels.min()} to {self.labels.max()}; "
                f"give classes below {program.classes}, and -1 to nodes that are not trained on"
            )


def interval_sizes(bounds_of_servers: Sequence[Array]) -> Array:
    """Return (K,) nodes of each interval of all graph servers, in order."""
    return np.concatenate([np.diff(bounds) for bounds in bounds_of_servers])


def _fixed_names(program: Program) -> set[str]:
    gathers = [step for step in program.steps if isinstance(step, Gather)]
    return {step.edges for step in gathers if step.edges is not None and step.edges.startswith(FIXED)}
