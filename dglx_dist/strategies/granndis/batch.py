"""A plan with its columns and its exchanges: what each epoch gets blocks of its own from."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, final

import dgl
import numpy as np
import torch
from torch import Tensor

from dglx_dist.strategies.granndis.exchange import HaloExchange
from dglx_dist.strategies.granndis.halo_block import HaloBlock, halo_block
from dglx_dist.strategies.granndis.plan import RankPlan
from dglx_dist.strategies.granndis.preload import PHASE, ColumnReader, PlanColumns

if TYPE_CHECKING:
    from dglx_dist.graph import DistGraph


@final
class HaloBatch:
    """What a rank trains on in one step; blocks of it may be had again and again.

    Making one reads its columns by one-sided calls, on any thread.

    Args:
        g: A graph of one node and one edge type.
        plan: Of this rank.
        reader: Of the columns.
        filled: Whether what goes into the model are the rows of all sources of layer 1, halo included; making
            one is collective then. Else it is the own rows, whose halo the first layer exchanges.
        device: Where blocks and columns shall be.

    Raises:
        PeerError: an owner of rows is dead or silent.
    """

    def __init__(
        self, g: DistGraph, plan: RankPlan, reader: ColumnReader, *, filled: bool, device: torch.device
    ) -> None:
        begin = time.perf_counter()
        self.plan = plan
        self._filled = filled
        exchanges: list[HaloExchange] = []
        # A plan out of a file may not be written to, of which torch warns.
        nodes = torch.from_numpy(np.require(plan.nodes, requirements="W"))
        self._blocks: list[HaloBlock] = []
        for depth, layer in enumerate(plan.layers):
            if depth and layer is plan.layers[depth - 1]:
                # Deep models have many layers over one structure, which is on the device once.
                exchanges.append(exchanges[-1].at(depth + 1))
                self._blocks.append(self._blocks[-1].through(exchanges[-1]))
            else:
                exchanges.append(HaloExchange(g.session, layer, depth + 1))
                etype, degrees = g.canonical_etypes[0], g.out_degrees
                block = halo_block(layer, nodes, exchanges[-1], etype=etype, out_degrees=degrees)
                self._blocks.append(block.to(device))
        columns = reader.read(plan, partial(exchanges[0].fetch, phase=PHASE) if filled else None)
        self._attach(columns.to(device))
        self._input_nodes = (self._blocks[0].srcdata[dgl.NID] if filled else nodes).to(device)
        self.fetch_s = time.perf_counter() - begin
        """Seconds that making it took."""

    @property
    def input_nodes(self) -> Tensor:
        """(n,) int64 global ids of the rows that go into the model."""
        return self._input_nodes

    def blocks(self) -> list[HaloBlock]:
        """Return the blocks, input-most first; their frames are new, structure and columns are shared."""
        return [block.fresh() for block in self._blocks]

    def _attach(self, columns: PlanColumns) -> None:
        first, last = self._blocks[0], self._blocks[-1]
        for name, rows in columns.inputs.items():
            if self._filled:
                first.set_all(name, rows)
            else:
                first.set_own(name, rows)
        last.dstdata.update(columns.targets)
        for block, edges in zip(self._blocks, columns.edges, strict=bool(columns.edges)):
            block.edata.update(edges)
