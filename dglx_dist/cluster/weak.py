"""Calls of methods at an end that may come after that of their object."""

from __future__ import annotations

import weakref
from collections.abc import Callable


def if_alive(method: Callable[[], None]) -> Callable[[], None]:
    """Return what calls the bound ``method`` if its object is still there, and does not keep it."""
    known = weakref.WeakMethod(method)

    def call() -> None:
        found = known()
        if found is not None:
            found()

    return call
