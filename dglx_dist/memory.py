"""The memory of the machine and of the process: limits, use, the allocator, and sizes as text."""

import ctypes
import logging
import mmap
import resource
from contextlib import suppress
from itertools import product
from pathlib import Path

import psutil

from dglx_dist.errors import ConfigError

_LOG = logging.getLogger(__name__)


def resident_bytes() -> int:
    """Return the resident bytes of this process, shared pages included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def peak_bytes() -> int:
    """Return the peak resident bytes of this process since its program started, shared pages included.

    Not from ``getrusage``, whose peak includes the process that started this one.
    """
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


_GROUPS = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Mount point, limit, use and droppable use of control groups, version 2 and 1."""


def machine_memory(
    groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> tuple[int, int]:
    """Return the bytes that this process can have at most, and now: of its limits, control group and machine.

    ``groups`` is where control groups are mounted, ``own`` names this process's.
    """
    machine, process = psutil.virtual_memory(), psutil.Process().memory_info()
    total, free = machine.total, machine.available
    for kind, held in ((resource.RLIMIT_AS, process.vms), (resource.RLIMIT_DATA, process.data)):
        if (most := resource.getrlimit(kind)[0]) != resource.RLIM_INFINITY:
            total, free = min(total, most), max(0, min(free, most - held))
    for line in own.read_text().splitlines() if own.is_file() else ():
        _, controllers, path = line.split(":", 2)
        # In a container the mounted tree may begin with its own group, whatever the path says.
        below = Path(path.lstrip("/")) if controllers in ("", "memory") else Path()
        for (mount, limit, used, droppable), place in product(_GROUPS, (below, *below.parents)):
            folder = groups / mount / place
            with suppress(OSError, ValueError, KeyError):  # not this version, or no limit
                most = int((folder / limit).read_text())
                kept = dict(one.split() for one in (folder / "memory.stat").read_text().splitlines())
                use = int((folder / used).read_text()) - int(kept[droppable])
                total, free = min(total, most), max(0, min(free, most - use))
    return total, free


# Numbers of <malloc.h>.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4

_NEVER = 2**31 - 1

_DEFAULT_MMAP_MAX = 65536


def keep_memory() -> bool:
    """Make glibc keep freed memory for the next allocation of this process; False with another C library.

    By default each tensor of more than 32 MiB is mapped anew, and its pages are faulted in and cleared at
    every step: 37 % of the processor time of forward and backward of GraphSAGE 3 x 256 on sampled blocks.
    The cost is memory: a process keeps its peak, which was 12 % more there.
    """
    done = _set_allocator((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER))
    if done:
        _LOG.info(
            "glibc keeps freed memory for the next step; set any MALLOC_ variable or GLIBC_TUNABLES to choose"
        )
    return done


def return_memory(large: int = 1 << 20) -> bool:
    """Make glibc return freed memory of this process to the system; False with another C library.

    What has ``large`` bytes or more is mapped separately from then on; smaller pieces that are free by now
    are returned once. Kept memory is fragmented: full-graph training of GraphSAGE held 1.4 to 1.6 times the
    memory that it used at any time.
    """
    # Setting the threshold also keeps glibc from raising it to what was freed last.
    done = _set_allocator((_MMAP_MAX, _DEFAULT_MMAP_MAX), (_MMAP_THRESHOLD, large), (_TRIM_THRESHOLD, large))
    if done:
        ctypes.CDLL(None).malloc_trim(0)
    return done


def _set_allocator(*settings: tuple[int, int]) -> bool:
    """Apply ``settings`` in their order, up to the first that is refused; return whether none was."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(name, value) == 1 for name, value in settings)


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}
"""As :func:`format_bytes` writes them."""


def read_size(text: str) -> int:
    """Return the bytes of "4GB", "512MB" or "1000"; ConfigError if it is not a size."""
    digits = text.strip().upper().rstrip("BKMGTP")
    unit = text.strip().upper()[len(digits) :]
    try:
        size = int(float(digits) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        raise ConfigError(f"{text!r} is not a size in bytes; write it as '4GB', '512MB' or '1000'") from None
    if size < 1:
        raise ConfigError(f"a size of {text!r} leaves no room; write it as '4GB' or '512MB'")
    return size


def format_bytes(num_bytes: float) -> str:
    """Format a number of bytes with three digits and a decimal unit: 1536 -> ``1.54 KB``."""
    value, units = float(num_bytes), ["PB", "TB", "GB", "MB", "KB", "B"]
    while abs(value) >= 999.5 and len(units) > 1:  # 999.5 would be written as 1e+03
        value, _ = value / 1000, units.pop()
    return f"{value:.0f} B" if units[-1] == "B" else f"{value:.3g} {units[-1]}"
