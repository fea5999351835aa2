"""``dglx train --model rgcn`` and ``hgt``: papers with labels, venues with features, authors with neither."""

import json
from pathlib import Path
from typing import Any

import pyarrow.dataset
import pytest

import dglx_dist as dx
from dglx_dist.cli.train_config import TrainConfig
from dglx_dist.cli.train_job import train_dataset
from tests.helpers import wide
from tests.helpers.ranks import run_ranks
from tests.training import hetero


def _train(folder: str, out: str, options: dict[str, Any]) -> list[tuple[float, float]]:
    plan = TrainConfig(
        data=folder, out=out, hidden=8, fanouts=(-1, -1), batch_size=20, dropout=0.0, lr=0.02, eval_every=0,
        **options,
    )  # fmt: skip
    epochs = train_dataset(plan).epochs
    return [(epoch.loss, epoch.train_accuracy) for epoch in epochs]


@pytest.mark.parametrize("model", ["rgcn", *wide("hgt")])
def test_a_run_on_two_servers_is_that_of_one_process(model: str, tmp_path: Path) -> None:
    data = str(hetero.write_parts(tmp_path))
    options = {"model": model, "epochs": 25}
    (alone,) = run_ranks(_train, 1, args=(data, str(tmp_path / "alone"), options))
    # Twenty papers to train on: they are learnt by heart.
    assert alone[-1][1] > 0.9
    written = {"predictions": str(tmp_path / "classes"), "save_embeddings": str(tmp_path / "hidden")}
    cached = {"cache": "vip", "cache_alpha": 1.0}
    both = run_ranks(
        _train, 2, args=(data, str(tmp_path / "both"), options | written | cached), ranks_per_server=1
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


def test_a_resumed_run_goes_on_with_its_rows(tmp_path: Path) -> None:
    data, out = str(hetero.write_parts(tmp_path)), str(tmp_path / "run")
    whole = _train(data, str(tmp_path / "whole"), {"model": "rgcn", "epochs": 4})
    _train(data, out, {"model": "rgcn", "epochs": 2, "checkpoint_every": 1})
    assert _train(data, out, {"model": "rgcn", "epochs": 4, "resume": True}) == whole


def test_a_model_for_one_type_names_those_for_several(tmp_path: Path) -> None:
    plan = TrainConfig(data=str(hetero.write_parts(tmp_path)), out=str(tmp_path / "run"))
    with pytest.raises(dx.ConfigError, match=r"3 node and 5 edge types, and --model sage .* --model rgcn or"):
        train_dataset(plan)
