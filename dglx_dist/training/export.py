"""Export node rows and ranked edges to Parquet files with the user's node ids."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn

from dglx_dist.comm.collectives import gather_json, run_on_all_ranks
from dglx_dist.data.storage.columns import safe_name
from dglx_dist.data.storage.files import check_replaceable, name_write_failures, place_folder
from dglx_dist.data.storage.object_store import ObjectStore, find_store
from dglx_dist.data.storage.remote import open_output
from dglx_dist.errors import ConfigError, StorageError
from dglx_dist.graph.dist_tensor import DistTensor
from dglx_dist.graph.shared_memory import open_partial_folder
from dglx_dist.records import Array
from dglx_dist.training.config import EXPORT_INDEX

if TYPE_CHECKING:
    from dglx_dist.comm.session import Session
    from dglx_dist.graph.dist_graph import DistGraph
    from dglx_dist.training.link import RankedEdges


RELATIONS = "_relations.parquet"
FORMAT = "dglx_dist rows"
_CONTENT = "exported rows"
ID, CLASS = "id", "class"
ROW_GROUP_BYTES = 1 << 24
"""Bytes per row group, and per chunk of rows that a rank holds at a time."""
_EDGES_PER_GROUP = 1 << 16
_COLUMNS = ("source", "relation", "destination", "score", "rank", "source_rank", "best", "best_scores")


def write_embeddings(
    rows: DistTensor | Mapping[str, DistTensor],
    g: DistGraph,
    folder: str | Path,
    *,
    name: str = "embedding",
    overwrite: bool = False,
    more: Mapping[str, DistTensor] | None = None,
    classes: Sequence[str] = (),
) -> Path:
    """Write node rows as Parquet files, one per rank. Every rank must call this.

    A table has the column ``id`` and the column ``name``, in no particular order. ``id`` is the dataset's
    user id (text or int64), or the int64 id before partitioning if there is none. ``name`` is a number per
    row, or fixed-size lists of numbers. ``pyarrow.dataset.dataset(folder)`` reads the files as one table. For
    a mapping, each node type has its own folder below ``folder``. ``_index.json`` lists the files.

    The folder must be on a disk that all ranks share. It is replaced atomically. At an address in an object
    store, ranks upload their files, and the index lists them when all are there. Parquet does not support
    bfloat16, so it is written as float32.

    Args:
        rows: A tensor over the nodes of one type, or a mapping from node type to such a tensor.
        g: The graph that has these nodes.
        folder: Must not exist or be empty, unless ``overwrite``.
        name: Column name for ``rows``.
        overwrite: Replace the result from an earlier call.
        more: More columns for the same nodes. Only if ``rows`` is a single tensor.
        classes: Class names for the column ``class``. ``rows`` are then (N,) class numbers.

    Returns:
        ``folder``.

    Raises:
        ConfigError: On all ranks, if ``rows`` do not belong to nodes in ``g`` or an argument is invalid.
        StorageError: On all ranks, if the folder has other contents or a rank cannot write to it.
        PeerError: If a rank is dead or silent.
    """

    def read_tables() -> dict[str, dict[str, DistTensor]]:
        for column in (name, *(more or ())):
            if not isinstance(column, str) or column in ("", ID) or not column.isprintable():
                raise ConfigError(f"name={column!r} must be printable text other than {ID!r}")
        tables = {subfolder: {name: tensor} for subfolder, tensor in _find_tables(rows, g).items()}
        for column, values in (more or {}).items():
            tables[""][column] = _find_tables(values, g)[""]
        g.kvstore.fence()
        return tables

    # The call is also a barrier: afterwards every rank's rows are complete.
    tables = run_on_all_ranks(g.session, read_tables, ConfigError)
    _write_folder(g.session, folder, overwrite, lambda partial: _write_share(tables, g, partial, classes))
    return Path(folder)


def write_edges(
    edges: RankedEdges, g: DistGraph, folder: str | Path, *, scores: bool = False, overwrite: bool = False
) -> None:
    """Write ranked edges with the user's ids, as :func:`write_embeddings` writes rows. All ranks call this.

    The columns are those in :meth:`LinkEvaluation.test_edges`. ``relation`` is a name, ``best`` is a list,
    and ``scores`` adds ``best_scores``. With several pairs of node types, each has its own folder
    ``SOURCE.DESTINATION``.
    """

    def write_share(partial: Path) -> list[dict[str, Any]]:
        # All ids are read once, because each call reads the texts from all parts' files.
        ids = {}
        for ntype in dict.fromkeys(chain.from_iterable(edges)):
            ids[ntype] = pa.array(g.user_ids(np.arange(g.num_nodes(ntype)), ntype))
        relations = pa.array([etype[1] for etype in g.canonical_etypes], pa.string())

        files = []
        for (source, destination), columns in edges.items():
            path = Path(f"part-{g.session.topology.rank:05d}.parquet")
            if len(edges) > 1:
                path = Path(f"{safe_name(source)}.{safe_name(destination)}") / path
            texts = {"source": ids[source], "relation": relations, "destination": ids[destination]}
            table = _make_edge_table(columns, {**texts, "best": ids[destination]})
            if not scores:
                table = table.drop(["best_scores"])
            with name_write_failures(partial):
                _write_file(partial / path, table.schema, table.to_batches(_EDGES_PER_GROUP))
            entry = {"source": source, "destination": destination}
            files.append({**entry, "path": path.as_posix(), "num_rows": len(table)})
        return files

    _write_folder(g.session, folder, overwrite, write_share)


def _make_edge_table(columns: Mapping[str, Tensor], texts: Mapping[str, pa.Array]) -> pa.Table:
    """Build a table from the columns.

    If ``texts`` has a column's name, its entries replace the column's numbers. A matrix becomes a column with
    lists, without the missing destinations at the end of each row.
    """
    is_candidate = columns["best_scores"] > -math.inf
    list_ends = is_candidate.sum(1).cumsum(0).numpy()
    offsets = np.concatenate([[0], list_ends]).astype(np.int32)
    arrays = {}
    for name in _COLUMNS:
        if name not in columns:
            continue
        values = columns[name]
        is_matrix = values.dim() == 2
        array = pa.array((values[is_candidate] if is_matrix else values).numpy())
        if name in texts:
            array = texts[name].take(array)
        arrays[name] = pa.ListArray.from_arrays(offsets, array) if is_matrix else array
    return pa.table(arrays)


def _write_folder(
    session: Session, folder: str | Path, overwrite: bool, write_share: Callable[[Path], list[dict[str, Any]]]
) -> None:
    """Replace ``folder`` by the files from all ranks. ``write_share`` returns this rank's index entries."""
    is_rank_0 = session.topology.rank == 0
    # A wrong folder or a missing package on one rank is an error on all.
    store = run_on_all_ranks(session, lambda: find_store(folder), ConfigError)
    if store is not None:
        _write_objects(session, store, overwrite, write_share)
        return

    def find_target() -> Path:
        target = Path(folder).absolute()
        if is_rank_0:
            check_target(target, overwrite)
        return target

    target = run_on_all_ranks(session, find_target)
    with open_partial_folder(session, target) as partial:
        entries = gather_json(run_on_all_ranks(session, lambda: write_share(partial)), session)
        run_on_all_ranks(
            session, lambda: _publish(partial, target, entries, overwrite) if is_rank_0 else None
        )


def _write_objects(
    session: Session, store: ObjectStore, overwrite: bool, write_share: Callable[[Path], list[dict[str, Any]]]
) -> None:
    """Replace all objects of ``store`` by the files of all ranks. An index without files comes first."""
    is_rank_0 = session.topology.rank == 0

    with tempfile.TemporaryDirectory(prefix="dglx-rows-") as name:
        folder = Path(name)

        def begin() -> None:
            if is_rank_0:
                _check_objects(store, overwrite)
                _write_index(folder, [])
                store.put(EXPORT_INDEX, folder / EXPORT_INDEX)

        def upload() -> list[dict[str, Any]]:
            entries = write_share(folder)
            for path in folder.rglob("*.parquet"):
                store.put(path.relative_to(folder).as_posix(), path)
            return entries

        def finish() -> None:
            if is_rank_0:
                _write_index(folder, entries)
                store.put(EXPORT_INDEX, folder / EXPORT_INDEX)
                written = {EXPORT_INDEX, *(entry["path"] for entry in chain.from_iterable(entries))}
                for object_name in store.list().keys() - written:
                    store.delete(object_name)

        run_on_all_ranks(session, begin)
        entries = gather_json(run_on_all_ranks(session, upload), session)
        run_on_all_ranks(session, finish)


def _write_file(path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Arrow refuses a path that is not UTF-8, but accepts its bytes.
    with pa.OSFile(os.fsencode(path), "wb") as file, pq.ParquetWriter(file, schema) as writer:
        for batch in batches:
            writer.write_batch(batch, row_group_size=len(batch))


def write_relations(decoder: nn.Module, g: DistGraph, folder: str | Path) -> None:
    """Write ``_relations.parquet`` with a decoder's parameters per edge type, if any. All ranks call it."""

    def write() -> None:
        parameters = dict(decoder.named_parameters())
        if not parameters or g.session.topology.rank > 0:
            return
        columns: dict[str, Any] = {"etype": [":".join(etype) for etype in g.canonical_etypes]}
        for name, rows in parameters.items():
            columns[name] = pa.array(list(rows.detach().cpu().numpy()))
        with open_output(Path(folder) / RELATIONS) as partial:
            pq.write_table(pa.table(columns), partial)

    run_on_all_ranks(g.session, write)


def _find_tables(rows: DistTensor | Mapping[str, DistTensor], g: DistGraph) -> dict[str, DistTensor]:
    """Return the rows to write by subfolder. A single tensor has the subfolder "".

    Raises ConfigError if a value does not have a row for each node of its type.
    """
    if not isinstance(rows, Mapping):
        _find_node_type("rows", rows, g)
        return {"": rows}
    if not rows:
        raise ConfigError("there are no rows to write. Pass a DistTensor or a mapping from node type to one.")
    tables = {}
    for key, tensor in rows.items():
        label = f"rows[{key!r}]"
        ntype = _find_node_type(label, tensor, g)
        if key != ntype:
            raise ConfigError(f"{label} has the nodes of type {ntype!r}. Use that key.")
        tables[safe_name(ntype)] = tensor
    return tables


def _find_node_type(label: str, tensor: Any, g: DistGraph) -> str:
    """Find the node type that ``tensor`` has a row per node for. ConfigError if there is none."""
    if not isinstance(tensor, DistTensor):
        raise ConfigError(
            f"{label} is a {type(tensor).__name__}. Pass a DistTensor over all nodes, like the result of "
            "layerwise_inference() or the weight of a DistEmbedding."
        )
    policy = tensor.part_policy
    ntype = str(policy.type_name)
    if policy.kind != "node" or ntype not in g.ntypes or len(tensor) != g.num_nodes(ntype):
        raise ConfigError(
            f"{label} is partitioned as {policy.policy_str} and has {len(tensor)} rows, but it must have "
            f"the nodes of this graph ({', '.join(g.ntypes)})"
        )
    if math.prod(tensor.shape[1:]) == 0:
        raise ConfigError(f"{label} has shape {tuple(tensor.shape)}, but a row needs at least one value")
    return ntype


def check_target(target: Path, overwrite: bool) -> None:
    """Raise StorageError if :func:`write_embeddings` may not replace a folder, or objects at an address."""
    store = find_store(target)
    if store is None:
        check_replaceable(target.absolute(), overwrite, _CONTENT, _is_export)
    else:
        _check_objects(store, overwrite)


def _check_objects(store: ObjectStore, overwrite: bool) -> None:
    names = store.list()
    if not names:
        return
    if not overwrite:
        raise StorageError(f"{store.locate()} exists already; choose another address, or give overwrite=True")
    if EXPORT_INDEX not in names or FORMAT.encode() not in store.read_small(EXPORT_INDEX):
        raise StorageError(
            f"{store.locate()} does not hold {_CONTENT}, so it is not overwritten; choose another address, "
            "or delete the objects yourself"
        )


def _is_export(folder: Path) -> bool:
    index = folder / EXPORT_INDEX
    return index.is_file() and FORMAT in index.read_text(encoding="utf-8", errors="replace")


def _write_share(
    tables: Mapping[str, Mapping[str, DistTensor]], g: DistGraph, partial: Path, classes: Sequence[str]
) -> list[dict[str, Any]]:
    """Write the rows that this rank owns as one Parquet file for each table. Return its index entries."""
    files = []
    for subfolder, columns in tables.items():
        policy = next(iter(columns.values())).part_policy
        ntype = str(policy.type_name)
        first, last = policy.owned_range
        path = Path(subfolder) / f"part-{g.session.topology.rank:05d}.parquet"

        is_text = g.dataset.manifest.user_ids.get(ntype) == "string"
        fields = [(ID, pa.string() if is_text else pa.int64())]
        row_bytes = 8  # for the id
        for name, column in columns.items():
            fields.append((name, _find_row_type(column)))
            # Rows are converted to float32 at least while they are written.
            row_bytes += math.prod(column.shape[1:]) * max(column.dtype.itemsize, 4)
        if classes:
            fields.append((CLASS, pa.string()))
        schema = pa.schema(fields)

        with name_write_failures(partial):
            _write_file(partial / path, schema, _read_batches(g, schema, columns, row_bytes, classes))
        files.append({"ntype": ntype, "path": path.as_posix(), "num_rows": last - first})
    return files


def _read_batches(
    g: DistGraph, schema: pa.Schema, columns: Mapping[str, DistTensor], row_bytes: int, classes: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """Yield the rows that this rank owns in the columns that ``schema`` lists, with the user's ids first."""
    policy = next(iter(columns.values())).part_policy
    first, last = policy.owned_range
    num_rows = max(ROW_GROUP_BYTES // row_bytes, 1)
    for start in range(first, last, num_rows):
        ids = np.arange(start, min(start + num_rows, last))
        arrays = [_read_user_ids(g, str(policy.type_name), ids, schema.field(ID).type)]
        for name, column in columns.items():
            arrays.append(_to_arrow(column[torch.from_numpy(ids)], schema.field(name).type))
        if classes:
            # The column after the ids has the class numbers.
            arrays.append(pa.array(classes, pa.string()).take(arrays[1]))
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _publish(partial: Path, target: Path, entries: list[Any], overwrite: bool) -> None:
    """Write an index over the files from all ranks, and move the complete folder to ``target``."""
    with name_write_failures(target):
        _write_index(partial, entries)
        place_folder(partial, target, overwrite, _CONTENT, _is_export)


def _write_index(folder: Path, entries: list[Any]) -> None:
    files = list(chain.from_iterable(entries))
    text = json.dumps({"format": FORMAT, "version": 1, "files": files}, indent=1)
    (folder / EXPORT_INDEX).write_text(text, encoding="utf-8")


def to_column(rows: Tensor) -> pa.Array:
    """Convert (n, ...) ``rows`` to a table column: numbers, or lists of numbers."""
    return _to_arrow(rows, _find_row_type(rows))


def _find_row_type(rows: DistTensor | Tensor) -> pa.DataType:
    """Return a row's type in a table: a number, or lists of numbers for rows with a shape."""
    dtype = torch.float32 if rows.dtype == torch.bfloat16 else rows.dtype
    row_type = pa.from_numpy_dtype(torch.empty(0, dtype=dtype).numpy().dtype)
    for size in reversed(rows.shape[1:]):
        row_type = pa.list_(row_type, int(size))
    return row_type


def _read_user_ids(g: DistGraph, ntype: str, ids: Array, dtype: pa.DataType) -> pa.Array:
    if dtype == pa.int64():
        return pa.array(g.user_ids(ids, ntype), type=dtype)
    return pa.array(np.concatenate(list(_read_texts(g, ntype, ids))), type=dtype)


def _read_texts(g: DistGraph, ntype: str, ids: Array) -> Iterator[Array]:
    """Yield the text ids for a range of local nodes, part by part. Files on other machines are not read."""
    offsets = g.dataset.manifest.node_offsets[ntype]
    for part in range(len(offsets) - 1):
        first = max(ids[0], offsets[part])
        last = min(ids[-1] + 1, offsets[part + 1])
        if first < last:
            texts = g.dataset.part(part).user_ids(ntype)
            if texts is None:
                raise StorageError(f"part {part} lacks the ids of {ntype!r} nodes. Partition it again.")
            yield texts[first - offsets[part] : last - offsets[part]]


def _to_arrow(rows: Tensor, dtype: pa.DataType) -> pa.Array:
    if rows.dtype == torch.bfloat16:
        rows = rows.float()
    values = pa.array(rows.reshape(-1).numpy())
    for size in reversed(rows.shape[1:]):
        values = pa.FixedSizeListArray.from_arrays(values, int(size))
    return values.cast(dtype)
