"""Draw pictures as PNG files: epochs, parts, expansion, and schedules from traces."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator

from dglx_dist.comm.trace import (
    COMPUTE,
    GRAPH_SERVER,
    LOADER,
    NETWORK,
    PARAMETER_SERVER,
    WAIT,
    WORKER,
    RankSpans,
    Span,
    TraceFile,
    assign_tracks,
)
from dglx_dist.data.storage.files import replace_atomically
from dglx_dist.errors import ConfigError
from dglx_dist.progress import escape_lines, visible
from dglx_dist.records import STANDARD_ERROR, EpochRecord
from dglx_dist.report.tables import COLORS, HIDDEN, INSIDE_COLOR, OUTSIDE_COLOR, PHASES, format_percent


def overlap(trace: TraceFile, row: str = NETWORK) -> float | None:
    """Return the share of transfer time in which the rank also computed, summed over the ranks.

    With the workers' ``row``, it is their task time instead of transfer time. Waiting is not computing.
    Return None if no span is in ``row``.
    """
    busy_s = 0.0
    overlap_s = 0.0
    for rank in trace.ranks:
        busy = [span for span in rank.spans if span.row == row and not is_wait(span)]
        work = [span for span in rank.spans if span.row in (COMPUTE, GRAPH_SERVER)]
        waits = [span for span in work if is_wait(span)]
        busy_s += _sum_covered(busy)
        # Computing time that no span in the row overlaps is subtracted.
        alone_s = _sum_covered([*busy, *work]) - _sum_covered([*busy, *waits])
        overlap_s += _sum_covered(work) - _sum_covered(waits) - alone_s

    if busy_s <= 0:
        return None
    return overlap_s / busy_s


def is_wait(span: Span) -> bool:
    """Return whether the row of ``span`` waits."""
    return span.name.startswith(WAIT)


def _sum_covered(spans: Iterable[Span]) -> float:
    """Return the seconds in which at least one of ``spans`` runs."""
    total_s = 0.0
    covered_until_s = -math.inf
    for begin_s, end_s in sorted((span.begin_s, span.end_s) for span in spans):
        total_s += max(end_s - max(begin_s, covered_until_s), 0.0)
        covered_until_s = max(covered_until_s, end_s)
    return total_s


def _choose_range(
    trace: TraceFile, row: str, requested: tuple[int, int] | None, *, unit: str, usual: int, early: int = 0
) -> tuple[int, int]:
    """Return the first and the last batch to draw, which have spans in ``row``.

    ``requested`` is the user's range. None: ``usual`` batches in the middle, moved by ``early`` / 2. Raises
    ConfigError if the trace has no batch, which the message calls ``unit``, in the range.
    """
    batches = set()
    for rank in trace.ranks:
        batches |= {span.batch for span in rank.spans if span.row == row and span.batch is not None}
    batch_ids = sorted(batches)
    if not batch_ids:
        raise ConfigError(f"the trace has no {unit} to draw. Record more with --trace-steps.")
    if requested is None:
        start = max((len(batch_ids) - usual + early) // 2, 0)
        end = min(start + usual, len(batch_ids))
        return batch_ids[start], batch_ids[end - 1]

    first, last = requested
    if not any(first <= batch <= last for batch in batch_ids):
        raise ConfigError(
            f"the trace has no {unit} from {first} to {last}, only {batch_ids[0]} to {batch_ids[-1]}. Choose "
            "others with --batches FIRST:LAST."
        )
    return max(first, batch_ids[0]), min(last, batch_ids[-1])


def _find_window(
    trace: TraceFile, first: int, last: int, rows: Collection[str] | None = None
) -> tuple[float, float]:
    """Return when the batches ``first`` to ``last`` begin and end, in seconds, with a small margin.

    Only spans in ``rows`` count. None: in all rows.
    """
    begins_s = []
    ends_s = []
    for rank in trace.ranks:
        for span in rank.spans:
            is_drawn = span.batch is not None and first <= span.batch <= last
            if is_drawn and (rows is None or span.row in rows) and not is_wait(span):
                begins_s.append(span.begin_s)
                ends_s.append(span.end_s)

    margin_s = 0.01 * (max(ends_s) - min(begins_s))
    return min(begins_s) - margin_s, max(ends_s) + margin_s


_MAX_LEGEND = 8
"""Maximum number of servers with a legend."""


@contextmanager
def _picture(
    path: str | Path, size: tuple[float, float], title: str, panels: tuple[int, int] = (1, 1)
) -> Iterator[Any]:
    """Yield the panels' axes row by row, then write ``path`` as PDF, SVG or PNG by its suffix."""
    figure = Figure(figsize=size, layout="constrained")
    yield figure.subplots(*panels, squeeze=False).ravel()
    figure.suptitle(visible(title), fontsize=10)
    for text in figure.findobj(Text):
        # The user's names may contain formula characters.
        text.set(text=escape_lines(text.get_text()), parse_math=False)

    file_format = Path(path).suffix[1:]
    if file_format not in ("pdf", "svg"):
        file_format = "png"
    # An interruption does not damage an earlier picture.
    with replace_atomically(Path(path)) as partial:
        figure.savefig(partial, dpi=100, format=file_format)


def draw(epochs: Sequence[EpochRecord], path: str | Path, *, title: str) -> None:
    """Draw each epoch's loss, accuracy, phases and bytes to a PNG file."""
    with _picture(path, (13, 4), title, (1, 3)) as (learning, phases, traffic):
        _draw_learning(learning, epochs)
        _draw_phases(phases, epochs)
        _draw_traffic(traffic, epochs)


def _draw_learning(axes: Any, epochs: Sequence[EpochRecord]) -> None:
    """Draw the loss and, with an axis on the right, the accuracy in training and the validation metric."""
    axes.plot([e.epoch for e in epochs], [e.loss for e in epochs], color="#444444", label="loss")
    right = axes.twinx()
    trained = [(e.epoch, e.train_accuracy) for e in epochs if not math.isnan(e.train_accuracy)]
    if trained:
        right.plot(*zip(*trained, strict=True), color="#4c72b0", label="train accuracy")

    name = _find_validation_metric(epochs)
    label = name.replace("_", " ", 1)
    measured = []
    for e in epochs:
        score = e.metrics.get(name, e.val_accuracy)
        if score is not None:
            measured.append((e.epoch, score))
    if measured:
        right.plot(*zip(*measured, strict=True), color="#c44e52", marker="o", markersize=3, label=label)

    metric = label.removeprefix("val ")
    axes.set(title=f"loss and {metric}", xlabel="epoch", ylabel="loss")
    right.set(ylabel=metric)
    if trained or all(0 <= score <= 1 for _, score in measured):
        right.set(ylim=(0, 1))
    # Both axes share one legend.
    handles = [*axes.get_lines(), *right.get_lines()]
    axes.legend(handles=handles, loc="center right", fontsize=8)


def _find_validation_metric(epochs: Sequence[EpochRecord]) -> str:
    """Return the name of the first validation metric, which decides which epoch is the best."""
    for record in epochs:
        for name in record.metrics:
            if name.startswith("val_") and not name.endswith(STANDARD_ERROR):
                return name
    return "val_accuracy"


def _draw_phases(axes: Any, epochs: Sequence[EpochRecord]) -> None:
    """Draw the seconds in the training loop as stacked bars, and those in the loader's threads as lines."""
    numbers = [e.epoch for e in epochs]
    totals = [0.0] * len(epochs)
    for name, field, color in PHASES:
        seconds = [getattr(e, field) for e in epochs]
        axes.bar(numbers, seconds, bottom=totals, color=color, label=name)
        totals = [total + height for total, height in zip(totals, seconds, strict=True)]
    for name, field, color in HIDDEN:
        axes.plot(numbers, [getattr(e, field) for e in epochs], color=color, linestyle="--", label=name)
    axes.set(title="seconds per epoch", xlabel="epoch", ylabel="s")

    # The first epoch compiles kernels. At full height it would flatten all others.
    warm_limit = max(totals[1:], default=0.0)
    if totals and totals[0] > 2 * warm_limit > 0:
        axes.set_ylim(0, 1.6 * warm_limit)
        axes.set_xlabel(f"epoch (the first one, {totals[0]:.2g} s, is cut off)")
    axes.legend(fontsize=8, loc="upper right")


def _draw_traffic(axes: Any, epochs: Sequence[EpochRecord]) -> None:
    """Draw each epoch's bytes as stacked bars."""
    numbers = [e.epoch for e in epochs]
    inside = [e.bytes_inside / 1e6 for e in epochs]
    axes.bar(numbers, inside, color=INSIDE_COLOR, label="inside a server")
    outside = [e.bytes_outside / 1e6 for e in epochs]
    axes.bar(numbers, outside, bottom=inside, color=OUTSIDE_COLOR, label="between servers")
    axes.set(title="payload per epoch, all ranks", xlabel="epoch", ylabel="MB")

    # The legend is above the bars. Without bytes, the axis must not be empty.
    most_bytes = max((e.bytes_inside + e.bytes_outside for e in epochs), default=1)
    axes.set_ylim(0, 1.4 * most_bytes / 1e6 or 1)
    axes.legend(fontsize=8, loc="upper right")


def draw_parts(columns: Mapping[str, Sequence[float]], path: str | Path, *, title: str) -> None:
    """Draw a panel per column (nodes, edges, ...) to a PNG file: a bar per part and a line at the mean."""
    num_columns = min(max(len(columns), 1), 2)
    num_rows = max(-(-len(columns) // num_columns), 1)
    with _picture(path, (6 * num_columns, 3.5 * num_rows), title, (num_rows, num_columns)) as panels:
        for axes, (name, values) in zip(panels, columns.items(), strict=False):
            axes.bar(range(len(values)), values, color="#4c72b0")
            axes.axhline(sum(values) / max(len(values), 1), color="#444444", linestyle="--", linewidth=1)
            axes.set(title=name, xlabel="part")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        # There are two panels per row, so an odd number leaves the last one empty.
        for axes in panels[len(columns) :]:
            axes.set_axis_off()


def draw_expansion(factors: Sequence[Sequence[float]], path: str | Path, *, title: str) -> None:
    """Draw how servers' neighbourhoods grow to a PNG file, with a line per server.

    ``factors`` are (K + 1, S): nodes within h hops from a server's own nodes, relative to these.
    """
    hops = range(len(factors))
    servers = len(factors[0])
    with _picture(path, (6, 3.5), title) as (axes,):
        for server in range(servers):
            axes.plot(hops, [row[server] for row in factors], marker="o", label=f"server {server}")
        # No neighbourhood is larger than the whole graph.
        axes.axhline(servers, color="#444444", linestyle="--", linewidth=1, label="the whole graph")
        axes.set(xlabel="hops", ylabel="nodes held / own nodes", ylim=(0, None))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if servers <= _MAX_LEGEND:
            axes.legend(fontsize=8)


WAITING_COLOR = "#eeeeee"
UNNUMBERED = "#888888"
_CHAR_WIDTH = 0.008
"""A letter's width relative to the picture. Labels that do not fit are left out."""


def _clip(span: Span, window: tuple[float, float]) -> tuple[float, float]:
    """Clip ``span`` to the ``window`` (in seconds). Return begin and end in milliseconds from its begin."""
    begin_s, end_s = window
    left_ms = 1e3 * (max(span.begin_s, begin_s) - begin_s)
    right_ms = 1e3 * (min(span.end_s, end_s) - begin_s)
    return left_ms, right_ms


def has_intervals(trace: TraceFile) -> bool:
    """Return whether the trace is from a strategy that trains in intervals."""
    return any(span.row == GRAPH_SERVER for rank in trace.ranks for span in rank.spans)


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
"""Short labels for spans. Other spans are labelled with their names."""
SPLIT = {"forward": "fD", "backward": "bD"}
"""Labels if the first layer has its own spans on top, so that what remains is the owner's side."""
_BACKWARD_PREFIXES = ("grad", "publish", "collect")
"""Name prefixes for the spans in which intervals run backward. These spans are hatched."""


def draw_trace(
    trace: TraceFile, path: str | Path, *, title: str, batches: tuple[int, int] | None = None
) -> tuple[int, int]:
    """Draw ``batches`` (first and last, or some in the middle by default) on each rank to a PNG file.

    Each batch has a colour, and waiting is grey. For a strategy that trains in intervals, the batches are
    epochs, each interval has a colour, and backward is hatched. Return the first and the last batch or epoch.
    Raises ConfigError if the trace has no such batch or epoch.
    """
    by_epoch = has_intervals(trace)
    names = SHORT
    if by_epoch:
        # The first epoch compiles kernels and starts workers.
        first, last = _choose_range(trace, GRAPH_SERVER, batches, unit="epoch", usual=2, early=1)
        window = _find_window(trace, first, last)
        units = "epochs"
        names = {}
    else:
        # The first batches compile kernels and open connections, and the last ones are drained.
        first, last = _choose_range(trace, COMPUTE, batches, unit="batch", usual=4)
        window = _find_window(trace, first, last, (COMPUTE,))
        units = "batches"
        if any(span.name == "forward M" for rank in trace.ranks for span in rank.spans):
            names = SHORT | SPLIT

    rows: list[tuple[str, list[Span]]] = []
    for rank in trace.ranks:
        rows += _list_rows(rank, window, by_epoch)
    heading = f"{title}: {units} {first} to {last}, {describe_overlap(trace)}"
    with _picture(path, (13, 1.4 + 0.38 * len(rows)), heading) as (axes,):
        for height, (_, spans) in enumerate(rows):
            for index, span in enumerate(spans):
                # Nested spans come later and lie on top.
                visible_part = _longest_part(span, spans[index + 1 :])
                _draw_span(axes, height, span, visible_part, window, names, by_epoch=by_epoch)
        window_ms = 1e3 * (window[1] - window[0])
        axes.set(xlim=(0, window_ms), ylim=(len(rows) - 0.4, -0.6), xlabel="milliseconds")
        axes.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=8)

    return first, last


def _draw_span(
    axes: Any,
    height: int,
    span: Span,
    visible_part: Span,
    window: tuple[float, float],
    names: Mapping[str, str],
    *,
    by_epoch: bool,
) -> None:
    """Draw a bar for ``span``, and its label if the bar's ``visible_part`` is wide enough."""
    label = names.get(span.name, span.name)
    color = UNNUMBERED
    color_id = span.interval if by_epoch else span.batch
    if color_id is not None:
        color = COLORS[color_id % len(COLORS)]
        label += f" i{color_id}" if by_epoch else str(color_id)

    style: dict[str, Any] = {"height": 0.8, "color": color}
    if is_wait(span):
        style = {"height": 0.45, "color": WAITING_COLOR}
    if by_epoch and span.name.startswith(_BACKWARD_PREFIXES):
        style["hatch"] = "//"
    left, right = _clip(span, window)
    axes.barh(height, right - left, left=left, edgecolor="white", linewidth=0.4, **style)

    # A label must fit in the bar's part that later bars do not cover.
    left, right = _clip(visible_part, window)
    label_width = _CHAR_WIDTH * len(label) * 1e3 * (window[1] - window[0])
    if not is_wait(span) and right - left > label_width:
        text_style = {"ha": "center", "va": "center", "fontsize": 6, "color": "white"}
        axes.text((left + right) / 2, height, label, **text_style)


def _list_rows(
    rank: RankSpans, window: tuple[float, float], by_epoch: bool
) -> Iterator[tuple[str, list[Span]]]:
    """Yield the label and the spans of each row to draw. Spans that overlap are in several rows."""
    begin_s, end_s = window
    window_spans = [span for span in rank.spans if span.end_s > begin_s and span.begin_s < end_s]
    row_names: tuple[str, ...] = (COMPUTE, NETWORK, LOADER)
    if by_epoch:
        row_names = (GRAPH_SERVER, WORKER, PARAMETER_SERVER, NETWORK)

    for row in row_names:
        row_spans = [span for span in window_spans if span.row == row]
        tracks = assign_tracks(row_spans, nested=row == COMPUTE)
        # A row without spans is drawn, too.
        for track, spans in enumerate(tracks or [[]]):
            label = ""
            if row == WORKER:
                label = f"rank {rank.rank}\n{row} {track + 1}"
            elif track == 0:
                label = f"rank {rank.rank}\n{row}"
            yield label, spans


def describe_overlap(trace: TraceFile) -> str:
    """Describe the overlap like ``82.0 % of the network's time beside compute``, or the workers' time."""
    row = NETWORK
    no_spans = "nothing on the network"
    overlap_text = "the network's time beside compute"
    if has_intervals(trace):
        row = WORKER
        no_spans = "no task of a worker"
        overlap_text = "the workers' time beside graph servers"

    fraction = overlap(trace, row)
    if fraction is None:
        return no_spans
    return f"{format_percent(fraction)} of {overlap_text}"


def _longest_part(span: Span, later: Sequence[Span]) -> Span:
    """Return the longest part of ``span`` that no span in ``later`` (in order) covers."""
    gaps = [(span.begin_s, span.begin_s)]
    begin = span.begin_s
    for cover in later:
        if cover.begin_s >= span.end_s:
            break
        gaps.append((begin, cover.begin_s))
        begin = max(begin, cover.end_s)

    gaps.append((begin, span.end_s))
    left, right = max(gaps, key=lambda part: part[1] - part[0])
    return replace(span, begin_s=left, end_s=right)
