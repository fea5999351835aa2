"""Compare a finished run's costs with its prediction, as entries for ``summary.json``."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dglx_dist.comm.collectives import broadcast_json, gather_json, run_on_all_ranks
from dglx_dist.comm.session import Session
from dglx_dist.errors import StorageError
from dglx_dist.memory import peak_bytes
from dglx_dist.planner.records import Outcome
from dglx_dist.records import EpochRecord
from dglx_dist.report.run_folder import PLAN, read_plan
from dglx_dist.report.tables import summarise
from dglx_dist.strategies.base import find_float_parameter
from dglx_dist.training.fit_config import FitResult


def read_run_plan(folder: Path, session: Session) -> dict[str, Any] | None:
    """Read ``plan.json`` for the run in ``folder`` on rank 0. Return None if the run has no plan.

    Every rank must call this. Raises StorageError on all ranks if the file is damaged.
    """

    def read() -> dict[str, Any] | None:
        if session.topology.rank != 0:
            return None
        value = read_plan(folder)
        if value is None:
            return None

        # A plan that can be summarized has all entries that later code reads.
        try:
            summarize_plan(value)
        except (KeyError, IndexError, TypeError) as error:
            raise StorageError(
                f"{folder / PLAN} is damaged ({type(error).__name__}: {error}). Delete it, and resume again."
            ) from error
        return value

    return broadcast_json(run_on_all_ranks(session, read, StorageError), session)


def build_outcome(epoch: int, epochs: Sequence[EpochRecord], facts: Mapping[str, Any]) -> Outcome:
    """Return the measured cost. Bytes are taken from ``epoch``, or from the last epoch if it is missing."""
    matches = [record for record in epochs if record.epoch == epoch]
    record = matches[0] if matches else epochs[-1]
    seconds = summarise(facts, epochs)["epoch_seconds"]
    return Outcome(
        epoch=record.epoch,
        epoch_seconds=float(str(seconds)),
        bytes_outside=record.bytes_outside,
        bytes_inside=record.bytes_inside,
        peak_memory_bytes=facts["peak_memory_bytes"],
    )


def summarize_plan(value: Mapping[str, Any]) -> dict[str, object]:
    """Summarize ``Choice.to_json()`` for ``summary.json``: prediction, and outcome if any."""
    picked = value["predictions"][value["picked"]]
    outcome = value["outcome"]
    entry: dict[str, object] = {
        "chosen": picked["name"],
        "why": "; ".join(value["why"]),
        "predicted_epoch_seconds": picked["epoch_seconds"],
        "predicted_bytes_outside": picked["bytes_outside"],
        "predicted_bytes_inside": picked["bytes_inside"],
        "predicted_peak_memory_bytes": picked["memory_bytes"],
        "bytes_are_counted": picked["bytes_exact"],
    }
    if outcome is None:
        return entry
    for name in ("epoch_seconds", "bytes_outside", "bytes_inside", "peak_memory_bytes"):
        entry[name] = outcome[name]
    entry["of_epoch"] = outcome["epoch"]
    if outcome["epoch_seconds"] > 0:
        entry["predicted_by_measured"] = picked["epoch_seconds"] / outcome["epoch_seconds"]
    return entry


def collect_facts(model: nn.Module, session: Session, result: FitResult) -> dict[str, Any]:
    """Collect strategy, ranks, accuracies, the model's device and peak memory. Every rank must call this."""
    device = find_float_parameter(model).device
    device_name = str(device)
    device_peak = None
    if device.type == "cuda":
        device_name = f"cuda ({torch.cuda.get_device_name(device)})"
        device_peak = torch.cuda.max_memory_reserved(device)
    host_peaks, device_peaks = zip(*gather_json([peak_bytes(), device_peak], session), strict=True)
    # Ranks that compute on CPUs have no device peak.
    gpu_peaks = [peak for peak in device_peaks if peak is not None]

    facts: dict[str, Any] = {
        "strategy": session.strategy,
        "precision": result.precision,
        "ranks": session.topology.world_size,
        "servers": session.topology.num_servers,
        "task": result.task,
    }
    if result.accuracy:
        facts["val_accuracy"] = result.val_accuracy
        facts["test_accuracy"] = result.test_accuracy
    facts |= result.metrics
    if result.best_epoch is not None:
        facts["best_epoch"] = result.best_epoch
    if result.stopped_early:
        facts["stopped_early"] = True

    facts["peak_memory_bytes"] = max(host_peaks)
    facts["rank_memory_bytes"] = list(host_peaks)
    facts["device"] = device_name
    facts["peak_device_memory_bytes"] = max(gpu_peaks, default=None)
    return facts
