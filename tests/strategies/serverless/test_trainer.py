"""``dx.fit`` under lambda against plain torch: updates, resumed runs, own stages, refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dgl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dglx_dist as dx
from dglx_dist.comm.session import current_session
from dglx_dist.comm.trace import read_trace
from dglx_dist.errors import CheckpointError, ConfigError
from dglx_dist.graph.optim import SparseAdam
from dglx_dist.records import EpochRecord
from dglx_dist.strategies.base import Objective, WrappedModel
from dglx_dist.strategies.serverless.graph_partition import read_features, read_structure
from dglx_dist.strategies.serverless.graph_server import GraphServer
from dglx_dist.strategies.serverless.parameter_server import Update
from dglx_dist.strategies.serverless.trainer import IntervalLoader, draw_weights, write_back
from dglx_dist.training import checkpoint
from dglx_dist.training.fit_config import FitConfig
from tests.helpers.ranks import run_ranks
from tests.strategies import equality


def test_what_does_not_fit_is_refused() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    optimizer = torch.optim.SGD([model[1].weight, model[0].weight], lr=0.1)
    parameters = dict(model.named_parameters())
    with pytest.raises(ConfigError, match=r"shape \(3, 4\) that is not one of the model's"):
        Update(optimizer, dict(nn.Linear(1, 1).named_parameters()), ["weight"])
    # The program does not read the first weight, and so it stays as it is.
    update = Update(optimizer, parameters, [*parameters][1:])
    assert update.names == ("0.bias", "1.weight", "1.bias")
    with pytest.raises(ConfigError, match="belongs to no parameter"):
        write_back(model, optimizer, {}, {"9.bias/momentum_buffer": np.zeros(3)})


INLINE = {"executor": "inline", "intervals": 3, "workers": 2}


@pytest.fixture
def g(folder: Path) -> Iterator[Any]:
    with dx.init("lambda", timeout=30, **INLINE):
        yield dx.DistGraph(folder)


def adam(parameters: Any) -> torch.optim.Optimizer:
    first, *later = parameters
    groups = [{"params": later}, {"params": [first], "lr": 0.05, "amsgrad": False}]
    return torch.optim.Adam(groups, lr=0.02, weight_decay=0.01, amsgrad=True)


def plain(epochs: int, rate_of: Callable[[int], float] = lambda epoch: 0.02) -> tuple[nn.Module, list[Any]]:
    graph = equality.plain_graph()
    torch.manual_seed(11)
    model = equality.PlainModel("sage").double()
    optimizer, seen = adam(model.parameters()), []
    mask, labels = graph.ndata["train_mask"], graph.ndata["label"]
    for epoch in range(epochs):
        optimizer.param_groups[0]["lr"] = rate_of(epoch)
        scores = model([graph, graph], graph.ndata["feat"])[mask]
        loss = F.cross_entropy(scores, labels[mask])
        seen.append((loss.item(), float((scores.argmax(1) == labels[mask]).double().mean())))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model, seen


def difference(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((a - b).detach().abs().max().item() for a, b in pairs)


def fit(
    g: Any, config: FitConfig, *, slower_on: tuple[int, ...] = (), **more: Any
) -> tuple[WrappedModel, Any, Any]:
    made: list[torch.optim.Optimizer] = []

    def make(parameters: Any) -> torch.optim.Optimizer:
        made.append(adam(parameters))
        return made[0]

    def slower(record: EpochRecord) -> None:
        if record.epoch == 5 and current_session().topology.rank in slower_on:
            made[0].param_groups[0]["lr"] = 0.005

    model = equality.model_of("sage", g)
    model, result = dx.fit(model, g, config=config, make_optimizer=make, callbacks=[slower], **more)
    return model, made[0], result


@pytest.mark.filterwarnings("error:.*without effect")
def test_fit_is_plain_training(g: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the learning rate changes at a stop: parameter servers go on with it."""
    runs: list[int] = []

    def make_server(*given: Any, run: int, **more: Any) -> GraphServer:
        runs.append(run)
        return GraphServer(*given, run=run, **more)

    monkeypatch.setattr("dglx_dist.strategies.serverless.trainer.GraphServer", make_server)
    model, _, result = fit(g, FitConfig(epochs=8, eval_every=3, show_progress=False), slower_on=(0,))
    seen = result.epochs
    expected, losses = plain(8, lambda epoch: 0.02 if epoch <= 5 else 0.005)
    assert len(runs) == 1
    assert difference(model.whole(), expected) < 1e-12
    assert [record.epoch for record in seen] == list(range(8))
    assert [record.val_accuracy is not None for record in seen] == [e in (2, 5, 7) for e in range(8)]
    np.testing.assert_allclose([(r.loss, r.train_accuracy) for r in seen], losses, rtol=1e-10)
    assert all(r.seconds > 0 and r.num_samples == 167 for r in seen)
    # One rank, with workers in its threads: not a byte has moved.
    assert sum(r.bytes_inside + r.bytes_outside for r in seen) == 0
    assert result.account["invocations"] - result.account["relaunched"] == 8 * 3 * 3
    # Servers alone: there is no function to pay for, nor one of which the time is not known.
    assert result.account["dollars_functions"] == 0 < result.account["dollars_servers"]
    assert "at least" not in result.account["label"]
    assert "simulated" in result.account["label"]


def test_a_frozen_layer_stays_and_the_first_gradient_is_that_of_all(g: Any) -> None:
    model = equality.model_of("sage", g)
    frozen = model.layers[0].fc_neigh.weight  # type: ignore[union-attr, index]
    frozen.requires_grad_(False)
    first = [parameter.detach().clone() for parameter in model.parameters()]
    dx.fit(model, g, config=FitConfig(epochs=2, eval_every=0, show_progress=False), make_optimizer=adam)
    moved = [not torch.equal(before, after) for before, after in zip(first, model.parameters(), strict=True)]
    assert moved == [parameter is not frozen for parameter in model.parameters()]


def test_resume_is_bit_equal_and_other_strategies_read_its_checkpoints(folder: Path, tmp_path: Path) -> None:
    def config(epochs: int, **more: Any) -> FitConfig:
        where = {"checkpoint_folder": tmp_path / "saved", "checkpoint_every": 2}
        return FitConfig(epochs=epochs, eval_every=0, show_progress=False, **where, **more)

    with dx.init("lambda", timeout=30, **INLINE):
        g = dx.DistGraph(folder)
        straight, optimizer, _ = fit(g, FitConfig(epochs=6, eval_every=2, show_progress=False))
        fit(g, config(3))
    with dx.init("lambda", timeout=30, **INLINE):
        g = dx.DistGraph(folder)
        resumed, again, result = fit(g, config(6, resume=True))
        assert result.first_epoch == 3
        assert [record.epoch for record in result.epochs] == [3, 4, 5]
        assert difference(straight.whole(), resumed.whole()) == 0.0
        states = [dict(stepped.state_dict()["state"]) for stepped in (optimizer, again)]
        assert states[0].keys() == states[1].keys() == set(range(len(list(resumed.parameters()))))
        for number, entries in states[0].items():
            assert all(torch.equal(value, states[1][number][key]) for key, value in entries.items())
        assert float(states[1][0]["step"]) == 6
    with dx.init("data_parallel", timeout=30):
        g = dx.DistGraph(folder)
        loader = dx.DataLoader(
            g,
            equality.new_ids_of_training(g),
            dgl.dataloading.MultiLayerFullNeighborSampler(2),
            batch_size=500,
        )
        model = dx.wrap(equality.model_of("sage", g), g)
        optimizer = adam(model.parameters())
        checkpoint.load(tmp_path / "saved", model=model, optimizer=optimizer, loader=loader)
        assert difference(model.whole(), straight.whole()) == 0.0


def two_ranks(folder: str, saved: str) -> dict[str, Any]:
    """Workers in processes; stop after two of four epochs, resume; the whole by another number of servers."""
    results: dict[str, Any] = {}
    config = {"eval_every": 0, "show_progress": False, "checkpoint_folder": saved}
    with dx.init("lambda", timeout=60, intervals=2, workers=2, parameter_servers=2):
        g = dx.DistGraph(folder)
        fit(g, FitConfig(epochs=2, **config))
        model, _, result = fit(g, FitConfig(epochs=4, resume=True, **config))
        results["weights"] = [parameter.detach().numpy().copy() for parameter in model.parameters()]
        results["records"] = result.epochs
        results["account"] = {key: value for key, value in result.account.items() if "seconds" not in key}
        left = [phase for phase in current_session().ledger.rows() if phase.phase == "ghosts"]
        results["ghosts"] = sum(row.num_bytes for row in left)
        loader = _loader(g, torch.arange(2))
        try:
            loader.own_targets()
        except ConfigError as error:
            results["twice"] = str(error)
    results |= overlapping(folder)
    return results


def overlapping(folder: str) -> dict[str, Any]:
    """Asynchronous epochs become synchronous inside one run; then only rank 0 changes its learning rate."""
    results: dict[str, Any] = {}
    config = {"show_progress": False, "eval_every": 6}
    options = {"mode": "async", "staleness": 1, "switch_at": 0.2}
    with dx.init("lambda", timeout=60, **{**INLINE, **options}):
        g = dx.DistGraph(folder)
        _, _, result = fit(g, FitConfig(epochs=6, **config))
        results["accuracies"] = [record.train_accuracy for record in result.epochs]
        results["switch"] = result.account["synchronous_from"]
        try:
            fit(g, FitConfig(epochs=12, **config), slower_on=(0,))
        except ConfigError as error:
            results["unlike"] = str(error)
    return results


def test_two_ranks_with_workers_in_processes_train_alike(folder: Path, tmp_path: Path) -> None:
    first, second = run_ranks(two_ranks, 2, args=(str(folder), str(tmp_path / "saved")))
    expected, losses = plain(4)
    for local, remote, true in zip(first["weights"], second["weights"], expected.parameters(), strict=True):
        assert np.array_equal(local, remote)
        assert np.abs(local - true.detach().numpy()).max() < 1e-12
    assert first["records"] == second["records"]
    assert first["account"] == second["account"]
    np.testing.assert_allclose([(r.loss, r.train_accuracy) for r in first["records"]], losses[2:], rtol=1e-10)
    assert first["ghosts"] > 0
    # Two epochs, two ranks, two intervals, three tasks each; some may have been launched again.
    assert first["account"]["invocations"] - first["account"]["relaunched"] == 2 * 2 * 2 * 3
    assert all(record.bytes_outside > 0 for record in first["records"])
    assert "is a training node of 2 ranks" in first["twice"]
    reached = [epoch for epoch, accuracy in enumerate(first["accuracies"]) if accuracy >= 0.2]
    assert first["switch"] == second["switch"] == reached[0] + 2
    for result in (first, second):
        assert "disagree on the digest of weights and optimizer" in result["unlike"]


def _loader(g: Any, nodes: Any, fanouts: tuple[int, ...] = (-1, -1), **options: Any) -> IntervalLoader:
    sampler = dgl.dataloading.NeighborSampler(list(fanouts))
    loader: IntervalLoader = dx.DataLoader(g, nodes, sampler, **options)
    return loader


def test_a_loop_of_ones_own_is_refused(g: Any) -> None:
    model, loader = dx.wrap(equality.model_of("sage", g), g), _loader(g, torch.arange(3))
    with pytest.raises(ConfigError, match=r"no loop can own a step; call dx\.fit"):
        next(iter(loader))
    blocks = [dgl.to_block(dgl.rand_graph(4, 9).int().long(), torch.arange(4))] * 2
    x = torch.zeros(4, equality.WIDTH, dtype=torch.float64)
    with pytest.raises(ConfigError, match="no loop can own a step"):
        model(blocks, x)
    with torch.no_grad():
        assert model(blocks, x).shape == (4, equality.CLASSES)
    with pytest.raises(ConfigError, match="reduction='sum'"):
        dx.wrap(equality.model_of("sage", g), g, reduction="sum")


def test_options_of_mini_batches_are_told(g: Any) -> None:
    with pytest.raises(ConfigError, match=r"draws \[5, -1\] in-neighbours.*MultiLayerFullNeighborSampler"):
        _loader(g, torch.arange(3), (5, -1))
    with pytest.raises(ConfigError, match=r"draws \[4, 4\] in-neighbours"):
        fit(g, FitConfig(epochs=1, show_progress=False), fanouts=(4, 4))
    with pytest.raises(ConfigError, match="draws edges by 'weight', but strategy 'lambda' takes all of them"):
        dx.DataLoader(g, torch.arange(3), dgl.dataloading.NeighborSampler([-1, -1], prob="weight"))
    with pytest.raises(ConfigError, match="has no loader option 'exclude'"):
        _loader(g, torch.arange(3), exclude=torch.arange(2))
    with pytest.warns(UserWarning, match=r"batch_size=16, shuffle=True: without effect"):
        _loader(g, torch.arange(3), batch_size=16, shuffle=True)
    with pytest.raises(ConfigError, match="no rank has a training node"):
        _loader(g, torch.arange(0)).own_targets()
    with pytest.raises(CheckpointError, match="not a position between epochs"):
        _loader(g, torch.arange(3)).load_state_dict({"epoch": 1, "step": 4, "seed": 0})


def test_what_no_worker_can_train_is_refused(g: Any) -> None:
    config = {"epochs": 1, "eval_every": 0, "show_progress": False}

    def check_refusal(reason: str, config_of: FitConfig | None = None, **more: Any) -> None:
        with pytest.raises(ConfigError, match=reason):
            dx.fit(equality.model_of("sage", g), g, config=config_of or FitConfig(**config), **more)

    weighted = nn.CrossEntropyLoss(weight=torch.arange(1.0, 1 + equality.CLASSES).double())
    check_refusal("needs a mean over rows: divide a weighted loss", FitConfig(**config, loss=weighted))
    check_refusal("needs a mean over rows", FitConfig(**config, loss=nn.CrossEntropyLoss(reduction="sum")))
    check_refusal(r"config\.task would take part", FitConfig(**config, task=lambda model, batch: None))  # type: ignore[arg-type, return-value]
    rows = dx.DistEmbedding(g.num_nodes(), 4, graph=g)
    check_refusal("sparse would take part", sparse=SparseAdam([rows], lr=0.1))
    check_refusal("no optimizer 'RMSprop'", make_optimizer=lambda p: torch.optim.RMSprop(p, lr=0.1))
    check_refusal(
        "no tensor 'colour'", FitConfig(**config, feature="colour"), loader=_loader(g, torch.arange(9))
    )
    wide = equality.build_model("sage", 9, 4, equality.CLASSES, dropout=0.0).double()
    with pytest.raises(ConfigError, match="x of 7 columns: RuntimeError: mat1 and mat2 shapes"):
        dx.fit(wide, g, config=FitConfig(**config))
    strict = equality.model_of("gcn", g)
    strict.layers[1].set_allow_zero_in_degree(False)
    with pytest.raises(ConfigError, match=r"node \d+ has no in-edge, and GraphConv 'layers\.1' refuses"):
        dx.fit(strict, g, config=FitConfig(**config))
    model = dx.wrap(equality.model_of("sage", g), g)
    with pytest.raises(ConfigError, match="the loader is a list"):
        model.trainer([], adam(model.parameters()), Objective(loss=F.cross_entropy))


@pytest.mark.parametrize(("kind", "fans"), [("xavier", 300 + 100), ("he", 300)])
@pytest.mark.parametrize("law", ["uniform", "normal"])
def test_weights_are_drawn_with_variance_two_by_fans(kind: str, fans: int, law: str) -> None:
    """DGL's GraphConv has (inputs, outputs), torch (outputs, inputs)."""
    convs = [dgl.nn.GraphConv(300, 100), dgl.nn.SAGEConv(300, 100, "mean"), nn.Linear(300, 100)]
    nn.init.ones_(convs[0].bias)
    frozen = nn.Linear(3, 3).requires_grad_(False)
    before = frozen.weight.clone()
    draw_weights(nn.ModuleList([*convs, frozen]), f"{kind}_{law}", 1)  # type: ignore[arg-type]  # made here
    for weight in (convs[0].weight, convs[1].fc_neigh.weight, convs[2].weight):
        assert weight.std().item() == pytest.approx((2 / fans) ** 0.5, rel=0.02)
        assert (weight.abs().max() < 1.8 * weight.std()) == (law == "uniform")
    assert not convs[0].bias.any()
    assert torch.equal(frozen.weight, before)


def test_drawn_weights_are_those_of_the_seed(folder: Path) -> None:
    drawn = []
    for seed in (1, 1, 2):
        with dx.init("lambda", seed=seed, initialise="he_normal", **INLINE):
            model = dx.wrap(equality.PlainModel("gcn").double(), dx.DistGraph(folder))
            drawn.append(next(model.parameters()).detach().clone())
    assert [torch.equal(drawn[0], weights) for weights in drawn] == [True, True, False]


def put(g: Any, name: str, rows: torch.Tensor) -> None:
    g.ndata[name] = g.new_tensor(tuple(rows.shape), rows.dtype, name)
    g.ndata[name][torch.arange(len(rows))] = rows


def test_labels_are_whole_numbers_of_classes(g: Any) -> None:
    labels, config = g.ndata["label"][:], {"epochs": 1, "eval_every": 0, "show_progress": False}
    first = int(equality.new_ids_of_training(g)[0])
    too_large, without = labels.clone(), labels.clone()
    too_large[first], without[first] = 2**32, -1
    for name, changed, reason in (
        ("large", too_large, f"training node {first} has the label 4294967296"),
        ("without", without, f"training node {first} has the label -1"),
    ):
        put(g, name, changed)
        with pytest.raises(ConfigError, match=reason):
            dx.fit(equality.model_of("sage", g), g, config=FitConfig(label=name, **config))


def test_features_of_half_precision_are_read_as_the_programs_numbers(g: Any) -> None:
    narrow = g.ndata["feat"][:].bfloat16()
    put(g, "narrow", narrow)
    features = read_features(g, read_structure(g), "narrow", "float32")
    assert np.array_equal(features, narrow.float().numpy())


def test_more_parameter_servers_than_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match="parameter_servers=2, but there are 1 ranks"):
        dx.init("lambda", parameter_servers=2)


def test_several_types_are_refused() -> None:
    rates = {("user", "rates", "film"): (torch.arange(4), torch.arange(4) % 2)}
    graph = dgl.heterograph({**rates, ("film", "rated", "user"): (torch.arange(4) % 2, torch.arange(4))})
    with dx.init("lambda", timeout=30, **INLINE):
        g = dx.distribute(graph)
        with pytest.raises(ConfigError, match="one node and one edge type"):
            dx.wrap(equality.build_model("sage", 4, 4, 2, dropout=0.0), g)


def test_a_trace_has_every_task_of_every_interval(folder: Path, tmp_path: Path) -> None:
    with dx.init("lambda", timeout=60, executor="inline", intervals=2, workers=2, threads=1):
        g = dx.DistGraph(folder)
        dx.fit(
            equality.model_of("gcn", g),
            g,
            config=FitConfig(epochs=2, eval_every=0, trace=tmp_path / "t.json", show_progress=False),
        )
        g.close()
    (rank,) = read_trace(tmp_path / "t.json").ranks
    names = {
        row: {span.name for span in rank.spans if span.row == row} for row in {s.row for s in rank.spans}
    }
    assert names["graph server"] == {
        "GA1", "open AV1", "GA2", "open AV2", "publish GA2", "collect SC1",
    }  # fmt: skip
    assert names["network"] == {"SC1", "gradSC1"}
    assert names["parameter server"] == {"WU"}
    tasks = [
        (span.name, span.batch, span.interval)
        for span in rank.spans
        if span.row == "worker" and span.name != "wait for rows"
    ]
    assert sorted(tasks) == sorted(
        (name, epoch, interval)
        for name in ("AV1", "AV2+grad", "gradAV1")
        for epoch in (0, 1)
        for interval in (0, 1)
    )
    # A worker begins with an interval before the other one is summed, or they would take turns. Which one is
    # first depends on the end of the epoch before.
    made = [
        (span.name, span.interval) for span in rank.spans if span.row == "graph server" and span.batch == 1
    ]
    orders = [
        [("GA1", first), ("open AV1", first), ("GA1", 1 - first), ("open AV1", 1 - first)] for first in (0, 1)
    ]
    assert made[:4] in orders
