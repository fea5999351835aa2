"""``dglx train`` and dx.fit under strategies that work inside the model, against data_parallel."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import dgl
import numpy as np
import pytest
import torch

import dglx_dist as dx
from dglx_dist.cli.train_job import train_dataset
from dglx_dist.errors import CheckpointError, ConfigError
from dglx_dist.training.fit_config import FitConfig
from dglx_dist.training.models import build_model
from dglx_dist.training.relational import EntityInputs
from tests.api.graphs import plan_of, read_tables
from tests.helpers import wide
from tests.helpers.ranks import run_ranks
from tests.strategies import equality

EPOCHS = 4
SMALL: dict[str, Any] = {"fanouts": (-1, -1), "epochs": EPOCHS}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "data_parallel": ("data_parallel", {}),
    "push_pull": ("p3", {}),
    "full_graph": ("fb", {}),
    "one_hop": ("flx", {"hops": 1}),
    "closed": ("granndis", {"use_pp": False}),
}


def train_each_way(dataset: str, folder: str) -> None:
    for name, (strategy, options) in WAYS.items():
        out = Path(folder) / name
        batch_size = equality.NUM_NODES if name in ("data_parallel", "push_pull") else None
        way = {"strategy": strategy, "strategy_options": options, "batch_size": batch_size}
        trained = train_dataset(plan_of(dataset, out, **SMALL, **way, model="gcn"))
        assert [epoch.num_samples for epoch in trained.epochs] == [167] * EPOCHS
        half = train_dataset(plan_of(dataset, out / "bf16", **SMALL, **way, model="gcn", precision="bf16"))
        assert half.summary["precision"] == "bf16"
        for left, right in zip(trained.epochs, half.epochs, strict=True):
            assert 0 < abs(left.loss - right.loss) < 2e-3 * left.loss
    check_resuming(dataset, Path(folder))


def check_resuming(dataset: str, folder: Path) -> None:
    """A run that is broken off goes on to the same weights, also under other strategies."""
    full, parts = folder / "whole", folder / "parts"
    options = {"strategy": "full_graph", "dropout": 0.5, "checkpoint_every": 1, "save_embeddings": None}
    options["precision"] = "bf16"
    plan = plan_of(dataset, full, **SMALL, **options)
    train_dataset(plan)
    again = replace(plan, out=str(parts), predictions=str(parts / "classes"))
    train_dataset(replace(again, epochs=2, predictions=None))
    again = replace(again, resume=True, precision=None)
    assert train_dataset(again).summary["precision"] == "bf16"
    lines = [(case / "metrics.jsonl").read_text().splitlines() for case in (full, parts)]
    losses = [[json.loads(line)["loss"] for line in of_run] for of_run in lines]
    assert losses[0] == losses[1]
    # Weights and Adam's moments, cut or not, are of one kind.
    cut: dict[str, Any] = {"strategy": "push_pull", "strategy_options": {"depth": 3}}
    train_dataset(replace(again, epochs=EPOCHS + 1, **cut))
    train_dataset(replace(again, epochs=EPOCHS + 2, strategy="data_parallel"))
    for way in {"strategy": "full_graph"}, cut:
        with pytest.raises(CheckpointError, match="Build the model as in the saved run"):
            train_dataset(replace(again, epochs=EPOCHS + 3, hidden=16, **way))
    assert len((parts / "metrics.jsonl").read_text().splitlines()) == EPOCHS + 2


@pytest.mark.parametrize(("ranks", "ranks_per_server"), [(2, 1), *wide((3, 2))])
def test_results_equal_data_parallel(dataset: str, tmp_path: Path, ranks: int, ranks_per_server: int) -> None:
    run_ranks(
        train_each_way, ranks, args=(dataset, str(tmp_path)), ranks_per_server=ranks_per_server, timeout_s=240
    )
    expected_classes, expected_rows = read_tables(tmp_path / "data_parallel")
    for name in WAYS:
        classes, rows = read_tables(tmp_path / name)
        np.testing.assert_allclose(rows, expected_rows, rtol=2e-3, atol=2e-4, err_msg=name)
        assert (classes == expected_classes).mean() > 0.99
        message = json.loads((tmp_path / name / "config.json").read_text())["strategy"]
        assert name in (message, "one_hop", "closed")
    records = [json.loads(line) for line in (tmp_path / "closed" / "metrics.jsonl").read_text().splitlines()]
    # Between servers nothing but the gradients of parameters crosses.
    assert len({record["bytes_outside"] for record in records}) == 1


def fit_on_rank(dataset: str, trace: str) -> list[Any]:
    with dx.init("full_graph", timeout=30, seed=1) as session:
        g = dx.DistGraph(dataset)
        seen: list[Any] = []
        torch.manual_seed(2)
        model = build_model("sage", equality.WIDTH, 8, equality.CLASSES, 2, dropout=0.3)
        wrapped, result = dx.fit(model, g, config=FitConfig(epochs=3, trace=trace), callbacks=[seen.append])
        assert wrapped.module is wrapped.whole() is model
        assert seen == result.epochs
        # What was fitted once may be again.
        dx.fit(model, g, config=FitConfig(epochs=1))
        g.barrier()
        assert session.step_share is None
        return [(epoch.loss, epoch.num_samples, epoch.bytes_inside + epoch.bytes_outside) for epoch in seen]


def test_fit_tells_what_an_epoch_was(dataset: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    own, second = run_ranks(fit_on_rank, 2, args=(dataset, str(trace)), ranks_per_server=1)
    assert own == second
    losses = [loss for loss, _, _ in own]
    assert losses == sorted(losses, reverse=True)
    assert all(samples == 167 for _, samples, _ in own)
    # Nothing is fetched in an epoch, so all move the same.
    assert len({moved for _, _, moved in own}) == 1
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"] if "name" in event}
    assert {"forward", "backward", "step"} <= names
    assert any(name.startswith("halo of") for name in names)
    assert any(name.startswith("halo gradients of") for name in names)


def refusals(dataset: str, folder: str) -> None:
    with pytest.raises(ConfigError, match=r"--cache vip keeps feature rows.*use strategy data_parallel"):
        train_dataset(plan_of(dataset, Path(folder) / "cached", strategy="push_pull", cache="vip"))
    assert [path.name for path in (Path(folder) / "cached").iterdir()] == [".checkpoints.lock"]
    with dx.init("push_pull", timeout=30, seed=1):
        g = dx.DistGraph(dataset)
        first, second, third = (build_model("sage", equality.WIDTH, 8, 3, 1).double() for _ in range(3))
        embedding = dx.DistEmbedding(g.num_nodes(), equality.WIDTH, "rows", graph=g)
        config = FitConfig(inputs=EntityInputs(g, embeddings={g.ntypes[0]: embedding}), epochs=1)
        with pytest.raises(ConfigError, match=r"DistEmbedding.*nn\.Embedding\(.*sparse=True"):
            dx.fit(first, g, config=config, fanouts=[3])
        sampler = dgl.dataloading.NeighborSampler([3], prefetch_node_feats=["feat"])
        loader = dx.DataLoader(g, dx.node_split(g.ndata["train_mask"]), sampler, batch_size=30)
        model = dx.wrap(second, g)
        _, _, blocks = next(iter(loader))
        with pytest.raises(ConfigError, match=r"(?s)embedding|Embedding"):
            model(blocks, embedding(blocks[0].srcdata[dgl.NID]))
        # What is not refused: gradients, of cut weights too, are clipped together.
        model = dx.wrap(third, g)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _, _, blocks in loader:
            model(blocks, blocks[0].srcdata["feat"]).sum().backward()
            assert model.clip_grad_norm_(1e6) > 0
            optimizer.step()
        g.barrier()


def test_what_push_pull_cannot_do_is_refused(dataset: str, tmp_path: Path) -> None:
    run_ranks(refusals, 2, args=(dataset, str(tmp_path)))


STACKS: dict[str, dict[str, Any]] = {
    "cat": {"model": "sage", "norm": "layer", "residual": True, "jk": "cat"},
    "appnp": {"model": "appnp", "teleport": 0.2},
    "gatv2": {"model": "gatv2", "heads": 2, "jk": "max"},
}


def train_stacks(dataset: str, folder: str) -> object:
    """Each under three strategies; and the strategy that auto takes for the last."""
    for name, model in STACKS.items():
        out, options = Path(folder) / name, {"batch_size": equality.NUM_NODES, **SMALL, **model}
        train_dataset(plan_of(dataset, out / "data_parallel", **options, scores=True))
        del options["batch_size"]
        for strategy in ("full_graph", "lambda"):
            train_dataset(plan_of(dataset, out / strategy, **options, strategy=strategy, scores=True))
    options |= {"strategy": "auto", "predictions": None, "save_embeddings": None}
    chosen = train_dataset(plan_of(dataset, out / "auto", **options)).summary["strategy"]
    with pytest.raises(ConfigError, match=r"push_pull found no layer that takes the 7 columns"):
        train_dataset(plan_of(dataset, Path(folder) / "wrong", **STACKS["appnp"], strategy="push_pull"))
    return chosen


@pytest.mark.wide
def test_what_is_between_layers_under_strategies(dataset: str, tmp_path: Path) -> None:
    """Rows of several layers travel together; a node's embedding is the last of them."""
    for result in run_ranks(train_stacks, 2, args=(dataset, str(tmp_path)), timeout_s=240):
        assert result not in ("lambda", "push_pull")
    for name, width in {"cat": 8, "appnp": equality.CLASSES, "gatv2": 8}.items():
        classes, rows = read_tables(tmp_path / name / "data_parallel")
        assert rows.shape == (equality.NUM_NODES, width)
        for strategy in ("full_graph", "lambda"):
            same, remaining = read_tables(tmp_path / name / strategy)
            np.testing.assert_allclose(remaining, rows, rtol=2e-3, atol=2e-4)
            assert (classes == same).mean() > 0.99
