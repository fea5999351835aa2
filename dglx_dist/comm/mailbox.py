"""Messages of peers by one-sided calls, collected by round and step until all senders have been heard."""

import threading
import time
import weakref
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, Generic, TypeAlias, TypeVar, final

from dglx_dist.comm.collectives import raise_for_missing
from dglx_dist.comm.rpc import Pending
from dglx_dist.comm.session import Session
from dglx_dist.errors import DglxError
from dglx_dist.records import Array

_CHECK_EVERY_S = 1.0
"""Period at which a waiting rank probes those it waits for."""

MAX_AHEAD = 1 << 16
"""Rounds by which a message may be early: what is kept for later is bounded."""

M = TypeVar("M")


class RoundEnded(DglxError):
    """A round ended while a thread waited for its messages; seen by that thread only."""


@final
class Mailbox(Generic[M]):
    """Received messages; any thread may put them, and any number of threads may wait.

    Rounds are numbered upwards. Messages of a round that has ended are dropped. ``advice`` is the remedy when
    a rank sends nothing.
    """

    def __init__(self, session: Session, advice: str) -> None:
        self._session, self._advice = session, advice
        self._arrived: dict[tuple[int, Hashable], dict[int, M]] = {}
        self._changed = threading.Condition()
        self.first_round = 0
        self._reason: BaseException | None = None
        # Made when raised: a stored exception would keep the frames of its traceback alive.
        self._failures: dict[int, Callable[[], BaseException]] = {}

    def put(self, round_number: int, step: Hashable, sender: int, message: M) -> None:
        """Add the message of the rank ``sender``, unless its round has ended."""
        with self._changed:
            if round_number >= self.first_round:
                self._arrived.setdefault((round_number, step), {})[sender] = message
                self._changed.notify_all()

    def begin(self, round_number: int, reason: BaseException | None = None) -> None:
        """End the earlier rounds; whoever waits for them gets the first ``reason``."""
        with self._changed:
            if round_number > self.first_round:
                self.first_round, self._reason = round_number, reason
                self._arrived = {key: value for key, value in self._arrived.items() if key[0] >= round_number}
                self._failures = {key: value for key, value in self._failures.items() if key >= round_number}
            self._changed.notify_all()

    def fail(self, round_number: int, reason: Callable[[], BaseException]) -> None:
        """Let whoever waits for messages of ``round_number`` that are missing get the first ``reason``."""
        with self._changed:
            self._failures.setdefault(round_number, reason)
            self._changed.notify_all()

    def take(
        self,
        round_number: int,
        step: Hashable,
        senders: Collection[int],
        what: str,
        is_busy: Callable[[int], bool] = lambda _rank: False,
    ) -> dict[int, M]:
        """Wait for a message of each of the ranks ``senders``, and return them by rank.

        ``what`` names the messages in errors; ``is_busy`` tells of a rank that is late whether it works on
        the round: it is then given more time.

        Raises:
            PeerError: a rank failed, is dead, or sent nothing within the session's time-out; it is named.
            RoundEnded: the round ended meanwhile; or the reason that was given for its end or failure.
        """
        deadline = time.monotonic() + self._session.timeout_s
        while not isinstance(missing := self._missing(round_number, step, senders, deadline), dict):
            raise_for_missing(self._session, missing, what, advice=self._advice, late=False)
            if time.monotonic() < deadline:
                continue
            if absent := [rank for rank in missing if not is_busy(rank)]:
                raise_for_missing(self._session, absent, what, advice=self._advice, late=True)
            deadline = time.monotonic() + self._session.timeout_s
        return missing

    def _missing(
        self, round_number: int, step: Hashable, senders: Collection[int], deadline: float
    ) -> list[int] | dict[int, M]:
        """Wait until all messages are there, or for some time; return them, or the ranks that are missing."""

        def missing() -> list[int]:
            return sorted(set(senders) - self._arrived.get((round_number, step), {}).keys())

        with self._changed:
            self._changed.wait_for(
                lambda: round_number < self.first_round or round_number in self._failures or not missing(),
                min(_CHECK_EVERY_S, max(deadline - time.monotonic(), 0.0)),
            )
            if round_number < self.first_round:
                raise self._reason or RoundEnded(f"round {round_number} ended before step {step}")
            if missing() and round_number in self._failures:
                raise self._failures[round_number]()
            if late := missing():
                return late
            arrived = self._arrived.pop((round_number, step), {})
            return {rank: arrived[rank] for rank in senders}


Put: TypeAlias = Callable[[int, str, int, list[Array]], None]
"""(number of the round, step, sender, arrays): takes a message, as :meth:`Mailbox.put` does."""


@final
class OneSidedExchange:
    """Arrays of any number and size, on any thread. All ranks must construct it before one posts.

    ``op`` is the name of the remote call, equal on all ranks and used by nothing else; ``check`` is called
    with received arrays, and the sender gets its error. ``put`` takes the messages in place of
    :attr:`mailbox`; ``first_round`` of a sender is then the round that this rank is at with it.
    """

    def __init__(
        self,
        session: Session,
        op: str,
        advice: str,
        check: Callable[[Sequence[Array]], None] | None = None,
        put: Put | None = None,
        first_round: Callable[[int], int] | None = None,
    ) -> None:
        self._session, self._op = session, op
        self.mailbox: Mailbox[list[Array]] = Mailbox(session, advice)
        mailbox, world_size = self.mailbox, session.topology.world_size
        deliver, current = put or mailbox.put, first_round or (lambda _: mailbox.first_round)

        def receive(name: str, arrays: Sequence[Array]) -> list[Array]:
            number, sender, step = name.split(" ", 2)
            if not 0 <= int(sender) < world_size:
                raise ValueError(f"sender {sender} is not one of the {world_size} ranks")
            at = current(int(sender))
            if not 0 <= int(number) < at + MAX_AHEAD:
                raise ValueError(f"{step!r} of round {number} is not kept: this rank is at {at}")
            if check is not None:
                check(arrays)
            deliver(int(number), step, int(sender), list(arrays))
            return []

        # Not a method, which would keep the owner of the exchange alive as long as the session.
        session.rpc.register(op, receive)
        self.close = weakref.finalize(self, session.rpc.unregister, op)
        """Stops receiving. May be called twice."""

    def submit(
        self,
        round_number: int | Mapping[int, int],
        step: str,
        arrays: Mapping[int, Sequence[Array]],
        *,
        phase: str | None,
        layer: int = 0,
    ) -> list[Pending]:
        """Send each rank its ``arrays`` of a round, or of one by rank, and return at once.

        PeerError: a rank is dead.
        """
        topology, submit = self._session.topology, self._session.rpc.submit
        rounds = dict.fromkeys(arrays, round_number) if isinstance(round_number, int) else round_number
        names = {rank: f"{rounds[rank]} {topology.rank} {step}" for rank in arrays}
        # Starts with the next rank, so that not all ranks send to the same one first.
        order = sorted(arrays, key=lambda rank: (rank - topology.rank) % topology.world_size)
        return [submit(to, self._op, names[to], list(arrays[to]), phase=phase, layer=layer) for to in order]

    def post(
        self, round_number: int, step: str, arrays: Mapping[int, Sequence[Array]], **counted: Any
    ) -> None:
        """:meth:`submit`, and wait until all is delivered; :meth:`Mailbox.take` waits for what others send.

        PeerError: a rank is dead or silent; RemoteError: it rejects the arrays.
        """
        for call in self.submit(round_number, step, arrays, **counted):
            call.result()
