"""The whole structure of one edge type, put together once from the parts and memory-mapped."""

from __future__ import annotations

import errno
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dglx_dist.errors import ConfigError, StorageError
from dglx_dist.progress import progress
from dglx_dist.records import Array, ColumnInfo, EdgeType
from dglx_dist.storage.columns import read_column, write_column
from dglx_dist.storage.folders import partial_folder, publish, replace_folder
from dglx_dist.storage.layout import CACHE, edge_type_name
from dglx_dist.storage.reader import StoredDataset

_LOG = logging.getLogger(__name__)
_INDPTR = ColumnInfo(dtype="int64", row_shape=())
_STAMP = "stamp.json"
_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)


@dataclass(frozen=True, kw_only=True)
class CSC:
    """In-edges of every node of one edge type, over new global ids; read-only."""

    indptr: Array
    """(N_dst + 1,) int64."""
    indices: Array
    """(E,) int32 or int64 source ids; the position of an edge here is its global edge id."""


def open_structure(dataset: StoredDataset, etype: EdgeType) -> CSC:
    """Return the whole graph's in-edges of one type, memory-mapped.

    One part: the part's own arrays. More: a copy under ``<folder>/cache``, made by the first process that
    asks and used by all later ones as long as the manifest is the same. Processes may race: each writes
    under a name of its own and the first to finish wins. In a folder that cannot be written the copy is
    made in memory, and that is logged.

    Raises:
        ConfigError: there is no such edge type.
        StorageError: a part is not on this machine, or damaged.
    """
    manifest = dataset.manifest
    if etype not in manifest.edge_offsets:
        raise ConfigError(f"{dataset.folder} has no edge type {etype} (known: {manifest.edge_types})")
    if manifest.num_parts == 1:
        part = dataset.part(0)
        return CSC(indptr=part.indptr(etype), indices=part.indices(etype))
    target = dataset.folder / CACHE / f"structure-{manifest.checksum}" / edge_type_name(etype)
    if not _is_whole(target):
        try:
            _build(dataset, etype, target)
        except OSError as problem:
            if problem.errno in _READ_ONLY:
                _LOG.warning("%s cannot be written (%s): the structure is copied to memory", target, problem)
                return _in_memory(dataset, etype)
            raise StorageError(f"{target} cannot be written ({problem}); make room for it") from problem
    return CSC(
        indptr=read_column(target / "indptr.arrow", "indptr", _INDPTR, manifest.num_nodes(etype[2]) + 1),
        indices=read_column(target / "indices.arrow", "indices", None, manifest.num_edges(etype)),
    )


def _is_whole(target: Path) -> bool:
    """Whether the copy is as it was when it was made, by size and time of change."""
    try:
        stamp = json.loads((target / _STAMP).read_bytes())
        return bool(stamp == _stamp(target))
    except (OSError, ValueError):
        return False


def _stamp(folder: Path) -> dict[str, list[int]]:
    status = {name: (folder / name).stat() for name in ("indptr.arrow", "indices.arrow")}
    return {name: [found.st_size, found.st_mtime_ns] for name, found in status.items()}


def _build(dataset: StoredDataset, etype: EdgeType, target: Path) -> None:
    manifest = dataset.manifest
    num_edges = manifest.num_edges(etype)
    with (
        partial_folder(target) as partial,
        progress("Putting the structure together", num_edges, enabled=num_edges > 1 << 24) as advance,
    ):
        write_column(
            partial / "indptr.arrow",
            _INDPTR,
            manifest.num_nodes(etype[2]) + 1,
            _indptr_pieces(dataset, etype),
        )
        info = ColumnInfo(dtype=dataset.part(0).indices(etype).dtype.name, row_shape=())

        def pieces() -> Iterator[Array]:
            for part in range(manifest.num_parts):
                indices = dataset.part(part).indices(etype)
                yield indices
                advance(len(indices))

        write_column(partial / "indices.arrow", info, num_edges, pieces())
        (partial / _STAMP).write_text(json.dumps(_stamp(partial)))
        if not publish(partial, target) and not _is_whole(target):
            # Somebody else's damaged copy is in the way.
            replace_folder(partial, target)


def _indptr_pieces(dataset: StoredDataset, etype: EdgeType) -> Iterator[Array]:
    yield np.zeros(1, dtype=np.int64)
    offsets = dataset.manifest.edge_offsets[etype]
    for part in range(dataset.manifest.num_parts):
        yield dataset.part(part).indptr(etype)[1:] + offsets[part]


def _in_memory(dataset: StoredDataset, etype: EdgeType) -> CSC:
    parts = [dataset.part(part) for part in range(dataset.manifest.num_parts)]
    indptr = np.concatenate(list(_indptr_pieces(dataset, etype)))
    indices = np.concatenate([part.indices(etype) for part in parts])
    indptr.flags.writeable = indices.flags.writeable = False
    return CSC(indptr=indptr, indices=indices)
