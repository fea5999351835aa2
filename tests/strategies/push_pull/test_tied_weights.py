"""Parameters that a model uses in several places: kept tied in its parts, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dgl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dglx_dist.comm.session import start_session
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.strategies.base import STRATEGIES
from tests.helpers.ranks import run_ranks
from tests.strategies import equality
from tests.strategies.equality import CLASSES, WIDTH
from tests.strategies.push_pull import runs
from tests.strategies.test_equality import difference


class Net(nn.Module):
    """Two layers as wide as the features, and a head; what is used twice depends on ``kind``."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        slope = nn.PReLU()
        first = dgl.nn.SAGEConv(WIDTH, WIDTH, "mean", activation=slope)
        second = dgl.nn.SAGEConv(WIDTH, WIDTH, "mean", activation=slope)
        self.layers = nn.ModuleList([first, second])
        if kind == "two names":
            self.begin = first
        if kind == "bias":
            second.fc_self.bias = first.fc_self.bias
        if kind == "weight":
            second.fc_neigh.weight = first.fc_neigh.weight
        self.head = nn.Linear(WIDTH, CLASSES)
        self.kind = kind

    def forward(self, blocks: list[Any], x: Tensor) -> Tensor:
        first, second = self.layers
        h = (self.begin if self.kind == "two names" else first)(blocks[0], x)
        scores: Tensor = self.head(second(blocks[1], h))
        return scores


TIED = ("activation", "bias", "two names")


def state_of(g: DistGraph, strategy: str, kind: str) -> dict[str, Any]:
    topology = g.session.topology
    ids = equality.new_ids_of_training(g)[: runs.BATCH]
    made = STRATEGIES.get(strategy)(g.session, {})
    loader = made.loader(g, ids[topology.rank :: topology.world_size], runs.sampler(), batch_size=runs.BATCH)
    torch.manual_seed(2)
    model: Any = made.wrap(Net(kind).double(), g)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(3):
        for _, _, blocks in loader:
            loss = F.cross_entropy(model(blocks, blocks[0].srcdata["feat"]), blocks[-1].dstdata["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    whole = model.whole()
    assert sorted(whole.state_dict()) == sorted(model.state_dict())
    assert len(list(whole.parameters())) == len(list(model.parameters()))
    return {name: value.numpy().copy() for name, value in model.state_dict().items()}


def on_rank(folder: str) -> dict[str, Any]:
    with start_session(timeout_s=60):
        g = DistGraph(folder)
        found: dict[str, Any] = {
            f"{kind}/{name}": state_of(g, name, kind)
            for kind in TIED
            for name in ("push_pull", "data_parallel")
        }
        try:
            state_of(g, "push_pull", "weight")
        except ConfigError as error:
            found["weight"] = str(error)
        g.barrier()
        return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = equality.write_parts(tmp_path_factory.mktemp("ties"))
    return run_ranks(on_rank, 2, args=(str(folder),))


@pytest.mark.parametrize("kind", TIED)
def test_what_is_tied_stays_tied(trained: list[dict[str, Any]], kind: str) -> None:
    """Also an activation that both layers share, whose slope is trained, and one layer under two names."""
    for found in trained:
        ours, plain = found[f"{kind}/push_pull"], found[f"{kind}/data_parallel"]
        assert sorted(ours) == sorted(plain)
        assert difference([ours[name] for name in plain], list(plain.values())) <= 1e-12


def test_a_cut_weight_that_another_layer_has_too_is_refused(trained: list[dict[str, Any]]) -> None:
    for found in trained:
        assert "'layers.0.fc_neigh.weight'" in found["weight"]
        assert "'layers.1.fc_neigh.weight'" in found["weight"]
        assert "data_parallel" in found["weight"]
