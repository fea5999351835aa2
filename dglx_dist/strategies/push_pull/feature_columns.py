"""This rank's feature columns for all nodes: files, loading, row statistics, the store (P3, section 3.2)."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
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
from dglx_dist.comm.session import Session, SessionField
from dglx_dist.data.storage.arrays import ArrayFolder, ArrayStream, ArrayWriter
from dglx_dist.data.storage.columns import numpy_dtype, safe_name
from dglx_dist.data.storage.reader import StoredDataset
from dglx_dist.data.storage.writer import CHUNK_BYTES
from dglx_dist.dataloading.row_buffers import Precision, RowMemory
from dglx_dist.errors import ConfigError, StorageError
from dglx_dist.graph.kvstore import KVStore
from dglx_dist.graph.partition_book import rows_per_message
from dglx_dist.graph.row_kernels import (
    check_ids,
    column_info,
    numpy_view,
    take_rows,
    tensor_view,
    torch_dtype,
)
from dglx_dist.layers.dropout import Columns, deal_out_columns
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

OPENED: SessionField[_Opened] = SessionField(lambda _: _Opened())
"""The open columns."""

Moments: TypeAlias = tuple[Tensor, Tensor]
"""(mean, biased variance), (V,) float64 each."""

log = logging.getLogger(__name__)


def slice_folder(dataset: StoredDataset, ntype: str, name: str, columns: Columns) -> ArrayFolder:
    """Return the folder of ``columns`` of the node feature ``name``, whether it exists or not."""
    name = f"{safe_name(ntype)}/{safe_name(name)}/{columns.first}-{columns.last}"
    return dataset.cache.entry("columns", name)


def read_slice(folder: ArrayFolder, info: ColumnInfo, num_rows: int) -> Array | None:
    """Map the (N, F_p) values of a folder; None without an intact file of these, which is logged."""
    found = folder.find(_header(info, num_rows))
    return found[1][VALUES] if found is not None else None


def _header(info: ColumnInfo, num_rows: int) -> dict[str, object]:
    return {"dtype": info.dtype, "shape": [num_rows, *info.row_shape]}


def begin_slice(writer: ArrayWriter, info: ColumnInfo, num_rows: int) -> ArrayStream:
    """Begin the file of one slice; raises OSError as :class:`ArrayStream`."""
    return writer.stream(VALUES, numpy_dtype(info.dtype), (num_rows, *info.row_shape))


def publish_slice(writer: ArrayWriter, info: ColumnInfo, num_rows: int) -> None:
    """Put the complete slice in its place, unless an intact one is there already; may raise OSError."""
    writer.publish(_header(info, num_rows))


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
    for ntype in manifest.node_types:
        for name, info in manifest.node_columns[ntype].items():
            if name != LABEL and len(info.row_shape) == 1 and info.row_shape[0] and manifest.num_nodes(ntype):
                try:
                    _write_feature(dataset, ntype, name, info, num_parts)
                except OSError as problem:
                    raise StorageError(
                        f"the columns of {name!r} cannot be written into {dataset.folder}: {problem}; the "
                        "dataset is whole without them, and training then makes them at the start"
                    ) from problem


def _write_feature(dataset: StoredDataset, ntype: str, name: str, info: ColumnInfo, num_parts: int) -> None:
    num_rows = dataset.manifest.num_nodes(ntype)
    cuts = [columns for columns in deal_out_columns(info.row_shape[0], num_parts) if len(columns)]
    infos = [ColumnInfo(dtype=info.dtype, row_shape=(len(columns),)) for columns in cuts]
    targets = [slice_folder(dataset, ntype, name, columns) for columns in cuts]
    row_bytes = info.row_shape[0] * numpy_dtype(info.dtype).itemsize
    step = max(1, CHUNK_BYTES // row_bytes)
    with (
        ExitStack() as stack,
        progress(f"Columns of {name}", num_rows, enabled=num_rows * row_bytes > PROGRESS_BYTES) as advance,
    ):
        writers = [stack.enter_context(target.writing()) for target in targets]
        streams = [begin_slice(*slice_, num_rows) for slice_ in zip(writers, infos, strict=True)]
        for part in range(dataset.manifest.num_parts):
            rows = dataset.part(part).node_data(ntype, name)
            for first in range(0, len(rows), step):
                chunk = rows[first : first + step]
                for stream, columns in zip(streams, cuts, strict=True):
                    stream.append(chunk[:, columns.cut])
                advance(len(chunk))
        for writer, info_ in zip(writers, infos, strict=True):
            publish_slice(writer, info_, num_rows)


@dataclass(frozen=True, kw_only=True)
class ColumnRequest:
    """The columns of one feature that one rank needs."""

    name: str
    key: str
    """The KVStore's name of the tensor."""
    columns: Columns
    info: ColumnInfo
    """Stored dtype, and (F_p,)."""
    num_rows: int
    folder: ArrayFolder | None
    """Present or not; None: in memory only."""
    is_leader: bool
    """Whether no lower rank of this machine needs the same: it makes the file that the others map."""

    @property
    def dtype(self) -> np.dtype[np.generic]:
        return numpy_dtype(self.info.dtype)

    @property
    def row_bytes(self) -> int:
        return len(self.columns) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class ColumnSlice:
    """The own columns of one feature."""

    of: ColumnRequest
    rows: Array
    """(V, F_p) by id, C-contiguous and read-only; bfloat16 as its bits in uint16."""
    problem: str = ""
    """The reason why it could not be kept in a file."""


def load_columns(store: KVStore, wanted: Sequence[ColumnRequest], session: Session) -> dict[str, ColumnSlice]:
    """Return the requested columns, by feature; every rank must call it, for the same features.

    A rank that has them in a file loads nothing, but serves the others. Of all ranks on a machine that need
    the same columns one loads; the others map its file, or load too where no file could be made.

    Raises:
        RemoteError: a rank that holds rows could not read them; StorageError on those that did not ask it.
        PeerError: a rank is dead or did not take part within the time-out.
    """
    found: dict[str, ColumnSlice] = {}
    for is_last_turn in (False, True):
        local = run_on_all_ranks(session, lambda: [_local_rows(store, one) for one in wanted])
        for one, rows in zip(wanted, local, strict=True):
            if rows is not None:
                found.setdefault(one.name, ColumnSlice(of=one, rows=rows))
        missing = [one for one in wanted if one.name not in found and (one.is_leader or is_last_turn)]
        if gather_int64([len(missing)], session).any():
            _stream(store, missing, session, found)
        if not gather_int64([len(wanted) - len(found)], session).any():
            break
    return found


def _local_rows(store: KVStore, wanted: ColumnRequest) -> Array | None:
    if not wanted.num_rows or not len(wanted.columns):
        return np.empty((wanted.num_rows, len(wanted.columns)), wanted.dtype)
    column = store.column(wanted.key)
    whole = [shard.rows for shard in column.shards if len(shard.rows) == wanted.num_rows]
    if whole and len(wanted.columns) == wanted.columns.width and not column.writable:
        return whole[0]
    if wanted.folder is None:
        return None
    return read_slice(wanted.folder, wanted.info, wanted.num_rows)


def _stream(
    store: KVStore, missing: Sequence[ColumnRequest], session: Session, found: dict[str, ColumnSlice]
) -> None:
    """Load ``missing`` into ``found`` while serving the other ranks; collective."""
    num_bytes = sum(one.num_rows * one.row_bytes for one in missing)
    shown = session.topology.rank == 0 and num_bytes > PROGRESS_BYTES
    op = f"{store.label}.columns"
    session.rpc.register(op, partial(_serve_columns, store))
    with ExitStack() as stack, progress("Loading columns", num_bytes, enabled=shown) as advance:
        stack.callback(session.rpc.unregister, op)
        barrier(session, "loading columns")
        steps = _load(store, missing, session, op, found)
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


def _load(
    store: KVStore,
    missing: Sequence[ColumnRequest],
    session: Session,
    op: str,
    found: dict[str, ColumnSlice],
) -> Generator[int, None, None]:
    """Load one feature after the other into ``found``; yield the bytes of each message."""
    for wanted in missing:
        with closing(_Sink(wanted)) as sink:
            for piece in _pieces(store, wanted, session, op):
                sink.put(piece)
                yield piece.nbytes
            found[wanted.name] = sink.result()


def _pieces(store: KVStore, wanted: ColumnRequest, session: Session, op: str) -> Iterator[Array]:
    """Yield the rows of all servers in order, a message each, with a few requested ahead."""
    step = rows_per_message(wanted.row_bytes)
    pending: deque[Pending] = deque()
    for server, (first, last) in enumerate(pairwise(store.column(wanted.key).bounds.tolist())):
        rank = store.placement.serving_rank(server)
        for begin in range(first, last, step):
            window = [begin, min(begin + step, last), wanted.columns.first, wanted.columns.last]
            arrays = [np.array(window, np.int64)]
            pending.append(session.rpc.submit(rank, op, wanted.key, arrays, phase=PHASE))
            if len(pending) == IN_FLIGHT:
                yield pending.popleft().result()[0]
    while pending:
        yield pending.popleft().result()[0]


@final
class _Sink:
    """Collects rows in order in a file, or in memory where no file is requested or it cannot be written."""

    def __init__(self, wanted: ColumnRequest) -> None:
        self._wanted = wanted
        self._stack = ExitStack()
        self._rows = np.empty((0, len(wanted.columns)), wanted.dtype)
        self._writer: ArrayWriter | None = None
        self._stream: ArrayStream | None = None
        self._num_rows, self._problem = 0, ""
        if wanted.folder is None:
            self._rows = np.empty((wanted.num_rows, len(wanted.columns)), wanted.dtype)
            return
        try:
            self._writer = self._stack.enter_context(wanted.folder.writing())
            self._stream = begin_slice(self._writer, wanted.info, wanted.num_rows)
        except OSError as problem:
            self._to_memory(problem)

    def put(self, rows: Array) -> None:
        if self._stream is not None:
            try:
                self._stream.append(rows)
            except OSError as problem:
                self._to_memory(problem)
        if self._stream is None:
            self._rows[self._num_rows : self._num_rows + len(rows)] = rows
        self._num_rows += len(rows)

    def result(self) -> ColumnSlice:
        wanted = self._wanted
        if self._stream is not None and self._writer is not None and wanted.folder is not None:
            try:
                publish_slice(self._writer, wanted.info, wanted.num_rows)
                rows = read_slice(wanted.folder, wanted.info, wanted.num_rows)
                if rows is not None:
                    return ColumnSlice(of=wanted, rows=rows)
                raise FileNotFoundError(f"{wanted.folder.path} was removed")
            except OSError as problem:
                self._to_memory(problem)
        self._rows.flags.writeable = False
        return ColumnSlice(of=wanted, rows=self._rows, problem=self._problem)

    def close(self) -> None:
        # Removes a folder that was not renamed to its place.
        self._stack.close()

    def _to_memory(self, problem: OSError) -> None:
        # With the rows that the file has already: nothing is requested twice.
        wanted = self._wanted
        assert wanted.folder is not None
        self._problem = f"{wanted.folder.path} cannot be written ({problem})"
        self._rows = np.empty((wanted.num_rows, len(wanted.columns)), wanted.dtype)
        if self._stream is not None:
            self._rows[: self._stream.num_rows] = self._stream.written()
        self._stream = None


def _serve_columns(store: KVStore, key: str, arrays: Sequence[Array]) -> Sequence[Array]:
    """Return the requested columns of a range of this server's rows."""
    begin, end, left, right = arrays[0].tolist()
    pieces = [
        rows[max(begin - first, 0) : max(end - first, 0), left:right]
        for first, rows in store.shards(key)
        if first < end and begin < first + len(rows)
    ]
    return [np.concatenate(pieces)]


def moments_of_rows(
    slices: Sequence[tuple[Array, ColumnInfo]], num_rows: int, width: int, session: Session
) -> Moments:
    """Return mean and variance of every row, in two passes: sums first, then squared differences.

    Every rank must call it; the two sums over the ranks are 8 bytes a row each.

    Args:
        slices: (V, F_p) columns that only this rank adds, and their dtype; may be empty.
        num_rows: V.
        width: Columns of all ranks together, at least 1.
        session: The run.
    """
    mean = _row_sums(slices, num_rows, lambda values, _: values)
    sum_over_ranks(mean, session, phase=PHASE, in_place=True).div_(width)
    variance = _row_sums(slices, num_rows, lambda values, rows: (values - mean[rows, None]).square_())
    sum_over_ranks(variance, session, phase=PHASE, in_place=True).div_(width)
    return mean, variance


def _row_sums(
    slices: Sequence[tuple[Array, ColumnInfo]], num_rows: int, function: Callable[[Tensor, slice], Tensor]
) -> Tensor:
    """Return (V,) sums over the columns of ``function`` of float64 values (k, F_p) and their rows."""
    sums = torch.zeros(num_rows, dtype=torch.float64)
    for rows, info in slices:
        step = max(1, CHUNK_VALUES // max(1, rows.shape[1]))
        for first in range(0, num_rows, step):
            chunk = slice(first, min(first + step, num_rows))
            values = tensor_view(rows[chunk].copy(), info).to(torch.float64)
            sums[chunk] += function(values, chunk).sum(1)
    return sums


@final
class ColumnStore:
    """This rank's columns of some features, for all nodes. Made by :func:`open_columns`."""

    def __init__(self, slices: Mapping[str, ColumnSlice], group: Group, session: Session) -> None:
        self._slices, self._group, self._session = dict(slices), group, session
        self._moments: dict[tuple[str, ...], Moments] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._slices)

    @property
    def widths(self) -> Mapping[str, int]:
        """Feature name to F, its columns on all parts together."""
        return {name: one.of.columns.width for name, one in self._slices.items()}

    def cut(self, name: str) -> Columns:
        """Return the columns of the feature that this rank holds; ConfigError if it was not opened."""
        return self._slice(name).of.columns

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of :meth:`rows`; raises as :meth:`cut`."""
        return Precision().target(torch_dtype(self._slice(name).of.info.dtype))

    def rows(self, name: str, nodes: Tensor, memory: RowMemory | None = None) -> Tensor:
        """Return the own columns of nodes; any thread may call it, and nothing is sent.

        Args:
            name: Of the feature.
            nodes: (K,) int64 on the CPU, any order, repeats allowed.
            memory: Buffers of the copy; None: fresh memory.

        Returns:
            (K, F_p), a copy of ``g.ndata[name][nodes][:, cut]``, with float16 and bfloat16 as float32, as in
            the batches of data parallel training.

        Raises:
            ConfigError: the feature was not opened, or ``nodes`` are no ids.
            IndexError: an id is out of range.
        """
        one, info = self._slice(name), self._slice(name).of.info
        if nodes.dtype != torch.int64 or nodes.dim() != 1:
            raise ConfigError(f"nodes are {nodes.dtype} of shape {tuple(nodes.shape)}; give (K,) int64 ids")
        ids = nodes.numpy()
        check_ids(ids, len(one.rows), repr(name))
        dtype = self.dtype(name)
        if memory is None:
            return tensor_view(take_rows(one.rows, ids), info).to(dtype)
        found = memory.rows(name, len(ids), info)
        take_rows(one.rows, ids, numpy_view(found))
        if found.dtype == dtype:
            return found
        return memory.rows(name, len(ids), column_info(dtype, info.row_shape)).copy_(found)

    def moments(self, names: Sequence[str]) -> Moments:
        """Return mean and variance of each node's row of all columns of ``names``, concatenated.

        Every rank must call it; the first call sums twice over the ranks, 8 bytes per node each, under the
        phase ``columns``, and its result is kept. The variance is biased, as in LayerNorm.
        """
        key = tuple(names)
        if key not in self._moments:
            parts = [self._slice(name) for name in key]
            # Other groups hold the same columns: they add zeros, and get the same bits.
            counted = parts if min(self._group.replicas) == self._group.rank else []
            width = sum(one.of.columns.width for one in parts)
            num_rows = len(parts[0].rows) if parts else 0
            self._moments[key] = moments_of_rows(
                [(one.rows, one.of.info) for one in counted], num_rows, width, self._session
            )
        return self._moments[key]

    def close(self) -> None:
        """Release the columns; ``g.close()`` calls it."""
        self._slices.clear()
        self._moments.clear()

    def _slice(self, name: str) -> ColumnSlice:
        if name not in self._slices:
            known = ", ".join(map(repr, self._slices)) or "none: the graph is closed"
            raise ConfigError(
                f"the columns of {name!r} are not open (open: {known}); name it in the option `features`"
            )
        return self._slices[name]


def open_columns(g: DistGraph, names: Sequence[str], group: Group, *, cache: bool = True) -> ColumnStore:
    """Return this rank's columns of node features for all nodes; every rank must call it, for the same ones.

    Columns that are not in a file yet move once, under the phase ``columns``: the own columns of the rows of
    other servers, and 32 bytes per request of 4 MiB. They are streamed into a file beside the dataset, which
    is mapped, or into memory without ``cache``, for tensors that the program made, and where no file can be
    made, which rank 0 logs. Later openings with the same number of parts, also of other jobs, move nothing.

    Returns:
        The same object for the same request, until ``g.close()``.

    Raises:
        ConfigError: on all ranks: a name is unknown, given twice or of no matrix, the graph has several node
            types, or ranks request different columns.
        RemoteError: a rank that holds rows could not read them; StorageError on those that did not ask it.
        PeerError: a rank is dead or did not take part within the time-out.
    """
    opened = OPENED.of(g.session)
    key = (g.kvstore.label, group.members, tuple(names))
    if key not in opened.stores:
        wanted = run_on_all_ranks(g.session, lambda: _column_requests(g, names, group, cache), ConfigError)
        request = {"features": list(names), "parts": group.size, "cache": cache}
        check_equal(g.session, "the request for columns", request, "every rank must ask for the same")
        if not any(label == g.kvstore.label for label, _, _ in opened.stores):
            g.on_close.append(lambda: opened.forget(g.kvstore.label))
        opened.stores[key] = ColumnStore(_load_missing(g, wanted, opened, group), group, g.session)
    return opened.stores[key]


@dataclass(frozen=True)
class _Opened:
    """The open columns of a session; stores that have a feature in common share its slice."""

    stores: dict[tuple[str, tuple[int, ...], tuple[str, ...]], ColumnStore] = field(default_factory=dict)
    slices: dict[tuple[str, tuple[int, ...], str], ColumnSlice] = field(default_factory=dict)

    def forget(self, label: str) -> None:
        for key in [key for key in self.stores if key[0] == label]:
            self.stores.pop(key).close()
        for kept in [kept for kept in self.slices if kept[0] == label]:
            del self.slices[kept]


def _column_requests(g: DistGraph, names: Sequence[str], group: Group, cache: bool) -> list[ColumnRequest]:
    if len(g.ntypes) != 1:
        raise ConfigError(
            f"the graph has the node types {', '.join(g.ntypes)}; push_pull trains on graphs of one: use "
            "strategy='data_parallel'"
        )
    if len(set(names)) != len(names):
        raise ConfigError(f"features={list(names)}: name each once")
    return [_column_request(g, name, group, cache) for name in names]


def _column_request(g: DistGraph, name: str, group: Group, cache: bool) -> ColumnRequest:
    if name not in g.ndata:
        raise ConfigError(f"g.ndata has no feature {name!r} (known: {', '.join(sorted(g.ndata))})")
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
    (ntype,) = g.ntypes
    columns = deal_out_columns(shape[0], group.size)[group.part]
    hosts = g.session.hosts
    return ColumnRequest(
        name=name,
        key=key,
        columns=columns,
        info=ColumnInfo(dtype=column.info.dtype, row_shape=(len(columns),)),
        num_rows=column.num_rows,
        folder=slice_folder(g.dataset, ntype, name, columns) if cache and not column.writable else None,
        is_leader=all(hosts[rank] != hosts[group.rank] for rank in group.replicas if rank < group.rank),
    )


def _load_missing(
    g: DistGraph, wanted: Sequence[ColumnRequest], opened: _Opened, group: Group
) -> dict[str, ColumnSlice]:
    keys = {one.name: (g.kvstore.label, group.members, one.name) for one in wanted}
    found = load_columns(g.kvstore, [one for one in wanted if keys[one.name] not in opened.slices], g.session)
    for name, loaded in found.items():
        opened.slices[keys[name]] = loaded
    problem = next((one.problem for one in found.values() if one.problem), "")
    problems = [one for one in gather_json(problem, g.session) if one]
    if problems and g.session.topology.rank == 0:
        log.warning(
            "%d of %d ranks keep columns in memory, and load them again next time: %s",
            len(problems),
            g.session.topology.world_size,
            problems[0],
        )
    return {name: opened.slices[key] for name, key in keys.items()}
