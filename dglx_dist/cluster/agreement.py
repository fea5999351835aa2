"""Whether the ranks that meet were told the same."""

from __future__ import annotations

from typing import Any

from dglx_dist.errors import ConfigError


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
        ("seed", "give the same seed"),
        ("curve", "set DGLX_CURVE alike"),
    ):
        for rank, one in enumerate(said):
            if one[name] != said[0][name]:
                raise ConfigError(
                    f"rank 0 has {name} {said[0][name]!r} and rank {rank} has {one[name]!r}; "
                    f"{remedy} on all ranks"
                )
