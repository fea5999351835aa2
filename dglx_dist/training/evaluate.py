"""Exact scores of every node, and the accuracy that follows (DistDGL evaluates the same way)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from dglx_dist.cluster.collectives import barrier, sum_over_ranks
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_tensor import DistTensor
from dglx_dist.records import FEATURE, LABEL, SPLITS, Array
from dglx_dist.strategies.base import WrappedModel
from dglx_dist.training.full_blocks import FullBlocks
from dglx_dist.training.models import InferenceLayer

if TYPE_CHECKING:
    from dglx_dist.graph import DistGraph


def layerwise_inference(
    model: nn.Module,
    g: DistGraph,
    *,
    feature: str = FEATURE,
    batch_size: int = 4096,
    layers: Sequence[InferenceLayer] | None = None,
) -> DistTensor:
    """Compute every layer once for every node, over all neighbours; every rank must call it.

    Each rank computes its share of its server's nodes and reads the layer before through the KVStore, so
    memory holds two layers of activations, not more. Convolutions see the degrees of the whole graph.

    Args:
        model: Wrapped or plain, equal on all ranks; put into evaluation mode meanwhile.
        g: A graph of one node and one edge type.
        feature: Node data that goes into the first layer.
        batch_size: Destinations computed at once.
        layers: ``(block, h) -> h`` per layer; the model's ``inference_layers()`` when not given.

    Returns:
        (N, C) in the dtype of the model, rows by the ids of ``g``. ``delete()`` it when done.

    Raises:
        ConfigError: the model does not tell its layers, or the graph has several types.
    """
    steps = list(layers) if layers is not None else _layers_of(_plain(model))
    target = float_of(model)
    blocks, mine = FullBlocks(g, target.device), local_share(g)
    computed: list[DistTensor] = []
    with _evaluating(model):
        for layer in steps:
            rows = computed[-1] if computed else g.ndata[feature]
            computed.append(_one_layer(layer, blocks, rows, (g, mine, batch_size), target))
            if len(computed) > 1:
                computed.pop(-2).delete()
    return computed[-1]


def minibatch_inference(
    model: nn.Module, g: DistGraph, num_layers: int, *, feature: str = FEATURE, batch_size: int = 1024
) -> DistTensor:
    """Compute every node's scores from its whole neighbourhood of ``num_layers`` hops; collective.

    Exact for any model that is called as ``model(blocks, h)``, but shared neighbours are computed again in
    each batch: prefer :func:`layerwise_inference` where the model tells its layers.

    Args:
        model: Wrapped or plain, equal on all ranks; put into evaluation mode meanwhile.
        g: A graph of one node and one edge type.
        num_layers: Blocks the model takes.
        feature: Node data that goes in.
        batch_size: Nodes computed at once.

    Returns:
        (N, C) in the dtype of the model, rows by the ids of ``g``. ``delete()`` it when done.

    Raises:
        ConfigError: ``num_layers`` is below 1, or the graph has several types.
    """
    if num_layers < 1:
        raise ConfigError(f"num_layers={num_layers} must be at least 1")
    target = float_of(model)
    full, mine = FullBlocks(g, target.device), local_share(g)

    def scores(ids: Array) -> Tensor:
        blocks, inputs = full.blocks(ids, num_layers)
        h = g.ndata[feature][torch.from_numpy(inputs)].to(target.device, target.dtype)
        return _plain(model)(blocks, h)

    with _evaluating(model):
        width = scores(np.zeros(1, dtype=np.int64)).shape[1]
        out = _new_rows(g, width, target.dtype)
        for first, last in batches(mine, batch_size):
            _put(out, first, scores(np.arange(first, last)))
    barrier(g.session, "the scores of all nodes")
    return out


def evaluate(
    model: nn.Module,
    g: DistGraph,
    masks: Sequence[str] | None = None,
    *,
    feature: str = FEATURE,
    label: str = LABEL,
    batch_size: int = 4096,
    num_layers: int | None = None,
) -> dict[str, float]:
    """Return the exact accuracy within each mask, equal on every rank; every rank must call it.

    Args:
        model: Wrapped or plain, equal on all ranks.
        g: A graph of one node and one edge type.
        masks: Names of boolean node data; those of train, val and test masks that exist when not given.
        feature: Node data that goes into the model.
        label: (N,) integer node data; rows below 0 have no label and do not count.
        batch_size: Nodes computed at once.
        num_layers: For a model without ``inference_layers()``: how many blocks it takes; each batch then
            computes its whole neighbourhood (:func:`minibatch_inference`).

    Returns:
        Mask to accuracy, nan where a mask has no labelled node.

    Raises:
        ConfigError: the model does not tell its layers and ``num_layers`` is not given; the nodes have no
            ``label`` or mask of that name.
    """
    names = list(masks) if masks is not None else [name for name in SPLITS if name in g.ndata]
    for name in (label, *names):
        if name not in g.ndata:
            known = ", ".join(map(repr, g.ndata)) or "none"
            raise ConfigError(f"the nodes have no tensor {name!r} to evaluate with (known: {known})")
    if num_layers is not None:
        scores = minibatch_inference(model, g, num_layers, feature=feature, batch_size=batch_size)
    else:
        scores = layerwise_inference(model, g, feature=feature, batch_size=batch_size)
    counts = torch.zeros(len(names), 2, dtype=torch.int64)
    first, last = local_share(g)
    if last > first:
        rows = slice(first, last)
        labels = g.ndata[label][rows]
        correct = scores[rows].argmax(1) == labels
        for row, name in enumerate(names):
            inside = g.ndata[name][rows].bool() & (labels >= 0)
            counts[row, 0], counts[row, 1] = (correct & inside).sum(), inside.sum()
    scores.delete()
    totals = sum_over_ranks(counts, g.session, phase="metrics").tolist()
    return {name: hit / n if n else math.nan for name, (hit, n) in zip(names, totals, strict=True)}


def in_original_order(rows: DistTensor, g: DistGraph) -> Tensor:
    """Return all rows of a node tensor in the order of the dataset before partitioning; any rank alone.

    Returns:
        (N, ...): row v belongs to the node that was v in the raw graph.
    """
    values = rows.to_local()
    ordered = torch.empty_like(values)
    ordered[g.orig_ids(torch.arange(len(rows)), g.ntypes[0])] = values
    return ordered


def local_share(g: DistGraph) -> tuple[int, int]:
    """Return this rank's first own node and the one after its last; shares of ranks are disjoint."""
    topology = g.session.topology
    policy = g.get_node_partition_policy(g.ntypes[0])
    first, size = int(policy.bounds[policy.part_id]), policy.get_part_size()
    place, count = topology.local_rank, len(topology.ranks_of_server(topology.server))
    return first + size * place // count, first + size * (place + 1) // count


def batches(share: tuple[int, int], batch_size: int) -> Iterator[tuple[int, int]]:
    """Cut ``first <= id < last`` into pieces of at most ``batch_size``.

    Raises:
        ConfigError: ``batch_size`` is below 1.
    """
    if batch_size < 1:
        raise ConfigError(f"batch_size={batch_size} must be at least 1")
    first, last = share
    for start in range(first, last, batch_size):
        yield start, min(start + batch_size, last)


def float_of(model: nn.Module) -> Tensor:
    """Return a tensor of the floating-point dtype and the device of the model's parameters."""
    floats = (p for p in model.parameters() if p.is_floating_point())
    return next(floats, torch.zeros(()))


def _one_layer(
    layer: InferenceLayer,
    blocks: FullBlocks,
    rows: DistTensor,
    work: tuple[DistGraph, tuple[int, int], int],
    target: Tensor,
) -> DistTensor:
    g, share, batch_size = work

    def apply(ids: Array) -> Tensor:
        block, sources = blocks.block(ids)
        h = rows[torch.from_numpy(sources)].to(target.device, target.dtype)
        return layer(block, h)

    # All ranks need the width before any has a result, also those without nodes: node 0 tells it.
    width = apply(np.zeros(1, dtype=np.int64)).shape[1]
    out = _new_rows(g, width, target.dtype)
    for first, last in batches(share, batch_size):
        _put(out, first, apply(np.arange(first, last)))
    barrier(g.session, "a layer of all nodes")
    return out


def _new_rows(g: DistGraph, width: int, dtype: torch.dtype) -> DistTensor:
    policy = g.get_node_partition_policy(g.ntypes[0])
    return DistTensor((g.num_nodes(), width), dtype, part_policy=policy, is_gdata=False, graph=g)


def _put(out: DistTensor, first: int, values: Tensor) -> None:
    """Write rows of the own server straight into the memory that its ranks share."""
    start = first - out.local_range[0]
    out.local_rows()[start : start + len(values)] = values.cpu()


def _plain(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, WrappedModel) else model


def _layers_of(module: nn.Module) -> list[InferenceLayer]:
    ask = getattr(module, "inference_layers", None)
    if ask is None:
        raise ConfigError(
            f"{type(module).__name__} does not tell its layers; give it a method inference_layers() that "
            "returns one callable (block, h) -> h per layer (see dglx_dist.training.models), or pass "
            "num_layers= to evaluate(), which computes each batch's whole neighbourhood"
        )
    return list(ask())


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes.items():
            module.training = training
