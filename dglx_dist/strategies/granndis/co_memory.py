"""The number of co-batches that the memory allows, told to the user with what it is for."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, final

import numpy as np
import torch
from torch import Tensor, nn

from dglx_dist.cluster.allocator import return_memory
from dglx_dist.cluster.collectives import gather_int64
from dglx_dist.errors import ConfigError
from dglx_dist.graph.opening import together
from dglx_dist.progress import progress
from dglx_dist.records import Array
from dglx_dist.strategies.granndis.co_batches import CoBatchPlanner, CoBatchRecipe
from dglx_dist.strategies.granndis.memory import MemoryEstimate, choose_num_batches, estimate
from dglx_dist.strategies.granndis.rehearsal import Rehearsal, rehearse
from dglx_dist.strategies.granndis.request import Request

if TYPE_CHECKING:
    from dglx_dist.graph import DistGraph


@final
class MemoryChoice:
    """Chooses a number of co-batches. Every rank makes one.

    Args:
        g: A graph of one node and one edge type.
        planner: Of the server's seeds.
        recipe: Of the co-batches; its number of them is of no meaning.
        request: What blocks have.
        memory_bytes: What a rank may need for training, beyond what it has before.
    """

    def __init__(
        self,
        g: DistGraph,
        planner: CoBatchPlanner,
        recipe: CoBatchRecipe,
        request: Request,
        memory_bytes: int,
    ) -> None:
        self._g, self._planner, self._recipe = g, planner, recipe
        self._request, self._memory_bytes = request, memory_bytes

    def choose(self, model: nn.Module) -> tuple[int, MemoryEstimate]:
        """Return the fewest co-batches that ``model`` trains on within the memory; every rank must call it.

        Rank 0 tells what the largest one needs. From now on what is freed goes back to the system, for what
        an allocator keeps would be half as much again.

        Returns:
            Their number, equal on all ranks, and what the largest one needs on this rank.

        Raises:
            ConfigError: on all ranks: the model cannot be tried out, or not even the smallest co-batch fits.
            PeerError: a rank did not take part.
        """
        return_memory()
        row = together(self._g.session, lambda: self._row(), ConfigError)
        rehearsal = together(self._g.session, lambda: self._rehearsed(model, row), ConfigError)
        feature_bytes = row.numel() * row.element_size()
        largest: dict[int, MemoryEstimate] = {}

        def worst(number: int, steps: Array) -> int:
            mine = [self._needed(number, int(step), rehearsal, feature_bytes) for step in steps]
            largest[number] = max(mine, key=lambda one: one.total)
            return int(gather_int64([largest[number].total], self._g.session).max())

        shown = self._g.session.topology.rank == 0
        with progress("choosing the number of co-batches", 1, enabled=shown) as advance:
            number = choose_num_batches(worst, self._memory_bytes, max(self._planner.seeds.counts))
            advance(1)
            batches = "1 co-batch" if number == 1 else f"{number} co-batches"
            advance.say(f"{batches} an epoch; the largest of rank 0 needs")
            for line in largest[number].lines():
                advance.say(line)
        return number, largest[number]

    def _needed(self, number: int, step: int, rehearsal: Rehearsal, feature_bytes: int) -> MemoryEstimate:
        plan = self._planner.make(replace(self._recipe, num_batches=number), (0, 0, step))
        # One co-batch is kept, of several the next ones are loaded while one is trained on.
        ahead = 0 if number == 1 else self._request.depth
        return estimate(plan, rehearsal, feature_bytes, ahead=ahead)

    def _row(self) -> Tensor:
        """Return (1, F) of what goes into the model, in its type."""
        inputs = next(iter(self._request.columns.inputs.values()), {})
        if len(inputs) != 1:
            raise ConfigError(
                f"option memory needs one column that goes into the model, and the sampler prefetches "
                f"{list(inputs)}; give prefetch_node_feats=['feat'], or batches=R in place of memory"
            )
        (key,) = inputs.values()
        rows = self._g.kvstore.pull(key, np.zeros(1, np.int64), phase="preload")
        return self._request.columns.precision.converted(rows).clone()

    def _rehearsed(self, model: nn.Module, row: Tensor) -> Rehearsal:
        g, num_nodes = self._g, self._g.num_nodes()
        topology = g.session.topology
        return rehearse(
            model,
            self._request.num_layers,
            row.to(torch.device("cpu")),
            with_halo=len(topology.ranks_of_server(topology.server)) > 1,
            etype=g.canonical_etypes[0],
            out_degrees=lambda ids: g.out_degrees(ids % num_nodes),
            seed=g.session.seed,
        )
