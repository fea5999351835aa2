"""Opening of a dataset: verification, memory-mapped parts, and the structure of the whole graph."""

from __future__ import annotations

import errno
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, final

import numpy as np

from dglx_dist.data.external_memory import Workspace, concatenate_chunks
from dglx_dist.data.storage.arrays import ArrayCache, checksum_of
from dglx_dist.data.storage.columns import (
    CACHE,
    STRINGS,
    FileInfo,
    check_file,
    data_path,
    edge_folder,
    edge_type_name,
    id_dtype,
    node_folder,
    read_column,
    read_strings,
    safe_name,
    string_pieces,
)
from dglx_dist.data.storage.files import PARTIAL_SUFFIX, read_small_file, replace_atomically
from dglx_dist.data.storage.manifest import Manifest, StoredArray, part_arrays, read_manifest
from dglx_dist.errors import ConfigError, DatasetError, StorageError, shorten_list
from dglx_dist.progress import progress
from dglx_dist.records import Array, EdgeType, RawGraph

Verify: TypeAlias = Literal["auto", "full", "never"]

_LOG = logging.getLogger(__name__)
_TEXTS_AT_ONCE = 1 << 16
_PROGRESS_BYTES = 1 << 28
"""Minimum number of bytes for which progress is shown."""

_VALUES = 1 << 18
"""Number of values compared at a time, which fit in the processor's cache."""
_STAMPS = f"{CACHE}/verified.json"

Stamps: TypeAlias = dict[str, list[object]]
"""Stamps of verified files by path: [size, modification time in ns, time of the inode's change in ns,
checksum]. If values were checked against ranges, the checksum of the manifest with the ranges follows. The
time of an inode cannot be set, so copies, and stamps that came with a dataset, do not count as verified."""


def verify_files(folder: Path, manifest: Manifest, verify: Verify) -> None:
    """Compare the files on this machine with their checksums, and ids, masks and labels with their ranges.

    ``full`` reads all files. ``auto`` skips files with the same size and times as at the last verification,
    which are recorded in ``cache/verified.json``. If that cannot be written, a warning is logged, and every
    opening reads all files. Raises StorageError if a file is damaged, and DatasetError if a value is out of
    range.
    """
    if verify == "never":
        return
    files = manifest.files
    parts = range(manifest.num_parts)
    arrays = (item for part in parts for item in part_arrays(manifest, part).items())
    ids = {path: array for path, array in arrays if array.upper_bound is not None}
    stamps = _read_stamps(folder) if verify == "auto" else {}
    current = {
        path: [*_make_stamp(folder / path, info), *([manifest.checksum] if path in ids else [])]
        for path, info in files.items()
        if (folder / path).exists()
    }
    changed = [path for path in current if stamps.get(path) != current[path]]
    if not changed:
        return
    num_bytes = sum(files[path].num_bytes for path in changed)
    with progress("Checking files", num_bytes, enabled=num_bytes > _PROGRESS_BYTES) as advance:
        for path in changed:
            check_file(folder / path, files[path], "copy it again or partition the graph again")
            if path in ids:
                _check_values(folder, path, ids[path])
            advance(files[path].num_bytes)

    _write_stamps(folder, current)


def _check_values(folder: Path, path: str, array: StoredArray) -> None:
    name = Path(path).stem
    bound = array.upper_bound or 0
    values = read_column(folder / path, name, array.info if "/data/" in path else None, array.num_rows)
    where = f"{folder}: part {path.split('/')[0].removeprefix('part')} is wrong: in {path}, {name}"
    remedy = "copy the part again or partition the graph again"
    dtypes = ("int32", "int64") if array.info is None else (array.info.dtype,)
    if values.dtype.name not in dtypes or values.ndim != 1 + len(array.info.row_shape if array.info else ()):
        types = " or ".join(dtypes)
        raise DatasetError(f"{where} is {values.dtype} of shape {values.shape}, expected {types}; {remedy}")
    items = values.reshape(-1).view(np.uint8) if values.dtype == np.bool_ else values
    i = find_first_invalid(items, bound, least=array.minimum, is_indptr=name == "indptr")
    if i is not None:
        expected = f"below {bound}" if array.minimum is None else f"0 to {bound - 1}"
        if name == "indptr":
            expected = f"numbers that never fall, from 0 at first to {bound - 1} at last"
        raise DatasetError(f"{where}[{i}] is {items[i]}, expected {expected} ({array.refers_to}); {remedy}")


def find_first_invalid(
    values: Array, bound: int, *, least: int | None = 0, is_indptr: bool = False
) -> int | None:
    """Return the position of the first of (K,) integers outside [``least``, ``bound``), or None.

    With ``is_indptr`` there must be at least one, and they must also rise from 0 to ``bound`` - 1.
    """
    if is_indptr and values[0] != 0:
        return 0
    for start in range(0, len(values), _VALUES):
        # The chunk includes the last value of the previous one, to compare neighbours.
        first = max(start - 1, 0)
        chunk = values[first : start + _VALUES]
        # Minimum and maximum need no temporary arrays, which takes a third of the time.
        is_low = least is not None and chunk.min() < least
        if is_low or chunk.max() >= bound or (is_indptr and (chunk[1:] < chunk[:-1]).any()):
            is_wrong = (chunk >= bound) | (chunk < (chunk.min() if least is None else least))
            if is_indptr:
                is_wrong[1:] |= chunk[1:] < chunk[:-1]
            return first + int(is_wrong.argmax())
    return len(values) - 1 if is_indptr and values[-1] != bound - 1 else None


def _make_stamp(path: Path, info: FileInfo) -> list[object]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, info.checksum]


def _read_stamps(folder: Path) -> Stamps:
    try:
        stamps = json.loads(read_small_file(folder / _STAMPS))
        # If the checksum is wrong, all files are read again.
        return stamps["files"] if stamps["crc32"] == checksum_of(stamps["files"]) else {}
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return {}


def _write_stamps(folder: Path, stamps: Stamps) -> None:
    target = folder / _STAMPS
    try:
        target.parent.mkdir(exist_ok=True)
        with replace_atomically(target) as partial:
            partial.write_text(json.dumps({"crc32": checksum_of(stamps), "files": stamps}))
    except OSError as error:
        _LOG.warning(
            "%s cannot be written (%s), so every opening of this dataset reads all its files; "
            "open it with verify='never' to avoid that",
            target,
            error.strerror,
        )


K = TypeVar("K")


def open_dataset(folder: str | Path, *, verify: Verify = "auto", checked: bool = False) -> StoredDataset:
    """Open a partitioned dataset, and clean its cache. Not collective.

    Args:
        verify: See :func:`verify_files`. ``never`` also trusts the cache.
        checked: Whether another process of this machine has just opened it with the same ``verify``.

    Raises:
        StorageError: the dataset is missing, half-written, damaged, or of a newer format version.
        DatasetError: an id in it is out of range.
    """
    if verify not in ("auto", "full", "never"):
        raise ConfigError(f"verify is {verify!r}; choose 'auto', 'full' or 'never'")
    folder = Path(folder).absolute()
    if folder.name.endswith(PARTIAL_SUFFIX):
        raise StorageError(f"{folder} was left behind by a write that was killed; delete it")
    manifest = read_manifest(folder)
    cache = ArrayCache(folder / CACHE, manifest.checksum, trusted=verify == "never")
    if not checked:
        cache.clean()

    try:
        verify_files(folder, manifest, "never" if checked and verify == "full" else verify)
    except PermissionError as error:
        path = error.filename or folder
        raise StorageError(f"{path} cannot be read by this user; change its permissions") from error

    return StoredDataset(folder, manifest, cache)


@final
class StoredDataset:
    """The parts of a dataset. This machine may only have some of them."""

    def __init__(self, folder: Path, manifest: Manifest, cache: ArrayCache) -> None:
        self.folder = folder
        self.manifest = manifest
        self.cache = cache
        self._parts: dict[int, StoredPart] = {}

    def has_part(self, part: int) -> bool:
        return not self._find_missing_files(part)

    def part(self, part: int) -> StoredPart:
        """Return one part without reading it. Raise StorageError if its files are not on this machine."""
        if part not in self._parts:
            paths = self._find_missing_files(part)
            if paths:
                raise StorageError(
                    f"part {part} of {self.folder} is not on this machine: {shorten_list(paths)} missing; "
                    f"copy the folder part{part} here"
                )
            self._parts[part] = StoredPart(self.folder, self.manifest, part)
        return self._parts[part]

    def _find_missing_files(self, part: int) -> list[str]:
        manifest = self.manifest
        if not 0 <= part < manifest.num_parts:
            raise ConfigError(f"{self.folder} has the parts 0..{manifest.num_parts - 1}, not {part}")
        return [path for path in part_arrays(manifest, part) if not (self.folder / path).exists()]


@final
class StoredPart:
    """One part of a dataset. Its arrays are read-only memory-mapped views that are opened on first use.

    Methods raise ConfigError for an unknown type or name, and StorageError for a missing or damaged file.
    """

    def __init__(self, folder: Path, manifest: Manifest, part: int) -> None:
        self._folder = folder
        self._manifest = manifest
        self._part = part
        self._stored = part_arrays(manifest, part)
        self._arrays: dict[str, Array] = {}

    def indptr(self, etype: EdgeType) -> Array:
        """Return the (n_dst + 1,) int64 row pointers of the in-edges of the owned destinations, from 0."""
        return self._map_array(f"{self._edge_folder(etype)}/indptr.arrow")

    def indices(self, etype: EdgeType) -> Array:
        """Return the (E_part,) int32 or int64 new global source ids, ascending within a destination."""
        return self._map_array(f"{self._edge_folder(etype)}/indices.arrow")

    def node_data(self, ntype: str, name: str) -> Array:
        """Return the (n, *row) rows of one node tensor. bfloat16 is returned as bits in uint16."""
        path = data_path(self._node_folder(ntype), name)
        _check_known(self._manifest.node_columns[ntype], name, f"tensor of {ntype!r} nodes", self._folder)
        return self._map_array(path)

    def edge_data(self, etype: EdgeType, name: str) -> Array:
        """Return the (E_part, *row) rows of one edge tensor, in the order of :meth:`indices`."""
        path = data_path(self._edge_folder(etype), name)
        _check_known(self._manifest.edge_columns[etype], name, f"tensor of {etype} edges", self._folder)
        return self._map_array(path)

    def original_node_ids(self, ntype: str) -> Array:
        """Return the (n,) int64 ascending ids of the owned nodes in the source."""
        return self._map_array(f"{self._node_folder(ntype)}/original_ids.arrow")

    def original_edge_ids(self, etype: EdgeType) -> Array:
        """Return the (E_part,) int64 positions of the edges in the source."""
        return self._map_array(f"{self._edge_folder(etype)}/original_ids.arrow")

    def user_ids(self, ntype: str, workspace: Workspace | None = None) -> Array | None:
        """Return the user's (n,) int64 or unicode ids, or None. Strings are copied."""
        path = f"{self._node_folder(ntype)}/user_ids.arrow"
        kind = self._manifest.user_ids.get(ntype)
        if kind is None:
            return None
        num_rows = self._stored[path].num_rows
        if kind != "string" or workspace is None or not num_rows:
            return self._map_array(path)
        pieces = partial(string_pieces, self._folder / path, path, num_rows, _TEXTS_AT_ONCE)
        (ids,) = concatenate_chunks(workspace, f"ids-{safe_name(ntype)}", [pieces], num_rows)
        return ids

    def _node_folder(self, ntype: str) -> str:
        _check_known(self._manifest.node_columns, ntype, "node type", self._folder)
        return node_folder(self._part, ntype)

    def _edge_folder(self, etype: EdgeType) -> str:
        _check_known(self._manifest.edge_columns, etype, "edge type", self._folder)
        return edge_folder(self._part, etype)

    def _map_array(self, path: str) -> Array:
        # Two threads may both map a file. Either view is valid.
        if path not in self._arrays:
            file = self._folder / path
            stored = self._stored[path]
            self._arrays[path] = (
                read_strings(file, path, stored.num_rows)
                if stored.info == STRINGS
                else read_column(file, path, stored.info, stored.num_rows)
            )
        return self._arrays[path]


def _check_known(mapping: Mapping[K, Any], key: K, kind: str, folder: Path) -> None:
    if key not in mapping:
        names = ", ".join(repr(name) for name in mapping) or "none"
        raise ConfigError(f"{folder} has no {kind} {key!r} (known: {names})")


def load_raw_graph(dataset: StoredDataset, workspace: Workspace | None = None) -> RawGraph:
    """Return the graph of a dataset with one part, with edges in their stored order.

    Arrays are memory-mapped, except for destinations. These are in memory, or in a stage of the
    ``workspace``. Raises ConfigError if the dataset has several parts, or a tensor is stored as bfloat16.
    """
    manifest = dataset.manifest
    if manifest.num_parts != 1:
        raise ConfigError(
            f"{dataset.folder} already has {manifest.num_parts} parts; train on it, or partition the graph "
            "that it was made from"
        )

    for tensors in (*manifest.node_columns.values(), *manifest.edge_columns.values()):
        for name, info in tensors.items():
            if info.dtype == "bfloat16":
                raise ConfigError(
                    f"{dataset.folder} holds {name!r} as bfloat16; partition the graph that it was made from"
                )

    part = dataset.part(0)
    destinations = _expand_destinations(part, manifest, workspace)
    user_ids = {ntype: part.user_ids(ntype, workspace) for ntype in manifest.user_ids}
    return RawGraph(
        name=manifest.name,
        num_nodes={ntype: manifest.num_nodes(ntype) for ntype in manifest.node_types},
        edges={etype: (part.indices(etype), ends) for etype, ends in destinations.items()},
        node_data={
            ntype: {name: part.node_data(ntype, name) for name in columns}
            for ntype, columns in manifest.node_columns.items()
        },
        edge_data={
            etype: {name: part.edge_data(etype, name) for name in columns}
            for etype, columns in manifest.edge_columns.items()
        },
        edge_ids={etype: part.original_edge_ids(etype) for etype in manifest.edge_types},
        num_classes=dict(manifest.num_classes),
        class_names=manifest.class_names,
        user_ids={ntype: ids for ntype, ids in user_ids.items() if ids is not None},
    )


def _expand_destinations(
    part: StoredPart, manifest: Manifest, workspace: Workspace | None
) -> dict[EdgeType, Array]:
    etypes = manifest.edge_types
    num_edges = sum(map(manifest.num_edges, manifest.edge_types))
    makers = [
        partial(expand_indptr, part.indptr(etype), id_dtype(manifest.num_nodes(etype[2]))) for etype in etypes
    ]
    return dict(zip(etypes, concatenate_chunks(workspace, "edges", makers, num_edges), strict=True))


def expand_indptr(indptr: Array, dtype: Any, step: int = 1 << 20) -> Iterator[Array]:
    """Yield the row numbers of all values of a CSC in order, in at least one piece of at most ``step``.

    ``indptr`` are the (N + 1,) row pointers.
    """
    num_values = int(indptr[-1])
    for first in range(0, max(num_values, 1), step):
        last = min(first + step, num_values)
        low = int(np.searchsorted(indptr, first, side="right")) - 1
        high = int(np.searchsorted(indptr, last, side="left"))
        ends = np.clip(indptr[low : high + 1], first, last)
        yield np.repeat(np.arange(low, high, dtype=dtype), np.diff(ends))


_PROGRESS_EDGES = 1 << 24
_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)


@dataclass(frozen=True, kw_only=True)
class CSC:
    """Read-only in-edges of every node of one edge type, with new global ids."""

    indptr: Array
    """(N_dst + 1,) int64."""
    indices: Array
    """(E,) int32 or int64 source ids. The position of an edge is its global edge id."""


def open_structure(dataset: StoredDataset, etype: EdgeType) -> CSC:
    """Return the memory-mapped in-edges of one type of the whole graph.

    If there are several parts, the first process writes a copy into the cache. Later ones use it as long as
    the manifest is the same. A damaged copy is logged and rewritten. If several processes write a copy, the
    first to finish wins. If the folder cannot be written, a warning is logged, and the copy is made in
    memory. Raises StorageError if a part is damaged or not on this machine.
    """
    manifest = dataset.manifest
    if etype not in manifest.edge_offsets:
        raise ConfigError(f"{dataset.folder} has no edge type {etype} (known: {manifest.edge_types})")
    if manifest.num_parts == 1:
        part = dataset.part(0)
        return CSC(indptr=part.indptr(etype), indices=part.indices(etype))
    parts = range(manifest.num_parts)
    offsets = manifest.edge_offsets[etype]

    def pieces(name: str) -> Iterator[Array]:
        if name == "indptr":
            yield np.zeros(1, dtype=np.int64)
        for part in parts:
            stored = dataset.part(part)
            yield stored.indices(etype) if name == "indices" else stored.indptr(etype)[1:] + offsets[part]

    copy = dataset.cache.entry("structure", edge_type_name(etype))
    # Compiled code reads the arrays without checks, so their lengths are compared with the manifest.
    lengths = {"indptr": manifest.num_nodes(etype[2]) + 1, "indices": manifest.num_edges(etype)}
    total = sum(lengths.values())
    bounds = {"indptr": lengths["indices"] + 1, "indices": manifest.num_nodes(etype[0])}
    stored = copy.find(lengths, check=lambda arrays: _check_structure(arrays, lengths, bounds))
    try:
        if stored is None:
            with (
                copy.open_writer() as writer,
                progress("Assembling the structure", total, enabled=total > _PROGRESS_EDGES) as advance,
            ):
                for name, length in lengths.items():
                    stream = writer.stream(name, next(pieces(name)).dtype, (length,))
                    for piece in pieces(name):
                        stream.append(piece)
                        advance(len(piece))
                writer.publish(lengths, overwrite=copy.path.exists())
            stored = copy.read()
    except OSError as problem:
        if problem.errno not in _READ_ONLY:
            raise StorageError(f"{copy.path} cannot be written ({problem}); make room for it") from problem
        _LOG.warning("%s cannot be written (%s), so the structure is copied to memory", copy.path, problem)
        arrays = {name: np.concatenate(list(pieces(name))) for name in lengths}
        for array in arrays.values():
            array.flags.writeable = False
        return CSC(**arrays)

    return CSC(**stored[1])


def _check_structure(
    arrays: Mapping[str, Array], lengths: Mapping[str, int], bounds: Mapping[str, int]
) -> None:
    # The checksum shows that the copy is complete, but anyone may have written it.
    for name, length in lengths.items():
        array = arrays[name]
        if array.shape != (length,) or array.dtype.name not in ("int32", "int64"):
            raise ValueError(f"{name} is {array.dtype} of shape {array.shape}, expected {length} ids")
        if (at := find_first_invalid(array, bounds[name], is_indptr=name == "indptr")) is not None:
            raise ValueError(f"{name}[{at}] is {array[at]}, which is out of range")
