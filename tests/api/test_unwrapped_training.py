"""Models that would train on every rank by itself are refused with the line to add."""

import copy
import io
from collections.abc import Sequence
from typing import Any

import dgl
import pytest
import torch
from dgl.nn import SAGEConv
from torch import nn

import dglx_dist as dx
from dglx_dist.errors import ConfigError
from tests.helpers.ranks import run_ranks


def plain_graph() -> Any:
    g = dgl.graph((torch.arange(8), (torch.arange(8) + 1) % 8))
    g.ndata["feat"], g.ndata["label"] = torch.eye(8), torch.arange(8) % 2
    g.ndata["train_mask"] = torch.ones(8, dtype=torch.bool)
    return g


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = SAGEConv(8, 2, "mean")

    def forward(self, blocks: Any, x: Any) -> Any:
        return self.conv(blocks[0], x)


def train(model: nn.Module, g: Any, more: Sequence[nn.Parameter] = ()) -> str:
    optimizer = torch.optim.SGD([*model.parameters(), *more], lr=0.1)
    sampler = dgl.dataloading.MultiLayerFullNeighborSampler(
        1, prefetch_node_feats=["feat"], prefetch_labels=["label"]
    )
    try:
        for _, _, blocks in dx.DataLoader(g, dx.node_split(g.ndata["train_mask"]), sampler, batch_size=2):
            scores = model(blocks, blocks[0].srcdata["feat"])
            loss = nn.functional.cross_entropy(scores, blocks[-1].dstdata["label"])
            sum((temperature * loss for temperature in more), loss).backward()
            optimizer.step()
    except ConfigError as error:
        return str(error)
    return ""


def train_in_ways() -> dict[str, str]:
    with dx.init():
        g = dx.distribute(plain_graph(), parts=2)
        torch.manual_seed(0)
        messages = {
            "forgotten": train(Net(), g),
            "ddp": train(nn.parallel.DistributedDataParallel(Net()), g),
            "wrapped": train(dx.wrap(Net(), g), g),
            "second": train(Net(), g),
        }
        messages["mixed"] = train(dx.wrap(Net(), g), g, [nn.Parameter(torch.ones(()))])
        try:
            dx.wrap(nn.parallel.DistributedDataParallel(Net()), g)
        except ConfigError as error:
            messages["wrap ddp"] = str(error)
    return messages


def test_refuses_to_train_a_model_that_is_not_wrapped() -> None:
    for messages in run_ranks(train_in_ways, 2):
        assert messages.pop("wrapped") == ""
        assert "takes the module itself" in messages.pop("wrap ddp")
        assert all("model = dx.wrap(model, g)" in message for message in messages.values())


def test_one_rank_trains_an_unwrapped_model() -> None:
    with dx.init():
        assert train(Net(), dx.distribute(plain_graph(), parts=1)) == ""


def test_wrap_refuses_a_lazy_module_by_the_name_of_its_parameter() -> None:
    with dx.init():
        g = dx.distribute(plain_graph(), parts=1)
        with pytest.raises(ConfigError, match=r"'0.weight' belongs to a lazy module.*Run one forward"):
            dx.wrap(nn.Sequential(nn.LazyLinear(3)), g)


def copy_and_train() -> list[Any]:
    with dx.init():
        g = dx.distribute(plain_graph(), parts=2)
        model = dx.wrap(Net(), g)
        averaged = torch.optim.swa_utils.AveragedModel(model)
        copied = copy.deepcopy(model)
        before = model.state_dict()["conv.fc_neigh.weight"].clone()
        assert train(copied, g) == ""
        averaged.update_parameters(copied)
        assert torch.equal(before, model.state_dict()["conv.fc_neigh.weight"])
        with pytest.raises(ConfigError, match="save that"):
            torch.save(model, io.BytesIO())
        return [value.tolist() for value in copied.state_dict().values()]


def test_a_copy_of_a_wrapped_model_trains_with_the_other_ranks() -> None:
    first, second = run_ranks(copy_and_train, 2)
    assert first == second
