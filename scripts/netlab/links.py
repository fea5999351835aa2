"""Cards, bridge and rates of emulated servers: what ``ip`` and ``tc`` are told, what the cards counted."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from dglx_dist.errors import LabError
from dglx_dist.planner.records import Rate
from scripts.netlab.base import Card

CARD = "eth0"
LOOPBACK = "lo"
BRIDGE = "bridge"
_TIMEOUT_S = 30.0
_LATENCY = "50ms"


def address_of(server: int) -> str:
    """Return the IPv4 address of a server; every lab has the same ones, as none sees another."""
    return f"10.77.0.{server + 1}"


def name_of(server: int) -> str:
    """Return the host name of a server."""
    return f"server-{server}"


def bridge_setup() -> list[list[str]]:
    """Return the commands that make the bridge, inside the namespace of the switch."""
    return [["ip", "link", "add", BRIDGE, "type", "bridge"], ["ip", "link", "set", BRIDGE, "up"]]


def port_of(server: int) -> str:
    """Return the name of the bridge's end of the cable to a server."""
    return f"server{server}"


def connect(server: int, *, init: int, switch: int) -> None:
    """Lay a cable from the card of ``server`` to the bridge.

    Args:
        server: Its number.
        init: First process of the server.
        switch: First process of the namespace of the bridge.

    Raises:
        LabError: with what ip answered.
    """
    card = ["ip", "link", "add", CARD, "netns", str(init), "type", "veth"]
    run([*card, "peer", "name", port_of(server), "netns", str(switch)])
    run_inside(switch, [["ip", "link", "set", port_of(server), "master", BRIDGE, "up"]])
    run_inside(
        init,
        [
            ["ip", "address", "add", f"{address_of(server)}/24", "dev", CARD],
            ["ip", "link", "set", CARD, "up"],
        ],
    )


def limit(device: str, rate: Rate | None) -> list[str]:
    """Return the command that holds what ``device`` sends to ``rate``, from now on; None: no limit.

    A token bucket: up to ``burst`` bytes leave at once after a pause, all others at the rate; a packet that
    would wait longer than 50 ms is dropped, as a switch does.
    """
    held = ["noqueue"]
    if rate is not None:
        burst = rate.burst_bytes(may_tear=device != LOOPBACK)
        held = ["tbf", "rate", f"{rate.bits_per_s}bit", "burst", str(burst), "latency", _LATENCY]
    return ["tc", "qdisc", "replace", "dev", device, "root", *held]


def read_card(device: str, *, pid: int | None = None) -> Card:
    """Read the counters of ``device`` in the network namespace of process ``pid``.

    Args:
        device: e.g. "eth0".
        pid: A process of the server; None: the calling one, which may be a rank inside it.

    Raises:
        LabError: the process has ended, or it has no such device.
    """
    process = "self" if pid is None else str(pid)
    try:
        lines = Path(f"/proc/{process}/net/dev").read_text().splitlines()
    except OSError as error:
        raise LabError(
            f"the counters of {device} cannot be read, process {process} is gone ({error.strerror}); "
            "the lab was taken down meanwhile"
        ) from error
    cards = {name.strip(): numbers.split() for name, _, numbers in (line.partition(":") for line in lines)}
    if device not in cards:
        there = ", ".join(name for name, numbers in cards.items() if numbers and numbers[0].isdigit())
        raise LabError(f"there is no network device {device!r} here, only {there}")
    return Card(sent=int(cards[device][8]), received=int(cards[device][0]))


def run_inside(pid: int, commands: Sequence[Sequence[str]]) -> str:
    """Run ``commands`` one after another in the network namespace of process ``pid``; return their output.

    Raises:
        LabError: one failed; with what it answered.
    """
    script = "\n".join(shlex.join(command) for command in commands)
    return run(["nsenter", "-t", str(pid), "-n", "sh", "-ec", script])


def run(command: Sequence[str]) -> str:
    """Run ``command`` and return its output.

    Raises:
        LabError: it failed or took longer than 30 s; with what it answered.
    """
    process = subprocess.Popen(
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            said, complained = process.communicate(timeout=_TIMEOUT_S)
        except BaseException as error:
            # With all that it started: what hangs is a child of the shell.
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise LabError(f"no end of this within {_TIMEOUT_S:.0f} s: {shlex.join(command)}") from None
            raise
    if process.returncode:
        raise LabError(f"{shlex.join(command)}: {complained.strip() or f'exit code {process.returncode}'}")
    return said
