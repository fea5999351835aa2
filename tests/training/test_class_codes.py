"""Labels that are no classes are refused before a model of that many classes is built."""

from __future__ import annotations

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
        with pytest.raises(ConfigError, match=f"{base + 7372}: .* of 4 nodes; .*--task regression"):
            read_task(g, "_N", "label")
        assert read_task(g, "_N", "label", "regression") == ("regression", 1)
