import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

import dglx_dist as dx
from dglx_dist.cli.train_config import TrainConfig
from dglx_dist.cli.train_job import CHECKPOINTS, train_dataset
from dglx_dist.errors import StorageError
from dglx_dist.records import EpochRecord
from dglx_dist.report.run_folder import append_epoch
from tests.api.graphs import as_dgl


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
    train_dataset(TrainConfig(data=dataset, out=str(out), epochs=2, checkpoint_every=1))
    assert any((out / CHECKPOINTS).iterdir())
    train_dataset(TrainConfig(data=dataset, out=str(out), epochs=1))
    assert not (out / CHECKPOINTS).exists()


def test_only_a_restart_of_the_same_launch_goes_on(
    dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = TrainConfig(data=dataset, out=str(tmp_path / "run"), epochs=2, checkpoint_every=1)
    first = tmp_path / "run" / CHECKPOINTS / "epoch-000001-step-000000000"

    def made(launch: str, restarts: int) -> int:
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", f"/tmp/x/{launch}/attempt_{restarts}/0/error.json")
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
        assert [epoch.epoch for epoch in train_dataset(plan).epochs] == [0, 1]
        return first.stat().st_mtime_ns

    before = made("job_a", 0)
    assert made("job_a", 1) == before
    # Its first attempt ended before it replaced the run of another launch.
    replaced = made("job_b", 1)
    assert replaced != before
    (aside,) = (tmp_path / "run").glob(f"{CHECKPOINTS}-before-*")
    assert (aside / first.name).stat().st_mtime_ns == before, "a restart deletes no checkpoint"
    assert made("job_b", 0) != replaced


def test_a_restart_by_torchrun_keeps_the_checkpoints_and_ends_with_the_same_weights(
    dataset: str, tmp_path: Path
) -> None:
    said, found = {}, {}
    for name, killed in (("killed", True), ("whole", False)):
        plan = {"data": dataset, "out": str(tmp_path / name), "epochs": 4, "checkpoint_every": 1}
        command = [sys.executable, "-m", "dglx_dist.cli.torchrun", "--standalone", "--nproc-per-node", "2"]
        command += ["--max-restarts", "1", "-m", __name__, json.dumps([killed, plan])]
        done = subprocess.run(
            command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr
        said[name] = done.stderr
        last = tmp_path / name / CHECKPOINTS / "epoch-000004-step-000000000"
        # The order in which tensors lie in the files may differ.
        found[name] = {
            (piece["name"], *piece["offset"]): (last / piece["file"]).read_bytes()[piece["first_byte"] :][
                : piece["num_bytes"]
            ]
            for piece in json.loads((last / "tensors.json").read_text())["pieces"]
        }
    assert said["killed"].count("goes on from the newest checkpoint") == 1
    assert "training epochs 2 to 3" in said["killed"]
    assert "goes on" not in said["whole"]
    before = json.loads((tmp_path / "killed" / "before.json").read_text())
    assert len(before) == 2
    assert before.items() <= _times_of(tmp_path / "killed").items()
    assert found["killed"] == found["whole"]
    epochs = (tmp_path / "killed" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in epochs] == [0, 1, 2, 3]


def _times_of(run: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in (run / CHECKPOINTS).iterdir()}


def _append_and_die(folder: Path, record: EpochRecord) -> None:
    append_epoch(folder, record)
    if record.epoch == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        (folder / "before.json").write_text(json.dumps(_times_of(folder)))
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_picture_that_cannot_be_written_is_an_error_of_ours_and_costs_no_figure(
    dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dglx_dist.cli.train_job.draw", full)
    with pytest.raises(StorageError, match="dglx report"):
        train_dataset(TrainConfig(data=dataset, out=str(tmp_path / "run"), epochs=1))
    assert (tmp_path / "run" / "summary.json").is_file()


if __name__ == "__main__":
    dies, of_plan = json.loads(sys.argv[1])
    with mock.patch("dglx_dist.cli.train_job.append_epoch", _append_and_die if dies else append_epoch):
        train_dataset(TrainConfig(**of_plan))
