"""Columns (named tensors cut by rows): shards, caches of rows of other servers, and rows in transit."""

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
"""(rows of the local server (n, *row), (k,) int64 indices of rows) to values (k, *row)."""

PushHandler: TypeAlias = Callable[[Tensor, Tensor, Tensor], None]
"""(rows of the local server (n, *row), (k,) int64 indices, values (k, *row)): changes rows in place."""


PendingPull: TypeAlias = Callable[[], Tensor]
"""Waits for the rows of :meth:`KVStore.submit_pull`."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Rows with consecutive ids that lie in this server's memory."""

    first: int
    """Id of the first row."""
    rows: Array
    """(n, *row), C-contiguous; bfloat16 as uint16."""
    on_disk: bool = False
    """Whether they are in a file that the memory cannot hold."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RowCache:
    """Some rows of one column; immutable."""

    table: SlotTable
    """Id of a row to its slot."""
    rows: Array
    """(C, *row) in NumPy's form of the column's dtype; slot s is row s."""


_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""Dtypes that torch cannot index, and what it copies in their place."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DeviceRows:
    """Some rows of one column on this rank's device; immutable."""

    table: SlotTable
    """Id of a row to its slot."""
    rows: Tensor
    """(C, *row) in the column's dtype; slot s is row s."""

    def join_rows(self, hits: Tensor, slots: Tensor, missing: Tensor, rows: Tensor) -> Tensor:
        """Return cached ``slots`` at the positions ``hits`` and ``rows`` at ``missing``, all on the device.

        (h,) and (m,) int64 positions are together 0 to h + m - 1; (m, *row) ``rows`` have the column's dtype.
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
"""Of a slot without a row."""
_LEAST_PLACES = 16
_DIRECT_IDS = 1 << 20
"""Most ids of which each has a place (12 bytes, without a search); above, those in use have one."""


Ask: TypeAlias = Callable[[RemotePlan], Sequence[tuple[Pending, int, int]]]
"""Requests the ids of a plan: (answer, first slot, last slot) of each message."""


@final
class JointRequest:
    """The rows that several pulls miss, in one message per server, sorted by id.

    It is sent when the answers of the request ``before`` have arrived, when it is full, or when its rows are
    waited for: the slower the link, the more pulls share a message. Not thread-safe.
    """

    def __init__(self, ask: Ask, before: Sequence[Pending]) -> None:
        self.num_rows, self.is_sent = 0, False
        self._ask, self._before = ask, before
        self._plans: list[RemotePlan] = []
        self._replies: Sequence[tuple[Pending, int, int]] = ()
        self._places: Array = np.empty(0, np.int64)
        """Of the rows of all plans, in the order of plans, among the sorted ones."""

    def add(self, plan: RemotePlan, full: int) -> None:
        """Ask for the distinct ids of ``plan`` too; from ``full`` rows on, nothing is waited for."""
        self._plans.append(plan)
        self.num_rows += len(plan.ids)
        if self.num_rows >= full or all(answer.ready() for answer in self._before):
            self.send()

    def send(self) -> Sequence[tuple[Pending, int, int]]:
        """Return (answer, first, last of the sorted rows) of each message, sent now unless they are."""
        if not self.is_sent:
            ids = np.concatenate([plan.ids for plan in self._plans])
            order = np.argsort(ids) if len(self._plans) > 1 else np.arange(len(ids))
            self._places = np.empty(len(ids), np.int64)
            self._places[order] = np.arange(len(ids))
            starts = np.sum([plan.server_starts for plan in self._plans], axis=0)
            self._replies = self._ask(self._plans[0]._replace(ids=ids[order], server_starts=starts))
            self._before, self.is_sent = (), True
        return self._replies

    def copy(self, plan: RemotePlan, first: int, out: Array) -> None:
        """Wait for the rows of ``plan``, from the ``first`` of those asked for; copy them to ``out``.

        PeerError, RemoteError: as of a pull. ValueError: an answer is not what was asked for.
        """
        replies, places = self.send(), self._places[first : first + len(plan.ids)]
        for reply, begin, end in replies:
            (answer,) = reply.result()
            check_answer(answer, out, end - begin)
            here: Any = slice(begin, end)
            if len(self._plans) > 1:
                here = np.flatnonzero((places >= begin) & (places < end))
            move_rows(answer, places[here] - begin, out, plan.positions[here])


@final
class LookAheadRows:
    """A rank's copies of other servers' rows of one column, chosen by the batches announced.

    Those whose next use is furthest are evicted (Belady's MIN). One loader at a time has claimed them. It
    announces its batches in their order, and pulls the rows of each in turn with ``ahead=``; it waits for
    them in this order, so that a slot is read before the next batch overwrites it. Not thread-safe.

    Args:
        count: Most rows to keep, C; may be 0.
        own: First and last id, exclusive, of the rows of the local server.
        num_ids: Rows of all servers; no id may be beyond.
    """

    def __init__(self, count: int, info: ColumnInfo, own: tuple[int, int], num_ids: int) -> None:
        self.rows: Array = np.empty((count, *info.row_shape), numpy_dtype(info.dtype))
        """(C, *row) in NumPy's form of the column's dtype; slot s is row s."""
        self.announce_more: Callable[[], bool] = lambda: False
        """Announces one more batch, unless there is none or its memory is spent: False."""
        self._own, self._num_ids, self._claim = own, num_ids, threading.Lock()
        self._message = rows_per_message(math.prod(info.row_shape) * self.rows.itemsize)
        self._forget()
        self._rewind()

    def _forget(self) -> None:
        # Ids announced or cached: the slot, -1 for those not cached.
        self.table = _new_table(0)
        if self._num_ids <= _DIRECT_IDS:
            self.table = SlotTable(np.full(self._num_ids, -1, np.int32), np.empty(0, np.int64))
        self._last = np.empty(len(self.table.slots), np.int64)
        # By place in the table: the number of the last input announced of an id.
        self._used = 0
        self._held = np.full(len(self.rows), -1, np.int64)
        self._next_use = np.full(len(self.rows), _EMPTY, np.int32)
        # Inputs of all batches are numbered on; the next uses of those of batches to come are in a ring.
        self._following = np.empty(_LEAST_PLACES, np.int32)
        self._firsts: deque[int] = deque()
        self._unfinished = 0

    def _rewind(self) -> None:
        # Nothing refers to a batch any more: from 0 again, so that steps fit 32 bits.
        self._last.fill(-1)
        self._end, self._step, self._requested = 0, 0, 0
        self._joint: JointRequest | None = None

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
        self._rewind()
        self._claim.release()

    def announce(self, ids: Array) -> None:
        """Note the (K,) int64 distinct ``ids``, of any server, as the inputs of the batch after the last.

        IndexError: an id is no row.
        """
        check_ids(ids, self._num_ids, "the cached column")
        remote = ids[(ids < self._own[0]) | (ids >= self._own[1])]
        self._firsts.append(self._end)
        self._make_place(len(remote))
        places, step = (self._end, self._firsts[0]), self._step + len(self._firsts) - 1
        self._used += _announce(self.table, self._last, self._next_use, self._following, remote, places, step)
        self._end += len(remote)

    @property
    def is_busy(self) -> bool:
        """Whether rows of two messages or more are requested and not copied yet."""
        return self._requested >= 2 * self._message

    def pull(self, plan: RemotePlan, ask: Ask) -> Callable[[Array], None]:
        """Ask for the distinct ids of ``plan``, and choose the rows to keep: :meth:`admit`.

        Ids of other batches may be in the same message: :class:`JointRequest`. Returns what waits for the
        rows and copies them to the (K, *row) rows of the batch, and from there to those that are kept.
        """
        joint, full = self._joint, self._message // 2
        # A batch does not wait for the rows of a much larger one.
        if joint is None or joint.is_sent or (joint.num_rows and joint.num_rows + len(plan.ids) > full):
            before = () if joint is None else [answer for answer, _, _ in joint.send()]
            joint = self._joint = JointRequest(ask, before)
        first = joint.num_rows
        joint.add(plan, full)
        self._requested += len(plan.ids)
        # After the request: it may have to wait for the draws of more batches.
        keep = self.admit(plan)

        def finish(rows: Array) -> None:
            joint.copy(plan, first, rows)
            self._requested -= len(plan.ids)
            keep(rows)

        return finish

    def admit(self, plan: RemotePlan) -> Callable[[Array], None]:
        """Choose the rows to keep after the batch announced first; ``plan`` has its hits and misses.

        Announces more batches until a longer look-ahead could not choose better. Returns a function of the
        (K, *row) rows of the batch that copies those to keep.
        """
        positions, hits = np.concatenate([plan.hit_places, plan.positions]), len(plan.hit_places)
        # Only inputs of other servers are numbered.
        end = self._firsts[1] if len(self._firsts) > 1 else self._end
        assert len(positions) == end - self._firsts[0], "another batch was announced first"
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
        if len(self.table.keys) and 3 * (self._used + count) > 2 * len(self.table.keys):
            # Ids neither cached nor announced are left behind.
            kept = (self.table.keys >= 0) & ((self.table.slots >= 0) | (self._last >= begin))
            places = np.flatnonzero(kept)
            self._used = len(places)
            table = _new_table(2 * (len(places) + count))
            last = np.full(len(table.keys), -1, np.int64)
            _move_entries(self.table, self._last, places, table, last)
            self.table, self._last = table, last


@dataclass(frozen=True, kw_only=True, eq=False)
class Column:
    """One named tensor, as this rank sees it."""

    name: str
    info: ColumnInfo
    bounds: Array
    """(S + 1,) int64; server s owns the ids ``bounds[s]:bounds[s + 1]``."""
    shards: tuple[Shard, ...]
    """The rows of the local server, in order of their ids."""
    writable: bool
    on_read: PullHandler | None = None
    """Computes the rows that are read, in place of copying; only for a tensor in memory."""
    on_push: PushHandler | None = None
    """Applies the rows that are pushed."""
    cache: RowCache | None = None
    """Of rows of other servers; only for a column of the dataset."""
    on_device: DeviceRows | None = None
    """Of rows of any server, for batches on that device; only for a column of the dataset."""
    ahead: LookAheadRows | None = None
    """Of rows of other servers, for the loader that has claimed them; in place of ``cache``."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held by this rank while it updates rows that it owns from their old values."""
    counts: list[int] = field(default_factory=lambda: [0, 0, 0, 0])
    """Rows that this rank requested, as in :class:`CacheCounts`."""

    def __post_init__(self) -> None:
        dtype = numpy_dtype(self.info.dtype)
        for shard in self.shards:
            rows = shard.rows
            if rows.dtype != dtype or rows.shape[1:] != self.info.row_shape or not rows.flags.c_contiguous:
                raise ConfigError(
                    f"the rows of {self.name!r} are {rows.dtype} of shape {rows.shape}; they must be {dtype} "
                    f"with rows of shape {self.info.row_shape} in C order"
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
        """Copy the rows of those (K,) int64 ``ids`` that lie here to their positions in ``out`` (K, *row)."""
        if self.on_read is not None:
            self._compute(self.on_read, ids, out)
            return
        for shard in self.shards:
            if shard.on_disk:
                request_rows(shard.rows, shard.first, ids)
            gather_rows(shard.rows, shard.first, ids, out)

    def _compute(self, handler: PullHandler, ids: Array, out: Array) -> None:
        (shard,) = self.shards  # a tensor in memory has one
        here = np.flatnonzero((ids >= shard.first) & (ids < shard.first + len(shard.rows)))
        if not len(here):
            return
        values = handler(view_as_tensor(shard.rows, self.info), torch.from_numpy(ids[here] - shard.first))
        shape, dtype = (len(here), *self.info.row_shape), torch_dtype(self.info.dtype)
        if tuple(values.shape) != shape or values.dtype != dtype:
            raise ConfigError(
                f"the pull handler of {self.name!r} returned {values.dtype} of shape {tuple(values.shape)}; "
                f"it must be {dtype} of shape {shape}"
            )
        out[here] = view_as_numpy(values.detach().contiguous())

    def is_nonzero(self) -> Iterator[Array]:
        """Yield (n, *row) bool for each shard: which values are not 0."""
        for shard in self.shards:
            # bfloat16 is held as bits, of which the highest is the sign: -0.0 is zero too.
            yield (shard.rows & 0x7FFF if self.info.dtype == "bfloat16" else shard.rows) != 0

    def write(self, ids: Array, rows: Array) -> None:
        """Overwrite the rows that lie here from (K, *row) ``rows``; the last of repeated ids stays."""
        for shard in self.shards:
            scatter_rows(rows, shard.rows, shard.first, ids)

    def check(self, ids: Array) -> None:
        """Raise ConfigError or IndexError unless ``ids`` are (K,) int64 rows of this tensor."""
        if ids.dtype != np.int64 or ids.ndim != 1:
            raise ConfigError(f"ids must be (K,) int64, not {ids.dtype} of shape {ids.shape}")
        # By the user's name of the tensor, the last part of the store's.
        check_ids(ids, self.num_rows, repr(self.name.rpartition("~")[2]))

    def check_writable(self) -> None:
        if not self.writable:
            raise ConfigError(
                f"{self.name!r} belongs to the dataset on disk, which is read-only; create a tensor to "
                "write to with g.new_tensor(shape, dtype, name)"
            )


@dataclass(frozen=True, kw_only=True)
class CacheCounts:
    """Rows that this rank requested, repeats included."""

    local: int = 0
    """Of the local server."""
    hits: int = 0
    """Of another server, in a cache."""
    misses: int = 0
    """Of another server, and requested there."""
    on_device: int = 0
    """Of any server, in the cache on the device; counted above, too."""

    def __sub__(self, other: CacheCounts) -> CacheCounts:
        return CacheCounts(**{name: count - getattr(other, name) for name, count in vars(self).items()})


def check_cacheable(column: Column) -> None:
    if column.writable:
        raise ConfigError(
            f"{column.name!r} can be written to, which would make cached rows stale; only columns "
            "of the dataset, which are read-only, can be cached"
        )


def _new_table(least: int) -> SlotTable:
    length = max(_LEAST_PLACES, 1 << int(least).bit_length())
    return SlotTable(np.full(length, -1, np.int32), np.full(length, -1, np.int64))


@njit(cache=True, nogil=True)
def _move_entries(table: SlotTable, last: Array, places: Array, to: SlotTable, to_last: Array) -> None:
    for place in places:
        at = find_place(to.keys, table.keys[place])
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
        number, at = places[0] + k, find_place(table.keys, ids[k])
        following[number & mask] = _NEVER
        if len(table.keys) > 0 and table.keys[at] < 0:
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
            table.slots[find_place(table.keys, held[slot])] = -1
        held[slot], next_use[slot] = ids[k], uses[k]
        table.slots[find_place(table.keys, ids[k])] = slot
        taken[count], slots[count] = k, slot
        count += 1
        slot += 1
    return taken[:count].copy(), slots[:count].copy()
