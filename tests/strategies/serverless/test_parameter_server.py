"""The parameter server without sockets: updates, versions, stashes, duplicates, refusals."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from dglx_dist.errors import ConfigError
from dglx_dist.records import Array
from dglx_dist.strategies.serverless.parameter_server import ParameterPlan, ParameterServer, Update, assign

from .programs import LINEAR_STEPS as STEPS
from .programs import exchange, linear, make_update
from .programs import linear_gradients as gradients_of
from .programs import linear_weights as first_weights

PROGRAM = linear()
SHAPES = PROGRAM.weight_shapes
make_sgd = functools.partial(make_update, "SGD", list(SHAPES), lr=0.1, momentum=0.9)


def plan_of(num_intervals: int = 5, num_servers: int = 1, **settings: int) -> ParameterPlan:
    sizes = [7 * interval % 5 for interval in range(num_intervals)]
    return ParameterPlan(program=PROGRAM, server_of_interval=assign(sizes, num_servers), **settings)


def servers_of(plan: ParameterPlan) -> list[ParameterServer]:
    return [ParameterServer(plan, index, first_weights(), make_sgd()) for index in range(plan.num_servers)]


def bits(arrays: Iterable[Array]) -> list[bytes]:
    return [array.tobytes() for array in arrays]


def plain_answer(plan: ParameterPlan, epochs: int) -> list[bytes]:
    return answer_for(tuple(plan.server_of_interval.tolist()), plan.num_servers, epochs)


@functools.cache
def answer_for(server_of: tuple[int, ...], num_servers: int, epochs: int) -> list[bytes]:
    """Sums in the order of servers and intervals; SGD with momentum, whose update is tested elsewhere."""
    update, weights = make_sgd(), tuple(first_weights())
    for epoch in range(epochs):
        of_servers = []
        for server in range(num_servers):
            intervals = [at for at, item in enumerate(server_of) if item == server]
            parts = [gradients_of(at, epoch, 0) + gradients_of(at, epoch, 3) for at in intervals]
            of_servers.append([functools.reduce(np.add, item) for item in zip(*parts, strict=True)])
        total = [functools.reduce(np.add, item) for item in zip(*of_servers, strict=True)]
        weights = update.apply(weights, total)
    return bits(weights)


def go_through(
    servers: Sequence[ParameterServer], interval: int, epochs: int, draw: np.random.Generator
) -> Iterator[None]:
    """Take an interval through its epochs, with gate, duplicates and deaths; pause before calls."""
    plan, sent = servers[0].plan, list[tuple[int, int, int]]()
    server = servers[int(plan.server_of_interval[interval])]
    for epoch in range(epochs):
        while epoch > servers[0].updates + plan.staleness:
            yield
        seen = bits(server.weights(interval, epoch, 0))
        assert server._stash_of[interval][1] >= epoch - plan.staleness
        for step in map(int, draw.permutation(list(STEPS))):
            yield
            assert bits(server.weights(interval, epoch, 0)) == seen
            assert server.gradients(interval, epoch, step, gradients_of(interval, epoch, step))
            sent.append((interval, epoch, step))
            if sent and draw.random() < 0.2:
                again = sent[int(draw.integers(len(sent)))]
                assert not server.gradients(*again, gradients_of(*again))
        # The worker died after its last push: another one asks for the same weights.
        assert bits(server.weights(interval, epoch, 0)) == seen


def test_hundreds_of_orders_leave_the_same_bits_and_nothing_behind() -> None:
    versions_seen = set()
    for seed in range(360):
        staleness, num_servers = seed % 3, 1 + seed // 3 % 3
        plan = plan_of(3 + seed % 4, staleness=staleness, num_servers=num_servers)
        servers, draw = servers_of(plan), np.random.default_rng(seed)
        under_way = [go_through(servers, interval, 3, draw) for interval in range(plan.num_intervals)]
        while under_way:
            single = under_way[int(draw.integers(len(under_way)))]
            try:
                next(single)
            except StopIteration:
                under_way.remove(single)
            if draw.random() < 0.35:
                exchange(servers)
            for server in servers:
                assert len(server._versions) <= staleness + 2
                assert server._stash_of.keys() <= set(server._intervals)
        while servers[0].updates < 3:
            assert exchange(servers) is not None
        for server in servers:
            assert bits(server.latest()) == plain_answer(plan, 3)
            assert server.updates == 3
            versions_seen |= {(staleness, version - epoch) for epoch, version in server._stash_of.values()}
            server.drain()
            assert list(server._versions) == [3]
            assert not server._stash_of
    # The orders do reach old versions: otherwise they would show nothing.
    assert {(1, -1), (2, -2), (2, -1)} <= versions_seen


def finish(server: ParameterServer, epoch: int) -> None:
    for interval in server.plan.intervals_of(server.index):
        for step in STEPS:
            server.gradients(interval, epoch, step, gradients_of(interval, epoch, step))


def test_a_duplicate_with_other_bits_is_an_error() -> None:
    (server,) = servers_of(plan_of())
    server.gradients(0, 0, 3, gradients_of(0, 0, 3))
    second = [value + 1e-6 for value in gradients_of(0, 0, 3)]
    with pytest.raises(ConfigError, match="interval 0, epoch 0, step 3 came twice with different bits"):
        server.gradients(0, 0, 3, second)
    finish(server, 0)
    assert exchange([server]) == 1
    with pytest.raises(ConfigError, match="twice with different bits"):
        server.gradients(0, 0, 3, second)
    assert bits(server.latest()) == plain_answer(server.plan, 1)


def test_keys_of_another_server_or_epoch_are_refused() -> None:
    """More of it, and other shapes, in test_worker_access.py."""
    plan = plan_of(num_servers=2, staleness=1)
    first, second = servers_of(plan)
    own, second_one = plan.intervals_of(0)[0], plan.intervals_of(1)[0]
    with pytest.raises(ConfigError, match=f"interval {second_one} is of parameter server 1, not of 0"):
        first.gradients(second_one, 0, 3, gradients_of(second_one, 0, 3))
    with pytest.raises(ConfigError, match="beyond staleness 1"):
        first.weights(own, 2, 3)
    vector = np.zeros(plan.size)
    for sender, epoch, sums in ((0, 0, vector), (2, 0, vector), (1, 3, vector), (1, 0, vector[:1])):
        with pytest.raises(ConfigError, match="server"):
            first.receive_sums(sender, epoch, sums)
    assert (
        first.missing() == second.missing().replace(str(second_one), str(own)) or "step 0" in first.missing()
    )
    finish(first, 0)
    assert exchange([first, second]) is None
    assert first.servers_missing() == [1]
    assert first.missing() == ""
    assert f"epoch 0, step 0: gradients of intervals {second_one}" in second.missing()


def test_weights_of_an_epoch_that_is_over_are_gone() -> None:
    (server,) = servers_of(plan_of(staleness=0))
    for interval in range(5):
        server.weights(interval, 0, 0)
    finish(server, 0)
    with pytest.raises(ConfigError, match="epoch 0 is under way"):
        server.drain()
    assert exchange([server]) == 1
    stash = server.weights(0, 0, 0)
    assert bits(stash) == bits(first_weights()[:2])
    server.weights(0, 1, 0)
    with pytest.raises(ConfigError, match="a worker that was given up"):
        server.weights(0, 0, 0)
    server.drain()
    with pytest.raises(ConfigError, match="gone after 1 updates"):
        server.weights(1, 0, 0)


def test_an_update_keeps_no_version_that_nobody_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    (server,) = servers_of(plan_of(staleness=0))
    apply, before = Update.apply, []
    monkeypatch.setattr(Update, "apply", lambda *given: before.append(len(server._versions)) or apply(*given))
    for epoch in range(3):
        for interval in range(5):
            server.weights(interval, epoch, 0)
        finish(server, epoch)
        exchange([server])
    assert before == [1, 1, 1]  # and its result makes staleness + 2


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
        while server.updates < 3 and not all(item.done() for item in done):
            exchange([server])
        assert [item.result() for item in done] == list(reversed(range(32)))
    while exchange([server]) is not None:
        pass
    assert bits(server.latest()) == plain_answer(plan, 3)


def test_first_weights_must_be_the_plans() -> None:
    with pytest.raises(ConfigError, match="first weights"):
        ParameterServer(plan_of(), 0, first_weights()[:2], make_sgd())


def test_intervals_go_to_the_lightest_server() -> None:
    assert assign([5, 9, 4, 1], 2).tolist() == [1, 0, 1, 0]
    assert assign([0, 0, 0], 3).tolist() == [0, 1, 2]
    assert assign([3, 3, 3, 3], 1).tolist() == [0, 0, 0, 0]
    for servers in (0, 3):
        with pytest.raises(ConfigError, match=f"parameter_servers={servers}"):
            assign([1, 2], servers)


# More than one block and more than one vector, with a tail; a matrix; one element; a number; nothing.
UPDATE_SHAPES = {"wide": (91, 103), "row": (1, 7), "one": (1,), "number": (), "none": (0, 3)}
TORCH_UPDATES = {"SGD": torch.optim.SGD, "Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.013}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4}),
    ("SGD", {"lr": 0.1, "momentum": 0.7, "dampening": 0.3, "maximize": True}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("Adam", {"lr": 0.01}),
    ("Adam", {"lr": 0.01, "betas": (0.3, 0.99), "eps": 1e-7, "weight_decay": 0.01}),
    ("Adam", {"lr": 0.01, "amsgrad": True, "maximize": True}),
    ("AdamW", {"lr": 0.01, "weight_decay": 0.02}),
]


def start(dtype: str, seed: int = 0) -> dict[str, Array]:
    draw = np.random.default_rng(seed)
    return {name: draw.standard_normal(shape).astype(dtype) for name, shape in UPDATE_SHAPES.items()}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("kind", "settings"), CASES, ids=str)
def test_twenty_steps_are_torchs_to_the_last_bit(kind: str, settings: dict[str, Any], dtype: str) -> None:
    reference = {name: torch.nn.Parameter(torch.tensor(value)) for name, value in start(dtype).items()}
    optimizer = TORCH_UPDATES[kind](list(reference.values()), **settings)
    update = Update(optimizer, reference, list(UPDATE_SHAPES))
    weights: Sequence[Array] = tuple(start(dtype).values())
    for step in range(20):
        if step == 10:  # as from a checkpoint
            update = Update(optimizer, reference, list(UPDATE_SHAPES))
        scale = 10.0 ** (step % 7 - 5)
        gradients = [(value * scale).astype(dtype) for value in start(dtype, step + 1).values()]
        for weight, gradient in zip(reference.values(), gradients, strict=True):
            weight.grad = torch.tensor(gradient)
        optimizer.step()
        weights = update.apply(weights, gradients)
        assert bits(weights) == bits(their.detach().numpy() for their in reference.values())
    assert {(str(weight.dtype), weight.flags.writeable) for weight in weights} == {(dtype, False)}
    state = optimizer.state_dict()["state"]
    for position, name in enumerate(UPDATE_SHAPES):
        for key, value in state.get(position, {}).items():
            if value is not None:
                ours = update.state[f"{name}/{key}"]
                assert (ours.tobytes(), ours.shape) == (value.numpy().tobytes(), tuple(value.shape)), key
