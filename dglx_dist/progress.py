"""A progress bar for long operations, shown where somebody can see it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Advance = Callable[[int], None]
"""Call it with how many more units are done."""


@contextmanager
def progress(description: str, total: int, *, enabled: bool = True) -> Iterator[Advance]:
    """Show how far ``description`` is, on standard error, and yield what moves it on.

    Args:
        description: What is going on, a few words.
        total: How many units make the whole; 0 is allowed.
        enabled: False on every rank but 0.
    """
    console = Console(stderr=True)
    if not enabled:
        yield lambda _: None
        return
    if not console.is_terminal:
        console.print(f"{description} ...", highlight=False)
        yield lambda _: None
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
        yield lambda units: bar.advance(task, units)
