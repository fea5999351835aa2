"""Which parameter server keeps the stashes of which interval."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dglx_dist.errors import ConfigError
from dglx_dist.records import Array


def assign(sizes: Sequence[int] | Array, num_servers: int) -> Array:
    """Give each interval to the server with the lightest load, largest intervals first (section 5.1).

    The answer depends on nothing but the arguments, so the order in which gradients are summed never
    depends on who was quick. No server goes without an interval.

    Args:
        sizes: (K,) rows of each interval; 0 is allowed.
        num_servers: P.

    Returns:
        (K,) int64 server of each interval.

    Raises:
        ConfigError: there is no server, or there are more than intervals.
    """
    if not 1 <= num_servers <= len(sizes):
        raise ConfigError(
            f"parameter_servers={num_servers} with {len(sizes)} intervals; give 1 to {len(sizes)}, or more "
            "intervals"
        )
    loads, server_of = [0] * num_servers, np.zeros(len(sizes), dtype=np.int64)
    for interval in sorted(range(len(sizes)), key=lambda one: (-int(sizes[one]), one)):
        server = loads.index(min(loads))
        # A task has a cost of its own besides its rows: this also spreads empty intervals.
        loads[server] += int(sizes[interval]) + 1
        server_of[interval] = server
    return server_of
