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
from tests.strategies.test_equality import difference

EPOCHS = (0, 1, 2, 3, 4, 0, 4)
OPTIONS = {"external_hops": 1, "external_fanout": 1, "resample_every": 2}


def epochs_of(folder: str) -> list[dict[str, Any]]:
    """Five epochs, and then the first and the last once more."""
    session = start_session(timeout_s=60)
    g = DistGraph(folder, structure="partitioned")
    strategy: Any = STRATEGIES.get("shared_preload")(session, OPTIONS)
    loader = strategy.loader(g, runs.my_share(g), runs.sampler())
    model = strategy.wrap(runs.first_model("sage"), g)
    found = []
    for epoch in EPOCHS:
        loader.set_epoch(epoch)
        ((_, output_nodes, blocks),) = loader
        model.zero_grad()
        scores = model(blocks, blocks[0].srcdata["feat"])
        F.cross_entropy(scores, blocks[-1].dstdata["label"]).backward()
        found.append(
            {
                "nodes": loader.plan.nodes.tolist(),
                "external": loader.plan.external_nodes,
                "seeds": output_nodes.tolist(),
                "num_global": blocks[-1].step_share.num_global,
                "gradients": [parameter.grad.numpy().copy() for parameter in model.parameters()],
            }
        )
    g.close()
    return found


def test_the_choice_changes_every_two_epochs_and_comes_again(tmp_path: Path) -> None:
    folder = str(equality.write_parts(tmp_path))
    by_number = [run_ranks(epochs_of, ranks, args=(folder,), ranks_per_server=ranks // 2) for ranks in (2, 4)]
    for results in by_number:
        # What the ranks hold together, replicas as often as servers have them.
        nodes = [sorted(node for rank in results for node in rank[n]["nodes"]) for n in range(len(EPOCHS))]
        assert nodes[0] == nodes[1] == nodes[5]
        assert nodes[2] == nodes[3]
        assert nodes[4] == nodes[6]
        assert len({tuple(nodes[n]) for n in (0, 2, 4)}) == 3
        for n in range(len(EPOCHS)):
            assert nodes[n] == sorted(node for rank in by_number[0] for node in rank[n]["nodes"])
            seeds = [node for rank in results for node in rank[n]["seeds"]]
            assert len(seeds) == len(set(seeds)) == results[0][n]["num_global"]
        for rank in results:
            assert rank[0]["external"] > 0
            assert difference(rank[0]["gradients"], rank[5]["gradients"]) == 0
            assert difference(rank[0]["gradients"], rank[2]["gradients"]) > 1e-6
            for one, other in zip(rank, by_number[0][0], strict=True):
                assert difference(one["gradients"], other["gradients"]) <= 1e-10


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
