from pathlib import Path

from scripts.bench import messages
from scripts.bench.messages import Failure
from scripts.bench.records import Job


def test_a_job_arrives_as_it_was_given(tmp_path: Path) -> None:
    assert messages.read_job(tmp_path, 7) is None
    messages.write_job(tmp_path, 7, Job(kind="echo", params={"a": [1, None, 0.5]}), 30.0)
    assert (tmp_path / "job-00007.json").is_file()
    assert messages.read_job(tmp_path, 7) == (Job(kind="echo", params={"a": [1, None, 0.5]}), 30.0)


def test_reports_and_failures_are_told_apart(tmp_path: Path) -> None:
    failure = Failure(rank=1, text="ValueError: no", at_ns=5, lost_a_peer=False)
    messages.write_result(tmp_path, 0, 0, {"epochs": []})
    messages.write_failure(tmp_path, 0, failure)
    assert messages.read_report(tmp_path, 0, 0) == {"epochs": []}
    assert messages.read_report(tmp_path, 0, 1) == failure
    assert messages.read_report(tmp_path, 0, 2) is None
    assert messages.read_report(tmp_path, 1, 0) is None


def test_nothing_half_written_stays(tmp_path: Path) -> None:
    messages.write_json(tmp_path / "a.json", {"b": 1})
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
