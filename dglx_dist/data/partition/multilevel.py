"""Multilevel methods: METIS (by pymetis or DGL) for any number of balance weights, and KaMinPar for one."""

import contextlib
import ctypes
import importlib
import io
import tempfile
from abc import abstractmethod
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, final

import numpy as np

from dglx_dist.data.external_memory import SHOWN_FROM, write_array
from dglx_dist.data.partition.balance import assign_balanced
from dglx_dist.data.partition.base import DEFAULT_TOLERANCE, Partitioner, PartitionOptions
from dglx_dist.data.partition.graph_views import BalanceWeights, SymmetricGraph
from dglx_dist.data.partition.one_pass import cut_ranges
from dglx_dist.data.partition.semi_external import partition
from dglx_dist.data.storage.files import partial_folder
from dglx_dist.errors import ConfigError
from dglx_dist.progress import progress
from dglx_dist.records import Array, Assignment, RawGraph

_DGL_WEIGHTS = ("nodes", "degree")
"""Constraints that DGL has arguments for. Other constraints become node types."""


def dgl_supports(options: PartitionOptions, weights: BalanceWeights) -> bool:
    """Return whether DGL's METIS supports the request.

    DGL's METIS has equal parts and no tolerances. It balances nodes, in-degrees and columns with 0 and 1.
    """
    if options.target_weights is not None:
        return False
    for constraint in options.constraints:
        if options.tolerance_of(constraint) != DEFAULT_TOLERANCE:
            return False
    for name, column in zip(weights.names, weights.columns, strict=True):
        if name not in _DGL_WEIGHTS and column.max(initial=0) > 1:
            return False
    return True


def part_graph_with_dgl(
    symmetric: SymmetricGraph, options: PartitionOptions, weights: BalanceWeights
) -> Array:
    """Return (N,) int32 parts by DGL's METIS, with one initial partition, one refinement and a fixed seed."""
    # Nodes with equal values in all other columns become one node type.
    node_types = np.zeros(symmetric.num_nodes, dtype=np.int64)
    for name, column in zip(weights.names, weights.columns, strict=True):
        if name not in _DGL_WEIGHTS:
            node_types = node_types * 2 + column

    dgl = importlib.import_module("dgl")
    torch = importlib.import_module("torch")
    balance_ntypes = None
    if node_types.any():
        _, type_ids = np.unique(node_types, return_inverse=True)
        balance_ntypes = torch.from_numpy(type_ids)
    indptr = torch.from_numpy(symmetric.indptr)
    indices = torch.from_numpy(symmetric.indices.astype(np.int64))
    no_edge_ids = torch.empty(0, dtype=torch.int64)
    homogeneous = dgl.graph(("csc", (indptr, indices, no_edge_ids)))

    # DGL prints how long each step took, which is suppressed.
    with contextlib.redirect_stdout(io.StringIO()):
        parts = dgl.metis_partition_assignment(
            homogeneous,
            len(weights.shares),
            balance_ntypes=balance_ntypes,
            balance_edges="degree" in weights.names,
            objtype=options.objective,
        )

    return np.asarray(parts.numpy(), dtype=np.int32)


# Indices in the options array, its length, and return codes, as in METIS 5.1's metis.h.
_NUM_OPTIONS = 40
_OBJTYPE = 1
_NITER = 6
_NCUTS = 7
_SEED = 8
_NUMBERING = 17
_RETURN_CODES = {-2: "bad input", -3: "not enough memory", -4: "internal error"}
_MAX_SEED = 2**31 - 1


def library_path() -> str:
    """Return the path to pymetis' shared library, which contains METIS with 64-bit ids."""
    extension = importlib.import_module("pymetis._internal")
    width = extension._idx_type_width()
    if width != 64:
        raise ConfigError(f"pymetis was built with {width}-bit ids; install its wheel with 64-bit ids")
    return str(extension.__file__)


def part_graph(
    path: str, graph: SymmetricGraph, weights: BalanceWeights, options: PartitionOptions, seed: int
) -> Array:
    """Compute (N,) int32 parts with METIS_PartGraphKway from the shared library ``path``, without the GIL.

    Neighbour ids are copied unless they are int64. ``weights`` columns that are all 0 are left out. Raises
    ConfigError if METIS failed.
    """
    library = ctypes.CDLL(path)
    num_nodes = graph.num_nodes
    used = [c for c, column in enumerate(weights.columns) if column.any()]
    num_constraints = max(len(used), 1)
    used_names = [weights.names[c] for c in used]
    node_weights = None
    # Without node weights, METIS balances the node count.
    if used_names not in ([], ["nodes"]):
        columns = [weights.columns[c] for c in used]
        node_weights = np.ascontiguousarray(np.stack(columns, axis=1), dtype=np.int64)
    indices = graph.indices.astype(np.int64, copy=False)
    edge_weights = graph.edge_weights
    if edge_weights is not None:
        edge_weights = edge_weights.astype(np.int64, copy=False)

    # METIS 5 in pymetis has 32-bit reals. It takes one share per (part, constraint), and one tolerance per
    # constraint.
    shares = np.repeat(weights.shares.astype(np.float32), num_constraints)
    tolerances = np.full(num_constraints, 1 + np.float32(DEFAULT_TOLERANCE), dtype=np.float32)
    if used:
        tolerances = np.float32(1) + weights.tolerance[used].astype(np.float32)
    parts = np.empty(num_nodes, dtype=np.int64)
    cut = ctypes.c_int64()
    code = library.METIS_PartGraphKway(
        ctypes.byref(ctypes.c_int64(num_nodes)),
        ctypes.byref(ctypes.c_int64(num_constraints)),
        _get_address(graph.indptr),
        _get_address(indices),
        _get_address(node_weights),
        None,  # Sizes for the communication volume, which are equal for all nodes.
        _get_address(edge_weights),
        ctypes.byref(ctypes.c_int64(len(weights.shares))),
        _get_address(shares),
        _get_address(tolerances),
        _make_metis_options(library, options, seed),
        ctypes.byref(cut),
        _get_address(parts),
    )
    if code != 1:
        raise ConfigError(
            f"METIS failed with {_RETURN_CODES.get(code, code)} on {num_nodes} nodes and "
            f"{len(graph.indices)} neighbours; with too little memory use method kaminpar or ldg"
        )

    return parts.astype(np.int32)


def _make_metis_options(
    library: ctypes.CDLL, options: PartitionOptions, seed: int
) -> ctypes.Array[ctypes.c_int64]:
    values = (ctypes.c_int64 * _NUM_OPTIONS)()
    library.METIS_SetDefaultOptions(values)
    values[_OBJTYPE] = int(options.objective == "vol")
    values[_NITER] = 1 if options.fast else 10
    values[_NCUTS] = 1

    # METIS uses 31 bits of the seed, and 0 and 1 are the same seed.
    values[_SEED] = seed % (_MAX_SEED - 1) + 1
    values[_NUMBERING] = 0
    return values


def _get_address(array: Array | None) -> ctypes.c_void_p | None:
    if array is None:
        return None
    return array.ctypes.data_as(ctypes.c_void_p)


class _Multilevel(Partitioner):
    external = True
    _dtype: ClassVar[Any] = None

    def assign(self, graph: RawGraph, num_parts: int, seed: int) -> Assignment:
        # The graph before symmetrisation has half the entries, and may have parallel edges to count.
        def count_bytes(weights: BalanceWeights) -> int:
            num_weights = len(weights.columns)
            return self._estimate_bytes(graph.total_nodes, 2 * graph.total_edges, True, num_weights)

        return assign_balanced(
            self,
            graph,
            num_parts,
            seed,
            partial(self._partition, seed),
            dtype=self._dtype,
            count_reserved_bytes=count_bytes,
        )

    def _partition(self, seed: int, symmetric: SymmetricGraph, weights: BalanceWeights) -> Array:
        """Return (N,) int32 parts. If memory is limited, a graph that is too large is clustered first."""
        workspace = self.workspace
        if workspace is None:
            return self._compute_with_progress(seed, symmetric, weights)
            return self._compute_with_progress(seed, symmetric, weights)

        num_weights = len(weights.columns)
        # Each balance weight is a column with one int64 per node, which stays in memory.
        workspace_beside_columns = workspace.with_reserved(8 * num_weights * symmetric.num_nodes)

        def fits(coarse_graph: SymmetricGraph) -> bool:
            has_weights = coarse_graph.edge_weights is not None
            num_nodes = coarse_graph.num_nodes
            num_entries = len(coarse_graph.indices)
            num_bytes = self._estimate_bytes(num_nodes, num_entries, has_weights, num_weights)
            return workspace_beside_columns.fits(num_bytes)

        solve = partial(self._compute_with_progress, seed)
        return partition(symmetric, weights, solve, fits, workspace, seed)

    def _compute_with_progress(self, seed: int, symmetric: SymmetricGraph, weights: BalanceWeights) -> Array:
        # The library does not report its progress.
        with progress("Placing the nodes", 1, enabled=len(symmetric.indices) >= SHOWN_FROM):
            return self._compute(seed, symmetric, weights)

    @abstractmethod
    def _compute(self, seed: int, symmetric: SymmetricGraph, weights: BalanceWeights) -> Array:
        """Compute (N,) int32 parts for a graph that fits in memory."""

    @staticmethod
    @abstractmethod
    def _estimate_bytes(num_nodes: int, num_entries: int, has_weights: bool, num_weights: int) -> int:
        """Return the library's measured memory, in addition to the symmetric graph."""


@final
class Metis(_Multilevel):
    """Multilevel k-way partitioning on the symmetrised graph (DistDGL).

    This method supports any number of constraints, a tolerance for each, target weights, the objective and
    ``fast``. With ``fast`` it uses DGL's METIS build like DistDGL, with one initial partition and one
    refinement pass. If DGL's build does not support the options, it uses one refinement pass instead of ten.

    If parts exceed their tolerance, nodes are moved afterwards. Remaining excess is logged and listed in
    ``parameters["missed"]``. The method takes about 200 bytes per directed edge. For graphs larger than
    memory see :mod:`.semi_external`.
    """

    honours = frozenset({"balance", "tolerance", "target_weights", "objective", "fast"})
    max_constraints = None
    _dtype = np.int64

    @staticmethod
    def _estimate_bytes(num_nodes: int, num_entries: int, has_weights: bool, num_weights: int) -> int:
        return 112 * num_entries + (200 + 60 * num_weights) * num_nodes

    def _compute(self, seed: int, symmetric: SymmetricGraph, weights: BalanceWeights) -> Array:
        if len(symmetric.indices) == 0:
            # METIS prints warnings without edges. Weights after the first are balanced by moving nodes.
            return cut_ranges(weights.columns[0], weights.shares)
        if self.options.fast and dgl_supports(self.options, weights):
            return part_graph_with_dgl(symmetric, self.options, weights)
        return part_graph(library_path(), symmetric, weights, self.options, seed)


_HEADER_BYTES = 24
# Bits in the version word say that an array is absent or has 32-bit numbers.
NO_EDGE_WEIGHTS = 1
NO_NODE_WEIGHTS = 2
SHORT_NODE_IDS = 8
SHORT_EDGE_WEIGHTS = 32
_SHARED_MEMORY = Path("/dev/shm")


def write_parhip(path: Path, graph: SymmetricGraph, node_weights: Array | None) -> None:
    """Write a ParHiP file with header, each row's byte offset, neighbours, and node and edge weights."""
    version = 0
    if graph.edge_weights is None:
        version |= NO_EDGE_WEIGHTS
    elif graph.edge_weights.itemsize == 4:
        version |= SHORT_EDGE_WEIGHTS

    if node_weights is None:
        version |= NO_NODE_WEIGHTS
    if graph.indices.itemsize == 4:
        version |= SHORT_NODE_IDS

    offset = _HEADER_BYTES + len(graph.indptr) * 8
    with path.open("wb") as file:
        write_array(file, np.array([version, graph.num_nodes, len(graph.indices)], dtype=np.uint64))
        write_array(file, graph.indptr * graph.indices.itemsize + offset)
        for array in (graph.indices, node_weights, graph.edge_weights):
            if array is not None:
                write_array(file, array)


@final
class Kaminpar(_Multilevel):
    """KaMinPar, the default for one balance weight. It is reproducible with one thread only.

    It supports one constraint, its tolerance, target weights, ``fast`` and ``threads``. Graphs larger than
    memory are clustered first, see :mod:`.semi_external`. KaMinPar's own compressed graphs are not used,
    because the same seed does not always give the same parts.
    """

    honours = frozenset({"balance", "tolerance", "target_weights", "fast", "threads"})

    @staticmethod
    def _estimate_bytes(num_nodes: int, num_entries: int, has_weights: bool, num_weights: int) -> int:
        entry_bytes = 28 if has_weights else 16
        return 150 * num_nodes + entry_bytes * num_entries

    def _compute(self, seed: int, graph: SymmetricGraph, weights: BalanceWeights) -> Array:
        library = importlib.import_module("kaminpar")
        node_weights = None
        if weights.names != ("nodes",):
            node_weights = weights.columns[0]

        # The Python binding only reads graphs from files. A file in shared memory costs one copy.
        folder: contextlib.AbstractContextManager[str | Path]
        if self.workspace is None:
            parent = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
            folder = tempfile.TemporaryDirectory(prefix="dglx-kaminpar-", dir=parent)
        else:
            folder = partial_folder(self.workspace.folder / "kaminpar")
        with folder as scratch:
            path = Path(scratch) / "graph.parhip"
            write_parhip(path, graph, node_weights)
            kaminpar_graph = library.load_graph(str(path), library.GraphFileFormat.PARHIP)

        context = library.fast_context() if self.options.fast else library.default_context()
        library.reseed(seed % 2**31)
        partitioner = library.KaMinPar(self.options.threads, context)
        capacities = np.floor(weights.capacities()[0]).astype(np.int64)
        parts = partitioner.compute_partition(kaminpar_graph, max_block_weights=capacities.tolist())
        return np.fromiter(parts, dtype=np.int32, count=graph.num_nodes)
