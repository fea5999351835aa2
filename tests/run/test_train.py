from pathlib import Path

import pytest

import dglx_dist as dx
from dglx_dist.errors import StorageError
from dglx_dist.run.plan import TrainPlan
from dglx_dist.run.train import CHECKPOINTS, train_dataset
from tests.run.graphs import as_dgl


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


def test_a_run_that_replaces_another_leaves_no_checkpoint_of_it(dataset: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train_dataset(TrainPlan(data=dataset, out=str(out), epochs=2, checkpoint_every=1))
    assert any((out / CHECKPOINTS).iterdir())
    train_dataset(TrainPlan(data=dataset, out=str(out), epochs=1))
    assert not (out / CHECKPOINTS).exists()


def test_a_picture_that_cannot_be_written_is_an_error_of_ours_and_costs_no_figure(
    dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dglx_dist.run.train.draw", full)
    with pytest.raises(StorageError, match="dglx report"):
        train_dataset(TrainPlan(data=dataset, out=str(tmp_path / "run"), epochs=1))
    assert (tmp_path / "run" / "summary.json").is_file()
