"""METIS as DGL wraps it: the cheap variant of DistDGL, and the way out on machines without pymetis."""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Mapping

import numpy as np

from dglx_dist.errors import ConfigError
from dglx_dist.partition.options import DEFAULT_TOLERANCE, PartitionOptions
from dglx_dist.partition.symmetric import SymmetricGraph
from dglx_dist.partition.weights import BalanceWeights
from dglx_dist.records import Array

_OWN_WEIGHTS = ("nodes", "degree")
"""Constraints that DGL has arguments for; others become kinds of nodes."""


def what_dgl_lacks(options: PartitionOptions, weights: BalanceWeights) -> str | None:
    """Return why DGL's METIS cannot do what is asked, or None when it can."""
    given = options.tolerance
    tolerances = list(given.values()) if isinstance(given, Mapping) else [given]
    if any(t != DEFAULT_TOLERANCE for t in tolerances):
        return f"DGL's METIS knows no tolerance, but {given} is asked for"
    if options.target_weights is not None:
        return f"DGL's METIS makes equal parts, but target_weights={options.target_weights} is asked for"
    for name, column in zip(weights.names, weights.columns, strict=True):
        if name not in _OWN_WEIGHTS and column.max(initial=0) > 1:
            return f"DGL's METIS cannot balance the weight {name!r}"
    return None


def part_graph_with_dgl(
    symmetric: SymmetricGraph, options: PartitionOptions, weights: BalanceWeights
) -> Array:
    """Return (N,) int32 parts by DGL's METIS: one initial partition, one refinement pass, one fixed seed.

    Raises:
        ConfigError: a tolerance, target weights or a weight that is neither nodes, degree nor 0 / 1.
    """
    lacking = what_dgl_lacks(options, weights)
    if lacking is not None:
        raise ConfigError(f"{lacking}; pip install pymetis")
    kinds = np.zeros(symmetric.num_nodes, dtype=np.int64)
    for name, column in zip(weights.names, weights.columns, strict=True):
        if name not in _OWN_WEIGHTS:
            kinds = kinds * 2 + column
    dgl, torch = importlib.import_module("dgl"), importlib.import_module("torch")
    csc = tuple(torch.from_numpy(a) for a in (symmetric.indptr, symmetric.indices.astype(np.int64)))
    homogeneous = dgl.graph(("csc", (*csc, torch.empty(0, dtype=torch.int64))))
    # DGL tells on standard output how long each step took.
    with contextlib.redirect_stdout(io.StringIO()):
        parts = dgl.metis_partition_assignment(
            homogeneous,
            len(weights.shares),
            balance_ntypes=torch.from_numpy(np.unique(kinds, return_inverse=True)[1])
            if kinds.any()
            else None,
            balance_edges="degree" in weights.names,
            objtype=options.objective,
        )
    return np.asarray(parts.numpy(), dtype=np.int32)
