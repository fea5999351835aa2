"""Joining the ranks, and what depends on the strategy that was named there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dglx_dist.cluster.collectives import sum_over_ranks
from dglx_dist.cluster.session import Session, current_session
from dglx_dist.compat.graph import DistGraph as ScriptGraph
from dglx_dist.compat.model import ScriptModel
from dglx_dist.errors import ConfigError
from dglx_dist.graph import DistGraph
from dglx_dist.graph.opening import together
from dglx_dist.partition import PARTITIONERS, Partitioner
from dglx_dist.run.auto_options import Training, check_session_options
from dglx_dist.sampling.edge_loader import samples_edges
from dglx_dist.sampling.options import whole_number
from dglx_dist.strategies.base import WRAPPED, Reduction, Strategy, WrappedModel
from dglx_dist.strategies.opening import begin, resolve_strategy, strategy_of
from dglx_dist.strategies.registry import STRATEGIES

if TYPE_CHECKING:
    from dglx_dist.planner.records import Choice


def init(
    strategy: str | None = None,
    *,
    timeout: float = 300.0,
    seed: int = 0,
    backend: str | None = None,
    **options: object,
) -> Session:
    """Join the other ranks that torchrun started; every rank calls it first. One process without torchrun.

    Args:
        strategy: Name or alias of a strategy, or ``auto``; None: DGLX_STRATEGY, else ``data_parallel``.
        timeout: Seconds that a rank may be silent before the others give up, naming it.
        seed: Of everything random; the same draws on any number of ranks.
        backend: Of ``torch.distributed``; None: gloo, and nccl beside it where there is CUDA.
        options: The strategy's own options; those in DGLX_OPTIONS, which is JSON, count too.

    Returns:
        The session; closes by itself at the end of the process, or by :func:`shutdown`, or as a context.

    Raises:
        UnknownNameError: there is no such strategy; the message has the nearest name.
        ConfigError: the strategy does not know an option, ``seed`` is no seed, ranks disagree, or a session
            is open already.
        PeerError: ranks are missing after ``timeout``; the message lists them.
    """
    # Before anything is opened: a wrong name must not cost a rendezvous.
    seed = whole_number("seed", seed, least=0)
    name = resolve_strategy(strategy, auto=True)
    session = begin(name, options, timeout_s=timeout, seed=seed, backend=backend, check=check_session_options)
    torch.manual_seed(seed)
    return session


def shutdown() -> None:
    """Close the current session, once the other ranks close theirs; every rank calls it, or none."""
    current_session().close()


def DataLoader(g: DistGraph, indices: Any, graph_sampler: Any, **options: Any) -> Any:
    """Return what yields ``(input_nodes, output_nodes, blocks)`` for the current strategy.

    With ``dgl.dataloading.as_edge_prediction_sampler(...)`` it is a :func:`DistEdgeDataLoader`.

    Every rank must call it, and all get the same number of steps; a rank that is out of seeds gets
    blocks without destinations.

    Args:
        g: The distributed graph.
        indices: (K,) this rank's seeds, as :func:`node_split` gives them; may be empty.
        graph_sampler: A sampler of ``dgl.dataloading``.
        options: ``batch_size``, ``shuffle``, ``drop_last``, ``seed``, ``depth`` and others; see
            :class:`dglx_dist.sampling.DataLoader`.

    Raises:
        ConfigError: an option or sampler that cannot be honoured, or ``g`` is in this process only.
    """
    inner = _distributed(g)
    strategy = strategy_of(inner.session)
    make = strategy.edge_loader if samples_edges(graph_sampler) else strategy.loader
    return make(inner, indices, graph_sampler, **options)


def DistEdgeDataLoader(g: DistGraph, eids: Any, graph_sampler: Any, **options: Any) -> Any:
    """Return what yields batches of edges: ``(input_nodes, pair_graph, [negative_pair_graph,] blocks)``.

    Every rank must call it, and all get the same number of steps; a rank that is out of edges gets pair
    graphs without edges.

    Args:
        g: The distributed graph.
        eids: This rank's edges, as :func:`edge_split` gives them, or a dict of them by edge type.
        graph_sampler: A sampler of ``dgl.dataloading``.
        options: ``exclude``, ``reverse_eids``, ``reverse_etypes``, ``negative_sampler`` and those of
            :func:`DataLoader`; see :class:`dglx_dist.sampling.DistEdgeDataLoader`.

    Raises:
        ConfigError: an option or sampler that cannot be honoured, also by the strategy, or ``g`` is in this
            process only.
    """
    inner = _distributed(g)
    return strategy_of(inner.session).edge_loader(inner, eids, graph_sampler, **options)


DistNodeDataLoader = DataLoader
"""DGL's name for :func:`DataLoader`."""


def wrap(model: nn.Module, g: DistGraph | ScriptGraph, reduction: Reduction = "mean") -> WrappedModel:
    """Return ``model`` made to train with the other ranks, as DistributedDataParallel would; collective.

    Build the optimizer afterwards, from the parameters of what comes back.

    Args:
        model: The same on all ranks; rank 0's weights win.
        g: The distributed graph that it will see. For a script's ``dgl.distributed.DistGraph``, ``.module``
            of what comes back is always uncut, for inference with code of the script's own.
        reduction: What the loss of the loop is over its own targets: their mean, or their sum.

    Raises:
        ConfigError: the strategy cannot train this model exactly, the ranks built different ones, or ``g``
            is in this process only.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"wrap takes a torch.nn.Module, not a {type(model).__name__}")
    if isinstance(model, WrappedModel):
        raise ConfigError("the model is wrapped already; give wrap the module that you built, once")
    inner = _distributed(g)
    wrapped = strategy_of(inner.session).wrap(model, inner, reduction)
    inner.session.attached[WRAPPED] = True
    # Scripts of DistDGL evaluate with code of their own on model.module.
    return ScriptModel(wrapped) if g is not inner and wrapped.parts.local else wrapped


def local_device() -> torch.device:
    """Return the device of this rank: its GPU where there is one, else the CPU."""
    return current_session().device


def reduce_mean(value: float | Tensor, count: int) -> float:
    """Return the mean over all ranks of means over ``count`` things each; every rank must call it.

    Args:
        value: This rank's mean; ignored where ``count`` is 0.
        count: Over how many it was taken, at least 0.

    Returns:
        The mean over all things of all ranks; NaN when there is none.
    """
    weighted = float(value) * count if count else 0.0
    sums = torch.tensor([weighted, float(count)], dtype=torch.float64)
    total, number = sum_over_ranks(sums, current_session(), phase="metrics").tolist()
    return total / number if number else float("nan")


def strategy_names() -> tuple[str, ...]:
    """Return the names that :func:`init` takes, aliases left out; ``auto`` chooses among them."""
    return STRATEGIES.names()


def default_fanouts(strategy: str, num_layers: int) -> tuple[int, ...]:
    """Return one fan-out per layer for who names none: 25 and 10s, or all where steps take whole graphs.

    Raises:
        UnknownNameError: there is no such strategy.
    """
    if STRATEGIES.get(strategy).traits.unit == "full_graph":
        return (-1,) * num_layers
    return (25, *[10] * (num_layers - 1))


def default_batch_size(strategy: str) -> int | None:
    """Return the targets per rank and step for who names none: 512; None where steps take whole graphs.

    Raises:
        UnknownNameError: there is no such strategy.
    """
    return None if STRATEGIES.get(strategy).traits.unit == "full_graph" else 512


def _distributed(g: object) -> DistGraph:
    if isinstance(g, ScriptGraph):
        return g.inner
    if not isinstance(g, DistGraph):
        raise ConfigError(
            f"the graph is a {type(g).__name__} of this process, not one that all ranks share; "
            "pass g = dx.distribute(graph), or dx.DistGraph(folder)"
        )
    return g


def register_strategy(name: str) -> Callable[[type[Strategy]], type[Strategy]]:
    """Return a decorator that makes a subclass of Strategy known as ``name`` in this process.

    Raises:
        ConfigError: the name is taken.
    """
    return STRATEGIES.register(name)


def register_partitioner(name: str) -> Callable[[type[Partitioner]], type[Partitioner]]:
    """Return a decorator that makes a subclass of Partitioner known as ``name`` in this process.

    Raises:
        ConfigError: the name is taken.
    """
    return PARTITIONERS.register(name)


def choose_strategy(
    model: nn.Module,
    g: DistGraph,
    *,
    fanouts: Sequence[int] | None = None,
    batch_size: int | None = None,
    epochs: int = 20,
) -> Choice:
    """Choose the strategy that trains ``model`` on ``g`` fastest, where the session has ``auto``; collective.

    Before the first loader is made, and before :func:`wrap`; :func:`fit` does it by itself. Some batches and
    plans are counted, the model is timed on them, and the links for two seconds.

    Args:
        model: As it will be wrapped; not changed.
        g: The distributed graph, of one node and edge type.
        fanouts: Of the loader to come, input-most first. None: 25, then 10, as ``fit`` has them.
        batch_size: Of the loader to come. None: 512.
        epochs: That will be trained.

    Returns:
        Every way to train with what an epoch of it is expected to take, which one was taken and why; the same
        on every rank.

    Raises:
        ConfigError: the session has a strategy already, a value cannot be honoured or differs between ranks,
            the graph has several types, the model fails on a batch, or nothing fits.
        PeerError: a rank is dead or silent.
    """
    return choose_for(model, g, fanouts, batch_size, epochs, own_loop=True)


def choose_for(
    model: nn.Module,
    g: DistGraph,
    fanouts: Sequence[int] | None,
    batch_size: int | None,
    epochs: int,
    *,
    own_loop: bool,
) -> Choice:
    """See :func:`choose_strategy`; ``own_loop``: whether what can be trained by ``fit`` alone is left out."""
    # Only here: choosing brings all that it chooses among.
    from dglx_dist.run.auto import choose_in_job

    if not isinstance(model, nn.Module):
        raise ConfigError(f"choose_strategy takes a torch.nn.Module, not a {type(model).__name__}")
    inner = _distributed(g)

    def read() -> Training:
        told = Training(fanouts=fanouts, batch_size=batch_size, epochs=epochs)
        # NumPy's numbers are no JSON.
        return replace(
            told,
            fanouts=None if fanouts is None else [int(one) for one in fanouts],
            batch_size=None if batch_size is None else int(batch_size),
            num_layers=2 if fanouts is None else len(fanouts),
            own_loop=own_loop,
        )

    return choose_in_job(model, inner, together(inner.session, read, ConfigError))
