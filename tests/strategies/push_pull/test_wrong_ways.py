"""Mistakes that implementations of P3 make: each leaves other weights, so tests see them.

Every mistake is made in the real code, by replacing the one function that does it right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import dgl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dglx_dist.comm.session import start_session
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.layers import convolutions as sage
from dglx_dist.strategies.base import STRATEGIES
from dglx_dist.strategies.push_pull import pipeline
from dglx_dist.strategies.push_pull.pipeline import InFlightBatch, PartGradients
from tests.helpers.ranks import run_ranks
from tests.strategies import equality
from tests.strategies.push_pull.runs import SHARES, first_model
from tests.strategies.test_equality import difference

RANKS, STEPS, FANOUT = 3, 10, 3


@contextmanager
def only_the_own_owner() -> Iterator[None]:
    """zero_grad inside the loop over the owners: what the others' batches say is dropped."""
    backward = InFlightBatch.backward

    def forgetful(self: InFlightBatch, wanted: Any) -> Any:
        part = own_part(self)
        self.shares = [[of_owners[part]] for of_owners in self.shares]
        self.pushes = [Only(push, part) for push in self.pushes]  # type: ignore[misc]  # a Transfer to it
        return backward(self, wanted)

    with mock.patch.object(InFlightBatch, "backward", forgetful):
        yield


class Only:
    """What one owner sent."""

    def __init__(self, push: Any, part: int) -> None:
        self._push, self._part = push, part

    def result(self) -> list[Tensor]:
        return [self._push.result()[self._part]]


def own_part(batch: InFlightBatch) -> int:
    """The own block is the one with data."""
    return next(n for n, one in enumerate(batch.inputs) if "feat" in one.block.srcdata)


def owners_alike() -> AbstractContextManager[Any]:
    """M's gradients from unweighed means, summed: N times D's where the shares are even."""
    return mock.patch.object(
        InFlightBatch,
        "push_gradients",
        lambda self, gradients, exchange: send(self, gradients, exchange, 1.0),
    )


def send(batch: InFlightBatch, gradients: Any, exchange: Any, weight: float) -> None:
    for gradient, shares in zip(gradients, batch.shares, strict=True):
        # Of a rank without targets; that would be nan, which anybody would see.
        found = torch.nan_to_num(gradient) * weight
        batch.pushes.append(exchange.push(found, shares, pipeline.BACKWARD, batch.number))


def mean_over_ranks() -> AbstractContextManager[Any]:
    """The mean of DDP for M: averaging pieces of different columns, and each owner's unweighed mean."""
    add = PartGradients.add

    def averaged(self: PartGradients, computed: Any) -> None:
        add(self, computed)
        for parameter in self._part.parameters.values():
            if parameter.grad is not None:
                parameter.grad /= dist.get_world_size()

    return mock.patch.object(PartGradients, "add", averaged)


def activated_before_the_sum() -> AbstractContextManager[Any]:
    """The first layer's activation done by each part on its share."""

    compute_shares = pipeline.compute_shares

    def eager(layer: Any, given: Any, group: Any, exchange: Any) -> Any:
        found = compute_shares(layer, given, group, exchange)
        return [[torch.relu(share) for share in of_owners] for of_owners in found]

    return mock.patch.object(pipeline, "compute_shares", eager)


@contextmanager
def attention_of_each_part() -> Iterator[None]:
    """GAT as a sum of the parts' complete outputs: a softmax of each part's own logits."""
    with (
        mock.patch.object(pipeline, "sum_to_owner", lambda shares, exchange: shares[0]),
        mock.patch.object(pipeline, "send_to_parts", lambda own, like, exchange: tuple(like)),
    ):
        yield


def divided_by_the_fanout() -> AbstractContextManager[Any]:
    """The mean over as many neighbours as were asked for, not as there are."""

    def mean(block: Any, rows: Tensor, weight: Tensor | None = None) -> Tensor:
        return sage.sum_in_edges(block, rows, weight) / FANOUT

    return mock.patch.object(sage, "mean_in_edges", mean)


def not_summed_over_ranks() -> AbstractContextManager[Any]:
    """Each part keeps its own gradient of the attention vectors, which all parts share."""
    return mock.patch.object(PartGradients, "_over_all", lambda self, gradients, like: gradients)


WRONG: Mapping[str, tuple[str, Callable[[], AbstractContextManager[Any]]]] = {
    "only the own owner": ("sage", only_the_own_owner),
    "owners alike": ("sage", owners_alike),
    "mean over ranks": ("sage", mean_over_ranks),
    "activated before the sum": ("sage", activated_before_the_sum),
    "attention of each part": ("gat", attention_of_each_part),
    "divided by the fanout": ("sage", divided_by_the_fanout),
    "shared weights of one part": ("gat", not_summed_over_ranks),
}
TOLERANCES = {"shared weights of one part": 1e-6}
"""Attention vectors hardly move in ten steps; everything else is off by more than 1e-3."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return equality.write_parts(tmp_path_factory.mktemp("wrong"))


def train(g: DistGraph, kind: str, strategy: str) -> list[Any]:
    session = g.session
    rank, world_size = session.topology.rank, session.topology.world_size
    mine = equality.cut(equality.new_ids_of_training(g), SHARES["uneven"], rank, world_size)
    sampler = dgl.dataloading.NeighborSampler(
        [FANOUT, FANOUT], prefetch_node_feats=["feat"], prefetch_labels=["label"]
    )
    ours = STRATEGIES.get(strategy)(session, {})
    model: Any = ours.wrap(first_model(kind), g)
    equality.train(model, ours.loader(g, mine, sampler, batch_size=equality.NUM_NODES, seed=4), STEPS)
    return [parameter.detach().numpy().copy() for parameter in model.whole().parameters()]


def on_rank(folder: str) -> dict[str, list[Any]]:
    with start_session(timeout_s=60):
        g = DistGraph(folder)
        found = {f"{kind} {how}": train(g, kind, how) for kind in ("sage", "gat") for how in HOWS}
        for name, (kind, mistake) in WRONG.items():
            with mistake():
                found[name] = train(g, kind, "push_pull")
        g.barrier()
        return found


HOWS = ("data_parallel", "push_pull")


def test_every_mistake_leaves_other_weights(folder: Path) -> None:
    for found in run_ranks(on_rank, RANKS, args=(str(folder),)):
        for kind in ("sage", "gat"):
            assert difference(found[f"{kind} push_pull"], found[f"{kind} data_parallel"]) <= 1e-10
        for name, (kind, _) in WRONG.items():
            right = found[f"{kind} data_parallel"]
            assert difference(found[name], right) > TOLERANCES.get(name, 1e-3), name
