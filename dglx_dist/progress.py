"""Progress display for long operations: a bar on terminals, otherwise a line now and then."""

import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias, final

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

Figures: TypeAlias = Callable[[float, float], Mapping[str, str]]
"""Maps (finished units, units per second) to table cells. Called from another thread."""
_CODES = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


def visible(text: str) -> str:
    """Return ``text`` with control codes, line ends and direction marks escaped, like ``\\x1b``."""
    return _CODES.sub(lambda code: code[0].encode("unicode_escape").decode(), text)


def escape_lines(text: str) -> str:
    return "\n".join(map(visible, text.split("\n")))


class VisibleFormatter(logging.Formatter):
    """Log formatter that escapes control codes, because the user's names may contain them."""

    def format(self, record: logging.LogRecord) -> str:
        return escape_lines(super().format(record))


@final
class PlainConsole(Console):
    """Console that prints texts literally, also in table cells, and escapes their control codes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render_str(self, text: str, **how: Any) -> Text:
        return super().render_str(visible(text), **how)


@dataclass(frozen=True)
class Advance:
    """Handle for a progress bar. Call it with the number of units finished since the last call."""

    move: Callable[[int], None]
    say: Callable[[str], None]
    """Prints a line, above the bar if there is one. Does nothing if progress is not enabled."""
    show: Callable[[str], None]
    """Shows the current state behind the description. Does nothing without a bar."""

    def __call__(self, units: int) -> None:
        self.move(units)


@contextmanager
def progress(
    description: str, total: int, *, enabled: bool = True, figures: Figures | None = None
) -> Iterator[Advance]:
    """Show progress through ``total`` units on standard error, and yield a handle for it.

    On a terminal, a table with ``figures`` below the bar is updated a few times a second.
    """
    if not enabled:
        yield Advance(_do_nothing, _do_nothing, _do_nothing)
        return

    console = PlainConsole(stderr=True, soft_wrap=True)
    if not console.is_terminal:
        console.print(f"{description} ...")
        yield Advance(_report_lines(description, total, console.print), console.print, _do_nothing)
        return

    columns = [
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
    ]
    # A table with figures replaces the remaining time.
    if figures is None:
        columns.append(TimeRemainingColumn())
    with _Bar(*columns, console=console, transient=True, refresh_per_second=4) as bar:
        bar.figures = figures
        task = bar.add_task(visible(description), total=max(total, 1))

        def show_state(state: str) -> None:
            bar.update(task, description=visible(f"{description} | {state}"))

        yield Advance(lambda units: bar.advance(task, units), console.print, show_state)


@final
class _Bar(Progress):
    """A progress bar with a table of figures below."""

    figures: Figures | None = None

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        if self.figures is None:
            return
        for task in self.tasks:
            cells = self.figures(task.completed, task.speed or 0.0)
            table = Table(*cells)
            table.add_row(*cells.values())
            yield table


_LINE_INTERVAL_S = 30.0
"""Seconds between two progress lines."""


def _report_lines(description: str, total: int, say: Callable[[str], None]) -> Callable[[int], None]:
    """Return a function that counts finished units, and says every 30 s how many are left."""
    begin = last_report = time.monotonic()
    num_done = 0

    def move(units: int) -> None:
        nonlocal last_report, num_done
        num_done = min(num_done + units, total)
        now = time.monotonic()
        if now - last_report < _LINE_INTERVAL_S or not num_done:
            return

        last_report = now
        remaining_s = (now - begin) * (total - num_done) / num_done
        remaining = timedelta(seconds=round(remaining_s))
        say(f"{description} ... {100 * num_done / total:.0f} %, {remaining} left")

    return move


def say(text: str, style: str = "") -> None:
    """Print lines on standard error."""
    PlainConsole(stderr=True, soft_wrap=True).print(Text(escape_lines(text)), style=style)


def _do_nothing(_: object) -> None:
    pass
