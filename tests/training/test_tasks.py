"""Several labels, regression and class weights: metrics by hand, and losses of plain torch, on any ranks."""

import json
import math
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import dgl
import numpy as np
import pyarrow.dataset
import pytest
import torch
from torch.nn import functional as F

import dglx_dist as dx
from dglx_dist.cli.train_job import describe_target, train_dataset
from dglx_dist.comm.session import start_session
from dglx_dist.errors import ConfigError
from dglx_dist.report.run_folder import read_epochs
from dglx_dist.training import metrics
from dglx_dist.training.config import RunOptions, TrainConfig
from dglx_dist.training.fit_config import PLAIN_VALUES, needs_own_loop
from dglx_dist.training.link import LinkEvaluation
from dglx_dist.training.models import build_model
from dglx_dist.training.resume import UPDATE_OPTIONS
from dglx_dist.training.tasks import compute_class_weights, compute_moments, measure, warn_of_guesses
from tests.helpers import wide
from tests.helpers.ranks import run_each, run_ranks

NODES, LABELS = 60, 3
MASKS = ("train_mask", "val_mask", "test_mask")
EXACT = ("data_parallel", "push_pull", "full_graph", "shared_preload", "cooperative")


def graph() -> dgl.DGLGraph:
    draw = np.random.default_rng(3)
    g = dgl.graph((draw.integers(0, NODES, 240), draw.integers(0, NODES, 240)), num_nodes=NODES)
    g.ndata["feat"] = torch.from_numpy(draw.normal(size=(NODES, 8)).astype(np.float32))
    for number, mask in enumerate(MASKS):
        g.ndata[mask] = torch.arange(NODES) % 3 == number
    return g


def labels(task: str) -> torch.Tensor:
    feat = graph().ndata["feat"]
    if task == "multilabel":
        # As DGL's PPI has them: floating-point zeros and ones.
        return (feat[:, :LABELS] > 0.3).float()
    if task == "regression":
        return feat[:, 0] * 2 + feat[:, 1]
    if task == "far":
        return 1e6 + 1e3 * labels("regression").double()
    return (feat[:, 0] > 1).long()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    for task in ("multilabel", "regression", "far", "classification"):
        g = graph()
        g.ndata["label"] = labels(task)
        dx.partition_graph(g, task, 2, folder, part_method="random")
    return folder


def average_precision(score: np.ndarray, truth: np.ndarray) -> float:
    result, recall = 0.0, 0.0
    for threshold in sorted(set(score.tolist()), reverse=True):
        array = score >= threshold
        hits = (array & truth).sum()
        result += (hits / truth.sum() - recall) * hits / array.sum()
        recall = hits / truth.sum()
    return float(result)


def roc_auc(score: np.ndarray, truth: np.ndarray) -> float:
    above = score[truth][:, None] - score[~truth][None]
    return float(((above > 0) + 0.5 * (above == 0)).mean())


def f1(said: np.ndarray, truth: np.ndarray) -> float:
    return float(2 * (said & truth).sum() / (said.sum() + truth.sum()))


def _of_columns(cut: tuple[int, ...]) -> dict[str, float]:
    session = start_session()
    rows = slice(*cut[session.topology.rank : session.topology.rank + 2])
    score, truth = drawn_scores()
    own, true = torch.from_numpy(score)[rows], torch.from_numpy(truth)[rows]
    return {
        "ap": metrics.average_precision(own, true, session),
        "ap of one": metrics.average_precision(own[:, 0], true[:, 0], session),
        "auc": metrics.roc_auc(own, true, session),
        "micro": metrics.f1(own > 0, true, 4, session, average="micro"),
        "macro": metrics.f1(own > 0, true, 4, session),
        "no positives": metrics.average_precision(own[:, 3], true[:, 3], session),
    }


def drawn_scores() -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    truth = draw.random((40, 4)) < 0.4
    truth[:, 3] = False
    # Rounded, so that some are tied.
    return np.round(draw.normal(size=(40, 4)) + truth, 1), truth


@pytest.mark.wide
@pytest.mark.parametrize("cut", [(0, 40), (0, 7, 7, 40)])
def test_metrics_of_several_columns(cut: tuple[int, ...]) -> None:
    score, truth = drawn_scores()
    columns = [(score[:, c], truth[:, c]) for c in range(3)]
    for result in run_ranks(_of_columns, len(cut) - 1, args=(cut,)):
        assert result["ap of one"] == pytest.approx(average_precision(*columns[0]), abs=1e-12)
        assert result["ap"] == pytest.approx(
            np.mean([average_precision(*column) for column in columns]), abs=1e-12
        )
        assert result["auc"] == pytest.approx(np.mean([roc_auc(*column) for column in columns]), abs=1e-12)
        assert result["micro"] == pytest.approx(f1(score > 0, truth), abs=1e-12)
        # Column 3 is said, though never true: it counts as 0.
        assert result["macro"] == pytest.approx(sum(f1(s > 0, t) for s, t in columns) / 4, abs=1e-12)
        assert math.isnan(result["no positives"])


def _train(values: dict[str, Any]) -> None:
    train_dataset(TrainConfig(**values))


def plan(data: Path, task: str, out: Path, **more: Any) -> dict[str, Any]:
    values = {"data": str(data / task), "out": str(out), "epochs": 3, "hidden": 8, "dropout": 0.0}
    return {**values, "fanouts": (-1, -1), "predictions": str(out / "said"), **more}


def plain_losses(
    task: str, weights: torch.Tensor | None = None, rates: Sequence[float] = (1, 1, 1)
) -> list[float]:
    """Losses of DGL's and torch's own, on the whole graph, with the weights that seed 0 gives."""
    g, truth = graph(), labels(task)
    rows = g.ndata["train_mask"]
    torch.manual_seed(0)
    model = build_model(
        "sage", 8, 8, {"multilabel": LABELS, "regression": 1, "classification": 2}[task], dropout=0.0
    )
    adam, result = torch.optim.Adam(model.parameters(), lr=0.01), []
    for rate in rates:
        adam.param_groups[0]["lr"] = 0.01 * rate
        scores = model([g, g], g.ndata["feat"])[rows]
        if task == "multilabel":
            loss = F.binary_cross_entropy_with_logits(scores, truth[rows], pos_weight=weights)
        elif task == "regression":
            deviation, mean = torch.std_mean(truth[rows], correction=0)
            loss = F.mse_loss(scores[:, 0], (truth[rows] - mean) / deviation)
        else:
            each = F.cross_entropy(scores, truth[rows], reduction="none")
            loss = (each * (1 if weights is None else weights[truth[rows]])).mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
        result.append(loss.item())
    return result


def test_losses_are_those_of_plain_torch(data: Path, tmp_path: Path) -> None:
    cases = [(task, strategy) for task in ("multilabel", "regression") for strategy in EXACT]
    folders = [tmp_path / f"{task}-{strategy}" for task, strategy in cases]
    plans = [
        (plan(data, task, out, strategy=strategy),)
        for (task, strategy), out in zip(cases, folders, strict=True)
    ]
    run_each(_train, plans, 2, ranks_per_server=1)
    for (task, strategy), out in zip(cases, folders, strict=True):
        losses = [record.loss for record in read_epochs(out)]
        assert losses == pytest.approx(plain_losses(task), rel=1e-5), strategy


def said_of(out: Path, task: str) -> np.ndarray:
    table = pyarrow.dataset.dataset(out / "said").to_table().sort_by("id")
    assert table["id"].to_pylist() == list(range(NODES))
    return np.array(table["prediction"].to_pylist())


@pytest.mark.wide
@pytest.mark.parametrize("ranks", [1, 2])
def test_metrics_are_those_of_the_written_predictions(ranks: int, data: Path, tmp_path: Path) -> None:
    test = graph().ndata["test_mask"].numpy()
    out = tmp_path / "several"
    run_ranks(_train, ranks, args=(plan(data, "multilabel", out, metric=("f1_micro", "accuracy")),))
    message, truth = said_of(out, "multilabel")[test], labels("multilabel").numpy()[test] > 0
    summary = json.loads((out / "summary.json").read_text())
    assert summary["task"] == "multilabel"
    assert summary["test_f1_micro"] == pytest.approx(f1(message, truth), abs=1e-12)
    assert summary["test_accuracy"] == pytest.approx((message == truth).all(1).mean(), abs=1e-12)
    record = read_epochs(out)[-1]
    assert math.isnan(record.train_accuracy)
    assert record.val_accuracy == record.metrics["val_accuracy"]
    assert record.metrics["test_f1_micro"] == summary["test_f1_micro"]

    out = tmp_path / "numbers"
    run_ranks(_train, ranks, args=(plan(data, "regression", out),))
    error = np.abs(said_of(out, "regression") - labels("regression").numpy())[test]
    summary = json.loads((out / "summary.json").read_text())
    assert summary["test_mae"] == pytest.approx(error.mean(), rel=1e-6)
    assert summary["test_rmse"] == pytest.approx(math.sqrt((error**2).mean()), rel=1e-6)


@pytest.mark.wide
def test_targets_far_from_0_are_learnt_as_well(data: Path, tmp_path: Path) -> None:
    tasks = ("regression", "far")
    cases = [(task, tmp_path / strategy / task, strategy) for strategy in EXACT for task in tasks]
    plans = [(plan(data, task, out, strategy=strategy),) for task, out, strategy in cases]
    run_each(_train, plans, 2)
    for strategy in EXACT:
        near, far = (read_epochs(tmp_path / strategy / task) for task in tasks)
        # Scores of 1e6 are float32, whose last bit is 1/16.
        assert [epoch.loss for epoch in far] == pytest.approx([epoch.loss for epoch in near], rel=1e-3)
        result, expected = far[-1].metrics["test_rmse"], 1e3 * near[-1].metrics["test_rmse"]
        assert result == pytest.approx(expected, rel=1e-3)
        error = said_of(tmp_path / strategy / "far", "far") - labels("far").numpy()
        of_test = error[graph().ndata["test_mask"].numpy()]
        assert math.sqrt((of_test**2).mean()) == pytest.approx(result, rel=1e-4), strategy


def _fitted_far(folder: str) -> tuple[list[float], float, float]:
    with dx.init("data_parallel"):
        g = dx.DistGraph(folder)

        def error(model: Any) -> dict[str, float]:
            rows = dx.layerwise_inference(model, g)
            share = slice(*g.get_node_partition_policy("_N").owned_range)
            error = (rows[share][:, 0] - g.ndata["label"][share])[g.ndata["val_mask"][share]].abs()
            return {"val_error": dx.reduce_mean(error.mean(), len(error))}

        config = dx.FitConfig(epochs=2, evaluate=error, metric=("error",), show_progress=False)
        model, result = dx.fit(build_model("sage", 8, 8, 1, dropout=0.0), g, config=config)
        mean, deviation = compute_moments(g, "_N", "label", "train_mask")
        again = dx.evaluate(model, g, task="regression", metrics=["mae"])["val_mae"]
        return [float(mean), float(deviation)], result.metrics["val_error"], again


@pytest.mark.parametrize("ranks", [3, *wide(1, 2)])
def test_scores_of_a_regression_are_in_the_unit_of_its_labels(ranks: int, data: Path) -> None:
    known = labels("far")[graph().ndata["train_mask"]]
    expected = [float(known.mean()), float(known.std(correction=0))]
    for scale, by_own, by_evaluate in run_ranks(_fitted_far, ranks, args=(str(data / "far"),)):
        assert scale == pytest.approx(expected, rel=1e-12)
        assert by_own == pytest.approx(by_evaluate, rel=1e-5)
        assert by_own < 1e4, "the labels are about 1e6"


def test_scores_of_another_width_than_the_labels_are_refused(data: Path) -> None:
    with (
        dx.init("data_parallel"),
        pytest.raises(ConfigError, match="must have a column for each of the labels"),
    ):
        dx.fit(build_model("sage", 8, 8, 3), dx.DistGraph(data / "far"), config=dx.FitConfig(epochs=1))


def test_equal_targets_have_no_deviation(tmp_path: Path) -> None:
    g = graph()
    g.ndata["label"] = torch.full((NODES, 2), 1e6 + 1 / 3, dtype=torch.float64)
    dx.partition_graph(g, "equal", 1, tmp_path)
    with dx.init("data_parallel"):
        _, deviation = compute_moments(dx.DistGraph(tmp_path / "equal"), "_N", "label", "train_mask")
        assert deviation.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("classification", "classification, 2 classes"),
        ("multilabel", f"multilabel, {LABELS} labels"),
        ("regression", "regression"),
    ],
)
def test_the_task_of_a_run_is_said(task: str, said: str, data: Path, tmp_path: Path) -> None:
    with dx.init("data_parallel"):
        config = TrainConfig(**{**plan(data, task, tmp_path), "task": task})
        assert describe_target(config, dx.DistGraph(data / task), "_N") == said
        g, links = dx.DistGraph(data / task), [("_N", name, "_N") for name in ("a", "b", "c", "d")]
        item, four = (LinkEvaluation(g=g, targets=targets) for targets in (links[:1], links))
        assert describe_target(config, g, item).endswith("on a, decoder dot")
        assert describe_target(config, g, four).endswith("4 edge types, decoder distmult")


@pytest.mark.parametrize("task", ["classification", "multilabel", "regression"])
def test_workers_train_every_task_with_weights_a_schedule_and_clipping(
    task: str, data: Path, tmp_path: Path
) -> None:
    """Epochs are full-graph steps, as under full_graph."""
    weights = {} if task == "regression" else {"class_weight": "balanced"}
    options = {"schedule": "cosine", "warmup": 2, "clip_norm": 0.05, "weight_decay": 0.1, "epochs": 5}
    losses = []
    for strategy, more in (("full_graph", {}), ("lambda", {"strategy_options": {"executor": "inline"}})):
        out = tmp_path / strategy
        changes = {"strategy": strategy, "batch_size": None, **options, **weights, **more}
        _train({**plan(data, task, out), **changes})
        losses.append([(record.loss, record.train_accuracy) for record in read_epochs(out)])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


@pytest.mark.parametrize(
    ("stored", "wanted", "said"),
    [
        ("regression", {"task": "multilabel"}, "regression numbers"),
        ("multilabel", {"task": "classification"}, "one whole number per node"),
        ("multilabel", {"metric": ("mae",)}, "metric mae is not one of multilabel"),
        ("regression", {"class_weight": "balanced"}, "class weights need classes"),
    ],
)
def test_refuses_labels(stored: str, wanted: dict[str, Any], said: str, data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        _train({**plan(data, stored, tmp_path), **wanted})


@pytest.mark.parametrize("task", ["classification", "multilabel"])
def test_balanced_classes(task: str, data: Path, tmp_path: Path) -> None:
    truth = labels(task)[graph().ndata["train_mask"]]
    if task == "classification":
        weights = len(truth) / (2 * torch.bincount(truth, minlength=2).float())
    else:
        weights = (1 - truth).sum(0) / truth.sum(0)
    run_ranks(_train, 2, args=(plan(data, task, tmp_path, class_weight="balanced"),))
    losses = [record.loss for record in read_epochs(tmp_path)]
    assert losses == pytest.approx(plain_losses(task, weights), rel=1e-5)


def _weights_of_another_column(folder: str) -> list[float]:
    """Compute weights of three classes, one of which only one rank has; the column of labels has two."""
    with dx.init("data_parallel") as session:
        g = dx.DistGraph(folder)
        own = dx.node_split(g.ndata["train_mask"])
        g.ndata["y"] = g.new_tensor((NODES,), torch.int64, "y")
        g.ndata["y"][own[:2]] = torch.tensor([1, 2 if session.topology.rank == 0 else 1])
        g.barrier()
        weights: list[float] = (1 / compute_class_weights(g, "_N", "y", "classification")).tolist()
        return weights


def test_balances_the_classes_of_a_column_that_has_more_than_the_labels(data: Path) -> None:
    number = int(graph().ndata["train_mask"].sum())
    expected = [3 * count / number for count in (number - 4, 3, 1)]
    for weights in run_ranks(_weights_of_another_column, 2, args=(str(data / "classification"),)):
        assert weights == pytest.approx(expected)


def _wrong_on_one_rank(folder: str) -> list[str]:
    """Errors that only rank 0's rows show, of labels -1 and of scores of another width."""
    with dx.init("data_parallel") as session:
        g, message = dx.DistGraph(folder), []
        own = dx.node_split(g.ndata["train_mask"])
        g.ndata["broken"] = g.new_tensor((NODES,), torch.int64, "broken")
        if session.topology.rank == 0:
            g.ndata["broken"][own[:1]] = torch.tensor([-1])
        scores = dx.DistTensor((NODES, 2), torch.float32, "scores")
        for wrong in (
            lambda: compute_class_weights(g, "_N", "broken", "classification"),
            lambda: measure(scores, g, "_N", "label", "val_mask", "regression", ["mae"]),
        ):
            with pytest.raises(ConfigError) as error:
                wrong()
            message.append(str(error.value))
        return message


def test_labels_that_are_wrong_on_one_rank_are_refused_on_all(data: Path) -> None:
    for of_labels, of_scores in run_ranks(_wrong_on_one_rank, 2, args=(str(data / "classification"),)):
        assert "no class" in of_labels
        assert "Its last layer must have a column" in of_scores


def test_what_needs_a_loop_in_torch() -> None:
    assert needs_own_loop(RunOptions()) is None
    assert needs_own_loop(RunOptions(schedule="cosine", warmup=2, clip_norm=1.0)) is None
    assert needs_own_loop(RunOptions(accumulate=2)) == "accumulate 2"
    assert needs_own_loop(RunOptions(precision="bf16")) == "precision bf16"


def test_every_option_is_known_to_change_the_steps_or_not() -> None:
    """An option that is in neither set would be ignored without a word by lambda and by a resumed run."""
    unchanged = {
        "metric",
        "epochs",
        "eval_every",
        "eval_sample",
        "eval_activations",
        "patience",
        "min_delta",
        "checkpoint_every",
        "keep",
        "resume",
        "overwrite",
    }
    unchanged |= {"goes_on", "trace", "trace_steps", "tensorboard", "watch"}
    # Options of Objective, and those that only a loop in torch can follow.
    of_objective = {"task", "class_weight", "schedule", "warmup", "clip_norm"}
    assert {field.name for field in fields(RunOptions)} == {*PLAIN_VALUES, *of_objective, *unchanged}
    assert {*UPDATE_OPTIONS, "precision", "task"} == {*PLAIN_VALUES, *of_objective}


def test_warns_of_the_majoritys_accuracy(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    truth = labels("classification")
    test = graph().ndata["test_mask"]
    share = float((truth[test] == 0).float().mean())
    _train(plan(data, "classification", tmp_path, epochs=1, lr=1e-9, metric=("accuracy", "f1_macro")))
    result = json.loads((tmp_path / "summary.json").read_text())["test_accuracy"]
    warned = [text for text in caplog.messages if "share of the largest class" in text]
    assert len(warned) == (result <= share)
    assert all(f"is not better than {share:.4g}, the share" in text for text in warned)
    assert result <= share, "an untrained model is not better"


@pytest.mark.wide
def test_warns_of_no_better_than_means(data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for lr, message in ((1e-9, 1), (0.05, 0)):
        caplog.clear()
        _train(plan(data, "regression", tmp_path / str(lr), model="mlp", epochs=40, lr=lr))
        assert (
            len([text for text in caplog.messages if "standard deviation of the labels" in text]) == message
        )


def test_a_constant_column_hides_no_other_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    g = graph()
    g.ndata["label"] = torch.stack([0.1 * torch.arange(NODES) / NODES, torch.full((NODES,), 0.3)], 1)
    dx.partition_graph(g, "half", 1, tmp_path)
    with dx.init("data_parallel"):
        opened = dx.DistGraph(tmp_path / "half")
        warn_of_guesses("regression", {"test_rmse": 0.5}, opened, "_N", "label")
    assert "the test rmse of 0.5 is not better than" in caplog.text


def test_an_area_under_the_curve_of_guesses_is_said(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    with dx.init("data_parallel"):
        g = dx.DistGraph(data / "multilabel")
        for area in (0.52, 0.7):
            warn_of_guesses("multilabel", {"test_roc_auc": area}, g, "_N", "label")
    (warning,) = (text for text in caplog.messages if "roc_auc" in text)
    assert warning.startswith("the test roc_auc of 0.52 is hardly better than 0.5, that of guesses")


def test_early_stop_needs_validation(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dglx_dist.training.loop.train_pass", lambda *_: pytest.fail("trained"))
    folder = tmp_path / "data"
    raw = graph()
    raw.ndata["label"] = labels("classification")
    del raw.ndata["val_mask"]
    dx.partition_graph(raw, "none", 1, folder)
    with pytest.raises(ConfigError, match=r"early-stop 2 needs validation targets.* val_mask"):
        _train({**plan(data, "classification", tmp_path, patience=2), "data": str(folder / "none")})
