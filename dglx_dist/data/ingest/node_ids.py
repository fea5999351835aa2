"""Look up nodes by their ids, in memory or in files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dglx_dist.data.external_memory import ScatteredRows, Spill, iterate_runs, release_memory
from dglx_dist.data.tables import PiecewiseTable, TablePiece, as_numpy, parse_ids
from dglx_dist.data.validate import column_error, describe_repeated_id, first_repeat
from dglx_dist.records import Array

_TABLE_BYTES = 96
"""Approximate bytes per id for a hash table and sorted copies, in addition to the id itself."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@final
class IdMap:
    """Maps ids to node numbers. Ids other than 0..N-1 are stored in files (buckets).

    Args:
        folder: Folder for the buckets. Each fits in ``memory`` bytes.
        is_text: Whether ids are texts (large_string) instead of int64.
        id_bytes: Bytes of all ids that will be added, or None if they are 0..N-1.
        memory: Number of bytes to look up at a time.
    """

    def __init__(
        self, folder: Path, num_nodes: int, *, is_text: bool, id_bytes: int | None, memory: int
    ) -> None:
        self.num_nodes = num_nodes
        self.is_text = is_text
        self.is_range = id_bytes is None
        self._folder = folder
        self._memory = memory
        # The bucket count is rounded up, so that each bucket fits.
        table_bytes = (id_bytes or 0) + _TABLE_BYTES * num_nodes
        self._num_buckets = max(1, (table_bytes + memory - 1) // memory)

    def read(self, table: PiecewiseTable, column: str) -> Iterator[tuple[TablePiece, Any]]:
        """Yield a column's ids as pyarrow arrays, with their pieces."""
        for piece in table.pieces([column]):
            yield piece, parse_ids(piece.columns[column], is_text=self.is_text)

    def add(self, ids: Any, first_row: int, folder: Path | None = None) -> None:
        """Append ``ids`` with their rows to the map's buckets, or to buckets in ``folder``.

        Each bucket is a file with several Arrow streams, one after the other.
        """
        folder = folder or self._folder
        buckets = self._find_buckets(ids)
        folder.mkdir(parents=True, exist_ok=True)

        order = np.argsort(buckets, kind="stable")
        rows = pa.record_batch([pa.array(first_row + order), ids.take(pa.array(order))], ["number", "id"])
        for bucket, run in iterate_runs(buckets[order]):
            with (folder / str(bucket)).open("ab") as file, pa.ipc.new_stream(file, rows.schema) as stream:
                stream.write_batch(rows[run])

    def check_unique(self, table: PiecewiseTable, column: str) -> None:
        """Raise DatasetError with both rows if an id occurs twice. Call it after all ids are added."""
        repeats: list[tuple[int, int, object]] = []
        for bucket in range(self._num_buckets):
            repeats += self._find_repeats(bucket)
        if not repeats:
            return

        row, earlier, name = min(repeats, key=lambda repeat: repeat[0])
        path, row_in_file = table.locate(row)
        earlier_path, earlier_in_file = table.locate(earlier)
        earlier_name = f"row {earlier_in_file}"
        if earlier_path != path:
            earlier_name = f"{earlier_name} of {earlier_path}"
        raise column_error(str(path), column, describe_repeated_id(name, earlier_name), row_in_file)

    def find(self, table: PiecewiseTable, column: str, owner: str, folder: Path) -> Spill:
        """Return (E,) int64 node numbers for the E ids in a column, in row order.

        Raises DatasetError if an id is unknown. The message names the file and the first such row.
        """
        unknown_ids = _UnknownIds()
        node_numbers = Spill(folder / "nodes", np.int64)
        for piece, ids in self.read(table, column):
            if self.is_range:
                # The ids are the node numbers.
                nodes = as_numpy(ids)
                rows = np.arange(piece.row, piece.row + len(ids))
                unknown_ids.add((nodes < 0) | (nodes >= self.num_nodes), rows, ids)
                node_numbers.append(nodes)
            else:
                self.add(ids, piece.row, folder / "lookups")

        if not self.is_range:
            for nodes in self._look_up(table.num_rows, unknown_ids, folder):
                node_numbers.append(nodes)
        unknown_ids.check(table, column, owner)
        return node_numbers

    def _look_up(self, num_rows: int, unknown_ids: _UnknownIds, folder: Path) -> Iterator[Array]:
        """Yield node numbers, in row order, for the ids that were added to the lookup buckets."""
        scatter = ScatteredRows(folder / "rows", num_rows, np.int64, memory=self._memory)
        for bucket in range(self._num_buckets):
            # An empty bucket has no file.
            nodes, known_ids = next(read_ids(self._folder / str(bucket), None), (None, None))
            lookups = folder / "lookups" / str(bucket)
            for rows, ids in read_ids(lookups, self._memory // 8):
                positions = pc.index_in(ids, value_set=ids[:0] if known_ids is None else known_ids)
                is_unknown = as_numpy(pc.is_null(positions))
                unknown_ids.add(is_unknown, rows, ids)
                if nodes is not None:
                    scatter.put(rows[~is_unknown], nodes[positions.drop_null().to_numpy()])

            lookups.unlink(missing_ok=True)
            del nodes, known_ids
            release_memory()
        yield from scatter.chunks()

    def _find_buckets(self, ids: Any) -> Array:
        """Return each id's bucket. Equal ids have equal buckets."""
        if self.is_text:
            return np.fromiter(map(hash, ids.to_pylist()), np.int64, len(ids)) % self._num_buckets
        # The product's highest bits are used, because they depend on all bits of an id.
        with np.errstate(over="ignore"):
            hashes = ids.to_numpy(zero_copy_only=False).astype(np.uint64) * _GOLDEN >> np.uint64(32)
        # A 32-bit hash times B, divided by 2^32, is a bucket below B.
        return (hashes * np.uint64(self._num_buckets) >> np.uint64(32)).astype(np.int64)

    def _find_repeats(self, bucket: int) -> Iterator[tuple[int, int, object]]:
        """Yield (row, earlier row, id) for the first repeated id in a bucket, if there is one."""
        path = self._folder / str(bucket)
        limits: list[int | None] = [None]
        if path.is_file() and path.stat().st_size > self._memory:
            # If one id is in most rows, its bucket does not fit in memory, but the first rows have a repeat.
            limits = [self._memory, None]

        for max_bytes in limits:
            rows, ids = next(read_ids(path, max_bytes), (np.empty(0, np.int64), None))
            if ids is None:
                return
            repeat = first_repeat(ids.dictionary_encode().indices.to_numpy(zero_copy_only=False))
            if repeat is not None:
                position, earlier_position = repeat
                yield int(rows[position]), int(rows[earlier_position]), ids[position].as_py()
                return


class _UnknownIds:
    """Counts a column's unknown ids, and keeps the first."""

    def __init__(self) -> None:
        self._count = 0
        self._first_row = -1
        self._first_id: object = None

    def add(self, is_unknown: Array, rows: Array, ids: Any) -> None:
        if not is_unknown.any():
            return
        index = int(is_unknown.argmax())
        if self._count == 0 or rows[index] < self._first_row:
            self._first_row = int(rows[index])
            self._first_id = ids[index].as_py()
        self._count += int(is_unknown.sum())

    def check(self, table: PiecewiseTable, column: str, owner: str) -> None:
        """Raise DatasetError if there are unknown ids."""
        if self._count == 0:
            return
        path, row_in_file = table.locate(self._first_row)
        message = (
            f"node id {self._first_id!r} is not among the ids of {owner} "
            f"(rows of {column!r} with unknown ids: {self._count})"
        )
        raise column_error(str(path), column, message, row_in_file)


def read_ids(path: Path, max_bytes: int | None) -> Iterator[tuple[Array, Any]]:
    """Yield (numbers, ids) in the order in which they were appended, or nothing if there is no file.

    About ``max_bytes`` are read at a time. None reads all at once.
    """
    if not path.is_file():
        return

    size = path.stat().st_size
    tables = []
    num_bytes = 0
    with path.open("rb") as file:
        while file.tell() < size:
            tables.append(pa.ipc.open_stream(file).read_all())
            num_bytes += tables[-1].nbytes
            is_full = max_bytes is not None and num_bytes >= max_bytes
            if is_full or file.tell() == size:
                table = pa.concat_tables(tables).combine_chunks()
                yield table["number"].chunk(0).to_numpy(), table["id"].chunk(0)
                tables = []
                num_bytes = 0
