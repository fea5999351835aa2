from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dglx_dist.errors import CheckpointError
from dglx_dist.training.optimizer_state import restore_state, split_state

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "plain sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.8, 0.99), amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), capturable=False),
}


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)).double()


def advance(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        optimizer.zero_grad()
        net(x).pow(2).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_restored_optimizer_goes_on_to_the_last_bit(name: str) -> None:
    whole = model()
    optimizer = OPTIMIZERS[name](whole.parameters())
    advance(whole, optimizer, range(3))
    tensors, plain = split_state(optimizer, whole)
    again = model()
    again.load_state_dict(whole.state_dict())
    other = OPTIMIZERS[name](again.parameters())
    restore_state(other, again, {k: v.clone() for k, v in tensors.items()}, json.loads(json.dumps(plain)))
    advance(whole, optimizer, range(3, 6))
    advance(again, other, range(3, 6))
    for a, b in zip(whole.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


def test_names_are_those_of_the_parameters() -> None:
    net = model()
    optimizer = torch.optim.Adam([net[1].bias, net[0].weight])
    advance(net, optimizer, range(1))
    tensors, plain = split_state(optimizer, net)
    assert {name.rpartition("/")[0] for name in tensors} == {"1.bias", "0.weight"}
    assert plain["groups"][0]["params"] == ["1.bias", "0.weight"]


def test_mismatches_are_told() -> None:
    net = model()
    _, plain = split_state(torch.optim.Adam(net.parameters()), net)
    with pytest.raises(CheckpointError, match="Adam, not SGD"):
        restore_state(torch.optim.SGD(net.parameters(), lr=1.0), net, {}, plain)
    with pytest.raises(CheckpointError, match="parameter group 0"):
        restore_state(torch.optim.Adam(net[0].parameters()), net, {}, plain)


def test_what_cannot_be_saved_is_told() -> None:
    net = model()
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=1.0)
    optimizer.param_groups[0]["schedule"] = lambda step: step
    with pytest.raises(CheckpointError, match="'schedule' of type function"):
        split_state(optimizer, net)
