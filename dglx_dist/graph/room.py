"""Whether rows fit into memory, asked before any of them is made."""

from __future__ import annotations

import shutil

import psutil

from dglx_dist.cluster.session import Session
from dglx_dist.errors import ConfigError
from dglx_dist.graph.opening import together
from dglx_dist.records import Array


def check_room(session: Session, bounds: Array, row_bytes: int, what: str, remedy: str) -> None:
    """Refuse on all ranks what does not fit on one machine. Every rank must call it.

    Args:
        session: The run; rows lie in its ``scratch``.
        bounds: (S + 1,) int64; server s will have the rows ``bounds[s]:bounds[s + 1]``.
        row_bytes: Of one row, with everything that goes with it.
        what: For the message.
        remedy: What to do when it does not fit.

    Raises:
        ConfigError: on all ranks, when the rows of a machine's servers need more than is free there.
    """

    def check() -> None:
        topology, host = session.topology, session.hosts[session.topology.rank]
        here = {server for rank, server in enumerate(topology.server_of_rank) if session.hosts[rank] == host}
        rows = sum(int(bounds[server + 1] - bounds[server]) for server in here)
        # Apart from the memory itself, its file system (/dev/shm) has a limit of its own.
        free = min(psutil.virtual_memory().available, shutil.disk_usage(session.scratch).free)
        if rows * row_bytes > free:
            raise ConfigError(
                f"{what} needs {rows * row_bytes / 1e9:.3f} GB for {rows} rows of {row_bytes} bytes on "
                f"{host}, where {free / 1e9:.3f} GB are free; {remedy}"
            )

    together(session, check, ConfigError)
