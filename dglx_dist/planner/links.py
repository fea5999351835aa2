"""Measured bandwidth of the links of a running job."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dglx_dist.comm.collectives import barrier, gather_json
from dglx_dist.comm.exchange import Incoming, Outgoing, row_exchanges
from dglx_dist.comm.session import Session

_FIRST_BYTES, _MOST_BYTES = 32 * 1024, 64 * 2**20
_LONG_ENOUGH_S = 0.1
"""A round of this duration shows the rate. The first one is not counted, as it begins with a burst."""
_ROUNDS = 3
_EXCHANGE_NAME = "probe of the links"
PROBE_PHASE = "link_probe"
"""Ledger phase of the probe."""


@dataclass(frozen=True, kw_only=True)
class Links:
    """Payload per second in both directions at once."""

    external_bytes_per_s: float
    """Rate of the slowest server's card."""
    internal_bytes_per_s: float
    """Rate of all ranks of a server in total."""


def probe(session: Session, *, seconds: float = 2.0) -> Links:
    """Time messages around rings of ranks, first between servers and then within them, for about ``seconds``.

    Collective, and the same on all ranks; without limits for one rank. The session should be idle.
    The ledger counts the messages as :data:`PROBE_PHASE`.
    """
    topology = session.topology
    if topology.world_size == 1:
        return Links(external_bytes_per_s=1e12, internal_bytes_per_s=1e12)
    servers = [topology.ranks_of_server(server) for server in range(topology.num_servers)]
    across = _ring_neighbours([ranks[0] for ranks in servers], topology.rank)
    inside = _ring_neighbours(servers[topology.server], topology.rank)
    external = _measure_bandwidth(session, across, seconds / 2) if len(servers) > 1 else None
    internal = _measure_bandwidth(session, inside, seconds / 2) if max(map(len, servers)) > 1 else None
    if internal is not None:
        # Each rank of the ring within a server moves this much.
        internal *= len(servers[topology.server])
    rate = external or internal
    assert rate is not None
    return Links(external_bytes_per_s=rate, internal_bytes_per_s=internal or rate)


def _ring_neighbours(members: Sequence[int], rank: int) -> tuple[int, int] | None:
    if rank not in members or len(members) == 1:
        return None
    place = members.index(rank)
    return members[place - 1], members[(place + 1) % len(members)]


def _measure_bandwidth(session: Session, neighbors: tuple[int, int] | None, seconds: float) -> float:
    """Return the median rate of rounds, for about ``seconds``."""
    num_bytes, spent, rounds = _FIRST_BYTES, 0.0, list[float]()
    while len(rounds) <= _ROUNDS and (spent < seconds or not rounds):
        took = max(map(float, gather_json(_time_swap(session, neighbors, num_bytes), session)))
        spent += took
        if rounds or took >= _LONG_ENOUGH_S or spent >= seconds / 2 or num_bytes >= _MOST_BYTES:
            rounds.append(took)
            continue
        # Large enough to last, but at most eight times larger, because bursts look too fast.
        enough = num_bytes * 1.2 * _LONG_ENOUGH_S / max(took, 1e-9)
        num_bytes = int(min(max(enough, 2 * num_bytes), 8 * num_bytes, _MOST_BYTES))
    return num_bytes / max(statistics.median(rounds[1:] or rounds), 1e-9)


def _time_swap(session: Session, neighbors: tuple[int, int] | None, num_bytes: int) -> float:
    streams = row_exchanges(session).streams
    barrier(session, _EXCHANGE_NAME)
    begin = time.perf_counter()
    if neighbors is not None:
        before, after = neighbors
        outgoing = [Outgoing(rank=after, rows=torch.zeros(num_bytes, dtype=torch.uint8))]
        incoming = [Incoming(rank=before, rows=torch.empty(num_bytes, dtype=torch.uint8))]
        streams.post(outgoing, incoming, _EXCHANGE_NAME, phase=PROBE_PHASE)()
    return time.perf_counter() - begin
