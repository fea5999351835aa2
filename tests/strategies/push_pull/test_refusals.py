"""What push-pull refuses: every rank is told at once, in words that say what to do instead."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import dgl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dglx_dist.comm.session import start_session
from dglx_dist.errors import ConfigError, PeerError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.strategies.base import STRATEGIES
from dglx_dist.strategies.push_pull import pipeline
from tests.helpers.ranks import run_ranks
from tests.strategies import equality
from tests.strategies.equality import CLASSES, HIDDEN, WIDTH
from tests.strategies.push_pull import runs


class Before(nn.Module):
    """A model that does something to the features, or with them, around its first layer."""

    def __init__(
        self,
        before: Callable[[Tensor], Tensor] | None = None,
        module: nn.Module | None = None,
        width: int = WIDTH,
    ) -> None:
        super().__init__()
        self.before, self.module = before, module
        self.first = dgl.nn.SAGEConv(width, HIDDEN, "mean")
        self.last = dgl.nn.SAGEConv(HIDDEN, CLASSES, "mean")

    def forward(self, blocks: list[Any], x: Tensor) -> Tensor:
        x = x if self.module is None else self.module(x)
        x = x if self.before is None else self.before(x)
        return self.last(blocks[1], self.first(blocks[0], x))


class Around(Before):
    """A skip connection from the features."""

    def __init__(self, beside: bool) -> None:
        super().__init__()
        self.beside = beside
        self.skip = nn.Linear(WIDTH + HIDDEN if beside else WIDTH, HIDDEN)

    def forward(self, blocks: list[Any], x: Tensor) -> Tensor:
        h, own = self.first(blocks[0], x), x[: blocks[0].num_dst_nodes()]
        h = self.skip(torch.cat([h, own], 1)) if self.beside else h + self.skip(own)
        return self.last(blocks[1], h)


class TwoFirst(Before):
    """Two layers on the same rows."""

    def __init__(self) -> None:
        super().__init__()
        self.other = dgl.nn.SAGEConv(WIDTH, HIDDEN, "mean")

    def forward(self, blocks: list[Any], x: Tensor) -> Tensor:
        return self.last(blocks[1], self.first(blocks[0], x) + self.other(blocks[0], x))


class Weighted(Before):
    """Edge weights that the model makes itself."""

    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()), requires_grad=trained)

    def forward(self, blocks: list[Any], x: Tensor) -> Tensor:
        weight = torch.ones(blocks[0].num_edges(), dtype=x.dtype) * self.scale
        return self.last(blocks[1], self.first(blocks[0], x, edge_weight=weight))


class WeightedOnOne(Before):
    """Rank 0 alone weighs its edges."""

    def forward(self, blocks: list[Any], x: Tensor) -> Tensor:
        weight = torch.ones(blocks[0].num_edges(), dtype=x.dtype) if dist.get_rank() == 0 else None
        return self.last(blocks[1], self.first(blocks[0], x, edge_weight=weight))


class OtherBlock(Before):
    """Calls its first layer on a block of its own."""

    def forward(self, blocks: list[Any], x: Tensor) -> Tensor:
        block = dgl.to_block(dgl.rand_graph(5, 12), torch.arange(5))
        return self.first(block, x[: block.num_src_nodes()])


NOT_AS_THEY_CAME = r"not the loader's features as they came.*LayerNorm.*Dropout.*Embedding.*data_parallel"
ONLY_A_SHARE = r"share of the input's columns.*no skip connection.*data_parallel"
MODELS: Mapping[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "times two": (lambda: Before(lambda x: x * 2), {}, NOT_AS_THEY_CAME),
    "relu": (lambda: Before(torch.relu), {"depth": 3}, NOT_AS_THEY_CAME),
    "functional dropout": (lambda: Before(lambda x: F.dropout(x, 0.5)), {}, NOT_AS_THEY_CAME),
    "scaled": (lambda: Before(module=nn.PReLU()), {}, r"'module' \(PReLU\) was given \d col.*data_parallel"),
    "batch norm": (lambda: Before(module=nn.BatchNorm1d(WIDTH)), {}, r"BatchNorm1d.*LayerNorm"),
    "linear": (lambda: Before(module=nn.Linear(WIDTH, WIDTH)), {}, rf"'module' \(Linear\).*{ONLY_A_SHARE}"),
    "skip": (lambda: Around(beside=False), {"depth": 2}, rf"'skip' \(Linear\).*{ONLY_A_SHARE}"),
    "skip beside": (lambda: Around(beside=True), {}, rf"'skip' \(Linear\).*{ONLY_A_SHARE}"),
    "two first layers": (TwoFirst, {}, rf"'other' \(SAGEConv\).*{ONLY_A_SHARE}"),
    "computed weights": (
        lambda: Weighted(False),
        {"depth": 2},
        r"'edge_weight'.*depth=1.*prefetch_edge_feats",
    ),
    "trained weights": (lambda: Weighted(True), {}, r"'edge_weight' is trained.*data_parallel"),
    "weights on one rank": (WeightedOnOne, {}, "disagree on the values of edges.*edge_weight=nothing"),
    "other block": (OtherBlock, {}, r"not come from the strategy's loader.*model\.whole\(\)"),
    "other width": (
        lambda: Before(width=WIDTH + 1),
        {},
        rf"no layer that takes the {WIDTH} columns of the input",
    ),
    "unknown feature": (Before, {"features": "feat,fat"}, r"features: the nodes have no 'fat' \(known: "),
    "empty feature": (Before, {"features": "feat,"}, "has an empty name; as 'feat,extra'"),
    "group": (Before, {"group_size": 3}, r"does not divide the 2 ranks; choose one of 1, 2"),
    "unknown option": (Before, {"dept": 2}, r"dept"),
    "depth": (Before, {"depth": 4}, r"depth=4 must be 1, 2 or 3"),
    "memory": (Before, {"memory": "much"}, r"'much' is not a size in bytes; write it as '4GB'"),
}
ACCEPTED = {"computed weights, one by one": (lambda: Weighted(False), {"depth": 1})}


def one_step(g: DistGraph, make: Callable[[], nn.Module], options: dict[str, Any], **how: Any) -> str:
    """Return what a user's script would end with; nothing where it does not."""
    try:
        strategy = STRATEGIES.get("push_pull")(g.session, options)
        topology = g.session.topology
        mine = equality.cut(
            equality.new_ids_of_training(g), runs.SHARES["uneven"], topology.rank, topology.world_size
        )
        loader = strategy.loader(g, mine, runs.sampler(), batch_size=60)
        torch.manual_seed(0)
        model: Any = strategy.wrap(make().double(), g)
        optimizer = how.get("optimizer", torch.optim.SGD)(model.parameters(), lr=0.1)
        for _, _, blocks in loader:
            loss: Any = sum(runs.loss_of(model, blocks) for _ in range(how.get("calls", 1)))
            loss.backward(retain_graph=how.get("twice", False))
            if how.get("twice"):
                loss.backward()
            optimizer.step(*how.get("closure", ()))
    except ConfigError as error:
        return str(error)
    return ""


def on_rank(folder: str) -> dict[str, str]:
    with start_session(timeout_s=30):
        g = DistGraph(folder)
        found = {name: one_step(g, make, options) for name, (make, options, _) in MODELS.items()}
        found |= {name: one_step(g, make, options) for name, (make, options) in ACCEPTED.items()}
        for depth in (1, 3):
            found[f"twice {depth}"] = one_step(g, Before, {"depth": depth}, twice=True)
        found["calls"] = one_step(g, Before, {"depth": 2}, calls=2)
        found["lbfgs"] = one_step(g, Before, {}, optimizer=torch.optim.LBFGS, closure=(lambda: 0.0,))
        model = Before().double()
        gone = mock.patch.object(pipeline.dist, "new_group", side_effect=RuntimeError("gone"))
        with gone, pytest.raises(PeerError):
            STRATEGIES.get("push_pull")(g.session, {"group_size": 1}).wrap(model, g)
        assert model.first.fc_neigh.weight.shape == (HIDDEN, WIDTH)
        assert not any("forward" in vars(module) for module in model.modules())
        # And after all that, what is right still trains.
        found["right"] = one_step(g, Before, {"depth": 3})
        g.barrier()
        return found


def test_every_rank_is_told_what_to_do(folder: Path) -> None:
    for found in run_ranks(on_rank, 2, args=(str(folder),)):
        for name, (_, _, words) in MODELS.items():
            match(found[name], words, name)
        match(found["twice 1"], "backward went through the first layer twice.*call the model once", "twice")
        match(found["twice 3"], "backward went through the first layer twice.*call the model once", "twice")
        match(found["calls"], "called twice for one batch.*call it once.*depth=1", "calls")
        match(found["lbfgs"], "LBFGS looks at whole parameters.*data_parallel", "lbfgs")
        assert [found[name] for name in (*ACCEPTED, "right")] == [""] * (len(ACCEPTED) + 1)


def match(message: str, words: str, name: str) -> None:
    assert re.search(words, message), f"{name}: {message!r}"
