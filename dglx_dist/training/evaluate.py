"""The exact accuracy within each mask (DistDGL evaluates the same way)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dglx_dist.cluster.collectives import sum_over_ranks
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_tensor import DistTensor
from dglx_dist.records import FEATURE, LABEL, SPLITS
from dglx_dist.training.inference import (
    Inputs,
    batches,
    first_rows,
    layerwise_inference,
    local_share,
    minibatch_inference,
    whole_of,
)
from dglx_dist.training.layers_of import layers_of
from dglx_dist.training.nested import flatten

if TYPE_CHECKING:
    from dglx_dist.graph import DistGraph


def evaluate(  # noqa: PLR0913 - what a first call needs none of
    model: nn.Module,
    g: DistGraph,
    masks: Sequence[str] | None = None,
    *,
    feature: str = FEATURE,
    label: str = LABEL,
    batch_size: int = 4096,
    num_layers: int | None = None,
    ntype: str | None = None,
    inputs: Inputs | None = None,
    output: str | int | None = None,
) -> dict[str, float]:
    """Return the exact accuracy within each mask, equal on every rank; every rank must call it.

    Args:
        model: Wrapped or plain, equal on all ranks.
        g: The graph.
        masks: Names of boolean node data; those of train, val and test masks that exist when not given.
        feature: Node data that goes into the model.
        label: (N,) integer node data; rows below 0 have no label and do not count.
        batch_size: Nodes computed at once.
        num_layers: For a model without ``inference_layers()``: how many blocks it takes; each batch then
            computes its whole neighbourhood (:func:`minibatch_inference`).
        ntype: Whose nodes are classified; not needed when only one type has ``label``.
        inputs: What goes into the model in place of ``feature``, by node type; see
            :func:`layerwise_inference`.
        output: Of a model that gives several: name or place of the one that holds the scores.

    Returns:
        Mask to accuracy, nan where a mask has no labelled node.

    Raises:
        ConfigError: the model does not tell its layers and ``num_layers`` is not given; the nodes have no
            ``label`` or mask of that name; or it is unclear which type or output is meant.
    """
    ntype = labelled_type(g, label) if ntype is None else ntype
    names = _names(g, masks, label, ntype)
    options: dict[str, Any] = {
        "feature": feature,
        "inputs": inputs,
        "batch_size": batch_size,
        "ntypes": [ntype],
    }
    if num_layers is not None:
        computed = flatten(minibatch_inference(model, g, num_layers, **options))
    else:
        computed = flatten(layerwise_inference(model, g, **options))
    try:
        scores = _scores([(path, rows) for path, rows in computed.items()], output)
        return _accuracy(scores, g, ntype, label, names)
    finally:
        for rows in computed.values():
            rows.delete()


def check_evaluable(
    model: nn.Module,
    g: DistGraph,
    *,
    feature: str = FEATURE,
    label: str = LABEL,
    batch_size: int = 4096,
    num_layers: int | None = None,
    ntype: str | None = None,
    inputs: Inputs | None = None,
) -> None:
    """Raise what :func:`evaluate` would raise before it computes anything; every rank must call it.

    Args, raises: as :func:`evaluate`.
    """
    ntype = labelled_type(g, label) if ntype is None else ntype
    _names(g, None, label, ntype)
    first_rows(g, feature, inputs)
    next(batches((0, 0), batch_size), None)
    module = whole_of(model)
    if num_layers is None:
        layers_of(module, None, None)
    elif num_layers < 1:
        raise ConfigError(f"num_layers={num_layers} must be at least 1")


def _names(g: DistGraph, masks: Sequence[str] | None, label: str, ntype: str) -> list[str]:
    """Return the names of the masks; raise ConfigError unless they and the labels are there."""
    data = g.nodes[ntype].data
    names = list(masks) if masks is not None else [name for name in SPLITS if name in data]
    for name in (label, *names):
        if name not in data:
            known = ", ".join(map(repr, data)) or "none"
            raise ConfigError(f"the nodes have no tensor {name!r} to evaluate with (known: {known})")
    if data[label].ndim != 1 or data[label].dtype.is_floating_point:
        raise ConfigError(
            f"{label!r} is {data[label].dtype} of shape {data[label].shape}, and accuracy needs one whole "
            "number for each node; give such a column as label="
        )
    return names


def labelled_type(g: DistGraph, label: str = LABEL) -> str:
    """Return the only node type, or the only one that has ``label``; the first where none has.

    Raises:
        ConfigError: several types have it.
    """
    labelled = [ntype for ntype in g.ntypes if label in g.nodes[ntype].data]
    if len(g.ntypes) == 1 or not labelled:
        return g.ntypes[0]
    if len(labelled) > 1:
        raise ConfigError(f"nodes of the types {', '.join(labelled)} have {label!r}; say which with ntype=")
    return labelled[0]


def _scores(computed: Sequence[tuple[Any, DistTensor]], output: str | int | None) -> DistTensor:
    chosen = [rows for path, rows in computed if output is None or output in path]
    if len(chosen) != 1:
        paths = ", ".join("".join(f"[{key!r}]" for key in path) for path, _ in computed)
        raise ConfigError(f"the model gives {paths}; say with output= which one holds the scores")
    return chosen[0]


def _accuracy(
    scores: DistTensor, g: DistGraph, ntype: str, label: str, names: Sequence[str]
) -> dict[str, float]:
    counts = torch.zeros(len(names), 2, dtype=torch.int64)
    first, last = local_share(g, ntype)
    data = g.nodes[ntype].data
    if last > first:
        rows = slice(first, last)
        labels = data[label][rows]
        correct = scores[rows].argmax(1) == labels
        for row, name in enumerate(names):
            inside = data[name][rows].bool() & (labels >= 0)
            counts[row, 0], counts[row, 1] = (correct & inside).sum(), inside.sum()
    totals = sum_over_ranks(counts, g.session, phase="metrics").tolist()
    return {name: hit / n if n else math.nan for name, (hit, n) in zip(names, totals, strict=True)}
