"""Columns (named tensors cut by rows): shards, the row cache, and rows in transit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from dglx_dist.data.storage.columns import numpy_dtype
from dglx_dist.errors import ConfigError
from dglx_dist.graph.partition_book import rows_per_message
from dglx_dist.graph.row_kernels import (
    SlotTable,
    check_ids,
    gather_rows,
    numpy_view,
    request_rows,
    scatter_rows,
    tensor_view,
    torch_dtype,
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

    def joined(self, hits: Tensor, slots: Tensor, missing: Tensor, rows: Tensor) -> Tensor:
        """Return cached ``slots`` at the positions ``hits`` and ``rows`` at ``missing``, all on the device.

        (h,) and (m,) int64 positions are together 0 to h + m - 1; (m, *row) ``rows`` have the column's dtype.
        """
        dtype = self.rows.dtype
        kind = _SIGNED.get(dtype, dtype)
        cached = self.rows.view(kind)
        out = cached.new_empty((len(hits) + len(missing), *cached.shape[1:]))
        out.index_copy_(0, hits, cached.index_select(0, slots))
        return out.index_copy_(0, missing, rows.view(kind)).view(dtype)


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

    @property
    def hit_rate(self) -> float | None:
        """Hits among the rows of other servers; None when there were none."""
        return self.hits / (self.hits + self.misses) if self.hits + self.misses else None

    def __sub__(self, other: CacheCounts) -> CacheCounts:
        return CacheCounts(**{name: count - getattr(other, name) for name, count in vars(self).items()})


def check_cacheable(column: Column) -> None:
    if column.writable:
        raise ConfigError(
            f"{column.name!r} can be written to, which would make cached rows stale; only columns "
            "of the dataset, which are read-only, can be cached"
        )
