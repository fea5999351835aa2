"""What a lab is: emulated servers of one machine, joined by links of a set rate."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

from dglx_dist.errors import ConfigError
from dglx_dist.planner.records import Rate

MOST_SERVERS = 250
LEAST_CPUS = 0.01


@dataclass(frozen=True, kw_only=True)
class LabSpec:
    """What the user asked for."""

    servers: int
    external: Rate | None = None
    """Most that a server sends, and most that it receives, through its card; None: not limited."""
    internal: Rate | None = None
    """The same for what the ranks of one server send each other by sockets; None: not limited."""
    cpus: float | None = None
    """Cores of each server, may be a fraction; None: this machine's cores / servers."""

    def __post_init__(self) -> None:
        if self.servers < 1:
            raise ConfigError(f"servers={self.servers}: a lab has at least one server")
        if self.servers > MOST_SERVERS:
            raise ConfigError(f"{self.servers} servers: a lab has at most {MOST_SERVERS}")
        if self.cpus is not None and not LEAST_CPUS <= self.cpus < float("inf"):
            raise ConfigError(f"cpus={self.cpus}: give each server {LEAST_CPUS} cores or more")


@dataclass(frozen=True, kw_only=True)
class Card:
    """Bytes that went through a server's network card since it was made, headers included."""

    sent: int
    received: int


class Server(ABC):
    """One emulated server."""

    number: int
    """0..S-1."""
    address: str
    """IPv4, reached by all servers of the lab."""
    device: str | None
    """Name of its card inside; None: plain loopback, which counts nothing of its own."""
    cores: tuple[int, ...]
    """Cores that its processes may run on."""
    cpu_share: float
    """Cores' worth of time that its processes get at most; see ``cpu_held_by``."""
    cpu_held_by: Literal["affinity", "quota", "affinity and quota", "nothing"]

    @abstractmethod
    def inside(self, command: Sequence[str]) -> list[str]:
        """Return the command that runs ``command`` on this server, within its share of the cores.

        Raises:
            LabError: the server is down.
        """


class Lab(ABC):
    """Servers that are up; a context manager that takes them down."""

    name: str
    spec: LabSpec
    kind: Literal["namespaces", "loopback"]
    missing: str | None
    """Why it is plain loopback, and what to install; None when it is not."""
    servers: tuple[Server, ...]

    @abstractmethod
    def set_rates(self, external: Rate | None, internal: Rate | None) -> None:
        """Limit all links anew, at once, also while commands run.

        Raises:
            ConfigError: a rate is given and this lab is plain loopback.
        """

    @abstractmethod
    def cards(self) -> tuple[Card, ...]:
        """Read the (S,) cards; empty on plain loopback."""

    @abstractmethod
    def describe(self) -> dict[str, object]:
        """Return JSON values for results: kind, servers, rates, cores and how they are held, missing."""

    @abstractmethod
    def close(self) -> None:
        """Take the servers down and end what runs on them. May be called twice."""

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def label(lab: Lab) -> str:
    """Say what is emulated, in the few words that stand beside every figure.

    E.g. "namespaces, 100mbit between servers" or "loopback, links not limited: WHY".
    """
    if lab.kind == "loopback":
        return f"loopback, links not limited: {lab.missing or 'asked for'}"
    external, internal = lab.spec.external, lab.spec.internal
    between = "links not limited" if external is None else f"{external} between servers"
    return f"namespaces, {between}" + ("" if internal is None else f", {internal} within")
