"""The picture of ``dglx plan --map``: who wins at which hidden width and bandwidth."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, NullFormatter

from dglx_dist.planner.regions import Regions

COLORS = (
    "#9ecae1",
    "#fdae6b",
    "#a1d99b",
    "#bcbddc",
    "#fc9272",
    "#d9d9d9",
    "#fdd0a2",
    "#c7e9c0",
    "#f7b6d2",
    "#ffe08a",
)
_NOTHING = "nothing fits"
_GAINS = (1.25, 1.5, 2.0, 3.0, 5.0, 10.0)


def draw_regions(
    regions: Regions, path: str | Path, *, title: str, here: tuple[int, float] | None = None
) -> None:
    """Draw the regions into a PNG file, with lines of equal gain over the usual strategy.

    Args:
        regions: A grid of at least 2 x 2.
        path: Where the picture goes.
        title: Heading.
        here: Hidden width and bytes per second that were asked for: a star.
    """
    names = sorted({name for row in regions.winners for name in row})
    grid = np.array([[names.index(name) for name in row] for row in regions.winners])
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    bits = [8 * rate / 1e9 for rate in regions.bytes_per_s]
    colors = ListedColormap([COLORS[place % len(COLORS)] for place in range(len(names))])
    norm = BoundaryNorm(np.arange(len(names) + 1) - 0.5, len(names)) if len(names) > 1 else None
    axes.pcolormesh(bits, regions.hidden, grid, cmap=colors, norm=norm, shading="nearest")
    _draw_gains(axes, bits, regions)
    if here is not None:
        axes.plot(
            [8 * here[1] / 1e9], [here[0]], marker="*", markersize=14, color="#222222", linestyle="none"
        )
    axes.set(xscale="log", xlabel="Gbit/s of payload between servers", ylabel="hidden width", title=title)
    axes.set_yscale("log", base=2)
    axes.set_yticks(list(regions.hidden), [str(width) for width in regions.hidden])
    # Numbers as the command line takes them, and not as powers.
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())
    patches = [
        Patch(color=COLORS[place % len(COLORS)], label=name or _NOTHING) for place, name in enumerate(names)
    ]
    axes.legend(
        handles=patches, loc="upper left", bbox_to_anchor=(0, -0.13), ncols=2, fontsize=8, frameon=False
    )
    target = Path(path)
    # Whoever interrupts it finds an earlier picture whole.
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        figure.savefig(partial, dpi=110, format="png")
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _draw_gains(axes: Any, bits: Sequence[float], regions: Regions) -> None:
    gains = np.array(regions.gains)
    levels = [level for level in _GAINS if gains.min() < level < gains.max()]
    if min(gains.shape) < 2 or not levels:
        return
    lines = axes.contour(bits, regions.hidden, gains, levels=levels, colors="#444444", linewidths=0.8)
    axes.clabel(lines, fmt=lambda level: f"{level:g} x {regions.usual}", fontsize=7)
