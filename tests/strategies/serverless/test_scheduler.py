"""Staleness bounds and barriers: the interval that may proceed, and the switch to synchronous epochs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dglx_dist.errors import ConfigError
from dglx_dist.strategies.serverless.cost import prices
from dglx_dist.strategies.serverless.graph_server import Barrier, TaskKind, epoch_schedule
from dglx_dist.strategies.serverless.options import LambdaOptions, read_lambda_options
from dglx_dist.strategies.serverless.scheduler import IntervalProgress
from tests.helpers import wide
from tests.strategies.serverless.programs import gat, gcn, sage

from . import cases
from .serial_scheduler import Event, SerialScheduler, choose_randomly

GCN = "AV1 f; SC1 scatter; GA2 gather |; AV2 fb; GA2 publish; SC1 send_back ,; SC1 collect |; AV1 b"
GAT = (
    "AV1 f; SC1 scatter; AE1 apply |; SM1 softmax; GA1 gather; "
    "AV2 f; SC2 scatter; AE2 apply |; SM2 softmax; GA2 gather; AV3 fb; "
    "GA2 publish; SM2 softmax_gradient; AE2 apply; SC2 send_back ,; SC2 collect |; AV2 b; "
    "GA1 publish; SM1 softmax_gradient; AE1 apply; SC1 send_back ,; SC1 collect |; AV1 b"
)
MARK = {Barrier.NONE: "", Barrier.LOCAL: " ,", Barrier.GLOBAL: " |"}


def words(program) -> str:
    return "; ".join(
        f"{program.steps[task.step].name} "
        f"{task.direction.value if task.kind is TaskKind.WORK else task.kind.value}{MARK[task.barrier]}"
        for task in epoch_schedule(program)
    )


def test_schedules_have_gradient_tasks_where_needed() -> None:
    """Layer 1 of a graph convolution has no gradient of its input; attention has one of everything."""
    assert words(gcn()) == words(sage()) == f"GA1 gather; {GCN}"
    assert words(gat()) == GAT
    assert words(gcn((5, 3))) == "GA1 gather; AV1 fb"


def progress(policy: LambdaOptions, intervals: int = 2, peers: tuple[int, ...] = (1,)) -> IntervalProgress:
    created = IntervalProgress(gcn(), policy, intervals, peers)
    created.end = 9
    return created


def go(one: IntervalProgress, interval: int, num_tasks: int) -> None:
    for _ in range(num_tasks):
        one.start(interval)
        one.finish(interval)


def test_a_scatter_waits_for_all_intervals_of_all_graph_servers() -> None:
    schedule = progress(LambdaOptions(mode="pipe"))
    go(schedule, 0, 3)
    assert schedule.startable() == [1]
    go(schedule, 1, 3)
    assert schedule.startable() == []
    assert schedule.waited_for() == schedule.behind(3) == [1]
    assert (schedule.floor, schedule.news()) == (3, (True, None))
    schedule.record_position(1, 3)
    assert schedule.startable() == [0, 1]
    go(schedule, 0, 3)
    # Gradients of halo nodes: all own intervals first; gradients of own rows: all graph servers.
    assert schedule.task_of(0)[1].kind is TaskKind.SEND_BACK
    assert schedule.startable() == [1]


def test_without_a_pipeline_every_move_waits_for_the_one_before() -> None:
    schedule = progress(LambdaOptions(mode="no_pipe"), peers=())
    go(schedule, 0, 1)
    assert schedule.startable() == [1]
    schedule.start(1)
    assert schedule.startable() == []
    schedule.finish(1)
    assert schedule.startable() == [0, 1]


def test_news_are_told_of_synchronous_epochs_only() -> None:
    schedule = progress(LambdaOptions(mode="async", staleness=5), intervals=1)
    schedule.record_position(1, 10**6)
    reports = []
    while schedule.can_start(0):
        go(schedule, 0, 1)
        reports += [schedule.floor] if schedule.news() == (True, None) else []
    assert reports == [3, 7]
    # Epoch 0 has barriers; then S more may begin before the first update.
    assert divmod(schedule.position[0], 9) == (6, 0)


def test_counts_may_come_in_any_order() -> None:
    options = LambdaOptions(mode="async", staleness=1, switch_at=0.55)
    schedule = IntervalProgress(gcn(num_train=100), options, 2, (1,), first_epoch=3)
    # Epoch 5 may be begun while one of epoch 3 is under way; then it must be known what 3 came to.
    assert [schedule.is_known(epoch) for epoch in (3, 4, 5)] == [True, True, False]
    for server, epoch, correct in ((1, 4, 50), (0, 4, 5), (0, 3, 54)):
        schedule.record_correct(server, epoch, correct)
    assert not schedule.is_known(5)
    schedule.record_correct(1, 3, 0)
    assert schedule.synchronous_from == 4 + 1 + 1
    assert [schedule.is_synchronous(epoch) for epoch in (3, 4, 5, 6)] == [True, False, False, True]
    assert schedule.is_known(99)


@pytest.mark.parametrize("staleness", [2, *wide(0)])
def test_after_the_target_epochs_are_those_of_pipe(staleness: int) -> None:
    """In random orders, in which counts are told late: plain training goes on from there."""
    epochs, switched, program = 15, set(), gcn(num_train=30)
    for seed in range(8):
        target = 10 + seed % 2
        options = {"mode": "async", "staleness": staleness, "switch_at": target / 30}
        servers, parameters = cases.servers(program, [0, 17, 40], 2, **options)
        schedule = SerialScheduler(servers, parameters, choose_randomly(seed))
        weights: dict[int, dict[str, np.ndarray]] = {}

        def keep(event: Event, weights=weights, parameters=parameters) -> None:
            if event.kind == "update":
                weights[parameters[0].updates] = cases.latest(parameters[0])

        schedule.watch = keep
        schedule.run(epochs)
        correct = [sum(server.correct(epoch) for server in servers) for epoch in range(epochs)]
        reached = [epoch for epoch in range(epochs) if correct[epoch] >= target]
        begins = reached[0] + staleness + 1 if reached else None
        assert [progress.synchronous_from for progress in schedule.progress] == [begins, begins]
        if begins is None or begins >= epochs:
            continue
        switched.add(begins)
        last = weights[begins]
        for epoch in range(begins, epochs):
            gradients = cases.plain_run("gcn", last, cases.case(), num_train=30).gradients
            last = {key: value - cases.LR * gradients[key] for key, value in last.items()}
            for key, value in weights[epoch + 1].items():
                np.testing.assert_allclose(value, last[key], rtol=1e-9, atol=1e-12)
    assert switched


def test_a_price_table_is_read_once(tmp_path: Path) -> None:
    own_table = tmp_path / "mine.json"
    own_table.write_text(prices().to_json().replace('"aws"', '"mine"'))
    options = read_lambda_options({"prices": str(own_table)})
    own_table.unlink()
    assert options.price_table.name == "mine"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mode": "fast"}, "mode='fast' must be no_pipe, pipe or async"),
        ({"staleness": 1}, "no meaning with mode='pipe'.*add mode='async'"),
        ({"staleness": -1, "mode": "async"}, "staleness=-1 must be from 0"),
        ({"switch_at": 0.9}, "leave it out"),
        ({"switch_at": 1.5, "mode": "async"}, "accuracy from 0 to 1"),
        ({"initialise": "xavier"}, "initialise='xavier' must be keep, xavier_uniform, .* or he_normal"),
        ({"intervals": 0}, "intervals=0 must be from 1"),
        ({"parameter_servers": 0}, "parameter_servers=0 must be from 1"),
        ({"intervals": True}, "must be of type int"),
        ({"stalenes": 1}, "no option 'stalenes'.*did you mean 'staleness'"),
        ({"executor": "inline", "memory_mb": 192}, "executor='inline' has no option 'memory_mb'"),
        ({"executor": "inlin"}, "did you mean 'inline'"),
        ({"prices": "awz"}, "no price table 'awz'"),
        ({"server": "c5.tiny"}, r"no server 'c5\.tiny'"),
    ],
)
def test_wrong_options_are_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_lambda_options(given)
