"""A lab of network namespaces, joined by a bridge that lives in a namespace of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from os import getpid
from typing import Literal, final

from dglx_dist.comm import system as cgroups
from dglx_dist.errors import LabError
from dglx_dist.planner.records import Rate
from scripts.netlab import cleaning, links, state
from scripts.netlab.base import Card, Lab, LabSpec, label
from scripts.netlab.budget import CpuShare, deal_out, held_by, usable_cores
from scripts.netlab.holder import Holder
from scripts.netlab.pids import find
from scripts.netlab.server import NAMESPACES, SETUP, NamespaceServer, ServerFacts, call_it, cgroup_name
from scripts.netlab.state import LabState


@final
class NamespaceLab(Lab):
    """Servers that are up; ``open_lab``, ``up`` and ``attach`` of ``lab.opening`` return one.

    Nothing of it has a name or an address outside, but for its notes and its control groups.

    Args:
        noted: What is noted of it, complete.
        holders: Its namespaces, to be let go by ``close``; none: they are another process's.
    """

    servers: tuple[NamespaceServer, ...]

    def __init__(self, noted: LabState, holders: Sequence[Holder] = ()) -> None:
        self.name = noted.name
        self.spec = noted.spec
        self.kind = "namespaces"
        self.missing = None
        self.servers = tuple(NamespaceServer(facts) for facts in noted.servers)
        self._noted = noted
        self._holders = tuple(holders)

    def set_rates(self, external: Rate | None, internal: Rate | None) -> None:
        """Limit all links anew, at once, also while commands run.

        Raises:
            LabError: the lab is down, or a rate was refused; some links may have the new one then.
        """
        if not all(process.alive() for process in self._noted.processes):
            raise LabError(f"the lab {self.name!r} was taken down meanwhile")
        noted = replace(self._noted, spec=replace(self.spec, external=external, internal=internal))
        _apply_rates(noted)
        # Last: nobody shall read of a rate that was refused.
        state.note(noted)
        self._noted, self.spec = noted, noted.spec

    def cards(self) -> tuple[Card, ...]:
        """Read the (S,) cards.

        Raises:
            LabError: the lab is down.
        """
        return tuple(server.card() for server in self.servers)

    def describe(self) -> dict[str, object]:
        """Return JSON values for results."""
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
            "missing": None,
        }

    def close(self) -> None:
        """Take the servers down and end what runs on them; a lab of another process stays up."""
        holders, self._holders = self._holders, ()
        for holder in holders:
            holder.close()
        # Taken down by another process, the name may be another lab's by now.
        if holders and state.noted_still(self._noted):
            cleaning.remove(self._noted)


def make(spec: LabSpec, name: str, *, held: Literal["process", "detached"]) -> NamespaceLab:
    """Make a lab; whatever fails, nothing of it stays.

    Args:
        spec: What is asked for.
        name: Nobody else's.
        held: ``process``: it ends with this process, however that ends. ``detached``: only when taken down.

    Raises:
        ConfigError: the name is taken, or there are not as many cores as asked for.
        LabError: the machine refused; with its answer.
    """
    shares = deal_out(usable_cores(), spec.servers, spec.cpus)
    noted = LabState(
        name=state.check_name(name),
        spec=spec,
        held=held,
        owner=find(getpid()),
        boot=state.boot_id(),
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )
    state.reserve(noted)
    holders: list[Holder] = []
    try:
        noted = _raise_servers(noted, shares, holders)
        _apply_rates(noted)
        noted = replace(noted, complete=True)
        state.note(noted)
        if held == "detached":
            for holder in holders:
                holder.stay()
            return NamespaceLab(noted)
    except BaseException:
        for holder in holders:
            holder.close()
        cleaning.remove(noted)
        raise
    return NamespaceLab(noted, holders)


def _raise_servers(noted: LabState, shares: Sequence[CpuShare], holders: list[Holder]) -> LabState:
    switch = Holder("the bridge", ["--net"], links.bridge_setup())
    holders.append(switch)
    noted = replace(noted, switch=(switch.init, switch.outer))
    state.note(noted)
    # A lab made inside a server takes no notes for its own whose process numbers it cannot see.
    setup = [*SETUP, ["mount", "-t", "tmpfs", "tmpfs", str(state.folder())]]
    addresses = {links.name_of(number): links.address_of(number) for number in range(len(shares))}
    for number, share in enumerate(shares):
        named = [*setup, call_it(links.name_of(number), addresses)]
        holder = Holder(f"server {number}", NAMESPACES, named)
        holders.append(holder)
        links.connect(number, init=holder.init.pid, switch=switch.init.pid)
        group = cgroups.make(cgroup_name(noted.name, number), share.share) if share.needs_quota else None
        facts = ServerFacts(
            number=number,
            address=links.address_of(number),
            init=holder.init,
            outer=holder.outer,
            cores=share.cores,
            cpu_share=share.share,
            cpu_held_by=held_by(share, quota=group is not None),
            cgroup=None if group is None else str(group),
        )
        noted = replace(noted, servers=(*noted.servers, facts))
        state.note(noted)
    return noted


def _apply_rates(noted: LabState) -> None:
    """Limit what each server sends on its card and what it receives at the bridge's end, and its loopback."""
    spec = noted.spec
    ports = [links.limit(links.port_of(server.number), spec.external) for server in noted.servers]
    links.run_inside(noted.switch[0].pid, ports)
    for server in noted.servers:
        commands = [links.limit(links.CARD, spec.external), links.limit(links.LOOPBACK, spec.internal)]
        links.run_inside(server.init.pid, commands)
