"""Training without a loop of one's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dgl
import torch
from torch import Tensor, nn

from dglx_dist.errors import ConfigError
from dglx_dist.graph import DistGraph, node_split
from dglx_dist.records import FEATURE
from dglx_dist.run.auto_outcome import outcome_of
from dglx_dist.run.facts import facts_of
from dglx_dist.run.going_on import adopt_earlier
from dglx_dist.run.session import DataLoader, choose_for, default_batch_size, default_fanouts, wrap
from dglx_dist.strategies.base import WrappedModel
from dglx_dist.strategies.opening import strategy_of
from dglx_dist.strategies.registry import AUTO
from dglx_dist.training.entity_inputs import EntityInputs
from dglx_dist.training.epoch import TrainingLoader
from dglx_dist.training.evaluate import labelled_type
from dglx_dist.training.fit import Callback, FitConfig, FitResult, train
from dglx_dist.training.sparse_state import Sparse

if TYPE_CHECKING:
    from dglx_dist.planner.records import Choice

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def fit(  # noqa: PLR0913 - what a first call needs none of
    model: nn.Module,
    g: DistGraph,
    *,
    config: FitConfig | None = None,
    fanouts: Sequence[int] | None = None,
    batch_size: int | None = None,
    lr: float = 0.01,
    make_optimizer: MakeOptimizer | None = None,
    callbacks: Sequence[Callback] = (),
    sparse: Sparse = None,
    loader: TrainingLoader | None = None,
    trace: str | Path | None = None,
    **loader_options: Any,
) -> tuple[WrappedModel, FitResult]:
    """Train ``model`` with the current strategy, which ``auto`` chooses here; every rank must call it.

    A run that goes on is not chosen for anew: it keeps what its checkpoint was trained with.

    On the nodes of ``train_mask``, of any graph: with several node types, of the one that has labels. Or on
    what a ``loader`` of your own yields, edges for instance, with ``config.task``.

    Args:
        model: Called as ``model(blocks, features)``; one block for each fan-out. With several node types, or
            ``config.inputs``, features and results are ``{node type: rows}``.
        g: With the node data that ``config`` names (``feat`` and ``label``), and ``train_mask``. Types
            without features need ``config.inputs``.
        config: How long, how often to evaluate, where checkpoints lie; defaults when not given.
        fanouts: Neighbours drawn per node and layer, input-most layer first; -1: all. None: two layers, 25
            and 10; all where the strategy takes the whole graph.
        batch_size: Targets per rank and step. None: 512, where the strategy has mini-batches.
        lr: Of Adam.
        make_optimizer: Makes another optimizer from the parameters; ``lr`` is then unused.
        callbacks: Called after each epoch with its record.
        sparse: Optimiser of the embeddings in ``config.inputs``; or several.
        loader: Of :func:`DistEdgeDataLoader` or :func:`DataLoader`, in place of one made by ``fanouts``,
            ``batch_size`` and ``loader_options``.
        trace: File for a trace of all ranks, as ``config.trace``, whose first ``config.trace_steps`` steps it
            holds; open it in Perfetto, or draw it with `dglx report FILE`.
        loader_options: More for :func:`DataLoader`.

    Returns:
        The wrapped model (``.module`` is yours) and what training did, equal on all ranks; under ``auto``
        with what was chosen, and prediction beside outcome.

    Raises:
        ConfigError: node data is missing, or an option cannot be honoured, as those of a loader beside
            ``loader``; or ``auto`` cannot choose for what is trained.
        CheckpointError: the checkpoint to resume from does not match.
        StorageError: the trace cannot be written.
    """
    config = config or FitConfig()
    if trace is not None:
        config = replace(config, trace=trace)
    if loader is not None and loader_options:
        raise ConfigError(
            f"{', '.join(loader_options)} cannot be changed in a given loader; make it with them"
        )
    choice = None
    if g.session.strategy == AUTO:
        choice = _settle_strategy(model, g, config, fanouts, batch_size)
        if default_batch_size(g.session.strategy) is None:
            # They say which mini-batches were weighed against what is trained now.
            fanouts, batch_size = None if fanouts is None else [-1] * len(fanouts), None
    if config.inputs is None and config.task is None and len(g.ntypes) > 1:
        config = replace(config, inputs=EntityInputs(g, feature=config.feature))
    _check_inputs(g, config.inputs)
    if loader is None:
        fanouts = default_fanouts(g.session.strategy, 2) if fanouts is None else fanouts
        usual = default_batch_size(g.session.strategy)
        batch_size = usual if batch_size is None else batch_size
        # Where a step takes everybody, an order means nothing, and a loader says so.
        options = {"shuffle": True, **loader_options} if usual is not None else loader_options
        if batch_size is not None:
            options["batch_size"] = batch_size
        loader = _node_loader(g, config, fanouts, options)
    wrapped = wrap(model, g)
    if make_optimizer is None:
        optimizer: torch.optim.Optimizer = torch.optim.Adam(wrapped.parameters(), lr=lr)
    else:
        optimizer = make_optimizer(wrapped.parameters())
    result = train(wrapped, loader, optimizer, g, config, callbacks=callbacks, sparse=sparse)
    if choice is not None and result.epochs:
        facts = facts_of(g.session, result)
        choice = replace(choice, outcome=outcome_of(choice.epoch, result.epochs, facts))
    return wrapped, replace(result, choice=choice)


def _settle_strategy(
    model: nn.Module, g: DistGraph, config: FitConfig, fanouts: Sequence[int] | None, batch_size: int | None
) -> Choice | None:
    """Go on with what the checkpoint was trained with, else choose; collective."""
    for name, is_usual in (
        ("config.task", config.task is None),
        ("config.inputs", config.inputs is None),
        ("config.feature", config.feature == FEATURE),
    ):
        if not is_usual:
            raise ConfigError(
                f"strategy 'auto' chooses for the classes of nodes by their {FEATURE!r}, and {name} asks for "
                "something else; name a strategy in dx.init"
            )
    folder = config.checkpoint_folder
    if config.resume and folder is not None and adopt_earlier(g, folder, fanouts, batch_size) is not None:
        return None
    return choose_for(model, g, fanouts, batch_size, config.epochs, own_loop=False)


def _check_inputs(g: DistGraph, inputs: EntityInputs | None) -> None:
    """Raise ConfigError for rows of embeddings where the strategy does not move rows."""
    if inputs is None or strategy_of(g.session).traits.features == "rows":
        return
    embedded = [ntype for ntype in g.ntypes if ntype not in inputs.feature_widths]
    if embedded:
        raise ConfigError(
            f"config.inputs has a DistEmbedding of the nodes {embedded[0]!r}, whose rows strategy "
            f"{g.session.strategy!r} does not move; put nn.Embedding(g.num_nodes(), width, sparse=True) "
            "into the model, which is cut by column, or use strategy='data_parallel'"
        )


def training_nodes(g: DistGraph, ntype: str) -> Tensor:
    """Return this rank's share of the ``train_mask`` of one type."""
    nodes = node_split(g.nodes[ntype].data["train_mask"], g.get_partition_book(), ntype)
    assert isinstance(nodes, Tensor)
    return nodes


def _node_loader(
    g: DistGraph, config: FitConfig, fanouts: Sequence[int], options: Mapping[str, Any]
) -> TrainingLoader:
    ntype = labelled_type(g, config.label) if config.ntype is None else config.ntype
    feats = {ntype: [config.feature]}
    if config.inputs is not None:
        feats = {name: [config.inputs.feature] for name in config.inputs.feature_widths}
    seeds, labels = {ntype: training_nodes(g, ntype)}, {ntype: [config.label]}
    sampler = dgl.dataloading.NeighborSampler(
        list(fanouts), prefetch_node_feats=feats, prefetch_labels=labels
    )
    loader: TrainingLoader = DataLoader(g, seeds, sampler, **options)
    return loader
