"""One run of full-graph training in a rank: the equality graph, float64, plain SGD, and what moved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import dgl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.strategies.base import STRATEGIES
from tests.strategies import equality

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""(wrapped or plain model, scores, labels) to the loss."""


def mean_loss(model: nn.Module, scores: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores, labels)


@dataclass(frozen=True)
class Run:
    """What is trained, and how."""

    strategy: str = "full_graph"
    options: Mapping[str, Any] = field(default_factory=dict)
    epochs: int = equality.STEPS
    loss: Loss = mean_loss
    reduction: str = "mean"


@dataclass
class Notes:
    """What a rank saw."""

    weights: list[Any] = field(default_factory=list)
    making: Counter[tuple[str, bool]] = field(default_factory=Counter)
    """Bytes by phase and whether they left the server, until the first epoch."""
    moved: list[Counter[tuple[str, bool]]] = field(default_factory=list)
    """The same for each epoch."""
    rows: list[Any] = field(default_factory=list)
    """Global ids of this rank's rows of every level."""
    external_nodes: int = 0


def sampler(num_layers: int = 2) -> Any:
    return dgl.dataloading.MultiLayerFullNeighborSampler(
        num_layers, prefetch_node_feats=["feat"], prefetch_labels=["label"]
    )


def my_share(g: DistGraph, share: str = "uneven") -> Tensor:
    topology = g.session.topology
    ids = equality.new_ids_of_training(g)
    return equality.cut(ids, equality.SHARES[share], topology.rank, topology.world_size)


def train(g: DistGraph, run: Run, model: nn.Module, num_layers: int = 2) -> Notes:
    """Do the user's loop."""
    session, notes = g.session, Notes()
    before = session.ledger.snapshot()
    strategy: Any = STRATEGIES.get(run.strategy)(session, run.options)
    loader = strategy.loader(g, my_share(g), sampler(num_layers))
    wrapped = strategy.wrap(model, g, run.reduction)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=equality.RATE)
    notes.making = _moved(session, before)
    for _ in range(run.epochs):
        before = session.ledger.snapshot()
        for _, _, blocks in loader:
            scores = wrapped(blocks, blocks[0].srcdata["feat"])
            loss = run.loss(wrapped, scores, blocks[-1].dstdata["label"])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it bare
            optimizer.step()
        notes.moved.append(_moved(session, before))
    plan = loader.plan
    notes.rows = [plan.rows(level).copy() for level in range(num_layers + 1)]
    notes.external_nodes = plan.external_nodes
    notes.weights = [p.detach().numpy().copy() for p in wrapped.whole().parameters()]
    return notes


def _moved(session: Any, before: Any) -> Counter[tuple[str, bool]]:
    moved: Counter[tuple[str, bool]] = Counter()
    for row in session.ledger.since(before):
        moved[row.phase, not row.inside] += row.num_bytes
    return moved


def first_model(kind: str) -> nn.Module:
    torch.manual_seed(11)
    return equality.PlainModel(kind).double()


def one_process(model: nn.Module, loss: Loss = mean_loss, epochs: int = equality.STEPS) -> list[Any]:
    """The weights that plain DGL and torch leave."""
    graph = equality.plain_graph()
    optimizer = torch.optim.SGD(model.parameters(), lr=equality.RATE)
    targets = graph.ndata["train_mask"].nonzero()[:, 0]
    for _ in range(epochs):
        scores = model([graph, graph], graph.ndata["feat"])[targets]
        optimizer.zero_grad()
        loss(model, scores, graph.ndata["label"][targets]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return [p.detach().numpy().copy() for p in model.parameters()]
