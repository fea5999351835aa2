"""What was foretold of the choice beside what came out, for the folder of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dglx_dist.errors import StorageError
from dglx_dist.planner.records import Outcome
from dglx_dist.records import EpochRecord
from dglx_dist.report.rundir import PLAN, read_plan
from dglx_dist.report.summary import RunFacts, summarise


def earlier_plan(folder: Path) -> dict[str, Any] | None:
    """Return what ``plan.json`` of a run that goes on says; None: it has none, for nothing was chosen.

    Raises:
        StorageError: the file is damaged.
    """
    value = read_plan(folder)
    if value is None:
        return None
    try:
        described(value)
    except (KeyError, IndexError, TypeError) as error:
        raise StorageError(
            f"{folder / PLAN} is damaged ({type(error).__name__}: {error}); delete it, and resume again"
        ) from error
    return value


def outcome_of(counted: int, epochs: Sequence[EpochRecord], facts: RunFacts) -> Outcome:
    """Return what came out: bytes of the epoch that was counted, else of the last; the rest of the whole run.

    Args:
        counted: Number of the epoch whose bytes were foretold.
        epochs: Of the run, at least one.
        facts: Of the run.
    """
    record = next((one for one in epochs if one.epoch == counted), epochs[-1])
    seconds = summarise(facts, epochs)["epoch_seconds"]
    return Outcome(
        epoch=record.epoch,
        epoch_seconds=float(str(seconds)),
        bytes_outside=record.bytes_outside,
        bytes_inside=record.bytes_inside,
        peak_memory_bytes=facts.peak_memory_bytes,
    )


def described(value: Mapping[str, Any]) -> dict[str, object]:
    """Return what a run's summary says of a plan: prediction beside outcome, where it has one.

    Args:
        value: ``Choice.to_json()``.
    """
    taken, outcome = value["predictions"][value["picked"]], value["outcome"]
    found: dict[str, object] = {
        "chosen": taken["name"],
        "why": "; ".join(value["why"]),
        "predicted_epoch_seconds": taken["epoch_seconds"],
        "predicted_bytes_outside": taken["bytes_outside"],
        "predicted_bytes_inside": taken["bytes_inside"],
        "predicted_peak_memory_bytes": taken["memory_bytes"],
        "bytes_are_counted": taken["bytes_exact"],
    }
    if outcome is None:
        return found
    for name in ("epoch_seconds", "bytes_outside", "bytes_inside", "peak_memory_bytes"):
        found[name] = outcome[name]
    found["of_epoch"] = outcome["epoch"]
    if outcome["epoch_seconds"] > 0:
        found["predicted_by_measured"] = taken["epoch_seconds"] / outcome["epoch_seconds"]
    return found
