"""From the id of a cached row to its place in the cache: an array of all ids, or a hash table."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from dglx_dist.records import Array

DIRECT_LIMIT = 1 << 26
"""Most ids for which a table has an entry per id (4 bytes each, 256 MiB a server); beyond, it is hashed."""

_LEAST_BITS = 4


class SlotTable(NamedTuple):
    """Where cached rows lie, as compiled code reads it; made by :func:`slot_table`."""

    slots: Array
    """(N,) int32, -1 for ids that are not cached; or beside ``keys`` the slot of each of them."""
    keys: Array
    """() when ``slots`` has an entry per id; else a power of two of int64 ids, -1 where there is none."""


def no_slots() -> SlotTable:
    """Return the table of a column of which no row is cached."""
    return SlotTable(np.empty(0, np.int32), np.empty(0, np.int64))


def table_sizes(count: int, num_ids: int, direct_limit: int = DIRECT_LIMIT) -> tuple[int, int]:
    """Return the lengths of ``slots`` and ``keys`` for ``count`` cached ones of ``num_ids`` ids.

    A hash table is at most half full: 24 to 48 bytes per cached row. The direct table takes 4 bytes for each
    of all ids and is used while it is the smaller one, or ``num_ids`` at most ``direct_limit``.
    """
    bits = _LEAST_BITS
    while (1 << bits) < 2 * count:
        bits += 1
    if num_ids <= direct_limit or 4 * num_ids <= 12 << bits:
        return num_ids, 0
    return 1 << bits, 1 << bits


def fill_table(table: SlotTable, ids: Array) -> None:
    """Give the (C,) int64 distinct ``ids`` the slots 0 to C - 1 in arrays as :func:`table_sizes` says."""
    table.slots[:] = -1
    if len(table.keys) == 0:
        table.slots[ids] = np.arange(len(ids), dtype=np.int32)
    else:
        table.keys[:] = -1
        _insert(table, ids)


@njit(cache=True, nogil=True)
def slot_of(table: SlotTable, key: int) -> int:
    """Return the slot of the id ``key``, or -1."""
    if len(table.keys) == 0:
        if len(table.slots) == 0:
            return -1
        return int(table.slots[np.uint64(key)])
    at = _first_place(key, len(table.keys))
    mask = np.uint64(len(table.keys) - 1)
    while table.keys[at] >= 0 and table.keys[at] != key:
        at = (at + np.uint64(1)) & mask
    return int(table.slots[at])


@njit(cache=True, nogil=True)
def _first_place(key: int, length: int) -> np.uint64:
    # Fibonacci hashing: the high half of the product, cut to the length, which is a power of two.
    mixed = (np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)
    return mixed & np.uint64(length - 1)


@njit(cache=True, nogil=True)
def _insert(table: SlotTable, ids: Array) -> None:
    mask = np.uint64(len(table.keys) - 1)
    for slot in range(len(ids)):
        at = _first_place(ids[slot], len(table.keys))
        while table.keys[at] >= 0:
            at = (at + np.uint64(1)) & mask
        table.keys[at] = ids[slot]
        table.slots[at] = slot
