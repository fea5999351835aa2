"""The writing half of the KVStore: rows overwritten anywhere, or added by the one rank that owns them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias, final

import numpy as np
from torch import Tensor

from dglx_dist.cluster.session import Session
from dglx_dist.errors import ConfigError
from dglx_dist.graph.add_rows import add_rows, check_summable, sum_repeated
from dglx_dist.graph.column import Column
from dglx_dist.graph.dtypes import tensor_view
from dglx_dist.graph.gather import first_outside, take_rows
from dglx_dist.graph.ids import to_tensor
from dglx_dist.graph.owners import RowOwners
from dglx_dist.graph.placement import Placement
from dglx_dist.graph.remote_plan import plan_remote
from dglx_dist.graph.rows import Request, requests_of, rows_per_message
from dglx_dist.graph.unwaited import Send, Unwaited
from dglx_dist.records import Array
from dglx_dist.storage.columns import numpy_dtype

PushHandler: TypeAlias = Callable[[Tensor, Tensor, Tensor], None]
"""(rows of the own server (n, *row), (k,) int64 rows of them, values (k, *row)): change the rows in place."""


@dataclass(frozen=True, kw_only=True)
class PushOrder:
    """How to push, beside what."""

    accumulate: bool = False
    wait: bool = True
    phase: str = "push"
    layer: int = 0


@dataclass(frozen=True)
class _PerTensor:
    lock: threading.Lock
    """Held while the own rows are added to."""
    owners: RowOwners


@final
class Pusher:
    """Writes rows of writable columns, on this rank and for others.

    Args:
        session: The run; its ``rpc`` serves three operations named by ``label``.
        placement: Which rank answers for a server.
        column: Name to what is known of the tensor; raises ConfigError for an unknown one.
        label: Tells the stores of one run apart.
    """

    def __init__(
        self, session: Session, placement: Placement, column: Callable[[str], Column], label: str
    ) -> None:
        self._session, self._placement, self._column = session, placement, column
        self._write, self._add, self._handle = (f"{label}.{op}" for op in ("push", "add", "handle"))
        self._handlers: dict[str, PushHandler] = {}
        self._kept: dict[str, _PerTensor] = {}
        self._unwaited = Unwaited(session)
        session.rpc.register(self._write, self._serve_write)
        session.rpc.register(self._add, self._serve_add)
        session.rpc.register(self._handle, self._serve_handle)

    def push(self, name: str, ids: Array, rows: Array, order: PushOrder) -> None:
        """Write rows; see :meth:`KVStore.push`."""
        column = self.checked(name, ids, rows)
        rows = np.ascontiguousarray(rows)
        if name in self._handlers or order.accumulate:
            sends = self._to_owners(column, ids, rows, order)
        else:
            sends = self._to_servers(column, ids, rows, order)
        self._deliver(sends, order)

    def fence(self, timeout_s: float | None = None) -> None:
        """Wait for the pushes that were not waited for; see :meth:`KVStore.fence`."""
        self._unwaited.fence(timeout_s)

    def set_handler(self, name: str, handler: PushHandler | None) -> None:
        """Let ``handler`` do what is pushed to a tensor from now on; None: write or add again."""
        self._column(name).check_writable()
        if handler is None:
            self._handlers.pop(name, None)
        else:
            self._handlers[name] = handler

    def forget(self, name: str) -> None:
        """Forget what belongs to a tensor that is removed."""
        self._handlers.pop(name, None)
        self._kept.pop(name, None)

    def close(self) -> None:
        """Answer nobody any more; a fence and a barrier belong before it."""
        self._unwaited.close()
        for op in (self._write, self._add, self._handle):
            self._session.rpc.unregister(op)

    def write_local(self, name: str, ids: Array, rows: Array) -> None:
        """Overwrite rows of the own server; see :meth:`KVStore.write_local`."""
        column = self.checked(name, ids, rows)
        server = self._placement.topology.server
        self._check_range(column, ids, int(column.bounds[server]), int(column.bounds[server + 1]))
        column.write(ids, np.ascontiguousarray(rows))

    def checked(self, name: str, ids: Array, rows: Array) -> Column:
        """Return the column when ``rows`` may be pushed to it.

        Raises:
            ConfigError: there is no such tensor, it is read-only, or ids or rows do not fit.
            IndexError: an id is out of range.
        """
        column = self._column(name)
        column.check_writable()
        if ids.dtype != np.int64 or ids.ndim != 1:
            raise ConfigError(f"ids must be (K,) int64, not {ids.dtype} of shape {ids.shape}")
        column.check(ids)
        dtype, shape = numpy_dtype(column.info.dtype), (len(ids), *column.info.row_shape)
        if rows.dtype != dtype or rows.shape != shape:
            raise ConfigError(
                f"{name!r} takes rows of {dtype} and shape {shape}, not {rows.dtype} of shape {rows.shape}"
            )
        return column

    def _to_servers(self, column: Column, ids: Array, rows: Array, order: PushOrder) -> list[Send]:
        """Write the own server's rows, and return what the others are to write: of repeated ids the last."""
        plan = plan_remote(ids, column.bounds, self._placement.topology.server)
        last_places = plan.positions[plan.starts[1:] - 1]
        sends = [
            self._send(
                call,
                self._write,
                column,
                plan.ids,
                take_rows(rows, last_places[call.first : call.last]),
                order,
            )
            for call in requests_of(plan, self._placement, rows_per_message(column.row_bytes))
        ]
        column.write(ids, rows)
        return sends

    def _to_owners(self, column: Column, ids: Array, rows: Array, order: PushOrder) -> list[Send]:
        """Return what each owner rank is to do, this rank too."""
        starts = self._per_tensor(column).owners.starts
        if order.accumulate:
            check_summable(column.name, column.info)
            # One rank more, which owns nothing and is taken for our own: so every row is to be sent.
            plan = plan_remote(ids, np.append(starts, starts[-1]), len(starts) - 1)
            values, sorted_ids, cuts = sum_repeated(rows, plan, column.info), plan.ids, plan.server_starts
        else:
            # Owners have ascending ranges, so this groups by owner too. Requests may overtake each other, so
            # all rows of one id go in one.
            by_id = np.argsort(ids, kind="stable")
            values, sorted_ids = take_rows(rows, by_id), ids[by_id]
            cuts = np.searchsorted(sorted_ids, starts)
        op = self._handle if column.name in self._handlers else self._add
        step = rows_per_message(column.row_bytes)
        return [
            self._send(call, op, column, sorted_ids, values[call.first : call.last], order)
            for rank, (first, last) in enumerate(pairwise(cuts[: len(starts)].tolist()))
            for call in _runs(rank, sorted_ids, first, last, step, has_repeats=not order.accumulate)
        ]

    def _send(
        self, call: Request, op: str, column: Column, ids: Array, rows: Array, order: PushOrder
    ) -> Send:
        arrays = [ids[call.first : call.last], rows]
        return Send(
            rank=call.rank, op=op, name=column.name, arrays=arrays, phase=order.phase, layer=order.layer
        )

    def _deliver(self, sends: list[Send], order: PushOrder) -> None:
        rpc, own = self._session.rpc, self._placement.topology.rank
        away = [send for send in sends if send.rank != own]
        pending = []
        if order.wait:
            pending = [
                rpc.submit(one.rank, one.op, one.name, one.arrays, phase=one.phase, layer=one.layer)
                for one in away
            ]
        else:
            self._unwaited.put(away)
        for one in sends:
            if one.rank == own:
                rpc.call(own, one.op, one.name, one.arrays, phase=one.phase)
        for call in pending:
            call.result()

    def _serve_write(self, name: str, arrays: Sequence[Array]) -> Sequence[Array]:
        ids, rows = arrays
        self.write_local(name, ids, rows)
        return []

    def _serve_add(self, name: str, arrays: Sequence[Array]) -> Sequence[Array]:
        ids, rows = arrays
        column = self._own(name, ids, rows)
        check_summable(name, column.info)
        with self._per_tensor(column).lock:
            for shard in column.shards:
                add_rows(shard.rows, shard.first, ids, rows, column.info)
        return []

    def _serve_handle(self, name: str, arrays: Sequence[Array]) -> Sequence[Array]:
        ids, rows = arrays
        column = self._own(name, ids, rows)
        if name not in self._handlers:
            raise ConfigError(
                f"no push handler of {name!r} is registered here; register it on every rank before pushing"
            )
        (shard,) = column.shards  # of a writable tensor there is one
        with self._per_tensor(column).lock:
            self._handlers[name](
                tensor_view(shard.rows, column.info),
                to_tensor(ids - shard.first),
                # The arrays of a message cannot be written, which a handler need not know.
                tensor_view(rows.copy(), column.info),
            )
        return []

    def _own(self, name: str, ids: Array, rows: Array) -> Column:
        """Return the column when this rank owns all of ``ids``."""
        column = self.checked(name, ids, rows)
        owned = self._per_tensor(column).owners.range_of(self._placement.topology.rank)
        self._check_range(column, ids, *owned)
        return column

    def _check_range(self, column: Column, ids: Array, first: int, last: int) -> None:
        bad = first_outside(ids - first, last - first)
        if bad >= 0:
            topology = self._placement.topology
            raise IndexError(
                f"server {topology.server}, rank {topology.rank} has the rows {first} to {last - 1} of "
                f"{column.name!r}, and was given id {ids[bad]}"
            )

    def lock_of(self, column: Column) -> threading.Lock:
        """Return what is held here while own rows of ``column`` are changed in place."""
        return self._per_tensor(column).lock

    def _per_tensor(self, column: Column) -> _PerTensor:
        found = self._kept.get(column.name)
        if found is None:
            owners = RowOwners(column.bounds, self._placement.topology)
            # One step, so that of two threads both get the same lock.
            found = self._kept.setdefault(column.name, _PerTensor(threading.Lock(), owners))
        return found


def _runs(rank: int, ids: Array, first: int, last: int, step: int, *, has_repeats: bool) -> Iterator[Request]:
    """Cut ``ids[first:last]`` after about ``step``; ids with repeats ascend, and equal ones stay together."""
    while first < last:
        end = min(first + step, last)
        if has_repeats:
            end = first + int(np.searchsorted(ids[first:last], ids[end - 1], side="right"))
        yield Request(rank=rank, first=first, last=end)
        first = end
