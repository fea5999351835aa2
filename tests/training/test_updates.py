"""Clipped gradients, schedulers and optimizers of a training run."""

from pathlib import Path
from typing import Any

import dgl
import pytest
import torch
from torch.optim import lr_scheduler

import dglx_dist as dx
from dglx_dist.cli.train_job import _OPTIMIZERS
from dglx_dist.errors import ConfigError
from dglx_dist.training.config import TrainConfig
from dglx_dist.training.models import build_model
from tests.helpers.ranks import run_each


def _graph() -> Any:
    generator = torch.Generator().manual_seed(0)
    ends = torch.randint(24, (2, 120), generator=generator)
    graph = dgl.add_self_loop(dgl.graph((ends[0], ends[1]), num_nodes=24))
    graph.ndata["feat"] = torch.rand(24, 5, generator=generator)
    graph.ndata["label"] = torch.arange(24) % 3
    graph.ndata["train_mask"] = torch.arange(24) % 2 == 0
    graph.ndata["val_mask"] = torch.arange(24) % 2 == 1
    return graph


def _fit(g: Any, epochs: int = 4, lr: float = 1.0, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    width, classes = g.ndata["feat"].shape[1], g.num_classes()
    config = dx.FitConfig(epochs=epochs, show_progress=False, **options.pop("config", {}))
    fanouts = {} if "loader" in options else {"fanouts": [-1, -1]}
    model = build_model("gcn", width, 4, classes, 2, 0.0)
    options = {"make_optimizer": lambda p: torch.optim.SGD(p, lr=lr), **fanouts, **options}
    return dx.fit(model, g, config=config, **options)


def _clip(folder: str, strategy: str) -> None:
    with dx.init(strategy, timeout=60):
        g = dx.distribute(_graph(), parts=2, cache=folder)
        states: list[Any] = []
        for clip in (None, 1e-3):
            torch.manual_seed(0)
            start = build_model("gcn", g.ndata["feat"].shape[1], 4, g.num_classes(), 2, 0.0)
            before = torch.cat([value.reshape(-1) for value in start.state_dict().values()])
            wrapped, _ = _fit(g, epochs=1, config={"clip_norm": clip})
            after = torch.cat([value.reshape(-1) for value in wrapped.state_dict().values()])
            states.append(float((after - before).norm()))
        assert states[0] > 2e-3
        assert states[1] == pytest.approx(1e-3, rel=0.02)


def test_clips_the_norm_of_all_gradients(tmp_path: Path) -> None:
    strategies = ("data_parallel", "push_pull", "full_graph")
    run_each(_clip, [(str(tmp_path / strategy), strategy) for strategy in strategies], 2)


def test_resumes_the_scheduler_of_fit(tmp_path: Path) -> None:
    def schedule(optimizer: Any) -> Any:
        return lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))

    with dx.init(timeout=30):
        g = dx.distribute(_graph(), parts=1, cache=tmp_path)
        full, _ = _fit(g, make_scheduler=schedule)
        folder = {"checkpoint_folder": tmp_path / "run"}
        _fit(g, epochs=2, make_scheduler=schedule, config=folder)
        remaining, _ = _fit(g, make_scheduler=schedule, config=folder)
    for name, value in full.state_dict().items():
        assert torch.equal(value, remaining.state_dict()[name])


def test_feeds_the_validation_metric_to_a_plateau(tmp_path: Path) -> None:
    made: list[Any] = []

    def schedule(optimizer: Any, mode: Any = "max") -> Any:
        made.append(lr_scheduler.ReduceLROnPlateau(optimizer, mode, patience=0))
        return made[-1]

    with dx.init(timeout=30):
        g = dx.distribute(_graph(), parts=1, cache=tmp_path)
        _, result = _fit(g, make_scheduler=schedule)
        assert made[-1].best == result.best_val_accuracy
        assert made[-1].last_epoch == 4
        with pytest.raises(ConfigError, match=r"mode='min'\) gets the metric accuracy. Use mode='max'"):
            _fit(g, make_scheduler=lambda optimizer: schedule(optimizer, "min"))
        with pytest.raises(ConfigError, match="both set the learning rate"):
            _fit(g, make_scheduler=schedule, config={"schedule": "cosine"})


def test_builds_optimizers_by_name() -> None:
    assert sorted(_OPTIMIZERS) == ["adagrad", "adam", "adamw", "rmsprop", "sgd"]
    assert TrainConfig(data="d", optimizer="sgd", momentum=0.9).momentum == 0.9
    with pytest.raises(ConfigError, match="momentum"):
        TrainConfig(data="d", momentum=0.9)
    with pytest.raises(ConfigError, match="optimizer"):
        TrainConfig(data="d", optimizer="sdg")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="clip"):
        TrainConfig(data="d", clip_norm=0.0)
