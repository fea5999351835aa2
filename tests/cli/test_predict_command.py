"""``dglx predict``: its answers are those that ``dglx train --predictions`` has written."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from dglx_dist.cli.app import app
from dglx_dist.cli.train_job import train_dataset
from dglx_dist.errors import DglxError
from dglx_dist.training.config import TrainConfig

NUM_NODES = 60
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "classes": ("classes", {"model": "sage"}),
    "jumping knowledge": ("classes", {"model": "gcn", "jk": "cat", "layers": 3}),
    "attention": ("classes", {"model": "gat", "heads": 2}),
    "labels": ("labels", {}),
    "numbers": ("numbers", {"metric": ("mae",)}),
    "types": ("types", {"model": "rgcn"}),
    "edge weights": ("classes", {"model": "gcn", "edge_weight": "strength"}),
}
"""Name of a run to its data, and its options."""


def write_tables(folder: Path) -> Path:
    """Tables with ids that are texts, like 07, and blank labels."""
    rng = np.random.default_rng(0)
    names = [f"{node:02}" for node in range(NUM_NODES)]
    splits = ["train", "val", "test"]
    feat = rng.normal(size=(NUM_NODES, 4))
    ends = [rng.choice(names, 240), rng.choice(names, 240)]
    edges = ["src,dst,strength"] + [
        f"{source},{target},{weight:.3f}"
        for source, target, weight in zip(*ends, rng.random(240) + 0.5, strict=True)
    ]
    for kind in ("classes", "labels", "numbers"):
        labels = [
            {
                "classes": "" if node % 7 == 0 else ["cat", "dog", "emu"][node % 3],
                "labels": f"{int(feat[node, 0] > 0)},{int(feat[node, 1] > 0)}",
                "numbers": f"{100 + 10 * feat[node, 0]:.4f}",
            }[kind]
            for node in range(NUM_NODES)
        ]
        columns = "label_0,label_1" if kind == "labels" else "label"
        nodes = [f"id,{columns},split,feat_0,feat_1,feat_2,feat_3"]
        for node, name in enumerate(names):
            split = "" if labels[node] == "" else splits[node % 3]
            nodes.append(",".join([name, labels[node], split, *(f"{value:.5f}" for value in feat[node])]))
        (folder / kind).mkdir(parents=True)
        (folder / kind / "nodes.csv").write_text("\n".join(nodes) + "\n")
        (folder / kind / "edges.csv").write_text("\n".join(edges) + "\n")

    typed = folder / "types"
    for name in ("nodes", "edges"):
        (typed / name).mkdir(parents=True)
    shutil.copy(folder / "classes" / "nodes.csv", typed / "nodes" / "user.csv")
    items = ["id,feat_0"] + [f"i{node},{node / 10}" for node in range(20)]
    (typed / "nodes" / "item.csv").write_text("\n".join(items) + "\n")
    buys = ["src,dst"] + [f"{names[node]},i{node % 20}" for node in range(NUM_NODES)]
    (typed / "edges" / "user__buys__item.csv").write_text("\n".join(buys) + "\n")
    sold = ["src,dst"] + [f"i{node % 20},{names[(node + 7) % NUM_NODES]}" for node in range(NUM_NODES)]
    (typed / "edges" / "item__sold_to__user.csv").write_text("\n".join(sold) + "\n")
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tables(tmp_path_factory.mktemp("predict"))
    for kind in ("classes", "labels", "numbers", "types"):
        arguments = ["partition", str(folder / kind), "--parts", "2", "--out", str(folder / "data" / kind)]
        partitioned = CliRunner().invoke(app, arguments)
        assert partitioned.exit_code == 0, (partitioned.output, partitioned.exception)
    for name, (kind, options) in RUNS.items():
        run = folder / "runs" / name
        train_dataset(
            TrainConfig(
                data=str(folder / "data" / kind),
                out=str(run),
                epochs=3,
                hidden=8,
                patience=5,
                predictions=str(folder / "predictions" / name),
                scores=True,
                **options,
            )
        )
    return folder


def predict(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["predict", *map(str, arguments)], env={"COLUMNS": "200"})


def read_refusal(*arguments: object) -> str:
    shown = predict(*arguments)
    assert isinstance(shown.exception, DglxError), (shown.output, shown.exception)
    return str(shown.exception)


def to_rows(table: pa.Table) -> dict[Any, dict[str, Any]]:
    return {row["id"]: row for row in table.to_pylist()}


@pytest.mark.parametrize("name", RUNS)
def test_answers_equal_the_predictions_of_the_run(name: str, trained: Path, tmp_path: Path) -> None:
    expected = to_rows(pyarrow.dataset.dataset(trained / "predictions" / name).to_table())
    assert len(expected) == NUM_NODES
    asked = ["07", "59", "14", "00"]
    (tmp_path / "ids.csv").write_text("name,id\n" + "".join(f"x,{node}\n" for node in asked))
    run = trained / "runs" / name
    for nodes, ids in (([], expected), (["--nodes", tmp_path / "ids.csv"], asked)):
        out = tmp_path / f"{len(nodes)}.parquet"
        shown = predict(run, "--out", out, "--scores", *nodes)
        assert shown.exit_code == 0, (shown.output, shown.exception)
        answers = to_rows(pq.read_table(out))
        assert len(answers) == len(ids)
        for node in ids:
            assert answers[node].keys() == expected[node].keys()
            assert answers[node].get("class") == expected[node].get("class")
            for column in ("prediction", "scores"):
                assert answers[node][column] == pytest.approx(expected[node][column], rel=1e-5, abs=1e-6)


def test_files_of_ids_and_answers(trained: Path, tmp_path: Path) -> None:
    run = trained / "runs" / "classes"
    (tmp_path / "ids.txt").write_text("07\n\n 59\n")
    pq.write_table(pa.table({"id": ["07", "59"]}), tmp_path / "ids.parquet")
    tables = []
    for name in ("ids.txt", "ids.parquet"):
        out = tmp_path / "deep" / f"{name}.csv"
        shown = predict(run, "--nodes", tmp_path / name, "--out", out)
        assert shown.exit_code == 0, (shown.output, shown.exception)
        assert "2 nodes written to" in shown.output
        tables.append(out.read_text())
    assert tables[0] == tables[1]
    lines = tables[0].splitlines()
    assert lines[0] == '"id","prediction","class"'
    assert lines[1].startswith('"07",')


def test_final_weights_and_a_moved_dataset(trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained / "runs" / "classes", run)
    config = json.loads((run / "config.json").read_text())
    data = config["data"]
    (run / "config.json").write_text(json.dumps(config | {"data": "gone"}))
    assert "gone" in read_refusal(run, "--out", tmp_path / "a.csv")
    (run / "model.safetensors").unlink()
    assert "model.safetensors" in read_refusal(run, "--out", tmp_path / "a.csv", "--data", data)
    shown = predict(run, "--out", tmp_path / "a.csv", "--data", data, "--weights", "final")
    assert shown.exit_code == 0, (shown.output, shown.exception)


def test_mistakes_are_refused(trained: Path, tmp_path: Path) -> None:
    run, out = trained / "runs" / "classes", tmp_path / "a.csv"
    ids = tmp_path / "ids.csv"
    for text, message in [
        ("id\n07\n99\n", "99"),
        ("node\n07\n", "no column 'id' (columns: node)"),
        ("", "cannot be read"),
    ]:
        ids.write_text(text)
        assert message in read_refusal(run, "--nodes", ids, "--out", out)
    assert not out.exists()
    assert "cannot be read" in read_refusal(run, "--nodes", tmp_path / "none.csv", "--out", out)
    other = trained / "data" / "types"
    assert "trained on a dataset with" in read_refusal(run, "--out", out, "--data", other)
    assert "has no config.json" in read_refusal(trained, "--out", out)
    assert "must end with .parquet or .csv" in read_refusal(run, "--out", tmp_path / "a.json")
    assert "Use .parquet" in read_refusal(run, "--out", out, "--scores")
    out.write_text("mine")
    assert "--overwrite" in read_refusal(run, "--out", out)
    assert out.read_text() == "mine"
    assert predict(run, "--out", out, "--overwrite").exit_code == 0
    assert out.read_text() != "mine"


IDS: list[tuple[dict[str, list[Any]], str]] = [
    ({"id": ["07", None]}, "1 are missing"),
    ({"id": []}, "0 ids"),
    ({"id": [0.5]}, "type double"),
    ({"id": [[1]]}, "type list"),
    ({"name": ["07"]}, "no column 'id'"),
]


@pytest.mark.parametrize(("columns", "message"), IDS)
def test_ids_that_are_none_are_refused(
    columns: dict[str, list[Any]], message: str, trained: Path, tmp_path: Path
) -> None:
    ids = tmp_path / "ids.parquet"
    pq.write_table(pa.table(columns), ids)
    run = trained / "runs" / "classes"
    assert message in read_refusal(run, "--nodes", ids, "--out", tmp_path / "a.csv")


def test_changed_data_of_the_same_size_is_refused(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "classes", tmp_path / "classes")
    nodes = (tmp_path / "classes" / "nodes.csv").read_text().replace("emu", "ape")
    (tmp_path / "classes" / "nodes.csv").write_text(nodes)
    data = tmp_path / "data"
    arguments = ["partition", str(tmp_path / "classes"), "--parts", "2", "--out", str(data)]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    run = trained / "runs" / "classes"
    assert "dataset_checksum" in read_refusal(run, "--out", tmp_path / "a.csv", "--data", data)


def test_lists_need_parquet(trained: Path, tmp_path: Path) -> None:
    refusal = read_refusal(trained / "runs" / "labels", "--out", tmp_path / "a.csv")
    assert "predictions of 2 values are lists" in refusal


def test_damaged_runs_are_refused(trained: Path, tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "a.csv"
    shutil.copytree(trained / "runs" / "classes", run)
    weights = (run / "model.safetensors").read_bytes()
    for content in (weights[:100], b"junk"):
        (run / "model.safetensors").write_bytes(content)
        assert "are damaged" in read_refusal(run, "--out", out)
    shutil.copy(trained / "runs" / "jumping knowledge" / "model.safetensors", run / "model.safetensors")
    assert "another model" in read_refusal(run, "--out", out)

    config = json.loads((run / "config.json").read_text())
    del config["task"]
    (run / "config.json").write_text(json.dumps(config))
    assert "lacks task" in read_refusal(run, "--out", out)

    (tmp_path / "spread").mkdir()
    (tmp_path / "spread" / "summary.json").write_text("{}")
    assert "several seeds" in read_refusal(tmp_path / "spread", "--out", out)
    (tmp_path / "file").write_text("")
    read_refusal(trained / "runs" / "classes", "--out", tmp_path / "file" / "a.csv")


def test_the_device_of_the_training_may_be_missing(trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained / "runs" / "classes", run)
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"device": "cuda:7"}))
    assert predict(run, "--out", tmp_path / "a.csv", "--device", "cpu").exit_code == 0


def test_runs_without_a_model_of_nodes_are_refused(trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained / "runs" / "classes", run)
    config = json.loads((run / "config.json").read_text())
    for changed, message in [
        ({"task": "link"}, "predicts links"),
        ({"embeddings": 8}, "only in checkpoints"),
    ]:
        (run / "config.json").write_text(json.dumps(config | changed))
        assert message in read_refusal(run, "--out", tmp_path / "a.csv")
