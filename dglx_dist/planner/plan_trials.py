"""Blocks of whole graphs to time a model on: those of a server that has the neighbourhood of its nodes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import dgl
import numpy as np
import torch
from torch import Tensor, nn

from dglx_dist.errors import ConfigError
from dglx_dist.layers.node_dropout import NodeDropouts, install_node_dropouts
from dglx_dist.planner.closure_plans import Ground
from dglx_dist.planner.model_shape import ModelShape
from dglx_dist.planner.rates import time_batches
from dglx_dist.records import EDGE_TYPE, Array
from dglx_dist.strategies.granndis.closure import Grower
from dglx_dist.strategies.granndis.halo_block import HaloBlock, halo_block
from dglx_dist.strategies.granndis.own_rows import own_rows, read_layers
from dglx_dist.strategies.granndis.shared_closure import HeldClosure

log = logging.getLogger(__name__)

_MOST_EDGES = 3_000_000
"""Of all layers of a neighbourhood that is tried."""
_PARTS = (8, 3, 1)
"""Of a server's training nodes one in so many, the smallest neighbourhood first."""
_FEW_SEEDS = 64
"""Of which neighbourhoods are tried where those of all are too large."""


def plan_trials(ground: Ground, seeds: Array, num_layers: int, server: int = 0) -> Iterator[list[HaloBlock]]:
    """Yield the blocks of all layers for parts of a server's training nodes, smallest first.

    They are those of shared preloading on a server of one rank, and of its co-batches: of the size, and with
    the wide ids, that training has; no row comes from elsewhere.

    Args:
        ground: Of a structure that is whole here.
        seeds: (K,) ascending int64 training nodes, of all servers.
        num_layers: L.
        server: Whose nodes.
    """
    first, last = ground.own(server)
    mine = seeds[(seeds >= first) & (seeds < last)]
    mine = mine if len(mine) else seeds
    if ground.structure.num_edges * num_layers > _MOST_EDGES:
        mine = mine[:: -(-len(mine) // _FEW_SEEDS)]
    for part in _PARTS:
        yield _blocks(ground, mine[::part], num_layers, server)


def _blocks(ground: Ground, seeds: Array, num_layers: int, server: int) -> list[HaloBlock]:
    grower = Grower(ground.structure, seeds)
    for _ in range(num_layers):
        grower.add(grower.sources())
    closure = grower.finish()
    held = HeldClosure(closure=closure, holders=np.zeros(len(closure.nodes), np.int32))
    own = own_rows(held, 0)
    layers = read_layers(own, held, num_layers, ground.own(server), 0, np.zeros_like)
    nodes = torch.from_numpy(own.nodes)
    blocks: list[HaloBlock] = []
    for depth, layer in enumerate(layers):
        alike = depth and layer is layers[depth - 1]
        blocks.append(blocks[-1].fresh() if alike else halo_block(layer, nodes, _NoPeers(), etype=EDGE_TYPE))
    return blocks


def time_on_plans(
    module: nn.Module, shape: ModelShape, trials: Sequence[Sequence[Any]], clock: Callable[[], float]
) -> tuple[Array, Array, float] | None:
    """Return what :func:`time_batches` gives for ``trials``; None for a model that does not run on them."""
    try:
        return time_batches(OnPlans(module), shape, trials, clock=clock)
    except ConfigError as problem:
        log.info("the model is timed on mini-batches alone: %s", problem)
        return None


class _NoPeers:
    """Stands for the exchange of a rank that needs nobody's rows."""

    def exchange(self, h: Tensor, kept: Tensor | None = None) -> Tensor:
        """Return ``h``."""
        return h


@final
class OnPlans(nn.Module):
    """A model that drops entries as strategies of whole graphs do: by node, not by torch's generator.

    Args:
        module: Called as ``module(blocks, features)``; a copy of this changes only its own.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._dropouts: NodeDropouts | None = None

    def forward(self, blocks: Sequence[Any], x: Tensor) -> Any:
        """Call the module."""
        if self._dropouts is None:
            self._dropouts = install_node_dropouts(self.module, 0)
        self._dropouts.begin(0, blocks[0].srcdata[dgl.NID])
        return self.module(blocks, x)
