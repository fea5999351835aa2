"""What this machine needs for emulated servers, and what of it is missing."""

from __future__ import annotations

import os
import shutil
import subprocess

_PACKAGES = {
    "iproute2": ("ip", "tc"),
    "util-linux": ("unshare", "nsenter", "mount", "taskset"),
}
_NAMESPACES = ("unshare", "--net", "--mount", "--ipc", "--uts", "--pid", "--fork", "--kill-child")
_TIMEOUT_S = 30.0
_STEPS = (
    (
        "true",
        "new namespaces are refused; a container needs --privileged (or --cap-add SYS_ADMIN, NET_ADMIN)",
    ),
    (
        "mount --make-rprivate / && mount -t proc proc /proc",
        "mounts are refused; a container needs --privileged",
    ),
    (
        "echo server > /proc/sys/kernel/hostname",
        "a host name of its own is refused; a container needs --privileged",
    ),
    ("mount -t tmpfs tmpfs /dev/shm", "a private /dev/shm is refused; a container needs --privileged"),
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
    missing = missing_tools()
    if os.geteuid() != 0:
        missing.append("namespaces and network devices need root: sudo, or a privileged container")
    return "; ".join(missing) if missing else _what_is_refused()


def missing_tools() -> list[str]:
    """Name the programs that are not installed, by package."""
    lacking = {
        package: [tool for tool in tools if shutil.which(tool) is None]
        for package, tools in _PACKAGES.items()
    }
    return [
        f"{', '.join(tools)}: not installed, apt-get install {package}"
        for package, tools in lacking.items()
        if tools
    ]


def _what_is_refused() -> str | None:
    script = "\n".join(f"{{ {command}; }} || exit {10 + step}" for step, (command, _) in enumerate(_STEPS))
    try:
        tried = subprocess.run(
            [*_NAMESPACES, "sh", "-c", script],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return f"this machine made no namespaces within {_TIMEOUT_S:.0f} s"
    if tried.returncode == 0:
        return None
    # Codes of the steps begin at 10, so that unshare's own 1 means that no step was reached.
    step = max(tried.returncode - 10, 0)
    reason = _STEPS[min(step, len(_STEPS) - 1)][1]
    return f"{reason}: {' '.join(tried.stderr.split())}"
