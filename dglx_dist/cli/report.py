"""``dglx inspect`` and ``dglx report``."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dglx_dist.cli.common import check_picture, command, draw_or_warn, show, warn, write
from dglx_dist.errors import ConfigError, DglxError, StorageError
from dglx_dist.options import at_least, check_ranges, option, refuse_addresses
from dglx_dist.progress import PlainConsole
from dglx_dist.records import EDGE_TYPE, FEATURE, NODE_TYPE, format_type

if TYPE_CHECKING:
    from dglx_dist.data.storage.manifest import Manifest
    from dglx_dist.data.storage.reader import StoredDataset
    from dglx_dist.records import ColumnInfo
    from dglx_dist.report.run_folder import Run

PICTURE = "partition.png"
_PICTURE_REMEDY = "; choose a file with --picture FILE"
HOPS = 4
"""Default for ``--hops``."""


@dataclass(frozen=True, kw_only=True)
class InspectCommand:
    """Options of ``dglx inspect``."""

    folder: Path = option(..., "Folder or address that `dglx partition` wrote.", metavar="DIR")
    picture: Path | None = option(None, "File of the picture. Default: cache/partition.png.", metavar="FILE")
    verify: Literal["auto", "full", "never"] = option(
        "auto", "Verification of files: auto for new files, full for all files, or never."
    )
    closure: bool = option(False, "Show how many nodes a server needs to preload its neighbourhood, by hop.")
    hops: int | None = option(None, f"Layers of the model for --closure. Default: {HOPS}.", check=at_least(0))
    servers: int | None = option(None, "Servers for --closure. Default: one per part.", check=at_least(1))

    def __post_init__(self) -> None:
        check_ranges(self)
        refuse_addresses(self, ("picture",))
        for name, value in (("hops", self.hops), ("servers", self.servers)):
            if value is not None and not self.closure:
                raise ConfigError(f"--{name} {value} needs --closure. Add it.")


@command(InspectCommand)
def inspect(config: InspectCommand) -> None:
    """Show a partitioned dataset: edge cut, balance, halo and replication factors, sizes on disk, a picture.

    Balance is the largest part divided by the mean. The halo factor is the number of nodes of other parts
    that a part reads, per node that it owns. The replication factor is the number of copies of a node if
    every part stored its halo. With --closure, the rows that full_graph sends between servers for a layer are
    shown too.

    Examples: `dglx inspect data/demo --verify full`, `dglx inspect data/demo --closure --hops 3`
    """
    from dglx_dist.data.storage.columns import CACHE
    from dglx_dist.data.storage.reader import open_dataset
    from dglx_dist.memory import format_bytes
    from dglx_dist.report.pictures import draw_parts
    from dglx_dist.report.tables import build_parts_table, build_summary_table, plural

    dataset = open_dataset(config.folder, verify=config.verify)
    if config.picture is not None:
        check_picture(config.picture, "--picture", PICTURE)

    manifest = dataset.manifest
    cut = f"{plural(manifest.num_parts, 'part')} by {manifest.method}"
    write(f"{manifest.name}, cut into {cut}, seed {manifest.seed}")
    PlainConsole().print(build_summary_table(summarize_dataset(manifest)))

    columns = list_part_columns(manifest.quality)
    cells: dict[str, Any] = {}
    for name, values in columns.items():
        cells[name] = [value if isinstance(value, int) else f"{value:.4f}" for value in values]
    sizes = count_part_bytes(manifest)
    cells["on disk"] = [format_bytes(size) for size in sizes]
    show(build_parts_table(cells))

    target = config.picture or dataset.folder / CACHE / PICTURE
    if config.closure:
        _show_closure(dataset, target, config)
    columns["MB on disk"] = [size / 1e6 for size in sizes]
    title = f"{manifest.name}: {cut}"
    draw_or_warn(lambda: draw_parts(columns, target, title=title), target, _PICTURE_REMEDY)


def summarize_dataset(manifest: Manifest) -> dict[str, object]:
    """List the rows for the first table in ``dglx inspect``: types, columns, quality of the cut, size."""
    rows: dict[str, object] = {}
    for ntype, columns in manifest.node_columns.items():
        name = "nodes" if ntype == NODE_TYPE else f"nodes {ntype}"
        rows[name] = f"{manifest.num_nodes(ntype)}: {_describe_columns(columns)}"
    for etype, columns in manifest.edge_columns.items():
        name = "edges" if etype == EDGE_TYPE else f"edges {format_type(etype)}"
        rows[name] = f"{manifest.num_edges(etype)}: {_describe_columns(columns)}"

    # Datasets from older versions lack some figures.
    quality = manifest.quality
    for name in ("edge_cut", "replication_factor"):
        figure = quality.get(name)
        if isinstance(figure, float):
            rows[name.replace("_", " ")] = f"{figure:.4f}"
    balance = quality.get("balance")
    if isinstance(balance, dict):
        rows |= {f"balance {name} (max/mean)": f"{ratio:.4f}" for name, ratio in balance.items()}

    trainers = quality.get("trainers")
    if isinstance(trainers, dict):
        rows["trainers"] = f"{trainers['num_parts']}, edge cut {trainers['edge_cut']:.4f}"
        for name, ratio in trainers["balance"].items():
            rows[f"balance {name} of trainers"] = f"{ratio:.4f}"

    rows["bytes on disk"] = sum(info.num_bytes for info in manifest.files.values())
    return rows


def _describe_columns(columns: Mapping[str, ColumnInfo]) -> str:
    """Describe rows by name and type, like ``feat float32[5], label int64``."""
    descriptions = [f"{name} {info.dtype}{list(info.row_shape) or ''}" for name, info in columns.items()]
    return ", ".join(descriptions) or "no tensors"


def list_part_columns(quality: Mapping[str, Any]) -> dict[str, list[float]]:
    """Select the columns for the table with parts that ``quality`` has, by heading."""
    headings = {
        "nodes": "num_nodes", "edges": "num_edges", "halo nodes": "halo_nodes",
        "halo factor": "halo_factor", "remote in-edges": "remote_fraction",
    }  # fmt: skip
    return {heading: list(quality[name]) for heading, name in headings.items() if name in quality}


def count_part_bytes(manifest: Manifest) -> list[int]:
    sizes = [0] * manifest.num_parts
    for path, info in manifest.files.items():
        part = path.split("/")[0].removeprefix("part")
        if part.isdecimal():
            sizes[int(part)] += info.num_bytes
    return sizes


_CUT_EDGE_BYTES = 100
"""Memory to count the rows between servers, in bytes per cut edge."""


def _show_closure(dataset: StoredDataset, picture: Path, config: InspectCommand) -> None:
    """Show and draw the nodes that servers preload by hop. With several types, show only the rows sent."""
    from dglx_dist.graph.analysis import measure_expansion
    from dglx_dist.report.pictures import draw_expansion
    from dglx_dist.report.tables import build_expansion_table

    manifest = dataset.manifest
    servers = config.servers or manifest.num_parts
    if len(manifest.node_types) > 1 or len(manifest.edge_types) > 1:
        _show_border(dataset, servers)
        return

    hops = HOPS if config.hops is None else config.hops
    expansion = measure_expansion(dataset, servers, hops)
    factors = expansion.factors.tolist()
    most_foreign = expansion.foreign.max(axis=1).tolist()
    most_work = expansion.work.max(axis=1).tolist()
    show(build_expansion_table(factors, most_foreign, feature_bytes(manifest), most_work))
    _show_border(dataset, servers)

    target = picture.with_name(f"{picture.stem}-closure.png")
    title = f"{manifest.name}, {len(factors[0])} servers"
    draw_or_warn(lambda: draw_expansion(factors, target, title=title), target, _PICTURE_REMEDY)


def _show_border(dataset: StoredDataset, servers: int) -> None:
    """Print how many rows the servers exchange for a layer that computes all nodes."""
    from dglx_dist.memory import machine_memory
    from dglx_dist.strategies.full_graph.plan_builder import border_rows

    manifest = dataset.manifest
    num_edges = manifest.quality.get("cut_edges")
    if not isinstance(num_edges, int):
        # Older datasets do not have the figure. All edges are an upper bound.
        num_edges = sum(map(manifest.num_edges, manifest.edge_types))
    if _CUT_EDGE_BYTES * num_edges > machine_memory()[1]:
        write(f"rows between servers were not counted, because {num_edges} cut edges do not fit in memory")
        return

    rows_by_type, covered_rows = border_rows(dataset, servers)
    total = sum(rows_by_type.values())
    text = f"rows between servers for a layer of all nodes: {total}; {covered_rows} with aggregate=cover"
    if len(rows_by_type) > 1:
        types = ", ".join(f"{ntype} {num_rows}" for ntype, num_rows in rows_by_type.items())
        text += f"; by node type: {types}"
    write(text)


def feature_bytes(manifest: Manifest) -> int:
    """Return the bytes per feature row for the first node type, 0 without features."""
    from dglx_dist.data.storage.columns import numpy_dtype

    info = manifest.node_columns[manifest.node_types[0]].get(FEATURE)
    if info is None:
        return 0
    return numpy_dtype(info.dtype).itemsize * math.prod(info.row_shape)


def report(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUNDIR...|TRACE", help="Folders of `dglx train --out`, or a file of `--trace`."
        ),
    ],
    batches: Annotated[
        str | None,
        typer.Option(
            metavar="FIRST:LAST",
            help="Batches of a trace to draw, or epochs for strategy lambda. Default: some in the middle.",
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File for an HTML page with figures of the runs.")
    ] = None,
) -> None:
    """Print the tables of a run and draw its picture again. An unfinished run shows its finished epochs.

    Several runs are printed side by side. A run with --seeds shows mean and deviation, and beside other runs
    or on the page also the run of each seed. The page of --html needs no network, but Plotly on this machine:
    `pip install 'dglx_dist[report]'`. It has curves, cost, bytes between ranks, and the reason for the choice
    of auto.

    For a trace, draw the timeline of the ranks, and print how much of the network time overlaps with compute.

    Examples: `dglx report runs/demo`, `dglx report runs/a runs/b --html both.html` and `dglx report
    trace.json --batches 20:23`
    """
    from dglx_dist.report.run_store import fetch_run

    folders = [Path(fetch_run(path)) for path in folders]
    # A folder that is listed twice is one run.
    folders = list({path.resolve(): path for path in folders}.values())
    folder = folders[0]
    is_single = len(folders) == 1
    if folder.is_file() and is_single and html is None:
        report_trace(folder, read_batches(batches))
        return
    if batches is not None:
        raise ConfigError(f"--batches {batches} is for a trace, but {folder} is not one. Pass a trace file.")

    if html is not None:
        from dglx_dist.report.page import check_page

        check_picture(html, "--html", "page.html")
        check_page(html)

    from dglx_dist.report.run_folder import read_spread

    spreads = dict[Path, Mapping[str, Any]]()
    for path in folders:
        with _explain_damage(path):
            spread = read_spread(path)
        if spread is not None:
            spreads[path] = spread

    if html is not None or not is_single:
        _report_runs(folders, spreads, html)
    if is_single:
        with _explain_damage(folder):
            _report_run(folder, spreads.get(folder))


def _report_runs(
    folders: Sequence[Path], spreads: Mapping[Path, Mapping[str, Any]], html: Path | None
) -> None:
    """Print runs' figures side by side, with each seed in ``spreads``, and write their page."""
    from dglx_dist.report.page import render_page, write_page
    from dglx_dist.report.run_folder import read_run
    from dglx_dist.report.tables import build_runs_table, spread_cells, summarise

    run_folders = list[Path]()
    means = dict[str, Mapping[str, tuple[object, str]]]()
    for folder in folders:
        spread = spreads.get(folder)
        if spread is None:
            run_folders.append(folder)
            continue
        with _explain_damage(folder):
            run_folders += [folder / name for name in spread["runs"]]
            means[f"{folder}: mean ± std"] = spread_cells(spread)

    names = [folder.resolve().name for folder in run_folders]
    runs: dict[str, Run] = {}
    summaries = dict[str, Mapping[str, object]]()
    for name, folder in zip(names, run_folders, strict=True):
        title = name
        if names.count(name) > 1:
            title = str(folder)
        with _explain_damage(folder):
            run = read_run(folder)
            runs[title] = run
            summaries[title] = run.summary or summarise({}, run.epochs)
            # Each run is tried alone, so that the message names the damaged one.
            if html is None:
                build_runs_table({title: summaries[title]})
            else:
                render_page({title: run}, "")

    if len(runs) > 1:
        show(build_runs_table(summaries))
    if html is not None:
        write_page(runs, html, means)
        write(f"page: {html}")


def _report_run(folder: Path, spread: Mapping[str, Any] | None) -> None:
    """Print a run's tables and draw its picture, or print its ``spread`` if it has several seeds."""
    from dglx_dist.report.pictures import draw
    from dglx_dist.report.run_folder import PICTURE, read_run
    from dglx_dist.report.tables import (
        build_epoch_table,
        build_spread_table,
        build_summary_table,
        format_run_title,
    )

    if spread is not None:
        show(build_spread_table(spread))
        return
    run = read_run(folder)
    show(partial(build_epoch_table, run.epochs))
    if run.summary is None:
        warn(_how_to_resume(folder, run.config))
        return

    show(build_summary_table(run.summary))
    title = format_run_title(run.summary, run.config)
    target = folder / PICTURE
    draw_or_warn(lambda: draw(run.epochs, target, title=title), target)


@contextmanager
def _explain_damage(path: Path) -> Iterator[None]:
    """Turn errors that damaged files cause into StorageError with ``path``."""
    try:
        yield
    except DglxError:
        raise
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError) as problem:
        reason = f"{type(problem).__name__}: {str(problem)[:200]}"
        raise StorageError(f"{path} is damaged ({reason}). Repeat the run.") from problem


def report_trace(path: Path, batches: tuple[int, int] | None) -> None:
    """Draw the trace ``path`` to a PNG file beside it, and print how much of the traffic was hidden.

    Raises StorageError if the file is not a trace, or is damaged, and ConfigError if it has no such
    ``batches``.
    """
    from dglx_dist.comm.trace import read_trace
    from dglx_dist.report.pictures import describe_overlap, draw_trace

    with _explain_damage(path):
        trace = read_trace(path)
        target = path.with_suffix(".png")
        title = str(trace.facts.get("strategy", path.stem))
        for name, value in dict(trace.facts.get("options", {})).items():
            title += f" {name}={value}"
        write(f"{title}: {describe_overlap(trace)}")
        draw_or_warn(lambda: draw_trace(trace, target, title=title, batches=batches), target)


def read_batches(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
        raise ConfigError(f"--batches {text} must be two batch numbers, like 20:23")
    return int(first), int(last)


def _how_to_resume(folder: Path, config: Mapping[str, Any]) -> str:
    data = shlex.quote(str(config.get("data", "DIR")))
    return (
        "the run did not finish, or is still running. It can be resumed from its newest "
        f"checkpoint, if any: `dglx train {data} --out {shlex.quote(str(folder))}`, with the "
        f"same options ({folder / 'config.json'})"
    )
