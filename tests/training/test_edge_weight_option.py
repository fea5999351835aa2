"""``dglx train --edge-weight``: ready-made models multiply messages by an edge column, as DGL's layers do."""

import json
import math
from pathlib import Path
from typing import Any

import dgl
import pytest
import torch
import torch.nn.functional as F

import dglx_dist as dx
from dglx_dist.cli.train_job import train_dataset
from dglx_dist.errors import ConfigError
from dglx_dist.report.run_folder import read_epochs
from dglx_dist.training.config import TrainConfig
from dglx_dist.training.models import ResGCN, build_model
from tests.helpers.ranks import run_each, run_ranks
from tests.training.test_schedules import said_of
from tests.training.test_tasks import EXACT, graph, labels, plan

MODELS = ("sage", "gcn", "gat", "gin", "sgc", "appnp", "resgcn")


def weighted_graph(task: str = "classification") -> dgl.DGLGraph:
    g = dgl.add_self_loop(graph())
    g.ndata["label"] = labels(task)
    g.edata["weight"] = torch.rand(g.num_edges(), generator=torch.Generator().manual_seed(1)) + 0.1
    g.edata["column"] = 10 * g.edata["weight"].reshape(-1, 1).double()
    g.edata["pair"] = torch.rand(g.num_edges(), 2)
    return g


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    for task in ("classification", "regression"):
        dx.partition_graph(weighted_graph(task), task, 2, folder, part_method="random")
    return folder


def _train(values: dict[str, Any]) -> None:
    train_dataset(TrainConfig(**values))


class Whole:
    """The degrees of the whole graph, for the symmetric norm."""

    def __init__(self, g: dgl.DGLGraph) -> None:
        self.in_degrees, self.out_degrees = g.in_degrees, g.out_degrees


def plain_losses(kind: str, weight: str | None) -> tuple[list[float], torch.Tensor]:
    g = weighted_graph()
    rows, truth = g.ndata["train_mask"], g.ndata["label"]
    g.ndata[dgl.NID] = g.nodes()
    torch.manual_seed(0)
    full: Any = Whole(g)
    model: Any = (
        ResGCN(8, 8, 2, 2, 0.0)
        if kind == "resgcn"
        else build_model(kind, 8, 8, 2, dropout=0.0, heads=4, graph=full)
    )
    model.edge_weight = weight
    adam, result = torch.optim.Adam(model.parameters(), lr=0.01), []
    for _ in range(3):
        loss = F.cross_entropy(model([g, g], g.ndata["feat"])[rows], truth[rows])
        adam.zero_grad()
        loss.backward()
        adam.step()
        result.append(float(loss.detach()))
    return result, model([g, g], g.ndata["feat"]).argmax(1)


@pytest.mark.parametrize("kind", MODELS)
def test_ready_made_models_weigh_edges_as_the_layers_of_dgl(kind: str) -> None:
    g, weight = weighted_graph(), weighted_graph().edata["weight"]
    convs = {
        "sage": lambda model, h: model.layers[0](g, h, edge_weight=weight),
        "gat": lambda model, h: model.layers[0](g, h, edge_weight=weight).mean(1),
        "gin": lambda model, h: model.layers[0](g, h, edge_weight=weight),
        "sgc": lambda model, h: model.layers[0](g, h, edge_weight=weight),
        "gcn": lambda model, h: dgl.nn.GraphConv.forward(
            norm_both(model.layers[0].conv), g, h, edge_weight=weight
        ),
        "appnp": lambda model, h: (
            0.9 * model.layers[0](g, model.encoder(h), edge_weight=weight) + 0.1 * model.encoder(h)
        ),
    }
    if kind == "resgcn":
        return
    g.ndata[dgl.NID] = g.nodes()
    full: Any = Whole(g)
    model: Any = build_model(kind, 8, 8, 2, 1, 0.0, graph=full)
    plain = model(g, g.ndata["feat"])
    model.edge_weight = "weight"
    torch.testing.assert_close(model(g, g.ndata["feat"]), convs[kind](model, g.ndata["feat"]))
    assert not torch.allclose(model(g, g.ndata["feat"]), plain)


def norm_both(conv: Any) -> Any:
    copied = dgl.nn.GraphConv(8, 2, norm="both", allow_zero_in_degree=True)
    copied.load_state_dict(conv.state_dict())
    return copied


WAYS = [
    *(("sage", strategy) for strategy in EXACT),
    *(("gcn", strategy) for strategy in EXACT[:3]),
    *(("gat", strategy) for strategy in EXACT[:3]),
    *((kind, "full_graph") for kind in MODELS[3:]),
]


def test_weighted_training_is_that_of_one_process(data: Path, tmp_path: Path) -> None:
    folders = [tmp_path / f"{kind}-{strategy}" for kind, strategy in WAYS]
    plans = [
        (plan(data, "classification", out, strategy=strategy, model=kind, edge_weight="weight"),)
        for (kind, strategy), out in zip(WAYS, folders, strict=True)
    ]
    run_each(_train, plans, 2, ranks_per_server=1)
    for (kind, strategy), out in zip(WAYS, folders, strict=True):
        losses, classes = plain_losses(kind, "weight")
        assert [record.loss for record in read_epochs(out)] == pytest.approx(losses, rel=2e-5), strategy
        # The units of gin are dead on this graph.
        assert kind == "gin" or losses != pytest.approx(plain_losses(kind, None)[0], rel=1e-4)
        assert said_of(out).tolist() == classes.tolist()
        inside = weighted_graph().ndata["test_mask"]
        right = (classes == weighted_graph().ndata["label"])[inside].float().mean()
        accuracy = json.loads((out / "summary.json").read_text())["test_accuracy"]
        assert accuracy == pytest.approx(float(right))


def test_a_column_of_one_number_for_each_edge_is_read(data: Path, tmp_path: Path) -> None:
    _train(plan(data, "regression", tmp_path, edge_weight="column"))
    assert math.isfinite(read_epochs(tmp_path)[-1].loss)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"edge_weight": "wieght"}, r"no edge column of that name .*known: .*weight"),
        ({"edge_weight": "pair"}, r"one number per edge \(known: "),
        ({"edge_weight": "weight", "strategy": "lambda", "model": "gcn"}, "the workers of strategy 'lambda'"),
        ({"edge_weight": "weight", "model": "gatv2"}, "left out with --model gatv2"),
        ({"edge_weight": "weight", "model": "mlp"}, "left out with --model mlp"),
        ({"edge_weight": "weight", "task": "link"}, "left out with --task link"),
        ({"edge_weight": "weight", "strategy": "auto"}, "left out with --strategy auto"),
    ],
)
def test_refuses_what_cannot_be_weighed_before_training(
    options: dict[str, Any], said: str, data: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        _train({**plan(data, "classification", tmp_path), "predictions": None, **options})
    assert not (tmp_path / "metrics.jsonl").exists()


def test_says_once_that_a_column_of_weights_is_not_used(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _train(plan(data, "classification", tmp_path / "one"))
    assert capsys.readouterr().err.replace("\n", " ").count("--edge-weight weight") == 1
    _train(plan(data, "classification", tmp_path / "two", edge_weight="weight"))
    assert "--edge-weight" not in capsys.readouterr().err


OWN = """
from dgl.nn import SAGEConv
from torch import nn

class Net(nn.Module):
    def __init__(self, in_dim, classes):
        super().__init__()
        self.conv = SAGEConv(in_dim, classes, "mean")

    def layer(self, block, h):
        return self.conv(block, h, edge_weight=block.edata["weight"])

    def forward(self, blocks, h):
        return self.layer(blocks[0], h)

    def inference_layers(self):
        return [self.layer]
"""


def test_a_model_of_the_user_reads_the_column_from_its_blocks(data: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    options = plan(data, "classification", tmp_path / "run", layers=1, edge_weight="weight")
    options |= {"fanouts": (-1,), "model_file": f"{tmp_path / 'own.py'}:Net"}
    run_ranks(_train, 2, args=(options,))
    assert len(said_of(tmp_path / "run")) == 60
