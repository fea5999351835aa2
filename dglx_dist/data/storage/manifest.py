"""Define a dataset's manifest, read and write it as JSON, and replace a dataset's folder."""

import json
import re
import shlex
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, NamedTuple, TypeAlias

import numpy as np

from dglx_dist.data.json_fields import Fields, Within
from dglx_dist.data.storage.columns import (
    CACHE,
    DTYPES,
    IDS,
    MANIFEST,
    STRINGS,
    FileInfo,
    data_path,
    edge_folder,
    node_folder,
)
from dglx_dist.data.storage.files import check_replaceable, place_folder, read_small_file
from dglx_dist.data.storage.remote import DatasetMirror
from dglx_dist.errors import StorageError
from dglx_dist.options import find_address
from dglx_dist.records import LABEL, Array, ColumnInfo, EdgeType

FORMAT = "dglx-dataset"
VERSION = 1
_NO_CHECKSUM = "00000000"
_Count: TypeAlias = Annotated[int, Within(0, (1 << 63) - 1)]
"""Whole number from 0 that fits int64."""
_INTEGERS = {dtype for dtype in DTYPES if dtype.startswith(("int", "uint"))}
_EtypeName: TypeAlias = Annotated[tuple[str, ...], Within(3, 3)]
"""Source type, relation and destination type."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Manifest:
    """Describes a partitioned dataset. Compare two by :attr:`checksum` or :func:`to_json`."""

    name: str
    num_parts: int
    node_offsets: Mapping[str, Array]
    """(P + 1,) int64 by node type. Part p has the new ids ``offsets[p] .. offsets[p + 1] - 1``."""
    edge_offsets: Mapping[EdgeType, Array]
    """(P + 1,) int64 by edge type, the same for global edge ids."""
    node_columns: Mapping[str, Mapping[str, ColumnInfo]]
    """Columns by node type and name."""
    edge_columns: Mapping[EdgeType, Mapping[str, ColumnInfo]]
    """Columns by edge type and name."""
    num_classes: Mapping[str, int]
    user_ids: Mapping[str, str]
    """``int64`` or ``string`` by node type that has user ids. Types with ids 0..N-1 are left out."""
    method: str
    seed: int
    parameters: Mapping[str, object] = field(default_factory=dict)
    quality: Mapping[str, object] = field(default_factory=dict)
    """The partition's quality figures, JSON values only."""
    files: Mapping[str, FileInfo] = field(default_factory=dict)
    """Size and checksum for every file except the manifest, by path relative to the folder."""
    checksum: str = ""
    """The manifest's own checksum, which identifies the dataset's content. Empty before writing."""

    @property
    def node_types(self) -> tuple[str, ...]:
        """Node types in the same order as in the source."""
        return tuple(self.node_columns)

    @property
    def edge_types(self) -> tuple[EdgeType, ...]:
        """Canonical edge types in the same order as in the source."""
        return tuple(self.edge_columns)

    @property
    def is_homogeneous(self) -> bool:
        """Whether there is one node type and one edge type."""
        return len(self.node_types) == len(self.edge_types) == 1

    @property
    def class_names(self) -> dict[str, list[str]]:
        """Class names by type, for types whose classes have names in the source."""
        names_by_type = self.parameters.get("class_names")
        if not isinstance(names_by_type, Mapping):
            return {}
        class_names = {}
        for ntype, names in names_by_type.items():
            if isinstance(names, list | tuple):
                class_names[ntype] = [str(name) for name in names]
        return class_names

    def num_nodes(self, ntype: str) -> int:
        return int(self.node_offsets[ntype][-1])

    def num_edges(self, etype: EdgeType) -> int:
        return int(self.edge_offsets[etype][-1])


class StoredArray(NamedTuple):
    """Content of one file in a part, and its valid values."""

    info: ColumnInfo | None
    """Dtype and row shape, or None for ids that are int32 or int64."""
    num_rows: int
    upper_bound: int | None = None
    """Bound that all values must be below, because compiled code does not check them. None: no bound."""
    refers_to: str = ""
    """Description of the values in messages, such as ``'paper' nodes``."""
    minimum: int | None = 0
    """Smallest allowed value. None: no minimum."""


def part_arrays(manifest: Manifest, part: int) -> dict[str, StoredArray]:
    """Describe each file in one part, by its path relative to the dataset."""

    def count_owned(offsets: Array) -> int:
        return int(offsets[part + 1] - offsets[part])

    arrays = {}
    for ntype, columns in manifest.node_columns.items():
        folder = node_folder(part, ntype)
        num_nodes = count_owned(manifest.node_offsets[ntype])
        original_ids = StoredArray(IDS, num_nodes, manifest.num_nodes(ntype), f"{ntype!r} nodes")
        arrays[f"{folder}/original_ids.arrow"] = original_ids
        if ntype in manifest.user_ids:
            info = IDS if manifest.user_ids[ntype] == "int64" else STRINGS
            arrays[f"{folder}/user_ids.arrow"] = StoredArray(info, num_nodes)

        num_classes = manifest.num_classes.get(ntype)
        for name, info in columns.items():
            array = _describe_column(info, num_nodes)
            is_label = name == LABEL and info.row_shape == () and info.dtype in _INTEGERS
            if is_label and num_classes is not None:
                # Negative values stand for no label.
                array = array._replace(upper_bound=num_classes, refers_to="num_classes", minimum=None)
            arrays[data_path(folder, name)] = array

    for etype, columns in manifest.edge_columns.items():
        folder = edge_folder(part, etype)
        num_edges = count_owned(manifest.edge_offsets[etype])
        num_row_pointers = count_owned(manifest.node_offsets[etype[2]]) + 1
        num_sources = manifest.num_nodes(etype[0])
        original_ids = StoredArray(IDS, num_edges, manifest.num_edges(etype), f"edges {etype}")
        # The last row pointer equals the number of edges.
        indptr = StoredArray(IDS, num_row_pointers, num_edges + 1, f"edges {etype} of the part")
        arrays[f"{folder}/indptr.arrow"] = indptr
        arrays[f"{folder}/indices.arrow"] = StoredArray(None, num_edges, num_sources, f"{etype[0]!r} nodes")
        arrays[f"{folder}/original_ids.arrow"] = original_ids
        for name, info in columns.items():
            arrays[data_path(folder, name)] = _describe_column(info, num_edges)
    return arrays


def _describe_column(info: ColumnInfo, num_rows: int) -> StoredArray:
    if info.dtype == "bool":
        # Booleans are stored as bytes, and code that counts and indexes by masks relies on 0 and 1.
        return StoredArray(info, num_rows, upper_bound=2, refers_to="booleans")
    return StoredArray(info, num_rows)


def to_json(manifest: Manifest) -> dict[str, object]:
    """Return the manifest as JSON values, without its checksum."""
    node_types = []
    for ntype, columns in manifest.node_columns.items():
        node_types.append(
            {
                "name": ntype,
                "offsets": manifest.node_offsets[ntype].tolist(),
                "columns": _columns_to_json(columns),
                "num_classes": manifest.num_classes.get(ntype),
                "user_ids": manifest.user_ids.get(ntype),
            }
        )

    edge_types = []
    for etype, columns in manifest.edge_columns.items():
        offsets = manifest.edge_offsets[etype].tolist()
        edge_types.append({"name": list(etype), "offsets": offsets, "columns": _columns_to_json(columns)})

    files = {}
    for path, info in manifest.files.items():
        files[path] = {"bytes": info.num_bytes, "crc32": info.checksum}
    return {
        "format": FORMAT,
        "version": VERSION,
        "name": manifest.name,
        "num_parts": manifest.num_parts,
        "node_types": node_types,
        "edge_types": edge_types,
        "method": manifest.method,
        "seed": manifest.seed,
        "parameters": dict(manifest.parameters),
        "quality": dict(manifest.quality),
        "files": files,
    }


def from_json(value: object, where: str) -> Manifest:
    """Return the manifest for parsed JSON. Messages name the file ``where``.

    Raises StorageError if a key is missing or unknown, a value has the wrong kind, or the format version is
    newer.
    """
    top = Fields(value, where, error=StorageError)
    _check_format(top)
    num_parts = top.integer("num_parts", 1)
    node_offsets = {}
    node_columns = {}
    num_classes = {}
    user_ids = {}
    for item in top.nested_list("node_types", 1):
        ntype = item.text("name")
        node_offsets[ntype] = _read_offsets(item, num_parts)
        node_columns[ntype] = _read_columns(item.nested_fields("columns"))
        if item.raw_value("num_classes") is not None:
            num_classes[ntype] = item.integer("num_classes", 0)
        kind = item.choice("user_ids", ("int64", "string", None))
        if kind is not None:
            user_ids[ntype] = kind
        item.reject_unread()

    edge_offsets = {}
    edge_columns = {}
    for item in top.nested_list("edge_types"):
        source, relation, destination = item.value("name", _EtypeName)
        etype = (source, relation, destination)
        edge_offsets[etype] = _read_offsets(item, num_parts)
        edge_columns[etype] = _read_columns(item.nested_fields("columns"))
        item.reject_unread()

    entries = top.nested_fields("files")
    files = {path: _read_file_info(entries.nested_fields(path)) for path in entries.mapping}
    manifest = Manifest(
        name=top.text("name"),
        num_parts=num_parts,
        node_offsets=node_offsets,
        edge_offsets=edge_offsets,
        node_columns=node_columns,
        edge_columns=edge_columns,
        num_classes=num_classes,
        user_ids=user_ids,
        method=top.text("method"),
        seed=top.integer("seed"),
        parameters=top.nested_fields("parameters").mapping,
        quality=top.nested_fields("quality").mapping,
        files=files,
    )
    top.reject_unread()

    _check_types(manifest, where)
    _check_files(manifest, where)
    return manifest


def _check_types(manifest: Manifest, where: str) -> None:
    for etype in manifest.edge_types:
        for ntype in (etype[0], etype[2]):
            if ntype not in manifest.node_columns:
                raise StorageError(f"{where}: key 'edge_types' has {etype}, but no node type is {ntype!r}")

    for ntype, names in manifest.class_names.items():
        num_classes = manifest.num_classes.get(ntype, 0)
        if len(names) != num_classes:
            raise StorageError(f"{where}: {len(names)} class_names for {num_classes} classes of {ntype!r}")


def write_manifest(manifest: Manifest, folder: Path) -> Manifest:
    """Write ``manifest.json`` into ``folder``, and return the manifest with its checksum."""
    # The checksum covers the text with zeros in place of the checksum itself.
    blank = json.dumps({**to_json(manifest), "checksum": _NO_CHECKSUM}, indent=1, ensure_ascii=True)
    value = f"{zlib.crc32(blank.encode()):08x}"
    head, _, tail = blank.rpartition(_NO_CHECKSUM)
    (folder / MANIFEST).write_text(f"{head}{value}{tail}")
    return replace(manifest, checksum=value)


def read_manifest(folder: Path) -> Manifest:
    """Read a dataset's manifest. ``folder`` may also be an address in an object store, as a path.

    Raises StorageError if it is missing, damaged, or too new.
    """
    address = find_address(folder)
    if address is not None:
        folder = DatasetMirror(address).folder
    path = folder / MANIFEST
    try:
        content = read_small_file(path)
    except OSError as problem:
        raise StorageError(_explain_unreadable(folder, problem)) from problem

    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as problem:
        raise StorageError(f"{path} is damaged ({problem}); copy it again or partition again") from problem

    top = Fields(value, str(path), error=StorageError)
    # The version is checked first, because a newer format may compute its checksum differently.
    _check_format(top)
    stated = top.text("checksum")
    head, _, tail = content.rpartition(f'"{stated}"'.encode(errors="replace"))
    blank = head + f'"{_NO_CHECKSUM}"'.encode() + tail
    if f"{zlib.crc32(blank):08x}" != stated:
        raise StorageError(
            f"{path} does not match its checksum {stated!r}, so it was damaged or edited; "
            "copy it again or partition again"
        )

    del value["checksum"]
    return replace(from_json(value, str(path)), checksum=stated)


def _explain_unreadable(folder: Path, problem: OSError) -> str:
    """Return a message that says why ``folder`` has no readable manifest."""
    paths = sorted(folder.glob("*.json")) if folder.is_dir() else [folder]
    for path in paths:
        if is_dgl_config(path):
            return f'{folder} is in the format of DGL; open it with dx.DistGraph(part_config="{path}")'
    if not folder.exists():
        reason = "it does not exist"
    elif folder.is_file():
        command = f"dglx partition {shlex.quote(str(folder))} --out DIR"
        return f"{folder} is a file, not a partitioned dataset; partition it first: `{command}`"
    elif isinstance(problem, FileNotFoundError):
        reason = f"it has no {MANIFEST}"
    else:
        reason = f"its {MANIFEST} cannot be read ({problem.strerror})"

    return (
        f"{folder} is not a partitioned dataset: {reason}; write one with `dglx partition "
        "DATA --out DIR` or dx.partition_graph"
    )


def is_dgl_config(path: Path) -> bool:
    """Return whether ``path`` is the JSON file that describes a partition in DGL's format."""
    try:
        value = json.loads(read_small_file(path))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(value, dict) and "part-0" in value


def _check_format(top: Fields) -> None:
    name = top.text("format")
    if name != FORMAT:
        raise StorageError(f"{top.where}: key 'format' is {name!r}, expected {FORMAT!r}")
    version = top.integer("version", 1)
    if version > VERSION:
        raise StorageError(
            f"{top.where} has format version {version}, but this program reads up to version "
            f"{VERSION}; update dglx_dist, or partition again with this version"
        )


def _read_offsets(item: Fields, num_parts: int) -> Array:
    count = num_parts + 1
    offsets = item.value("offsets", Annotated[tuple[_Count, ...], Within(count, count)])
    never_falls = all(earlier <= later for earlier, later in pairwise(offsets))
    if offsets[0] != 0 or not never_falls:
        raise item.field_error("offsets", "numbers that start at 0 and never fall")
    return np.array(offsets, dtype=np.int64)


def _read_columns(items: Fields) -> dict[str, ColumnInfo]:
    columns = {}
    for name in items.mapping:
        item = items.nested_fields(name)
        dtype = item.choice("dtype", DTYPES)
        columns[name] = ColumnInfo(dtype=dtype, row_shape=item.value("row_shape", tuple[_Count, ...]))
        item.reject_unread()
    return columns


def _columns_to_json(columns: Mapping[str, ColumnInfo]) -> dict[str, object]:
    return {name: {"dtype": info.dtype, "row_shape": list(info.row_shape)} for name, info in columns.items()}


def _read_file_info(item: Fields) -> FileInfo:
    info = FileInfo(num_bytes=item.integer("bytes", 0), checksum=item.text("crc32"))
    item.reject_unread()
    return info


def _check_files(manifest: Manifest, where: str) -> None:
    expected: set[str] = set()
    for part in range(manifest.num_parts):
        expected.update(part_arrays(manifest, part))
    differing = sorted(expected ^ manifest.files.keys())
    if differing:
        path = differing[0]
        problem = "lacks" if path in expected else "has the unexpected"
        raise StorageError(f"{where}: key 'files' {problem} {path!r}; partition the graph again")


_PART_FOLDER = re.compile(r"part\d+")
_DESCRIPTION = "a dataset of this program"


def check_target(folder: Path, overwrite: bool | None) -> None:
    """Raise StorageError if ``folder`` holds files that a dataset must not replace."""
    check_replaceable(folder, overwrite, _DESCRIPTION, _is_dataset)


def put_in_place(partial: Path, folder: Path, overwrite: bool | None) -> None:
    """Rename the finished dataset ``partial`` to ``folder``. Raises the errors of :func:`check_target`."""
    place_folder(partial, folder, overwrite, _DESCRIPTION, _is_dataset)


def _is_dataset(folder: Path) -> bool:
    # The dataset may be damaged or in another version, but the folder must not have foreign files.
    names = {path.name for path in folder.iterdir()}
    if MANIFEST not in names:
        return False
    for name in names - {MANIFEST, CACHE}:
        if not _PART_FOLDER.fullmatch(name):
            return False
    return FORMAT.encode() in read_small_file(folder / MANIFEST)
