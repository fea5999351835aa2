"""Training that is told to end at any step goes on later to the same bits, under every strategy."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dglx_dist as dx
from dglx_dist.comm.session import current_session
from dglx_dist.data.storage.manifest import read_manifest
from dglx_dist.errors import ConfigError, Stopped
from dglx_dist.training import checkpoint
from dglx_dist.training.fit_config import FitConfig
from dglx_dist.training.models import build_model
from tests.helpers.ranks import run_ranks
from tests.strategies import equality

EPOCHS, BATCH = 3, 20
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "data_parallel": ("data_parallel", {}, {}),
    "three": ("push_pull", {"depth": 3}, {}),
    "three, drained for checkpoints": ("push_pull", {"depth": 3}, {"checkpoint_every": "2steps"}),
    "full_graph": ("full_graph", {}, {}),
    "cooperative": ("cooperative", {"batches": 3}, {}),
    "lambda": ("lambda", {"executor": "inline", "intervals": 2, "workers": 2}, {}),
}
INSIDE = {"data_parallel", "three, drained for checkpoints", "cooperative"}
"""Cases that can stop inside an epoch."""


class Told:
    """Tells this rank to end in its ``at``-th call in training, and then lets all ranks hear of it."""

    def __init__(self, at: int, number: int) -> None:
        self.calls, self.at, self.number = 0, at, number

    def __call__(self, module: nn.Module, *_: object) -> None:
        self.calls += module.training
        if self.calls == self.at and module.training:
            os.kill(os.getpid(), self.number)
            while current_session().stop_point._stop_at < 0:
                time.sleep(0.01)


def fit(dataset: str, case: str, checkpoints: Path, told: Told | None) -> tuple[Any, list[float]]:
    strategy, options, settings = CASES[case]
    losses: list[float] = []
    with dx.init(strategy, timeout=60, seed=3, **options):
        g = dx.DistGraph(dataset)
        torch.manual_seed(1)
        # A lambda's dropout is drawn by its workers.
        dropout = 0.0 if strategy == "lambda" else 0.3
        model = build_model("sage", equality.WIDTH, 8, equality.CLASSES, 2, dropout=dropout).double()
        if told is not None and strategy != "lambda":
            model.register_forward_pre_hook(told)

        def after_epoch(record: Any) -> None:
            losses.append(record.loss)
            if told is not None and strategy == "lambda":
                told(model.train())

        mini = {"batch_size": BATCH, "fanouts": (3, 3)} if strategy in ("data_parallel", "push_pull") else {}
        often = {"checkpoint_every": 0, "eval_every": 2, "show_progress": False} | settings
        config = FitConfig(epochs=EPOCHS, checkpoint_folder=checkpoints, **often)
        try:
            wrapped, _ = dx.fit(model, g, config=config, callbacks=[after_epoch], **mini)
        except Stopped as stopped:
            return str(stopped), losses
        weights = {name: value.tolist() for name, value in wrapped.state_dict().items()}
        g.barrier()
        return weights, losses


def run_preempted(dataset: str, folder: str) -> dict[str, Any]:
    """By case: what it gives undisturbed, what it says when it is stopped, and what it gives then."""
    results: dict[str, Any] = {}
    rank, draws = int(os.environ["RANK"]), np.random.default_rng(11)
    for number, (case, (strategy, _, _)) in enumerate(CASES.items()):
        calls = {"lambda": 1, "full_graph": EPOCHS, "cooperative": 3 * EPOCHS}.get(strategy, 5 * EPOCHS)
        at = int(draws.integers(1, max(calls - 2, 2)))
        message = Told(at, [signal.SIGTERM, signal.SIGUSR1][number % 2]) if number % 2 == rank else None
        places = [Path(folder) / f"{number}-{name}" for name in ("whole", "parts")]
        full = fit(dataset, case, places[0], None)
        output, first = fit(dataset, case, places[1], message)
        weights, remaining = fit(dataset, case, places[1], None)
        results[case] = {"at": at, "whole": full, "said": output, "again": (weights, first + remaining)}
        if case == "data_parallel":
            # All epochs are done now: nothing is lost, and other settings are not mixed in.
            assert fit(dataset, case, places[1], None) == (weights, [])
            CASES["other"] = (strategy, {}, {"precision": "bf16"})
            with pytest.raises(ConfigError, match=r"precision: float32 -> bf16.*overwrite=True"):
                fit(dataset, "other", places[1], None)
            del CASES["other"]
            # The content of a dataset, not only its size.
            saved = json.loads((checkpoint.find_latest(places[1]) / checkpoint.STATE_NAME).read_text())
            checksum = read_manifest(Path(dataset)).checksum
            assert saved["extra"]["configuration"]["dataset"] == checksum
    return results


def test_a_run_that_was_told_to_end_goes_on_to_the_same_bits(dataset: str, tmp_path: Path) -> None:
    first, second = run_ranks(run_preempted, 2, args=(dataset, str(tmp_path)), ranks_per_server=1)
    assert first.keys() == CASES.keys()
    for case, value in first.items():
        assert value["said"] == second[case]["said"]
        assert "Run the same command again to resume" in value["said"], (case, value["at"])
        assert ("after step 0 " not in value["said"]) <= (case in INSIDE), (case, value["at"], value["said"])
        assert value["again"] == value["whole"] == second[case]["again"], case
