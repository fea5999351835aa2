"""A lab without a network of its own: servers are torchrun nodes of this machine, and no link is limited."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Sequence
from typing import Literal, final

from dglx_dist.errors import ConfigError
from dglx_dist.planner.records import Rate
from scripts.netlab.base import Card, Lab, LabSpec, Server, label
from scripts.netlab.budget import CpuShare, HeldBy, deal_out, held_by, usable_cores


@final
class LoopbackServer(Server):
    """Processes that torchrun takes for a machine of their own."""

    def __init__(self, number: int, share: CpuShare) -> None:
        self.number = number
        self.address = "127.0.0.1"
        self.device = None
        self.cores = share.cores
        self.cpu_share = share.share
        self._keeps_to_cores = shutil.which("taskset") is not None
        self.cpu_held_by: HeldBy = held_by(share, quota=False) if self._keeps_to_cores else "nothing"

    def inside(self, command: Sequence[str]) -> list[str]:
        """Return ``command``, kept on this server's cores where ``taskset`` is installed."""
        if not self._keeps_to_cores:
            return list(command)
        return ["taskset", "-c", ",".join(map(str, self.cores)), *command]


@final
class LoopbackLab(Lab):
    """Servers on 127.0.0.1, in one network, one process table and one ``/dev/shm``.

    Rates in ``spec`` are not held; :meth:`describe` says so.

    Args:
        spec: What was asked for.
        missing: Why it is not a lab of namespaces; None: it was asked for.

    Raises:
        ConfigError: there are not as many cores as asked for.
    """

    def __init__(self, spec: LabSpec, missing: str | None = None) -> None:
        self.spec = spec
        self.name = f"loopback-{secrets.token_hex(4)}"
        self.kind: Literal["namespaces", "loopback"] = "loopback"
        self.missing = missing
        self.servers: tuple[Server, ...] = tuple(
            LoopbackServer(number, share)
            for number, share in enumerate(deal_out(usable_cores(), spec.servers, spec.cpus))
        )

    def set_rates(self, external: Rate | None, internal: Rate | None) -> None:
        """Do nothing for no rates.

        Raises:
            ConfigError: a rate is given.
        """
        for name, rate in (("external", external), ("internal", internal)):
            if rate is not None:
                raise ConfigError(
                    f"{name} rate {rate}: plain loopback limits no link "
                    f"({self.missing or 'it was asked for'}); give no rate, or make a lab of namespaces"
                )

    def cards(self) -> tuple[Card, ...]:
        """Return (): loopback counts nothing per server."""
        return ()

    def describe(self) -> dict[str, object]:
        """Return JSON values: kind, label, servers, the rates that were asked for and are not held, cores."""
        return {
            "name": self.name,
            "kind": self.kind,
            "label": label(self),
            "servers": len(self.servers),
            "external": None,
            "internal": None,
            "rates_not_held": {
                name: str(rate)
                for name, rate in (("external", self.spec.external), ("internal", self.spec.internal))
                if rate is not None
            },
            "cores": [list(server.cores) for server in self.servers],
            "cpu_share": [server.cpu_share for server in self.servers],
            "cpu_held_by": sorted({server.cpu_held_by for server in self.servers}),
            "missing": self.missing,
        }

    def close(self) -> None:
        """Do nothing: commands end themselves."""
