"""Moves bytes between this rank and its peers in all directions at once, and waits until all are there.

One thread serves all connections, as soon as each can send or has something: gloo's collectives and messages
leave a slow link idle between requests (``scripts/bench/micro/halo.py`` measures them).
"""

from __future__ import annotations

import selectors
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

from dglx_dist.cluster.collectives import peers_named
from dglx_dist.cluster.session import Session
from dglx_dist.cluster.streams import Streams, open_streams
from dglx_dist.cluster.timeline import NETWORK
from dglx_dist.errors import ConfigError, PeerError
from dglx_dist.strategies.granndis.buffers import KeptBuffer
from dglx_dist.strategies.granndis.device_wire import make_device_wire
from dglx_dist.strategies.granndis.ends import End, Incoming, Receiver, Sender, head_of

_KEPT = "halo wire"


@dataclass(frozen=True, kw_only=True)
class Outgoing:
    """What goes to one peer."""

    rank: int
    num_bytes: int
    pieces: Iterator[memoryview]
    """Made when there is room to send them; together num_bytes."""


@final
class Wire:
    """The connections of a rank and what an exchange needs beside them. One exchange at a time.

    Args:
        session: The run; every rank must make its first one.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._streams: Streams = open_streams(session)
        self.devices = make_device_wire(session)
        """For what lies on accelerators; None: that goes through the host too."""
        self.sent, self.received = KeptBuffer(), KeptBuffer()
        """For the exchange that runs."""
        self._in_use = threading.Lock()
        self._broken = ""
        self._sequence_to: dict[int, int] = {}
        self._sequence_from: dict[int, int] = {}
        self._seconds = 0.0

    def seconds(self, *, reset: bool = False) -> float:
        """Seconds spent in exchanges: what stood still for peers, and own work on what is sent."""
        spent = self._seconds
        if reset:
            self._seconds = 0.0
        return spent + (0.0 if self.devices is None else self.devices.seconds(reset=reset))

    def swap(
        self,
        outgoing: Sequence[Outgoing],
        incoming: Sequence[Incoming],
        name: str,
        meanwhile: Iterable[bool] = (),
    ) -> None:
        """Send all of ``outgoing`` while all of ``incoming`` arrives.

        What has no bytes is passed over, at both ends. The peers must call it in the same order.

        Args:
            outgoing: At most one for each peer.
            incoming: At most one for each peer.
            name: What is exchanged, at most 32 characters; equal at both ends.
            meanwhile: Own work in small steps, done while bytes are on their way. Yields whether more can be
                done at once; False: not before more of ``incoming`` has arrived.

        Raises:
            PeerError: a peer is dead, silent for the time-out, or is at another exchange; it is named.
            ConfigError: another thread is in an exchange.
        """
        if not self._in_use.acquire(blocking=False):
            raise ConfigError(
                f"two threads exchange halo rows at the same time ({name}), in an order that the ranks "
                "cannot agree on; run the layers of a model on one thread"
            )
        started = time.perf_counter()
        try:
            self._check_whole(name)
            self._broken = name
            with peers_named(self._session, name), self._session.timeline.span(name, NETWORK):
                self._run(self._ends(outgoing, incoming, name), name, iter(meanwhile))
            self._broken = ""
        finally:
            self._seconds += time.perf_counter() - started
            self._in_use.release()

    def _check_whole(self, name: str) -> None:
        if self._broken:
            raise PeerError(
                f"{name} cannot be exchanged: an earlier exchange ({self._broken}) was broken off half-way "
                "on this rank; end the session and start again from the last checkpoint"
            )

    def _ends(self, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming], name: str) -> list[End]:
        """Number the messages and put those of one peer together."""
        ends: dict[int, End] = {}
        for one in outgoing:
            if one.num_bytes:
                head = head_of(_next(self._sequence_to, one.rank), one.num_bytes, name)
                self._end(ends, one.rank).sender = Sender(head, one.pieces)
        for other in incoming:
            if len(other.room):
                head = head_of(_next(self._sequence_from, other.rank), len(other.room), name)
                self._end(ends, other.rank).receiver = Receiver(head, other)
        return list(ends.values())

    def _end(self, ends: dict[int, End], rank: int) -> End:
        if rank not in ends:
            ends[rank] = End(rank=rank, connection=self._streams.to(rank))
        return ends[rank]

    def _run(self, ends: Sequence[End], name: str, work: Iterator[bool]) -> None:
        with selectors.DefaultSelector() as selector:
            waiting, working, idle = 0, True, False
            for end in ends:
                self._serve(end, selectors.EVENT_WRITE)
                if end.events:
                    selector.register(end.connection, end.events, end)
                    waiting += 1
            while waiting or working:
                busy = working and not idle
                ready = selector.select(0 if busy else self._session.timeout_s) if waiting else []
                if not ready and not busy:
                    # Work that still waits when all is there is a bug, and would not end.
                    assert waiting, f"work beside the {name} waits for more than comes"
                    self._name_missing([key.data for key in selector.get_map().values()], name)
                for key, events in ready:
                    waiting -= self._go_on(selector, key, events)
                more = next(work, None) if working else None
                working, idle = more is not None, more is False

    def _go_on(self, selector: selectors.BaseSelector, key: selectors.SelectorKey, events: int) -> bool:
        """Serve one connection; return whether it has nothing left to do."""
        end: End = key.data
        self._serve(end, events)
        if not end.events:
            selector.unregister(end.connection)
        elif end.events != key.events:
            selector.modify(end.connection, end.events, end)
        return not end.events

    def _serve(self, end: End, events: int) -> None:
        try:
            end.serve(events)
        except PeerError:
            raise
        except OSError as error:
            rank = end.rank
            # peers_named says who died or failed first.
            raise RuntimeError(
                f"the connection to rank {rank} on {self._session.hosts[rank]} broke: {error}"
            ) from error

    def _name_missing(self, ends: Sequence[End], name: str) -> None:
        hosts = self._session.hosts
        names = ", ".join(f"rank {end.rank} on {hosts[end.rank]}" for end in ends)
        raise RuntimeError(
            f"nothing moved for {self._session.timeout_s:g} s while rank {self._session.topology.rank} "
            f"waited for {names} in the {name}; look at their output, or raise timeout_s (DGLX_TIMEOUT)"
        )


def wire_of(session: Session) -> Wire:
    """Return the wire of this session; made the first time, when every rank must call it.

    Raises:
        PeerError: a rank is dead or did not connect within the time-out; it is named.
    """
    kept = session.attached.get(_KEPT)
    if isinstance(kept, Wire):
        return kept
    made = session.attached[_KEPT] = Wire(session)
    return made


def _next(numbers: dict[int, int], rank: int) -> int:
    numbers[rank] = numbers.get(rank, 0) + 1
    return numbers[rank]
