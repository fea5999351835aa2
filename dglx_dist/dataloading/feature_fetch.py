"""Asynchronous fetch of node and edge columns while blocks are built, into buffers that are used again."""

from __future__ import annotations

import logging
import math
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from dglx_dist.graph.column import DeviceRows, LookAheadRows, PendingPull
from dglx_dist.graph.kvstore import KVStore
from dglx_dist.graph.row_kernels import allocate_rows, make_column_info, torch_dtype, view_as_tensor
from dglx_dist.internals.graphs import Column, frames_by_type, replace_columns
from dglx_dist.internals.message_passing import note_edge_order
from dglx_dist.internals.pytorch import Copy
from dglx_dist.records import Array, ColumnInfo, EdgeType

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph

EDGE_PHASE, LABEL_PHASE, FEATURE_PHASE = "edge_features", "labels", "features"
"""Phases of the byte ledger."""

EdgesOfBlock: TypeAlias = Mapping[EdgeType, Array]
"""Edge type to the (E,) ids of a block's edges."""

log = logging.getLogger(__name__)

NO_ROWS: Array = np.empty(0, np.int64)
K = TypeVar("K")
_MARGIN = 8
"""New buffers get 1/8 spare rows, so that batches of about the same size fit."""

_CPU = torch.device("cpu")
HALVES = (torch.float16, torch.bfloat16)
FLOATS = (*HALVES, torch.float32, torch.float64)


@final
class RowMemory:
    """Memory for the rows of columns, and their conversion to the floating-point ``dtype`` of batches.

    Page faults of a fresh array cost as much as filling it, so arrays are used again. None is returned
    explicitly: it is idle when all its views, including tensors over it, are gone. At most ``num_batches``
    are kept of a column. Thread-safe.

    Features stored in half precision save disk, memory and network traffic, but few models compute in it, so
    ``dtype`` None converts float16 and bfloat16 to float32 and keeps others. Integers and booleans are not
    converted. For a ``device`` that is a GPU the memory is page-locked, so that rows are copied from there.
    """

    def __init__(
        self, num_batches: int = 4, dtype: torch.dtype | None = None, device: torch.device = _CPU
    ) -> None:
        self._num_batches, self._dtype, self.device = num_batches, check_float(dtype), device
        self._kept: dict[tuple[str, ColumnInfo], list[Array]] = {}
        self._lock = threading.Lock()
        # Measured, because interpreters differ in the references that a loop itself holds.
        self._references_of_idle = _references([np.empty(0)])[0]

    def rows(self, key: str, count: int, info: ColumnInfo) -> Tensor:
        """Return an uninitialised (``count``, *row) tensor for column ``key``; ``count`` may be 0.

        It lies in the longest idle array, or in one that replaces it.
        """
        width = math.prod(info.row_shape)
        if count == 0 or width == 0:
            return allocate_rows(count, info)
        with self._lock:
            kept = self._kept.setdefault((key, info), [])
            counts = _references(kept)
            idle = [place for place, n in enumerate(counts) if n == self._references_of_idle]
            longest = max(idle, key=lambda place: len(kept[place]), default=None)
            if longest is not None and len(kept[longest]) >= count:
                array = kept[longest]
            else:
                array = self._new((count + count // _MARGIN, width), info)
                if longest is not None:
                    kept[longest] = array
                elif len(kept) < self._num_batches:
                    kept.append(array)
        return view_as_tensor(array[:count].reshape(count, *info.row_shape), info)

    def _new(self, shape: tuple[int, int], info: ColumnInfo) -> Array:
        if self.device.type != "cuda":
            return np.empty(shape, numpy_dtype(info.dtype))
        # The very array that torch gives: only that is counted as the base of views.
        dtype = torch.int16 if info.dtype == "bfloat16" else torch_dtype(info.dtype)
        return torch.empty(shape, dtype=dtype, pin_memory=torch.cuda.is_available()).numpy()

    def get_output_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the output dtype for a column of ``dtype``."""
        if dtype not in FLOATS:
            return dtype
        return self._dtype or (torch.float32 if dtype in HALVES else dtype)

    def convert(self, rows: Tensor) -> Tensor:
        """Return (K, *row) ``rows`` in the output dtype; ``rows`` itself if it has that dtype."""
        dtype = self.get_output_dtype(rows.dtype)
        if dtype == rows.dtype:
            return rows
        return self.rows("", len(rows), make_column_info(dtype, tuple(rows.shape[1:]))).copy_(rows)


def _references(arrays: Sequence[Array]) -> list[int]:
    # Includes the references of this loop. A comprehension would hold others.
    counts = []
    for array in arrays:
        counts.append(sys.getrefcount(array))
    return counts


def check_float(dtype: object) -> torch.dtype | None:
    """Return ``dtype``; raise ConfigError unless it is None or a floating-point dtype of columns."""
    if dtype is None:
        return None
    if not isinstance(dtype, torch.dtype) or dtype not in FLOATS:
        raise ConfigError(
            f"feature_dtype={dtype!r}; give one of {', '.join(map(str, FLOATS))}, or None for float32 if "
            "features are stored in half precision"
        )
    return dtype


Ahead: TypeAlias = Mapping[str, LookAheadRows]
"""Claimed rows by column."""

NOTHING_CLAIMED: Ahead = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The columns to attach: by type, name in the frame to name in the store."""

    inputs: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """For the sources of the first block, by node type."""
    targets: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """For the destinations of the last block, by node type."""
    edges: Mapping[EdgeType, Mapping[str, str]] = field(default_factory=dict)
    """For the edges of every block, by edge type."""
    memory: RowMemory = field(default_factory=RowMemory)
    """Memory for the rows of inputs, and for those of inputs and edges that are converted."""

    def group_inputs(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return the input nodes by column in the store, of which ``inputs`` are those by type."""
        return {key: inputs.get(ntype, NO_ROWS) for ntype, _, key in _each(self.inputs)}

    def claim(self, store: KVStore) -> Ahead:
        """Claim the look-ahead rows of the inputs that no other loader has; by column."""
        claimed = {}
        for key in self.group_inputs({}):
            ahead = store.column(key).ahead
            # Rows of which some are on the batches' device are split there.
            if ahead is None or self.on_device(store, key) is not None:
                continue
            if ahead.claim():
                claimed[key] = ahead
            else:
                log.info("another loader uses the look-ahead cache of %s; this one fetches every row", key)
        return claimed

    def on_device(self, store: KVStore, key: str) -> DeviceRows | None:
        """Return the rows of a column that are on the device of the batches."""
        rows = store.column(key).on_device
        return rows if rows is not None and rows.rows.device == self.memory.device else None


WINDOW_BYTES = 256 << 20
"""Maximum size of sampled batches that wait to be requested; beyond it a loader looks no further ahead."""
MOST_REQUESTED = 4
"""Batches ahead of the delivered one whose rows are requested."""


class Sampled(Protocol):
    """A batch whose columns are not requested yet, as :func:`look_ahead` reads it."""

    @property
    def inputs(self) -> Mapping[str, Array]:
        """The (n,) int64 distinct input nodes by column."""

    @property
    def num_bytes(self) -> int: ...


S = TypeVar("S", bound=Sampled)


def look_ahead(samples: Iterator[S], claimed: Ahead, fetch: Callable[[S], None]) -> Generator[S, None, None]:
    """Yield the batches of ``samples`` in order, with the rows of the next ones requested by ``fetch``.

    Samples as many batches ahead as are needed to know which rows to keep, as long as they take at most
    :data:`WINDOW_BYTES`. Requests one batch ahead, and up to :data:`MOST_REQUESTED` whose rows take less than
    two messages. The consumer waits for the rows of a batch before it asks for the next one. The error of a
    sample is raised in its turn.
    """
    window: deque[S] = deque()
    num_bytes, failed = 0, None

    def announce_more() -> bool:
        nonlocal num_bytes, failed
        if failed is not None or (window and num_bytes >= WINDOW_BYTES):
            return False
        try:
            batch = next(samples, None)
            if batch is None:
                return False
            for key, rows in claimed.items():
                rows.announce(batch.inputs[key])
        except Exception as error:  # noqa: BLE001 - the batches sampled before it come first
            failed = error
            return False
        window.append(batch)
        num_bytes += batch.num_bytes
        return True

    for rows in claimed.values():
        rows.announce_more = announce_more
    requested: deque[S] = deque()
    while window or announce_more():
        num_bytes -= window[0].num_bytes
        # Without a name: it would keep the batch after the consumer has let it go.
        requested.append(window.popleft())
        fetch(requested[-1])
        while len(requested) > MOST_REQUESTED or (
            len(requested) > 1 and any(rows.is_busy for rows in claimed.values())
        ):
            yield requested.popleft()
    while requested:
        yield requested.popleft()
    if failed is not None:
        raise failed


@final
@dataclass(frozen=True, kw_only=True)
class SplitColumn:
    """Rows of a column of the first block's sources, of which some are cached on the device of the batch."""

    ntype: str
    name: str
    cached: DeviceRows
    parts: Sequence[Tensor]
    """The arguments of :meth:`DeviceRows.join_rows`."""
    dtype: torch.dtype
    """Of the column in the block."""

    def move(self, copy: Copy) -> SplitColumn:
        return replace(self, parts=[copy(part) for part in self.parts])

    def attach(self, blocks: Sequence[DGLBlock]) -> None:
        """Set the column, on the current stream."""
        rows = self.cached.join_rows(*self.parts)
        blocks[0].srcnodes[self.ntype].data[self.name] = rows.to(self.dtype)


def submit_columns(
    store: KVStore,
    columns: Columns,
    inputs: Mapping[str, Array],
    targets: Mapping[str, Array],
    blocks: Sequence[EdgesOfBlock],
    *,
    distinct: bool = True,
    claimed: Ahead = NOTHING_CLAIMED,
) -> Callable[[Sequence[DGLBlock]], Sequence[SplitColumn]]:
    """Send the requests for all rows of a batch, without waiting.

    Args:
        inputs: Node type to the (n,) int64 sources of the first block; a type may be missing.
        targets: Node type to the (B,) int64 destinations of the last.
        blocks: The edges of each block, the input-most first; read only when edge columns are fetched.
        distinct: Whether no input node and no target is repeated, as in all batches of compiled kernels.
        claimed: Where to keep rows of the inputs, which have been announced.

    Returns:
        What waits and sets the columns on the blocks, the input-most first, but for the returned ones: those
        with rows on the device of the batch, which are set there. It raises PeerError if an owner of rows is
        dead or silent.
    """
    pending: list[tuple[int, str, Any, str, PendingPull]] = []
    split: list[tuple[str, str, DeviceRows, Sequence[Array], PendingPull]] = []
    left = dict(claimed)
    for ntype, name, key in _each(columns.inputs):
        ids, column = inputs.get(ntype, NO_ROWS), store.column(key)
        cached = None if key in claimed else columns.on_device(store, key)
        places = () if cached is None else store.split_cached(key, ids, cached)
        if places:
            ids = ids[places[-1]]
        # Made when it is filled: of requested batches several wait.
        out = partial(columns.memory.rows, key, len(ids), column.info)
        # A column with two names in the blocks was announced once.
        ahead = left.pop(key, None)
        pull = store.submit_pull(key, ids, out=out, distinct=distinct, ahead=ahead, phase=FEATURE_PHASE)
        if cached is not None:
            split.append((ntype, name, cached, places, pull))
        else:
            pending.append((0, "srcnodes", ntype, name, pull))
    for ntype, name, key in _each(columns.targets):
        pull = store.submit_pull(key, targets.get(ntype, NO_ROWS), distinct=distinct, phase=LABEL_PHASE)
        pending.append((-1, "dstnodes", ntype, name, pull))
    for number, edges in enumerate(blocks):
        for etype, name, key in _each(columns.edges):
            ids = edges[etype].astype(np.int64, copy=False)
            pull = store.submit_pull(key, ids, phase=EDGE_PHASE, layer=number + 1)
            pending.append((number, "edges", etype, name, pull))

    def finish(built: Sequence[DGLBlock]) -> Sequence[SplitColumn]:
        for number, side, kind, name, pull in pending:
            rows = pull() if side == "dstnodes" else columns.memory.convert(pull())
            getattr(built[number], side)[kind].data[name] = rows
        return [
            SplitColumn(
                ntype=ntype,
                name=name,
                cached=cached,
                parts=[*map(torch.from_numpy, places), pull()],
                dtype=columns.memory.get_output_dtype(cached.rows.dtype),
            )
            for ntype, name, cached, places, pull in split
        ]

    return finish


def _each(columns: Mapping[K, Mapping[str, str]]) -> Iterator[tuple[K, str, str]]:
    # Type, name in the frame, name in the store.
    return ((kind, name, key) for kind, names in columns.items() for name, key in names.items())


@final
class OnDemandColumns(dict[str, Any]):
    """The columns of a frame of a block, which fetches a column of the graph on first access.

    DGL's loader fetches what is not prefetched in the same way. It is slower, because training waits.
    """

    def __init__(
        self, columns: Mapping[str, Any], g: DistGraph, kind: str | EdgeType, warned: set[str]
    ) -> None:
        super().__init__(columns)
        # Kept as they are now, because scripts of DistDGL see other edge ids in the frame.
        self._ids = columns.get(_ID)
        self._g, self._kind, self._warned = g, kind, warned

    def __missing__(self, name: str) -> Any:
        kind = self._kind
        if isinstance(kind, str):
            stored, option = self._g.nodes[kind].data, "prefetch_node_feats"
        else:
            stored, option = self._g.edges[kind].data, "prefetch_edge_feats"
        if name not in stored or self._ids is None:
            raise KeyError(name)  # a wrapped model says what to write
        if name not in self._warned:
            self._warned.add(name)
            warn_user(
                f"the column {name!r} is fetched when the batch reads it, and training waits for it; give "
                f"the sampler {option}=[{name!r}] (labels: prefetch_labels) to have it fetched ahead"
            )
        rows = stored[name][self._ids.data]
        self[name] = Column.create(rows.float() if rows.dtype in HALVES else rows)
        return self[name]


_ID = dgl.NID
"""Name of the ids in frames; DGL has one for nodes and edges."""


def fetch_on_access(g: DistGraph, blocks: Sequence[DGLBlock], warned: set[str]) -> None:
    """Let the frames of ``blocks`` fetch missing columns; ``warned`` holds the names already warned of."""
    for block in blocks:
        note_edge_order(block, g.orig_edge_ids)
        for kind, frame in frames_by_type(block):
            replace_columns(frame, partial(OnDemandColumns, g=g, kind=kind, warned=warned))


def get_edge_ids(block: DGLBlock) -> dict[EdgeType, Array]:
    return {etype: block.edges[etype].data[dgl.EID].numpy() for etype in block.canonical_etypes}
