"""Tables for the terminal and for Markdown, and the figures of summary.json."""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median, stdev
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from dglx_dist.memory import format_bytes
from dglx_dist.planner.records import Choice, Prediction
from dglx_dist.progress import escape_lines, visible
from dglx_dist.records import EpochRecord

PHASES = (
    ("wait for the loader", "wait_s", "#c44e52"),
    ("compute", "compute_s", "#4c72b0"),
    ("exchange", "exchange_s", "#dd8452"),
)
"""Label, field of EpochRecord and colour of the consecutive phases of the training loop."""
HIDDEN = (("sample (threads)", "sample_s", "#55a868"), ("fetch (threads)", "fetch_s", "#8172b3"))
"""The same for the loader's threads, which run beside the training loop."""
INSIDE, OUTSIDE = "#9ecae1", "#d62728"
COLORS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860", "#da8bc3", "#64b5cd")
"""Colours of runs, batches or intervals, which take them in turn."""


def format_count(count: float) -> str:
    """Format a count with a space between thousands: 12345.6 gives ``12 346``."""
    return f"{count:,.0f}".replace(",", " ")


def plural(count: object, noun: str) -> str:
    """Format a count with its noun: (1, "rank") gives ``1 rank``, (2, "class") gives ``2 classes``."""
    shown = f"{count:g}" if isinstance(count, float) else count
    return f"{shown} {noun}" if count == 1 else f"{shown} {noun}{'es' if noun.endswith('s') else 's'}"


def format_seconds(seconds: float) -> str:
    """Format seconds: 0.0123 gives ``0.012``, 75.3 gives ``75.3``."""
    return f"{seconds:.3f}" if abs(seconds) < 10 else f"{seconds:.1f}"


def format_percent(fraction: float | None) -> str:
    """Format a fraction as a percentage: 0.8123 gives ``81.2 %``, None gives ``""``."""
    return "" if fraction is None else f"{100 * fraction:.1f} %"


def format_score(value: float | None) -> str:
    """Format a metric: 0.81234 gives ``0.8123``, None gives ``""``."""
    return "" if value is None else f"{value:.4g}" if abs(value) >= 10 else f"{value:.4f}"


def _table(names: Iterable[str], caption: str | None = None) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption=caption, caption_justify="left")
    for name in names:
        table.add_column(Text(escape_lines(name)), justify="right", no_wrap=True)
    return table


_PLAN_COLUMNS = (
    "", "strategy, options", "s", "from", "to", "compute", "network", "bytes out", "bytes in", "memory",
    "GPU", "steps", "",
)  # fmt: skip
_OF_TRIALS = ("from", "to")
_OF_PLANS = ("compute", "network")
_PLAN_LEGEND = (
    "s: seconds of an epoch. {seconds}. bytes: payload of an epoch between servers and inside of them, "
    "counted, or expected with ~. memory: peak of a rank on the host, and on its GPU. exact: the same "
    "weights as one process on the same batches. group_size: ranks that share the columns of the features. "
    "hops: layers whose rows are fetched once. batches: pieces of an epoch. cache: policy and share of own "
    "nodes."
)
_SECONDS_OF_TRIALS = "They are the median of the timed turns, and the fastest and slowest one"
_SECONDS_OF_PLANS = "They are computing time of one process here, and bytes divided by the links' bandwidth"


def build_plan_table(choice: Choice) -> Table:
    """Return a table with one row per candidate in the order of ``choice``. The chosen one is marked."""
    is_tried = any(prediction.trial for prediction in choice.predictions)
    hidden = {*(_OF_PLANS if is_tried else _OF_TRIALS)}
    if not choice.cluster.device_memory_bytes:
        hidden.add("GPU")
    seconds = _SECONDS_OF_TRIALS if is_tried else _SECONDS_OF_PLANS
    names = [name for name in _PLAN_COLUMNS if name not in hidden]
    table = _table(names, _PLAN_LEGEND.format(seconds=seconds))
    for column, wraps in ((1, True), (-2, False), (-1, True)):
        table.columns[column].justify, table.columns[column].no_wrap = "left", not wraps

    for row, prediction in enumerate(choice.predictions):
        eligible = prediction.feasible and not prediction.barred
        style = "bold" if row == choice.picked else ("" if eligible else "dim")
        following = choice.predictions[row + 1 : row + 2]
        last = eligible and any(successor.barred or not successor.feasible for successor in following)
        cells = zip(_PLAN_COLUMNS, _plan_cells(prediction, chosen=row == choice.picked), strict=True)
        table.add_row(*(cell for name, cell in cells if name not in hidden), style=style, end_section=last)

    return table


def _plan_cells(prediction: Prediction, *, chosen: bool) -> tuple[str, ...]:
    limit = f"only with {prediction.barred}" if prediction.barred else ""
    remark = prediction.why_not or "; ".join(filter(None, (prediction.not_tried, limit, prediction.note)))
    kind = "exact" if prediction.candidate.exact else "estimate"
    prefix = "" if prediction.bytes_exact else "~"
    trial = prediction.trial
    numbers = (
        [""] * 5
        if not prediction.epoch_seconds
        else [
            format_seconds(prediction.epoch_seconds),
            *(["", ""] if trial is None else map(format_seconds, (trial.low, trial.high))),
            *map(format_seconds, (prediction.compute_s, prediction.network_s)),
        ]
    )
    sizes = (
        [""] * 4
        if not prediction.memory_bytes
        else [
            prefix + format_bytes(prediction.inter_server_bytes),
            prefix + format_bytes(prediction.intra_server_bytes),
            format_bytes(prediction.memory_bytes - prediction.device_memory_bytes),
            format_bytes(prediction.device_memory_bytes),
        ]
    )
    return ("->" if chosen else "", prediction.candidate.name, *numbers, *sizes, kind, remark)


def format_plan_head(choice: Choice) -> str:
    """Describe the graph, the training and the cluster of a plan."""
    graph, cluster = choice.graph, choice.cluster
    return (
        f"{visible(graph.name)}: {format_count(graph.nodes)} nodes, {format_count(graph.edges)} edges, "
        f"{graph.features} features, {format_percent(graph.edge_cut)} of the edges between servers "
        f"({graph.method})\n"
        f"{choice.trained}\n"
        f"{plural(cluster.servers, 'server')} x {plural(cluster.ranks_per_server, 'rank')}, "
        f"{format_bytes(cluster.external_bytes_per_s)}/s outside, "
        f"{format_bytes(cluster.internal_bytes_per_s)}/s inside, "
        f"{plural(cluster.cores, 'core')} and {format_bytes(cluster.memory_bytes)} a rank"
        + (f", {format_bytes(cluster.device_memory_bytes)} on its GPU" * bool(cluster.device_memory_bytes))
    )


def summarise(facts: Mapping[str, object], epochs: Sequence[EpochRecord]) -> dict[str, object]:
    """Return the content of ``summary.json``: the ``facts`` of the run, and figures of its epochs.

    The first epoch warms caches and compiles kernels, so it is left out if there are others.
    ``epoch_seconds`` and ``samples_per_second`` are medians, ``bytes_*`` and ``phase_seconds`` are means.
    ``checkpoint_seconds`` is the time that training stood still for checkpoints in all epochs, and
    ``evaluation_seconds`` the time of all evaluations. ``evaluation_bytes_outside`` is a mean over these.
    """
    warm = list(epochs[1:]) or list(epochs)
    evaluated = [e for e in epochs if e.evaluation_s]
    hits = sum(e.cache_hits for e in warm)
    misses = sum(e.cache_misses for e in warm)
    return {
        **facts,
        "epochs": len(epochs),
        "epoch_seconds": median(e.seconds for e in warm) if warm else None,
        "samples_per_second": median(e.samples_per_second for e in warm) if warm else None,
        "bytes_inside": round(fmean(e.bytes_inside for e in warm)) if warm else 0,
        "bytes_outside": round(fmean(e.bytes_outside for e in warm)) if warm else 0,
        # There is no rate if no row of a cached tensor was remote.
        **({"cache_hit_rate": hits / (hits + misses)} if hits + misses else {}),
        **(_summarise_evaluations(evaluated) if evaluated else {}),
        **({"checkpoint_seconds": pauses} if (pauses := sum(e.checkpoint_s for e in epochs)) else {}),
        "phase_seconds": average_phases(warm),
    }


def _summarise_evaluations(epochs: Sequence[EpochRecord]) -> dict[str, object]:
    return {
        "evaluation_seconds": sum(epoch.evaluation_s for epoch in epochs),
        "evaluation_bytes_outside": round(fmean(epoch.evaluation_bytes_outside for epoch in epochs)),
    }


def format_run_title(summary: Mapping[str, object], config: Mapping[str, object]) -> str:
    """Return the heading of a run's picture."""
    facts = {**config, **summary}
    return (
        f"{facts.get('graph', '?')}: {facts.get('model', '?')} by {facts.get('strategy', '?')}, "
        f"{plural(facts.get('ranks', '?'), 'rank')} on {plural(facts.get('servers', '?'), 'server')}"
    )


def average_phases(epochs: Sequence[EpochRecord]) -> dict[str, float]:
    """Return the mean seconds per epoch of each phase, empty without epochs."""
    phases = ("sample", "fetch", "wait", "compute", "exchange") if epochs else ()
    return {phase: fmean(getattr(record, f"{phase}_s") for record in epochs) for phase in phases}


_EPOCH_COLUMNS = (
    "seconds", "samples/s", "sample", "fetch", "wait", "compute", "exchange", "inside", "outside",
)  # fmt: skip


def build_epoch_table(epochs: Iterable[EpochRecord], width: int = 1000) -> Table:
    """Return a table with one row per epoch: loss, metrics, seconds, samples/s, phases in seconds, and bytes.

    ``train`` is the accuracy during training, ``val`` the exact one of validation, and other validation
    metrics have their own columns. ``sample`` and ``fetch`` run on the loader's threads beside the other
    phases, so the columns do not sum to ``seconds``. ``wait`` is the part of them that is not hidden.
    ``hits`` is the hit rate of a cache of remote rows, and ``saving`` the time that training stood still for
    checkpoints.

    Cost columns with only zeros are left out, and so are the last columns that do not fit in ``width``
    characters.
    """
    epochs = list(epochs)
    scores: dict[str, list[str]] = {}
    if any(not math.isnan(record.train_accuracy) for record in epochs):
        scores["train"] = [format_percent(record.train_accuracy) for record in epochs]
    if any(record.val_accuracy is not None for record in epochs):
        scores["val"] = [format_percent(record.val_accuracy) for record in epochs]
    for name in dict.fromkeys(name for record in epochs for name in record.metrics):
        if name.startswith("val_") and name != "val_accuracy":
            # The heading has two lines, because link prediction has five metrics.
            scores[name.replace("_", "\n", 1)] = [format_score(record.metrics.get(name)) for record in epochs]

    costs = dict(zip(_EPOCH_COLUMNS, map(list, zip(*map(_epoch_cells, epochs), strict=True)), strict=False))
    if any(record.cache_hit_rate is not None for record in epochs):
        costs["hits"] = [format_percent(record.cache_hit_rate) for record in epochs]
    costs["saving"] = [format_seconds(record.checkpoint_s) for record in epochs]
    costs["eval"] = [format_seconds(record.evaluation_s) for record in epochs]
    costs["eval\noutside"] = [format_bytes(record.evaluation_bytes_outside) for record in epochs]
    required = {
        "epoch": [str(record.epoch) for record in epochs],
        "loss": [f"{record.loss:.4f}" for record in epochs],
        **scores,
    }
    shown = required | {name: cells for name, cells in costs.items() if not _ZEROS.issuperset(cells)}
    while len(shown) > len(required) and _measure_width(shown) > width:
        shown.popitem()
    dropped = [name for name in costs if name not in shown and not _ZEROS.issuperset(costs[name])]
    table = _table(shown, _EPOCH_LEGEND + (f"; no room for {', '.join(dropped)}" if dropped else ""))
    for cells in zip(*shown.values(), strict=True):
        table.add_row(*cells)
    return table


_ZEROS = frozenset(("0.000", "0 B"))


def _measure_width(columns: Mapping[str, Sequence[str]]) -> int:
    return -1 + sum(3 + max(map(len, (*name.split("\n"), *cells))) for name, cells in columns.items())


_EPOCH_LEGEND = (
    "times in seconds; phases are means over ranks: sample and fetch run on the loader's threads, and wait "
    "is the time that training waited for them; bytes inside / outside the servers, all ranks; saving, eval: "
    "checkpoints and evaluations"
)


def _epoch_cells(record: EpochRecord) -> tuple[str, ...]:
    phases = (record.sample_s, record.fetch_s, record.wait_s, record.compute_s, record.exchange_s)
    return (
        format_seconds(record.seconds),
        format_count(record.samples_per_second),
        *(format_seconds(seconds) for seconds in phases),
        format_bytes(record.bytes_inside),
        format_bytes(record.bytes_outside),
    )


def build_summary_table(summary: Mapping[str, object]) -> Table:
    """Return a table of the figures of ``summary.json``, one per row. Nested ones are ``outer.inner``."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, (_, cell) in flat_cells(summary).items():
        table.add_row(name, cell)
    return table


def spread(summaries: Mapping[str, Mapping[str, object]]) -> dict[str, object]:
    """Return mean and sample standard deviation of the metrics that all runs have, and the metrics of each
    run.

    The deviation of a single run is None.
    """
    metrics: dict[str, dict[str, float]] = {run: {} for run in summaries}
    for run, summary in summaries.items():
        scores = {name: value for name, value in summary.items() if name.startswith(("val_", "test_"))}
        metrics[run] = {name: value for name, value in scores.items() if isinstance(value, float)}

    # An earlier run may have other metrics.
    runs = list(metrics.values())
    shared = [name for name in runs[0] if all(name in run_metrics for run_metrics in runs)]
    columns = {name: [run_metrics[name] for run_metrics in runs] for name in shared}
    means = {name: fmean(column) for name, column in columns.items()}
    deviations = {name: stdev(column) if len(column) > 1 else None for name, column in columns.items()}
    return {"runs": metrics, "mean": means, "std": deviations}


def build_spread_table(summary: Mapping[str, Any]) -> Table:
    """Return a table with one row per run of :func:`spread`, followed by mean and standard deviation."""
    cells = spread_cells(summary)
    table = _table(("run", *cells))
    for run, values in summary["runs"].items():
        table.add_row(run, *(_format_cell(values.get(name), name) for name in cells))
    table.add_row("mean ± std", *(text for _, text in cells.values()), style="bold")
    return table


def spread_cells(summary: Mapping[str, Any]) -> dict[str, tuple[object, str]]:
    """Return (mean, text of mean and standard deviation) of each metric of :func:`spread`."""
    deviations = {name: _format_cell(summary["std"][name], name) for name in summary["mean"]}
    means = summary["mean"].items()
    return {name: (mean, f"{_format_cell(mean, name)} ± {deviations[name]}") for name, mean in means}


def build_runs_table(summaries: Mapping[str, Mapping[str, object]]) -> Table:
    """Return a table with the figures of several runs: one figure per row, one column per run."""
    table = Table("", *summaries, box=box.SIMPLE_HEAD, pad_edge=False)
    columns = [flat_cells(summary) for summary in summaries.values()]
    for row in dict.fromkeys(name for cells in columns for name in cells):
        table.add_row(row, *(cells.get(row, (None, "-"))[1] for cells in columns))
    return table


def flat_cells(values: Mapping[str, object]) -> dict[str, tuple[object, str]]:
    """Return (value, text) of each figure that is not drawn. Nested ones are ``outer.inner``."""
    cells: dict[str, tuple[object, str]] = {}
    for name, value in values.items():
        if name in ("traffic", "rank_memory_bytes"):
            continue
        nested = value if isinstance(value, Mapping) else {"": value}
        for inner_name, figure in nested.items():
            key = f"{name}.{inner_name}" if nested is value else name
            cells[key] = (figure, _format_cell(figure, str(inner_name), name))
    return cells


def _format_cell(value: object, *names: str) -> str:
    # The unit follows from the names.
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if any(name.endswith(("accuracy", "hit_rate")) for name in names):
        return format_percent(value)
    if any(name.startswith(("val_", "test_")) for name in names):
        return format_score(value)
    if any("bytes" in name for name in names):
        return format_bytes(value)
    if any(name.endswith("seconds") for name in names):
        return f"{format_seconds(value)} s"
    return format_count(value) if abs(value) >= 100 else f"{value:g}"


def build_parts_table(columns: Mapping[str, Sequence[object]]) -> Table:
    """Return a table with one row per part and the given columns of one value per part."""
    table = _table(["part", *columns])
    for part, values in enumerate(zip(*columns.values(), strict=True)):
        table.add_row(str(part), *(str(value) for value in values))
    return table


def build_expansion_table(
    factors: Sequence[Sequence[float]], foreign: Sequence[int], row_bytes: int, work: Sequence[float]
) -> Table:
    """Return a table with one row per hop: nodes held by each server relative to its own, and the largest
    cost.

    Args:
        factors: (K + 1, S) nodes within h hops relative to own nodes.
        foreign: (K + 1,) nodes of other servers, on the server with the most such nodes.
        work: (K + 1,) edges aggregated by a model of h layers, relative to those without replicas.
    """
    servers = len(factors[0])
    heads = ["least", "mean", "most"]
    if servers <= _MAX_COLUMNS:
        heads = [f"server {server}" for server in range(servers)]
    table = _table(("hops", *heads, "foreign nodes", "features", "work"), _EXPANSION_LEGEND)
    for hop, (row, nodes, times) in enumerate(zip(factors, foreign, work, strict=True)):
        figures = row if servers <= _MAX_COLUMNS else [min(row), sum(row) / servers, max(row)]
        table.add_row(
            str(hop),
            *(f"{factor:.2f}" for factor in figures),
            format_count(nodes),
            format_bytes(nodes * row_bytes),
            f"{times:.2f}",
        )

    return table


_MAX_COLUMNS = 8
_EXPANSION_LEGEND = (
    "nodes within this number of hops, relative to the server's own nodes. shared_preload holds them for a "
    "model with this number of layers. Foreign nodes and features (loaded once) and work of an epoch "
    "(relative to full_graph) are those of the server with the most."
)
