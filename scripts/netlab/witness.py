"""The network cards as second witness of the byte ledger.

Compared are all bytes of a server's card, both directions together, with all payload that the ledger has
between this server and others. The card also has headers (0.2 to 1 % where messages are large, as packets
leave a virtual card in bundles, up to 5 % where they are small and many); acknowledgements, which go the
other way than the bytes they are for and are why directions are not compared alone; what was sent again; and
what ranks need to meet, to keep in touch and to end: some hundred kB, which is why little traffic is not
judged at all.

An all-reduce is counted as a ring, which is what gloo does. A broadcast is counted as a copy from its source
to each other rank, while gloo hands copies on along a tree: the sum over all servers is the same, but where
the first weights of a large model are much of what is sent, single servers of four or more may differ.
Traffic on the loopback of a server goes through no card, nor does the ledger count it as outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dglx_dist.errors import ConfigError
from scripts.netlab.base import Card
from scripts.netlab.traces import Trace

TOLERANCE = 0.08
LEAST_BYTES = 4_000_000
"""Below it, meeting each other and keeping in touch are too much of the traffic."""

Verdict = Literal["agrees", "differs", "too little traffic to compare"]


@dataclass(frozen=True, kw_only=True)
class Witness:
    """What the card of one server counted, and what the ledger says of it."""

    server: int | None
    """None: the sum over all servers."""
    card: Card
    """Bytes between the two readings, headers included."""
    ledger: Card
    """Payload to and from other servers."""

    @property
    def ratio(self) -> float | None:
        """Card over ledger, both directions together; None where the ledger has nothing."""
        payload = self.ledger.sent + self.ledger.received
        return (self.card.sent + self.card.received) / payload if payload else None

    @property
    def verdict(self) -> Verdict:
        """Whether both say the same, within 8 %."""
        if self.ledger.sent + self.ledger.received < LEAST_BYTES or self.ratio is None:
            return "too little traffic to compare"
        return "agrees" if abs(self.ratio - 1) <= TOLERANCE else "differs"


def compare(cards_before: Sequence[Card], cards_after: Sequence[Card], trace: Trace) -> tuple[Witness, ...]:
    """Hold each card against the ledger: (S + 1,), one for each server, then their sum; none without cards.

    Args:
        cards_before: (S,) read before the command; empty on plain loopback.
        cards_after: (S,) read after it.
        trace: What the command's ranks left.

    Raises:
        ConfigError: the cards are not those of the trace's servers.
    """
    if not cards_before and not cards_after:
        return ()
    if not len(cards_before) == len(cards_after) >= trace.num_servers:
        raise ConfigError(
            f"{len(cards_before)} and {len(cards_after)} cards cannot be held against the ledger of "
            f"{trace.num_servers} servers; is DGLX_RANKS_PER_SERVER set inside the lab? unset it"
        )
    payload = trace.ledger_outside_by_server()
    each = [
        Witness(
            server=server,
            card=Card(sent=after.sent - before.sent, received=after.received - before.received),
            ledger=Card(sent=payload.get(server, (0, 0))[0], received=payload.get(server, (0, 0))[1]),
        )
        for server, (before, after) in enumerate(zip(cards_before, cards_after, strict=True))
    ]
    total = Witness(
        server=None,
        card=_sum([one.card for one in each]),
        ledger=_sum([one.ledger for one in each]),
    )
    return (*each, total)


def _sum(cards: Sequence[Card]) -> Card:
    return Card(sent=sum(card.sent for card in cards), received=sum(card.received for card in cards))
