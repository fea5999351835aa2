"""The weights of one process, also with penalties, sums, dropout, edge features and trained inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dgl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dglx_dist.comm.session import start_session
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.embedding import DistEmbedding
from dglx_dist.graph.optim import SparseSGD
from dglx_dist.strategies.base import STRATEGIES
from tests.helpers import wide
from tests.helpers.ranks import run_ranks
from tests.strategies import equality
from tests.strategies.equality import CLASSES, HIDDEN, RATE, WIDTH
from tests.strategies.full_graph import runs
from tests.strategies.full_graph.runs import Run
from tests.strategies.test_equality import TOLERANCE, difference

EPOCHS = 4
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "full_graph": ("full_graph", {}),
    "anew": ("full_graph", {"use_pp": False}),
    "one hop": ("shared_preload", {"hops": 1}),
    "closed": ("shared_preload", {}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return equality.write_parts(tmp_path_factory.mktemp("full_graph_weights"))


class Around(nn.Module):
    """An encoder, residuals, norms and dropouts around three convolutions."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.encoder = nn.Linear(WIDTH, HIDDEN)
        self.convs = nn.ModuleList(dgl.nn.SAGEConv(HIDDEN, HIDDEN, "mean") for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2))
        self.last = dgl.nn.GATConv(HIDDEN, CLASSES, 2, dropout, dropout, allow_zero_in_degree=True)
        self.dropout = nn.Dropout(dropout)

    def forward(self, blocks: Any, x: Tensor) -> Tensor:
        h = self.encoder(self.dropout(x))
        for conv, norm, block in zip(self.convs, self.norms, blocks, strict=False):
            h = h[: block.num_dst_nodes()] + conv(block, self.dropout(torch.relu(norm(h))))
        out: Tensor = self.last(blocks[2], h).mean(1)
        return out


def around(dropout: float) -> nn.Module:
    torch.manual_seed(3)
    return Around(dropout).double()


def penalised(model: nn.Module, scores: Tensor, labels: Tensor) -> Tensor:
    """A mean and a penalty on the weights, which goes past the model's output."""
    return F.cross_entropy(scores, labels) + 0.05 * sum(p.square().sum() for p in model.parameters())


def summed(model: nn.Module, scores: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores, labels, reduction="sum") / 100


def on_rank(folder: str) -> dict[str, Any]:
    with start_session(timeout_s=60, seed=9) as session:
        g = DistGraph(folder)
        found: dict[str, Any] = {}
        for name, (strategy, options) in WAYS.items():
            run = Run(strategy, options, epochs=EPOCHS)
            for dropout in (0.0, 0.4):
                found[name, f"dropout {dropout}"] = runs.train(g, run, around(dropout), 3).weights
            for loss, reduction in ((penalised, "mean"), (summed, "sum")):
                run = Run(strategy, options, epochs=EPOCHS, loss=loss, reduction=reduction)
                model = runs.first_model("gat")
                found[name, loss.__name__] = runs.train(g, run, model).weights
            found[name, "embedding"] = with_embedding(g, name, strategy, options)
        assert session.step_share is None
        g.barrier()
        return found


def with_embedding(g: DistGraph, name: str, strategy: str, options: dict[str, Any]) -> list[Any]:
    """Train rows of nodes that go in, as the ranks' owners and a plain nn.Embedding would."""
    embedding = DistEmbedding(g.num_nodes(), WIDTH, f"rows of {name}", dtype=torch.float64, graph=g)
    first = torch.linspace(-1, 1, g.num_nodes() * WIDTH, dtype=torch.float64).reshape(-1, WIDTH)
    mine = torch.arange(g.num_nodes())[g.rank() :: g.session.topology.world_size]
    # By original ids, whatever the ids of this graph are.
    embedding.weight[mine] = first[g.orig_ids(mine)]
    g.barrier()
    way: Any = STRATEGIES.get(strategy)(g.session, options)
    loader = way.loader(g, runs.my_share(g), runs.sampler())
    model = way.wrap(runs.first_model("sage"), g)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    sparse = SparseSGD([embedding], lr=RATE)
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
    rows = torch.linspace(-1, 1, graph.num_nodes() * WIDTH, dtype=torch.float64).reshape(-1, WIDTH)
    rows.requires_grad_()
    model = runs.first_model("sage")
    optimizer = torch.optim.SGD([*model.parameters(), rows], lr=RATE)
    targets = graph.ndata["train_mask"].nonzero()[:, 0]
    for _ in range(EPOCHS):
        loss = F.cross_entropy(model([graph, graph], rows)[targets], graph.ndata["label"][targets])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it bare
        optimizer.step()
    return [*(p.detach().numpy().copy() for p in model.parameters()), rows.detach().numpy()]


def plain_around() -> list[Any]:
    """Residuals cut rows off, which the whole graph in place of a block does not need."""

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = around(0.0)

        def forward(self, graphs: Any, x: Tensor) -> Tensor:
            out: Tensor = self.inner([graphs[0]] * 3, x)
            return out

    return runs.one_process(Blocks(), epochs=EPOCHS)


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Any]:
    """What one process leaves; of dropout, what one rank does."""
    alone = run_ranks(on_rank, 1, args=(str(folder),))[0]
    plain = {
        "dropout 0.0": plain_around(),
        "penalised": runs.one_process(runs.first_model("gat"), penalised, EPOCHS),
        "summed": runs.one_process(runs.first_model("gat"), summed, EPOCHS),
        "embedding": plain_embedding(),
        "dropout 0.4": alone["full_graph", "dropout 0.4"],
    }
    check(alone, plain)
    assert difference(plain["dropout 0.4"], plain["dropout 0.0"]) > 1e-3
    return plain


def check(found: dict[Any, Any], plain: dict[str, Any]) -> None:
    worst = {key: difference(weights, plain[key[1]]) for key, weights in found.items()}
    assert not {key: value for key, value in worst.items() if not value <= TOLERANCE}


@pytest.mark.parametrize(("ranks", "ranks_per_server"), [(2, 1), *wide((2, 2), (4, 2), (3, 1))])
def test_ranks_leave_the_weights_of_one_process(
    folder: Path, expected: dict[str, Any], ranks: int, ranks_per_server: int
) -> None:
    for found in run_ranks(on_rank, ranks, args=(str(folder),), ranks_per_server=ranks_per_server):
        check(found, expected)
