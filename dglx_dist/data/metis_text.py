"""Graphs in METIS's text format: a line of sizes, then a line of neighbours for each node."""

import gzip
import zlib
from pathlib import Path

import numpy as np

from dglx_dist.errors import DatasetError
from dglx_dist.records import Array


def read_metis(path: Path) -> tuple[dict[str, Array], Array | None]:
    """Return ``src``, ``dst``, ``num_nodes`` and ``node_weight`` of a ``.graph``, and its weights of edges.

    DatasetError: the file is not what its first line says.
    """
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        lines = [line.split() for line in content.splitlines() if not line.lstrip().startswith(b"%")]
        # An empty line is a node without neighbours, but not before the sizes.
        while lines and not lines[0]:
            del lines[0]
        num_nodes, num_edges, *more = [int(field) for field in lines[0]] if lines else (0, 0)
        layout = f"{more[0] if more else 0:03d}"
        num_weights = (more[1] if len(more) > 1 else 1) * (layout[-2] == "1")
        has_weights, first = layout[-1] == "1", num_weights + (layout[-3] == "1")
        counts = np.array([len(line) for line in lines[1 : 1 + num_nodes]], dtype=np.int64)
        numbers = np.array([field for line in lines[1 : 1 + num_nodes] for field in line], dtype=np.int64)
    except (ValueError, OverflowError, OSError, EOFError, zlib.error) as error:
        raise DatasetError(f"{path}: not a readable METIS graph, or cut off: {error}") from error
    places = np.arange(len(numbers)) - np.repeat(np.cumsum(counts) - counts, counts)
    owners, step = np.repeat(np.arange(len(counts)), counts), 1 + has_weights
    is_end = (places >= first) & ((places - first) % step == 0)
    src, dst = owners[is_end], numbers[is_end] - 1
    forward, backward = (np.stack(pair)[:, np.lexsort(pair)] for pair in ((src, dst), (dst, src)))
    is_outside = bool(((dst < 0) | (dst >= num_nodes)).any())
    problems = {
        f"not one line for each of {num_nodes} nodes": len(counts) != num_nodes
        or any(lines[1 + num_nodes :]),
        f"the format {layout}, which is not of 0 and 1": len(layout) > 3 or not {*layout} <= {"0", "1"},
        "a line without all its weights": ((counts - first) % step).any() or (counts < first).any(),
        f"a neighbour outside 1..{num_nodes}": is_outside,
        f"{len(dst)} neighbours, not each of {num_edges} edges from both ends": len(dst) != 2 * num_edges,
        "an edge in the line of one of its ends only": not np.array_equal(forward, backward),
    }
    if problem := next((problem for problem, is_wrong in problems.items() if is_wrong), None):
        raise DatasetError(f"{path}: read as METIS's format, it has {problem}; correct it, or write edges")
    arrays = {"src": src, "dst": dst, "num_nodes": np.array(num_nodes)}
    if num_weights:
        weights = numbers[(places < first) & (places >= first - num_weights)].reshape(num_nodes, num_weights)
        arrays["node_weight"] = weights[:, 0] if num_weights == 1 else weights
    return arrays, numbers[(places >= first) & ~is_end] if has_weights else None
