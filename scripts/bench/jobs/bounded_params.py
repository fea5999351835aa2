"""What the job ``bounded`` is told, checked before anything is opened."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from dglx_dist.errors import ConfigError
from dglx_dist.registry import did_you_mean
from dglx_dist.training.models import MODEL_KINDS, check_kind


@dataclass(frozen=True, kw_only=True)
class BoundedParams:
    """One training run of a ready-made model in whole epochs.

    Raises:
        UnknownNameError: there is no such model.
        ConfigError: a value is out of range.
    """

    data: str
    """Folder of the partitioned dataset."""
    strategy: str = "lambda"
    options: Mapping[str, Any] = field(default_factory=dict)
    """The strategy's own."""
    model: str = "gcn"
    hidden: int = 16
    layers: int = 2
    lr: float = 0.01
    epochs: int = 1
    """Measured ones."""
    warmup: int = 1
    """Epochs before them."""
    seed: int = 0
    """Of the weights at the start."""
    target: float | None = None
    """Training accuracy, as a fraction, to which epochs are counted; None: they are not."""
    accuracy: bool = False
    """Evaluate on the test nodes at the end, outside all seconds."""

    def __post_init__(self) -> None:
        check_kind(self.model, MODEL_KINDS)
        for name, wrong, allowed in (
            ("hidden", self.hidden < 1, "at least 1"),
            ("layers", self.layers < 1, "at least 1"),
            ("epochs", self.epochs < 1, "at least 1"),
            ("warmup", self.warmup < 0, "at least 0"),
            ("lr", not 0 < self.lr < math.inf, "above 0"),
            ("target", self.target is not None and not 0 < self.target <= 1, "a fraction, or left out"),
        ):
            if wrong:
                raise ConfigError(f"{name}={getattr(self, name)!r} of a bounded job must be {allowed}")


def read_bounded(params: Mapping[str, Any]) -> BoundedParams:
    """Read JSON values.

    Raises:
        ConfigError: a name is unknown, ``data`` is missing or a value out of range.
    """
    known = [one.name for one in fields(BoundedParams)]
    for name in params:
        if name not in known:
            hint = did_you_mean(name, known)
            raise ConfigError(f"a bounded job has no parameter {name!r}{hint} (known: {', '.join(known)})")
    if "data" not in params:
        raise ConfigError("a bounded job needs the parameter data, the folder of a partitioned dataset")
    return BoundedParams(**params)
