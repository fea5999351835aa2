"""The job ``survey``: what data-parallel training will move, counted by one process from the same draws.

Draws are keyed by seed, epoch and global id, so one process can make the batches of every rank, and the bytes
that follow from them are those of the run itself, to the byte.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import dgl
import numpy as np
from torch import Tensor

from dglx_dist.bench.jobs.context import JobContext
from dglx_dist.bench.jobs.train_params import TrainParams, read_params
from dglx_dist.cluster.topology import Topology
from dglx_dist.graph import DistGraph
from dglx_dist.graph.placement import Placement
from dglx_dist.graph.split import marked_ids, split_ids
from dglx_dist.records import FEATURE, LABEL, NODE_TYPE, Array
from dglx_dist.run.session import DataLoader, init
from dglx_dist.training.models import build_model

_ID_BYTES, _EDGE_BYTES = 8, 24
"""algorithms 1.3: an id asked for; source, destination and id of an edge that is returned."""


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What the first measured epoch of a run comes to, over all ranks."""

    steps: int
    """Of every rank: as many as the one with most seeds needs."""
    input_rows: int
    remote_rows: int
    """Of them on another server."""
    edges: int
    seeds_per_server: list[int]
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

    @property
    def payload_bytes(self) -> int:
        """Payload between servers, where each has one rank."""
        return self.feature_bytes + self.sampling_bytes + self.label_bytes + self.gradient_bytes

    @property
    def seeds_max_over_mean(self) -> float:
        """Of the servers; 1 is even."""
        return max(self.seeds_per_server) * len(self.seeds_per_server) / max(sum(self.seeds_per_server), 1)


def run(params: Mapping[str, Any], context: JobContext) -> dict[str, Any]:
    """Return the fields of a :class:`Survey` by name of a run; one process counts them all.

    Args:
        params: Name to ``train``: parameters of the job ``train``; and ``servers``: on how many it will run,
            one rank on each.
        context: Of the only rank.

    Raises:
        ConfigError: a parameter is unknown or out of range.
        StorageError: a dataset is missing or damaged.
    """
    return {name: asdict(_survey(one, context)) for name, one in params.items()}


def _survey(params: Mapping[str, Any], context: JobContext) -> Survey:
    told, servers = read_params(params["train"]), int(params["servers"])
    with init(timeout=context.timeout_s, seed=told.seed) as session:
        g = DistGraph(told.data, session=session)
        count = _Count(g, servers)
        for server in range(servers):
            count.rank(told, server)
        found = count.total(told)
        g.close()
    return found


class _Count:
    """Adds up what the batches of all ranks need from elsewhere."""

    def __init__(self, g: DistGraph, servers: int) -> None:
        self._g, self._servers = g, servers
        offsets = g.dataset.manifest.node_offsets[NODE_TYPE]
        self._placement = Placement(g.dataset.manifest.num_parts, _topology(0, servers))
        self._bounds: Array = self._placement.server_offsets(offsets)
        self._rows, self._remote, self._edges, self._remote_seeds = 0, 0, 0, 0
        self._asked, self._returned = 0, 0
        self._first_targets, self._first_edges = 0, 0
        self._seeds: list[int] = []
        self._steps = 0

    def rank(self, told: TrainParams, server: int) -> None:
        """Make the batches of the only rank of ``server``."""
        g = self._g
        marked = marked_ids(g.ndata["train_mask"], g.num_nodes())
        even = told.seeds == "even"
        seeds = split_ids(marked, self._bounds, _topology(server, self._servers), force_even=even)
        seeds = seeds[: told.max_seeds]
        self._seeds.append(len(seeds))
        sampler = dgl.dataloading.NeighborSampler(list(told.fanouts))
        loader = DataLoader(g, seeds, sampler, batch_size=told.batch_size, shuffle=True, num_threads=0)
        loader.set_epoch(told.warmup)
        self._steps = max(self._steps, len(loader))
        first, last = int(self._bounds[server]), int(self._bounds[server + 1])
        for inputs, targets, blocks in loader:
            self._rows += len(inputs)
            self._remote += int(_outside(inputs, first, last).sum())
            self._remote_seeds += int(_outside(targets, first, last).sum())
            self._first_targets += blocks[0].num_dst_nodes()
            self._first_edges += blocks[0].num_edges()
            for block in blocks:
                away = _outside(block.dstdata[dgl.NID], first, last)
                self._edges += block.num_edges()
                self._asked += int(away.sum())
                self._returned += int(block.in_degrees()[away].sum())

    def total(self, told: TrainParams) -> Survey:
        """Return the sum over the ranks so far."""
        g, partitioned = self._g, told.structure == "partitioned" and self._servers > 1
        sampling = _ID_BYTES * self._asked + _EDGE_BYTES * self._returned
        return Survey(
            steps=self._steps,
            input_rows=self._rows,
            remote_rows=self._remote,
            edges=self._edges,
            seeds_per_server=self._seeds,
            feature_bytes=(_ID_BYTES + _row_bytes(g, FEATURE)) * self._remote,
            sampling_bytes=sampling if partitioned else 0,
            label_bytes=(_ID_BYTES + _row_bytes(g, LABEL)) * self._remote_seeds,
            gradient_bytes=2 * (self._servers - 1) * _parameter_bytes(told, g) * self._steps,
            first_targets=self._first_targets,
            first_edges=self._first_edges,
        )


def _topology(rank: int, servers: int) -> Topology:
    return Topology(rank, servers, tuple(range(servers)))


def _outside(nodes: Tensor, first: int, last: int) -> Tensor:
    return (nodes < first) | (nodes >= last)


def _row_bytes(g: DistGraph, name: str) -> int:
    column = g.ndata[name]
    return int(np.prod(column.shape[1:], dtype=np.int64)) * column.dtype.itemsize


def _parameter_bytes(told: TrainParams, g: DistGraph) -> int:
    classes, width = int(g.num_classes(NODE_TYPE) or 0), g.ndata[FEATURE].shape[1]
    graph = g if told.norm == "graph" else None
    model = build_model(
        told.model, width, told.hidden, classes, len(told.fanouts), heads=told.heads, graph=graph
    )
    # With each tensor goes a flag of one element, that somebody has its gradient.
    return sum((parameter.numel() + 1) * parameter.element_size() for parameter in model.parameters())
