"""A strategy that is opened beside the session's, stepped and closed leaves nothing and changes nothing."""

import gc
import threading
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import dgl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import optimizer

import dglx_dist as dx
from dglx_dist.comm.session import Session, start_session
from dglx_dist.dataloading.step_loader import WRAPPED_MODELS
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.internals.pytorch import remove_hooks_without_owner
from dglx_dist.strategies.base import STRATEGIES, open_strategy
from tests.helpers.ranks import run_ranks
from tests.strategies import equality

WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "rows": ("data_parallel", {}),
    "columns": ("push_pull", {"structure": "push"}),
    "columns, late": ("push_pull", {"depth": 3, "structure": "push"}),
    "columns, replicas": ("push_pull", {"group_size": 1}),
    "whole": ("full_graph", {}),
    "preloaded": ("shared_preload", {}),
    "in batches": ("cooperative", {"batches": 4}),
}


class Net(nn.Module):
    """Two layers with a dropout, whose draws belong to steps and loaders."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner, self.dropout = equality.PlainModel("sage"), nn.Dropout(0.5)

    def forward(self, blocks: Any, x: Any) -> Any:
        return self.inner(blocks, self.dropout(x))


def step(model: Any, blocks: Any, descent: torch.optim.Optimizer) -> None:
    loss = F.cross_entropy(model(blocks, blocks[0].srcdata["feat"]), blocks[-1].dstdata["label"])
    descent.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it bare
    descent.step()


def arguments(g: DistGraph, name: str) -> tuple[Any, Any, dict[str, Any]]:
    """Return seeds, sampler and options of a loader."""
    topology = g.session.topology
    own_ids = equality.cut(equality.new_ids_of_training(g), (2.0, 1.0), topology.rank, topology.world_size)
    sizes = {"batch_size": 8, "shuffle": True} if STRATEGIES.get(name).traits.unit == "mini_batch" else {}
    fanouts = [3, 3] if sizes else [-1, -1]
    sampler = dgl.dataloading.NeighborSampler(
        fanouts, prefetch_node_feats=["feat"], prefetch_labels=["label"]
    )
    return own_ids, sampler, sizes


def try_out(g: DistGraph, name: str, options: dict[str, Any]) -> list[weakref.ref[Any]]:
    """Take two steps of a way to train, leave its loop in the middle of an epoch, and close it."""
    opened = STRATEGIES.get(name)(g.session, options).open(g)
    seeds, sampler, sizes = arguments(g, name)
    loader, model = opened.loader(seeds, sampler, **sizes), opened.wrap(Net().double())
    descent, batches = torch.optim.Adam(model.parameters()), iter(loader)
    for _ in range(min(2, len(loader))):
        step(model, next(batches)[-1], descent)
    opened.close()
    opened.close()
    return [weakref.ref(target) for target in (opened, loader, model)]


def left_by(session: Session) -> dict[str, Any]:
    remove_hooks_without_owner()
    return {
        "threads": Counter(thread.name for thread in threading.enumerate()),
        "operations": sorted(session.rpc._handlers),
        "fields": sorted(map(id, session._fields)),
        "models": len(WRAPPED_MODELS),
        "actions": (len(session.before_close), len(session.on_close)),
        "hooks": (len(optimizer._global_optimizer_pre_hooks), len(optimizer._global_optimizer_post_hooks)),
        "groups": len(torch.distributed.distributed_c10d._world.pg_map),
        "shares": (session.step_share, session.model_share),
    }


def train(g: DistGraph, name: str, options: dict[str, Any]) -> tuple[list[Any], dict[str, int]]:
    """Train two epochs by the public functions; return the weights, and what was sent of each phase."""
    g.session.adopt(name, options)
    equality.forget_kept_batches(g)
    before = g.session.ledger.snapshot()
    seeds, sampler, sizes = arguments(g, name)
    loader, model = dx.DataLoader(g, seeds, sampler, **sizes), dx.wrap(Net().double(), g)
    descent = torch.optim.Adam(model.parameters())
    for _ in range(2):
        for _, _, blocks in loader:
            step(model, blocks, descent)
    moved = equality.moved_since(g.session, before)
    return [p.detach().numpy().copy() for p in model.whole().parameters()], dict(moved)


def on_rank(folder: str, tries: bool) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for way, (name, options) in WAYS.items():
        with start_session(timeout_s=60) as session:
            g = DistGraph(folder)
            if tries:
                try_out(g, name, options)  # makes what a session makes once, such as its connections
                gc.collect()
                left = left_by(session)
                gone = [reference for settings in WAYS.values() for reference in try_out(g, *settings)]
                assert left_by(session)["threads"] == left["threads"], way  # before anything is collected
                assert left_by(session)["models"] == left["models"], way
                assert left_by(session)["hooks"] == left["hooks"], way
                gc.collect()
                try_out(g, name, options)
                gc.collect()
                assert not any(reference() for reference in gone), way
            results[way] = train(g, name, options)
            g.barrier()
    return results


@pytest.mark.wide
def test_a_run_is_the_same_after_others_were_tried(folder: Path) -> None:
    plain = run_ranks(on_rank, 2, args=(str(folder), False), timeout_s=200)
    after = run_ranks(on_rank, 2, args=(str(folder), True), timeout_s=200)
    for first, second in zip(plain, after, strict=True):
        for way in WAYS:
            (weights, moved), (weights_after, moved_after) = first[way], second[way]
            assert all(map(np.array_equal, weights, weights_after)), way
            for phase in moved.keys() - {"control", "columns", "ids"}:
                assert moved_after[phase] == moved[phase], (way, phase)


def what_stays(folder: str) -> None:
    with start_session(timeout_s=60) as session:
        g = DistGraph(folder)
        for way in WAYS.values():
            try_out(g, *way)
        gc.collect()
        left = left_by(session)
        for way in WAYS.values():
            try_out(g, *way)
            gc.collect()
            now = left_by(session)
            assert now == left, (way, {name: (left[name], now[name]) for name in left})


@pytest.mark.wide
def test_nothing_remains_of_closed_strategies(folder: Path) -> None:
    run_ranks(what_stays, 2, args=(str(folder),), timeout_s=200)


def test_the_session_has_one_strategy_for_each_graph(folder: Path) -> None:
    with start_session() as session:
        g, beside = DistGraph(folder), DistGraph(folder)
        opened = open_strategy(g)
        assert open_strategy(g) is opened
        assert open_strategy(beside) is not opened
        g.close()
        assert opened.is_closed
        assert open_strategy(beside) is open_strategy(beside)
        session.adopt("push_pull", {})
        assert open_strategy(beside).strategy.traits.features == "columns"
        beside.close()


def test_models_of_a_closed_strategy_are_not_trained(folder: Path) -> None:
    with start_session() as session:
        g = DistGraph(folder)
        seeds, sampler, sizes = arguments(g, "data_parallel")
        loader, model = dx.DataLoader(g, seeds, sampler, **sizes), dx.wrap(Net().double(), g)
        descent, blocks = torch.optim.Adam(model.parameters()), next(iter(loader))[-1]
        g.close()
        step(model, blocks, descent)  # on rows of a graph that was closed meanwhile
        g = DistGraph(folder)
        opened = STRATEGIES.get("data_parallel")(session, {}).open(g)
        model = opened.wrap(Net().double())
        opened.close()
        with pytest.raises(ConfigError, match="was closed, so its gradients would stay on this rank"):
            step(model, blocks, descent)


def test_a_closed_loader_ends_its_iteration(folder: Path) -> None:
    with start_session() as session:
        g = DistGraph(folder)
        opened = STRATEGIES.get("data_parallel")(session, {}).open(g)
        loader = opened.loader(torch.arange(20), dgl.dataloading.NeighborSampler([2]), batch_size=4)
        batches = iter(loader)
        next(batches)
        opened.close()
        assert list(batches) == []
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("dglx-loader")]
        with pytest.raises(ConfigError, match="has no option"):
            opened.loader(torch.arange(20), dgl.dataloading.NeighborSampler([2]), dept=4)
