"""How a controller is set up, and what it says of itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from dglx_dist.errors import ConfigError
from dglx_dist.offload.autotuner import TunerLimits
from dglx_dist.offload.cost import Usage
from dglx_dist.offload.prices import PriceTable, prices
from dglx_dist.offload.relaunch import RelaunchRule
from dglx_dist.offload.tasks import TaskKey

_LEAST_PAUSE_S = 0.001


@final
@dataclass(frozen=True, kw_only=True)
class ControllerOptions:
    """How tasks are sent.

    Raises:
        ConfigError: a number is out of its bounds.
    """

    limits: TunerLimits
    """Bounds of the number of workers when it is tuned."""
    workers: int | None = None
    """Tasks under way at most; None: tuned by the queue of the graph server, from min(intervals, 100)."""
    batch: int = 1
    """Tasks that are sent together, while others are under way; fewer when one waits ``batch_wait_s``."""
    batch_wait_s: float = 0.005
    tick_s: float = 0.05
    """How often deaths and time-outs are looked for."""
    tune_s: float = 1.0
    """How often the queue is looked at."""
    relaunch: RelaunchRule = field(default_factory=RelaunchRule)
    prices: PriceTable = field(default_factory=prices)
    """Says how durations are rounded when they are billed."""

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise ConfigError(f"there are {self.workers} workers; give at least 1, or none to have it tuned")
        if self.batch < 1:
            raise ConfigError(f"batches of {self.batch} tasks; give at least 1")
        if not (self.batch_wait_s >= 0 and self.tick_s > 0 and self.tune_s > 0):
            raise ConfigError(f"{self} has a time below 0; give batch_wait_s >= 0, tick_s and tune_s > 0")

    @property
    def pause_s(self) -> float:
        """How often a controller is to tick: also often enough for a batch that does not get full."""
        return self.tick_s if self.batch == 1 else min(self.tick_s, max(self.batch_wait_s, _LEAST_PAUSE_S))


@final
@dataclass(frozen=True, kw_only=True)
class Counts:
    """What has happened so far."""

    invocations: int = 0
    """Tasks sent, each attempt once."""
    cold: int = 0
    """Invocations known to have ended for which a worker had to start first."""
    warm: int = 0
    """Those that found one."""
    relaunched: int = 0
    lost: int = 0
    """Of those launched again: workers known dead, not late."""
    refused: int = 0
    """Results that were duplicates."""
    billed_s: float = 0.0
    """Seconds of the invocations known to have ended, not rounded."""
    gb_s: float = 0.0
    """Their GB-seconds, each rounded up as the price table says."""

    @property
    def usage(self) -> Usage:
        """What is to be paid for."""
        return Usage(invocations=self.invocations, gb_seconds=self.gb_s, unknown=self.unbilled)

    @property
    def unbilled(self) -> int:
        """Invocations of which no duration is known: under way, killed, or not told by the provider."""
        return self.invocations - self.cold - self.warm


@final
@dataclass(frozen=True, kw_only=True)
class Finished:
    """One task that was done, for traces; times are those of the controller's clock, in seconds."""

    key: TaskKey
    attempt: int
    sent: float
    ready: float
    """When its rows could be pulled; before that the worker waited."""
    done: float
