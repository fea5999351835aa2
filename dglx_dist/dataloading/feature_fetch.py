"""Fetches node and edge columns while blocks are built, into buffers that are reused."""

from __future__ import annotations

import logging
import math
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar, final

import dgl
import numpy as np
import torch
from dgl.heterograph import DGLBlock
from torch import Tensor

from dglx_dist.comm.session import warn_user
from dglx_dist.data.storage.columns import numpy_dtype
from dglx_dist.errors import ConfigError
from dglx_dist.graph.column import LookAheadRows, PendingPull
from dglx_dist.graph.kvstore import KVStore
from dglx_dist.graph.row_kernels import allocate_rows, make_column_info, torch_dtype, view_as_tensor
from dglx_dist.internals.cpu_kernels import note_edge_order
from dglx_dist.internals.graphs import Column, frames_by_type, replace_columns
from dglx_dist.records import Array, ColumnInfo, EdgeType

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph

# Phases in the byte ledger.
EDGE_PHASE = "edge_features"
LABEL_PHASE = "labels"
FEATURE_PHASE = "features"

EdgesOfBlock: TypeAlias = Mapping[EdgeType, Array]
"""Map from edge type to the (E,) edge ids in a block."""

log = logging.getLogger(__name__)

NO_ROWS: Array = np.empty(0, np.int64)
K = TypeVar("K")
_MARGIN = 8
"""New buffers get 1/8 spare rows, so that later batches of about the same size fit."""

_CPU = torch.device("cpu")
HALVES = (torch.float16, torch.bfloat16)
FLOATS = (*HALVES, torch.float32, torch.float64)


@final
class RowMemory:
    """Buffers that hold column rows for batches. Thread-safe.

    Page faults for a new array cost as much as filling the array, so arrays are reused. An array is idle when
    no view or tensor of it exists, so batches need not return it.

    Args:
        num_batches: Maximum number of arrays to keep per column.
        dtype: Floating-point dtype of rows in batches. None turns float16 and bfloat16 into float32 and keeps
            other dtypes. Half precision saves disk, memory and network traffic, but few models compute in it.
            Integers and booleans are never converted.
        device: Device that batches go to. For a GPU, the memory is page-locked so that rows can be copied
            from there.
    """

    def __init__(self, num_batches: int = 4, dtype: torch.dtype | None = None, device: Any = _CPU) -> None:
        self._num_batches = num_batches
        self._dtype = check_float(dtype)
        self.device = device
        self._arrays: dict[tuple[str, ColumnInfo], list[Array]] = {}
        self._lock = threading.Lock()
        # Measure how many references an idle array has, because interpreters hold different ones in a loop.
        self._idle_references = _count_references([np.empty(0)])[0]

    def rows(self, key: str, count: int, info: ColumnInfo) -> Tensor:
        """Return an uninitialised (``count``, *row) tensor for column ``key``. ``count`` may be 0.

        The tensor is a view of the longest idle array. If that is too small, a new array replaces it.
        """
        width = math.prod(info.row_shape)
        if count == 0 or width == 0:
            return allocate_rows(count, info)

        with self._lock:
            arrays = self._arrays.setdefault((key, info), [])
            longest_index = None
            for index, num_references in enumerate(_count_references(arrays)):
                if num_references != self._idle_references:
                    continue
                if longest_index is None or len(arrays[index]) > len(arrays[longest_index]):
                    longest_index = index

            if longest_index is not None and len(arrays[longest_index]) >= count:
                array = arrays[longest_index]
            else:
                array = self._allocate((count + count // _MARGIN, width), info)
                if longest_index is not None:
                    arrays[longest_index] = array
                elif len(arrays) < self._num_batches:
                    arrays.append(array)

        return view_as_tensor(array[:count].reshape(count, *info.row_shape), info)

    def _allocate(self, shape: tuple[int, int], info: ColumnInfo) -> Array:
        """Return an uninitialised array, in page-locked memory if batches go to a GPU."""
        if self.device.type != "cuda":
            return np.empty(shape, numpy_dtype(info.dtype))
        # Keep the array that torch returns, because it is the base of all views.
        dtype = torch.int16 if info.dtype == "bfloat16" else torch_dtype(info.dtype)
        return torch.empty(shape, dtype=dtype, pin_memory=torch.cuda.is_available()).numpy()

    def convert(self, rows: Tensor) -> Tensor:
        """Return (K, *row) ``rows`` in the batches' dtype, without a copy if they have it already."""
        dtype = rows.dtype
        if dtype in FLOATS and self._dtype is not None:
            dtype = self._dtype
        elif dtype in HALVES:
            dtype = torch.float32
        if dtype == rows.dtype:
            return rows
        # All converted rows share the buffers with the key "".
        buffer = self.rows("", len(rows), make_column_info(dtype, tuple(rows.shape[1:])))
        return buffer.copy_(rows)


def _count_references(arrays: Sequence[Array]) -> list[int]:
    """Count the references to each array, including the references that this function's loop holds."""
    # A comprehension would hold other references than this loop.
    counts = []
    for array in arrays:
        counts.append(sys.getrefcount(array))
    return counts


def check_float(dtype: object) -> torch.dtype | None:
    """Return ``dtype``. Raise ConfigError unless it is None or a floating-point dtype."""
    if dtype is None:
        return None
    if not isinstance(dtype, torch.dtype) or dtype not in FLOATS:
        raise ConfigError(
            f"feature_dtype={dtype!r}. Choose one of {', '.join(map(str, FLOATS))}, or None "
            "to get float32 for features that are stored in half precision."
        )
    return dtype


ClaimedRows: TypeAlias = Mapping[str, LookAheadRows]
"""Reserved look-ahead rows by column."""

NO_CLAIMED_ROWS: ClaimedRows = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The columns to attach, as {type: {name in the frame: name in the store}}."""

    inputs: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Columns for the first block's sources, by node type."""
    targets: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Columns for the last block's destinations, by node type."""
    edges: Mapping[EdgeType, Mapping[str, str]] = field(default_factory=dict)
    """Columns for the edges in every block, by edge type."""
    memory: RowMemory = field(default_factory=RowMemory)
    """Buffers for input rows, and for converted input and edge rows."""

    def group_inputs(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return the input nodes by column in the store, for ``inputs`` by node type."""
        return {key: inputs.get(ntype, NO_ROWS) for ntype, _name, key in _iterate_columns(self.inputs)}

    def claim(self, store: KVStore) -> ClaimedRows:
        """Reserve and return the input columns' look-ahead rows. Skip those that another loader holds."""
        claimed_rows = {}
        for key in self.group_inputs({}):
            ahead = store.column(key).ahead
            if ahead is None:
                continue
            if ahead.claim():
                claimed_rows[key] = ahead
            else:
                log.info("another loader uses the look-ahead cache of %s, so this one fetches every row", key)
        return claimed_rows


WINDOW_BYTES = 256 << 20
"""Maximum total bytes in sampled batches that wait to be requested."""
MAX_REQUESTED = 4
"""Maximum number of batches to request rows for ahead of the delivered batch."""


class Sampled(Protocol):
    """A batch that :func:`look_ahead` can request."""

    @property
    def inputs(self) -> Mapping[str, Array]:
        """(n,) int64 distinct input nodes by column."""

    @property
    def num_bytes(self) -> int: ...


S = TypeVar("S", bound=Sampled)


def look_ahead(
    samples: Iterator[S], claimed_rows: ClaimedRows, fetch: Callable[[S], None]
) -> Generator[S, None, None]:
    """Yield the batches from ``samples`` in order, and ``fetch`` rows for later batches ahead.

    Samples as many batches ahead as are needed to decide which rows to keep, up to :data:`WINDOW_BYTES`.
    Requests one batch ahead, and up to :data:`MAX_REQUESTED` if their rows take less than two messages. The
    consumer must wait for a batch's rows before it asks for the next batch. If a sample fails, its error is
    raised after the previous batches were yielded.
    """
    # Batches that are sampled but not requested, and their total size.
    window: deque[S] = deque()
    num_bytes = 0
    failure: Exception | None = None

    def announce_more() -> bool:
        """Sample the next batch and announce its rows. Return False if the window is full or samples end."""
        nonlocal num_bytes, failure
        if failure is not None or (window and num_bytes >= WINDOW_BYTES):
            return False
        try:
            batch = next(samples, None)
            if batch is None:
                return False
            for key, rows in claimed_rows.items():
                rows.announce(batch.inputs[key])
        except Exception as error:  # noqa: BLE001 - the batches sampled before it are yielded first
            failure = error
            return False
        window.append(batch)
        num_bytes += batch.num_bytes
        return True

    for rows in claimed_rows.values():
        rows.announce_more = announce_more

    requested: deque[S] = deque()
    while window or announce_more():
        num_bytes -= window[0].num_bytes
        # Don't use a variable here, because it would hold the batch after the consumer has released it.
        requested.append(window.popleft())
        fetch(requested[-1])
        while _is_full(requested, claimed_rows):
            yield requested.popleft()

    while requested:
        yield requested.popleft()
    if failure is not None:
        raise failure


def _is_full(requested: Sequence[Sampled], claimed_rows: ClaimedRows) -> bool:
    """Return whether the consumer must take a batch before more rows may be requested."""
    if len(requested) <= 1:
        return False
    return len(requested) > MAX_REQUESTED or any(rows.is_busy for rows in claimed_rows.values())


def submit_columns(
    store: KVStore,
    columns: Columns,
    inputs: Mapping[str, Array],
    targets: Mapping[str, Array],
    blocks: Sequence[EdgesOfBlock],
    *,
    distinct: bool = True,
    claimed_rows: ClaimedRows = NO_CLAIMED_ROWS,
) -> Callable[[Sequence[DGLBlock]], None]:
    """Send the requests for all rows in a batch without waiting.

    Args:
        inputs: (n,) int64 sources in the first block, by node type. Types may be missing.
        targets: (B,) int64 destinations in the last block, by node type.
        blocks: Edges by block, with layer 1 first. May be empty if no edge columns are fetched.
        distinct: Whether no input node and no target is repeated, as in all batches from compiled kernels.
        claimed_rows: Reserved look-ahead rows for the inputs, which have been announced.

    Returns:
        Function that waits for the rows and sets the columns on the blocks, with layer 1 first. It raises
        PeerError if a row's owner is dead or silent.
    """
    # Each entry has the block's index, the frames' name, the type, the column's name, and the pull for its
    # rows.
    pending: list[tuple[int, str, Any, str, PendingPull]] = []
    unused_rows = dict(claimed_rows)
    for ntype, name, key in _iterate_columns(columns.inputs):
        ids = inputs.get(ntype, NO_ROWS)
        column = store.column(key)
        # Allocate the buffer when it is filled, because several requested batches wait at a time.
        out = partial(columns.memory.rows, key, len(ids), column.info)
        # If a column has two names in the blocks, only the first pull may use the announced rows.
        ahead = unused_rows.pop(key, None)
        pull = store.submit_pull(key, ids, out=out, distinct=distinct, ahead=ahead, phase=FEATURE_PHASE)
        pending.append((0, "srcnodes", ntype, name, pull))

    for ntype, name, key in _iterate_columns(columns.targets):
        pull = store.submit_pull(key, targets.get(ntype, NO_ROWS), distinct=distinct, phase=LABEL_PHASE)
        pending.append((-1, "dstnodes", ntype, name, pull))

    for block_index, edges in enumerate(blocks):
        for etype, name, key in _iterate_columns(columns.edges):
            ids = edges[etype].astype(np.int64, copy=False)
            pull = store.submit_pull(key, ids, phase=EDGE_PHASE, layer=block_index + 1)
            pending.append((block_index, "edges", etype, name, pull))

    def finish(blocks: Sequence[DGLBlock]) -> None:
        for block_index, frames, type_name, name, pull in pending:
            rows = pull()
            # Labels keep their dtype.
            if frames != "dstnodes":
                rows = columns.memory.convert(rows)
            getattr(blocks[block_index], frames)[type_name].data[name] = rows

    return finish


def _iterate_columns(columns: Mapping[K, Mapping[str, str]]) -> Iterator[tuple[K, str, str]]:
    """Yield each column's type, name in the frame, and name in the store."""
    for type_name, names in columns.items():
        for name, key in names.items():
            yield type_name, name, key


@final
class OnDemandColumns(dict[str, Any]):
    """Columns in a block's frame. If a column is missing, the first access fetches it from the graph.

    DGL's loader does the same. It is slower than prefetching, because training waits.
    """

    def __init__(
        self, columns: Mapping[str, Any], g: DistGraph, kind: str | EdgeType, warned: set[str]
    ) -> None:
        super().__init__(columns)
        # Keep the current ids, because the frame may show other edge ids to scripts for DistDGL.
        self._ids = columns.get(_ID)
        self._g = g
        self._type_name = kind
        self._warned_columns = warned

    def __missing__(self, name: str) -> Any:
        """Fetch a column from the distributed graph that was not prefetched, and keep it.

        The first such read per column warns the user, because training waits for it. Raises KeyError if the
        graph has no such column or the rows' ids are unknown.
        """
        type_name = self._type_name
        if isinstance(type_name, str):
            columns = self._g.nodes[type_name].data
            option = "prefetch_node_feats"
        else:
            columns = self._g.edges[type_name].data
            option = "prefetch_edge_feats"

        # A wrapped model's message contains the remedy for this error.
        if name not in columns or self._ids is None:
            raise KeyError(name)
        if name not in self._warned_columns:
            self._warned_columns.add(name)
            value: object = [name] if self._g.is_homogeneous else {type_name: [name]}
            warn_user(
                f"the column {name!r} is fetched when the batch reads it, and training waits "
                f"for it. Pass {option}={value} (labels: prefetch_labels) to the sampler "
                "to prefetch it."
            )

        rows = columns[name][self._ids.data]
        if rows.dtype in HALVES:
            rows = rows.float()
        self[name] = Column.create(rows)
        return self[name]


_ID = dgl.NID
"""Name for the ids in frames. It is the same for nodes and edges."""


def fetch_on_access(g: DistGraph, blocks: Sequence[DGLBlock], warned: set[str]) -> None:
    """Let the blocks' frames fetch missing columns. ``warned`` collects columns that caused a warning."""
    for block in blocks:
        note_edge_order(block, g.orig_edge_ids)
        for kind, frame in frames_by_type(block):
            replace_columns(frame, partial(OnDemandColumns, g=g, kind=kind, warned=warned))


def get_edge_ids(block: DGLBlock) -> dict[EdgeType, Array]:
    return {etype: block.edges[etype].data[dgl.EID].numpy() for etype in block.canonical_etypes}
