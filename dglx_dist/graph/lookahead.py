"""Look-ahead cache of remote rows: those whose next use is furthest are evicted (Belady's MIN)."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import final

import numpy as np
from numba import njit

from dglx_dist.data.storage.columns import numpy_dtype
from dglx_dist.graph.row_kernels import RemotePlan, SlotTable, first_place, move_rows
from dglx_dist.records import Array, ColumnInfo

_NEVER = 1 << 30
"""Next use of a row that no announced batch uses."""
_EMPTY = _NEVER + 1
"""Of a slot without a row."""
_LEAST_PLACES = 16


@final
class LookAheadRows:
    """A rank's copies of other servers' rows of one column, chosen by the batches announced.

    One loader at a time has claimed them. It announces its batches in their order, and pulls the rows of each
    in turn with ``ahead=``; it waits for them in this order, so that a slot is read before the next batch
    overwrites it. Not thread-safe.

    Args:
        count: Most rows to keep, C; may be 0.
        info: Of the column.
        own: First and last id, exclusive, of the rows of the local server.
    """

    def __init__(self, count: int, info: ColumnInfo, own: tuple[int, int]) -> None:
        self.rows: Array = np.empty((count, *info.row_shape), numpy_dtype(info.dtype))
        """(C, *row) in NumPy's form of the column's dtype; slot s is row s."""
        self.announce_more: Callable[[], bool] = lambda: False
        """Announces one more batch, unless there is none or its memory is spent: False."""
        self._own, self._claim = own, threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self.table = _new_table(0)
        """Ids announced or cached: the slot, -1 for those not cached."""
        self._last = np.full(len(self.table.keys), -1, np.int64)
        """By place in the table: the number of the last input announced of an id."""
        self._used = 0
        self._held = np.full(len(self.rows), -1, np.int64)
        self._next_use = np.full(len(self.rows), _EMPTY, np.int32)
        # Inputs of all batches are numbered on; the next uses of those of batches to come are in a ring.
        self._following = np.empty(_LEAST_PLACES, np.int32)
        self._firsts: deque[int] = deque()
        self._end, self._step, self._unfinished = 0, 0, 0

    @property
    def num_bytes(self) -> int:
        """Memory of the rows and of what finds and orders them."""
        kept = (self.rows, *self.table, self._last, self._held, self._next_use, self._following)
        return sum(one.nbytes for one in kept)

    def claim(self) -> bool:
        """Take the rows for one loader; False if another has them."""
        return self._claim.acquire(blocking=False)

    def release(self) -> None:
        """Give the rows back; they stay for the next loader unless an announced batch was not finished."""
        self.announce_more = lambda: False
        if self._firsts or self._unfinished:
            self._forget()
        # Nothing refers to a batch any more: from 0 again, so that steps fit 32 bits.
        self._last.fill(-1)
        self._end, self._step = 0, 0
        self._claim.release()

    def announce(self, ids: Array) -> None:
        """Note the (K,) int64 distinct ``ids``, of any server, as the inputs of the batch after the last."""
        remote = ids[(ids < self._own[0]) | (ids >= self._own[1])]
        self._firsts.append(self._end)
        self._make_place(len(remote))
        places, step = (self._end, self._firsts[0]), self._step + len(self._firsts) - 1
        self._used += _announce(self.table, self._last, self._next_use, self._following, remote, places, step)
        self._end += len(remote)

    def admit(self, plan: RemotePlan) -> Callable[[Array], None]:
        """Choose the rows to keep after the batch announced first, of which ``plan`` are hits and misses.

        Announces more batches until the choice is that of a look-ahead without end. Returns what keeps them,
        given the (K, *row) rows of the batch.
        """
        positions, hits = np.concatenate([plan.hit_places, plan.positions]), len(plan.hit_places)
        # Only inputs of other servers are numbered.
        numbers = self._firsts[0] + np.cumsum(np.bincount(positions))[positions] - 1
        while True:
            uses = self._following[numbers & (len(self._following) - 1)]
            self._next_use[plan.hit_slots] = uses[:hits]
            cut = _cut(self._next_use, uses[hits:], self._step, len(self._firsts))
            if not cut[3] or not self.announce_more():
                break
        self._firsts.popleft()
        self._step += 1
        self._unfinished += 1
        kept, slots = _replace(self.table, self._held, self._next_use, plan.ids, uses[hits:], cut)
        places = plan.positions[kept]

        def keep(rows: Array) -> None:
            move_rows(rows, places, self.rows, slots)
            self._unfinished -= 1

        return keep

    def _make_place(self, count: int) -> None:
        begin, end = self._firsts[0], self._end
        if end + count - begin > len(self._following):
            old, numbers = self._following, np.arange(begin, end)
            self._following = np.empty(1 << (end + count - begin).bit_length(), np.int32)
            self._following[numbers & (len(self._following) - 1)] = old[numbers & (len(old) - 1)]
        if 3 * (self._used + count) > 2 * len(self.table.keys):
            # Ids neither cached nor announced are left behind.
            kept = (self.table.keys >= 0) & ((self.table.slots >= 0) | (self._last >= begin))
            places = np.flatnonzero(kept)
            self._used = len(places)
            table = _new_table(2 * (len(places) + count))
            last = np.full(len(table.keys), -1, np.int64)
            _move_entries(self.table, self._last, places, table, last)
            self.table, self._last = table, last


def _new_table(least: int) -> SlotTable:
    length = max(_LEAST_PLACES, 1 << int(least).bit_length())
    return SlotTable(np.full(length, -1, np.int32), np.full(length, -1, np.int64))


@njit(cache=True, nogil=True)
def _place(keys: Array, key: int) -> np.uint64:
    """Return the place of ``key``, or the free one where it belongs."""
    at, mask = first_place(key, len(keys)), np.uint64(len(keys) - 1)
    while keys[at] >= 0 and keys[at] != key:
        at = (at + np.uint64(1)) & mask
    return at


@njit(cache=True, nogil=True)
def _move_entries(table: SlotTable, last: Array, places: Array, to: SlotTable, to_last: Array) -> None:
    for place in places:
        at = _place(to.keys, table.keys[place])
        to.keys[at], to.slots[at], to_last[at] = table.keys[place], table.slots[place], last[place]


@njit(cache=True, nogil=True)
def _announce(
    table: SlotTable,
    last: Array,
    next_use: Array,
    following: Array,
    ids: Array,
    places: tuple[int, int],
    step: int,
) -> int:
    """Note the use of ``ids``, numbered from ``places[0]``, in batch ``step``; return the number of new ids.

    ``places[1]`` is the first number of the batches to come.
    """
    mask, new = len(following) - 1, 0
    for k in range(len(ids)):
        number, at = places[0] + k, _place(table.keys, ids[k])
        following[number & mask] = _NEVER
        if table.keys[at] < 0:
            table.keys[at] = ids[k]
            new += 1
        elif last[at] >= places[1]:
            following[last[at] & mask] = step
        elif table.slots[at] >= 0:
            next_use[table.slots[at]] = step
        last[at] = number
    return new


@njit(cache=True, nogil=True)
def _cut(next_use: Array, uses: Array, step: int, known: int) -> tuple[int, int, int, bool]:
    """Return where to cut the rows, in slots and requested, in the order of their next use.

    (Next use at the cut, slots and requested rows with that use that stay, whether batches after the
    ``known`` ones could tell rows at the cut apart.) ``uses`` are those of the requested rows.
    """
    held, asked = np.zeros(known + 2, np.int64), np.zeros(known + 2, np.int64)
    for use in next_use:
        held[known + use - _NEVER if use >= _NEVER else use - step] += 1
    for use in uses:
        asked[known if use >= _NEVER else use - step] += 1
    room, later = len(next_use), 0
    while held[later] + asked[later] < room:
        room -= held[later] + asked[later]
        later += 1
    stay = min(held[later], room)
    cut = _NEVER + later - known if later >= known else step + later
    is_open = later == known and held[later] + asked[later] > room and len(next_use) > 0
    return cut, stay, min(asked[later], room - stay), is_open


@njit(cache=True, nogil=True)
def _replace(
    table: SlotTable,
    held: Array,
    next_use: Array,
    ids: Array,
    uses: Array,
    cut: tuple[int, int, int, bool],
) -> tuple[Array, Array]:
    """Give slots of rows beyond the cut to requested ``ids`` within it; return their indices and slots."""
    limit, stay, enter, _ = cut
    taken, slots = np.empty(len(ids), np.int64), np.empty(len(ids), np.int64)
    count, slot = 0, 0
    for k in range(len(ids)):
        if uses[k] > limit or (uses[k] == limit and enter == 0):
            continue
        enter -= uses[k] == limit
        while next_use[slot] < limit or (next_use[slot] == limit and stay > 0):
            stay -= next_use[slot] == limit
            slot += 1
        if held[slot] >= 0:
            table.slots[_place(table.keys, held[slot])] = -1
        held[slot], next_use[slot] = ids[k], uses[k]
        table.slots[_place(table.keys, ids[k])] = slot
        taken[count], slots[count] = k, slot
        count += 1
        slot += 1
    return taken[:count].copy(), slots[:count].copy()
