"""Losses and loops that users write leave the weights of one process; a rank that dies is named."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dgl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dglx_dist as dx
from dglx_dist.comm.session import start_session
from dglx_dist.errors import PeerError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.embedding import DistEmbedding
from dglx_dist.graph.optim import SparseSGD
from dglx_dist.strategies.base import STRATEGIES
from tests.helpers.ranks import run_ranks, start_ranks
from tests.strategies import equality
from tests.strategies.full_graph import runs
from tests.strategies.test_equality import TOLERANCE, difference

EPOCHS = 3
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "full_graph": ("full_graph", {}),
    "anew": ("full_graph", {"use_pp": False}),
    "one hop": ("shared_preload", {"hops": 1}),
    "closed": ("shared_preload", {}),
}
LOCAL = "local graph"
"""Another way: ``dx.local_graph`` in place of a loader."""


def forward_twice(model: Any, blocks: Any, x: Tensor, labels: Tensor) -> None:
    first, second = model(blocks, x), model(blocks, 2 * x)
    (F.cross_entropy(first, labels) + F.cross_entropy(second, labels)).backward()  # type: ignore[no-untyped-call]


def accumulate(model: Any, blocks: Any, x: Tensor, labels: Tensor) -> None:
    for scale in (1, 2):
        runs.mean_loss(model, blocks, scale * x, labels)


def add_penalty(model: Any, blocks: Any, x: Tensor, labels: Tensor) -> None:
    """A mean and a penalty on the weights, which goes past the model's output."""
    penalty = 0.05 * sum(p.square().sum() for p in model.parameters())
    (F.cross_entropy(model(blocks, x), labels) + penalty).backward()  # type: ignore[no-untyped-call]


def sum_loss(model: Any, blocks: Any, x: Tensor, labels: Tensor) -> None:
    (F.cross_entropy(model(blocks, x), labels, reduction="sum") / 100).backward()  # type: ignore[no-untyped-call]


STEPS: dict[str, tuple[runs.Step, str, str]] = {
    "forward twice": (forward_twice, "sage", "mean"),
    "accumulate": (accumulate, "sage", "mean"),
    "add_penalty": (add_penalty, "gat", "mean"),
    "sum_loss": (sum_loss, "gat", "sum"),
}
"""With the model and the reduction."""


def on_local_graph(g: DistGraph, step: runs.Step, kind: str, reduction: str = "mean") -> list[Any]:
    strategy: Any = STRATEGIES.get("full_graph")(g.session, {}).open(g)
    lg, module = dx.local_graph(g), runs.first_model(kind)
    mask = lg.ndata["train_mask"]
    batch = [lg, lg], lg.ndata["feat"], lg.ndata["label"][mask]
    model = runs.OfTargets(strategy.wrap(module, reduction), mask)
    return runs.train(module, model, lambda: [batch], step, epochs=EPOCHS)


def train_with(
    g: DistGraph, way: str, step: runs.Step, kind: str = "sage", reduction: str = "mean"
) -> list[Any]:
    if way == LOCAL:
        return on_local_graph(g, step, kind, reduction)
    (strategy, loader), module = runs.open_loader(g, *WAYS[way]), runs.first_model(kind)
    return runs.train(module, strategy.wrap(module, reduction), runs.batches_of(loader), step, epochs=EPOCHS)


def train_in_two(g: DistGraph, way: str) -> list[Any]:
    """Two wrapped models, one on the rows that the other one returns."""
    strategy, loader = runs.open_loader(g, *WAYS[way])
    module: Any = runs.first_model("sage")
    body, head = (strategy.wrap(conv) for conv in module.convs)

    def both(blocks: Any, x: Tensor) -> Any:
        return head(blocks[1], torch.relu(body(blocks[0], x)))

    return runs.train(module, both, runs.batches_of(loader), epochs=EPOCHS)


def first_rows(nodes: int, width: int) -> Tensor:
    return torch.linspace(-1, 1, nodes * width, dtype=torch.float64).reshape(nodes, width)


def with_embedding(g: DistGraph, way: str) -> list[Any]:
    """Train rows of nodes that go in, as the ranks' owners and a plain nn.Embedding would."""
    size, everyone = (g.num_nodes(), equality.WIDTH), torch.arange(g.num_nodes())
    embedding = DistEmbedding(*size, f"rows of {way}", dtype=torch.float64, graph=g)
    own = everyone[g.rank() :: g.session.topology.world_size]
    # By original ids, whatever the ids of this graph are.
    embedding.weight[own] = first_rows(*size)[g.orig_ids(own)]
    g.barrier()
    (strategy, loader), module = runs.open_loader(g, *WAYS[way]), runs.first_model("sage")
    sparse = SparseSGD([embedding], lr=equality.RATE)

    def batches() -> Iterator[tuple[Any, Tensor, Tensor]]:
        for inputs, _, blocks in loader:
            sparse.zero_grad()
            yield blocks, embedding(inputs), blocks[-1].dstdata["label"]
            sparse.step()

    weights = runs.train(module, strategy.wrap(module), batches, epochs=EPOCHS)
    g.barrier()
    by_original = torch.empty(size, dtype=torch.float64)
    by_original[g.orig_ids(everyone)] = embedding.weight[everyone]
    return [*weights, by_original.numpy()]


def plain_embedding() -> list[Any]:
    graph, module = equality.plain_graph(), runs.first_model("sage")
    rows = first_rows(graph.num_nodes(), equality.WIDTH).requires_grad_()
    targets = graph.ndata["train_mask"].nonzero()[:, 0]

    def batches() -> Iterator[tuple[Any, Tensor, Tensor]]:
        yield [graph, graph], rows, graph.ndata["label"][targets]
        assert rows.grad is not None
        rows.data -= equality.RATE * rows.grad
        rows.grad = None

    weights = runs.train(module, runs.OfTargets(module, targets), batches, epochs=EPOCHS)
    return [*weights, rows.detach().numpy()]


def rows_and_gradients(g: DistGraph, way: str) -> dict[str, Any]:
    """Return the rows of the first layer and the gradients of its input, with the original ids of both."""
    strategy, loader = runs.open_loader(g, *WAYS[way])
    ((_, _, blocks),) = loader
    module: Any = runs.first_model("sage")
    hidden: list[Tensor] = []
    module.convs[0].register_forward_hook(lambda _, __, out: hidden.append(out.detach()))
    x = blocks[0].srcdata["feat"].clone().requires_grad_()
    runs.mean_loss(strategy.wrap(module), blocks, x, blocks[-1].dstdata["label"])
    assert x.grad is not None
    return {
        "sources": g.orig_ids(blocks[0].srcdata[dgl.NID]).numpy(),
        # Gradients inside are those of the sum of the ranks' weighed losses, times the number of ranks.
        "gradients": x.grad.numpy() / g.session.topology.world_size,
        "nodes": g.orig_ids(blocks[0].dstdata[dgl.NID]).numpy(),
        "hidden": hidden[0].numpy(),
    }


def on_rank(folder: str) -> dict[str, Any]:
    with start_session(strategy="full_graph", timeout_s=60) as session:
        g = DistGraph(folder)
        results: dict[str, Any] = {way: rows_and_gradients(g, way) for way in WAYS}
        results |= {
            name: {way: train_with(g, way, *case) for way in (*WAYS, LOCAL)} for name, case in STEPS.items()
        }
        before = session.ledger.snapshot()
        results["plain"] = {LOCAL: on_local_graph(g, runs.mean_loss, "sage")}
        moved = runs.moved_since(session, before)
        results["bytes"] = [moved["halo", False] + moved["halo", True], dx.local_graph(g)._block.halo_rows]
        results["in two"] = {way: train_in_two(g, way) for way in WAYS}
        results["embedding"] = {way: with_embedding(g, way) for way in WAYS}
        assert session.step_share is None
        g.barrier()
        return results


@pytest.fixture(scope="module")
def results(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(on_rank, 4, args=(str(folder),), ranks_per_server=2, timeout_s=240)


def expected_of(name: str) -> list[Any]:
    if name == "embedding":
        return plain_embedding()
    step, kind, _ = STEPS.get(name, (runs.mean_loss, "sage", "mean"))
    return runs.one_process(runs.first_model(kind), step, EPOCHS)


@pytest.mark.parametrize("name", [*STEPS, "plain", "in two", "embedding"])
def test_ranks_leave_the_weights_of_one_process(results: list[dict[str, Any]], name: str) -> None:
    expected = expected_of(name)
    for result in results:
        for way, weights in result[name].items():
            assert difference(weights, expected) <= TOLERANCE, way


def test_a_local_graph_of_one_rank_is_the_whole_graph(folder: Path) -> None:
    with start_session(strategy="full_graph"), contextlib.closing(DistGraph(folder)) as g:
        weights = on_local_graph(g, runs.mean_loss, "sage")
    assert difference(weights, expected_of("plain")) <= TOLERANCE


def test_a_local_graph_sends_features_once_and_narrower_outputs(
    results: list[dict[str, Any]],
) -> None:
    moved, halo = np.sum([result["bytes"] for result in results], axis=0).tolist()
    assert moved == EPOCHS * halo * min(equality.HIDDEN, equality.CLASSES) * 8 > 0


@pytest.mark.parametrize("way", ["full_graph", "one hop", "closed"])
def test_replicas_have_their_owners_rows_and_gradient(results: list[dict[str, Any]], way: str) -> None:
    graph = equality.plain_graph()
    model: Any = runs.first_model("sage")
    x = graph.ndata["feat"].requires_grad_()
    hidden = model.convs[0](graph, x).detach().numpy()
    targets = graph.ndata["train_mask"].nonzero()[:, 0]
    F.cross_entropy(model([graph, graph], x)[targets], graph.ndata["label"][targets]).backward()  # type: ignore[no-untyped-call]
    times, total = np.zeros(equality.NUM_NODES, int), np.zeros((equality.NUM_NODES, equality.WIDTH))
    for result in results:
        rank_results = result[way]
        np.testing.assert_allclose(
            rank_results["hidden"], hidden[rank_results["nodes"]], rtol=0, atol=TOLERANCE
        )
        np.add.at(times, rank_results["nodes"], 1)
        np.add.at(total, rank_results["sources"], rank_results["gradients"])
    # Two servers compute some nodes where they close over a hop of the neighbourhood, and none else.
    assert times.max() == (2 if way == "closed" else 1)
    assert x.grad is not None
    np.testing.assert_allclose(total, x.grad.numpy(), rtol=0, atol=TOLERANCE)
    needed = np.unique(np.concatenate([result[way]["sources"] for result in results]))
    unneeded = np.setdiff1d(np.arange(equality.NUM_NODES), needed)
    assert (total[unneeded] == 0).all()


def with_a_death(folder: str) -> str:
    session = start_session(timeout_s=30)
    g = DistGraph(folder)

    def step(model: Any, blocks: Any, x: Tensor, labels: Tensor) -> None:
        if session.topology.rank == 1 and blocks[0].step_number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        runs.mean_loss(model, blocks, x, labels)

    with pytest.raises(PeerError) as caught:
        train_with(g, "full_graph", step)
    session.fail(caught.value)
    session.close(failed=True)
    return str(caught.value)


def test_a_rank_killed_in_an_epoch_is_named_by_all(folder: Path) -> None:
    outcomes = start_ranks(with_a_death, 3, args=(str(folder),), ranks_per_server=1)
    assert outcomes[1].exitcode == -signal.SIGKILL
    for rank in (0, 2):
        assert "rank 1" in str(outcomes[rank].result), outcomes[rank]
