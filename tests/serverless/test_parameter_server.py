"""The parameter server without sockets: orders, versions, stashes, duplicates, refusals."""

import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from dglx_dist.errors import ConfigError
from dglx_dist.records import Array
from dglx_dist.serverless.parameter_server import ParameterPlan, ParameterServer, assign, exchange
from dglx_dist.serverless.parameter_updates import make_update

from .programs import gcn

SHAPES = {"w1": (3, 2), "b1": (2,), "w2": (2, 2)}
# Step 2 shares w1 with step 1 and step 3 has no weights.
STEPS: dict[int, tuple[str, ...]] = {1: ("w1", "b1"), 2: ("w1",), 3: (), 4: ("w2",)}
GROUPS = [{"lr": 0.1, "momentum": 0.9, "params": list(SHAPES)}]


def plan_of(num_intervals: int = 5, **settings: Any) -> ParameterPlan:
    num_servers = settings.get("num_servers", 1)
    sizes = [7 * interval % 5 for interval in range(num_intervals)]
    given: dict[str, Any] = {"shapes": SHAPES, "dtype": np.dtype(np.float32), "steps": STEPS}
    given["server_of_interval"] = assign(sizes, num_servers)
    return ParameterPlan(**{**given, **settings})


def first_weights() -> list[Array]:
    draw = np.random.default_rng(0)
    return [draw.standard_normal(shape).astype(np.float32) for shape in SHAPES.values()]


def servers_of(plan: ParameterPlan) -> list[ParameterServer]:
    update = lambda: make_update("SGD", GROUPS, list(SHAPES))  # noqa: E731
    return [ParameterServer(plan, index, first_weights(), update()) for index in range(plan.num_servers)]


@functools.cache
def gradients_of(interval: int, epoch: int, step: int) -> list[Array]:
    draw = np.random.default_rng([interval, epoch, step])
    return [draw.standard_normal(SHAPES[name]).astype(np.float32) for name in STEPS[step]]


def bits(arrays: Sequence[Array]) -> list[bytes]:
    return [array.tobytes() for array in arrays]


def plain_answer(plan: ParameterPlan, epochs: int) -> list[bytes]:
    return answer_for(tuple(plan.server_of_interval.tolist()), plan.num_servers, epochs)


@functools.cache
def answer_for(server_of: tuple[int, ...], num_servers: int, epochs: int) -> list[bytes]:
    """Sums in the order of servers, steps, intervals; SGD with momentum, whose update is tested elsewhere."""
    update, weights = make_update("SGD", GROUPS, list(SHAPES)), tuple(first_weights())
    for epoch in range(epochs):
        total = None
        for server in range(num_servers):
            of_server: dict[str, Array] = {}
            for step, names in STEPS.items():
                of_step: dict[str, Array] = {}
                for interval in [at for at, one in enumerate(server_of) if one == server]:
                    for name, value in zip(names, gradients_of(interval, epoch, step), strict=True):
                        of_step[name] = of_step[name] + value if name in of_step else value
                for name, value in of_step.items():
                    of_server[name] = of_server[name] + value if name in of_server else value
            parts = [of_server[name] for name in SHAPES]
            total = parts if total is None else [a + b for a, b in zip(total, parts, strict=True)]
        assert total is not None
        weights = update.apply(weights, total)
    return bits(weights)


class Schedule:
    """Intervals go through their epochs in a random order, with gate, duplicates and deaths as in a run."""

    def __init__(self, plan: ParameterPlan, epochs: int, seed: int) -> None:
        self.plan, self.epochs, self.draw = plan, epochs, np.random.default_rng(seed)
        self.servers = servers_of(plan)
        self.epoch = dict.fromkeys(range(plan.num_intervals), 0)
        self.todo: dict[int, list[int]] = {interval: [] for interval in self.epoch}
        self.seen: dict[tuple[int, int], list[bytes]] = {}
        self.sent: list[tuple[int, int, int]] = []

    def run(self) -> None:
        while self.epoch:
            self.check_bounds()
            if self.draw.random() < 0.3:
                exchange(self.servers)
            updates = self.servers[0].updates
            gate = updates + self.plan.staleness
            able = [one for one, epoch in self.epoch.items() if self.todo[one] or epoch <= gate]
            if not able:
                assert exchange(self.servers) == updates + 1
                continue
            self.go_on(able[int(self.draw.integers(len(able)))])
        while self.servers[0].updates < self.epochs:
            assert exchange(self.servers) is not None

    def go_on(self, interval: int) -> None:
        epoch, server = self.epoch[interval], self.server_of(interval)
        if not self.todo[interval]:
            self.todo[interval] = [int(step) for step in self.draw.permutation(list(STEPS))]
            self.seen[interval, epoch] = bits(server.weights(interval, epoch, 1))
            assert server.stashes[interval][1] >= epoch - self.plan.staleness
        step = self.todo[interval].pop()
        assert bits(server.weights(interval, epoch, 1)) == self.seen[interval, epoch]
        assert server.gradients(interval, epoch, step, gradients_of(interval, epoch, step))
        if step != 3:
            self.sent.append((interval, epoch, step))
        again = self.sent[int(self.draw.integers(len(self.sent)))] if self.sent else None
        if again is not None and self.draw.random() < 0.2:
            assert not self.server_of(again[0]).gradients(*again, gradients_of(*again))
        if not self.todo[interval]:
            # The worker died after its last push: another one asks for the same weights.
            assert bits(server.weights(interval, epoch, 1)) == self.seen[interval, epoch]
            self.epoch[interval] += 1
            if self.epoch[interval] == self.epochs:
                del self.epoch[interval]

    def server_of(self, interval: int) -> ParameterServer:
        return self.servers[int(self.plan.server_of_interval[interval])]

    def check_bounds(self) -> None:
        for server in self.servers:
            assert len(server.alive) <= self.plan.staleness + 2
            assert set(server.stashes) <= set(self.plan.intervals_of(server.index))


def test_hundreds_of_orders_leave_the_same_bits_and_nothing_behind() -> None:
    versions_seen = set()
    for seed in range(360):
        staleness, num_servers = seed % 3, 1 + seed // 3 % 3
        plan = plan_of(3 + seed % 4, staleness=staleness, num_servers=num_servers)
        schedule = Schedule(plan, epochs=3, seed=seed)
        schedule.run()
        expected = plain_answer(plan, 3)
        for server in schedule.servers:
            assert bits(server.latest()) == expected
            assert server.updates == 3
            versions_seen |= {(staleness, version - epoch) for epoch, version in server.stashes.values()}
            server.drain()
            assert server.alive == (3,)
            assert not server.stashes
    # The orders do reach old versions: otherwise they would show nothing.
    assert {(1, -1), (2, -2), (2, 0)} <= versions_seen


def test_equal_versions_are_shared() -> None:
    (server,) = servers_of(plan_of(staleness=1))
    first, second = server.weights(0, 0, 1), server.weights(1, 0, 1)
    assert all(a is b for a, b in zip(first, second, strict=True))
    assert server.alive == (0,)


def finish(server: ParameterServer, epoch: int) -> None:
    for interval in server.plan.intervals_of(server.index):
        for step in STEPS:
            server.gradients(interval, epoch, step, gradients_of(interval, epoch, step))


def test_a_duplicate_with_other_bits_is_an_error() -> None:
    (server,) = servers_of(plan_of())
    server.gradients(0, 0, 4, gradients_of(0, 0, 4))
    other = [value + np.float32(1e-6) for value in gradients_of(0, 0, 4)]
    with pytest.raises(ConfigError, match="interval 0, epoch 0, step 4 came twice with different bits"):
        server.gradients(0, 0, 4, other)
    finish(server, 0)
    assert exchange([server]) == 1
    with pytest.raises(ConfigError, match="twice with different bits"):
        server.gradients(0, 0, 4, other)
    assert bits(server.latest()) == plain_answer(server.plan, 1)


def test_what_is_not_asked_for_is_refused() -> None:
    plan = plan_of(num_servers=2, staleness=1)
    first, second = servers_of(plan)
    mine, other = plan.intervals_of(0)[0], plan.intervals_of(1)[0]
    good = gradients_of(mine, 0, 4)
    wrong: list[tuple[tuple[int, int, int], list[Array], str]] = [
        ((other, 0, 4), good, "is of parameter server 1"),
        ((9, 0, 4), good, "no interval 9"),
        ((-1, 0, 4), good, "no interval -1"),
        ((mine, -1, 4), good, "epoch -1"),
        ((mine, 2, 4), good, "beyond staleness 1"),
        ((mine, 0, 0), good, "step 0"),
        ((mine, 0, 4), [*good, *good], "2 arrays for 1"),
        ((mine, 0, 4), [good[0].astype(np.float64)], "float64 of shape"),
        ((mine, 0, 4), [good[0][:1]], r"shape \(1, 2\)"),
    ]
    for key, arrays, says in wrong:
        with pytest.raises(ConfigError, match=says):
            first.gradients(*key, arrays)
    for key in ((other, 0, 4), (9, 0, 4), (mine, 2, 4), (mine, 0, 0)):
        with pytest.raises(ConfigError):
            first.weights(*key)
    vector = np.zeros(plan.size, np.float32)
    for sender, epoch, sums in ((0, 0, vector), (2, 0, vector), (1, 3, vector), (1, 0, vector[:1])):
        with pytest.raises(ConfigError, match="server"):
            first.receive_sums(sender, epoch, sums)
    assert first.missing() == second.missing().replace(str(other), str(mine)) or "step 1" in first.missing()
    finish(first, 0)
    assert exchange([first, second]) is None
    assert first.servers_missing() == [1]
    assert first.missing() == ""
    assert f"epoch 0, step 1: gradients of intervals {other}" in second.missing()


def test_weights_of_an_epoch_that_is_over_are_gone() -> None:
    (server,) = servers_of(plan_of(staleness=0))
    for interval in range(5):
        server.weights(interval, 0, 1)
    finish(server, 0)
    with pytest.raises(ConfigError, match="epoch 0 is under way"):
        server.drain()
    assert exchange([server]) == 1
    stash = server.weights(0, 0, 1)
    assert bits(stash) == bits(first_weights()[:2])
    server.weights(0, 1, 1)
    with pytest.raises(ConfigError, match="a worker that was given up"):
        server.weights(0, 0, 1)
    server.drain()
    with pytest.raises(ConfigError, match="gone after 1 updates"):
        server.weights(1, 0, 1)


def test_many_threads_may_push_and_pull() -> None:
    plan = plan_of(32, staleness=2)
    (server,) = servers_of(plan)

    def work(interval: int) -> int:
        for epoch in range(3):
            for step in STEPS:
                server.weights(interval, epoch, step)
                server.gradients(interval, epoch, step, gradients_of(interval, epoch, step))
        return interval

    with ThreadPoolExecutor(8) as pool:
        done = [pool.submit(work, interval) for interval in reversed(range(32))]
        while server.updates < 3 and not all(one.done() for one in done):
            exchange([server])
        assert [one.result() for one in done] == list(reversed(range(32)))
    while exchange([server]) is not None:
        pass
    assert bits(server.latest()) == plain_answer(plan, 3)


def test_a_plan_is_made_from_a_program() -> None:
    program = gcn()
    plan = ParameterPlan.of(program, assign([2, 3], 2), num_servers=2, staleness=1, first_epoch=4)
    assert plan.shapes == program.weight_shapes
    assert set(plan.steps) == set(program.vertex_steps)
    assert sorted(name for names in plan.steps.values() for name in names) == sorted(plan.shapes)
    assert (plan.num_servers, plan.staleness, plan.first_epoch) == (2, 1, 4)


def test_going_on_from_a_later_epoch() -> None:
    (server,) = servers_of(plan_of(first_epoch=7))
    assert server.updates == 7
    server.weights(0, 7, 1)
    finish(server, 7)
    assert exchange([server]) == 8


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"dtype": np.dtype(np.float16)}, "float16"),
        ({"steps": {1: ("w1", "w9")}}, "w9"),
        ({"steps": {1: ("w1",)}}, "no step uses b1, w2"),
        ({"staleness": -1}, "staleness=-1"),
        ({"server_of_interval": np.zeros(5, np.int64), "num_servers": 2}, "not each of 2"),
    ],
    ids=str,
)
def test_plans_that_make_no_sense_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        plan_of(**{"num_servers": 1, **settings})


def test_first_weights_and_update_must_be_the_plans() -> None:
    update = make_update("SGD", GROUPS, list(SHAPES))
    with pytest.raises(ConfigError, match="first weights"):
        ParameterServer(plan_of(), 0, first_weights()[:2], update)
    with pytest.raises(ConfigError, match="the update is of"):
        ParameterServer(plan_of(), 0, first_weights(), make_update("SGD", [], ["a"]))


def test_intervals_go_to_the_lightest_server() -> None:
    assert assign([5, 9, 4, 1], 2).tolist() == [1, 0, 1, 0]
    assert assign([0, 0, 0], 3).tolist() == [0, 1, 2]
    assert assign([3, 3, 3, 3], 1).tolist() == [0, 0, 0, 0]
    for servers in (0, 3):
        with pytest.raises(ConfigError, match=f"parameter_servers={servers}"):
            assign([1, 2], servers)
