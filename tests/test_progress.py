"""Progress is shown where somebody can see it, and nowhere else."""

import io
import logging
import re
import time

import pytest
from rich.table import Table

from dglx_dist.cli.common import show, write
from dglx_dist.progress import VisibleFormatter, progress, say, visible

ODD = "[red]x[/red] [/] :smile: \x1b[31m \x07 \u202e \x9b \r $a$ \u00e4"
SHOWN = r"[red]x[/red] [/] :smile: \x1b[31m \x07 \u202e \x9b \r $a$ " + "\u00e4"
"""Text of a user that consoles would interpret, and what they show."""


def test_a_line_without_a_terminal_stands_and_none_of_other_ranks(
    capfd: pytest.CaptureFixture[str],
) -> None:
    for enabled in (False, True):
        with progress("writing parts", 3, enabled=enabled) as advance:
            advance(1)
            advance.say("part 0 " * 20 + "[done]")
    assert capfd.readouterr() == ("", "writing parts ...\n" + "part 0 " * 20 + "[done]\n")


def test_shows_text_unchanged(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(ODD, "n", title=ODD)
    table.add_row(ODD, "a\nb")
    write(f"{ODD}\n")
    show(table)
    with progress(ODD, 1) as advance:
        advance.say(ODD)
    say(f"{ODD}\nnext line", "red")
    printed, message = capfd.readouterr()
    assert printed.startswith(f"{SHOWN}\\n\n")
    assert printed.count(SHOWN) == 4
    assert r"a\nb" in printed
    assert message == f"{SHOWN} ...\n{SHOWN}\n{SHOWN}\nnext line\n"
    record = logging.LogRecord("a", logging.WARNING, "", 0, "%s\nnext", (ODD,), None)
    assert VisibleFormatter().format(record) == f"{SHOWN}\nnext"
    screen = io.StringIO()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    with progress(ODD, 1) as advance:
        advance.show(ODD)
    assert f"{SHOWN} | {SHOWN}" in screen.getvalue()


@pytest.mark.parametrize(
    "text", ["\u06cc\u200c\u0627", "\U0001f468\u200d\U0001f469", "gr\u00f6\u00dfe", "a b"]
)
def test_letters_of_any_script_are_no_codes(text: str) -> None:
    assert visible(text) == text


def test_a_line_stands_above_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress("writing parts", 2) as advance:
        advance.say("part 0 done")
        advance(2)
    assert "part 0 done\n" in screen.getvalue()
    assert "100 %" in screen.getvalue()


def test_a_terminal_gets_a_table_of_figures_that_is_gone_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "90")

    def figures(done: float, speed: float) -> dict[str, str]:
        return {"step": f"{done:.0f} of 2", "steps/s": f"{speed:.0f}"}

    with progress("training", 2, figures=figures) as advance:
        advance(1)
        advance.say("epoch 2: loss [0.5]")
        advance.show("workers 4")
    shown = re.sub(r"\x1b\[[0-9;?]*m", "", screen.getvalue())
    assert "epoch 2: loss [0.5]\n" in shown
    for text in ("training", "━", "│ 1 of 2 │ 0       │", "┃ step   ┃ steps/s ┃", "50 %", "workers 4"):
        assert text in shown
    # Bar and table, of six lines, are erased.
    assert shown.endswith("\x1b[1A\x1b[2K" * 6)


def test_without_a_terminal_figures_are_lines(capfd: pytest.CaptureFixture[str]) -> None:
    with progress("training", 2, figures=lambda done, speed: {}) as advance:
        advance.say("epoch 0: loss 0.5")
    assert capfd.readouterr() == ("", "training ...\nepoch 0: loss 0.5\n")


def test_a_log_gets_a_line_with_the_time_left_every_half_minute(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with progress("Reading", 200) as advance:
        for _ in range(5):
            now[0] += 20
            advance(30)
    assert capsys.readouterr().err.splitlines() == [
        "Reading ...",
        "Reading ... 30 %, 0:01:33 left",
        "Reading ... 60 %, 0:00:53 left",
    ]
