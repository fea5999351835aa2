"""torch.compile in and around the wrapped model trains as without it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import dglx_dist as dx
from tests.api.test_loop_habits import STRATEGIES, Net, loader_of, plain_graph
from tests.helpers import wide
from tests.helpers.ranks import run_each
from tests.strategies.equality import loop

WAYS: dict[str, Callable[[Any, str], nn.Module]] = {
    "in wrap": lambda g, backend: dx.wrap(torch.compile(Scored(), backend=backend), g),
    "around wrap": lambda g, backend: torch.compile(dx.wrap(Scored(), g), backend=backend),
}


class Scored(nn.Module):
    """Layers that are compiled after layers that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.head = nn.Sequential(nn.LayerNorm(3), nn.GELU(), nn.Linear(3, 3)).double()

    def forward(self, blocks: Any, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.net(blocks, x)).sin()
        return scores


def train(g: Any, model: nn.Module) -> dict[str, Tensor]:
    loop(model, loader_of(g), torch.optim.SGD(model.parameters(), lr=0.5), 2)
    return {name.replace("_orig_mod.", ""): value.clone() for name, value in model.state_dict().items()}


def furthest_from_eager(strategy: str, backend: str) -> dict[str, float]:
    with dx.init(strategy=strategy, seed=0, timeout=60, **STRATEGIES[strategy]):
        g = dx.distribute(plain_graph(), parts=2)
        expected, differences = train(g, dx.wrap(Scored(), g)), {}
        for name, build in WAYS.items():
            torch._dynamo.reset()
            counters.clear()
            weights = train(g, build(g, backend))
            assert counters["frames"]["ok"] > 0, name
            differences[name] = max(float((weights[key] - expected[key]).abs().max()) for key in expected)
        return differences


@pytest.mark.parametrize("backend", ["eager", *wide("aot_eager")])
def test_trains_a_compiled_model_as_without_compilation(backend: str) -> None:
    cases = [(strategy, backend) for strategy in STRATEGIES]
    for case, results in zip(cases, run_each(furthest_from_eager, cases, 2), strict=True):
        for differences in results:
            assert differences == pytest.approx(dict.fromkeys(WAYS, 0.0), abs=1e-12), case
