"""An optimizer of torch goes on as an update of the parameter servers, and comes back."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dglx_dist.errors import ConfigError
from dglx_dist.strategies.serverless.trainer import restore_optimizer, update_of

fused = pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="torch does not fuse")
CASES: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    (torch.optim.AdamW, {"lr": 0.01}),
]


def make(kind: Any, settings: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    groups = [
        {"params": [model[1].weight, model[0].bias], "lr": 0.3},
        {"params": [model[0].weight]},  # the last bias is not trained
    ]
    return model, kind(groups, **settings)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    for at, parameter in enumerate(model.parameters()):
        draw = np.random.default_rng([number, at])
        parameter.grad = torch.tensor(draw.standard_normal(parameter.shape), dtype=parameter.dtype)
    optimizer.step()


@fused
@pytest.mark.parametrize(("kind", "settings"), CASES, ids=str)
def test_there_and_back_is_as_if_torch_had_gone_on(kind: Any, settings: dict[str, Any]) -> None:
    expected, all_torch = make(kind, settings)
    model, optimizer = make(kind, settings)
    for number in range(6):
        step(expected, all_torch, number)
    for number in range(2):
        step(model, optimizer, number)
    before = copy.deepcopy(optimizer.state_dict())

    names = [name for name, _ in model.named_parameters()]
    update = update_of(optimizer, model, names)
    weights = tuple(parameter.detach().numpy().copy() for parameter in model.parameters())
    for number in range(2, 4):
        draws = [np.random.default_rng([number, at]).standard_normal(w.shape) for at, w in enumerate(weights)]
        weights = update.apply(weights, [draw.astype(np.float32) for draw in draws])
    # Only read: stepping the update left the optimizer alone.
    assert str(optimizer.state_dict()) == str(before)

    with torch.no_grad():
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            parameter.copy_(torch.tensor(weight))
    fresh = make(kind, settings)
    fresh[0].load_state_dict(model.state_dict())
    restore_optimizer(fresh[1], fresh[0], update.state)
    for number in range(4, 6):
        step(*fresh, number)
    for ours, theirs in zip(fresh[0].parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    found, states = (dict(sorted(one.state_dict()["state"].items())) for one in (fresh[1], all_torch))
    assert found.keys() == states.keys()
    for position, entries in states.items():
        assert found[position].keys() == entries.keys()
        assert all(torch.equal(found[position][key], value) for key, value in entries.items())


def test_what_does_not_fit_is_refused() -> None:
    model, optimizer = make(torch.optim.SGD, {"lr": 0.1})
    names = [name for name, _ in model.named_parameters()]
    with pytest.raises(ConfigError, match="no optimizer 'RMSprop'"):
        update_of(torch.optim.RMSprop(model.parameters()), model, names)
    with pytest.raises(ConfigError, match=r"shape \(3, 4\) that is not one of the model's"):
        update_of(optimizer, nn.Linear(1, 1), names)
    with pytest.raises(ConfigError, match=r"has '0\.weight', the model only"):
        update_of(optimizer, model, names[1:])
    with pytest.raises(ConfigError, match="belongs to no parameter of the optimizer"):
        restore_optimizer(optimizer, model, {"9.bias/momentum_buffer": np.zeros(3)})
