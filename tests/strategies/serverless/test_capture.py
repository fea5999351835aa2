"""Models and losses are recorded, or refused with the reason; every convolution of DGL is in a table."""

import re
from pathlib import Path
from typing import Any

import dgl.function as fn
import dgl.nn as dglnn
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dglx_dist.errors import ConfigError
from dglx_dist.strategies.serverless.cut import CLASS_LABEL, capture, capture_loss
from dglx_dist.strategies.serverless.program import Apply, Program, Slot
from dglx_dist.strategies.serverless.tensor_program import ALLOWED, Operation, TensorProgram, find_operation
from dglx_dist.training.tasks import choose_loss

from .programs import CONVOLUTIONS, MODELS, WEIGHT, Stack, make_program, program_of

PAGE = Path(__file__).parents[3] / "docs" / "strategies" / "lambda.md"
NUMBERS = Slot(name="label", shape=(3,), per="node")


class Changed(nn.Module):
    """A convolution whose result is changed in a way that no task can compute, or that loses the gradient."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.conv = kind, dglnn.GraphConv(5, 4)
        self.norm, self.gate = nn.BatchNorm1d(4), nn.Parameter(torch.zeros(1))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, blocks: list[Any], x: Tensor) -> Tensor:  # noqa: C901 - a case for each kind
        h: Tensor = self.conv(blocks[0], x)
        match self.kind:
            case "batch norm":
                return self.norm(h)
            case "softmax":
                return h.softmax(0)
            case "mean":
                return h - h.mean(0)
            case "number":
                return h / blocks[0].num_dst_nodes()
            case "value":
                return h * x.max().item()
            case "values":
                return h * float(h.max())
            case "noise":
                return h + torch.rand_like(h)
            case "view":
                h[:, 0] = 0
                return h * 2
            case "no gradient":
                with torch.no_grad():
                    h = self.conv(blocks[0], x)
                return self.conv(blocks[0], h[:, [0, 1, 2, 3, 0]])
            case "branch":
                return h * 2 if bool((x > 100).any()) else h
            case "list":
                return h * 2 if self.conv.weight.tolist()[0][0] > -100 else h
            case "buffer":
                self.calls += 1
                return h / self.calls
            case "hidden mean":
                return h + self.gate * h.mean(0, keepdim=True)
            case "nodes with nodes":
                return (h @ h.t()) @ h
            case "messages of weights":
                blocks[0].srcdata["w"] = self.gate.expand(len(x), 4)
                blocks[0].update_all(fn.copy_u("w", "m"), fn.sum("m", "s"))
                return h + blocks[0].dstdata["s"]
            case "small gradient":
                with torch.no_grad():
                    h = self.conv(blocks[0], x)
                return 1e-6 * (self.conv(blocks[0], h[:, [0, 1, 2, 3, 0]]))
            case "reversed":
                return h.flip(0)
        raise AssertionError(self.kind)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("batch norm", r"BatchNorm1d 'norm' uses statistics over all nodes.*use nn\.LayerNorm"),
        ("softmax", "rows of nodes .* from each other with _softmax"),
        ("mean", "rows of nodes .* from each other with sub"),
        ("number", r"from each other with div|computes with a number of the graph"),
        ("value", "a value of a tensor in Python"),
        ("branch", "a value of a tensor in Python"),
        ("list", "a value of a tensor in Python"),
        ("buffer", "a buffer or weight that it changes"),
        ("hidden mean", "rows of nodes .* from each other with"),
        ("nodes with nodes", "from each other with"),
        ("messages of weights", "messages of weights alone"),
        ("small gradient", "gradient of 'conv.weight' of the model differs"),
        ("values", "a value of a tensor in Python"),
        ("noise", r"random numbers \(rand_like\).*use torch\.nn\.Dropout"),
        ("view", "differs by .* changed in place through a view"),
        ("no gradient", "gradient of 'conv.weight' of the model differs"),
        ("reversed", "rows of nodes .* from each other with flip"),
    ],
)
def test_a_model_that_no_task_can_compute_is_refused_with_the_reason(kind: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        capture(Changed(kind).double(), 5)


def test_a_program_comes_back_from_its_text_and_shared_weights_count_once() -> None:
    for name in (*MODELS, *CONVOLUTIONS):
        program = make_program(name)
        again = Program.from_json(program.to_json())
        assert again.digest == program.digest
        assert again.weight_shapes == program.weight_shapes
        names = {
            operation.name
            for step in program.steps
            if isinstance(step, Apply)
            for operation in step.body.operations
        }
        assert {operation.partition(".")[0] for operation in names} <= ALLOWED | {"drop"}
    # A weight of two hops belongs to two steps.
    gated = make_program("GatedGraphConv")
    used = [weight for step in gated.steps if isinstance(step, Apply) for weight in step.weights]
    assert len(used) > len(set(used)) == len(gated.weight_shapes)


def test_degrees_are_read_once_and_wide_rows_of_edges_are_not_kept() -> None:
    program = make_program("GraphConv")
    assert [step.name for step in program.steps if isinstance(step, Apply) and step.place == "once"] == [
        "ON1"
    ]
    for step in make_program("EdgeConv").steps:
        if isinstance(step, Apply) and step.per == "edge" and step.place == "once":
            assert all(slot.width <= 8 for slot in step.outputs)


def test_a_worker_runs_only_operations_of_the_list() -> None:
    good = TensorProgram(
        inputs=((2,),),
        weights=(),
        constants=(),
        operations=(Operation(name="relu.default", arguments=({"value": 0},), keywords={}, results=(1,)),),
        outputs=(1,),
    )
    assert good.run([torch.ones(3, 2)], [], None)[1].shape == (3, 2)
    for name in (
        "relu_.default",
        "empty.memory_format",
        "as_strided.default",
        "set_.source_Tensor",
        "system.x",
        "",
    ):
        with pytest.raises(ConfigError, match="not one that workers run"):
            find_operation(name)
    with pytest.raises(ConfigError, match="before they exist"):
        TensorProgram(inputs=(), weights=(), constants=(), operations=good.operations, outputs=(1,))
    with pytest.raises(ConfigError, match="no operation makes the outputs"):
        TensorProgram(inputs=((2,),), weights=(), constants=(), operations=(), outputs=(7,))


@pytest.mark.parametrize(
    ("loss", "label"),
    [
        (F.cross_entropy, CLASS_LABEL),
        (nn.CrossEntropyLoss(label_smoothing=0.1), CLASS_LABEL),
        (choose_loss("classification", torch.tensor([1.0, 2.0, 3.0])), CLASS_LABEL),
        (nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0, 3.0])), NUMBERS),
        (choose_loss("multilabel"), NUMBERS),
        (choose_loss("regression"), NUMBERS),
        (F.smooth_l1_loss, NUMBERS),
        (lambda scores, labels: ((scores - labels) ** 2).sum(1).sqrt().mean(), NUMBERS),
    ],
)
def test_any_loss_that_is_a_mean_over_rows_is_captured(loss: Any, label: Slot) -> None:
    program = capture_loss(loss, (3,), label, torch.float64)
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(7, 3, dtype=torch.float64, generator=generator)
    labels = torch.randint(3, (7,), generator=generator) if label.dtype else scores.round().clamp(0, 1)
    by_row = program.run([scores, labels.reshape(7, -1) if not label.dtype else labels], [], None)
    torch.testing.assert_close(by_row[program.outputs[0]].mean(), loss(scores, labels).double())


def test_a_loss_that_is_no_mean_is_refused() -> None:
    for loss in (
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]).double()),
        nn.CrossEntropyLoss(reduction="sum"),
    ):
        with pytest.raises(ConfigError, match="divide a weighted loss by the number of rows"):
            capture_loss(loss, (3,), CLASS_LABEL, torch.float64)


def sizes(*shape: int, **more: Any) -> dict[str, Slot]:
    return {"w": Slot(name="edge:w", shape=shape, per="edge", **more)}


class Single(nn.Module):
    def __init__(self, conv: nn.Module, *edge_data: str) -> None:
        super().__init__()
        self.conv, self.edge_data = conv, edge_data

    def forward(self, blocks: list[Any], x: Tensor) -> Tensor:
        x = self.before(x) if hasattr(self, "before") else x
        result: Tensor = self.conv(blocks[0], x, *(blocks[0].edata[name] for name in self.edge_data))
        return result


class Wrapped(nn.Module):
    def __init__(self, conv: nn.Module, call: Any) -> None:
        super().__init__()
        self.conv, self.call = conv, call

    def forward(self, graph: Any, x: Tensor, *edge_data: Tensor) -> Tensor:
        result: Tensor = self.call(self.conv, graph, x, *edge_data)
        return result


def linear(inputs: int = 5, outputs: int = 4) -> nn.Module:
    return nn.Linear(inputs, outputs)


TABLE: dict[str, tuple[Any, ...]] = {
    "GraphConv": (lambda: dglnn.GraphConv(5, 4),),
    "SAGEConv mean, gcn, pool": (lambda: dglnn.SAGEConv(5, 4, "pool"),),
    "SAGEConv lstm": (lambda: dglnn.SAGEConv(5, 4, "lstm"),),
    "GATConv": (lambda: dglnn.GATConv(5, 2, 3),),
    "GATv2Conv": (lambda: dglnn.GATv2Conv(5, 2, 3),),
    "EdgeGATConv": (lambda: dglnn.EdgeGATConv(5, 2, 4, 3), sizes(2)),
    "EGATConv": (
        lambda: Wrapped(dglnn.EGATConv(5, 2, 4, 3, 2), lambda conv, g, x, w: conv(g, x, w)[0]),
        sizes(2),
    ),
    "EGNNConv": (lambda: Wrapped(dglnn.EGNNConv(5, 6, 4), lambda conv, g, x: conv(g, x, x[:, :3])[0]),),
    "GCN2Conv": (lambda: Wrapped(dglnn.GCN2Conv(5, 1), lambda conv, g, x: conv(g, x, x)),),
    "DotGatConv": (lambda: dglnn.DotGatConv(5, 4, 2),),
    "AGNNConv": (lambda: dglnn.AGNNConv(),),
    "GINConv": (lambda: dglnn.GINConv(linear(), "max"),),
    "GINEConv": (lambda: dglnn.GINEConv(linear()), sizes(5)),
    "EdgeConv": (lambda: dglnn.EdgeConv(5, 4),),
    "NNConv": (lambda: dglnn.NNConv(5, 4, linear(2, 20), "sum"), sizes(2)),
    "CFConv": (lambda: dglnn.CFConv(5, 2, 6, 4), sizes(2)),
    "GMMConv": (lambda: dglnn.GMMConv(5, 4, 2, 3, "mean"), sizes(2)),
    "RelGraphConv": (lambda: dglnn.RelGraphConv(5, 4, 3, "basis", 2), sizes(dtype="int64")),
    "SGConv": (lambda: dglnn.SGConv(5, 4, k=2),),
    "TAGConv": (lambda: dglnn.TAGConv(5, 4, 2),),
    "APPNPConv": (lambda: dglnn.APPNPConv(3, 0.1, 0.2),),
    "GatedGraphConv": (lambda: dglnn.GatedGraphConv(5, 6, 2, 1),),
    "ChebConv": (lambda: dglnn.ChebConv(5, 4, 2),),
    "PNAConv": (lambda: dglnn.PNAConv(5, 4, ["mean", "max"], ["identity"], 1.0),),
}
"""Convolutions of DGL that take a block or a graph, and rows; with the data of edges."""


def test_the_table_of_the_page_is_what_is_captured() -> None:
    trained, refused = [], []
    for name, (make, *edge_data) in TABLE.items():
        conv = make()
        columns = edge_data[0] if edge_data else {}
        # A layer without weights of its own trains those before it.
        model = Single(conv, *columns)
        model.before = nn.Linear(5, 5)
        try:
            capture(model, 5, columns)
            trained.append(name)
        except ConfigError:
            refused.append(name)
    text = PAGE.read_text()
    rows = dict(re.findall(r"^\| (yes|no): [^|]*\| ([^|]*)\|$", text, re.MULTILINE))
    of_page = {verdict: sorted(re.findall(r"`([^`]+)`", cell)) for verdict, cell in rows.items()}
    assert of_page["yes"] == sorted(trained)
    assert of_page["no"] == sorted(refused)
    assert len(trained) >= 20


def test_data_of_edges_that_is_not_read_is_not_fetched() -> None:
    assert [
        slot.name for slot in capture(Single(dglnn.SAGEConv(5, 4, "pool")), 5, WEIGHT).program.inputs
    ] == ["x"]


@pytest.mark.parametrize(
    ("features", "begins_with"), [(8, ["GA1", "AV1", "SC1"]), (9, ["AV1", "SC1", "GA1"])]
)
def test_features_are_summed_before_a_product_unless_they_are_much_wider(
    features: int, begins_with: list[str]
) -> None:
    model = Stack(dglnn.GraphConv(features, 4, norm="none"), dglnn.GraphConv(4, 3, norm="none"))
    assert [step.name for step in program_of(model, features).steps][:3] == begins_with
