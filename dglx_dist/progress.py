"""Progress of long operations: a bar on terminals, elsewhere a line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text


@final
class Advance:
    """Handle of a progress bar; call it with the number of units done since the last call."""

    def __init__(
        self, move: Callable[[int], None], say: Callable[[str], None], show: Callable[[str], None]
    ) -> None:
        self._move = move
        self.say = say
        """Prints a line of text, above the bar if there is one; does nothing if progress is not enabled."""
        self.show = show
        """Shows the current state behind the description; does nothing without a bar."""

    def __call__(self, units: int) -> None:
        self._move(units)


@contextmanager
def progress(
    description: str,
    total: int,
    *,
    enabled: bool = True,
    figures: Callable[[], Mapping[str, str]] | None = None,
) -> Iterator[Advance]:
    """Show the progress of ``total`` units on standard error and yield its handle.

    On a terminal ``figures`` (name -> value), called from another thread, are a live table in place of a bar.
    """
    if not enabled:
        yield Advance(_nothing, _nothing, _nothing)
        return
    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    if not console.is_terminal:
        console.print(f"{description} ...")
        yield Advance(_lines(description, total, console.print), console.print, _nothing)
        return
    if figures is not None:
        states = [""]

        def table() -> Table:
            now = figures()
            found = Table(*now, title=description, caption=Text(states[-1]), box=SIMPLE_HEAD)
            found.add_row(*now.values())
            return found

        with Live(get_renderable=table, console=console, refresh_per_second=2, transient=True):
            yield Advance(_nothing, console.print, states.append)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(description, total=max(total, 1))
        yield Advance(
            lambda units: bar.advance(task, units),
            console.print,
            lambda state: bar.update(task, description=f"{description} | {state}"),
        )


_LINE_S = 30.0


def _lines(description: str, total: int, say: Callable[[str], None]) -> Callable[[int], None]:
    begin = said = time.monotonic()
    done = 0

    def move(units: int) -> None:
        nonlocal said, done
        done, now = min(done + units, total), time.monotonic()
        if now - said >= _LINE_S and done:
            said, left = now, timedelta(seconds=round((now - begin) * (total - done) / done))
            say(f"{description} ... {100 * done / total:.0f} %, {left} left")

    return move


def say(text: str) -> None:
    """Print a line on standard error."""
    Console(stderr=True, soft_wrap=True, highlight=False, markup=False).print(text)


def _nothing(_: object) -> None:
    pass
