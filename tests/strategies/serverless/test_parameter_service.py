"""Parameter servers on real ranks beside torch in one process, their bytes, and errors when one dies."""

import functools
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from dglx_dist.comm.collectives import barrier
from dglx_dist.comm.ledger import WORKER, Ledger
from dglx_dist.comm.rpc import Rpc
from dglx_dist.comm.session import Session, start_session
from dglx_dist.comm.topology import Topology
from dglx_dist.comm.trace import Timeline
from dglx_dist.errors import ConfigError, PeerError, RemoteError
from dglx_dist.records import Array
from dglx_dist.strategies.serverless import parameter_service as ops
from dglx_dist.strategies.serverless.parameter_server import ParameterPlan, ParameterServer, assign
from dglx_dist.strategies.serverless.parameter_service import ParameterClient, ParameterService
from dglx_dist.strategies.serverless.tasks import Direction, TaskKey
from tests.helpers.ranks import run_ranks

from .programs import LINEAR_STEPS, linear, make_update
from .programs import linear_gradients as gradients_of
from .programs import linear_weights as first_weights

SHAPES = linear().weight_shapes
STEPS = [step for step, names in LINEAR_STEPS.items() if names]
SIZE = 6 + 2 + 4
make_adam = functools.partial(make_update, "Adam", list(SHAPES), lr=0.05, amsgrad=True)
SIZES = [4, 0, 7, 5, 1, 6]
"""Rows of each interval; one has none."""
EPOCHS = 4


def plain_answer() -> tuple[Sequence[Array], dict[str, Array]]:
    """Weights, and the state of the update, after all epochs in one process."""
    update, weights = make_adam(), tuple(first_weights())
    for epoch in range(EPOCHS):
        each = [
            [array for step in STEPS for array in gradients_of(interval, epoch, step)]
            for interval in range(len(SIZES))
        ]
        weights = update.apply(weights, [np.sum(item, axis=0) for item in zip(*each, strict=True)])
    return weights, update.state


def plan_of(num_servers: int, staleness: int = 0) -> ParameterPlan:
    return ParameterPlan(program=linear(), server_of_interval=assign(SIZES, num_servers), staleness=staleness)


@contextmanager
def serve(
    rpc: Rpc, plan: ParameterPlan, num_ranks: int = 1, listen: Callable[[int], None] = lambda _updates: None
) -> Iterator[tuple[ParameterService | None, ParameterClient]]:
    service = None
    if rpc.rank < plan.num_servers:
        update = make_adam()
        server = ParameterServer(plan, rpc.rank, first_weights(), update)
        service = ParameterService(rpc, server, num_ranks, Timeline())
    client = ParameterClient(rpc, plan, listen)
    try:
        yield service, client
    finally:
        if service is not None:
            service.close()
        client.close()


def push(client: ParameterClient, epoch: int = 0, *, lacking: Collection[tuple[int, int]] = ()) -> None:
    for interval in client._plan.intervals_of(0):
        for step in STEPS:
            if (interval, step) not in lacking:
                client.gradients(key_of(interval, epoch, step), gradients_of(interval, epoch, step))


def wait_for(client: ParameterClient, updates: int, within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while min(client._updates) < updates:
        client.raise_if_stopped()
        if time.monotonic() > deadline:
            raise PeerError(ops.what_misses(client._rpc, [0]))
        if time.monotonic() > deadline - within_s + 10:
            # The message of a server that stops may be lost with the server.
            ops.raise_for_silent(client._rpc, range(len(client._updates)), "waiting for an update")
        time.sleep(0.001)


def key_of(interval: int, epoch: int, step: int, direction: Direction = Direction.BACKWARD) -> TaskKey:
    return TaskKey(epoch, step, interval, direction)


def train_interval(rpc: Rpc, client: ParameterClient, interval: int, epoch: int, *, as_worker: bool) -> None:
    def call(op: str, key: TaskKey, arrays: Sequence[Array]) -> list[Array]:
        # A worker has no ledger; what this rank counts in its place is told apart by the phase.
        return rpc.call(client.server_of(interval), op, str(key), arrays, phase="stands for a worker")

    keys = [key_of(interval, epoch, step) for step in STEPS]
    for key in keys:
        call(ops.WEIGHTS, key, []) if as_worker else client.weights(key)
    for key in reversed(keys):
        arrays = gradients_of(interval, epoch, key.step)
        for _ in range(2 if interval == 3 else 1):  # once more is no harm
            if as_worker:
                call(ops.GRADIENTS, key, arrays)
            else:
                client.gradients(key, arrays)


def train(session: Session, num_servers: int, *, as_worker: bool) -> dict[str, Any]:
    plan, rpc = plan_of(num_servers), session.rpc
    num_ranks = session.topology.world_size
    before = session.ledger.snapshot()
    with serve(rpc, plan, num_ranks) as (service, client):
        barrier(session, "all serve")
        for epoch in range(EPOCHS):
            for interval in range(rpc.rank, len(SIZES), num_ranks):
                train_interval(rpc, client, interval, epoch, as_worker=as_worker)
            wait_for(client, epoch + 1)
        results = {"latest": client.latest(), "state": client.state()}
        barrier(session, "all read")
        if service is not None:
            service.server.drain()
            results["alive"] = tuple(service.server._versions)
    rows = session.ledger.since(before)
    results["bytes"] = [(row.phase, row.layer, row.source, row.destination, row.num_bytes) for row in rows]
    return results


def train_with_one_two_and_three_servers() -> list[dict[str, Any]]:
    with start_session() as session:
        results = [train(session, num_servers, as_worker=num_servers == 3) for num_servers in (1, 2, 3)]
        barrier(session, "done")
        return results


def expected_bytes(num_servers: int) -> Counter[tuple[str, int, int]]:
    """Weights |W| a pull, gradients |W| a push, sums |theta| s (P - 1) per server, direction and epoch."""
    num_bytes, each = EPOCHS * SIZE * 8, range(num_servers)
    result = Counter(
        {(ops.BETWEEN, item, second): num_bytes for item in each for second in each if item != second}
    )
    for interval, server in enumerate(assign(SIZES, num_servers).tolist()):
        asker = WORKER if num_servers == 3 else interval % 3
        if asker != server:  # what a rank asks of itself is no traffic
            result[ops.DOWN, server, asker] += num_bytes
            result[ops.UP, asker, server] += num_bytes * (2 if interval == 3 else 1)
    return result


def test_one_two_and_three_servers_train_as_one_process_does() -> None:
    by_rank = run_ranks(train_with_one_two_and_three_servers, 3)
    expected, state = plain_answer()
    for at, num_servers in enumerate((1, 2, 3)):
        results = [rank[at] for rank in by_rank]
        for result in results:
            for position, name in enumerate(SHAPES):
                np.testing.assert_allclose(result["latest"][name], expected[position], rtol=1e-12)
                assert result["latest"][name].tobytes() == results[0]["latest"][name].tobytes()
            for path, value in state.items():
                np.testing.assert_allclose(result["state"][path], value, rtol=1e-12)
        assert [result.get("alive") for result in results] == [(EPOCHS,)] * num_servers + [None] * (
            3 - num_servers
        )
        moved = Counter[tuple[str, int, int]]()
        for phase, layer, source, destination, num_bytes in (
            row for result in results for row in result["bytes"]
        ):
            if phase in (ops.BETWEEN, ops.DOWN, ops.UP):
                moved[phase, source, destination] += num_bytes
                assert phase == ops.BETWEEN or layer in STEPS
        assert +moved == expected_bytes(num_servers)


def alone() -> Rpc:
    return Rpc(0, Ledger(Topology(rank=0, world_size=1, server_of_rank=(0,))), timeout_s=30)


def test_timeout_error_names_the_missing_gradients() -> None:
    with serve(alone(), plan_of(1)) as (_, client):
        push(client, lacking=((2, 0), (4, 0), (4, 3)))
        with pytest.raises(PeerError) as caught:
            wait_for(client, 1, within_s=0.01)
    text = "epoch 0, step 0: gradients of intervals 2, 4; epoch 0, step 3: gradients of intervals 4"
    assert text in str(caught.value)
    assert "parameter server 0 on rank 0" in str(caught.value)


def test_invalid_messages_of_servers_are_refused() -> None:
    """Messages that workers must not send are in test_worker_access.py."""
    rpc = alone()
    with serve(rpc, plan_of(1)):
        for op, name, arrays, says in (
            (ops.SUMS, "0/0", [np.zeros(SIZE)], "sums of server 0"),
            (ops.SUMS, "0", [np.zeros(SIZE)], "no number and server"),
            (ops.SUMS, "0/1", [], "0 arrays"),
            (ops.UPDATED, "1/1", [], "no parameter server 1"),
        ):
            with pytest.raises(RemoteError, match=says):
                rpc.call(0, op, name, arrays, phase="test")


def test_an_update_that_fails_ends_the_waiting_and_the_service() -> None:
    rpc = alone()
    with serve(rpc, plan_of(1)) as (service, client):
        assert service is not None
        service.server._update.apply = broken  # type: ignore[method-assign]
        push(client)
        with pytest.raises(PeerError, match="parameter server 0 on rank 0 stopped: ValueError: no room"):
            wait_for(client, 1)
        with pytest.raises(RemoteError, match="no room"):
            client.weights(key_of(0, 0, 0))
        with pytest.raises(PeerError, match="no room"):
            service.raise_if_stopped()


class Answered:
    """In the place of a call to a rank that is not there."""

    def __init__(self, arrays: list[Array]) -> None:
        self._arrays = arrays

    def result(self, _timeout_s: float | None = None) -> list[Array]:
        return self._arrays


@pytest.mark.parametrize(
    ("dead", "says"),
    [
        ([1], "no answer of parameter server 1 on rank 1 while waiting for its sums of epoch 0"),
        ([], "parameter server 1 on rank 1 sent no sums of epoch 0 within 0.02 s; .* waits for all of it"),
    ],
)
def test_sums_that_do_not_come_are_named(dead: list[int], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rpc = alone()
    myself = rpc.submit

    def submit(rank: int, op: str, name: str, arrays: Sequence[Array], **counted: Any) -> Any:
        if rank == 0:
            return myself(rank, op, name, arrays, **counted)
        return Answered([np.frombuffer(b"all of it", np.uint8)] if op == ops.MISSING else [])

    monkeypatch.setattr(rpc, "submit", submit)
    monkeypatch.setattr(rpc, "find_silent", lambda ranks, _: [rank for rank in ranks if rank in dead])
    monkeypatch.setattr(rpc, "timeout_s", 0.02)
    with serve(rpc, plan_of(2)) as (_, client):
        push(client)
        with pytest.raises(PeerError, match=says):
            wait_for(client, 1)


def broken(_weights: Sequence[Array], _gradients: Sequence[Array], _rates: object) -> tuple[Array, ...]:
    raise ValueError("no room")


def test_a_state_comes_back_and_others_are_refused() -> None:
    state = {
        "first.weight/step": np.array(3, np.float32),
        "first.weight/exp_avg": np.ones((2, 3)),
        "first.bias/exp_avg": np.zeros(2),
    }
    table, numbers = ops.pack_state(state)
    result = ops.unpack_state(plan_of(1), [table, numbers])
    assert list(result) == list(state)
    assert all(np.array_equal(result[path], value) for path, value in state.items())
    for bad in (
        [],
        [table],
        [table, numbers[:9]],
        [table[:-1], numbers],
        ops.pack_state({"x/step": np.ones(1)}),
    ):
        with pytest.raises(ConfigError, match="state cannot be read"):
            ops.unpack_state(plan_of(1), bad)


def test_listeners_hear_of_each_update_once() -> None:
    rpc, heard, all_heard = alone(), [], threading.Event()

    def listen(updates: int) -> None:
        heard.append(updates)
        if updates == 2:
            all_heard.set()

    with serve(rpc, plan_of(1, staleness=1), listen=listen) as (_, client):
        for epoch in (1, 0):
            push(client, epoch)
        wait_for(client, 2)
        assert all_heard.wait(20)
    assert heard == [1, 2]
    with pytest.raises(RemoteError, match="no operation"):
        rpc.call(0, ops.LATEST, "", [], phase="test")
