"""Loops over loaders of push-pull that can run in any rank, and what each part has of each owner's batch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dgl
import numpy as np
import torch
from dgl.dataloading import NeighborSampler

from dglx_dist.data.storage.writer import write_dataset
from dglx_dist.dataloading.edge_loader import DistEdgeDataLoader
from dglx_dist.dataloading.loader import DataLoader
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, Assignment, RawGraph
from dglx_dist.strategies.push_pull.exchange import Group, GroupBatch, PartInput, make_group
from dglx_dist.strategies.push_pull.feature_columns import open_columns
from dglx_dist.strategies.push_pull.loader import PushPullLoader, open_loader
from dglx_dist.strategies.push_pull.options import PushPullOptions

NUM_NODES, HALF, WIDTH = 80, 320, 5
FANOUTS = [3, 2]


def ring() -> RawGraph:
    """Node n and the next four around a ring; the source's edge i + HALF is the reverse of edge i."""
    pairs = [(n, (n + step) % NUM_NODES) for step in (1, 2, 3, 4) for n in range(NUM_NODES)]
    sources, destinations = np.random.default_rng(1).permutation(np.array(pairs)).T
    ids = np.arange(NUM_NODES)
    return RawGraph(
        name="ring",
        num_nodes={NODE_TYPE: NUM_NODES},
        edges={EDGE_TYPE: (np.concatenate([sources, destinations]), np.concatenate([destinations, sources]))},
        node_data={
            NODE_TYPE: {
                "feat": (ids[:, None] * 10 + np.arange(WIDTH)).astype(np.float32),
                "small": (ids[:, None] % 3 + np.zeros((1, 2))).astype(np.float16),
                "label": ids % 7,
                "depth": ids.astype(np.float32),
            }
        },
        edge_data={EDGE_TYPE: {"weight": np.arange(2 * HALF, dtype=np.float32)}},
        num_classes={NODE_TYPE: 7},
    )


def write_ring(folder: Path, num_parts: int) -> Path:
    part_of = np.random.default_rng(3).integers(num_parts, size=NUM_NODES).astype(np.int32)
    assignment = Assignment(num_parts=num_parts, part_of={NODE_TYPE: part_of}, method="test", seed=0)
    write_dataset(ring(), assignment, folder)
    return folder


def share_of(count: int, rank: int, world_size: int) -> torch.Tensor:
    """Uneven shares: rank 1 has none, rank 0 the most."""
    owners = torch.arange(count) * 7919 % 10
    bounds = [0, 6, 6, 9, 10][: world_size + 1]
    bounds[-1] = 10
    return ((owners >= bounds[rank]) & (owners < bounds[rank + 1])).nonzero()[:, 0]


def sampler_of(**prefetch: Any) -> NeighborSampler:
    return NeighborSampler(
        FANOUTS, **({"prefetch_node_feats": ["feat"], "prefetch_labels": ["label"]} | prefetch)
    )


def nodes_of(g: DistGraph, sampler: Any = None, group: Group | None = None, **given: Any) -> PushPullLoader:
    """A loader of nodes; what is no option of the strategy is one of the loader."""
    options, rest = _parted(given)
    ours = group or make_group(g.session, g.session.topology.world_size)
    topology = g.session.topology
    seeds = share_of(NUM_NODES, topology.rank, topology.world_size)
    store = open_columns(g, ["feat"], ours)
    return open_loader(DataLoader, g, seeds, sampler or sampler_of(), store, ours, options, rest)


def edges_of(g: DistGraph, **given: Any) -> PushPullLoader:
    options, rest = _parted(given)
    topology = g.session.topology
    group = make_group(g.session, topology.world_size)
    eids = share_of(2 * HALF, topology.rank, topology.world_size)[::4]
    store = open_columns(g, ["feat"], group)
    return open_loader(DistEdgeDataLoader, g, eids, sampler_of(), store, group, options, rest)


def _parted(given: Mapping[str, Any]) -> tuple[PushPullOptions, dict[str, Any]]:
    known = ("structure", "depth_of_pipeline")
    rest = {name: value for name, value in given.items() if name not in known}
    rest.setdefault("batch_size", 8)
    options = PushPullOptions(
        structure=given.get("structure", "push"), depth=given.get("depth_of_pipeline", 1)
    )
    return options, rest


def in_edges(block: Any, nodes: torch.Tensor) -> list[tuple[int, int]]:
    """(source, destination) as global ids, in the order of the columns."""
    indptr, indices, _ = block.adj_tensors("csc")
    destinations = nodes[: block.num_dst_nodes()].repeat_interleave(indptr.diff().long())
    return list(zip(nodes[indices.long()].tolist(), destinations.tolist(), strict=True))


def seen(one: PartInput) -> dict[str, Any]:
    """What a part has of one owner's batch, and what must be equal on all parts."""
    return {
        "number": one.number,
        "nodes": one.nodes.tolist(),
        "destinations": one.block.num_dst_nodes(),
        "edges": in_edges(one.block, one.nodes),
        "idtype": str(one.block.idtype),
        "columns": {name: rows.numpy() for name, rows in one.columns.items()},
    }


def group_batch_of(batch: Any) -> GroupBatch:
    group_batch: GroupBatch = batch[-1][0].push_pull
    return group_batch


def epoch_of(loader: PushPullLoader) -> list[list[dict[str, Any]]]:
    """By step, by owner: what this part has."""
    found = []
    for batch in loader:
        group_batch, block = group_batch_of(batch), batch[-1][0]
        own = loader_part(loader)
        assert group_batch.inputs[own].block.edata.keys() == block.edata.keys()
        for name, values in group_batch.inputs[own].block.edata.items():
            assert values.data_ptr() == block.edata[name].data_ptr()
        assert torch.equal(block.srcdata[dgl.NID], group_batch.inputs[own].nodes)
        for name, rows in group_batch.inputs[own].columns.items():
            assert block.srcdata[name].data_ptr() == rows.data_ptr()
        found.append([seen(one) for one in group_batch.inputs])
    return found


def loader_part(loader: PushPullLoader) -> int:
    return loader._group.part
