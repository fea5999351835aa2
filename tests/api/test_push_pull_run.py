"""``dglx train --strategy push_pull`` and what comes with it, against data_parallel."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import dgl
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import dglx_dist as dx
from dglx_dist.cli.train_job import train_dataset
from dglx_dist.errors import CheckpointError, ConfigError
from dglx_dist.training.fit import FitConfig
from dglx_dist.training.inference import minibatch_inference
from dglx_dist.training.relational import EntityInputs
from tests.api.graphs import plan_of, written
from tests.helpers.ranks import run_ranks
from tests.strategies import equality

SMALL: dict[str, Any] = {"fanouts": (4, 4), "batch_size": 30, "epochs": 2}


def train_both_ways(dataset: str, folder: str) -> None:
    for strategy in ("data_parallel", "p3"):
        train_dataset(plan_of(dataset, Path(folder) / strategy, **SMALL, strategy=strategy, model="gcn"))
    options = {"strategy": "push_pull", "strategy_options": {"depth": 3}, "epochs": 1, "checkpoint_every": 1}
    options |= {"predictions": None, "save_embeddings": None}
    plan = plan_of(dataset, Path(folder) / "resumed", **SMALL | options)
    train_dataset(plan)
    # Weights and Adam's moments, cut or not, are of one kind.
    again = replace(plan, strategy="data_parallel", strategy_options={}, epochs=2, resume=True)
    train_dataset(again)
    with pytest.raises(CheckpointError, match="build the model as it was"):
        train_dataset(replace(again, strategy="push_pull", epochs=3, hidden=16))


class Sage(nn.Module):
    """One layer on rows of its own, or on what it is given."""

    def __init__(self, num_nodes: int = 0) -> None:
        super().__init__()
        self.rows = nn.Embedding(num_nodes, equality.WIDTH, sparse=True) if num_nodes else None
        self.conv = dgl.nn.SAGEConv(equality.WIDTH, equality.CLASSES, "mean")

    def forward(self, blocks: Any, h: Any) -> torch.Tensor:
        if self.rows is not None:
            h = self.rows(blocks[0].srcdata[dgl.NID])
        out: torch.Tensor = self.conv(blocks[0], h)
        return out


def refusals(dataset: str, folder: str) -> None:
    with pytest.raises(ConfigError, match=r"--cache vip keeps feature rows.*leave --cache out"):
        train_dataset(plan_of(dataset, Path(folder) / "cached", **SMALL, strategy="push_pull", cache="vip"))
    assert not (Path(folder) / "cached").exists()
    with dx.init("push_pull", timeout=30, seed=1):
        g = dx.DistGraph(dataset)
        sampler = dgl.dataloading.NeighborSampler(
            [3], prefetch_node_feats=["feat"], prefetch_labels=["label"]
        )
        seeds = dx.node_split(g.ndata["train_mask"], g.get_partition_book())
        loader = dx.DataLoader(g, seeds, sampler, batch_size=30)
        embedding = dx.DistEmbedding(g.num_nodes(), equality.WIDTH, "rows", graph=g)
        inputs = EntityInputs(g, embeddings={g.ntypes[0]: embedding})
        config = FitConfig(inputs=inputs, epochs=1)
        with pytest.raises(ConfigError, match=r"DistEmbedding.*nn\.Embedding\(.*sparse=True"):
            dx.fit(Sage(), g, config=config, fanouts=[3])
        model = dx.wrap(Sage(), g)
        _, _, blocks = next(iter(loader))
        with pytest.raises(ConfigError, match=r"(?s)embedding|Embedding"):
            model(blocks, embedding(blocks[0].srcdata[dgl.NID]))
        check_whole(g, loader)
        g.barrier()


def check_whole(g: Any, loader: Any) -> None:
    """Evaluation takes the user's class with rows of all columns, and the wrapped model trains on."""
    model = dx.wrap(Sage(g.num_nodes()).double(), g)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = model.whole()
    for _, _, blocks in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model(blocks, blocks[0].srcdata["feat"]), blocks[-1].dstdata["label"])
        loss.backward()
        assert model.clip_grad_norm_(1e6) > 0
        optimizer.step()
    after, uncut = model.whole(), Sage(g.num_nodes()).double()
    assert type(after.conv) is dgl.nn.SAGEConv
    assert type(after.rows) is nn.Embedding
    assert not any(torch.equal(p, q) for p, q in zip(after.parameters(), before.parameters(), strict=True))
    uncut.load_state_dict(model.state_dict())
    for model_or_copy in (model, after):
        assert dx.evaluate(model_or_copy, g, num_layers=1) == dx.evaluate(uncut, g, num_layers=1)
    with pytest.raises(ConfigError, match=r"whole\(\)"):
        minibatch_inference(dx.wrap(Sage().double(), g).module, g, 1)


def on_rank(dataset: str, folder: str) -> None:
    # What training draws in the end is not looked at here.
    with patch("dglx_dist.cli.train_job.draw"):
        train_both_ways(dataset, folder)
        refusals(dataset, folder)


def test_results_are_those_of_data_parallel_and_what_cannot_be_is_refused(
    dataset: str, tmp_path: Path
) -> None:
    run_ranks(on_rank, 2, args=(dataset, str(tmp_path)))
    (classes, rows), (expected_classes, expected_rows) = (
        written(tmp_path / strategy) for strategy in ("p3", "data_parallel")
    )
    np.testing.assert_allclose(rows, expected_rows, rtol=2e-3, atol=2e-4)
    assert (classes == expected_classes).mean() > 0.99
    assert json.loads((tmp_path / "p3" / "config.json").read_text())["strategy"] == "push_pull"
    assert len((tmp_path / "resumed" / "metrics.jsonl").read_text().splitlines()) == 2
