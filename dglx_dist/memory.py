"""Memory on the machine and in the process: limits, use, the allocator, and sizes as text."""

import ctypes
import logging
import mmap
import resource
from contextlib import suppress
from pathlib import Path

import psutil

from dglx_dist.errors import ConfigError

_LOG = logging.getLogger(__name__)


def resident_bytes() -> int:
    """Return this process's resident memory in bytes, shared pages included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def peak_bytes() -> int:
    """Return this process's peak resident memory in bytes, shared pages included.

    ``getrusage`` is not used, because its peak includes the process that started this one.
    """
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


_GROUPS = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Mount point, limit, use and reclaimable use for control groups, in version 2 and version 1."""


def machine_memory(
    mounted: Path = Path("/sys/fs/cgroup"), groups: Path = Path("/proc/self/cgroup")
) -> tuple[int, int]:
    """Return the bytes that this process can have at most, and the bytes that it can still get.

    This considers the process's limits, its control group and the machine.

    Args:
        mounted: Folder where control groups are mounted.
        groups: File that names this process's control groups.
    """
    machine = psutil.virtual_memory()
    process = psutil.Process().memory_info()
    # Pairs (limit, use), in bytes.
    limits: list[tuple[int, int]] = []
    for kind, used_bytes in ((resource.RLIMIT_AS, process.vms), (resource.RLIMIT_DATA, process.data)):
        limit = resource.getrlimit(kind)[0]
        if limit != resource.RLIM_INFINITY:
            limits.append((limit, used_bytes))

    lines = groups.read_text().splitlines() if groups.is_file() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        # In a container the mounted tree may start at the container's own group, whatever the path says.
        subfolder = Path(path.lstrip("/")) if controllers in ("", "memory") else Path()
        for group in (subfolder, *subfolder.parents):
            limits += _read_group_limits(mounted, group)

    total = min([machine.total, *(limit for limit, _ in limits)])
    free = min([machine.available, *(limit - used_bytes for limit, used_bytes in limits)])
    return total, max(0, free)


def _read_group_limits(mounted: Path, group: Path) -> list[tuple[int, int]]:
    """Return a control group's memory limits, each with the memory in use, in bytes."""
    limits = []
    for mount, limit_name, used_name, reclaimable_name in _GROUPS:
        folder = mounted / mount / group
        # The other version lacks the file. Without a limit, the file has a word in place of a number.
        with suppress(OSError, ValueError, KeyError):
            limit = int((folder / limit_name).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            used_bytes = int((folder / used_name).read_text())
            limits.append((limit, used_bytes - int(stat[reclaimable_name])))
    return limits


# Numbers from <malloc.h>.
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
_MMAP_MAX = -4

_NEVER = 2**31 - 1

_DEFAULT_MMAP_MAX = 65536


def keep_memory() -> bool:
    """Make glibc keep freed memory for the next allocation. Return False with another C library.

    By default glibc maps each tensor above 32 MiB anew, so its pages are faulted in and cleared in every
    step. For GraphSAGE 3 x 256 on sampled blocks, this took 37 % of the processor time. The cost is memory: a
    process keeps its peak, which was 12 % higher in that run.
    """
    is_set = _set_allocator((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER))
    if is_set:
        _LOG.info(
            "glibc keeps freed memory for the next step. To choose, set a MALLOC_ variable or GLIBC_TUNABLES."
        )
    return is_set


def return_memory(large: int = 1 << 20) -> bool:
    """Make glibc return freed memory to the system. Return False with another C library.

    From then on, allocations with at least ``large`` bytes are mapped separately. Smaller free pieces are
    returned once. Kept memory is fragmented: full-graph training with GraphSAGE held 1.4 to 1.6 times the
    memory in use.
    """
    # Once a threshold is set, glibc does not raise it when a large block is freed.
    settings = (_MMAP_MAX, _DEFAULT_MMAP_MAX), (_MMAP_THRESHOLD, large), (_TRIM_THRESHOLD, large)
    is_set = _set_allocator(*settings)
    if is_set:
        ctypes.CDLL(None).malloc_trim(0)
    return is_set


def _set_allocator(*settings: tuple[int, int]) -> bool:
    """Apply ``settings`` in order, up to the first refused one. Return whether all were accepted."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return all(mallopt(name, value) == 1 for name, value in settings)


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}
"""Units that :func:`format_bytes` writes."""


def read_size(text: str) -> int:
    """Return the bytes of "4GB", "512MB" or "1000". Raise ConfigError if it is not a size."""
    upper_text = text.strip().upper()
    digits = upper_text.rstrip("BKMGTP")
    unit = upper_text[len(digits) :]
    try:
        size = int(float(digits) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        raise ConfigError(f"{text!r} is not a size in bytes. Write it as '4GB', '512MB' or '1000'.") from None
    if size < 1:
        raise ConfigError(f"the size {text!r} is less than one byte. Write it as '4GB' or '512MB'.")
    return size


def format_bytes(num_bytes: float) -> str:
    """Format a byte count with three digits and a decimal unit: 1536 gives ``1.54 KB``."""
    value = float(num_bytes)
    units = ["PB", "TB", "GB", "MB", "KB", "B"]
    # The format below would write 999.5 as 1e+03.
    while abs(value) >= 999.5 and len(units) > 1:
        value = value / 1000
        units.pop()
    unit = units[-1]
    if unit == "B":
        return f"{value:.0f} B"
    return f"{value:.3g} {unit}"
