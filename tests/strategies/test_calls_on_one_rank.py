"""Collective calls on rank 0 alone: waiting ranks report them at once, and not after the time-out."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dglx_dist as dx
from tests.api.test_loop_habits import STRATEGIES, Net, call_model, loader_of, plain_graph
from tests.helpers import wide
from tests.helpers.ranks import start_ranks


def validate(model: Any, loader: Any, blocks: Any) -> None:
    with torch.no_grad():
        for _, _, batch in loader:
            call_model(batch, model)


ALONE: dict[str, Callable[[Any, Any, Any], object]] = {
    "state_dict": lambda model, loader, blocks: model.state_dict(),
    "whole": lambda model, loader, blocks: model.whole(),
    "call": lambda model, loader, blocks: torch.no_grad()(call_model)(blocks, model),
    "validation": validate,
}


def call_on_rank_0(strategy: str, call: str, epochs: int) -> None:
    with dx.init(strategy=strategy, seed=0, timeout=20, **STRATEGIES[strategy]) as session:
        g = dx.distribute(plain_graph(), parts=2)
        model = dx.wrap(Net(), g)
        loader, validation = loader_of(g), loader_of(g)
        for _ in range(epochs):
            for _, _, blocks in loader:
                call_model(blocks, model).sum().backward()
            if session.topology.rank == 0:
                ALONE[call](model, validation, blocks)


@pytest.mark.parametrize("epochs", [1, *wide(2)])
@pytest.mark.parametrize(
    ("strategy", "call"),
    [
        *(("push_pull", call) for call in ("state_dict", "validation")),
        ("full_graph", "validation"),
        *wide(*(("push_pull", call) for call in ("whole", "call"))),
    ],
)
def test_names_the_calls_that_every_rank_must_make(strategy: str, call: str, epochs: int) -> None:
    outcomes = start_ranks(call_on_rank_0, 2, args=(strategy, call, epochs), timeout_s=100)
    assert "move such calls out of `if rank == 0`" in "".join(
        outcome.error + outcome.output for outcome in outcomes
    )


def stop_early_on_rank_0(strategy: str) -> None:
    with dx.init(strategy=strategy, seed=0, timeout=20, **STRATEGIES[strategy]) as session:
        g = dx.distribute(plain_graph(), parts=2)
        model, loader = dx.wrap(Net(), g), loader_of(g)
        for epoch in range(3):
            for _, _, blocks in loader:
                call_model(blocks, model).sum().backward()
            if session.topology.rank == 0 and epoch == 1:
                break


@pytest.mark.parametrize("strategy", ["data_parallel", *wide("push_pull", "full_graph")])
def test_names_the_rank_whose_loop_ended_early(strategy: str) -> None:
    outcomes = start_ranks(stop_early_on_rank_0, 2, args=(strategy,), timeout_s=100)
    shown = "".join(outcome.error + outcome.output for outcome in outcomes)
    assert "end the training loop after the same step on every rank" in shown
    assert "dx.reduce_mean" in shown


def call_unwrapped() -> str:
    with dx.init(strategy="push_pull", timeout=30):
        g = dx.distribute(plain_graph(), parts=2)
        net: nn.Module = Net()
        try:
            for _, _, blocks in loader_of(g):
                call_model(blocks, net)
        except dx.errors.ConfigError as error:
            return str(error)
        return ""


def test_refuses_batches_of_columns_to_a_model_that_is_not_wrapped() -> None:
    for message in start_ranks(call_unwrapped, 2):
        assert "Net was called on a batch of push_pull" in message.result
        assert "model = dx.wrap(model, g)" in message.result
