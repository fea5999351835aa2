"""A picture of who did what when, drawn from a trace without a display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from dglx_dist.cluster.timeline import COMPUTE, LOADER, NETWORK, Span
from dglx_dist.cluster.trace_events import TraceFile, deal_out
from dglx_dist.report.excerpt import choose, clipped, window
from dglx_dist.report.overlap import is_wait, overlap
from dglx_dist.report.units import readable_percent

COLORS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860")
"""Batch b has colour b modulo their number."""
NO_BATCH, WAITING = "#bbbbbb", "#eeeeee"
SHORT = {
    "forward M": "fM",
    "forward D": "fD",
    "backward D": "bD",
    "backward M": "bM",
    "forward": "f",
    "backward": "b",
    "step": "s",
    "sample": "sample",
    "all-reduce D": "sum D",
    "push gradient": "push",
    "push structure": "structure",
}
"""Names of spans as boxes show them; others as they are."""
SPLIT = {"forward": "fD", "backward": "bD"}
"""Names where the first layer has spans of its own, which lie on top: what is left is the owner's side."""
_SHOWN_BATCHES = 4
_LETTER_FRACTION = 0.0085
"""Width of a letter, as a fraction of the picture's: a label is left out where it has no room."""


def draw(
    trace: TraceFile, path: str | Path, *, title: str, batches: tuple[int, int] | None = None
) -> tuple[int, int]:
    """Draw the rows of each rank into a PNG file, a colour per batch; where a rank waits it is grey.

    Args:
        trace: What to draw.
        path: Where the picture goes.
        title: Heading; strategy and overlap are added.
        batches: First and last batch whose compute is shown; None: some in the middle, past the warm-up.

    Returns:
        The first and the last batch.

    Raises:
        ConfigError: the trace has no such batch.
    """
    # The first batches compile kernels and open connections; the last ones are drained.
    first, last = choose(trace, COMPUTE, batches, unit="batch", usual=_SHOWN_BATCHES)
    begin, end = window(trace, first, last, (COMPUTE,))
    split = any(span.name == "forward M" for rank in trace.ranks for span in rank.spans)
    names = SHORT | SPLIT if split else SHORT
    rows = [
        (f"rank {rank.rank}\n{row}" if number == 0 else "", lane)
        for rank in trace.ranks
        for row in (COMPUTE, NETWORK, LOADER)
        for number, lane in enumerate(_lanes(rank.spans, row, begin, end))
    ]
    figure = Figure(figsize=(13, 1.4 + 0.42 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for height, (_, lane) in enumerate(rows):
        for place, span in enumerate(lane):
            _draw_box(axes, span, height, (begin, end))
            # What is nested lies on top, and comes later.
            _draw_label(axes, _longest_part(span, lane[place + 1 :]), height, (begin, end), names)
    axes.set(xlim=(0, 1e3 * (end - begin)), ylim=(len(rows) - 0.4, -0.6), xlabel="milliseconds")
    axes.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=8)
    figure.suptitle(f"{title}: batches {first} to {last}, {overlap_text(trace)}", fontsize=10)
    figure.savefig(path, dpi=110, format="png")
    return first, last


def overlap_text(trace: TraceFile) -> str:
    """Return ``82 % of the network's time beside compute``, of the whole trace."""
    fraction = overlap(trace).fraction
    if fraction is None:
        return "nothing on the network"
    return f"{readable_percent(fraction)} of the network's time beside compute"


def _lanes(spans: Sequence[Span], row: str, begin: float, end: float) -> list[list[Span]]:
    inside = [span for span in spans if span.row == row and span.end_s > begin and span.begin_s < end]
    return deal_out(inside, nested=row == COMPUTE) or [[]]


def _longest_part(span: Span, later: Sequence[Span]) -> Span:
    """Return ``span`` where it is longest without one of ``later`` on top, which are in order."""
    free, begin = [(span.begin_s, span.begin_s)], span.begin_s
    for other in later:
        if other.begin_s >= span.end_s:
            break
        free.append((begin, other.begin_s))
        begin = max(begin, other.end_s)
    free.append((begin, span.end_s))
    left, right = max(free, key=lambda part: part[1] - part[0])
    return replace(span, begin_s=left, end_s=right)


def _draw_box(axes: Any, span: Span, height: int, shown: tuple[float, float]) -> None:
    left, right = clipped(span, shown)
    waits = is_wait(span)
    color = NO_BATCH if span.batch is None else COLORS[span.batch % len(COLORS)]
    axes.barh(
        height,
        right - left,
        left=left,
        height=0.5 if waits else 0.8,
        color=WAITING if waits else color,
        edgecolor="white",
        linewidth=0.5,
    )


def _draw_label(
    axes: Any, span: Span, height: int, shown: tuple[float, float], names: Mapping[str, str]
) -> None:
    left, right = clipped(span, shown)
    label = names.get(span.name, span.name) + ("" if span.batch is None else str(span.batch))
    room = _LETTER_FRACTION * len(label) * 1e3 * (shown[1] - shown[0])
    if not is_wait(span) and right - left > room:
        axes.text((left + right) / 2, height, label, ha="center", va="center", fontsize=7, color="white")
