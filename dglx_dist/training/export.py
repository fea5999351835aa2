"""Export of node rows and ranked edges to Parquet files with the user's node ids."""

from __future__ import annotations

import json
import math
import os
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
from dglx_dist.data.storage.files import (
    check_replaceable,
    name_write_failures,
    place_folder,
    replace_atomically,
)
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
"""Size of a row group, and of the rows that a rank holds at a time, in bytes."""
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

    A table has the column ``id`` (the dataset's user id, text or int64, or the int64 id before partitioning
    if there is none) and the column ``name`` (a number per row, or fixed-size lists of them), in no
    particular order. ``pyarrow.dataset.dataset(folder)`` reads the files as one table. For a mapping, each
    node type has its own folder below ``folder``. ``_index.json`` lists the files.

    The folder must be on a disk that all ranks share. It is replaced atomically. Parquet does not support
    bfloat16, so it is written as float32.

    Args:
        rows: A tensor over the nodes of one type, or a mapping from node type to such a tensor.
        g: The graph of these nodes.
        folder: Must not exist or be empty, unless ``overwrite``.
        name: Name of the column of ``rows``.
        overwrite: Replace the result of an earlier call.
        more: More columns for the same nodes. Only if ``rows`` is a single tensor.
        classes: Class names for the column ``class``. ``rows`` are then (N,) numbers of classes.

    Returns:
        ``folder``.

    Raises:
        ConfigError: on all ranks, if ``rows`` are not rows of the nodes of ``g`` or an argument is invalid.
        StorageError: on all ranks, if the folder has other contents or a rank cannot write to it.
        PeerError: a rank is dead or silent.
    """

    def read_tables() -> dict[str, dict[str, DistTensor]]:
        for column in (name, *(more or ())):
            if not isinstance(column, str) or column in ("", ID) or not column.isprintable():
                raise ConfigError(f"name={column!r} must be printable text other than {ID!r}")
        tables = {folder: {name: tensor} for folder, tensor in _find_tables(rows, g).items()}
        for column, values in (more or {}).items():
            tables[""][column] = _find_tables(values, g)[""]
        g.kvstore.fence()
        return tables

    # This is also a barrier: afterwards the rows of every rank are complete.
    tables = run_on_all_ranks(g.session, read_tables, ConfigError)
    _write_folder(g.session, folder, overwrite, lambda partial: _write_share(tables, g, partial, classes))
    return Path(folder)


def write_edges(
    edges: RankedEdges, g: DistGraph, folder: str | Path, *, scores: bool = False, overwrite: bool = False
) -> None:
    """Write ranked edges with the user's ids, as :func:`write_embeddings` writes rows. All ranks call this.

    The columns are those of :meth:`LinkEvaluation.test_edges`. ``relation`` is a name, ``best`` is a list,
    and ``scores`` adds ``best_scores``. With several pairs of node types, each has its own folder
    ``SOURCE.DESTINATION``.
    """

    def write_share(partial: Path) -> list[dict[str, Any]]:
        # All ids are read once, because each call reads the texts from the files of all parts.
        ntypes = dict.fromkeys(chain.from_iterable(edges))
        ids = {ntype: pa.array(g.user_ids(np.arange(g.num_nodes(ntype)), ntype)) for ntype in ntypes}
        names = pa.array([etype[1] for etype in g.canonical_etypes], pa.string())
        files = []
        for (source, destination), columns in edges.items():
            subfolder = f"{safe_name(source)}.{safe_name(destination)}" if len(edges) > 1 else ""
            path = Path(subfolder) / f"part-{g.session.topology.rank:05d}.parquet"
            u, v = ids[source], ids[destination]
            table = _edge_table(columns, {"source": u, "relation": names, "destination": v, "best": v})
            table = table if scores else table.drop(["best_scores"])
            with name_write_failures(partial):
                _write_file(partial / path, table.schema, table.to_batches(_EDGES_PER_GROUP))
            entry = {"source": source, "destination": destination}
            files.append({**entry, "path": path.as_posix(), "num_rows": len(table)})

        return files

    _write_folder(g.session, folder, overwrite, write_share)


def _edge_table(columns: Mapping[str, Tensor], ids: Mapping[str, pa.Array]) -> pa.Table:
    is_candidate = columns["best_scores"] > -math.inf
    arrays = {}
    offsets = np.concatenate([[0], is_candidate.sum(1).cumsum(0).numpy()]).astype(np.int32)
    for name in filter(columns.__contains__, _COLUMNS):
        values = columns[name]
        is_list = values.dim() == 2
        array = pa.array((values[is_candidate] if is_list else values).numpy())
        array = ids[name].take(array) if name in ids else array
        arrays[name] = pa.ListArray.from_arrays(offsets, array) if is_list else array

    return pa.table(arrays)


def _write_folder(
    session: Session, folder: str | Path, overwrite: bool, write_share: Callable[[Path], list[dict[str, Any]]]
) -> None:
    """Replace ``folder`` by the files of all ranks. ``write_share`` returns this rank's index entries."""
    is_first = session.topology.rank == 0

    def find_target() -> Path:
        target = Path(folder).absolute()
        if is_first:
            check_target(target, overwrite)
        return target

    target = run_on_all_ranks(session, find_target)
    with open_partial_folder(session, target) as partial:
        files = gather_json(run_on_all_ranks(session, lambda: write_share(partial)), session)
        run_on_all_ranks(session, lambda: _finish(partial, target, files, overwrite) if is_first else None)


def _write_file(path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Arrow refuses a path that is not UTF-8, but accepts its bytes.
    with pa.OSFile(os.fsencode(path), "wb") as file, pq.ParquetWriter(file, schema) as writer:
        for batch in batches:
            writer.write_batch(batch, row_group_size=len(batch))


def write_relations(decoder: nn.Module, g: DistGraph, folder: str | Path) -> None:
    """Write ``_relations.parquet`` with a decoder's parameters per edge type, if any. All ranks call it."""
    columns = {name: pa.array(list(rows.detach().cpu().numpy())) for name, rows in decoder.named_parameters()}

    def write() -> None:
        target = Path(folder).absolute() / RELATIONS
        names = [":".join(etype) for etype in g.canonical_etypes]
        with name_write_failures(target), replace_atomically(target) as partial:
            pq.write_table(pa.table({"etype": names, **columns}), partial)

    run_on_all_ranks(g.session, write if columns and g.session.topology.rank == 0 else lambda: None)


def _find_tables(rows: DistTensor | Mapping[str, DistTensor], g: DistGraph) -> dict[str, DistTensor]:
    """Return the rows to write by subfolder, which is "" for a single tensor.

    Raises ConfigError unless all are rows of the nodes of this graph.
    """
    is_mapping = isinstance(rows, Mapping)
    if is_mapping and not rows:
        raise ConfigError("there are no rows to write. Pass a DistTensor or a mapping from node type to one.")
    tensors: Mapping[str | None, Any] = dict(rows) if is_mapping else {None: rows}  # type: ignore[arg-type]  # dict() takes a mapping here
    tables = {}
    for ntype, tensor in tensors.items():
        label = "rows" if ntype is None else f"rows[{ntype!r}]"
        if not isinstance(tensor, DistTensor):
            raise ConfigError(
                f"{label} is a {type(tensor).__name__}. Pass a DistTensor over all nodes, like the result of "
                "layerwise_inference() or the weight of a DistEmbedding."
            )

        policy = tensor.part_policy
        owner = str(policy.type_name)
        if policy.kind != "node" or owner not in g.ntypes or len(tensor) != g.num_nodes(owner):
            raise ConfigError(
                f"{label} is partitioned as {policy.policy_str} and has {len(tensor)} rows, but it must have "
                f"the nodes of this graph ({', '.join(g.ntypes)})"
            )

        if ntype not in (None, owner):
            raise ConfigError(f"{label} has the nodes of type {owner!r}. Use that key.")
        if math.prod(tensor.shape[1:]) == 0:
            raise ConfigError(f"{label} has shape {tuple(tensor.shape)}, but a row needs at least one value")
        tables[safe_name(owner) if is_mapping else ""] = tensor

    return tables


def check_target(target: Path, overwrite: bool) -> None:
    """Raise StorageError if :func:`write_embeddings` may not replace ``target``."""
    check_replaceable(target, overwrite, _CONTENT, _is_export)


def _is_export(folder: Path) -> bool:
    index = folder / EXPORT_INDEX
    return index.is_file() and FORMAT in index.read_text(encoding="utf-8", errors="replace")


def _write_share(
    tables: Mapping[str, Mapping[str, DistTensor]], g: DistGraph, partial: Path, classes: Sequence[str]
) -> list[dict[str, Any]]:
    """Write the rows that this rank owns as one Parquet file for each table. Return its index entries."""
    rank = g.session.topology.rank
    files = []
    for subfolder, columns in tables.items():
        rows = next(iter(columns.values()))
        ntype = str(rows.part_policy.type_name)
        first, last = rows.part_policy.owned_range
        path = Path(subfolder) / f"part-{rank:05d}.parquet"
        is_text = g.dataset.manifest.user_ids.get(ntype) == "string"
        types = {
            ID: pa.string() if is_text else pa.int64(),
            **{name: _find_row_type(column) for name, column in columns.items()},
        }
        schema = pa.schema([*types.items(), *([(CLASS, pa.string())] if classes else [])])
        widths = [math.prod(column.shape[1:]) * max(column.dtype.itemsize, 4) for column in columns.values()]
        row_bytes = 8 + sum(widths)
        step = max(ROW_GROUP_BYTES // row_bytes, 1)
        pieces = (np.arange(start, min(start + step, last)) for start in range(first, last, step))
        with name_write_failures(partial):
            batches = (_make_batch(g, schema, columns, ids, classes) for ids in pieces)
            _write_file(partial / path, schema, batches)
        files.append({"ntype": ntype, "path": path.as_posix(), "num_rows": last - first})

    return files


def _make_batch(
    g: DistGraph, schema: pa.Schema, columns: Mapping[str, DistTensor], ids: Array, classes: Sequence[str]
) -> pa.RecordBatch:
    rows = next(iter(columns.values()))
    values = [_read_user_ids(g, str(rows.part_policy.type_name), ids, schema.field(ID).type)]
    for name, column in columns.items():
        values.append(_to_arrow(column[torch.from_numpy(ids)], schema.field(name).type))
    if classes:
        values.append(pa.array(classes, pa.string()).take(values[1]))
    return pa.RecordBatch.from_arrays(values, schema=schema)


def _finish(partial: Path, target: Path, files: list[Any], overwrite: bool) -> None:
    entries = list(chain.from_iterable(files))
    text = json.dumps({"format": FORMAT, "version": 1, "files": entries}, indent=1)
    with name_write_failures(target):
        (partial / EXPORT_INDEX).write_text(text, encoding="utf-8")
        place_folder(partial, target, overwrite, _CONTENT, _is_export)


def _find_row_type(rows: DistTensor) -> pa.DataType:
    dtype = torch.float32 if rows.dtype == torch.bfloat16 else rows.dtype
    row_type = pa.bool_()
    if dtype != torch.bool:
        row_type = pa.from_numpy_dtype(torch.empty(0, dtype=dtype).numpy().dtype)
    for size in reversed(rows.shape[1:]):
        row_type = pa.list_(row_type, int(size))
    return row_type


def _read_user_ids(g: DistGraph, ntype: str, ids: Array, dtype: pa.DataType) -> pa.Array:
    if dtype == pa.int64():
        return pa.array(g.user_ids(ids, ntype), type=dtype)
    return pa.array(np.concatenate(list(_read_texts(g, ntype, ids))), type=dtype)


def _read_texts(g: DistGraph, ntype: str, ids: Array) -> Iterator[Array]:
    """Yield the text ids of a range of local nodes, part by part. No files of other machines are read."""
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
