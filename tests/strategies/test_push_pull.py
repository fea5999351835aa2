"""Push-pull without its pipeline leaves the weights of one plain DGL process, and moves the bytes of 2.4."""

from pathlib import Path
from typing import Any

import dgl
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from dglx_dist.cluster.session import start_session
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.layers.columns import deal_out_columns
from dglx_dist.strategies.push_pull.loader import PushPullLoader
from dglx_dist.strategies.push_pull.model import PushPullModel
from dglx_dist.strategies.push_pull.slices import load_columns
from tests.helpers.ranks import run_ranks
from tests.strategies import equality
from tests.strategies.test_equality import PLACEMENTS, TOLERANCE, difference, plain_weights

KINDS = ("sage", "gcn", "gat")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return equality.write_parts(tmp_path_factory.mktemp("push_pull"))


def train(g: DistGraph, kind: str, share: str, bytes_of: dict[str, int]) -> list[Any]:
    session = g.session
    rank, world_size = session.topology.rank, session.topology.world_size
    mine = equality.cut(equality.new_ids_of_training(g), equality.SHARES[share], rank, world_size)
    columns = deal_out_columns(equality.WIDTH, world_size)[rank]
    slices = {"feat": load_columns(g.kvstore, g.ndata["feat"].kvstore_key, columns, session)}
    sampler = dgl.dataloading.MultiLayerFullNeighborSampler(
        2, prefetch_node_feats=["feat"], prefetch_labels=["label"]
    )
    loader = PushPullLoader(g, mine, sampler, slices, batch_size=max(len(mine), 1) if world_size == 1 else 500)
    torch.manual_seed(11)
    plain = equality.PlainModel(kind).double()
    model = PushPullModel(plain, equality.WIDTH, session, reduction="mean", bucket_bytes=1 << 20)
    optimizer = torch.optim.SGD(model.parameters(), lr=equality.RATE)
    before = session.ledger.snapshot()
    for _ in range(equality.STEPS):
        for _, _, blocks in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(blocks, blocks[0].srcdata["feat"]), blocks[-1].dstdata["label"])
            loss.backward()
            optimizer.step()
    for row in session.ledger.since(before):
        bytes_of[row.phase] = bytes_of.get(row.phase, 0) + row.num_bytes
    state = model.state_dict()
    return [state[name].numpy().copy() for name, _ in equality.PlainModel(kind).named_parameters()]


def on_rank(folder: str) -> dict[str, Any]:
    with start_session(timeout_s=60) as session:
        g = DistGraph(folder)
        shares = list(equality.SHARES) if session.topology.world_size > 1 else ["even"]
        found: dict[str, Any] = {}
        for kind in KINDS:
            for share in shares:
                moved: dict[str, int] = {}
                found[f"{kind}/{share}"] = (train(g, kind, share, moved), moved)
        g.barrier()
        return found


@pytest.mark.parametrize(("ranks", "ranks_per_server"), PLACEMENTS)
def test_weights_are_those_of_one_process(folder: Path, ranks: int, ranks_per_server: int) -> None:
    for found in run_ranks(on_rank, ranks, args=(str(folder),), ranks_per_server=ranks_per_server):
        worst = {cell: difference(w, plain_weights(cell.split("/")[0])) for cell, (w, _) in found.items()}
        assert not {cell: value for cell, value in worst.items() if not value <= TOLERANCE}
        for _, moved in found.values():
            assert "features" not in moved
