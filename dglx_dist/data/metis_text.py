"""Graphs in METIS's text format. The first line has sizes, and each node has a line of neighbours."""

import logging
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dglx_dist.data.sources import open_text
from dglx_dist.errors import DatasetError
from dglx_dist.records import Array

_LOG = logging.getLogger(__name__)


EDGE_VALUES = "values of edges"
"""Name of the array that becomes the edge column ``weight``, even if there are as many nodes as edges."""


def read_metis(path: Path) -> dict[str, Array]:
    """Return ``src``, ``dst``, ``num_nodes``, and any ``node_weight`` and :data:`EDGE_VALUES`.

    Raises:
        DatasetError: the file does not match its first line.
    """
    with open_text(path, "METIS graph, or cut off") as file:
        content = file.read()
    rows = [(line_number, line.split()) for line_number, line in enumerate(content.splitlines(), 1)]
    rows = [(line_number, row) for line_number, row in rows if not row or not row[0].startswith(b"%")]

    # An empty line is a node without neighbours, but not before the sizes.
    while rows and not rows[0][1]:
        del rows[0]
    line_of_sizes, sizes = rows[0][0] if rows else 1, _read_numbers(rows[:1], path)
    if not 2 <= len(sizes) <= 4:
        raise DatasetError(
            f"{path} is not a readable METIS graph: line {line_of_sizes} has {len(sizes)} numbers, but the "
            "first line must have the numbers of nodes and edges; correct it, or write edges in a .txt"
        )

    num_nodes, num_edges, *extra_sizes = sizes.tolist()
    layout = f"{extra_sizes[0] if extra_sizes else 0:03d}"
    num_weights = (extra_sizes[1] if len(extra_sizes) > 1 else 1) * (layout[-2] == "1")
    has_weights, start = layout[-1] == "1", num_weights + (layout[-3] == "1")
    node_rows = rows[1 : 1 + max(num_nodes, 0)]

    # ``columns`` has the index of each value in its line. Neighbours begin at index ``start``.
    counts = np.array([len(row) for _, row in node_rows], dtype=np.int64)
    values = _read_numbers(node_rows, path)
    columns = np.arange(len(values)) - np.repeat(np.cumsum(counts) - counts, counts)
    owners, step = np.repeat(np.arange(len(counts)), counts), 1 + has_weights
    is_end = (columns >= start) & ((columns - start) % step == 0)
    src, dst = owners[is_end], values[is_end] - 1
    forward, backward = (np.stack(pair)[:, np.lexsort(pair)] for pair in ((src, dst), (dst, src)))
    bad_rows = src[(dst < 0) | (dst >= num_nodes)]
    gaps = ((counts - start) % step != 0) | (counts < start)
    line_ids = np.array([line_number for line_number, _ in node_rows])
    has_other_count = len(counts) != num_nodes or any(row for _, row in rows[1 + num_nodes :])
    problems = {
        f"not one line for each of {num_nodes} nodes": has_other_count,
        f"the format {layout}, which is not 0s and 1s": len(layout) > 3 or not {*layout} <= {"0", "1"},
        f"a line with missing weights (line {line_ids[gaps].max(initial=0)})": gaps.any(),
        f"a neighbour outside 1..{num_nodes} (line {line_ids[bad_rows].max(initial=0)})": len(bad_rows) > 0,
        f"{len(dst)} neighbours, but {num_edges} edges have {2 * num_edges}": len(dst) != 2 * num_edges,
        "an edge that is in the line of only one of its ends": not np.array_equal(forward, backward),
    }
    if problem := next((problem for problem, is_wrong in problems.items() if is_wrong), None):
        raise DatasetError(f"{path}: in METIS's format it has {problem}; correct it, or write edges")
    arrays = {"src": src, "dst": dst, "num_nodes": np.array(num_nodes)}
    if num_weights:
        weights = values[(columns < start) & (columns >= start - num_weights)].reshape(num_nodes, num_weights)
        arrays["node_weight"] = weights[:, 0] if num_weights == 1 else weights
    if has_weights:
        arrays[EDGE_VALUES] = values[(columns >= start) & ~is_end]
    message = "%s: read in METIS's format, with %d nodes counted from 0, and each edge in both directions"
    _LOG.warning(message, path, num_nodes)
    return arrays


def _read_numbers(rows: Sequence[tuple[int, list[bytes]]], path: Path) -> Array:
    """Return the numbers of all lines. Raise DatasetError for the first text that is not a number."""
    try:
        return np.array([field for _, row in rows for field in row], dtype=np.int64)
    except (ValueError, OverflowError):
        pairs = ((line_number, field.decode(errors="replace")) for line_number, row in rows for field in row)
        line_number, field = next(pair for pair in pairs if not re.fullmatch(r"[-+]?[0-9]{1,18}", pair[1]))
        reason = f"is not a readable METIS graph: line {line_number}: {field!r:.40} is no whole number"
        raise DatasetError(f"{path} {reason}; correct it, or write edges in a .txt") from None
