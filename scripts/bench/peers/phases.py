"""How the parts that each system's loop can tell apart become the fields of an EpochRecord."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from dglx_dist.records import EpochRecord

Parts = Mapping[str, tuple[str, ...]]
"""Name of a part of the loop -> fields that its seconds are added to."""

# Nothing of a stock loop runs ahead of training, so it waits for all of its sampling and reading.
STOCK: Parts = {
    "sample": ("sample_s", "wait_s"),
    "pull": ("fetch_s", "wait_s"),
    "forward": ("compute_s",),
    "backward": ("compute_s",),  # with DDP's exchange, which runs during it and cannot be told apart
    "update": ("compute_s",),
    "sparse update": ("exchange_s",),
}
OURS: Parts = {
    "wait": ("wait_s",),
    "pull": ("fetch_s", "wait_s"),  # rows of an embedding; features are read by the loader's thread
    "forward": ("compute_s",),
    "backward": ("compute_s",),
    "update": ("compute_s",),
    "sparse update": ("exchange_s",),
    "loader sample": ("sample_s",),
    "loader fetch": ("fetch_s",),
    "exchange": ("exchange_s",),
}
# The sampler slices features in the same call, in worker processes when there are some.
PYG: Parts = {
    "sample and slice": ("sample_s", "wait_s"),
    "wait": ("wait_s",),
    "forward": ("compute_s",),
    "backward": ("compute_s",),
    "update": ("compute_s",),
}
MAPPINGS: Mapping[str, Parts] = {"stock": STOCK, "ours": OURS, "dense": OURS, "pyg": PYG}

_TIMES = ("sample_s", "fetch_s", "wait_s", "compute_s", "exchange_s")


def as_record(system: str, rows: Sequence[Mapping[str, Any]], wire: int | None) -> EpochRecord:
    """Put the (W,) rows that the ranks of ``system`` reported of one epoch together.

    ``seconds`` are the slowest rank's. Phases are means over ranks, so that those of the loop come to no more
    than it. Counts and bytes are sums; ``bytes_outside`` is what our ledger counted, or, of a system that
    counts nothing itself, ``wire``: what all cards sent, headers included (0 if unknown).
    """
    times = [_times(system, row["parts"]) for row in rows]
    # A model's exchange is within its backward: what is told apart is not counted twice.
    for row, found in zip(rows, times, strict=True):
        found["compute_s"] = max(found["compute_s"] - row["parts"].get("exchange", 0.0), 0.0)
    mean = {name: fmean(found[name] for found in times) for name in _TIMES}
    counts = {name: sum(row["counts"].get(name, 0.0) for row in rows) for name in _names(rows)}
    targets = max(counts.get("targets", 0.0), 1.0)
    return EpochRecord(
        epoch=int(rows[0]["epoch"]),
        loss=counts.get("loss_sum", 0.0) / targets,
        train_accuracy=counts.get("correct", 0.0) / targets,
        val_accuracy=None,
        seconds=max(row["seconds"] for row in rows),
        num_samples=int(counts.get("targets", 0.0)),
        sample_s=mean["sample_s"],
        fetch_s=mean["fetch_s"],
        wait_s=mean["wait_s"],
        compute_s=mean["compute_s"],
        exchange_s=mean["exchange_s"],
        bytes_inside=int(counts.get("ledger inside", 0.0)),
        bytes_outside=int(counts["ledger outside"]) if "ledger outside" in counts else wire or 0,
    )


def told(system: str) -> str:
    """Return the mapping of ``system`` in words, for results: "parts -> columns of a report; ..."."""
    by_columns: dict[str, list[str]] = {}
    for part, names in MAPPINGS[system].items():
        by_columns.setdefault(" and ".join(name.removesuffix("_s") for name in names), []).append(part)
    return "; ".join(f"{', '.join(parts)} -> {columns}" for columns, parts in by_columns.items())


def _times(system: str, parts: Mapping[str, float]) -> dict[str, float]:
    found = dict.fromkeys(_TIMES, 0.0)
    for part, seconds in parts.items():
        for name in MAPPINGS[system][part]:
            found[name] += seconds
    return found


def _names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return sorted({name for row in rows for name in row["counts"]})
