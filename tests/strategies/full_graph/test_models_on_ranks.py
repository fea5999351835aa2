"""Deep models with dropout on 1, 2 and 4 ranks of 1 and 2 servers: recomputed or not, they train alike."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dgl.nn import GATConv, GraphConv
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from dglx_dist.comm.session import start_session
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.training.models import RECOMPUTE, ResGCN
from tests.helpers.ranks import run_ranks
from tests.strategies import equality
from tests.strategies.full_graph import runs

LAYERS, HIDDEN, STEPS = 3, 6, 2
DEEP = 28
"""Layers of the model without dropout, which plain DGL can train too."""
SHAPES, MORE_SHAPES = ((1, 1), (2, 2)), ((1, 2), (2, 1), (1, 4))
"""(servers, ranks per server); the latter with --all."""
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "fb+pp": ("full_graph", {"use_pp": True}),
    "fb": ("full_graph", {"use_pp": False}),
    "flx": ("shared_preload", {}),
    "one hop": ("shared_preload", {"hops": 1, "use_pp": False}),
}


class Attending(nn.Module):
    """Two attention layers, dropout in all places, the second layer computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        drops: dict[str, Any] = {"feat_drop": 0.5, "attn_drop": 0.5, "allow_zero_in_degree": True}
        self.first = GATConv(equality.WIDTH, 3, 2, **drops)
        self.second = GATConv(6, equality.CLASSES, 2, **drops)
        self.dropout = nn.Dropout(0.5)

    def forward(self, blocks: list[Any], h: Tensor) -> Tensor:
        h = self.dropout(functional.elu(self.first(blocks[0], self.dropout(h)).flatten(1)))
        return checkpoint(lambda h: self.second(blocks[1], self.dropout(h)).mean(1), h, use_reentrant=False)


class Late(nn.Module):
    """The recomputed part ends with an exchange, after all results of it that backward needs."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.first = nn.Linear(equality.WIDTH, equality.CLASSES)
        self.sums = GraphConv(1, 1, norm="none", weight=False, bias=False, allow_zero_in_degree=True)
        self.again = again

    def forward(self, blocks: list[Any], h: Tensor) -> Tensor:
        def mix(h: Tensor) -> Tensor:
            return self.sums(blocks[1], self.first(h) / 20)

        h = self.sums(blocks[0], h)
        return checkpoint(mix, h, use_reentrant=False) if self.again else mix(h)


def resgcn(layers: int, dropout: float, recompute: str) -> nn.Module:
    torch.manual_seed(1)
    return ResGCN(
        equality.WIDTH, HIDDEN, equality.CLASSES, layers, dropout=dropout, recompute=recompute
    ).double()


def models(way: str) -> dict[str, tuple[nn.Module, int]]:
    """By name, with the number of layers; without use_pp and without hops, all ways to recompute."""
    made = {
        f"resgcn/{recompute}": (resgcn(LAYERS, 0.5, recompute), LAYERS)
        for recompute in (RECOMPUTE if way in ("fb+pp", "fb") else ("exchange",))
    }
    torch.manual_seed(1)
    made["gat"] = Attending().double(), 2
    if way == "fb":
        for again in (False, True):
            torch.manual_seed(1)
            made[f"late/{again}"] = Late(again).double(), 2
    if way in ("fb+pp", "flx"):
        made["deep"] = resgcn(DEEP, 0.0, "exchange"), DEEP
    return made


def on_ranks(folder: str) -> dict[str, Any]:
    session = start_session(timeout_s=60)
    g = DistGraph(folder)
    topology = session.topology
    results: dict[str, Any] = {}
    for way, (name, options) in WAYS.items():
        for kind, (module, layers) in models(way).items():
            strategy, loader = runs.open_loader(g, name, options, layers)
            model = strategy.wrap(module)
            # Functional draws of torch differ between ranks, and must not matter.
            torch.manual_seed(topology.rank)
            before = session.ledger.snapshot()
            equality.train(model, loader, STEPS)
            sent = runs.moved_since(session, before)
            weights = [p.detach().numpy().copy() for p in module.parameters()]
            halo = [sent[phase, False] + sent[phase, True] for phase in ("halo", "halo_gradients")]
            results[f"{way}/{kind}"] = weights, halo
    return results


@pytest.fixture(scope="module")
def results_by_shape(
    folder: Path, request: pytest.FixtureRequest
) -> dict[tuple[int, int], list[dict[str, Any]]]:
    return {
        (servers, ranks): run_ranks(
            on_ranks, servers * ranks, args=(str(folder),), ranks_per_server=ranks, timeout_s=240
        )
        for servers, ranks in SHAPES + (MORE_SHAPES if request.config.getoption("--all") else ())
    }


def plain_deep(layers: int, dropout: float) -> list[Any]:
    def step(model: Any, graphs: Any, x: Tensor, labels: Tensor) -> None:
        runs.mean_loss(model, graphs[0], x, labels)

    return runs.one_process(resgcn(layers, dropout, "none"), step, STEPS)


def test_dropout_and_recomputing_depend_on_no_rank(results_by_shape: Any) -> None:
    on_one_rank = results_by_shape[1, 1][0]
    expected = {
        "resgcn": on_one_rank["fb+pp/resgcn/none"][0],
        "gat": on_one_rank["fb+pp/gat"][0],
        "late": on_one_rank["fb/late/False"][0],
        "deep": plain_deep(DEEP, 0.0),
    }
    for shape, ranks in results_by_shape.items():
        for rank in ranks:
            for name, (weights, _) in rank.items():
                for got, want in zip(weights, expected[name.split("/")[1]], strict=True):
                    np.testing.assert_allclose(got, want, rtol=0, atol=1e-10, err_msg=f"{shape} {name}")


def test_dropout_changes_the_weights(results_by_shape: Any) -> None:
    """Else any number of ranks would train the same."""
    dropped, plain = results_by_shape[1, 1][0]["fb/resgcn/none"][0], plain_deep(LAYERS, 0.0)
    assert max(np.abs(got - want).max() for got, want in zip(dropped, plain, strict=True)) > 1e-3


def halo_bytes(results_by_shape: Any, way: str, kind: str) -> Any:
    """(halo, halo_gradients) of all ranks on 2 servers of 2."""
    return np.array([rank[f"{way}/{kind}"][1] for rank in results_by_shape[2, 2]]).sum(0)


@pytest.mark.parametrize("way", ["fb", "fb+pp"])
def test_what_is_computed_again_is_exchanged_again_or_kept(results_by_shape: Any, way: str) -> None:
    none, again, kept = (halo_bytes(results_by_shape, way, f"resgcn/{recompute}") for recompute in RECOMPUTE)
    assert none[0] > 0
    assert again.tolist() == [2 * none[0], none[1]]
    assert kept.tolist() == none.tolist()


def test_what_is_computed_again_is_so_to_its_end(results_by_shape: Any) -> None:
    """Torch would stop before the exchange: on one rank perhaps, and not on another that waits for it."""
    once, again = (halo_bytes(results_by_shape, "fb", f"late/{again}") for again in (False, True))
    # Rows of the first layer are WIDTH wide and need no gradient, those of the second CLASSES wide.
    assert again[0] - once[0] == once[1] == again[1] > 0


def test_cached_features_spare_the_first_layer_behind_an_encoder(results_by_shape: Any) -> None:
    spared, all_layers = (halo_bytes(results_by_shape, way, "resgcn/none") for way in ("fb+pp", "fb"))
    assert (spared < all_layers).all()
    # Forward and backward send the same rows, with an encoder also those of layer 1.
    for halo, gradients in (spared, all_layers):
        assert halo == gradients
