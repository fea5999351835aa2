"""Progress is shown where somebody can see it, and nowhere else."""

from __future__ import annotations

import pytest

from dglx_dist.progress import progress


def test_without_a_terminal_one_line_says_what_goes_on(capfd: pytest.CaptureFixture[str]) -> None:
    with progress("writing parts", 3) as advance:
        advance(2)
    shown = capfd.readouterr()
    assert shown.err.strip() == "writing parts ..."
    assert shown.out == ""


def test_other_ranks_are_silent(capfd: pytest.CaptureFixture[str]) -> None:
    with progress("writing parts", 0, enabled=False) as advance:
        advance(1)
    assert capfd.readouterr() == ("", "")
