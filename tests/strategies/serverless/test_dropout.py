"""Dropout and LayerNorm under lambda: the weights of full_graph, whatever the intervals, ranks and modes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import dgl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dglx_dist as dx
from dglx_dist.training.fit_config import FitConfig
from tests.helpers import wide
from tests.helpers.ranks import run_ranks
from tests.strategies import equality

HIDDEN, TOLERANCE = 8, 1e-10


class Dropping(nn.Module):
    """Two convolutions with every kind of dropout that workers know, and a LayerNorm between them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, wide, classes = kind, equality.WIDTH, equality.CLASSES
        zero = {"allow_zero_in_degree": True}
        self.features, self.between = nn.Dropout(0.2), nn.Dropout(0.4)
        self.norm = nn.LayerNorm(HIDDEN, elementwise_affine=kind != "sage")
        if kind == "gat":
            drops = {"feat_drop": 0.2, "attn_drop": 0.3}
            self.first = dgl.nn.GATConv(wide, HIDDEN // 2, 2, residual=True, **drops, **zero)
            self.second = dgl.nn.GATConv(HIDDEN, classes, 2, **drops, **zero)
        elif kind == "sage":
            self.first = dgl.nn.SAGEConv(wide, HIDDEN, "mean", feat_drop=0.3)
            self.second = dgl.nn.SAGEConv(HIDDEN, classes, "mean", feat_drop=0.2)
        else:
            self.first = dgl.nn.GraphConv(wide, HIDDEN, norm="right", **zero)
            self.second = dgl.nn.GraphConv(HIDDEN, HIDDEN, norm="right", **zero)
            self.head = nn.Linear(HIDDEN, classes)

    def forward(self, blocks: list[Any], h: Tensor) -> Tensor:
        if self.kind == "gcn":
            h = self.features(h)
        h = self.first(blocks[0], h)
        h = self.between(torch.relu(self.norm(h.flatten(1))))
        h = self.second(blocks[1], h)
        if self.kind == "gat":
            return h.mean(1)
        # One module called twice; a function behind a dropout; a dropout of the scores.
        scores: Tensor = self.head(F.elu(self.between(h))) if self.kind == "gcn" else self.features(h)
        return scores


KINDS = ("sage", "gcn", "gat")


def train(folder: str, kind: str, strategy: str, **options: Any) -> tuple[list[Any], list[Any]]:
    with dx.init(strategy, timeout=60, seed=5, **options):
        g = dx.DistGraph(folder)
        torch.manual_seed(1)
        model, result = dx.fit(
            Dropping(kind).double(),
            g,
            config=FitConfig(epochs=5, eval_every=2, num_layers=2, show_progress=False),
            make_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.3),
        )
        weights = [parameter.detach().numpy().copy() for parameter in model.parameters()]
        return weights, [(epoch.loss, epoch.val_accuracy or 0.0) for epoch in result.epochs]


def under_lambda(folder: str) -> dict[str, Any]:
    return {kind: train(folder, kind, "lambda", executor="inline", intervals=3) for kind in KINDS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(equality.write_parts(tmp_path_factory.mktemp("dropping")))


@pytest.fixture(scope="module")
def expected_results(folder: str) -> dict[str, Any]:
    return {kind: train(folder, kind, "full_graph") for kind in KINDS}


def check(results: dict[str, Any], expected_results: dict[str, Any]) -> None:
    for kind, (weights, epochs) in results.items():
        for weight, expected_weight in zip(weights, expected_results[kind][0], strict=True):
            assert np.abs(weight - expected_weight).max() <= TOLERANCE, kind
        np.testing.assert_allclose(epochs, expected_results[kind][1], rtol=TOLERANCE)


@pytest.mark.wide
@pytest.mark.parametrize(
    "options",
    [
        {"intervals": 1, "mode": "no_pipe"},
        {"intervals": 7},
        {"intervals": 2, "executor": "local", "workers": 1},
    ],
)
def test_options_and_intervals_change_nothing(
    folder: str, expected_results: dict[str, Any], options: dict[str, Any]
) -> None:
    check(
        {kind: train(folder, kind, "lambda", **{"executor": "inline"} | options) for kind in KINDS},
        expected_results,
    )


@pytest.mark.parametrize(("ranks", "ranks_per_server"), [(2, 1), *wide((3, 2))])
def test_ranks_drop_alike(
    folder: str, expected_results: dict[str, Any], ranks: int, ranks_per_server: int
) -> None:
    for result in run_ranks(under_lambda, ranks, args=(folder,), ranks_per_server=ranks_per_server):
        check(result, expected_results)


def sent_with_and_without(folder: str) -> list[dict[str, int]]:
    """Bytes by phase of two epochs of SAGE, whose features and rows are dropped, or nothing is."""
    results = []
    for scale in (1.0, 0.0):
        with dx.init("lambda", timeout=60, executor="inline", intervals=3) as session:
            model = Dropping("sage").double()
            # A dropout of the scores would separate the last step from the loss.
            model.features.p = 0.0
            for module in model.modules():
                if isinstance(module, nn.Dropout):
                    module.p *= scale
            config = FitConfig(epochs=2, eval_every=0, num_layers=2, show_progress=False)
            dx.fit(model, dx.DistGraph(folder), config=config)
            phases: Counter[str] = Counter()
            for row in session.ledger.rows():
                phases[row.phase] += row.num_bytes
        results.append({name: phases[name] for name in PHASES})
    return results


PHASES = ("preload", "ghosts", "ghost_gradients", "weights_down", "weights_up")


def test_no_byte_is_sent_for_dropout(folder: str) -> None:
    for dropping, plain in run_ranks(sent_with_and_without, 2, args=(folder,), ranks_per_server=1):
        assert dropping == plain
        assert plain["ghosts"] > 0
