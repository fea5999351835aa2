"""How to start ranks: the command line for torchrun and the environment that makes them fast."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from dglx_dist.cluster.topology import inherited_environment
from dglx_dist.errors import ConfigError

_ALLOCATOR = {
    # A fresh large tensor is otherwise mapped, page-faulted in and given back to the system at every step,
    # which costs up to a third of a training step on CPUs. allocator.keep_memory() does the same from within,
    # which is later than the first imports. A MALLOC_TOP_PAD_ would add 0.5 GB to a rank and no speed.
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
}
_TALK = {
    # torch's profiler, by which option memory of cooperative tries a model out, else says on each rank that
    # it starts and stops; no level below silences that.
    "KINETO_LOG_LEVEL": "99",
}


def rank_environment(
    num_ranks: int, *, ranks_per_server: int | None = None, environment: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the whole environment for ``num_ranks`` ranks on this machine.

    Sets glibc's allocator to keep its memory and the threads of each rank to its share of the cores, and
    silences torch's profiler; what the user has set already is left alone.

    Args:
        num_ranks: Ranks on this machine, at least 1.
        ranks_per_server: Size of the virtual servers; None: as the environment says.
        environment: What to start from; None: this process's own.

    Raises:
        ConfigError: a number is below 1.
    """
    if num_ranks < 1 or (ranks_per_server is not None and ranks_per_server < 1):
        raise ConfigError(f"{num_ranks} ranks, {ranks_per_server} per server: both must be at least 1")
    start = inherited_environment() if environment is None else dict(environment)
    threads = max(len(os.sched_getaffinity(0)) // num_ranks, 1)
    found = {**_ALLOCATOR, **_TALK, "OMP_NUM_THREADS": str(threads), **start}
    if ranks_per_server is not None:
        found["DGLX_RANKS_PER_SERVER"] = str(ranks_per_server)
    return found


def torchrun_command(
    script_args: Sequence[str], ranks: int, servers: int = 1
) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment that start ``ranks`` ranks on this machine.

    Args:
        script_args: A script and its arguments, or ``-m``, a module and its arguments.
        ranks: Processes.
        servers: Virtual servers; the last may have fewer ranks.

    Raises:
        ConfigError: the ranks cannot be cut into so many servers.
    """
    per_server = -(-ranks // servers) if servers > 0 else 0
    if ranks < 1 or servers < 1 or -(-ranks // per_server) != servers:
        raise ConfigError(
            f"{ranks} ranks cannot be cut into {servers} servers; make the ranks a multiple of the servers"
        )
    command = [sys.executable, "-m", "dglx_dist.cli.torchrun", "--standalone", "--nproc-per-node", str(ranks)]
    return [*command, *script_args], rank_environment(ranks, ranks_per_server=per_server)
