"""The user's own part of every node, from a file or an array."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import final

import numpy as np

from dglx_dist.errors import ConfigError, DatasetError
from dglx_dist.partition.base import Partitioner
from dglx_dist.partition.flat import check_request, describe, to_assignment
from dglx_dist.records import Array, Assignment, RawGraph


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
