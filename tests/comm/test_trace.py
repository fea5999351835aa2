"""Traces: events, their order over ranks, and the files that a session leaves under DGLX_TRACE."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from dglx_dist.comm.collectives import sum_over_ranks
from dglx_dist.comm.ledger import Ledger
from dglx_dist.comm.session import start_session
from dglx_dist.comm.topology import Topology
from dglx_dist.comm.trace import (
    Timeline,
    TraceWriter,
    assign_tracks,
    check_replaceable,
    read_trace,
    remove_trace,
    write_trace,
)
from dglx_dist.errors import ConfigError, StorageError
from dglx_dist.records import EpochRecord
from tests.helpers.ranks import run_ranks, start_ranks
from tests.report.traces import span, trace_of


def _read(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(path.read_text())
    return value


def _epoch(loss: float) -> EpochRecord:
    return EpochRecord(
        epoch=0, loss=loss, train_accuracy=0.5, val_accuracy=None, seconds=2.0, num_samples=4, sample_s=0.1,
        fetch_s=0.2, wait_s=0.3, compute_s=0.4, exchange_s=0.5, bytes_inside=6, bytes_outside=7,
    )  # fmt: skip


def test_a_loss_that_is_no_number_is_none_in_the_file(tmp_path: Path) -> None:
    writer, topology = TraceWriter(tmp_path, 1), Topology(1, 2, (0, 1))
    assert [writer.new_loader(), writer.new_loader()] == [0, 1]
    writer.note_epoch(_epoch(0.75))
    writer.note_epoch(_epoch(float("nan")))
    writer.write("job", topology, Ledger(topology), failed=False)
    assert [epoch["loss"] for epoch in _read(tmp_path / "rank-1.json")["epochs"]] == [0.75, None]
    assert [path.name for path in tmp_path.iterdir()] == ["rank-1.json"]


def test_sessions_of_one_process_have_a_file_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DGLX_TRACE", str(tmp_path / "new"))
    for number in range(3):
        with start_session() as session:
            assert session.trace is not None
            session.trace.note_epoch(_epoch(number))
    names = ["rank-0.json", "rank-0.1.json", "rank-0.2.json"]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted(names)
    results = [_read(tmp_path / "new" / name) for name in names]
    assert [result["epochs"][0]["loss"] for result in results] == [0, 1, 2]
    assert len({result["job"] for result in results}) == 3


def test_two_writers_at_once_do_not_meet(tmp_path: Path) -> None:
    topology = Topology(0, 1, (0,))
    first, second = TraceWriter(tmp_path, 0), TraceWriter(tmp_path, 0)
    second.write("second", topology, Ledger(topology), failed=False)
    first.write("first", topology, Ledger(topology), failed=False)
    assert [_read(tmp_path / name)["job"] for name in ("rank-0.json", "rank-0.1.json")] == ["first", "second"]


def test_a_session_that_fails_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DGLX_TRACE", str(tmp_path))
    with pytest.raises(KeyError), start_session():
        raise KeyError("x")
    assert _read(tmp_path / "rank-0.json")["failed"] is True


def test_folder_that_is_a_file_is_an_error_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DGLX_TRACE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"DGLX_TRACE='.*file'.*every rank can write"):
        start_session()
    monkeypatch.setenv("DGLX_TRACE", "")
    with start_session() as session:
        assert session.trace is None


def test_a_failed_write_at_the_end_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = TraceWriter(tmp_path / "gone", 0)
    (tmp_path / "gone" / "rank-0.json.part").unlink()
    (tmp_path / "gone").rmdir()
    topology = Topology(0, 1, (0,))
    writer.write("job", topology, Ledger(topology), failed=False)
    assert "could not be written" in caplog.text


def _sum() -> None:
    with start_session(timeout_s=20) as session:
        sum_over_ranks(torch.ones(10), session, phase="gradients")


def test_each_rank_writes_its_own_counts(tmp_path: Path) -> None:
    run_ranks(_sum, 3, ranks_per_server=2, environment={"DGLX_TRACE": str(tmp_path)})
    results = [_read(tmp_path / f"rank-{rank}.json") for rank in range(3)]
    assert [result["server"] for result in results] == [0, 0, 1]
    assert len({result["job"] for result in results}) == 1
    # 40 bytes over 3 ranks: 2 x 2/3 of them from each, the first with what is left over.
    sent = [[(row["destination"], row["num_bytes"]) for row in result["ledger"]] for result in results]
    assert sent == [[(1, 54)], [(2, 53)], [(0, 53)]]


def _sum_where_one_cannot_write(folder: str) -> None:
    if os.environ["RANK"] == "1":
        os.environ["DGLX_TRACE"] = f"{folder}/file"
    _sum()


def test_all_ranks_hear_that_one_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    variables = {"DGLX_TRACE": str(tmp_path)}
    for result in start_ranks(_sum_where_one_cannot_write, 2, args=(str(tmp_path),), environment=variables):
        assert result.error.startswith("ConfigError: DGLX_TRACE=")
        assert "rank 1 cannot write" in result.error


SPANS = [
    span("forward D", "compute", 10.0, 10.5, 7),
    span("wait for the pull", "compute", 10.1, 10.2, 7),
    span("pull", "network", 10.1, 10.4, 8),
    span("push gradient", "network", 10.3, 10.6, 7),
    span("sample", "loader", 10.25, 10.35),
]


def test_reading_returns_written_spans_from_time_zero(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_trace(path, trace_of(SPANS, [span("step", "compute", 10.5, 11.0, 7)]))
    first, second = read_trace(path).ranks
    message = [
        (s.name, s.row, round(s.begin_s, 6), round(s.end_s, 6), s.batch)
        for s in (*first.spans, *second.spans)
    ]
    assert message == [
        ("forward D", "compute", 0.0, 0.5, 7),
        ("wait for the pull", "compute", 0.1, 0.2, 7),
        ("pull", "network", 0.1, 0.4, 8),
        ("sample", "loader", 0.25, 0.35, None),
        ("push gradient", "network", 0.3, 0.6, 7),
        ("step", "compute", 0.5, 1.0, 7),
    ]
    assert (second.host, second.clock_error_s) == ("host1", pytest.approx(1e-4))
    assert read_trace(path).facts == {"strategy": "push_pull", "options": {"depth": 3}}
    assert [item.name for item in tmp_path.iterdir()] == ["trace.json"]


def test_file_has_the_json_object_format_of_chrome(tmp_path: Path) -> None:
    write_trace(tmp_path / "t", trace_of(SPANS))
    events = json.loads((tmp_path / "t").read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["rank 0 on host0"]
    assert list(names.values()) == ["compute", "network", "network 2", "loader"]
    on_row = {e["name"]: names[e["tid"]] for e in events if e["ph"] == "X"}
    # The two transfers cross, so no viewer could nest them.
    assert (on_row["pull"], on_row["push gradient"]) == ("network", "network 2")
    assert on_row["wait for the pull"] == "compute"
    (pull,) = (e for e in events if e["name"] == "pull")
    assert (pull["ts"], pull["dur"], pull["pid"], pull["args"]) == (1e5, 3e5, 0, {"batch": 8})


def test_spans_on_one_row_are_nested_or_apart() -> None:
    spans = [
        span(str(n), "network", *ends) for n, ends in enumerate([(0, 4), (1, 2), (2, 4), (3, 5), (4, 6)])
    ]
    lanes = [[item.name for item in lane] for lane in assign_tracks(spans)]
    assert lanes == [["0", "1", "2", "4"], ["3"]]


def test_only_a_trace_is_replaced_or_removed(tmp_path: Path) -> None:
    path = tmp_path / "new" / "trace.json"
    check_replaceable(path)
    assert list(path.parent.iterdir()) == []
    path.write_text('{"mine": 1}')
    with pytest.raises(StorageError, match="something other than a trace"):
        check_replaceable(path)
    remove_trace(path)
    assert path.read_text() == '{"mine": 1}'
    write_trace(path, trace_of(SPANS))
    check_replaceable(path)
    remove_trace(path)
    remove_trace(path)
    assert not path.exists()
    with pytest.raises(StorageError, match=r"is a folder\. Use a file"):
        check_replaceable(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="Choose another place"):
        check_replaceable(tmp_path / "file" / "trace.json")
    with pytest.raises(StorageError, match="cannot write the trace"):
        write_trace(tmp_path / "new", trace_of(SPANS))
    assert sorted(item.name for item in tmp_path.iterdir()) == ["file", "new"]


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('"traceEvents": [', '"events": [', "traceEvents"),
        ('"ts": 0.0', '"ts": -1', "a number from 0"),
        ('"ts": 0.0', '"ts": "0"', "a number from 0"),
        ('"batch": 8', '"batch": 0.5', "batch"),
        ("dglx_dist trace 1", "dglx_dist trace 9", "format"),
        ('{"otherData"', '"otherData"', "damaged"),
    ],
)
def test_damage_is_named(tmp_path: Path, before: str, after: str, message: str) -> None:
    path = tmp_path / "t.json"
    write_trace(path, trace_of(SPANS))
    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, after))
    with pytest.raises(StorageError, match=message) as raised:
        read_trace(path)
    assert "t.json" in str(raised.value)
    with pytest.raises(StorageError, match="--trace FILE"):
        read_trace(tmp_path / "none.json")


def test_a_span_lies_around_those_inside_it_and_is_kept_when_its_block_raises() -> None:
    timeline = Timeline()
    timeline.add("pull", "network", 0.0, 1.0)
    with timeline.span("forward", "compute", 0):
        assert (timeline.spans, timeline.dropped) == ([], 0)
    timeline.start()

    def fail() -> None:
        with timeline.span("outer", "compute", 3):
            with timeline.span("inner", "compute"):
                pass
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fail()
    inner, outer = timeline.spans
    assert (inner.name, inner.batch, outer.name, outer.batch) == ("inner", None, "outer", 3)
    assert outer.begin_s <= inner.begin_s <= inner.end_s <= outer.end_s


def test_threads_fill_it_up_to_its_bound_and_the_rest_is_counted() -> None:
    timeline = Timeline(max_spans=1000)
    timeline.start()

    def note(thread: int) -> None:
        for number in range(300):
            timeline.add(str(thread), "loader", number, number + 1)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(note, range(4)))
    assert len(timeline.spans) == 1000
    assert timeline.dropped == 200
    timeline.start()
    assert (timeline.spans, timeline.dropped) == ([], 0)
