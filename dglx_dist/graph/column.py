"""Columns (named tensors cut by rows): shards, pulling, the row cache, and masks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias, final

import numpy as np
import torch
from torch import Tensor

from dglx_dist.comm.collectives import gather_int64
from dglx_dist.comm.rpc import Pending
from dglx_dist.comm.session import Session
from dglx_dist.data.storage.columns import numpy_dtype
from dglx_dist.errors import ConfigError
from dglx_dist.graph.ids import check_ids
from dglx_dist.graph.partition_book import Placement, requests_of, rows_per_message
from dglx_dist.graph.row_kernels import (
    Hits,
    RemotePlan,
    SlotTable,
    empty_rows,
    fill_table,
    gather_rows,
    move_rows,
    no_slots,
    numpy_view,
    plan_pull,
    scatter_rows,
    spread_rows,
    table_sizes,
    tensor_view,
    torch_dtype,
)
from dglx_dist.graph.shared_memory import shared_rows
from dglx_dist.records import Array, ColumnInfo

PullHandler: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(rows of the local server (n, *row), (k,) int64 indices of rows) to values (k, *row)."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Rows with consecutive ids that lie in this server's memory."""

    first: int
    """Id of the first row."""
    rows: Array
    """(n, *row), C-contiguous; bfloat16 as uint16."""


@dataclass(frozen=True, kw_only=True)
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

    def __post_init__(self) -> None:
        dtype = numpy_dtype(self.info.dtype)
        for shard in self.shards:
            rows = shard.rows
            if rows.dtype != dtype or rows.shape[1:] != self.info.row_shape or not rows.flags.c_contiguous:
                raise ConfigError(
                    f"the rows of {self.name!r} are {rows.dtype} of shape {rows.shape}; they must be {dtype} "
                    f"with rows of shape {self.info.row_shape} in C order"
                )

    @property
    def num_rows(self) -> int:
        return int(self.bounds[-1])

    @property
    def row_bytes(self) -> int:
        return int(np.prod(self.info.row_shape, dtype=np.int64)) * numpy_dtype(self.info.dtype).itemsize

    def read(self, ids: Array, out: Array) -> None:
        """Copy the rows of those (K,) int64 ``ids`` that lie here to their positions in ``out`` (K, *row).

        Raises:
            ConfigError: the pull handler returned another shape or dtype.
        """
        if self.on_read is not None:
            self._compute(self.on_read, ids, out)
            return
        for shard in self.shards:
            gather_rows(shard.rows, shard.first, ids, out)

    def _compute(self, handler: PullHandler, ids: Array, out: Array) -> None:
        (shard,) = self.shards  # a tensor in memory has one
        here = np.flatnonzero((ids >= shard.first) & (ids < shard.first + len(shard.rows)))
        if not len(here):
            return
        values = handler(tensor_view(shard.rows, self.info), torch.from_numpy(ids[here] - shard.first))
        shape, dtype = (len(here), *self.info.row_shape), torch_dtype(self.info.dtype)
        if tuple(values.shape) != shape or values.dtype != dtype:
            raise ConfigError(
                f"the pull handler of {self.name!r} returned {values.dtype} of shape {tuple(values.shape)}; "
                f"it must be {dtype} of shape {shape}"
            )
        out[here] = numpy_view(values.detach().contiguous())

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
        check_ids(ids, self.num_rows, repr(self.name))

    def check_writable(self) -> None:
        if not self.writable:
            raise ConfigError(
                f"{self.name!r} belongs to the dataset on disk, which is read-only; create a tensor to "
                "write to with g.new_tensor(shape, dtype, name)"
            )


def shards_of(offsets: Array, parts: Mapping[int, Array]) -> tuple[Shard, ...]:
    shards = []
    for part in sorted(parts):
        count = int(offsets[part + 1] - offsets[part])
        if len(parts[part]) != count:
            raise ConfigError(f"part {part} has {len(parts[part])} rows for {count} ids")
        shards.append(Shard(first=int(offsets[part]), rows=parts[part]))
    return tuple(shards)


PHASE_ROW_CACHE = "cache"
"""Ledger phase of filling caches."""

_SLOTS = ColumnInfo(dtype="int32", row_shape=())
_IDS = ColumnInfo(dtype="int64", row_shape=())


@dataclass(frozen=True, kw_only=True, eq=False)
class RowCache:
    """Some rows of one column; immutable."""

    table: SlotTable
    """Id of a row to its slot."""
    rows: Array
    """(C, *row) in NumPy's form of the column's dtype; slot s is row s."""

    @property
    def num_bytes(self) -> int:
        return int(self.rows.nbytes + self.table.slots.nbytes + self.table.keys.nbytes)


@dataclass(frozen=True, kw_only=True)
class CachePlan:
    """One server's cache of one column."""

    policy: str
    rows: int
    """Rows of other servers in this server's cache."""
    bytes: int
    """The server's memory for the rows and the table that finds them."""
    expected_hit_rate: float | None
    """Share of hits among remote rows that the policy's model predicts; None where it has none."""


def fill_cache(
    session: Session,
    file_name: str,
    info: ColumnInfo,
    num_ids: int,
    ids: Array,
    pull: Callable[[Array], Tensor],
) -> RowCache:
    """Fetch rows into memory that the ranks of a server share; collective.

    Args:
        session: The run.
        file_name: Prefix of unused names in its ``scratch``; the same on the ranks of a server.
        info: Of the column.
        num_ids: Rows of all servers.
        ids: (C,) int64 distinct ids to keep, on the first rank of each server; ignored on the others.
        pull: Fetches their (C, *row) rows; called on that rank.

    Raises:
        ConfigError: on all ranks, when memory is short on one of them, or a server does not answer.
    """
    leader = session.topology.ranks_of_server(session.topology.server)[0]
    count = int(gather_int64([len(ids)], session)[leader, 0])
    num_slots, num_keys = table_sizes(count, num_ids) if count else (0, 0)
    rows = shared_rows(session, f"{file_name}.rows", count, info, lambda _shape, _dtype: pull(ids))
    keys = shared_rows(session, f"{file_name}.keys", num_keys, _IDS)

    def fill(shape: tuple[int, ...], _dtype: torch.dtype) -> Tensor:
        slots = np.empty(shape, np.int32)
        fill_table(SlotTable(slots, keys), ids)
        return torch.from_numpy(slots)

    slots = shared_rows(session, f"{file_name}.slots", num_slots, _SLOTS, fill)
    return RowCache(table=SlotTable(slots, keys), rows=rows)


@dataclass(frozen=True, kw_only=True)
class CacheCounts:
    """Rows that this rank requested, repeats included."""

    local: int = 0
    """Of the local server."""
    hits: int = 0
    """Of another server, in the cache."""
    misses: int = 0
    """Of another server, and requested there."""

    @property
    def hit_rate(self) -> float | None:
        """Hits among the rows of other servers; None when there were none."""
        return self.hits / (self.hits + self.misses) if self.hits + self.misses else None

    def __add__(self, other: CacheCounts) -> CacheCounts:
        return CacheCounts(
            local=self.local + other.local, hits=self.hits + other.hits, misses=self.misses + other.misses
        )

    def __sub__(self, other: CacheCounts) -> CacheCounts:
        return CacheCounts(
            local=self.local - other.local, hits=self.hits - other.hits, misses=self.misses - other.misses
        )


@final
class Puller:
    """The reading half of a store.

    Args:
        session: The run.
        placement: The rank that serves each server.
        op: The operation under which all ranks serve their rows.
    """

    def __init__(self, session: Session, placement: Placement, op: str) -> None:
        self._session, self._placement, self._op = session, placement, op
        self._caches: dict[str, RowCache] = {}
        self._counts: dict[str, CacheCounts] = {}
        self._counts_lock = threading.Lock()

    def submit(
        self, column: Column, ids: Array, *, out: Tensor | None, distinct: bool, phase: str, layer: int
    ) -> PendingPull:
        column.check(ids)
        out = empty_rows(len(ids), column.info) if out is None else _checked(out, len(ids), column)
        cache = self._caches.get(column.name)
        table = no_slots() if cache is None else cache.table
        server = self._placement.topology.server
        plan, hits = plan_pull(ids, column.bounds, server, table, distinct=distinct)
        replies = []
        for call in requests_of(plan, self._placement, rows_per_message(column.row_bytes)):
            requested = [plan.ids[call.first : call.last]]
            pending = self._session.rpc.submit(
                call.rank, self._op, column.name, requested, phase=phase, layer=layer
            )
            replies.append((pending, call.first))
        self._count(column.name, len(ids), len(hits.places), len(plan.positions))
        return PendingPull(column, ids, out, plan, hits, cache, replies)

    def set_cache(self, column: Column, cache: RowCache | None) -> None:
        check_cacheable(column)
        if cache is None:
            self._caches.pop(column.name, None)
        else:
            self._caches[column.name] = cache

    def forget(self, name: str) -> None:
        self._caches.pop(name, None)
        self._counts.pop(name, None)

    def has_cache(self) -> bool:
        return bool(self._caches)

    def counts(self, name: str | None) -> CacheCounts:
        with self._counts_lock:
            if name is not None:
                return self._counts.get(name, CacheCounts())
            return sum((self._counts.get(key, CacheCounts()) for key in self._caches), CacheCounts())

    def _count(self, name: str, requested: int, hits: int, misses: int) -> None:
        new = CacheCounts(local=requested - hits - misses, hits=hits, misses=misses)
        with self._counts_lock:
            self._counts[name] = self._counts.get(name, CacheCounts()) + new


@final
class PendingPull:
    """Rows in transit. :meth:`result` must be called on the thread that submitted."""

    def __init__(
        self,
        column: Column,
        ids: Array,
        out: Tensor,
        plan: RemotePlan,
        hits: Hits,
        cache: RowCache | None,
        replies: list[tuple[Pending, int]],
    ) -> None:
        self._column, self._ids, self._out = column, ids, out
        self._plan, self._hits, self._cache = plan, hits, cache
        self._replies = replies
        self._done = False

    def result(self) -> Tensor:
        """Read the local rows, wait for the others, and return all (K, *row) in the order of the ids.

        Raises:
            PeerError: an owner is dead or silent.
            RemoteError: an owner cannot answer.
        """
        if not self._done:
            out = numpy_view(self._out)
            self._column.read(self._ids, out)
            if self._cache is not None:
                move_rows(self._cache.rows, self._hits.slots, out, self._hits.places)
            for reply, first_slot in self._replies:
                (rows,) = reply.result()
                spread_rows(rows, out, self._plan.starts, self._plan.positions, first_slot)
            self._done = True
        return self._out


def check_cacheable(column: Column) -> None:
    if column.writable:
        raise ConfigError(
            f"{column.name!r} can be written to, which would make cached rows stale; only columns "
            "of the dataset, which are read-only, can be cached"
        )


def _checked(out: Tensor, count: int, column: Column) -> Tensor:
    shape, dtype = (count, *column.info.row_shape), torch_dtype(column.info.dtype)
    if tuple(out.shape) != shape or out.dtype != dtype or not out.is_contiguous() or out.device.type != "cpu":
        raise ConfigError(
            f"out for {column.name!r} must be a contiguous CPU tensor of {dtype} and shape {shape}, "
            f"not {out.dtype} of shape {tuple(out.shape)} on {out.device}"
        )
    return out
