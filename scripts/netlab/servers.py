"""Emulated servers: the processes that hold their namespaces, cards and links, commands that run inside."""

from __future__ import annotations

import os
import re
import select
import shlex
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, final

from dglx_dist.planner.records import Rate
from scripts.netlab import hold
from scripts.netlab.base import Card, LabError, Server


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process of this machine."""

    pid: int
    started: int
    """Clock ticks since the machine started."""

    def alive(self) -> bool:
        """Whether it runs still; another process of the same number does not count, nor does a zombie."""
        return _start_time(self.pid) == self.started

    def kill(self) -> None:
        """End it at once, if it runs still."""
        if self.alive():
            try:
                os.kill(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                return  # it ended in between


def command_line(pid: int) -> str:
    """Return the command line of process ``pid``; empty where there is none, or it is just ending."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def find_process(pid: int) -> Process:
    """Return the process that now has number ``pid`` (ProcessLookupError: there is none, or it has ended)."""
    started = _start_time(pid)
    if started is None:
        raise ProcessLookupError(f"no process {pid}")
    return Process(pid=pid, started=started)


def _start_time(pid: int) -> int | None:
    try:
        # The name of the program, which may hold anything, ends with the last parenthesis.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])


_START_S = 30.0
_END_S = 10.0
# The shell is the first process of its own process namespace and must say which number it has outside;
# /proc is still the one of outside here.
_WHO = "read outside rest < /proc/self/stat"


class Holder:
    """Namespaces that are held open by one end of a pipe, of which this process has the other.

    When this process ends, however it ends, the kernel ends all that runs in the namespaces, and the
    namespaces with it. LabError: the namespaces were refused, or a command of ``setup`` failed inside.
    ``namespaces``: options of ``unshare``, e.g. ``--net``; a process namespace is always among them.
    """

    def __init__(self, what: str, namespaces: Sequence[str], setup: Sequence[Sequence[str]]) -> None:
        wait = f'exec {shlex.join([sys.executable, "-I", "-S", hold.__file__])} "$outside"'
        lines = [_WHO, *(shlex.join(command) for command in setup), wait]
        enter = ["unshare", *namespaces, "--pid", "--fork", "--kill-child", "sh", "-ec", "\n".join(lines)]
        self._pipe = subprocess.Popen(
            enter,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            # Ctrl-C is for the process that owns the lab; it takes the servers down in order.
            start_new_session=True,
            cwd="/",  # it may outlive the folder of its maker
        )
        assert self._pipe.stdin is not None
        assert self._pipe.stdout is not None
        self._input, self._output = self._pipe.stdin, self._pipe.stdout
        # A child made by fork would keep the pipe, and with it all of this, beyond the end of this process.
        # Hooks of fork stay for good, the holder need not.
        this = weakref.WeakMethod(self.forget)
        os.register_at_fork(after_in_child=lambda: (forget := this()) and forget())
        try:
            self.init = self._wait_until_ready(what)
            self.outer = find_process(self._pipe.pid)
        except BaseException:
            self._let_go()
            raise

    def stay(self) -> None:
        """Let it outlive this process; only killing ``init`` ends it then (LabError: it has ended)."""
        try:
            self._input.write(hold.STAY)
        except BrokenPipeError as error:
            raise LabError(f"process {self.init.pid}, which holds a server, has ended already") from error
        finally:
            self.forget()
        self._output.close()

    def close(self) -> None:
        """End all that runs inside; returns when it has ended."""
        self.init.kill()
        self._let_go()
        wait_until_ended((self.init, self.outer))

    def forget(self) -> None:
        """Close this process's end of the pipe and no more."""
        self._input.close()

    def _let_go(self) -> None:
        self.forget()
        if self._pipe.poll() is None:
            try:
                self._pipe.wait(timeout=_END_S)
            except subprocess.TimeoutExpired:
                self._pipe.kill()  # --kill-child ends the inside with it
                self._pipe.wait(timeout=_END_S)
        self._output.close()

    def _wait_until_ready(self, what: str) -> Process:
        output = _read_until_ready(self._output)
        match = re.search(r"^ready (\d+)$", output, flags=re.MULTILINE)
        if not match:
            raise LabError(f"{what} could not be made: {' '.join(output.split()) or 'no answer'}")
        return find_process(int(match[1]))


def wait_until_ended(processes: Sequence[Process]) -> None:
    """Wait until all have ended (LabError: some have not within 10 s; the message names them)."""
    deadline = time.monotonic() + _END_S
    while left := [process.pid for process in processes if process.alive()]:
        if time.monotonic() > deadline:
            raise LabError(f"processes {left} were killed and have not ended after {_END_S:.0f} s")
        time.sleep(0.005)


def _read_until_ready(stream: IO[bytes]) -> str:
    deadline = time.monotonic() + _START_S
    output = b""
    while not re.search(rb"^ready \d+\n", output, flags=re.MULTILINE):
        readable, _, _ = select.select([stream], [], [], max(deadline - time.monotonic(), 0))
        if not readable:
            return f"{output.decode(errors='replace')} no answer within {_START_S:.0f} s"
        piece = stream.read(4096)  # not buffered: what there is
        if not piece:
            break
        output += piece
    return output.decode(errors="replace")


CARD = "eth0"
LOOPBACK = "lo"
BRIDGE = "bridge"
_COMMAND_TIMEOUT_S = 30.0
_USUAL_BURST_BYTES = 256 * 1024
_USUAL_S = 20e-3
"""A rate at which the usual bucket would last longer gets a smaller one, so that short rates hold too."""
_BUNDLE_BYTES = 72 * 1024
"""A virtual card sends segments in bundles of up to 64 KiB plus headers; a smaller bucket splits them."""
_TORN_BITS_PER_S = 50_000_000
"""Below this rate one bundle lasts more than 12 ms, which would be free after each pause of a short epoch. It
is split, and each segment has its own headers."""
_TORN_S = 5e-3
_MIN_BURST_BYTES = 16 * 1024
_LATE_S = 2e-3
"""The kernel may refill a bucket this late; buckets of fast links must last as long."""
_LATENCY = "50ms"


def address_of(server: int) -> str:
    # Every lab has the same ones, as none sees another.
    return f"10.77.0.{server + 1}"


def bridge_setup() -> list[list[str]]:
    return [["ip", "link", "add", BRIDGE, "type", "bridge"], ["ip", "link", "set", BRIDGE, "up"]]


def port_of(server: int) -> str:
    return f"server{server}"


def connect(server: int, *, init: int, switch: int) -> None:
    """Lay a cable from the card of ``server`` to the bridge; ``init``, ``switch``: their first processes."""
    card = ["ip", "link", "add", CARD, "netns", str(init), "type", "veth"]
    run_command([*card, "peer", "name", port_of(server), "netns", str(switch)])
    run_inside(switch, [["ip", "link", "set", port_of(server), "master", BRIDGE, "up"]])
    run_inside(
        init,
        [
            ["ip", "address", "add", f"{address_of(server)}/24", "dev", CARD],
            ["ip", "link", "set", CARD, "up"],
        ],
    )


def limit_command(device: str, rate: Rate | None) -> list[str]:
    """Return the command that holds what ``device`` sends to ``rate``, from now on; None: no limit.

    A token bucket: up to ``burst`` bytes leave at once after a pause, all others at the rate; a packet that
    would wait longer than 50 ms is dropped, as a switch does.
    """
    held = ["noqueue"]
    if rate is not None:
        burst = _burst_bytes(rate, may_tear=device != LOOPBACK)
        held = ["tbf", "rate", f"{rate.bits_per_s}bit", "burst", str(burst), "latency", _LATENCY]
    return ["tc", "qdisc", "replace", "dev", device, "root", *held]


def _burst_bytes(rate: Rate, *, may_tear: bool) -> int:
    """Return the bytes that a card at this rate sends at once after a pause.

    ``may_tear``: whether packets of the device are small. A packet larger than the bucket, as on a loopback
    device, would never leave.
    """
    bytes_per_s = rate.bits_per_s / 8
    if may_tear and rate.bits_per_s < _TORN_BITS_PER_S:
        return max(round(bytes_per_s * _TORN_S), _MIN_BURST_BYTES)
    usual = min(max(round(bytes_per_s * _USUAL_S), _BUNDLE_BYTES), _USUAL_BURST_BYTES)
    return max(usual, round(bytes_per_s * _LATE_S))


def read_card(device: str, *, pid: int | None = None) -> Card:
    """Read the counters of ``device`` in the network namespace of process ``pid``; None: the calling one.

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
    """Run commands one after another in the network namespace of process ``pid``, see :func:`run_command`."""
    script = "\n".join(shlex.join(command) for command in commands)
    return run_command(["nsenter", "-t", str(pid), "-n", "sh", "-ec", script])


def run_command(command: Sequence[str]) -> str:
    """Run ``command``, return its output; LabError with its answer: it failed, or took longer than 30 s."""
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
            output, errors = process.communicate(timeout=_COMMAND_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            late = f"no end of this within {_COMMAND_TIMEOUT_S:.0f} s: {shlex.join(command)}"
            raise LabError(late) from None
        finally:
            if process.poll() is None:
                # With all that it started: what hangs is a child of the shell.
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        raise LabError(f"{shlex.join(command)}: {errors.strip() or f'exit code {process.returncode}'}")
    return output


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


@final
@dataclass(frozen=True, kw_only=True)
class NamespaceServer(Server):
    """A server that is up, as its lab's notes have it; JSON values but for the processes."""

    device = CARD
    init: Process
    """First process inside; ends everything inside when it ends."""
    outer: Process
    """Its parent, outside."""
    cgroup: str | None
    """Folder of its control group."""

    def inside(self, command: Sequence[str]) -> list[str]:
        # It stays in the process group of who starts it: a signal to the group reaches the command too, one
        # to the process that was started does not.
        self._check_alive()
        enter = ["taskset", "-c", ",".join(map(str, self.cores)), "sh", "-c", _ENTER, "enter"]
        return [*enter, self.cgroup or "", str(self.init.pid), *command]

    def card(self) -> Card:
        self._check_alive()
        return read_card(CARD, pid=self.init.pid)

    def _check_alive(self) -> None:
        # The number of its first process may be that of any other by now, even of one outside all servers.
        if not self.init.alive():
            raise LabError(f"server {self.number} is down; the lab was taken down meanwhile")


def call_it(server: int, servers: int) -> list[str]:
    # Programs find each other and themselves by name: that of this machine has no address in there.
    hosts = ["127.0.0.1 localhost", *(f"{address_of(index)} server-{index}" for index in range(servers))]
    return ["sh", "-ec", _CALL, "call", f"server-{server}", "\n".join(hosts)]


def cgroup_name(lab: str, server: int | str) -> str:
    return f"dglx-lab-{lab}-{server}"
