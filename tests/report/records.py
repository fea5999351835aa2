"""Epochs made by hand."""

from dglx_dist.records import EpochRecord


def epoch(number: int, *, seconds: float = 2.0, val: float | None = 0.5, loss: float = 1.0) -> EpochRecord:
    return EpochRecord(
        epoch=number,
        loss=loss,
        train_accuracy=0.25,
        val_accuracy=val,
        seconds=seconds,
        num_samples=100,
        sample_s=0.5,
        fetch_s=0.25,
        wait_s=0.125,
        compute_s=1.0,
        exchange_s=0.0625,
        bytes_inside=1000 * number,
        bytes_outside=10 * number,
    )
