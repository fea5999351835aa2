import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dglx_dist.errors import ConfigError
from scripts.bench.simulate import ComputeCost, Line, SleepingModel, calibrate

COST = ComputeCost(forward=Line(base_s=0.5, per_edge_s=0.01), backward=Line(base_s=0.25, per_edge_s=0.02))


def block(edges: int, targets: int) -> Any:
    """As much of a block as is looked at."""
    return SimpleNamespace(
        num_edges=lambda: edges,
        num_dst_nodes=lambda: targets,
        srcdata={"feat": torch.ones(4, 3)},
        dstdata={"label": torch.zeros(targets, dtype=torch.int64)},
    )


class Linear(nn.Module):
    """Moves a clock, which stands still else, as the batch's size tells."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.now = nn.Linear(3, 2), 0.0

    def forward(self, blocks: list[Any], h: torch.Tensor) -> torch.Tensor:
        self.now += 1.0 + 0.1 * sum(one.num_edges() for one in blocks)
        return self.layer(h)[: blocks[-1].num_dst_nodes()]


def test_forward_and_backward_sleep_as_calibrated() -> None:
    slept: list[float] = []
    model = SleepingModel(nn.Linear(3, 2), COST, classes=5, sleep=slept.append)
    scores = model([block(30, 7), block(10, 4)], torch.ones(9, 3))
    assert scores.shape == (4, 5)
    assert slept == [0.5 + 0.01 * 40]
    nn.functional.cross_entropy(scores, torch.zeros(4, dtype=torch.int64)).backward()
    assert slept == [0.5 + 0.01 * 40, 0.25 + 0.02 * 40]
    model([block(0, 0)], torch.ones(0, 3))
    assert slept[2:] == [0.0]


def test_every_parameter_gets_a_zero_gradient_of_its_size_and_the_optimizer_leaves_it() -> None:
    inner = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model = SleepingModel(inner, COST, classes=2, sleep=lambda _: None)
    before = [parameter.detach().clone() for parameter in inner.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scores = model([block(3, 2)], torch.ones(3, 3))
    nn.functional.cross_entropy(scores, torch.tensor([0, 1])).backward()
    for parameter in inner.parameters():
        assert parameter.grad.shape == parameter.shape
        assert not parameter.grad.any()
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, inner.parameters(), strict=True))
    assert [name for name, _ in model.named_parameters()] == [
        f"module.{name}" for name, _ in inner.named_parameters()
    ]


def test_calibration_finds_the_line() -> None:
    model = Linear()
    cost = calibrate(model, [[block(edges, 2)] for edges in (10, 20, 40)], clock=lambda: model.now)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert cost.forward.base_s == pytest.approx(1.0)
    assert cost.forward.per_edge_s == pytest.approx(0.1)
    assert cost.backward == Line(base_s=0.0, per_edge_s=0.0)


def test_one_size_of_batch_tells_no_cost_per_edge() -> None:
    with pytest.raises(ConfigError, match="at least two sizes"):
        calibrate(Linear(), [[block(7, 1)], [block(7, 2)]])


def test_a_slower_core_takes_that_much_longer() -> None:
    assert COST.scaled(2.0).forward.seconds(40) == 2 * COST.forward.seconds(40)
    assert COST.scaled(2.0).backward.seconds(40) == 2 * COST.backward.seconds(40)


def test_nonsense_cannot_be_slept() -> None:
    for wrong in (-1.0, math.inf, math.nan):
        with pytest.raises(ConfigError, match="cannot be slept"):
            Line(base_s=wrong, per_edge_s=0.0)
