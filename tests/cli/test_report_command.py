from pathlib import Path

import pytest

from dglx_dist.cli.report_command import draw_or_warn, show
from dglx_dist.report.table import summary_table


def test_brackets_of_a_folder_or_a_column_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    draw_or_warn(lambda: None, Path("runs/[/red]/picture.png"))
    show(summary_table({"nodes": "3: [bold] float32[5]"}))
    shown = capsys.readouterr().out
    assert "runs/[/red]/picture.png" in shown
    assert "[bold] float32[5]" in shown
