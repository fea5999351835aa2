"""KaMinPar: parallel multilevel partitioning with one balance weight."""

from __future__ import annotations

import functools
import importlib
import tempfile
from pathlib import Path
from typing import Any, final

import numpy as np

from dglx_dist.data.partition.balance import assign_balanced
from dglx_dist.data.partition.base import Partitioner
from dglx_dist.data.partition.graph_views import BalanceWeights, SymmetricGraph
from dglx_dist.errors import ConfigError
from dglx_dist.records import Array, Assignment, RawGraph

_HEADER_BYTES = 24
# Bits of the version word: an array is absent, or has 32-bit numbers.
NO_EDGE_WEIGHTS, NO_NODE_WEIGHTS, SHORT_NODE_IDS, SHORT_EDGE_WEIGHTS = 1, 2, 8, 32
_SHARED_MEMORY = Path("/dev/shm")


def write_parhip(path: Path, graph: SymmetricGraph, node_weights: Array | None) -> None:
    """Write a ParHiP file: header, byte offset of each row, neighbours, (N,) int64 node and edge weights."""
    version = 0
    version |= NO_EDGE_WEIGHTS if graph.edge_weights is None else SHORT_EDGE_WEIGHTS
    version |= NO_NODE_WEIGHTS if node_weights is None else 0
    version |= SHORT_NODE_IDS if graph.indices.itemsize == 4 else 0
    first_neighbour = _HEADER_BYTES + len(graph.indptr) * 8
    with path.open("wb") as file:
        np.array([version, graph.num_nodes, len(graph.indices)], dtype=np.uint64).tofile(file)
        (graph.indptr * graph.indices.itemsize + first_neighbour).tofile(file)
        graph.indices.tofile(file)
        if node_weights is not None:
            node_weights.tofile(file)
        if graph.edge_weights is not None:
            graph.edge_weights.tofile(file)


@final
class Kaminpar(Partitioner):
    """The default for one balance weight; reproducible with one thread only.

    Supports one constraint, its tolerance, target weights, ``fast`` and ``threads``.
    """

    honours = frozenset({"balance", "tolerance", "target_weights", "fast", "threads"})

    def assign(self, graph: RawGraph, num_parts: int, seed: int) -> Assignment:
        return assign_balanced(self, graph, (num_parts, seed), functools.partial(self._compute, seed))

    def _compute(self, seed: int, graph: SymmetricGraph, weights: BalanceWeights) -> Array:
        library = _library()
        node_weights = None if weights.names == ("nodes",) else weights.columns[0]
        # The Python binding reads graphs from files only; a file in shared memory costs one copy.
        folder = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
        with tempfile.TemporaryDirectory(prefix="dglx-kaminpar-", dir=folder) as scratch:
            path = Path(scratch) / "graph.parhip"
            write_parhip(path, graph, node_weights)
            loaded = library.load_graph(str(path), library.GraphFileFormat.PARHIP)
        context = library.fast_context() if self.options.fast else library.default_context()
        library.reseed(seed % 2**31)
        partitioner = library.KaMinPar(self.options.threads, context)
        capacities = np.floor(weights.capacities()[0]).astype(np.int64)
        parts = partitioner.compute_partition(loaded, max_block_weights=capacities.tolist())
        return np.fromiter(parts, dtype=np.int32, count=graph.num_nodes)


def _library() -> Any:
    try:
        return importlib.import_module("kaminpar")
    except ModuleNotFoundError as error:
        raise ConfigError(
            "method kaminpar needs the package kaminpar; pip install kaminpar, or use metis or ldg"
        ) from error
