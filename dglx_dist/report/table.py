"""The tables that the command line prints, and those of Markdown files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich import box
from rich.table import Table

from dglx_dist.records import EpochRecord
from dglx_dist.report.units import readable_bytes, readable_count, readable_percent, readable_seconds

_EPOCH_COLUMNS = (
    "epoch", "loss", "train", "val", "seconds", "samples/s",
    "sample", "fetch", "wait", "compute", "exchange", "inside", "outside",
)  # fmt: skip


def epoch_table(epochs: Iterable[EpochRecord]) -> Table:
    """Return one row per epoch: loss, accuracy, seconds, samples/s, the phases in seconds, and bytes.

    ``sample`` and ``fetch`` run on the loader's threads beside the other phases, so the columns do
    not add up to ``seconds``; ``wait`` is what of them was not hidden. Where a cache of remote rows was used,
    ``hits`` is how much of them it had.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption=_LEGEND, caption_justify="left")
    epochs = list(epochs)
    cached = any(record.cache_hit_rate is not None for record in epochs)
    for name in (*_EPOCH_COLUMNS, *(["hits"] if cached else [])):
        table.add_column(name, justify="right", no_wrap=True)
    for record in epochs:
        table.add_row(*_epoch_cells(record), *([readable_percent(record.cache_hit_rate)] if cached else []))
    return table


_LEGEND = (
    "phases are means over ranks: sample and fetch on the loader's threads, wait is what training waited "
    "for them; bytes inside / outside the server, all ranks"
)


def _epoch_cells(record: EpochRecord) -> tuple[str, ...]:
    phases = (record.sample_s, record.fetch_s, record.wait_s, record.compute_s, record.exchange_s)
    return (
        str(record.epoch),
        f"{record.loss:.4f}",
        readable_percent(record.train_accuracy),
        readable_percent(record.val_accuracy),
        readable_seconds(record.seconds),
        readable_count(record.samples_per_second),
        *(readable_seconds(seconds) for seconds in phases),
        readable_bytes(record.bytes_inside),
        readable_bytes(record.bytes_outside),
    )


def summary_table(summary: Mapping[str, object]) -> Table:
    """Return the figures of ``summary.json`` one under the other, nested ones as ``outer.inner``."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in summary.items():
        if isinstance(value, Mapping):
            for inner, inner_value in value.items():
                table.add_row(f"{name}.{inner}", _cell(inner_value, str(inner), name))
        else:
            table.add_row(name, _cell(value, name))
    return table


def _cell(value: object, *names: str) -> str:
    """Write a figure in the unit that one of its names tells."""
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if any(name.endswith(("accuracy", "hit_rate")) for name in names):
        return readable_percent(value)
    if any("bytes" in name for name in names):
        return readable_bytes(value)
    if any(name.endswith("seconds") for name in names):
        return f"{readable_seconds(value)} s"
    return readable_count(value) if abs(value) >= 100 else f"{value:g}"


def parts_table(columns: Mapping[str, Sequence[object]]) -> Table:
    """Return one row per part with the given columns, each a sequence of one value per part.

    Raises:
        ValueError: the columns differ in length.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("part", justify="right", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for part, values in enumerate(zip(*columns.values(), strict=True)):
        table.add_row(str(part), *(str(value) for value in values))
    return table


def expansion_table(
    factors: Sequence[Sequence[float]], foreign: Sequence[int], row_bytes: int, work: Sequence[float]
) -> Table:
    """Return one row per hop: how many times its own nodes each server holds, and what that costs the worst.

    Args:
        factors: (K + 1, S) nodes within h hops by own nodes; of more than 8 servers least, mean and most.
        foreign: (K + 1,) nodes of other servers, of the server with most.
        row_bytes: Of a node's features.
        work: (K + 1,) edges aggregated by a model of h layers, by those without replicas.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption=_EXPANSION_LEGEND, caption_justify="left")
    servers = len(factors[0])
    heads = (
        [f"server {number}" for number in range(servers)] if servers <= _SHOWN else ["least", "mean", "most"]
    )
    for name in ("hops", *heads, "foreign nodes", "features", "work"):
        table.add_column(name, justify="right", no_wrap=True)
    for hop, (row, nodes, times) in enumerate(zip(factors, foreign, work, strict=True)):
        shown = row if servers <= _SHOWN else [min(row), sum(row) / servers, max(row)]
        table.add_row(
            str(hop),
            *(f"{factor:.2f}" for factor in shown),
            readable_count(nodes),
            readable_bytes(nodes * row_bytes),
            f"{times:.2f}",
        )
    return table


_SHOWN = 8
_EXPANSION_LEGEND = (
    "nodes within so many hops of a server's own, by its own: what it holds under shared_preload for a model "
    "of as many layers. Foreign nodes and features, loaded once, and work, that of an epoch by the one of "
    "full_graph, are those of the server with most"
)


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of Markdown, one line per row; ``|`` and line ends in cells are escaped.

    Raises:
        ValueError: a row has another number of cells than ``head``.
    """
    lines = [_markdown_line(head), "|" + "---|" * len(head)]
    for row in rows:
        if len(row) != len(head):
            raise ValueError(f"row {list(row)} has {len(row)} cells, the head has {len(head)}")
        lines.append(_markdown_line(row))
    return "\n".join(lines)


def _markdown_line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"
