"""Training on external nodes that are chosen anew every other epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch.nn.functional as F

from dglx_dist.comm.session import start_session
from dglx_dist.errors import PeerError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.strategies.base import STRATEGIES
from dglx_dist.strategies.full_graph.expansion import EasOptions
from dglx_dist.strategies.full_graph.plan_source import PlanMaker, PlanSource, PlanSpec
from tests.helpers.ranks import run_ranks
from tests.strategies import equality
from tests.strategies.full_graph import runs

EPOCHS = 5
OPTIONS = {"external_hops": 1, "external_fanout": 1, "resample_every": 2}


@pytest.fixture(scope="module")
def resampled(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Any]]:
    """By the number of ranks, on two servers."""
    folder = str(equality.write_parts(tmp_path_factory.mktemp("resampled")))
    return {
        ranks: run_ranks(epochs_of, ranks, args=(folder,), ranks_per_server=ranks // 2) for ranks in (2, 4)
    }


def an_epoch(loader: Any, model: Any) -> dict[str, Any]:
    ((_, output_nodes, blocks),) = loader
    model.zero_grad()
    scores = model(blocks, blocks[0].srcdata["feat"])
    F.cross_entropy(scores, blocks[-1].dstdata["label"]).backward()
    share = blocks[-1].step_share
    return {
        "nodes": loader.plan.nodes.tolist(),
        "external": loader.plan.external_nodes,
        "seeds": output_nodes.tolist(),
        "share": (share.num_local, share.num_global),
        "gradients": [parameter.grad.numpy().copy() for parameter in model.parameters()],
    }


def epochs_of(folder: str) -> list[dict[str, Any]]:
    """Five epochs, and then the first and the last once more."""
    session = start_session(timeout_s=60)
    g = DistGraph(folder, structure="partitioned")
    strategy: Any = STRATEGIES.get("shared_preload")(session, OPTIONS)
    loader = strategy.loader(g, runs.my_share(g), runs.sampler())
    model = strategy.wrap(runs.first_model("sage"), g)
    found = [an_epoch(loader, model) for _ in range(EPOCHS)]
    for epoch in (0, EPOCHS - 1):
        loader.set_epoch(epoch)
        found.append(an_epoch(loader, model))
    g.close()
    return found


def nodes_of(resampled: list[Any], epoch: int) -> list[int]:
    """What the ranks hold together, replicas as often as servers have them."""
    return sorted(node for rank in resampled for node in rank[epoch]["nodes"])


def difference(one: list[Any], other: list[Any]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_choice_changes_every_two_epochs_and_comes_again(
    resampled: dict[int, list[Any]], ranks: int
) -> None:
    first, second, third, fourth, fifth, first_again, fifth_again = (
        nodes_of(resampled[ranks], epoch) for epoch in range(EPOCHS + 2)
    )
    assert first == second == first_again
    assert third == fourth
    assert fifth == fifth_again
    assert len({tuple(nodes) for nodes in (first, third, fifth)}) == 3
    for rank in resampled[ranks]:
        assert difference(rank[0]["gradients"], rank[5]["gradients"]) == 0
        assert difference(rank[0]["gradients"], rank[2]["gradients"]) > 1e-6
        assert rank[0]["external"] > 0


def test_seeds_are_trained_once_whatever_is_chosen(resampled: dict[int, list[Any]]) -> None:
    for of_ranks in resampled.values():
        for epoch in range(EPOCHS):
            seeds = [node for rank in of_ranks for node in rank[epoch]["seeds"]]
            assert len(seeds) == len(set(seeds)) == of_ranks[0][epoch]["share"][1]
            assert all(rank[epoch]["share"] == (len(rank[epoch]["seeds"]), len(seeds)) for rank in of_ranks)


def test_any_number_of_ranks_per_server_chooses_and_trains_alike(resampled: dict[int, list[Any]]) -> None:
    for epoch in range(EPOCHS):
        assert nodes_of(resampled[2], epoch) == nodes_of(resampled[4], epoch)
        for rank in resampled[4]:
            assert difference(rank[epoch]["gradients"], resampled[2][0][epoch]["gradients"]) <= 1e-10


def test_a_choice_that_failed_is_not_taken_for_the_one_before(tmp_path: Path) -> None:
    with start_session():
        g = DistGraph(str(equality.write_parts(tmp_path)))
        maker = PlanMaker(g, np.array([1, 2]))
        plans = PlanSource(g, maker, PlanSpec(num_layers=2, hops=2, eas=EasOptions(resample_every=2)))
        before = plans.plan(1, 0)
        with (
            mock.patch.object(maker._planner, "plan", side_effect=PeerError("gone")),
            pytest.raises(PeerError, match="gone"),
        ):
            plans.plan(2, 0)
        assert plans.plan(2, 0) is not before
        plans.close()
