"""A port for the ranks to meet at, which no other lab of this machine takes meanwhile."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Callable

from dglx_dist.errors import LabError

# Below the ports that Linux gives to outgoing connections and to whoever asks for any port.
_FIRST, _LAST, _TRIES = 20_000, 32_000, 200


class Port:
    """A port of 127.0.0.1 or of a lab's server 0, claimed until it is closed or the process ends."""

    def __init__(self, number: int, claim: socket.socket) -> None:
        self.number = number
        self._claim = claim

    def close(self) -> None:
        """Give it up."""
        self._claim.close()


def claim_port(where: str, *, is_free: Callable[[int], bool]) -> Port:
    """Claim a port that is free and that no other process of this machine has claimed by this function.

    The claim is an abstract Unix socket named after the port: the system lets one process have it, and
    gives it back when that process ends, however it ends.

    Args:
        where: Whose ports: claims of one place do not stand in the way of another's.
        is_free: Whether nobody listens at that port there.

    Raises:
        LabError: none was found.
    """
    # Seeded by nothing: two labs that start at once shall not look at the same ports in the same order.
    for number in random.SystemRandom().sample(range(_FIRST, _LAST), _TRIES):
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            claim.bind(f"\0dglx-lab-port-{where}-{number}")
        except OSError:
            claim.close()
            continue
        if is_free(number):
            return Port(number, claim)
        claim.close()
    raise LabError(
        f"no free port between {_FIRST} and {_LAST} after {_TRIES} tries; end other programs of user "
        f"{os.getuid()} that listen there"
    )


def nobody_listens(number: int) -> bool:
    """Whether a program of this network could listen at ``number`` on every address."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", number))
        except OSError:
            return False
    return True
