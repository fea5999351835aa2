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
        self.now += 1.0 + 0.1 * sum(item.num_edges() for item in blocks)
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
    assert COST.scale(2.0).backward == Line(base_s=2 * 0.25, per_edge_s=2 * 0.02)


def test_calibration_finds_the_line() -> None:
    model = Linear()
    cost = calibrate(model, [[block(edges, 2)] for edges in (10, 20, 40)], clock=lambda: model.now)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert cost.forward.base_s == pytest.approx(1.0)
    assert cost.forward.per_edge_s == pytest.approx(0.1)
    assert cost.backward == Line(base_s=0.0, per_edge_s=0.0)
    with pytest.raises(ConfigError, match="at least two sizes"):
        calibrate(Linear(), [[block(7, 1)], [block(7, 2)]])
    for wrong in (-1.0, math.inf, math.nan):
        with pytest.raises(ConfigError, match="cannot be slept"):
            Line(base_s=wrong, per_edge_s=0.0)
