"""A neighbor sampler for graphs with times."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any, Literal, NoReturn, final

from dgl.dataloading import BlockSampler

from dglx_dist.errors import ConfigError


@final
class TemporalNeighborSampler(BlockSampler):
    """Samples in-edges that are not later than their seed's time.

    Each seed has its own tree, and all rows in a tree have the seed's time. Blocks have the node columns
    ``seed_id``, the seed's position in the batch, and ``time``. A node can have several rows. The loader's
    ``seed_time=`` gives the seed times. By default a seed's time is the node's ``node_time``, or in a loader
    for edges the edge's ``edge_time``. An edge's negatives have the same time.

    Times are integers or floats. Edges at the seed's time are sampled. To predict edges, pass earlier times
    than those of the edges as ``seed_time``. Or leave out a batch's edges by ``exclude``: ``self``, or
    ``reverse_id`` if each edge has an opposite edge with the same time. Edges without a time (NaN, NaT or the
    smallest integer) are never sampled. Edge types without the column are always sampled. ``dglx partition
    --time`` sorts the edges by time, or else the first loader.

    Args:
        fanouts: Edges per node and edge type, with layer 1 first, as for DGL's ``NeighborSampler``.
        edge_time: Name of the edge column with times, or None if only nodes have times.
        node_time: Name of a node column with times. An edge then exists from the later of its own time and
            its source's time. Node types without the column always exist.
        strategy: ``uniform`` draws among past edges. ``last`` takes the most recent ones. Among edges with
            equal times it takes those with the largest ids.
        window: Longest time between an edge and the seed, inclusive, in the column's unit.
        prefetch: ``prefetch_node_feats``, ``prefetch_labels`` and ``prefetch_edge_feats``, as in DGL.

    Raises:
        ConfigError: there is no column with times, or the strategy or the window is invalid.
    """

    def __init__(
        self,
        fanouts: Any,
        edge_time: str | None = "time",
        node_time: str | None = None,
        strategy: Literal["uniform", "last"] = "uniform",
        window: float | None = None,
        **prefetch: Any,
    ) -> None:
        super().__init__(**prefetch)
        if strategy not in ("uniform", "last"):
            raise ConfigError(f"strategy={strategy!r}. Choose 'uniform' or 'last'.")
        if edge_time is None and node_time is None:
            raise ConfigError("edge_time and node_time are both None. Name a column of times.")
        if window is not None:
            is_number = isinstance(window, Real) and not isinstance(window, bool)
            if not is_number or not 0 <= window < math.inf:
                raise ConfigError(f"window={window!r}. Use a number of at least 0, or None for no limit.")
        self.fanouts = fanouts
        self.edge_time = edge_time
        self.node_time = node_time
        self.strategy = strategy
        self.window = window

    def sample_blocks(self, g: Any, seed_nodes: Any, exclude_eids: Any = None) -> NoReturn:
        """Raise ConfigError, because only this package's loaders know the seed times."""
        raise ConfigError(
            f"TemporalNeighborSampler does not sample {type(g).__name__} itself. Pass it to "
            "dx.DataLoader or dx.DistEdgeDataLoader."
        )
