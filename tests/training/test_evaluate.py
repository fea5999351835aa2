"""The scores of all 500 nodes of the equality graph are those of plain DGL on the whole graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dgl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dglx_dist.comm.session import start_session
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.training.inference import evaluate, in_original_order, layerwise_inference, minibatch_inference
from tests.helpers import wide
from tests.helpers.ranks import run_ranks
from tests.strategies import equality


class OwnModel(nn.Module):
    """A user's model with DGL's own GraphConv and its symmetric norm, which reads the sources' degrees."""

    def __init__(self) -> None:
        super().__init__()
        self.first = dgl.nn.GraphConv(equality.WIDTH, 6, norm="both", allow_zero_in_degree=True)
        self.second = dgl.nn.GraphConv(6, equality.CLASSES, norm="left", allow_zero_in_degree=True)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, blocks: list[Any], h: Tensor) -> Tensor:
        return self.second(blocks[1], self._between(self.first(blocks[0], h)))

    def _between(self, h: Tensor) -> Tensor:
        return F.dropout(torch.relu(self.norm(h)), 0.5, self.training)

    def inference_layers(self) -> list[Any]:
        return [lambda block, h: self._between(self.first(block, h)), self.second]


class Untold(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = OwnModel()

    def forward(self, blocks: list[Any], h: Tensor) -> Tensor:
        return self.inner(blocks, h)


def own_model(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(2)
    return kind().double()


def _scores(folder: str) -> dict[str, Any]:
    session = start_session(timeout_s=60)
    g = DistGraph(folder)
    results: dict[str, Any] = {}
    tensors = len(g.kvstore.names())
    for kind in equality.MODELS:
        scores = layerwise_inference(equality.model_of(kind, g), g, batch_size=37)
        results[kind] = in_original_order(scores, g).numpy().copy()
        scores.delete()
    model = own_model(OwnModel)
    model.norm.eval()
    results["own"] = in_original_order(layerwise_inference(model, g), g).numpy().copy()
    assert model.training
    assert not model.norm.training
    results["untold"] = in_original_order(
        minibatch_inference(own_model(Untold), g, 2, batch_size=90), g
    ).numpy()
    assert len(g.kvstore.names()) == tensors + 2  # the two that were not deleted, and no layer in between
    results["accuracy"] = evaluate(own_model(OwnModel), g)
    results["accuracy untold"] = evaluate(own_model(Untold), g, ["val_mask"], num_layers=2)
    with pytest.raises(ConfigError, match=r"inference_layers\(\).*num_layers="):
        evaluate(own_model(Untold), g)
    with pytest.raises(ConfigError, match=r"no tensor 'tset_mask'.*known: 'feat', 'label', 'train_mask'"):
        evaluate(own_model(OwnModel), g, ["tset_mask"])
    session.close()
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return equality.write_parts(tmp_path_factory.mktemp("evaluate"))


@pytest.mark.parametrize(("ranks", "ranks_per_server"), [(1, 1), (3, 2), *wide((2, 1), (4, 4))])
def test_scores_and_accuracy(folder: Path, ranks: int, ranks_per_server: int) -> None:
    graph = equality.plain_graph()
    features = graph.ndata["feat"]
    plain = {}
    with torch.no_grad():
        for kind in equality.MODELS:
            torch.manual_seed(11)
            plain[kind] = equality.PlainModel(kind).double().eval()([graph, graph], features)
        plain["own"] = own_model(OwnModel).eval()([graph, graph], features)
    plain["untold"] = plain["own"]
    # Untold's weights are those of the OwnModel inside it.
    correct = plain["own"].argmax(1) == graph.ndata["label"]
    accuracy = {
        name: float(correct[graph.ndata[name]].double().mean())
        for name in ("train_mask", "val_mask", "test_mask")
    }
    for result in run_ranks(_scores, ranks, args=(str(folder),), ranks_per_server=ranks_per_server):
        for name, scores in plain.items():
            np.testing.assert_allclose(result[name], scores.numpy(), rtol=0, atol=1e-12, err_msg=name)
        assert result["accuracy"] == pytest.approx(accuracy, abs=1e-15)
        assert result["accuracy untold"] == pytest.approx({"val_mask": accuracy["val_mask"]}, abs=1e-15)


def test_degrees_inside_a_block_would_give_other_scores() -> None:
    """Why blocks for evaluation carry the degrees of the graph: DGL's own do not."""
    graph = equality.plain_graph()
    model = own_model(OwnModel).eval()
    block = dgl.to_block(dgl.in_subgraph(graph, torch.arange(50)), torch.arange(50))
    with torch.no_grad():
        inside = model.first(block, graph.ndata["feat"][block.srcdata[dgl.NID]])
        whole = model.first(graph, graph.ndata["feat"])[:50]
    assert float((inside - whole).abs().max()) > 1e-3
