"""Columns (named tensors that are cut by rows): shards, caches of remote rows, and rows in transit."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias, final

import numpy as np
import torch
from numba import njit
from torch import Tensor

from dglx_dist.comm.rpc import Pending
from dglx_dist.data.storage.columns import numpy_dtype
from dglx_dist.errors import ConfigError
from dglx_dist.graph.partition_book import rows_per_message
from dglx_dist.graph.row_kernels import (
    RemotePlan,
    SlotTable,
    check_answer,
    check_ids,
    find_place,
    gather_rows,
    move_rows,
    request_rows,
    scatter_rows,
    torch_dtype,
    view_as_numpy,
    view_as_tensor,
)
from dglx_dist.records import Array, ColumnInfo

PullHandler: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Function from (rows of the local server (n, *row), (k,) int64 indices of rows) to values (k, *row)."""

PushHandler: TypeAlias = Callable[[Tensor, Tensor, Tensor], None]
"""Function of (rows of the local server (n, *row), (k,) int64 indices, values (k, *row)) that changes
rows."""


PendingPull: TypeAlias = Callable[[], Tensor]
"""Function that waits for the rows of :meth:`KVStore.submit_pull`."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Rows with consecutive ids in the memory of this server."""

    first: int
    """Id of the first row."""
    rows: Array
    """(n, *row) rows in C order. bfloat16 is stored as uint16."""
    on_disk: bool = False
    """Whether the rows are in a file that does not fit in memory."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RowCache:
    """Some rows of one column. Immutable."""

    table: SlotTable
    """Table that maps the id of a row to its slot."""
    rows: Array
    """(C, *row) in NumPy's form of the column's dtype. Slot s is row s."""


_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""Dtypes that torch cannot index, and the dtypes that are copied instead."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DeviceRows:
    """Some rows of one column on the device of this rank. Immutable."""

    table: SlotTable
    """Table that maps the id of a row to its slot."""
    rows: Tensor
    """(C, *row) in the dtype of the column. Slot s is row s."""

    def join_rows(self, hits: Tensor, slots: Tensor, missing: Tensor, rows: Tensor) -> Tensor:
        """Return (h + m, *row) with the cached ``slots`` at positions ``hits``, and ``rows`` at ``missing``.

        ``hits`` and ``missing`` are (h,) and (m,) int64 positions. Everything is on the device, and the (m,
        *row) ``rows`` have the dtype of the column.
        """
        dtype = self.rows.dtype
        kind = _SIGNED.get(dtype, dtype)
        cached = self.rows.view(kind)
        out = cached.new_empty((len(hits) + len(missing), *cached.shape[1:]))
        out.index_copy_(0, hits, cached.index_select(0, slots))
        return out.index_copy_(0, missing, rows.view(kind)).view(dtype)


_NEVER = 1 << 30
"""Next use of a row that no announced batch uses."""
_EMPTY = _NEVER + 1
"""Next use of a slot without a row."""
_LEAST_PLACES = 16
_DIRECT_IDS = 1 << 20
"""Largest number of ids for a table without search (12 bytes per id). Larger tables hold only ids in use."""


Ask: TypeAlias = Callable[[RemotePlan], Sequence[tuple[Pending, int, int]]]
"""Function that requests the ids of a plan. Returns (answer, first slot, last slot) of each message."""


@final
class JointRequest:
    """The rows that several pulls miss, in one message per server, sorted by id.

    It is sent when it is full, when all answers to the ``previous`` request have arrived, or when somebody
    waits for its rows. The slower the link, the more pulls share a message. Not thread-safe.
    """

    def __init__(self, ask: Ask, previous: Sequence[Pending]) -> None:
        self.num_rows, self.is_sent = 0, False
        self._ask, self._previous = ask, previous
        self._plans: list[RemotePlan] = []
        self._replies: Sequence[tuple[Pending, int, int]] = ()
        self._places: Array = np.empty(0, np.int64)
        """Places of the rows of all plans, in the order of the plans, among the sorted rows."""

    def add(self, plan: RemotePlan, full: int) -> None:
        """Add the distinct ids of ``plan``. The request is sent at once if it has ``full`` rows."""
        self._plans.append(plan)
        self.num_rows += len(plan.ids)
        if self.num_rows >= full or all(answer.is_ready() for answer in self._previous):
            self.send()

    def send(self) -> Sequence[tuple[Pending, int, int]]:
        """Send the request unless it is sent.

        Return (answer, first, last of the sorted rows) of each message.
        """
        if not self.is_sent:
            ids = np.concatenate([plan.ids for plan in self._plans])
            order = np.argsort(ids) if len(self._plans) > 1 else np.arange(len(ids))
            self._places = np.empty(len(ids), np.int64)
            self._places[order] = np.arange(len(ids))
            starts = np.sum([plan.server_starts for plan in self._plans], axis=0)
            self._replies = self._ask(self._plans[0]._replace(ids=ids[order], server_starts=starts))
            self._previous, self.is_sent = (), True
        return self._replies

    def copy(self, plan: RemotePlan, first: int, out: Array) -> None:
        """Wait for the rows of ``plan``, which start at the requested row ``first``. Copy them to ``out``.

        Raises:
            PeerError, RemoteError: as for a pull.
            ValueError: an answer does not match its request.
        """
        replies, places = self.send(), self._places[first : first + len(plan.ids)]
        for reply, begin, end in replies:
            (answer,) = reply.result()
            check_answer(answer, out, end - begin)
            selected: Any = slice(begin, end)
            if len(self._plans) > 1:
                selected = np.flatnonzero((places >= begin) & (places < end))
            move_rows(answer, places[selected] - begin, out, plan.positions[selected])


@final
class LookAheadRows:
    """A rank's copies of remote rows of one column, chosen by the announced batches. Not thread-safe.

    The rows with the furthest next use are evicted (Belady's MIN). One loader at a time has reserved them. It
    announces its batches in their order, and pulls the rows of each in turn with ``ahead=``. It waits for the
    rows in this order, so that a slot is read before the next batch overwrites it.

    Args:
        count: Maximum number C of rows to keep. May be 0.
        own: First and last id, exclusive, of the rows of the local server.
        num_ids: Number of rows of all servers.
    """

    def __init__(self, count: int, info: ColumnInfo, own: tuple[int, int], num_ids: int) -> None:
        self.rows: Array = np.empty((count, *info.row_shape), numpy_dtype(info.dtype))
        """(C, *row) in NumPy's form of the column's dtype. Slot s is row s."""
        self.announce_more: Callable[[], bool] = lambda: False
        """Function that announces one more batch. False: there is none, or the memory is used up."""
        self._own, self._num_ids, self._claim = own, num_ids, threading.Lock()
        self._message = rows_per_message(math.prod(info.row_shape) * self.rows.itemsize)
        self._forget()
        self._rewind()

    def _forget(self) -> None:
        # Slots of ids that are announced or cached. -1 means that an id is not cached.
        self.table = _new_table(0)
        if self._num_ids <= _DIRECT_IDS:
            self.table = SlotTable(np.full(self._num_ids, -1, np.int32), np.empty(0, np.int64))
        self._last = np.empty(len(self.table.slots), np.int64)
        # The number of the last announced input of each id, by place in the table.
        self._num_used = 0
        self._ids_by_slot = np.full(len(self.rows), -1, np.int64)
        self._next_use = np.full(len(self.rows), _EMPTY, np.int32)
        # The inputs of all batches are numbered consecutively. A ring holds the next uses of inputs to come.
        self._following = np.empty(_LEAST_PLACES, np.int32)
        self._firsts: deque[int] = deque()
        self._unfinished = 0

    def _rewind(self) -> None:
        # No batch is referred to any more, so numbers restart at 0 and steps fit in 32 bits.
        self._last.fill(-1)
        self._end, self._step, self._requested = 0, 0, 0
        self._joint: JointRequest | None = None

    @property
    def num_bytes(self) -> int:
        """Size in bytes of the rows and of the tables that find and order them."""
        arrays = (self.rows, *self.table, self._last, self._ids_by_slot, self._next_use, self._following)
        return sum(array.nbytes for array in arrays)

    def claim(self) -> bool:
        """Reserve the rows for one loader. Return False if another one has them."""
        return self._claim.acquire(blocking=False)

    def release(self) -> None:
        """Give the rows back. They stay for the next loader unless an announced batch was not finished."""
        self.announce_more = lambda: False
        if self._firsts or self._unfinished:
            self._forget()
        self._rewind()
        self._claim.release()

    def announce(self, ids: Array) -> None:
        """Register the (K,) int64 distinct ``ids`` of any server as the inputs of the next batch.

        Raises IndexError if an id is out of range.
        """
        check_ids(ids, self._num_ids, "the cached column")
        remote = ids[(ids < self._own[0]) | (ids >= self._own[1])]
        self._firsts.append(self._end)
        self._make_place(len(remote))
        places, step = (self._end, self._firsts[0]), self._step + len(self._firsts) - 1
        self._num_used += _announce(
            self.table, self._last, self._next_use, self._following, remote, places, step
        )
        self._end += len(remote)

    @property
    def is_busy(self) -> bool:
        """Whether rows of two messages or more are requested and not copied yet."""
        return self._requested >= 2 * self._message

    def pull(self, plan: RemotePlan, ask: Ask) -> Callable[[Array], None]:
        """Request the distinct ids of ``plan``, and choose the rows to keep as in :meth:`admit`.

        A message may also contain ids of other batches; see :class:`JointRequest`.

        Returns:
            Function that waits for the rows, copies them to the (K, *row) rows of the batch, and then copies
            the rows to keep.
        """
        joint, full = self._joint, self._message // 2
        # A batch should not wait for the rows of a much larger one.
        if joint is None or joint.is_sent or (joint.num_rows and joint.num_rows + len(plan.ids) > full):
            previous = () if joint is None else [answer for answer, _, _ in joint.send()]
            joint = self._joint = JointRequest(ask, previous)
        first = joint.num_rows
        joint.add(plan, full)
        self._requested += len(plan.ids)
        # This follows the request, because it may have to wait for the draws of more batches.
        keep = self.admit(plan)

        def finish(rows: Array) -> None:
            joint.copy(plan, first, rows)
            self._requested -= len(plan.ids)
            keep(rows)

        return finish

    def admit(self, plan: RemotePlan) -> Callable[[Array], None]:
        """Choose the rows to keep after the batch that was announced first.

        Announces more batches until a longer look-ahead could not choose better. ``plan`` holds the hits and
        misses of the batch. Returns a function of the (K, *row) rows of the batch that copies the rows to
        keep.
        """
        positions, hits = np.concatenate([plan.hit_places, plan.positions]), len(plan.hit_places)
        # Only inputs of other servers have numbers.
        end = self._firsts[1] if len(self._firsts) > 1 else self._end
        assert len(positions) == end - self._firsts[0], "another batch was announced first"
        numbers = self._firsts[0] + np.cumsum(np.bincount(positions))[positions] - 1
        while True:
            uses = self._following[numbers & (len(self._following) - 1)]
            self._next_use[plan.hit_slots] = uses[:hits]
            limits = _find_cut(self._next_use, uses[hits:], self._step, len(self._firsts))
            if not limits[3] or not self.announce_more():
                break
        self._firsts.popleft()
        self._step += 1
        self._unfinished += 1
        new_uses, table = uses[hits:], self.table
        kept, slots = _assign_slots(table, self._ids_by_slot, self._next_use, plan.ids, new_uses, limits)
        positions_to_keep = plan.positions[kept]

        def keep(rows: Array) -> None:
            move_rows(rows, positions_to_keep, self.rows, slots)
            self._unfinished -= 1

        return keep

    def _make_place(self, count: int) -> None:
        begin, end = self._firsts[0], self._end
        if end + count - begin > len(self._following):
            old, numbers = self._following, np.arange(begin, end)
            self._following = np.empty(1 << (end + count - begin).bit_length(), np.int32)
            self._following[numbers & (len(self._following) - 1)] = old[numbers & (len(old) - 1)]
        if len(self.table.keys) and 3 * (self._num_used + count) > 2 * len(self.table.keys):
            # Ids that are neither cached nor announced are dropped.
            is_needed = (self.table.keys >= 0) & ((self.table.slots >= 0) | (self._last >= begin))
            places = np.flatnonzero(is_needed)
            self._num_used = len(places)
            table = _new_table(2 * (len(places) + count))
            last = np.full(len(table.keys), -1, np.int64)
            _move_entries(self.table, self._last, places, table, last)
            self.table, self._last = table, last


@dataclass(frozen=True, kw_only=True, eq=False)
class Column:
    """A named tensor as this rank sees it."""

    name: str
    info: ColumnInfo
    bounds: Array
    """(S + 1,) int64 bounds. Server s owns the ids ``bounds[s]:bounds[s + 1]``."""
    shards: tuple[Shard, ...]
    """Rows of the local server, in the order of their ids."""
    writable: bool
    on_read: PullHandler | None = None
    """Function that computes the rows that are read. Only for a tensor in memory."""
    on_push: PushHandler | None = None
    """Function that applies pushed rows."""
    cache: RowCache | None = None
    """Cached rows of other servers. Only for a column of the dataset."""
    on_device: DeviceRows | None = None
    """Cached rows of any server, for batches on that device. Only for a column of the dataset."""
    ahead: LookAheadRows | None = None
    """Cached rows of other servers for the loader that has reserved them. It replaces ``cache``."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Lock that this rank holds while it updates rows that it owns from their old values."""
    counts: list[int] = field(default_factory=lambda: [0, 0, 0, 0])
    """Number of rows that this rank requested, as in :class:`CacheCounts`."""

    def __post_init__(self) -> None:
        dtype = numpy_dtype(self.info.dtype)
        for shard in self.shards:
            rows = shard.rows
            if rows.dtype != dtype or rows.shape[1:] != self.info.row_shape or not rows.flags.c_contiguous:
                raise ConfigError(
                    f"the rows of {self.name!r} are {rows.dtype} of shape {rows.shape}, but they must be "
                    f"{dtype} with rows of shape {self.info.row_shape} in C order"
                )

    @cached_property
    def num_rows(self) -> int:
        return int(self.bounds[-1])

    @cached_property
    def row_bytes(self) -> int:
        return int(np.prod(self.info.row_shape, dtype=np.int64)) * numpy_dtype(self.info.dtype).itemsize

    @cached_property
    def rows_per_message(self) -> int:
        return rows_per_message(self.row_bytes)

    def read(self, ids: Array, out: Array) -> None:
        """Copy the local rows among (K,) int64 ``ids`` to their positions in ``out`` (K, *row)."""
        if self.on_read is not None:
            self._compute(self.on_read, ids, out)
            return
        for shard in self.shards:
            if shard.on_disk:
                request_rows(shard.rows, shard.first, ids)
            gather_rows(shard.rows, shard.first, ids, out)

    def _compute(self, handler: PullHandler, ids: Array, out: Array) -> None:
        (shard,) = self.shards  # A tensor in memory has one shard.
        positions = np.flatnonzero((ids >= shard.first) & (ids < shard.first + len(shard.rows)))
        if not len(positions):
            return
        indices = torch.from_numpy(ids[positions] - shard.first)
        values = handler(view_as_tensor(shard.rows, self.info), indices)
        shape, dtype = (len(positions), *self.info.row_shape), torch_dtype(self.info.dtype)
        if tuple(values.shape) != shape or values.dtype != dtype:
            raise ConfigError(
                f"the pull handler of {self.name!r} returned {values.dtype} of shape {tuple(values.shape)}, "
                f"but it must return {dtype} of shape {shape}"
            )
        out[positions] = view_as_numpy(values.detach().contiguous())

    def find_nonzero(self) -> Iterator[Array]:
        """Yield an (n, *row) bool array for each shard that marks the values that are not 0."""
        for shard in self.shards:
            # bfloat16 is stored as bits. The highest bit is the sign, and -0.0 is zero, too.
            yield (shard.rows & 0x7FFF if self.info.dtype == "bfloat16" else shard.rows) != 0

    def write(self, ids: Array, rows: Array) -> None:
        """Overwrite the local rows with (K, *row) ``rows``. The last of repeated ids wins."""
        for shard in self.shards:
            scatter_rows(rows, shard.rows, shard.first, ids)

    def check(self, ids: Array) -> None:
        """Raise ConfigError or IndexError unless ``ids`` are (K,) int64 rows of this tensor."""
        if ids.dtype != np.int64 or ids.ndim != 1:
            raise ConfigError(f"ids must be (K,) int64, not {ids.dtype} of shape {ids.shape}")
        # Use the user's name of the tensor, which is the last part of the name in the store.
        check_ids(ids, self.num_rows, repr(self.name.rpartition("~")[2]))

    def check_writable(self) -> None:
        if not self.writable:
            raise ConfigError(
                f"{self.name!r} belongs to the dataset on disk, which is read-only. Create a writable tensor "
                "with g.new_tensor(shape, dtype, name)."
            )


@dataclass(frozen=True, kw_only=True)
class CacheCounts:
    """Number of rows that this rank requested. Repeated ids count each time."""

    local: int = 0
    """Number of rows of the local server."""
    hits: int = 0
    """Number of rows of other servers that were in a cache."""
    misses: int = 0
    """Number of rows that were requested from other servers."""
    on_device: int = 0
    """Number of rows of any server in the cache on the device. They are also counted above."""

    def __sub__(self, other: CacheCounts) -> CacheCounts:
        return CacheCounts(**{name: count - getattr(other, name) for name, count in vars(self).items()})


def check_cacheable(column: Column) -> None:
    if column.writable:
        raise ConfigError(
            f"{column.name!r} can be written to, which would make cached rows stale. Only columns "
            "of the dataset, which are read-only, can be cached."
        )


def _new_table(least: int) -> SlotTable:
    length = max(_LEAST_PLACES, 1 << int(least).bit_length())
    return SlotTable(np.full(length, -1, np.int32), np.full(length, -1, np.int64))


@njit(cache=True, nogil=True)
def _move_entries(table: SlotTable, last: Array, places: Array, to: SlotTable, to_last: Array) -> None:
    for place in places:
        new_place = find_place(to.keys, table.keys[place])
        to.keys[new_place] = table.keys[place]
        to.slots[new_place] = table.slots[place]
        to_last[new_place] = last[place]


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
    """Register ``ids``, numbered from ``places[0]``, as used in batch ``step``. Count the new ones.

    ``places[1]`` is the first number of the batches to come.
    """
    mask, new = len(following) - 1, 0
    for k in range(len(ids)):
        number, place = places[0] + k, find_place(table.keys, ids[k])
        following[number & mask] = _NEVER
        if len(table.keys) > 0 and table.keys[place] < 0:
            table.keys[place] = ids[k]
            new += 1
        elif last[place] >= places[1]:
            following[last[place] & mask] = step
        elif table.slots[place] >= 0:
            next_use[table.slots[place]] = step
        last[place] = number
    return new


@njit(cache=True, nogil=True)
def _find_cut(next_use: Array, uses: Array, step: int, known: int) -> tuple[int, int, int, bool]:
    """Return where to cut the cached and requested rows, in the order of their next use.

    Args:
        next_use: Next uses of the cached rows.
        uses: Next uses of the requested rows.
        known: Number of known batches.

    Returns:
        Next use at the cut, number of slots and of requested rows with that use that stay, and whether
        batches after the known ones could tell the rows at the cut apart.
    """
    cached_counts, requested_counts = np.zeros(known + 2, np.int64), np.zeros(known + 2, np.int64)
    for use in next_use:
        cached_counts[known + use - _NEVER if use >= _NEVER else use - step] += 1
    for use in uses:
        requested_counts[known if use >= _NEVER else use - step] += 1
    room, later = len(next_use), 0
    while cached_counts[later] + requested_counts[later] < room:
        room -= cached_counts[later] + requested_counts[later]
        later += 1
    stay = min(cached_counts[later], room)
    cut = _NEVER + later - known if later >= known else step + later
    is_open = later == known and cached_counts[later] + requested_counts[later] > room and len(next_use) > 0
    return cut, stay, min(requested_counts[later], room - stay), is_open


@njit(cache=True, nogil=True)
def _assign_slots(
    table: SlotTable,
    ids_by_slot: Array,
    next_use: Array,
    ids: Array,
    uses: Array,
    cut: tuple[int, int, int, bool],
) -> tuple[Array, Array]:
    """Give slots of rows beyond the cut to requested ``ids`` within it. Return their indices and slots."""
    limit, stay, enter, _ = cut
    indices, slots = np.empty(len(ids), np.int64), np.empty(len(ids), np.int64)
    count, slot = 0, 0
    for k in range(len(ids)):
        if uses[k] > limit or (uses[k] == limit and enter == 0):
            continue
        enter -= uses[k] == limit
        while next_use[slot] < limit or (next_use[slot] == limit and stay > 0):
            stay -= next_use[slot] == limit
            slot += 1
        if ids_by_slot[slot] >= 0:
            table.slots[find_place(table.keys, ids_by_slot[slot])] = -1
        ids_by_slot[slot], next_use[slot] = ids[k], uses[k]
        table.slots[find_place(table.keys, ids[k])] = slot
        indices[count], slots[count] = k, slot
        count += 1
        slot += 1
    return indices[:count].copy(), slots[:count].copy()
