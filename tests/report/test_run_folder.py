"""A run's folder read back."""

import json
import math
from pathlib import Path

import pytest

from dglx_dist.errors import StorageError
from dglx_dist.report.run_folder import append_epoch, read_epochs, read_run, start_run, write_run
from tests.report.records import epoch

CONFIG = {"model": "sage", "fanout": (10, 5), "data": Path("data/x")}
SUMMARY = {"test_accuracy": 0.75, "phase_seconds": {"wait": 0.1}}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    epochs = [epoch(0, seconds=4.0), epoch(1, val=None)]
    write_run(tmp_path / "run", CONFIG, epochs, SUMMARY)
    run = read_run(tmp_path / "run")
    assert run.epochs == tuple(epochs)
    assert run.summary == SUMMARY
    assert run.config == {"model": "sage", "fanout": [10, 5], "data": "data/x"}
    metrics = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert json.loads(metrics.splitlines()[0])["samples_per_second"] == 25.0
    # Of a run that did not finish too, and its file has the same bytes.
    folder = start_run(tmp_path / "steps", CONFIG)
    for record in epochs:
        append_epoch(folder, record)
    assert (read_run(folder).epochs, read_run(folder).summary) == (tuple(epochs), None)
    assert (folder / "metrics.jsonl").read_bytes() == metrics


def test_a_loss_that_is_no_number_survives_as_valid_json(tmp_path: Path) -> None:
    write_run(tmp_path, CONFIG, [epoch(0, loss=math.nan)], SUMMARY)
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["loss"] is None
    assert math.isnan(read_run(tmp_path).epochs[0].loss)


def test_starting_again_forgets_the_earlier_summary_and_its_epochs(tmp_path: Path) -> None:
    write_run(tmp_path, CONFIG, [epoch(0)], SUMMARY)
    start_run(tmp_path, CONFIG)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json"]
    with pytest.raises(StorageError, match=r"metrics\.jsonl.*before its first epoch"):
        read_run(tmp_path)


@pytest.mark.parametrize(("name", "where"), [("summary.json", "summary.json"), ("metrics.jsonl", "line 2")])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, where: str) -> None:
    write_run(tmp_path, CONFIG, [epoch(0)], SUMMARY)
    with (tmp_path / name).open("a") as file:
        file.write("{\n")
    with pytest.raises(StorageError, match=where):
        read_run(tmp_path)


def test_a_folder_that_is_missing_or_a_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="nowhere"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(StorageError, match="nowhere"):
        append_epoch(tmp_path / "nowhere", epoch(0))
    (tmp_path / "run").write_text("")
    with pytest.raises(StorageError, match="--out"):
        start_run(tmp_path / "run", CONFIG)


def test_an_epoch_done_again_after_a_resume_counts_once(tmp_path: Path) -> None:
    # Killed after epoch 3, resumed from the checkpoint after epoch 1, killed again after epoch 2.
    for record in (epoch(0), epoch(1), epoch(2), epoch(3), epoch(2, loss=0.25)):
        append_epoch(tmp_path, record)
    assert read_epochs(tmp_path) == (epoch(0), epoch(1), epoch(2, loss=0.25))


def test_a_resumed_run_that_ends_before_its_first_epoch_has_no_metrics(tmp_path: Path) -> None:
    start_run(tmp_path, CONFIG, read_epochs(tmp_path))
    with pytest.raises(StorageError, match=r"has no metrics\.jsonl"):
        read_run(tmp_path)


def test_a_line_that_a_killed_run_left_half_written_is_dropped(tmp_path: Path) -> None:
    append_epoch(tmp_path, epoch(0))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 1, "lo')
    assert read_epochs(tmp_path) == (epoch(0),)
    append_epoch(start_run(tmp_path, CONFIG, read_epochs(tmp_path)), epoch(1))
    assert read_epochs(tmp_path) == (epoch(0), epoch(1))


def test_no_room_for_the_end_of_a_run_costs_no_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    append_epoch(start_run(tmp_path, CONFIG), epoch(0))
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(StorageError, match="cannot write the run"):
        write_run(tmp_path, CONFIG, [epoch(0)], SUMMARY)
    assert read_epochs(tmp_path) == (epoch(0),)
