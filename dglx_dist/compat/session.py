"""``initialize`` and who takes part: no servers, no address file, no worker processes."""

from __future__ import annotations

import warnings
from typing import Any

from dglx_dist.cluster.collectives import barrier
from dglx_dist.cluster.session import current_session, session_if_open, start_later
from dglx_dist.cluster.topology import Topology, read_settings, read_topology
from dglx_dist.errors import ConfigError
from dglx_dist.sampling.options import whole_number
from dglx_dist.strategies.opening import begin, resolve_strategy

MAX_QUEUE_SIZE = 20 * 2**30

_OF_SERVERS = ("num_servers", "num_workers", "num_samplers")
"""Arguments of older versions of DGL, about processes that do not exist here."""


def initialize(
    ip_config: object = None,
    max_queue_size: int = MAX_QUEUE_SIZE,
    net_type: str | None = None,
    num_worker_threads: int = 1,
    use_graphbolt: bool = False,
    *,
    strategy: str | None = None,
    timeout: float = 300.0,
    seed: int = 0,
    **options: object,
) -> None:
    """Say how to train; the ranks join each other when the first graph is opened.

    Creates no process group, so that the script may do so next with ``init_process_group``. Where it has not
    done so when the graph is opened, one is created then.

    Args:
        ip_config: Not read: torchrun tells where the ranks are. One warning, on rank 0, for this argument and
            those that follow, where they are not what DGL has by default, and for the variables of DGL's
            launcher.
        max_queue_size: Likewise; there are no queues.
        net_type: Likewise.
        num_worker_threads: Likewise; there are no sampler processes.
        use_graphbolt: False.
        strategy: Name of a strategy; None: that of ``python -m dglx_dist.run``, else ``data_parallel``.
        timeout: Seconds that a rank may be silent before the others give up, naming it.
        seed: Of everything that is drawn.
        options: Of the strategy.

    Raises:
        ConfigError: ``use_graphbolt``, a strategy that is unknown or ``auto``, a session is open already, or
            DGL's launcher started this process as one of its servers.
    """
    if use_graphbolt:
        raise ConfigError("use_graphbolt=True cannot be honoured: there is one format; leave it out")
    if session_if_open() is not None:
        raise ConfigError("initialize was called before; call dgl.distributed.exit_client() between the two")
    name, seed = resolve_strategy(strategy), whole_number("seed", seed, least=0)
    launcher = read_settings().dgl_processes
    if launcher.get("DGL_ROLE", "client") != "client":
        raise ConfigError(
            f"DGL_ROLE is {launcher['DGL_ROLE']!r}, and there are no such processes here: every rank serves "
            "its share; start the script with torchrun, not with DGL's launcher"
        )
    given = {
        "ip_config": (ip_config, None),
        "max_queue_size": (max_queue_size, MAX_QUEUE_SIZE),
        # None is what newer versions have.
        "net_type": ("socket" if net_type is None else net_type, "socket"),
        "num_worker_threads": (num_worker_threads, 1),
        **{key: (options.pop(key), None) for key in _OF_SERVERS if key in options},
    }
    ignored = [f"{key}={value!r}" for key, (value, usual) in given.items() if value != usual]
    ignored += [f"{key}={value!r}" for key, value in launcher.items()]
    if ignored and read_topology().rank == 0:
        warnings.warn(
            f"{', '.join(ignored)}: not used, because torchrun says where the ranks are, and there are no "
            "servers and no sampler processes",
            stacklevel=2,
        )
    start_later(lambda: begin(name, options, timeout_s=timeout, seed=seed))


def exit_client() -> None:
    """End the session once the other ranks end theirs; ``initialize`` may then be called again.

    Every rank calls it, or none: the end of the process does it too.
    """
    start_later(None)
    session = session_if_open()
    if session is not None:
        session.close()


def client_barrier() -> None:
    """Wait until every rank is here."""
    barrier(current_session(), "client_barrier()")


def get_rank() -> int:
    """Return the rank of this process."""
    return _topology().rank


def get_num_client() -> int:
    """Return the number of ranks."""
    return _topology().world_size


def get_num_machines() -> int:
    """Return the number of servers, which is that of the partitions that the book knows."""
    return _topology().num_servers


def get_machine_id() -> int:
    """Return the server of this rank."""
    return _topology().server


def get_group_id() -> int:
    """Return 0: there are no groups of clients."""
    return 0


def refused(name: str, reason: str) -> type[Any]:
    """Return what takes the place of a name that cannot be honoured: calling or deriving it raises.

    Args:
        name: As in ``dgl.distributed``.
        reason: What to say, and what to do instead.
    """

    def raise_it(*_: object, **__: object) -> Any:
        raise ConfigError(f"dgl.distributed.{name} is not available: {reason}")

    kept = {"__new__": raise_it, "__init_subclass__": raise_it, "__doc__": f"Not available: {reason}"}
    return type(name, (), kept)


def _topology() -> Topology:
    session = session_if_open()
    return read_topology() if session is None else session.topology
