"""Candidates that ``strategy="auto"`` compares. Each strategy lists its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

Unit: TypeAlias = Literal["mini_batch", "full_graph"]
"""Data that one step trains on."""

CACHE_SIZES = (0.1, 0.5)
"""Cache sizes to compare, each as a fraction of the server's own nodes."""


@dataclass(frozen=True, kw_only=True)
class CandidateContext:
    """Facts about the model and the cluster that determine the candidates."""

    ranks: int
    servers: int
    num_layers: int
    steps: int
    """Number of mini-batches in an epoch, or 0 without mini-batches."""
    caches: tuple[float, ...] = CACHE_SIZES


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A strategy with its main options."""

    unit: Unit
    strategy: str = ""
    """Registered name of the strategy. The planner sets it."""
    options: Mapping[str, Any] = field(default_factory=dict)
    cache: str | None = None
    """Cache policy for remote rows, or None for no cache."""
    cache_alpha: float = 0.0
    """Cache size as a fraction of the server's own nodes."""
    exact: bool = True
    """Whether training gives the same weights as one process on the same batches."""
    epochs_factor: float = 1.0
    """Factor on the epochs that exact strategies need for the same accuracy. Assumed from the papers."""

    @property
    def name(self) -> str:
        """Name in tables: the strategy and its options."""
        words = [self.strategy]
        for name, value in self.options.items():
            words.append(f"{name}={value}")
        if self.cache:
            words.append(f"cache={self.cache}:{self.cache_alpha:g}")
        return " ".join(words)

    @property
    def arguments(self) -> str:
        """Command-line options for ``dglx train`` that train this candidate."""
        words = [f"--strategy {self.strategy}"]
        for name, value in self.options.items():
            words.append(f"--option {name}={str(value).lower()}")
        if self.cache:
            words.append(f"--cache {self.cache} --cache-alpha {self.cache_alpha:g}")
        return " ".join(words)
