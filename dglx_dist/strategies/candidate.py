"""Candidates of ``strategy="auto"``: a strategy with its main options, as the strategy itself offers them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

Unit: TypeAlias = Literal["mini_batch", "full_graph"]
"""What one step trains on."""

CACHE_SIZES = (0.1, 0.5)
"""Cache sizes to compare, as fractions of the server's own nodes."""


@dataclass(frozen=True, kw_only=True)
class CandidateContext:
    """Properties of model and cluster that define the candidates."""

    ranks: int
    servers: int
    num_layers: int
    steps: int
    """Steps of an epoch of mini-batches. 0: there are no mini-batches."""
    caches: tuple[float, ...] = CACHE_SIZES


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A strategy with its main options."""

    unit: Unit
    strategy: str = ""
    """Registered name of the strategy. The planner sets it."""
    options: Mapping[str, Any] = field(default_factory=dict)
    cache: str | None = None
    """Policy of the cache of remote rows. None: no cache."""
    cache_alpha: float = 0.0
    """Size of the cache as a fraction of the server's own nodes."""
    exact: bool = True
    """Whether steps give the weights of one process on the same batches. False: another estimator."""
    epochs_factor: float = 1.0
    """Epochs to the same accuracy relative to exact strategies of the same unit. Assumed, from papers."""

    @property
    def name(self) -> str:
        """Name in tables: the strategy and its options."""
        options = [f"{name}={value}" for name, value in self.options.items()]
        cached = [f"cache={self.cache}:{self.cache_alpha:g}"] if self.cache else []
        return " ".join([self.strategy, *options, *cached])
