"""A user's loop under ``torch.autocast`` in bfloat16 on CPUs: every strategy against plain DGL."""

import functools
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dgl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dglx_dist as dx
from dglx_dist.comm.session import start_session
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.internals.cpu_kernels import correct_kernels
from dglx_dist.strategies.base import STRATEGIES
from dglx_dist.strategies.push_pull.exchange import add_in_order
from tests.helpers import wide
from tests.helpers.ranks import run_ranks
from tests.strategies import equality
from tests.strategies.equality import CLASSES, STEPS, WIDTH

HIDDEN = 16
LAYERS: dict[str, Any] = {
    "sage": lambda a, b: dgl.nn.SAGEConv(a, b, "mean"),
    "pool": lambda a, b: dgl.nn.SAGEConv(a, b, "pool"),
    "gcn": lambda a, b: dgl.nn.GraphConv(a, b, norm="right", allow_zero_in_degree=True),
    "gat": lambda a, b: dgl.nn.GATConv(a, b // 2, 2, allow_zero_in_degree=True),
    "gatv2": lambda a, b: dgl.nn.GATv2Conv(a, b // 2, 2, allow_zero_in_degree=True),
    "gin": lambda a, b: dgl.nn.GINConv(nn.Linear(a, b), learn_eps=True),
}
BY_COLUMNS = ("sage", "gcn", "gat", "gin")


@dataclass(frozen=True)
class Way:
    strategy: str
    options: dict[str, Any]
    layers: tuple[str, ...] = tuple(LAYERS)
    exchanged: str = ""
    """Ledger phase of the rows of activations."""


WAYS = [
    Way("data_parallel", {}),
    Way("push_pull", {"depth": 2}, BY_COLUMNS, "activations"),
    Way("full_graph", {}, exchanged="halo"),
    Way("shared_preload", {"hops": 1}, ("sage", "gat"), "halo"),
    Way("cooperative", {"batches": 1}, ("sage", "gat"), "halo"),
]


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.convs = nn.ModuleList([LAYERS[kind](WIDTH, HIDDEN), LAYERS[kind](HIDDEN, 2 * CLASSES)])

    def forward(self, blocks: Any, h: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.convs[0](blocks[0], h).flatten(1))
        scores: torch.Tensor = self.convs[1](blocks[1], h).flatten(1)[:, :CLASSES]
        return scores


def train(model: nn.Module, batches: Any, *, bf16: bool) -> list[float]:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=equality.RATE), []
    for blocks, x, labels, targets in batches:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = F.cross_entropy(model(blocks, x.float())[targets], labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def weights_of(model: nn.Module) -> list[Any]:
    assert all(p.dtype == torch.float32 for p in model.parameters())
    return [p.detach().numpy().copy() for p in model.parameters()]


@functools.cache
def one_process(kind: str, *, bf16: bool) -> list[Any]:
    graph, model = equality.plain_graph(), Net(kind)
    targets = graph.ndata["train_mask"].nonzero()[:, 0]
    batch = [graph, graph], graph.ndata["feat"], graph.ndata["label"][targets], targets
    train(model, [batch] * STEPS, bf16=bf16)
    return weights_of(model)


def on_ranks(folder: str) -> dict[str, Any]:
    session, results = start_session(timeout_s=60), {}
    g, rank, world_size = DistGraph(folder), session.topology.rank, session.topology.world_size
    ids = equality.new_ids_of_training(g)
    own_ids = equality.cut(ids, equality.SHARES["uneven"], rank, world_size)
    for way in WAYS:
        strategy = STRATEGIES.get(way.strategy)(session, way.options).open(g)
        loader = equality._loader(strategy, g, own_ids, len(ids))
        for kind in way.layers:
            moved: dict[bool, Counter[str]] = {}
            loops: list[list[Any]] = []
            for bf16, around in ((False, False), (True, True), (True, False)):
                model = strategy.wrap(Net(kind))
                before = session.ledger.snapshot()
                batches = (
                    (blocks, blocks[0].srcdata["feat"], blocks[-1].dstdata["label"], slice(None))
                    for _ in range(STEPS)
                    for _, _, blocks in loader
                )
                with torch.autocast("cpu", torch.bfloat16, enabled=around):
                    losses = train(model, batches, bf16=bf16)
                loops.append(weights_of(model.whole()))
                moved[bf16] = equality.moved_since(session, before)
            with torch.autocast("cpu", torch.bfloat16):
                accuracy = dx.evaluate(model, g, num_layers=2)
            results[f"{way.strategy} {kind}"] = loops, losses, moved, accuracy
    return results


def distance(mine: list[Any], other: list[Any]) -> float:
    return float(np.sqrt(sum(((a - b) ** 2).sum() for a, b in zip(mine, other, strict=True))))


@pytest.mark.wide
@pytest.mark.parametrize(("ranks", "path"), [(2, "dgl"), *wide((2, "torch"), (1, "dgl"), (3, "dgl"))])
def test_every_strategy_is_one_process_but_for_rounding(folder: Path, ranks: int, path: str) -> None:
    """A strategy may round as often again as bfloat16 in one process does: not more than twice its distance
    from float32."""
    correct_kernels()
    results = run_ranks(on_ranks, ranks, args=(str(folder),), environment={"DGLX_MESSAGE_PASSING": path})
    exchanged = {f"{way.strategy} {kind}": way.exchanged for way in WAYS for kind in way.layers}
    assert all(set(result) == set(exchanged) for result in results)
    for name, phase in exchanged.items():
        kind = name.split()[1]
        expected = one_process(kind, bf16=True)
        rounding = distance(expected, one_process(kind, bf16=False))
        for (_, around, weights), losses, moved, accuracy in (result[name] for result in results):
            # Autocast around the whole loop keeps no weights of an earlier step.
            assert distance(around, weights) == 0, name
            assert distance(weights, expected) <= 2 * rounding, name
            assert distance(weights, one_process(kind, bf16=False)) > rounding / 8, name
            assert losses[-1] < losses[0], name
            assert accuracy == results[0][name][3], name
            assert moved[True]["gradients"] == moved[False]["gradients"], name
            # Rows go as they are, and only these layers return the bfloat16 of their last product.
            if kind in ("sage", "pool"):
                assert 2 * moved[True][phase] == moved[False][phase], name
        if phase and ranks > 1:
            assert sum(result[name][2][True][phase] for result in results) > 0, name


def test_parts_are_summed_wide() -> None:
    """1 + 2^-8 + 2^-8 is 1 where bfloat16 rounds twice."""
    shares = [torch.full((3, 2), value, dtype=torch.bfloat16) for value in (1.0, 2.0**-8, 2.0**-8)]
    assert torch.equal(add_in_order(shares), torch.full((3, 2), 1 + 2.0**-7, dtype=torch.bfloat16))
