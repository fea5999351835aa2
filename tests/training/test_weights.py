"""The weights that ``dx.load`` takes from a run, and the plain files of weights that a run writes."""

import json
import logging
import math
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

import dglx_dist as dx
from dglx_dist.cli.app import app
from dglx_dist.cli.train_job import train_dataset
from dglx_dist.errors import CheckpointError, ConfigError, StorageError
from dglx_dist.report.run_folder import read_epochs
from dglx_dist.training.best_epoch import write_safetensors
from dglx_dist.training.checkpoint_folder import folder_name
from dglx_dist.training.config import TrainConfig
from dglx_dist.training.fit_config import FitConfig
from dglx_dist.training.models import build_model
from tests.helpers import wide
from tests.helpers.ranks import run_each, run_ranks
from tests.training.test_schedules import said_of
from tests.training.test_tasks import EXACT, graph, labels, plan


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    for task in ("regression", "classification"):
        g = graph()
        g.ndata["label"] = labels(task)
        dx.partition_graph(g, task, 2, folder, part_method="random")
    return folder


def read_weights(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    with safe_open(path, "pt") as file:
        facts = file.metadata()
    return load_file(path), facts


def _train(values: dict[str, Any]) -> None:
    train_dataset(TrainConfig(**values))


def _predict(folder: str, run: str, how: dict[str, Any]) -> list[float]:
    with dx.init("data_parallel"):
        g = dx.DistGraph(folder)
        model = build_model("sage", 8, 8, 1, dropout=0.0)
        model.standardise(torch.zeros(1), torch.ones(1))
        dx.load(run, model=model, **how)
        rows = dx.layerwise_inference(model, g)
        ids = torch.argsort(g.orig_ids(torch.arange(g.num_nodes())))
        return [float(value) for value in rows[ids].reshape(-1)]


@pytest.mark.parametrize("strategy", ["push_pull", *wide("data_parallel")])
def test_load_takes_the_best_epoch_of_a_run(strategy: str, data: Path, tmp_path: Path) -> None:
    options = plan(data, "regression", tmp_path, strategy=strategy, epochs=40, lr=0.1, patience=3)
    run_ranks(_train, 2, args=(options,))
    message, where = said_of(tmp_path).tolist(), str(data / "regression")
    for folder in (tmp_path, tmp_path / "checkpoints"):
        (result,) = run_ranks(_predict, 1, args=(where, str(folder), {}))
        assert result == message
    (newest,) = run_ranks(_predict, 1, args=(where, str(tmp_path), {"which": "newest"}))
    assert newest != message


@pytest.mark.wide
def test_load_names_its_checkpoint(data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _train(plan(data, "regression", tmp_path, epochs=40, lr=0.1, patience=3))
    best = json.loads((tmp_path / "summary.json").read_text())["best_epoch"]
    newest, run = len(read_epochs(tmp_path)), str(tmp_path)
    caplog.set_level(logging.WARNING)
    with dx.init("data_parallel"):
        model = build_model("sage", 8, 8, 1, dropout=0.0)
        model.standardise(torch.zeros(1), torch.ones(1))
        adam = torch.optim.Adam(model.parameters())
        caplog.clear()
        assert dx.load(run, model=model).epoch == best + 1
        assert folder_name(best + 1) in caplog.messages[-1]
        assert folder_name(newest) in caplog.messages[-1]
        # To go on with training is another purpose.
        assert dx.load(run, model=model, optimizer=adam).epoch == newest
        assert f"{folder_name(newest)}, the newest" in caplog.messages[-1]
        assert dx.load(run, model=model, optimizer=adam, which="best").epoch == best + 1
        for which in ("last", "", 0, False):
            with pytest.raises(ConfigError, match=f"which={which!r}"):
                dx.load(run, model=model, optimizer=adam, which=which)  # type: ignore[arg-type]
        (tmp_path / "checkpoints" / folder_name(best + 1)).rename(tmp_path / "moved")
        assert dx.load(run, model=model).epoch == newest
        assert f"the best one, {folder_name(best + 1)}, does not exist" in caplog.messages[-1]
        with pytest.raises(CheckpointError, match="which='newest'"):
            dx.load(run, model=model, which="best")


def test_load_names_the_weights_of_a_run_without_checkpoints(data: Path, tmp_path: Path) -> None:
    _train(plan(data, "classification", tmp_path / "run", epochs=1))
    (tmp_path / "seeds" / "seed-1").mkdir(parents=True)
    with dx.init("data_parallel"):
        model = build_model("sage", 8, 8, 2, dropout=0.0)
        with pytest.raises(CheckpointError, match="--checkpoint-every 1") as caught:
            dx.load(tmp_path / "run", model=model)
        assert f"load_file('{tmp_path}/run/model.safetensors')" in str(caught.value)
        with pytest.raises(CheckpointError, match=r"such as .*seeds/seed-1$"):
            dx.load(tmp_path / "seeds", model=model)
        with pytest.raises(CheckpointError, match="save one first"):
            dx.load(tmp_path, model=model)


def test_values_of_the_users_own_loop_are_not_taken_for_a_best_epoch(tmp_path: Path) -> None:
    with dx.init("data_parallel"):
        model = torch.nn.Linear(2, 2)
        for epoch in (1, 2):
            dx.save(tmp_path, model=model, epoch=epoch, extra={"best": [0, 0.7]})
        assert dx.load(tmp_path, model=model).epoch == 2


@pytest.mark.wide
def test_a_run_leaves_its_best_and_its_final_weights(data: Path, tmp_path: Path) -> None:
    models = {**dict.fromkeys(EXACT, "sage"), "lambda": "gcn"}
    more: dict[str, Any] = {"epochs": 6, "lr": 0.3, "checkpoint_every": 1}
    plans = [
        (plan(data, "classification", tmp_path / strategy, strategy=strategy, model=model, **more),)
        for strategy, model in models.items()
    ]
    run_each(_train, plans, 2, ranks_per_server=1)
    for strategy, model in models.items():
        out = tmp_path / strategy
        scores = [record.val_accuracy for record in read_epochs(out)]
        best = max(range(6), key=lambda epoch: (scores[epoch], -epoch))
        with dx.init("data_parallel"):
            plain = build_model(model, 8, 8, 2, dropout=0.0, graph=dx.DistGraph(data / "classification"))
            for name, epoch in (("model", best), ("final", 5)):
                state, facts = read_weights(out / f"{name}.safetensors")
                assert facts == {"format": "pt", "epoch": str(epoch)}
                assert plain.load_state_dict(state)
                dx.load(out / "checkpoints" / folder_name(epoch + 1), model=plain)
                assert all(torch.equal(value, state[key]) for key, value in plain.state_dict().items())


def test_the_last_line_of_a_run_says_where_its_weights_are(data: Path, tmp_path: Path) -> None:
    run, command = tmp_path / "run", ["train", str(data / "classification"), "--epochs", "1", "--out"]
    message = CliRunner().invoke(app, [*command, str(run)])
    assert message.exit_code == 0
    last = message.output.replace("\n", "").rpartition("written to")[2]
    assert f"{run}/model.safetensors" in last
    assert f"{run}/final.safetensors" in last
    assert CliRunner().invoke(app, [*command, str(run), "--seeds", "0,1", "--overwrite"]).exit_code == 0
    assert read_weights(run / "seed-1" / "model.safetensors")[1]["epoch"] == "0"


def test_without_validation_the_model_is_that_of_the_last_epoch(data: Path, tmp_path: Path) -> None:
    g = graph()
    g.ndata["label"] = labels("classification")
    del g.ndata["val_mask"]
    dx.partition_graph(g, "plain", 1, tmp_path, part_method="random")
    _train(plan(tmp_path, "plain", tmp_path / "run", epochs=2))
    both = [read_weights(tmp_path / "run" / f"{name}.safetensors") for name in ("model", "final")]
    assert [facts["epoch"] for _, facts in both] == ["1", "1"]
    assert all(torch.equal(value, both[1][0][name]) for name, value in both[0][0].items())


def test_a_resumed_run_keeps_the_best_weights_and_a_new_one_removes_them(data: Path, tmp_path: Path) -> None:
    options = plan(data, "regression", tmp_path, epochs=2, lr=1e-12, checkpoint_every=1)
    _train(options)
    first = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])["metrics"]["val_mae"]
    _train({**options, "epochs": 4})
    _, facts = read_weights(tmp_path / "model.safetensors")
    values = [record.metrics["val_mae"] for record in read_epochs(tmp_path)]
    assert values[0] == first
    assert int(facts["epoch"]) == int(np.argmin(values))
    (tmp_path / "model.safetensors").write_bytes(b"of the run before")
    _train({**options, "overwrite": True, "eval_every": 0})
    assert read_weights(tmp_path / "model.safetensors")[1]["epoch"] == "1"


def test_fit_writes_weights_where_it_is_told(data: Path, tmp_path: Path) -> None:
    with dx.init("data_parallel"):
        g = dx.DistGraph(data / "classification")
        config = FitConfig(epochs=2, weights_folder=tmp_path / "new", show_progress=False)
        wrapped, _ = dx.fit(build_model("sage", 8, 8, 2, dropout=0.0), g, config=config)
        state, _ = read_weights(tmp_path / "new" / "final.safetensors")
        assert all(torch.equal(value, state[name]) for name, value in wrapped.state_dict().items())


def test_weights_of_all_dtypes_and_shapes_are_read_again(tmp_path: Path) -> None:
    state = {
        "flag": torch.tensor([True, False, True]),
        "half": torch.randn(3, 5).to(torch.bfloat16),
        "sixteen": torch.randn(3).to(torch.float16),
        "count": torch.tensor(7),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "empty": torch.zeros(0, 4),
        "also empty": torch.zeros(3, 0),
        "columns": torch.randn(4, 6, dtype=torch.float64).t(),
        "every second": torch.arange(10)[::2],
        "scale": nn.Parameter(torch.tensor(math.pi)),
    }
    write_safetensors(state, tmp_path / "x", epoch=3)
    tensors, facts = read_weights(tmp_path / "x")
    assert facts == {"format": "pt", "epoch": "3"}
    assert tensors.keys() == state.keys()
    for name, value in state.items():
        assert tensors[name].dtype == value.dtype
        assert torch.equal(value, tensors[name])


def test_tied_weights_are_read_under_each_name(tmp_path: Path) -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
        model[2].weight = model[0].weight
        # One storage: the whole, and a piece of it.
        model.register_buffer("rows", torch.arange(6.0).reshape(3, 2))
        model.register_buffer("row", model.rows[1])
        return model

    model, loaded = build(), build()
    write_safetensors(model.state_dict(), tmp_path / "x")
    loaded.load_state_dict(load_file(tmp_path / "x"))
    assert loaded[2].weight is loaded[0].weight
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    "odd", [torch.zeros(2, dtype=torch.complex128), torch.eye(3).to_sparse(), {"of": "no tensor"}]
)
def test_names_what_safetensors_lacks(odd: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_safetensors({"fine": torch.ones(2), "odd": odd}, tmp_path / "y")
    assert "Use dx.save" in caplog.messages[-1]
    assert not list(tmp_path.iterdir())


def test_an_interrupted_write_leaves_old_weights(tmp_path: Path) -> None:
    path = tmp_path / "x"
    write_safetensors({"a": torch.ones(2)}, path)
    before = path.read_bytes()
    (tmp_path / "plain").touch()
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode
    (tmp_path / "plain").unlink()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, limits[1]))
    try:
        with pytest.raises(StorageError, match=r"x cannot be written: .*File too large"):
            write_safetensors({"a": torch.zeros(2)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_equal_weights_are_equal_files(tmp_path: Path) -> None:
    """The library writes the facts of a file in random order."""
    facts = {"epoch": 1, "best": "yes", "name": "é", "note": "x"}
    for number in range(20):
        write_safetensors({"w": torch.ones(3)}, tmp_path / str(number), **facts)
    assert len({(tmp_path / str(number)).read_bytes() for number in range(20)}) == 1
    weights, stored = read_weights(tmp_path / "0")
    assert torch.equal(weights["w"], torch.ones(3))
    assert stored == {"format": "pt"} | {name: str(fact) for name, fact in facts.items()}
