"""Standard output for results alone."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def libraries_on_stderr() -> Iterator[None]:
    """Let what libraries in C print meanwhile go to standard error: METIS complains of tiny graphs there."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        # What they have printed may still be in their buffer.
        ctypes.CDLL(None).fflush(None)
        os.dup2(kept, 1)
        os.close(kept)
