"""A graph on disk whose columns tell what row they are, and loops over it that can run in any rank."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dgl
import numpy as np
import torch
from dgl.dataloading import NeighborSampler

from dglx_dist.comm.session import Session, start_session
from dglx_dist.data.storage.writer import write_dataset
from dglx_dist.dataloading.loader import DataLoader
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, Assignment, RawGraph

NUM_NODES = 60


def raw_graph() -> RawGraph:
    """Node n has the in-neighbours n + 1 ... n + n % 17 around a ring; node 0 has none."""
    edges = [((n + step) % NUM_NODES, n) for n in range(NUM_NODES) for step in range(1, n % 17 + 1)]
    sources, destinations = np.array(edges).T
    ids = np.arange(NUM_NODES)
    return RawGraph(
        name="rings",
        num_nodes={NODE_TYPE: NUM_NODES},
        edges={EDGE_TYPE: (sources, destinations)},
        node_data={
            NODE_TYPE: {
                "feat": np.stack([ids, ids * 2, ids * 3], axis=1).astype(np.float32),
                "label": ids % 7,
                "train_mask": ids % 4 != 3,
            }
        },
        edge_data={
            EDGE_TYPE: {
                "odd": sources % 2 == 1,
                "source": sources.astype(np.float32),
                "negative": -sources.astype(np.float32),
                "pair": np.stack([sources, destinations], axis=1),
            }
        },
        num_classes={NODE_TYPE: 7},
    )


def write_rings(folder: Path, num_parts: int) -> Path:
    """Part of node n is n // 7 % num_parts, so parts are uneven and every node has foreign neighbours."""
    part_of = (np.arange(NUM_NODES) // 7 % num_parts).astype(np.int32)
    assignment = Assignment(num_parts=num_parts, part_of={NODE_TYPE: part_of}, method="file", seed=0)
    write_dataset(raw_graph(), assignment, folder)
    return folder


def in_edges_of(block: dgl.DGLGraph) -> dict[int, list[int]]:
    """Destination to the ids of its drawn in-edges."""
    _, destinations = block.edges()
    nodes = block.dstdata[dgl.NID]
    drawn: dict[int, list[int]] = {int(node): [] for node in nodes}
    for node, edge in zip(nodes[destinations.long()].tolist(), block.edata[dgl.EID].tolist(), strict=True):
        drawn[node].append(edge)
    return drawn


def draws_in_rank(
    folder: str, structure: str, seeds_of_rank: Mapping[str, list[int]], loader_options: Mapping[str, Any]
) -> dict[str, Any]:
    """Run two epochs on this rank; return what was drawn, the steps and the bytes."""
    options = dict(loader_options)
    fanouts = options.pop("fanouts", [3, 4])
    sampler_options = options.pop("sampler", {})
    with start_session(timeout_s=60) as session:
        g = DistGraph(folder, structure=structure)
        seeds = torch.tensor(seeds_of_rank[str(session.topology.rank)], dtype=torch.int64)
        sampler = NeighborSampler(fanouts, prefetch_node_feats=["feat"], **sampler_options)
        loader = DataLoader(g, seeds, sampler, batch_size=4, shuffle=True, seed=5, **options)
        return {"length": len(loader), **_run(loader, g, session)}


def _run(loader: DataLoader, g: DistGraph, session: Session) -> dict[str, Any]:
    drawn: dict[str, list[int]] = {}
    targets, shares, expected_bytes = [], [], 0
    original = g.orig_ids(torch.arange(NUM_NODES))
    owner = g.get_partition_book().nid2partid(torch.arange(NUM_NODES))
    for epoch in range(2):
        for _, output_nodes, blocks in loader:
            targets.append(output_nodes.tolist())
            shares.append([session.step_share.num_local, session.step_share.num_global])
            assert blocks[-1].step_share is session.step_share
            ids = original[blocks[0].srcdata[dgl.NID]]
            features = torch.stack([ids, ids * 2, ids * 3], dim=1).float()
            assert torch.equal(blocks[0].srcdata["feat"], features)
            for hop, block in enumerate(reversed(blocks)):
                for node, edges in in_edges_of(block).items():
                    key = f"{epoch} {hop} {node}"
                    assert drawn.setdefault(key, edges) == edges
                    if owner[node] != session.topology.server:
                        expected_bytes += 8 + 24 * len(edges)
    sampling = session.ledger.total(phase="sampling")
    return {"drawn": drawn, "targets": targets, "shares": shares, "bytes": [sampling, expected_bytes]}
