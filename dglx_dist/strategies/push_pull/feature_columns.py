"""This rank's feature columns for all nodes: files, loading, row statistics, the store (P3, section 3.2)."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias, final

import numpy as np
import torch
from torch import Tensor

from dglx_dist.comm.collectives import (
    barrier,
    check_equal,
    gather_int64,
    gather_json,
    run_on_all_ranks,
    sum_over_ranks,
)
from dglx_dist.comm.rpc import Pending
from dglx_dist.comm.session import Session
from dglx_dist.data.storage.arrays import ArrayFolder
from dglx_dist.data.storage.columns import numpy_dtype, safe_name
from dglx_dist.data.storage.reader import StoredDataset
from dglx_dist.data.storage.writer import CHUNK_BYTES
from dglx_dist.dataloading.feature_fetch import RowMemory
from dglx_dist.errors import ConfigError, PeerError, StorageError
from dglx_dist.graph.kvstore import KVStore
from dglx_dist.graph.partition_book import rows_per_message
from dglx_dist.graph.row_kernels import (
    check_ids,
    read_from_disk,
    request_rows,
    take_rows,
    torch_dtype,
    view_as_numpy,
    view_as_tensor,
)
from dglx_dist.layers.dropout import ColumnRange, deal_out_columns
from dglx_dist.progress import progress
from dglx_dist.records import LABEL, Array, ColumnInfo
from dglx_dist.strategies.push_pull.exchange import Group

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph


PHASE = "columns"
"""Ledger phase of all bytes that this module moves."""

VALUES = "values"
PROGRESS_BYTES = 1 << 28
"""Larger transfers show their progress."""

ROUND_BYTES = 1 << 26
"""Ranks that load meet all others after each so many bytes, so that nobody runs into a time-out."""

IN_FLIGHT = 4
"""Messages requested ahead; with the one that is written, the memory that loading takes beside its result."""

CHUNK_VALUES = 1 << 20
"""Values that are converted to float64 at a time."""

Moments: TypeAlias = tuple[Tensor, Tensor]
"""(mean, biased variance), (V,) float64 each."""

log = logging.getLogger(__name__)


_NOT_LOADED: Array = np.empty(0)


@final
@dataclass(kw_only=True, eq=False)
class ColumnSlice:
    """Some columns of a node feature for all nodes, and the file that keeps them."""

    name: str
    key: str = ""
    """The KVStore's name of the tensor."""
    columns: ColumnRange
    info: ColumnInfo
    """Stored dtype, and (F_p,)."""
    num_rows: int
    folder: ArrayFolder | None
    """Of the file, whether it exists or not; None: in memory only."""
    is_leader: bool = True
    """Whether no lower rank of this machine needs the same: it makes the file that the others map."""
    rows: Array = field(default_factory=lambda: _NOT_LOADED)
    """(V, F_p) by id, C-contiguous and read-only; bfloat16 as its bits in uint16."""
    on_disk: bool = False
    """Whether they are in a file that the memory cannot hold."""
    problem: str = ""
    """The reason why it could not be kept in a file."""

    @property
    def is_loaded(self) -> bool:
        return self.rows is not _NOT_LOADED

    @property
    def dtype(self) -> np.dtype[np.generic]:
        return numpy_dtype(self.info.dtype)

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_rows, len(self.columns)

    @property
    def row_bytes(self) -> int:
        return len(self.columns) * self.dtype.itemsize

    @property
    def facts(self) -> dict[str, object]:
        """What the stamp of its file says."""
        return {"dtype": self.info.dtype, "shape": [*self.shape]}

    def read(self) -> Array | None:
        """Map the file's (V, F_p) values; None without an intact file of these, which is logged."""
        found = None if self.folder is None else self.folder.find(self.facts)
        return found[1][VALUES] if found is not None else None

    def local(self, store: KVStore) -> Array | None:
        """Return the rows if this rank has them: no values, those of a single part, or a file."""
        column = store.column(self.key)
        uncut = [shard.rows for shard in column.shards if len(shard.rows) == self.num_rows]
        if self.is_loaded or not self.num_rows or not len(self.columns):
            return self.rows if self.is_loaded else np.empty(self.shape, self.dtype)
        if uncut and len(self.columns) == self.columns.width and not column.writable:
            return uncut[0]
        return self.read()


def stored_slice(dataset: StoredDataset, ntype: str, name: str, columns: ColumnRange) -> ColumnSlice:
    """Return ``columns`` of the node feature ``name`` with the place of their file."""
    path = f"{safe_name(ntype)}/{safe_name(name)}/{columns.first}-{columns.last}"
    dtype = dataset.manifest.node_columns[ntype][name].dtype
    return ColumnSlice(
        name=name,
        columns=columns,
        info=ColumnInfo(dtype=dtype, row_shape=(len(columns),)),
        num_rows=dataset.manifest.num_nodes(ntype),
        folder=dataset.cache.entry("columns", path),
    )


def write_slices(dataset: StoredDataset, num_parts: int) -> None:
    """Write the columns that each of ``num_parts`` ranks holds, of every matrix of node features.

    One process calls it; it reads the dataset once, a chunk at a time. Nothing is written for graphs of
    several node types, whose columns no strategy cuts, and for one part of one rank, which maps the rows.

    Raises:
        StorageError: the folder cannot be written, or a part is damaged.
    """
    manifest = dataset.manifest
    if len(manifest.node_types) > 1 or num_parts == manifest.num_parts == 1:
        return
    (ntype,) = manifest.node_types
    for name, info in manifest.node_columns[ntype].items():
        if name != LABEL and len(info.row_shape) == 1 and info.row_shape[0] and manifest.num_nodes(ntype):
            try:
                _write_feature(dataset, ntype, name, num_parts)
            except OSError as problem:
                raise StorageError(
                    f"the columns of {name!r} cannot be written into {dataset.folder}: {problem}; the "
                    "dataset is whole without them, and training then makes them at the start"
                ) from problem


def _write_feature(dataset: StoredDataset, ntype: str, name: str, num_parts: int) -> None:
    num_rows, info = dataset.manifest.num_nodes(ntype), dataset.manifest.node_columns[ntype][name]
    cuts = [columns for columns in deal_out_columns(info.row_shape[0], num_parts) if len(columns)]
    slices = [stored_slice(dataset, ntype, name, columns) for columns in cuts]
    row_bytes = info.row_shape[0] * numpy_dtype(info.dtype).itemsize
    step = max(1, CHUNK_BYTES // row_bytes)
    with (
        ExitStack() as stack,
        progress(f"Columns of {name}", num_rows, enabled=num_rows * row_bytes > PROGRESS_BYTES) as advance,
    ):
        writers = [stack.enter_context(one.folder.open_writer()) for one in slices if one.folder is not None]
        streams = [
            writer.stream(VALUES, one.dtype, one.shape) for one, writer in zip(slices, writers, strict=True)
        ]
        for part in range(dataset.manifest.num_parts):
            rows = dataset.part(part).node_data(ntype, name)
            for first in range(0, len(rows), step):
                chunk = rows[first : first + step]
                for stream, columns in zip(streams, cuts, strict=True):
                    stream.append(chunk[:, columns.cut])
                advance(len(chunk))
        for one, writer in zip(slices, writers, strict=True):
            writer.publish(one.facts)


def load_columns(store: KVStore, wanted: Sequence[ColumnSlice], session: Session) -> None:
    """Load the requested columns; every rank must call it, for the same features.

    A rank that has them in a file loads nothing, but serves the others. Of all ranks on a machine that need
    the same columns one loads; the others map its file, or load too where no file could be made. Raises as
    :meth:`ColumnStores.open`.
    """
    for is_last_turn in (False, True):
        local = run_on_all_ranks(session, lambda: [one.local(store) for one in wanted])
        for one, rows in zip(wanted, local, strict=True):
            one.rows = one.rows if rows is None else rows
        missing = [one for one in wanted if not one.is_loaded and (one.is_leader or is_last_turn)]
        if gather_int64([len(missing)], session).any():
            _stream(store, missing, session)
        if not gather_int64([sum(not one.is_loaded for one in wanted)], session).any():
            break
    large = read_from_disk([one.rows for one in wanted])
    for one in wanted:
        one.on_disk = large


def _stream(store: KVStore, missing: Sequence[ColumnSlice], session: Session) -> None:
    """Load ``missing`` while serving the other ranks; collective."""
    num_bytes = sum(one.num_rows * one.row_bytes for one in missing)
    shown = session.topology.rank == 0 and num_bytes > PROGRESS_BYTES
    op = f"{store.label}.columns"
    session.rpc.register(op, partial(_serve_columns, store))
    with ExitStack() as stack, progress("Loading columns", num_bytes, enabled=shown) as advance:
        stack.callback(session.rpc.unregister, op)
        barrier(session, "loading columns")
        steps = (
            loaded for one in missing for loaded in _load(one, partial(_pieces, store, one, session, op))
        )
        stack.callback(steps.close)

        def load_round() -> int:
            loaded = 0
            for num_loaded in steps:
                advance(num_loaded)
                loaded += num_loaded
                if loaded >= ROUND_BYTES:
                    break
            return loaded

        while gather_int64([run_on_all_ranks(session, load_round)], session).any():
            pass
        barrier(session, "the columns are loaded")


def _load(wanted: ColumnSlice, pieces: Callable[[], Iterator[Array]]) -> Iterator[int]:
    """Load one feature, in a file if that can be written, else in memory; yield the bytes of each message."""
    if wanted.folder is not None:
        try:
            with wanted.folder.open_writer() as writer:
                stream = writer.stream(VALUES, wanted.dtype, wanted.shape)
                for piece in pieces():
                    stream.append(piece)
                    yield piece.nbytes
                writer.publish(wanted.facts)
            found = wanted.read()
            if found is None:
                raise FileNotFoundError("it was removed")
            wanted.rows = found
            return
        except PeerError:
            raise  # a ConnectionError, thus an OSError
        except OSError as problem:
            wanted.problem = f"{wanted.folder.path} cannot be written ({problem})"
    rows = np.empty(wanted.shape, wanted.dtype)
    first = 0
    for piece in pieces():
        rows[first : first + len(piece)] = piece
        first += len(piece)
        yield piece.nbytes
    rows.flags.writeable = False
    wanted.rows = rows


def _pieces(store: KVStore, wanted: ColumnSlice, session: Session, op: str) -> Iterator[Array]:
    """Yield the rows of all servers in order, a message each, with a few requested ahead."""
    step = rows_per_message(wanted.row_bytes)
    pending: deque[Pending] = deque()
    for server, (first, last) in enumerate(pairwise(store.column(wanted.key).bounds.tolist())):
        rank = store.placement.serving_ranks[server]
        for begin in range(first, last, step):
            window = [begin, min(begin + step, last), wanted.columns.first, wanted.columns.last]
            arrays = [np.array(window, np.int64)]
            pending.append(session.rpc.submit(rank, op, wanted.key, arrays, phase=PHASE))
            if len(pending) == IN_FLIGHT:
                yield pending.popleft().result()[0]
    while pending:
        yield pending.popleft().result()[0]


def _serve_columns(store: KVStore, key: str, arrays: Sequence[Array]) -> Sequence[Array]:
    begin, end, left, right = arrays[0].tolist()
    pieces = [
        one.rows[max(begin - one.first, 0) : max(end - one.first, 0), left:right]
        for one in store.column(key).shards
        if one.first < end and begin < one.first + len(one.rows)
    ]
    return [np.concatenate(pieces)]


@final
class ColumnStore:
    """This rank's columns of some features, for all nodes. Made by :class:`ColumnStores`."""

    def __init__(self, slices: Sequence[ColumnSlice], group: Group, session: Session) -> None:
        self.slices = {one.name: one for one in slices}
        """By feature; nothing once the graph is closed."""
        self._group, self._session = group, session
        self._moments: Moments | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.slices)

    @property
    def widths(self) -> Mapping[str, int]:
        """Feature name to F, its columns on all parts together."""
        return {name: one.columns.width for name, one in self.slices.items()}

    def dtype(self, name: str) -> torch.dtype:
        """Return the stored dtype; raises as :meth:`rows`."""
        return torch_dtype(self._slice(name).info.dtype)

    def rows(self, name: str, nodes: Tensor, memory: RowMemory | None = None) -> Tensor:
        """Return (K, F_p), a copy of the own columns of ``g.ndata[name][nodes]``. Thread-safe; sends nothing.

        ``nodes`` are (K,) int64 on the CPU, any order, repeats allowed; ``memory`` lends the copy's buffers
        and has its dtype; without, float16 and bfloat16 become float32, as in data parallel training.

        Raises:
            ConfigError: the feature was not opened, or ``nodes`` are no ids.
            IndexError: an id is out of range.
        """
        one = self._slice(name)
        if nodes.dtype != torch.int64 or nodes.dim() != 1:
            raise ConfigError(f"nodes are {nodes.dtype} of shape {tuple(nodes.shape)}; give (K,) int64 ids")
        ids = nodes.numpy()
        check_ids(ids, len(one.rows), repr(name))
        memory = memory or RowMemory()
        found = memory.rows(name, len(ids), one.info)
        if one.on_disk:
            request_rows(one.rows, 0, ids)
        take_rows(one.rows, ids, view_as_numpy(found))
        return memory.convert(found)

    def moments(self) -> Moments:
        """Return mean and variance of each node's row of all columns, of all features and parts.

        Every rank must call it; the first call sums twice over the ranks, first values, then squared
        differences, 8 bytes per node each, under the phase ``columns``, and its result is kept. The variance
        is biased, as in LayerNorm.
        """
        if self._moments is None:
            parts = [self._slice(name) for name in self.names]
            # Other groups hold the same columns: they add zeros, and get the same bits.
            counted = parts if min(self._group.replicas) == self._group.rank else []
            width, num_rows = sum(one.columns.width for one in parts), parts[0].num_rows

            def mean_of(function: Callable[[Tensor, slice], Tensor]) -> Tensor:
                # Of ``function`` of float64 values (k, F_p) and their rows, over the columns.
                sums = torch.zeros(num_rows, dtype=torch.float64)
                for one in counted:
                    step = max(1, CHUNK_VALUES // max(1, len(one.columns)))
                    for first in range(0, num_rows, step):
                        chunk = slice(first, min(first + step, num_rows))
                        values = view_as_tensor(one.rows[chunk].copy(), one.info).to(torch.float64)
                        sums[chunk] += function(values, chunk).sum(1)
                return sum_over_ranks(sums, self._session, phase=PHASE, in_place=True).div_(width)

            mean = mean_of(lambda values, _: values)
            self._moments = mean, mean_of(lambda values, rows: (values - mean[rows, None]).square_())
        return self._moments

    def close(self) -> None:
        """Release the columns."""
        self.slices.clear()

    def _slice(self, name: str) -> ColumnSlice:
        if name not in self.slices:
            known = ", ".join(map(repr, self.slices)) or "none: the graph is closed"
            raise ConfigError(
                f"the columns of {name!r} are not open (open: {known}); name it in the option `features`"
            )
        return self.slices[name]


@final
class ColumnStores:
    """The columns of one graph that this rank holds in ``group``; all ranks open and close alike.

    Columns that are not in a file yet move once, under the phase ``columns``: the own columns of the rows of
    other servers, and 32 bytes per request of 4 MiB. They are streamed into a file beside the dataset, which
    is mapped, or into memory for tensors that the program made, and where no file can be made, which rank 0
    logs. Later openings with the same number of parts, also of other jobs, move nothing.
    """

    def __init__(self, g: DistGraph, group: Group) -> None:
        self._g, self._group = g, group
        self._opened: dict[tuple[str, ...], ColumnStore] = {}

    def open(self, names: Sequence[str]) -> ColumnStore:
        """Return the columns of features of one node type; collective, and the same object at each call.

        Raises:
            ConfigError: on all ranks: a name is of no matrix, or ranks request different columns.
            RemoteError: a rank that holds rows could not read them; StorageError on those that did not
                ask it.
            PeerError: a rank is dead or did not take part within the time-out.
        """
        g, group, key = self._g, self._group, tuple(names)
        if key in self._opened:
            return self._opened[key]
        wanted = run_on_all_ranks(
            g.session, lambda: [_column_slice(g, name, group) for name in names], ConfigError
        )
        request = {"features": list(names), "parts": group.size}
        check_equal(g.session, "the request for columns", request, "every rank must ask for the same")
        # Stores that have a feature in common share its slice.
        there = {name: one for store in self._opened.values() for name, one in store.slices.items()}
        missing = [one for one in wanted if one.name not in there]
        load_columns(g.kvstore, missing, g.session)
        problem = next((one.problem for one in missing if one.problem), "")
        problems = [one for one in gather_json(problem, g.session) if one]
        if problems and g.session.topology.rank == 0:
            log.warning(
                "%d of %d ranks keep columns in memory, and load them again next time: %s",
                len(problems),
                g.session.topology.world_size,
                problems[0],
            )
        self._opened[key] = ColumnStore([there.get(one.name, one) for one in wanted], group, g.session)
        return self._opened[key]

    def close(self) -> None:
        """Release all columns."""
        while self._opened:
            self._opened.popitem()[1].close()


def _column_slice(g: DistGraph, name: str, group: Group) -> ColumnSlice:
    key = g.ndata[name].kvstore_key
    column = g.kvstore.column(key)
    shape = column.info.row_shape
    if len(shape) != 1 or not shape[0]:
        raise ConfigError(
            f"{name!r} has rows of shape {tuple(shape)}; push_pull splits matrices by column: store it as "
            "one row of numbers per node, (V, 1) where there is a single one"
        )
    if column.on_read is not None:
        raise ConfigError(f"{name!r} is computed by a handler when it is read; write it to a tensor first")
    columns = deal_out_columns(shape[0], group.size)[group.part]
    hosts = g.session.hosts
    return ColumnSlice(
        name=name,
        key=key,
        columns=columns,
        info=ColumnInfo(dtype=column.info.dtype, row_shape=(len(columns),)),
        num_rows=column.num_rows,
        folder=None if column.writable else stored_slice(g.dataset, g.ntypes[0], name, columns).folder,
        is_leader=all(hosts[rank] != hosts[group.rank] for rank in group.replicas if rank < group.rank),
    )
