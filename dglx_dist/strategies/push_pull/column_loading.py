"""This rank's columns of a node feature, for all nodes: from a file, or from the servers that hold the rows.

P3, section 3.2: features are split by column. They move once, when a dataset is first trained on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import final

import numpy as np

from dglx_dist.cluster.collectives import barrier, gather_int64
from dglx_dist.cluster.rpc import Pending
from dglx_dist.cluster.session import Session
from dglx_dist.graph.column import Column
from dglx_dist.graph.kvstore import KVStore
from dglx_dist.graph.opening import together
from dglx_dist.graph.rows import rows_per_message
from dglx_dist.layers.columns import Columns
from dglx_dist.progress import progress
from dglx_dist.records import Array, ColumnInfo
from dglx_dist.storage.columns import numpy_dtype
from dglx_dist.storage.folders import partial_folder
from dglx_dist.strategies.push_pull.column_files import WORTH_SHOWING, SliceWriter, put_in_place, read_slice

PHASE = "columns"
"""The ledger's name of these bytes."""

ROUND_BYTES = 1 << 26
"""A rank that loads tells the others that it lives after each so many, so that none waits for too long."""

IN_FLIGHT = 4
"""Messages that are asked for ahead: with one more being written, what loading takes beside its result."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What one rank needs of one feature."""

    name: str
    key: str
    """The KVStore's name of the tensor."""
    columns: Columns
    info: ColumnInfo
    """Dtype, and (F_p,)."""
    num_rows: int
    """V."""
    folder: Path | None
    """Where the file is, or will be; None: in memory only."""
    leads: bool
    """Whether no lower rank of this machine needs the same: it makes the file that the others map."""

    @property
    def is_empty(self) -> bool:
        """Whether there is not a single value."""
        return not self.num_rows * len(self.columns)


@dataclass(frozen=True, kw_only=True)
class Obtained:
    """One slice, and what was in the way of keeping it in a file."""

    rows: Array
    """(V, F_p) by id; read-only, bfloat16 as its bits in uint16."""
    problem: str = ""


def obtain(store: KVStore, wanted: Wanted, session: Session) -> Obtained:
    """Return the columns that this rank wants; every rank must call it, for the same feature.

    Who has them in a file loads nothing, but answers those that do not. Of all ranks on a machine that want
    the same columns one loads; the others map its file, or load too where no file could be made.

    Raises:
        StorageError: on all ranks, when a part is damaged on one.
        PeerError: a rank is dead or did not take part within the time-out.
    """
    found = together(session, lambda: _at_hand(store, wanted))
    for is_my_turn in (wanted.leads, True):
        if found is None and is_my_turn and not wanted.leads:
            found = _at_hand(store, wanted)
        loads = found is None and is_my_turn
        if gather_int64([loads], session).any():
            loaded = _stream(store, wanted, session, loads=loads)
            found = found or loaded
    assert found is not None, "the last turn is everybody's"
    return found


def _at_hand(store: KVStore, wanted: Wanted) -> Obtained | None:
    if wanted.is_empty:
        return Obtained(rows=np.empty((wanted.num_rows, len(wanted.columns)), numpy_dtype(wanted.info.dtype)))
    column = store.column(wanted.key)
    whole = [shard.rows for shard in column.shards if len(shard.rows) == wanted.num_rows]
    if whole and len(wanted.columns) == wanted.columns.width and not column.writable:
        return Obtained(rows=whole[0])
    if wanted.folder is None:
        return None
    rows = read_slice(wanted.folder, wanted.info, wanted.num_rows)
    return None if rows is None else Obtained(rows=rows)


def _stream(store: KVStore, wanted: Wanted, session: Session, *, loads: bool) -> Obtained | None:
    """Load on the ranks that must, answer on all; collective."""
    op = f"{store.label}.columns"
    column = store.column(wanted.key)
    num_bytes = wanted.num_rows * len(wanted.columns) * numpy_dtype(wanted.info.dtype).itemsize
    shown = session.topology.rank == 0 and num_bytes > WORTH_SHOWING
    session.rpc.register(op, _Server(store))
    with (
        ExitStack() as stack,
        progress(f"Loading columns of {wanted.name}", wanted.num_rows, enabled=shown) as advance,
    ):
        stack.callback(session.rpc.unregister, op)
        barrier(session, f"columns of {wanted.name!r}")
        loading = _Loading(_pieces(store, column, wanted, session, op), wanted, advance) if loads else None
        if loading is not None:
            stack.callback(loading.close)
        while gather_int64([loading is not None and not loading.is_done], session).any():
            together(session, lambda: None if loading is None else loading.go_on(ROUND_BYTES))
        found = together(session, lambda: None if loading is None else loading.result())
        barrier(session, f"columns of {wanted.name!r} are there")
    return found


def _pieces(store: KVStore, column: Column, wanted: Wanted, session: Session, op: str) -> Iterator[Array]:
    """Yield the rows of all servers in order, a message each, asking a few ahead."""
    columns, itemsize = wanted.columns, numpy_dtype(wanted.info.dtype).itemsize
    step = rows_per_message(len(columns) * itemsize)
    under_way: deque[Pending] = deque()
    for server, (first, last) in enumerate(pairwise(column.bounds.tolist())):
        rank = store.placement.serving_rank(server)
        for begin in range(first, last, step):
            asked = np.array([begin, min(begin + step, last), columns.first, columns.last], np.int64)
            under_way.append(session.rpc.submit(rank, op, wanted.key, [asked], phase=PHASE))
            if len(under_way) == IN_FLIGHT:
                yield under_way.popleft().result()[0]
    while under_way:
        yield under_way.popleft().result()[0]


@final
class _Loading:
    """Takes pieces in order into a file, or into memory where there is to be none or it cannot be written."""

    def __init__(self, pieces: Iterator[Array], wanted: Wanted, advance: Callable[[int], None]) -> None:
        self._pieces, self._wanted, self._advance = pieces, wanted, advance
        self._stack = ExitStack()
        self._rows = np.empty((0, len(wanted.columns)), numpy_dtype(wanted.info.dtype))
        self._partial: Path | None = None
        self._writer: SliceWriter | None = None
        self._num_rows = 0
        self._problem = ""
        try:
            self._open_file()
        except OSError as problem:
            self._to_memory(problem)

    @property
    def is_done(self) -> bool:
        """Whether all rows are there."""
        return self._num_rows == self._wanted.num_rows

    def go_on(self, num_bytes: int) -> int:
        """Take pieces until there are ``num_bytes`` more, or all; return how many bytes came."""
        taken = 0
        while taken < num_bytes and not self.is_done:
            piece = next(self._pieces)
            self._put(piece)
            self._num_rows += len(piece)
            self._advance(len(piece))
            taken += piece.nbytes
        return taken

    def result(self) -> Obtained:
        """Return all rows, mapped where there is a file."""
        wanted = self._wanted
        if self._writer is not None and self._partial is not None and wanted.folder is not None:
            try:
                self._writer.finish()
                put_in_place(self._partial, wanted.folder, wanted.info, wanted.num_rows)
            except OSError as problem:
                self._to_memory(problem)
        if self._writer is not None and wanted.folder is not None:
            rows = read_slice(wanted.folder, wanted.info, wanted.num_rows)
            if rows is not None:
                return Obtained(rows=rows)
            self._to_memory(OSError(f"{wanted.folder} was taken away"))
        self._rows.flags.writeable = False
        return Obtained(rows=self._rows, problem=self._problem)

    def close(self) -> None:
        """Let go of the file; what is not in its place is removed."""
        self._stack.close()

    def _open_file(self) -> None:
        wanted = self._wanted
        if wanted.folder is None:
            self._rows = np.empty((wanted.num_rows, len(wanted.columns)), self._rows.dtype)
            return
        self._partial = self._stack.enter_context(partial_folder(wanted.folder))
        self._writer = SliceWriter(self._partial, wanted.info, wanted.num_rows)
        self._stack.callback(self._writer.close)

    def _put(self, piece: Array) -> None:
        if self._writer is not None:
            try:
                self._writer.append(piece)
            except OSError as problem:
                self._to_memory(problem)
        if self._writer is None:
            self._rows[self._num_rows : self._num_rows + len(piece)] = piece

    def _to_memory(self, problem: OSError) -> None:
        """Go on in memory, with what the file has already: nothing is asked for twice."""
        self._problem = f"{self._wanted.folder} cannot be written ({problem})"
        self._rows = np.empty((self._wanted.num_rows, len(self._wanted.columns)), self._rows.dtype)
        if self._writer is not None:
            self._rows[: self._writer.num_rows] = self._writer.written()
        self._writer = None


@final
class _Server:
    """Answers with the columns of a run of this server's rows."""

    def __init__(self, store: KVStore) -> None:
        self._store = store

    def __call__(self, key: str, arrays: Sequence[Array]) -> Sequence[Array]:
        begin, end, left, right = arrays[0].tolist()
        pieces = [
            rows[max(begin - first, 0) : max(end - first, 0), left:right]
            for first, rows in self._store.shards(key)
            if first < end and begin < first + len(rows)
        ]
        return [np.concatenate(pieces)]
