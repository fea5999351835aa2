"""What a session leaves when DGLX_TRACE names a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dglx_dist.comm.collectives import sum_over_ranks
from dglx_dist.comm.ledger import Ledger
from dglx_dist.comm.session import start_session
from dglx_dist.comm.topology import Topology, read_settings
from dglx_dist.comm.trace import Pass, TraceWriter
from dglx_dist.errors import ConfigError
from dglx_dist.records import EpochRecord
from tests.helpers.ranks import run_ranks, start_ranks

FIELDS = {"job", "rank", "server", "world_size", "server_of_rank", "failed", "ledger", "passes", "epochs"}


def _read(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(path.read_text())
    return value


def _epoch(loss: float) -> EpochRecord:
    return EpochRecord(
        epoch=0, loss=loss, train_accuracy=0.5, val_accuracy=None, seconds=2.0, num_samples=4, sample_s=0.1,
        fetch_s=0.2, wait_s=0.3, compute_s=0.4, exchange_s=0.5, bytes_inside=6, bytes_outside=7,
    )  # fmt: skip


def test_the_environment_names_the_folder() -> None:
    assert read_settings({}).trace is None
    assert read_settings({"DGLX_TRACE": ""}).trace is None
    assert read_settings({"DGLX_TRACE": "a/b"}).trace == Path("a/b")


def test_without_it_a_session_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DGLX_TRACE", raising=False)
    with start_session() as session:
        assert session.trace is None


def test_the_file_holds_what_was_noted(tmp_path: Path) -> None:
    topology = Topology(1, 2, (0, 1))
    ledger = Ledger(topology)
    ledger.add("features", 1, 0, 1, 40)
    writer = TraceWriter(tmp_path, 1)
    assert [writer.new_loader(), writer.new_loader()] == [0, 1]
    writer.note_pass(Pass(loader=1, steps=3, seconds=1.5, wait_s=0.25))
    writer.note_epoch(_epoch(0.75))
    writer.note_epoch(_epoch(float("nan")))
    writer.write("job", topology, ledger, failed=False)
    found = _read(tmp_path / "rank-1.json")
    assert set(found) == FIELDS
    assert (found["rank"], found["server"], found["world_size"], found["failed"]) == (1, 1, 2, False)
    assert found["server_of_rank"] == [0, 1]
    assert found["ledger"] == [
        {"phase": "features", "layer": 1, "source": 0, "destination": 1, "inside": False, "num_bytes": 40}
    ]
    assert found["passes"] == [{"loader": 1, "steps": 3, "seconds": 1.5, "wait_s": 0.25}]
    assert [epoch["loss"] for epoch in found["epochs"]] == [0.75, None]
    assert [path.name for path in tmp_path.iterdir()] == ["rank-1.json"]


def test_sessions_of_one_process_have_a_file_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DGLX_TRACE", str(tmp_path / "new"))
    for number in range(3):
        with start_session() as session:
            assert session.trace is not None
            session.trace.note_epoch(_epoch(number))
    names = ["rank-0.json", "rank-0.1.json", "rank-0.2.json"]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted(names)
    found = [_read(tmp_path / "new" / name) for name in names]
    assert [one["epochs"][0]["loss"] for one in found] == [0, 1, 2]
    assert len({one["job"] for one in found}) == 3


def test_two_writers_at_once_do_not_meet(tmp_path: Path) -> None:
    topology = Topology(0, 1, (0,))
    first, second = TraceWriter(tmp_path, 0), TraceWriter(tmp_path, 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0.1.json.part", "rank-0.json.part"]
    second.write("second", topology, Ledger(topology), failed=False)
    first.write("first", topology, Ledger(topology), failed=False)
    assert _read(tmp_path / "rank-0.json")["job"] == "first"
    assert _read(tmp_path / "rank-0.1.json")["job"] == "second"


def test_a_session_that_fails_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DGLX_TRACE", str(tmp_path))
    with pytest.raises(KeyError), start_session():
        raise KeyError("x")
    assert _read(tmp_path / "rank-0.json")["failed"] is True


def test_a_folder_that_is_a_file_is_told_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DGLX_TRACE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"DGLX_TRACE='.*file'.*every rank can write"):
        start_session()
    monkeypatch.delenv("DGLX_TRACE")
    start_session().close()


def test_a_write_that_fails_at_the_end_is_only_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = TraceWriter(tmp_path / "gone", 0)
    (tmp_path / "gone" / "rank-0.json.part").unlink()
    (tmp_path / "gone").rmdir()
    topology = Topology(0, 1, (0,))
    writer.write("job", topology, Ledger(topology), failed=False)
    assert "could not be written" in caplog.text


def _sum() -> None:
    with start_session(timeout_s=20) as session:
        sum_over_ranks(torch.ones(10), session, phase="gradients")


def test_ranks_write_what_each_counted(tmp_path: Path) -> None:
    run_ranks(_sum, 3, ranks_per_server=2, environment={"DGLX_TRACE": str(tmp_path)})
    found = [_read(tmp_path / f"rank-{rank}.json") for rank in range(3)]
    assert [one["server"] for one in found] == [0, 0, 1]
    assert len({one["job"] for one in found}) == 1
    # 40 bytes over 3 ranks: 2 x 2/3 of them from each, the first with what is left over.
    sent = [[(row["destination"], row["num_bytes"]) for row in one["ledger"]] for one in found]
    assert sent == [[(1, 54)], [(2, 53)], [(0, 53)]]


def _sum_where_one_cannot_write(folder: str) -> None:
    import os

    if os.environ["RANK"] == "1":
        os.environ["DGLX_TRACE"] = f"{folder}/file"
    _sum()


def test_all_ranks_hear_that_one_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    outcomes = start_ranks(
        _sum_where_one_cannot_write, 2, args=(str(tmp_path),), environment={"DGLX_TRACE": str(tmp_path)}
    )
    assert all(one.error.startswith("ConfigError: DGLX_TRACE=") for one in outcomes)
    assert all("rank 1 cannot write" in one.error for one in outcomes)
