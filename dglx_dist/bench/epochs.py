"""Epochs as JSON values, between ranks, driver and results."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from dglx_dist.errors import ConfigError
from dglx_dist.records import EpochRecord

_MAY_BE_NO_NUMBER = ("loss", "train_accuracy")


def to_json(epoch: EpochRecord) -> dict[str, Any]:
    """Return JSON values; what is no number, as the loss of simulated compute, becomes null."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in asdict(epoch).items()
    }


def from_json(value: Mapping[str, Any]) -> EpochRecord:
    """Read what :func:`to_json` gave.

    Raises:
        ConfigError: a field is missing.
    """
    try:
        read: dict[str, Any] = {one.name: value[one.name] for one in fields(EpochRecord)}
    except KeyError as error:
        raise ConfigError(f"{dict(value)} is no epoch: it has no {error}") from None
    for name in _MAY_BE_NO_NUMBER:
        read[name] = math.nan if read[name] is None else read[name]
    return EpochRecord(**read)
