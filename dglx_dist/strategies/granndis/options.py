"""The options of full-graph training, read and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from dglx_dist.errors import ConfigError
from dglx_dist.strategies.base import check_options
from dglx_dist.strategies.granndis.eas import EasOptions, read_eas_options
from dglx_dist.strategies.granndis.split import AUTO, check_split

BUCKET_BYTES = 4 * 2**20

COMMON: Mapping[str, type] = {"use_pp": bool, "bucket_bytes": int}
"""What every strategy of full-graph training knows."""
EXTERNAL: Mapping[str, type] = {
    "external_hops": int,
    "external_fanout": int,
    "external_policy": str,
    "resample_every": int,
}
"""Of expansion-aware sampling."""
PRELOADING: Mapping[str, type] = {**COMMON, **EXTERNAL, "hops": int, "split": str}
"""What those know that preload the neighbourhood of a server."""


@final
@dataclass(frozen=True, kw_only=True)
class FullGraphOptions:
    """What the user said of what is exchanged between ranks.

    Raises:
        ConfigError: a value cannot be honoured.
    """

    hops: int | None = None
    """k: layers that a server computes without others (algorithms 3.2); None: all of them."""
    use_pp: bool = True
    """Whether the features of the halo are kept from the start on, or sent anew in each epoch."""
    split: str = AUTO
    """The partitioner that gives the rows of a server to its ranks."""
    eas: EasOptions | None = None
    """How far a server reaches into the others, where it is not the whole neighbourhood."""
    bucket_bytes: int = BUCKET_BYTES
    """Gradients of parameters that are sent together."""

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1:
            raise ConfigError(f"option bucket_bytes={self.bucket_bytes} must be at least 1")
        if self.hops is not None and self.hops < 0:
            raise ConfigError(
                f"option hops={self.hops} must be at least 0: it is the number of layers, from the first one "
                "on, that a server computes without others; 0 is full_graph, and left out it is all layers"
            )
        if self.eas is not None and self.hops is not None:
            raise ConfigError(
                f"option hops={self.hops} says that layers above exchange rows with other servers, and with "
                f"external_hops={self.eas.hops} none does; leave one of them out"
            )
        check_split(self.split)


def read_full_graph_options(
    strategy: str, options: Mapping[str, object], known: Mapping[str, type], **fixed: Any
) -> FullGraphOptions:
    """Return the options of the session.

    Args:
        strategy: Name for messages.
        options: What the user gave.
        known: Option name to the type of its value.
        fixed: Fields that the strategy sets itself.

    Raises:
        ConfigError: one is unknown, of another type, or has a value that cannot be honoured.
    """
    check_options(strategy, options, known)
    external: dict[str, Any] = {name: value for name, value in options.items() if name in EXTERNAL}
    others: dict[str, Any] = {name: value for name, value in options.items() if name not in EXTERNAL}
    asked = {"external_hops": None, "external_fanout": None, **external}
    return FullGraphOptions(**others, **fixed, eas=read_eas_options(**asked))


def hops_of(options: FullGraphOptions, num_layers: int) -> int:
    """Return how many of ``num_layers`` layers are computed without other servers.

    Raises:
        ConfigError: there are not so many.
    """
    if options.hops is None:
        return num_layers
    if options.hops > num_layers:
        raise ConfigError(
            f"option hops={options.hops}, and the sampler has {num_layers} layers: give at most "
            f"{num_layers}, or leave it out, which is all of them"
        )
    return options.hops
