"""A graph in memory and the owner of every node -> a dataset on disk."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from dglx_dist.errors import ConfigError
from dglx_dist.progress import Advance, progress
from dglx_dist.records import Array, Assignment, ColumnInfo, EdgeType, NodeColumn, RawGraph, SparseRows
from dglx_dist.storage.columns import FileInfo, column_info, numpy_dtype, write_column, write_strings
from dglx_dist.storage.folders import named_failures, partial_folder
from dglx_dist.storage.layout import data_path, edge_folder, node_folder
from dglx_dist.storage.manifest import Manifest, write_manifest
from dglx_dist.storage.relabel import NodeOrder, relabel_edges, relabel_nodes
from dglx_dist.storage.target import check_target, put_in_place

CHUNK_BYTES = 1 << 24
"""Rows are gathered this many bytes at a time, so that writing needs no second copy of a column."""

_IDS = ColumnInfo(dtype="int64", row_shape=())


def write_dataset(
    graph: RawGraph,
    assignment: Assignment,
    folder: Path,
    *,
    quality: Mapping[str, object] | None = None,
    overwrite: bool = False,
    bfloat16: Collection[tuple[str | EdgeType, str]] = (),
) -> Manifest:
    """Relabel ``graph`` and write it as a dataset that appears at ``folder`` whole or not at all.

    Needs about three times the edge ids beside the graph; features are streamed. Called by one process.

    Args:
        graph: What to write; sparse features are stored dense.
        assignment: The owner of every node.
        folder: Must not exist, or be empty, unless ``overwrite``.
        quality: Figures to keep in the manifest, JSON values only.
        overwrite: Replace the dataset that is there; it is lost only when the new one stands.
        bfloat16: (node or edge type, column) of each uint16 array that holds bfloat16 bits.

    Returns:
        The manifest of what was written.

    Raises:
        ConfigError: graph and assignment do not fit, or a value cannot be stored.
        StorageError: ``folder`` holds something that may not be replaced, or cannot be written.
    """
    folder = Path(folder).absolute()
    check_target(folder, overwrite)
    node_columns = _node_columns(graph, bfloat16)
    edge_columns = _edge_columns(graph, bfloat16)
    user_ids = _user_id_kinds(graph)
    settings = _json_only({"parameters": dict(assignment.parameters), "quality": dict(quality or {})})
    orders = relabel_nodes(graph, assignment)
    num_bytes = _expected_bytes(graph, node_columns, edge_columns)
    with (
        named_failures(folder),
        partial_folder(folder) as partial,
        progress("Writing the dataset", num_bytes) as advance,
    ):
        job = _Job(partial, assignment.num_parts, advance)
        for ntype in graph.num_nodes:
            job.write_node_type(graph, ntype, orders[ntype], node_columns[ntype])
        edge_offsets = {
            etype: job.write_edge_type(graph, etype, orders, edge_columns[etype]) for etype in graph.edges
        }
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
            files=job.files,
        )
        manifest = write_manifest(manifest, partial)
        put_in_place(partial, folder, overwrite)
    return manifest


class _Job:
    """One write: collects what each file came to."""

    def __init__(self, folder: Path, num_parts: int, advance: Advance) -> None:
        self._folder = folder
        self._num_parts = num_parts
        self._advance = advance
        self.files: dict[str, FileInfo] = {}

    def write_node_type(
        self, graph: RawGraph, ntype: str, order: NodeOrder, columns: Mapping[str, ColumnInfo]
    ) -> None:
        """Write ids and columns of one node type in all parts."""
        user_ids = graph.user_ids.get(ntype)
        for part in range(self._num_parts):
            folder = node_folder(part, ntype)
            rows = order.new_to_old[order.offsets[part] : order.offsets[part + 1]]
            self._ids(f"{folder}/original_ids.arrow", rows)
            if user_ids is not None:
                self._user_ids(f"{folder}/user_ids.arrow", user_ids, rows)
            for name, info in columns.items():
                take = _taker(graph.node_data[ntype][name])
                self._gathered(data_path(folder, name), info, rows, take)

    def write_edge_type(
        self,
        graph: RawGraph,
        etype: EdgeType,
        orders: Mapping[str, NodeOrder],
        columns: Mapping[str, ColumnInfo],
    ) -> Array:
        """Write structure, ids and columns of one edge type in all parts; return its offsets (P + 1,)."""
        source, _, destination = etype
        order = relabel_edges(graph, etype, orders[source], orders[destination])
        nodes = orders[destination].offsets
        for part in range(self._num_parts):
            folder = edge_folder(part, etype)
            first, last = int(order.offsets[part]), int(order.offsets[part + 1])
            rows = order.new_to_old[first:last]
            indptr = order.indptr[nodes[part] : nodes[part + 1] + 1] - first
            self._column(f"{folder}/indptr.arrow", _IDS, len(indptr), [indptr])
            indices = order.indices[first:last]
            info = ColumnInfo(dtype=indices.dtype.name, row_shape=())
            self._column(f"{folder}/indices.arrow", info, len(indices), [indices])
            self._ids(f"{folder}/original_ids.arrow", rows)
            for name, info in columns.items():
                take = _taker(graph.edge_data[etype][name])
                self._gathered(data_path(folder, name), info, rows, take)
        return order.offsets

    def _user_ids(self, path: str, user_ids: Array, rows: Array) -> None:
        if user_ids.dtype.kind == "U":
            self.files[path] = write_strings(self._folder / path, user_ids[rows])
        else:
            self._gathered(path, _IDS, rows, _taker(user_ids))

    def _ids(self, path: str, ids: Array) -> None:
        self._gathered(path, _IDS, ids, lambda rows: rows)

    def _gathered(self, path: str, info: ColumnInfo, rows: Array, take: Callable[[Array], Array]) -> None:
        """Write ``take(rows)`` a chunk at a time."""
        dtype = numpy_dtype(info.dtype)
        step = max(1, CHUNK_BYTES // max(1, math.prod(info.row_shape) * dtype.itemsize))
        chunks = (
            take(rows[first : first + step]).astype(dtype, copy=False) for first in range(0, len(rows), step)
        )
        self._column(path, info, len(rows), chunks)

    def _column(self, path: str, info: ColumnInfo, num_rows: int, chunks: Iterable[Array]) -> None:
        self.files[path] = write_column(self._folder / path, info, num_rows, self._counted(chunks))

    def _counted(self, chunks: Iterable[Array]) -> Iterator[Array]:
        for chunk in chunks:
            yield chunk
            self._advance(chunk.nbytes)


def _taker(column: NodeColumn) -> Callable[[Array], Array]:
    if isinstance(column, SparseRows):
        return column.dense
    return lambda rows: column[rows]


def _node_columns(
    graph: RawGraph, bfloat16: Collection[tuple[str | EdgeType, str]]
) -> dict[str, dict[str, ColumnInfo]]:
    return {
        ntype: {
            name: _checked_info(column, num_nodes, f"{ntype}/{name}", (ntype, name) in bfloat16)
            for name, column in graph.node_data.get(ntype, {}).items()
        }
        for ntype, num_nodes in graph.num_nodes.items()
    }


def _edge_columns(
    graph: RawGraph, bfloat16: Collection[tuple[str | EdgeType, str]]
) -> dict[EdgeType, dict[str, ColumnInfo]]:
    return {
        etype: {
            name: _checked_info(column, len(src), f"{etype}/{name}", (etype, name) in bfloat16)
            for name, column in graph.edge_data.get(etype, {}).items()
        }
        for etype, (src, _) in graph.edges.items()
    }


def _checked_info(column: NodeColumn, num_rows: int, what: str, is_bfloat16: bool) -> ColumnInfo:
    if not column.shape or column.shape[0] != num_rows:
        raise ConfigError(f"{what} has shape {column.shape}, but there are {num_rows} rows to describe")
    if isinstance(column, SparseRows):
        info = ColumnInfo(dtype=column_info(column.values, what).dtype, row_shape=(column.num_columns,))
    else:
        info = column_info(column, what)
    if not is_bfloat16:
        return info
    if info.dtype != "uint16":
        raise ConfigError(f"{what} has dtype {info.dtype}; the bits of bfloat16 values are passed as uint16")
    return ColumnInfo(dtype="bfloat16", row_shape=info.row_shape)


def _user_id_kinds(graph: RawGraph) -> dict[str, str]:
    kinds = {}
    for ntype, ids in graph.user_ids.items():
        if ids.shape != (graph.num_nodes.get(ntype, 0),):
            raise ConfigError(
                f"user ids of {ntype!r} have shape {ids.shape}, but there are "
                f"{graph.num_nodes.get(ntype, 0)} such nodes"
            )
        if ids.dtype.kind == "U":
            kinds[ntype] = "string"
        elif ids.dtype.kind in "iu" and ids.max(initial=0) <= np.iinfo(np.int64).max:
            kinds[ntype] = "int64"
        else:
            raise ConfigError(
                f"user ids of {ntype!r} have dtype {ids.dtype}; give unicode strings or what fits into int64"
            )
    return kinds


def _expected_bytes(
    graph: RawGraph,
    node_columns: Mapping[str, Mapping[str, ColumnInfo]],
    edge_columns: Mapping[EdgeType, Mapping[str, ColumnInfo]],
) -> int:
    rows = [(graph.num_nodes[ntype], columns) for ntype, columns in node_columns.items()]
    rows += [(len(graph.edges[etype][0]), columns) for etype, columns in edge_columns.items()]
    ids = 16 * (graph.total_nodes + graph.total_edges)
    return ids + sum(count * _row_bytes(info) for count, columns in rows for info in columns.values())


def _row_bytes(info: ColumnInfo) -> int:
    return math.prod(info.row_shape) * numpy_dtype(info.dtype).itemsize


def _json_only(settings: Mapping[str, dict[str, object]]) -> Mapping[str, dict[str, object]]:
    """Return ``settings`` as they will be read back, or say now which one JSON cannot hold."""
    for name, values in settings.items():
        for key, value in values.items():
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError) as problem:
                raise ConfigError(
                    f"{name}[{key!r}] is {value!r}, which JSON cannot hold ({problem})"
                ) from problem
    read: Mapping[str, dict[str, object]] = json.loads(json.dumps(settings))
    return read
