"""Pictures of a run and of a partition, drawn without a display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dglx_dist.records import EpochRecord

PHASES = (
    ("wait for the loader", "wait_s", "#c44e52"),
    ("compute", "compute_s", "#4c72b0"),
    ("exchange", "exchange_s", "#dd8452"),
)
"""Label, field of EpochRecord, colour of what the training loop does, one after another."""
HIDDEN = (("sample (threads)", "sample_s", "#55a868"), ("fetch (threads)", "fetch_s", "#8172b3"))
"""The same for what the loader's threads do beside it."""
INSIDE, OUTSIDE = "#9ecae1", "#d62728"
_IN_LEGEND = 8
"""Servers that are named beside their lines."""


def draw(epochs: Sequence[EpochRecord], path: str | Path, *, title: str) -> None:
    """Draw loss and accuracy, where the seconds went, and the bytes of each epoch into a PNG file."""
    figure = Figure(figsize=(13, 4), layout="constrained")
    FigureCanvasAgg(figure)
    learning, phases, traffic = figure.subplots(1, 3)
    _draw_learning(learning, epochs)
    _draw_phases(phases, epochs)
    _draw_traffic(traffic, epochs)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)


def _draw_learning(axes: Any, epochs: Sequence[EpochRecord]) -> None:
    numbers = [e.epoch for e in epochs]
    axes.plot(numbers, [e.loss for e in epochs], color="#444444", label="loss")
    axes.set(title="loss and accuracy", xlabel="epoch", ylabel="loss")
    right = axes.twinx()
    right.plot(numbers, [e.train_accuracy for e in epochs], color="#4c72b0", label="train accuracy")
    measured = [(e.epoch, e.val_accuracy) for e in epochs if e.val_accuracy is not None]
    if measured:
        right.plot(
            *zip(*measured, strict=True), color="#c44e52", marker="o", markersize=3, label="val accuracy"
        )
    right.set(ylim=(0, 1), ylabel="accuracy")
    handles = [*axes.get_lines(), *right.get_lines()]
    axes.legend(handles=handles, loc="center right", fontsize=8)


def _draw_phases(axes: Any, epochs: Sequence[EpochRecord]) -> None:
    numbers = [e.epoch for e in epochs]
    bottom = [0.0] * len(epochs)
    for name, field, color in PHASES:
        heights = [getattr(e, field) for e in epochs]
        axes.bar(numbers, heights, bottom=bottom, color=color, label=name)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    for name, field, color in HIDDEN:
        axes.plot(numbers, [getattr(e, field) for e in epochs], color=color, linestyle="--", label=name)
    axes.set(title="seconds per epoch", xlabel="epoch", ylabel="s")
    # The first epoch compiles kernels; drawn whole, it would flatten all others.
    warm = max((sum(getattr(e, field) for _, field, _ in PHASES) for e in epochs[1:]), default=0.0)
    if bottom and bottom[0] > 2 * warm > 0:
        axes.set_ylim(0, 1.6 * warm)
        axes.set_xlabel(f"epoch (the first, {bottom[0]:.2g} s, goes beyond the picture)")
    axes.legend(fontsize=8, loc="upper right")


def _draw_traffic(axes: Any, epochs: Sequence[EpochRecord]) -> None:
    numbers = [e.epoch for e in epochs]
    inside = [e.bytes_inside / 1e6 for e in epochs]
    axes.bar(numbers, inside, color=INSIDE, label="inside a server")
    outside = [e.bytes_outside / 1e6 for e in epochs]
    axes.bar(numbers, outside, bottom=inside, color=OUTSIDE, label="between servers")
    axes.set(title="payload per epoch, all ranks", xlabel="epoch", ylabel="MB")
    axes.set_ylim(0, 1.4 * max((e.bytes_inside + e.bytes_outside for e in epochs), default=1) / 1e6 or 1)
    axes.legend(fontsize=8, loc="upper right")


def draw_parts(columns: Mapping[str, Sequence[float]], path: str | Path, *, title: str) -> None:
    """Draw one bar per part for each column (nodes, edges, halo, ...) into a PNG file.

    Args:
        columns: Name to one number per part, all of one length; each gets its own panel, two to a row,
            with a line at the mean, so that imbalance shows.
        path: Where the picture goes.
        title: Heading of the whole.
    """
    across = min(max(len(columns), 1), 2)
    down = max(-(-len(columns) // across), 1)
    figure = Figure(figsize=(6 * across, 3.5 * down), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(down, across, squeeze=False).flat
    for axes, (name, values) in zip(panels, columns.items(), strict=False):
        axes.bar(range(len(values)), values, color="#4c72b0")
        axes.axhline(sum(values) / max(len(values), 1), color="#444444", linestyle="--", linewidth=1)
        axes.set(title=name, xlabel="part")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    # Two to a row: an odd number leaves the last place empty.
    for axes in panels:
        axes.set_axis_off()
    figure.suptitle(title)
    figure.savefig(path, dpi=100)


def draw_expansion(factors: Sequence[Sequence[float]], path: str | Path, *, title: str) -> None:
    """Draw how the closures of servers grow into a PNG file.

    Args:
        factors: (K + 1, S) nodes within h hops of a server's own, by its own; a line for each server.
        path: Where the picture goes.
        title: Heading.
    """
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    servers = len(factors[0])
    for server in range(servers):
        axes.plot(range(len(factors)), [row[server] for row in factors], marker="o", label=f"server {server}")
    # No closure is larger than the graph.
    axes.axhline(servers, color="#444444", linestyle="--", linewidth=1, label="the whole graph")
    axes.set(title=title, xlabel="hops", ylabel="nodes held / own nodes", ylim=(0, None))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if servers <= _IN_LEGEND:
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=100)
