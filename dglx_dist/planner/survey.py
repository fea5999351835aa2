"""What an epoch of mini-batches moves and computes, counted from the very draws of training.

Draws are keyed by seed, epoch and global id, so one process can make the batches of every rank, and the bytes
that follow from them are those of the run itself, to the byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import dgl
import numpy as np
from torch import Tensor

from dglx_dist.cluster.topology import Topology
from dglx_dist.graph.split import split_ids
from dglx_dist.records import Array
from dglx_dist.sampling import DataLoader

if TYPE_CHECKING:
    from dglx_dist.graph import DistGraph

_ID_BYTES, _EDGE_BYTES = 8, 24
"""algorithms 1.3: an id asked for; source, destination and id of an edge that is returned."""


@dataclass(frozen=True, kw_only=True)
class Draws:
    """Which batches are made."""

    fanouts: tuple[int, ...]
    """Input-most first; -1: all."""
    batch_size: int
    """Seeds per rank and step."""
    epoch: int = 1
    force_even: bool = True
    """As of ``node_split``."""
    most_seeds: int | None = None
    """Of a rank; what it has more is left out."""
    most_batches: int | None = None
    """Of a rank that are counted; None: all of the epoch."""


@dataclass(frozen=True, kw_only=True)
class RankCount:
    """What the batches of one rank need. JSON values."""

    seeds: int
    steps: int
    """Batches that this rank has, counted or not."""
    counted: int
    """Batches that were made."""
    remote_rows: list[int]
    """(S,) input rows by the server that owns them; none of the own one."""
    remote_seeds: int
    """Targets of the last layer whose labels another server has."""
    sources: list[int]
    """(L,) rows that go into each layer, input-most first."""
    targets: list[int]
    """(L,) rows that come out of each layer."""
    edges: list[int]
    """(L,)."""
    asked: int
    """Nodes of other servers whose in-edges were drawn."""
    returned: int
    """In-edges drawn for them."""
    largest: list[list[int]]
    """(3, L) sources, targets and edges of the batch with most input rows."""
    hits: list[int] = field(default_factory=list)
    """Of the remote rows, those that caches of several sizes hold, in the order of these."""


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What an epoch of mini-batches comes to, over all ranks."""

    steps: int
    """Of every rank: as many as the one with most seeds needs."""
    input_rows: int
    remote_rows: int
    """Of them on another server."""
    edges: int
    seeds_per_rank: list[int]
    feature_bytes: int
    """(8 + F s) for each remote row."""
    sampling_bytes: int
    """8 for each remote node asked for in-edges, 24 for each that is returned; 0 with the whole structure."""
    label_bytes: int
    gradient_bytes: int
    """2 (W - 1) (|theta| s + a flag of s bytes for each parameter tensor) for each step."""
    first_targets: int = 0
    """D1 of algorithms 2.4: destinations of the layer-1 blocks; their sources, L0, are ``input_rows``."""
    first_edges: int = 0
    """E1: edges of the layer-1 blocks."""
    ranks_per_server: int = 1

    @property
    def ranks(self) -> int:
        """W."""
        return len(self.seeds_per_rank)

    @property
    def payload_bytes(self) -> int:
        """Payload between ranks; between servers, where each has one rank."""
        return self.feature_bytes + self.sampling_bytes + self.label_bytes + self.gradient_bytes

    @property
    def seeds_per_server(self) -> list[int]:
        """(S,)."""
        size = self.ranks_per_server
        return [sum(self.seeds_per_rank[first : first + size]) for first in range(0, self.ranks, size)]

    @property
    def seeds_max_over_mean(self) -> float:
        """Of the servers; 1 is even."""
        servers = self.seeds_per_server
        return max(servers) * len(servers) / max(sum(servers), 1)


def count_rank(
    g: DistGraph,
    draws: Draws,
    seeds: Array,
    place: tuple[Topology, Array],
    *,
    held: Sequence[Array] = (),
    keep: list[list[Any]] | None = None,
) -> RankCount:
    """Make the batches of one rank and count them; every rank of ``g``'s session must call it.

    Args:
        g: Of one node and edge type; its session may be of one rank, and the batches those of another.
        draws: Which batches.
        seeds: (K,) int64 all marked nodes, ascending; the rank's share is taken from them.
        place: Topology of the rank, and the (S + 1,) int64 first node of each server.
        held: (N,) bool masks, the rows that caches of different sizes hold on the rank's server.
        keep: Gets the blocks that were made, for whoever wants to compute on them; None: nobody.
    """
    topology, bounds = place
    mine = split_ids(seeds, bounds, topology, force_even=draws.force_even)[: draws.most_seeds]
    sampler = dgl.dataloading.NeighborSampler(list(draws.fanouts))
    loader = DataLoader(g, mine, sampler, batch_size=draws.batch_size, shuffle=True, num_threads=0)
    loader.set_epoch(draws.epoch)
    count = _Count(len(draws.fanouts), bounds, topology.server, held)
    for number, (inputs, targets, blocks) in enumerate(loader):
        if draws.most_batches is not None and number >= draws.most_batches:
            break
        assert isinstance(inputs, Tensor)
        assert isinstance(targets, Tensor)
        count.add(inputs, targets, blocks)
        if keep is not None:
            keep.append(blocks)
    return count.total(len(mine), -(-len(mine) // draws.batch_size))


class _Count:
    """Adds up what batches need from elsewhere."""

    def __init__(self, layers: int, bounds: Array, server: int, held: Sequence[Array]) -> None:
        self._bounds, self._held = bounds, held
        self._own = int(bounds[server]), int(bounds[server + 1])
        self._remote: Array = np.zeros(len(bounds) - 1, np.int64)
        self._sizes: Array = np.zeros((3, layers), np.int64)
        self._largest: Array = np.zeros((3, layers), np.int64)
        self._hits = [0] * len(held)
        self._seeds, self._asked, self._returned, self._batches = 0, 0, 0, 0

    def add(self, inputs: Tensor, targets: Tensor, blocks: Sequence[Any]) -> None:
        """Count one batch."""
        self._batches += 1
        rows = inputs.numpy()
        remote = rows[_outside(rows, *self._own)]
        owners = np.searchsorted(self._bounds, remote, side="right") - 1
        self._remote += np.bincount(owners, minlength=len(self._remote))
        self._seeds += int(_outside(targets.numpy(), *self._own).sum())
        for place, mask in enumerate(self._held):
            self._hits[place] += int(mask[remote].sum())
        sizes = np.array(
            [
                [block.num_src_nodes() for block in blocks],
                [block.num_dst_nodes() for block in blocks],
                [block.num_edges() for block in blocks],
            ]
        )
        self._sizes += sizes
        self._largest = max(self._largest, sizes, key=lambda one: int(one[0, 0]))
        for block in blocks:
            away = _outside(block.dstdata[dgl.NID], *self._own)
            self._asked += int(away.sum())
            self._returned += int(block.in_degrees()[away].sum())

    def total(self, seeds: int, steps: int) -> RankCount:
        """Return the sums so far."""
        return RankCount(
            seeds=seeds,
            steps=steps,
            counted=self._batches,
            remote_rows=self._remote.tolist(),
            remote_seeds=self._seeds,
            sources=self._sizes[0].tolist(),
            targets=self._sizes[1].tolist(),
            edges=self._sizes[2].tolist(),
            asked=self._asked,
            returned=self._returned,
            largest=self._largest.tolist(),
            hits=self._hits,
        )


def summed(
    ranks: Sequence[RankCount],
    *,
    row_bytes: Mapping[str, int],
    parameter_bytes: int,
    partitioned: bool,
    ranks_per_server: int = 1,
) -> Survey:
    """Return the sum over the ranks, of what was counted.

    Args:
        ranks: (W,).
        row_bytes: Of a row of ``feat`` and of ``label``.
        parameter_bytes: Of all gradients, with a flag of one element for each tensor.
        partitioned: Whether servers ask each other for in-edges.
        ranks_per_server: G.
    """
    steps = max(one.steps for one in ranks)
    world_size = len(ranks)
    sampling = sum(_ID_BYTES * one.asked + _EDGE_BYTES * one.returned for one in ranks)
    remote = sum(sum(one.remote_rows) for one in ranks)
    spread = partitioned and world_size > ranks_per_server
    return Survey(
        steps=steps,
        input_rows=sum(one.sources[0] for one in ranks),
        remote_rows=remote,
        edges=sum(sum(one.edges) for one in ranks),
        seeds_per_rank=[one.seeds for one in ranks],
        feature_bytes=(_ID_BYTES + row_bytes["feat"]) * remote,
        sampling_bytes=sampling if spread else 0,
        label_bytes=(_ID_BYTES + row_bytes["label"]) * sum(one.remote_seeds for one in ranks),
        gradient_bytes=2 * (world_size - 1) * parameter_bytes * steps,
        first_targets=sum(one.targets[0] for one in ranks),
        first_edges=sum(one.edges[0] for one in ranks),
        ranks_per_server=ranks_per_server,
    )


def _outside(nodes: Any, first: int, last: int) -> Any:
    return (nodes < first) | (nodes >= last)
