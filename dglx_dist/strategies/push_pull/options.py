"""Options of push-pull."""

from dataclasses import dataclass
from functools import partial
from typing import Literal, final

from dglx_dist.comm.codec import WireDtype
from dglx_dist.errors import ConfigError
from dglx_dist.memory import read_size
from dglx_dist.options import Check, at_least, check_ranges, option, read_options
from dglx_dist.records import FEATURE
from dglx_dist.strategies.gradient_sync import BUCKET_BYTES


@final
@dataclass(frozen=True, kw_only=True)
class PushPullOptions:
    """Options of push_pull."""

    depth: int = option(
        1,
        "Number of mini-batches in flight. 1 is exact, 3 is the paper's.",
        check=Check(lambda depth: 1 <= depth <= 3, "1, 2 or 3 mini-batches in flight"),
    )
    weights: Literal["whole", "split"] = option(
        "whole",
        "Whether both sides of a batch use the same version of the weights (whole, the paper's), or only the "
        "first layer lags (split).",
    )
    group_size: int = option(
        0,
        "Ranks that hold all columns together. 0: as few as ``memory`` allows, or all.",
        check=at_least(0),
    )
    memory: str = ""
    """Size of the features that a rank may hold, such as "4GB"."""
    structure: Literal["push", "resample"] = option(
        "push", "Whether owners push their blocks to the parts, or the parts sample them again."
    )
    features: str = FEATURE
    """Comma-separated names, in the order in which the model concatenates them."""
    wire_dtype: WireDtype = option("same", "Type in which partial activations and gradients are sent.")
    bucket_bytes: int = option(BUCKET_BYTES, "Bytes of gradients that are sent together.", check=at_least(1))

    def __post_init__(self) -> None:
        check_ranges(self, "option {name}={value!r}")
        if self.memory:
            read_size(self.memory)
        if not all(self.names):
            raise ConfigError(f"option features={self.features!r} has an empty name; write 'feat,extra'")
        if len(set(self.names)) < len(self.names):
            raise ConfigError(f"option features={self.features!r} has a name twice")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name.strip() for name in self.features.split(","))

    @property
    def delay(self) -> int:
        """Number of iterations between a batch's loss and the step on its part side."""
        return max(self.depth - 2, 0)


read_push_pull_options = partial(read_options, "strategy 'push_pull'", PushPullOptions)
"""Read the options. Raises ConfigError if an option is unknown, has a wrong type or is not supported."""
