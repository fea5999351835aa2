"""``dglx train --strategy lambda`` and what it writes."""

import json
from pathlib import Path
from typing import Any

import pytest

from dglx_dist.api import init
from dglx_dist.cli.train_job import build_run_config, fill_defaults, train_dataset
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.training.config import TrainConfig

OPTIONS = {"executor": "inline", "intervals": 3, "workers": 2, "prices": "dorylus"}


def plan_of(dataset: str, out: Path, **changes: Any) -> TrainConfig:
    plan = {"strategy": "dorylus", "strategy_options": OPTIONS, "hidden": 8, "epochs": 4}
    return TrainConfig(**{"data": dataset, "out": str(out)} | plan | changes)  # type: ignore[arg-type]


def test_a_run_its_bill_and_its_resume(dataset: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    straight = train_dataset(plan_of(dataset, tmp_path / "straight", eval_every=2))
    first = train_dataset(plan_of(dataset, out, epochs=2, eval_every=2, checkpoint_every=1))
    again = train_dataset(plan_of(dataset, out, eval_every=2, checkpoint_every=2, resume=True))
    assert first.epochs + again.epochs[2:] == again.epochs
    for left, right in zip(straight.epochs, again.epochs, strict=True):
        assert (left.epoch, left.loss, left.train_accuracy) == (right.epoch, right.loss, right.train_accuracy)
        assert left.val_accuracy == right.val_accuracy
    summary = json.loads((out / "summary.json").read_text())
    assert summary["strategy"] == "lambda"
    assert summary["account"]["epochs"] == 2
    assert summary["account"]["invocations"] - summary["account"]["relaunched"] == 2 * 3 * 3
    assert summary["account"]["label"].startswith("simulated")
    assert "text" not in summary["account"]
    moved = sum(row[2] for rows in summary["traffic"].values() for row in rows)
    assert moved == sum(epoch.bytes_inside + epoch.bytes_outside for epoch in again.epochs)
    config = json.loads((out / "config.json").read_text())
    # Nothing of mini-batches was in force, and all in-neighbours.
    message = [config[name] for name in ("fanouts", "batch_size", "depth", "loader_threads")]
    assert message == [[-1, -1], None, None, None]
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"fanouts": (5, 5)}, r"draws \[5, 5\] in-neighbours.*--fanout out"),
        ({"cache": "vip"}, "strategy 'lambda' moves none in training. Leave --cache out"),
        (
            {"precision": "bf16"},
            "'lambda' takes one step per epoch, in the dtype of the weights",
        ),
        ({"strategy_options": {**OPTIONS, "mode": "pype"}}, "mode='pype'"),
    ],
)
def test_refuses_what_it_cannot_do(
    dataset: str, tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        train_dataset(plan_of(dataset, tmp_path, **changes))


def test_the_run_folder_holds_no_key(dataset: str, tmp_path: Path) -> None:
    options = {"executor": "http", "url": "https://a.host/f?code=k3y", "headers": {"Authorization": "k3y"}}
    plan = plan_of(dataset, tmp_path, strategy_options=options)
    with init(plan.strategy, **options) as session:
        run_config = build_run_config(plan, DistGraph(dataset, session=session), session)
    assert "k3y" not in json.dumps(run_config)
    assert run_config["strategy_options"]["url"] == "https://a.host/f"  # type: ignore[index]


def test_a_batch_size_is_told_to_be_without_effect(dataset: str, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="depth=2, batch_size=64: without effect"):
        train_dataset(plan_of(dataset, tmp_path, epochs=1, batch_size=64, depth=2))


def test_mini_batches_have_their_usual_values() -> None:
    plan = TrainConfig(data="d", out="o", layers=3, fanouts=None, batch_size=7)
    filled = fill_defaults(plan)
    assert (filled.fanouts, filled.batch_size) == ((25, 10, 10), 7)
    assert (filled.depth, filled.loader_threads) == (1, 1)
