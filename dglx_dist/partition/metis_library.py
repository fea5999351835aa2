"""The METIS library inside pymetis, called directly: pymetis' own function knows one constraint only."""

from __future__ import annotations

import ctypes
import importlib
from dataclasses import dataclass

import numpy as np

from dglx_dist.errors import ConfigError
from dglx_dist.partition.symmetric import SymmetricGraph
from dglx_dist.partition.weights import BalanceWeights
from dglx_dist.records import Array

# Places in the options array, return codes and array length as in metis.h of METIS 5.1.
NUM_OPTIONS = 40
OBJTYPE, NITER, NCUTS, SEED, NUMBERING = 1, 6, 7, 8, 17
RETURN_CODES = {-2: "bad input", -3: "not enough memory", -4: "internal error"}
MAX_SEED = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class MetisRequest:
    """What METIS is told beside the graph and its weights."""

    num_parts: int
    seed: int
    volume: bool = False
    """Minimise communication volume in place of cut edges."""
    num_refinements: int = 10
    """Refinement passes on each level."""


def library_path() -> str | None:
    """Return the shared library that exports METIS with 64-bit ids, or None where pymetis is not installed.

    Raises:
        ConfigError: it is installed, but with ids of another width.
    """
    try:
        extension = importlib.import_module("pymetis._internal")
    except ModuleNotFoundError:
        return None
    width = extension._idx_type_width()
    if width != 64:
        raise ConfigError(f"pymetis was built with {width}-bit ids; install its wheel, which has 64-bit ids")
    return str(extension.__file__)


def part_graph(path: str, graph: SymmetricGraph, weights: BalanceWeights, request: MetisRequest) -> Array:
    """Return (N,) int32 parts by METIS_PartGraphKway; releases the GIL.

    Args:
        path: From :func:`library_path`.
        graph: With int64 indices.
        weights: Constraints, tolerances and shares; columns without any weight are left out.
        request: The rest.

    Raises:
        ConfigError: METIS refuses or runs out of memory.
    """
    library = ctypes.CDLL(path)
    used = [c for c, column in enumerate(weights.columns) if column.any()]
    num_nodes, num_constraints = graph.num_nodes, max(len(used), 1)
    node_weights = None
    if len(used) > 1 or (used and weights.names[used[0]] != "nodes"):
        node_weights = np.stack([weights.columns[c] for c in used], axis=1)
        node_weights = np.ascontiguousarray(node_weights, dtype=np.int64)
    edge_weights = None if graph.edge_weights is None else graph.edge_weights.astype(np.int64)
    # METIS 5 in pymetis has 32-bit reals. One share per (part, constraint), one tolerance per constraint.
    shares = np.repeat(weights.shares.astype(np.float32), num_constraints)
    tolerances = np.ones(num_constraints, dtype=np.float32)
    tolerances += weights.tolerance[used].astype(np.float32) if used else np.float32(0.05)
    parts = np.empty(num_nodes, dtype=np.int64)
    cut = ctypes.c_int64()
    code = library.METIS_PartGraphKway(
        *(ctypes.byref(ctypes.c_int64(n)) for n in (num_nodes, num_constraints)),
        *(_address(a) for a in (graph.indptr, graph.indices, node_weights, None, edge_weights)),
        ctypes.byref(ctypes.c_int64(request.num_parts)),
        _address(shares),
        _address(tolerances),
        _options(library, request),
        ctypes.byref(cut),
        _address(parts),
    )
    if code != 1:
        raise ConfigError(
            f"METIS gave up with {RETURN_CODES.get(code, code)} on {num_nodes} nodes and "
            f"{len(graph.indices)} neighbours; with too little memory use method kaminpar or ldg"
        )
    return parts.astype(np.int32)


def _options(library: ctypes.CDLL, request: MetisRequest) -> ctypes.Array[ctypes.c_int64]:
    options = (ctypes.c_int64 * NUM_OPTIONS)()
    library.METIS_SetDefaultOptions(options)
    options[OBJTYPE] = int(request.volume)
    options[NITER] = request.num_refinements
    options[NCUTS] = 1
    # More than 31 bits do not reach its generator, which takes 0 and 1 for the same.
    options[SEED] = request.seed % (MAX_SEED - 1) + 1
    options[NUMBERING] = 0
    return options


def _address(array: Array | None) -> ctypes.c_void_p | None:
    return None if array is None else array.ctypes.data_as(ctypes.c_void_p)
