"""``dglx report``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dglx_dist.errors import ConfigError
from dglx_dist.records import FEATURE

if TYPE_CHECKING:
    from dglx_dist.data.storage.manifest import Manifest
    from dglx_dist.data.storage.reader import StoredDataset


def report(
    folder: Annotated[
        Path,
        typer.Argument(metavar="RUNDIR|TRACE", help="What `dglx train --out` or `--trace` wrote."),
    ],
    batches: Annotated[
        str | None,
        typer.Option(
            metavar="FIRST:LAST",
            help="Of a trace: batches to draw; epochs, of strategy lambda. Default: some in the middle.",
        ),
    ] = None,
) -> None:
    """Print the tables of a run again and draw its picture anew; of an unfinished one, what there is.

    Of a trace, draw who did what when, and say how much of the network's time lay beside compute.

    Examples: `dglx report runs/demo` and `dglx report trace.json --batches 20:23`
    """
    if folder.is_file():
        report_trace(folder, read_batches(batches))
        return
    if batches is not None:
        raise ConfigError(f"--batches {batches} is for a trace, and {folder} is none; give the trace's file")
    from dglx_dist.report.pictures import draw
    from dglx_dist.report.run_folder import PICTURE, read_run
    from dglx_dist.report.tables import epoch_table, run_title, summary_table

    run = read_run(folder)
    show(epoch_table(run.epochs))
    if run.summary is None:
        warn(how_to_resume(folder, run.config))
        return
    show(summary_table(run.summary))
    title = run_title(run.summary, run.config)
    draw_or_warn(lambda: draw(run.epochs, folder / PICTURE, title=title), folder / PICTURE)


def report_trace(path: Path, batches: tuple[int, int] | None) -> None:
    """Draw the trace ``path`` beside it, as a PNG file, and say how much of the traffic was hidden.

    Raises:
        StorageError: it is no trace, or damaged.
        ConfigError: it has no such batches.
    """
    from dglx_dist.comm.trace import read_trace
    from dglx_dist.report import pictures as pipeline
    from dglx_dist.report import pictures as schedule

    trace, target = read_trace(path), path.with_suffix(".png")
    title = " ".join(
        [str(trace.facts.get("strategy", path.stem))]
        + [f"{name}={value}" for name, value in dict(trace.facts.get("options", {})).items()]
    )
    if pipeline.has_intervals(trace):
        text, draw = pipeline.pipeline_text(trace), partial(pipeline.draw_pipeline, epochs=batches)
    else:
        text, draw = schedule.overlap_text(trace), partial(schedule.draw_schedule, batches=batches)
    Console(highlight=False, soft_wrap=True, markup=False).print(f"{title}: {text}")
    draw_or_warn(lambda: draw(trace, target, title=title), target)


def read_batches(text: str | None) -> tuple[int, int] | None:
    """Read ``FIRST:LAST``.

    Raises:
        ConfigError: it is something else.
    """
    if text is None:
        return None
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
        raise ConfigError(f"--batches {text} must be two numbers of batches, such as 20:23")
    return int(first), int(last)


def how_to_resume(folder: Path, config: Mapping[str, Any]) -> str:
    """Return what to say of a run with this ``config.json`` that lacks its summary."""
    start = "" if config.get("checkpoint_every") else ", from the start, as no checkpoint was asked for"
    return (
        f"the run did not finish, or still goes on; resume it{start}: "
        f"`dglx train {config.get('data', 'DIR')} --resume --out {folder}`, with the options that it had "
        f"({folder / 'config.json'})"
    )


def draw_or_warn(draw: Callable[[], object], target: Path, remedy: str = "", *, quiet: bool = False) -> None:
    """Call ``draw``, which writes ``target``, and say where the picture is, or why there is none.

    Args:
        draw: Makes the folder of ``target`` too, if need be.
        target: The picture.
        remedy: What follows the warning, e.g. ``; say where with --picture FILE``.
        quiet: Whether where it is goes without saying, as beside JSON.
    """
    try:
        draw()
    except OSError as error:
        warn(f"the picture could not be written to {target}: {error.strerror}{remedy}")
    else:
        if not quiet:
            Console(highlight=False, soft_wrap=True, markup=False).print(f"picture: {target}")


def warn(text: str) -> None:
    """Show a warning on standard error."""
    say(f"warning: {text}", "yellow")


def say(text: str, style: str = "") -> None:
    """Write a line to standard error."""
    Console(stderr=True, soft_wrap=True).print(text, style=style, highlight=False, markup=False)


def show(table: Table) -> None:
    """Print a table, as wide as it is when nobody looks at a terminal."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=max(console.width, 150))
    console.print(table)


HOPS = 4
"""Followed when nobody says how many."""


def check_closure(closure: bool, *, hops: int | None, servers: int | None) -> None:
    """Raise ConfigError for what belongs to ``--closure`` where it is not asked for, or is out of range."""
    for name, value, least in (("hops", hops, 0), ("servers", servers, 1)):
        if value is not None and not closure:
            raise ConfigError(f"--{name} {value} is for --closure; add that")
        if value is not None and value < least:
            raise ConfigError(f"--{name} {value} must be at least {least}")


def show_closure(dataset: StoredDataset, picture: Path, *, hops: int | None, servers: int | None) -> None:
    """Print the table and draw it beside ``picture``.

    Raises:
        ConfigError: the dataset has several types, or fewer parts than ``servers``.
        StorageError: a part is not on this machine, or damaged.
    """
    from dglx_dist.graph.analysis import measure_expansion
    from dglx_dist.report.pictures import draw_expansion
    from dglx_dist.report.tables import expansion_table

    manifest = dataset.manifest
    found = measure_expansion(
        dataset, manifest.num_parts if servers is None else servers, HOPS if hops is None else hops
    )
    factors, foreign = found.factors.tolist(), found.foreign.max(axis=1).tolist()
    show(expansion_table(factors, foreign, feature_bytes(manifest), found.work.max(axis=1).tolist()))
    target = picture.with_name(f"{picture.stem}-closure.png")

    def draw() -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        draw_expansion(factors, target, title=f"{manifest.name}, {len(factors[0])} servers")

    draw_or_warn(draw, target, remedy="; say where with --picture FILE")


def feature_bytes(manifest: Manifest) -> int:
    """Return the bytes of one node's features; 0 without any."""
    from dglx_dist.data.storage.columns import numpy_dtype

    info = manifest.node_columns[manifest.node_types[0]].get(FEATURE)
    if info is None:
        return 0
    return numpy_dtype(info.dtype).itemsize * math.prod(info.row_shape)
