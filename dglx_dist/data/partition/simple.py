"""The user's own part of every node, from a file or an array."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import final

import numpy as np

from dglx_dist.data.partition.base import Partitioner
from dglx_dist.data.partition.graph_views import balance_weights, check_request, describe, to_assignment
from dglx_dist.errors import ConfigError, DatasetError
from dglx_dist.keyed_random import splitmix64
from dglx_dist.records import Array, Assignment, RawGraph


@final
class Contiguous(Partitioner):
    """Ranges of ids, for data that is already ordered well (by crawl, by community, by an earlier partition).

    Honours one balance weight and target weights. No range exceeds its share by more than one node.
    """

    honours = frozenset({"balance", "target_weights", "tolerance"})

    def assign(self, graph: RawGraph, num_parts: int, seed: int) -> Assignment:
        """Cut the ids into P ranges; ``seed`` changes nothing. See :meth:`Partitioner.assign`."""
        check_request(num_parts, seed)
        weights = balance_weights(graph, self.options, num_parts, self.max_constraints)
        return to_assignment(
            graph,
            cut_ranges(weights.columns[0], weights.shares),
            num_parts,
            method="contiguous",
            seed=seed,
            parameters=describe(self.options, weights),
        )


def cut_ranges(weights: Array, shares: Array) -> Array:
    """Return (N,) int32 ascending parts of the (N,) int64 ``weights``, close to the (P,) ``shares``.

    A node goes where its middle lies on the line of all weights, so a range misses each of its two ends
    by at most half a node.
    """
    ends = np.cumsum(weights, dtype=np.float64)
    total = ends[-1] if len(ends) else 0.0
    middles = ends - weights / 2.0
    borders = np.cumsum(shares)[:-1] * total
    return np.searchsorted(borders, middles, side="right").astype(np.int32)


@final
class Hash(Partitioner):
    """splitmix64(id) mod P, so that order or pattern in the ids does not show in the parts (P3, section 2.1).

    It promises no balance: sizes vary like those of a random draw.
    """

    def assign(self, graph: RawGraph, num_parts: int, seed: int) -> Assignment:
        """Hash the ids (node types one after the other); ``seed`` changes nothing. See the base class."""
        check_request(num_parts, seed)
        return to_assignment(
            graph,
            hash_parts(graph.total_nodes, num_parts),
            num_parts,
            method="hash",
            seed=seed,
            parameters=describe(self.options, None),
        )


def hash_parts(num_nodes: int, num_parts: int) -> Array:
    """Return (N,) int32: splitmix64(id) mod P of the ids 0..N-1."""
    ids = np.arange(num_nodes, dtype=np.uint64)
    return (splitmix64(ids) % np.uint64(num_parts)).astype(np.int32)


FEATURES, COLUMNS = "features", "columns"
"""The key and the value in ``Assignment.parameters`` of those who ask for features by column."""


@final
class Feature(Partitioner):
    """Owners by hash, with ``parameters["features"] == "columns"``: features are meant to be cut by column.

    On disk rows still lie with their owner, so that every strategy can train; who writes the dataset adds,
    for that parameter, files of the columns of as many ranks as parts (P3, section 3.2).
    """

    def assign(self, graph: RawGraph, num_parts: int, seed: int) -> Assignment:
        """Hash the ids as ``hash`` does; ``seed`` changes nothing. See :meth:`Partitioner.assign`."""
        check_request(num_parts, seed)
        return to_assignment(
            graph,
            hash_parts(graph.total_nodes, num_parts),
            num_parts,
            method="feature",
            seed=seed,
            parameters={**describe(self.options, None), FEATURES: COLUMNS},
        )


@final
class File(Partitioner):
    """Takes the parts from ``options.file`` or ``options.vector``; it promises no balance."""

    honours = frozenset({"file", "vector"})

    def assign(self, graph: RawGraph, num_parts: int, seed: int) -> Assignment:
        """Read and check one part id per node; ``seed`` changes nothing. See :meth:`Partitioner.assign`.

        Raises:
            ConfigError: neither or both of file and vector are given, or the suffix is unknown.
            DatasetError: the ids are not whole numbers in [0, P), or not one per node; names the line.
        """
        check_request(num_parts, seed)
        told, parts, unit = self._parts(graph)
        _check_parts(parts, told, unit, graph.total_nodes, num_parts)
        parameters = {**describe(self.options, None), "file": told}
        return to_assignment(graph, parts, num_parts, method="file", seed=seed, parameters=parameters)

    def _parts(self, graph: RawGraph) -> tuple[str, Array, str]:
        """Return where the ids come from, the ids, and what one of them is called in a message."""
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
    """Return the part ids in ``path``: .npy (N,) integers, or .txt / .csv with one per line.

    Raises:
        ConfigError: there is no such file, or its suffix is another one.
        DatasetError: a line is not a whole number; names the file and the line, counted from 1.
    """
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


def _check_parts(parts: Array, told: str, unit: str, num_nodes: int, num_parts: int) -> None:
    if parts.ndim != 1 or (parts.dtype.kind not in "iu" and len(parts)):
        raise DatasetError(
            f"{told} holds {parts.shape} {parts.dtype}; part ids are whole numbers, ({num_nodes},)"
        )
    _check_count(parts, told, num_nodes)
    wrong = (parts < 0) | (parts >= num_parts)
    if wrong.any():
        first = int(np.argmax(wrong))
        number = first + 1 if unit == "line" else first
        raise DatasetError(
            f"{told}, {unit} {number}: part {parts[first]} is outside 0..{num_parts - 1}; "
            f"ask for {int(parts.max()) + 1} parts or correct it"
        )


def _check_count(parts: Array, told: str, num_nodes: int) -> None:
    if len(parts) != num_nodes:
        raise DatasetError(f"{told} has {len(parts)} part ids for {num_nodes} nodes; give one per node")


@final
class Random(Partitioner):
    """A random deal: a part misses its share by at most one node, a neighbour is remote with (P-1)/P."""

    honours = frozenset({"target_weights"})

    def assign(self, graph: RawGraph, num_parts: int, seed: int) -> Assignment:
        """Shuffle the nodes and cut the row into parts; see :meth:`Partitioner.assign`."""
        check_request(num_parts, seed)
        weights = balance_weights(graph, self.options, num_parts, self.max_constraints)
        order = np.random.default_rng(seed).permutation(graph.total_nodes)
        part_of_node = np.empty(graph.total_nodes, dtype=np.int32)
        part_of_node[order] = cut_ranges(weights.columns[0], weights.shares)
        return to_assignment(
            graph,
            part_of_node,
            num_parts,
            method="random",
            seed=seed,
            parameters=describe(self.options, weights),
        )
