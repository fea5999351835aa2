"""Mistakes that implementations of P3 make, in the real code: each leaves other weights, so tests see it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from dglx_dist.comm.session import start_session
from dglx_dist.dataloading import step_loader
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.layers import convolutions
from dglx_dist.strategies.push_pull import pipeline
from dglx_dist.strategies.push_pull.pipeline import PartSide, Pipeline
from tests.helpers.ranks import run_ranks
from tests.strategies.push_pull import runs
from tests.strategies.push_pull.runs import Run
from tests.strategies.test_equality import difference

RANKS, FANOUT, KINDS, STRATEGIES = 3, 3, ("sage", "gat"), ("data_parallel", "push_pull")
compute, add, complete = PartSide.compute, PartSide.add_gradients, Pipeline.complete
compute_shares = pipeline.compute_shares


def own_owner(self: Any, batch: Any) -> None:
    part = self._group.part
    batch.shares = [[of_owners[part]] for of_owners in batch.shares]
    batch.pushes = [lambda push=push: [push()[part]] for push in batch.pushes]
    compute(self, batch)


def ignore_weight(self: Any, batch: Any, gradients: Any) -> None:
    batch.weight = 1.0
    # Of a rank without targets; that would be nan, which anybody would see.
    complete(self, batch, [torch.nan_to_num(gradient) for gradient in gradients])


def average_gradients(self: Any, batch: Any) -> None:
    add(self, batch)
    for parameter in self.parameters.values():
        if parameter.grad is not None:
            parameter.grad /= dist.get_world_size()


def activate_shares(*given: Any) -> Any:
    return [[torch.relu(share) for share in of_owners] for of_owners in compute_shares(*given)]


def mean_of_fanout(block: Any, rows: Any, weight: Any = None) -> Any:
    return convolutions.sum_in_edges(block, rows, weight) / FANOUT


WRONG: Mapping[str, tuple[str, Any, str, Any]] = {
    # zero_grad inside the loop over the owners.
    "gradients of the own owner only": ("sage", PartSide, "compute", own_owner),
    "owners alike, whatever their targets": ("sage", Pipeline, "complete", ignore_weight),
    "the mean of DDP for different columns": ("sage", PartSide, "add_gradients", average_gradients),
    "activation before the sum": ("sage", pipeline, "compute_shares", activate_shares),
    "a softmax of each part's own logits": (
        "gat",
        pipeline,
        "sum_over_parts",
        lambda shares, _: tuple(shares),
    ),
    "a mean over the fan-out": ("sage", convolutions, "mean_in_edges", mean_of_fanout),
    "attention vectors of one part": ("gat", PartSide, "_sum_over_all", lambda self, flat: flat),
}
"""Mistake to its model, the object and name that are replaced, and the replacement."""

LEAST = {"attention vectors of one part": 1e-6}
"""They hardly move in some steps; everything else is off by more than 1e-3."""


def on_rank(folder: str) -> dict[str, list[Any]]:
    with start_session(timeout_s=60):
        g, results = DistGraph(folder), {}
        for kind in KINDS:
            for strategy in STRATEGIES:
                results[f"{kind} {strategy}"] = runs.train(g, Run(kind, {}, strategy=strategy)).weights
        for name, (kind, *mistake) in WRONG.items():
            # Without its checks, the loop does not refuse the weights that the test compares.
            with mock.patch.object(*mistake), mock.patch.object(step_loader, "EARLY_CHECKS", ()):
                results[name] = runs.train(g, Run(kind, {})).weights
        g.barrier()
        return results


@pytest.fixture(scope="module")
def results(folder: Path) -> list[dict[str, list[Any]]]:
    return run_ranks(on_rank, RANKS, args=(str(folder),))


@pytest.mark.parametrize("name", WRONG)
def test_every_mistake_leaves_other_weights_than_without(results: list[Any], name: str) -> None:
    for result in results:
        right = result[f"{WRONG[name][0]} data_parallel"]
        assert difference(result[f"{WRONG[name][0]} push_pull"], right) <= 1e-10
        assert difference(result[name], right) > LEAST.get(name, 1e-3)
