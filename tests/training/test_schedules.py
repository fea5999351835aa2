"""Schedules of the learning rate, the best epoch's weights, and runs of several seeds."""

import json
import math
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.dataset
import pytest
import torch
from typer.testing import CliRunner

import dglx_dist as dx
from dglx_dist.cli.app import app
from dglx_dist.cli.train_job import train_dataset, train_seeds
from dglx_dist.data.partition.base import PartitionPlan
from dglx_dist.data.partition.prepare import partition_to_disk
from dglx_dist.data.sources import load_dataset
from dglx_dist.data.storage.reader import load_raw_graph, open_dataset
from dglx_dist.errors import ConfigError
from dglx_dist.report.run_folder import read_epochs
from dglx_dist.report.tables import spread
from dglx_dist.training.checkpoint_folder import folder_name
from dglx_dist.training.config import RunOptions, TrainConfig, compute_rate_factor
from dglx_dist.training.fit_config import FitConfig
from dglx_dist.training.models import build_model
from tests.helpers import wide
from tests.helpers.ranks import run_each, run_ranks
from tests.training.test_tasks import EXACT, NODES, graph, labels, plain_losses, plan


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, g = tmp_path_factory.mktemp("schedules"), graph()
    g.ndata["label"] = labels("regression")
    dx.partition_graph(g, "regression", 2, folder, part_method="random")
    return folder


def test_rates() -> None:
    steps = RunOptions(epochs=8, schedule="step")
    assert [compute_rate_factor(steps, step, 1) for step in range(8)] == [1, 1, 1, 1, 0.1, 0.1, 0.01, 0.01]
    cosine = RunOptions(epochs=6, schedule="cosine", warmup=2)
    results = [compute_rate_factor(cosine, step, 2) for step in range(12)]
    assert results[:4] == [0.25, 0.5, 0.75, 1.0]
    assert results[4:] == pytest.approx([(1 + math.cos(math.pi * k / 8)) / 2 for k in range(8)])
    with pytest.raises(ConfigError, match="a warmup of 3 epochs does not fit in 3"):
        TrainConfig(data="x", epochs=3, warmup=3)


def _train(values: dict[str, Any]) -> None:
    train_dataset(TrainConfig(**values))


def test_a_schedule_gives_the_rates_of_a_plain_loop(data: Path, tmp_path: Path) -> None:
    more: dict[str, Any] = {"schedule": "cosine", "warmup": 1}
    plans = [(plan(data, "regression", tmp_path / name, strategy=name, **more),) for name in EXACT[:3]]
    run_each(_train, plans, 2, ranks_per_server=1)
    for name in EXACT[:3]:
        losses = [record.loss for record in read_epochs(tmp_path / name)]
        assert losses == pytest.approx(plain_losses("regression", rates=[1.0, 1.0, 0.5]), rel=1e-5), name


def test_a_resumed_schedule_goes_on_with_the_same_bits(data: Path, tmp_path: Path) -> None:
    options = plan(data, "regression", tmp_path, schedule="cosine", warmup=1, epochs=5, batch_size=7)
    options |= {"checkpoint_every": "2steps", "dropout": 0.5}
    _train(options)
    full = [record.loss for record in read_epochs(tmp_path)]
    folders = sorted((tmp_path / "checkpoints").glob("epoch-*"))
    for folder in folders[len(folders) // 2 :]:
        shutil.rmtree(folder)
    _train(options)
    assert [record.loss for record in read_epochs(tmp_path)] == full
    with pytest.raises(ConfigError, match="epochs: 5 -> 6"):
        _train({**options, "epochs": 6})


def said_of(out: Path) -> np.ndarray:
    table = pyarrow.dataset.dataset(out / "said").to_table().sort_by("id")
    return np.array(table["prediction"].to_pylist())


@pytest.mark.wide
@pytest.mark.parametrize("strategy", ["push_pull", *wide("data_parallel")])
def test_predictions_are_those_of_the_best_epoch(strategy: str, data: Path, tmp_path: Path) -> None:
    options = plan(data, "regression", tmp_path, strategy=strategy, epochs=40, lr=0.1, patience=3)
    run_ranks(_train, 2, args=(options,))
    records = read_epochs(tmp_path)
    best = min(records, key=lambda record: record.metrics["val_mae"])
    assert len(records) == best.epoch + 4 < 40
    error = np.abs(said_of(tmp_path) - labels("regression").numpy())
    summary = json.loads((tmp_path / "summary.json").read_text())
    for split in ("val", "test"):
        inside = graph().ndata[f"{split}_mask"].numpy()
        assert summary[f"{split}_mae"] == best.metrics[f"{split}_mae"]
        assert error[inside].mean() == pytest.approx(best.metrics[f"{split}_mae"], rel=1e-5)
    assert summary["best_epoch"] == best.epoch
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == [folder_name(best.epoch + 1), folder_name(len(records))]


@pytest.mark.wide
def test_a_best_epoch_without_weights_or_of_another_metric_is_forgotten(data: Path, tmp_path: Path) -> None:
    options = plan(data, "regression", tmp_path, epochs=2, lr=1e-12, checkpoint_every=2)
    _train(options)
    _train({**options, "epochs": 20, "patience": 3})
    # Of the epochs from 2 on, not of epoch 0, which has no weights here.
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["best_epoch"] >= 2
    _train({**options, "epochs": 40, "patience": 2, "metric": ("rmse",), "keep": 1})
    again = json.loads((tmp_path / "summary.json").read_text())
    assert again["best_epoch"] > summary["best_epoch"]
    records = {record.epoch: record for record in read_epochs(tmp_path)}
    assert again["val_rmse"] == records[again["best_epoch"]].metrics["val_rmse"]


def _fit_twice(folder: str) -> tuple[dict[str, float], dict[str, float], float]:
    with dx.init("data_parallel"):
        g = dx.DistGraph(folder)
        torch.manual_seed(1)
        options: Any = {"epochs": 40, "patience": 2, "show_progress": False}
        config = FitConfig(**options, metric=("rmse",), schedule="cosine")
        made: list[torch.optim.Optimizer] = []

        def make(parameters: Any) -> torch.optim.Optimizer:
            made.append(torch.optim.Adam(parameters, lr=0.1))
            return made[0]

        model, measurement = dx.fit(
            build_model("sage", 8, 8, 1, dropout=0.0), g, config=config, make_optimizer=make
        )
        assert made[0].param_groups[0]["lr"] == 0.1  # a second training begins with the same rate
        again = dx.evaluate(model, g, task="regression", metrics=["rmse"])
        return measurement.metrics, again, min(record.metrics["val_rmse"] for record in measurement.epochs)


@pytest.mark.wide
def test_without_checkpoints_the_best_weights_are_in_memory(data: Path) -> None:
    for kept, again, best in run_ranks(_fit_twice, 2, args=(str(data / "regression"),)):
        assert kept == again
        assert kept["val_rmse"] == best


@pytest.mark.wide
def test_mean_and_spread_of_seeds(data: Path, tmp_path: Path) -> None:
    options = plan(data, "regression", tmp_path, seeds=(3, 5, 8))
    result = train_seeds(TrainConfig(**options))
    runs = [json.loads((tmp_path / f"seed-{seed}" / "summary.json").read_text()) for seed in (3, 5, 8)]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary == json.loads(json.dumps(result.summary))
    for name in ("val_mae", "test_mae", "test_rmse"):
        values = [run[name] for run in runs]
        assert len(set(values)) == 3
        assert summary["mean"][name] == pytest.approx(np.mean(values))
        assert summary["std"][name] == pytest.approx(np.std(values, ddof=1))
    message = pyarrow.dataset.dataset(tmp_path / "said" / "seed-5").to_table()
    assert message.num_rows == NODES
    (tmp_path / "said" / "_index.json").write_text("{}")  # as a run without --seeds leaves it
    with pytest.raises(ConfigError, match=r"--seeds 3,5,8 must be left out, or .*said removed"):
        TrainConfig(**options)
    shown = CliRunner().invoke(app, ["report", str(tmp_path)], env={"COLUMNS": "200"}).output
    assert "seed-5" in shown
    assert "mean ± std" in shown
    page = tmp_path / "page.html"
    result = CliRunner().invoke(app, ["report", str(tmp_path), "--html", str(page)], env={"COLUMNS": "200"})
    assert "seed-8" in result.output
    assert find_spec("plotly") is None or "seed-5" in page.read_text()


def test_seeds_are_different_and_one_has_no_deviation() -> None:
    for options, message in (
        ({"seeds": (0, 0)}, "different numbers"),
        ({"seeds": (0,), "seed": 1}, "--seed 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            TrainConfig(data="x", **options)
    single = spread({"seed-7": {"test_mae": 1.0, "val_mae": 2.0}})
    assert single["std"] == {"test_mae": None, "val_mae": None}
    assert spread({"a": {"test_mae": 1.0, "test_f1": 2.0}, "b": {"test_mae": 2.0}})["mean"] == {
        "test_mae": 1.5
    }


def test_scores_and_names_of_classes(tmp_path: Path) -> None:
    g, words = graph(), ["apple", "fig"]
    (tmp_path / "tables").mkdir()
    lines = [
        f"n{v},{words[int(c)]},{'train' if v < 40 else 'test'},{v / 60},1"
        for v, c in enumerate(labels("classification"))
    ]
    (tmp_path / "tables" / "nodes.csv").write_text("\n".join(["id,label,split,feat_0,feat_1", *lines]))
    edges = [f"n{u},n{v}" for u, v in zip(*(ends.tolist() for ends in g.edges()), strict=True)]
    (tmp_path / "tables" / "edges.csv").write_text("\n".join(["src,dst", *edges]))

    folder = tmp_path / "one"
    partition_to_disk(load_dataset(tmp_path / "tables"), folder, PartitionPlan(num_parts=1))
    # A dataset of one part, as `dglx ingest` writes it, is partitioned again.
    partition_to_disk(load_raw_graph(open_dataset(folder)), tmp_path / "two", PartitionPlan(num_parts=2))
    out = str(tmp_path / "said")
    run_ranks(
        _train,
        2,
        args=(
            {
                "data": str(tmp_path / "two"),
                "out": str(tmp_path / "run"),
                "epochs": 2,
                "predictions": out,
                "scores": True,
            },
        ),
    )
    table = pyarrow.dataset.dataset(out).to_table().to_pydict()
    assert sorted(table["id"]) == sorted(f"n{v}" for v in range(NODES))
    scores = np.array(table["scores"])
    assert scores.shape == (NODES, 2)
    assert scores.sum(1) == pytest.approx(np.ones(NODES), abs=1e-6)
    assert scores.argmax(1).tolist() == table["prediction"]
    assert table["class"] == [words[item] for item in table["prediction"]]
