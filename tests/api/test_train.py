"""``dglx train`` in one process: the run's folder, the predictions, every built-in model."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow.dataset
import pytest
import torch

import dglx_dist as dx
from dglx_dist.cli.train_job import CHECKPOINTS, train_dataset
from dglx_dist.data.storage.files import lock_exclusive
from dglx_dist.errors import CheckpointError, ConfigError, StorageError
from dglx_dist.records import EpochRecord
from dglx_dist.report.run_folder import append_epoch
from dglx_dist.training.config import TrainConfig
from tests.api.graphs import as_dgl, plan_of, read_tables
from tests.helpers import wait_for_checkpoints, wide
from tests.helpers.ranks import run_ranks, start_ranks
from tests.training import hetero


@pytest.fixture
def dataset(tmp_path: Path) -> str:
    graph = as_dgl()
    for name in ("train_mask", "val_mask", "test_mask"):
        graph.ndata.pop(name, None)
    graph.ndata["label"] = graph.nodes() % 2
    graph.ndata["train_mask"] = graph.nodes() < 4
    graph.ndata["feat"] = graph.ndata["feat"].float()
    dx.partition_graph(graph, "t", 1, tmp_path)
    return str(tmp_path / "t")


@pytest.mark.wide
def test_a_run_that_replaces_another_says_so_and_leaves_no_checkpoint_of_it(
    dataset: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "run"
    deep: dict[str, Any] = {"model": "resgcn", "layers": 3, "recompute": "exchange", "checkpoint_every": 1}
    rows = str(tmp_path / "rows")
    train_dataset(TrainConfig(data=dataset, out=str(out), epochs=2, save_embeddings=rows, **deep))
    assert any((out / CHECKPOINTS).iterdir())
    assert json.loads((out / "config.json").read_text())["recompute"] == "exchange"
    before = sorted(path.name for path in out.rglob("*"))
    message = (
        r"model: resgcn -> sage, layers: 3 -> 2, fanouts: .* -> .*Choose another folder, or .*--overwrite"
    )
    with pytest.raises(ConfigError, match=message):
        train_dataset(TrainConfig(data=dataset, out=str(out), epochs=1))
    assert sorted(path.name for path in out.rglob("*")) == before
    train_dataset(TrainConfig(data=dataset, out=str(out), epochs=1, overwrite=True))
    assert caplog.messages == [f"replacing the finished run in {out} (no checkpoints, or --overwrite)"]
    assert list((out / CHECKPOINTS).iterdir()) == []


def test_checkpoints_are_lost_by_overwrite_alone_and_not_to_a_restart(
    dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = TrainConfig(data=dataset, out=str(tmp_path / "run"), epochs=2, checkpoint_every=1)
    first = tmp_path / "run" / CHECKPOINTS / "epoch-000001-step-000000000"

    def train_again(launch: str, restarts: int, *, overwrite: bool = False) -> int:
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", f"/tmp/x/{launch}/attempt_{restarts}/0/error.json")
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
        assert [epoch.epoch for epoch in train_dataset(replace(plan, overwrite=overwrite)).epochs] == [0, 1]
        return first.stat().st_mtime_ns

    before = train_again("job_a", 0)
    assert (
        train_again("job_a", 1)
        == train_again("job_a", 1, overwrite=True)
        == train_again("job_b", 0)
        == before
    )
    # Its first attempt ended before it replaced the run of another launch.
    replaced = train_again("job_b", 1, overwrite=True)
    assert replaced != before
    assert train_again("job_b", 0, overwrite=True) != replaced


def test_a_run_that_is_done_says_so_and_a_resumed_one_what_it_keeps(
    dataset: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan = TrainConfig(data=dataset, out=str(tmp_path / "run"), epochs=1, checkpoint_every=1)
    train_dataset(plan)
    assert caplog.messages == []
    lock = lock_exclusive(tmp_path / "run" / f".{CHECKPOINTS}.lock", 0.0)
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    with pytest.raises(StorageError, match="another job uses"):
        train_dataset(replace(plan, timeout_s=0.5, overwrite=True))
    assert files == {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    os.close(lock)
    train_dataset(plan)
    assert caplog.messages[-1] == "nothing to train: 1 epochs are done"
    (tensors,) = (tmp_path / "run").rglob("tensors-0.bin")
    full = tensors.read_bytes()
    tensors.write_bytes(bytes([full[0] ^ 1]) + full[1:])
    with pytest.raises(CheckpointError, match="damaged"):
        train_dataset(replace(plan, epochs=2))
    tensors.write_bytes(full)
    assert all(path.stat().st_mtime_ns == mtime for path, mtime in files.items() if path.suffix == ".json")
    train_dataset(replace(plan, epochs=2, resume=True, lr=0.5))
    message = caplog.messages[-1]
    assert "epoch-000001-step-000000000 of another configuration" in message
    assert "lr: 0.01 -> 0.5" in message


def _train_plan(plan: dict[str, Any]) -> None:
    train_dataset(TrainConfig(**plan))


def _times_of(run: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in (run / CHECKPOINTS).iterdir()}


def _append_and_die(folder: Path, record: EpochRecord) -> None:
    append_epoch(folder, record)
    if record.epoch == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        wait_for_checkpoints(folder / CHECKPOINTS, 2)
        (folder / "before.json").write_text(json.dumps(_times_of(folder)))
        os.kill(os.getpid(), signal.SIGKILL)


def _train_and_die(plan: dict[str, Any]) -> None:
    with mock.patch("dglx_dist.cli.train_job.append_epoch", _append_and_die):
        _train_plan(plan)


def _restart_by_torchrun(plan: dict[str, Any]) -> str:
    command = [sys.executable, "-m", "dglx_dist.cli.torchrun", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "1", "-m", __name__, json.dumps(plan)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


def _restart_in_forks(plan: dict[str, Any]) -> str:
    """Start the ranks twice, as torchrun does."""
    first = start_ranks(_train_and_die, 2, args=(plan,))
    assert -signal.SIGKILL in [outcome.exitcode for outcome in first]
    second = start_ranks(_train_plan, 2, args=(plan,), environment={"TORCHELASTIC_RESTART_COUNT": "1"})
    assert [outcome.exitcode for outcome in second] == [0, 0]
    return "".join(outcome.output for outcome in (*first, *second))


@pytest.mark.parametrize("restart", [_restart_in_forks, *wide(_restart_by_torchrun)])
def test_a_restart_keeps_the_checkpoints_and_ends_with_the_same_weights(
    dataset: str, tmp_path: Path, restart: Callable[[dict[str, Any]], str]
) -> None:
    plans = {
        name: {"data": dataset, "out": str(tmp_path / name), "epochs": 4, "checkpoint_every": 1}
        for name in ("killed", "whole")
    }
    shown = restart(plans["killed"])
    run_ranks(_train_plan, 2, args=(plans["whole"],))
    result = {}
    for name in plans:
        last = tmp_path / name / CHECKPOINTS / "epoch-000004-step-000000000"
        # The order in which tensors lie in the files may differ.
        result[name] = {
            tensor: (last / saved["file"]).read_bytes()[saved["first_byte"] :][: saved["num_bytes"]]
            for tensor, saved in json.loads((last / "state.json").read_text())["tensors"].items()
        }
    assert shown.count("resuming from ") == 1
    assert "training epochs 2 to 3" in shown
    before = json.loads((tmp_path / "killed" / "before.json").read_text())
    assert len(before) == 2
    assert before.items() <= _times_of(tmp_path / "killed").items()
    assert result["killed"] == result["whole"]
    epochs = (tmp_path / "killed" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in epochs] == [0, 1, 2, 3]


def test_a_picture_that_cannot_be_written_is_an_error_of_ours_and_costs_no_figure(
    dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dglx_dist.report.pictures.draw", full)
    with pytest.raises(StorageError, match="dglx report"):
        train_dataset(TrainConfig(data=dataset, out=str(tmp_path / "run"), epochs=1))
    assert (tmp_path / "run" / "summary.json").is_file()


def predicted_dataset(folder: Path, parts: int) -> str:
    """Two triangles; the class is the triangle, and so is the first feature."""
    graph = as_dgl()
    graph.ndata["label"] = (graph.nodes() > 2).long()
    for place, name in enumerate(("train_mask", "val_mask", "test_mask")):
        graph.ndata[name] = graph.nodes() % 3 == place
    graph.ndata["feat"] = torch.stack([graph.ndata["label"] * 4.0 - 2.0, torch.zeros(6)], 1)
    dx.partition_graph(graph, "t", parts, folder, part_method="random", seed=4)
    return str(folder / "t")


def _train(data: str, out: Path) -> float:
    plan = plan_of(data, out, epochs=30, model="mlp", batch_size=6, lr=0.05, eval_every=0)
    # The second replaces what the first has written.
    train_dataset(replace(plan, epochs=1))
    accuracy = train_dataset(plan).summary["test_accuracy"]
    assert isinstance(accuracy, float)
    return accuracy


def test_the_class_of_every_node_under_its_original_id(tmp_path: Path) -> None:
    for ranks in (1, 2):
        data, out = predicted_dataset(tmp_path / str(ranks), ranks), tmp_path / f"run-{ranks}"
        assert run_ranks(_train, ranks, args=(data, out)) == [1.0] * ranks
        classes, rows = read_tables(out)
        assert classes.tolist() == [0, 0, 0, 1, 1, 1]
        assert rows.shape == (6, 8)
        # Nodes of one triangle have the same features, so the same hidden layer; the other's differs.
        assert (rows == rows[[0, 0, 0, 3, 3, 3]]).all()
        assert (rows[0] != rows[3]).any()


def test_a_folder_of_something_else_is_found_before_training(tmp_path: Path) -> None:
    (tmp_path / "run" / "classes").mkdir(parents=True)
    (tmp_path / "run" / "classes" / "letter.txt").write_text("dear")
    with pytest.raises(dx.StorageError, match="does not hold exported rows"):
        _train(predicted_dataset(tmp_path, 1), tmp_path / "run")
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"classes", f".{CHECKPOINTS}.lock"}


def _train_model(folder: str, out: str, options: dict[str, Any]) -> list[tuple[float, float]]:
    usual = {"hidden": 8, "fanouts": (-1, -1), "batch_size": 20, "dropout": 0.0, "lr": 0.02, "eval_every": 0}
    epochs = train_dataset(TrainConfig(**{"data": folder, "out": out, **usual, **options})).epochs
    return [(epoch.loss, epoch.train_accuracy) for epoch in epochs]


@pytest.mark.parametrize("model", ["rgcn", *wide("hgt")])
def test_a_run_on_two_servers_is_that_of_one_process(model: str, tmp_path: Path) -> None:
    data = str(hetero.write_parts(tmp_path))
    options = {"model": model, "epochs": 25}
    (alone,) = run_ranks(_train_model, 1, args=(data, str(tmp_path / "alone"), options))
    # Twenty papers to train on: they are learnt by heart.
    assert alone[-1][1] > 0.9
    outputs = {"predictions": str(tmp_path / "classes"), "save_embeddings": str(tmp_path / "hidden")}
    cached = {"cache": "vip", "cache_alpha": 1.0}
    both = run_ranks(
        _train_model,
        2,
        args=(data, str(tmp_path / "both"), options | outputs | cached),
        ranks_per_server=1,
    )
    assert both[0] == both[1]
    assert [loss for loss, _ in both[0][:5]] == pytest.approx([loss for loss, _ in alone[:5]], rel=1e-3)
    classes = pyarrow.dataset.dataset(tmp_path / "classes").to_table()
    assert sorted(classes["id"].to_pylist()) == list(range(hetero.NUM_NODES["paper"]))
    for ntype, count in hetero.NUM_NODES.items():
        rows = pyarrow.dataset.dataset(tmp_path / "hidden" / ntype).to_table()
        assert sorted(rows["id"].to_pylist()) == list(range(count))
        assert {len(row) for row in rows["embedding"].to_pylist()} == {8}
    summary = json.loads((tmp_path / "both" / "summary.json").read_text())
    assert 0.0 <= summary["test_accuracy"] <= 1.0


@pytest.mark.parametrize(
    ("strategy", "model"),
    [("full_graph", "hgt"), *wide(("shared_preload", "rgcn"), ("cooperative", "rgcn"))],
)
def test_trains_whole_graphs_of_several_types_like_mini_batches(
    strategy: str, model: str, tmp_path: Path
) -> None:
    data, options = str(hetero.write_parts(tmp_path)), {"model": model, "epochs": 5, "eval_every": 1}
    (alone,) = run_ranks(_train_model, 1, args=(data, str(tmp_path / "alone"), options))
    whole = {
        "strategy": strategy,
        "fanouts": None,
        "batch_size": None,
        "save_embeddings": str(tmp_path / "rows"),
    }
    both = run_ranks(
        _train_model, 2, args=(data, str(tmp_path / "both"), options | whole), ranks_per_server=1
    )
    # One mini-batch has all 20 papers.
    assert both[0] == both[1]
    assert [loss for loss, _ in both[0]] == pytest.approx([loss for loss, _ in alone], rel=1e-3)
    first, second = (json.loads((tmp_path / run / "summary.json").read_text()) for run in ("alone", "both"))
    assert first["test_accuracy"] == second["test_accuracy"]
    rows = pyarrow.dataset.dataset(tmp_path / "rows" / "author").to_table()
    assert sorted(rows["id"].to_pylist()) == list(range(hetero.NUM_NODES["author"]))


@pytest.mark.parametrize("model", ["hgt", *wide("rgcn")])
def test_auto_chooses_on_several_types(model: str, tmp_path: Path) -> None:
    data, run = str(hetero.write_parts(tmp_path)), tmp_path / "run"
    options = {"model": model, "epochs": 2, "strategy": "auto"}
    run_ranks(_train_model, 2, args=(data, str(run), options), ranks_per_server=1)
    plan = json.loads((run / "plan.json").read_text())
    predictions = {entry["name"]: entry for entry in plan["predictions"]}
    assert predictions["data_parallel"]["trial"] is not None
    push_pull = predictions["push_pull structure=push"]
    assert push_pull["trial"] is not None if model == "rgcn" else "on several types" in push_pull["why_not"]
    assert all(entry["memory_bytes"] for entry in predictions.values() if entry["feasible"])
    assert predictions["data_parallel"]["outside"]["embeddings"] > 0
    assert plan["graph"]["nodes"] == sum(hetero.NUM_NODES.values())
    assert "epochs" in json.loads((run / "summary.json").read_text())


@pytest.mark.wide
def test_a_resumed_run_goes_on_with_its_rows(tmp_path: Path) -> None:
    """With the state of both optimizers and of dropout."""
    data, full, parts = str(hetero.write_parts(tmp_path)), str(tmp_path / "whole"), str(tmp_path / "run")

    def losses(out: str, **options: Any) -> list[Any]:
        inputs = {
            "model": "rgcn",
            "layers": 3,
            "fanouts": (-1, -1, -1),
            "norm": "layer",
            "residual": True,
            "dropout": 0.5,
            "precision": None if "resume" in options else "bf16",
            **options,
        }
        return run_ranks(_train_model, 2, args=(data, out, inputs), ranks_per_server=1)

    expected = losses(full, epochs=4)
    losses(parts, epochs=2, checkpoint_every=1)
    assert losses(parts, epochs=4, resume=True) == expected


def test_a_model_for_one_type_names_those_for_several(tmp_path: Path) -> None:
    plan = TrainConfig(data=str(hetero.write_parts(tmp_path)), out=str(tmp_path / "run"))
    with pytest.raises(dx.ConfigError, match=r"3 node and 5 edge types, but --model sage .* --model rgcn or"):
        train_dataset(plan)


if __name__ == "__main__":
    _train_and_die(json.loads(sys.argv[1]))
