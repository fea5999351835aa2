"""Open a dataset: verify files, memory-map parts, and assemble the whole graph's structure."""

from __future__ import annotations

import errno
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, final

import numpy as np

from dglx_dist.data.external_memory import Workspace, concatenate_chunks
from dglx_dist.data.storage.arrays import ArrayCache, ArrayFolder, checksum_of
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
from dglx_dist.data.storage.remote import DatasetMirror
from dglx_dist.errors import ConfigError, DatasetError, StorageError, shorten_list
from dglx_dist.options import find_address
from dglx_dist.progress import progress
from dglx_dist.records import Array, EdgeType, RawGraph

Verify: TypeAlias = Literal["auto", "full", "never"]

_LOG = logging.getLogger(__name__)
_TEXTS_AT_ONCE = 1 << 16
_PROGRESS_BYTES = 1 << 28
"""Bytes from which progress is shown."""

_VALUES = 1 << 18
"""Number of values to compare at a time. They fit in the processor's cache."""
_STAMPS = f"{CACHE}/verified.json"

Stamps: TypeAlias = dict[str, list[object]]
"""Stamps by path, for files that were verified: [size, modification time in ns, inode change time in ns,
checksum]. If values were checked against ranges, the checksum of the manifest with the ranges follows. An
inode's change time cannot be set, so copied files never match a stamp and are verified again."""


def verify_files(folder: Path, manifest: Manifest, verify: Verify) -> None:
    """Compare the files on this machine with their checksums, and ids, masks and labels with their ranges.

    ``full`` reads all files. ``auto`` skips a file if its size and times match the last verification, which
    ``cache/verified.json`` records. If this record cannot be written, a warning is logged, and every opening
    reads all files.

    Raises:
        StorageError: a file is damaged.
        DatasetError: a value is out of range.
    """
    if verify == "never":
        return

    files = manifest.files
    bounded_arrays = {}
    for part in range(manifest.num_parts):
        for path, array in part_arrays(manifest, part).items():
            if array.upper_bound is not None:
                bounded_arrays[path] = array

    stamps = {}
    for path, info in files.items():
        if (folder / path).exists():
            stamps[path] = _make_stamp(folder / path, info)
            if path in bounded_arrays:
                stamps[path].append(manifest.checksum)

    changed = list(stamps)
    if verify == "auto":
        verified_stamps = _read_stamps(folder)
        changed = [path for path in stamps if stamps[path] != verified_stamps.get(path)]
    if not changed:
        return
    num_bytes = sum(files[path].num_bytes for path in changed)
    with progress("Checking files", num_bytes, enabled=num_bytes > _PROGRESS_BYTES) as advance:
        for path in changed:
            check_file(folder / path, files[path], "copy it again or partition the graph again")
            if path in bounded_arrays:
                _check_values(folder, path, bounded_arrays[path])
            advance(files[path].num_bytes)

    _write_stamps(folder, stamps)


def _check_values(folder: Path, path: str, array: StoredArray) -> None:
    """Raise DatasetError if an array has a value outside its bounds, or another dtype or shape."""
    name = Path(path).stem
    bound = array.upper_bound or 0
    # read_column checks the dtype and shape of user columns. Ids may be int32 or int64, so they are checked
    # below.
    info = array.info if "/data/" in path else None
    values = read_column(folder / path, name, info, array.num_rows)

    part = path.split("/")[0].removeprefix("part")
    where = f"{folder}: part {part} is wrong: in {path}, {name}"
    remedy = "copy the part again or partition the graph again"
    dtypes: tuple[str, ...] = ("int32", "int64")
    num_dimensions = 1
    if array.info is not None:
        dtypes = (array.info.dtype,)
        num_dimensions += len(array.info.row_shape)
    if values.dtype.name not in dtypes or values.ndim != num_dimensions:
        types = " or ".join(dtypes)
        raise DatasetError(f"{where} is {values.dtype} of shape {values.shape}, expected {types}; {remedy}")

    if values.dtype == np.bool_:
        # Damaged booleans may be neither 0 nor 1.
        values = values.reshape(-1).view(np.uint8)
    is_indptr = name == "indptr"
    i = find_first_invalid(values, bound, minimum=array.minimum, is_indptr=is_indptr)
    if i is None:
        return

    expected = f"0 to {bound - 1}"
    if is_indptr:
        expected = f"numbers that never fall, from 0 at first to {bound - 1} at last"
    elif array.minimum is None:
        expected = f"below {bound}"
    raise DatasetError(f"{where}[{i}] is {values[i]}, expected {expected} ({array.refers_to}); {remedy}")


def find_first_invalid(
    values: Array, bound: int, *, minimum: int | None = 0, is_indptr: bool = False
) -> int | None:
    """Return the position of the first invalid value, or None.

    Args:
        values: (K,) integers.
        bound: Values must be below it.
        minimum: Values must not be below it. None: no minimum.
        is_indptr: Whether values must also start at 0, never fall, and end at ``bound`` - 1. K must be above
            0 then.
    """
    if is_indptr and values[0] != 0:
        return 0

    for start in range(0, len(values), _VALUES):
        # The chunk starts with the previous chunk's last value, to compare neighbours.
        first = max(start - 1, 0)
        chunk = values[first : start + _VALUES]
        # Checking min and max takes a third of the time that comparisons with temporary arrays take.
        has_invalid = chunk.max() >= bound or (minimum is not None and chunk.min() < minimum)
        if is_indptr:
            has_invalid = has_invalid or (chunk[1:] < chunk[:-1]).any()
        if not has_invalid:
            continue

        is_invalid = chunk >= bound
        if minimum is not None:
            is_invalid |= chunk < minimum
        if is_indptr:
            is_invalid[1:] |= chunk[1:] < chunk[:-1]
        return first + int(is_invalid.argmax())

    if is_indptr and values[-1] != bound - 1:
        return len(values) - 1
    return None


def _make_stamp(path: Path, info: FileInfo) -> list[object]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, info.checksum]


def _read_stamps(folder: Path) -> Stamps:
    """Return the stamps from the last verification, or none if they are missing or damaged."""
    try:
        record = json.loads(read_small_file(folder / _STAMPS))
        if record["crc32"] == checksum_of(record["files"]):
            stamps: Stamps = record["files"]
            return stamps
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        pass
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
        folder: Folder of the dataset, or its address in an object store. For an address, a local copy is
            opened that fetches files when they are first needed.
        verify: See :func:`verify_files`. ``never`` also trusts the cache.
        checked: Whether another process on this machine has just opened the dataset with the same ``verify``.

    Raises:
        StorageError: the dataset is missing, half-written, damaged, or in a newer format version.
        DatasetError: an id in it is out of range.
    """
    if verify not in ("auto", "full", "never"):
        raise ConfigError(f"verify is {verify!r}; choose 'auto', 'full' or 'never'")
    address = find_address(folder)
    mirror = None if address is None else DatasetMirror(address)
    folder = Path(folder).absolute() if mirror is None else mirror.folder

    if folder.name.endswith(PARTIAL_SUFFIX):
        raise StorageError(f"{folder} was left behind by a write that was killed; delete it")
    manifest = read_manifest(folder)
    cache = ArrayCache(folder / CACHE, manifest.checksum, trusted=verify == "never")
    if not checked:
        cache.clean()

    if checked and verify == "full":
        verify = "never"
    try:
        verify_files(folder, manifest, verify)
    except PermissionError as error:
        path = error.filename or folder
        raise StorageError(f"{path} cannot be read by this user; change its permissions") from error

    return StoredDataset(folder, manifest, cache, mirror, "never" if verify == "never" else "auto")


@dataclass(frozen=True, kw_only=True)
class _LocalFiles:
    """A dataset's files on this machine, and the mirror that adds missing ones."""

    folder: Path
    manifest: Manifest
    mirror: DatasetMirror | None
    verify: Verify

    def fetch(self, paths: Iterable[str]) -> None:
        """Fetch files that are not on this machine yet. Do nothing without a mirror.

        Threads and processes may call this at the same time. Raises StorageError if a file is missing,
        damaged or cannot be read, and DatasetError if an id in it is out of range.
        """
        if self.mirror is None:
            return
        missing = {path: self.manifest.files[path] for path in paths if not (self.folder / path).exists()}
        if missing:
            self.mirror.fetch(missing)
            verify_files(self.folder, self.manifest, self.verify)


@final
class StoredDataset:
    """A dataset's parts, some of which may be on other machines.

    A dataset in an object store has a ``mirror``, which fetches missing files.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        cache: ArrayCache,
        mirror: DatasetMirror | None = None,
        verify: Verify = "auto",
    ) -> None:
        self.folder = folder
        self.manifest = manifest
        self.cache = cache
        self.location = str(folder) if mirror is None else mirror.location
        """The dataset's folder or address, for messages."""
        self._files = _LocalFiles(folder=folder, manifest=manifest, mirror=mirror, verify=verify)
        self._parts: dict[int, StoredPart] = {}

    def has_part(self, part: int) -> bool:
        return not self._find_missing_files(part)

    def part(self, part: int) -> StoredPart:
        """Open one part without reading it. Raise StorageError if its files are not on this machine."""
        if part not in self._parts:
            paths = self._find_missing_files(part)
            if paths and self._files.mirror is None:
                raise StorageError(
                    f"part {part} of {self.folder} is not on this machine: "
                    f"{shorten_list(paths)} missing; copy the folder part{part} here"
                )
            self._parts[part] = StoredPart(self._files, part)
        return self._parts[part]

    def fetch_parts(self, parts: Iterable[int]) -> None:
        """Fetch the missing files for ``parts`` if the dataset is in an object store."""
        self._files.fetch([path for part in parts for path in part_arrays(self.manifest, part)])

    def fetch_structure(self, etype: EdgeType) -> None:
        """Fetch one type's in-edges in all parts if the dataset is in an object store."""
        folders = [edge_folder(part, etype) for part in range(self.manifest.num_parts)]
        self._files.fetch(f"{folder}/{name}.arrow" for folder in folders for name in ("indptr", "indices"))

    def _find_missing_files(self, part: int) -> list[str]:
        manifest = self.manifest
        if not 0 <= part < manifest.num_parts:
            raise ConfigError(f"{self.folder} has the parts 0..{manifest.num_parts - 1}, not {part}")
        return [path for path in part_arrays(manifest, part) if not (self.folder / path).exists()]


@final
class StoredPart:
    """One part in a dataset. Its arrays are read-only memory-mapped views that are opened on first use.

    Methods raise ConfigError for an unknown type or name, and StorageError for a missing or damaged file.
    """

    def __init__(self, files: _LocalFiles, part: int) -> None:
        self._files = files
        self._folder = files.folder
        self._manifest = files.manifest
        self._part = part
        self._stored = part_arrays(files.manifest, part)
        self._arrays: dict[str, Array] = {}

    def indptr(self, etype: EdgeType) -> Array:
        """Return the (n_dst + 1,) int64 row pointers, from 0, for in-edges into owned destinations."""
        return self._map_array(f"{self._edge_folder(etype)}/indptr.arrow")

    def indices(self, etype: EdgeType) -> Array:
        """Return the (E_part,) int32 or int64 new global source ids, ascending within a destination."""
        return self._map_array(f"{self._edge_folder(etype)}/indices.arrow")

    def node_data(self, ntype: str, name: str) -> Array:
        """Return one node column's (n, *row) rows. bfloat16 is returned as bits in uint16."""
        path = data_path(self._node_folder(ntype), name)
        _check_known(self._manifest.node_columns[ntype], name, f"tensor of {ntype!r} nodes", self._folder)
        return self._map_array(path)

    def edge_data(self, etype: EdgeType, name: str) -> Array:
        """Return one edge column's (E_part, *row) rows, in the same order as :meth:`indices`."""
        path = data_path(self._edge_folder(etype), name)
        _check_known(self._manifest.edge_columns[etype], name, f"tensor of {etype} edges", self._folder)
        return self._map_array(path)

    def original_node_ids(self, ntype: str) -> Array:
        """Return the (n,) int64 ids that the owned nodes have in the source, ascending."""
        return self._map_array(f"{self._node_folder(ntype)}/original_ids.arrow")

    def original_edge_ids(self, etype: EdgeType) -> Array:
        """Return the (E_part,) int64 positions that the edges have in the source."""
        return self._map_array(f"{self._edge_folder(etype)}/original_ids.arrow")

    def user_ids(self, ntype: str, workspace: Workspace | None = None) -> Array | None:
        """Return the user's (n,) int64 or unicode ids, or None if the type has none.

        Texts are copied to memory, or to a stage in the ``workspace``.
        """
        path = f"{self._node_folder(ntype)}/user_ids.arrow"
        if ntype not in self._manifest.user_ids:
            return None
        num_rows = self._stored[path].num_rows
        is_text = self._manifest.user_ids[ntype] == "string"
        if not is_text or workspace is None or num_rows == 0:
            return self._map_array(path)

        self._files.fetch([path])
        make_chunks = partial(string_pieces, self._folder / path, path, num_rows, _TEXTS_AT_ONCE)
        (ids,) = concatenate_chunks(workspace, f"ids-{safe_name(ntype)}", [make_chunks], num_rows)
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
            self._files.fetch([path])
            file = self._folder / path
            stored = self._stored[path]
            if stored.info == STRINGS:
                array = read_strings(file, path, stored.num_rows)
            else:
                array = read_column(file, path, stored.info, stored.num_rows)
            self._arrays[path] = array
        return self._arrays[path]


def _check_known(mapping: Mapping[K, Any], key: K, description: str, folder: Path) -> None:
    if key not in mapping:
        names = ", ".join(map(repr, mapping)) or "none"
        raise ConfigError(f"{folder} has no {description} {key!r} (known: {names})")


def load_raw_graph(dataset: StoredDataset, workspace: Workspace | None = None) -> RawGraph:
    """Load the graph from a dataset with one part. Edges keep their stored order.

    Arrays are memory-mapped, except for destinations. These are in memory, or in a stage in the
    ``workspace``. Raises ConfigError if the dataset has several parts, or a tensor is stored as bfloat16.
    """
    manifest = dataset.manifest
    if manifest.num_parts != 1:
        raise ConfigError(
            f"{dataset.location} already has {manifest.num_parts} parts; train on it, or "
            "partition the graph that it was made from"
        )

    for tensors in (*manifest.node_columns.values(), *manifest.edge_columns.values()):
        for name, info in tensors.items():
            if info.dtype == "bfloat16":
                raise ConfigError(
                    f"{dataset.location} holds {name!r} as bfloat16; partition the graph that it was made "
                    "from"
                )

    dataset.fetch_parts([0])
    part = dataset.part(0)
    destinations = _expand_destinations(part, manifest, workspace)
    node_data = {}
    for ntype, columns in manifest.node_columns.items():
        node_data[ntype] = {name: part.node_data(ntype, name) for name in columns}
    edge_data = {}
    for etype, columns in manifest.edge_columns.items():
        edge_data[etype] = {name: part.edge_data(etype, name) for name in columns}
    user_ids = {}
    for ntype in manifest.user_ids:
        ids = part.user_ids(ntype, workspace)
        assert ids is not None, "the manifest has user ids of the type"
        user_ids[ntype] = ids

    return RawGraph(
        name=manifest.name,
        num_nodes={ntype: manifest.num_nodes(ntype) for ntype in manifest.node_types},
        edges={etype: (part.indices(etype), ends) for etype, ends in destinations.items()},
        node_data=node_data,
        edge_data=edge_data,
        edge_ids={etype: part.original_edge_ids(etype) for etype in manifest.edge_types},
        num_classes=dict(manifest.num_classes),
        class_names=manifest.class_names,
        user_ids=user_ids,
    )


def _expand_destinations(
    part: StoredPart, manifest: Manifest, workspace: Workspace | None
) -> dict[EdgeType, Array]:
    makers = []
    num_edges = 0
    for etype in manifest.edge_types:
        dtype = id_dtype(manifest.num_nodes(etype[2]))
        makers.append(partial(expand_indptr, part.indptr(etype), dtype))
        num_edges += manifest.num_edges(etype)
    arrays = concatenate_chunks(workspace, "edges", makers, num_edges)
    return dict(zip(manifest.edge_types, arrays, strict=True))


def expand_indptr(indptr: Array, dtype: Any, step: int = 1 << 20) -> Iterator[Array]:
    """Yield the row number of each value in a CSC, in pieces with up to ``step`` values.

    ``indptr`` are the (N + 1,) row pointers. An empty CSC gives one empty piece.
    """
    num_values = int(indptr[-1])
    for first in range(0, max(num_values, 1), step):
        last = min(first + step, num_values)
        # Select the rows with a value in [first, last), and clip their ranges to it.
        first_row = int(np.searchsorted(indptr, first, side="right")) - 1
        end_row = int(np.searchsorted(indptr, last, side="left"))
        ends = np.clip(indptr[first_row : end_row + 1], first, last)
        yield np.repeat(np.arange(first_row, end_row, dtype=dtype), np.diff(ends))


_PROGRESS_EDGES = 1 << 24
_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)


@dataclass(frozen=True, kw_only=True)
class CSC:
    """Read-only in-edges of all nodes for one edge type, with new global ids."""

    indptr: Array
    """(N_dst + 1,) int64."""
    indices: Array
    """(E,) int32 or int64 source ids. An edge's position is its global edge id."""


def open_structure(dataset: StoredDataset, etype: EdgeType) -> CSC:
    """Memory-map the whole graph's in-edges for one edge type.

    If the dataset has several parts, the first process joins them in a copy in the cache. Later processes use
    the copy as long as the manifest stays the same. A damaged copy is logged and rewritten. If several
    processes write a copy, the first to finish wins. If the folder cannot be written, a warning is logged,
    and the copy is made in memory. Raises StorageError if a part is damaged or not on this machine.
    """
    manifest = dataset.manifest
    if etype not in manifest.edge_offsets:
        raise ConfigError(f"{dataset.location} has no edge type {etype} (known: {manifest.edge_types})")
    if manifest.num_parts == 1:
        part = dataset.part(0)
        return CSC(indptr=part.indptr(etype), indices=part.indices(etype))

    # Compiled code reads the arrays without checks, so their lengths are compared with the manifest.
    lengths = {"indptr": manifest.num_nodes(etype[2]) + 1, "indices": manifest.num_edges(etype)}
    bounds = {"indptr": lengths["indices"] + 1, "indices": manifest.num_nodes(etype[0])}
    copy = dataset.cache.entry("structure", edge_type_name(etype))
    stored = copy.find(lengths, check=lambda arrays: _check_structure(arrays, lengths, bounds))
    try:
        if stored is None:
            _write_structure(dataset, etype, copy, lengths)
            stored = copy.read()
    except OSError as problem:
        if problem.errno not in _READ_ONLY:
            raise StorageError(f"{copy.path} cannot be written ({problem}); make room for it") from problem
        _LOG.warning("%s cannot be written (%s), so the structure is copied to memory", copy.path, problem)
        arrays = {name: np.concatenate(list(_iterate_structure(dataset, etype, name))) for name in lengths}
        for array in arrays.values():
            array.flags.writeable = False
        return CSC(**arrays)

    _, arrays = stored
    return CSC(**arrays)


def _iterate_structure(dataset: StoredDataset, etype: EdgeType, name: str) -> Iterator[Array]:
    """Yield the whole graph's ``indptr`` or ``indices``, part by part."""
    if name == "indptr":
        yield np.zeros(1, dtype=np.int64)
    for part in range(dataset.manifest.num_parts):
        stored_part = dataset.part(part)
        if name == "indices":
            yield stored_part.indices(etype)
        else:
            # A part's row pointers begin at 0. That entry repeats the previous part's last one, so it is left
            # out.
            yield stored_part.indptr(etype)[1:] + dataset.manifest.edge_offsets[etype][part]


def _write_structure(
    dataset: StoredDataset, etype: EdgeType, copy: ArrayFolder, lengths: Mapping[str, int]
) -> None:
    dataset.fetch_structure(etype)
    total = sum(lengths.values())
    with (
        copy.open_writer() as writer,
        progress("Assembling the structure", total, enabled=total > _PROGRESS_EDGES) as advance,
    ):
        for name, length in lengths.items():
            dtype = next(_iterate_structure(dataset, etype, name)).dtype
            stream = writer.stream(name, dtype, (length,))
            for piece in _iterate_structure(dataset, etype, name):
                stream.append(piece)
                advance(len(piece))
        writer.publish(lengths, overwrite=copy.path.exists())


def _check_structure(
    arrays: Mapping[str, Array], lengths: Mapping[str, int], bounds: Mapping[str, int]
) -> None:
    # The checksum shows that the copy is complete, but anyone may have written it.
    for name, length in lengths.items():
        array = arrays[name]
        if array.shape != (length,) or array.dtype.name not in ("int32", "int64"):
            raise ValueError(f"{name} is {array.dtype} of shape {array.shape}, expected {length} ids")
        i = find_first_invalid(array, bounds[name], is_indptr=name == "indptr")
        if i is not None:
            raise ValueError(f"{name}[{i}] is {array[i]}, which is out of range")
