"""Blocks with every in-neighbour, for evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from torch import Tensor

from dglx_dist.errors import ConfigError
from dglx_dist.records import Array
from dglx_dist.sampling.blocks import BlockBuilder

if TYPE_CHECKING:
    from dglx_dist.graph import DistGraph


@final
class FullBlocks:
    """Builds blocks whose destinations have all their in-edges; any rank alone, any time.

    In-degrees of such a block are those of the graph by construction. Its ``out_degrees()`` are the graph's
    too, unlike those of a block that DGL makes: a convolution that divides by the sources' degrees
    (``GraphConv(norm="both")``, ``norm="left"``) then computes what it computes on the whole graph.

    Args:
        g: A graph of one node and one edge type.
        device: Where the blocks shall be.

    Raises:
        ConfigError: the graph has several types.
    """

    def __init__(self, g: DistGraph, device: torch.device) -> None:
        if len(g.canonical_etypes) != 1:
            raise ConfigError(
                f"evaluation over all nodes needs one edge type, not {len(g.canonical_etypes)}; "
                "iterate over a dglx_dist.DataLoader with full fan-out and use dglx_dist.training.metrics"
            )
        self._g, self._device = g, device
        self._structure = g.structure(g.canonical_etypes[0])
        self._builder = BlockBuilder(g.canonical_etypes[0])

    def block(self, destinations: Array) -> tuple[Any, Array]:
        """Return the block of ``destinations`` ((K,) distinct int64 ids) and its (S,) source ids.

        The destinations are the first K sources.
        """
        edges = self._structure.ask("in_edges", destinations)
        candidates = np.setdiff1d(edges.sources, destinations)
        sources = np.concatenate([destinations, candidates])
        order = np.argsort(sources, kind="stable")
        local = order[np.searchsorted(sources, edges.sources, sorter=order)]
        ids = torch.from_numpy(sources)
        block = self._builder.block(
            torch.from_numpy(np.ascontiguousarray(edges.indptr)),
            torch.from_numpy(local),
            ids,
            torch.from_numpy(edges.edge_ids),
        )
        if self._device.type != "cpu":
            block = block.to(self._device)
        block.out_degrees = _GlobalOutDegrees(self._g, ids)
        return block, sources

    def blocks(self, destinations: Array, num_layers: int) -> tuple[list[Any], Array]:
        """Return the blocks of ``num_layers`` hops, input-most first, and the ids of its sources."""
        found: list[Any] = []
        ids = destinations
        for _ in range(num_layers):
            block, ids = self.block(ids)
            found.insert(0, block)
        return found, ids


class _GlobalOutDegrees:
    """Stands in for a block's ``out_degrees``; asks the graph only when a convolution does."""

    def __init__(self, g: DistGraph, ids: Tensor) -> None:
        self._g = g
        self._ids = ids

    def __call__(self, u: Any = "__ALL__", etype: Any = None) -> Tensor:
        ids = self._ids if isinstance(u, str) else self._ids[u]
        return self._g.out_degrees(ids)
