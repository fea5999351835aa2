"""An emulated server: namespaces, a share of the cores and a card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from dglx_dist.errors import LabError
from scripts.netlab.base import Card, Server
from scripts.netlab.budget import HeldBy
from scripts.netlab.links import CARD, read_card
from scripts.netlab.pids import Process

NAMESPACES = ("--net", "--mount", "--ipc", "--uts")
SETUP = (
    # Mounts below must not show outside.
    ("mount", "--make-rprivate", "/"),
    ("mount", "-t", "proc", "proc", "/proc"),
    ("mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", "/dev/shm"),
    ("ip", "link", "set", "lo", "up"),
)
# $1: the server's name, $2: the hosts that it knows. The mount keeps the file that has no name any more.
_CALL = """\
echo "$1" > /proc/sys/kernel/hostname
if [ -e /etc/hosts ]; then
    echo "$2" > /dev/shm/hosts
    mount --bind /dev/shm/hosts /etc/hosts
    rm /dev/shm/hosts
fi
"""
# Keeps the folder, which entering a mount namespace forgets.
# $1: the group or nothing, $2: first process of the server.
_ENTER = """\
if [ -n "$1" ]; then echo 0 > "$1/cgroup.procs" || exit 125; fi
init=$2; shift 2
exec nsenter -t "$init" -n -m -i -u -p -- sh -c 'cd "$0" && exec "$@"' "$(pwd -P)" "$@"
"""


@dataclass(frozen=True, kw_only=True)
class ServerFacts:
    """What there is to know of a server that is up; JSON values but for the processes."""

    number: int
    address: str
    init: Process
    """First process inside; ends everything inside when it ends."""
    outer: Process
    """Its parent, outside."""
    cores: tuple[int, ...]
    cpu_share: float
    cpu_held_by: HeldBy
    cgroup: str | None
    """Folder of its control group."""


@final
class NamespaceServer(Server):
    """A server that is up.

    Args:
        facts: As noted when it was made.
    """

    def __init__(self, facts: ServerFacts) -> None:
        self.facts = facts
        self.number = facts.number
        self.address = facts.address
        self.device = CARD
        self.cores = facts.cores
        self.cpu_share = facts.cpu_share
        self.cpu_held_by = facts.cpu_held_by

    def inside(self, command: Sequence[str]) -> list[str]:
        """Return the command that runs ``command`` here, in the folder where it is started.

        It stays in the process group of who starts it: a signal to the group reaches the command too, one
        to the process that was started does not.

        Raises:
            LabError: the server is down.
        """
        self._check_alive()
        cores = ",".join(map(str, self.cores))
        enter = ["taskset", "-c", cores, "sh", "-c", _ENTER, "enter"]
        return [*enter, self.facts.cgroup or "", str(self.facts.init.pid), *command]

    def card(self) -> Card:
        """Read its card.

        Raises:
            LabError: the server is down.
        """
        self._check_alive()
        return read_card(CARD, pid=self.facts.init.pid)

    def alive(self) -> bool:
        """Whether it is up still."""
        return self.facts.init.alive()

    def _check_alive(self) -> None:
        # The number of its first process may be that of any other by now, even of one outside all servers.
        if not self.alive():
            raise LabError(f"server {self.number} is down; the lab was taken down meanwhile")


def call_it(name: str, addresses: Mapping[str, str]) -> list[str]:
    """Return the command that gives a server its name and those of ``addresses``, {name: address}; inside.

    Programs find each other and themselves by name so: that of this machine has no address in there.
    """
    hosts = ["127.0.0.1 localhost", *(f"{address} {host}" for host, address in addresses.items())]
    return ["sh", "-ec", _CALL, "call", name, "\n".join(hosts)]


def cgroup_name(lab: str, server: int) -> str:
    """Return the name of a server's control group."""
    return f"dglx-lab-{lab}-{server}"
