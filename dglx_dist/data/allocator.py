"""Settings of glibc's allocator."""

from __future__ import annotations

import ctypes
import logging

log = logging.getLogger(__name__)

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
    done = _set((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER))
    if done:
        log.info(
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
    done = _set((_MMAP_MAX, _DEFAULT_MMAP_MAX), (_MMAP_THRESHOLD, large), (_TRIM_THRESHOLD, large))
    if done:
        ctypes.CDLL(None).malloc_trim(0)
    return done


def _set(*settings: tuple[int, int]) -> bool:
    """Apply ``settings`` in their order, up to the first that is refused; return whether none was."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(name, value) == 1 for name, value in settings)
