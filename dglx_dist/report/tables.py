"""Tables for the terminal and for Markdown, and the figures in summary.json."""

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
from dglx_dist.records import STANDARD_ERROR, EpochRecord

PHASES = (
    ("wait for the loader", "wait_s", "#c44e52"),
    ("compute", "compute_s", "#4c72b0"),
    ("exchange", "exchange_s", "#dd8452"),
)
"""Label, EpochRecord field and colour for each phase in the training loop, in their order."""
HIDDEN = (("sample (threads)", "sample_s", "#55a868"), ("fetch (threads)", "fetch_s", "#8172b3"))
"""The same for the loader's threads, which run beside the training loop."""
INSIDE_COLOR = "#9ecae1"
OUTSIDE_COLOR = "#d62728"
COLORS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860", "#da8bc3", "#64b5cd")
"""Colours that runs, batches or intervals take in turn."""


def format_count(count: float) -> str:
    """Format a count with a space between thousands: 12345.6 gives ``12 346``."""
    return f"{count:,.0f}".replace(",", " ")


def plural(count: object, noun: str) -> str:
    """Format a count with its noun: (1, "rank") gives ``1 rank``, (2, "class") gives ``2 classes``."""
    text = f"{count:g}" if isinstance(count, float) else str(count)
    if count == 1:
        return f"{text} {noun}"
    suffix = "es" if noun.endswith("s") else "s"
    return f"{text} {noun}{suffix}"


def format_seconds(seconds: float) -> str:
    """Format seconds: 0.0123 gives ``0.012``, 75.3 gives ``75.3``."""
    return f"{seconds:.3f}" if abs(seconds) < 10 else f"{seconds:.1f}"


def format_percent(fraction: float | None) -> str:
    """Format a fraction as a percentage: 0.8123 gives ``81.2 %``, None gives ``""``."""
    return "" if fraction is None else f"{100 * fraction:.1f} %"


def format_score(value: float | None) -> str:
    """Format a metric: 0.81234 gives ``0.8123``, None gives ``""``."""
    if value is None:
        return ""
    return f"{value:.4g}" if abs(value) >= 10 else f"{value:.4f}"


def _build_table(names: Iterable[str], caption: str | None = None) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption=caption, caption_justify="left")
    for name in names:
        table.add_column(Text(escape_lines(name)), justify="right", no_wrap=True)
    return table


_PLAN_COLUMNS = (
    "", "strategy, options", "s", "from", "to", "compute", "network", "bytes out", "bytes in", "memory",
    "GPU", "steps", "",
)  # fmt: skip
_TRIAL_COLUMNS = ("from", "to")
_ESTIMATE_COLUMNS = ("compute", "network")
_PLAN_LEGEND = (
    "s: seconds of an epoch without evaluations. {seconds}. bytes: payload of an epoch between servers and "
    "inside of them, counted, or expected with ~. memory: peak of a rank on the host, and on its GPU. "
    "exact: the same weights as one process on the same batches. group_size: ranks that share the columns of "
    "the features. hops: layers whose rows are fetched once. batches: pieces of an epoch. cache: policy and "
    "share of own nodes."
)
_TRIAL_LEGEND = "They are the median of the timed turns, and the fastest and slowest one"
_ESTIMATE_LEGEND = "They are computing time of one process here, and bytes divided by the links' bandwidth"


def build_plan_table(choice: Choice) -> Table:
    """Build a table with one row per candidate in the order of ``choice``. The chosen one is marked."""
    if any(prediction.trial for prediction in choice.predictions):
        hidden_columns = set(_ESTIMATE_COLUMNS)
        seconds_legend = _TRIAL_LEGEND
    else:
        hidden_columns = set(_TRIAL_COLUMNS)
        seconds_legend = _ESTIMATE_LEGEND
    if not choice.cluster.device_memory_bytes:
        hidden_columns.add("GPU")

    names = [name for name in _PLAN_COLUMNS if name not in hidden_columns]
    table = _build_table(names, _PLAN_LEGEND.format(seconds=seconds_legend))
    name_column = table.columns[1]
    steps_column, remark_column = table.columns[-2:]
    for text_column in (name_column, steps_column, remark_column):
        text_column.justify = "left"
    # Names and remarks may be long, so their text is wrapped.
    name_column.no_wrap = False
    remark_column.no_wrap = False

    for row, prediction in enumerate(choice.predictions):
        is_chosen = row == choice.picked
        is_eligible = _is_eligible(prediction)
        if is_chosen:
            style = "bold"
        elif is_eligible:
            style = ""
        else:
            style = "dim"

        # A rule separates the candidates that may be chosen from the others.
        has_next = row + 1 < len(choice.predictions)
        end_section = is_eligible and has_next and not _is_eligible(choice.predictions[row + 1])

        cells = ("->" if is_chosen else "", *_format_prediction(prediction))
        named_cells = zip(_PLAN_COLUMNS, cells, strict=True)
        shown_cells = [cell for name, cell in named_cells if name not in hidden_columns]
        table.add_row(*shown_cells, style=style, end_section=end_section)
    return table


def _is_eligible(prediction: Prediction) -> bool:
    return prediction.feasible and not prediction.barred


def _format_prediction(prediction: Prediction) -> tuple[str, ...]:
    """Format the cells in a plan's columns, from the candidate's name to the remark."""
    seconds = ["", "", "", "", ""]
    if prediction.epoch_seconds:
        seconds[0] = format_seconds(prediction.epoch_seconds)
        if prediction.trial is not None:
            seconds[1] = format_seconds(prediction.trial.low)
            seconds[2] = format_seconds(prediction.trial.high)
        seconds[3] = format_seconds(prediction.compute_s)
        seconds[4] = format_seconds(prediction.network_s)

    sizes = ["", "", "", ""]
    if prediction.memory_bytes:
        prefix = "" if prediction.bytes_exact else "~"
        sizes = [
            prefix + format_bytes(prediction.inter_server_bytes),
            prefix + format_bytes(prediction.intra_server_bytes),
            format_bytes(prediction.memory_bytes - prediction.device_memory_bytes),
            format_bytes(prediction.device_memory_bytes),
        ]

    remark = prediction.why_not
    if not remark:
        limit = f"only with {prediction.barred}" if prediction.barred else ""
        remark = "; ".join(filter(None, (prediction.not_tried, limit, prediction.note)))
    steps = "exact" if prediction.candidate.exact else "estimate"
    return (prediction.candidate.name, *seconds, *sizes, steps, remark)


def format_plan_head(choice: Choice) -> str:
    """Describe a plan's graph, training and cluster."""
    graph = choice.graph
    cluster = choice.cluster
    text = (
        f"{visible(graph.name)}: {format_count(graph.nodes)} nodes, {format_count(graph.edges)} edges, "
        f"{graph.features} features, {format_percent(graph.edge_cut)} of the edges between servers "
        f"({graph.method})\n"
        f"{choice.trained}\n"
        f"{plural(cluster.servers, 'server')} x {plural(cluster.ranks_per_server, 'rank')}, "
        f"{format_bytes(cluster.external_bytes_per_s)}/s outside, "
        f"{format_bytes(cluster.internal_bytes_per_s)}/s inside, "
        f"{plural(cluster.cores, 'core')} and {format_bytes(cluster.memory_bytes)} a rank"
    )
    if cluster.device_memory_bytes:
        text += f", {format_bytes(cluster.device_memory_bytes)} on its GPU"
    return text


def summarise(facts: Mapping[str, object], epochs: Sequence[EpochRecord]) -> dict[str, object]:
    """Return the content for ``summary.json``: the ``facts`` about the run, and figures from its epochs.

    The first epoch warms caches and compiles kernels, so it is left out if there are others.
    ``epoch_seconds`` and ``samples_per_second`` are medians, ``bytes_*`` and ``phase_seconds`` are means.
    ``checkpoint_seconds`` is the time that training stood still for checkpoints in all epochs, and
    ``evaluation_seconds`` the time that all evaluations took. ``evaluation_bytes_outside`` is a mean over
    these.
    """
    warm = epochs[1:] or epochs
    summary = {
        **facts,
        "epochs": len(epochs),
        "epoch_seconds": None,
        "samples_per_second": None,
        "bytes_inside": 0,
        "bytes_outside": 0,
    }
    if warm:
        summary["epoch_seconds"] = median(record.seconds for record in warm)
        summary["samples_per_second"] = median(record.samples_per_second for record in warm)
        summary["bytes_inside"] = round(fmean(record.bytes_inside for record in warm))
        summary["bytes_outside"] = round(fmean(record.bytes_outside for record in warm))

    # There is no rate if no cached tensor had a remote row.
    num_hits = sum(record.cache_hits for record in warm)
    num_misses = sum(record.cache_misses for record in warm)
    if num_hits + num_misses:
        summary["cache_hit_rate"] = num_hits / (num_hits + num_misses)

    evaluated = [record for record in epochs if record.evaluation_s]
    if evaluated:
        mean_bytes = fmean(record.evaluation_bytes_outside for record in evaluated)
        summary["evaluation_seconds"] = sum(record.evaluation_s for record in evaluated)
        summary["evaluation_bytes_outside"] = round(mean_bytes)
    checkpoint_seconds = sum(record.checkpoint_s for record in epochs)
    if checkpoint_seconds:
        summary["checkpoint_seconds"] = checkpoint_seconds
    summary["phase_seconds"] = average_phases(warm)
    return summary


def format_run_title(summary: Mapping[str, object], config: Mapping[str, object]) -> str:
    """Return the heading for a run's picture."""
    facts = {**config, **summary}
    ranks = plural(facts.get("ranks", "?"), "rank")
    servers = plural(facts.get("servers", "?"), "server")
    model = f"{facts.get('model', '?')} by {facts.get('strategy', '?')}"
    return f"{facts.get('graph', '?')}: {model}, {ranks} on {servers}"


def average_phases(epochs: Sequence[EpochRecord]) -> dict[str, float]:
    """Return each phase's mean seconds per epoch, empty without epochs."""
    means: dict[str, float] = {}
    if not epochs:
        return means
    for phase in ("sample", "fetch", "wait", "compute", "exchange"):
        means[phase] = fmean(getattr(record, f"{phase}_s") for record in epochs)
    return means


def build_epoch_table(epochs: Iterable[EpochRecord], width: int = 1000) -> Table:
    """Build a table with one row per epoch: loss, metrics, seconds, samples/s, phases in seconds, and bytes.

    ``train`` is the accuracy during training, ``val`` the validation accuracy, and other validation metrics
    have their own columns. Estimates have their standard error after ``±``. ``sample`` and ``fetch`` run on
    the loader's threads beside the other phases, so the columns do not sum to ``seconds``. ``wait`` is the
    part that is not hidden. ``hits`` is the hit rate in a cache for remote rows, and ``saving`` the time that
    training stood still for checkpoints.

        Cost columns with only zeros are left out, and so are the last columns that do not fit in ``width``
        characters.
    """
    epochs = list(epochs)
    scores = _list_score_columns(epochs)
    costs: dict[str, list[str]] = {}
    for record in epochs:
        for name, cell in _format_costs(record).items():
            costs.setdefault(name, []).append(cell)

    columns = dict(scores)
    for name, cells in costs.items():
        if not _ZEROS.issuperset(cells):
            columns[name] = cells
    # The last columns are the least important ones.
    dropped_names: list[str] = []
    while len(columns) > len(scores) and _measure_width(columns) > width:
        name, _ = columns.popitem()
        dropped_names.insert(0, name)
    legend = _EPOCH_LEGEND
    if dropped_names:
        legend += f"; no room for {', '.join(dropped_names)}"

    table = _build_table(columns, legend)
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    return table


def _list_score_columns(epochs: Sequence[EpochRecord]) -> dict[str, list[str]]:
    """List the cells with epoch, loss and metrics by heading. Metrics that no epoch has are left out."""
    columns = {
        "epoch": [str(record.epoch) for record in epochs],
        "loss": [f"{record.loss:.4f}" for record in epochs],
    }
    if any(not math.isnan(record.train_accuracy) for record in epochs):
        columns["train"] = [format_percent(record.train_accuracy) for record in epochs]
    if any(record.val_accuracy is not None for record in epochs):
        columns["val"] = []
        for record in epochs:
            error = record.metrics.get(f"val_accuracy{STANDARD_ERROR}")
            suffix = "" if error is None else f" ± {100 * error:.1f}"
            columns["val"].append(f"{format_percent(record.val_accuracy)}{suffix}")

    names: dict[str, None] = {}
    for record in epochs:
        names |= dict.fromkeys(record.metrics)
    for name in names:
        if name.startswith("val_") and name != "val_accuracy" and not name.endswith(STANDARD_ERROR):
            # The heading has two lines, because link prediction has five metrics.
            heading = name.replace("_", "\n", 1)
            columns[heading] = []
            for record in epochs:
                error = record.metrics.get(f"{name}{STANDARD_ERROR}")
                suffix = "" if error is None else f" ± {format_score(error)}"
                columns[heading].append(f"{format_score(record.metrics.get(name))}{suffix}")
    return columns


def _format_costs(record: EpochRecord) -> dict[str, str]:
    """Format the cells with seconds and bytes by heading, the most important column first."""
    return {
        "seconds": format_seconds(record.seconds),
        "samples/s": format_count(record.samples_per_second),
        "sample": format_seconds(record.sample_s),
        "fetch": format_seconds(record.fetch_s),
        "wait": format_seconds(record.wait_s),
        "compute": format_seconds(record.compute_s),
        "exchange": format_seconds(record.exchange_s),
        "inside": format_bytes(record.bytes_inside),
        "outside": format_bytes(record.bytes_outside),
        "hits": format_percent(record.cache_hit_rate),
        "saving": format_seconds(record.checkpoint_s),
        "eval": format_seconds(record.evaluation_s),
        "eval\noutside": format_bytes(record.evaluation_bytes_outside),
    }


_ZEROS = frozenset(("", "0.000", "0 B"))
"""Cells that show no cost."""


def _measure_width(columns: Mapping[str, Sequence[str]]) -> int:
    """Return a table's width in characters. Three characters separate neighbouring columns."""
    width = -1
    for name, cells in columns.items():
        width += 3 + max(map(len, (*name.split("\n"), *cells)))
    return width


_EPOCH_LEGEND = (
    "times in seconds; phases are means over ranks: sample and fetch run on the loader's threads, and wait "
    "is the time that training waited for them; bytes inside / outside the servers, all ranks; saving, eval: "
    "checkpoints and evaluations"
)


def build_summary_table(summary: Mapping[str, object]) -> Table:
    """Build a table with the figures in ``summary.json``, one per row. Nested ones are ``outer.inner``."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, (_, text) in flat_cells(summary).items():
        table.add_row(name, text)
    return table


def spread(summaries: Mapping[str, Mapping[str, object]]) -> dict[str, object]:
    """Compute each metric's mean and sample standard deviation over runs, and list each run's metrics.

    Only metrics that all runs have are averaged. A single run has None as its deviation.
    """
    metrics: dict[str, dict[str, float]] = {}
    for run, summary in summaries.items():
        metrics[run] = {}
        for name, value in summary.items():
            if name.startswith(("val_", "test_")) and isinstance(value, float):
                metrics[run][name] = value

    means = {}
    deviations = {}
    runs = list(metrics.values())
    for name in runs[0]:
        values = [run_metrics[name] for run_metrics in runs if name in run_metrics]
        # An earlier run may have other metrics.
        if len(values) == len(runs):
            means[name] = fmean(values)
            deviations[name] = stdev(values) if len(values) > 1 else None
    return {"runs": metrics, "mean": means, "std": deviations}


def build_spread_table(summary: Mapping[str, Any]) -> Table:
    """Build a table with one row per run in :func:`spread`, followed by mean and standard deviation."""
    cells = spread_cells(summary)
    table = _build_table(("run", *cells))
    for run, values in summary["runs"].items():
        table.add_row(run, *(_format_cell(values.get(name), name) for name in cells))
    table.add_row("mean ± std", *(text for _, text in cells.values()), style="bold")
    return table


def spread_cells(summary: Mapping[str, Any]) -> dict[str, tuple[object, str]]:
    """For each metric in a :func:`spread`, return the mean, and a text with mean and standard deviation."""
    cells: dict[str, tuple[object, str]] = {}
    for name, mean in summary["mean"].items():
        deviation = _format_cell(summary["std"][name], name)
        cells[name] = (mean, f"{_format_cell(mean, name)} ± {deviation}")
    return cells


def build_runs_table(summaries: Mapping[str, Mapping[str, object]]) -> Table:
    """Build a table with several runs' figures: one figure per row, one column per run."""
    table = Table("", *summaries, box=box.SIMPLE_HEAD, pad_edge=False)
    cells_of_runs = [flat_cells(summary) for summary in summaries.values()]
    names: dict[str, None] = {}
    for cells in cells_of_runs:
        names |= dict.fromkeys(cells)
    for name in names:
        texts = [cells.get(name, (None, "-"))[1] for cells in cells_of_runs]
        table.add_row(name, *texts)
    return table


def flat_cells(values: Mapping[str, object]) -> dict[str, tuple[object, str]]:
    """Return (value, text) for each figure that is not drawn. Nested ones are ``outer.inner``."""
    cells: dict[str, tuple[object, str]] = {}
    for name, value in values.items():
        if name in ("traffic", "rank_memory_bytes"):
            continue
        if not isinstance(value, Mapping):
            cells[name] = (value, _format_cell(value, name))
            continue
        for inner_name, figure in value.items():
            cells[f"{name}.{inner_name}"] = (figure, _format_cell(figure, str(inner_name), name))
    return cells


def _format_cell(value: object, *names: str) -> str:
    """Format ``value`` with the unit that follows from the figure's ``names``."""
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


_PARTS_LEGEND = (
    "edge cut: share of edges between different parts. halo nodes: nodes of other parts that in-edges of "
    "this part start from. halo factor: halo nodes divided by own nodes. remote in-edges: share of in-edges "
    "from other parts. replication factor: copies of a node, on average, if every part stored its halo. "
    "balance: the largest part divided by the mean of all parts; 1 is best."
)


def build_parts_table(columns: Mapping[str, Sequence[object]]) -> Table:
    """Build a table with one row per part and the given columns, which have one value per part."""
    table = _build_table(["part", *columns], _PARTS_LEGEND)
    for part, values in enumerate(zip(*columns.values(), strict=True)):
        table.add_row(str(part), *map(str, values))
    return table


def build_expansion_table(
    factors: Sequence[Sequence[float]], foreign: Sequence[int], row_bytes: int, work: Sequence[float]
) -> Table:
    """Build a table with one row per hop: each server's nodes relative to its own, and the largest cost.

    Args:
        factors: (K + 1, S) nodes within h hops relative to own nodes.
        foreign: (K + 1,) nodes on other servers, for the server with the most such nodes.
        row_bytes: Feature bytes per node.
        work: (K + 1,) edges that a model with h layers aggregates, relative to those without replicas.
    """
    num_servers = len(factors[0])
    # A table with many servers would not fit the terminal, so it has the extremes and the mean.
    has_all_servers = num_servers <= _MAX_COLUMNS
    names = ["least", "mean", "most"]
    if has_all_servers:
        names = [f"server {server}" for server in range(num_servers)]
    table = _build_table(("hops", *names, "foreign nodes", "features", "work"), _EXPANSION_LEGEND)

    rows = zip(factors, foreign, work, strict=True)
    for hop, (server_factors, num_foreign, relative_work) in enumerate(rows):
        figures = server_factors
        if not has_all_servers:
            mean = sum(server_factors) / num_servers
            figures = [min(server_factors), mean, max(server_factors)]
        table.add_row(
            str(hop),
            *(f"{factor:.2f}" for factor in figures),
            format_count(num_foreign),
            format_bytes(num_foreign * row_bytes),
            f"{relative_work:.2f}",
        )
    return table


_MAX_COLUMNS = 8
_EXPANSION_LEGEND = (
    "nodes within this number of hops, relative to the server's own nodes. shared_preload holds them for a "
    "model with this number of layers. Foreign nodes and features (loaded once) and work of an epoch "
    "(relative to full_graph) are those of the server with the most."
)
