"""Schedulers, further optimizers and averaged weights in checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from dglx_dist.comm.session import current_session, start_session
from dglx_dist.errors import CheckpointError
from dglx_dist.training import checkpoint
from tests.helpers.ranks import run_ranks

_SCHEDULERS: dict[str, Any] = {
    "step": lambda o: lr_scheduler.StepLR(o, 2, 0.1),
    "milestones": lambda o: lr_scheduler.MultiStepLR(o, [1, 4], 0.1),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 7),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.5, 9),
    "in turn": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
}


def _build() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 2)
    return model, torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)


def _rates(scheduler: Any, optimizer: torch.optim.Optimizer) -> list[float]:
    rates = []
    for _ in range(4):
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize("name", _SCHEDULERS)
def test_resumes_schedulers_as_if_never_interrupted(tmp_path: Path, name: str) -> None:
    model, optimizer = _build()
    scheduler = _SCHEDULERS[name](optimizer)
    _rates(scheduler, optimizer)
    with start_session():
        checkpoint.save(tmp_path, model=model, optimizer=optimizer, state={"scheduler": scheduler})
        undisturbed = _rates(scheduler, optimizer)
        model, optimizer = _build()
        scheduler = _SCHEDULERS[name](optimizer)
        checkpoint.load(tmp_path, model=model, optimizer=optimizer, state={"scheduler": scheduler})
    assert _rates(scheduler, optimizer) == undisturbed


def test_resumes_plateau_optimizers_and_averages(tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]:
        torch.manual_seed(0)
        model, optimizer = _build()
        return (
            model,
            optimizer,
            {
                "plateau": lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
                "second": torch.optim.Adam([nn.Parameter(torch.ones(3))], lr=0.1),
                "average": torch.optim.swa_utils.AveragedModel(model),
                "scaler": torch.amp.GradScaler("cpu", init_scale=8.0),
            },
        )

    model, optimizer, state = build()
    second = state["second"]
    second.param_groups[0]["params"][0].grad = torch.ones(3)
    second.step()
    with torch.no_grad():
        model.weight.add_(1.0)
    state["average"].update_parameters(model)
    for value in (1.0, 2.0):
        state["plateau"].step(value)
    with start_session():
        checkpoint.save(tmp_path, model=model, optimizer=optimizer, state=state)
        model, optimizer, fresh = build()
        checkpoint.load(tmp_path, model=model, optimizer=optimizer, state=fresh)
    assert (fresh["plateau"].best, fresh["plateau"].num_bad_epochs) == (1.0, 1)
    assert fresh["second"].state_dict()["state"][0]["exp_avg"].tolist() == pytest.approx([0.1] * 3)
    assert torch.equal(fresh["average"].module.weight, state["average"].module.weight)
    assert fresh["scaler"].get_scale() == 8.0


class _Holder:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def test_refuses_state_that_differs_or_cannot_be_saved(tmp_path: Path) -> None:
    model, optimizer = _build()
    with start_session():
        for state, message in (
            ({"mine": _Holder([1, print])}, r"state\['mine'\]\['value'\]\[1\] is of type builtin"),
            ({"mine": 3}, "is a int. Pass objects with state_dict"),
        ):
            with pytest.raises(CheckpointError, match=message):
                checkpoint.save(tmp_path, model=model, state=state)  # type: ignore[arg-type]
        checkpoint.save(tmp_path, model=model, optimizer=optimizer, state={"mine": _Holder(1)})
        for inputs, message in (
            ({}, r"has state of \['mine'\], but state= has \[\]"),
            ({"state": {"mine": _Holder(0), "other": _Holder(0)}}, r"state= has \['mine', 'other'\]"),
            ({"state": {"mine": nn.Linear(1, 1)}}, "is a _Holder, not a Linear"),
        ):
            with pytest.raises(CheckpointError, match=message):
                checkpoint.load(tmp_path, model=model, optimizer=optimizer, **inputs)
        checkpoint.load(tmp_path, model=model)


def _save_states_of_ranks(folder: str) -> None:
    start_session(timeout_s=60)
    rank = current_session().topology.rank
    model, optimizer = _build()
    state = {"mine": _Holder(torch.full((2,), rank)), "same": _Holder({"text": "a", 3: (None, 0.5)})}
    checkpoint.save(folder, model=model, optimizer=optimizer, state=state)
    loaded = {"mine": _Holder(None), "same": _Holder(None)}
    checkpoint.load(folder, model=model, optimizer=optimizer, state=loaded)
    assert loaded["mine"].value.tolist() == [rank, rank]
    assert loaded["same"].value == {"text": "a", 3: (None, 0.5)}


def test_each_rank_resumes_its_own_state(tmp_path: Path) -> None:
    run_ranks(_save_states_of_ranks, 2, args=(str(tmp_path),))
    model, optimizer = _build()
    state = {"mine": _Holder(None), "same": _Holder(None)}
    with start_session(), pytest.raises(CheckpointError, match="on 2 ranks of strategy"):
        checkpoint.load(tmp_path, model=model, optimizer=optimizer, state=state)


def test_loads_the_newest_checkpoint_of_a_run_folder(tmp_path: Path) -> None:
    model, _ = _build()
    with start_session():
        saved = checkpoint.save(tmp_path / "checkpoints", model=model, epoch=2)
        assert checkpoint.load(tmp_path, model=model).path == saved
