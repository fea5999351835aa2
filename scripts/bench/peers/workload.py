"""Workload that every system trains: one graph, one model, one kind of batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

TRAINERS: Mapping[str, str] = {
    "stock": "stock_trainer.py",
    "ours": "ours.py",
    "dense": "ours.py",
    "pyg": "pyg_trainer.py",
}
"""System -> its program."""
TOLD = "launch.json"
"""File that tells the ranks of a launch, in the folder of its reports."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Model and batches of one comparison; the same for all systems."""

    features: int
    classes: int
    hidden: int = 16
    fanouts: tuple[int, ...] = (25, 10)
    """Fan-outs in DGL's order. The last one is the hop at the seeds."""
    batch_size: int = 1000
    """Seeds per trainer and step."""
    embedding: int = 0
    """Width of trainable rows that take the place of the features; 0: none."""
    lr: float = 0.003


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Parameters of a job of the kind "program"."""

    system: Literal["stock", "ours", "dense", "pyg"]
    workload: Workload
    data: str
    """The partition in the system's own format."""
    epochs: int = 2
    """Measured ones."""
    warmup: int = 1
    """Epochs before those."""
    allocator: Literal["unset", "tuned"] = "unset"
    """unset: as a user of torchrun finds it (ours then keeps freed memory by itself); tuned: the settings of
    ``dglx train`` for both."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """For the system's program alone, JSON values."""
