"""Labs of network namespaces: what a machine lacks for them, making them, finding those that are up."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from typing import Literal, final

from dglx_dist.errors import ConfigError
from dglx_dist.planner.records import Rate
from scripts.netlab import cgroups, servers, state
from scripts.netlab.base import Card, CpuShare, Lab, LabError, LabSpec, LoopbackLab, deal_out, usable_cores
from scripts.netlab.servers import (
    NAMESPACES,
    SETUP,
    Holder,
    NamespaceServer,
    call_it,
    cgroup_name,
    find_process,
)
from scripts.netlab.state import LabState, clean_stale

_PACKAGES = {"iproute2": ("ip", "tc"), "util-linux": ("unshare", "nsenter", "mount", "taskset")}
_TRIAL = ("unshare", "--net", "--mount", "--ipc", "--uts", "--pid", "--fork", "--kill-child")
_TRIAL_TIMEOUT_S = 30.0
_NEED = "refused; a container needs --privileged"
_STEPS = (
    ("true", f"new namespaces are {_NEED} (or --cap-add SYS_ADMIN, NET_ADMIN)"),
    ("mount --make-rprivate / && mount -t proc proc /proc", f"mounts are {_NEED}"),
    ("echo server > /proc/sys/kernel/hostname", f"a host name of its own is {_NEED}"),
    ("mount -t tmpfs tmpfs /dev/shm", f"a private /dev/shm is {_NEED}"),
    ("ip link add veth0 type veth peer name veth1", "the kernel makes no virtual cards (module veth)"),
    ("ip link add bridge type bridge", "the kernel makes no bridges (module bridge)"),
    (
        "tc qdisc add dev veth0 root tbf rate 1mbit burst 256kb latency 50ms",
        "the kernel cannot limit rates (module sch_tbf; on Debian and Ubuntu in linux-modules-extra)",
    ),
)


def what_is_missing() -> str | None:
    """Say what this machine lacks for emulated servers, and what to install; None: nothing.

    Tries it out in namespaces of its own, which end with the trial. A normal user learns that root is needed.
    """
    missing = [
        f"{', '.join(lacking)}: not installed, apt-get install {package}"
        for package, tools in _PACKAGES.items()
        if (lacking := [tool for tool in tools if shutil.which(tool) is None])
    ]
    if os.geteuid() != 0:
        missing.append("namespaces and network devices need root: sudo, or a privileged container")
    return "; ".join(missing) if missing else _what_is_refused()


def _what_is_refused() -> str | None:
    script = "\n".join(f"{{ {command}; }} || exit {10 + step}" for step, (command, _) in enumerate(_STEPS))
    try:
        tried = subprocess.run(
            [*_TRIAL, "sh", "-c", script],
            capture_output=True,
            text=True,
            timeout=_TRIAL_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return f"this machine made no namespaces within {_TRIAL_TIMEOUT_S:.0f} s"
    if tried.returncode == 0:
        return None
    # Codes of the steps begin at 10, so that unshare's own 1 means that no step was reached.
    step = max(tried.returncode - 10, 0)
    reason = _STEPS[min(step, len(_STEPS) - 1)][1]
    return f"{reason}: {' '.join(tried.stderr.split())}"


@final
class NamespaceLab(Lab):
    """Servers that are up; ``open_lab``, ``open_detached`` and ``attach`` return one.

    Nothing of it has a name or an address outside, but for its notes and its control groups. ``holders``:
    its namespaces, to be let go by ``close``; none: they are another process's.
    """

    servers: tuple[NamespaceServer, ...]

    def __init__(self, noted: LabState, holders: Sequence[Holder] = ()) -> None:
        self.kind = "namespaces"
        self.name, self.spec, self.servers = noted.name, noted.spec, noted.servers
        self._noted, self._holders = noted, tuple(holders)

    def set_rates(self, external: Rate | None, internal: Rate | None) -> None:
        if not all(process.alive() for process in self._noted.processes):
            raise LabError(f"the lab {self.name!r} was taken down meanwhile")
        noted = replace(self._noted, spec=replace(self.spec, external=external, internal=internal))
        _apply_rates(noted)
        # Last: nobody shall read of a rate that was refused.
        state.write_notes(noted)
        self._noted, self.spec = noted, noted.spec

    def cards(self) -> tuple[Card, ...]:
        return tuple(server.card() for server in self.servers)

    def close(self) -> None:
        holders, self._holders = self._holders, ()
        for holder in holders:
            holder.close()
        # Taken down by another process, the name may be another lab's by now.
        if holders and state.noted_still(self._noted):
            state.remove_lab(self._noted)


def make_lab(spec: LabSpec, name: str, *, held: Literal["process", "detached"]) -> NamespaceLab:
    """Make a lab called ``name``, nobody else's; whatever fails, nothing of it stays.

    ``held``: by "process", with which it ends, however that ends, or "detached", until it is taken down.
    """
    shares = deal_out(usable_cores(), spec.servers, spec.cpus)
    noted = LabState(
        name=state.check_name(name),
        spec=spec,
        held=held,
        owner=find_process(os.getpid()),
        boot=state.boot_id(),
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )
    state.write_notes(noted, new=True)
    holders: list[Holder] = []
    try:
        noted = _raise_servers(noted, shares, holders)
        _apply_rates(noted)
        noted = replace(noted, complete=True)
        state.write_notes(noted)
        if held == "detached":
            for holder in holders:
                holder.stay()
            return NamespaceLab(noted)
    except BaseException:
        for holder in holders:
            holder.close()
        state.remove_lab(noted)
        raise
    return NamespaceLab(noted, holders)


def _raise_servers(noted: LabState, shares: Sequence[CpuShare], holders: list[Holder]) -> LabState:
    switch = Holder("the bridge", ["--net"], servers.bridge_setup())
    holders.append(switch)
    noted = replace(noted, switch=(switch.init, switch.outer))
    state.write_notes(noted)
    # A lab made inside a server takes no notes for its own whose process numbers it cannot see.
    setup = [*SETUP, ["mount", "-t", "tmpfs", "tmpfs", str(state.notes_folder())]]
    for number, share in enumerate(shares):
        holder = Holder(f"server {number}", NAMESPACES, [*setup, call_it(number, len(shares))])
        holders.append(holder)
        servers.connect(number, init=holder.init.pid, switch=switch.init.pid)
        group = cgroups.make(cgroup_name(noted.name, number), share.share) if share.needs_quota else None
        made = NamespaceServer(
            number=number,
            address=servers.address_of(number),
            init=holder.init,
            outer=holder.outer,
            cores=share.cores,
            cpu_share=share.share,
            cpu_held_by=share.held_by(quota=group is not None),
            cgroup=None if group is None else str(group),
        )
        noted = replace(noted, servers=(*noted.servers, made))
        state.write_notes(noted)
    return noted


def _apply_rates(noted: LabState) -> None:
    limit, external = servers.limit_command, noted.spec.external
    ports = [limit(servers.port_of(server.number), external) for server in noted.servers]
    servers.run_inside(noted.switch[0].pid, ports)
    own = [limit(servers.CARD, external), limit(servers.LOOPBACK, noted.spec.internal)]
    for server in noted.servers:
        servers.run_inside(server.init.pid, own)


def open_lab(spec: LabSpec, *, name: str | None = None, force_loopback: bool = False) -> Lab:
    """Make a lab that ends with this process at the latest; ``with`` takes it down before.

    What is left of labs whose owner was killed is removed first. On a machine that cannot make namespaces, or
    with ``force_loopback``, it is plain loopback, whose ``missing`` says what the machine lacks. ``name`` is
    what ``python scripts/netlab status`` shows; None: a random one.
    """
    missing = None if force_loopback else what_is_missing()
    if force_loopback or missing:
        return LoopbackLab(spec, missing=missing)
    clean_stale()
    return make_lab(spec, name if name is not None else state.random_name(), held="process")


def open_detached(spec: LabSpec, name: str) -> NamespaceLab:
    """Make a lab that stays up when this process ends, until ``state.take_down(name)``."""
    missing = what_is_missing()
    if missing:
        raise LabError(f"no lab can stay up here: {missing}")
    clean_stale()
    return make_lab(spec, name, held="detached")


def attach(name: str) -> NamespaceLab:
    """Return a lab that another process made (ConfigError: it is not up); closing it leaves it up."""
    noted = state.read_notes(name)
    if not noted.complete or not all(process.alive() for process in noted.processes):
        raise ConfigError(
            f"the lab {name!r} is not up any more, or not yet; "
            f"remove it with `python scripts/netlab down {name}`"
        )
    return NamespaceLab(noted)
