"""A graph of several node and edge types on disk, and a loop over it that can run in any rank."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import dgl
import numpy as np
import torch
from dgl.dataloading import LaborSampler, NeighborSampler

from dglx_dist.comm.session import start_session
from dglx_dist.data.storage.writer import write_dataset
from dglx_dist.dataloading.kernels import Schema
from dglx_dist.dataloading.loader import DataLoader, open_maker
from dglx_dist.dataloading.sampler_spec import read_sampler
from dglx_dist.dataloading.step_loader import LoaderOptions
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.keyed_random import Csc
from dglx_dist.records import Array, Assignment, EdgeType, RawGraph

NUM_NODES = {"ghost": 0, "item": 50, "user": 30}
KNOWS, BUYS, SOLD = ("user", "knows", "user"), ("user", "buys", "item"), ("item", "sold_to", "user")
WANTS, HAUNTS, LIKE = ("user", "wants", "item"), ("ghost", "haunts", "user"), ("item", "like", "item")


def edges() -> dict[EdgeType, tuple[Array, Array]]:
    """User u knows u % 9 users and buys u % 13 items, item i is like i % 5 others; two types are empty."""
    users, items = NUM_NODES["user"], NUM_NODES["item"]
    knows = [((u + step) % users, u) for u in range(users) for step in range(1, 1 + u % 9)]
    buys = [(u, (3 * u + step) % items) for u in range(users) for step in range(u % 13)]
    like = [((i + 7 * step) % items, i) for i in range(items) for step in range(1, 1 + i % 5)]
    nothing = np.empty(0, np.int64)
    return {
        KNOWS: _columns(knows),
        BUYS: _columns(buys),
        WANTS: (nothing, nothing),
        SOLD: _columns([(item, user) for user, item in buys]),
        HAUNTS: (nothing, nothing),
        LIKE: _columns(like),
    }


def _columns(pairs: Sequence[tuple[int, int]]) -> tuple[Array, Array]:
    sources, destinations = np.array(pairs, np.int64).T
    return sources, destinations


def raw_shop() -> RawGraph:
    """Features tell the node; every edge type has weights, of which some are 0."""
    users, items = np.arange(NUM_NODES["user"]), np.arange(NUM_NODES["item"])
    return RawGraph(
        name="shop",
        num_nodes=NUM_NODES,
        edges=edges(),
        node_data={
            "user": {"feat": np.stack([users, -users], axis=1).astype(np.float32), "label": users % 3},
            "item": {"feat": items.astype(np.float32)[:, None] + 0.5, "label": items % 4},
        },
        edge_data={
            etype: {"weight": ((sources + destinations) % 4).astype(np.float32)}
            for etype, (sources, destinations) in edges().items()
        },
    )


def write_shop(folder: Path, num_parts: int) -> Path:
    part_of = {
        "user": (np.arange(NUM_NODES["user"]) // 4 % num_parts).astype(np.int32),
        "item": np.zeros(NUM_NODES["item"], np.int32),
        "ghost": np.empty(0, np.int32),
    }
    write_dataset(raw_shop(), Assignment(num_parts=num_parts, part_of=part_of, method="file", seed=0), folder)
    return folder


def typed_shop(wide: Sequence[EdgeType] = ()) -> tuple[Schema, list[Csc]]:
    """The shop as the kernels read it; ``wide`` types have int64 indices."""
    schema = Schema(ntypes=tuple(NUM_NODES), num_nodes=tuple(NUM_NODES.values()), etypes=tuple(edges()))
    cscs = []
    for etype, (sources, destinations) in edges().items():
        order = np.lexsort([sources, destinations])
        counts = np.bincount(destinations, minlength=NUM_NODES[etype[2]])
        indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        indices = sources[order].astype(np.int64 if etype in wide else np.int32)
        cscs.append(Csc(indptr, indices, np.empty(0, np.float32), 0, 0))
    return schema, cscs


def dgl_shop(schema: Schema, cscs: Sequence[Csc]) -> dgl.DGLGraph:
    data = {}
    for etype, csc in zip(schema.etypes, cscs, strict=True):
        arrays = (torch.from_numpy(csc.indptr), torch.from_numpy(csc.indices.astype(np.int64)))
        data[etype] = ("csc", (*arrays, torch.empty(0, dtype=torch.int64)))
    return dgl.heterograph(data, num_nodes_dict=dict(zip(schema.ntypes, schema.num_nodes, strict=True)))


def edges_in(block: dgl.DGLGraph, etype: EdgeType) -> list[tuple[int, int, int]]:
    source, destination = block.edges(etype=etype)
    sources = block.srcnodes[etype[0]].data[dgl.NID][source].tolist()
    destinations = block.dstnodes[etype[2]].data[dgl.NID][destination].tolist()
    return sorted(zip(sources, destinations, block.edges[etype].data[dgl.EID].tolist(), strict=True))


SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "uniform": {},
    "full": {"fanouts": [-1, -1]},
    "replace": {"sampler": {"replace": True}, "exclude": {"buys": [5, 9, 100], "like": [7]}},
    "weighted": {"sampler": {"prob": "weight"}},
    # Only with equal draws for all batches have nodes the same edges in each.
    "by source": {
        "kind": LaborSampler,
        "sampler": {"batch_dependency": 0},
        "exclude": {"buys": [5, 9, 100], "like": [7]},
    },
}


def shop_in_rank(
    folder: str, structure: str, seeds_of_rank: Mapping[str, Mapping[str, list[int]]], exclude: bool
) -> dict[str, Any]:
    """Make batches of each of SETTINGS on this rank; return what was drawn, the bytes and their formula."""
    with start_session(timeout_s=60) as session:
        g = DistGraph(folder, structure=structure)
        own_ids = seeds_of_rank[str(session.topology.rank)]
        seeds = {ntype: torch.tensor(ids, dtype=torch.int64) for ntype, ids in own_ids.items()}
        results = {name: _epoch(g, seeds, **options) for name, options in SETTINGS.items()}
        before, sampler = session.ledger.total(phase="sampling"), NeighborSampler([3, 4])
        maker = open_maker(g, sampler, read_sampler(sampler), LoaderOptions(), seed=5)
        all_edges = {etype: np.arange(0, g.num_edges(etype), 2) for etype in g.canonical_etypes}
        seeds = {"user": np.arange(g.num_nodes("user"))}
        without = maker.complete(maker.sample_items(seeds, 0, all_edges if exclude else {}, step=0))
        parity = {
            int(edge) % 2 for block in without.blocks for etype in g.canonical_etypes
            for edge in block.edges[etype].data[dgl.EID]
        }  # fmt: skip
        own_bytes = session.ledger.total(phase="sampling") - before
        expected = _note(g, without.blocks, {}) + _excluded_bytes(g, without.blocks, all_edges) * exclude
        g.barrier()
        return {**results, "parity": sorted(parity), "own bytes": [own_bytes, expected]}


def _epoch(
    g: DistGraph,
    seeds: Any,
    fanouts: Sequence[int] = (3, 4),
    kind: Any = NeighborSampler,
    sampler: Any = None,
    **options: Any,
) -> dict[str, Any]:
    features = {"user": ["feat"], "item": ["feat"]}
    drawing = kind(list(fanouts), prefetch_node_feats=features, **(sampler or {}))
    loader = DataLoader(g, seeds, drawing, batch_size=5, shuffle=True, seed=5, **options)
    before, expected = g.session.ledger.total(phase="sampling"), 0
    drawn: dict[str, list[int]] = {}
    shares, targets = [], []
    for _, output_nodes, blocks in loader:
        shares.append([g.session.step_share.num_local, g.session.step_share.num_global])
        targets.append({ntype: ids.tolist() for ntype, ids in output_nodes.items() if len(ids)})
        _check_features(g, blocks[0])
        expected += _note(g, blocks, drawn)
    measured = g.session.ledger.total(phase="sampling") - before
    return {"drawn": drawn, "shares": shares, "targets": targets, "bytes": [measured, expected]}


def _check_features(g: DistGraph, block: dgl.DGLGraph) -> None:
    for ntype in ("user", "item"):
        ids = block.srcnodes[ntype].data[dgl.NID]
        assert torch.equal(block.srcnodes[ntype].data["feat"], g.nodes[ntype].data["feat"][ids])


def _note(g: DistGraph, blocks: Sequence[dgl.DGLGraph], drawn: dict[str, list[int]]) -> int:
    """Note every destination's edges per hop and edge type; return the bytes they should have cost here."""
    book, expected = g.get_partition_book(), 0
    for hop, block in enumerate(reversed(blocks)):
        for etype in g.canonical_etypes:
            nodes = block.dstnodes[etype[2]].data[dgl.NID]
            owners = book.nid2partid(nodes, etype[2]).tolist()
            edges_of_node: dict[int, list[int]] = {int(node): [] for node in nodes}
            for _, destination, edge in edges_in(block, etype):
                edges_of_node[destination].append(edge)
            for (node, ids), owner in zip(edges_of_node.items(), owners, strict=True):
                assert drawn.setdefault(f"{hop} {etype} {node}", ids) == ids
                if owner != book.partid:
                    expected += 8 + 24 * len(ids)
    return expected


def _excluded_bytes(g: DistGraph, blocks: Sequence[dgl.DGLGraph], exclude: Mapping[EdgeType, Array]) -> int:
    """8 per excluded edge of each server that is asked, in every hop and edge type."""
    book, expected = g.get_partition_book(), 0
    for block in blocks:
        for etype in g.canonical_etypes:
            nodes = block.dstnodes[etype[2]].data[dgl.NID]
            asked_parts = set(book.nid2partid(nodes, etype[2]).tolist()) - {book.partid}
            owners = book.eid2partid(torch.from_numpy(exclude[etype]), etype).tolist()
            expected += 8 * sum(owner in asked_parts for owner in owners)
    return expected
