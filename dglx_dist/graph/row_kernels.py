"""Compiled kernels on rows of any dtype that release the interpreter lock: copies, plans, sums.

Rows are copied as machine words. An array with N rows is viewed as (N, words) unsigned integers. They have
the widest size that divides a row and fits both sides' alignment. So one kernel serves all dtypes.
"""

import mmap
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from dglx_dist.data.storage.columns import DTYPES, numpy_dtype
from dglx_dist.errors import ConfigError
from dglx_dist.memory import machine_memory
from dglx_dist.records import Array, ColumnInfo

_TORCH: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}


@cache
def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype for a column's dtype. Raise ConfigError if no column can have it."""
    if name not in _TORCH:
        raise ConfigError(f"a column cannot have dtype {name!r}. Use one of {', '.join(_TORCH)}.")
    return _TORCH[name]


def make_column_info(dtype: torch.dtype | str, row_shape: tuple[int, ...]) -> ColumnInfo:
    name = str(dtype).removeprefix("torch.")
    torch_dtype(name)
    return ColumnInfo(dtype=name, row_shape=row_shape)


def allocate_rows(count: int, info: ColumnInfo) -> Tensor:
    return torch.empty((count, *info.row_shape), dtype=torch_dtype(info.dtype))


def view_as_numpy(rows: Tensor) -> Array:
    """View a contiguous CPU tensor as an array, bfloat16 as uint16."""
    if rows.dtype == torch.bfloat16:
        return rows.view(torch.int16).numpy().view(numpy_dtype("bfloat16"))
    return rows.numpy()


def view_as_tensor(rows: Array, info: ColumnInfo) -> Tensor:
    if info.dtype == "bfloat16":
        return torch.from_numpy(rows.view("int16")).view(torch.bfloat16)
    return torch.from_numpy(rows)


_LINE_BYTES = 64


@njit(nogil=True, inline="always")
def read_ahead(rows: Array, row: int) -> None:
    """Prefetch the row at index ``row`` in (n, d) ``rows``."""
    step = max(1, _LINE_BYTES // rows.itemsize)
    for column in range(0, rows.shape[1], step):
        _prefetch(rows, row, column)


@intrinsic
def _prefetch(_context: Any, rows: Any, _row: Any, _column: Any) -> Any:
    """Prefetch ``rows[row, column]`` with LLVM. A hint for writing made no difference in measurements."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array_type = signature.args[0]
        array_value, *indices = arguments
        array = context.make_array(array_type)(context, builder, array_value)
        pointer = cgutils.get_item_pointer(context, builder, array_type, array, indices)

        byte_pointer = ir.IntType(8).as_pointer()
        int32 = ir.IntType(32)
        signature_type = ir.FunctionType(ir.VoidType(), [byte_pointer, int32, int32, int32])
        prefetch = cgutils.get_or_insert_function(builder.module, signature_type, "llvm.prefetch.p0i8")
        # The arguments of llvm.prefetch are: 0 for reading, 3 for all cache levels, 1 for the data cache.
        hints = [ir.Constant(int32, value) for value in (0, 3, 1)]
        builder.call(prefetch, [builder.bitcast(pointer, byte_pointer), *hints])
        return context.get_dummy_value()

    return types.void(rows, types.intp, types.intp), generate


_WORDS: dict[int, np.dtype[Any]] = {size: np.dtype(f"u{size}") for size in (8, 4, 2, 1)}

_AHEAD = 8
"""Number of rows between the prefetched row and the copied row."""


def view_as_words(source: Array, out: Array) -> tuple[Array, Array]:
    """View two nonempty C-contiguous (n, *row) arrays with one dtype as (n, words) with equal words."""
    row_bytes = source.nbytes // len(source)
    # A word must divide both addresses and a row's size, and has at most 8 bytes. The lowest bit that is set
    # in any of these numbers is the greatest power of two that divides them all.
    alignment_bits = source.ctypes.data | out.ctypes.data | row_bytes | 8
    word = _WORDS[alignment_bits & -alignment_bits]
    num_words = row_bytes // word.itemsize
    source_words = source.reshape(-1).view(np.uint8).view(word)
    out_words = out.reshape(-1).view(np.uint8).view(word)
    return source_words.reshape(len(source), num_words), out_words.reshape(len(out), num_words)


def gather_rows(source: Array, first: int, ids: Array, out: Array) -> None:
    """Copy ``source[ids[k] - first]`` to ``out[k]`` for every k whose row is in ``source``.

    Args:
        source: C-contiguous rows with consecutive ids.
        first: Id of the first row in ``source``.
        ids: (K,) int64 ids. Ids without a row in ``source`` are skipped.
        out: C-contiguous (K, *row) rows with the same row shape and dtype.
    """
    if len(ids) and source.size:
        source_words, out_words = view_as_words(source, out)
        _gather(source_words, first, ids, out_words)


def take_rows(source: Array, indices: Array, out: Array | None = None) -> Array:
    """Return the rows at the (K,) int64 ``indices``, in ``out`` or a new array. Faster than NumPy."""
    if out is None:
        out = np.empty((len(indices), *source.shape[1:]), source.dtype)
    gather_rows(source, 0, indices, out)
    return out


def scatter_rows(rows: Array, target: Array, first: int, ids: Array) -> None:
    """Copy ``rows[k]`` to ``target[ids[k] - first]`` for every k whose row is in ``target``.

    Args:
        rows: (K, *row) rows.
        target: Rows with consecutive ids, and with the same row shape and dtype.
        first: Id of the first row in ``target``.
        ids: (K,) int64 ids. If an id is repeated, its last row wins.
    """
    positions = np.flatnonzero((ids >= first) & (ids < first + len(target)))
    move_rows(rows, positions, target, ids[positions] - first)


def move_rows(source: Array, indices: Array, out: Array, out_indices: Array) -> None:
    """Copy ``source[indices[k]]`` to ``out[out_indices[k]]`` for every k. The indices are int64."""
    if len(indices) and source.size:
        source_words, out_words = view_as_words(source, out)
        _move(source_words, indices, out_words, out_indices)


def check_answer(rows: Array, out: Array, num_rows: int) -> None:
    """Raise ValueError unless ``rows``, from another rank, has ``num_rows`` rows that fit into ``out``."""
    shape = (num_rows, *out.shape[1:])
    if rows.shape != shape or rows.dtype != out.dtype:
        raise ValueError(
            f"another rank sent {rows.dtype} of shape {rows.shape}, but the request was for {out.dtype} of "
            f"shape {shape}. All ranks must run the same version on the same dataset."
        )


def spread_rows(
    rows: Array, out: Array, starts: Array, positions: Array, first_slot: int, last_slot: int
) -> None:
    """Copy ``rows[k]`` to each position that belongs to slot ``first_slot + k``.

    Args:
        rows: One row for each slot from ``first_slot`` to ``last_slot - 1``. They may be unaligned.
        out: Rows by position.
        starts, positions: Fields of :class:`RemotePlan`.

    Raises:
        ValueError: ``rows`` has a wrong length, shape or dtype.
    """
    check_answer(rows, out, last_slot - first_slot)
    slot_starts = starts[first_slot : last_slot + 1]
    row_indices = np.repeat(np.arange(len(rows)), np.diff(slot_starts))
    move_rows(rows, row_indices, out, positions[slot_starts[0] : slot_starts[-1]])


_PAGE_BYTES = mmap.PAGESIZE
_MADVISE_WILL_NEED = int(mmap.MADV_WILLNEED)
_madvise = types.ExternalFunction("madvise", types.intc(types.uintp, types.uintp, types.intc))


def read_from_disk(arrays: Sequence[Array]) -> bool:
    """Return whether memory-mapped arrays take more than half the free memory.

    If so, Linux is told to read only the pages that are used. It would otherwise read up to megabytes around
    each page, and drop pages that are used again. Call :func:`request_rows` before rows are copied.
    """
    _, free_bytes = machine_memory()
    if sum(array.nbytes for array in arrays) <= free_bytes // 2:
        return False
    for array in arrays:
        if array.size:
            _advise(array.ctypes.data, 0, array.nbytes, mmap.MADV_RANDOM)
    return True


def request_rows(source: Array, first: int, ids: Array) -> None:
    """Start to read the rows that :func:`gather_rows` will copy from a file. Does not wait."""
    is_present = (ids >= first) & (ids < first + len(source))
    indices = np.sort(ids[is_present]) - first
    if len(indices) and source.size:
        _request(source.ctypes.data, source.nbytes // len(source), indices)


@njit(cache=True, nogil=True)
def _advise(start: int, begin: int, end: int, advice: int) -> None:
    # The address must be where a page starts.
    page = (start + begin) // _PAGE_BYTES * _PAGE_BYTES
    # Ignore failures. Pages without advice are read when they are used.
    _madvise(np.uintp(page), np.uintp(start + end - page), np.int32(advice))


@njit(cache=True, nogil=True)
def _request(start: int, row_bytes: int, rows: Array) -> None:
    # One call serves all rows that lie on the same page or on neighboring pages.
    begin, end = rows[0] * row_bytes, (rows[0] + 1) * row_bytes
    for row in rows[1:]:
        if (start + row * row_bytes) // _PAGE_BYTES > (start + end - 1) // _PAGE_BYTES + 1:
            _advise(start, begin, end, _MADVISE_WILL_NEED)
            begin = row * row_bytes
        end = (row + 1) * row_bytes
    _advise(start, begin, end, _MADVISE_WILL_NEED)


@njit(cache=True, nogil=True)
def _gather(source: Array, first: int, ids: Array, out: Array) -> None:
    """Copy the rows for ``ids`` that are in ``source`` to their positions in ``out``."""
    num_rows, num_words = source.shape
    last = ids.shape[0] - 1
    for k in range(ids.shape[0]):
        # As an unsigned number, an id below `first` becomes a huge one. So one comparison checks both ends.
        upcoming_row = np.uint64(ids[min(k + _AHEAD, last)] - first)
        if upcoming_row < np.uint64(num_rows):
            read_ahead(source, upcoming_row)

        row = np.uint64(ids[k] - first)
        if row < np.uint64(num_rows):
            for word in range(num_words):
                out[np.uint64(k), np.uint64(word)] = source[row, np.uint64(word)]


@njit(cache=True, nogil=True)
def _move(source: Array, rows: Array, out: Array, out_rows: Array) -> None:
    num_words = source.shape[1]
    last = rows.shape[0] - 1
    for k in range(rows.shape[0]):
        read_ahead(source, rows[min(k + _AHEAD, last)])
        # Unsigned indices spare the check for negative indices.
        source_row, out_row = np.uint64(rows[k]), np.uint64(out_rows[k])
        for word in range(num_words):
            out[out_row, np.uint64(word)] = source[source_row, np.uint64(word)]


@njit(cache=True, nogil=True)
def find_first_outside(ids: Array, end: int) -> int:
    """Return the position of the first (K,) int64 id outside [0, ``end``), or -1."""
    num_outside = 0
    # Without an early exit, the first loop runs on vector registers.
    for k in range(ids.shape[0]):
        if np.uint64(ids[k]) >= np.uint64(end):
            num_outside += 1

    if num_outside:
        for k in range(ids.shape[0]):
            if np.uint64(ids[k]) >= np.uint64(end):
                return k
    return -1


def check_ids(ids: Array, end: int, what: str) -> None:
    """Raise IndexError if an id in the (K,) int64 ``ids`` is outside [0, ``end``)."""
    position = find_first_outside(ids, end)
    if position >= 0:
        raise IndexError(
            f"id {ids[position]} at position {position} is outside {what}, whose ids are 0 to {end - 1}"
        )


DIRECT_LIMIT = 1 << 26
"""Maximum number of ids for a direct table (4 bytes each, 256 MiB per server). Larger tables are hashed."""

_MIN_BITS = 4


class SlotTable(NamedTuple):
    """Table from ids to slots with cached rows, direct or hashed. :func:`fill_table` fills it."""

    slots: Array
    """Direct: (N,) int32 slots, -1 for ids that are not cached. Hashed: one slot per entry in ``keys``."""
    keys: Array
    """Direct: length 0. Hashed: int64 ids, -1 in free entries. The length is a power of two."""


NO_SLOTS = SlotTable(np.empty(0, np.int32), np.empty(0, np.int64))


def compute_table_sizes(num_cached: int, num_ids: int, direct_limit: int = DIRECT_LIMIT) -> tuple[int, int]:
    """Return the lengths of ``slots`` and ``keys`` for ``num_cached`` cached ids, all below ``num_ids``.

    A hash table is at most half full and takes 24 to 48 bytes per cached row. A direct table takes 4 bytes
    per id. A direct table is chosen if it is smaller, or if ``num_ids`` is at most ``direct_limit``.
    """
    num_bits = max(_MIN_BITS, (2 * num_cached - 1).bit_length())
    num_entries = 1 << num_bits
    # An entry in a hash table takes 12 bytes: 4 for the slot and 8 for the key.
    if num_ids <= direct_limit or 4 * num_ids <= 12 * num_entries:
        return num_ids, 0
    return num_entries, num_entries


def fill_table(table: SlotTable, ids: Array) -> None:
    """Assign slots 0 to C - 1 to (C,) int64 distinct ``ids``. See :func:`compute_table_sizes` for lengths."""
    table.slots[:] = -1
    if len(table.keys) == 0:
        table.slots[ids] = np.arange(len(ids), dtype=np.int32)
    else:
        table.keys[:] = -1
        _insert(table, ids)


@njit(cache=True, nogil=True)
def find_slot(table: SlotTable, key: int) -> int:
    """Return the slot for the id ``key``, or -1 if it is not cached."""
    if len(table.slots) == 0:
        return -1
    return int(table.slots[find_entry(table.keys, key)])


@njit(cache=True, nogil=True)
def find_entry(keys: Array, key: int) -> np.uint64:
    """Return the index of the table entry with the id ``key``, or the free entry for that id."""
    # In a direct table, the id is the entry's index.
    if len(keys) == 0:
        return np.uint64(key)
    # Fibonacci hashing. The mask reduces the product's high half to an index in `keys`.
    mask = np.uint64(len(keys) - 1)
    entry = ((np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)) & mask
    while keys[entry] >= 0 and keys[entry] != key:
        entry = (entry + np.uint64(1)) & mask
    return entry


@njit(cache=True, nogil=True)
def _insert(table: SlotTable, ids: Array) -> None:
    for slot in range(len(ids)):
        entry = find_entry(table.keys, ids[slot])
        table.keys[entry] = ids[slot]
        table.slots[entry] = slot


MAX_IDS = 1 << 20
"""Maximum number of ids in one request. More ids are split into several requests."""


class RemotePlan(NamedTuple):
    """Remote ids among K requested ids, grouped by server. Each distinct id that must be sent has a slot."""

    ids: Array
    """(slots,) int64 distinct remote ids by server. A server's ids are in order of appearance."""
    server_starts: Array
    """(S + 1,) int64 starts. Server s has the slots ``[s]:[s + 1]``, and the local server has no slots."""
    starts: Array
    """(slots + 1,) int64 starts. Slot s is requested at ``positions[starts[s]:starts[s + 1]]``."""
    positions: Array
    """(P,) int64: where the ids to request are among the K ids, sorted by slot."""
    hit_positions: Array
    """(hits,) int64: where the cached remote ids are among the K ids, ascending."""
    hit_slots: Array
    """(hits,) int64 cache slots for these ids."""

    def requests(self, ranks: Sequence[int], max_ids: int = MAX_IDS) -> list[tuple[int, int, int]]:
        """Split the ids to request into messages with at most ``max_ids`` ids.

        Args:
            ranks: ``ranks[s]`` is the rank that is asked for ids on server s.

        Returns:
            (rank, first, end) for each message, which requests the ids ``self.ids[first:end]``.
        """
        messages = []
        server_ranges = pairwise(self.server_starts.tolist())
        for rank, (server_first, server_end) in zip(ranks, server_ranges, strict=True):
            for first in range(server_first, server_end, max_ids):
                messages.append((rank, first, min(first + max_ids, server_end)))
        return messages


def plan_remote(
    ids: Array, bounds: Array, own_server: int, cached: SlotTable = NO_SLOTS, *, distinct: bool = False
) -> RemotePlan:
    """Split ids into ids on the local server, cached ids, and ids to request.

    Args:
        ids: (K,) int64 ids.
        bounds: (S + 1,) int64. Server s owns the ids ``bounds[s]:bounds[s + 1]``.
        own_server: The local server.
        cached: Slots of cached ids.
        distinct: Whether the caller guarantees distinct ids, which saves a search for repeated ids.
    """
    return RemotePlan(*_plan(ids, bounds, own_server, cached, distinct))


def number_distinct(ids: Array) -> tuple[Array, Array]:
    """Return the distinct ``ids`` in order of appearance, and each id's (K,) int64 index among them."""
    index = np.empty(len(ids), np.int64)
    return _find_distinct(ids, np.arange(len(ids)), index), index


@njit(cache=True, nogil=True)
def _plan(ids: Array, bounds: Array, server: int, cached: SlotTable, is_distinct: bool) -> Any:
    """Return the fields for a :class:`RemotePlan` over the (K,) ``ids``, in order."""
    misses, hit_positions, hit_slots = _split_cached(ids, bounds[server], bounds[server + 1], cached)
    if is_distinct:
        slots, server_starts = group_by_range(ids[misses], bounds)
        positions = np.empty(len(misses), np.int64)
        positions[slots] = misses
        starts = np.arange(len(misses) + 1)
        return ids[positions], server_starts, starts, positions, hit_positions, hit_slots
    # Slots number the distinct ids by server. So the distinct ids are first found in order of appearance, and
    # then grouped by server.
    index_of_miss = np.empty(len(misses), np.int64)
    distinct_ids = _find_distinct(ids, misses, index_of_miss)
    slot_of_index, server_starts = group_by_range(distinct_ids, bounds)
    slot_ids = np.empty(len(distinct_ids), np.int64)
    slot_ids[slot_of_index] = distinct_ids
    starts = np.zeros(len(distinct_ids) + 1, np.int64)
    for k in range(len(misses)):
        starts[slot_of_index[index_of_miss[k]] + 1] += 1
    starts = np.cumsum(starts)

    next_index = starts[:-1].copy()
    positions = np.empty(len(misses), np.int64)
    for k in range(len(misses)):
        slot = slot_of_index[index_of_miss[k]]
        positions[next_index[slot]] = misses[k]
        next_index[slot] += 1
    return slot_ids, server_starts, starts, positions, hit_positions, hit_slots


@njit(cache=True, nogil=True)
def _split_cached(ids: Array, low: int, high: int, cached: SlotTable) -> tuple[Array, Array, Array]:
    """Return positions for ids to request, and positions and slots for cached ids. Skip local ids."""
    # These arrays are longer than needed, but unused memory costs nothing until it is written.
    miss_positions = np.empty(len(ids), np.int64)
    hit_positions = np.empty(len(ids), np.int64)
    hit_slots = np.empty(len(ids), np.int64)
    num_misses, num_hits = 0, 0
    for position in range(ids.shape[0]):
        key = ids[position]
        if low <= key < high:
            continue
        slot = find_slot(cached, key)
        if slot >= 0:
            hit_positions[num_hits] = position
            hit_slots[num_hits] = slot
            num_hits += 1
        else:
            miss_positions[num_misses] = position
            num_misses += 1
    return miss_positions[:num_misses], hit_positions[:num_hits], hit_slots[:num_hits]


@njit(cache=True, nogil=True)
def group_by_range(ids: Array, bounds: Array) -> tuple[Array, Array]:
    """Sort ids by range, stably. Return each id's (k,) index after the sort, and each range's first index.

    Range r has the ids ``bounds[r]:bounds[r + 1]`` and the indices ``starts[r]:starts[r + 1]``.
    """
    targets = np.empty(len(ids), np.int64)
    starts = np.zeros(len(bounds), np.int64)
    # `targets` first holds each id's range, and then its index.
    for k in range(len(ids)):
        targets[k] = np.searchsorted(bounds, ids[k], side="right") - 1
        starts[targets[k] + 1] += 1
    starts = np.cumsum(starts)

    next_target = starts[:-1].copy()
    for k in range(len(ids)):
        target = next_target[targets[k]]
        next_target[targets[k]] += 1
        targets[k] = target
    return targets, starts


@njit(cache=True, nogil=True)
def _find_distinct(ids: Array, positions: Array, index_of_position: Array) -> Any:
    """Return the distinct ids at ``positions`` in order of appearance. Fill in ``index_of_position``."""
    # An open-addressing hash table, at most half full, finds repeated ids.
    num_bits = 4
    while (1 << num_bits) < 2 * len(positions):
        num_bits += 1
    mask = np.uint64((1 << num_bits) - 1)
    shift = np.uint64(64 - num_bits)
    table = np.full(1 << num_bits, -1, np.int64)
    distinct_ids = np.empty(len(positions), np.int64)
    num_distinct = 0

    for k in range(len(positions)):
        key = ids[positions[k]]
        # Fibonacci hashing separates consecutive ids, which are common.
        entry = (np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)) >> shift
        while table[entry] >= 0 and distinct_ids[table[entry]] != key:
            entry = (entry + np.uint64(1)) & mask
        if table[entry] < 0:
            table[entry] = num_distinct
            distinct_ids[num_distinct] = key
            num_distinct += 1
        index_of_position[k] = table[entry]
    return distinct_ids[:num_distinct].copy()


HALF_DTYPES = ("float16", "bfloat16")
"""Dtypes with rows that are added in float32 and rounded once, to nearest even."""


def check_summable(name: str, info: ColumnInfo) -> None:
    if info.dtype == "bool":
        raise ConfigError(f"{name!r} holds bool, which cannot be added. Push it without accumulate=True.")


def sum_repeated(rows: Array, plan: RemotePlan, info: ColumnInfo) -> Array:
    """Sum the (K, *row) ``rows`` by slot in ``plan``, ordered by position.

    Return (slots, *row) sums in the dtype that ``info`` names. Integers wrap around.
    """
    if len(plan.positions) == len(plan.ids):
        return take_rows(rows, plan.positions)
    wide_rows = _widen_from_half(rows, info)
    sums = np.empty((len(plan.ids), *rows.shape[1:]), wide_rows.dtype)
    if sums.size:
        flat_rows = wide_rows.reshape(len(wide_rows), -1)
        _sum(flat_rows, plan.starts, plan.positions, sums.reshape(len(sums), -1))
    return _round_to_half(sums, info)


def add_rows(target: Array, first_id: int, ids: Array, rows: Array, info: ColumnInfo) -> None:
    """Add ``rows[k]`` to the target row with the id ``ids[k]``.

    Only one thread may add to a row at a time.

    Args:
        target: (N, ...) rows with the ids ``first_id`` to ``first_id + N - 1``.
        ids: (K,) distinct int64 ids. Ids without a row in ``target`` are skipped.
        rows: (K, ...) rows with the same dtype as ``target``.
        info: The column's dtype.
    """
    is_present = (ids >= first_id) & (ids < first_id + len(target))
    if not is_present.all():
        ids = ids[is_present]
        rows = rows[is_present]
    if rows.size == 0:
        return
    if info.dtype not in HALF_DTYPES:
        _add(target.reshape(len(target), -1), first_id, ids, rows.reshape(len(rows), -1))
        return

    # NumPy has no bfloat16, and sums in half precision are rounded from float32.
    old_rows = np.empty_like(rows)
    gather_rows(target, first_id, ids, old_rows)
    sums = _widen_from_half(old_rows, info) + _widen_from_half(rows, info)
    scatter_rows(_round_to_half(sums, info), target, first_id, ids)


def _widen_from_half(rows: Array, info: ColumnInfo) -> Array:
    """Return float16 or bfloat16 rows in float32, and other rows unchanged."""
    return view_as_tensor(rows, info).float().numpy() if info.dtype in HALF_DTYPES else rows


def _round_to_half(sums: Array, info: ColumnInfo) -> Array:
    """Undo :func:`_widen_from_half`. Values are rounded to nearest even."""
    if info.dtype not in HALF_DTYPES:
        return sums
    wide_info = ColumnInfo(dtype="float32", row_shape=info.row_shape)
    return view_as_numpy(view_as_tensor(sums, wide_info).to(torch_dtype(info.dtype)))


@njit(cache=True, nogil=True)
def _sum(rows: Array, starts: Array, positions: Array, out: Array) -> None:
    num_columns = rows.shape[1]
    for slot in range(out.shape[0]):
        row = np.uint64(positions[starts[slot]])
        target = np.uint64(slot)
        for column in range(num_columns):
            out[target, np.uint64(column)] = rows[row, np.uint64(column)]
        for index in range(starts[slot] + 1, starts[slot + 1]):
            row = np.uint64(positions[index])
            for column in range(num_columns):
                out[target, np.uint64(column)] += rows[row, np.uint64(column)]


@njit(cache=True, nogil=True)
def _add(target: Array, first: int, ids: Array, rows: Array) -> None:
    num_columns = rows.shape[1]
    for k in range(ids.shape[0]):
        row = np.uint64(ids[k] - first)
        for column in range(num_columns):
            target[row, np.uint64(column)] += rows[np.uint64(k), np.uint64(column)]
