"""Emulated machines on one host: each has its own network, process ids and /dev/shm, and one core.

A machine is a set of unnamed Linux namespaces held by one shell that reads from a pipe of this process. When
this process ends, however it ends, the pipe closes, the shell ends, and the kernel ends every process of the
machine and its network with it: nothing is left to clean up.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

DEVICE = "eth0"
_TOOLS = ("ip", "unshare", "nsenter", "mount", "taskset")
_NAMESPACES = ("unshare", "--net", "--mount", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc")
_PRIVATE = "mount --make-rprivate / && mount -t tmpfs -o mode=1777 tmpfs /dev/shm"


def what_is_missing(rate: str | None = None) -> str | None:
    """Return what this host lacks for emulated machines, or None."""
    tools = [tool for tool in (*_TOOLS, *(["tc"] if rate else [])) if shutil.which(tool) is None]
    if tools:
        return f"not installed: {', '.join(tools)} (packages iproute2 and util-linux)"
    if os.geteuid() != 0:
        return "namespaces and network devices need root"
    tried = subprocess.run(
        [*_NAMESPACES, "sh", "-c", f"{_PRIVATE} && ip link add veth0 type veth peer name veth1"],
        capture_output=True,
        text=True,
    )
    return f"namespaces or veth pairs are refused: {tried.stderr.strip()}" if tried.returncode else None


@dataclass
class Memory:
    """Largest memory seen in a machine, bytes."""

    machine: int = 0
    """Shared pages once: the sum over its processes of the proportional set size."""
    of_process: dict[str, int] = field(default_factory=dict)
    """Name of the module that a process runs to its largest resident size, shared pages included."""


class Machine:
    """One emulated machine; ``with Machines(...)`` makes them."""

    def __init__(self, number: int) -> None:
        self.address = f"10.77.0.{number + 1}"
        cores = sorted(os.sched_getaffinity(0))
        self.core = cores[number % len(cores)]
        self.memory = Memory()
        hold = f"{_PRIVATE} && ip link set lo up && echo ready && read forever"
        self._holder = subprocess.Popen(
            [*_NAMESPACES, "sh", "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        if self._holder.stdout is None or self._holder.stdout.readline() != "ready\n":
            raise SystemExit("the namespaces of a machine could not be made; the reason stands above")
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children")
        self.init = int(children.read_text().split()[0])

    def inside(self, command: Sequence[str]) -> list[str]:
        """Return the command that runs ``command`` here, on this machine's core."""
        return ["nsenter", "-t", str(self.init), "-n", "-m", "-i", "-p",
                "taskset", "-c", str(self.core), *command]  # fmt: skip

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], folder: Path, log: Path
    ) -> subprocess.Popen[bytes]:
        """Start ``command`` here in ``folder``; its output goes to the end of ``log``."""
        with log.open("ab") as output:
            return subprocess.Popen(
                self.inside(command), env=dict(environment), cwd=folder, stdout=output, stderr=output
            )

    def look_at_memory(self) -> None:
        """Note the memory of every process here, where it is more than before."""
        namespace = os.readlink(f"/proc/{self.init}/ns/pid")
        total = 0
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if os.readlink(process / "ns/pid") != namespace:
                    continue
                total += _kilobytes(process / "smaps_rollup", "Pss:")
                words = (process / "cmdline").read_text().split("\0")
                peak = _kilobytes(process / "status", "VmHWM:")
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue  # just ended, or nobody may look at it
            name = next((word for word in words if word.startswith("peer.")), "")
            if name and "torch.distributed.run" not in words:
                self.memory.of_process[name] = max(self.memory.of_process.get(name, 0), peak)
        self.memory.machine = max(self.memory.machine, total)

    def close(self) -> None:
        """End every process here."""
        if self._holder.stdin is not None:
            self._holder.stdin.close()
        self._holder.wait(timeout=10)


class Machines:
    """Two machines joined by a wire.

    Args:
        rate: Most that each of them sends, e.g. "1gbit"; None: as fast as the host can.
    """

    def __init__(self, rate: str | None) -> None:
        self._rate = rate
        self.all: list[Machine] = []

    def __enter__(self) -> list[Machine]:
        self.all = [Machine(number) for number in range(2)]
        first, second = self.all
        _run(["ip", "link", "add", DEVICE, "netns", str(first.init), "type", "veth",
              "peer", "name", DEVICE, "netns", str(second.init)])  # fmt: skip
        for machine in self.all:
            _run(machine.inside(["ip", "address", "add", f"{machine.address}/24", "dev", DEVICE]))
            _run(machine.inside(["ip", "link", "set", DEVICE, "up"]))
            if self._rate:
                shape = ["rate", self._rate, "burst", "256kb", "latency", "50ms"]
                _run(machine.inside(["tc", "qdisc", "add", "dev", DEVICE, "root", "tbf", *shape]))
        return self.all

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for machine in self.all:
            machine.close()


def wait_for(
    processes: Sequence[subprocess.Popen[bytes]], machines: Sequence[Machine], timeout_s: float
) -> str | None:
    """Wait for all processes, noting memory meanwhile; return what went wrong, or None."""
    deadline = time.monotonic() + timeout_s
    while any(process.poll() is None for process in processes):
        failed = [process for process in processes if process.poll() not in (None, 0)]
        if failed:
            return f"a process ended with exit code {failed[0].returncode}"
        if time.monotonic() > deadline:
            return f"not done after {timeout_s:.0f} s"
        for machine in machines:
            machine.look_at_memory()
        time.sleep(1.0)
    codes = [process.returncode for process in processes if process.returncode]
    return f"a process ended with exit code {codes[0]}" if codes else None


def bytes_sent() -> int:
    """Return the bytes that the machine of the calling process has put on the wire."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == DEVICE:
            return int(numbers.split()[8])
    return 0


def machine_seconds() -> float:
    """Return the processor time of all processes that now run on the machine of the calling process."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # Fields after the name, which may hold anything and ends with the last parenthesis.
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def peak_resident() -> int:
    """Return the largest resident size of the calling process so far, bytes, shared pages included."""
    return _kilobytes(Path("/proc/self/status"), "VmHWM:")


def _kilobytes(path: Path, name: str) -> int:
    lines = path.read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), 0)


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")
