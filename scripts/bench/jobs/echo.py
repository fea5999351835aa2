"""A job that does nothing, or fails as it is told: whether a pool works."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from typing import Any

from dglx_dist.errors import ConfigError
from scripts.bench.worker import JobContext


def run(params: Mapping[str, Any], context: JobContext) -> dict[str, Any]:
    """Return ``params`` with the rank, its server and its process.

    ``fails_on``, ``dies_on``, ``silent_on``: ranks that raise, are killed, sleep until the pool gives up.
    """
    if params.get("fails_on") == context.rank:
        raise ConfigError(f"rank {context.rank} was told to fail; leave fails_on out")
    if params.get("dies_on") == context.rank:
        os.kill(os.getpid(), signal.SIGKILL)
    if params.get("silent_on") == context.rank:
        time.sleep(context.timeout_s + 60.0)
    return {
        "params": dict(params),
        "rank": context.rank,
        "server": context.server,
        "process": os.getpid(),
        "number": context.number,
    }
