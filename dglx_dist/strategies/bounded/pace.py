"""How epochs may overlap (Dorylus, section 5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, final

from dglx_dist.errors import ConfigError

Mode: TypeAlias = Literal["no_pipe", "pipe", "async"]


@final
@dataclass(kw_only=True)
class Pace:
    """The one object of a graph server's run that says which epochs are synchronous."""

    mode: Mode = "pipe"
    staleness: int = 0
    """S: an interval may begin epoch e once e - S updates were made. Only where epochs are asynchronous."""
    first_epoch: int = 0
    """Always synchronous: there are no values yet to be stale."""
    target: int | None = None
    """Right answers of an epoch, over all graph servers, that make later ones synchronous; None: none do."""
    synchronous_from: int | None = None
    """The epoch from which on all are synchronous; None: never. Set while no interval can have begun it."""

    def __post_init__(self) -> None:
        if self.staleness < 0:
            raise ConfigError(f"staleness={self.staleness} must be at least 0")

    def is_synchronous(self, epoch: int) -> bool:
        """Whether ``epoch`` has a barrier at every Scatter."""
        late = self.synchronous_from is not None and epoch >= self.synchronous_from
        return self.mode != "async" or epoch <= self.first_epoch or late

    def lead(self, epoch: int) -> int:
        """How many updates may be missing when an interval begins ``epoch``."""
        return 0 if self.is_synchronous(epoch) else self.staleness
