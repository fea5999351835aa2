"""``KVStore``: pulls and pushes rows in distributed tensors by one-sided calls (DistDGL's KVStore)."""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count, pairwise
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from dglx_dist.comm.collectives import barrier, check_equal, run_on_all_ranks
from dglx_dist.comm.rpc import Handler, Pending
from dglx_dist.comm.session import Session
from dglx_dist.comm.wire import payload_bytes
from dglx_dist.data.storage.columns import numpy_dtype
from dglx_dist.errors import ConfigError, DglxError, PeerError, RemoteError
from dglx_dist.graph.column import (
    CacheCounts,
    Column,
    LookAheadRows,
    PendingPull,
    PullHandler,
    PushHandler,
    RowCache,
    Shard,
    check_cacheable,
)
from dglx_dist.graph.partition_book import Placement, RowOwners
from dglx_dist.graph.row_kernels import (
    NO_SLOTS,
    RemotePlan,
    add_rows,
    allocate_rows,
    check_summable,
    find_first_outside,
    move_rows,
    plan_remote,
    spread_rows,
    sum_repeated,
    take_rows,
    torch_dtype,
    view_as_numpy,
    view_as_tensor,
)
from dglx_dist.records import Array, ColumnInfo

MAX_BYTES = 64 << 20
"""Maximum size in bytes of unanswered pushes. At the limit, the next push waits for the oldest."""


class _Message(NamedTuple):
    """Message that a push sends to one rank. ``arrays`` are the ids and their rows."""

    rank: int
    arrays: list[Array]


class _UnansweredPush(NamedTuple):
    """Message from a push with ``wait=False``, until the owner answers."""

    rank: int
    call: Pending
    num_bytes: int


def _cut_into_ranges(
    ids: Array, start: int, stop: int, step: int, *, has_repeats: bool
) -> Iterator[tuple[int, int]]:
    """Split the ascending ``ids[start:stop]`` into ranges with about ``step`` ids.

    Yield their (start, end).
    """
    while start < stop:
        end = min(start + step, stop)
        if has_repeats:
            # Keep all repetitions of the last id in one range.
            end = start + int(np.searchsorted(ids[start:stop], ids[end - 1], side="right"))
        yield start, end
        start = end


@final
class KVStore:
    """Named tensors that are cut by rows over the servers.

    The local server's rows are read from memory that its ranks share. Other rows are read by one-sided calls
    to one rank on the server that owns them. A rank may pull or push alone, from any thread, at any time.
    Only registering handlers is collective. A name must exist on all ranks before one uses it.

    Args:
        session: Session that the store serves. Its ``rpc`` must not serve another store with the same
            ``label``.
        label: The store's unique name in the session, the same on all ranks.
    """

    def __init__(self, session: Session, placement: Placement, label: str = "kv") -> None:
        self.session = session
        self.placement = placement
        self.label = label
        self._rank = placement.topology.rank
        self._server = placement.topology.server
        self._columns: dict[str, Column] = {}
        self._owners: dict[str, RowOwners] = {}
        self._counts_lock = threading.Lock()
        self._counter = count()
        self._unanswered: deque[_UnansweredPush] = deque()
        self._unanswered_bytes = 0
        self._push_errors: list[DglxError] = []
        self._push_lock = threading.Lock()
        self._handlers: dict[str, Handler] = {
            f"{label}.pull": self._serve_pull,
            f"{label}.push": self._serve_write,
            f"{label}.add": self._serve_add,
            f"{label}.handle": self._serve_handle,
            f"{label}.nonzero": self._serve_nonzero,
            f"{label}.count_nonzero": self._serve_count_nonzero,
        }
        self._pull_op = f"{label}.pull"
        for op, handler in self._handlers.items():
            session.rpc.register(op, handler)
        session.before_close.append(self.fence)

    def add(
        self,
        name: str,
        offsets: Array,
        shards: Mapping[int, Array],
        info: ColumnInfo,
        *,
        on_disk: bool = False,
    ) -> None:
        """Add a read-only tensor. Part p owns the rows ``offsets[p]:offsets[p + 1]``.

        Args:
            shards: Part number to (n, *row) rows, for every part on the local server.
            on_disk: Whether the rows are in files that do not fit in memory.

        Raises:
            ConfigError: the name is taken, or the rows do not match ``offsets`` or ``info``.
        """
        local_shards = []
        for part, rows in sorted(shards.items()):
            num_rows = int(offsets[part + 1] - offsets[part])
            if len(rows) != num_rows:
                raise ConfigError(f"part {part} has {len(rows)} rows for {num_rows} ids")
            local_shards.append(Shard(first=int(offsets[part]), rows=rows, on_disk=on_disk))

        bounds = self.placement.server_offsets(offsets)
        shard_tuple = tuple(local_shards)
        self.add_column(Column(name=name, info=info, bounds=bounds, shards=shard_tuple, writable=False))

    def add_column(self, column: Column) -> None:
        if column.name in self._columns:
            raise ConfigError(f"there is already a tensor {column.name!r}. Choose another name.")
        self._columns[column.name] = column
        self._owners[column.name] = RowOwners(column.bounds, self.placement.topology)

    def remove(self, name: str) -> None:
        """Forget a tensor. Call a barrier first, so that no rank uses its rows any more."""
        column = self.column(name)
        del self._columns[column.name]
        del self._owners[column.name]

    def has(self, name: str) -> bool:
        return name in self._columns

    def names(self) -> tuple[str, ...]:
        return tuple(self._columns)

    def next_number(self) -> int:
        """Return 0, 1, 2, ... The number is the same on all ranks if only collective operations call this."""
        return next(self._counter)

    def close(self) -> None:
        """Stop serving. Call :meth:`fence` and a barrier first."""
        if self.fence in self.session.before_close:
            self.session.before_close.remove(self.fence)
        for op in self._handlers:
            self.session.rpc.unregister(op)

    def column(self, name: str) -> Column:
        """Return the column called ``name``. If there is none, a ConfigError lists the existing columns."""
        column = self._columns.get(name)
        if column is None:
            known = ", ".join(map(repr, self._columns))
            raise ConfigError(f"there is no tensor {name!r} (known: {known})")
        return column

    def pull(self, name: str, ids: Array, **options: Any) -> Tensor:
        """Fetch rows by global id and wait for them. ``options`` are those of :meth:`submit_pull`."""
        return self.submit_pull(name, ids, **options)()

    def submit_pull(
        self,
        name: str,
        ids: Array,
        *,
        out: Tensor | Callable[[], Tensor] | None = None,
        distinct: bool = False,
        ahead: LookAheadRows | None = None,
        phase: str = "features",
        layer: int = 0,
    ) -> PendingPull:
        """Request rows from their owners and return at once, before local rows are read.

        Sends 8 bytes per distinct remote id that is not cached, and receives one row for each. Rows on the
        local server or in its cache cost nothing. Not collective.

        Args:
            ids: (K,) int64 ids in any order. Ids may be repeated.
            out: (K, *row) contiguous CPU tensor of the column's dtype to fill, or a function that creates it
                once the rows are waited for. The default is a new tensor.
            distinct: Whether the caller guarantees distinct ids, which saves a search.
            ahead: Look-ahead rows that the caller has reserved. ``ids`` must then be distinct and belong to
                the oldest announced batch. Wait for the pulls in the order in which they were submitted.
            phase, layer: Keys of the traffic ledger.

        Returns:
            Function that reads local rows, waits for remote rows, and returns all rows (K, *row) in the
            order of the ids. The submitting thread must call it. It raises PeerError if an owner is dead or
            silent, and RemoteError if an owner cannot answer.

        Raises:
            ConfigError: there is no such tensor, or ``out`` does not fit.
            IndexError: an id is out of range. The message shows the first one and its position.
        """
        column = self.column(name)
        assert distinct or ahead is None, "the inputs of a batch are distinct"
        # Ids of look-ahead rows were checked when they were announced.
        if ahead is None:
            column.check(ids)
        if isinstance(out, Tensor):
            _check_out(out, len(ids), column)

        cache = column.cache if ahead is None else ahead
        cached_slots = NO_SLOTS if cache is None else cache.table
        plan = plan_remote(ids, column.bounds, self._server, cached_slots, distinct=distinct)
        send = partial(self._submit_requests, column, phase, layer)
        copy_replies: Callable[[Array], None]
        if ahead is None:
            replies = send(plan)
            copy_replies = partial(_spread_replies, replies, plan)
        else:
            copy_replies = ahead.pull(plan, send)
        self._count_rows(column, len(ids), plan)

        def wait() -> Tensor:
            if out is None:
                result = allocate_rows(len(ids), column.info)
            else:
                result = out if isinstance(out, Tensor) else out()
            _check_out(result, len(ids), column)

            # Local rows and cached rows are copied while remote rows are in transit.
            rows = view_as_numpy(result)
            column.read(ids, rows)
            if cache is not None:
                move_rows(cache.rows, plan.hit_slots, rows, plan.hit_positions)
            copy_replies(rows)
            return result

        return wait

    def _submit_requests(
        self, column: Column, phase: str, layer: int, plan: RemotePlan
    ) -> list[tuple[Pending, int, int]]:
        """Request the remote ids of ``plan``. Return (call, first slot, end slot) per message."""
        submit = partial(self.session.rpc.submit, phase=phase, layer=layer)
        replies = []
        for rank, first, end in plan.requests(self.placement.serving_ranks, column.rows_per_message):
            call = submit(rank, self._pull_op, column.name, [plan.ids[first:end]])
            replies.append((call, first, end))
        return replies

    def _count_rows(self, column: Column, num_ids: int, plan: RemotePlan) -> None:
        num_hits = len(plan.hit_positions)
        num_misses = len(plan.positions)
        with self._counts_lock:
            column.counts[0] += num_ids - num_hits - num_misses
            column.counts[1] += num_hits
            column.counts[2] += num_misses

    def set_cache(
        self,
        name: str,
        cache: RowCache | None,
        ahead: LookAheadRows | None = None,
        *,
        is_frozen: bool = False,
    ) -> None:
        """Use a cache for the tensor's rows on other servers. Results stay the same. Not collective.

        Args:
            name: Name of the tensor.
            cache: Rows for all reads, or None for no cache.
            ahead: Rows for the loader that has reserved them. Its reads use these instead of ``cache``.
            is_frozen: Whether the caller guarantees that no rank writes the tensor.

        Raises:
            ConfigError: there is no such tensor, or it is writable and not frozen.
        """
        column = self.column(name)
        if not is_frozen:
            check_cacheable(column)
        self._columns[name] = replace(column, cache=cache, ahead=ahead)

    def cache_counts(self, name: str | None = None) -> CacheCounts:
        """Return how many rows this rank requested from one tensor, or from all tensors with a cache."""
        columns = self._list_cached() if name is None else [self.column(name)]
        total = np.zeros(3, np.int64)
        with self._counts_lock:
            for column in columns:
                total += column.counts
        local, hits, misses = total.tolist()
        return CacheCounts(local=local, hits=hits, misses=misses)

    @contextmanager
    def pause_counting(self) -> Iterator[None]:
        """Do not count rows for :meth:`cache_counts` that this rank requests inside the ``with`` block."""
        with self._counts_lock:
            saved_counts = {name: [*column.counts] for name, column in self._columns.items()}
        try:
            yield
        finally:
            with self._counts_lock:
                for name, counts in saved_counts.items():
                    self._columns[name].counts[:] = counts

    @property
    def has_cache(self) -> bool:
        return bool(self._list_cached())

    @property
    def looks_ahead(self) -> bool:
        return any(column.ahead is not None for column in self._columns.values())

    def _list_cached(self) -> list[Column]:
        columns = self._columns.values()
        return [column for column in columns if column.cache is not None or column.ahead is not None]

    def push(
        self, name: str, ids: Array, rows: Array, *, accumulate: bool = False, wait: bool = True
    ) -> None:
        """Overwrite rows on any server, or add to them. Not collective.

        * Overwriting: if an id is repeated, its last row wins. Sends 8 bytes and one row per distinct id on
          another server.
        * ``accumulate``: rows with the same id are summed in order, and the rank that owns the row
          (``RowOwners``) adds the sum. Sends 8 bytes and one row per distinct id that another rank owns.
          Traffic to ranks on this server counts as inside. float16 and bfloat16 are summed and added in
          float32, and rounded after each step.

        A rank's pushes with ``wait=False`` may overtake each other. A :meth:`fence` orders them. If one rank
        overwrites a row that another rank pushes to, the program must order the two. Otherwise the overwrite
        may be lost or mixed.

        Args:
            ids: (K,) int64 ids in any order.
            rows: (K, *row) in the column's NumPy dtype.
            wait: Whether to wait until every later pull on any rank sees the rows. Otherwise the push returns
                at once, and ``rows`` may be reused. :meth:`fence` then waits and raises errors.

        Raises:
            ConfigError: there is no such tensor, it is read-only, or the rows do not fit or have no sum.
                Nothing has been written then.
            IndexError: an id is out of range. Nothing has been written then.
            PeerError: an owner is dead or silent. With ``wait=False`` only if too many pushes are unanswered.
            RemoteError: an owner cannot write, or a push handler raised.
        """
        column = self._check_rows(name, ids, rows)
        rows = np.ascontiguousarray(rows)
        if column.on_push is None and not accumulate:
            op = "push"
            messages = self._split_by_server(column, ids, rows)
            column.write(ids, rows)
        else:
            op = "add" if column.on_push is None else "handle"
            messages = self._split_by_owner(column, ids, rows, accumulate)

        def submit(message: _Message) -> Pending:
            op_name = f"{self.label}.{op}"
            return self.session.rpc.submit(message.rank, op_name, name, message.arrays, phase="push")

        own_messages = [message for message in messages if message.rank == self._rank]
        remote_messages = [message for message in messages if message.rank != self._rank]
        calls = []
        for message in remote_messages:
            if wait:
                calls.append(submit(message))
            else:
                self._submit_unanswered(submit, message)

        # This rank updates its own rows while the other ranks work.
        for message in own_messages:
            submit(message).result()
        for call in calls:
            call.result()

    def fence(self, timeout_s: float | None = None) -> None:
        """Wait until every later pull on any rank sees this rank's pushes with ``wait=False``.

        Not collective. Closing a graph or a session does the same. If a push failed, the first error is
        raised once: PeerError if an owner is dead, or RemoteError if it cannot write. Also raises PeerError
        with the silent ranks after ``timeout_s``, by default the session's time limit.
        """
        if timeout_s is None:
            timeout_s = self.session.timeout_s
        deadline = time.monotonic() + timeout_s
        with self._push_lock:
            while self._unanswered:
                self._finish_oldest(deadline - time.monotonic())
            errors = self._push_errors
            self._push_errors = []

        if len(errors) > 1:
            errors[0].add_note(f"{len(errors) - 1} more pushes with wait=False failed too")
        if errors:
            raise errors[0]

    def write_local(self, name: str, ids: Array, rows: Array) -> None:
        """Overwrite rows on the local server. Raise IndexError if another server owns a row."""
        column = self._check_rows(name, ids, rows)
        self._check_range(column, ids, *column.bounds[self._server : self._server + 2])
        column.write(ids, np.ascontiguousarray(rows))

    def register_push_handler(self, name: str, handler: PushHandler | None) -> None:
        """Let ``handler`` apply pushes to a tensor instead of overwriting or adding. All ranks call this.

        The owner of the pushed rows calls ``handler(rows, local_ids, values)``. Any thread may call it, but
        never two at a time for one tensor. The handler must not push or pull. If a push repeats an id, all
        its rows arrive together, in the push's order (8 bytes and a row each). With ``accumulate=True`` their
        sum arrives instead. No code is sent, so each rank registers its own handler.

        Args:
            handler: Function that takes ``rows`` (n, *row), the memory with the local server's rows,
                ``local_ids`` (k,) int64, which index ``rows``, and ``values`` (k, *row), the pushed rows.
                None restores overwriting and adding.

        Raises:
            ConfigError: on all ranks, if there is no such writable tensor or if the ranks disagree.
        """
        self._change_on_all_ranks(name, handler, "push", lambda column: replace(column, on_push=handler))

    def register_pull_handler(self, name: str, handler: PullHandler | None) -> None:
        """Let ``handler`` compute the rows that are pulled from a tensor. Every rank must call this.

        ``handler(rows, local_ids)`` returns (k, *row) values in the tensor's dtype. For rows on the local
        server, the pulling rank calls the handler. For other rows, the serving rank calls it. Any thread may
        do so. Arguments and errors are as in :meth:`register_push_handler`.
        """
        self._change_on_all_ranks(name, handler, "pull", lambda column: replace(column, on_read=handler))

    def nonzero(self, name: str) -> Array:
        """Return the (n,) int64 ids with a nonzero value in a one-dimensional tensor, ascending.

        Receives one bit for each row on other servers. Not collective. Raises ConfigError if there is no such
        tensor or it has more dimensions.
        """
        column = self.column(name)
        if column.info.row_shape:
            raise ConfigError(f"{name!r} has rows of shape {column.info.row_shape}, but a mask has numbers")
        masks = self._query_servers("nonzero", name)
        ids = []
        for bits, (first, last) in zip(masks, pairwise(column.bounds.tolist()), strict=True):
            mask = np.unpackbits(bits, count=last - first)
            ids.append(first + np.flatnonzero(mask))
        return np.concatenate(ids)

    def count_nonzero(self, name: str) -> int:
        """Count the nonzero values. Each other server sends 8 bytes. Not collective."""
        self.column(name)
        return sum(int(answer[0]) for answer in self._query_servers("count_nonzero", name))

    def _check_rows(self, name: str, ids: Array, rows: Array) -> Column:
        """Return the column ``name``. Raise as :meth:`push` if ``rows`` cannot be pushed to ``ids``."""
        column = self.column(name)
        column.check_writable()
        column.check(ids)
        dtype = numpy_dtype(column.info.dtype)
        shape = (len(ids), *column.info.row_shape)
        if rows.dtype != dtype or rows.shape != shape:
            raise ConfigError(f"{name!r} takes {dtype} {shape}, not {rows.dtype} {rows.shape}")
        return column

    def _check_range(self, column: Column, ids: Array, first: int, last: int) -> None:
        """Raise IndexError if one of ``ids`` is outside [``first``, ``last``)."""
        position = find_first_outside(ids - first, last - first)
        if position >= 0:
            raise IndexError(
                f"server {self._server}, rank {self._rank} has the rows {first} to {last - 1} "
                f"of {column.name!r}, but received id {ids[position]}"
            )

    def _split_by_server(self, column: Column, ids: Array, rows: Array) -> list[_Message]:
        """Return the messages to other servers. If an id is repeated, its last row is sent."""
        plan = plan_remote(ids, column.bounds, self._server)
        # A slot's last position is just before the start of the next slot.
        last_positions = plan.positions[plan.starts[1:] - 1]
        messages = []
        for rank, first, end in plan.requests(self.placement.serving_ranks, column.rows_per_message):
            arrays = [plan.ids[first:end], take_rows(rows, last_positions[first:end])]
            messages.append(_Message(rank, arrays))
        return messages

    def _split_by_owner(self, column: Column, ids: Array, rows: Array, accumulate: bool) -> list[_Message]:
        """Split a push into messages to the ranks that own the rows. See :meth:`push` for ``accumulate``."""
        starts = self._owners[column.name].starts
        if accumulate:
            check_summable(column.name, column.info)
            # Group ids by rank, not by server. An extra rank without rows acts as the local rank, so that all
            # ids count as remote.
            plan = plan_remote(ids, np.append(starts, starts[-1]), len(starts) - 1)
            values = sum_repeated(rows, plan, column.info)
            sorted_ids = plan.ids
            cuts = plan.server_starts
        else:
            # Each owner has one range of ids, in ascending order, so sorting by id groups by owner. Requests
            # may overtake each other, so all rows with the same id go into one request.
            order = np.argsort(ids, kind="stable")
            values = take_rows(rows, order)
            sorted_ids = ids[order]
            cuts = np.searchsorted(sorted_ids, starts)

        max_rows = column.rows_per_message
        messages = []
        for rank, (first, last) in enumerate(pairwise(cuts[: len(starts)].tolist())):
            ranges = _cut_into_ranges(sorted_ids, first, last, max_rows, has_repeats=not accumulate)
            messages += [_Message(rank, [sorted_ids[start:end], values[start:end]]) for start, end in ranges]
        return messages

    def _submit_unanswered(self, submit: Callable[[_Message], Pending], message: _Message) -> None:
        """Send one message and do not wait for its answer. Wait first if :data:`MAX_BYTES` are unanswered."""
        num_bytes = payload_bytes(message.arrays)
        with self._push_lock:
            while self._unanswered:
                if self._unanswered_bytes < MAX_BYTES and not self._unanswered[0].call.is_ready():
                    break
                self._finish_oldest(self.session.timeout_s)
            self._unanswered.append(_UnansweredPush(message.rank, submit(message), num_bytes))
            self._unanswered_bytes += num_bytes

    def _finish_oldest(self, time_left_s: float) -> None:
        """Wait for the answer to the oldest unanswered push, up to ``time_left_s``.

        If the push failed, the next fence raises its error. Raises PeerError if the owner is only late.
        """
        push = self._unanswered[0]
        try:
            push.call.result(push.call.age_s + time_left_s)
        except (PeerError, RemoteError) as error:
            if isinstance(error, PeerError) and not push.call.is_ready():
                # The owner is late but not dead. The push stays in the queue for a later fence.
                raise PeerError(f"{error}. Number of unanswered pushes: {self._list_silent()}.") from error
            self._push_errors.append(error)
        self._unanswered.popleft()
        self._unanswered_bytes -= push.num_bytes

    def _list_silent(self) -> str:
        """Return text that lists the ranks with unanswered pushes, and how many each has."""
        num_pushes = Counter(push.rank for push in self._unanswered if not push.call.is_ready())
        return ", ".join(f"rank {rank} ({number})" for rank, number in sorted(num_pushes.items()))

    def _change_on_all_ranks(
        self, name: str, handler: object, operation: str, change: Callable[[Column], Column]
    ) -> None:
        """Change a column on all ranks or on none, and return when all have changed it."""

        def check_column() -> None:
            self.column(name).check_writable()
            self.fence()

        run_on_all_ranks(self.session, check_column, ConfigError)
        change_name = f"{operation} of {name!r}"
        if handler is None:
            change_name += ": none"
        check_equal(self.session, "a handler", change_name, "every rank must register the same")
        self._columns[name] = change(self.column(name))
        barrier(self.session, f"registering a handler of {name!r}")

    def _query_servers(self, op: str, name: str) -> Sequence[Array]:
        """Call ``op`` for the tensor ``name`` on all servers. Return one answer per server, in order."""
        ranks = self.placement.serving_ranks
        calls = {}
        # This rank answers its own call at once, so it comes last. The other servers work meanwhile.
        for rank in sorted(ranks, key=lambda rank: rank == self._rank):
            calls[rank] = self.session.rpc.submit(rank, f"{self.label}.{op}", name, [], phase="masks")
        return [calls[rank].result()[0] for rank in ranks]

    def _serve_pull(self, name: str, arrays: Sequence[Array]) -> Sequence[Array]:
        (ids,) = arrays
        column = self.column(name)
        column.check(ids)
        self._check_range(column, ids, *column.bounds[self._server : self._server + 2])
        rows = np.empty((len(ids), *column.info.row_shape), numpy_dtype(column.info.dtype))
        column.read(ids, rows)
        return [rows]

    def _serve_write(self, name: str, arrays: Sequence[Array]) -> Sequence[Array]:
        self.write_local(name, *arrays)
        return []

    def _serve_add(self, name: str, arrays: Sequence[Array]) -> Sequence[Array]:
        """Add a message's rows to this rank's rows, under the column's lock."""
        ids, rows = arrays
        column = self._check_owned(name, ids, rows)
        check_summable(name, column.info)
        with column.lock:
            for shard in column.shards:
                add_rows(shard.rows, shard.first, ids, rows, column.info)
        return []

    def _serve_handle(self, name: str, arrays: Sequence[Array]) -> Sequence[Array]:
        """Let the push handler apply a message's rows. Raise ConfigError if this rank has no handler."""
        ids, rows = arrays
        column = self._check_owned(name, ids, rows)
        if column.on_push is None:
            raise ConfigError(f"{name!r} has no push handler here. Register it on every rank before pushing.")

        # A writable tensor has one shard.
        (shard,) = column.shards
        local_ids = torch.from_numpy(ids - shard.first)
        # Copy the rows, because a message's arrays are read-only and a handler may write.
        values = view_as_tensor(rows.copy(), column.info)
        with column.lock:
            column.on_push(view_as_tensor(shard.rows, column.info), local_ids, values)
        return []

    def _serve_nonzero(self, name: str, _arrays: Sequence[Array]) -> Sequence[Array]:
        """Return one bit per local row. The first row is the highest bit in the first byte."""
        return [np.packbits(np.concatenate(list(self.column(name).find_nonzero())))]

    def _serve_count_nonzero(self, name: str, _arrays: Sequence[Array]) -> Sequence[Array]:
        masks = self.column(name).find_nonzero()
        return [np.array([sum(int(np.count_nonzero(mask)) for mask in masks)])]

    def _check_owned(self, name: str, ids: Array, rows: Array) -> Column:
        """Return the column ``name``. Raise as :meth:`push`, or IndexError if another rank owns a row."""
        column = self._check_rows(name, ids, rows)
        self._check_range(column, ids, *self._owners[name].get_range(self._rank))
        return column


def _spread_replies(replies: Sequence[tuple[Pending, int, int]], plan: RemotePlan, rows: Array) -> None:
    """Wait for ``replies``, and copy each received row to all positions in ``rows`` where its id occurs."""
    for call, first, end in replies:
        (answer,) = call.result()
        spread_rows(answer, rows, plan.starts, plan.positions, first, end)


def _check_out(out: Tensor, num_rows: int, column: Column) -> None:
    """Raise ConfigError if ``out`` is not a contiguous CPU tensor for ``num_rows`` rows from ``column``."""
    shape = (num_rows, *column.info.row_shape)
    dtype = torch_dtype(column.info.dtype)
    has_memory = out.device.type == "cpu" and out.is_contiguous()
    if tuple(out.shape) != shape or out.dtype != dtype or not has_memory:
        raise ConfigError(
            f"out for {column.name!r} must be a contiguous CPU tensor of {dtype} and shape "
            f"{shape}, not {out.dtype} of shape {tuple(out.shape)} on {out.device}"
        )
