"""A rank is killed in the middle of an epoch; the restart goes on from the checkpoint to the same weights."""

import os
import re
import signal
from pathlib import Path
from typing import Any

import dgl
import torch
from torch import nn

from dglx_dist.api import fit, init
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.training.fit_config import FitConfig
from tests.helpers import wait_for_checkpoints
from tests.helpers.ranks import run_ranks, start_ranks
from tests.strategies import equality

EPOCHS, BATCH = 2, 20
KILLED_AT = 7
"""Call of the model in which rank 1 dies: there are 5 in an epoch."""
DEPTHS = (1, 3)


class Net(nn.Module):
    """Two convolutions; counts its calls in training, and dies in one of them if told so."""

    def __init__(self, dies_at: int | None, checkpoints: str) -> None:
        super().__init__()
        self.first = dgl.nn.SAGEConv(equality.WIDTH, equality.HIDDEN, "mean")
        self.second = dgl.nn.SAGEConv(equality.HIDDEN, equality.CLASSES, "mean")
        self.calls, self.dies_at, self.checkpoints = 0, dies_at, checkpoints

    def forward(self, blocks: Any, h: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.first(blocks[0], h))
        self.calls += 1
        if self.calls == self.dies_at:
            wait_for_checkpoints(self.checkpoints, 1)
            os.kill(os.getpid(), signal.SIGKILL)
        out: torch.Tensor = self.second(blocks[1], h)
        return out

    def inference_layers(self) -> list[Any]:
        return [lambda block, h: torch.relu(self.first(block, h)), lambda block, h: self.second(block, h)]


def train(
    dataset: str, checkpoints: str, options: dict[str, Any], kill: bool
) -> tuple[dict[str, Any], int, dict[str, float]]:
    with init("push_pull", timeout=20, seed=3, **options) as session:
        g = DistGraph(dataset)
        torch.manual_seed(1)
        net = Net(KILLED_AT if kill and session.topology.rank == 1 else None, checkpoints).double()
        config = FitConfig(epochs=EPOCHS, checkpoint_folder=checkpoints, show_progress=False)
        wrapped, result = fit(net, g, config=config, fanouts=(3, 3), batch_size=BATCH)
        weights = {name: value.tolist() for name, value in wrapped.state_dict().items()}
        g.barrier()
        return weights, result.first_epoch, result.accuracy


def restart_runs(dataset: str, folder: str) -> dict[int, Any]:
    """By depth: what a run that nobody disturbs gives, and what the restart of the killed one does."""
    return {
        depth: [train(dataset, f"{folder}/{name}-{depth}", {"depth": depth}, False) for name in "ab"]
        for depth in DEPTHS
    }


def test_a_killed_rank_costs_no_bit(dataset: str, tmp_path: Path) -> None:
    """Also with three batches in flight the others end and the restart goes on."""
    for depth in DEPTHS:
        place = str(tmp_path / f"b-{depth}")
        outcomes = start_ranks(train, 2, args=(dataset, place, {"depth": depth}, True))
        assert outcomes[1].exitcode == -signal.SIGKILL
        assert re.search(r"PeerError.*rank 1", outcomes[0].error)
    results = run_ranks(restart_runs, 2, args=(dataset, str(tmp_path)))
    for depth in DEPTHS:
        assert results[0][depth] == results[1][depth]
        undisturbed, again = results[0][depth]
        assert (undisturbed[1], again[1]) == (0, 1)
        assert (again[0], again[2]) == (undisturbed[0], undisturbed[2])
