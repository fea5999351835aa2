"""How fast the links of a running job are: two seconds of messages between its ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from dglx_dist.cluster.collectives import barrier, gather_json
from dglx_dist.cluster.session import Session
from dglx_dist.strategies.granndis.ends import Incoming
from dglx_dist.strategies.granndis.wire import Outgoing, Wire, wire_of

_FIRST_BYTES, _MOST_BYTES = 256 * 1024, 64 * 2**20
_LONG_ENOUGH_S = 0.3
"""A round that lasts as long tells the rate: what a limit lets pass at once is little of it."""
_SMALL_ROUNDS = 10
_NAME = "probe of the links"


@dataclass(frozen=True, kw_only=True)
class Links:
    """Payload per second, in both directions at once, and how long a small message takes."""

    external_bytes_per_s: float
    """Of the slowest server's card."""
    internal_bytes_per_s: float
    """Of all ranks of a server together."""
    latency_s: float
    """Between servers; between ranks, where there is one server."""


def probe(session: Session, *, seconds: float = 2.0) -> Links | None:
    """Send around rings of ranks, first across servers and then inside of them; every rank must call it.

    What is sent is no payload of the run, and is not in the ledger.

    Args:
        session: Whose ranks; nothing else should be under way.
        seconds: For both rings together, about.

    Returns:
        The same on all ranks; None for one rank, which has no links.

    Raises:
        PeerError: a rank is dead or silent.
    """
    topology = session.topology
    if topology.world_size == 1:
        return None
    wire = wire_of(session)
    leads = topology.local_rank == 0
    across = _ring(
        [topology.ranks_of_server(server)[0] for server in range(topology.num_servers)], topology.rank
    )
    own = list(topology.ranks_of_server(topology.server))
    inside = _ring(own, topology.rank)
    external = (
        _rate(session, wire, across if leads else None, seconds / 2) if topology.num_servers > 1 else None
    )
    several = any(len(topology.ranks_of_server(s)) > 1 for s in range(topology.num_servers))
    internal = _rate(session, wire, inside, seconds / 2) if several else None
    latency = _small(session, wire, (across if leads else None) if external is not None else inside)
    # A ring of ranks inside a server moves as much for each of them.
    together = None if internal is None else internal * len(own)
    found = external if external is not None else together
    assert found is not None
    return Links(
        external_bytes_per_s=found,
        internal_bytes_per_s=together if together is not None else found,
        latency_s=latency,
    )


def _ring(members: list[int], rank: int) -> tuple[int, int] | None:
    """Return who comes before and after ``rank``; None where it is alone or no member."""
    if rank not in members or len(members) == 1:
        return None
    place = members.index(rank)
    return members[place - 1], members[(place + 1) % len(members)]


def _rate(session: Session, wire: Wire, neighbours: tuple[int, int] | None, seconds: float) -> float:
    """Return the bytes per second of the slowest rank, of messages that grow until they last long enough."""
    num_bytes, spent = _FIRST_BYTES, 0.0
    while True:
        took = _longest(session, _swap(session, wire, neighbours, num_bytes))
        spent += took
        if took >= _LONG_ENOUGH_S or spent >= seconds or num_bytes >= _MOST_BYTES:
            return num_bytes / max(took, 1e-9)
        # As large as would last long enough, and at most eight times, for a burst says too much.
        wanted = num_bytes * 1.2 * _LONG_ENOUGH_S / max(took, 1e-9)
        num_bytes = int(min(max(wanted, 2 * num_bytes), 8 * num_bytes, _MOST_BYTES))


def _small(session: Session, wire: Wire, neighbours: tuple[int, int] | None) -> float:
    """Return the seconds of a message of a few bytes."""
    took = sum(_swap(session, wire, neighbours, 8) for _ in range(_SMALL_ROUNDS)) / _SMALL_ROUNDS
    return _longest(session, took)


def _swap(session: Session, wire: Wire, neighbours: tuple[int, int] | None, num_bytes: int) -> float:
    barrier(session, _NAME)
    begin = time.perf_counter()
    if neighbours is not None:
        before, after = neighbours
        outgoing = [Outgoing(rank=after, num_bytes=num_bytes, pieces=_pieces(num_bytes))]
        wire.swap(outgoing, [Incoming(rank=before, room=memoryview(bytearray(num_bytes)))], _NAME)
    return time.perf_counter() - begin


def _pieces(num_bytes: int) -> Iterator[memoryview]:
    piece = memoryview(bytearray(min(num_bytes, 2**20)))
    for first in range(0, num_bytes, len(piece)):
        yield piece[: num_bytes - first]


def _longest(session: Session, seconds: float) -> float:
    return max(float(str(one)) for one in gather_json(seconds, session))
