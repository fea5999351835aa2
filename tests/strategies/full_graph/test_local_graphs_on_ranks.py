"""``dx.local_graph`` on real ranks: training in the full-graph style against plain DGL in one process."""

from __future__ import annotations

from collections import Counter
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
from tests.strategies.test_equality import TOLERANCE, difference

KINDS = ("sage", "gcn_symmetric", "gat", "weighted")


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


def trained(kind: str, g: Any, wrap: Any = lambda model: model) -> tuple[list[np.ndarray], np.ndarray]:
    """Return weights and scores of the loop of a script for one graph in one process."""
    torch.manual_seed(11)
    model = wrap(Weighted() if kind == "weighted" else equality.PlainModel(kind).double())
    x, mask, labels = (g.ndata[name] for name in ("feat", "train_mask", "label"))
    given = (g, x, g.edata["weight"]) if kind == "weighted" else ([g, g], x)
    optimizer = torch.optim.SGD(model.parameters(), lr=equality.RATE)
    for _ in range(equality.STEPS):
        loss = F.cross_entropy(model(*given)[mask], labels[mask])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        scores = model.eval()(*given).numpy()
    return [p.detach().numpy().copy() for p in model.parameters()], scores


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
    results: dict[str, Any] = {"nodes": g.orig_ids(lg.ndata[dgl.NID], "_N").numpy(), "moved": {}}
    for kind in KINDS:
        before = session.ledger.snapshot()
        results[kind] = trained(kind, lg, lambda model: strategy.wrap(model, g))
        moved = Counter[str]()
        for row in session.ledger.since(before):
            moved[row.phase] += row.num_bytes
        results["moved"][kind] = moved["halo_gradients"], moved["preload"]
    again = strategy.wrap(dgl.nn.SAGEConv(equality.WIDTH, equality.WIDTH, "mean").double(), g)
    with pytest.raises(ConfigError, match="put both into one"):
        again(lg, torch.relu(again(lg, lg.ndata["feat"])))
    results["halo"] = lg._block.halo_rows
    g.close()
    return results


@pytest.mark.parametrize(("ranks", "per_server"), [(1, 1), (4, 2), *wide((2, 1))])
def test_training_on_local_graphs_is_training_on_the_whole_graph(
    folder: Path, ranks: int, per_server: int
) -> None:
    results = run_ranks(train_on_rank, ranks, args=(str(folder),), ranks_per_server=per_server)
    nodes = np.concatenate([one["nodes"] for one in results])
    assert np.array_equal(np.sort(nodes), np.arange(equality.NUM_NODES))
    halo = sum(one["halo"] for one in results)
    graph = equality.plain_graph()
    graph.edata["weight"] = torch.from_numpy(edge_weights())
    for kind in KINDS:
        weights, scores = trained(kind, graph)
        assert all(difference(one[kind][0], weights) <= TOLERANCE for one in results)
        found = np.concatenate([one[kind][1] for one in results])
        np.testing.assert_allclose(found, scores[nodes], rtol=0, atol=TOLERANCE)
    # Features went once, when the graph was made: layer 1 of SAGE sends nothing, layer 2 its narrower output.
    moved = np.sum([one["moved"]["sage"] for one in results], axis=0)
    width = min(equality.HIDDEN, equality.CLASSES)
    assert moved.tolist() == [equality.STEPS * halo * width * 8, 0]
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
