"""A progress bar for long operations, shown where somebody can see it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@final
class Advance:
    """What :func:`progress` yields: call it with how many more units are done."""

    def __init__(
        self, move: Callable[[int], None], say: Callable[[str], None], show: Callable[[str], None]
    ) -> None:
        self._move = move
        self._say = say
        self._show = show

    def __call__(self, units: int) -> None:
        """Move the bar on by ``units``; nothing where there is no bar."""
        self._move(units)

    def say(self, line: str) -> None:
        """Show one line of text, above the bar where there is one; nothing where progress is not enabled."""
        self._say(line)

    def show(self, state: str) -> None:
        """Show what goes on at this moment, behind the description; nothing where there is no bar."""
        self._show(state)


@contextmanager
def progress(description: str, total: int, *, enabled: bool = True) -> Iterator[Advance]:
    """Show how far ``description`` is, on standard error, and yield what moves it on.

    Args:
        description: What is going on, a few words.
        total: How many units make the whole; 0 is allowed.
        enabled: False on every rank but 0.
    """
    if not enabled:
        yield Advance(_nothing, _nothing, _nothing)
        return
    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    if not console.is_terminal:
        console.print(f"{description} ...")
        yield Advance(_nothing, console.print, _nothing)
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


def _nothing(_: object) -> None:
    """Show nothing."""
