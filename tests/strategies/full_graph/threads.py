"""Ranks as threads of one process, whose autograd graph spans them all."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import dgl
import numpy as np
import torch
from torch import Tensor

from dglx_dist.comm.topology import Topology
from dglx_dist.graph.structure import ReplicatedStructure
from dglx_dist.records import EDGE_TYPE
from dglx_dist.strategies.cost import PartitionContext
from dglx_dist.strategies.full_graph.halo_block import HaloBlock, halo_block
from dglx_dist.strategies.full_graph.halo_plan import HaloLayer, RankPlan
from dglx_dist.strategies.full_graph.plan_builder import plan_all, seeds_by_server

TIMEOUT_S = 20.0
TOLERANCE = {"rtol": 0.0, "atol": 1e-10}

# Node 11 has no in-neighbour but itself, and is one of others: its rank sends and receives nothing.
NUM_NODES = 12
OWNER = np.array([0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 2])
ALL_NODES = np.arange(NUM_NODES)
SEEDS = np.array([0, 1, 4, 5, 6, 9])
"""None of rank 2, and not all of the others."""


def whole_graph() -> dgl.DGLGraph:
    """A graph of 12 nodes with self-loops, whose edges are numbered by destination, then source."""
    draw = np.random.default_rng(3)
    others = draw.integers(0, NUM_NODES, (2, 30))
    others = others[:, others[1] != 11]
    ends = np.concatenate([others, [ALL_NODES, ALL_NODES], [[11, 11], [0, 8]]], axis=1)
    ends = np.unique(ends, axis=1)
    ends = ends[:, np.lexsort((ends[0], ends[1]))]
    return dgl.graph((torch.from_numpy(ends[0]), torch.from_numpy(ends[1])), num_nodes=NUM_NODES)


def features() -> Tensor:
    return torch.randn(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def plans_of(
    g: dgl.DGLGraph, seeds: np.ndarray, num_layers: int, owner: np.ndarray = OWNER
) -> list[RankPlan]:
    """Plans of ranks that compute their own nodes, each a server."""
    src, dst = (ends.numpy() for ends in g.edges())
    indptr = np.concatenate([[0], np.cumsum(np.bincount(dst, minlength=len(owner)))])
    counts = np.bincount(owner)
    context = PartitionContext(
        structure=ReplicatedStructure(EDGE_TYPE, len(owner), indptr, src),
        bounds=np.concatenate([[0], np.cumsum(counts)]),
        topology=Topology(0, len(counts), tuple(range(len(counts)))),
        seed=0,
    )
    return plan_all(context, seeds_by_server(context, seeds), num_layers, 0)


class FakeExchange:
    """Hands rows over between threads; autograd sees no border."""

    def __init__(
        self, rank: int, layer: HaloLayer, lanes: dict[tuple[int, int], queue.Queue[Tensor]]
    ) -> None:
        self._rank, self._layer, self._lanes = rank, layer, lanes
        self.given: list[tuple[int, ...]] = []
        """Shapes of what was exchanged."""
        self.backwards = 0

    def exchange(self, h: Tensor, kept: Tensor | None = None) -> Tensor:
        """As of HaloExchange."""
        assert len(h) == self._layer.own_rows
        if not (self._layer.send or self._layer.receive):
            return h
        self.given.append(tuple(h.shape))
        if kept is not None:
            return torch.cat([h, kept])
        for peer, rows in self._layer.send:
            self._lanes[self._rank, peer].put(h[torch.from_numpy(rows)])
        halo = [self._lanes[peer, self._rank].get(timeout=TIMEOUT_S) for peer, _ in self._layer.receive]
        whole = torch.cat([h, *halo])
        if whole.requires_grad:
            whole.register_hook(self._count)
        return whole

    def _count(self, gradient: Tensor) -> None:
        self.backwards += 1


class World:
    """All ranks of a set of plans."""

    def __init__(
        self, g: dgl.DGLGraph, seeds: np.ndarray, num_layers: int, owner: np.ndarray = OWNER
    ) -> None:
        self.plans = plans_of(g, seeds, num_layers, owner)
        ranks = range(len(self.plans))
        degrees = g.out_degrees()
        self.exchanges: list[list[FakeExchange]] = []
        self.blocks: list[list[HaloBlock]] = []
        lanes = [{(a, b): queue.Queue() for a in ranks for b in ranks} for _ in range(num_layers)]
        for rank, plan in enumerate(self.plans):
            made = [FakeExchange(rank, layer, lanes[n]) for n, layer in enumerate(plan.layers)]
            self.exchanges.append(made)
            nodes = torch.from_numpy(plan.nodes)
            self.blocks.append(
                [
                    halo_block(layer, nodes, exchange, out_degrees=lambda ids: degrees[ids])
                    for layer, exchange in zip(plan.layers, made, strict=True)
                ]
            )

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """Call ``work(rank)`` on a thread each; return what they returned, or raise the first error."""
        results: list[Any] = [None] * len(self.plans)
        errors: list[BaseException] = []

        def call(rank: int) -> None:
            try:
                results[rank] = work(rank)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=call, args=(rank,)) for rank in range(len(self.plans))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(3 * TIMEOUT_S)
        if errors:
            raise errors[0]
        return results


def gradients_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Take the gradients off ``tensors``; zeros where there are none."""
    found = [torch.zeros_like(one) if one.grad is None else one.grad for one in tensors]
    for one in tensors:
        one.grad = None
    return found
