"""Read graphs in METIS's text format. The first line has sizes, and each node has a line with neighbours."""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from dglx_dist.data.sources import open_text
from dglx_dist.errors import DatasetError
from dglx_dist.records import Array

_LOG = logging.getLogger(__name__)

EDGE_VALUES = "values of edges"
"""Array that becomes the edge column ``weight``, even if there are as many nodes as edges."""


def read_metis(path: Path) -> dict[str, Array]:
    """Read a graph in METIS's text format.

    Returns:
        ``src``, ``dst`` and ``num_nodes``, and ``node_weight`` and :data:`EDGE_VALUES` if the file has them.
        Nodes are counted from 0, and each edge is listed in both directions.

    Raises:
        DatasetError: If the lines do not match the first line.
    """
    sizes, lines = _read_lines(path)
    weight_begin = sizes.neighbors_begin - sizes.num_weights

    # Each value has its line's node and its index within the line.
    counts = np.array([len(fields) for _, fields in lines[: sizes.num_lines]], dtype=np.int64)
    values = _parse_numbers(lines[: sizes.num_lines], path)
    line_starts = np.cumsum(counts) - counts
    indices = np.arange(len(values)) - np.repeat(line_starts, counts)
    nodes = np.repeat(np.arange(len(counts)), counts)

    # If edges have weights, each neighbour is followed by its edge's weight.
    is_after_weights = indices >= sizes.neighbors_begin
    is_neighbor = is_after_weights & ((indices - sizes.neighbors_begin) % sizes.fields_per_edge == 0)
    src = nodes[is_neighbor]
    dst = values[is_neighbor] - 1
    problem = _find_problem(sizes, lines, counts, src, dst)
    if problem is not None:
        raise DatasetError(f"{path}: in METIS's format it has {problem}; correct it, or write edges")

    arrays = {"src": src, "dst": dst, "num_nodes": np.array(sizes.num_nodes)}
    if sizes.num_weights > 0:
        is_weight = (indices >= weight_begin) & ~is_after_weights
        weights = values[is_weight].reshape(sizes.num_nodes, sizes.num_weights)
        arrays["node_weight"] = weights[:, 0] if sizes.num_weights == 1 else weights
    if sizes.fields_per_edge == 2:
        arrays[EDGE_VALUES] = values[is_after_weights & ~is_neighbor]

    message = "%s: read in METIS's format, with %d nodes counted from 0, and each edge in both directions"
    _LOG.warning(message, path, sizes.num_nodes)
    return arrays


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    """A file's first line: ``nodes edges [format [weights]]``.

    The format's digits tell whether lines have a node size, node weights, and edge weights.
    """

    num_nodes: int
    num_edges: int
    format: str
    """Three digits, or more if the file is wrong."""
    num_weights: int
    """Weights per node."""

    @property
    def num_lines(self) -> int:
        """Node lines that are read."""
        return max(self.num_nodes, 0)

    @property
    def neighbors_begin(self) -> int:
        """Index of the first neighbour in a line, behind the node's size and weights."""
        has_size = self.format[-3] == "1"
        return has_size + self.num_weights

    @property
    def fields_per_edge(self) -> int:
        has_edge_weights = self.format[-1] == "1"
        return 1 + has_edge_weights


_Line: TypeAlias = tuple[int, list[bytes]]
"""Line number in the file, counted from 1, and the line's fields."""


def _read_lines(path: Path) -> tuple[_Sizes, list[_Line]]:
    """Read the first line, and the lines behind it that are not comments."""
    with open_text(path, "METIS graph, or cut off") as file:
        content = file.read()
    lines: list[_Line] = []
    for line_number, line in enumerate(content.splitlines(), 1):
        fields = line.split()
        is_comment = bool(fields) and fields[0].startswith(b"%")
        # An empty line is a node without neighbours, but not before the sizes.
        if not is_comment and (fields or lines):
            lines.append((line_number, fields))

    numbers = _parse_numbers(lines[:1], path).tolist()
    if not 2 <= len(numbers) <= 4:
        line_number = lines[0][0] if lines else 1
        raise DatasetError(
            f"{path} is not a readable METIS graph: line {line_number} has {len(numbers)} numbers, but the "
            "first line must have the numbers of nodes and edges; correct it, or write edges in a .txt"
        )

    num_nodes, num_edges, *optional = numbers
    digits = f"{optional[0] if optional else 0:03d}"
    num_weights = 0
    if digits[-2] == "1":
        num_weights = optional[1] if len(optional) > 1 else 1
    sizes = _Sizes(num_nodes=num_nodes, num_edges=num_edges, format=digits, num_weights=num_weights)
    return sizes, lines[1:]


def _find_problem(sizes: _Sizes, lines: Sequence[_Line], counts: Array, src: Array, dst: Array) -> str | None:
    """Describe the first contradiction between the first line and the others, or return None.

    Args:
        sizes: The first line.
        lines: The other lines.
        counts: (n,) number of fields in each node line.
        src: (E,) source by edge.
        dst: (E,) destination by edge.
    """
    surplus_lines = lines[sizes.num_lines :]
    if len(counts) != sizes.num_nodes or any(fields for _, fields in surplus_lines):
        return f"not one line for each of {sizes.num_nodes} nodes"
    if len(sizes.format) > 3 or not set(sizes.format) <= {"0", "1"}:
        return f"the format {sizes.format}, which is not 0s and 1s"

    line_numbers = np.array([line_number for line_number, _ in lines[: sizes.num_lines]], dtype=np.int64)
    num_fields = counts - sizes.neighbors_begin
    is_incomplete = (num_fields < 0) | (num_fields % sizes.fields_per_edge != 0)
    if is_incomplete.any():
        return f"a line with missing weights (line {line_numbers[is_incomplete].max()})"

    is_outside = (dst < 0) | (dst >= sizes.num_nodes)
    if is_outside.any():
        line_number = line_numbers[src[is_outside]].max()
        return f"a neighbour outside 1..{sizes.num_nodes} (line {line_number})"
    if len(dst) != 2 * sizes.num_edges:
        return f"{len(dst)} neighbours, but {sizes.num_edges} edges have {2 * sizes.num_edges}"

    forward = np.stack([src, dst])[:, np.lexsort((src, dst))]
    backward = np.stack([dst, src])[:, np.lexsort((dst, src))]
    if not np.array_equal(forward, backward):
        return "an edge that is in the line of only one of its ends"
    return None


def _parse_numbers(lines: Sequence[_Line], path: Path) -> Array:
    """Parse the numbers on all lines.

    Raises DatasetError for the first field that is not a whole number.
    """
    try:
        return np.array([field for _, fields in lines for field in fields], dtype=np.int64)
    except (ValueError, OverflowError):
        pass
    for line_number, fields in lines:
        for field in fields:
            text = field.decode(errors="replace")
            if not re.fullmatch(r"[-+]?[0-9]{1,18}", text):
                raise DatasetError(
                    f"{path} is not a readable METIS graph: line {line_number}: {text!r:.40} is no whole "
                    "number; correct it, or write edges in a .txt"
                )
    raise AssertionError("NumPy refused numbers that match the pattern")
