"""Several graph servers, all parameter servers and workers in one thread, in an order that can be repeated.

Whatever could happen next is an event; whoever chooses decides which. So any interleaving of a real run can
be tried, and repeated from its record.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TypeAlias, final

import numpy as np

from dglx_dist.errors import ConfigError
from dglx_dist.serverless.parameter_server import ParameterServer, exchange
from dglx_dist.serverless.tasks import TaskKey
from dglx_dist.strategies.serverless.graph_server import (
    Computed,
    GraphServer,
    Kind,
    LocalParameters,
    ScheduledTask,
    compute_task,
    submit,
)
from dglx_dist.strategies.serverless.options import StalenessPolicy
from dglx_dist.strategies.serverless.scheduler import Progress


class What(Enum):
    """What happens."""

    MOVE = "move"
    """A graph server makes a move, or lets workers take its task."""
    COMPUTE = "compute"
    """A worker pulls weights and rows, and computes."""
    SUBMIT = "hand_in"
    """It pushes gradients and gives rows."""
    UPDATE = "update"
    """The parameter servers update the weights."""
    TELL = "tell"
    """A graph server tells all how many answers of an epoch were right."""


@final
@dataclass(frozen=True)
class Event:
    """One thing that can happen next."""

    what: What
    server: int = -1
    """Graph server; -1 for an update."""
    interval: int = -1
    """Its own number of it; the epoch where answers are told."""
    position: int = field(default=-1, compare=False)
    """How far the interval is."""


Choice: TypeAlias = Callable[[Sequence[Event]], int]
"""Of the events that can happen, at least one, in a fixed order: which does."""


def first_come(events: Sequence[Event]) -> int:
    """Choose in the order of layers: the interval that is furthest behind, updates at once."""
    return min(
        range(len(events)), key=lambda at: (events[at].position, events[at].server, events[at].interval)
    )


def seeded(seed: int) -> Choice:
    """Return a choice at random, the same for the same seed."""
    draw = np.random.default_rng(seed)
    return lambda events: int(draw.integers(len(events)))


def replayed(record: Sequence[Event]) -> Choice:
    """Return the choice that repeats ``record``.

    Raises:
        ConfigError: when called and the recorded event cannot happen: the run is another one.
    """
    following = iter(record)

    def choose(events: Sequence[Event]) -> int:
        wanted = next(following, None)
        if wanted not in events:
            raise ConfigError(f"the record has {wanted}, which cannot happen; is it of another run?")
        return events.index(wanted)

    return choose


@final
class SerialSchedule:
    """Runs epochs of all graph servers in this thread.

    Args:
        servers: All graph servers, by number.
        parameters: All parameter servers of one plan, in order.
        pace: How epochs may overlap; each graph server goes on with a copy.
        choose: Which event comes next.
    """

    def __init__(
        self,
        servers: Sequence[GraphServer],
        parameters: Sequence[ParameterServer],
        pace: StalenessPolicy,
        choose: Choice = first_come,
    ) -> None:
        self.servers, self._parameters, self._choose = servers, parameters, choose
        self._hands = LocalParameters(parameters)
        numbers = range(len(servers))
        self.progress = [
            Progress(
                one.course,
                one.part.num_intervals,
                replace(pace),  # as on ranks, each finds out for itself when to switch
                [peer for peer in numbers if peer != one.rank],
            )
            for one in servers
        ]
        self._waiting: dict[tuple[int, int], TaskKey] = {}
        self._computed: dict[tuple[int, int], tuple[TaskKey, Computed]] = {}
        self._untold: list[tuple[int, int]] = []
        self.record: list[Event] = []
        """What happened."""
        self.watch: Callable[[Event], None] = lambda _event: None
        """Called after each event."""

    def run(self, end: int) -> None:
        """Train until all intervals have ended the epoch before ``end``, and its update is made."""
        for progress in self.progress:
            progress.end = end
        while not all(progress.is_done for progress in self.progress):
            events = self.events()
            assert events, f"nothing can happen: {[one.position for one in self.progress]}"
            event = events[self._choose(events)]
            self.record.append(event)
            self._happen(event)
            self.watch(event)

    def events(self) -> list[Event]:
        """Return what can happen now."""
        found = [
            Event(What.MOVE, server, interval, progress.position[interval])
            for server, progress in enumerate(self.progress)
            for interval in progress.able()
        ]
        for what, tasks in ((What.COMPUTE, self._waiting), (What.SUBMIT, self._computed)):
            found += [
                Event(what, server, interval, self.progress[server].position[interval])
                for server, interval in sorted(tasks)
            ]
        found += [Event(What.TELL, server, epoch) for server, epoch in self._untold]
        ready = all(one.own_sums() is not None for one in self._parameters)
        return [*found, Event(What.UPDATE)] if ready else found

    def _happen(self, event: Event) -> None:
        if event.what is What.UPDATE:
            updates = exchange(self._parameters)
            assert updates is not None
            for progress in self.progress:
                progress.updates = updates
        elif event.what is What.TELL:
            self._untold.remove((event.server, event.interval))
            correct = self.servers[event.server].correct(event.interval)
            for progress in self.progress:
                progress.switch.hear(event.server, event.interval, correct)
        elif event.what is What.MOVE:
            self._move(event.server, event.interval)
        elif event.what is What.COMPUTE:
            key = self._waiting.pop((event.server, event.interval))
            computed = compute_task(self.servers[event.server], self._hands, key)
            self._computed[event.server, event.interval] = key, computed
        else:
            key, computed = self._computed.pop((event.server, event.interval))
            over = submit(self.servers[event.server], self._hands, key, computed)
            assert over, f"task {key} is not over with all it gives"
            self._finish(event.server, event.interval)

    def _move(self, number: int, interval: int) -> None:
        server = self.servers[number]
        epoch, move = self.progress[number].start(interval)
        if move.kind is Kind.WORK:
            server.open(interval, epoch, move)
            self._waiting[number, interval] = server.key_of(interval, epoch, move)
            return
        if move.kind in (Kind.SCATTER, Kind.SEND_BACK):
            self._send(server, interval, move)
        else:
            server.compute(interval, epoch, move)
        self._finish(number, interval)

    def _send(self, server: GraphServer, interval: int, move: ScheduledTask) -> None:
        for letter in server.letters(interval, move):
            arrays = [letter.positions, *letter.rows]
            self.servers[letter.peer].receive(server.rank, move.kind, move.step, arrays)

    def _finish(self, number: int, interval: int) -> None:
        progress = self.progress[number]
        if not progress.finish(interval):
            return
        self._untold += [(number, epoch) for epoch in progress.answered()]
        if (news := progress.news()) is not None:
            for other in self.progress:
                if other is not progress:
                    other.hear(number, news)
