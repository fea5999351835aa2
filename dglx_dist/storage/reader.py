"""A dataset on disk -> memory-mapped arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, final

from dglx_dist.errors import ConfigError, StorageError
from dglx_dist.records import Array, ColumnInfo, EdgeType
from dglx_dist.storage.columns import read_column, read_strings
from dglx_dist.storage.layout import PARTIAL_SUFFIX, data_path, edge_folder, node_folder, part_files
from dglx_dist.storage.manifest import Manifest, read_manifest
from dglx_dist.storage.verify import Verify, verify_files

K = TypeVar("K")

_IDS = ColumnInfo(dtype="int64", row_shape=())


def open_dataset(folder: str | Path, *, verify: Verify = "auto") -> StoredDataset:
    """Open a partitioned dataset; nothing but the manifest is read, apart from verifying.

    Any process may call it alone. The first opening reads every file once to compare checksums, and ids with
    their ranges; later ones compare sizes and times of change only (:mod:`dglx_dist.storage.verify`). Let one
    process of each machine open it before the others do, and they need not all read it.

    Args:
        folder: What ``write_dataset`` wrote.
        verify: ``auto``, ``full`` (read everything now) or ``never``.

    Raises:
        StorageError: it is missing, half-written, damaged, or of a newer format version.
        DatasetError: an id in it is out of range.
        ConfigError: ``verify`` is none of the three.
    """
    if verify not in ("auto", "full", "never"):
        raise ConfigError(f"verify is {verify!r}; choose 'auto', 'full' or 'never'")
    folder = Path(folder).absolute()
    if folder.name.endswith(PARTIAL_SUFFIX):
        raise StorageError(f"{folder} was left behind by a write that was killed; delete it")
    manifest = read_manifest(folder)
    verify_files(folder, manifest, verify)
    return StoredDataset(folder, manifest)


@final
class StoredDataset:
    """The parts of a dataset, of which this machine may have some only."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._parts: dict[int, StoredPart] = {}

    def has_part(self, part: int) -> bool:
        """Whether all files of ``part`` are on this machine."""
        return not self._missing(part)

    def part(self, part: int) -> StoredPart:
        """Return one part; nothing is read.

        Raises:
            ConfigError: there is no such part.
            StorageError: naming its files that are not on this machine.
        """
        if part not in self._parts:
            missing = self._missing(part)
            if missing:
                shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
                raise StorageError(
                    f"part {part} of {self.folder} is not on this machine: {shown} missing; "
                    f"copy the folder part{part} here"
                )
            self._parts[part] = StoredPart(self.folder, self.manifest, part)
        return self._parts[part]

    def _missing(self, part: int) -> list[str]:
        manifest = self.manifest
        if not 0 <= part < manifest.num_parts:
            raise ConfigError(f"{self.folder} has the parts 0..{manifest.num_parts - 1}, not {part}")
        paths = part_files(part, manifest.node_columns, manifest.edge_columns, tuple(manifest.user_ids))
        return [path for path in paths if not (self.folder / path).exists()]


@final
class StoredPart:
    """One part: every array is a read-only view of a memory map, made when first asked for.

    Methods raise ConfigError for a type or name that the dataset does not have, and StorageError
    naming the file when it is damaged or missing.
    """

    def __init__(self, folder: Path, manifest: Manifest, part: int) -> None:
        self._folder = folder
        self._manifest = manifest
        self._part = part
        self._arrays: dict[str, Array] = {}

    def num_nodes(self, ntype: str) -> int:
        """Return how many nodes of one type this part owns."""
        offsets = _known(self._manifest.node_offsets, ntype, "node type", self._folder)
        return int(offsets[self._part + 1] - offsets[self._part])

    def num_edges(self, etype: EdgeType) -> int:
        """Return how many edges of one type this part owns."""
        offsets = _known(self._manifest.edge_offsets, etype, "edge type", self._folder)
        return int(offsets[self._part + 1] - offsets[self._part])

    def indptr(self, etype: EdgeType) -> Array:
        """Return (n_dst + 1,) int64 starting at 0: in-edges of the owned destinations."""
        folder = self._edge_folder(etype)
        return self._column(f"{folder}/indptr.arrow", _IDS, self.num_nodes(etype[2]) + 1)

    def indices(self, etype: EdgeType) -> Array:
        """Return (E_part,) int32 or int64 new global source ids, ascending within a destination."""
        return self._column(f"{self._edge_folder(etype)}/indices.arrow", None, self.num_edges(etype))

    def node_data(self, ntype: str, name: str) -> Array:
        """Return (n, *row) of one node tensor; bfloat16 comes as its bits in uint16."""
        columns = _known(self._manifest.node_columns, ntype, "node type", self._folder)
        info = _known(columns, name, f"tensor of {ntype!r} nodes", self._folder)
        path = data_path(node_folder(self._part, ntype), name)
        return self._column(path, info, self.num_nodes(ntype))

    def edge_data(self, etype: EdgeType, name: str) -> Array:
        """Return (E_part, *row) of one edge tensor, in the order of :meth:`indices`."""
        columns = _known(self._manifest.edge_columns, etype, "edge type", self._folder)
        info = _known(columns, name, f"tensor of {etype} edges", self._folder)
        return self._column(data_path(self._edge_folder(etype), name), info, self.num_edges(etype))

    def original_node_ids(self, ntype: str) -> Array:
        """Return (n,) int64: the id that each owned node had in the source, ascending."""
        num_nodes = self.num_nodes(ntype)
        return self._column(f"{node_folder(self._part, ntype)}/original_ids.arrow", _IDS, num_nodes)

    def original_edge_ids(self, etype: EdgeType) -> Array:
        """Return (E_part,) int64: the position that each edge had in the source's list."""
        return self._column(f"{self._edge_folder(etype)}/original_ids.arrow", _IDS, self.num_edges(etype))

    def user_ids(self, ntype: str) -> Array | None:
        """Return (n,) int64 or unicode ids that the user knows, or None; strings are copied."""
        num_nodes = self.num_nodes(ntype)
        kind = self._manifest.user_ids.get(ntype)
        path = f"{node_folder(self._part, ntype)}/user_ids.arrow"
        if kind is None:
            return None
        if kind == "int64":
            return self._column(path, _IDS, num_nodes)
        return self._kept(path, lambda: read_strings(self._folder / path, path, num_nodes))

    def _edge_folder(self, etype: EdgeType) -> str:
        _known(self._manifest.edge_columns, etype, "edge type", self._folder)
        return edge_folder(self._part, etype)

    def _column(self, path: str, info: ColumnInfo | None, num_rows: int) -> Array:
        return self._kept(path, lambda: read_column(self._folder / path, path, info, num_rows))

    def _kept(self, path: str, read: Callable[[], Array]) -> Array:
        # Two threads may both map a file once; either view serves.
        if path not in self._arrays:
            self._arrays[path] = read()
        return self._arrays[path]


def _known(mapping: Mapping[K, Any], key: K, kind: str, folder: Path) -> Any:
    if key not in mapping:
        known = ", ".join(repr(one) for one in mapping) or "none"
        raise ConfigError(f"{folder} has no {kind} {key!r} (known: {known})")
    return mapping[key]
