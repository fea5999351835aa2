"""Labs: emulated servers on one machine with their cores, or plain loopback in their place."""

from __future__ import annotations

import math
import os
import secrets
import shutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, final

from dglx_dist.errors import ConfigError, DglxError
from dglx_dist.planner.records import Rate

MAX_SERVERS = 250
MIN_CPUS = 0.01
HeldBy = Literal["affinity", "quota", "affinity and quota", "nothing"]


class LabError(DglxError):
    """An operation on emulated servers failed. The message holds the answer of the host or the command."""


@dataclass(frozen=True, kw_only=True)
class LabSpec:
    """Options of a lab."""

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
        if self.servers > MAX_SERVERS:
            raise ConfigError(f"{self.servers} servers: a lab has at most {MAX_SERVERS}")
        if self.cpus is not None and not MIN_CPUS <= self.cpus < float("inf"):
            raise ConfigError(f"cpus={self.cpus}: give each server {MIN_CPUS} cores or more")


@dataclass(frozen=True, kw_only=True)
class Card:
    """Bytes that went through a server's network card since it was made, headers included."""

    sent: int
    received: int


@dataclass(frozen=True, kw_only=True)
class Server(ABC):
    """One emulated server."""

    device: ClassVar[str | None]
    """Name of its card inside; None: plain loopback, which counts nothing of its own."""
    number: int
    """0..S-1."""
    address: str
    """IPv4, reached by all servers of the lab."""
    cores: tuple[int, ...]
    """Cores that its processes may run on."""
    cpu_share: float
    """Cores' worth of time that its processes get at most; see ``cpu_held_by``."""
    cpu_held_by: HeldBy

    @abstractmethod
    def inside(self, command: Sequence[str]) -> list[str]:
        """Return the command that runs ``command`` on this server, within its share of the cores."""


class Lab(ABC):
    """Servers that are up; a context manager that takes them down."""

    name: str
    spec: LabSpec
    kind: Literal["namespaces", "loopback"]
    missing: str | None = None
    """Why it is plain loopback, and what to install; None when it is not."""
    servers: tuple[Server, ...]

    @abstractmethod
    def set_rates(self, external: Rate | None, internal: Rate | None) -> None:
        """Limit all links anew, at once, also while commands run; ConfigError on plain loopback."""

    @abstractmethod
    def cards(self) -> tuple[Card, ...]:
        """Read the (S,) cards; empty on plain loopback."""

    def describe(self) -> dict[str, object]:
        """Return JSON values for results: kind, servers, rates, cores and how they are held, missing."""
        return {
            "kind": self.kind,
            "name": self.name,
            "label": label(self),
            "servers": len(self.servers),
            "external": self.spec.external and str(self.spec.external),
            "internal": self.spec.internal and str(self.spec.internal),
            "cores": [list(server.cores) for server in self.servers],
            "cpu_share": [server.cpu_share for server in self.servers],
            "cpu_held_by": sorted({server.cpu_held_by for server in self.servers}),
            "missing": self.missing,
        }

    def close(self) -> None:  # noqa: B027  # nothing to end on plain loopback: commands end themselves
        """Take the servers down and end what runs on them. May be called twice."""

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def label(lab: Lab) -> str:
    """Say what is emulated, as beside every figure: e.g. "namespaces, 100mbit between servers"."""
    if lab.kind == "loopback":
        return f"loopback, links not limited: {lab.missing or 'asked for'}"
    external, internal = lab.spec.external, lab.spec.internal
    between = "links not limited" if external is None else f"{external} between servers"
    return f"namespaces, {between}" + ("" if internal is None else f", {internal} within")


_EXACT = 1e-9


@dataclass(frozen=True, kw_only=True)
class CpuShare:
    """CPU share of one server. Its processes run on ``cores`` only, for at most ``share`` cores of time."""

    cores: tuple[int, ...]
    share: float

    @property
    def needs_quota(self) -> bool:
        """Whether keeping to the cores is not enough to keep to the share."""
        return self.share < len(self.cores) - _EXACT

    def held_by(self, *, quota: bool) -> HeldBy:
        """Say what keeps a server to its share: ``quota`` tells whether a control group does.

        Its processes keep to its cores in any case.
        """
        if quota:
            return "affinity and quota"
        return "nothing" if self.needs_quota else "affinity"


def usable_cores() -> tuple[int, ...]:
    return tuple(sorted(os.sched_getaffinity(0)))


def deal_out(cores: tuple[int, ...], servers: int, cpus: float | None) -> tuple[CpuShare, ...]:
    """Give each of (S,) servers its cores of ``cores`` and its share of time on them.

    No two servers share a core where there are enough. Where there are more servers than cores, as many as
    fit share one core; where that leaves a server over, all run on all cores and only the share parts them.
    ``cpus`` None: whole cores as far as they go, else cores / S.
    """
    if cpus is None:
        cpus = float(len(cores) // servers) or len(cores) / servers
    if cpus * servers > len(cores) + _EXACT:
        raise ConfigError(
            f"{servers} servers of {cpus:g} cores need {servers * cpus:g}, and there are {len(cores)}; "
            f"give each at most {len(cores) / servers:g}, or let computation be simulated"
        )
    width = math.ceil(cpus - _EXACT)
    if width * servers <= len(cores):
        own = [cores[server * width : (server + 1) * width] for server in range(servers)]
    elif math.floor(1 / cpus + _EXACT) * len(cores) >= servers:
        own = [(cores[server % len(cores)],) for server in range(servers)]
    else:
        own = [cores] * servers
    return tuple(CpuShare(cores=server_cores, share=cpus) for server_cores in own)


@final
class LoopbackServer(Server):
    """Processes that torchrun takes for a machine of their own."""

    device = None

    def inside(self, command: Sequence[str]) -> list[str]:
        if shutil.which("taskset") is None:
            return list(command)
        return ["taskset", "-c", ",".join(map(str, self.cores)), *command]


@final
class LoopbackLab(Lab):
    """Servers on 127.0.0.1, in one network, one process table and one ``/dev/shm``.

    Rates in ``spec`` are not held; :meth:`describe` says so. ``missing``: why it is not a lab of namespaces.
    """

    def __init__(self, spec: LabSpec, missing: str | None = None) -> None:
        self.spec, self.missing = spec, missing
        self.name, self.kind = f"loopback-{secrets.token_hex(4)}", "loopback"
        holds = shutil.which("taskset") is not None
        self.servers: tuple[Server, ...] = tuple(
            LoopbackServer(
                number=number,
                address="127.0.0.1",
                cores=share.cores,
                cpu_share=share.share,
                cpu_held_by=share.held_by(quota=False) if holds else "nothing",
            )
            for number, share in enumerate(deal_out(usable_cores(), spec.servers, spec.cpus))
        )

    def set_rates(self, external: Rate | None, internal: Rate | None) -> None:
        for name, rate in (("external", external), ("internal", internal)):
            if rate is not None:
                raise ConfigError(
                    f"{name} rate {rate}: plain loopback limits no link "
                    f"({self.missing or 'it was asked for'}); give no rate, or make a lab of namespaces"
                )

    def cards(self) -> tuple[Card, ...]:
        return ()

    def describe(self) -> dict[str, object]:
        requested = {"external": self.spec.external, "internal": self.spec.internal}
        not_held = {name: str(rate) for name, rate in requested.items() if rate is not None}
        return {**super().describe(), "external": None, "internal": None, "rates_not_held": not_held}
