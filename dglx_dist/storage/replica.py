"""The whole structure of one edge type, put together once from the parts and memory-mapped."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dglx_dist.errors import ConfigError, StorageError
from dglx_dist.progress import progress
from dglx_dist.records import Array, ColumnInfo, EdgeType
from dglx_dist.storage.columns import read_column, write_column
from dglx_dist.storage.folders import partial_folder, publish, replace_folder, seal, unseal
from dglx_dist.storage.layout import CACHE, edge_type_name
from dglx_dist.storage.reader import StoredDataset

_LOG = logging.getLogger(__name__)
_INDPTR_FILE, _INDICES_FILE = "indptr.arrow", "indices.arrow"
_INDPTR = ColumnInfo(dtype="int64", row_shape=())
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
    asks and used by all later ones as long as the manifest is the same; its checksums are compared each time,
    and a damaged one is logged and made anew. Processes may race: each writes under a name of its own and the
    first to finish wins. In a folder that cannot be written the copy is made in memory, and that is logged.

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
    if damage := _damage(target):
        if target.exists():
            _LOG.warning("%s", damage)
        try:
            _build(dataset, etype, target)
        except OSError as problem:
            if problem.errno in _READ_ONLY:
                _LOG.warning("%s cannot be written (%s): the structure is copied to memory", target, problem)
                return _in_memory(dataset, etype)
            raise StorageError(f"{target} cannot be written ({problem}); make room for it") from problem
    return CSC(
        indptr=read_column(target / _INDPTR_FILE, "indptr", _INDPTR, manifest.num_nodes(etype[2]) + 1),
        indices=read_column(target / _INDICES_FILE, "indices", None, manifest.num_edges(etype)),
    )


def _damage(target: Path) -> str:
    """Return what is wrong with the copy, "" if nothing."""
    try:
        unseal(target)
    except StorageError as problem:
        return str(problem)
    return ""


def _build(dataset: StoredDataset, etype: EdgeType, target: Path) -> None:
    manifest = dataset.manifest
    num_edges = manifest.num_edges(etype)
    with (
        partial_folder(target) as partial,
        progress("Putting the structure together", num_edges, enabled=num_edges > 1 << 24) as advance,
    ):
        num_rows = manifest.num_nodes(etype[2]) + 1
        indptr = write_column(partial / _INDPTR_FILE, _INDPTR, num_rows, _indptr_pieces(dataset, etype))
        info = ColumnInfo(dtype=dataset.part(0).indices(etype).dtype.name, row_shape=())

        def pieces() -> Iterator[Array]:
            for part in range(manifest.num_parts):
                indices = dataset.part(part).indices(etype)
                yield indices
                advance(len(indices))

        indices = write_column(partial / _INDICES_FILE, info, num_edges, pieces())
        seal(partial, {}, {_INDPTR_FILE: indptr, _INDICES_FILE: indices})
        if not publish(partial, target) and _damage(target):
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
