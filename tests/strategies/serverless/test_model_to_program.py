"""A model as a program: equal scores, loss and gradients; or refused, with the place and the remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import dgl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from dgl import function as fn
from torch import Tensor, nn

import dglx_dist as dx
from dglx_dist.errors import ConfigError
from dglx_dist.layers.base import DeclaredStage
from dglx_dist.records import Array
from dglx_dist.strategies.serverless.program import Edge, Gather, Scatter, Vertex
from dglx_dist.strategies.serverless.stages.base import STAGES, register_stage
from dglx_dist.strategies.serverless.graph_partition import edge_values
from dglx_dist.strategies.serverless.layer_kinds import FACTOR_OF_NORM, EdgeFactor
from dglx_dist.strategies.serverless.model_to_program import chain_of, find_layers
from dglx_dist.training.fit_config import FitConfig
from dglx_dist.training.models import build_model
from tests.strategies import equality
from tests.strategies.serverless import cases
from tests.strategies.serverless.own_stage import Gate
from tests.strategies.serverless.own_tensor_stage import TensorGate

NODES, WIDTH, CLASSES = 30, 5, 3


def graph() -> Any:
    """Directed, with self-loops; node 0 has no in-edge and node 1 no out-edge; edges by (target, source)."""
    random = np.random.default_rng(5)
    pairs = np.unique(random.integers(NODES, size=(120, 2)), axis=0)
    pairs = pairs[(pairs[:, 0] != 0) & (pairs[:, 1] != 1)]
    made = dgl.graph((pairs[:, 1], pairs[:, 0]), num_nodes=NODES)
    made.edata["w"] = torch.from_numpy(random.random(len(pairs)))
    return made


ON_ROWS = (nn.Linear, nn.LayerNorm, nn.Dropout)


class Seq(nn.Module):
    def __init__(self, layers: list[nn.Module], after: list[Callable[[Tensor], Tensor]]) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"layers": nn.ModuleList(layers)})
        self._after = after

    def forward(self, blocks: list[Any], h: Tensor) -> Tensor:
        numbers = iter(range(len(blocks)))
        for layer, after in zip(self.inner["layers"], self._after, strict=True):  # type: ignore[arg-type]
            h = after(layer(h) if isinstance(layer, ON_ROWS) else layer(blocks[next(numbers)], h))
        return h


def same(h: Tensor) -> Tensor:
    return h


def conv(kind: str, wide: int, narrow: int, **options: Any) -> Any:
    if kind == "sage":
        return dgl.nn.SAGEConv(wide, narrow, "mean", **options)
    zero = {"allow_zero_in_degree": True}
    if kind == "gat":
        return dgl.nn.GATConv(wide, narrow, 2, **zero, **options)
    return dgl.nn.GraphConv(wide, narrow, norm=kind, **zero, **options)


class Calls(nn.Module):
    """Layers, and how the model calls them with its blocks and rows."""

    def __init__(self, call: Callable[[Any, Any, Tensor], Tensor], *layers: nn.Module) -> None:
        super().__init__()
        self.layers, self._call = nn.ModuleList(layers), call

    def forward(self, blocks: list[Any], h: Tensor) -> Tensor:
        return self._call(self.layers, blocks, h)


def call_with_weights(layers: Any, blocks: Any, h: Tensor) -> Any:
    """Convolutions that take edge weights, by name and by position, one of them with a pair of rows."""
    h = torch.relu(layers[0](blocks[0], h, edge_weight=blocks[0].edata["w"]))
    return layers[1](blocks[1], (h, h[: blocks[1].num_dst_nodes()]), blocks[1].edata["w"])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "sage": lambda: build_model("sage", WIDTH, 4, CLASSES, layers=3, dropout=0.0),
    "gcn": lambda: build_model("gcn", WIDTH, 6, CLASSES, dropout=0.0),
    "gat": lambda: build_model("gat", WIDTH, 4, CLASSES, layers=3, dropout=0.0, heads=2),
    "sgc": lambda: build_model("sgc", WIDTH, 4, CLASSES, layers=3, dropout=0.0),
    "mlp": lambda: build_model("mlp", WIDTH, 4, CLASSES, dropout=0.0),
    "norms": lambda: Seq(
        [
            conv("both", WIDTH, 4, activation=torch.tanh),
            conv("left", 4, 6, bias=False),
            conv("none", 6, CLASSES),
        ],
        [same, torch.sigmoid, same],
    ),
    "functions": lambda: Seq(
        [
            conv("right", WIDTH, 4),
            conv("sage", 4, 4, bias=False),
            conv("sage", 4, 4),
            conv("right", 4, 4),
            nn.Linear(4, CLASSES),
        ],
        [nn.LeakyReLU(0.2), nn.ELU(0.7), torch.sigmoid, torch.tanh, same],
    ),
    "in_place": lambda: Seq([conv("sage", WIDTH, 4), nn.Linear(4, CLASSES)], [torch.relu_, torch.tanh]),
    "heads": lambda: Seq(
        [
            conv("gat", WIDTH, 4, residual=True, activation=F.elu),
            conv("gat", 4, 2, residual=True, bias=False),
            conv("sage", 4, 4, activation=torch.relu),
            conv("gat", 4, CLASSES),
        ],
        [
            lambda h: torch.tanh(h.mean(1)),
            lambda h: F.leaky_relu(h).flatten(1),
            same,
            lambda h: F.elu(h, 1.5).mean(1),
        ],
    ),
    "norm behind heads": lambda: Seq(
        [nn.LayerNorm(WIDTH), conv("gat", WIDTH, 2), nn.LayerNorm(4), conv("gat", 4, CLASSES)],
        [same, lambda h: F.elu(h).flatten(1), torch.relu, lambda h: h.mean(1)],
    ),
    "norm behind sums": lambda: Seq(
        [
            conv("sage", WIDTH, 4),
            nn.LayerNorm(4, elementwise_affine=False),
            conv("both", 4, 4),
            nn.LayerNorm(4),
            nn.Linear(4, CLASSES),
        ],
        [torch.tanh, F.elu, same, torch.relu, same],
    ),
    "call_with_weights": lambda: Calls(call_with_weights, conv("both", WIDTH, 4), conv("sage", 4, CLASSES)),
    "called in another order": lambda: Calls(
        lambda layers, blocks, h: layers[0](torch.tanh(layers[1](blocks[0], h))),
        nn.Linear(4, CLASSES),
        conv("sage", WIDTH, 4),
    ),
}


def factor_values(factor: EdgeFactor, g: Any) -> Array:
    sources, targets = (ends.numpy() for ends in g.edges())
    d = np.maximum(np.bincount(targets, minlength=NODES), 1).astype(float) ** factor.target
    o = np.maximum(np.bincount(sources, minlength=NODES), 1).astype(float) ** factor.source
    column = 1.0 if factor.column is None else g.edata[factor.column].numpy()
    values: Array = (d[targets] * o[sources] * column)[:, None]
    return values


@pytest.mark.parametrize("kind", MODELS)
def test_the_program_is_the_model(kind: str) -> None:
    torch.manual_seed(2)
    model, g = MODELS[kind]().double(), graph()
    for parameter in model.parameters():
        # Biases begin at zero, where much could be wrong without a trace.
        nn.init.normal_(parameter, std=0.5)
    random = np.random.default_rng(6)
    x = random.standard_normal((NODES, WIDTH))
    labels = np.where(np.arange(NODES) % 3, random.integers(CLASSES, size=NODES), -1).astype(np.int32)
    chain = chain_of(model, {"w": ()})
    program = replace(chain.program, num_train=int((labels >= 0).sum()))
    sources, targets = (ends.numpy() for ends in g.edges())
    case = cases.Case(
        indptr=np.concatenate([[0], np.cumsum(np.bincount(targets, minlength=NODES))]),
        sources=sources,
        x=x,
        labels=labels,
        fixed={name: factor_values(factor, g) for name, factor in chain.factors.items()},
    )
    result = cases.plain_run(
        program, {name: tensor.numpy() for name, tensor in model.state_dict().items()}, case
    )

    rows = torch.from_numpy(labels) >= 0
    blocks = [g for layer in find_layers(model) if layer.takes_block]
    scores = model(blocks, torch.from_numpy(x))
    loss = F.cross_entropy(scores[rows], torch.from_numpy(labels).long()[rows])
    loss.backward()
    np.testing.assert_allclose(result.loss_sum / int(rows.sum()), loss.item(), rtol=1e-12)
    assert result.correct == int((scores[rows].argmax(1) == torch.from_numpy(labels)[rows]).sum())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        np.testing.assert_allclose(result.gradients[name], parameter.grad.numpy(), atol=1e-11, err_msg=name)


def test_steps_are_those_of_the_paper() -> None:
    """No Scatter of features, none behind the last layer; one name for equal weights of edges."""
    chain = chain_of(MODELS["gcn"]())
    assert [step.name for step in chain.program.steps] == ["GA1", "AV1", "SC1", "GA2", "AV2"]
    assert chain.program.dtype == "float32"
    assert chain.factors == {"fixed:0": EdgeFactor(target=-1.0)}
    kinds = [type(step) for step in chain_of(MODELS["gat"]()).program.steps]
    assert kinds == [*[Vertex, Scatter, Edge, Gather] * 3, Vertex]
    shared = chain_of(MODELS["sage"]())
    assert {step.edges for step in shared.program.steps if isinstance(step, Gather)} == {"fixed:0"}


def names_of(model: nn.Module) -> list[str]:
    return [step.name for step in chain_of(model).program.steps]


def test_small_stages_join_their_neighbours_and_drops_are_steps() -> None:
    """No task for a norm, none for a dropout; without dropout the end of attention joins the next start."""
    normed = Seq(
        [conv("sage", WIDTH, 4), nn.LayerNorm(4), nn.Dropout(0.5), conv("sage", 4, CLASSES)],
        [same, torch.relu, same, same],
    )
    assert names_of(normed) == ["GA1", "AV1", "DR1", "SC1", "GA2", "AV2"]
    heads = build_model("gat", WIDTH, 4, CLASSES, heads=2)
    assert names_of(heads)[3:] == ["GA1", "AV2", "DR1", "AV3", "SC2", "AE2", "GA2", "AV4"]
    late = Seq([conv("sage", WIDTH, CLASSES), nn.Dropout(0.5)], [same, same])
    assert names_of(late) == ["GA1", "AV1", "DR1", "AV2"]
    # A dropout that is never called, as one layer's, and one of probability 0 are no steps.
    assert names_of(build_model("sage", WIDTH, 4, CLASSES, layers=1)) == ["GA1", "AV1"]
    assert names_of(pair(nn.Dropout(0.0))) == names_of(pair(same))


def test_nothing_of_the_model_changes() -> None:
    model = MODELS["heads"]()
    model.train()
    model.inner.eval()  # type: ignore[union-attr, operator]
    before = ({n: v.clone() for n, v in model.state_dict().items()}, torch.get_rng_state())
    modes = [module.training for module in model.modules()]
    chain_of(model)
    assert all(torch.equal(value, before[0][name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), before[1])
    assert [module.training for module in model.modules()] == modes
    assert all("forward" not in module.__dict__ for module in model.modules())
    assert not any(module._forward_pre_hooks for module in model.modules())


def pair(after: Callable[[Tensor], Tensor], *, width: int = 4) -> nn.Module:
    return Seq([conv("sage", WIDTH, width), conv("sage", 4, CLASSES)], [after, same])


def tied() -> nn.Module:
    model = Seq([conv("right", 4, 4), conv("right", 4, 4)], [torch.relu, same])
    model.inner["layers"][1].weight = model.inner["layers"][0].weight  # type: ignore[index]
    return model


class ByMode(Seq):
    """Drops features, or takes its layers in another order, in training alone."""

    def __init__(self, drops: bool) -> None:
        super().__init__([conv("sage", 4, 4), conv("sage", 4, 4)], [same, same])
        self._drops = drops

    def forward(self, blocks: list[Any], h: Tensor) -> Tensor:
        first, two = self.inner["layers"]  # type: ignore[misc]
        if self.training and not self._drops:
            first, two = two, first
        h = F.dropout(h, 0.5, training=self.training and self._drops)
        return two(blocks[1], first(blocks[0], h))  # type: ignore[no-any-return]


class Noisy(nn.Module):
    """Drops without a module of its own."""

    def forward(self, h: Tensor) -> Tensor:
        return F.dropout(h, 0.5, training=self.training)


def modules(*inner: nn.Module) -> nn.Module:
    model = pair(nn.Sequential(*inner))
    model.between = model._after[0]  # type: ignore[attr-defined, index]
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "other dropout": (
        lambda: modules(nn.AlphaDropout(0.3)),
        "'between.0', AlphaDropout, drops with probability 0.3",
    ),
    "dropout in an activation": (
        lambda: Seq([conv("sage", WIDTH, 4, activation=nn.Sequential(nn.ReLU(), nn.Dropout(0.3)))], [same]),
        "drops in 'activation.1' with probability 0.3",
    ),
    "dropout of a pair": (
        lambda: Calls(lambda layers, b, h: layers[0](b[0], (h, h)), conv("sage", WIDTH, 4, feat_drop=0.2)),
        "would drop other entries of each",
    ),
    "dropout of heads": (
        lambda: Seq([conv("gat", WIDTH, 4), nn.Dropout(0.3)], [same, lambda h: h.mean(1)]),
        "it must be (nodes, columns)",
    ),
    "functional dropout": (lambda: modules(Noisy()), "something else in training"),
    "features dropped": (lambda: ByMode(drops=True), "does not get the unchanged features"),
    "other order": (lambda: ByMode(drops=False), "calls other layers"),
    "unknown function": (lambda: pair(F.silu), "between the layers 'inner.layers.0' and 'inner.layers.1'"),
    "norm": (lambda: modules(nn.ReLU(), nn.BatchNorm1d(4)), "'between.1', BatchNorm1d, takes means over all"),
    "other norm": (lambda: modules(nn.GroupNorm(2, 4)), "GroupNorm 'between.0' is called"),
    "norm of heads": (
        lambda: Seq([conv("gat", WIDTH, 4), nn.LayerNorm((2, 4))], [same, lambda h: h.mean(1)]),
        "is over 2 dimensions",
    ),
    "trained": (lambda: modules(nn.PReLU()), "trains the parameter 'between.0.weight'"),
    "trained inside": (
        lambda: Seq([conv("sage", WIDTH, 4, activation=nn.PReLU())], [same]),
        "parameter 'activation.weight' that no stage knows",
    ),
    "detached": (lambda: pair(lambda h: torch.relu(h).detach()), "no gradient flows back"),
    "log_softmax": (
        lambda: Seq([conv("sage", WIDTH, CLASSES)], [lambda h: F.log_softmax(h, 1)]),
        "leave log_softmax out",
    ),
    "skip": (
        lambda: Calls(
            lambda layers, b, h: (first := layers[0](b[0], h)) + layers[1](b[1], first),
            *(conv("sage", WIDTH, 4), conv("sage", 4, 4)),
        ),
        "after the last layer, 'layers.1'",
    ),
    "features changed": (
        lambda: Seq([nn.Sequential(), conv("sage", WIDTH, 4)], [same, same]),  # type: ignore[list-item]
        "could not be called",
    ),
    "twice": (
        lambda: Calls(lambda layers, b, h: layers[0](b[0], layers[0](b[0], h)), conv("sage", WIDTH, WIDTH)),
        "is called twice",
    ),
    "tied": (tied, "belongs to two layers"),
    "wrong width": (lambda: pair(torch.relu, width=6), "6 columns"),
    "aggregator": (lambda: Seq([dgl.nn.SAGEConv(WIDTH, 4, "pool")], [same]), "aggregator 'pool'"),
    "unknown layer": (lambda: Seq([dgl.nn.GINConv(nn.Linear(WIDTH, 4))], [same]), "GINConv, is not known to"),
    "hidden weights": (
        lambda: Seq([nn.utils.spectral_norm(conv("right", WIDTH, 4))], [same]),
        "has no parameter 'weight'; a parametrization such as weight_norm may hide it",
    ),
    "no layer": (lambda: nn.Sequential(nn.PReLU(), nn.Dropout(0.2)), "no layer that workers know"),
    "half": (lambda: pair(torch.relu).half(), "parameters are float16"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_step_is_refused(kind: str) -> None:
    make, reason = REFUSED[kind]
    model = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ConfigError) as caught:
        chain_of(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert reason in str(caught.value)
    # A call that fails for another reason than the model's own has that reason alone.
    assert ("could not be called" in str(caught.value)) == (kind == "features changed")
    assert any(
        way in str(caught.value)
        for way in ("strategy='data_parallel'", "call model.float()", "leave log_softmax out")
    )


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
    def __init__(self, **declared: Any) -> None:
        super().__init__()
        self.gated = GatedConv(equality.WIDTH, HIDDEN, **declared)
        self.conv = dgl.nn.SAGEConv(HIDDEN, HIDDEN, "mean")
        self.head = nn.Linear(HIDDEN, equality.CLASSES)

    def forward(self, blocks: list[Any], h: Tensor) -> Tensor:
        h = self.gated(blocks[0], h)
        scores: Tensor = self.head(torch.relu(self.conv(blocks[1], h)))
        return scores


class Doubled(Gate):
    def backward(self, *given: Any, **named: Any) -> Any:
        gradients = super().backward(*given, **named)
        return gradients._replace(weights=(2 * gradients.weights[0],))


@pytest.fixture(autouse=True)
def register_stages() -> Iterator[None]:
    register_stage("gate", "tests.strategies.serverless.own_stage:Gate")
    register_stage("doubled", Doubled)
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
        for local, expected_parameter in zip(trained.parameters(), expected.parameters(), strict=True):
            assert (local - expected_parameter).detach().abs().max().item() < 1e-12


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
        ({"stage": "doubled"}, "differ in the gradient of 'weight'"),
        ({"stage": "gates"}, "did you mean 'gate'"),
    ],
)
def test_what_is_declared_wrongly_is_refused(declared: dict[str, Any], reason: str) -> None:
    with pytest.raises(Exception, match=reason) as caught:
        chain_of(Model(**declared))
    assert isinstance(caught.value, ConfigError) or "did you mean" in reason


def test_an_activation_behind_it_needs_to_be_taken() -> None:
    class Behind(Model):
        def forward(self, blocks: list[Any], h: Tensor) -> Tensor:
            h = torch.relu(self.gated(blocks[0], h))
            scores: Tensor = self.head(self.conv(blocks[1], h))
            return scores

    with pytest.raises(ConfigError, match="followed by relu, but its stage takes no activation"):
        chain_of(Behind())


def test_edge_values_are_those_of_their_factor() -> None:
    whole_graph, everyone = graph(), np.arange(NODES)
    whole_graph.edata["two"] = torch.ones(whole_graph.num_edges(), 2)
    with dx.init():
        g = dx.distribute(whole_graph)
        for factor in (*FACTOR_OF_NORM.values(), EdgeFactor(target=-1.0, column="w")):
            expected = factor_values(factor, whole_graph)
            np.testing.assert_allclose(edge_values(factor, g, everyone, "float64"), expected)
        (of_target,) = np.nonzero(whole_graph.edges()[1].numpy() == 2)
        some = edge_values(factor, g, np.array([2]), "float32")
        np.testing.assert_array_equal(some, expected[of_target].astype(np.float32))
        with pytest.raises(ConfigError, match=r"'two' has \(2,\) numbers per edge"):
            edge_values(EdgeFactor(column="two"), g, everyone, "float64")
