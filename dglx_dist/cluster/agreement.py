"""Whether the ranks that meet were told the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dglx_dist.errors import ConfigError

_OF_ONE_MACHINE = frozenset({"memory", "threads"})
"""Options that a machine may have of its own."""


def must_be_alike(strategy: str, options: Mapping[str, object], seed: int, curve: bool) -> dict[str, Any]:
    """Return what a rank tells the others of what must be the same, for :func:`check_agreement`.

    Args:
        strategy: Name of the strategy.
        options: The strategy's; values that JSON does not know count by their type.
        seed: Of everything random.
        curve: Whether one-sided calls are encrypted.
    """
    told = {name: value for name, value in options.items() if name not in _OF_ONE_MACHINE}
    text = json.dumps(told, sort_keys=True, default=lambda value: type(value).__name__)
    return {"strategy": strategy, "options": text, "seed": seed, "curve": curve}


def check_agreement(said: list[Any]) -> None:
    """Raise ConfigError unless all ranks said the same of what must be the same.

    Args:
        said: (W,) what each rank told when it joined.
    """
    for one in said:
        if one["no_trace"]:
            raise ConfigError(one["no_trace"])
    for name, remedy in (
        ("strategy", "give the same --strategy"),
        ("options", "give the strategy the same options"),
        ("seed", "give the same seed"),
        ("curve", "set DGLX_CURVE alike"),
    ):
        for rank, one in enumerate(said):
            if one[name] != said[0][name]:
                raise ConfigError(
                    f"rank 0 has {name} {said[0][name]!r} and rank {rank} has {one[name]!r}; "
                    f"{remedy} on all ranks"
                )
