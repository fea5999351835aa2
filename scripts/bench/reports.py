"""What the ranks report on a job -> one measurement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dglx_dist.errors import JobError
from scripts.bench.records import Measurement, Variant
from scripts.bench.results import read_epoch
from scripts.netlab.calibrate import Measured

KEYS = ("epochs", "bytes_outside_wire", "peak_bytes", "accuracy", "extra")
"""Of a report, as in :class:`Measurement`. All but ``peak_bytes`` are over all ranks, and rank 0's count."""


def read_measurement(variant: Variant, repetition: int, reports: Sequence[Mapping[str, Any]]) -> Measurement:
    """Put the reports, by rank, together.

    Raises:
        JobError: a report lacks the epochs, or has a key that is not in ``KEYS``.
    """
    first = reports[0]
    if "epochs" not in first or not set(first) <= set(KEYS):
        raise JobError(
            f"job {variant.job.kind} of {variant.name} reports {', '.join(first)}; it must report epochs, "
            f"and of others only {', '.join(KEYS[1:])}"
        )
    wire = first.get("bytes_outside_wire")
    return Measurement(
        variant=variant.name,
        repetition=repetition,
        epochs=tuple(read_epoch(epoch) for epoch in first["epochs"]),
        bytes_outside_wire=None if wire is None else int(wire),
        peak_bytes=max(int(report.get("peak_bytes", 0)) for report in reports),
        accuracy=tuple((float(seconds), float(share)) for seconds, share in first.get("accuracy", [])),
        extra=first.get("extra", {}),
    )


def read_measured(variant: Variant, reports: Sequence[Mapping[str, Any]]) -> Measured:
    """Return what a calibration needs to know of one job: of an epoch, and of a server with an even share.

    Where no card counts, the payload between servers stands in.
    """
    measurement = read_measurement(variant, 0, reports)
    payload = sum(epoch.bytes_outside for epoch in measurement.epochs)
    wire = payload if measurement.bytes_outside_wire is None else measurement.bytes_outside_wire
    parts = max(len(measurement.epochs), 1) * variant.shape.servers
    return Measured(seconds=measurement.seconds, bytes_per_server=wire / parts)
