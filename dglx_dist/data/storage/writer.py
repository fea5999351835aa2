"""Write a dataset: convert feature precision, renumber nodes and edges by owner, and write all parts."""

import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa
from numba import njit

from dglx_dist.data.external_memory import (
    MIN_WORK_BYTES,
    Budget,
    Chunks,
    EdgeColumn,
    EdgeStream,
    Ranks,
    Workspace,
    map_spill,
    shared_folder,
    sort_edges,
)
from dglx_dist.data.storage.columns import (
    IDS,
    FileInfo,
    data_path,
    edge_folder,
    id_dtype,
    make_column_info,
    node_folder,
    numpy_dtype,
    text_buffers,
    write_column,
    write_strings,
)
from dglx_dist.data.storage.files import name_write_failures, synchronise
from dglx_dist.data.storage.manifest import Manifest, check_target, put_in_place, write_manifest
from dglx_dist.data.validate import check_assignment, check_ids
from dglx_dist.errors import ConfigError
from dglx_dist.memory import format_bytes
from dglx_dist.progress import Advance, progress
from dglx_dist.records import LABEL, Array, Assignment, ColumnInfo, EdgeType, NodeColumn, RawGraph, SparseRows
from dglx_dist.registry import suggest_name

FeatureDtype: TypeAlias = str | Mapping[str, str]
"""Dtype in which features are stored, for all columns or by column name: float16, bfloat16 or float32."""

_FEATURE_DTYPES = ("float16", "bfloat16", "float32")
K = TypeVar("K", str, EdgeType)


def check_feature_dtype(feature_dtype: FeatureDtype | None, graph: RawGraph | None = None) -> None:
    """Raise ConfigError if a feature dtype is invalid, or ``graph`` does not have a named column."""
    if feature_dtype is None:
        return
    dtypes = feature_dtype
    if isinstance(dtypes, str):
        dtypes = {"all features": dtypes}
    for column, dtype in dtypes.items():
        if dtype not in _FEATURE_DTYPES:
            raise ConfigError(f"the feature dtype of {column} is {dtype!r}, not {', '.join(_FEATURE_DTYPES)}")
    if graph is not None and isinstance(feature_dtype, Mapping):
        _check_names(graph, feature_dtype)


def resolve_dtypes(columns: Mapping[str, Any], feature_dtype: FeatureDtype | None) -> dict[str, str]:
    """Return the stored dtypes for those of one type's ``columns`` that are converted, by name.

    A single dtype applies to all floating-point columns with at least two dimensions, except ``label``.
    Columns with one value per node or edge (weights, times) keep their dtype unless they are named.
    """
    if feature_dtype is None:
        return {}
    if isinstance(feature_dtype, Mapping):
        return {name: feature_dtype[name] for name in columns if name in feature_dtype}

    dtypes = {}
    for name, column in columns.items():
        if column.dtype.kind == "f" and len(column.shape) > 1 and name != LABEL:
            dtypes[name] = feature_dtype
    return dtypes


def _check_names(graph: RawGraph, feature_dtype: Mapping[str, str]) -> None:
    dtypes = {}
    for columns in (*graph.node_data.values(), *graph.edge_data.values()):
        for name, column in columns.items():
            dtypes[name] = column.dtype
    for name in feature_dtype:
        if name not in dtypes:
            raise ConfigError(
                f"feature_dtype names {name!r}, which {graph.name} does not have"
                f"{suggest_name(name, dtypes)} (columns: {', '.join(sorted(dtypes)) or 'none'})"
            )
        if dtypes[name].kind != "f":
            raise ConfigError(
                f"feature_dtype names {name!r}, which is {dtypes[name]}; only floating-point "
                "columns are stored in another precision"
            )


def narrow(
    piece: Array, dtype: str, description: str, rows: Array | range, ids: Array | None = None
) -> Array:
    """Round the values in ``piece`` to ``dtype``, and check that no finite value becomes infinite.

    Args:
        piece: (k, ...) floating-point rows from a column.
        dtype: Name of the dtype to store. NumPy has no bfloat16, so its bits are returned as uint16.
        description: The column's name in the error message.
        rows: (k,) row numbers that the rows in ``piece`` have in the column.
        ids: (N,) ids for all rows in the column. None: ids equal row numbers.

    Returns:
        (k, ...) rounded values.

    Raises:
        ConfigError: a finite value is too large for ``dtype``. The message shows the value and its id.
    """
    if dtype == "bfloat16":
        narrowed = _round_to_bfloat16(_round_to_odd(piece)).reshape(piece.shape)
        # Infinity and NaN have all exponent bits set, and finite values do not.
        is_finite = (narrowed & _BFLOAT16_EXPONENT) != _BFLOAT16_EXPONENT
    else:
        narrowed = _cast_quietly(piece, dtype)
        is_finite = np.isfinite(narrowed)

    is_overflow = ~is_finite & np.isfinite(piece)
    if is_overflow.any():
        index = tuple(np.argwhere(is_overflow)[0].tolist())
        row = int(rows[index[0]])
        row_id = row if ids is None else int(ids[row])
        wider = "bfloat16 or float32" if dtype == "float16" else "float32"
        raise ConfigError(
            f"{description} has {piece[index]} in row {row_id}, too large for {dtype};"
            f" store it as {wider}, or scale the column"
        )
    return narrowed


_BFLOAT16_EXPONENT = 0x7F80
"""Exponent bits in a bfloat16 value."""


def _round_to_odd(values: Array) -> Array:
    """Return float32 bits that round to the bfloat16 nearest to ``values``.

    Rounding twice could go wrong at ties. So values that float32 cannot represent are truncated and get an
    odd last bit (round to odd). The odd bit keeps them on the correct side of a tie.
    """
    single = np.ascontiguousarray(_cast_quietly(values, np.float32))
    bits = single.view(np.uint32)
    if values.dtype.itemsize > single.itemsize:
        is_rounded = (single != values) & np.isfinite(values)
        # Subtracting 1 from a float's bits gives the next float towards 0.
        bits -= is_rounded & (np.abs(single) > np.abs(values))
        bits |= is_rounded
    return bits.reshape(-1)


def _cast_quietly(values: Array, dtype: Any) -> Array:
    # Overflow is checked by the caller.
    with np.errstate(over="ignore"):
        return values.astype(dtype)


def _round_to_bfloat16(single: Array) -> Array:
    """Round (K,) float32 bits to the nearest 16 bits, with ties to even. NaN stays NaN."""
    high = single >> np.uint32(16)
    is_nan = (single & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    # To round to even, add half the last bit if it is odd, and a little less than half if it is even.
    half = np.uint32(0x7FFF) + (high & np.uint32(1))
    rounded = (single + half) >> np.uint32(16)
    # Truncating a NaN could clear all its fraction bits, so one of them is set.
    return np.where(is_nan, high | np.uint32(0x0040), rounded).astype(np.uint16)


@dataclass(frozen=True, kw_only=True)
class NodeOrder:
    """New ids for one node type. Both permutations are int32 if N fits."""

    new_to_old: Array
    """(N,) original ids by new id, ascending within a part."""
    old_to_new: Array
    """(N,) new ids by original id."""
    offsets: Array
    """(P + 1,) int64. The new ids of part p are ``offsets[p] .. offsets[p + 1] - 1``."""


@dataclass(frozen=True, kw_only=True)
class EdgeOrder:
    """All edges of one type as CSC with new ids, over all parts."""

    indptr: Array
    """(N_dst + 1,) int64."""
    indices: Array
    """(E,) new source ids, ascending within a destination, int32 if N_src fits."""
    new_to_old: Array
    """(E,) position in ``RawGraph.edges`` by new edge id. If sorted on disk, the id in the source instead."""
    offsets: Array
    """(P + 1,) int64. Part p has the edges ``offsets[p] .. offsets[p + 1] - 1``, and their destinations."""


def rows_of(order: NodeOrder | EdgeOrder, part: int) -> Array:
    """Return one part's original ids."""
    return order.new_to_old[order.offsets[part] : order.offsets[part + 1]]


def relabel_nodes(graph: RawGraph, assignment: Assignment) -> dict[str, NodeOrder]:
    """Assign new ids to the nodes of every type, part by part. Nodes in one part keep their order."""
    check_assignment(assignment, graph)
    orders = {}
    for ntype, num_nodes in graph.num_nodes.items():
        part_of = np.asarray(assignment.part_of[ntype])
        # A stable sort keeps the nodes' order. NumPy uses the faster radix sort for 16-bit keys.
        key_dtype = np.uint16 if assignment.num_parts <= 1 << 16 else np.int32
        new_to_old = np.argsort(part_of.astype(key_dtype), kind="stable")
        new_to_old = new_to_old.astype(id_dtype(num_nodes), copy=False)
        old_to_new = np.empty_like(new_to_old)
        old_to_new[new_to_old] = np.arange(num_nodes, dtype=new_to_old.dtype)

        part_sizes = np.bincount(part_of, minlength=assignment.num_parts)
        offsets = np.concatenate([[0], np.cumsum(part_sizes)])
        orders[ntype] = NodeOrder(new_to_old=new_to_old, old_to_new=old_to_new, offsets=offsets)
    return orders


def relabel_edges(graph: RawGraph, etype: EdgeType, sources: NodeOrder, destinations: NodeOrder) -> EdgeOrder:
    """Order one type's edges by (new destination, new source, original edge id).

    This takes linear time and temporary memory for 2 E ids. Raises DatasetError if an edge names a node that
    does not exist.
    """
    check_ends(graph, etype)
    src, dst = graph.edges[etype]
    dtype = id_dtype(len(src))
    by_source = np.empty(len(src), dtype=dtype)
    new_to_old = np.arange(len(src), dtype=dtype)
    indptr = _count(dst, destinations.old_to_new)

    # Sorting by source, and then stably by destination, gives ascending sources per destination.
    _fill(src, sources.old_to_new, new_to_old, _count(src, sources.old_to_new), by_source)
    _fill(dst, destinations.old_to_new, by_source, indptr[:-1].copy(), new_to_old)
    del by_source
    indices = np.empty(len(src), dtype=sources.old_to_new.dtype)
    _gather_twice(src, sources.old_to_new, new_to_old, indices)
    edge_offsets = indptr[destinations.offsets]
    return EdgeOrder(indptr=indptr, indices=indices, new_to_old=new_to_old, offsets=edge_offsets)


def check_ends(graph: RawGraph, etype: EdgeType) -> None:
    """Check that one type's edges start and end at existing nodes.

    Raises DatasetError if there is no node with an id, and ConfigError if there are more sources than
    destinations or fewer.
    """
    source_type, _, destination_type = etype
    src, dst = graph.edges[etype]
    check_ids(src, graph.num_nodes[source_type], "src", f"edges {etype}")
    check_ids(dst, graph.num_nodes[destination_type], "dst", f"edges {etype}")
    if len(src) != len(dst):
        raise ConfigError(f"edge type {etype} has {len(src)} sources but {len(dst)} destinations")


def relabel_on_disk(
    graph: RawGraph, etype: EdgeType, orders: Mapping[str, NodeOrder], workspace: Workspace
) -> tuple[EdgeOrder, dict[str, Array]]:
    """Order one type's edges like :func:`relabel_edges`, but on disk, and their columns with them.

    Arrays are memory-mapped from a stage in ``workspace``. Raises ConfigError if the workspace has too little
    memory.
    """
    src, dst = graph.edges[etype]
    sources = orders[etype[0]]
    destinations = orders[etype[2]]
    ids = graph.edge_ids.get(etype)
    columns = graph.edge_data.get(etype, {})
    num_edges = len(src)

    # ``read_rows`` takes the first row and the row after the last.
    def make_chunks(read_rows: Callable[[int, int], Array]) -> Chunks:
        def iterate_chunks(step: int) -> Iterator[Array]:
            for first in range(0, num_edges, step):
                yield read_rows(first, min(first + step, num_edges))

        return iterate_chunks

    def cut_rows(column: Array) -> Chunks:
        return make_chunks(lambda first, end: column[first:end])

    id_info = ColumnInfo(dtype=id_dtype(num_edges).__name__, row_shape=())
    id_chunks = make_chunks(np.arange) if ids is None else cut_rows(ids)
    carried_columns = [EdgeColumn(id_info, id_chunks)]
    for name, column in columns.items():
        carried_columns.append(EdgeColumn(make_column_info(column, name), cut_rows(column)))
    stream = EdgeStream(
        sources=make_chunks(lambda first, end: sources.old_to_new[src[first:end]]),
        destinations=make_chunks(lambda first, end: destinations.old_to_new[dst[first:end]]),
        columns=carried_columns,
        num_sources=len(sources.new_to_old),
        num_destinations=len(destinations.new_to_old),
    )

    def sort(folder: Path) -> None:
        check_ends(graph, etype)
        budget = sorting_budget(graph, workspace.budget)
        description = f"Ordering the edges {':'.join(etype)}"
        with progress(description, 3 * num_edges, enabled=workspace.ranks.is_first) as advance:
            sort_edges(stream, folder, budget, order=_order_of_bucket, advance=advance, ranks=workspace.ranks)

    folder = workspace.stage(f"order{list(graph.edges).index(etype)}", sort, shared=True)
    indptr = map_spill(folder, "indptr")
    order = EdgeOrder(
        indptr=indptr,
        indices=map_spill(folder, "indices"),
        new_to_old=map_spill(folder, "carried0"),
        offsets=indptr[destinations.offsets],
    )
    ordered_columns = {}
    for i, (name, column) in enumerate(columns.items(), 1):
        ordered_columns[name] = map_spill(folder, f"carried{i}").reshape(column.shape)
    return order, ordered_columns


_NODE_BYTES = 32
"""Memory per node while edges are ordered: owners, permutations and sorting."""


def sorting_budget(graph: RawGraph, budget: Budget) -> Budget:
    """Return the budget that node arrays leave to order edges. Raise ConfigError if it is too small."""
    num_bytes = _NODE_BYTES * graph.total_nodes
    if budget.work < num_bytes + MIN_WORK_BYTES:
        raise ConfigError(
            f"{graph.total_nodes} nodes take {format_bytes(num_bytes)} of memory, more than "
            f"--memory grants; {budget.remedy(num_bytes + MIN_WORK_BYTES)}"
        )
    return budget.with_reserved(num_bytes)


def _order_of_bucket(destinations: Array, sources: Array) -> Array:
    """Sort the edges in a bucket by (destination, source, position), and return their positions."""
    # A key has the source in its high bits, and the edge's position in its low bits.
    position_bits = len(sources).bit_length()
    source_bits = int(sources.max(initial=0)).bit_length()
    assert source_bits + position_bits < 64, "a bucket of more edges than there is memory"
    row_ends = np.cumsum(np.bincount(destinations, minlength=1))
    keys = np.empty(len(sources), np.int64)
    _sort_rows(destinations, sources, row_ends, position_bits, keys)
    return keys


@njit(cache=True, nogil=True)
def _sort_rows(destinations: Array, sources: Array, ends: Array, bits: int, keys: Array) -> None:
    """Sort edges by (destination, source, position), and write their positions into ``keys``.

    ``ends`` says where each destination's edges end in the result. It is overwritten with where they begin.
    """
    for edge in range(len(destinations) - 1, -1, -1):
        node = destinations[edge]
        ends[node] -= 1
        keys[ends[node]] = np.int64(sources[edge]) << bits | edge

    for node in range(len(ends)):
        last = ends[node + 1] if node + 1 < len(ends) else len(keys)
        keys[ends[node] : last].sort()

    mask = (np.int64(1) << bits) - 1
    for position in range(len(keys)):
        keys[position] &= mask


@njit(cache=True, nogil=True)
def _count(ids: Array, old_to_new: Array) -> Array:
    # One more slot lets the cumulative sum begin with 0.
    num_edges = np.zeros(len(old_to_new) + 1, dtype=np.int64)
    for edge in range(len(ids)):
        num_edges[old_to_new[ids[edge]] + 1] += 1
    return np.cumsum(num_edges)


@njit(cache=True, nogil=True)
def _fill(ids: Array, old_to_new: Array, order: Array, cursor: Array, out: Array) -> None:
    for position in range(len(order)):
        edge = order[position]
        node = old_to_new[ids[edge]]
        out[cursor[node]] = edge
        cursor[node] += 1


@njit(cache=True, nogil=True)
def _gather_twice(ids: Array, old_to_new: Array, edges: Array, out: Array) -> None:
    for position in range(len(edges)):
        out[position] = old_to_new[ids[edges[position]]]


CHUNK_BYTES = 1 << 24
"""Row bytes to gather at a time, so that writing needs no second copy of a column."""


def write_dataset(
    graph: RawGraph,
    assignment: Assignment,
    folder: Path,
    *,
    quality: Mapping[str, object] | None = None,
    overwrite: bool = False,
    bfloat16: Collection[tuple[str | EdgeType, str]] = (),
    feature_dtype: FeatureDtype | None = None,
    workspace: Workspace | None = None,
) -> Manifest:
    """Renumber nodes and edges in ``graph``, and write it atomically as a dataset.

    One process calls this, or all ranks in ``workspace``, which share the parts. Temporary memory is about
    three times the edge ids, or what ``workspace`` grants. Features are streamed.

    Args:
        graph: Graph to write. Sparse features are stored dense.
        folder: Folder that does not exist or is empty. With ``overwrite`` it may be a dataset to replace.
        quality: Figures for the manifest, JSON values only.
        bfloat16: (node or edge type, column) for each uint16 array that holds bfloat16 bits.
        feature_dtype: Dtype for the columns that :func:`resolve_dtypes` selects. They are converted while
            writing.
        workspace: Workspace to order edges on disk. The result is the same.

    Raises:
        ConfigError: graph and assignment do not match, or a value cannot be stored.
        DatasetError: an edge names a node that does not exist.
        StorageError: ``folder`` must not be replaced, or cannot be written.
    """
    folder = Path(folder).absolute()
    check_target(folder, overwrite)
    check_feature_dtype(feature_dtype, graph)
    num_edges = {etype: len(src) for etype, (src, _) in graph.edges.items()}
    node_columns = _make_column_infos(graph.num_nodes, graph.node_data, bfloat16, feature_dtype)
    edge_columns = _make_column_infos(num_edges, graph.edge_data, bfloat16, feature_dtype)
    user_ids = _find_user_id_kinds(graph)
    parameters = dict(assignment.parameters)
    if graph.class_names:
        parameters["class_names"] = {ntype: list(names) for ntype, names in graph.class_names.items()}
    settings = _check_settings({"parameters": parameters, "quality": dict(quality or {})})

    orders = relabel_nodes(graph, assignment)
    disk_orders = {}
    ranks = Ranks()
    if workspace is not None:
        ranks = workspace.ranks
        for etype in graph.edges:
            disk_orders[etype] = relabel_on_disk(graph, etype, orders, workspace)
    num_bytes = 16 * (graph.total_nodes + graph.total_edges)
    num_bytes += _count_column_bytes(graph.num_nodes, node_columns)
    num_bytes += _count_column_bytes(num_edges, edge_columns)
    with (
        name_write_failures(folder),
        shared_folder(folder, ranks, lambda temp, target: put_in_place(temp, target, overwrite)) as partial,
        progress("Writing the dataset", num_bytes // ranks.count, enabled=ranks.is_first) as advance,
    ):
        writer = _PartWriter(partial, assignment.num_parts, advance, ranks)
        for ntype in graph.num_nodes:
            writer.write_node_type(graph, ntype, orders[ntype], node_columns[ntype])
        edge_offsets = {}
        for etype in graph.edges:
            disk_order = disk_orders.get(etype)
            offsets = writer.write_edge_type(graph, etype, orders, edge_columns[etype], disk_order)
            edge_offsets[etype] = offsets
        manifest = Manifest(
            name=graph.name,
            num_parts=assignment.num_parts,
            node_offsets={ntype: order.offsets for ntype, order in orders.items()},
            edge_offsets=edge_offsets,
            node_columns=node_columns,
            edge_columns=edge_columns,
            num_classes=dict(graph.num_classes),
            user_ids=user_ids,
            method=assignment.method,
            seed=assignment.seed,
            parameters=settings["parameters"],
            quality=settings["quality"],
            files=writer.files(),
        )
        # The first rank writes the files that describe the dataset.
        if not ranks.is_first:
            return manifest
        return write_manifest(manifest, partial)


class _PartWriter:
    """Writes the files in all parts. Out of R ranks, rank r writes each part p with p mod R = r."""

    def __init__(self, folder: Path, num_parts: int, advance: Advance, ranks: Ranks) -> None:
        self._folder = folder
        self._num_parts = num_parts
        self._advance = advance
        self._ranks = ranks
        self._part = 0
        self._files: dict[str, FileInfo | None] = {}

    def files(self) -> dict[str, FileInfo]:
        """Return the files that all ranks have written. All ranks must call this."""
        # The caller flushes the folder to disk on rank 0's machine only.
        for path, info in self._files.items():
            if info is not None and not self._ranks.is_first:
                synchronise(self._folder / path)

        infos_by_rank = self._ranks.gather_objects([info and asdict(info) for info in self._files.values()])
        files = {}
        for path, infos in zip(self._files, zip(*infos_by_rank, strict=True), strict=True):
            # One rank has written the file, and the other ranks report None.
            (info,) = filter(None, infos)
            files[path] = FileInfo(**info)
        return files

    def _write(self, path: str, write: Callable[[Path], FileInfo]) -> None:
        self._files[path] = None
        if self._part % self._ranks.count == self._ranks.rank:
            self._files[path] = write(self._folder / path)

    def write_node_type(
        self, graph: RawGraph, ntype: str, order: NodeOrder, columns: Mapping[str, ColumnInfo]
    ) -> None:
        user_ids = graph.user_ids.get(ntype)
        for part in range(self._num_parts):
            self._part = part
            folder = node_folder(part, ntype)
            rows = rows_of(order, part)
            self._write_column(f"{folder}/original_ids.arrow", IDS, rows, None)
            path = f"{folder}/user_ids.arrow"
            if user_ids is not None and user_ids.dtype.kind == "U":
                self._write(path, partial(_write_texts, user_ids, rows))
            elif user_ids is not None:
                self._write_column(path, IDS, rows, user_ids)

            for name, info in columns.items():
                column = graph.node_data[ntype][name]
                description = f"node data {name!r} of {ntype!r}"
                self._write_column(data_path(folder, name), info, rows, column, description)

    def write_edge_type(
        self,
        graph: RawGraph,
        etype: EdgeType,
        orders: Mapping[str, NodeOrder],
        columns: Mapping[str, ColumnInfo],
        on_disk: tuple[EdgeOrder, Mapping[str, Array]] | None,
    ) -> Array:
        """Write one type's edges. Return (P + 1,) offsets that tell where each part's edge ids begin."""
        source, _, destination = etype
        data: Mapping[str, NodeColumn] = graph.edge_data.get(etype, {})
        ids = graph.edge_ids.get(etype)
        if on_disk is None:
            order = relabel_edges(graph, etype, orders[source], orders[destination])
        else:
            order, data = on_disk
            ids = order.new_to_old

        node_offsets = orders[destination].offsets
        source_info = make_column_info(order.indices, "sources")
        for part in range(self._num_parts):
            self._part = part
            folder = edge_folder(part, etype)
            edge_range = range(*order.offsets[part : part + 2].tolist())
            # A part's row pointers begin at 0.
            indptr = order.indptr[node_offsets[part] : node_offsets[part + 1] + 1] - edge_range.start
            self._column(f"{folder}/indptr.arrow", IDS, len(indptr), [indptr])
            self._write_column(f"{folder}/indices.arrow", source_info, edge_range, order.indices)
            rows: Array | range = edge_range
            if on_disk is None:
                rows = rows_of(order, part)
            self._write_column(f"{folder}/original_ids.arrow", IDS, rows, ids)
            for name, info in columns.items():
                description = f"edge data {name!r} of {etype}"
                self._write_column(data_path(folder, name), info, rows, data[name], description, ids)
        return order.offsets

    def _write_column(
        self,
        path: str,
        info: ColumnInfo,
        rows: Array | range,
        column: NodeColumn | None,
        description: str = "",
        ids: Array | None = None,
    ) -> None:
        """Write the ``rows`` from ``column``, or ``rows`` itself without one. Messages show the row's id."""
        dtype = numpy_dtype(info.dtype)
        step = max(1, CHUNK_BYTES // max(1, _count_row_bytes(info)))
        narrows = False
        if description and column is not None and column.dtype.kind == "f":
            narrows = column.dtype.name != info.dtype

        def chunks() -> Iterator[Array]:
            for first in range(0, len(rows), step):
                piece = rows[first : first + step]
                chunk = np.asarray(piece) if column is None else take_rows(column, piece)
                if narrows:
                    yield narrow(chunk, info.dtype, description, piece, ids)
                else:
                    yield chunk.astype(dtype, copy=False)

        self._column(path, info, len(rows), chunks())

    def _column(self, path: str, info: ColumnInfo, num_rows: int, chunks: Iterable[Array]) -> None:
        def count_bytes() -> Iterator[Array]:
            for chunk in chunks:
                yield chunk
                self._advance(chunk.nbytes)

        self._write(path, lambda file: write_column(file, info, int(num_rows), count_bytes()))


def _write_texts(texts: Array, rows: Array, path: Path) -> FileInfo:
    step = max(1, CHUNK_BYTES // max(1, texts.itemsize))

    def iterate_texts() -> Iterator[Any]:
        for first in range(0, len(rows), step):
            yield pa.array(texts[rows[first : first + step]].tolist(), pa.large_string())

    num_bytes = sum(len(text_buffers(texts)[1]) for texts in iterate_texts())
    return write_strings(path, len(rows), num_bytes, iterate_texts(), iterate_texts())


def take_rows(column: NodeColumn, rows: Array | range) -> Array:
    if isinstance(rows, range):
        assert isinstance(column, np.ndarray), "only nodes have sparse rows, and their rows are arrays"
        return column[rows.start : rows.stop]
    return column.dense(rows) if isinstance(column, SparseRows) else column[rows]


def _make_column_infos(
    num_rows: Mapping[K, int],
    data: Mapping[K, Mapping[str, NodeColumn]],
    bfloat16: Collection[tuple[str | EdgeType, str]],
    feature_dtype: FeatureDtype | None,
) -> dict[K, dict[str, ColumnInfo]]:
    """Describe all columns by dtype and row shape. Raise ConfigError if a column cannot be stored."""
    infos: dict[K, dict[str, ColumnInfo]] = {}
    for type_key, count in num_rows.items():
        columns = data.get(type_key, {})
        dtypes = resolve_dtypes(columns, feature_dtype)
        infos[type_key] = {}
        for name, column in columns.items():
            is_bfloat16 = (type_key, name) in bfloat16
            info = _check_column(column, count, f"{type_key}/{name}", is_bfloat16)
            infos[type_key][name] = replace(info, dtype=dtypes.get(name, info.dtype))
    return infos


def _check_column(column: NodeColumn, num_rows: int, description: str, is_bfloat16: bool) -> ColumnInfo:
    if not column.shape or column.shape[0] != num_rows:
        raise ConfigError(f"{description} has shape {column.shape}, but there are {num_rows} rows")
    if isinstance(column, SparseRows):
        dtype = make_column_info(column.values, description).dtype
        info = ColumnInfo(dtype=dtype, row_shape=(column.num_columns,))
    else:
        info = make_column_info(column, description)

    if not is_bfloat16:
        return info
    if info.dtype != "uint16":
        raise ConfigError(f"{description} is {info.dtype}; the bits of bfloat16 values are passed as uint16")
    return ColumnInfo(dtype="bfloat16", row_shape=info.row_shape)


def _find_user_id_kinds(graph: RawGraph) -> dict[str, str]:
    """Return ``string`` or ``int64`` for each node type that has user ids."""
    kinds = {}
    for ntype, ids in graph.user_ids.items():
        count = graph.num_nodes.get(ntype, 0)
        if ids.shape != (count,):
            raise ConfigError(f"user ids of {ntype!r} have shape {ids.shape}, but there are {count} nodes")
        if ids.dtype.kind == "U":
            kinds[ntype] = "string"
        elif ids.dtype.kind in "iu" and ids.max(initial=0) <= np.iinfo(np.int64).max:
            kinds[ntype] = "int64"
        else:
            raise ConfigError(
                f"user ids of {ntype!r} have dtype {ids.dtype}; give unicode strings or "
                "integers that fit int64"
            )
    return kinds


def _count_row_bytes(info: ColumnInfo) -> int:
    return math.prod(info.row_shape) * numpy_dtype(info.dtype).itemsize


def _count_column_bytes(num_rows: Mapping[K, int], columns: Mapping[K, Mapping[str, ColumnInfo]]) -> int:
    num_bytes = 0
    for type_key, infos in columns.items():
        row_bytes = sum(_count_row_bytes(info) for info in infos.values())
        num_bytes += num_rows[type_key] * row_bytes
    return num_bytes


def _check_settings(settings: Mapping[str, dict[str, object]]) -> Mapping[str, dict[str, object]]:
    """Return the settings as JSON will read them back. Raise ConfigError if a value is not a JSON value."""
    for name, values in settings.items():
        for key, value in values.items():
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError) as problem:
                raise ConfigError(
                    f"{name}[{key!r}] is {value!r}, which is not a JSON value ({problem}); "
                    "use text, numbers, lists or dicts"
                ) from problem
    read: Mapping[str, dict[str, object]] = json.loads(json.dumps(settings))
    return read
