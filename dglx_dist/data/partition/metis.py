"""METIS, with as many balance constraints as one likes."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import numpy as np

from dglx_dist.data.partition.balance import deal, settle
from dglx_dist.data.partition.base import DEFAULT_TOLERANCE, Partitioner, PartitionOptions
from dglx_dist.data.partition.graph_views import (
    BalanceWeights,
    SymmetricGraph,
    balance_weights,
    check_request,
    describe,
    symmetrise,
    to_assignment,
    trivial_parts,
)
from dglx_dist.errors import ConfigError
from dglx_dist.records import Array, Assignment, RawGraph

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


@final
class Metis(Partitioner):
    """Multilevel k-way partitioning of the symmetrised graph (DistDGL, section 1.1).

    Honours any number of constraints, a tolerance for each, target weights, the objective and ``fast``:
    DistDGL's cheap variant, one initial partition and one refinement pass, by DGL's own build of METIS.
    With tolerances, target weights or weights above 1 of one's own, which that build does not know, fast is
    one refinement pass instead of ten. METIS aims at the tolerances; what it misses is moved to where
    there is room, and what cannot be is logged and listed in ``parameters["missed"]``. About 200 bytes
    of memory per directed edge.
    """

    honours = frozenset({"balance", "tolerance", "target_weights", "objective", "fast"})
    max_constraints = None

    def assign(self, graph: RawGraph, num_parts: int, seed: int) -> Assignment:
        """Partition with METIS; see :meth:`Partitioner.assign`.

        Raises:
            ConfigError: as there, METIS runs out of memory, or pymetis is not installed and DGL's own METIS
                knows neither tolerances nor target weights.
        """
        check_request(num_parts, seed)
        weights = balance_weights(graph, self.options, num_parts, self.max_constraints)
        parameters = describe(self.options, weights)
        part_of_node = trivial_parts(graph.total_nodes, num_parts)
        if part_of_node is None:
            symmetric = symmetrise(graph, dtype=np.int64)
            part_of_node, missed = settle(
                symmetric, weights, self._compute(symmetric, weights, seed), "metis"
            )
            if missed:
                parameters["missed"] = missed
        return to_assignment(graph, part_of_node, num_parts, method="metis", seed=seed, parameters=parameters)

    def _compute(self, symmetric: SymmetricGraph, weights: BalanceWeights, seed: int) -> Array:
        if len(symmetric.indices) == 0:
            # METIS has nothing to coarsen, and complains on standard output; any even deal is as good.
            return deal(weights)
        path = library_path()
        if path is None or (self.options.fast and what_dgl_lacks(self.options, weights) is None):
            return part_graph_with_dgl(symmetric, self.options, weights)
        request = MetisRequest(
            num_parts=len(weights.shares),
            seed=seed,
            volume=self.options.objective == "vol",
            num_refinements=1 if self.options.fast else 10,
        )
        return part_graph(path, symmetric, weights, request)
