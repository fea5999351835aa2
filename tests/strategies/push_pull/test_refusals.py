"""Refusals of push-pull: every rank raises at once, and the message names the remedy."""

import re
from collections.abc import Callable
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

Use = Callable[[Any, list[Any], Tensor], Tensor]
"""A net, its blocks and the features to hidden rows."""


class Net(nn.Module):
    """Two convolutions, the first as ``use`` has it, and another module that it may use."""

    def __init__(
        self,
        use: Use = lambda net, blocks, x: net.first(blocks[0], x),
        other: nn.Module | None = None,
        width: int = WIDTH,
    ) -> None:
        super().__init__()
        self.use, self.other = use, other
        self.first = dgl.nn.SAGEConv(width, HIDDEN, "mean")
        self.last = dgl.nn.SAGEConv(HIDDEN, CLASSES, "mean")

    def forward(self, blocks: list[Any], x: Tensor) -> Tensor:
        return self.last(blocks[1], self.use(self, blocks, x))


def after(change: Callable[[Tensor], Tensor]) -> Net:
    return Net(lambda net, blocks, x: net.first(blocks[0], change(x)))


def through(module: nn.Module) -> Net:
    return Net(lambda net, blocks, x: net.first(blocks[0], net.other(x)), module)


def skip(net: Any, blocks: list[Any], x: Tensor) -> Tensor:
    return net.first(blocks[0], x) + net.other(x[: blocks[0].num_dst_nodes()])


def skip_beside(net: Any, blocks: list[Any], x: Tensor) -> Tensor:
    return net.other(torch.cat([net.first(blocks[0], x), x[: blocks[0].num_dst_nodes()]], 1))


def two_first(net: Any, blocks: list[Any], x: Tensor) -> Tensor:
    return net.other(blocks[0], x) + net.first(blocks[0], x)


def call_with_weights(net: Any, blocks: list[Any], x: Tensor) -> Tensor:
    """By weights that the model makes itself; trained ones if it has some."""
    weight = torch.ones(blocks[0].num_edges(), dtype=x.dtype)
    return net.first(blocks[0], x, edge_weight=weight if net.other is None else weight * net.other.weight)


def weighed_on_one(net: Any, blocks: list[Any], x: Tensor) -> Tensor:
    return call_with_weights(net, blocks, x) if dist.get_rank() == 0 else net.first(blocks[0], x)


def other_block(net: Any, blocks: list[Any], x: Tensor) -> Tensor:
    block = dgl.to_block(dgl.rand_graph(5, 12), torch.arange(5))
    return net.first(block, x[: block.num_src_nodes()])


NOT_AS_THEY_CAME = r"not the loader's unchanged features.*LayerNorm.*Dropout.*Embedding.*data_parallel"
ONLY_A_SHARE = r"share of the input's columns.*no skip connection.*data_parallel"
TWICE = "backward went through the first layer twice.*call the model once"
LBFGS = {"optimizer": torch.optim.LBFGS, "closure": (lambda: 0.0,)}
TRAINS = "^$"
CASES: tuple[tuple[Callable[[], nn.Module], dict[str, Any], dict[str, Any], str], ...] = (
    (lambda: after(lambda x: x * 2), {}, {}, NOT_AS_THEY_CAME),
    (lambda: after(torch.relu), {"depth": 3}, {}, NOT_AS_THEY_CAME),
    (lambda: after(lambda x: F.dropout(x, 0.5)), {}, {}, NOT_AS_THEY_CAME),
    (lambda: through(nn.PReLU()), {}, {}, r"'other' \(PReLU\) was given \d col.*data_parallel"),
    (lambda: through(nn.BatchNorm1d(WIDTH)), {}, {}, r"BatchNorm1d.*LayerNorm"),
    (lambda: through(nn.Linear(WIDTH, WIDTH)), {}, {}, rf"'other' \(Linear\).*{ONLY_A_SHARE}"),
    (lambda: Net(skip, nn.Linear(WIDTH, HIDDEN)), {"depth": 2}, {}, rf"'other' \(Linear\).*{ONLY_A_SHARE}"),
    (lambda: Net(skip_beside, nn.Linear(WIDTH + HIDDEN, HIDDEN)), {}, {}, rf"'other' \(Lin.*{ONLY_A_SHARE}"),
    (
        lambda: Net(two_first, dgl.nn.SAGEConv(WIDTH, HIDDEN, "mean")),
        {},
        {},
        rf"'first' \(SAGEConv\).*{ONLY_A_SHARE}",
    ),
    (lambda: Net(call_with_weights), {"depth": 2}, {}, r"'edge_weight'.*depth=1.*prefetch_edge_feats"),
    (lambda: Net(call_with_weights), {"depth": 1}, {}, TRAINS),
    (lambda: Net(call_with_weights, nn.PReLU()), {}, {}, r"'edge_weight' is trained.*data_parallel"),
    (lambda: Net(weighed_on_one), {}, {}, "disagree on the values of edges.*edge_weight=nothing"),
    (lambda: Net(other_block), {}, {}, r"not come from the strategy's loader.*model\.whole\(\)"),
    (lambda: Net(width=WIDTH + 1), {}, {}, rf"no layer that takes the {WIDTH} columns of the input"),
    (Net, {"features": "feat,fat"}, {}, r"features: the nodes have no 'fat' \(known: "),
    (Net, {"features": "feat,"}, {}, "has an empty name; write 'feat,extra'"),
    (Net, {"group_size": 3}, {}, r"does not divide the 2 ranks; choose one of 1, 2"),
    (Net, {"depth": 4}, {}, r"depth=4 must be 1, 2 or 3"),
    (Net, {"memory": "much"}, {}, r"'much' is not a size in bytes\. Write it as '4GB'"),
    (Net, {"memory": "1000"}, {}, "take 28000 bytes, and 2 ranks of 1000.*grant more memory, or use more"),
    (Net, {"depth": 1}, {"twice": True}, TWICE),
    (Net, {"depth": 3}, {"twice": True}, TWICE),
    (Net, {"depth": 2}, {"calls": 2}, "called twice for one batch.*call it once.*depth=1"),
    (Net, {}, LBFGS, "LBFGS uses uncut parameters.*data_parallel"),
    # And after all that, what is right still trains.
    (Net, {"depth": 3}, {}, TRAINS),
)
"""The model, the options, what else is done, and words of the message."""


def one_step(
    g: DistGraph,
    make: Callable[[], nn.Module],
    options: dict[str, Any],
    optimizer: Any = torch.optim.SGD,
    calls: int = 1,
    twice: bool = False,
    closure: tuple[Any, ...] = (),
) -> str:
    """Return what a user's script would end with; nothing where it does not."""
    try:
        strategy = STRATEGIES.get("push_pull")(g.session, options).open(g)
        topology = g.session.topology
        own_ids = equality.cut(
            equality.new_ids_of_training(g), runs.SHARES["uneven"], topology.rank, topology.world_size
        )
        loader = strategy.loader(own_ids, runs.sampler(), batch_size=60)
        torch.manual_seed(0)
        model: Any = strategy.wrap(make().double())
        steps = optimizer(model.parameters(), lr=0.1)
        for _, _, blocks in loader:
            loss: Any = sum(runs.choose_loss(model, blocks) for _ in range(calls))
            loss.backward(retain_graph=twice)
            if twice:
                loss.backward()
            steps.step(*closure)
    except ConfigError as error:
        return str(error)
    return ""


def on_rank(folder: str) -> list[str]:
    with start_session(timeout_s=30):
        g = DistGraph(folder)
        model = Net().double()
        gone = mock.patch.object(pipeline.dist, "new_group", side_effect=RuntimeError("gone"))
        with gone, pytest.raises(PeerError):
            STRATEGIES.get("push_pull")(g.session, {"group_size": 1}).open(g).wrap(model)
        assert model.first.fc_neigh.weight.shape == (HIDDEN, WIDTH)
        assert not any("forward" in vars(module) for module in model.modules())
        results = [one_step(g, make, options, **how) for make, options, how, _ in CASES]
        g.barrier()
        return results


def test_every_rank_is_told_what_to_do(folder: Path) -> None:
    for result in run_ranks(on_rank, 2, args=(str(folder),)):
        wrong = {
            words: message
            for message, (*_, words) in zip(result, CASES, strict=True)
            if not re.search(words, message)
        }
        assert not wrong
