from dataclasses import replace
from pathlib import Path

import pyarrow.dataset
import pytest
import torch

import dglx_dist as dx
from dglx_dist.cli.train_config import TrainConfig
from dglx_dist.cli.train_job import train_dataset
from tests.api.graphs import as_dgl
from tests.helpers.ranks import run_ranks


def dataset(folder: Path, parts: int) -> str:
    """Two triangles; the class is the triangle, and so is the first feature."""
    graph = as_dgl()
    graph.ndata["label"] = (graph.nodes() > 2).long()
    for place, name in enumerate(("train_mask", "val_mask", "test_mask")):
        graph.ndata[name] = graph.nodes() % 3 == place
    graph.ndata["feat"] = torch.stack([graph.ndata["label"] * 4.0 - 2.0, torch.zeros(6)], 1)
    dx.partition_graph(graph, "t", parts, folder, part_method="random", seed=4)
    return str(folder / "t")


def _train(data: str, out: str) -> float:
    """Train for an epoch, and again for thirty; return the test accuracy of the second run."""
    plan = TrainConfig(
        data=data, out=f"{out}/run", epochs=30, hidden=8, dropout=0.0, model="mlp", batch_size=6, lr=0.05,
        predictions=f"{out}/classes", save_embeddings=f"{out}/hidden", eval_every=0,
    )  # fmt: skip
    # The second replaces what the first has written.
    train_dataset(replace(plan, epochs=1))
    accuracy = train_dataset(plan).summary["test_accuracy"]
    assert isinstance(accuracy, float)
    return accuracy


def test_the_class_of_every_node_under_its_original_id(tmp_path: Path) -> None:
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        data = dataset(folder, ranks)
        assert run_ranks(_train, ranks, args=(data, str(folder))) == [1.0] * ranks
        table = pyarrow.dataset.dataset(folder / "classes").to_table().to_pydict()
        assert dict(zip(table["id"], table["prediction"], strict=True)) == {
            0: 0,
            1: 0,
            2: 0,
            3: 1,
            4: 1,
            5: 1,
        }
        hidden = pyarrow.dataset.dataset(folder / "hidden").to_table()
        rows = dict(zip(hidden["id"].to_pylist(), hidden["embedding"].to_pylist(), strict=True))
        assert {len(row) for row in rows.values()} == {8}
        # Nodes of one triangle have the same features, so the same hidden layer; the other's differs.
        assert rows[0] == rows[1] == rows[2] != rows[3] == rows[4] == rows[5]


def test_a_folder_of_something_else_is_found_before_training(tmp_path: Path) -> None:
    (tmp_path / "classes").mkdir()
    (tmp_path / "classes" / "letter.txt").write_text("dear")
    with pytest.raises(dx.StorageError, match="other contents than exported rows"):
        _train(dataset(tmp_path, 1), str(tmp_path))
    assert not (tmp_path / "run").exists()


def test_one_layer_has_no_layer_before_the_scores() -> None:
    with pytest.raises(dx.ConfigError, match="--save-embeddings out must be left out with --layers 1"):
        TrainConfig(data="d", out="o", layers=1, fanouts=(5,), save_embeddings="out")
