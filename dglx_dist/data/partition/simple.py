"""Partitioners that do not read edges: contiguous, hash, random, feature, and given by the user."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, final

import numpy as np

from dglx_dist.data.partition.base import Partitioner
from dglx_dist.data.partition.graph_views import BalanceWeights, assign_parts
from dglx_dist.errors import ConfigError, DatasetError
from dglx_dist.keyed_random import splitmix64
from dglx_dist.records import Array, Assignment, RawGraph


@final
class Contiguous(Partitioner):
    """Ranges of ids, for data in a good order (by crawl, community or an earlier partition).

    Supports one balance weight and target weights; no range exceeds its share by more than one node.
    """

    honours = frozenset({"balance", "target_weights", "tolerance"})

    def assign(self, graph: RawGraph, num_parts: int, seed: int) -> Assignment:
        return assign_parts(self, graph, (num_parts, seed), lambda w: cut_ranges(w.columns[0], w.shares))


def cut_ranges(weights: Array, shares: Array) -> Array:
    """Return (N,) int32 ascending parts of the (N,) int64 ``weights``, close to the (P,) ``shares``.

    The middle of a node in the cumulative weights decides, so each end of a range is off by at most half a
    node.
    """
    ends = np.cumsum(weights, dtype=np.float64)
    total = ends[-1] if len(ends) else 0.0
    middles = ends - weights / 2.0
    borders = np.cumsum(shares)[:-1] * total
    return np.searchsorted(borders, middles, side="right").astype(np.int32)


class _ByHash(Partitioner):
    scatters = True
    _parameters: ClassVar[Mapping[str, str]] = MappingProxyType({})

    def assign(self, graph: RawGraph, num_parts: int, seed: int) -> Assignment:
        parts = hash_parts(graph.total_nodes, num_parts)
        return assign_parts(self, graph, (num_parts, seed), parts, **self._parameters)


@final
class Hash(_ByHash):
    """splitmix64(id) mod P (P3): independent of patterns in the ids, no balance promise."""


def hash_parts(num_nodes: int, num_parts: int) -> Array:
    """Return (N,) int32: splitmix64(id) mod P of the ids 0..N-1."""
    ids = np.arange(num_nodes, dtype=np.uint64)
    return (splitmix64(ids) % np.uint64(num_parts)).astype(np.int32)


FEATURES, COLUMNS = "features", "columns"
"""Key and value in ``Assignment.parameters`` that request features by column."""


@final
class Feature(_ByHash):
    """Owners by hash, and features also split by column (P3, section 3.2).

    Rows are stored with their owner, so that every strategy can train; for ``parameters["features"]`` the
    writer of the dataset adds files of columns for as many ranks as parts.
    """

    _parameters = MappingProxyType({FEATURES: COLUMNS})


@final
class File(Partitioner):
    """Parts from ``options.file`` or ``options.vector``, without a balance promise."""

    honours = frozenset({"file", "vector"})

    def assign(self, graph: RawGraph, num_parts: int, seed: int) -> Assignment:
        source, parts, unit = self._parts(graph)
        _check_parts(parts, source, unit, graph.total_nodes, num_parts)
        return assign_parts(self, graph, (num_parts, seed), parts, file=source)

    def _parts(self, graph: RawGraph) -> tuple[str, Array, str]:
        # The source of the ids, the ids, and the unit of a position in messages.
        file, vector = self.options.file, self.options.vector
        if (file is None) == (vector is None):
            raise ConfigError("method file needs either a file or a vector of part ids: set one of them")
        if file is not None:
            path = Path(file)
            unit = "row" if path.suffix == ".npy" else "line"
            return path.name, read_parts(path), unit
        if isinstance(vector, Mapping):
            missing = [t for t in graph.num_nodes if t not in vector]
            if missing:
                raise DatasetError(f"the vector has no part ids for node type {missing[0]!r}; add them")
            for node_type, count in graph.num_nodes.items():
                _check_count(vector[node_type], f"the vector of {node_type!r}", count)
            return "vector", np.concatenate([vector[t] for t in graph.num_nodes]), "row"
        return "vector", np.asarray(vector), "row"


def read_parts(path: Path) -> Array:
    """Return the part ids in ``path``: .npy (N,) integers, or .txt / .csv with one per line."""
    if path.suffix not in (".npy", ".txt", ".csv"):
        raise ConfigError(f"{path} ends in {path.suffix!r}; part ids come as .npy, .txt or .csv")
    if not path.is_file():
        raise ConfigError(f"there is no file {path}; give the path of one part id per node")
    if path.suffix == ".npy":
        try:
            with path.open("rb") as file:
                return np.asarray(np.lib.format.read_array(file, allow_pickle=False))
        except (ValueError, EOFError) as error:
            raise DatasetError(f"{path} is not a plain .npy array: {error}") from error
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise DatasetError(f"{path} is not text ({error}); write one whole number per line") from error
    parts = np.empty(len(lines), dtype=np.int64)
    for number, line in enumerate(lines):
        try:
            parts[number] = int(line)
        except (ValueError, OverflowError) as error:
            raise DatasetError(
                f"{path}, line {number + 1}: {line[:40]!r} is not a part id; write one whole number per line"
            ) from error
    return parts


def _check_parts(parts: Array, source: str, unit: str, num_nodes: int, num_parts: int) -> None:
    if parts.ndim != 1 or (parts.dtype.kind not in "iu" and len(parts)):
        raise DatasetError(
            f"{source} holds {parts.shape} {parts.dtype}; part ids are whole numbers, ({num_nodes},)"
        )
    _check_count(parts, source, num_nodes)
    wrong = (parts < 0) | (parts >= num_parts)
    if wrong.any():
        first = int(np.argmax(wrong))
        number = first + 1 if unit == "line" else first
        raise DatasetError(
            f"{source}, {unit} {number}: part {parts[first]} is outside 0..{num_parts - 1}; "
            f"ask for {int(parts.max()) + 1} parts or correct it"
        )


def _check_count(parts: Array, source: str, num_nodes: int) -> None:
    if len(parts) != num_nodes:
        raise DatasetError(f"{source} has {len(parts)} part ids for {num_nodes} nodes; give one per node")


@final
class Random(Partitioner):
    """A random permutation in ranges: shares are exact to one node; an edge is cut with (P - 1) / P."""

    honours = frozenset({"target_weights"})
    scatters = True

    def assign(self, graph: RawGraph, num_parts: int, seed: int) -> Assignment:
        def compute(weights: BalanceWeights) -> Array:
            part_of_node = np.empty(graph.total_nodes, dtype=np.int32)
            order = np.random.default_rng(seed).permutation(graph.total_nodes)
            part_of_node[order] = cut_ranges(weights.columns[0], weights.shares)
            return part_of_node

        return assign_parts(self, graph, (num_parts, seed), compute)
