"""Full-graph training in a rank and in one process: the equality graph, float64, plain SGD, what moved."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import dgl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.strategies.base import STRATEGIES
from tests.strategies import equality

Step = Callable[[Any, Any, Tensor, Tensor], None]
"""(model, blocks, features, labels): forward and backward."""
Batches = Callable[[], Iterable[tuple[Any, Tensor, Tensor]]]
"""Yields (blocks, features, labels) of an epoch."""


def sampler(num_layers: int = 2) -> Any:
    return dgl.dataloading.MultiLayerFullNeighborSampler(
        num_layers, prefetch_node_feats=["feat"], prefetch_labels=["label"]
    )


def my_share(g: DistGraph) -> Tensor:
    topology = g.session.topology
    ids = equality.new_ids_of_training(g)
    return equality.cut(ids, equality.SHARES["uneven"], topology.rank, topology.world_size)


def open_loader(
    g: DistGraph, name: str, options: Mapping[str, Any] | None = None, num_layers: int = 2, **more: Any
) -> tuple[Any, Any]:
    strategy: Any = STRATEGIES.get(name)(g.session, options or {}).open(g)
    return strategy, strategy.loader(my_share(g), sampler(num_layers), **more)


def mean_loss(model: Any, blocks: Any, x: Tensor, labels: Tensor) -> None:
    F.cross_entropy(model(blocks, x), labels).backward()  # type: ignore[no-untyped-call]  # torch leaves it bare


def batches_of(loader: Any) -> Batches:
    return lambda: (
        (blocks, blocks[0].srcdata["feat"], blocks[-1].dstdata["label"]) for _, _, blocks in loader
    )


def train(
    module: nn.Module, model: Any, batches: Batches, step: Step = mean_loss, epochs: int = equality.STEPS
) -> list[Any]:
    optimizer = torch.optim.SGD(module.parameters(), lr=equality.RATE)
    for _ in range(epochs):
        for batch in batches():
            optimizer.zero_grad()
            step(model, *batch)
            optimizer.step()
    return [p.detach().numpy().copy() for p in module.parameters()]


def moved_since(session: Any, before: Any) -> Counter[tuple[str, bool]]:
    moved: Counter[tuple[str, bool]] = Counter()
    for row in session.ledger.since(before):
        moved[row.phase, not row.inside] += row.num_bytes
    return moved


def first_model(kind: str) -> nn.Module:
    torch.manual_seed(11)
    return equality.PlainModel(kind).double()


class OfTargets(nn.Module):
    """The scores of the training nodes, of a model of one process."""

    def __init__(self, model: nn.Module, targets: Tensor) -> None:
        super().__init__()
        self.model, self._targets = model, targets

    def forward(self, graphs: Any, x: Tensor) -> Tensor:
        scores: Tensor = self.model(graphs, x)[self._targets]
        return scores


def one_process(module: nn.Module, step: Step = mean_loss, epochs: int = equality.STEPS) -> list[Any]:
    graph = equality.plain_graph()
    targets = graph.ndata["train_mask"].nonzero()[:, 0]
    batch = [graph, graph], graph.ndata["feat"], graph.ndata["label"][targets]
    return train(module, OfTargets(module, targets), lambda: [batch], step, epochs)
