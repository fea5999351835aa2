"""Blocks to time a model on: mini-batches of several sizes, and neighbourhoods with all their edges."""

from __future__ import annotations

import statistics
import time
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import dgl
import numpy as np
import torch

from dglx_dist.planner.rates import ByteRates
from dglx_dist.planner.survey import Draws
from dglx_dist.records import FEATURE, Array
from dglx_dist.sampling import DataLoader

if TYPE_CHECKING:
    from dglx_dist.graph import DistGraph

_MOST_EDGES = 3_000_000
"""Of all layers of a neighbourhood that is tried."""
_PARTS_OF_A_BATCH = (1, 2, 4)
_MOST_SEEDS = 64
_GATHERED = 20_000
_REPETITIONS = 5


def trials(
    g: DistGraph, seeds: Array, draws: Draws | None, num_layers: int, *, whole: bool
) -> Iterator[list[Any]]:
    """Yield blocks; every rank of ``g``'s session must take all of them.

    Args:
        g: Of one node and edge type.
        seeds: (K,) int64 training nodes, at least one.
        draws: Of mini-batches; None: none are tried.
        num_layers: L.
        whole: Whether to try neighbourhoods with all edges too, as whole graphs have them.
    """
    topology = g.session.topology
    if len(seeds) >= topology.world_size:
        # Every rank tries other ones, as in training, and all as many.
        seeds = seeds[topology.rank :: topology.world_size][: len(seeds) // topology.world_size]
    for part in _PARTS_OF_A_BATCH if draws is not None else ():
        assert draws is not None
        size = min(max(draws.batch_size // part, 1), len(seeds))
        yield _blocks(g, _spread(seeds, size), draws.fanouts)
    if not whole:
        return
    small = g.num_edges() * num_layers <= _MOST_EDGES
    size = len(seeds) if small else min(len(seeds), _MOST_SEEDS)
    for count in sorted({max(size // 4, 1), size}):
        yield _blocks(g, _spread(seeds, count), (-1,) * num_layers)


def byte_rates(g: DistGraph, nodes: Array, clock: Callable[[], float] = time.perf_counter) -> ByteRates:
    """Return what moving features of some of ``nodes`` takes, which this server should own."""
    ids = np.resize(nodes, _GATHERED)
    column = g.ndata[FEATURE]
    # The first time maps the file.
    rows = column[ids].contiguous()
    count = max(rows.numel() * rows.element_size(), 1)
    plain = rows.view(torch.uint8).numpy().reshape(-1)

    def timed(work: Callable[[], object]) -> float:
        seconds = []
        for _ in range(_REPETITIONS):
            begin = clock()
            work()
            seconds.append(clock() - begin)
        return statistics.median(seconds) / count

    return ByteRates(gather=timed(lambda: column[ids]), check=timed(lambda: zlib.crc32(plain.data)))


def _spread(seeds: Array, count: int) -> Array:
    """Return ``count`` of ``seeds``, from all over the graph as those of a shuffled batch are."""
    return seeds[np.unique(np.linspace(0, len(seeds) - 1, count).astype(np.int64))]


def _blocks(g: DistGraph, seeds: Array, fanouts: tuple[int, ...]) -> list[Any]:
    sampler = dgl.dataloading.NeighborSampler(list(fanouts))
    loader = DataLoader(g, seeds, sampler, batch_size=len(seeds), num_threads=0)
    ((_, _, blocks),) = list(loader)
    return list(blocks)
