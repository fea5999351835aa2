"""What goes into the first layer: features, or where no layer takes them an embedding of all nodes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import dgl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dglx_dist as dx
from dglx_dist.comm.session import start_session
from dglx_dist.data.storage.writer import write_dataset
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.records import NODE_TYPE, Assignment
from dglx_dist.strategies.base import STRATEGIES
from dglx_dist.strategies.push_pull.options import read_push_pull_options
from tests.helpers.ranks import run_ranks
from tests.strategies.push_pull.rounds import NUM_NODES, ring

WIDTH = 3
"""Of the embedding; the features have 5 columns, or there are none."""


class Learnt(nn.Module):
    """Two convolutions over an embedding of all nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(NUM_NODES, WIDTH)
        self.first = dgl.nn.SAGEConv(WIDTH, 4, "mean")
        self.last = dgl.nn.SAGEConv(4, 7, "mean")

    def forward(self, blocks: list[Any], nodes: Tensor) -> Tensor:
        h: Tensor = self.last(blocks[1], torch.relu(self.first(blocks[0], self.rows(nodes))))
        return h


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ring with features, without any, and with features of whole numbers."""
    folder, raw = tmp_path_factory.mktemp("inputs"), ring()
    part_of = np.arange(NUM_NODES, dtype=np.int32) % 2
    data = raw.node_data[NODE_TYPE]
    for name, feat in {"full": data["feat"], "bare": None, "whole": data["feat"].astype(np.int64)}.items():
        mine = {"label": data["label"]} | ({} if feat is None else {"feat": feat})
        assignment = Assignment(num_parts=2, part_of={NODE_TYPE: part_of}, method="test", seed=0)
        write_dataset(replace(raw, node_data={NODE_TYPE: mine}), assignment, folder / name)
    return folder


def train(g: DistGraph, strategy: str, options: dict[str, Any]) -> dict[str, Any]:
    rank, world_size = g.session.topology.rank, g.session.topology.world_size
    sampler = dgl.dataloading.MultiLayerFullNeighborSampler(2, prefetch_labels=["label"])
    ours = STRATEGIES.get(strategy)(g.session, options)
    loader = ours.loader(g, torch.arange(NUM_NODES)[rank::world_size], sampler, batch_size=16)
    torch.manual_seed(1)
    model: Any = ours.wrap(Learnt().double(), g)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(2):
        for nodes, _, blocks in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(blocks, nodes), blocks[-1].dstdata["label"]).backward()
            optimizer.step()
    return {name: value.numpy().copy() for name, value in model.state_dict().items()}


def on_rank(folder: str) -> dict[str, Any]:
    with start_session(timeout_s=60):
        found = {}
        for name in ("full", "bare"):
            g = DistGraph(f"{folder}/{name}")
            found[name] = [train(g, "push_pull", {}), train(g, "data_parallel", {})]
            found[f"{name}, late"] = [train(g, "push_pull", {"depth": 3})]
            g.close()
        g = DistGraph(f"{folder}/whole")
        with pytest.raises(dx.ConfigError, match=r"'feat' is torch.int64.*store it as float32"):
            STRATEGIES.get("push_pull")(g.session, {}).wrap(dgl.nn.SAGEConv(5, 7, "mean"), g)
        g.barrier()
        return found


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_embedding_is_the_input_where_no_layer_takes_features(folder: Path, num_ranks: int) -> None:
    for found in run_ranks(on_rank, num_ranks, args=(str(folder),)):
        for name in ("full", "bare"):
            cut, rows = found[name]
            assert cut.keys() == rows.keys()
            for key, value in rows.items():
                np.testing.assert_allclose(cut[key], value, rtol=0, atol=1e-10)
            assert found[f"{name}, late"][0]["rows.weight"].shape == (NUM_NODES, WIDTH)


def test_memory_may_be_a_number_of_bytes() -> None:
    assert read_push_pull_options({"memory": 1000}) == read_push_pull_options({"memory": "1000"})
    with pytest.raises(dx.ConfigError, match="type str, not bool"):
        read_push_pull_options({"memory": True})
