"""Pictures of an experiment: seconds by phase, bytes, accuracy over time, throughput over servers."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dglx_dist.report.pictures import HIDDEN, INSIDE, OUTSIDE, PHASES
from scripts.bench import results
from scripts.bench.figures import VariantFigures, variant_figures
from scripts.bench.records import Experiment, Outcome
from scripts.bench.suites import find

WHAT = ("phases", "bytes", "accuracy", "scaling")
"""Pictures that an experiment may have: ``<ID>-<what>.png``."""
_CARD, _LINES = "#444444", ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860")
_LABEL_WIDTH = 16
_MOST_BARS = 60
"""Of a picture that can be looked at."""


def draw(out: Path) -> tuple[Path, ...]:
    """Draw the pictures of all results in ``out`` there; return them.

    Raises:
        StorageError: a result is damaged.
        UnknownNameError: a result is of an experiment that this release does not have.
    """
    drawn = [draw_experiment(find(one.experiment), one, out) for one in results.read(out)]
    return tuple(picture for pictures in drawn for picture in pictures)


def draw_experiment(experiment: Experiment, outcome: Outcome, folder: Path) -> tuple[Path, ...]:
    """Draw what ``outcome`` has figures for as ``<folder>/<ID>-<what>.png``; nothing when not measured.

    Nothing either of more variants than bars can be told apart.

    Raises:
        OSError: a picture cannot be written.
    """
    variants = variant_figures(outcome)
    if not 0 < len(variants) <= _MOST_BARS:
        return ()
    titles = _titles(experiment, outcome, variants)
    painters: dict[str, Callable[[Any], None]] = {
        "phases": lambda axes: _draw_phases(axes, variants),
        "bytes": lambda axes: _draw_bytes(axes, variants),
        "accuracy": lambda axes: _draw_accuracy(axes, outcome),
        "scaling": lambda axes: _draw_scaling(axes, variants),
    }
    wanted = {"phases": True, "bytes": True, "scaling": is_scaling(outcome)}
    wanted["accuracy"] = any(one.accuracy for one in outcome.measurements)
    return tuple(
        _save(folder / f"{experiment.id}-{what}.png", titles, len(variants), painters[what])
        for what in WHAT
        if wanted[what]
    )


def is_scaling(outcome: Outcome) -> bool:
    """Say whether the experiment is about throughput on several numbers of servers."""
    if outcome.plan is None or len({one.shape.servers for one in outcome.plan.variants}) < 2:
        return False
    return any(ratio.quantity == "samples_per_second" for ratio in outcome.plan.ratios)


def _titles(experiment: Experiment, outcome: Outcome, variants: Sequence[VariantFigures]) -> tuple[str, str]:
    simulated = " (simulated)" if any(one.variant.simulated for one in variants) else ""
    links: dict[str, list[str]] = {}
    for one in variants:
        links.setdefault(one.link.words, []).append(one.variant.name)
    each = [f"{words} ({' | '.join(names)})" for words, names in links.items()]
    subtitle = "links between servers: " + ("; ".join(each) if len(links) > 1 else "".join(links))
    label = f" [{outcome.label}]" if outcome.label else ""
    return f"{experiment.id}: {experiment.title}{simulated}{label}", subtitle


def _save(path: Path, titles: tuple[str, str], bars: int, painter: Callable[[Any], None]) -> Path:
    width = max(7.5, 1.6 * bars + 3.2)
    figure = Figure(figsize=(width, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    title, subtitle = titles
    across = int(width * 12)
    figure.suptitle(textwrap.fill(title, across), fontsize=11, x=0.01, ha="left")
    axes = figure.subplots()
    painter(axes)
    axes.set_title(textwrap.fill(subtitle, across), fontsize=8.5, color="#444444", loc="left")
    figure.savefig(path, dpi=110)
    return path


def _draw_phases(axes: Any, variants: Sequence[VariantFigures]) -> None:
    places = range(len(variants))
    for offset, width, kinds, hatch in ((-0.16, 0.42, PHASES, None), (0.26, 0.24, HIDDEN, "//")):
        bottom = [0.0] * len(variants)
        at = [place + offset for place in places]
        for label, field, color in kinds:
            heights = [one.phases[field].median for one in variants]
            axes.bar(
                at, heights, width, bottom=bottom, color=color, label=label, hatch=hatch, edgecolor="white"
            )
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    medians = [one.seconds.median for one in variants]
    below = [one.seconds.median - one.seconds.low for one in variants]
    above = [one.seconds.high - one.seconds.median for one in variants]
    axes.errorbar(
        [place - 0.16 for place in places], medians, yerr=[below, above],
        fmt="D", markersize=4, color="black", capsize=6, label="whole epoch, median and IQR",
    )  # fmt: skip
    for place, one in zip(places, variants, strict=True):
        text = f"{one.seconds.median:.3g} s" + (" sim." if one.variant.simulated else "")
        axes.annotate(text, (place - 0.16, one.seconds.high), (0, 6), textcoords="offset points", ha="center")
    axes.set(ylabel="seconds per epoch")
    axes.set_xlabel("phases are means over ranks; loader's threads work beside the training loop", fontsize=8)
    _name_bars(axes, variants)


def _draw_bytes(axes: Any, variants: Sequence[VariantFigures]) -> None:
    payload = [place - 0.16 for place in range(len(variants))]
    inside = [one.bytes_inside / 1e6 for one in variants]
    outside = [one.bytes_outside / 1e6 for one in variants]
    axes.bar(payload, outside, 0.42, color=OUTSIDE, label="payload between servers (ledger)")
    axes.bar(payload, inside, 0.42, bottom=outside, color=INSIDE, label="payload inside a server (ledger)")
    counted = [(place, one) for place, one in enumerate(variants) if one.bytes_wire is not None]
    if counted:
        heights = [(one.bytes_wire or 0) / 1e6 for _, one in counted]
        axes.bar(
            [place + 0.26 for place, _ in counted],
            heights,
            0.24,
            color=_CARD,
            label="between servers, by the cards",
        )
    for place, one in enumerate(variants):
        axes.annotate(
            f"{one.bytes_outside / 1e6:.3g} MB out",
            (place - 0.16, (one.bytes_inside + one.bytes_outside) / 1e6),
            (0, 4), textcoords="offset points", ha="center",
        )  # fmt: skip
    axes.set(ylabel="MB per epoch, all ranks")
    _name_bars(axes, variants)


def _name_bars(axes: Any, variants: Sequence[VariantFigures]) -> None:
    names = [one.variant.name + (" (simulated)" if one.variant.simulated else "") for one in variants]
    axes.set_xticks(range(len(variants)), [textwrap.fill(name, _LABEL_WIDTH) for name in names])
    axes.set_xlim(-0.6, len(variants) - 0.4)
    axes.set_ylim(0, 1.12 * axes.get_ylim()[1])
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    # Beside the bars, for none of them may lie under it.
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


def _draw_accuracy(axes: Any, outcome: Outcome) -> None:
    plan = outcome.plan
    assert plan is not None
    for variant, color in zip(plan.variants, _LINES * len(plan.variants), strict=False):
        curves = [
            one.accuracy for one in outcome.measurements if one.variant == variant.name and one.accuracy
        ]
        for number, curve in enumerate(curves):
            name = variant.name + (" (simulated seconds)" if variant.simulated else "")
            seconds, accuracy = zip(*curve, strict=True)
            axes.plot(
                seconds, [100 * share for share in accuracy],
                color=color, marker="o", markersize=3, alpha=1.0 if number == 0 else 0.4,
                label=name if number == 0 else None,
            )  # fmt: skip
    axes.set(xlabel="seconds of training, evaluation left out", ylabel="validation accuracy, %")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")


def _draw_scaling(axes: Any, variants: Sequence[VariantFigures]) -> None:
    ordered = sorted(variants, key=lambda one: one.variant.shape.servers)
    servers = [one.variant.shape.servers for one in ordered]
    medians = [one.samples_per_second.median for one in ordered]
    below = [one.samples_per_second.median - one.samples_per_second.low for one in ordered]
    above = [one.samples_per_second.high - one.samples_per_second.median for one in ordered]
    simulated = " (simulated)" if any(one.variant.simulated for one in ordered) else ""
    ideal = [medians[0] * count / servers[0] for count in servers]
    axes.plot(
        servers, ideal, linestyle="--", color="#888888", label="ideal: each server adds as much as the first"
    )
    axes.errorbar(
        servers, medians, yerr=[below, above],
        fmt="o-", color=_LINES[0], capsize=5, label=f"measured{simulated}, median and IQR",
    )  # fmt: skip
    for count, median, best in zip(servers, medians, ideal, strict=True):
        axes.annotate(f"{median / best:.0%}", (count, median), (6, -12), textcoords="offset points")
    axes.set(xlabel="servers", ylabel="samples per second, all ranks")
    axes.set_xlim(0, servers[-1] * 1.15)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="upper left")
