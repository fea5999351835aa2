"""Blocks with every in-neighbour, for evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, final

import dgl
import numpy as np
import torch
from dgl.heterograph import DGLBlock
from torch import Tensor

from dglx_dist.graph.in_edges import InEdges
from dglx_dist.records import Array, EdgeType
from dglx_dist.sampling.blocks import BlockBuilder

if TYPE_CHECKING:
    from dglx_dist.graph import DistGraph

_NONE = np.zeros(0, dtype=np.int64)


@final
class FullBlocks:
    """Builds blocks whose destinations have all their in-edges; any rank alone, any time.

    In-degrees of such a block are those of the graph by construction. Its ``out_degrees()`` are the graph's
    too, unlike those of a block that DGL makes: a convolution that divides by the sources' degrees
    (``GraphConv(norm="both")``, ``norm="left"``) then computes what it computes on the whole graph.

    Args:
        g: The graph, of any types.
        device: Where the blocks shall be.
    """

    def __init__(self, g: DistGraph, device: torch.device) -> None:
        self._g, self.device = g, device
        self._etypes = g.canonical_etypes

    def block(self, destinations: Mapping[str, Array]) -> tuple[Any, dict[str, Array]]:
        """Return the block of ``destinations`` and the (S,) source ids per node type.

        Args:
            destinations: Node type to (K,) distinct int64 ids; types may be missing. They are the first K
                sources of their type.
        """
        wanted = {ntype: destinations.get(ntype, _NONE) for ntype in self._g.ntypes}
        # All requests leave before the first answer is read.
        pending = {
            etype: self._g.structure(etype).submit("in_edges", wanted[etype[2]]) for etype in self._etypes
        }
        edges = {etype: asked.result() for etype, asked in pending.items()}
        sources = {ntype: self._sources(ntype, ids, edges) for ntype, ids in wanted.items()}
        if len(self._etypes) == 1 and len(wanted) == 1:
            block = self._of_one_type(edges[self._etypes[0]], sources[self._g.ntypes[0]])
        else:
            block = self._of_types(edges, sources, wanted)
        return block, sources

    def blocks(
        self, destinations: Mapping[str, Array], num_layers: int
    ) -> tuple[list[Any], dict[str, Array]]:
        """Return the blocks of ``num_layers`` hops, input-most first, and the ids of its sources."""
        found: list[Any] = []
        ids = dict(destinations)
        for _ in range(num_layers):
            block, ids = self.block(ids)
            found.insert(0, block)
        return found, ids

    def _sources(self, ntype: str, destinations: Array, edges: Mapping[EdgeType, InEdges]) -> Array:
        ends = [drawn.sources for etype, drawn in edges.items() if etype[0] == ntype]
        others = np.setdiff1d(np.concatenate([_NONE, *ends]), destinations)
        return np.concatenate([destinations, others])

    def _of_one_type(self, edges: InEdges, sources: Array) -> Any:
        etype = self._etypes[0]
        ids = torch.from_numpy(sources)
        block: Any = BlockBuilder(etype).block(
            torch.from_numpy(np.ascontiguousarray(edges.indptr)),
            torch.from_numpy(_places(edges.sources, sources)),
            ids,
            torch.from_numpy(edges.edge_ids),
        )
        if self.device.type != "cpu":
            block = block.to(self.device)
        block.out_degrees = _GlobalOutDegrees(self._g, etype, ids)
        return block

    def _of_types(
        self, edges: Mapping[EdgeType, InEdges], sources: Mapping[str, Array], wanted: Mapping[str, Array]
    ) -> Any:
        columns = {
            etype: (
                "csc",
                (
                    torch.from_numpy(np.ascontiguousarray(drawn.indptr)),
                    torch.from_numpy(_places(drawn.sources, sources[etype[0]])),
                    torch.arange(len(drawn.sources)),
                ),
            )
            for etype, drawn in edges.items()
        }
        made = dgl.create_block(
            columns,
            {ntype: len(ids) for ntype, ids in sources.items()},
            {ntype: len(ids) for ntype, ids in wanted.items()},
        )
        for ntype, ids in sources.items():
            made.srcnodes[ntype].data[dgl.NID] = torch.from_numpy(ids)
            made.dstnodes[ntype].data[dgl.NID] = torch.from_numpy(wanted[ntype])
        for etype, drawn in edges.items():
            made.edges[etype].data[dgl.EID] = torch.from_numpy(drawn.edge_ids)
        made = made.to(self.device)
        types = (made.srctypes, made.dsttypes)
        block = _WholeBlock(made._graph, types, made.etypes, made._node_frames, made._edge_frames)
        block.whole = self._g
        return block


class _WholeBlock(DGLBlock):
    """A block whose slices by edge type know the out-degrees of the graph."""

    whole: DistGraph | None = None
    """Set after construction, for DGL makes slices and copies with the same class."""

    def __getitem__(self, key: Any) -> Any:
        part = super().__getitem__(key)
        if self.whole is None:
            return part
        (etype,) = part.canonical_etypes
        part.whole = self.whole
        part.out_degrees = _GlobalOutDegrees(self.whole, etype, part.srcdata[dgl.NID])
        return part


class _GlobalOutDegrees:
    """Stands in for a block's ``out_degrees``; asks the graph only when a convolution does."""

    def __init__(self, g: DistGraph, etype: EdgeType, ids: Tensor) -> None:
        self._g, self._etype = g, etype
        self._ids = ids

    def __call__(self, u: Any = "__ALL__", etype: Any = None) -> Tensor:
        ids = self._ids if isinstance(u, str) else self._ids[u]
        return self._g.out_degrees(ids, self._etype).to(ids.device)


def _places(ids: Array, among: Array) -> Array:
    """Return where each of ``ids`` stands in the distinct ids ``among``, which has them all."""
    order = np.argsort(among, kind="stable")
    return order[np.searchsorted(among, ids, sorter=order)]
