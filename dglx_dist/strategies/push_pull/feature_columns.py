"""One rank's feature columns for all nodes: files, loading, statistics and store (P3, section 3.2)."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
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
from dglx_dist.layers.dropout import deal_out_columns
from dglx_dist.layers.masks import ColumnRange
from dglx_dist.progress import progress
from dglx_dist.records import LABEL, Array, ColumnInfo
from dglx_dist.strategies.push_pull.exchange import Group

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph


PHASE = "columns"
"""Ledger phase for all bytes that this module moves."""

VALUES = "values"
PROGRESS_BYTES = 1 << 28
"""Minimum transfer size in bytes from which progress is shown."""

ROUND_BYTES = 1 << 26
"""Bytes after which all ranks meet while they load, so that no rank runs into a time-out."""

IN_FLIGHT = 4
"""Number of messages that are requested ahead. It limits the memory that loading takes besides its result."""

CHUNK_VALUES = 1 << 20
"""Number of values that are converted to float64 at a time."""

Moments: TypeAlias = tuple[Tensor, Tensor]
"""Mean and biased variance per node, (V,) float64 each."""

log = logging.getLogger(__name__)


_NOT_LOADED: Array = np.empty(0)


@final
@dataclass(kw_only=True, eq=False)
class ColumnSlice:
    """Some feature columns for all nodes, and the file that stores them."""

    name: str
    key: str = ""
    """Tensor name in the KVStore."""
    columns: ColumnRange
    info: ColumnInfo
    """Stored dtype and row shape (F_p,)."""
    num_rows: int
    folder: ArrayFolder | None
    """Folder for the file, which may not exist yet. None if the columns are in memory only."""
    is_leader: bool = True
    """Whether this rank makes the file. It is the machine's lowest rank that needs the columns."""
    rows: Array = field(default_factory=lambda: _NOT_LOADED)
    """(V, F_p) values by node id, C-contiguous and read-only. bfloat16 values are stored as uint16 bits."""
    on_disk: bool = False
    """Whether the rows are in a file that does not fit in memory."""
    problem: str = ""
    """Reason why the columns could not be written to a file."""

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
        """Facts in the file's stamp, by which a reader checks that the file fits."""
        return {"dtype": self.info.dtype, "shape": [*self.shape]}

    def read(self) -> Array | None:
        """Map the file's (V, F_p) values. Return None and log why if there is no intact file."""
        entry = None if self.folder is None else self.folder.find(self.facts)
        if entry is None:
            return None
        _, arrays = entry
        return arrays[VALUES]

    def find_local(self, store: KVStore) -> Array | None:
        """Return the (V, F_p) values if this rank needs no other rank for them. Otherwise return None.

        Such values are loaded already, are empty, are a shard with all rows and columns, or are in the file.
        """
        if self.is_loaded:
            return self.rows
        if not self.num_rows or not len(self.columns):
            return np.empty(self.shape, self.dtype)

        column = store.column(self.key)
        has_all_columns = len(self.columns) == self.columns.width
        # Values of a writable tensor may change after this call.
        if has_all_columns and not column.writable:
            for shard in column.shards:
                if len(shard.rows) == self.num_rows:
                    return shard.rows
        return self.read()


def stored_slice(dataset: StoredDataset, ntype: str, name: str, columns: ColumnRange) -> ColumnSlice:
    """Return a slice that holds ``columns`` from the node feature ``name``, with the folder for its file."""
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
    """Write the columns for each of ``num_parts`` ranks, from every node feature that is a matrix.

    One process calls it. It reads the dataset once, in chunks. For a single part nothing is written, because
    its rank maps the stored rows. Raises StorageError if the folder cannot be written, or stored data is
    damaged.
    """
    manifest = dataset.manifest
    if num_parts == manifest.num_parts == 1:
        return

    for ntype in manifest.node_types:
        if not manifest.num_nodes(ntype):
            continue
        for name, info in manifest.node_columns[ntype].items():
            is_matrix = len(info.row_shape) == 1 and info.row_shape[0] > 0
            if name == LABEL or not is_matrix:
                continue
            try:
                _write_feature(dataset, ntype, name, num_parts)
            except OSError as error:
                raise StorageError(
                    f"the columns of {name!r} cannot be written into {dataset.location}: {error}; the "
                    "dataset is complete without them, and training makes them at its start"
                ) from error


def _write_feature(dataset: StoredDataset, ntype: str, name: str, num_parts: int) -> None:
    """Write one file for each part, out of ``num_parts``, that gets columns from the feature ``name``."""
    num_rows = dataset.manifest.num_nodes(ntype)
    info = dataset.manifest.node_columns[ntype][name]
    row_bytes = info.row_shape[0] * numpy_dtype(info.dtype).itemsize
    rows_per_chunk = max(1, CHUNK_BYTES // row_bytes)
    is_large = num_rows * row_bytes > PROGRESS_BYTES

    with ExitStack() as stack, progress(f"Columns of {name}", num_rows, enabled=is_large) as advance:
        outputs = []
        for columns in deal_out_columns(info.row_shape[0], num_parts):
            if not len(columns):
                continue
            column_slice = stored_slice(dataset, ntype, name, columns)
            if column_slice.folder is not None:
                writer = stack.enter_context(column_slice.folder.open_writer())
                stream = writer.stream(VALUES, column_slice.dtype, column_slice.shape)
                outputs.append((column_slice, writer, stream))

        for part in range(dataset.manifest.num_parts):
            rows = dataset.part(part).node_data(ntype, name)
            for first_row in range(0, len(rows), rows_per_chunk):
                chunk = rows[first_row : first_row + rows_per_chunk]
                for column_slice, _, stream in outputs:
                    stream.append(chunk[:, column_slice.columns.cut])
                advance(len(chunk))

        for column_slice, writer, _ in outputs:
            writer.publish(column_slice.facts)


def load_columns(store: KVStore, slices: Sequence[ColumnSlice], session: Session) -> None:
    """Load columns. Every rank must call it for the same features.

    A rank that has its columns in a file only serves the others. On each machine one rank loads the columns,
    and other ranks with the same columns map its file. If no file could be made, they load them too.

    Raises what :meth:`ColumnStores.open` raises.
    """
    # The second round is for ranks that expected a file which their leader could not make.
    for is_last_round in (False, True):
        run_on_all_ranks(session, lambda: _map_local_rows(store, slices))
        due_slices = []
        for column_slice in slices:
            if not column_slice.is_loaded and (column_slice.is_leader or is_last_round):
                due_slices.append(column_slice)
        if gather_int64([len(due_slices)], session).any():
            _stream(store, due_slices, session)
        num_missing = sum(not column_slice.is_loaded for column_slice in slices)
        if not gather_int64([num_missing], session).any():
            break

    is_on_disk = read_from_disk([column_slice.rows for column_slice in slices])
    for column_slice in slices:
        column_slice.on_disk = is_on_disk


def _map_local_rows(store: KVStore, slices: Sequence[ColumnSlice]) -> None:
    """Set the rows for slices that need no other rank."""
    for column_slice in slices:
        rows = column_slice.find_local(store)
        if rows is not None:
            column_slice.rows = rows


def _stream(store: KVStore, missing_slices: Sequence[ColumnSlice], session: Session) -> None:
    """Load ``missing_slices`` while serving the other ranks. Every rank must call this."""
    num_bytes = sum(column_slice.num_rows * column_slice.row_bytes for column_slice in missing_slices)
    shows_progress = session.topology.rank == 0 and num_bytes > PROGRESS_BYTES
    op = f"{store.label}.columns"
    session.rpc.register(op, partial(_serve_columns, store))

    def load_slices() -> Generator[int]:
        for column_slice in missing_slices:
            yield from _load(column_slice, partial(_iterate_pieces, store, column_slice, session, op))

    with ExitStack() as stack, progress("Loading columns", num_bytes, enabled=shows_progress) as advance:
        stack.callback(session.rpc.unregister, op)
        barrier(session, "loading columns")
        messages = load_slices()
        # An error must close the writer that the generator has open.
        stack.callback(messages.close)

        def load_round() -> int:
            round_bytes = 0
            for message_bytes in messages:
                advance(message_bytes)
                round_bytes += message_bytes
                if round_bytes >= ROUND_BYTES:
                    break
            return round_bytes

        # A rank that has loaded everything keeps serving until no rank loads any more.
        while gather_int64([run_on_all_ranks(session, load_round)], session).any():
            pass
        barrier(session, "the columns are loaded")


def _load(column_slice: ColumnSlice, read_pieces: Callable[[], Iterator[Array]]) -> Iterator[int]:
    """Load one feature into a file, or into memory if no file can be written. Yield each message's bytes."""
    if column_slice.folder is not None:
        try:
            yield from _load_into_file(column_slice, column_slice.folder, read_pieces())
            return
        except PeerError:
            raise  # PeerError is an OSError, but has nothing to do with the file.
        except OSError as error:
            column_slice.problem = f"{column_slice.folder.path} cannot be written ({error})"

    # The pieces are requested again from the first row.
    rows = np.empty(column_slice.shape, column_slice.dtype)
    first_row = 0
    for piece in read_pieces():
        rows[first_row : first_row + len(piece)] = piece
        first_row += len(piece)
        yield piece.nbytes

    rows.flags.writeable = False
    column_slice.rows = rows


def _load_into_file(column_slice: ColumnSlice, folder: ArrayFolder, pieces: Iterator[Array]) -> Iterator[int]:
    """Write ``pieces`` to a slice's file, and map the file. Yield each piece's bytes."""
    with folder.open_writer() as writer:
        stream = writer.stream(VALUES, column_slice.dtype, column_slice.shape)
        for piece in pieces:
            stream.append(piece)
            yield piece.nbytes
        writer.publish(column_slice.facts)

    rows = column_slice.read()
    if rows is None:
        raise FileNotFoundError("it was removed")
    column_slice.rows = rows


def _iterate_pieces(store: KVStore, column_slice: ColumnSlice, session: Session, op: str) -> Iterator[Array]:
    """Yield rows from all servers in order, one message at a time, with a few requested ahead."""
    columns = column_slice.columns
    rows_per_request = rows_per_message(column_slice.row_bytes)
    bounds = store.column(column_slice.key).bounds.tolist()
    pending: deque[Pending] = deque()
    for server, (first_row, end_row) in enumerate(pairwise(bounds)):
        rank = store.placement.serving_ranks[server]
        for begin in range(first_row, end_row, rows_per_request):
            end = min(begin + rows_per_request, end_row)
            window = np.array([begin, end, columns.first, columns.last], np.int64)
            pending.append(session.rpc.submit(rank, op, column_slice.key, [window], phase=PHASE))
            if len(pending) == IN_FLIGHT:
                yield pending.popleft().result()[0]

    while pending:
        yield pending.popleft().result()[0]


def _serve_columns(store: KVStore, key: str, arrays: Sequence[Array]) -> Sequence[Array]:
    """Answer a remote call that requests a window of rows and columns. The rows may be in several shards."""
    first_row, end_row, first_column, end_column = arrays[0].tolist()
    pieces = []
    for shard in store.column(key).shards:
        if shard.first < end_row and first_row < shard.first + len(shard.rows):
            # A negative bound would count from the shard's end.
            begin = max(first_row - shard.first, 0)
            pieces.append(shard.rows[begin : end_row - shard.first, first_column:end_column])
    return [np.concatenate(pieces)]


@final
class ColumnStore:
    """This rank's columns from some features, for all nodes. See :class:`ColumnStores`."""

    def __init__(self, slices: Sequence[ColumnSlice], group: Group, session: Session) -> None:
        self.slices = {column_slice.name: column_slice for column_slice in slices}
        """Slices by feature name. Empty once the graph is closed."""
        self._group = group
        self._session = session
        self._moments: Moments | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.slices)

    @property
    def widths(self) -> Mapping[str, int]:
        """Total number of columns per feature, over all parts."""
        return {name: column_slice.columns.width for name, column_slice in self.slices.items()}

    def dtype(self, name: str) -> torch.dtype:
        """Return a feature's stored dtype."""
        return torch_dtype(self._get_slice(name).info.dtype)

    def rows(self, name: str, nodes: Tensor, memory: RowMemory | None = None) -> Tensor:
        """Copy this part's columns from ``g.ndata[name][nodes]`` (K, F_p). Thread-safe, and sends no bytes.

        Args:
            nodes: (K,) int64 ids on the CPU in any order. They may repeat.
            memory: Provides the buffers and the copy's dtype. By default float16 and bfloat16 become float32,
                as in data parallel training.

        Raises:
            ConfigError: the feature was not opened, or ``nodes`` has a wrong dtype or shape.
            IndexError: an id is out of range.
        """
        column_slice = self._get_slice(name)
        if nodes.dtype != torch.int64 or nodes.dim() != 1:
            raise ConfigError(f"nodes are {nodes.dtype} of shape {tuple(nodes.shape)}; give (K,) int64 ids")
        ids = nodes.numpy()
        check_ids(ids, len(column_slice.rows), repr(name))

        if memory is None:
            memory = RowMemory()
        rows = memory.rows(column_slice.key, len(ids), column_slice.info)
        if column_slice.on_disk:
            request_rows(column_slice.rows, 0, ids)
        take_rows(column_slice.rows, ids, view_as_numpy(rows))
        return memory.convert(rows)

    def moments(self) -> Moments:
        """Return mean and biased variance over each node's row, across all features and parts.

        Every rank must call it. The first call sums values and then squared differences over the ranks, with
        8 bytes per node each, under the phase ``columns``. Its result is kept.
        """
        if self._moments is None:
            mean = self._average_columns(lambda values, _: values)
            variance = self._average_columns(lambda values, rows: (values - mean[rows, None]).square_())
            self._moments = mean, variance
        return self._moments

    def _average_columns(self, function: Callable[[Tensor, slice], Tensor]) -> Tensor:
        """Average ``function`` over the columns in all parts. Return (V,) float64.

        The function gets (k, F_p) float64 values and the row range that they come from. Every rank must call
        this.
        """
        slices = [self._get_slice(name) for name in self.names]
        width = sum(column_slice.columns.width for column_slice in slices)
        num_rows = slices[0].num_rows
        sums = torch.zeros(num_rows, dtype=torch.float64)

        # Other groups hold the same columns. They add zeros, so all ranks get the same bits.
        is_in_first_group = min(self._group.replicas) == self._group.rank
        for column_slice in slices if is_in_first_group else ():
            rows_per_chunk = max(1, CHUNK_VALUES // max(1, len(column_slice.columns)))
            for first_row in range(0, num_rows, rows_per_chunk):
                chunk = slice(first_row, min(first_row + rows_per_chunk, num_rows))
                rows = view_as_tensor(column_slice.rows[chunk].copy(), column_slice.info)
                sums[chunk] += function(rows.to(torch.float64), chunk).sum(1)
        return sum_over_ranks(sums, self._session, phase=PHASE, in_place=True).div_(width)

    def close(self) -> None:
        self.slices.clear()

    def _get_slice(self, name: str) -> ColumnSlice:
        if name not in self.slices:
            open_names = ", ".join(map(repr, self.slices)) or "none: the graph is closed"
            raise ConfigError(
                f"the columns of {name!r} are not open (open: {open_names}); add it to the option `features`"
            )
        return self.slices[name]


@final
class ColumnStores:
    """The columns that this rank holds for one graph. All ranks must open and close alike.

    Columns without a file are sent once, under the phase ``columns``. They are written to a file beside the
    dataset and mapped from there. Later openings with the same number of parts send nothing, even in other
    jobs.

    Tensors that the program made are kept in memory. If no file can be made, columns are kept in memory too,
    and rank 0 logs a warning.
    """

    def __init__(self, g: DistGraph, group: Group) -> None:
        self._g = g
        self._group = group
        self._opened: dict[tuple[str, tuple[str, ...]], ColumnStore] = {}

    def open(self, ntype: str, names: Sequence[str]) -> ColumnStore:
        """Return one node type's feature columns, the same object at each call. Every rank must call this.

        Raises:
            ConfigError: a feature is not a matrix, or ranks request different columns. It is raised on all
                ranks.
            RemoteError: a rank could not read its rows. Ranks that did not ask it raise StorageError.
            PeerError: a rank is dead or did not take part within the time-out.
        """
        g = self._g
        group = self._group
        key = (ntype, tuple(names))
        if key in self._opened:
            return self._opened[key]

        slices = run_on_all_ranks(
            g.session, lambda: [_make_column_slice(g, ntype, name, group) for name in names], ConfigError
        )
        request = {"node type": ntype, "features": list(names), "parts": group.size}
        check_equal(g.session, "the request for columns", request, "every rank must ask for the same")

        # Stores that have a feature in common share its slice.
        shared_slices: dict[str, ColumnSlice] = {}
        for (opened_type, _), store in self._opened.items():
            if opened_type == ntype:
                shared_slices |= store.slices
        missing_slices = [column_slice for column_slice in slices if column_slice.name not in shared_slices]
        load_columns(g.kvstore, missing_slices, g.session)
        self._warn_of_problems(missing_slices)

        slices = [shared_slices.get(column_slice.name, column_slice) for column_slice in slices]
        self._opened[key] = ColumnStore(slices, group, g.session)
        return self._opened[key]

    def _warn_of_problems(self, slices: Sequence[ColumnSlice]) -> None:
        """Log a warning on rank 0 if ranks could not write files. Every rank must call this."""
        session = self._g.session
        own_problem = next((column_slice.problem for column_slice in slices if column_slice.problem), "")
        problems = [problem for problem in gather_json(own_problem, session) if problem]
        if problems and session.topology.rank == 0:
            log.warning(
                "%d of %d ranks keep columns in memory, and load them again next time: %s",
                len(problems),
                session.topology.world_size,
                problems[0],
            )

    def close(self) -> None:
        """Release all columns."""
        while self._opened:
            self._opened.popitem()[1].close()


def _make_column_slice(g: DistGraph, ntype: str, name: str, group: Group) -> ColumnSlice:
    """Return this rank's slice from a feature, without loading it. Not collective.

    Raises ConfigError if the feature is not a matrix, or is computed when it is read.
    """
    key = g.nodes[ntype].data[name].kvstore_key
    column = g.kvstore.column(key)
    shape = column.info.row_shape
    if len(shape) != 1 or not shape[0]:
        raise ConfigError(
            f"{name!r} has rows of shape {tuple(shape)}, but push_pull splits matrices by column; store it "
            "as one row of numbers per node, or as (V, 1) if there is a single number"
        )
    if column.on_read is not None:
        raise ConfigError(f"{name!r} is computed by a handler when read; write it to a tensor first")

    columns = deal_out_columns(shape[0], group.size)[group.part]
    # A tensor that may change has no file.
    folder = None if column.writable else stored_slice(g.dataset, ntype, name, columns).folder
    hosts = g.session.hosts
    lower_replicas = [rank for rank in group.replicas if rank < group.rank]
    return ColumnSlice(
        name=name,
        key=key,
        columns=columns,
        info=ColumnInfo(dtype=column.info.dtype, row_shape=(len(columns),)),
        num_rows=column.num_rows,
        folder=folder,
        is_leader=all(hosts[rank] != hosts[group.rank] for rank in lower_replicas),
    )
