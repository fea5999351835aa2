"""Edge batches in full-graph training. Blocks cover the graph, and pair graphs get rows from all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, final

import torch

from dglx_dist.dataloading.edge_loader import (
    EdgeBatch,
    EdgeOptions,
    EdgesBatch,
    open_edge_maker,
    read_edge_options,
)
from dglx_dist.dataloading.feature_fetch import Columns
from dglx_dist.dataloading.minibatch import Excluded, MiniBatch, NodeMaker
from dglx_dist.dataloading.sampler_spec import read_sampler
from dglx_dist.dataloading.step_loader import StepLoader
from dglx_dist.errors import ConfigError
from dglx_dist.records import EdgeType, StepShare
from dglx_dist.strategies.full_graph.loader import FullGraphLoader, HaloBatch
from dglx_dist.strategies.full_graph.options import FullGraphOptions
from dglx_dist.strategies.full_graph.pair_rows import PairPlanner, PairRows

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph


def read_edge_request(
    strategy: str, g: DistGraph, options: FullGraphOptions, arguments: Mapping[str, Any]
) -> EdgeOptions:
    """Check the arguments for an edge loader of ``strategy``. Every rank must call it.

    Raises ConfigError if the arguments or the strategy's options need other blocks in each step.
    """
    checked = read_edge_options(g, **arguments)
    read_sampler(checked.sampler).refuse_trees(strategy, checked.options.disjoint)
    if checked.exclude is not None:
        raise ConfigError(
            f"exclude={checked.exclude!r} removes other edges in each batch, but {strategy} passes messages "
            "along the same edges in all steps; leave it out and mark these edges by "
            "NeighborSampler(..., mask=), or use strategy='data_parallel'"
        )

    if options.batches > 1:
        raise ConfigError(
            f"option batches={options.batches} computes the rows of a part of the nodes in each step, but "
            "edges and their negatives end at any node; leave batches out"
        )

    if options.staleness:
        raise ConfigError(
            f"option staleness={options.staleness} reuses rows of the previous epoch, but each batch of "
            "edges needs rows of other nodes; use staleness=0"
        )

    return checked


@final
class GraphBlocks(NodeMaker):
    """The stages for batches that all use the graph's own blocks. They are completed on delivery."""

    def __init__(self, g: DistGraph, batch: HaloBatch, planner: PairPlanner) -> None:
        super().__init__(g, Columns())
        self._batch = batch
        self._planner = planner
        self._previous: PairRows | None = None

    def sample_blocks(self, batch: MiniBatch, epoch: int, exclude: Excluded, *, step: int) -> None:
        no_ids = torch.empty(0, dtype=torch.int64)
        batch.input_nodes = no_ids
        batch.output_nodes = no_ids
        batch.blocks = []

    def offline(self) -> NoReturn:
        raise ConfigError("a batch of edges of a full-graph strategy has blocks of its own rank only")

    def check_previous(self) -> None:
        """Raise ConfigError if the loop scored the previous batch's pairs without ``gather_pair_rows``."""
        # Backward checks this too, but an evaluation has none.
        previous = self._previous
        # After an error, the next iteration begins anew.
        self._previous = None
        if previous is not None:
            previous.check_calls()

    def finish(self, batch: MiniBatch, share: StepShare) -> None:
        assert isinstance(batch, EdgeBatch)
        batch.finish()
        self.check_previous()
        pair_rows = self._planner.plan(batch.seeds)
        self._previous = pair_rows
        blocks = self._batch.open_blocks(self._g.session, share.step_number, share)
        blocks[-1].pair_rows = pair_rows
        batch.blocks = blocks
        for graph in batch.pairs:
            graph.gather_rows = pair_rows
        batch.input_nodes = self._batch.input_nodes


@final
class FullGraphEdgeLoader(StepLoader[EdgeType, EdgeBatch, EdgesBatch]):
    """Iterates over ``(input_nodes, pair_graph, [negative_pair_graph,] blocks)``. Every rank must iterate.

    Each step passes messages over the graph once. A rank's blocks compute rows for its own nodes.
    ``gather_pair_rows`` turns them into rows for the pair graphs' nodes. A batch has
    ``edge_batches_per_step`` times ``batch_size`` edges from each rank.
    """

    def __init__(
        self, g: DistGraph, checked: EdgeOptions, encoder: FullGraphLoader, options: FullGraphOptions
    ) -> None:
        size = checked.options.batch_size * options.edge_batches_per_step
        batch = encoder.load(0, 0)
        planner = PairPlanner(g, batch.plan, options.wire_dtype)
        self._blocks = GraphBlocks(g, batch, planner)
        maker = open_edge_maker(g, checked, self._blocks)
        super().__init__(g.session, checked.items, replace(checked.options, batch_size=size), maker)

    def check_end(self) -> None:
        self._blocks.check_previous()
