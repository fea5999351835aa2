from pathlib import Path

import pytest

from dglx_dist.cli.common import draw_or_warn, show
from dglx_dist.cli.report import read_batches, report
from dglx_dist.comm.trace import write_trace
from dglx_dist.errors import ConfigError, StorageError
from dglx_dist.report.tables import summary_table
from tests.report.traces import span, trace_of


def test_brackets_of_a_folder_or_a_column_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    draw_or_warn(lambda: None, Path("runs/[/red]/picture.png"))
    show(summary_table({"nodes": "3: [bold] float32[5]"}))
    shown = capsys.readouterr().out
    assert "runs/[/red]/picture.png" in shown
    assert "[bold] float32[5]" in shown


def test_a_trace_is_drawn_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    write_trace(path, trace_of([span("forward", "compute", 0, 2, 0), span("pull", "network", 1, 3, 0)]))
    report(path)
    shown = capsys.readouterr().out
    assert "push_pull depth=3: 50.0 % of the network's time beside compute" in shown
    assert str(tmp_path / "trace.png") in shown.replace("\n", "")
    assert (tmp_path / "trace.png").stat().st_size > 1000


def test_batches_are_two_numbers_and_of_a_trace(tmp_path: Path) -> None:
    assert read_batches("3:12") == (3, 12)
    for wrong in ("3", "4:3", "a:b", "-1:2", ""):
        with pytest.raises(ConfigError, match="must be two numbers"):
            read_batches(wrong)
    with pytest.raises(ConfigError, match="--batches 1:2 is for a trace"):
        report(tmp_path, "1:2")


def test_another_file_is_no_trace(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(StorageError, match=r"other\.json.*otherData"):
        report(tmp_path / "other.json")
