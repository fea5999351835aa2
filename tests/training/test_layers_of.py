"""The layers that a model tells, or that one names."""

from typing import Any

import pytest
import torch
from torch import nn

from dglx_dist.errors import ConfigError
from dglx_dist.training.inference import layers_of


class Times(nn.Module):
    """Multiplies rows by a number."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, block: Any, h: torch.Tensor) -> torch.Tensor:
        return self.factor * h


class Model(nn.Module):
    """Three layers under a name that it does not tell, and another list that is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([Times(2), Times(-3), Times(5)])
        self.norms = nn.ModuleList()


class Telling(Model):
    def inference_layers(self) -> list[Any]:
        return list(self.convs[:2])


@pytest.mark.parametrize(
    ("layers", "between", "expected"),
    [
        ("convs", None, -30),
        # relu(2), relu(-6), and no function behind the last.
        ("convs", torch.relu, 0),
        ([Times(-7)], torch.relu, -7),
        (None, None, -6),
        (None, torch.neg, 6),
    ],
)
def test_layers_follow_each_other(layers: Any, between: Any, expected: float) -> None:
    h = torch.tensor(1.0)
    for layer in layers_of(Telling(), layers, between):
        h = layer(None, h)
    assert h == expected


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ("layers", "layers='layers', but Model has no list of layers of that name"),
        ("training", "no list of layers of that name"),
        ("norms", "no layers to compute"),
        ([], "no layers to compute"),
        (None, r"give it a method inference_layers\(\)"),
    ],
)
def test_who_tells_no_layers_is_asked_for_them(layers: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        layers_of(Model(), layers, None)
