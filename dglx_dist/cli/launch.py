"""``dglx train --ranks N`` starts its ranks through torchrun."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence

from rich.console import Console

from dglx_dist.cli.failure import LAUNCHED
from dglx_dist.cluster.launch_env import rank_environment
from dglx_dist.errors import ConfigError

INTERRUPTED = 128 + signal.SIGINT


def start_ranks(arguments: Sequence[str], *, ranks: int, servers: int | None) -> int:
    """Run ``dglx ARGUMENTS`` on ``ranks`` ranks of this machine and wait for them.

    Args:
        arguments: What follows ``dglx``, e.g. ``["train", "data/x", "--debug"]``.
        ranks: W.
        servers: S virtual servers of W / S ranks each; None: one, or what DGLX_RANKS_PER_SERVER says.

    Returns:
        The exit code: 0, 130 after Ctrl-C, that of the rank that failed first, or 128 + the signal that ended
        the launcher; unless it is 0, a message has been shown.

    Raises:
        ConfigError: the ranks are none, or cannot be dealt out to the servers.
    """
    command = [
        *(sys.executable, "-m", "dglx_dist.cli.torchrun"),
        *("--standalone", "--nproc-per-node", str(ranks)),
        *("-m", "dglx_dist.cli", LAUNCHED, *arguments),
    ]
    environment = rank_environment(ranks, ranks_per_server=ranks_of_each(ranks, servers))
    process = subprocess.Popen(command, env=environment)
    # Whoever ends this command means its ranks too.
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        code = process.wait()
    except KeyboardInterrupt:
        # The terminal sends the interrupt to the launcher too, which ends the ranks; wait for that.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        process.wait()
        code = INTERRUPTED
    # In the background of a script this process ignores the interrupt, and only the launcher has it.
    if code == INTERRUPTED:
        _say(
            "interrupted; the ranks have ended. The same command with --resume goes on from the newest "
            "checkpoint, where --checkpoint-every saved any"
        )
    if code < 0:
        _say(f"the launcher of the ranks was ended by {signal.Signals(-code).name}; the ranks end with it")
        return 128 - code
    return code


def _say(text: str) -> None:
    Console(stderr=True, soft_wrap=True).print(text, style="red", highlight=False, markup=False)


def ranks_of_each(ranks: int, servers: int | None) -> int | None:
    """Return how many of ``ranks`` are on each of ``servers``; None where nobody says how many servers.

    Raises:
        ConfigError: there are none, or they cannot be dealt out.
    """
    if ranks < 1:
        raise ConfigError(f"--ranks {ranks} must be at least 1")
    if servers is None:
        return None
    if servers < 1 or ranks % servers:
        raise ConfigError(
            f"--ranks {ranks} cannot be dealt out to --servers {servers}; "
            "make the ranks a multiple of the servers"
        )
    return ranks // servers
