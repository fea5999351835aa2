"""``dglx report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table


def report(
    folder: Annotated[Path, typer.Argument(metavar="RUNDIR", help="What `dglx train --out` wrote.")],
) -> None:
    """Print the table of a finished run again and draw its picture anew.

    Example: `dglx report runs/demo`
    """
    from dglx_dist.report.picture import draw
    from dglx_dist.report.rundir import PICTURE, read_run
    from dglx_dist.report.summary import run_title
    from dglx_dist.report.table import epoch_table, summary_table

    run = read_run(folder)
    show(epoch_table(run.epochs))
    show(summary_table(run.summary))
    draw(run.epochs, folder / PICTURE, title=run_title(run.summary, run.config))
    Console(highlight=False, soft_wrap=True).print(f"picture: {folder / PICTURE}")


def show(table: Table) -> None:
    """Print a table, as wide as it is when nobody looks at a terminal."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=max(console.width, 150))
    console.print(table)
