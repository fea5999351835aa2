"""Pictures of an experiment: seconds by phase, bytes, accuracy over time, throughput over servers."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from dglx_dist.report.tables import HIDDEN, INSIDE, OUTSIDE, PHASES
from scripts.bench import results
from scripts.bench.figures import mean_of, spread, variant_rows
from scripts.bench.records import Experiment, Line, Outcome
from scripts.bench.suites import find

WHAT = ("phases", "bytes", "accuracy", "scaling", "alpha", "rate")
"""Pictures that an experiment may have: ``<ID>-<what>.png``."""
_CARD, _LINES = "#444444", ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860")
_LABEL_WIDTH = 16
_MOST_BARS = 60
"""Of a picture that can be looked at."""
Rows = Sequence[Mapping[str, Any]]


def draw(out: Path) -> tuple[Path, ...]:
    """Draw the pictures of all results in ``out`` there; return them."""
    drawn = [draw_experiment(find(one.experiment), one, out) for one in results.read(out)]
    return tuple(picture for pictures in drawn for picture in pictures)


def draw_experiment(experiment: Experiment, outcome: Outcome, folder: Path) -> tuple[Path, ...]:
    """Draw what ``outcome`` has figures for as ``<folder>/<ID>-<what>.png``; nothing when not measured.

    Nothing either of more variants than bars can be told apart.
    """
    rows = variant_rows(outcome)
    if not 0 < len(rows) <= _MOST_BARS:
        return ()
    names = titles(experiment, outcome, rows)
    painters: dict[str, Callable[[Any], None]] = {
        "phases": lambda axes: draw_phases(axes, rows),
        "bytes": lambda axes: draw_bytes(axes, rows),
    }
    if any(one.accuracy for one in outcome.measurements):
        painters["accuracy"] = lambda axes: _draw_accuracy(axes, outcome)
    if is_scaling(outcome):
        painters["scaling"] = lambda axes: draw_scaling(axes, outcome)
    lines = () if outcome.plan is None else outcome.plan.lines
    return tuple(
        _save(folder / f"{experiment.id}-{what}.png", names, len(rows), paint)
        for what, paint in painters.items()
    ) + tuple(
        _save(folder / f"{experiment.id}-{what}.png", (names[0], ""), 4, partial(draw_lines, rows, told), 2)
        for what in dict.fromkeys(line.what for line in lines)
        if (told := [line for line in lines if line.what == what])
    )


def is_scaling(outcome: Outcome) -> bool:
    """Say whether the experiment is about throughput on several numbers of servers."""
    if outcome.plan is None or len({one.shape.servers for one in outcome.plan.variants}) < 2:
        return False
    return any(ratio.quantity == "samples_per_second" for ratio in outcome.plan.ratios)


def titles(experiment: Experiment, outcome: Outcome, rows: Rows) -> tuple[str, str]:
    """Return title and subtitle: what is simulated, how the links between servers were."""
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
    axes, *others = figure.subplots(1, panels, squeeze=False)[0]
    painter(axes, *others)
    axes.set_title(textwrap.fill(names[1], across), fontsize=8.5, color="#444444", loc="left")
    figure.savefig(path, dpi=110)
    return path


def _around(spreads: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return how far quartiles lie below and above their medians, as error bars want it."""
    return [[middle - low for middle, low, _ in spreads], [high - middle for middle, _, high in spreads]]


def draw_phases(axes: Any, rows: Rows) -> None:
    """Draw a bar of each variant's phases, and beside it what its loader's threads did."""
    for offset, width, kinds, hatch in ((-0.16, 0.42, PHASES, None), (0.26, 0.24, HIDDEN, "//")):
        bottom = [0.0] * len(rows)
        at = [place + offset for place in range(len(rows))]
        style: dict[str, Any] = {"hatch": hatch, "edgecolor": "white"}
        for label, name, color in kinds:
            heights = [row[name] for row in rows]
            axes.bar(at, heights, width, bottom=bottom, color=color, label=label, **style)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    spreads, at = [row["seconds"] for row in rows], [place - 0.16 for place in range(len(rows))]
    style = {"fmt": "D", "markersize": 4, "color": "black", "capsize": 6}
    whole = "whole epoch, median and IQR"
    axes.errorbar(at, [one[0] for one in spreads], yerr=_around(spreads), label=whole, **style)
    for place, row in zip(at, rows, strict=True):
        seconds, _, high = row["seconds"]
        text = f"{seconds:.3g} s" + (" sim." if row.get("simulated") else "")
        axes.annotate(text, (place, high), (0, 6), textcoords="offset points", ha="center")
    axes.set(ylabel="seconds per epoch")
    axes.set_xlabel("phases are means over ranks; loader's threads work beside the training loop", fontsize=8)
    _name_bars(axes, rows)


def draw_bytes(axes: Any, rows: Rows) -> None:
    """Draw a bar of each variant's payload, and beside it what the cards counted."""
    at = [place - 0.16 for place in range(len(rows))]
    inside, outside = ([row[name] for row in rows] for name in ("mb_inside", "mb_outside"))
    axes.bar(at, outside, 0.42, color=OUTSIDE, label="payload between servers (ledger)")
    axes.bar(at, inside, 0.42, bottom=outside, color=INSIDE, label="payload inside a server (ledger)")
    counted = {place + 0.42: row["mb_wire"] for place, row in zip(at, rows, strict=True) if row["mb_wire"]}
    if counted:
        axes.bar(counted.keys(), counted.values(), 0.24, color=_CARD, label="between servers, by the cards")
    for place, row in zip(at, rows, strict=True):
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
    # Beside the bars, for none of them may lie under it.
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


def _draw_accuracy(axes: Any, outcome: Outcome) -> None:
    variants = () if outcome.plan is None else outcome.plan.variants
    for variant, color in zip(variants, _LINES * len(variants), strict=False):
        measured = [one for one in outcome.measurements if one.variant == variant.name and one.accuracy]
        for number, one in enumerate(measured):
            name = variant.name + (" (simulated seconds)" if variant.simulated else "")
            seconds, accuracy = zip(*one.accuracy, strict=True)
            percent = [100 * share for share in accuracy]
            shown = {"alpha": 0.4} if number else {"label": name}
            axes.plot(seconds, percent, color=color, marker="o", markersize=3, **shown)
    axes.set(xlabel="seconds of training, evaluation left out", ylabel="validation accuracy, %")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")


def draw_lines(rows: Rows, lines: Sequence[Line], sent: Any, seconds: Any) -> None:
    """Draw megabytes between servers and seconds of an epoch, each line over the places of its points."""
    by_name = {row["name"]: row for row in rows}
    axis = {"alpha": "alpha: cached rows by the rows of a server", "rate": "Mbit/s between servers"}
    for line, color in zip(lines, _LINES * len(lines), strict=False):
        found = [(place, by_name[name]) for place, name in line.points if name in by_name]
        places = [place for place, _ in found]
        style: dict[str, Any] = {"fmt": "o-", "color": color, "capsize": 4, "label": line.name}
        sent.plot(places, [row["mb_outside"] for _, row in found], "o-", color=color, label=line.name)
        spreads = [row["seconds"] for _, row in found]
        seconds.errorbar(places, [one[0] for one in spreads], yerr=_around(spreads), **style)
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
    found: dict[int, list[float]] = {}
    servers_of = {one.name: one.shape.servers for one in outcome.plan.variants} if outcome.plan else {}
    for one in outcome.measurements:
        if one.epochs:
            found.setdefault(servers_of[one.variant], []).append(mean_of(one, "samples_per_second"))
    servers = sorted(found)
    spreads = [spread(found[count]).rounded() for count in servers]
    medians = [one[0] for one in spreads]
    simulated = " (simulated)" if outcome.plan and any(one.simulated for one in outcome.plan.variants) else ""
    ideal = [medians[0] * count / servers[0] for count in servers]
    each = "ideal: each server adds as much as the first"
    axes.plot(servers, ideal, linestyle="--", color="#888888", label=each)
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
