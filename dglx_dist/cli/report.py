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
from dglx_dist.options import at_least, check_ranges, option
from dglx_dist.progress import PlainConsole
from dglx_dist.records import EDGE_TYPE, FEATURE, NODE_TYPE, format_type

if TYPE_CHECKING:
    from dglx_dist.data.storage.manifest import Manifest
    from dglx_dist.data.storage.reader import StoredDataset
    from dglx_dist.records import ColumnInfo
    from dglx_dist.report.run_folder import Run

PICTURE = "partition.png"
_ELSEWHERE = "; choose a file with --picture FILE"
HOPS = 4
"""Default value of ``--hops``."""


@dataclass(frozen=True, kw_only=True)
class InspectCommand:
    """Options of ``dglx inspect``."""

    folder: Path = option(..., "Folder that `dglx partition` wrote.", metavar="DIR")
    picture: Path | None = option(None, "File of the picture. Default: cache/partition.png.", metavar="FILE")
    verify: Literal["auto", "full", "never"] = option(
        "auto", "Verification of files: auto for new files, full for all files, or never."
    )
    closure: bool = option(False, "Show how many nodes a server needs to preload its neighbourhood, by hop.")
    hops: int | None = option(None, f"Layers of the model for --closure. Default: {HOPS}.", check=at_least(0))
    servers: int | None = option(None, "Servers for --closure. Default: one per part.", check=at_least(1))

    def __post_init__(self) -> None:
        check_ranges(self)
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
    from dglx_dist.data.storage.reader import open_dataset
    from dglx_dist.memory import format_bytes
    from dglx_dist.report.pictures import draw_parts
    from dglx_dist.report.tables import build_parts_table, build_summary_table, plural

    dataset = open_dataset(config.folder, verify=config.verify)
    if config.picture is not None:
        check_picture(config.picture, "--picture", PICTURE)
    manifest = dataset.manifest
    quality = dict(dataset.manifest.quality)
    sizes = count_part_bytes(manifest)
    cut = f"{plural(manifest.num_parts, 'part')} by {manifest.method}"
    write(f"{manifest.name}, cut into {cut}, seed {manifest.seed}")
    PlainConsole().print(build_summary_table(summarize_dataset(manifest)))
    per_part = list_part_columns(quality)
    shown: dict[str, Any] = {
        name: [value if isinstance(value, int) else f"{value:.4f}" for value in values]
        for name, values in per_part.items()
    }
    shown["on disk"] = [format_bytes(size) for size in sizes]
    show(build_parts_table(shown))
    target = config.picture or config.folder / "cache" / PICTURE
    if config.closure:
        _show_closure(dataset, target, config)
    columns = {**per_part, "MB on disk": [size / 1e6 for size in sizes]}
    title = f"{manifest.name}: {cut}"
    draw_or_warn(lambda: draw_parts(columns, target, title=title), target, _ELSEWHERE)


def summarize_dataset(manifest: Manifest) -> dict[str, object]:
    quality = manifest.quality
    rows: dict[str, object] = {}
    for ntype, columns in manifest.node_columns.items():
        name = "nodes" if ntype == NODE_TYPE else f"nodes {ntype}"
        rows[name] = f"{manifest.num_nodes(ntype)}: {_describe_columns(columns)}"
    for etype, columns in manifest.edge_columns.items():
        name = "edges" if etype == EDGE_TYPE else f"edges {format_type(etype)}"
        rows[name] = f"{manifest.num_edges(etype)}: {_describe_columns(columns)}"
    for name in ("edge_cut", "replication_factor"):
        if isinstance(value := quality.get(name), float):
            rows[name.replace("_", " ")] = f"{value:.4f}"
    balance = quality.get("balance")
    if isinstance(balance, dict):
        rows |= {f"balance {name} (max/mean)": f"{ratio:.4f}" for name, ratio in balance.items()}
    trainers = quality.get("trainers")
    if isinstance(trainers, dict):
        rows["trainers"] = f"{trainers['num_parts']}, edge cut {trainers['edge_cut']:.4f}"
        rows |= {f"balance {name} of trainers": f"{r:.4f}" for name, r in trainers["balance"].items()}
    rows["bytes on disk"] = sum(info.num_bytes for info in manifest.files.values())
    return rows


def _describe_columns(columns: Mapping[str, ColumnInfo]) -> str:
    # A type is the dtype and shape of one row, like float32[5], or int64 for a number.
    types = {name: f"{info.dtype}{list(info.row_shape) or ''}" for name, info in columns.items()}
    return ", ".join(f"{name} {row}" for name, row in types.items()) or "no tensors"


def list_part_columns(quality: dict[str, Any]) -> dict[str, list[float]]:
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
"""Memory for counting the rows between servers, in bytes per cut edge."""


def _show_closure(dataset: StoredDataset, picture: Path, config: InspectCommand) -> None:
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
    foreign = expansion.foreign.max(axis=1).tolist()
    work = expansion.work.max(axis=1).tolist()
    show(build_expansion_table(factors, foreign, feature_bytes(manifest), work))
    target = picture.with_name(f"{picture.stem}-closure.png")
    _show_border(dataset, servers)
    title = f"{manifest.name}, {len(factors[0])} servers"
    draw_or_warn(lambda: draw_expansion(factors, target, title=title), target, _ELSEWHERE)


def _show_border(dataset: StoredDataset, servers: int) -> None:
    from dglx_dist.memory import machine_memory
    from dglx_dist.strategies.full_graph.plan_builder import border_rows

    manifest = dataset.manifest
    cut = manifest.quality.get("cut_edges")
    num_edges = cut if isinstance(cut, int) else sum(map(manifest.num_edges, manifest.edge_types))
    if _CUT_EDGE_BYTES * num_edges <= machine_memory()[1]:
        by_type, rows = border_rows(dataset, servers)
        types = ", ".join(f"{ntype} {count}" for ntype, count in by_type.items())
        text = f"for a layer of all nodes: {sum(by_type.values())}; {rows} with aggregate=cover"
        text += f"; by node type: {types}" if len(by_type) > 1 else ""
    else:
        text = f"were not counted, because {num_edges} cut edges do not fit in memory"

    write(f"rows between servers {text}")


def feature_bytes(manifest: Manifest) -> int:
    from dglx_dist.data.storage.columns import numpy_dtype

    info = manifest.node_columns[manifest.node_types[0]].get(FEATURE)
    return 0 if info is None else numpy_dtype(info.dtype).itemsize * math.prod(info.row_shape)


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
    # A folder that is listed twice is one run.
    folder, *more = folders = list({path.resolve(): path for path in folders}.values())
    if folder.is_file() and not more and html is None:
        report_trace(folder, read_batches(batches))
        return
    if batches is not None:
        raise ConfigError(f"--batches {batches} is for a trace, but {folder} is not one. Pass a trace file.")

    if html is not None:
        from dglx_dist.report.page import check_page

        check_picture(html, "--html", "page.html")
        check_page(html)

    from dglx_dist.report.pictures import draw
    from dglx_dist.report.run_folder import PICTURE, read_run, read_spread
    from dglx_dist.report.tables import (
        build_epoch_table,
        build_spread_table,
        build_summary_table,
        format_run_title,
    )

    spreads = dict[Path, Mapping[str, Any]]()
    for path in folders:
        with _explain_damage(path):
            if (seeds := read_spread(path)) is not None:
                spreads[path] = seeds

    runs = _report_runs(folders, spreads, html) if more or html is not None else []
    if more:
        return
    with _explain_damage(folder):
        if folder in spreads:
            show(build_spread_table(spreads[folder]))
            return
        run = runs[0] if runs else read_run(folder)
        show(partial(build_epoch_table, run.epochs))
        if run.summary is None:
            warn(_how_to_resume(folder, run.config))
            return
        show(build_summary_table(run.summary))
        title = format_run_title(run.summary, run.config)
        draw_or_warn(lambda: draw(run.epochs, folder / PICTURE, title=title), folder / PICTURE)


def _report_runs(folders: Sequence[Path], spreads: Mapping[Path, Mapping[str, Any]], html: Any) -> list[Run]:
    """Print the figures of runs side by side, with each seed of ``spreads``, and write their page."""
    from dglx_dist.report.page import render_page, write_page
    from dglx_dist.report.run_folder import read_run
    from dglx_dist.report.tables import build_runs_table, spread_cells, summarise

    places = list[Path]()
    means = dict[str, Mapping[str, tuple[object, str]]]()
    for folder in folders:
        with _explain_damage(folder):
            if folder in spreads:
                places += [folder / run for run in spreads[folder]["runs"]]
                means[f"{folder}: mean ± std"] = spread_cells(spreads[folder])
            else:
                places.append(folder)

    names = [place.resolve().name for place in places]
    runs: dict[str, Run] = {}
    summaries = dict[str, Mapping[str, object]]()
    for name, folder in zip(names, places, strict=True):
        title = str(folder) if names.count(name) > 1 else name
        with _explain_damage(folder):
            run = runs[title] = read_run(folder)
            summaries[title] = run.summary or summarise({}, run.epochs)
            # Each run is tried alone, so that the message names the damaged one.
            _ = build_runs_table({title: summaries[title]}) if html is None else render_page({title: run}, "")

    if len(runs) > 1:
        show(build_runs_table(summaries))
    if html is not None:
        write_page(runs, html, means)
        write(f"page: {html}")
    return list(runs.values())


@contextmanager
def _explain_damage(path: Path) -> Iterator[None]:
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
        title = " ".join(
            [str(trace.facts.get("strategy", path.stem))]
            + [f"{name}={value}" for name, value in dict(trace.facts.get("options", {})).items()]
        )
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
        "the run did not finish, or is still running. It can be resumed from its newest checkpoint, if any: "
        f"`dglx train {data} --out {shlex.quote(str(folder))}`, with the same options "
        f"({folder / 'config.json'})"
    )
