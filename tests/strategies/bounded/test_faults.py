"""What goes wrong under dx.fit: workers leave no trace; a dead rank ends the job, which resumes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dglx_dist as dx
from dglx_dist.cluster.session import current_session
from dglx_dist.errors import DglxError
from dglx_dist.records import EpochRecord
from dglx_dist.training.fit import FitConfig, FitResult
from tests.helpers.ranks import run_ranks, start_ranks
from tests.strategies import equality

A_FIFTH = {"seed": 3, "kill": 0.1, "delay": 0.05, "duplicate": 0.05, "delay_s": 0.7}
"""Of the calls."""


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=equality.RATE, momentum=0.9)


def trained(folder: Path, epochs: int, **options: Any) -> tuple[list[Any], FitResult]:
    with dx.init("lambda", timeout=30, intervals=3, workers=2, **options):
        g = dx.DistGraph(folder)
        config = FitConfig(epochs=epochs, eval_every=0, show_progress=False)
        model, result = dx.fit(equality.model_of("sage", g), g, config=config, make_optimizer=sgd)
        return [parameter.detach().numpy().copy() for parameter in model.parameters()], result


def test_a_fifth_of_the_calls_may_go_wrong(tmp_path: Path) -> None:
    folder = equality.write_parts(tmp_path)
    whole, _ = trained(folder, 5, executor="inline")
    found, result = trained(folder, 5, executor="local", faults=A_FIFTH)
    assert all(np.array_equal(one, other) for one, other in zip(whole, found, strict=True))
    account: dict[str, Any] = result.account
    assert account["relaunched"] > 0
    assert account["lost"] > 0
    # All tasks of the run, each attempt counted.
    assert account["invocations"] == 5 * 3 * 3 + account["relaunched"]


def saving(folder: str, saved: str, epochs: int, dies: bool) -> Any:
    def die(record: EpochRecord) -> None:
        if dies and record.epoch == 2 and current_session().topology.rank == 1:
            os._exit(3)

    config = {"eval_every": 1, "checkpoint_folder": saved, "resume": True, "show_progress": False}
    session = dx.init("lambda", timeout=20, executor="inline", intervals=2, workers=2, parameter_servers=2)
    try:
        g = dx.DistGraph(folder)
        model, result = dx.fit(
            equality.model_of("sage", g),
            g,
            config=FitConfig(epochs=epochs, **config),  # type: ignore[arg-type]
            make_optimizer=sgd,
            callbacks=[die],
        )
    except DglxError as error:
        session.close(failed=True)
        return str(error)
    weights = [parameter.detach().numpy().copy() for parameter in model.parameters()]
    session.close()
    return result.first_epoch, weights


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return equality.write_parts(tmp_path)


def test_a_dead_graph_and_parameter_server_is_named_and_the_job_resumes(folder: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    outcomes = start_ranks(saving, 2, args=(str(folder), str(saved), 6, True), timeout_s=120)
    assert outcomes[1].exitcode == 3
    assert "rank 1" in outcomes[0].result
    resumed = run_ranks(saving, 2, args=(str(folder), str(saved), 6, False))
    assert [first for first, _ in resumed] == [3, 3]
    # As many ranks sum alike, so a run that never died would end with the same bits; one process nearly so.
    with dx.init("lambda", timeout=30, executor="inline", intervals=2):
        g = dx.DistGraph(folder)
        config = FitConfig(epochs=6, eval_every=0, show_progress=False)
        model, _ = dx.fit(equality.model_of("sage", g), g, config=config, make_optimizer=sgd)
    for mine, theirs, true in zip(resumed[0][1], resumed[1][1], model.parameters(), strict=True):
        assert np.array_equal(mine, theirs)
        assert np.abs(mine - true.detach().numpy()).max() < 1e-12
