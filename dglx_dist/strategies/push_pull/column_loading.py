"""This rank's columns of a node feature, for all nodes: from a file, or from the servers that hold the rows.

P3, section 3.2: features are split by column. They move once, when a dataset is first trained on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import final

import numpy as np

from dglx_dist.cluster.collectives import barrier, gather_int64
from dglx_dist.cluster.rpc import Pending
from dglx_dist.cluster.session import Session
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

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """In which NumPy holds the values."""
        return numpy_dtype(self.info.dtype)

    @property
    def row_bytes(self) -> int:
        """Of the own columns of one row."""
        return len(self.columns) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Obtained:
    """One slice, and what was in the way of keeping it in a file."""

    rows: Array
    """(V, F_p) by id; read-only, bfloat16 as its bits in uint16."""
    problem: str = ""


def obtain(store: KVStore, wanted: Sequence[Wanted], session: Session) -> dict[str, Obtained]:
    """Return the columns that this rank wants, by feature; every rank must call it, for the same features.

    Who has them in a file loads nothing, but answers those that do not. Of all ranks on a machine that want
    the same columns one loads; the others map its file, or load too where no file could be made.

    Raises:
        RemoteError: a rank that holds rows could not read them; StorageError on those that did not ask it.
        PeerError: a rank is dead or did not take part within the time-out.
    """
    found: dict[str, Obtained] = {}
    for is_last_turn in (False, True):
        for name, rows in together(session, lambda: _at_hand(store, wanted)).items():
            found.setdefault(name, rows)
        mine = [one for one in wanted if one.name not in found and (one.leads or is_last_turn)]
        if gather_int64([len(mine)], session).any():
            _stream(store, mine, session, found)
        if not gather_int64([len(wanted) - len(found)], session).any():
            break
    return found


def _at_hand(store: KVStore, wanted: Sequence[Wanted]) -> dict[str, Obtained]:
    found = {one.name: _rows_at_hand(store, one) for one in wanted}
    return {name: Obtained(rows=rows) for name, rows in found.items() if rows is not None}


def _rows_at_hand(store: KVStore, wanted: Wanted) -> Array | None:
    if wanted.is_empty:
        return np.empty((wanted.num_rows, len(wanted.columns)), wanted.dtype)
    column = store.column(wanted.key)
    whole = [shard.rows for shard in column.shards if len(shard.rows) == wanted.num_rows]
    if whole and len(wanted.columns) == wanted.columns.width and not column.writable:
        return whole[0]
    if wanted.folder is None:
        return None
    return read_slice(wanted.folder, wanted.info, wanted.num_rows)


def _stream(store: KVStore, mine: Sequence[Wanted], session: Session, found: dict[str, Obtained]) -> None:
    """Load what is ``mine`` into ``found`` while answering the other ranks; collective."""
    num_bytes = sum(one.num_rows * one.row_bytes for one in mine)
    shown = session.topology.rank == 0 and num_bytes > WORTH_SHOWING
    op = f"{store.label}.columns"
    session.rpc.register(op, _Server(store))
    with ExitStack() as stack, progress("Loading columns", num_bytes, enabled=shown) as advance:
        stack.callback(session.rpc.unregister, op)
        barrier(session, "loading columns")
        steps = _load(store, mine, session, op, found)
        stack.callback(steps.close)

        def some() -> int:
            taken = 0
            for step in steps:
                advance(step)
                taken += step
                if taken >= ROUND_BYTES:
                    break
            return taken

        while gather_int64([together(session, some)], session).any():
            pass
        barrier(session, "the columns are there")


def _load(
    store: KVStore, mine: Sequence[Wanted], session: Session, op: str, found: dict[str, Obtained]
) -> Generator[int, None, None]:
    """Load one feature after the other into ``found``; yield after each message how many bytes came."""
    for wanted in mine:
        with closing(_Sink(wanted)) as sink:
            for piece in _pieces(store, wanted, session, op):
                sink.put(piece)
                yield piece.nbytes
            found[wanted.name] = sink.result()


def _pieces(store: KVStore, wanted: Wanted, session: Session, op: str) -> Iterator[Array]:
    """Yield the rows of all servers in order, a message each, asking a few ahead."""
    step = rows_per_message(wanted.row_bytes)
    under_way: deque[Pending] = deque()
    for server, (first, last) in enumerate(pairwise(store.column(wanted.key).bounds.tolist())):
        rank = store.placement.serving_rank(server)
        for begin in range(first, last, step):
            asked = [begin, min(begin + step, last), wanted.columns.first, wanted.columns.last]
            arrays = [np.array(asked, np.int64)]
            under_way.append(session.rpc.submit(rank, op, wanted.key, arrays, phase=PHASE))
            if len(under_way) == IN_FLIGHT:
                yield under_way.popleft().result()[0]
    while under_way:
        yield under_way.popleft().result()[0]


@final
class _Sink:
    """Takes rows in order into a file, or into memory where there is to be none or it cannot be written."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._stack = ExitStack()
        self._rows = np.empty((0, len(wanted.columns)), wanted.dtype)
        self._partial: Path | None = None
        self._writer: SliceWriter | None = None
        self._num_rows, self._problem = 0, ""
        if wanted.folder is None:
            self._rows = np.empty((wanted.num_rows, len(wanted.columns)), wanted.dtype)
            return
        try:
            self._partial = self._stack.enter_context(partial_folder(wanted.folder))
            self._writer = SliceWriter(self._partial, wanted.info, wanted.num_rows)
            self._stack.callback(self._writer.close)
        except OSError as problem:
            self._to_memory(problem)

    def put(self, rows: Array) -> None:
        """Take the next (k, F_p) rows."""
        if self._writer is not None:
            try:
                self._writer.append(rows)
            except OSError as problem:
                self._to_memory(problem)
        if self._writer is None:
            self._rows[self._num_rows : self._num_rows + len(rows)] = rows
        self._num_rows += len(rows)

    def result(self) -> Obtained:
        """Return all rows, mapped where there is a file."""
        wanted = self._wanted
        if self._writer is not None and self._partial is not None and wanted.folder is not None:
            try:
                self._writer.finish()
                put_in_place(self._partial, wanted.folder, wanted.info, wanted.num_rows)
                rows = read_slice(wanted.folder, wanted.info, wanted.num_rows)
                if rows is not None:
                    return Obtained(rows=rows)
                raise FileNotFoundError(f"{wanted.folder} was taken away")
            except OSError as problem:
                self._to_memory(problem)
        self._rows.flags.writeable = False
        return Obtained(rows=self._rows, problem=self._problem)

    def close(self) -> None:
        """Let go of the file; what is not in its place is removed."""
        self._stack.close()

    def _to_memory(self, problem: OSError) -> None:
        """Go on in memory, with what the file has already: nothing is asked for twice."""
        wanted = self._wanted
        self._problem = f"{wanted.folder} cannot be written ({problem})"
        self._rows = np.empty((wanted.num_rows, len(wanted.columns)), wanted.dtype)
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
