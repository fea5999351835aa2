"""A block of several types as one of a single type, for convolutions that tell types by numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import dgl
import torch
from torch import Tensor

from dglx_dist.records import EdgeType


@dataclass(frozen=True, kw_only=True)
class MergedBlock:
    """One node and one edge type; destinations, type by type, come first among the sources."""

    block: Any
    node_type: Tensor
    """(num_src,) int64: position in the node types."""
    edge_type: Tensor
    """(E,) int64: position in the edge types."""
    num_dst: Mapping[str, int]
    """Destinations per node type, in the order in which they stand."""

    def join(self, rows: Mapping[str, Tensor]) -> Tensor:
        """Return the (num_src, F) rows of all sources from those of each type."""
        heads = [rows[ntype][:count] for ntype, count in self.num_dst.items()]
        tails = [rows[ntype][count:] for ntype, count in self.num_dst.items()]
        return torch.cat([*heads, *tails])

    def split(self, rows: Tensor) -> dict[str, Tensor]:
        """Undo :meth:`join` for (num_dst, H) rows of the destinations."""
        return dict(zip(self.num_dst, torch.split(rows, list(self.num_dst.values())), strict=True))


def merge_block(block: Any, ntypes: Sequence[str], etypes: Sequence[EdgeType]) -> MergedBlock:
    """Merge ``block``, whose types are among ``ntypes`` and ``etypes``."""
    num_dst = {ntype: block.num_dst_nodes(ntype) for ntype in ntypes}
    num_rest = {ntype: block.num_src_nodes(ntype) - num_dst[ntype] for ntype in ntypes}
    first_dst = _starts(num_dst, 0)
    first_rest = _starts(num_rest, sum(num_dst.values()))
    sources, destinations, kinds = [], [], []
    for number, (source, relation, destination) in enumerate(etypes):
        u, v = (ends.long() for ends in block.edges(etype=(source, relation, destination)))
        inside = u < num_dst[source]
        sources.append(torch.where(inside, u + first_dst[source], u - num_dst[source] + first_rest[source]))
        destinations.append(v + first_dst[destination])
        kinds.append(torch.full_like(u, number))
    total = sum(num_dst.values())
    merged = dgl.create_block(
        (torch.cat(sources), torch.cat(destinations)),
        num_src_nodes=total + sum(num_rest.values()),
        num_dst_nodes=total,
    )
    counts = torch.tensor([*num_dst.values(), *num_rest.values()], device=block.device)
    numbers = torch.arange(len(ntypes), device=block.device).repeat(2)
    return MergedBlock(
        block=merged,
        node_type=numbers.repeat_interleave(counts),
        edge_type=torch.cat(kinds),
        num_dst=num_dst,
    )


def _starts(counts: Mapping[str, int], first: int) -> dict[str, int]:
    return dict(zip(counts, accumulate(counts.values(), initial=first), strict=False))
