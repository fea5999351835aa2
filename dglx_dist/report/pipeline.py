"""A picture of training in intervals (Dorylus): who worked on which one when, drawn without a display."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from dglx_dist.cluster.timeline import GRAPH_SERVER, NETWORK, PARAMETER_SERVER, WORKER, Span
from dglx_dist.cluster.trace_events import RankSpans, TraceFile, deal_out
from dglx_dist.report.excerpt import choose, clipped, window
from dglx_dist.report.overlap import is_wait, workers_beside
from dglx_dist.report.units import readable_percent

COLORS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860", "#da8bc3", "#64b5cd")
"""Interval i has colour i modulo their number."""
NO_INTERVAL, WAITING = "#888888", "#eeeeee"
_SHOWN_EPOCHS = 2
_LETTER_FRACTION = 0.0075
_BACK = ("grad", "publish", "collect")
"""How names begin of what goes backward; these are hatched."""


def has_intervals(trace: TraceFile) -> bool:
    """Whether the trace is of training in intervals."""
    return any(span.row == GRAPH_SERVER for rank in trace.ranks for span in rank.spans)


def draw(
    trace: TraceFile, path: str | Path, *, title: str, epochs: tuple[int, int] | None = None
) -> tuple[int, int]:
    """Draw the rows of each rank into a PNG file: a colour per interval, backward hatched.

    Args:
        trace: What to draw.
        path: Where the picture goes.
        title: Heading.
        epochs: First and last epoch that is shown; None: two in the middle.

    Returns:
        The first and the last epoch.

    Raises:
        ConfigError: the trace has no such epoch.
    """
    # The first epoch compiles kernels and starts workers.
    first, last = choose(trace, GRAPH_SERVER, epochs, unit="epoch", usual=_SHOWN_EPOCHS, early=1)
    begin, end = window(trace, first, last)
    rows = [row for rank in trace.ranks for row in _rows(rank, begin, end)]
    figure = Figure(figsize=(13, 1.4 + 0.34 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for height, (_, lane) in enumerate(rows):
        for span in lane:
            _draw_box(axes, span, height, (begin, end))
    axes.set(xlim=(0, 1e3 * (end - begin)), ylim=(len(rows) - 0.4, -0.6), xlabel="milliseconds")
    axes.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=8)
    figure.suptitle(f"{title}: epochs {first} to {last}, {pipeline_text(trace)}", fontsize=10)
    figure.savefig(path, dpi=110, format="png")
    return first, last


def pipeline_text(trace: TraceFile) -> str:
    """Return ``82.0 % of the workers' time beside graph servers``, of the whole trace."""
    worker_s, beside_s = workers_beside(trace)
    if worker_s <= 0:
        return "no task of a worker"
    return f"{readable_percent(beside_s / worker_s)} of the workers' time beside graph servers"


def _rows(rank: RankSpans, begin: float, end: float) -> list[tuple[str, list[Span]]]:
    found: list[tuple[str, list[Span]]] = []
    for row in (GRAPH_SERVER, WORKER, PARAMETER_SERVER, NETWORK):
        inside = [
            span for span in rank.spans if span.row == row and span.end_s > begin and span.begin_s < end
        ]
        lanes = deal_out(inside, nested=False)
        names = _names(rank.rank, row, len(lanes))
        found += list(zip(names, lanes, strict=True))
    return found


def _names(rank: int, row: str, number: int) -> Sequence[str]:
    """Return a name for each lane; of workers, which are many, each has its number."""
    if row == WORKER:
        return [f"rank {rank}, worker {lane + 1}" for lane in range(number)]
    return [f"rank {rank}, {row}" if lane == 0 else "" for lane in range(number)]


def _draw_box(axes: Any, span: Span, height: int, shown: tuple[float, float]) -> None:
    left, right = clipped(span, shown)
    waits = is_wait(span)
    color = NO_INTERVAL if span.interval is None else COLORS[span.interval % len(COLORS)]
    axes.barh(
        height,
        right - left,
        left=left,
        height=0.4 if waits else 0.8,
        color=WAITING if waits else color,
        edgecolor="white",
        linewidth=0.4,
        hatch="//" if span.name.startswith(_BACK) else None,
    )
    label = span.name if span.interval is None else f"{span.name} i{span.interval}"
    if not waits and right - left > _LETTER_FRACTION * len(label) * 1e3 * (shown[1] - shown[0]):
        axes.text((left + right) / 2, height, label, ha="center", va="center", fontsize=6, color="white")
