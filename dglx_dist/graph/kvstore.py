"""``KVStore``: one-sided pull and push of the rows of distributed tensors (DistDGL's KVStore)."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, pairwise
from typing import TypeAlias, final

import numpy as np
import torch
from torch import Tensor

from dglx_dist.comm.collectives import barrier, check_equal, run_on_all_ranks
from dglx_dist.comm.rpc import Pending, Rpc
from dglx_dist.comm.session import Session
from dglx_dist.data.storage.columns import numpy_dtype
from dglx_dist.errors import ConfigError, PeerError
from dglx_dist.graph.column import (
    CacheCounts,
    Column,
    PendingPull,
    Puller,
    PullHandler,
    RowCache,
    shards_of,
)
from dglx_dist.graph.partition_book import Placement, Request, RowOwners, requests_of, rows_per_message
from dglx_dist.graph.row_kernels import (
    add_rows,
    check_summable,
    first_outside,
    plan_remote,
    sum_repeated,
    take_rows,
    tensor_view,
)
from dglx_dist.records import Array, ColumnInfo

MAX_BYTES = 64 << 20
"""Of all unanswered calls; beyond it :meth:`AsyncPushQueue.put` waits."""

MAX_IN_FLIGHT = 8
"""Calls sent before the first of them is answered."""


@dataclass(frozen=True, kw_only=True)
class Send:
    """One request, with arrays that nothing else uses."""

    rank: int
    op: str
    name: str
    arrays: Sequence[Array]
    phase: str
    layer: int

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def submit(self, rpc: Rpc) -> Pending:
        return rpc.submit(self.rank, self.op, self.name, self.arrays, phase=self.phase, layer=self.layer)


@final
class AsyncPushQueue:
    """Requests that a thread sends in order, and their errors. :meth:`put` and :meth:`fence`: any thread."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._queue: deque[Send] = deque()
        self._bytes = 0
        self._num_put = self._num_answered = 0
        self._unanswered: Counter[int] = Counter()
        self._errors: list[Exception] = []
        self._changed = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None

    def put(self, sends: Sequence[Send]) -> None:
        """Queue requests; waits only while more than ``MAX_BYTES`` are unanswered.

        Raises:
            PeerError: no answer came within the session's time-out; the message names the ranks.
        """
        # Under one lock, or the thread may take the first and wait for its answer before the rest is sent.
        with self._changed:
            for send in sends:
                self._wait_until(lambda: self._bytes < MAX_BYTES, self._session.timeout_s, "a push")
                self._queue.append(send)
                self._bytes += send.num_bytes
                self._num_put += 1
                self._unanswered[send.rank] += 1
                if self._thread is None:
                    self._thread = threading.Thread(target=self._work, name="dglx-push", daemon=True)
                    self._thread.start()
                self._changed.notify_all()

    def fence(self, timeout_s: float | None = None) -> None:
        """Wait until every earlier request is answered, and raise their first error, once.

        Raises:
            PeerError: ``timeout_s`` (None: the session's) passed; the message names the silent ranks.
            DglxError: a request failed; a note has the number of further failures.
        """
        limit_s = self._session.timeout_s if timeout_s is None else timeout_s
        with self._changed:
            wanted = self._num_put
            # Answers are taken in the order of the requests, so a count identifies the answered ones.
            self._wait_until(lambda: self._num_answered >= wanted, limit_s, "fence()")
            errors, self._errors = self._errors, []
        if errors:
            if len(errors) > 1:
                errors[0].add_note(f"{len(errors) - 1} more pushes with wait=False failed too")
            raise errors[0]

    def close(self) -> None:
        """End the thread once all requests are sent; :meth:`fence` belongs before it."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def _wait_until(self, done: Callable[[], bool], limit_s: float, what: str) -> None:
        if not self._changed.wait_for(done, limit_s):
            missing = ", ".join(
                f"rank {rank} on {self._session.hosts[rank]} ({count})"
                for rank, count in sorted(self._unanswered.items())
            )
            raise PeerError(
                f"{what} waited {limit_s:g} s for pushes that were not answered by {missing}; look at the "
                "output there, or raise timeout_s (DGLX_TIMEOUT)"
            )

    def _work(self) -> None:
        # A call must be answered on the thread that made it, so this one does both.
        in_flight: deque[tuple[Send, Pending | None]] = deque()
        while (send := self._next(wait=not in_flight)) is not None or in_flight:
            if send is not None:
                in_flight.append((send, self._submit(send)))
            if send is None or len(in_flight) >= MAX_IN_FLIGHT:
                self._finish(*in_flight.popleft())

    def _next(self, *, wait: bool) -> Send | None:
        with self._changed:
            while wait and not self._queue and not self._closing:
                self._changed.wait()
            return self._queue.popleft() if self._queue else None

    def _submit(self, send: Send) -> Pending | None:
        try:
            return send.submit(self._session.rpc)
        except Exception as error:  # noqa: BLE001 - raised again at the fence
            self._note(error)
            return None

    def _finish(self, send: Send, pending: Pending | None) -> None:
        try:
            if pending is not None:
                pending.result()
        except Exception as error:  # noqa: BLE001 - raised again at the fence
            self._note(error)
        with self._changed:
            self._bytes -= send.num_bytes
            self._num_answered += 1
            self._unanswered[send.rank] -= 1
            self._unanswered += Counter()  # drops the zeros
            self._changed.notify_all()

    def _note(self, error: Exception) -> None:
        with self._changed:
            self._errors.append(error)


PushHandler: TypeAlias = Callable[[Tensor, Tensor, Tensor], None]
"""(rows of the local server (n, *row), (k,) int64 indices, values (k, *row)): changes rows in place."""


@dataclass(frozen=True, kw_only=True)
class PushOrder:
    """Options of a push."""

    accumulate: bool = False
    wait: bool = True
    phase: str = "push"
    layer: int = 0

    def make_send(self, call: Request, op: str, column: Column, ids: Array, rows: Array) -> Send:
        arrays = [ids[call.first : call.last], rows]
        return Send(
            rank=call.rank, op=op, name=column.name, arrays=arrays, phase=self.phase, layer=self.layer
        )


@dataclass(frozen=True)
class _PerTensor:
    lock: threading.Lock
    """Held while this rank's rows are updated."""
    owners: RowOwners


@final
class Pusher:
    """Writes rows of writable columns, on this rank and for others.

    Args:
        session: The run; its ``rpc`` serves three operations named by ``label``.
        placement: The rank that serves each server.
        column: Name to column; raises ConfigError for an unknown one.
        label: Distinguishes the stores of one run.
    """

    def __init__(
        self, session: Session, placement: Placement, column: Callable[[str], Column], label: str
    ) -> None:
        self._session, self._placement, self._column = session, placement, column
        self._write, self._add, self._handle = (f"{label}.{op}" for op in ("push", "add", "handle"))
        self._handlers: dict[str, PushHandler] = {}
        self._tensors: dict[str, _PerTensor] = {}
        self._async_pushes = AsyncPushQueue(session)
        session.rpc.register(self._write, self._serve_write)
        session.rpc.register(self._add, self._serve_add)
        session.rpc.register(self._handle, self._serve_handle)

    def push(self, name: str, ids: Array, rows: Array, order: PushOrder) -> None:
        column = self.checked(name, ids, rows)
        rows = np.ascontiguousarray(rows)
        if name in self._handlers or order.accumulate:
            sends = self._to_owners(column, ids, rows, order)
        else:
            sends = self._to_servers(column, ids, rows, order)
        self._deliver(sends, order)

    def fence(self, timeout_s: float | None = None) -> None:
        self._async_pushes.fence(timeout_s)

    def set_handler(self, name: str, handler: PushHandler | None) -> None:
        self._column(name).check_writable()
        if handler is None:
            self._handlers.pop(name, None)
        else:
            self._handlers[name] = handler

    def forget(self, name: str) -> None:
        self._handlers.pop(name, None)
        self._tensors.pop(name, None)

    def close(self) -> None:
        self._async_pushes.close()
        for op in (self._write, self._add, self._handle):
            self._session.rpc.unregister(op)

    def write_local(self, name: str, ids: Array, rows: Array) -> None:
        column = self.checked(name, ids, rows)
        server = self._placement.topology.server
        self._check_range(column, ids, int(column.bounds[server]), int(column.bounds[server + 1]))
        column.write(ids, np.ascontiguousarray(rows))

    def checked(self, name: str, ids: Array, rows: Array) -> Column:
        """Return the column if ``rows`` may be pushed to it; ConfigError or IndexError otherwise."""
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
        """Write the local server's rows; return the requests to the others, with the last of repeated ids."""
        plan = plan_remote(ids, column.bounds, self._placement.topology.server)
        last_places = plan.positions[plan.starts[1:] - 1]
        sends = [
            order.make_send(
                call, self._write, column, plan.ids, take_rows(rows, last_places[call.first : call.last])
            )
            for call in requests_of(plan, self._placement, rows_per_message(column.row_bytes))
        ]
        column.write(ids, rows)
        return sends

    def _to_owners(self, column: Column, ids: Array, rows: Array, order: PushOrder) -> list[Send]:
        """Return the requests to the owner ranks, this rank included."""
        starts = self._per_tensor(column).owners.starts
        if order.accumulate:
            check_summable(column.name, column.info)
            # Ranks in the place of servers, and one more as the local one that owns nothing: all are remote.
            plan = plan_remote(ids, np.append(starts, starts[-1]), len(starts) - 1)
            values, sorted_ids, cuts = sum_repeated(rows, plan, column.info), plan.ids, plan.server_starts
        else:
            # Owners have ascending ranges, so this groups by owner too. Requests may overtake each other, so
            # one request has all rows of an id.
            by_id = np.argsort(ids, kind="stable")
            values, sorted_ids = take_rows(rows, by_id), ids[by_id]
            cuts = np.searchsorted(sorted_ids, starts)
        op = self._handle if column.name in self._handlers else self._add
        step = rows_per_message(column.row_bytes)
        return [
            order.make_send(call, op, column, sorted_ids, values[call.first : call.last])
            for rank, (first, last) in enumerate(pairwise(cuts[: len(starts)].tolist()))
            for call in _runs(rank, sorted_ids, first, last, step, has_repeats=not order.accumulate)
        ]

    def _deliver(self, sends: list[Send], order: PushOrder) -> None:
        rpc, own = self._session.rpc, self._placement.topology.rank
        remote = [send for send in sends if send.rank != own]
        pending = [send.submit(rpc) for send in remote] if order.wait else []
        if not order.wait:
            self._async_pushes.put(remote)
        for send in sends:
            if send.rank == own:
                send.submit(rpc).result()
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
                torch.from_numpy(ids - shard.first),
                # A copy, since the arrays of a message are read-only and a handler may write.
                tensor_view(rows.copy(), column.info),
            )
        return []

    def _own(self, name: str, ids: Array, rows: Array) -> Column:
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
        return self._per_tensor(column).lock

    def _per_tensor(self, column: Column) -> _PerTensor:
        found = self._tensors.get(column.name)
        if found is None:
            owners = RowOwners(column.bounds, self._placement.topology)
            # setdefault is atomic, so two threads get the same lock.
            found = self._tensors.setdefault(column.name, _PerTensor(threading.Lock(), owners))
        return found


def _runs(rank: int, ids: Array, first: int, last: int, step: int, *, has_repeats: bool) -> Iterator[Request]:
    """Cut ``ids[first:last]`` into about ``step`` ids each; repeated ids (ascending) stay together."""
    while first < last:
        end = min(first + step, last)
        if has_repeats:
            end = first + int(np.searchsorted(ids[first:last], ids[end - 1], side="right"))
        yield Request(rank=rank, first=first, last=end)
        first = end


@final
class KVStore:
    """Named tensors cut by rows over the servers.

    Rows of the local server are read from memory that its ranks share, all others by one-sided calls to one
    rank of the server that owns them. A rank may pull or push alone, from any thread, at any time; only
    registering handlers is collective. A name must exist on all ranks before one uses it.

    Args:
        session: The run; its ``rpc`` must not serve another store of the same ``label``.
        placement: The parts of each server.
        label: Distinguishes the stores of one run; the same on all ranks.
    """

    def __init__(self, session: Session, placement: Placement, label: str = "kv") -> None:
        self.session = session
        self.placement = placement
        self.label = label
        self._columns: dict[str, Column] = {}
        self._numbers = count()
        self._pull_op = f"{label}.pull"
        self._puller = Puller(session, placement, self._pull_op)
        session.rpc.register(self._pull_op, self._serve_pull)
        self._pusher = Pusher(session, placement, self.column, label)
        self._bits_op, self._count_op = f"{label}.nonzero", f"{label}.count_nonzero"
        session.rpc.register(self._bits_op, lambda name, _: [self._nonzero_bits(name)])
        session.rpc.register(self._count_op, lambda name, _: [self._nonzero_count(name)])
        session.before_close.append(self.fence)

    def add(self, name: str, offsets: Array, shards: Mapping[int, Array], info: ColumnInfo) -> None:
        """Add a read-only tensor.

        Args:
            name: Of the tensor.
            offsets: (P + 1,) int64; part p owns the rows ``offsets[p]:offsets[p + 1]``.
            shards: Part to its rows (n, *row), for every part of the local server.
            info: Dtype and row shape.

        Raises:
            ConfigError: the name is taken, or the rows do not match ``offsets`` or ``info``.
        """
        bounds = self.placement.server_offsets(offsets)
        self.add_column(
            Column(name=name, info=info, bounds=bounds, shards=shards_of(offsets, shards), writable=False)
        )

    def add_column(self, column: Column) -> None:
        """Add ``column``; ConfigError when its name is taken."""
        if column.name in self._columns:
            raise ConfigError(f"there is a tensor {column.name!r} already; choose another name")
        self._columns[column.name] = column

    def remove(self, name: str) -> None:
        """Forget a tensor; a barrier before it must ensure that no rank uses its rows any more."""
        self._columns.pop(self.column(name).name)
        self._puller.forget(name)
        self._pusher.forget(name)

    def has(self, name: str) -> bool:
        return name in self._columns

    def names(self) -> tuple[str, ...]:
        return tuple(self._columns)

    def next_number(self) -> int:
        """Return 0, 1, 2, ...; the same on all ranks when only collective operations call it."""
        return next(self._numbers)

    def close(self) -> None:
        """Stop serving; a :meth:`fence` and a barrier belong before it."""
        if self.fence in self.session.before_close:
            self.session.before_close.remove(self.fence)
        for op in (self._pull_op, self._bits_op, self._count_op):
            self.session.rpc.unregister(op)
        self._pusher.close()

    def column(self, name: str) -> Column:
        """Return the column called ``name``; ConfigError, which lists those that exist, if there is none."""
        if name not in self._columns:
            raise ConfigError(
                f"there is no tensor {name!r} (known: {', '.join(map(repr, self._columns)) or 'none'})"
            )
        return self._columns[name]

    def shards(self, name: str) -> list[tuple[int, Array]]:
        """Return (id of its first row, rows) of each shard in this server's memory, in order; no copy."""
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
        """Fetch rows by global id: :meth:`submit_pull`, and wait."""
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
        """Ask the owners for rows and return at once, before the rows of the local server are read.

        Sends 8 bytes per distinct remote id that is not cached and receives one row for each; rows of the
        local server and of its cache cost nothing. Not collective.

        Args:
            name: Of the tensor.
            ids: (K,) int64, any order, repeats allowed.
            out: (K, *row) contiguous CPU tensor of the column's dtype to fill, or None for a new one.
            distinct: The caller guarantees that no id is repeated, as in a mini-batch, which saves a search.
            phase, layer: For the ledger.

        Raises:
            ConfigError: there is no such tensor, or ``out`` does not fit.
            IndexError: an id is out of range; the message has the first one and its position.
        """
        return self._puller.submit(
            self.column(name), ids, out=out, distinct=distinct, phase=phase, layer=layer
        )

    def set_cache(self, name: str, cache: RowCache | None) -> None:
        """Read rows of ``name`` from ``cache`` before asking other servers; None: no cache. Not collective.

        Results are the same with any cache; ``g.cache_rows`` fills one on every server.

        Raises:
            ConfigError: there is no such tensor, or it can be written to.
        """
        self._puller.set_cache(self.column(name), cache)

    def cache_counts(self, name: str | None = None) -> CacheCounts:
        """Return the rows that this rank requested: of one tensor, or of all those with a cache."""
        return self._puller.counts(None if name is None else self.column(name).name)

    @property
    def has_cache(self) -> bool:
        return self._puller.has_cache()

    def push(
        self,
        name: str,
        ids: Array,
        rows: Array,
        *,
        accumulate: bool = False,
        wait: bool = True,
        phase: str = "push",
        layer: int = 0,
    ) -> None:
        """Overwrite rows of any server, or add to them. Not collective.

        * Overwriting: of repeated ids the last row stays. Sends 8 bytes and one row per distinct id of
          another server.
        * ``accumulate``: the rows of repeated ids are summed in the order given, and the one rank that owns
          each row (``RowOwners``) adds the sum. Sends 8 bytes and one row per distinct id that another rank
          owns; what goes to ranks of this server counts as inside. float16 and bfloat16 are summed, and
          added, in float32 and rounded after each of both.

        Pushes of one rank with ``wait=False`` may overtake each other; a :meth:`fence` orders them. The
        program must order an overwrite and any other push of the same row by another rank: the overwrite
        may be lost, or mixed.

        Args:
            name: Of the tensor.
            ids: (K,) int64, any order.
            rows: (K, *row) of the column's dtype in NumPy.
            accumulate: Add to the present rows.
            wait: Return when every later pull of any rank sees the rows. Else return at once, with ``rows``
                free to be used again; :meth:`fence` waits, and raises errors.
            phase, layer: For the ledger.

        Raises:
            ConfigError: there is no such tensor, it is read-only, or the rows do not fit or have no sum.
            IndexError: an id is out of range. After both errors nothing has been written.
            PeerError: an owner is dead or silent; with ``wait=False`` only when too much is unanswered.
            RemoteError: an owner cannot write, or a push handler raised.
        """
        order = PushOrder(accumulate=accumulate, wait=wait, phase=phase, layer=layer)
        self._pusher.push(name, ids, rows, order)

    def fence(self, timeout_s: float | None = None) -> None:
        """Wait until every later pull of any rank sees this rank's pushes with ``wait=False``.

        Not collective. Raises the first error of these pushes, once; so does closing the graph or session.

        Args:
            timeout_s: None: the session's.

        Raises:
            PeerError: the time passed (the message names the silent ranks), or an owner is dead.
            RemoteError: an owner cannot write.
        """
        self._pusher.fence(timeout_s)

    def write_local(self, name: str, ids: Array, rows: Array) -> None:
        """Overwrite rows of the local server; its other ranks see them at once.

        Raises:
            ConfigError: as :meth:`push`.
            IndexError: an id is not of the local server.
        """
        self._pusher.write_local(name, ids, rows)

    def owner_lock(self, name: str) -> threading.Lock:
        """Return the lock that this rank holds while it updates rows that it owns from their old values."""
        return self._pusher.lock_of(self.column(name))

    def register_push_handler(self, name: str, handler: PushHandler | None) -> None:
        """Let ``handler`` apply pushes to a tensor, in place of overwriting or adding. Collective.

        ``handler(rows, local_ids, values)`` runs on the rank that owns the pushed rows, never twice at a
        time for one tensor, on a thread of its own: ``rows`` (n, *row) is the memory of the local server's
        rows, ``local_ids`` (k,) int64 are indices into it, ``values`` (k, *row) are the pushed rows. It must
        not push or pull. The rows of a repeated id come together, in the order of the push (8 bytes and a
        row each); with ``accumulate=True`` once, as their sum. No code is sent: each rank registers its own.

        Args:
            name: Of a writable tensor.
            handler: None: overwrite and add again.

        Raises:
            ConfigError: on all ranks: there is no such tensor, it is read-only, or ranks disagree.
        """
        self._agree(name, handler, "push", partial(self._pusher.set_handler, name, handler))

    def register_pull_handler(self, name: str, handler: PullHandler | None) -> None:
        """Let ``handler`` compute the rows that are pulled from a tensor. Collective.

        ``handler(rows, local_ids)`` returns (k, *row) values in the tensor's dtype. It runs on the rank that
        is asked, for rows of the local server on the one that asks, from any thread; otherwise as
        :meth:`register_push_handler`.

        Raises:
            ConfigError: on all ranks: there is no such writable tensor, or ranks disagree.
        """

        def change() -> None:
            self._columns[name] = replace(self.column(name), on_read=handler)

        self._agree(name, handler, "pull", change)

    def nonzero(self, name: str) -> Array:
        """Return the (n,) int64 ids of the nonzero rows of a one-dimensional tensor, ascending.

        Receives one bit for each row of the other servers. Not collective.

        Raises:
            ConfigError: there is no such tensor, or it has more dimensions.
            PeerError: a server is dead or silent.
        """
        column = self.column(name)
        if column.info.row_shape:
            raise ConfigError(
                f"{name!r} has rows of shape {column.info.row_shape}; only one of one dimension is a mask"
            )
        found = []
        for packed, (first, last) in zip(
            self._ask_all(self._bits_op, name), pairwise(column.bounds.tolist()), strict=True
        ):
            found.append(np.flatnonzero(np.unpackbits(packed, count=last - first)) + first)
        return np.concatenate(found)

    def count_nonzero(self, name: str) -> int:
        """Return the number of nonzero values of a tensor; 8 bytes from each other server. Not collective.

        Raises:
            ConfigError: there is no such tensor.
            PeerError: a server is dead or silent.
        """
        self.column(name)
        return sum(int(counted[0]) for counted in self._ask_all(self._count_op, name))

    def _ask_all(self, op: str, name: str) -> Sequence[Array]:
        """Return the answers by server; the local one is asked last, so that the others work meanwhile."""
        topology, rpc = self.placement.topology, self.session.rpc
        servers = range(topology.num_servers)
        pending = {
            server: rpc.submit(self.placement.serving_rank(server), op, name, [], phase="masks")
            for server in sorted(servers, key=lambda server: server == topology.server)
        }
        return [pending[server].result()[0] for server in servers]

    def _nonzero_bits(self, name: str) -> Array:
        """Return one bit per row of the local server, the first row in the highest bit of the first byte."""
        return np.packbits(np.concatenate(list(self.column(name).is_nonzero())))

    def _nonzero_count(self, name: str) -> Array:
        return np.array([sum(int(np.count_nonzero(found)) for found in self.column(name).is_nonzero())])

    def _agree(self, name: str, handler: object, kind: str, change: Callable[[], None]) -> None:
        """Make a change on all ranks or on none, and return when all have made it."""

        def check() -> None:
            self.column(name).check_writable()
            self.fence()

        run_on_all_ranks(self.session, check, ConfigError)
        wanted = f"{kind} of {name!r}" + ("" if handler is not None else ": none")
        check_equal(self.session, "a handler", wanted, "every rank must register the same")
        change()
        barrier(self.session, f"registering a handler of {name!r}")

    def _serve_pull(self, name: str, arrays: Sequence[Array]) -> Sequence[Array]:
        (ids,) = arrays
        column = self.column(name)
        server = self.placement.topology.server
        first, last = column.bounds[server], column.bounds[server + 1]
        if ids.dtype != np.int64 or ids.ndim != 1:
            raise ConfigError(f"ids must be (K,) int64, not {ids.dtype} of shape {ids.shape}")
        if len(ids) and (ids.min() < first or ids.max() >= last):
            raise IndexError(
                f"server {server} owns the rows {first} to {last - 1} of {column.name!r}, and was given "
                f"ids from {ids.min()} to {ids.max()}"
            )
        out = np.empty((len(ids), *column.info.row_shape), dtype=numpy_dtype(column.info.dtype))
        column.read(ids, out)
        return [out]
