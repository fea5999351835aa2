"""Sizes of layers, read from a call of the model, and what refuses a model."""

from typing import Any

import dgl
import pytest
import torch
from torch import nn

from dglx_dist.errors import ConfigError
from dglx_dist.layers.base import StageInput
from dglx_dist.layers.convolutions import make_stages
from dglx_dist.layers.tracer import random_block
from dglx_dist.planner.costs.base import COSTS
from dglx_dist.planner.measure import time_step
from dglx_dist.planner.model_shape import infer_shape
from dglx_dist.training.models import build_model
from tests.planner.hand_made import shape_of_kind


class Fails(nn.Module):
    def __init__(self, problem: Exception, weights: torch.Tensor) -> None:
        super().__init__()
        self.problem, self.weights = problem, weights

    def forward(self, _plan_blocks: Any, _rows: Any) -> Any:
        raise self.problem


def test_a_model_that_does_not_fit_is_refused_with_what_it_raised() -> None:
    block = dgl.to_block(dgl.graph(([0, 1], [0, 0])), [0])
    weights = nn.Parameter(torch.ones(1))
    for problem in (IndexError("list index"), dgl.DGLError("0-in-degree"), AttributeError("no h")):
        with pytest.raises(ConfigError, match=rf"{type(problem).__name__}: .* with 1 blocks"):
            time_step(Fails(problem, weights), [block], 3)
    with pytest.raises(ConfigError, match="Fails has no parameters to train"):
        time_step(Fails(ValueError(), torch.ones(1)), [block], 3)


PARTS = {
    # (inputs, outputs, summed) of each of 3 layers
    "sage": [(100, 16, 16), (16, 16, 16), (16, 10, 10)],
    "gcn": [(100, 16, 16), (16, 16, 16), (16, 10, 10)],
    "sgc": [(100, 10, 10), (10, 10, 10), (10, 10, 10)],
    # Heads of width 4; attention adds 6 columns for each of the 4.
    "gat": [(100, 16, 40), (16, 16, 40), (16, 40, 64)],
    "mlp": [(100, 16, 0), (16, 16, 0), (16, 10, 0)],
    # The encoder stands before the first sum, the decoder behind the last one.
    "resgcn": [(16, 16, 16), (16, 16, 16), (16, 16, 16)],
}


@pytest.mark.parametrize("kind", PARTS)
def test_layers_are_read_from_a_call_of_the_model(kind: str) -> None:
    result = shape_of_kind(kind, 100, 16, 10, 3)
    read = [(o.inputs, o.outputs, o.summed) for o in result.layers]
    assert read == PARTS[kind]
    assert result.first_learns == (kind == "resgcn")
    assert ("push_pull" in result.refusals) == (kind in ("mlp", "resgcn"))


class One(nn.Module):
    """A convolution, called with ``given`` beside its block and rows."""

    def __init__(self, conv: nn.Module, **given: Any) -> None:
        super().__init__()
        self.conv, self._given = conv, given

    def forward(self, blocks: Any, x: torch.Tensor) -> Any:
        inputs = {name: value.expand(blocks[0].num_edges()) for name, value in self._given.items()}
        return self.conv(blocks[0], x, **inputs)


RELATION = torch.zeros(1, dtype=torch.int64)
MLP = nn.Sequential(nn.Linear(100, 256), nn.ReLU(), nn.Linear(256, 16))
RELATIONAL = dgl.nn.RelGraphConv(100, 16, 5, "basis", 4)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (One(dgl.nn.SAGEConv(100, 16, "pool")), (100, 16, 100)),
        (One(dgl.nn.GINConv(MLP)), (100, 16, 100)),
        (One(RELATIONAL, etypes=RELATION), (100, 16, 16)),
    ],
)
def test_layers_with_more_than_one_product_have_one_width(model: One, expected: tuple[int, ...]) -> None:
    result = infer_shape(model, 100, 16, 1)
    (layer,) = result.layers
    assert (layer.inputs, layer.outputs, layer.summed) == expected
    assert result.hidden == 16
    # The same where the model cannot be called.
    assert infer_shape(Loops(model.conv), 100, 16, 1).layers == (layer,)


@pytest.mark.parametrize(
    ("conv", "width", "known"),
    [
        (dgl.nn.SAGEConv(8, 3, "mean"), 3, True),
        (dgl.nn.GINConv(nn.Linear(8, 3)), 3, True),
        (dgl.nn.GINConv(nn.Linear(8, 3), learn_eps=True), 6, True),
        (dgl.nn.RelGraphConv(8, 3, 5, "basis", 4), 3, False),
        (dgl.nn.RelGraphConv(8, 3, 5, layer_norm=True), 6, False),
        (dgl.nn.RelGraphConv(8, 3, 5, layer_norm=True, self_loop=False), 3, False),
    ],
)
def test_columns_that_push_pull_sums_are_those_of_a_call(conv: nn.Module, width: int, known: bool) -> None:
    block = random_block(4, 7, 20, torch.Generator().manual_seed(0))
    edges = {"etypes": RELATION.expand(block.num_edges())} if "Rel" in type(conv).__name__ else {}
    stages = make_stages(conv)
    sums = stages.sync(StageInput(block=block, x=torch.ones(7, 8), edges=edges))
    assert stages.sum_width == width == sum(item.shape[1] for item in sums)
    first = COSTS.get("push_pull").inspect(Loops(conv), 8)
    assert (first.sum_width, first.known) == (width, known)


class Loops(nn.Module):
    """Takes what the planner does not give: its layers are those that it has registered."""

    def __init__(self, *convs: nn.Module) -> None:
        super().__init__()
        self.convs = nn.ModuleList(convs)

    def forward(self, _blocks: Any, _x: Any, _more: Any) -> None: ...


def test_layers_of_a_model_that_cannot_be_called_are_those_that_it_has() -> None:
    two = Loops(dgl.nn.GraphConv(100, 16), dgl.nn.SAGEConv(16, 10, "mean"))
    result = infer_shape(two, 100, 10)
    assert [(layer.inputs, layer.outputs) for layer in result.layers] == [(100, 16), (16, 10)]
    assert result.kind == "gcn"
    three = infer_shape(two, 100, 10, 3, hidden=8)
    assert [(layer.inputs, layer.outputs) for layer in three.layers] == [(100, 8), (8, 8), (8, 10)]


def test_a_module_tells_what_refuses_it() -> None:
    plain = infer_shape(build_model("gcn", 100, 16, 10, 2, 0.5), 100, 10, 2)
    assert plain.refusals == {}
    mixing = torch.nn.Sequential(torch.nn.BatchNorm1d(100), torch.nn.Linear(100, 10))
    result = infer_shape(mixing, 100, 10, 1)
    assert result.refusals["full_graph"] == "'0' is a BatchNorm1d"
    assert result.refusals["lambda"].startswith("the model could not be called as model(blocks, x)")
    assert "push_pull" in result.refusals


def test_an_error_of_an_inspection_refuses_its_strategy_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(_model: nn.Module, _features: int) -> None:
        raise KeyError("no such layer")

    monkeypatch.setattr(COSTS.get("lambda"), "inspect", fails)
    result = infer_shape(build_model("gcn", 100, 16, 10, 2), 100, 10)
    assert result.refusals == {"lambda": "its inspection of the model failed: KeyError: 'no such layer'"}
    assert "full_graph" in result.inspected
