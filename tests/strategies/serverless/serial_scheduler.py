"""Deterministic single-threaded simulation of graph servers, parameter servers and workers.

Whatever can happen next is an event, and a choice function picks one. So any interleaving of a real run can
be tried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias, final

import numpy as np
import torch

from dglx_dist.strategies.serverless.graph_server import GraphServer, SubmitResult, TaskKind
from dglx_dist.strategies.serverless.parameter_server import ParameterServer
from dglx_dist.strategies.serverless.scheduler import EXCHANGED, IntervalProgress
from dglx_dist.strategies.serverless.tasks import Computed, TaskKey, add_gradients, half_rows
from dglx_dist.strategies.serverless.tensor_program import RowKeys
from tests.strategies.serverless.programs import exchange


def server_of(key: TaskKey, parameters: Sequence[ParameterServer]) -> ParameterServer:
    return parameters[int(parameters[0].plan.server_of_interval[key.interval])]


Halves: TypeAlias = list[Computed]


def compute_task(server: GraphServer, parameters: Sequence[ParameterServer], key: TaskKey) -> Halves:
    work = server.works[key.step, key.direction]
    where = server.rows_of(key.interval - server.part.first_interval, key.step)
    rows, first = where.stop - where.start, server.first_id(key.step) + where.start
    owner = server_of(key, parameters)
    weights = owner.weights(key.interval, key.epoch, key.step) if work.weights else []
    results = []
    for half in (0, 1):
        arrays, nodes = server.pull(key, half), half_rows(rows, half)
        assert arrays, f"task {key} is not open"
        keys = RowKeys(server.seed, key.epoch, torch.arange(first + nodes.start, first + nodes.stop))
        results.append(work.half(weights, arrays, nodes.stop - nodes.start, keys))
    return results


class Event(NamedTuple):
    """One thing that can happen next.

    A graph server executes or opens a task ("start"), or tells its correct predictions ("announce"); a worker
    computes a task ("compute"), or submits it ("submit"); the weights are updated ("update").
    """

    kind: str
    server: int = -1
    """Graph server; -1 for an update."""
    interval: int = -1
    """Local number of the interval; the epoch for "announce"."""
    position: int = -1
    """Position of the interval."""


Choice: TypeAlias = Callable[[Sequence[Event]], int]
"""Maps the possible events, at least one, in a fixed order, to the index of the next one."""


def first_come(events: Sequence[Event]) -> int:
    """Choose in the order of layers: the interval that is furthest behind, updates at once."""
    return min(
        range(len(events)), key=lambda at: (events[at].position, events[at].server, events[at].interval)
    )


def choose_randomly(seed: int) -> Choice:
    draw = np.random.default_rng(seed)
    return lambda events: int(draw.integers(len(events)))


@final
class SerialScheduler:
    """Runs epochs of all graph and parameter servers in this thread; ``choose`` tells which event is next."""

    def __init__(
        self,
        servers: Sequence[GraphServer],
        parameters: Sequence[ParameterServer],
        choose: Choice = first_come,
    ) -> None:
        self.servers, self._parameters, self._choose = servers, parameters, choose
        ranks = [server.rank for server in servers]
        self.progress = [
            IntervalProgress(
                server.program,
                server.options,
                server.part.num_intervals,
                [peer for peer in ranks if peer != server.rank],
            )
            for server in servers
        ]
        self._waiting: dict[tuple[int, int], TaskKey] = {}
        self._computed: dict[tuple[int, int], tuple[TaskKey, Halves]] = {}
        self._unannounced: list[tuple[int, int]] = []
        self.watch: Callable[[Event], None] = lambda _event: None
        """Called after each event."""

    def run(self, end: int) -> None:
        for progress in self.progress:
            progress.end = end
        while not all(progress.is_done for progress in self.progress):
            events = self.events()
            assert events, f"nothing can happen: {[progress.position for progress in self.progress]}"
            event = events[self._choose(events)]
            self._apply(event)
            self.watch(event)

    def events(self) -> list[Event]:
        events = [
            Event("start", server, interval, progress.position[interval])
            for server, progress in enumerate(self.progress)
            for interval in progress.startable()
        ]
        for kind, tasks in (("compute", self._waiting), ("submit", self._computed)):
            events += [
                Event(kind, server, interval, self.progress[server].position[interval])
                for server, interval in sorted(tasks)
            ]
        events += [Event("announce", server, epoch) for server, epoch in self._unannounced]
        ready = all(server.own_sums() is not None for server in self._parameters)
        return [*events, Event("update")] if ready else events

    def _apply(self, event: Event) -> None:
        if event.kind == "update":
            updates = exchange(self._parameters)
            assert updates is not None
            for progress in self.progress:
                progress.updates = updates
        elif event.kind == "announce":
            self._unannounced.remove((event.server, event.interval))
            correct = self.servers[event.server].correct(event.interval)
            for progress in self.progress:
                progress.record_correct(event.server, event.interval, correct)
        elif event.kind == "start":
            self._move(event.server, event.interval)
        elif event.kind == "compute":
            key = self._waiting.pop((event.server, event.interval))
            computed = compute_task(self.servers[event.server], self._parameters, key)
            self._computed[event.server, event.interval] = key, computed
        else:
            key, arrays = self._computed.pop((event.server, event.interval))
            server = self.servers[event.server]
            work = server.works[key.step, key.direction]
            if work.pushes and work.weights:
                gradients = add_gradients(arrays[0].gradients, arrays[1].gradients)
                owner = server_of(key, self._parameters)
                owner.gradients(key.interval, key.epoch, key.step, gradients)
            results = [server.submit(key, half, arrays[half].rows) for half in (0, 1)]
            assert results[-1] is SubmitResult.LAST, f"task {key} is not over with all it gives"
            self._finish(event.server, event.interval)

    def _move(self, number: int, interval: int) -> None:
        server = self.servers[number]
        epoch, task = self.progress[number].start(interval)
        if task.kind is TaskKind.WORK:
            server.open(interval, epoch, task)
            self._waiting[number, interval] = server.key_of(interval, epoch, task)
            return
        if task.kind in EXCHANGED:
            for peer, arrays in server.halo_messages(interval, task):
                self.servers[peer].receive(server.rank, task.kind, task.step, arrays)
        else:
            server.compute(interval, epoch, task)
        self._finish(number, interval)

    def _finish(self, number: int, interval: int) -> None:
        progress = self.progress[number]
        if not progress.finish(interval):
            return
        is_awaited, counted = progress.news()
        if counted is not None:
            self._unannounced.append((number, counted))
        for peer in self.progress:
            if is_awaited and peer is not progress:
                peer.record_position(number, progress.floor)
