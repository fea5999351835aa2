"""Messages from peers by one-sided calls, collected by round and step until all senders have sent theirs."""

import threading
import time
import weakref
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar, final

from dglx_dist.comm.collectives import raise_for_missing
from dglx_dist.comm.rpc import Pending
from dglx_dist.comm.session import Session
from dglx_dist.errors import DglxError
from dglx_dist.records import Array

_CHECK_EVERY_S = 1.0
"""A rank that waits for others probes them at this interval, in seconds."""

MAX_AHEAD = 1 << 16
"""Maximum number of rounds by which a message may be early. It limits the memory for early messages."""

M = TypeVar("M")


class RoundEnded(DglxError):
    """A round ended while a thread waited for its messages. Only that thread sees this error."""


@final
class Mailbox(Generic[M]):
    """Received messages. Any thread may put messages, and several threads may wait for them.

    Round numbers increase. Messages are dropped if their round has ended. ``advice`` is the remedy in the
    error for a rank that sends no message.
    """

    def __init__(self, session: Session, advice: str) -> None:
        self._session = session
        self._advice = advice
        self._condition = threading.Condition()
        self.first_round = 0
        self._arrived: dict[tuple[int, Hashable], dict[int, M]] = {}
        """Messages by round and step, and then by sender."""
        self._reason: BaseException | None = None
        """Error for threads that wait for a round before :attr:`first_round`."""
        # Functions that create the exceptions. A stored exception would hold its traceback's frames.
        self._failures: dict[int, Callable[[], BaseException]] = {}

    def put(self, round_number: int, step: Hashable, sender: int, message: M) -> None:
        """Add the message from rank ``sender``, unless its round has ended."""
        with self._condition:
            if round_number >= self.first_round:
                self._arrived.setdefault((round_number, step), {})[sender] = message
                self._condition.notify_all()

    def begin(self, round_number: int, reason: BaseException | None = None) -> None:
        """End all rounds before ``round_number``. Threads that wait for them raise the first ``reason``."""
        with self._condition:
            if round_number <= self.first_round:
                return

            self.first_round = round_number
            self._reason = reason
            for key in [key for key in self._arrived if key[0] < round_number]:
                del self._arrived[key]
            for failed_round in [number for number in self._failures if number < round_number]:
                del self._failures[failed_round]
            self._condition.notify_all()

    def fail(self, round_number: int, reason: Callable[[], BaseException]) -> None:
        """Let threads that wait for missing messages in ``round_number`` raise the first ``reason``."""
        with self._condition:
            self._failures.setdefault(round_number, reason)
            self._condition.notify_all()

    def take(
        self,
        round_number: int,
        step: Hashable,
        senders: Collection[int],
        what: str,
        is_busy: Callable[[int], bool] = lambda _rank: False,
    ) -> dict[int, M]:
        """Wait for a message from each rank in ``senders``, and return the messages by rank.

        ``what`` names the messages in errors. A late rank gets more time if ``is_busy`` returns True for it,
        because it still works on the round.

        Raises:
            PeerError: If a rank failed, is dead, or sent nothing within the time limit. The message names it.
            RoundEnded: If the round ended meanwhile. If its end or failure has a reason, that is raised
                instead.
        """
        deadline = time.monotonic() + self._session.timeout_s
        while True:
            result = self._collect(round_number, step, senders, deadline)
            if isinstance(result, dict):
                return result

            raise_for_missing(self._session, result, what, advice=self._advice, late=False)
            if time.monotonic() < deadline:
                continue

            idle_senders = [rank for rank in result if not is_busy(rank)]
            if idle_senders:
                raise_for_missing(self._session, idle_senders, what, advice=self._advice, late=True)
            deadline = time.monotonic() + self._session.timeout_s

    def _collect(
        self, round_number: int, step: Hashable, senders: Collection[int], deadline: float
    ) -> list[int] | dict[int, M]:
        """Wait until all messages have arrived, or until it is time to probe the missing ranks.

        Return the messages by rank, or a list with the missing ranks.
        """

        def find_missing() -> list[int]:
            arrived = self._arrived.get((round_number, step), {})
            return sorted(set(senders) - arrived.keys())

        def can_return() -> bool:
            has_ended = round_number < self.first_round
            return has_ended or round_number in self._failures or not find_missing()

        remaining_s = max(deadline - time.monotonic(), 0.0)
        with self._condition:
            self._condition.wait_for(can_return, min(_CHECK_EVERY_S, remaining_s))
            if round_number < self.first_round:
                raise self._reason or RoundEnded(f"round {round_number} ended before step {step}")

            missing = find_missing()
            if not missing:
                messages = self._arrived.pop((round_number, step), {})
                return {rank: messages[rank] for rank in senders}
            if round_number in self._failures:
                raise self._failures[round_number]()
            return missing


Put: TypeAlias = Callable[[int, str, int, list[Array]], None]
"""Function of (round number, step, sender, arrays) that receives a message like :meth:`Mailbox.put`."""


@final
class OneSidedExchange:
    """Sends arrays, however many and large, on any thread. All ranks must construct it before one posts.

    Args:
        op: Name for the remote call, equal on all ranks and used by nothing else.
        check: Function that checks received arrays. The sender gets its error.
        put: Function that takes the messages instead of :attr:`mailbox`.
        first_round: Function that returns the current round with a sender, together with ``put``.
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
        self._session = session
        self._op = op
        self.mailbox: Mailbox[list[Array]] = Mailbox(session, advice)
        # The local function below refers to these variables, because it must not refer to this exchange.
        mailbox, world_size = self.mailbox, session.topology.world_size
        deliver = put or mailbox.put
        get_round = first_round or (lambda _: mailbox.first_round)

        def receive(name: str, arrays: Sequence[Array]) -> list[Array]:
            round_text, sender_text, step = name.split(" ", 2)
            round_number = int(round_text)
            sender = int(sender_text)
            if not 0 <= sender < world_size:
                raise ValueError(f"sender {sender} is not one of the {world_size} ranks")

            current_round = get_round(sender)
            if not 0 <= round_number < current_round + MAX_AHEAD:
                raise ValueError(f"{step!r} of round {round_number} is not kept: rank is at {current_round}")
            if check is not None:
                check(arrays)
            deliver(round_number, step, sender, list(arrays))
            return []

        # Register a function, because a method would hold this exchange until the session ends.
        session.rpc.register(op, receive)
        self.close = weakref.finalize(self, session.rpc.unregister, op)
        """Function that stops receiving. It may be called twice."""

    def submit(
        self,
        round_number: int | Mapping[int, int],
        step: str,
        arrays: Mapping[int, Sequence[Array]],
        *,
        phase: str | None,
        layer: int = 0,
    ) -> list[Pending]:
        """Send each rank its ``arrays`` without waiting for an answer.

        ``round_number`` is one number for all ranks, or a mapping from ranks to numbers. Raises PeerError if
        a rank is dead.
        """
        topology = self._session.topology
        if isinstance(round_number, int):
            round_of_rank: Mapping[int, int] = dict.fromkeys(arrays, round_number)
        else:
            round_of_rank = round_number

        # Start with the next rank, so that the ranks do not all send to the same rank first.
        order = sorted(arrays, key=lambda rank: (rank - topology.rank) % topology.world_size)
        names = {rank: f"{round_of_rank[rank]} {topology.rank} {step}" for rank in order}
        submit = partial(self._session.rpc.submit, phase=phase, layer=layer)
        return [submit(rank, self._op, names[rank], list(arrays[rank])) for rank in order]

    def post(
        self, round_number: int, step: str, arrays: Mapping[int, Sequence[Array]], **counted: Any
    ) -> None:
        """Send each rank its ``arrays`` and wait until all are delivered. See :meth:`submit`.

        Raises PeerError if a rank is dead or silent, and RemoteError if a rank rejects the arrays.
        """
        for call in self.submit(round_number, step, arrays, **counted):
            call.result()
