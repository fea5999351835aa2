import json
from pathlib import Path

import pytest

from dglx_dist.comm.trace import assign_tracks, check_replaceable, read_trace, remove_trace, write_trace
from dglx_dist.errors import StorageError
from tests.report.traces import span, trace_of

SPANS = [
    span("forward D", "compute", 10.0, 10.5, 7),
    span("wait for the pull", "compute", 10.1, 10.2, 7),
    span("pull", "network", 10.1, 10.4, 8),
    span("push gradient", "network", 10.3, 10.6, 7),
    span("sample", "loader", 10.25, 10.35),
]


def test_what_is_written_is_read_again_with_the_first_span_at_zero(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_trace(path, trace_of(SPANS, [span("step", "compute", 10.5, 11.0, 7)]))
    first, second = read_trace(path).ranks
    told = [
        (s.name, s.row, round(s.begin_s, 6), round(s.end_s, 6), s.batch)
        for s in (*first.spans, *second.spans)
    ]
    assert told == [
        ("forward D", "compute", 0.0, 0.5, 7),
        ("wait for the pull", "compute", 0.1, 0.2, 7),
        ("pull", "network", 0.1, 0.4, 8),
        ("sample", "loader", 0.25, 0.35, None),
        ("push gradient", "network", 0.3, 0.6, 7),
        ("step", "compute", 0.5, 1.0, 7),
    ]
    assert (second.host, second.clock_error_s) == ("host1", pytest.approx(1e-4))
    assert read_trace(path).facts == {"strategy": "push_pull", "options": {"depth": 3}}
    assert [one.name for one in tmp_path.iterdir()] == ["trace.json"]


def test_the_file_is_what_chrome_calls_the_json_object_format(tmp_path: Path) -> None:
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
    lanes = [[one.name for one in lane] for lane in assign_tracks(spans)]
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
    with pytest.raises(StorageError, match="is a folder; name a file"):
        check_replaceable(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="choose another place"):
        check_replaceable(tmp_path / "file" / "trace.json")


def test_a_trace_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    with pytest.raises(StorageError, match="cannot write the trace"):
        write_trace(tmp_path / "t", trace_of(SPANS))
    assert [one.name for one in tmp_path.iterdir()] == ["t"]


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('"traceEvents": [', '"events": [', "traceEvents"),
        ('"ts": 0.0', '"ts": -1', "microseconds"),
        ('"ts": 0.0', '"ts": "0"', "microseconds"),
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


def test_a_missing_file_tells_what_writes_one(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="--trace FILE"):
        read_trace(tmp_path / "none.json")
