"""Exact evaluation of models that read edge data."""

from pathlib import Path
from typing import Any

import dgl
import pytest
import torch
from torch import nn

import dglx_dist as dx
from dglx_dist.errors import ConfigError
from tests.helpers.ranks import run_ranks


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = dgl.nn.GraphConv(3, 2, norm="none")

    def first(self, block: Any, h: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.conv(block, h, edge_weight=block.edata["w"])
        return scores

    def forward(self, blocks: list[Any], h: torch.Tensor) -> torch.Tensor:
        return self.first(blocks[0], h)

    def inference_layers(self) -> list[Any]:
        return [self.first]


def _graph() -> Any:
    graph = dgl.graph(([0, 1, 2, 0], [1, 2, 0, 2]))
    graph.ndata["feat"] = torch.eye(3)
    graph.ndata["label"] = torch.tensor([0, 1, 0])
    graph.ndata["train_mask"] = torch.ones(3, dtype=torch.bool)
    graph.edata["w"] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    return graph


def _evaluate(folder: str, strategy: str) -> None:
    graph, config = _graph(), dx.FitConfig(epochs=1, show_progress=False)
    sampler = dgl.dataloading.MultiLayerFullNeighborSampler(
        1, prefetch_node_feats=["feat"], prefetch_labels=["label"], prefetch_edge_feats=["w"]
    )
    dx.init(strategy, timeout=60)
    g = dx.distribute(graph, parts=2, cache=folder)
    assert dx.evaluate(Weighted(), g, edge_feats=["w"])["train_mask"] >= 0
    seeds = dx.node_split(g.ndata["train_mask"])
    options = {"batch_size": 3} if strategy == "data_parallel" else {}
    loader = dx.DataLoader(g, seeds, sampler, **options)
    model, result = dx.fit(Weighted(), g, config=config, loader=loader)
    assert result.accuracy.keys() == {"train_mask"}
    rows = dx.layerwise_inference(model, g, edge_feats=["w"])
    module = model.module
    features, weights = g.ndata["feat"][torch.arange(3)], g.edata["w"][torch.arange(4)]
    source, destination = g.find_edges(torch.arange(4))
    full = dgl.graph((source, destination), num_nodes=3)
    with torch.no_grad():
        expected = module.conv(full, features, edge_weight=weights)
    torch.testing.assert_close(rows[torch.arange(3)], expected)
    named = dx.FitConfig(epochs=1, show_progress=False, edge_feats=["w"])
    dx.fit(Weighted(), g, config=named, fanouts=[-1])
    with pytest.raises(ConfigError, match="edge_feats names 'weight', but"):
        dx.evaluate(Weighted(), g, edge_feats=["weight"])


@pytest.mark.parametrize("strategy", ["data_parallel", "full_graph"])
def test_evaluates_with_edge_data(tmp_path: Path, strategy: str) -> None:
    run_ranks(_evaluate, 2, args=(str(tmp_path), strategy))
