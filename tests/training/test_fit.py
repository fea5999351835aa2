"""The training loop: tasks, figures equal to plain DGL's, a resumed run bit for bit."""

import json
import os
import shutil
import signal
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import dgl
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import dglx_dist as dx
from dglx_dist.comm.session import start_session
from dglx_dist.data.storage.writer import write_dataset
from dglx_dist.errors import CheckpointError, ConfigError, Stopped
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.records import Assignment
from dglx_dist.strategies.base import STRATEGIES, explain_missing_edge_data
from dglx_dist.strategies.serverless.trainer import LambdaTrainer
from dglx_dist.training import checkpoint
from dglx_dist.training.fit import train
from dglx_dist.training.fit_config import FitConfig, FitResult
from dglx_dist.training.inference import evaluate
from dglx_dist.training.models import build_model
from dglx_dist.training.tracing import format_epoch
from tests.helpers import refusal, wide
from tests.helpers.ranks import run_ranks
from tests.report.records import epoch
from tests.strategies import equality

BATCH = 40
TIMES = ("seconds", "sample_s", "fetch_s", "wait_s", "compute_s", "exchange_s")


def prepare(
    g: DistGraph, model: torch.nn.Module, fanouts: list[int], ids: Any = None, **options: Any
) -> tuple[Any, Any]:
    """A loader of data_parallel, over all training nodes unless ``ids`` are given, and the wrapped model."""
    strategy = STRATEGIES.get("data_parallel")(g.session, {}).open(g)
    message = {"prefetch_node_feats": ["feat"], "prefetch_labels": ["label"]}
    nodes = equality.new_ids_of_training(g) if ids is None else ids
    loader = strategy.loader(nodes, dgl.dataloading.NeighborSampler(fanouts, **message), **options)
    return loader, strategy.wrap(model)


def _fit(g: DistGraph, dropout: float = 0.5, **config: Any) -> tuple[FitResult, list[Any]]:
    topology = g.session.topology
    # The second rank has one step's seeds, and runs out of them.
    ids = equality.cut(equality.new_ids_of_training(g), (3.0, 1.0), topology.rank, topology.world_size)
    torch.manual_seed(11)
    plain = build_model("sage", equality.WIDTH, equality.HIDDEN, equality.CLASSES, 2, dropout).double()
    loader, model = prepare(g, plain, [-1, 4], ids, batch_size=BATCH, shuffle=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    torch.manual_seed(topology.rank)
    seen: list[Any] = []
    result = train(model, loader, optimizer, g, FitConfig(**config), callbacks=[seen.append])
    assert seen == result.epochs
    return result, [p.detach().numpy().copy() for p in model.parameters()]


def check_resume(folder: str, saved: str) -> None:
    start_session(timeout_s=60)
    g, options = DistGraph(folder), {"eval_every": 2, "checkpoint_folder": saved}
    measurement, weights = _fit(g, epochs=4, eval_every=2)
    _fit(g, epochs=2, **options)
    remaining, second = _fit(g, epochs=4, checkpoint_every=5, resume=True, **options)
    assert all(np.array_equal(x, y) for x, y in zip(weights, second, strict=True))
    assert (remaining.first_epoch, [record.epoch for record in remaining.epochs]) == (2, [2, 3])
    assert [record.loss for record in remaining.epochs] == [record.loss for record in measurement.epochs[2:]]
    for name in ("accuracy", "best_epoch", "best_val_accuracy"):
        assert getattr(remaining, name) == getattr(measurement, name)
    for result in (measurement, remaining):
        assert bytes_of(result) == sum(item.bytes_inside + item.bytes_outside for item in result.epochs)
        assert "control" not in result.traffic
    assert bool(measurement.traffic) == (g.session.topology.world_size > 1)


def bytes_of(result: FitResult) -> int:
    return sum(row[2] for rows in result.traffic.values() for row in rows)


@pytest.mark.parametrize("ranks", [2, *wide(1)])
def test_resumed_fit_is_the_uninterrupted_one(folder: Path, tmp_path: Path, ranks: int) -> None:
    run_ranks(check_resume, ranks, args=(str(folder), str(tmp_path)), ranks_per_server=1)
    # After the last epoch it saved, though 5 epochs were not over.
    assert sorted(p.name[:12] for p in tmp_path.iterdir()) == ["epoch-000001", "epoch-000002", "epoch-000004"]


INSIDE: dict[str, dict[str, Any]] = {
    "data_parallel": {},
    "push_pull": {"depth": 3, "structure": "push"},
    "cooperative": {"batches": 5},
}
SAME = ("epoch", "loss", "train_accuracy", "val_accuracy", "num_samples", "bytes_inside", "bytes_outside")


def resumed_inside(folder: str, saved: str) -> None:
    for strategy, options in INSIDE.items():
        place, ends, moved = Path(saved, strategy), [], list[int]()
        config = FitConfig(
            epochs=3, checkpoint_folder=place, checkpoint_every="3steps", resume=True, show_progress=False
        )
        loading = {} if strategy == "cooperative" else {"fanouts": (3, 3), "batch_size": 20}
        for first in (0, 1):
            with dx.init(strategy, timeout=60, seed=3, **options) as session:
                g = dx.DistGraph(folder)
                torch.manual_seed(11)
                plain = build_model(
                    "sage", equality.WIDTH, equality.HIDDEN, equality.CLASSES, 2, 0.5
                ).double()
                make = partial(torch.optim.Adam, lr=0.01)
                torch.manual_seed(session.topology.rank)
                wrapped, result = dx.fit(plain, g, config=config, make_optimizer=make, **loading)
                assert result.first_epoch == first, (strategy, result)
                ends.append(
                    (wrapped.state_dict(), [[getattr(item, n) for n in SAME] for item in result.epochs])
                )
                moved.append(bytes_of(result))
                g.barrier()
                # As if the run had been killed in its second epoch.
                inside = [path for path in place.iterdir() if path.name > "epoch-000002"]
                if session.topology.rank == 0:
                    assert (place / "epoch-000001-step-000000001").is_dir()
                    for item in inside:
                        shutil.rmtree(item)
                g.barrier()
        (full, figures), (again, remaining) = ends
        assert all(torch.equal(full[name], again[name]) for name in full), strategy
        assert remaining == figures[1:], (strategy, remaining, figures)
        assert 0 < moved[1] < moved[0]
        assert moved[0] == sum(figure[-1] + figure[-2] for figure in figures)


def test_a_run_that_resumes_inside_an_epoch_is_the_uninterrupted_one(folder: Path, tmp_path: Path) -> None:
    run_ranks(resumed_inside, 2, args=(str(folder), str(tmp_path)), ranks_per_server=1)


def observe_run(folder: str, out: str) -> dict[str, Any]:
    start_session(timeout_s=60)
    options = {"tensorboard": Path(out, "tb"), "watch": True}
    result, _ = _fit(DistGraph(folder), epochs=3, eval_every=2, **options)
    return {"scalars": [record.scalars() for record in result.epochs], "traffic": result.traffic}


def test_figures_for_tensorboard_are_those_of_the_epochs(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (first, second) = run_ranks(observe_run, 2, args=(str(folder), str(tmp_path)), ranks_per_server=1)
    assert first == second
    phases = first["traffic"]
    assert {tuple(row[:2]) for rows in phases.values() for row in rows} == {(0, 1), (1, 0)}
    assert {"features", "gradients"} <= phases.keys()
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    results = {
        name: [(Scalar.step, Scalar.value) for Scalar in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }
    names = {name for of_epoch in first["scalars"] for name in of_epoch}
    assert results.keys() == names
    assert {"loss", "val_accuracy", "samples_per_second", "bytes_outside"} <= names
    for name in names:
        expected = [(at, of[name]) for at, of in enumerate(first["scalars"]) if name in of]
        assert [step for step, _ in results[name]] == [step for step, _ in expected]
        assert [value for _, value in results[name]] == pytest.approx(
            [value for _, value in expected], rel=1e-6
        )


def test_tensorboard_is_asked_for_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dglx_dist.training.config.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install 'dglx_dist\[tensorboard\]'"):
        FitConfig(tensorboard="runs/tb")


def _loop(folder: Path, place: Path, most: int) -> tuple[int, dict[str, Any]]:
    """Two epochs of a loop of one's own, or what is left of them, at most so many steps."""
    with start_session(seed=3) as session:
        g = DistGraph(folder)
        loader, model = prepare(g, equality.model_of("sage", g), [3, 3], batch_size=BATCH, shuffle=True)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        saved = dx.checkpoints(place, model, optimizer, loader, every="3steps", keep=1)
        steps = 0
        for _ in range(saved.epoch, 2):
            for _, _, blocks in loader:
                optimizer.zero_grad()
                F.cross_entropy(
                    model(blocks, blocks[0].srcdata["feat"]), blocks[-1].dstdata["label"]
                ).backward()
                optimizer.step()
                steps, saved.extra["seen"] = steps + 1, steps + 1
                saved.step()
                if steps == most:
                    os.kill(os.getpid(), signal.SIGTERM)
                    while not session.stop_point._holds:
                        time.sleep(0.01)
        return steps, model.state_dict()


def test_a_loop_of_ones_own_resumes(folder: Path, tmp_path: Path) -> None:
    steps, full = _loop(folder, tmp_path / "whole", 99)
    assert steps == 10
    with pytest.raises(Stopped, match=r"stopped after step . of epoch 1"):
        _loop(folder, tmp_path / "killed", 6)
    (left,) = (tmp_path / "killed").iterdir()
    remaining, again = _loop(folder, tmp_path / "killed", 99)
    assert remaining == 5 - int(left.name[-1]) > 0
    assert all(torch.equal(full[name], again[name]) for name in full)
    with start_session(), pytest.raises(ConfigError, match=r"every='often' must be .* like 200steps"):
        dx.checkpoints(tmp_path, torch.nn.Linear(1, 1), None, [], every="often")  # type: ignore[arg-type]


def record_epoch(folder: str) -> dict[str, Any]:
    start_session(timeout_s=60)
    return asdict(_fit(DistGraph(folder), 0.0, epochs=2)[0])


def test_records_are_sums_over_ranks(folder: Path, tmp_path: Path) -> None:
    traced = {"DGLX_TRACE": str(tmp_path)}
    results = run_ranks(record_epoch, 2, args=(str(folder),), ranks_per_server=1, environment=traced)
    assert results[0] == results[1]
    for rank in range(2):
        assert json.loads((tmp_path / f"rank-{rank}.json").read_text())["epochs"] == results[rank]["epochs"]
    for record in results[0]["epochs"]:
        assert record["num_samples"] == 167
        assert record["val_accuracy"] is not None
        assert record["bytes_inside"] == 0 < record["bytes_outside"]
        assert all(record[name] >= 0.0 for name in TIMES)
        of_the_loop = record["wait_s"] + record["compute_s"] + record["exchange_s"]
        assert of_the_loop == pytest.approx(record["seconds"], rel=1e-9)
    assert set(results[0]["accuracy"]) == {"train_mask", "val_mask", "test_mask"}


@pytest.mark.parametrize("strategy", ["data_parallel", "push_pull", "full_graph", "cooperative", "lambda"])
def test_what_an_evaluation_lacks_is_told_before_training(
    strategy: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After training, and without a checkpoint, all of it would be lost."""
    options = {"executor": "inline"} if strategy == "lambda" else {}
    trained: list[bool] = []
    monkeypatch.setattr(LambdaTrainer, "run", lambda *_: pytest.fail("trained"))

    class Silent(equality.PlainModel):
        def forward(self, blocks: list[Any], h: torch.Tensor) -> torch.Tensor:
            trained.append(True)
            return super().forward(blocks, h)

    with dx.init(strategy, timeout=30, **options):
        g = dx.DistGraph(folder)
        config = FitConfig(epochs=1, eval_every=0, show_progress=False)
        for changed, message in (
            ({}, r"method inference_layers\(\)"),
            ({"num_layers": 0}, "num_layers=0 must be at least 1"),
            ({"num_layers": 2, "eval_batch_size": 0}, "batch_size=0 must be at least 1"),
        ):
            model = Silent("gcn").double()
            with pytest.raises(ConfigError, match=message):
                dx.fit(model, g, config=replace(config, **changed))
        for kept in (False, True):
            with (
                torch.autocast("cpu", torch.bfloat16, cache_enabled=kept),
                pytest.raises(ConfigError, match=r"evaluation would not be exact.*precision='bf16'"),
            ):
                dx.fit(model, g, config=config)
        if strategy == "data_parallel":
            early = replace(config, eval_every=1, patience=1, num_layers=2)
            own: Any = replace(early, task=lambda *_: pytest.fail("trained"))
            with pytest.raises(ConfigError, match=r"early-stop 1 needs validation targets.* set evaluate="):
                dx.fit(Silent("gcn").double(), g, config=own)
    # Strategy lambda runs the model on a small graph of its own, to see its steps.
    assert strategy == "lambda" or not trained


@pytest.mark.parametrize("strategy", ["data_parallel", "full_graph", "cooperative"])
def test_edge_data_that_a_layer_lacks_is_told_with_what_to_pass(strategy: str, folder: Path) -> None:
    class WithEdges(equality.PlainModel):
        def __init__(self) -> None:
            super().__init__("gcn")
            self.convs[0] = dgl.nn.GINEConv(torch.nn.Linear(equality.WIDTH, equality.HIDDEN))

        def forward(self, blocks: list[Any], h: torch.Tensor) -> torch.Tensor:
            return self.convs[1](blocks[1], self.first(blocks[0], h))

        def first(self, block: Any, h: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.convs[0](block, h, block.edata["edge_feat"])
            return out

        def inference_layers(self) -> list[Any]:
            return [self.first, self.convs[1]]

    with dx.init(strategy, timeout=30):
        g, model = dx.DistGraph(folder), WithEdges().double()
        with pytest.raises(ConfigError, match=r"'edge_feat'.*prefetch_edge_feats=\['edge_feat'\]"):
            dx.fit(model, g, config=FitConfig(epochs=1, show_progress=False))
        with pytest.raises(ConfigError, match=r"'edge_feat'.*FitConfig\(evaluate=\.\.\.\)"):
            evaluate(model, g)


def test_a_key_error_of_the_users_own_stays() -> None:
    with pytest.raises(KeyError, match="mine"), explain_missing_edge_data():
        dict[str, int]()["mine"]


def test_early_stop_and_first_loss(folder: Path, tmp_path: Path) -> None:
    """With a learning rate that never helps: the first epoch stays the best, and resuming adds none."""
    result, resumed_result = run_ranks(_hopeless, 1, args=(str(folder), str(tmp_path)))[0]
    assert (resumed_result["stopped_early"], resumed_result["first_epoch"], resumed_result["epochs"]) == (
        True,
        3,
        [],
    )
    assert resumed_result["accuracy"] == result["accuracy"]
    assert result["stopped_early"]
    assert [r["epoch"] for r in result["epochs"]] == [0, 1, 2]
    assert result["best_epoch"] == 0
    graph = equality.plain_graph()
    torch.manual_seed(11)
    model = equality.PlainModel("sage").double()
    targets = graph.ndata["train_mask"].nonzero()[:, 0]
    with torch.no_grad():
        scores = model([graph, graph], graph.ndata["feat"])[targets]
        labels = graph.ndata["label"][targets]
        loss = float(F.cross_entropy(scores, labels))
        accuracy = float((scores.argmax(1) == labels).double().mean())
    for record in result["epochs"]:
        assert record["loss"] == pytest.approx(loss, abs=1e-12)
        assert record["train_accuracy"] == pytest.approx(accuracy, abs=1e-12)


@pytest.mark.parametrize(
    "extra", [{"best": 5}, {"best": [1, "a"]}, {"accuracy": [1]}, {"so_far": [{"loss": ""}]}]
)
def test_checks_what_a_checkpoint_says_of_runs(extra: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    with start_session():
        g = DistGraph(folder)
        loader, model = prepare(g, equality.model_of("sage", g), [-1, -1], batch_size=BATCH)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader.set_epoch(1)
        checkpoint.save(tmp_path, model=model, optimizer=optimizer, loader=loader, extra=extra)
        before = str(model.state_dict())
        with pytest.raises(CheckpointError, match=r"state\.json is damaged"):
            train(model, loader, optimizer, g, FitConfig(epochs=2, checkpoint_folder=tmp_path, resume=True))
        assert str(model.state_dict()) == before


def _hopeless(folder: str, checkpoints: str) -> list[dict[str, Any]]:
    start_session()
    g = DistGraph(folder)
    loader, model = prepare(g, equality.model_of("sage", g), [-1, -1], batch_size=BATCH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    config = FitConfig(epochs=9, patience=2, checkpoint_folder=checkpoints, resume=True)
    return [asdict(train(model, loader, optimizer, g, config)) for _ in range(2)]


def _disagreeing(folder: str) -> list[str]:
    with start_session(timeout_s=30) as session:
        g, rank = DistGraph(folder), session.topology.rank
        single = [{"precision": ["float32", "bf16"][rank]}, {"epochs": 2 + rank}, {"eval_every": rank}]
        results = [refusal(partial(_fit, g, **config), ConfigError) for config in single]
        resume_config = FitConfig(checkpoint_folder=Path(folder).parent / "none", resume=bool(rank))
        model = equality.model_of("sage", g)
        return [*results, refusal(partial(dx.fit, model, g, config=resume_config), ConfigError)]


def test_ranks_train_with_equal_settings(folder: Path) -> None:
    expected = "precision=float32", "epochs=2", "eval_every=0", "resume=False"
    for result in run_ranks(_disagreeing, 2, args=(str(folder),)):
        for text, settings in zip(result, expected, strict=True):
            assert text.startswith(
                f"ranks disagree on the settings of training: rank 0 has {settings}, rank 1"
            )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"epochs": 0}, "epochs=0"),
        ({"epochs": 2.5}, "epochs=2.5 must be a whole number"),
        ({"patience": 2, "eval_every": 0}, "early-stop 2"),
        ({"resume": True}, "resume needs checkpoint_folder"),
        ({"resume": True, "overwrite": True, "checkpoint_folder": "c"}, "Use one of the two"),
        *(
            (
                {"checkpoint_every": every},
                f"checkpoint_every={every} must be a number of epochs.*like 200steps",
            )
            for every in ("0steps", "-1", "2.5", "many", True, 1.5)
        ),
    ],
)
def test_config_refuses_nonsense(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FitConfig(**fields)


@pytest.mark.parametrize("dtype", ["float64", "float16", "int8", "bool"])
@pytest.mark.parametrize("kind", ["sage", "gat"])
def test_features_come_in_the_dtype_of_the_model(tmp_path: Path, kind: str, dtype: str) -> None:
    raw = equality.raw_graph()
    columns = {**raw.node_data["_N"], "feat": np.asarray(raw.node_data["_N"]["feat"]).astype(dtype)}
    raw = replace(raw, node_data={"_N": columns})
    part_of = {"_N": np.zeros(equality.NUM_NODES, np.int32)}
    parts = Assignment(num_parts=1, part_of=part_of, method="test", seed=0)
    write_dataset(raw, parts, tmp_path / "data")
    with start_session():
        g = DistGraph(tmp_path / "data")
        plain = build_model(kind, equality.WIDTH, equality.HIDDEN, equality.CLASSES, 2, 0.0)
        loader, model = prepare(g, plain, [2, 2], batch_size=BATCH)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        result = train(model, loader, optimizer, g, FitConfig(epochs=1))
    assert np.isfinite(result.epochs[0].loss)


class Noted:
    """In the place of an optimizer of embeddings: what was called, in order."""

    def __init__(self, calls: list[str], label: str) -> None:
        self._calls, self._label = calls, label

    def __getattr__(self, name: str) -> Any:
        return lambda: self._calls.append(f"{name} {self._label}")


def test_late_rows_of_all_optimisers_arrive_before_evaluation(folder: Path) -> None:
    with start_session():
        g = DistGraph(folder)
        loader, model = prepare(g, equality.model_of("sage", g), [2, 2], batch_size=500)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        calls: list[str] = []
        sparse: Any = [Noted(calls, "a"), Noted(calls, "b")]

        def evaluate_nothing(_: object) -> dict[str, float]:
            calls.append("evaluate")
            return {}

        config = FitConfig(epochs=2, eval_every=2, evaluate=evaluate_nothing)
        train(model, loader, optimizer, g, config, sparse=sparse)
    step = ["zero_grad a", "zero_grad b", "step a", "step b"]
    assert calls == [*step, *step, "flush a", "flush b", "evaluate"]


def test_an_epoch_in_one_line() -> None:
    assert format_epoch(epoch(3, seconds=0.15, val=0.841)) == "epoch 3: loss 1.0000, val 84.1 %, 0.15 s"
    assert format_epoch(epoch(3, val=None)) == "epoch 3: loss 1.0000, 2.00 s"
