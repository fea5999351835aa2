"""Hardware and versions, as a report needs them; no name of the host, no path of the user."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("dglx-dist", "torch", "dgl", "numpy", "numba", "pyzmq", "pyarrow", "torch-geometric")


def describe() -> dict[str, object]:
    """Return JSON values: cpu, cores (all and usable ones), memory in bytes, kernel, versions."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count() or 1,
        "cores_usable": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.system(),
        "kernel": platform.release(),
        "versions": {"python": platform.python_version(), **_versions()},
    }


def _cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.is_file() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
