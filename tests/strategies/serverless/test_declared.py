"""A layer of the user's own trains by its stage, in processes too, and is compared with it first."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dgl
import pytest
import torch
import torch.nn.functional as F
from dgl import function as fn
from torch import Tensor, nn

import dglx_dist as dx
from dglx_dist.errors import ConfigError
from dglx_dist.serverless.stages.base import STAGES, register_stage
from dglx_dist.strategies.serverless.model_to_program import chain_of
from dglx_dist.strategies.serverless.probe import DeclaredStage
from dglx_dist.training.fit import FitConfig
from tests.strategies import equality
from tests.strategies.serverless.own_stage import Gate
from tests.strategies.serverless.own_tensor_stage import TensorGate

HIDDEN = 4


class GatedConv(nn.Module):
    """The layer of own_stage.Gate as a module, over the mean of the in-neighbours."""

    def __init__(self, in_dim: int, out_dim: int, **declared: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(in_dim, out_dim) / 2)
        self._declared = declared

    def forward(self, block: Any, h: Tensor) -> Tensor:
        with block.local_scope():
            block.srcdata["h"] = h
            block.update_all(fn.copy_u("h", "m"), fn.mean("m", "h"))
            z = block.dstdata["h"] @ self.weight
        own = h[: block.num_dst_nodes(), : self.weight.shape[1]]
        return torch.tanh(z) * own + z

    def vertex_stage(self) -> DeclaredStage:
        wide, narrow = self.weight.shape
        usual: dict[str, Any] = {"stage": "gate", "config": {"in": wide, "out": narrow}}
        usual |= {"weights": ("weight",), "around": "mean", "own": True}
        return DeclaredStage(**usual | self._declared)


class Model(nn.Module):
    """The user's layer, one of DGL's, and a head."""

    def __init__(self, **declared: Any) -> None:
        super().__init__()
        self.gated = GatedConv(equality.WIDTH, HIDDEN, **declared)
        self.conv = dgl.nn.SAGEConv(HIDDEN, HIDDEN, "mean")
        self.head = nn.Linear(HIDDEN, equality.CLASSES)

    def forward(self, blocks: list[Any], h: Tensor) -> Tensor:
        h = self.gated(blocks[0], h)
        scores: Tensor = self.head(torch.relu(self.conv(blocks[1], h)))
        return scores


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    register_stage("gate", "tests.strategies.serverless.own_stage:Gate")
    register_stage("tensor_gate", TensorGate)
    yield
    assert STAGES.get("gate") is Gate


def model(**declared: Any) -> Model:
    torch.manual_seed(3)
    return Model(**declared).double()


def test_it_trains_in_processes_as_in_torch(tmp_path: Path) -> None:
    """And a stage of tensors in threads, which processes refuse."""
    graph, expected = equality.plain_graph(), model()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.3)
    mask = graph.ndata["train_mask"]
    for _ in range(3):
        optimizer.zero_grad()
        scores = expected([graph, graph], graph.ndata["feat"])
        F.cross_entropy(scores[mask], graph.ndata["label"][mask]).backward()
        optimizer.step()
    folder = equality.write_parts(tmp_path)
    config = FitConfig(epochs=3, eval_every=0, num_layers=2, show_progress=False)
    for executor, stage in (("local", "gate"), ("inline", "tensor_gate")):
        with dx.init("lambda", timeout=30, executor=executor, intervals=2, workers=1):
            g = dx.DistGraph(folder)
            trained, _ = dx.fit(
                model(stage=stage), g, config=config, make_optimizer=lambda p: torch.optim.SGD(p, lr=0.3)
            )
            if executor == "local":
                with pytest.raises(ConfigError, match="which imports torch, and workers of executor 'local'"):
                    dx.wrap(model(stage="tensor_gate"), g)
        for local, theirs in zip(trained.parameters(), expected.parameters(), strict=True):
            assert (local - theirs).detach().abs().max().item() < 1e-12


@pytest.mark.parametrize(
    ("declared", "reason"),
    [
        ({"around": "sum"}, "differ in the result"),
        ({"own": False}, "declares 1 inputs"),
        ({"weights": ()}, r"a parameter 'weight' that no stage knows"),
        (
            {"config": {"in": equality.WIDTH, "out": 3}},
            r"declares weights \['weight'\] of shapes \[\(7, 4\)\]",
        ),
        ({"stage": "gates"}, "did you mean 'gate'"),
    ],
)
def test_what_is_declared_wrongly_is_refused(declared: dict[str, Any], reason: str) -> None:
    with pytest.raises(Exception, match=reason) as caught:
        chain_of(Model(**declared))
    assert isinstance(caught.value, ConfigError) or "did you mean" in reason


class Doubled(Gate):
    """Right forward, wrong backward."""

    def backward(self, *given: Any, **named: Any) -> Any:
        found = super().backward(*given, **named)
        return found._replace(weights=(2 * found.weights[0],))


def test_a_wrong_gradient_is_refused() -> None:
    register_stage("doubled", Doubled)
    with pytest.raises(ConfigError, match="differ in the gradient of 'weight'"):
        chain_of(Model(stage="doubled"))


def test_an_activation_behind_it_needs_to_be_taken() -> None:
    class Behind(Model):
        def forward(self, blocks: list[Any], h: Tensor) -> Tensor:
            h = torch.relu(self.gated(blocks[0], h))
            scores: Tensor = self.head(self.conv(blocks[1], h))
            return scores

    with pytest.raises(ConfigError, match="followed by relu, but its stage takes no activation"):
        chain_of(Behind())
