"""Doing the next pieces of work on threads while the last one is used."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def run_ahead(
    make: Callable[[int], T], steps: range, *, depth: int, num_threads: int
) -> Generator[T, None, None]:
    """Yield ``make(step)`` for each step in order, at most ``depth`` of them begun ahead of the consumer.

    An error of a step is raised when it is that step's turn, with the traceback of its thread. When the
    consumer stops early, or closes the iterator, what has not begun is dropped and the threads end.

    Args:
        make: Called from the threads; from the consumer's when ``num_threads`` is 0.
        steps: What to do.
        depth: Results kept ready or under way; at least 1.
        num_threads: How many steps are worked on at a time.
    """
    if num_threads == 0:
        yield from map(make, steps)
        return
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="dglx-loader")
    begun: deque[Future[T]] = deque()
    try:
        coming = iter(steps)
        for step in coming:
            begun.append(pool.submit(make, step))
            if len(begun) == depth:
                break
        while begun:
            result = begun.popleft().result()
            # Only now, so that never more than `depth` results exist beside the consumer's.
            begun.extend(pool.submit(make, step) for step in _first(coming))
            yield result
            del result
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _first(steps: Iterator[int]) -> tuple[int, ...]:
    step = next(steps, None)
    return () if step is None else (step,)
