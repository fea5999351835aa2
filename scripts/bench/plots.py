"""Draws pictures of an experiment: seconds by phase, bytes, accuracy over time, throughput by servers."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from dglx_dist.report.tables import HIDDEN, INSIDE_COLOR, OUTSIDE_COLOR, PHASES
from scripts.bench import results
from scripts.bench.figures import mean_of, spread, variant_rows
from scripts.bench.records import Experiment, Line, Outcome
from scripts.bench.suites import find

WHAT = ("phases", "bytes", "accuracy", "scaling", "alpha", "rate")
"""Kinds of pictures, which are stored as ``<ID>-<kind>.png``."""
_CARD, _LINES = "#444444", ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860")
_LABEL_WIDTH = 16
_MAX_BARS = 60
"""Largest number of bars that one picture shows."""
Rows = Sequence[Mapping[str, Any]]


def draw(out: Path) -> tuple[Path, ...]:
    """Draw the pictures of all results in ``out`` into that folder. Return their paths."""
    pictures_by_result = [
        draw_experiment(find(outcome.experiment), outcome, out) for outcome in results.read(out)
    ]
    return tuple(picture for pictures in pictures_by_result for picture in pictures)


def draw_experiment(experiment: Experiment, outcome: Outcome, folder: Path) -> tuple[Path, ...]:
    """Draw the figures of ``outcome`` as ``<folder>/<ID>-<kind>.png`` and return the paths.

    Nothing is drawn without measurements, or if there are more variants than bars that fit one picture.
    """
    rows = variant_rows(outcome)
    if not 0 < len(rows) <= _MAX_BARS:
        return ()
    names = titles(experiment, outcome, rows)
    painters: dict[str, Callable[[Any], None]] = {
        "phases": lambda axes: draw_phases(axes, rows),
        "bytes": lambda axes: draw_bytes(axes, rows),
    }
    if any(measurement.accuracy for measurement in outcome.measurements):
        painters["accuracy"] = lambda axes: _draw_accuracy(axes, outcome)
    if is_scaling(outcome):
        painters["scaling"] = lambda axes: draw_scaling(axes, outcome)
    lines = () if outcome.plan is None else outcome.plan.lines
    return tuple(
        _save(folder / f"{experiment.id}-{kind}.png", names, len(rows), paint)
        for kind, paint in painters.items()
    ) + tuple(
        _save(
            folder / f"{experiment.id}-{kind}.png",
            (names[0], ""),
            4,
            partial(draw_lines, rows, lines_shown),
            2,
        )
        for kind in dict.fromkeys(line.what for line in lines)
        if (lines_shown := [line for line in lines if line.what == kind])
    )


def is_scaling(outcome: Outcome) -> bool:
    """Return whether the experiment measures throughput on several numbers of servers."""
    if outcome.plan is None or len({variant.shape.servers for variant in outcome.plan.variants}) < 2:
        return False
    return any(ratio.quantity == "samples_per_second" for ratio in outcome.plan.ratios)


def titles(experiment: Experiment, outcome: Outcome, rows: Rows) -> tuple[str, str]:
    """Return title and subtitle with simulated components and the links between servers."""
    simulated = " (simulated)" if any(row.get("simulated") for row in rows) else ""
    links: dict[str, list[str]] = {}
    for row in rows:
        links.setdefault(row["link"], []).append(row["name"])
    each = [f"{words} ({' | '.join(names)})" for words, names in links.items()]
    subtitle = "links between servers: " + ("; ".join(each) if len(links) > 1 else "".join(links))
    label = f" [{outcome.label}]" if outcome.label else ""
    return f"{experiment.id}: {experiment.title}{simulated}{label}", subtitle


def _save(
    path: Path, names: tuple[str, str], bars: int, painter: Callable[..., None], panels: int = 1
) -> Path:
    width = max(7.5, 1.6 * bars + 3.2)
    figure = Figure(figsize=(width, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    across = int(width * 12)
    figure.suptitle(textwrap.fill(names[0], across), fontsize=11, x=0.01, ha="left")
    axes, *more_axes = figure.subplots(1, panels, squeeze=False)[0]
    painter(axes, *more_axes)
    axes.set_title(textwrap.fill(names[1], across), fontsize=8.5, color="#444444", loc="left")
    figure.savefig(path, dpi=110)
    return path


def _around(spreads: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return the distances of quartiles below and above their medians, in matplotlib's format."""
    return [[middle - low for middle, low, _ in spreads], [high - middle for middle, _, high in spreads]]


def draw_phases(axes: Any, rows: Rows) -> None:
    """Draw a bar of each variant's phases, and a second bar for the threads of its loader."""
    for offset, width, kinds, hatch in ((-0.16, 0.42, PHASES, None), (0.26, 0.24, HIDDEN, "//")):
        bottom = [0.0] * len(rows)
        positions = [place + offset for place in range(len(rows))]
        style: dict[str, Any] = {"hatch": hatch, "edgecolor": "white"}
        for label, name, color in kinds:
            heights = [row[name] for row in rows]
            axes.bar(positions, heights, width, bottom=bottom, color=color, label=label, **style)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    spreads, positions = [row["seconds"] for row in rows], [place - 0.16 for place in range(len(rows))]
    style = {"fmt": "D", "markersize": 4, "color": "black", "capsize": 6}
    label = "whole epoch, median and IQR"
    axes.errorbar(
        positions, [interval[0] for interval in spreads], yerr=_around(spreads), label=label, **style
    )
    for place, row in zip(positions, rows, strict=True):
        seconds, _, high = row["seconds"]
        text = f"{seconds:.3g} s" + (" sim." if row.get("simulated") else "")
        axes.annotate(text, (place, high), (0, 6), textcoords="offset points", ha="center")
    axes.set(ylabel="seconds per epoch")
    axes.set_xlabel("phases are means over ranks; loader's threads work beside the training loop", fontsize=8)
    _name_bars(axes, rows)


def draw_bytes(axes: Any, rows: Rows) -> None:
    """Draw a bar of each variant's payload, and a second bar for the counters of the network cards."""
    positions = [place - 0.16 for place in range(len(rows))]
    inside, outside = ([row[name] for row in rows] for name in ("mb_inside", "mb_outside"))
    axes.bar(positions, outside, 0.42, color=OUTSIDE_COLOR, label="payload between servers (ledger)")
    axes.bar(
        positions, inside, 0.42, bottom=outside, color=INSIDE_COLOR, label="payload inside a server (ledger)"
    )
    wire = {
        place + 0.42: row["mb_wire"] for place, row in zip(positions, rows, strict=True) if row["mb_wire"]
    }
    if wire:
        axes.bar(wire.keys(), wire.values(), 0.24, color=_CARD, label="between servers, by the cards")
    for place, row in zip(positions, rows, strict=True):
        top = (place, row["mb_inside"] + row["mb_outside"])
        text = f"{row['mb_outside']:.3g} MB out"
        axes.annotate(text, top, (0, 4), textcoords="offset points", ha="center")
    axes.set(ylabel="MB per epoch, all ranks")
    _name_bars(axes, rows)


def _name_bars(axes: Any, rows: Rows) -> None:
    names = [row["name"] + (" (simulated)" if row.get("simulated") else "") for row in rows]
    axes.set_xticks(range(len(rows)), [textwrap.fill(name, _LABEL_WIDTH) for name in names])
    axes.set_xlim(-0.6, len(rows) - 0.4)
    axes.set_ylim(0, 1.12 * axes.get_ylim()[1])
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    # The legend is beside the plot, so that it covers no bar.
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


def _draw_accuracy(axes: Any, outcome: Outcome) -> None:
    variants = () if outcome.plan is None else outcome.plan.variants
    for variant, color in zip(variants, _LINES * len(variants), strict=False):
        measured = [
            measurement
            for measurement in outcome.measurements
            if measurement.variant == variant.name and measurement.accuracy
        ]
        for index, measurement in enumerate(measured):
            name = variant.name + (" (simulated seconds)" if variant.simulated else "")
            seconds, accuracy = zip(*measurement.accuracy, strict=True)
            percent = [100 * share for share in accuracy]
            style = {"alpha": 0.4} if index else {"label": name}
            axes.plot(seconds, percent, color=color, marker="o", markersize=3, **style)
    axes.set(xlabel="seconds of training, evaluation left out", ylabel="validation accuracy, %")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")


def draw_lines(rows: Rows, lines: Sequence[Line], sent: Any, seconds: Any) -> None:
    """Draw each line's megabytes between servers and seconds per epoch over the positions of its points."""
    by_name = {row["name"]: row for row in rows}
    axis = {"alpha": "alpha: cached rows by the rows of a server", "rate": "Mbit/s between servers"}
    for line, color in zip(lines, _LINES * len(lines), strict=False):
        points = [(place, by_name[name]) for place, name in line.points if name in by_name]
        places = [place for place, _ in points]
        style: dict[str, Any] = {"fmt": "o-", "color": color, "capsize": 4, "label": line.name}
        sent.plot(places, [row["mb_outside"] for _, row in points], "o-", color=color, label=line.name)
        spreads = [row["seconds"] for _, row in points]
        seconds.errorbar(places, [interval[0] for interval in spreads], yerr=_around(spreads), **style)
    for axes, label in ((sent, "MB between servers, an epoch"), (seconds, "seconds per epoch")):
        axes.set(xlabel=axis[lines[0].what], ylabel=label)
        if lines[0].what == "rate":
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    seconds.legend(fontsize=8)


def draw_scaling(axes: Any, outcome: Outcome) -> None:
    """Draw samples per second over servers, beside the ideal."""
    rates: dict[int, list[float]] = {}
    servers_of = (
        {measurement.name: measurement.shape.servers for measurement in outcome.plan.variants}
        if outcome.plan
        else {}
    )
    for measurement in outcome.measurements:
        if measurement.epochs:
            rates.setdefault(servers_of[measurement.variant], []).append(
                mean_of(measurement, "samples_per_second")
            )
    servers = sorted(rates)
    spreads = [spread(rates[count]).to_rounded_list() for count in servers]
    medians = [measurement[0] for measurement in spreads]
    simulated = (
        " (simulated)"
        if outcome.plan and any(measurement.simulated for measurement in outcome.plan.variants)
        else ""
    )
    ideal = [medians[0] * count / servers[0] for count in servers]
    ideal_label = "ideal: each server adds as much as the first"
    axes.plot(servers, ideal, linestyle="--", color="#888888", label=ideal_label)
    style = {"fmt": "o-", "color": _LINES[0], "capsize": 5, "label": f"measured{simulated}, median and IQR"}
    axes.errorbar(servers, medians, yerr=_around(spreads), **style)
    for count, middle, best in zip(servers, medians, ideal, strict=True):
        axes.annotate(f"{middle / best:.0%}", (count, middle), (6, -12), textcoords="offset points")
    axes.set(xlabel="servers", ylabel="samples per second, all ranks")
    axes.set_xlim(0, servers[-1] * 1.15)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="upper left")
