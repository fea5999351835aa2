"""Losses and loops that users write leave the weights of one process; a rank that dies is named."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import dgl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dglx_dist.comm.session import start_session
from dglx_dist.errors import PeerError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.embedding import DistEmbedding
from dglx_dist.graph.optim import SparseSGD
from dglx_dist.strategies.base import STRATEGIES
from tests.helpers.ranks import run_ranks, start_ranks
from tests.strategies import equality
from tests.strategies.full_graph import runs
from tests.strategies.full_graph.runs import Run
from tests.strategies.test_equality import TOLERANCE, difference

EPOCHS = 3
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "full_graph": ("full_graph", {}),
    "anew": ("full_graph", {"use_pp": False}),
    "one hop": ("shared_preload", {"hops": 1}),
    "closed": ("shared_preload", {}),
}
Step = Callable[[nn.Module, Any, Tensor, Tensor], None]
"""(model, blocks, features, labels): forward and backward."""


def forward_twice(model: nn.Module, blocks: Any, x: Tensor, labels: Tensor) -> None:
    """One backward through two passes, as consistency losses have it."""
    first, second = model(blocks, x), model(blocks, 2 * x)
    (F.cross_entropy(first, labels) + F.cross_entropy(second, labels)).backward()  # type: ignore[no-untyped-call]


def accumulated(model: nn.Module, blocks: Any, x: Tensor, labels: Tensor) -> None:
    """Two backwards whose gradients add up."""
    for scale in (1, 2):
        F.cross_entropy(model(blocks, scale * x), labels).backward()  # type: ignore[no-untyped-call]


def penalised(model: nn.Module, scores: Tensor, labels: Tensor) -> Tensor:
    """A mean and a penalty on the weights, which goes past the model's output."""
    return F.cross_entropy(scores, labels) + 0.05 * sum(p.square().sum() for p in model.parameters())


def summed(model: nn.Module, scores: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores, labels, reduction="sum") / 100


LOSSES = {"penalised": (penalised, "mean"), "summed": (summed, "sum")}
STEPS: dict[str, Step] = {"forward twice": forward_twice, "accumulated": accumulated}


def trained(g: DistGraph, way: str, step: Step) -> list[Any]:
    strategy, options = WAYS[way]
    made: Any = STRATEGIES.get(strategy)(g.session, options)
    loader = made.loader(g, runs.my_share(g), runs.sampler())
    model = made.wrap(runs.first_model("sage"), g)
    optimizer = torch.optim.SGD(model.parameters(), lr=equality.RATE)
    for _ in range(EPOCHS):
        for _, _, blocks in loader:
            optimizer.zero_grad()
            step(model, blocks, blocks[0].srcdata["feat"], blocks[-1].dstdata["label"])
            optimizer.step()
    return [p.detach().numpy().copy() for p in model.parameters()]


def trained_in_two(g: DistGraph, way: str) -> list[Any]:
    """Two wrapped models, one on the rows that the other one returns."""
    strategy, options = WAYS[way]
    made: Any = STRATEGIES.get(strategy)(g.session, options)
    loader = made.loader(g, runs.my_share(g), runs.sampler())
    module: Any = runs.first_model("sage")
    body, head = (made.wrap(conv, g) for conv in module.convs)
    optimizer = torch.optim.SGD(module.parameters(), lr=equality.RATE)
    for _ in range(EPOCHS):
        for _, _, blocks in loader:
            hidden = torch.relu(body(blocks[0], blocks[0].srcdata["feat"]))
            optimizer.zero_grad()
            F.cross_entropy(head(blocks[1], hidden), blocks[-1].dstdata["label"]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return [p.detach().numpy().copy() for p in module.parameters()]


def first_rows(nodes: int, width: int) -> Tensor:
    return torch.linspace(-1, 1, nodes * width, dtype=torch.float64).reshape(nodes, width)


def with_embedding(g: DistGraph, way: str) -> list[Any]:
    """Train rows of nodes that go in, as the ranks' owners and a plain nn.Embedding would."""
    size = g.num_nodes(), equality.WIDTH
    embedding = DistEmbedding(*size, f"rows of {way}", dtype=torch.float64, graph=g)
    first = first_rows(*size)
    mine = torch.arange(g.num_nodes())[g.rank() :: g.session.topology.world_size]
    # By original ids, whatever the ids of this graph are.
    embedding.weight[mine] = first[g.orig_ids(mine)]
    g.barrier()
    strategy, options = WAYS[way]
    made: Any = STRATEGIES.get(strategy)(g.session, options)
    loader = made.loader(g, runs.my_share(g), runs.sampler())
    model = made.wrap(runs.first_model("sage"), g)
    optimizer = torch.optim.SGD(model.parameters(), lr=equality.RATE)
    sparse = SparseSGD([embedding], lr=equality.RATE)
    for _ in range(EPOCHS):
        for inputs, _, blocks in loader:
            loss = F.cross_entropy(model(blocks, embedding(inputs)), blocks[-1].dstdata["label"])
            optimizer.zero_grad()
            sparse.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it bare
            optimizer.step()
            sparse.step()
    g.barrier()
    rows = embedding.weight[torch.arange(g.num_nodes())]
    by_original = torch.empty_like(rows)
    by_original[g.orig_ids(torch.arange(g.num_nodes()))] = rows
    return [*(p.detach().numpy().copy() for p in model.parameters()), by_original.numpy()]


def plain_embedding() -> list[Any]:
    graph = equality.plain_graph()
    rows = first_rows(graph.num_nodes(), equality.WIDTH).requires_grad_()
    model = runs.first_model("sage")
    optimizer = torch.optim.SGD([*model.parameters(), rows], lr=equality.RATE)
    targets = graph.ndata["train_mask"].nonzero()[:, 0]
    for _ in range(EPOCHS):
        loss = F.cross_entropy(model([graph, graph], rows)[targets], graph.ndata["label"][targets])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it bare
        optimizer.step()
    return [*(p.detach().numpy().copy() for p in model.parameters()), rows.detach().numpy()]


def rows_and_gradients(g: DistGraph, way: str) -> dict[str, Any]:
    """What the first layer computes of which nodes, and the gradients of what goes in, by original id."""
    strategy, options = WAYS[way]
    made: Any = STRATEGIES.get(strategy)(g.session, options)
    ((_, _, blocks),) = made.loader(g, runs.my_share(g), runs.sampler())
    module: Any = runs.first_model("sage")
    hidden: list[Tensor] = []
    module.convs[0].register_forward_hook(lambda _, __, out: hidden.append(out.detach()))
    x = blocks[0].srcdata["feat"].clone().requires_grad_()
    scores = made.wrap(module, g)(blocks, x)
    F.cross_entropy(scores, blocks[-1].dstdata["label"]).backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    return {
        "sources": g.orig_ids(blocks[0].srcdata[dgl.NID]).numpy(),
        # Gradients inside are those of the sum of the ranks' weighed losses, times the number of ranks.
        "gradients": x.grad.numpy() / g.session.topology.world_size,
        "nodes": g.orig_ids(blocks[0].dstdata[dgl.NID]).numpy(),
        "hidden": hidden[0].numpy(),
    }


def on_rank(folder: str) -> dict[str, Any]:
    with start_session(timeout_s=60) as session:
        g = DistGraph(folder)
        found: dict[str, Any] = {way: rows_and_gradients(g, way) for way in WAYS}
        found |= {name: {way: trained(g, way, step) for way in WAYS} for name, step in STEPS.items()}
        found["in two"] = {way: trained_in_two(g, way) for way in WAYS}
        found["embedding"] = {way: with_embedding(g, way) for way in WAYS}
        for name, (loss, reduction) in LOSSES.items():
            found[name] = {
                way: runs.train(
                    g,
                    Run(*WAYS[way], epochs=EPOCHS, loss=loss, reduction=reduction),
                    runs.first_model("gat"),
                ).weights
                for way in WAYS
            }
        assert session.step_share is None
        g.barrier()
        return found


def plain_steps(step: Step) -> list[Any]:
    graph = equality.plain_graph()
    model = runs.first_model("sage")
    targets = graph.ndata["train_mask"].nonzero()[:, 0]
    optimizer = torch.optim.SGD(model.parameters(), lr=equality.RATE)

    class OfTargets(nn.Module):
        def forward(self, graphs: Any, x: Tensor) -> Tensor:
            out: Tensor = model(graphs, x)[targets]
            return out

    for _ in range(EPOCHS):
        optimizer.zero_grad()
        step(OfTargets(), [graph, graph], graph.ndata["feat"], graph.ndata["label"][targets])
        optimizer.step()
    return [p.detach().numpy().copy() for p in model.parameters()]


@pytest.fixture(scope="module")
def results(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(on_rank, 4, args=(str(folder),), ranks_per_server=2, timeout_s=240)


EXPECTED: dict[str, Callable[[], list[Any]]] = {
    **{name: partial(plain_steps, step) for name, step in STEPS.items()},
    **{
        name: partial(lambda loss: runs.one_process(runs.first_model("gat"), loss, EPOCHS), loss)
        for name, (loss, _) in LOSSES.items()
    },
    # One model goes on from the rows of another.
    "in two": lambda: runs.one_process(runs.first_model("sage"), epochs=EPOCHS),
    "embedding": plain_embedding,
}


@pytest.mark.parametrize("name", EXPECTED)
def test_ranks_leave_the_weights_of_one_process(results: list[dict[str, Any]], name: str) -> None:
    expected = EXPECTED[name]()
    for result in results:
        for way in WAYS:
            assert difference(result[name][way], expected) <= TOLERANCE, way


@pytest.mark.parametrize("way", ["full_graph", "one hop", "closed"])
def test_replicas_are_their_owners_rows_and_share_its_gradient(
    results: list[dict[str, Any]], way: str
) -> None:
    graph = equality.plain_graph()
    model: Any = runs.first_model("sage")
    x = graph.ndata["feat"].requires_grad_()
    hidden = model.convs[0](graph, x).detach().numpy()
    targets = graph.ndata["train_mask"].nonzero()[:, 0]
    F.cross_entropy(model([graph, graph], x)[targets], graph.ndata["label"][targets]).backward()  # type: ignore[no-untyped-call]
    times, summed = np.zeros(equality.NUM_NODES, int), np.zeros((equality.NUM_NODES, equality.WIDTH))
    for result in results:
        found = result[way]
        np.testing.assert_allclose(found["hidden"], hidden[found["nodes"]], rtol=0, atol=TOLERANCE)
        np.add.at(times, found["nodes"], 1)
        np.add.at(summed, found["sources"], found["gradients"])
    # Two servers compute some nodes where they close over a hop of the neighbourhood, and none else.
    assert times.max() == (2 if way == "closed" else 1)
    assert x.grad is not None
    np.testing.assert_allclose(summed, x.grad.numpy(), rtol=0, atol=TOLERANCE)
    needed = np.unique(np.concatenate([result[way]["sources"] for result in results]))
    unneeded = np.setdiff1d(np.arange(equality.NUM_NODES), needed)
    assert (summed[unneeded] == 0).all()


def with_a_death(folder: str) -> str:
    session = start_session(timeout_s=30)
    g = DistGraph(folder)

    def step(model: nn.Module, blocks: Any, x: Tensor, labels: Tensor) -> None:
        if session.topology.rank == 1 and blocks[0].step_number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        F.cross_entropy(model(blocks, x), labels).backward()  # type: ignore[no-untyped-call]

    with pytest.raises(PeerError) as caught:
        trained(g, "full_graph", step)
    session.fail(caught.value)
    session.close(failed=True)
    return str(caught.value)


def test_a_rank_killed_in_an_epoch_is_named_by_all(folder: Path) -> None:
    outcomes = start_ranks(with_a_death, 3, args=(str(folder),), ranks_per_server=1)
    assert outcomes[1].exitcode == -signal.SIGKILL
    for rank in (0, 2):
        assert "rank 1" in str(outcomes[rank].result), outcomes[rank]
