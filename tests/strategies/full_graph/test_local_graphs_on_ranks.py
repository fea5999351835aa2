"""``dx.local_graph`` on real ranks: training in the full-graph style against plain DGL in one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import dgl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dglx_dist as dx
from dglx_dist.comm.session import start_session
from dglx_dist.data.storage.writer import write_dataset
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, Assignment
from dglx_dist.strategies.base import STRATEGIES
from tests.helpers import wide
from tests.helpers.ranks import run_ranks
from tests.strategies import equality

KINDS = ("sage", "gcn_symmetric", "gat")


def edge_weights() -> np.ndarray:
    num_edges = len(equality.raw_graph().edges[EDGE_TYPE][0])
    return np.random.default_rng(9).uniform(0.5, 2.0, num_edges)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parts = tmp_path_factory.mktemp("local") / "parts"
    raw = equality.raw_graph()
    part_of = np.random.default_rng(4).choice(4, size=equality.NUM_NODES, p=[0.4, 0.3, 0.2, 0.1])
    assignment = Assignment(num_parts=4, part_of={NODE_TYPE: part_of.astype(np.int32)}, method="test", seed=4)
    write_dataset(replace(raw, edge_data={EDGE_TYPE: {"weight": edge_weights()}}), assignment, parts)
    return parts


class Weighted(nn.Module):
    """In the full-graph style, with edge weights, a norm of degrees and several hops in one layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        hidden = equality.HIDDEN
        self.first = dgl.nn.SAGEConv(equality.WIDTH, hidden, "mean")
        self.second = dgl.nn.GraphConv(hidden, hidden, norm="both", allow_zero_in_degree=True)
        self.norm, self.last = nn.LayerNorm(hidden), dgl.nn.TAGConv(hidden, equality.CLASSES, k=2)
        self.double()

    def forward(self, g: Any, x: Tensor, weights: Tensor) -> Tensor:
        h = torch.relu(self.first(g, x, edge_weight=weights))
        h = h + torch.relu(self.second(g, self.norm(h), edge_weight=weights))
        return self.last(g, h)


def train_weighted(g: Any, model: Any, parameters: Any) -> np.ndarray:
    """The loop of a script for one graph in one process; returns the scores."""
    x, mask, labels, weights = g.ndata["feat"], g.ndata["train_mask"], g.ndata["label"], g.edata["weight"]
    optimizer = torch.optim.SGD(parameters, lr=equality.RATE)
    for _ in range(equality.STEPS):
        loss = F.cross_entropy(model(g, x, weights)[mask], labels[mask])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        scores: np.ndarray = model.eval()(g, x, weights).numpy()
    return scores


def train_on_rank(folder: str) -> dict[str, Any]:
    session = start_session(strategy="fb", timeout_s=60)
    g = DistGraph(folder)
    with pytest.raises(ConfigError, match="no column 'nope'"):
        dx.local_graph(g, columns=["nope"])
    if session.topology.world_size > 1:
        with pytest.raises(ConfigError, match=r"disagree on a local graph: rank 0 has use_pp=False, rank 1 "):
            dx.local_graph(g, use_pp=session.topology.rank > 0)
    lg = dx.local_graph(g, edge_columns=["weight"])
    strategy: Any = STRATEGIES.get("full_graph")(session, {})
    mask, x, labels = (lg.ndata[name] for name in ("train_mask", "feat", "label"))
    results: dict[str, Any] = {"nodes": g.orig_ids(lg.ndata[dgl.NID], "_N").numpy()}
    for kind in KINDS:
        torch.manual_seed(11)
        model = strategy.wrap(equality.PlainModel(kind).double(), g)
        optimizer = torch.optim.SGD(model.parameters(), lr=equality.RATE)
        before = session.ledger.snapshot()
        for _ in range(equality.STEPS):
            loss = F.cross_entropy(model([lg, lg], x)[mask], labels[mask])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        rows = [
            row for row in session.ledger.since(before) if row.phase in ("halo", "halo_gradients", "preload")
        ]
        with torch.no_grad():
            scores = model.eval()([lg, lg], x)
        results[kind] = {
            "weights": [p.detach().numpy().copy() for p in model.whole().parameters()],
            "scores": scores.numpy(),
            "bytes": {
                phase: sum(r.num_bytes for r in rows if r.phase == phase) for phase in ("halo", "preload")
            },
        }
    model = strategy.wrap(Weighted(), g)
    results["weighted"] = {
        "scores": train_weighted(lg, model, model.parameters()),
        "weights": [p.detach().numpy().copy() for p in model.whole().parameters()],
    }
    again = strategy.wrap(dgl.nn.SAGEConv(equality.WIDTH, equality.WIDTH, "mean").double(), g)
    with pytest.raises(ConfigError, match="put both into one"):
        again(lg, torch.relu(again(lg, x)))
    results["halo"] = lg._block.halo_rows
    g.close()
    return results


def one_process() -> tuple[list[np.ndarray], np.ndarray]:
    """What plain DGL leaves of the weighted model."""
    graph, model = equality.plain_graph(), Weighted()
    graph.edata["weight"] = torch.from_numpy(edge_weights())
    scores = train_weighted(graph, model, model.parameters())
    return [p.detach().numpy() for p in model.parameters()], scores


@pytest.mark.parametrize(("ranks", "per_server"), [(1, 1), (4, 2), *wide((2, 1))])
def test_training_on_local_graphs_is_training_on_the_whole_graph(
    folder: Path, ranks: int, per_server: int
) -> None:
    results = run_ranks(train_on_rank, ranks, args=(str(folder),), ranks_per_server=per_server)
    nodes = np.concatenate([one["nodes"] for one in results])
    assert np.array_equal(np.sort(nodes), np.arange(equality.NUM_NODES))
    halo = sum(one["halo"] for one in results)
    for kind in (*KINDS, "weighted"):
        weights, scores = one_process() if kind == "weighted" else equality.one_process(kind)
        for one in results:
            for mine, theirs in zip(one[kind]["weights"], weights, strict=True):
                np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-10)
        found = np.concatenate([one[kind]["scores"] for one in results])
        np.testing.assert_allclose(found, scores[nodes], rtol=0, atol=1e-10)
    # Features went once, when the graph was made: layer 1 of SAGE sends nothing, layer 2 its narrower output.
    moved = [sum(one["sage"]["bytes"][phase] for one in results) for phase in ("halo", "preload")]
    width = min(equality.HIDDEN, equality.CLASSES)
    assert moved == [equality.STEPS * halo * width * 8, 0]
    assert (halo > 0) == (ranks > 1)


def with_mini_batches(folder: str) -> str:
    with start_session(strategy="dp", timeout_s=60):
        with pytest.raises(ConfigError) as caught:
            dx.local_graph(DistGraph(folder))
        return str(caught.value)


def test_strategies_of_mini_batches_are_refused(folder: Path) -> None:
    """They would train, on gradients that count rows of other ranks with a weight of their own."""
    for message in run_ranks(with_mini_batches, 2, args=(str(folder),)):
        assert "strategy 'dp' would weigh" in message
        assert "dx.distribute(graph, strategy='full_graph')" in message
