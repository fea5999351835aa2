"""Deep models with dropout on 1, 2 and 4 ranks: recomputed or not, they train what one process trains."""

from __future__ import annotations

from typing import Any

import dgl
import numpy as np
import pytest
import torch
from dgl.nn import GATConv
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from dglx_dist.cluster.session import start_session
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.strategies import STRATEGIES
from dglx_dist.training.deep import build_resgcn
from dglx_dist.training.kinds import RECOMPUTE
from tests.helpers.ranks import run_ranks
from tests.strategies import equality

LAYERS, HIDDEN, STEPS = 4, 6, 3


class Attending(nn.Module):
    """Two attention layers, dropout in all places, the second layer computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        drops: dict[str, Any] = {"feat_drop": 0.3, "attn_drop": 0.3, "allow_zero_in_degree": True}
        self.first = GATConv(equality.WIDTH, 3, 2, **drops)
        self.second = GATConv(6, equality.CLASSES, 2, **drops)
        self.dropout = nn.Dropout(0.4)

    def forward(self, blocks: list[Any], h: Tensor) -> Tensor:
        h = self.dropout(functional.elu(self.first(blocks[0], self.dropout(h)).flatten(1)))
        return checkpoint(lambda h: self.second(blocks[1], self.dropout(h)).mean(1), h, use_reentrant=False)


def models() -> dict[str, tuple[nn.Module, int]]:
    """By name, with the number of layers; the same weights at every call."""
    made: dict[str, tuple[nn.Module, int]] = {}
    for recompute in RECOMPUTE:
        torch.manual_seed(1)
        deep = build_resgcn(
            equality.WIDTH, HIDDEN, equality.CLASSES, LAYERS, dropout=0.4, recompute=recompute
        )
        made[f"resgcn/{recompute}"] = deep.double(), LAYERS
    torch.manual_seed(1)
    made["gat"] = Attending().double(), 2
    return made


def on_ranks(folder: str) -> dict[str, Any]:
    """Weights and halo bytes by ``strategy use_pp/model``."""
    session = start_session(timeout_s=60)
    g = DistGraph(folder)
    topology = session.topology
    train_ids = equality.new_ids_of_training(g)
    mine = equality.cut(train_ids, equality.SHARES["uneven"], topology.rank, topology.world_size)
    results: dict[str, Any] = {}
    for name in ("full_graph", "shared_preload"):
        for use_pp in (True, False):
            strategy = STRATEGIES.get(name)(session, {"use_pp": use_pp})
            for kind, (module, layers) in models().items():
                sampler = dgl.dataloading.MultiLayerFullNeighborSampler(
                    layers, prefetch_node_feats=["feat"], prefetch_labels=["label"]
                )
                loader, model = strategy.loader(g, mine, sampler), strategy.wrap(module, g)
                # Functional draws of torch differ between ranks, and must not matter.
                torch.manual_seed(topology.rank)
                before = session.ledger.snapshot()
                equality.train(model, loader, STEPS)
                sent: dict[str, int] = {}
                for row in session.ledger.since(before):
                    sent[row.phase] = sent.get(row.phase, 0) + row.num_bytes
                weights = [p.detach().numpy().copy() for p in module.parameters()]
                halo = [sent.get(phase, 0) for phase in ("halo", "halo_gradients")]
                results[f"{name} {use_pp}/{kind}"] = weights, halo
    return results


@pytest.fixture(scope="module")
def placed(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """By (servers, ranks per server), of each rank."""
    folder = str(equality.write_parts(tmp_path_factory.mktemp("deep")))
    shapes: list[tuple[int, int]] = [(1, 1), (1, 2), (2, 2)]
    return {
        (servers, ranks): run_ranks(on_ranks, servers * ranks, args=(folder,), ranks_per_server=ranks)
        for servers, ranks in shapes
    }


def test_dropout_and_recomputing_depend_on_no_rank(placed: Any) -> None:
    expected = placed[1, 1][0]
    for shape, ranks in placed.items():
        for rank in ranks:
            for name, (weights, _) in rank.items():
                kind = name.partition("/")[2]
                reference = expected[
                    f"full_graph True/{kind.replace('exchange', 'none').replace('keep', 'none')}"
                ]
                for got, want in zip(weights, reference[0], strict=True):
                    np.testing.assert_allclose(got, want, rtol=0, atol=1e-10, err_msg=f"{shape} {name}")


def test_what_is_computed_again_is_exchanged_again_or_kept(placed: Any) -> None:
    for use_pp in (True, False):
        by_way = {
            way: [rank[f"full_graph {use_pp}/resgcn/{way}"][1] for rank in placed[2, 2]] for way in RECOMPUTE
        }
        none, again, kept = (np.array(by_way[way]).sum(0) for way in RECOMPUTE)
        assert none[0] > 0
        assert again.tolist() == [2 * none[0], none[1]]
        assert kept.tolist() == none.tolist()


def test_cached_features_spare_the_first_layer_behind_an_encoder(placed: Any) -> None:
    sums = {
        use_pp: np.array([rank[f"full_graph {use_pp}/resgcn/none"][1] for rank in placed[2, 2]]).sum(0)
        for use_pp in (True, False)
    }
    assert (sums[True] < sums[False]).all()
    # Forward and backward send the same rows, with an encoder also those of layer 1.
    for halo, gradients in sums.values():
        assert halo == gradients
