"""The options of push-pull, read and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, final, get_args

from dglx_dist.errors import ConfigError
from dglx_dist.records import FEATURE
from dglx_dist.storage.sizes import read_size
from dglx_dist.strategies.base import check_options

Side: TypeAlias = Literal["M", "D"]
"""P3's names: the part side (layer 1 up to the sum) and the owner side (all that follows)."""

Weights: TypeAlias = Literal["whole", "split"]
Order: TypeAlias = Literal["forward_first", "backward_first"]
StructureChoice: TypeAlias = Literal["auto", "push", "resample"]
Sync: TypeAlias = Literal["columns", "inputs"]

BUCKET_BYTES = 4 * 2**20
_MOST_IN_FLIGHT = 3

_TYPES: Mapping[str, type] = {
    "depth": int,
    "weights": str,
    "order": str,
    "group_size": int,
    "memory": str,
    "structure": str,
    "sync": str,
    "features": str,
    "cache_columns": bool,
    "bucket_bytes": int,
}


@final
@dataclass(frozen=True, kw_only=True)
class PushPullOptions:
    """What the user said."""

    depth: int = 1
    """Mini-batches in flight: 1 is exact, 3 the paper's."""
    weights: Weights = "whole"
    """Whether both sides of a batch use one version of the weights (as in the paper), or only M lags."""
    order: Order = "forward_first"
    group_size: int = 0
    """Ranks that hold all columns together; 0: the fewest that ``memory`` allows, all without it."""
    memory: str = ""
    """What a rank may hold of the features, as "4GB"."""
    structure: StructureChoice = "auto"
    sync: Sync = "columns"
    features: str = FEATURE
    """Names by comma, in the order in which the model puts them side by side."""
    cache_columns: bool = True
    bucket_bytes: int = BUCKET_BYTES

    def __post_init__(self) -> None:
        """Raise ConfigError unless every value is one that can be honoured."""
        if not 1 <= self.depth <= _MOST_IN_FLIGHT:
            raise ConfigError(f"option depth={self.depth} must be 1, 2 or 3 mini-batches in flight")
        for name, kind in (
            ("weights", Weights),
            ("order", Order),
            ("structure", StructureChoice),
            ("sync", Sync),
        ):
            if getattr(self, name) not in get_args(kind):
                known = " or ".join(map(repr, get_args(kind)))
                raise ConfigError(f"option {name}={getattr(self, name)!r} must be {known}")
        if self.group_size < 0 or self.bucket_bytes < 1:
            raise ConfigError(
                f"options group_size={self.group_size} and bucket_bytes={self.bucket_bytes} must be at least "
                "0 and 1"
            )
        if self.memory:
            read_size(self.memory)
        if not all(self.names):
            raise ConfigError(f"option features={self.features!r} has an empty name; as 'feat,extra'")
        if len(set(self.names)) < len(self.names):
            raise ConfigError(f"option features={self.features!r} has a name twice")

    @property
    def names(self) -> tuple[str, ...]:
        """The features."""
        return tuple(name.strip() for name in self.features.split(","))

    @property
    def in_flight(self) -> int:
        """Mini-batches in flight in the order in which they run.

        Going back first means that nothing stands between a batch's gradient and its step, which is the
        sequence of one batch less in flight.
        """
        return max(self.depth - 1, 1) if self.order == "backward_first" else self.depth

    @property
    def late(self) -> int:
        """Iterations of the user's loop between a batch's loss and the step of its part side."""
        return max(self.in_flight - 2, 0)


def read_push_pull_options(options: Mapping[str, object]) -> PushPullOptions:
    """Return the options of the session.

    Raises:
        ConfigError: one is unknown, of another type, or has a value that cannot be honoured.
    """
    memory = options.get("memory")
    if isinstance(memory, int) and not isinstance(memory, bool):
        # The command line reads memory=1000 as a number.
        options = {**options, "memory": str(memory)}
    check_options("push_pull", options, _TYPES)
    return PushPullOptions(**options)  # type: ignore[arg-type]  # checked one line up


def smallest_group(world_size: int, feature_bytes: int, memory_bytes: int) -> int:
    """Return the fewest ranks that hold ``feature_bytes`` together with ``memory_bytes`` each (P3, 3.5).

    Raises:
        ConfigError: not even all of them can.
    """
    for size in range(1, world_size + 1):
        if world_size % size == 0 and -(-feature_bytes // size) <= memory_bytes:
            return size
    raise ConfigError(
        f"the features take {feature_bytes} bytes, and {world_size} ranks of {memory_bytes} bytes (option "
        "memory) cannot hold them; grant more memory, or use more ranks"
    )
