"""Partitioners with one level: ranges, hash, random, by feature, from a file, LDG and Fennel."""

from pathlib import Path
from typing import ClassVar, final

import numpy as np
from numba import njit

from dglx_dist.data.partition.balance import assign_balanced
from dglx_dist.data.partition.base import Partitioner
from dglx_dist.data.partition.graph_views import (
    BalanceWeights,
    SymmetricGraph,
    assign_parts,
    balance_weights,
    iterate_slices,
)
from dglx_dist.data.storage.columns import id_dtype
from dglx_dist.errors import ConfigError, DatasetError
from dglx_dist.keyed_random import splitmix64
from dglx_dist.records import Array, Assignment, RawGraph


@final
class Contiguous(Partitioner):
    """Cuts the ids into ranges, for data in a good order (by crawl, community or an earlier partition).

    It supports one balance weight and target weights. No range exceeds its share by more than one node.
    """

    honours = frozenset({"balance", "target_weights", "tolerance"})
    external = True

    def assign(self, graph: RawGraph, num_parts: int, seed: int) -> Assignment:
        weights = balance_weights(graph, self.options, num_parts, self.max_constraints)
        parts = cut_ranges(weights.columns[0], weights.shares)
        return assign_parts(self, graph, num_parts, seed, parts, weights)


def cut_ranges(weights: Array, shares: Array) -> Array:
    """Return (N,) int32 ascending parts for (N,) int64 ``weights``, close to the (P,) ``shares``.

    A node is assigned by its middle in the cumulative weights. So each end of a range is off by at most half
    a node.
    """
    if len(weights) == 0:
        return np.empty(0, dtype=np.int32)
    middles = np.cumsum(weights, dtype=np.float64)
    borders = np.cumsum(shares)[:-1] * middles[-1]
    parts = np.empty(len(weights), dtype=np.int32)
    for rows in iterate_slices(len(weights)):
        middles[rows] -= weights[rows] / 2.0
        parts[rows] = np.searchsorted(borders, middles[rows], side="right")
    return parts


class _ByHash(Partitioner):
    external = True
    _parameters: ClassVar[dict[str, str]] = {}

    def assign(self, graph: RawGraph, num_parts: int, seed: int) -> Assignment:
        parts = hash_parts(graph.total_nodes, num_parts)
        return assign_parts(self, graph, num_parts, seed, parts, None, **self._parameters)


@final
class Hash(_ByHash):
    """The hash splitmix64(id) mod P (P3). It ignores patterns in the ids, and promises no balance."""


def hash_parts(num_nodes: int, num_parts: int) -> Array:
    """Return the (N,) int32 splitmix64(id) mod P for the ids 0..N-1."""
    parts = np.empty(num_nodes, dtype=np.int32)
    for rows in iterate_slices(num_nodes):
        ids = np.arange(rows.start, rows.stop, dtype=np.uint64)
        parts[rows] = splitmix64(ids) % np.uint64(num_parts)
    return parts


FEATURES, COLUMNS = "features", "columns"
"""Key and value in ``Assignment.parameters`` that request features by column."""


@final
class Feature(_ByHash):
    """Owners by hash, with features also split by column (P3, section 3.2).

    Rows are stored with their owner, so that every strategy can train. ``parameters["features"]`` makes the
    dataset writer add column files for as many ranks as parts.
    """

    _parameters: ClassVar = {FEATURES: COLUMNS}


@final
class File(Partitioner):
    """Parts from ``options.file``, without a balance promise."""

    honours = frozenset({"file"})
    external = True

    def assign(self, graph: RawGraph, num_parts: int, seed: int) -> Assignment:
        if self.options.file is None:
            raise ConfigError("method file needs a .npy file of part ids; set file (--file)")
        path = Path(self.options.file)
        parts = read_parts(path)
        num_nodes = graph.total_nodes
        if parts.ndim != 1 or parts.dtype.kind not in "iu":
            raise DatasetError(
                f"{path.name} holds {parts.dtype} of shape {parts.shape}; part ids are {num_nodes} integers"
            )

        if len(parts) != num_nodes:
            raise DatasetError(
                f"{path.name} has {len(parts)} part ids for {num_nodes} nodes; give one per node"
            )

        is_outside = (parts < 0) | (parts >= num_parts)
        if is_outside.any():
            row = int(np.argmax(is_outside))
            raise DatasetError(
                f"{path.name}, row {row}: part {parts[row]} is outside 0..{num_parts - 1}; "
                f"use {int(parts.max()) + 1} parts or correct it"
            )

        return assign_parts(self, graph, num_parts, seed, parts, file=path.name)


def read_parts(path: Path) -> Array:
    """Read the array in a .npy file."""
    if path.suffix != ".npy":
        raise ConfigError(f"{path} ends in {path.suffix!r}; write part ids as .npy (numpy.save)")
    if not path.is_file():
        raise ConfigError(f"there is no file {path}; give a file with one part id per node")
    try:
        with path.open("rb") as file:
            return np.asarray(np.lib.format.read_array(file, allow_pickle=False))
    except (ValueError, EOFError) as error:
        raise DatasetError(f"{path} is not a plain .npy array: {error}") from error


@final
class Random(Partitioner):
    """A random permutation that is cut into ranges. Shares are exact to one node."""

    honours = frozenset({"target_weights"})
    external = True

    def assign(self, graph: RawGraph, num_parts: int, seed: int) -> Assignment:
        weights = balance_weights(graph, self.options, num_parts, self.max_constraints)
        ids = np.arange(graph.total_nodes, dtype=id_dtype(graph.total_nodes))
        parts = np.empty(graph.total_nodes, dtype=np.int32)
        order = np.random.default_rng(seed).permutation(ids)
        parts[order] = cut_ranges(weights.columns[0], weights.shares)
        return assign_parts(self, graph, num_parts, seed, parts, weights)


def stream_order(graph: SymmetricGraph, seed: int) -> Array:
    """Return all nodes, (N,) int64, in breadth-first order from random starts.

    Greedy streaming works well in this order, because some of a node's neighbours are assigned before it.
    """
    starts = np.random.default_rng(seed).permutation(graph.num_nodes)
    return _order_breadth_first(graph.indptr, graph.indices, starts)


@njit(cache=True, nogil=True)
def _order_breadth_first(indptr: Array, indices: Array, starts: Array) -> Array:
    order = np.empty(len(starts), dtype=np.int64)
    is_seen = np.zeros(len(starts), dtype=np.bool_)
    num_found = 0
    num_visited = 0
    for start in starts:
        if is_seen[start]:
            continue
        is_seen[start] = True
        order[num_found] = start
        num_found += 1
        while num_visited < num_found:
            u = order[num_visited]
            num_visited += 1
            for e in range(indptr[u], indptr[u + 1]):
                v = indices[e]
                if not is_seen[v]:
                    is_seen[v] = True
                    order[num_found] = v
                    num_found += 1
    return order


GAMMA = 1.5
"""Exponent in Fennel's size penalty, as chosen by the authors."""


class _Streaming(Partitioner):
    honours = frozenset({"balance", "tolerance", "target_weights", "passes"})
    max_constraints = None
    external = True

    def assign(self, graph: RawGraph, num_parts: int, seed: int) -> Assignment:
        def compute(symmetric: SymmetricGraph, weights: BalanceWeights) -> Array:
            on_disk = isinstance(symmetric.indices, np.memmap)
            num_nodes = graph.total_nodes
            if on_disk and self.workspace is not None:
                num_bytes = (24 + 16 * len(weights.columns)) * num_nodes
                self.workspace.remaining(num_bytes, 0, f"placing {num_nodes} nodes by all weights")

            # A graph on disk is read in the file's order.
            order = None
            if not on_disk:
                order = stream_order(symmetric, seed)
            fennel = isinstance(self, Fennel)
            return stream(symmetric, order, weights, passes=self.options.passes, fennel=fennel)

        num_bytes = 80 * graph.total_nodes
        return assign_balanced(
            self, graph, num_parts, seed, compute, weighted=False, count_reserved_bytes=lambda _: num_bytes
        )


@final
class Fennel(_Streaming):
    """Assigns each node to the part with the most assigned neighbours minus the marginal size penalty.

    It supports any number of constraints, their tolerance, target weights and ``passes``. Parts above their
    tolerance are rebalanced afterwards. Remaining excess is in ``parameters["missed"]``.
    """


@final
class Ldg(_Streaming):
    """Linear deterministic greedy. It maximises assigned neighbours x the part's free share.

    It supports any number of constraints, their tolerance, target weights and ``passes``. Parts above their
    tolerance are rebalanced afterwards. Remaining excess is in ``parameters["missed"]``.
    """


def stream(
    graph: SymmetricGraph, order: Array | None, weights: BalanceWeights, *, passes: int, fennel: bool
) -> Array:
    """Return (N,) int32 parts. Nodes are assigned one by one, by LDG, or by Fennel with ``fennel``.

    ``order`` lists the (N,) int64 nodes as they are assigned. None: by id. The first of ``passes`` assigns
    all nodes. Each further pass assigns all nodes again, by the parts that their neighbours have by then
    (Nishimura and Ugander, "Restreaming Graph Partitioning", KDD 2013).
    """
    if order is None:
        order = np.arange(graph.num_nodes)
    part = np.full(graph.num_nodes, -1, dtype=np.int32)
    matrix = weights.matrix()
    capacity = np.ascontiguousarray(weights.capacities().T)
    for _ in range(passes):
        _stream(graph.indptr, graph.indices, order, matrix, capacity, weights.shares, fennel, part)
    return part


@njit(cache=True, nogil=True)
def _stream(
    indptr: Array,
    indices: Array,
    order: Array,
    weights: Array,
    capacity: Array,
    shares: Array,
    fennel: bool,
    part: Array,
) -> None:
    num_parts, num_weights = capacity.shape
    num_nodes = max(len(order), 1)
    # A part's size is measured in nodes with mean weight, relative to an equal share. So Fennel's constant
    # alpha = sqrt(P) m / n^1.5 also applies to other weights and unequal shares. If there are several
    # weights, the largest size counts.
    alpha = np.sqrt(num_parts) * (len(indices) / 2) / num_nodes**GAMMA
    mean_weight = np.empty(num_weights)
    for c in range(num_weights):
        mean_weight[c] = max(weights[:, c].sum() / num_nodes, 1e-9)

    load = np.zeros((num_parts, num_weights))
    links = np.zeros(num_parts)
    for u in order:
        links[:] = 0
        for e in range(indptr[u], indptr[u + 1]):
            p = part[indices[e]]
            if p >= 0:
                links[p] += 1

        # fill has the node added, and used has not. Among equal scores, the emptier part is best.
        best, best_score, best_fill = -1, -np.inf, np.inf
        emptiest, emptiest_fill = 0, np.inf
        for p in range(num_parts):
            fill, used, size = 0.0, 0.0, 0.0
            for c in range(num_weights):
                fill = max(fill, (load[p, c] + weights[u, c]) / max(capacity[p, c], 1.0))
                used = max(used, load[p, c] / max(capacity[p, c], 1.0))
                size = max(size, load[p, c] / mean_weight[c] / (shares[p] * num_parts))

            if fill < emptiest_fill:
                emptiest, emptiest_fill = p, fill
            if fill > 1.0:
                continue

            score = links[p] - alpha * GAMMA * np.sqrt(size) if fennel else links[p] * (1.0 - used)
            if score > best_score or (score == best_score and fill < best_fill):
                best, best_score, best_fill = p, score, fill

        # If all parts are full, the emptiest one takes the node.
        target_part = best if best >= 0 else emptiest
        part[u] = target_part
        for c in range(num_weights):
            load[target_part, c] += weights[u, c]
