"""METIS as DGL wraps it, for machines without pymetis."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

import numpy as np

from dglx_dist.errors import ConfigError
from dglx_dist.partition.options import DEFAULT_TOLERANCE, PartitionOptions
from dglx_dist.partition.symmetric import SymmetricGraph
from dglx_dist.partition.weights import BalanceWeights
from dglx_dist.records import Array


def part_graph_with_dgl(
    symmetric: SymmetricGraph, options: PartitionOptions, weights: BalanceWeights
) -> Array:
    """Return (N,) int32 parts by DGL's METIS: always the fast variant, always the same seed.

    Raises:
        ConfigError: a tolerance, target weights or a weight that is neither nodes, degree nor 0 / 1.
    """
    given = options.tolerance
    tolerances = list(given.values()) if isinstance(given, Mapping) else [given]
    if any(t != DEFAULT_TOLERANCE for t in tolerances):
        raise ConfigError(f"DGL's METIS knows no tolerance, but {given} is asked for; pip install pymetis")
    if options.target_weights is not None:
        raise ConfigError(
            f"DGL's METIS makes equal parts, but target_weights={options.target_weights} is asked for; "
            "pip install pymetis"
        )
    kinds = np.zeros(symmetric.num_nodes, dtype=np.int64)
    for name, column in zip(weights.names, weights.columns, strict=True):
        if name in ("nodes", "degree"):
            continue
        if column.max(initial=0) > 1:
            raise ConfigError(f"DGL's METIS cannot balance the weight {name!r}; pip install pymetis")
        kinds = kinds * 2 + column
    dgl, torch = importlib.import_module("dgl"), importlib.import_module("torch")
    csc = tuple(torch.from_numpy(a) for a in (symmetric.indptr, symmetric.indices.astype(np.int64)))
    homogeneous = dgl.graph(("csc", (*csc, torch.empty(0, dtype=torch.int64))))
    parts = dgl.metis_partition_assignment(
        homogeneous,
        len(weights.shares),
        balance_ntypes=torch.from_numpy(np.unique(kinds, return_inverse=True)[1]) if kinds.any() else None,
        balance_edges="degree" in weights.names,
        objtype=options.objective,
    )
    return np.asarray(parts.numpy(), dtype=np.int32)
