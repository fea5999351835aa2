"""From launches to the figures that are read: medians over epochs, and ratios."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from peer.launch import Launch

Row = dict[str, Any]


def figures(system: str, launches: Sequence[Launch], warm_up: int) -> Row:
    """Return the medians of ``system`` over all epochs of all its launches but the first of each launch.

    Seconds of an epoch are those of the slowest rank; rows and bytes are sums over ranks; parts and processor
    seconds (of the whole machine, servers and launchers included) are means over ranks.
    """
    mine = [launch for launch in launches if launch.system == system]
    epochs = [
        [rank["epochs"][number] for rank in launch.ranks]
        for launch in mine
        for number in range(warm_up, len(launch.ranks[0]["epochs"]))
    ]
    seconds = [max(rank["seconds"] for rank in epoch) for epoch in epochs]
    low, _, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else (seconds * 3)
    parts = {
        name: statistics.median(
            statistics.mean(rank["parts"].get(name, 0.0) for rank in epoch) for epoch in epochs
        )
        for name in epochs[0][0]["parts"]
    }
    counts = [name for name in epochs[0][0] if name.startswith("ledger ")]
    return {
        "system": system,
        "epochs": len(epochs),
        "seconds": statistics.median(seconds),
        "iqr": high - low,
        "cpu_s": statistics.median(statistics.mean(rank["cpu"] for rank in epoch) for epoch in epochs),
        "loss": _sum(epochs[-1], "loss_sum") / _sum(epochs[-1], "targets"),
        "input_rows": statistics.median(_sum(epoch, "input_rows") for epoch in epochs),
        "wire_mb": statistics.median(_sum(epoch, "wire_bytes") for epoch in epochs) / 1e6,
        "ledger_mb": {
            name.removeprefix("ledger "): round(statistics.median(_sum(e, name) for e in epochs) / 1e6, 3)
            for name in counts
        },
        "rank_peak_gb": max(rank["peak_rss"] for launch in mine for rank in launch.ranks) / 1e9,
        "machine_peak_gb": max(peak for launch in mine for peak in launch.machine_bytes) / 1e9,
        "process_peak_gb": {
            name: round(max(m.get(name, 0) for launch in mine for m in launch.process_bytes) / 1e9, 3)
            for name in mine[0].process_bytes[0]
        },
        "parts": {name: round(value, 3) for name, value in parts.items()},
        "all_seconds": [round(value, 3) for value in seconds],
    }


def text(rows: Sequence[Row]) -> str:
    """Return ``rows`` as lines to read; ratios are to the first row."""
    base = rows[0]
    lines = []
    for row in rows:
        lines.append(
            f"{row['system']:6} {row['seconds']:7.3f} s/epoch (IQR {row['iqr']:.3f}, {row['epochs']} epochs, "
            f"{row['seconds'] / base['seconds']:.2f}x)  rank {row['rank_peak_gb']:.2f} GB, machine "
            f"{row['machine_peak_gb']:.2f} GB, wire {row['wire_mb']:.1f} MB, "
            f"{row['input_rows'] / 1e6:.2f} M input rows, cpu {row['cpu_s']:.2f} s, loss {row['loss']:.3f}"
        )
        lines.append("       " + ", ".join(f"{name} {value:.2f}" for name, value in row["parts"].items()))
        if row["ledger_mb"]:
            lines.append(
                "       MB counted: " + ", ".join(f"{n} {v:.2f}" for n, v in row["ledger_mb"].items())
            )
        lines.append(
            "       peak GB: " + ", ".join(f"{n} {v:.2f}" for n, v in row["process_peak_gb"].items())
        )
    return "\n".join(lines)


def _sum(epoch: Sequence[dict[str, Any]], name: str) -> float:
    return float(sum(rank.get(name, 0) for rank in epoch))
