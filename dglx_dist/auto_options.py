"""Inputs of ``strategy="auto"``: options of the session, and the training to plan for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dglx_dist.comm.session import Session
from dglx_dist.data.storage.files import read_size
from dglx_dist.dataloading.step_loader import whole_number
from dglx_dist.errors import ConfigError
from dglx_dist.planner.choose import FULL_GRAPH_EPOCHS
from dglx_dist.planner.workload import DRY_BATCHES
from dglx_dist.strategies.base import AUTO, check_options, strategy_of

_OPTIONS: Mapping[str, type] = {
    "unit": str,
    "allow_estimators": bool,
    "full_graph_epochs": float,
    "memory": str,
    "dry_batches": int,
    "caches": bool,
}


@dataclass(frozen=True, kw_only=True)
class AutoOptions:
    """Options of ``auto``.

    Raises:
        ConfigError: a value cannot be honoured.
    """

    unit: str = "mini_batch"
    """Kind of step to choose among: mini_batch, full_graph, or any."""
    allow_estimators: bool = False
    full_graph_epochs: float = FULL_GRAPH_EPOCHS
    memory: str = ""
    """Limit of a rank, as "4GB"; empty: its share of the machine's."""
    dry_batches: int = DRY_BATCHES
    """0: all of an epoch."""
    caches: bool = True
    """Whether caches of remote rows may be chosen."""

    def __post_init__(self) -> None:
        if self.unit not in ("mini_batch", "full_graph", "any"):
            raise ConfigError(f"option unit={self.unit!r} must be 'mini_batch', 'full_graph' or 'any'")
        if self.dry_batches < 0:
            raise ConfigError(f"option dry_batches={self.dry_batches} must be at least 0 (0: an epoch)")
        if not 0 < self.full_graph_epochs < math.inf:
            raise ConfigError(f"option full_graph_epochs={self.full_graph_epochs} must be a number above 0")
        if self.memory:
            try:
                read_size(self.memory)
            except ConfigError as error:
                raise ConfigError(f"option memory: {error}") from None


@dataclass(frozen=True, kw_only=True)
class Training:
    """Model and batches of the training to plan for.

    Raises:
        ConfigError: a value cannot be honoured.
    """

    fanouts: Sequence[int] | None = None
    """Input-most first; None: the defaults."""
    batch_size: int | None = None
    epochs: int = 20
    num_layers: int | None = None
    """None: the number of fan-outs, or of the model's convolutions."""
    kind: str | None = None
    """Of a ready-made model; None: derived from its convolutions."""
    heads: int = 4
    hidden: int | None = None
    own_loop: bool = False
    """Whether the user's loop takes the steps, which strategy ``lambda`` does not support."""

    def __post_init__(self) -> None:
        if self.fanouts is not None:
            if isinstance(self.fanouts, str) or not isinstance(self.fanouts, Sequence) or not self.fanouts:
                raise ConfigError(
                    f"fanouts={self.fanouts!r} must be a list of one whole number for each layer, input-most "
                    "first; -1: all"
                )
            for place, fanout in enumerate(self.fanouts):
                whole_number(f"fanouts[{place}]", fanout, least=-1)
        if self.batch_size is not None:
            whole_number("batch_size", self.batch_size, least=1)
        whole_number("epochs", self.epochs, least=1)


def read_auto_options(options: Mapping[str, object]) -> AutoOptions:
    """Return the options of a session that was opened with ``auto``.

    Raises:
        ConfigError: one is unknown, of another type, or out of range.
    """
    given = dict(options)
    for name, kind in (("full_graph_epochs", float), ("memory", str)):
        if isinstance(given.get(name), int) and not isinstance(given[name], bool):
            given[name] = kind(given[name])  # type: ignore[arg-type]  # an int, checked above
    check_options(AUTO, given, _OPTIONS)
    return AutoOptions(**given)  # type: ignore[arg-type]  # checked above


def check_session_options(session: Session) -> None:
    """Raise ConfigError for an option that the session's strategy, or ``auto``, does not know."""
    if session.strategy == AUTO:
        read_auto_options(session.options)
    else:
        strategy_of(session)
