"""A step on accumulated gradients is that on the union of the batches, on any number of ranks."""

import logging.handlers
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import dgl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dglx_dist as dx
from dglx_dist.errors import ConfigError, Stopped
from dglx_dist.training.config import TrainConfig
from dglx_dist.training.fit_config import FitConfig
from tests.api.test_global_mean import CLASS_WEIGHTS, plain_graph
from tests.helpers.ranks import run_each
from tests.training.test_exact_mean import Layers, given_graph

LOSSES: dict[str, tuple[str, Any]] = {
    "rows": ("label", None),
    "weights": ("gaps", nn.CrossEntropyLoss(CLASS_WEIGHTS)),
}


def plain_weights(name: str, clip: float | None) -> dict[str, Tensor]:
    g, model = given_graph(), Layers()
    label, choose_loss = LOSSES[name]
    block = dgl.to_block(g, g.nodes(), include_dst_in_src=True)
    seeds = g.ndata["train_mask"].nonzero()[:, 0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        scores = model([block, block], g.ndata["feat"])[seeds]
        optimizer.zero_grad()
        (choose_loss or F.cross_entropy)(scores, g.ndata[label][seeds]).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model.state_dict()


def difference(strategy: str, name: str, clip: float | None) -> float:
    with dx.init(strategy=strategy, seed=0) as session:
        g = dx.distribute(given_graph(), parts=2)
        label, loss = LOSSES[name]
        # All 20 seeds are in the batches of an epoch, of which the last one is smaller.
        size = 6 // session.topology.world_size
        options: Any = {"epochs": 2, "label": label, "loss": loss, "clip_norm": clip, "accumulate": 10}
        config = FitConfig(**options, eval_every=0, evaluate=lambda _: {}, show_progress=False)
        make = partial(torch.optim.SGD, lr=0.5)
        model, _ = dx.fit(Layers(), g, config=config, fanouts=[-1, -1], batch_size=size, make_optimizer=make)
        weights, expected = model.state_dict(), plain_weights(name, clip)
        return max(float((weights[key] - expected[key]).abs().max()) for key in expected)


WAYS = [("data_parallel", None), ("data_parallel", 0.01), ("push_pull", 0.01)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_accumulated_steps_are_those_of_the_union(ranks: int) -> None:
    cases = [(strategy, name, clip) for strategy, clip in WAYS for name in LOSSES]
    for case, differences in zip(cases, run_each(difference, cases, ranks), strict=True):
        assert max(differences) < 1e-12, case


def _fit(folder: Path, way: str, **options: Any) -> list[list[float]]:
    with dx.init(seed=0):
        g = dx.distribute(plain_graph(), parts=1)
        config = FitConfig(
            epochs=3, accumulate=3, checkpoint_folder=folder, show_progress=False, eval_every=0, **options
        )
        torch.manual_seed(0)
        steps: list[int] = []

        class Interrupted(Layers):
            def forward(self, blocks: Any, x: Tensor) -> Tensor:
                if self.training:
                    steps.append(1)
                    if way == "stop" and len(steps) == 12:
                        os.kill(os.getpid(), signal.SIGTERM)
                        # A thread receives the signal. Without waiting, a busy machine would stop later.
                        stop = g.session.stop_point
                        with stop._changed:
                            assert stop._changed.wait_for(lambda: stop._stop_at >= 0, timeout=30)
                return super().forward(blocks, x)

        model, _ = dx.fit(Interrupted(), g, config=config, fanouts=[2, 2], batch_size=2)
        return [value.tolist() for value in model.state_dict().values()]


def test_a_stopped_run_ends_after_a_step_and_resumes_with_the_same_bits(tmp_path: Path) -> None:
    every = {"checkpoint_every": "4steps"}
    expected = _fit(tmp_path / "whole", "go on", **every)
    with pytest.raises(Stopped, match="stopped after step 3 of epoch 1"):
        _fit(tmp_path / "stopped", "stop", **every)
    assert _fit(tmp_path / "stopped", "go on", **every) == expected


def test_refuses_losses_of_several_means_and_strategies_without_a_loop(tmp_path: Path) -> None:
    def several(scores: Tensor, labels: Tensor) -> Tensor:
        known = labels != 0
        return F.cross_entropy(scores[known], labels[known]) + F.mse_loss(scores[:, 0], labels.double())

    with dx.init(seed=0):
        g = dx.distribute(plain_graph(), parts=1)
        config = FitConfig(accumulate=2, loss=several, eval_every=0, show_progress=False)
        with pytest.raises(ConfigError, match="accumulate=2 needs a loss that is one mean"):
            dx.fit(Layers(), g, config=config, fanouts=[-1, -1], batch_size=4)
    with pytest.raises(ConfigError, match="--accumulate 0"):
        TrainConfig(data="d", accumulate=0)


def through_pipeline(strategy: str) -> str:
    options = {"depth": 2} if strategy == "push_pull" else {}
    with dx.init(strategy, **options):
        g = dx.distribute(plain_graph(), parts=2)
        config = FitConfig(accumulate=2, eval_every=0, show_progress=False)
        with pytest.raises(ConfigError) as caught:
            dx.fit(Layers(), g, config=config)
        return str(caught.value)


def test_refuses_steps_that_overlap() -> None:
    by_columns, by_workers = run_each(through_pipeline, [("push_pull",), ("lambda",)], 2)
    assert all("accumulate=2 needs" in message for message in by_columns)
    assert all("accumulate 2: strategy" in message for message in by_workers)


def logged_without_effect(strategy: str, accumulate: int, batches: int | None = None) -> list[str]:
    handler = logging.handlers.BufferingHandler(99)
    logging.getLogger("dglx_dist").addHandler(handler)
    with dx.init(strategy, **({} if batches is None else {"batches": batches})):
        g = dx.distribute(plain_graph(), parts=2)
        config = FitConfig(epochs=1, accumulate=accumulate, eval_every=0, show_progress=False)
        options = {} if strategy == "full_graph" else {"fanouts": [-1, -1], "batch_size": 20}
        dx.fit(Layers(), g, config=config, **options)
    messages = [record.getMessage() for record in handler.buffer]
    return [message for message in messages if "has no effect" in message]


def test_says_that_the_only_step_of_an_epoch_accumulates_nothing() -> None:
    strategies = ("full_graph", "shared_preload", "cooperative", "push_pull")
    for first, second in run_each(logged_without_effect, [(strategy, 3) for strategy in strategies], 2):
        assert [message.partition(",")[0] for message in first] == ["accumulate=3 has no effect"]
        assert not second
    of_one_batch = [(strategy, 1) for strategy in strategies]
    several_steps = ("cooperative", 3, 2)
    for messages in run_each(logged_without_effect, [*of_one_batch, several_steps], 2):
        assert messages == [[], []]
