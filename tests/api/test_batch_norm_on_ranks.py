"""Batch norms whose statistics are those of one process, on any number of ranks."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import dgl
import pytest
import torch
from dgl.nn import SAGEConv
from torch import Tensor, nn

import dglx_dist as dx
from tests.helpers.ranks import run_ranks

NUM_NODES, WIDTH, CLASSES = 40, 5, 3


def plain_graph() -> dgl.DGLGraph:
    random = torch.Generator().manual_seed(0)
    ends = torch.randint(NUM_NODES, (2, 160), generator=random)
    g = dgl.graph((ends[0], ends[1]), num_nodes=NUM_NODES)
    g.ndata["feat"] = 3 + torch.rand(NUM_NODES, WIDTH, generator=random, dtype=torch.float64)
    g.ndata["label"] = torch.randint(CLASSES, (NUM_NODES,), generator=random)
    # The shares of two ranks are uneven.
    g.ndata["train_mask"] = torch.arange(NUM_NODES) % 3 == 0
    return g


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convs = nn.ModuleList([SAGEConv(WIDTH, 8, "mean"), SAGEConv(8, CLASSES, "mean")])
        self.norms = nn.ModuleList([nn.BatchNorm1d(8), nn.BatchNorm1d(CLASSES, affine=False, momentum=None)])
        self.double()

    def forward(self, blocks: Any, x: Tensor) -> Tensor:
        hidden = torch.relu(self.norms[0](self.convs[0](blocks[0], x)))
        return self.norms[1](self.convs[1](blocks[-1], hidden))


def trained_state(strategy: str, parts: int, is_converted: bool) -> dict[str, Any]:
    with dx.init(strategy=strategy, seed=0), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        g = dx.distribute(plain_graph(), parts=parts)
        sampler = dgl.dataloading.MultiLayerFullNeighborSampler(
            2, prefetch_node_feats=["feat"], prefetch_labels=["label"]
        )
        loader = dx.DataLoader(g, dx.node_split(g.ndata["train_mask"]), sampler, batch_size=NUM_NODES)
        model: Any = Net()
        model = dx.wrap(dx.nn.BatchNorm.convert(model) if is_converted else model, g)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        for _ in range(3):
            for _, _, blocks in loader:
                scores = model(blocks, blocks[0].srcdata["feat"])
                optimizer.zero_grad()
                nn.functional.cross_entropy(scores, blocks[-1].dstdata["label"]).backward()
                optimizer.step()
        state = {name: value.numpy().copy() for name, value in model.state_dict().items()}
        sent = g.session.ledger.total(phase="batch_norm")
        warned = [str(one.message) for one in caught if "batch norm" in str(one.message)]
        return {"state": state, "warned": len(warned), "sent": sent}


def distance(first: dict[str, Any], other: dict[str, Any]) -> float:
    return max(float(abs(first["state"][name] - other["state"][name]).max()) for name in first["state"])


@pytest.mark.parametrize("strategy", ["data_parallel", "push_pull"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_train_with_the_statistics_of_one_process(strategy: str, ranks: int) -> None:
    one = run_ranks(trained_state, 1, args=("data_parallel", ranks, False))[0]
    for of_rank in run_ranks(trained_state, ranks, args=(strategy, ranks, True)):
        assert distance(one, of_rank) < 1e-10
        assert of_rank["warned"] == 0


@pytest.mark.parametrize("strategy", ["full_graph", "shared_preload", "cooperative"])
def test_whole_graphs_have_the_statistics_of_one_process(strategy: str) -> None:
    one = run_ranks(trained_state, 1, args=(strategy, 2, True))[0]
    for of_rank in run_ranks(trained_state, 2, args=(strategy, 2, True)):
        assert distance(one, of_rank) < 1e-10


def test_statistics_of_each_rank_differ_and_are_warned_of() -> None:
    one = run_ranks(trained_state, 1, args=("data_parallel", 2, False))[0]
    of_ranks = run_ranks(trained_state, 2, args=("data_parallel", 2, False))
    assert distance(one, of_ranks[0]) > 1e-3
    assert [of_rank["warned"] for of_rank in of_ranks] == [1, 0]
    assert one["warned"] == 0


def test_alone_it_is_the_batch_norm_of_torch() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.BatchNorm1d(6, affine=False, momentum=None))
    converted = dx.nn.BatchNorm.convert(copy.deepcopy(plain))
    assert not any(isinstance(module, nn.BatchNorm1d) for module in converted.modules())
    for model in (copy.deepcopy(converted), pickle.loads(pickle.dumps(converted)), converted):
        torch.manual_seed(1)
        expected_model = copy.deepcopy(plain)
        for is_training in (True, True, False):
            x = torch.rand(7, 4)
            expected = expected_model.train(is_training)(x)
            assert torch.equal(model.train(is_training)(x), expected)
        state = expected_model.state_dict()
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
        model.load_state_dict(state)
