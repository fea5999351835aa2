"""Edges by row of their table -> in-edges by node, for more edges than fit into memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dglx_dist.errors import ConfigError
from dglx_dist.ingest.memory import PROGRAM, SHARES, give_back
from dglx_dist.ingest.scatter import Scatter
from dglx_dist.ingest.spill import Spill
from dglx_dist.records import Array

_SLOTS = 1 << 16
_EDGE = np.dtype([("destination", np.int64), ("source", np.int64), ("row", np.int64)])
_SORTING_BYTES = 3 * _EDGE.itemsize
"""What sorting takes for each edge: the edge, its place, and a sorted copy of each column in turn."""
_MOST_STEPS = 5
"""What a hub may take of the memory, in shares of it; nothing else is held meanwhile."""


@dataclass(frozen=True, kw_only=True)
class Ends:
    """Both ends of the edges of one table, in the order of its rows."""

    sources: Spill
    """(E,) int64."""
    destinations: Spill
    """(E,) int64."""

    @property
    def num_edges(self) -> int:
        """E."""
        return self.sources.num_rows

    def reversed(self) -> Ends:
        """Return the same edges the other way."""
        return Ends(sources=self.destinations, destinations=self.sources)


@dataclass(frozen=True, kw_only=True)
class InEdges:
    """CSC: edges ordered by (destination, source, row)."""

    indptr: Spill
    """(N_dst + 1,) int64."""
    indices: Spill
    """(E,) sources."""
    rows: Spill
    """(E,) int64 row of the table of each edge."""

    def places(self, folder: Path, memory: int) -> Spill:
        """Return (E,) int64: where the edge of each row of the table stands now."""
        count = self.rows.num_rows
        scatter = Scatter(folder / "scatter", count, np.int64, memory=memory)
        first = 0
        for rows in self.rows.chunks(memory // 64 + 1):
            scatter.put(rows, np.arange(first, first + len(rows)))
            first += len(rows)
        places = Spill(folder / "places", np.int64)
        for piece in scatter.chunks():
            places.append(piece)
        return places


def sort_edges(ends: Ends, num_sources: int, num_destinations: int, folder: Path, memory: int) -> InEdges:
    """Sort by destination, then source, then row of the table.

    The in-edges of consecutive destinations are sorted at a time, as many as fit; those of a 65,536th of the
    destinations are sorted together, in five times ``memory`` if need be.

    Args:
        ends: By row, all within range.
        num_sources: Nodes of the source type; their ids are stored in 32 bits where these do.
        num_destinations: Nodes of the destination type.
        folder: For files.
        memory: Bytes for one sort.

    Raises:
        ConfigError: more edges than that end at a node, or at neighbours in the table.
    """
    width = -(-num_destinations // _SLOTS)
    step = max(1, memory // _SORTING_BYTES)
    firsts = _first_destinations(ends, num_destinations, width, step)
    _deal_out(ends, firsts, folder / "buckets", step)
    result = InEdges(
        indptr=Spill(folder / "indptr", np.int64),
        indices=Spill(folder / "indices", np.int32 if num_sources < 2**31 else np.int64),
        rows=Spill(folder / "rows", np.int64),
    )
    result.indptr.append(np.zeros(1, np.int64))
    total = 0
    for number, (first, last) in enumerate(zip(firsts, [*firsts[1:], num_destinations], strict=True)):
        edges = _read_bucket(folder / "buckets" / str(number))
        counts = np.bincount(edges["destination"] - first, minlength=last - first)
        # A stable sort of two keys: edges of a bucket are by row already.
        order = np.lexsort((edges["source"], edges["destination"]))
        result.indices.append(edges["source"][order])
        result.rows.append(edges["row"][order])
        result.indptr.append(total + np.cumsum(counts))
        total += len(edges)
        del edges, order
        give_back()
    return result


def _first_destinations(ends: Ends, num_destinations: int, width: int, step: int) -> list[int]:
    """Return each bucket's first destination, so that none but a lone slot has more than ``step`` edges."""
    counts = np.zeros(-(-num_destinations // width), np.int64)
    for destinations in ends.destinations.chunks(step):
        counts += np.bincount(destinations // width, minlength=len(counts))
    _check_fits(counts, width, _MOST_STEPS * step)
    firsts, held = [0], 0
    for slot, count in enumerate(counts.tolist()):
        if held and held + count > step:
            firsts.append(slot * width)
            held = 0
        held += count
    return firsts


def _check_fits(counts: Array, width: int, most: int) -> None:
    slot = int(np.argmax(counts))
    if counts[slot] > most:
        nodes = f"rows {slot * width} to {(slot + 1) * width - 1}" if width > 1 else f"row {slot}"
        needed = int(counts[slot]) * _SORTING_BYTES * SHARES // _MOST_STEPS
        raise ConfigError(
            f"{counts[slot]} edges end at the nodes of {nodes} of their table, and are sorted together; "
            f"grant --memory {(needed + PROGRAM) // 2**20 + 1}MB"
        )


def _deal_out(ends: Ends, firsts: list[int], folder: Path, step: int) -> None:
    folder.mkdir(parents=True)
    row = 0
    for edges in _edges(ends, step):
        edges["row"] = np.arange(row, row + len(edges))
        row += len(edges)
        buckets = np.searchsorted(firsts, edges["destination"], side="right") - 1
        order = np.argsort(buckets, kind="stable")
        buckets = buckets[order]
        starts = np.flatnonzero(np.diff(buckets, prepend=-1))
        for start, end in zip(starts, [*starts[1:], len(order)], strict=True):
            with (folder / str(buckets[start])).open("ab") as file:
                edges[order[start:end]].tofile(file)


def _edges(ends: Ends, step: int) -> Iterator[Array]:
    pairs = zip(ends.sources.chunks(step), ends.destinations.chunks(step), strict=True)
    for sources, destinations in pairs:
        edges = np.empty(len(sources), _EDGE)
        edges["source"], edges["destination"] = sources, destinations
        yield edges


def _read_bucket(path: Path) -> Array:
    if not path.exists():
        return np.empty(0, _EDGE)
    edges = np.fromfile(path, dtype=_EDGE)
    path.unlink()
    return edges
