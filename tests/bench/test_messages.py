from pathlib import Path

from scripts.bench import worker
from scripts.bench.records import Job
from scripts.bench.worker import Failure


def test_a_job_arrives_as_it_was_given(tmp_path: Path) -> None:
    assert worker.read_job(tmp_path, 7) is None
    worker.write_job(tmp_path, 7, Job(kind="echo", params={"a": [1, None, 0.5]}), 30.0)
    assert (tmp_path / "job-00007.json").is_file()
    assert worker.read_job(tmp_path, 7) == (Job(kind="echo", params={"a": [1, None, 0.5]}), 30.0)


def test_reports_and_failures_are_told_apart(tmp_path: Path) -> None:
    failure = Failure(rank=1, text="ValueError: no", at_ns=5, lost_a_peer=False)
    worker.write_result(tmp_path, 0, 0, {"epochs": []})
    worker.write_failure(tmp_path, 0, failure)
    assert worker.read_report(tmp_path, 0, 0) == {"epochs": []}
    assert worker.read_report(tmp_path, 0, 1) == failure
    assert worker.read_report(tmp_path, 0, 2) is None
    assert worker.read_report(tmp_path, 1, 0) is None


def test_nothing_half_written_stays(tmp_path: Path) -> None:
    worker.write_json(tmp_path / "a.json", {"b": 1})
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
