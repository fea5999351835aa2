"""Push-pull without its pipeline leaves the weights of one plain DGL process, and moves the bytes of 2.4."""

from collections import Counter
from pathlib import Path
from typing import Any

import dgl
import pytest
import torch
import torch.nn.functional as F

from dglx_dist.comm.session import start_session
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.strategies.base import STRATEGIES
from dglx_dist.strategies.push_pull.exchange import BACKWARD, FORWARD, STRUCTURE
from tests.helpers import wide
from tests.helpers.ranks import run_ranks
from tests.strategies import equality
from tests.strategies.test_equality import TOLERANCE, difference, plain_weights

KINDS = ("sage", "gcn", "gat")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return equality.write_parts(tmp_path_factory.mktemp("push_pull"))


def train(g: DistGraph, kind: str, share: str, moved: Counter[str]) -> list[Any]:
    """Return the weights; add what this rank sent, and the sizes of its blocks, to ``moved``."""
    session = g.session
    rank, world_size = session.topology.rank, session.topology.world_size
    mine = equality.cut(equality.new_ids_of_training(g), equality.SHARES[share], rank, world_size)
    sampler = dgl.dataloading.MultiLayerFullNeighborSampler(
        2, prefetch_node_feats=["feat"], prefetch_labels=["label"]
    )
    strategy = STRATEGIES.get("push_pull")(session, {"structure": "push"})
    loader = strategy.loader(g, mine, sampler, batch_size=equality.NUM_NODES)
    torch.manual_seed(11)
    model = strategy.wrap(equality.PlainModel(kind).double(), g)
    optimizer = torch.optim.SGD(model.parameters(), lr=equality.RATE)
    before = session.ledger.snapshot()
    for _ in range(equality.STEPS):
        for input_nodes, _, blocks in loader:
            moved["L0"] += len(input_nodes)
            moved["D1"] += blocks[0].num_dst_nodes()
            moved["E1"] += blocks[0].num_edges()
            optimizer.zero_grad()
            loss = F.cross_entropy(model(blocks, blocks[0].srcdata["feat"]), blocks[-1].dstdata["label"])
            loss.backward()
            optimizer.step()
    for row in session.ledger.since(before):
        moved[row.phase] += row.num_bytes
    state = model.state_dict()
    return [state[name].numpy().copy() for name, _ in equality.PlainModel(kind).named_parameters()]


def on_rank(folder: str) -> dict[str, Any]:
    with start_session(timeout_s=60) as session:
        g = DistGraph(folder)
        shares = list(equality.SHARES) if session.topology.world_size > 1 else ["even"]
        found: dict[str, Any] = {}
        for kind in KINDS:
            for share in shares:
                moved: Counter[str] = Counter()
                found[f"{kind}/{share}"] = (train(g, kind, share, moved), moved)
        g.barrier()
        return found


@pytest.mark.parametrize(("ranks", "ranks_per_server"), [(1, 1), (2, 1), *wide((3, 2), (4, 4))])
def test_weights_are_those_of_one_process(folder: Path, ranks: int, ranks_per_server: int) -> None:
    results = run_ranks(on_rank, ranks, args=(str(folder),), ranks_per_server=ranks_per_server)
    for found in results:
        worst = {cell: difference(w, plain_weights(cell.split("/")[0])) for cell, (w, _) in found.items()}
        assert not {cell: value for cell, value in worst.items() if not value <= TOLERANCE}
    for cell in results[0]:
        total = sum((found[cell][1] for found in results), Counter())
        check_bytes(cell.split("/")[0], total, ranks)


def check_bytes(kind: str, total: Counter[str], ranks: int) -> None:
    """docs/strategies/push_pull.md, "When it pays", with int32 structure; each owner has N - 1 peers."""
    peers, size, steps = ranks - 1, 8, equality.STEPS
    activations = total["D1"] * equality.HIDDEN * size
    if kind == "gat":
        # Two heads' logits of sources and destinations: summed at the owner and handed to the parts.
        activations += 2 * (total["L0"] + total["D1"]) * 2 * size
    assert total[FORWARD] == peers * activations
    assert total[BACKWARD] == peers * activations
    assert total[STRUCTURE] == peers * 4 * (total["L0"] + total["D1"] + steps * ranks + total["E1"])
    assert total["features"] == total["columns"] == 0
