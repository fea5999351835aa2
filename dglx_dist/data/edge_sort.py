"""External sort: edges larger than memory -> CSC, with the values that each edge carries."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np

from dglx_dist.data.external_memory import (
    BUDGET_SHARES,
    PROGRAM_BYTES,
    BucketFiles,
    Ranks,
    Spill,
    joined_pieces,
    map_rows,
    release_memory,
)
from dglx_dist.data.storage.columns import id_dtype
from dglx_dist.errors import ConfigError
from dglx_dist.records import Array, ColumnInfo

Chunks: TypeAlias = Callable[[int], Iterator[Array]]
"""Number of rows -> all rows in order, at most so many at a time."""

T = TypeVar("T", Spill, Array)

_SLOTS = 1 << 16
_KEY_BYTES = 24
"""Keys of an edge that is sorted, its position, and what NumPy's sort takes beside them."""
_HUB_SHARES = 5
"""Memory shares that the edges of a hub may take; nothing else is in memory then."""


class Carried(NamedTuple):
    """Rows that belong to the edges."""

    info: ColumnInfo
    rows: Chunks


@dataclass(frozen=True, kw_only=True)
class EdgeStream:
    """E edges as they are read, in their order."""

    sources: Chunks
    destinations: Chunks
    carried: Sequence[Carried]
    num_sources: int
    num_destinations: int

    @property
    def record(self) -> np.dtype[np.void]:
        """One edge in a bucket."""
        ends = [("destination", id_dtype(self.num_destinations)), ("source", id_dtype(self.num_sources))]
        return np.dtype([*ends, *((str(i), *_dtype(one.info)) for i, one in enumerate(self.carried))])


@dataclass(frozen=True, kw_only=True)
class SortedEdges(Generic[T]):
    """CSC: edges ordered by (destination, source, position in the stream), as files or memory-mapped."""

    indptr: T
    """(N_dst + 1,) int64."""
    indices: T
    """(E,) sources; int32 where N_src fits."""
    carried: Sequence[T]


def by_key(destinations: Array, sources: Array) -> Array:
    """Return (K,) positions that sort edges by (destination, source); of equal ones the first comes first."""
    keys = destinations.astype(np.int64)
    keys *= int(sources.max(initial=0)) + 1
    keys += sources
    return np.argsort(keys, kind="stable")


def _each_file(
    edges: EdgeStream, folder: Path, make: Callable[[Path, Any, tuple[int, ...]], T]
) -> SortedEdges[T]:
    return SortedEdges(
        indptr=make(folder / "indptr", np.int64, ()),
        indices=make(folder / "indices", id_dtype(edges.num_sources), ()),
        carried=[make(folder / f"carried{i}", *_dtype(one.info)) for i, one in enumerate(edges.carried)],
    )


def map_sorted(edges: EdgeStream, folder: Path) -> SortedEdges[Array]:
    """Memory-map what :func:`sort_edges` wrote into ``folder``."""
    return _each_file(edges, folder, map_rows)


def sort_edges(
    edges: EdgeStream,
    folder: Path,
    memory: int,
    *,
    order: Callable[[Array, Array], Array] = by_key,
    advance: Callable[[int], None] = lambda _: None,
    ranks: Ranks | None = None,
) -> SortedEdges[Spill]:
    """Sort edges by (destination, source, position), and what they carry with them.

    All ``ranks`` (None: this process) call it with the same edges and ``memory``, and each sorts some ranges
    of destinations; what is returned is then this rank's, but the files in ``folder`` have all edges.

    Sorts the in-edges of as many consecutive destinations as fit into ``memory`` bytes, but at least those of
    one of 65,536 slots of destinations, with up to five times ``memory``; ConfigError if that is too little.
    ``order`` gives the positions of one bucket's edges, and ``advance`` is called with 3 for each edge.
    """
    record = edges.record
    each = record.itemsize + _KEY_BYTES + max(record[name].itemsize for name in record.names or ())
    width, step = max(-(-edges.num_destinations // _SLOTS), 1), max(1, memory // each)
    ranks = ranks or Ranks()
    firsts = _first_destinations(edges, width, step, each, advance, ranks.count)
    own = range(*(len(firsts) * rank // ranks.count for rank in (ranks.rank, ranks.rank + 1)))
    ends = [*firsts[1:], edges.num_destinations]
    with joined_pieces(folder, ranks) as piece:
        buckets = _write_buckets(edges, firsts, own, piece / "buckets", step, advance)
        result, total = _each_file(edges, piece, _spill), 0
        result.indptr.append(np.zeros(int(ranks.is_first), np.int64))
        for number in own:
            found = buckets.take(number)
            found["destination"] -= firsts[number]
            counts = np.bincount(found["destination"], minlength=ends[number] - firsts[number])
            # The edges of a bucket are in the order of the stream already.
            positions = order(found["destination"], found["source"])
            result.indices.append(found["source"][positions])
            for i, spill in enumerate(result.carried):
                spill.append(found[str(i)][positions])
            result.indptr.append(total + np.cumsum(counts))
            total += len(found)
            advance(len(found))
            del found, positions
            release_memory()
        shutil.rmtree(piece / "buckets")
    return result


def _spill(path: Path, dtype: Any, row_shape: tuple[int, ...]) -> Spill:
    return Spill(path, dtype, row_shape=row_shape)


def _dtype(info: ColumnInfo) -> tuple[str, tuple[int, ...]]:
    return ("uint16" if info.dtype == "bfloat16" else info.dtype), info.row_shape


def _first_destinations(
    edges: EdgeStream, width: int, step: int, each: int, advance: Callable[[int], None], shares: int
) -> list[int]:
    # A bucket has at most ``step`` edges, and at most one of so many shares, unless it is a single slot.
    counts = np.zeros(max(-(-edges.num_destinations // width), 1), np.int64)
    for destinations in edges.destinations(step):
        counts += np.bincount(destinations // width, minlength=len(counts))
        advance(len(destinations))
    _check_fits(counts, width, _HUB_SHARES * step, each)
    step, firsts, held = min(step, -(-int(counts.sum()) // shares)), [0], 0
    for slot, num_edges in enumerate(counts.tolist()):
        if held and held + num_edges > step:
            firsts.append(slot * width)
            held = 0
        held += num_edges
    return firsts


def _check_fits(counts: Array, width: int, most: int, each: int) -> None:
    slot = int(np.argmax(counts))
    if counts[slot] > most:
        nodes = f"nodes {slot * width} to {(slot + 1) * width - 1}" if width > 1 else f"node {slot}"
        needed = int(counts[slot]) * each * BUDGET_SHARES // _HUB_SHARES
        raise ConfigError(
            f"{counts[slot]} edges end at {nodes}, and are sorted together; "
            f"grant --memory {(needed + PROGRAM_BYTES) // 10**6 + 1}MB"
        )


def _write_buckets(
    edges: EdgeStream, firsts: list[int], own: range, folder: Path, step: int, advance: Callable[[int], None]
) -> BucketFiles:
    buckets, is_all = BucketFiles(folder, edges.record), len(own) == len(firsts)
    ends = zip(edges.sources(step), edges.destinations(step), strict=True)
    for (sources, destinations), *carried in zip(
        ends, *(one.rows(step) for one in edges.carried), strict=True
    ):
        records = np.empty(len(sources), edges.record)
        records["source"], records["destination"] = sources, destinations
        for i, rows in enumerate(carried):
            records[str(i)] = rows
        numbers = np.searchsorted(firsts, destinations, side="right") - 1
        kept = slice(None) if is_all else (own.start <= numbers) & (numbers < own.stop)
        buckets.append(numbers[kept], records[kept])
        advance(len(records))
    return buckets
