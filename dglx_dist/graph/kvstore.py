"""Rows of distributed tensors, read and written by any rank alone (DistDGL's KVStore)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count
from typing import final

import numpy as np
from torch import Tensor

from dglx_dist.cluster.session import Session
from dglx_dist.errors import ConfigError
from dglx_dist.graph.column import Column, shards_of
from dglx_dist.graph.placement import Placement
from dglx_dist.graph.pull import MAX_MESSAGE_BYTES, CacheCounts, PendingPull, Puller
from dglx_dist.graph.remote_plan import RemotePlan, plan_remote
from dglx_dist.graph.row_cache import RowCache
from dglx_dist.graph.rows import Request, requests_of
from dglx_dist.records import Array, ColumnInfo
from dglx_dist.storage.columns import numpy_dtype


@final
class KVStore:
    """Named tensors cut by rows over the servers.

    Rows of the own server are read from memory that its ranks share, all others by one-sided calls to one
    rank of the server that owns them. Nothing here is collective: a rank may pull or push alone, from any
    thread, at any time. But a name must have been added on all ranks before one of them asks for it.

    Args:
        session: The run; its ``rpc`` must not serve another store of the same ``label``.
        placement: Which server holds what.
        label: Tells the stores of one run apart; the same on all ranks.
    """

    def __init__(self, session: Session, placement: Placement, label: str = "kv") -> None:
        self.session = session
        self.placement = placement
        self.label = label
        self._columns: dict[str, Column] = {}
        self._numbers = count()
        self._pull_op, self._push_op = f"{label}.pull", f"{label}.push"
        self._puller = Puller(session, placement, self._pull_op)
        session.rpc.register(self._pull_op, self._serve_pull)
        session.rpc.register(self._push_op, self._serve_push)

    def add(self, name: str, offsets: Array, shards: Mapping[int, Array], info: ColumnInfo) -> None:
        """Make a read-only tensor known by ``name``.

        Args:
            name: Of the tensor.
            offsets: (P + 1,) int64; part p owns the rows ``offsets[p]:offsets[p + 1]``.
            shards: Part to its rows (n, *row), for every part of the own server.
            info: Dtype and row shape.

        Raises:
            ConfigError: the name is taken, or the rows do not match ``offsets`` or ``info``.
        """
        bounds = self.placement.server_offsets(offsets)
        self.add_column(
            Column(name=name, info=info, bounds=bounds, shards=shards_of(offsets, shards), writable=False)
        )

    def add_column(self, column: Column) -> None:
        """Make ``column`` known by its name.

        Raises:
            ConfigError: the name is taken.
        """
        if column.name in self._columns:
            raise ConfigError(f"there is a tensor {column.name!r} already; choose another name")
        self._columns[column.name] = column

    def remove(self, name: str) -> None:
        """Forget a tensor. Nobody may ask for its rows any more: a barrier belongs before it."""
        self._columns.pop(self.column(name).name)
        self._puller.forget(name)

    def has(self, name: str) -> bool:
        """Whether a tensor of that name is known."""
        return name in self._columns

    def names(self) -> tuple[str, ...]:
        """Return the names of all tensors, in the order they were added."""
        return tuple(self._columns)

    def next_number(self) -> int:
        """Return 0, 1, 2, ...; the same on all ranks when only collective operations ask."""
        return next(self._numbers)

    def close(self) -> None:
        """Answer nobody any more: a barrier belongs before it."""
        self.session.rpc.unregister(self._pull_op)
        self.session.rpc.unregister(self._push_op)

    def column(self, name: str) -> Column:
        """Return what is known of a tensor.

        Raises:
            ConfigError: there is none of that name; the message lists those that exist.
        """
        if name not in self._columns:
            raise ConfigError(
                f"there is no tensor {name!r} (known: {', '.join(map(repr, self._columns)) or 'none'})"
            )
        return self._columns[name]

    def shards(self, name: str) -> list[tuple[int, Array]]:
        """Return (id of its first row, rows) of each piece in this server's memory, in order; no copy."""
        return [(shard.first, shard.rows) for shard in self.column(name).shards]

    def pull(
        self,
        name: str,
        ids: Array,
        *,
        out: Tensor | None = None,
        distinct: bool = False,
        phase: str = "features",
        layer: int = 0,
    ) -> Tensor:
        """Fetch rows by global id; as :meth:`submit_pull`, and waits."""
        return self.submit_pull(name, ids, out=out, distinct=distinct, phase=phase, layer=layer).result()

    def submit_pull(
        self,
        name: str,
        ids: Array,
        *,
        out: Tensor | None = None,
        distinct: bool = False,
        phase: str = "features",
        layer: int = 0,
    ) -> PendingPull:
        """Ask the owners for rows and return at once, before the rows of the own server are read.

        Sends 8 bytes per distinct remote id that is not cached and receives one row for each; rows of the
        own server and of its cache cost nothing. Not collective.

        Args:
            name: Of the tensor.
            ids: (K,) int64, any order, repeats allowed.
            out: (K, *row) contiguous CPU tensor of the column's dtype to fill, or None for a new one.
            distinct: The caller knows that no id is repeated, as in a mini-batch; looking for repeats is
                then spared.
            phase: Under which the bytes are counted.
            layer: Likewise.

        Raises:
            ConfigError: there is no such tensor, or ``out`` does not fit.
            IndexError: an id is out of range; the message has the first one and its position.
        """
        return self._puller.submit(
            self.column(name), ids, out=out, distinct=distinct, phase=phase, layer=layer
        )

    def set_cache(self, name: str, cache: RowCache | None) -> None:
        """Look into ``cache`` before other servers are asked for rows of ``name``; None: into none.

        Not collective, and results are the same with any cache; ``g.cache_rows`` fills one on every server.

        Raises:
            ConfigError: there is no such tensor, or it can be written to.
        """
        self._puller.set_cache(self.column(name), cache)

    def cache_counts(self, name: str | None = None) -> CacheCounts:
        """Return how many rows this rank asked for: of one tensor, or of all those with a cache."""
        return self._puller.counts(None if name is None else self.column(name).name)

    @property
    def has_cache(self) -> bool:
        """Whether rows of any tensor are cached."""
        return self._puller.has_cache()

    def push(self, name: str, ids: Array, rows: Array, *, phase: str = "push", layer: int = 0) -> None:
        """Overwrite rows wherever they are, and wait until their owners have them. Not collective.

        Sends 8 bytes and one row per distinct remote id; of repeated ids the last row stays.

        Args:
            name: Of the tensor.
            ids: (K,) int64.
            rows: (K, *row) of the column's dtype as NumPy has it.
            phase: Under which the bytes are counted.
            layer: Likewise.

        Raises:
            ConfigError: there is no such tensor, it is read-only, or the rows do not fit.
            IndexError: an id is out of range.
        """
        column = self._writable(name, ids, rows)
        plan = plan_remote(ids, column.bounds, self.placement.topology.server)
        last_places = plan.positions[plan.starts[1:] - 1]
        submit = partial(self.session.rpc.submit, op=self._push_op, name=name, phase=phase, layer=layer)
        pending = [
            submit(
                call.rank,
                arrays=[plan.ids[call.first : call.last], rows[last_places[call.first : call.last]]],
            )
            for call in self._requests(plan, column)
        ]
        column.write(ids, rows)
        for call in pending:
            call.result()

    def write_local(self, name: str, ids: Array, rows: Array) -> None:
        """Overwrite rows of the own server; its other ranks see them at once.

        Raises:
            ConfigError: as :meth:`push`.
            IndexError: an id is not of the own server.
        """
        column = self._writable(name, ids, rows)
        self._check_own(column, ids)
        column.write(ids, rows)

    def _writable(self, name: str, ids: Array, rows: Array) -> Column:
        column = self.column(name)
        column.check_writable()
        column.check(ids)
        dtype, shape = numpy_dtype(column.info.dtype), (len(ids), *column.info.row_shape)
        if rows.dtype != dtype or rows.shape != shape:
            raise ConfigError(
                f"{name!r} takes rows of {dtype} and shape {shape}, not {rows.dtype} of shape {rows.shape}"
            )
        return column

    def _requests(self, plan: RemotePlan, column: Column) -> list[Request]:
        return requests_of(plan, self.placement, max(1, MAX_MESSAGE_BYTES // max(column.row_bytes, 8)))

    def _serve_pull(self, name: str, arrays: Sequence[Array]) -> Sequence[Array]:
        (ids,) = arrays
        column = self.column(name)
        self._check_own(column, ids)
        return self._puller.answer(column, ids)

    def _serve_push(self, name: str, arrays: Sequence[Array]) -> Sequence[Array]:
        ids, rows = arrays
        self.write_local(name, ids, rows)
        return []

    def _check_own(self, column: Column, ids: Array) -> None:
        server = self.placement.topology.server
        first, last = column.bounds[server], column.bounds[server + 1]
        if ids.dtype != np.int64 or ids.ndim != 1:
            raise ConfigError(f"ids must be (K,) int64, not {ids.dtype} of shape {ids.shape}")
        if len(ids) and (ids.min() < first or ids.max() >= last):
            raise IndexError(
                f"server {server} owns the rows {first} to {last - 1} of {column.name!r}, and was given "
                f"ids from {ids.min()} to {ids.max()}"
            )
