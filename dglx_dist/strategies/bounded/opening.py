"""What a rank reads before the first epoch: its part of the graph, with features, labels and edge weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import numpy as np
import torch

from dglx_dist.errors import ConfigError
from dglx_dist.graph.opening import together
from dglx_dist.offload.program import Program
from dglx_dist.records import Array
from dglx_dist.strategies.base import Objective
from dglx_dist.strategies.bounded.edge_factors import EdgeFactor, values_of
from dglx_dist.strategies.bounded.ghosts import routes_of
from dglx_dist.strategies.bounded.intervals import cut_intervals
from dglx_dist.strategies.bounded.loading import exchange_boundaries, read_features, read_structure
from dglx_dist.strategies.bounded.local_graph import LocalGraph
from dglx_dist.strategies.bounded.part import Part

if TYPE_CHECKING:
    from dglx_dist.graph import DistGraph


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Wanted:
    """What a part shall have."""

    program: Program
    factors: Mapping[str, EdgeFactor]
    """What edges weigh, by the names that the program uses."""
    objective: Objective
    targets: Array
    """(n,) bool: which of this rank's own nodes are trained on."""
    intervals: int
    """Per graph server."""
    want_in_edges: Sequence[str] = ()
    """Layers that raise where a node has no in-edge."""


def open_part(g: DistGraph, wanted: Wanted) -> Part:
    """Return this rank's part; every rank must call it.

    Raises:
        ConfigError: on all ranks, when on one the node data is missing or does not fit the program, a
            training node has no label, or a node has no in-edge and a layer wants one.
    """
    session, program = g.session, wanted.program
    together(session, lambda: check_columns(g, wanted.objective, program.features), ConfigError)
    graph = read_structure(g)
    boundary = exchange_boundaries(session, graph)
    bounds = cut_intervals(graph.indptr, graph.sources, wanted.intervals)

    def read() -> Part:
        _check_in_edges(graph, wanted.want_in_edges)
        own = np.arange(graph.starts[graph.rank], graph.starts[graph.rank + 1], dtype=np.int64)
        dtype = np.dtype(program.dtype)
        part = Part(
            graph=graph,
            bounds=bounds,
            first_interval=graph.rank * wanted.intervals,
            routes=routes_of(graph, bounds, boundary),
            features=read_features(g, graph, wanted.objective.feature, program.dtype),
            labels=_labels(g, own, wanted),
            fixed={name: values_of(one, g, own, dtype)[:, None] for name, one in wanted.factors.items()},
        )
        part.check(program)
        return part

    return together(session, read, ConfigError)


def check_columns(g: DistGraph, objective: Objective, width: int) -> None:
    """Raise ConfigError unless the nodes have features of ``width`` columns, and whole numbers as labels."""
    for name in (objective.feature, objective.label):
        if name not in g.ndata:
            known = ", ".join(map(repr, g.ndata)) or "none"
            raise ConfigError(f"the nodes have no tensor {name!r} (known: {known})")
    shape = tuple(g.ndata[objective.feature].shape)
    if len(shape) != 2 or shape[1] != width:
        raise ConfigError(
            f"the features {objective.feature!r} have the shape {shape}, and the model's first layer takes "
            f"{width} columns; build the model with as many"
        )
    labels = g.ndata[objective.label]
    if len(labels.shape) != 1 or labels.dtype.is_floating_point or labels.dtype.is_complex:
        raise ConfigError(
            f"the labels {objective.label!r} are {labels.dtype} of shape {tuple(labels.shape)}; give one "
            "whole number per node, the class"
        )


def _check_in_edges(graph: LocalGraph, layers: Sequence[str]) -> None:
    """Evaluation, in which the layers themselves are called, would raise after all training."""
    without = np.flatnonzero(np.diff(graph.indptr) == 0)
    if layers and len(without):
        raise ConfigError(
            f"node {int(graph.starts[graph.rank] + without[0])} has no in-edge, and layer {layers[0]!r} "
            "refuses such nodes; make it with allow_zero_in_degree=True, or add self-loops to the graph"
        )


def _labels(g: DistGraph, own: Array, wanted: Wanted) -> Array:
    name = wanted.objective.label
    labels = g.ndata[name][torch.from_numpy(own)].numpy()
    classes = wanted.program.classes
    # Before they are narrowed: a label of 2**32 would be class 0.
    wrong = np.flatnonzero(wanted.targets & ((labels < 0) | (labels >= classes)))
    if len(wrong):
        raise ConfigError(
            f"training node {int(own[wrong[0]])} has the label {int(labels[wrong[0]])}, and the model has "
            f"classes from 0 to {classes - 1}; take nodes without a label out of the training nodes, or "
            "build the model with more classes"
        )
    return np.where(wanted.targets, labels, -1).astype(np.int32)
