"""Ranks that train apart are found at the next epoch, evaluation or checkpoint."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dglx_dist as dx
from dglx_dist.comm.collectives import check_replicas
from dglx_dist.comm.ledger import CONTROL
from dglx_dist.comm.session import start_session
from dglx_dist.dataloading.step_loader import STEPS_BETWEEN_CHECKS
from dglx_dist.errors import ConfigError
from dglx_dist.training.fit_config import FitConfig
from dglx_dist.training.inference import minibatch_inference
from tests.helpers.ranks import run_each, run_ranks
from tests.training.test_exact_mean import Layers, plain_graph

import dgl  # isort: skip


def step(way: str, model: Any, optimizer: Any, blocks: Any) -> None:
    x, labels = blocks[0].srcdata["feat"], blocks[-1].dstdata["label"]
    optimizer.zero_grad()
    if way == "module":
        F.cross_entropy(model.module(blocks, x), labels).backward()
    elif way == "autograd":
        used = list(model.parameters())
        loss = F.cross_entropy(model.module(blocks, x), labels)
        for parameter, gradient in zip(used, torch.autograd.grad(loss, used), strict=True):
            parameter.grad = gradient
    else:
        loss = F.cross_entropy(model(blocks, x), labels)
        loss.backward()
        if way == "scheduler":
            optimizer.param_groups[0]["lr"] = float(loss.detach())
    optimizer.step()


def evaluations(model: nn.Module, g: Any, folder: Path) -> dict[str, Any]:
    return {
        "evaluate": lambda: dx.evaluate(model, g, masks=["train_mask"]),
        "inference": lambda: dx.layerwise_inference(model, g),
        "batches": lambda: minibatch_inference(model, g, 2),
        "save": lambda: dx.save(folder, model=model),
    }


def messages_of(strategy: str, way: str, folder: Path) -> dict[str, str]:
    with dx.init(strategy=strategy, seed=0) as session:
        g = dx.distribute(plain_graph(), parts=2)
        sampler = dgl.dataloading.MultiLayerFullNeighborSampler(
            2, prefetch_node_feats=["feat"], prefetch_labels=["label"]
        )
        sizes = {} if strategy == "full_graph" else {"batch_size": 20}
        model = dx.wrap(Layers(), g)
        if way == "reset":
            torch.manual_seed(session.topology.rank)
            for conv in model.module.convs:
                conv.reset_parameters()
        elif way == "rank 1":
            model.module.convs[1].fc_self.bias.data += session.topology.rank
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        loader = dx.DataLoader(g, dx.node_split(g.ndata["train_mask"]), sampler, **sizes)
        if way not in BEFORE_TRAINING:
            for _, _, blocks in loader:
                step(way, model, optimizer, blocks)
        evaluated: nn.Module = model
        if way == "second":
            torch.manual_seed(session.topology.rank)
            evaluated = nn.Module()
            evaluated.convs = nn.ModuleList([dgl.nn.SAGEConv(5, 3, "mean")]).double()
            evaluated.inference_layers = lambda: list(evaluated.convs)  # type: ignore[union-attr,operator]
        messages = {}
        before = session.ledger.snapshot()
        for name, evaluate in evaluations(evaluated, g, folder).items():
            if way == "second" and name == "batches":
                continue
            try:
                evaluate()
                messages[name] = ""
            except ConfigError as error:
                messages[name] = str(error)
        if way == "none":
            rows = session.ledger.since(before)
            assert any(row.phase == CONTROL for row in rows)
        return messages


WRONG_WAYS = [
    *(("data_parallel", way) for way in ("module", "autograd", "scheduler", "second", "reset", "rank 1")),
    *(("push_pull", way) for way in ("scheduler", "second", "rank 1")),
    *(("full_graph", way) for way in ("scheduler", "second", "reset", "rank 1")),
]
BEFORE_TRAINING = ("reset", "rank 1")
STRATEGIES = ("data_parallel", "push_pull", "full_graph")


def test_ranks_that_train_apart_are_an_error_with_the_likely_causes(tmp_path: Path) -> None:
    for first, second in run_each(messages_of, [(*way, tmp_path) for way in WRONG_WAYS], 2):
        assert first == second
        for message in first.values():
            assert "differs between rank 0 and ranks 1" in message
            assert "model.module(...)" in message
            assert "dx.reduce_mean" in message
    assert not list(tmp_path.iterdir())


def test_ranks_that_train_together_pass(tmp_path: Path) -> None:
    cases = [(strategy, "none", tmp_path / strategy) for strategy in STRATEGIES]
    for of_ranks in run_each(messages_of, cases, 2):
        assert [set(messages.values()) for messages in of_ranks] == [{""}] * 2


def train_without_evaluation(strategy: str, way: str) -> tuple[int, str]:
    """Return the number of steps before the loop ends, and the error that ends it."""
    with dx.init(strategy=strategy, seed=0) as session:
        g = dx.distribute(plain_graph(), parts=2)
        sampler = dgl.dataloading.MultiLayerFullNeighborSampler(
            2, prefetch_node_feats=["feat"], prefetch_labels=["label"]
        )
        sizes = {} if strategy == "full_graph" else {"batch_size": 20}
        model = dx.wrap(Layers(), g)
        if way == "rank 1":
            model.module.convs[1].fc_self.bias.data += session.topology.rank
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        loader = dx.DataLoader(g, dx.node_split(g.ndata["train_mask"]), sampler, **sizes)
        steps = 0
        try:
            for _ in range(STEPS_BETWEEN_CHECKS + 1):
                for _, _, blocks in loader:
                    step(way, model, optimizer, blocks)
                    steps += 1
        except ConfigError as error:
            return steps, str(error)
        return steps, ""


def test_loops_without_an_evaluation_compare_the_weights() -> None:
    ways = [(strategy, way) for strategy in STRATEGIES for way in ("scheduler", "rank 1", "none")]
    for (_, way), ranks in zip(ways, run_each(train_without_evaluation, ways, 2), strict=True):
        assert ranks[0] == ranks[1]
        steps, message = ranks[0]
        if way == "none":
            assert message == ""
            continue
        assert "differs between rank 0 and ranks 1" in message
        assert "dx.reduce_mean" in message
        # One step has changed the weights when the second step compares them.
        assert steps == (0 if way == "rank 1" else 1)


class Apart(Layers):
    """A model that changes its weights by the rank, as a hook of the user may."""

    def forward(self, blocks: Any, x: Tensor) -> Tensor:
        if self.training:
            self.convs[1].fc_self.bias.data += torch.distributed.get_rank()
        return super().forward(blocks, x)


def fit_apart(strategy: str) -> tuple[str, int]:
    with dx.init(strategy=strategy, seed=0):
        g = dx.distribute(plain_graph(), parts=2)
        ended: list[int] = []
        config = FitConfig(epochs=3, eval_every=0, show_progress=False, evaluate=lambda _: {})
        with pytest.raises(ConfigError, match=r"convs.1.fc_self.bias' differs between rank 0 and ranks 1"):
            dx.fit(Apart(), g, config=config, callbacks=[lambda record: ended.append(record.epoch)])
        return strategy, len(ended)


def test_fit_compares_the_weights_after_each_epoch() -> None:
    results = run_each(fit_apart, [(strategy,) for strategy in STRATEGIES], 2)
    assert results == [[(strategy, 0)] * 2 for strategy in STRATEGIES]


REPLICAS: dict[str, Callable[[int, Tensor], dict[str, Tensor]]] = {
    "another order": lambda rank, x: {"a": x, "b": x} if rank == 0 else {"b": x, "a": x},
    "rounded": lambda rank, x: {"a": x, "b": x * (1 + 1e-9 * rank)},
    "missing": lambda rank, x: {"a": x, "b": x} if rank == 0 else {"a": x},
    "negated": lambda rank, x: {"a": x * (1 - 2 * rank)},
    "exchanged": lambda rank, x: {"a": x.flip(0) if rank else x},
    "the second": lambda rank, x: {"a": x * (1 + 1e-9 * rank), "b": x + rank},
}


def compare_replicas(case: str) -> str:
    with start_session(timeout_s=60) as session:
        # Ranks on different machines may round differently.
        session.hosts = [f"host {rank}" for rank in range(session.topology.world_size)]
        x = torch.randn(40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        try:
            check_replicas(REPLICAS[case](session.topology.rank, x), session)
        except ConfigError as error:
            return str(error)
        return ""


def test_only_rounding_may_differ_between_machines() -> None:
    results = run_each(compare_replicas, [(case,) for case in REPLICAS], 2)
    for case, (first, second) in zip(REPLICAS, results, strict=True):
        assert first == second, case
        assert ("differs between rank 0 and ranks 1" in first) == (
            case not in ("another order", "rounded")
        ), case


class Pair(nn.Module):
    """Two models in one, which two optimizers train."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Layers()
        self.second = nn.Linear(3, 3).double()

    def forward(self, blocks: Any, x: Tensor) -> Tensor:
        return self.second(self.first(blocks, x))


def train_by_two_optimizers() -> str:
    with dx.init(seed=0) as session:
        g = dx.distribute(plain_graph(), parts=2)
        sampler = dgl.dataloading.MultiLayerFullNeighborSampler(
            2, prefetch_node_feats=["feat"], prefetch_labels=["label"]
        )
        model = dx.wrap(Pair(), g)
        parts = model.module.first, model.module.second
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts]
        model.module.second.bias.data += session.topology.rank
        try:
            for _, _, blocks in dx.DataLoader(g, dx.node_split(g.ndata["train_mask"]), sampler):
                F.cross_entropy(
                    model(blocks, blocks[0].srcdata["feat"]), blocks[-1].dstdata["label"]
                ).backward()
                for optimizer in optimizers:
                    optimizer.step()
        except ConfigError as error:
            return str(error)
        return ""


def test_weights_of_every_optimizer_are_compared() -> None:
    for message in run_ranks(train_by_two_optimizers, 2):
        assert "'second.bias' differs between rank 0 and ranks 1" in message


def wrap_twice() -> None:
    with dx.init():
        model = dx.wrap(Layers(), dx.distribute(plain_graph(), parts=2))
        with pytest.raises(ConfigError, match=r"leave it out, as dx.wrap exchanges"):
            nn.parallel.DistributedDataParallel(model)


def test_refuses_to_be_wrapped_by_torch() -> None:
    run_ranks(wrap_twice, 2)
