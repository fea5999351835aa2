"""All graph servers in one thread: pipe is plain training; async keeps its bounds in any order of events."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from dglx_dist.strategies.serverless.graph_server import GraphServer, TaskKind
from dglx_dist.strategies.serverless.parameter_server import ParameterServer
from tests.helpers import wide

from . import cases
from .programs import CONVOLUTIONS, MODELS, gcn
from .serial_scheduler import Choice, Event, SerialScheduler, choose_randomly, first_come


def train(
    name: str,
    graph_servers: int,
    intervals: int,
    choose: Choice,
    *,
    epochs: int,
    parameter_servers: int = 1,
    **options: Any,
) -> tuple[SerialScheduler, list[ParameterServer]]:
    program, starts = cases.PROGRAMS[name](), cases.STARTS[graph_servers]
    servers, parameters = cases.servers(
        program, starts, intervals, num_parameter_servers=parameter_servers, **options
    )
    schedule = SerialScheduler(servers, parameters, choose)
    schedule.run(epochs)
    return schedule, parameters


def check_equal_to_plain(
    name: str, schedule: SerialScheduler, parameters: Sequence[ParameterServer], epochs: int
) -> None:
    weights, losses = cases.plain_answer(name, epochs)
    for server in parameters:
        for key, value in cases.latest(server).items():
            np.testing.assert_allclose(value, weights[key], rtol=1e-10, atol=1e-12, err_msg=key)
    for epoch, (loss_sum, correct) in enumerate(losses):
        results = [server.statistics(epoch) for server in schedule.servers]
        assert sum(statistics[0] for statistics in results) == pytest.approx(loss_sum, rel=1e-10)
        assert sum(statistics[1] for statistics in results) == correct


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("edge_tasks", ["workers", "servers"])
def test_any_convolution_is_plain_training(name: str, edge_tasks: str) -> None:
    trained = train(name, 3, 2, choose_randomly(5), epochs=3, parameter_servers=2, edge_tasks=edge_tasks)
    check_equal_to_plain(name, *trained, 3)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("graph_servers", cases.STARTS)
@pytest.mark.parametrize(("intervals", "parameter_servers"), [(1, 1), (3, 3), (7, 2)])
def test_pipe_is_plain_training(
    name: str, graph_servers: int, intervals: int, parameter_servers: int
) -> None:
    count, choose = min(parameter_servers, graph_servers * intervals), choose_randomly(graph_servers)
    trained = train(name, graph_servers, intervals, choose, epochs=3, parameter_servers=count)
    check_equal_to_plain(name, *trained, 3)


@pytest.mark.parametrize(
    ("name", "intervals", "options"),
    [
        ("gcn", 100, {}),
        ("sage", 3, {"mode": "no_pipe"}),
        ("gat", 2, {}),
    ],
)
def test_twenty_epochs_or_a_hundred_intervals_equal_plain_training(
    name: str, intervals: int, options: dict[str, Any]
) -> None:
    epochs, graph_servers = (2, 1) if intervals == 100 else (20, 2)
    trained = train(name, graph_servers, intervals, first_come, epochs=epochs, **options)
    check_equal_to_plain(name, *trained, epochs)


@pytest.mark.parametrize("name", [*MODELS, "EdgeConv", "NNConv"])
def test_async_without_staleness_in_order_is_pipe_to_the_bit(name: str) -> None:
    results = []
    for mode, choose in (("pipe", choose_randomly(1)), ("pipe", first_come), ("async", first_come)):
        _, parameters = train(name, 3, 3, choose, epochs=4, parameter_servers=2, mode=mode)
        results.append([value.tobytes() for value in parameters[0].latest()])
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("name", ["gat", "dropping", "NNConv", "a model of one's own"])
def test_no_pipe_changes_no_bit(name: str) -> None:
    results = []
    for mode in ("pipe", "no_pipe"):
        _, parameters = train(name, 2, 2, choose_randomly(3), epochs=2, mode=mode)
        results.append([value.tobytes() for value in parameters[0].latest()])
    assert results[0] == results[1]


class Bounds:
    """Watches a schedule and checks every bound of bounded asynchrony after each event."""

    def __init__(
        self, schedule: SerialScheduler, parameters: Sequence[ParameterServer], staleness: int
    ) -> None:
        self.schedule, self.parameters, self.staleness = schedule, parameters, staleness
        self.written: dict[tuple[int, int], int] = {}
        self.seen: dict[tuple[int, int], int] = {}
        self.versions: dict[tuple[int, int, int], int] = {}
        self.lag = self.spread = self.alive = 0
        bounds = [server.part.bounds for server in schedule.servers]
        self.sources = [sources_of(server, bounds) for server in schedule.servers]
        schedule.watch = self.look

    def look(self, event: Event) -> None:
        updates = self.parameters[0].updates
        alive = max(len(server._versions) for server in self.parameters)
        assert alive <= self.staleness + 2
        self.alive = max(self.alive, alive)
        if event.kind == "update":
            return
        server = self.schedule.servers[event.server]
        epoch, index = divmod(event.position, len(server.schedule))
        assert epoch - updates <= self.staleness
        self.spread = max(self.spread, epoch - updates)
        task, place = server.schedule[index], (event.server, event.interval)
        if task.kind is TaskKind.GATHER and task.step > 0:
            oldest = min(
                (self.value_of(place, at) for at in self.sources[event.server][event.interval]), default=epoch
            )
            self.lag = max(self.lag, epoch - oldest)
            assert epoch - oldest <= self.staleness + 1
        elif task.kind is TaskKind.SCATTER:
            self.seen[place] = epoch
        elif task.kind is TaskKind.WORK and event.kind == "submit" and index == 1:
            self.written[place] = epoch
        if event.kind == "compute":
            self.check_version(server, event, epoch)

    def value_of(self, reader: tuple[int, int], source: tuple[int, int]) -> int:
        """Epoch of the rows of ``source`` that ``reader`` sees: halo nodes are as old as the last message."""
        return (self.written if source[0] == reader[0] else self.seen)[source]

    def check_version(self, server: GraphServer, event: Event, epoch: int) -> None:
        interval = server.part.first_interval + event.interval
        (index,) = {int(self.parameters[0].plan.server_of_interval[interval])}
        for number, parameters in enumerate(self.parameters):
            stash = parameters._stash_of.get(interval)
            assert (stash is not None) == (number == index)
        stashed_epoch, version = self.parameters[index]._stash_of[interval]
        assert stashed_epoch == epoch
        key = (event.server, event.interval, epoch)
        assert self.versions.setdefault(key, version) == version
        assert epoch - self.staleness <= version <= epoch


def sources_of(server: GraphServer, bounds: Sequence[np.ndarray]) -> list[set[tuple[int, int]]]:
    """Per interval: (graph server, interval) of the sources of its in-edges, by the servers' ``bounds``."""
    part, graph = server.part, server.part.graph
    ids = np.concatenate([graph.own_ids, graph.halo])
    results = []
    for interval in range(part.num_intervals):
        some = set()
        for where in ids[graph.sources[part.edges_of(interval)]].tolist():
            owner = int(np.searchsorted(graph.starts, where, side="right") - 1)
            inside = where - graph.starts[owner]
            some.add((owner, int(np.searchsorted(bounds[owner], inside, side="right") - 1)))
        results.append(some)
    return results


SMALL = functools.partial(cases.case, 12, 30, 3)


@pytest.mark.wide
@pytest.mark.parametrize(("staleness", "runs"), [(1, 400), *wide((0, 300), (2, 300))])
def test_bounds_hold_in_a_thousand_random_schedules(staleness: int, runs: int) -> None:
    worst, epochs = {"spread": 0, "lag": 0, "alive": 0}, 2 + staleness
    program = gcn((5, 2, 3))
    for seed in range(runs):
        servers, parameters = cases.servers(
            program,
            [0, 7, 12],
            1 + (seed % 3 == 2),
            num_parameter_servers=1 + seed % 2,
            graph=SMALL(),
            mode="async",
            staleness=staleness,
        )
        schedule = SerialScheduler(servers, parameters, uneven(seed))
        bounds = Bounds(schedule, parameters, staleness)
        schedule.run(epochs)
        for server in parameters:
            server.drain()
            assert server.updates == epochs
            assert server._stash_of == {}
            assert list(server._versions) == [epochs]
        assert not any(server.open_tasks for server in servers)
        worst = {name: max(value, getattr(bounds, name)) for name, value in worst.items()}
    # The bounds are reached, so that the test would see one that is exceeded.
    assert worst == {"spread": staleness, "lag": staleness + 1, "alive": staleness + 2}


def uneven(seed: int) -> Choice:
    """A seeded choice in which one graph server, another one each time, is mostly held back."""
    draw, slow = np.random.default_rng(seed), seed % 3

    def choose(events: Sequence[Event]) -> int:
        quick = [at for at, event in enumerate(events) if event.server != slow]
        among: Sequence[int] | range = quick if quick and draw.random() < 0.9 else range(len(events))
        return int(among[int(draw.integers(len(among)))])

    return choose


def test_the_watch_sees_a_gate_that_is_left_open() -> None:
    program = gcn((5, 2, 3))
    servers, parameters = cases.servers(program, [0, 7, 12], 1, mode="async", staleness=3, graph=SMALL())
    schedule = SerialScheduler(servers, parameters, uneven(0))
    Bounds(schedule, parameters, 1)
    with pytest.raises(AssertionError):
        schedule.run(8)
