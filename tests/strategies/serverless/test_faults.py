"""Faults under dx.fit: failed workers leave no trace, and a dead rank ends the job, which resumes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dglx_dist as dx
from dglx_dist.comm.session import current_session
from dglx_dist.errors import DglxError
from dglx_dist.records import EpochRecord
from dglx_dist.strategies.serverless.tasks import Direction, TaskKey, kernels
from dglx_dist.strategies.serverless.worker import TaskPhase
from dglx_dist.strategies.serverless.worker_process import Fault
from dglx_dist.training.fit_config import FitConfig, FitResult
from tests.helpers import wait_for_checkpoints
from tests.helpers.ranks import start_ranks
from tests.strategies import equality
from tests.strategies.serverless.faults import strike
from tests.strategies.serverless.servers import other_capability

EPOCHS, INTERVALS = 3, 3


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=equality.RATE, momentum=0.9)


def train(folder: Path, config: FitConfig, **options: Any) -> tuple[list[Any], FitResult]:
    with dx.init("lambda", timeout=30, intervals=INTERVALS, workers=2, **options):
        g = dx.DistGraph(folder)
        model, result = dx.fit(equality.model_of("sage", g), g, config=config, make_optimizer=sgd)
        return [parameter.detach().numpy().copy() for parameter in model.parameters()], result


def plain(epochs: int) -> FitConfig:
    return FitConfig(epochs=epochs, eval_every=0, show_progress=False)


@pytest.fixture(scope="module")
def faultless(folder: Path) -> list[Any]:
    return train(folder, plain(EPOCHS), executor="inline")[0]


def first_attempts() -> list[TaskKey]:
    """Return the keys of the first run with two layers: AV forward, fused last AV, AV backward."""
    kinds = ((2, Direction.FORWARD), (5, Direction.FUSED), (2, Direction.BACKWARD))
    return [
        TaskKey(epoch, step, interval, direction, 1)
        for epoch in range(EPOCHS)
        for interval in range(INTERVALS)
        for step, direction in kinds
    ]


def fault_of(key: TaskKey, attempt: int) -> Fault | None:
    """Kill in every phase, once a second attempt as well; pauses after which a task is given up."""
    number = first_attempts().index(key)
    place = list(TaskPhase)[number // 4 % len(TaskPhase)]
    if number % 4 == 1 and attempt <= (number == 1):
        return Fault(place=place)
    return Fault(place=place, seconds=0.7) if number % 9 == 6 and attempt == 0 else None


@pytest.mark.parametrize("executor", ["local", "inline"])
def test_failed_calls_do_not_change_the_weights(
    executor: str, folder: Path, faultless: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    strike(monkeypatch, fault_of, lambda key, attempt: first_attempts().index(key) % 9 == 3 and not attempt)
    weights, result = train(folder, plain(EPOCHS), executor=executor)
    assert all(np.array_equal(first, second) for first, second in zip(faultless, weights, strict=True))
    killed = [
        fault
        for key in first_attempts()
        for attempt in (0, 1)
        if (fault := fault_of(key, attempt)) is not None and fault.seconds is None
    ]
    account: dict[str, Any] = result.account
    # Who dies at the end has done its task.
    assert account["relaunched"] >= sum(fault.place is not TaskPhase.END for fault in killed)
    # All tasks of the run, each attempt counted.
    assert account["invocations"] == len(first_attempts()) + account["relaunched"]


@pytest.mark.wide
def test_a_run_of_unlike_kernels_says_so_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def warnings(executor: str) -> list[str]:
        caplog.clear()
        train(folder, FitConfig(epochs=2, eval_every=1, show_progress=False), executor=executor)
        return [record.getMessage() for record in caplog.records if "kernels" in record.getMessage()]

    capability = other_capability()
    # torch of this process is loaded, and has its kernels; workers take those that the variable says.
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", capability)
    assert warnings("inline") == []
    (message,) = warnings("local")
    assert kernels() in message
    assert capability.upper() in message


def saving(saved: Path, **more: Any) -> FitConfig:
    return FitConfig(epochs=EPOCHS, eval_every=1, checkpoint_folder=saved, show_progress=False, **more)


def until_death(folder: str, saved: str) -> str:
    """Rank 1, a graph server and a parameter server, dies after the second epoch; what rank 0 says."""

    def die(record: EpochRecord) -> None:
        if record.epoch == 1 and current_session().topology.rank == 1:
            wait_for_checkpoints(saved, 2)
            os._exit(3)

    session = dx.init("lambda", timeout=20, executor="inline", intervals=2, workers=2, parameter_servers=2)
    g = dx.DistGraph(folder)
    with pytest.raises(DglxError) as caught:
        dx.fit(
            equality.model_of("sage", g), g, config=saving(Path(saved)), make_optimizer=sgd, callbacks=[die]
        )
    session.close(failed=True)
    return str(caught.value)


def test_a_dead_graph_and_parameter_server_is_named_and_the_job_resumes(
    folder: Path, faultless: list[Any], tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    outcomes = start_ranks(until_death, 2, args=(str(folder), str(saved)), timeout_s=120)
    assert outcomes[1].exitcode == 3
    assert "rank 1" in outcomes[0].result
    # Any number of ranks goes on; sums in another order are those of a run that never died but for rounding.
    weights, result = train(folder, saving(saved, resume=True), executor="inline")
    assert result.first_epoch == 2
    for local, expected in zip(weights, faultless, strict=True):
        assert np.abs(local - expected).max() < 1e-12
