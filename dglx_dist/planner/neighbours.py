"""What a rank is timed beside: others that read and write the memory of the same machine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

_NUMBERS = 4_000_000
"""Of 4 bytes: more than fits any cache of one core."""


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Keep ``count`` more cores busy with sums over memory, as the layers of other ranks do.

    Who times something meanwhile counts the time of its own thread.
    """
    stop = threading.Event()
    threads = [threading.Thread(target=_sum_until, args=(stop,), daemon=True) for _ in range(count)]
    for one in threads:
        one.start()
    try:
        yield
    finally:
        stop.set()
        for one in threads:
            one.join()


def _sum_until(stop: threading.Event) -> None:
    rows, out = np.ones(_NUMBERS, np.float32), np.empty(_NUMBERS, np.float32)
    while not stop.is_set():
        # Lets go of the interpreter meanwhile.
        np.add(rows, 1.0, out=out)
