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
    find_entry,
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
"""Function from (the local server's rows (n, *row), (k,) int64 row indices) to values (k, *row)."""

PushHandler: TypeAlias = Callable[[Tensor, Tensor, Tensor], None]
"""Function that changes rows. Its arguments are the local server's rows (n, *row), (k,) int64 indices, and
values (k, *row).
"""


PendingPull: TypeAlias = Callable[[], Tensor]
"""Function that waits for the rows that :meth:`KVStore.submit_pull` requested."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Rows with consecutive ids in this server's memory."""

    first: int
    """First row's id."""
    rows: Array
    """(n, *row) rows in C order. bfloat16 is stored as uint16."""
    on_disk: bool = False
    """Whether the rows are in a file that does not fit in memory."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RowCache:
    """Copies of some rows from one column. Immutable."""

    table: SlotTable
    """Table that maps a row's id to its slot."""
    rows: Array
    """(C, *row) rows in the column's NumPy dtype. Slot s is row s."""


_NEVER = 1 << 30
"""Next use of a row that no announced batch uses."""
_EMPTY = _NEVER + 1
"""Next use of a slot without a row."""
_MIN_ENTRIES = 16
_DIRECT_IDS = 1 << 20
"""Largest number of ids for a direct table (12 bytes per id). Larger tables hold only the ids in use."""


Ask: TypeAlias = Callable[[RemotePlan], Sequence[tuple[Pending, int, int]]]
"""Function that requests a plan's ids. Returns (reply, first slot, end slot) per message."""


@final
class JointRequest:
    """A request for the rows that several pulls miss, as one message per server with sorted ids.

    The request is sent when it is full, when all replies to the ``previous`` request have arrived, or when a
    pull waits for rows. The slower the link, the more pulls share a message. Not thread-safe.
    """

    def __init__(self, ask: Ask, previous: Sequence[Pending]) -> None:
        self.num_rows = 0
        self.is_sent = False
        self._ask = ask
        self._previous_replies = previous
        self._plans: list[RemotePlan] = []
        self._replies: Sequence[tuple[Pending, int, int]] = ()
        # Requested rows are sorted by id. This array lists all plans' rows in the order in which they were
        # added, and has each row's index among the sorted rows.
        self._row_indices: Array = np.empty(0, np.int64)

    def add(self, plan: RemotePlan, max_rows: int) -> None:
        """Add the distinct ids of ``plan``. The request is sent at once if it has ``max_rows`` rows."""
        self._plans.append(plan)
        self.num_rows += len(plan.ids)
        if self.num_rows >= max_rows or all(reply.is_ready() for reply in self._previous_replies):
            self.send()

    def send(self) -> Sequence[tuple[Pending, int, int]]:
        """Send the request, unless it is sent already.

        Returns:
            (reply, first row, end row) per message. Rows are counted in id order.
        """
        if self.is_sent:
            return self._replies
        ids = np.concatenate([plan.ids for plan in self._plans])
        # The ids in one plan are grouped by server already. With several plans, sorting groups them by
        # server, because each server has one range of ids.
        order = np.argsort(ids) if len(self._plans) > 1 else np.arange(len(ids))
        self._row_indices = np.empty(len(ids), np.int64)
        self._row_indices[order] = np.arange(len(ids))

        starts = np.sum([plan.server_starts for plan in self._plans], axis=0)
        self._replies = self._ask(self._plans[0]._replace(ids=ids[order], server_starts=starts))
        self._previous_replies = ()
        self.is_sent = True
        return self._replies

    def copy(self, plan: RemotePlan, first: int, out: Array) -> None:
        """Wait for the rows that ``plan`` requested, and copy them to ``out``.

        ``first`` is the number of rows that other plans added to the request before this plan. Raises as
        :meth:`KVStore.submit_pull` does, and ValueError if a reply does not match the request.
        """
        replies = self.send()
        indices = self._row_indices[first : first + len(plan.ids)]
        for reply, begin, end in replies:
            (answer,) = reply.result()
            check_answer(answer, out, end - begin)
            selection: Any = slice(begin, end)
            if len(self._plans) > 1:
                selection = np.flatnonzero((indices >= begin) & (indices < end))
            move_rows(answer, indices[selection] - begin, out, plan.positions[selection])


@final
class LookAheadRows:
    """Copies of remote rows that a rank keeps for its announced batches, for one column. Not thread-safe.

    The rows with the furthest next use are evicted (Belady's MIN). Only one loader at a time may use this
    cache. The loader announces batches in order, and pulls their rows in that order with ``ahead=``. The
    loader also waits for the rows in that order, so that a slot is read before the next batch overwrites it.

    Args:
        num_rows: Maximum number C of rows to keep. May be 0.
        local_range: First id and end of the ids that the local server's rows have.
        num_ids: Number of rows on all servers.
    """

    def __init__(self, num_rows: int, info: ColumnInfo, local_range: tuple[int, int], num_ids: int) -> None:
        self.rows: Array = np.empty((num_rows, *info.row_shape), numpy_dtype(info.dtype))
        """(C, *row) rows in the column's NumPy dtype. Slot s is row s."""
        self.announce_more: Callable[[], bool] = lambda: False
        """Function that announces a batch. Returns False if no batch or memory is left."""
        self._local_range = local_range
        self._num_ids = num_ids
        self._claim_lock = threading.Lock()
        self._message_rows = rows_per_message(math.prod(info.row_shape) * self.rows.itemsize)
        self._clear_rows()
        self._reset_numbers()

    def _clear_rows(self) -> None:
        """Forget all cached rows and announced batches."""
        # For each announced or cached id, the table holds its slot, or -1 if it has none.
        self.table = _new_table(0)
        if self._num_ids <= _DIRECT_IDS:
            self.table = SlotTable(np.full(self._num_ids, -1, np.int32), np.empty(0, np.int64))
        self._last_input = np.empty(len(self.table.slots), np.int64)
        self._num_entries = 0
        self._ids_by_slot = np.full(len(self.rows), -1, np.int64)
        self._next_use = np.full(len(self.rows), _EMPTY, np.int32)

        # Inputs are numbered consecutively across all batches. `_last_input` has the last input for each
        # table entry. The ring buffer `_later_use` has, for each announced input, the next step that uses its
        # id. `_first_inputs` has the first input in each announced batch.
        self._later_use = np.empty(_MIN_ENTRIES, np.int32)
        self._first_inputs: deque[int] = deque()
        # Counts batches whose rows are chosen, but not copied yet.
        self._num_unfinished = 0

    def _reset_numbers(self) -> None:
        # No batch is pending, so steps and inputs can restart at 0. Steps must fit in 32 bits.
        self._last_input.fill(-1)
        self._next_input = 0
        self._step = 0
        self._num_requested = 0
        self._joint_request: JointRequest | None = None

    @property
    def num_bytes(self) -> int:
        """Size in bytes: the rows, and the tables that find and order them."""
        uses = self._last_input, self._ids_by_slot, self._next_use, self._later_use
        arrays = (self.rows, *self.table, *uses)
        return sum(array.nbytes for array in arrays)

    def claim(self) -> bool:
        """Reserve the rows for one loader. Return False if another loader has reserved them."""
        return self._claim_lock.acquire(blocking=False)

    def release(self) -> None:
        """End the reservation. The next loader finds the rows, unless an announced batch was not finished."""
        self.announce_more = lambda: False
        if self._first_inputs or self._num_unfinished:
            self._clear_rows()
        self._reset_numbers()
        self._claim_lock.release()

    def announce(self, ids: Array) -> None:
        """Register the (K,) distinct inputs of the next batch. Raise IndexError if an id does not exist."""
        check_ids(ids, self._num_ids, "the cached column")
        first, end = self._local_range
        remote_ids = ids[(ids < first) | (ids >= end)]
        self._first_inputs.append(self._next_input)
        self._reserve_entries(len(remote_ids))

        step = self._step + len(self._first_inputs) - 1
        input_bounds = (self._next_input, self._first_inputs[0])
        uses = self._last_input, self._next_use, self._later_use
        self._num_entries += _announce(self.table, *uses, remote_ids, input_bounds, step)
        self._next_input += len(remote_ids)

    @property
    def is_busy(self) -> bool:
        """Whether as many rows as fit in two messages are requested and not copied yet."""
        return self._num_requested >= 2 * self._message_rows

    def pull(self, plan: RemotePlan, ask: Ask) -> Callable[[Array], None]:
        """Request the distinct ids in ``plan``, and choose the rows to keep as in :meth:`admit`.

        A message may also contain ids of other batches; see :class:`JointRequest`.

        Returns:
            Function that waits for the rows, copies them to the batch's (K, *row) rows, and then copies the
            rows to keep.
        """
        joint = self._joint_request
        max_rows = self._message_rows // 2
        # A batch does not join a request that would then be too large, because it would wait for all rows.
        if joint is not None and joint.num_rows and joint.num_rows + len(plan.ids) > max_rows:
            joint.send()
        if joint is None or joint.is_sent:
            previous_replies = [] if joint is None else [reply for reply, _, _ in joint.send()]
            joint = self._joint_request = JointRequest(ask, previous_replies)
        first = joint.num_rows
        joint.add(plan, max_rows)
        self._num_requested += len(plan.ids)

        # The choice follows the request, because it may have to wait until more batches are drawn.
        copy_kept_rows = self.admit(plan)

        def finish(rows: Array) -> None:
            joint.copy(plan, first, rows)
            self._num_requested -= len(plan.ids)
            copy_kept_rows(rows)

        return finish

    def admit(self, plan: RemotePlan) -> Callable[[Array], None]:
        """Choose the rows to keep after the oldest announced batch.

        Announces more batches until a longer look-ahead could not choose better. ``plan`` holds the hits and
        misses in the oldest batch. Returns a function from the batch's (K, *row) rows that copies the rows to
        keep.
        """
        positions = np.concatenate([plan.hit_positions, plan.positions])
        num_hits = len(plan.hit_positions)
        first_input = self._first_inputs[0]
        end_input = self._first_inputs[1] if len(self._first_inputs) > 1 else self._next_input
        assert len(positions) == end_input - first_input, "the plan is of another batch"
        # Only inputs on other servers are numbered, so count the remote positions up to each position.
        num_remote_until = np.cumsum(np.bincount(positions))
        inputs = first_input + num_remote_until[positions] - 1

        while True:
            # Announcing a batch may change the next uses, and may replace the ring.
            uses = self._later_use[inputs & (len(self._later_use) - 1)]
            self._next_use[plan.hit_slots] = uses[:num_hits]
            miss_uses = uses[num_hits:]
            cut = _find_cut(self._next_use, miss_uses, self._step, len(self._first_inputs))
            _, _, _, is_open = cut
            if not is_open or not self.announce_more():
                break

        self._first_inputs.popleft()
        self._step += 1
        self._num_unfinished += 1
        table = self.table
        indices, slots = _assign_slots(table, self._ids_by_slot, self._next_use, plan.ids, miss_uses, cut)
        positions_to_keep = plan.positions[indices]

        def copy_kept_rows(rows: Array) -> None:
            move_rows(rows, positions_to_keep, self.rows, slots)
            self._num_unfinished -= 1

        return copy_kept_rows

    def _reserve_entries(self, num_ids: int) -> None:
        """Make space for ``num_ids`` further ids in the ring buffer and in the id table."""
        first_input, next_input = self._first_inputs[0], self._next_input
        num_inputs = next_input + num_ids - first_input
        if num_inputs > len(self._later_use):
            # The ring's length is a power of two, so that a mask finds an input's place.
            old_uses = self._later_use
            inputs = np.arange(first_input, next_input)
            self._later_use = np.empty(1 << num_inputs.bit_length(), np.int32)
            self._later_use[inputs & (len(self._later_use) - 1)] = old_uses[inputs & (len(old_uses) - 1)]

        # A hash table stays at most two thirds full. A direct table has an entry for every id.
        keys = self.table.keys
        if len(keys) and 3 * (self._num_entries + num_ids) > 2 * len(keys):
            # Ids that are neither cached nor announced are dropped.
            is_needed = (self.table.slots >= 0) | (self._last_input >= first_input)
            entries = np.flatnonzero((keys >= 0) & is_needed)
            self._num_entries = len(entries)
            table = _new_table(2 * (len(entries) + num_ids))
            last_inputs = np.full(len(table.keys), -1, np.int64)
            _move_entries(self.table, self._last_input, entries, table, last_inputs)
            self.table, self._last_input = table, last_inputs


@dataclass(frozen=True, kw_only=True, eq=False)
class Column:
    """A named tensor as this rank sees it."""

    name: str
    info: ColumnInfo
    bounds: Array
    """(S + 1,) int64 bounds. Server s owns the ids ``bounds[s]:bounds[s + 1]``."""
    shards: tuple[Shard, ...]
    """The local server's rows, in id order."""
    writable: bool
    on_read: PullHandler | None = None
    """Function that computes rows when they are read. Only for a tensor in memory."""
    on_push: PushHandler | None = None
    """Function that applies pushed rows."""
    cache: RowCache | None = None
    """Cached rows from other servers. Only for a dataset column."""
    ahead: LookAheadRows | None = None
    """Cached rows from other servers for the loader that has reserved them. It replaces ``cache``."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Lock for updates that depend on old values. This rank holds it while it updates its own rows."""
    counts: list[int] = field(default_factory=lambda: [0, 0, 0])
    """Row counts for this rank's requests: local, hits and misses, as in :class:`CacheCounts`."""

    def __post_init__(self) -> None:
        dtype = numpy_dtype(self.info.dtype)
        for shard in self.shards:
            rows = shard.rows
            if rows.dtype != dtype or rows.shape[1:] != self.info.row_shape or not rows.flags.c_contiguous:
                raise ConfigError(
                    f"the rows of {self.name!r} are {rows.dtype} of shape {rows.shape}, but "
                    f"they must be {dtype} with rows of shape {self.info.row_shape} in C order"
                )

    @cached_property
    def num_rows(self) -> int:
        return int(self.bounds[-1])

    @cached_property
    def row_bytes(self) -> int:
        return math.prod(self.info.row_shape) * numpy_dtype(self.info.dtype).itemsize

    @cached_property
    def rows_per_message(self) -> int:
        return rows_per_message(self.row_bytes)

    def read(self, ids: Array, out: Array) -> None:
        """Copy the local rows among (K,) int64 ``ids`` to their positions in ``out`` (K, *row)."""
        if self.on_read is not None:
            self._compute_rows(self.on_read, ids, out)
            return
        for shard in self.shards:
            if shard.on_disk:
                request_rows(shard.rows, shard.first, ids)
            gather_rows(shard.rows, shard.first, ids, out)

    def _compute_rows(self, handler: PullHandler, ids: Array, out: Array) -> None:
        """Let ``handler`` compute the rows for local ids. Raise ConfigError if shape or dtype is wrong."""
        # A tensor in memory has one shard.
        (shard,) = self.shards
        positions = np.flatnonzero((ids >= shard.first) & (ids < shard.first + len(shard.rows)))
        if not len(positions):
            return

        indices = torch.from_numpy(ids[positions] - shard.first)
        values = handler(view_as_tensor(shard.rows, self.info), indices)
        shape = (len(positions), *self.info.row_shape)
        dtype = torch_dtype(self.info.dtype)
        if tuple(values.shape) != shape or values.dtype != dtype:
            raise ConfigError(
                f"the pull handler of {self.name!r} returned {values.dtype} of shape "
                f"{tuple(values.shape)}, but it must return {dtype} of shape {shape}"
            )
        out[positions] = view_as_numpy(values.detach().contiguous())

    def find_nonzero(self) -> Iterator[Array]:
        """Yield one (n, *row) bool array per shard. It marks the values that are not 0."""
        for shard in self.shards:
            rows = shard.rows
            if self.info.dtype == "bfloat16":
                # bfloat16 is stored as uint16. The mask clears the sign, because -0.0 is zero, too.
                rows = rows & 0x7FFF
            yield rows != 0

    def write(self, ids: Array, rows: Array) -> None:
        """Overwrite the local rows with (K, *row) ``rows``. If an id is repeated, the last row wins."""
        for shard in self.shards:
            scatter_rows(rows, shard.rows, shard.first, ids)

    def check(self, ids: Array) -> None:
        """Raise ConfigError unless ``ids`` are (K,) int64, and IndexError if this tensor has no such row."""
        if ids.dtype != np.int64 or ids.ndim != 1:
            raise ConfigError(f"ids must be (K,) int64, not {ids.dtype} of shape {ids.shape}")
        # Show the name that the user knows. It is the last part of the store's name.
        check_ids(ids, self.num_rows, repr(self.name.rpartition("~")[2]))

    def check_writable(self) -> None:
        if not self.writable:
            raise ConfigError(
                f"{self.name!r} belongs to the dataset on disk, which is read-only. Create a "
                "writable tensor with g.new_tensor(shape, dtype, name)."
            )


@dataclass(frozen=True, kw_only=True)
class CacheCounts:
    """Row counts for this rank's requests. Repeated ids count each time."""

    local: int = 0
    """Rows on the local server."""
    hits: int = 0
    """Rows on other servers that were in a cache."""
    misses: int = 0
    """Rows that were requested from other servers."""

    def __sub__(self, other: CacheCounts) -> CacheCounts:
        return CacheCounts(**{name: count - getattr(other, name) for name, count in vars(self).items()})


def check_cacheable(column: Column) -> None:
    if column.writable:
        raise ConfigError(
            f"{column.name!r} can be written to, which would make cached rows stale. Only "
            "columns of the dataset, which are read-only, can be cached."
        )


def _new_table(min_entries: int) -> SlotTable:
    length = max(_MIN_ENTRIES, 1 << int(min_entries).bit_length())
    return SlotTable(np.full(length, -1, np.int32), np.full(length, -1, np.int64))


@njit(cache=True, nogil=True)
def _move_entries(table: SlotTable, inputs: Array, entries: Array, out: SlotTable, out_inputs: Array) -> None:
    for entry in entries:
        out_entry = find_entry(out.keys, table.keys[entry])
        out.keys[out_entry] = table.keys[entry]
        out.slots[out_entry] = table.slots[entry]
        out_inputs[out_entry] = inputs[entry]


@njit(cache=True, nogil=True)
def _announce(
    table: SlotTable,
    last_inputs: Array,
    next_use: Array,
    later_use: Array,
    ids: Array,
    input_bounds: tuple[int, int],
    step: int,
) -> int:
    """Register ``ids`` as inputs of the batch ``step``. Return how many ids had no table entry.

    Args:
        table: Table over announced and cached ids. New ids get an entry.
        last_inputs: Last input for each table entry.
        next_use: Next use for each slot.
        later_use: Ring buffer with the next use after each announced input.
        ids: (K,) distinct remote ids.
        input_bounds: The first input for ``ids``, and the first input that is still announced.
    """
    first_input, first_announced = input_bounds
    mask, num_new_ids = len(later_use) - 1, 0
    for k in range(len(ids)):
        input_number, entry = first_input + k, find_entry(table.keys, ids[k])
        later_use[input_number & mask] = _NEVER
        if len(table.keys) > 0 and table.keys[entry] < 0:
            table.keys[entry] = ids[k]
            num_new_ids += 1
        elif last_inputs[entry] >= first_announced:
            # An earlier announced batch uses the id, so this step is the next use after that batch.
            later_use[last_inputs[entry] & mask] = step
        elif table.slots[entry] >= 0:
            # No announced batch uses the id, but its row is cached.
            next_use[table.slots[entry]] = step
        last_inputs[entry] = input_number
    return num_new_ids


@njit(cache=True, nogil=True)
def _find_cut(next_use: Array, uses: Array, step: int, num_known: int) -> tuple[int, int, int, bool]:
    """Find the next use up to which cached and requested rows are kept.

    Args:
        next_use: Next uses of the cached rows.
        uses: Next uses of the requested rows.
        step: Step of the oldest announced batch.
        num_known: Number of known batches.

    Returns:
        Next use at the cut, how many cached and how many requested rows with this use are kept, and whether
        announcing more batches could tell the rows at the cut apart.
    """
    # Count the rows by the steps until their next use. The last two counts are for rows that no known batch
    # uses, and for slots without a row.
    num_cached, num_missed = np.zeros(num_known + 2, np.int64), np.zeros(num_known + 2, np.int64)
    for use in next_use:
        num_cached[num_known + use - _NEVER if use >= _NEVER else use - step] += 1
    for use in uses:
        num_missed[num_known if use >= _NEVER else use - step] += 1

    # Rows with the nearest next use come first, until the slots are full.
    room, ahead = len(next_use), 0
    while num_cached[ahead] + num_missed[ahead] < room:
        room -= num_cached[ahead] + num_missed[ahead]
        ahead += 1
    num_kept = min(num_cached[ahead], room)
    cut = _NEVER + ahead - num_known if ahead >= num_known else step + ahead
    is_open = ahead == num_known and num_cached[ahead] + num_missed[ahead] > room and len(next_use) > 0
    return cut, num_kept, min(num_missed[ahead], room - num_kept), is_open


@njit(cache=True, nogil=True)
def _assign_slots(
    table: SlotTable,
    ids_by_slot: Array,
    next_use: Array,
    ids: Array,
    uses: Array,
    cut: tuple[int, int, int, bool],
) -> tuple[Array, Array]:
    """Give slots to the ``ids`` with a use before the cut. Take the slots from rows with a later use.

    Return the indices of the ids that got a slot, and their slots. ``cut`` is what :func:`_find_cut`
    returned.
    """
    cut_use, num_kept, num_entering, _ = cut
    indices, slots = np.empty(len(ids), np.int64), np.empty(len(ids), np.int64)
    count, slot = 0, 0
    for k in range(len(ids)):
        if uses[k] > cut_use or (uses[k] == cut_use and num_entering == 0):
            continue
        num_entering -= uses[k] == cut_use
        while next_use[slot] < cut_use or (next_use[slot] == cut_use and num_kept > 0):
            num_kept -= next_use[slot] == cut_use
            slot += 1

        if ids_by_slot[slot] >= 0:
            table.slots[find_entry(table.keys, ids_by_slot[slot])] = -1
        ids_by_slot[slot], next_use[slot] = ids[k], uses[k]
        table.slots[find_entry(table.keys, ids[k])] = slot
        indices[count], slots[count] = k, slot
        count += 1
        slot += 1
    return indices[:count].copy(), slots[:count].copy()
