"""Training without a loop of one's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import dgl
import torch
from torch import Tensor, nn

from dglx_dist.graph import DistGraph, node_split
from dglx_dist.run.session import DataLoader, wrap
from dglx_dist.strategies.base import WrappedModel
from dglx_dist.training.fit import Callback, FitConfig, FitResult, train

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def fit(
    model: nn.Module,
    g: DistGraph,
    *,
    config: FitConfig | None = None,
    fanouts: Sequence[int] = (25, 10),
    batch_size: int = 512,
    lr: float = 0.01,
    make_optimizer: MakeOptimizer | None = None,
    callbacks: Sequence[Callback] = (),
    **loader_options: Any,
) -> tuple[WrappedModel, FitResult]:
    """Train ``model`` on the nodes of ``train_mask`` with the current strategy; every rank must call it.

    Args:
        model: Called as ``model(blocks, features)``; one block for each fan-out.
        g: With the node data that ``config`` names (``feat`` and ``label``), and ``train_mask``.
        config: How long, how often to evaluate, where checkpoints lie; defaults when not given.
        fanouts: Neighbours drawn per node and layer, input-most layer first; -1: all.
        batch_size: Targets per rank and step.
        lr: Of Adam.
        make_optimizer: Makes another optimizer from the parameters; ``lr`` is then unused.
        callbacks: Called after each epoch with its record.
        loader_options: More for :func:`DataLoader`.

    Returns:
        The wrapped model (``.module`` is yours) and what training did, equal on all ranks.

    Raises:
        ConfigError: node data is missing, or an option cannot be honoured.
        CheckpointError: the checkpoint to resume from does not match.
    """
    config = config or FitConfig()
    sampler = dgl.dataloading.NeighborSampler(
        list(fanouts), prefetch_node_feats=[config.feature], prefetch_labels=[config.label]
    )
    options = {"shuffle": True, **loader_options}
    loader = DataLoader(g, training_nodes(g), sampler, batch_size=batch_size, **options)
    wrapped = wrap(model, g)
    if make_optimizer is None:
        optimizer: torch.optim.Optimizer = torch.optim.Adam(wrapped.parameters(), lr=lr)
    else:
        optimizer = make_optimizer(wrapped.parameters())
    return wrapped, train(wrapped, loader, optimizer, g, config, callbacks=callbacks)


def training_nodes(g: DistGraph) -> Tensor:
    """Return this rank's share of the nodes of ``train_mask``; every rank must call it."""
    nodes = node_split(g.ndata["train_mask"])
    assert isinstance(nodes, Tensor)
    return nodes
