"""Reading rows of distributed tensors: from own memory, from the cache, from the servers that own them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from torch import Tensor

from dglx_dist.cluster.rpc import Pending
from dglx_dist.cluster.session import Session
from dglx_dist.errors import ConfigError
from dglx_dist.graph.column import Column
from dglx_dist.graph.dtypes import empty_rows, numpy_view, torch_dtype
from dglx_dist.graph.gather import move_rows, spread_rows
from dglx_dist.graph.placement import Placement
from dglx_dist.graph.remote_plan import Hits, RemotePlan, plan_pull
from dglx_dist.graph.row_cache import RowCache
from dglx_dist.graph.rows import requests_of, rows_per_message
from dglx_dist.graph.slot_table import no_slots
from dglx_dist.records import Array
from dglx_dist.storage.columns import numpy_dtype


@dataclass(frozen=True, kw_only=True)
class CacheCounts:
    """Rows that this rank asked for, repeats included."""

    local: int = 0
    """The own server owns them."""
    hits: int = 0
    """Another server's, and in the cache."""
    misses: int = 0
    """Another server's, and asked for there."""

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
        placement: Which rank answers for a server.
        op: The operation that all ranks serve with :meth:`answer`.
    """

    def __init__(self, session: Session, placement: Placement, op: str) -> None:
        self._session, self._placement, self._op = session, placement, op
        self._caches: dict[str, RowCache] = {}
        self._counts: dict[str, CacheCounts] = {}
        self._counts_lock = threading.Lock()

    def submit(
        self, column: Column, ids: Array, *, out: Tensor | None, distinct: bool, phase: str, layer: int
    ) -> PendingPull:
        """Ask the owners for rows and return at once; see ``KVStore.submit_pull``."""
        column.check(ids)
        out = empty_rows(len(ids), column.info) if out is None else _checked(out, len(ids), column)
        cache = self._caches.get(column.name)
        table = no_slots() if cache is None else cache.table
        server = self._placement.topology.server
        plan, hits = plan_pull(ids, column.bounds, server, table, distinct=distinct)
        replies = []
        for call in requests_of(plan, self._placement, rows_per_message(column.row_bytes)):
            asked = [plan.ids[call.first : call.last]]
            pending = self._session.rpc.submit(
                call.rank, self._op, column.name, asked, phase=phase, layer=layer
            )
            replies.append((pending, call.first))
        self._count(column.name, len(ids), len(hits.places), len(plan.positions))
        return PendingPull(column, ids, out, plan, hits, cache, replies)

    def answer(self, column: Column, ids: Array) -> Sequence[Array]:
        """Return the rows of (k,) ids of the own server: what another rank asked for."""
        out = np.empty((len(ids), *column.info.row_shape), dtype=numpy_dtype(column.info.dtype))
        column.read(ids, out)
        return [out]

    def set_cache(self, column: Column, cache: RowCache | None) -> None:
        """Look into ``cache`` before other servers are asked for rows of ``column``; None: into none.

        Raises:
            ConfigError: the column can be written to, so that its copies would grow stale.
        """
        check_cacheable(column)
        if cache is None:
            self._caches.pop(column.name, None)
        else:
            self._caches[column.name] = cache

    def forget(self, name: str) -> None:
        """Drop what is kept for a tensor that is no more."""
        self._caches.pop(name, None)
        self._counts.pop(name, None)

    def has_cache(self) -> bool:
        """Whether rows of any column are cached."""
        return bool(self._caches)

    def counts(self, name: str | None) -> CacheCounts:
        """Return what this rank asked for so far: of one column, or of all those with a cache."""
        with self._counts_lock:
            if name is not None:
                return self._counts.get(name, CacheCounts())
            return sum((self._counts.get(key, CacheCounts()) for key in self._caches), CacheCounts())

    def _count(self, name: str, asked: int, hits: int, misses: int) -> None:
        new = CacheCounts(local=asked - hits - misses, hits=hits, misses=misses)
        with self._counts_lock:
            self._counts[name] = self._counts.get(name, CacheCounts()) + new


@final
class PendingPull:
    """Rows under way. :meth:`result` belongs to the thread that submitted."""

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
        """Read the own server's rows, wait for the others, and return all (K, *row) in the order of the ids.

        Raises:
            PeerError: an owner is dead or silent.
            RemoteError: an owner could not answer.
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
    """Raise ConfigError when the column can be written to."""
    if column.writable:
        raise ConfigError(
            f"{column.name!r} can be written to, and a cache would go on giving its old rows; only columns "
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
