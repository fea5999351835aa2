"""``dx.local_graph`` on real ranks: training in the full-graph style against plain DGL in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dgl
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import dglx_dist as dx
from dglx_dist.cluster.session import start_session
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.strategies import STRATEGIES
from tests.helpers.ranks import run_ranks
from tests.strategies import equality

KINDS = ("sage", "gcn_symmetric", "gat")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return equality.write_parts(tmp_path_factory.mktemp("local"))


def train_on_rank(folder: str) -> dict[str, Any]:
    session = start_session(timeout_s=60)
    g = DistGraph(folder)
    with pytest.raises(ConfigError, match="no column 'nope'"):
        dx.local_graph(g, columns=["nope"])
    lg = dx.local_graph(g)
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
    results["halo"] = len(lg._block._halo._nodes) - lg.num_nodes() - lg._block._halo.repeats
    g.close()
    return results


@pytest.mark.parametrize(("ranks", "per_server"), [(3, 2), (4, 1)])
def test_training_on_local_graphs_is_training_on_the_whole_graph(
    folder: Path, ranks: int, per_server: int
) -> None:
    results = run_ranks(train_on_rank, ranks, args=(str(folder),), ranks_per_server=per_server)
    nodes = np.concatenate([one["nodes"] for one in results])
    assert np.array_equal(np.sort(nodes), np.arange(equality.NUM_NODES))
    halo = sum(one["halo"] for one in results)
    for kind in KINDS:
        weights, scores = equality.one_process(kind)
        for one in results:
            for mine, theirs in zip(one[kind]["weights"], weights, strict=True):
                np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-10)
        found = np.concatenate([one[kind]["scores"] for one in results])
        np.testing.assert_allclose(found, scores[nodes], rtol=0, atol=1e-10)
    # Features went once, when the graph was made: layer 1 of SAGE sends nothing, layer 2 its narrower output.
    moved = [sum(one["sage"]["bytes"][phase] for one in results) for phase in ("halo", "preload")]
    width = min(equality.HIDDEN, equality.CLASSES)
    assert moved == [equality.STEPS * halo * width * 8, 0]
