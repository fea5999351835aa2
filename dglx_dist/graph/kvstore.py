"""Rows of distributed tensors, read and written by any rank alone (DistDGL's KVStore)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import final

import numpy as np
from torch import Tensor

from dglx_dist.cluster.collectives import barrier, gather_json
from dglx_dist.cluster.session import Session
from dglx_dist.errors import ConfigError
from dglx_dist.graph.column import Column, PullHandler, shards_of
from dglx_dist.graph.marks import Marks
from dglx_dist.graph.opening import together
from dglx_dist.graph.placement import Placement
from dglx_dist.graph.pull import CacheCounts, PendingPull, Puller
from dglx_dist.graph.push import Pusher, PushHandler, PushOrder
from dglx_dist.graph.row_cache import RowCache
from dglx_dist.records import Array, ColumnInfo


@final
class KVStore:
    """Named tensors cut by rows over the servers.

    Rows of the own server are read from memory that its ranks share, all others by one-sided calls to one
    rank of the server that owns them. A rank may pull or push alone, from any thread, at any time; only
    registering handlers is collective. A name must have been added on all ranks before one asks for it.

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
        self._pull_op = f"{label}.pull"
        self._puller = Puller(session, placement, self._pull_op)
        session.rpc.register(self._pull_op, self._serve_pull)
        self._pusher = Pusher(session, placement, self.column, label)
        self._marks = Marks(session, placement, self.column, label)
        session.before_close.append(self.fence)

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
        self._pusher.forget(name)

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
        """Answer nobody any more: a :meth:`fence` and a barrier belong before it."""
        if self.fence in self.session.before_close:
            self.session.before_close.remove(self.fence)
        self.session.rpc.unregister(self._pull_op)
        self._pusher.close()
        self._marks.close()

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
        """Overwrite rows wherever they are, or add to them. Not collective.

        * Overwriting: of repeated ids the last row stays. Sends 8 bytes and one row per distinct id of
          another server.
        * ``accumulate``: the rows of repeated ids are summed in the order given, and the sums are added by
          the one rank that owns each row (``RowOwners``). Sends 8 bytes and one row per distinct id that
          another rank owns; that of this server's other ranks counts as inside. float16 and bfloat16 are
          summed, and added, in float32 and rounded after each of both.

        Pushes of one rank that are not waited for may overtake each other; a :meth:`fence` orders them. An
        overwrite of a row while another rank overwrites it or adds to it must be ordered by the program: it
        may be lost, or mixed.

        Args:
            name: Of the tensor.
            ids: (K,) int64, any order.
            rows: (K, *row) of the column's dtype as NumPy has it.
            accumulate: Add to what is there.
            wait: Return when the rows are there, seen by every later pull of any rank. Else return at once,
                with ``rows`` free to be used again; :meth:`fence` waits, and raises what went wrong.
            phase: Under which the bytes are counted.
            layer: Likewise.

        Raises:
            ConfigError: there is no such tensor, it is read-only, or the rows do not fit or have no sum.
            IndexError: an id is out of range. Nothing was written then, nor after a ConfigError.
            PeerError: an owner is dead or silent; with ``wait=False`` only when too much is under way.
            RemoteError: an owner could not write, or a push handler raised.
        """
        order = PushOrder(accumulate=accumulate, wait=wait, phase=phase, layer=layer)
        self._pusher.push(name, ids, rows, order)

    def fence(self, timeout_s: float | None = None) -> None:
        """Wait until all pushes of this rank with ``wait=False`` are seen by every later pull of any rank.

        Not collective. What went wrong with one of them is raised here, once; also when the graph or the
        session is closed.

        Args:
            timeout_s: None: the session's.

        Raises:
            PeerError: the time passed, and the ranks that have not answered are named; or one is dead.
            RemoteError: an owner could not write.
        """
        self._pusher.fence(timeout_s)

    def write_local(self, name: str, ids: Array, rows: Array) -> None:
        """Overwrite rows of the own server; its other ranks see them at once.

        Raises:
            ConfigError: as :meth:`push`.
            IndexError: an id is not of the own server.
        """
        self._pusher.write_local(name, ids, rows)

    def owner_lock(self, name: str) -> threading.Lock:
        """Return the lock that this rank holds while it changes rows that it owns by what they were.

        Raises:
            ConfigError: there is no such tensor.
        """
        return self._pusher.lock_of(self.column(name))

    def register_push_handler(self, name: str, handler: PushHandler | None) -> None:
        """Let ``handler`` do what is pushed to a tensor, in place of overwriting or adding. Collective.

        ``handler(rows, local_ids, values)`` runs on the rank that owns the pushed rows, never twice at a
        time for one tensor, on a thread of its own: ``rows`` (n, *row) is the memory of the own server's
        rows, ``local_ids`` (k,) int64 are places in it, ``values`` (k, *row) what was pushed. It must not
        push or pull. The rows of a repeated id come together, in the order in which they were pushed (8
        bytes and a row each); with ``accumulate=True`` once, as their sum. No code travels: each rank
        registers its own.

        Args:
            name: Of a writable tensor.
            handler: None: overwrite and add again.

        Raises:
            ConfigError: on all ranks: there is no such tensor, it is read-only, or ranks disagree.
        """
        self._agree(name, handler, "push", partial(self._pusher.set_handler, name, handler))

    def register_pull_handler(self, name: str, handler: PullHandler | None) -> None:
        """Let ``handler`` compute what is pulled from a tensor. Collective.

        ``handler(rows, local_ids)`` returns (k, *row) values in the tensor's dtype. It runs on the rank that
        is asked, for rows of the own server on the one that asks, from any thread; the rest as
        :meth:`register_push_handler`.

        Raises:
            ConfigError: on all ranks: there is no such writable tensor, or ranks disagree.
        """

        def change() -> None:
            self._columns[name] = replace(self.column(name), on_read=handler)

        self._agree(name, handler, "pull", change)

    def nonzero(self, name: str) -> Array:
        """Return the (n,) int64 ids of the rows of a one-dimensional tensor that are not zero, ascending.

        Receives one bit for each row of the other servers. Not collective.

        Raises:
            ConfigError: there is no such tensor, or it has more dimensions.
            PeerError: a server is dead or silent.
        """
        return self._marks.nonzero(name)

    def count_nonzero(self, name: str) -> int:
        """Return how many values of a tensor are not zero; 8 bytes from each other server. Not collective.

        Raises:
            ConfigError: there is no such tensor.
            PeerError: a server is dead or silent.
        """
        return self._marks.count_nonzero(name)

    def _agree(self, name: str, handler: object, kind: str, change: Callable[[], None]) -> None:
        """Make a change on all ranks or on none, and return when it is made everywhere."""

        def check() -> None:
            self.column(name).check_writable()
            self.fence()

        together(self.session, check, ConfigError)
        wanted = [kind, name, handler is not None]
        for rank, other in enumerate(gather_json(wanted, self.session)):
            if other != wanted:
                raise ConfigError(
                    f"rank {rank} registers {other} while rank {self.session.topology.rank} registers "
                    f"{wanted}; every rank must register the same"
                )
        change()
        barrier(self.session, f"registering a handler of {name!r}")

    def _serve_pull(self, name: str, arrays: Sequence[Array]) -> Sequence[Array]:
        (ids,) = arrays
        column = self.column(name)
        self._check_own(column, ids)
        return self._puller.answer(column, ids)

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
