"""``layerwise_inference`` refuses layers that leave out what ``forward`` does between them."""

from pathlib import Path
from typing import Any

import dgl
import pytest
import torch
import torch.nn.functional as F
from dgl.nn import GATConv, GraphConv, SAGEConv
from torch import Tensor, nn

import dglx_dist as dx
from dglx_dist.errors import ConfigError
from tests.helpers.ranks import run_ranks
from tests.training.test_tasks import graph


class Net(nn.Module):
    """DGL's tutorial: an activation between the layers, none in them."""

    def __init__(self, way: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        activation = F.relu if way == "inside" else None
        self.layers = nn.ModuleList([SAGEConv(8, 6, "mean", activation=activation), SAGEConv(6, 3, "mean")])
        if way == "attention":
            self.layers = nn.ModuleList([GATConv(8, 3, 2, allow_zero_in_degree=True), SAGEConv(6, 3, "mean")])
        elif way == "edges":
            self.layers = nn.ModuleList([Weighted(8, 6), Weighted(6, 3)])
        self.encoder = nn.Linear(8, 8) if way == "encoder" else None
        self.dropout = nn.Dropout(0.5)

    def forward(self, blocks: Any, h: Tensor) -> Tensor:
        if self.encoder is not None:
            h = self.encoder(h)
        for depth, layer in enumerate(self.layers):
            h = layer(blocks if isinstance(blocks, dgl.DGLGraph) else blocks[depth], h)
            if depth == 0 and self.way != "inside":
                h = self.dropout(F.elu(h) if self.way == "elu" else F.relu(h.flatten(1)))
        return h.log_softmax(1) if self.way == "log" else h


class Weighted(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.conv = GraphConv(width, out, norm="right", allow_zero_in_degree=True)

    def forward(self, block: Any, h: Tensor) -> Tensor:
        scores: Tensor = self.conv(block, h, edge_weight=block.edata["w"])
        return scores


class OfGraph(Net):
    def forward(self, g: Any, h: Tensor) -> Tensor:
        return self.layers[1](g, F.relu(self.layers[0](g, h)))


class OfMore(Net):
    def forward(self, blocks: Any, h: Tensor, more: Tensor) -> Tensor:
        return super().forward(blocks, h) + more


def outcomes(folder: str) -> dict[str, str]:
    plain = dgl.add_self_loop(graph())
    plain.edata["w"] = torch.rand(plain.num_edges())
    results = {}
    cases: dict[str, tuple[nn.Module, Any, Any]] = {
        "none": (Net(), "layers", None),
        "elu": (Net("elu"), "layers", F.relu),
        "encoder": (Net("encoder"), "layers", F.relu),
        "graph": (OfGraph(), "layers", None),
        "attention": (Net("attention"), "layers", F.relu),
        "edges": (Net("edges"), "layers", None),
        "list": (net := Net(), [*net.layers], None),
        "right": (Net(), "layers", F.relu),
        "right inside": (Net("inside"), "layers", None),
        "right log": (Net("log"), "layers", F.relu),
        "right attention": (Net("attention"), "layers", lambda h: F.relu(h.flatten(1))),
        "right edges": (Net("edges"), "layers", F.relu),
        "right graph": (OfGraph(), "layers", F.relu),
        "right more": (OfMore(), "layers", F.relu),
    }
    with dx.init(seed=0):
        g = dx.distribute(plain, parts=2, cache=folder)
        for name, (model, layers, between) in cases.items():
            edge_feats = ["w"] if "edges" in name else []
            before = torch.get_rng_state()
            try:
                rows = dx.layerwise_inference(model, g, layers=layers, between=between, edge_feats=edge_feats)
                results[name] = ""
                assert torch.equal(before, torch.get_rng_state())
                rows.delete()
            except ConfigError as error:
                results[name] = str(error)
    return results


@pytest.mark.parametrize("ranks", [1, 2])
def test_refuses_layers_that_are_not_what_forward_computes(ranks: int, tmp_path: Path) -> None:
    for result in run_ranks(outcomes, ranks, args=(str(tmp_path),)):
        for name, message in result.items():
            assert bool(message) != name.startswith("right"), (name, message)
            assert not message or "applies between its layers as between=" in message
        assert "layer 0 gets other rows" in result["encoder"]
        assert "layer 1 gets other rows" in result["none"]
