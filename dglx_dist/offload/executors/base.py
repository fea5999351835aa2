"""What an executor is: it has workers do tasks somewhere, and says at once when one has failed."""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import ClassVar, final

from dglx_dist.cluster.serve import Handler
from dglx_dist.offload.tasks import TaskKey


def no_notice() -> None:
    """Tell nobody."""


@final
@dataclass(frozen=True, kw_only=True)
class ExecutorContext:
    """What an executor is given by the graph server that has it."""

    folder: Path = field(default_factory=lambda: Path(tempfile.gettempdir()))
    """Where it may make a folder of its own, which it removes when it is closed."""
    stages: Mapping[str, str] = field(default_factory=dict)
    """The user's own stages: name to ``module:Class``."""
    handlers: Mapping[str, Handler] = field(default_factory=dict)
    """What answers a worker's operations in this process; for executors that need no socket."""
    notice: Callable[[], None] = no_notice
    """Called on any thread when :meth:`Executor.lost` has something new; returns quickly."""


@final
@dataclass(frozen=True, kw_only=True)
class Lost:
    """One attempt that will not bring its task to an end."""

    key: TaskKey
    attempt: int
    reason: str


@final
@dataclass(frozen=True, kw_only=True)
class Invocation:
    """One call of a worker that has ended, as a functions service bills it."""

    duration_s: float
    cold: bool
    """Whether a worker was started for it."""
    memory_mb: int


class Executor(ABC):
    """Has workers do tasks. Usable once made; any thread may call.

    Results do not come back through it: a worker gives its rows to the graph server and its gradients to the
    parameter server. So an executor may lose an attempt silently, and whoever invokes watches the time.

    Args:
        context: What the graph server gives.
        options: The executor's own, by name; unknown ones are refused.

    Raises:
        ConfigError: an option is unknown, or cannot be honoured here; the message says what is missing.
    """

    simulated: bool = True
    """Whether no provider is paid: dollars are then what the run would have cost."""
    in_process: ClassVar[bool] = False
    """Whether its workers are in this process, and can import all that it can."""
    option_names: ClassVar[tuple[str, ...]] = ()
    """All options that it takes; others are refused before anything is opened."""

    @abstractmethod
    def __init__(self, context: ExecutorContext, options: Mapping[str, object]) -> None: ...

    @abstractmethod
    def invoke(self, event: bytes) -> None:
        """Have a worker do the task of ``event`` (``Task.to_event``); returns at once.

        Raises:
            PeerError: the executor is closed, or cannot take it.
        """

    @abstractmethod
    def size(self, workers: int) -> None:
        """Use at most ``workers`` workers at the same time from now on, at least 1."""

    @abstractmethod
    def lost(self) -> list[Lost]:
        """Return the attempts that are known to have failed since the last call."""

    @abstractmethod
    def billed(self) -> list[Invocation]:
        """Return the invocations that have ended since the last call."""

    @property
    @abstractmethod
    def workers(self) -> int:
        """Workers that are up now, busy or idle; 0 where the executor cannot know."""

    @abstractmethod
    def close(self) -> None:
        """End all workers, at once, with what they do; may be called twice."""

    def __enter__(self) -> Executor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
