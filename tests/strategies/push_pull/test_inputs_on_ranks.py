"""What stands before the first layer, and layers that send rows, on real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dgl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dglx_dist.comm.session import start_session
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.strategies.base import STRATEGIES
from tests.helpers.ranks import run_ranks
from tests.strategies.equality import CLASSES, HIDDEN, NUM_NODES, WIDTH, new_ids_of_training, write_parts

KEYED = ("norm", "embedding", "attention")
"""With dropout, which is keyed: any number of parts must drop the same."""
PLAIN = ("plain-norm", "plain-embedding", "pool", "gatv2", "edge")
"""Without: data parallel training must give the same."""
BY_ROWS = ("pool", "gatv2", "edge")


class Model(nn.Module):
    """A first layer with something before it, and a second one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        p = 0.3 if kind in KEYED else 0.0
        self.rows = (
            nn.Embedding(NUM_NODES, WIDTH, sparse=kind == "embedding") if "embedding" in kind else None
        )
        self.norm = nn.LayerNorm(WIDTH) if "norm" in kind else nn.Identity()
        self.drop = nn.Dropout(p)
        self.first = {
            "attention": lambda: dgl.nn.GATConv(
                WIDTH, HIDDEN // 2, 2, feat_drop=p, attn_drop=p, allow_zero_in_degree=True
            ),
            "pool": lambda: dgl.nn.SAGEConv(WIDTH, HIDDEN, "pool"),
            "gatv2": lambda: dgl.nn.GATv2Conv(WIDTH, HIDDEN // 2, 2, allow_zero_in_degree=True),
            "edge": lambda: dgl.nn.EdgeConv(WIDTH, HIDDEN, allow_zero_in_degree=True),
        }.get(kind, lambda: dgl.nn.SAGEConv(WIDTH, HIDDEN, "mean", feat_drop=p))()
        self.last = dgl.nn.SAGEConv(HIDDEN, CLASSES, "mean")

    def forward(self, blocks: list[Any], x: Tensor) -> Tensor:
        h = x if self.rows is None else self.rows(blocks[0].srcdata[dgl.NID])
        h = self.first(blocks[0], self.drop(self.norm(h))).flatten(1)
        return self.last(blocks[1], torch.tanh(h))


def weights_of(
    strategy: Any, g: DistGraph, kind: str, seeds: Tensor, batch_size: int, epochs: int
) -> list[np.ndarray[Any, Any]]:
    torch.manual_seed(3)
    model = strategy.wrap(Model(kind).double(), g)
    sampler = dgl.dataloading.MultiLayerFullNeighborSampler(
        2, prefetch_node_feats=["feat"], prefetch_labels=["label"]
    )
    loader = strategy.loader(g, seeds, sampler, batch_size=batch_size, shuffle=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(epochs):
        for _, _, blocks in loader:
            loss = F.cross_entropy(model(blocks, blocks[0].srcdata["feat"]), blocks[-1].dstdata["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return [p.detach().numpy().copy() for p in model.whole().parameters()]


def on_ranks(folder: str) -> dict[str, Any]:
    session = start_session(timeout_s=60)
    g = DistGraph(folder)
    rank, world_size = session.topology.rank, session.topology.world_size
    everyone = new_ids_of_training(g)
    mine = everyone[rank::world_size]
    found: dict[str, Any] = {}
    for kind in KEYED:
        ours = STRATEGIES.get("push_pull")(session, {})
        found[f"push_pull/{kind}"] = weights_of(ours, g, kind, mine, len(everyone), 3)
        # The first rank has all seeds, so that batches are the same on any number of ranks.
        ours = STRATEGIES.get("push_pull")(session, {"depth": 3})
        first = everyone if rank == 0 else everyone[:0]
        found[f"depth-3/{kind}"] = weights_of(ours, g, kind, first, 40, 2)
    for kind in PLAIN if world_size > 1 else ():
        for name, options in (
            ("push_pull", {"sync": "inputs"} if kind in BY_ROWS else {}),
            ("data_parallel", {}),
        ):
            strategy = STRATEGIES.get(name)(session, options)
            found[f"{name}/{kind}"] = weights_of(strategy, g, kind, mine, len(everyone), 3)
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    folder: Path = write_parts(tmp_path_factory.mktemp("inputs"))
    return {ranks: run_ranks(on_ranks, ranks, args=(str(folder),)) for ranks in (1, 3)}


def same(found: list[Any], expected: list[Any]) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", KEYED)
@pytest.mark.parametrize("how", ["push_pull", "depth-3"])
def test_dropout_norm_and_embedding_are_the_same_on_any_number_of_parts(
    trained: dict[int, list[dict[str, Any]]], how: str, kind: str
) -> None:
    (alone,) = trained[1]
    for rank in trained[3]:
        same(rank[f"{how}/{kind}"], alone[f"{how}/{kind}"])


@pytest.mark.parametrize("kind", PLAIN)
def test_without_dropout_data_parallel_gives_the_same(
    trained: dict[int, list[dict[str, Any]]], kind: str
) -> None:
    for rank in trained[3]:
        same(rank[f"push_pull/{kind}"], rank[f"data_parallel/{kind}"])
