"""Asynchronous training becomes synchronous at the same epoch everywhere, which nobody has begun before."""

import numpy as np
import pytest

from dglx_dist.errors import ConfigError
from dglx_dist.strategies.serverless.options import LambdaOptions, StalenessPolicy
from dglx_dist.strategies.serverless.scheduler import SyncSwitch
from tests.helpers import wide

from . import cases
from .serial_scheduler import Event, EventKind, SerialScheduler, seeded


def test_the_least_count_that_has_the_accuracy() -> None:
    for accuracy, num_train, count in ((0.9, 10, 9), (0.55, 100, 55), (0.29, 100, 29), (1, 7, 7)):
        options = LambdaOptions(mode="async", switch_at=accuracy)
        assert options.staleness_policy(0, num_train).target == count, accuracy
    assert LambdaOptions(mode="async").staleness_policy(0, 10).target is None


def test_counts_may_come_in_any_order() -> None:
    policy = StalenessPolicy(mode="async", staleness=1, first_epoch=3, target=10)
    switch = SyncSwitch(policy, 2)
    # Epoch 5 may be begun while one of epoch 3 is under way; then it must be known what 3 came to.
    assert [switch.is_known(epoch) for epoch in (3, 4, 5)] == [True, True, False]
    switch.record(1, 4, 9)
    switch.record(0, 4, 1)
    switch.record(0, 3, 9)
    assert switch.missing() == [1]
    assert not switch.is_known(5)
    switch.record(1, 3, 0)
    assert policy.synchronous_from == 4 + 1 + 1
    assert switch.is_known(99)
    assert switch.has_decided(99)
    with pytest.raises(ConfigError, match="graph server 2 of 2 counted"):
        switch.record(2, 5, 1)


def test_nothing_waits_where_nobody_asks() -> None:
    switch = SyncSwitch(StalenessPolicy(mode="async", staleness=2), 4)
    assert switch.is_known(7)
    assert switch.has_decided(7)


@pytest.mark.parametrize("staleness", [2, *wide(0)])
def test_after_the_target_epochs_are_those_of_pipe(staleness: int) -> None:
    """In random orders, in which counts are told late: plain training goes on from there."""
    epochs, switched = 15, set()
    for seed in range(8):
        servers, parameters = cases.servers(cases.gcn(), [0, 17, 40], 2, staleness=staleness)
        target = 10 + seed % 2
        policy = StalenessPolicy(mode="async", staleness=staleness, target=target)
        schedule = SerialScheduler(servers, parameters, policy, seeded(seed))
        weights: dict[int, dict[str, np.ndarray]] = {}

        def keep(event: Event, weights=weights, parameters=parameters) -> None:
            if event.kind is EventKind.UPDATE:
                weights[parameters[0].updates] = cases.latest(parameters[0])

        schedule.watch = keep
        schedule.run(epochs)
        found = [sum(server.correct(epoch) for server in servers) for epoch in range(epochs)]
        reached = [epoch for epoch in range(epochs) if found[epoch] >= target]
        begins = reached[0] + staleness + 1 if reached else None
        assert [one.policy.synchronous_from for one in schedule.progress] == [begins, begins]
        if begins is None or begins >= epochs:
            continue
        switched.add(begins)
        last = weights[begins]
        for epoch in range(begins, epochs):
            gradients = cases.plain_run(cases.gcn(), last, cases.case()).gradients
            last = {key: value - cases.LR * gradients[key] for key, value in last.items()}
            for key, value in weights[epoch + 1].items():
                np.testing.assert_allclose(value, last[key], rtol=1e-9, atol=1e-12)
    assert switched
