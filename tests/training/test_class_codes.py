"""Labels that are no classes are refused before a model of that many classes is built."""

from pathlib import Path

import dgl
import pytest
import torch

import dglx_dist as dx
from dglx_dist.errors import ConfigError
from dglx_dist.training.tasks import read_task


@pytest.mark.parametrize("base", [0, 10**12])
def test_refuses_more_classes_than_nodes(tmp_path: Path, base: int) -> None:
    graph = dgl.graph(([0, 1, 2, 3], [1, 2, 3, 0]))
    graph.ndata["feat"] = torch.eye(4)
    graph.ndata["label"] = base + torch.tensor([2834, 7372, 2834, 7372])
    graph.ndata["train_mask"] = torch.ones(4, dtype=torch.bool)
    with dx.init(timeout=30):
        g = dx.distribute(graph, parts=1, cache=tmp_path)
        with pytest.raises(ConfigError, match=rf"{base + 7372}, .* for 4 nodes\. .*--task regression"):
            read_task(g, "_N", "label")
        assert read_task(g, "_N", "label", "regression") == ("regression", 1)


def test_refuses_more_classes_than_training_nodes_unless_asked_for(tmp_path: Path) -> None:
    nodes = torch.arange(600)
    graph = dgl.graph((nodes, (nodes + 1) % 600))
    graph.ndata["feat"] = torch.rand(600, 2)
    graph.ndata["label"] = nodes * 7 % 500  # whole-number prices
    graph.ndata["train_mask"] = nodes % 2 == 0
    with dx.init(timeout=30):
        g = dx.distribute(graph, parts=2, cache=tmp_path)
        with pytest.raises(ConfigError, match=r"500 classes for 300 training nodes. .*--task regression"):
            read_task(g, "_N", "label")
        assert read_task(g, "_N", "label", "classification") == ("classification", 0)
        assert read_task(g, "_N", "label", "regression") == ("regression", 1)
