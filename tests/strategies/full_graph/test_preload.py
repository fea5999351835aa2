"""The columns of plans: what is attached to blocks, and that values of edges are brought once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import dgl
import numpy as np
import pytest
import torch

from dglx_dist.comm.session import start_session
from dglx_dist.data.storage.writer import write_dataset
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, Assignment
from dglx_dist.strategies.base import STRATEGIES
from dglx_dist.strategies.full_graph.loader import PlanColumns
from tests.helpers.ranks import run_ranks
from tests.strategies.full_graph import plan_cases

NUM_LAYERS, COLUMNS = 3, 2
ROW_BYTES = COLUMNS * 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    raw = plan_cases.raw_graph()
    num_edges = len(raw.edges[EDGE_TYPE][0])
    raw = replace(
        raw, edge_data={EDGE_TYPE: {"weight": np.random.default_rng(1).random((num_edges, COLUMNS))}}
    )
    part_of = (np.arange(plan_cases.NUM_NODES) >= 150).astype(np.int32)
    folder = tmp_path_factory.mktemp("full_graph_preload") / "parts"
    write_dataset(raw, Assignment(num_parts=2, part_of={NODE_TYPE: part_of}, method="test", seed=0), folder)
    return folder


def test_values_of_edges_are_moved_once() -> None:
    whole = torch.zeros(5, 2)
    columns = PlanColumns(
        inputs={"feat": torch.zeros(4, 1)},
        targets={"label": torch.zeros(2)},
        edges=[{"weight": whole}, {"weight": whole[:3]}, {"weight": whole[:3]}],
    )
    moved = columns.to(torch.device("meta"))
    assert moved.inputs["feat"].device.type == moved.targets["label"].device.type == "meta"
    assert [len(rows["weight"]) for rows in moved.edges] == [5, 3, 3]
    assert all(rows["weight"]._base is moved.edges[0]["weight"]._base for rows in moved.edges)
    assert PlanColumns().to(torch.device("cpu")).edges == []


def on_rank(folder: str, strategy: str) -> int:
    """Return how many edges of the closure end at nodes of the other server."""
    with start_session(timeout_s=60) as session:
        g = DistGraph(folder)
        topology = session.topology
        sampler = dgl.dataloading.MultiLayerFullNeighborSampler(NUM_LAYERS, prefetch_edge_feats=["weight"])
        seeds = torch.from_numpy(np.flatnonzero(g.ndata["train_mask"][:].numpy()))
        mine = seeds[topology.rank :: topology.world_size]
        loader = STRATEGIES.get(strategy)(session, {}).loader(g, mine, sampler)
        ((_, _, blocks),) = loader
        weights = g.edata["weight"]
        for block in blocks:
            assert torch.equal(block.edata["weight"], weights[block.edata[dgl.EID]])
        own = set(g.local_nodes().tolist())
        first = blocks[0]
        ends = first.dstdata[dgl.NID][first.edges()[1].long()].tolist()
        remote = sum(node not in own for node in ends)
        received = sum(
            row.num_bytes
            for row in session.ledger.rows()
            if row.phase == "preload" and row.destination == topology.rank and row.source != topology.rank
        )
        g.barrier()
        assert received == ROW_BYTES * remote
        return remote


@pytest.mark.parametrize("strategy", ["full_graph", "shared_preload"])
def test_values_of_edges_come_once_for_all_layers(folder: Path, strategy: str) -> None:
    remote = run_ranks(on_rank, 2, args=(str(folder), strategy), ranks_per_server=1)
    assert (sum(remote) > 0) == (strategy == "shared_preload")
