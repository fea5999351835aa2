"""Read graphs in arrays: ``.npz`` archives, sparse matrices, and dicts of torch tensors."""

import importlib
import logging
import math
import re
import tokenize
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, final

import numpy as np

from dglx_dist.data.external_memory import Workspace, map_spill, spill
from dglx_dist.data.metis_text import EDGE_VALUES
from dglx_dist.data.sources import (
    OTHER_NAMES,
    DatasetSource,
    array_of_tensor,
    count_classes,
    masks_of_split,
    standard_columns,
)
from dglx_dist.data.validate import check_ids, check_integers, first_repeat
from dglx_dist.errors import ConfigError, DatasetError, DglxError
from dglx_dist.memory import format_bytes, machine_memory
from dglx_dist.progress import progress
from dglx_dist.records import (
    EDGE_TYPE,
    FEATURE,
    LABEL,
    NODE_TYPE,
    SPLITS,
    Array,
    EdgeType,
    NodeColumn,
    RawGraph,
    SparseRows,
)

_LOG = logging.getLogger(__name__)

_SPARSE_KEYS = ("feat_indptr", "feat_indices", "feat_data", "feat_dim")
_STRUCTURE = {
    *("src", "dst", "head", "tail", "rel", "etype", "etype_names", "relation_names", "triple_split"),
    *("num_classes", "num_nodes", "num_etypes", "num_entities", "num_relations", "both_directions", "split"),
    *_SPARSE_KEYS,
}
_REQUIRED_LENGTH = {FEATURE, LABEL, *OTHER_NAMES, *SPLITS}
"""Columns that training uses. A wrong length is an error."""
# NumPy reads an array's header before its checksum, so a damaged archive raises any of these.
_UNREADABLE = (
    *(zipfile.BadZipFile, zlib.error, tokenize.TokenError, EOFError, OSError),
    *(ValueError, TypeError, AttributeError, LookupError, RuntimeError, MemoryError),
)


@final
class NpzSource(DatasetSource):
    """A ``.npz`` with arrays. If memory is limited, it is unpacked into files. It has no options.

    ``src``, ``dst`` and ``num_nodes`` define a graph. ``etype`` and ``etype_names`` give it one edge type
    ("_N", name, "_N") per relation. ``head``, ``rel``, ``tail`` and ``triple_split`` define a knowledge graph
    with split masks on edges. Features are in ``features``, or as compressed rows in ``feat_indptr``,
    ``feat_indices``, ``feat_data`` and ``feat_dim``. ``num_classes`` may give the number of classes.

    Without ``num_nodes``, the node count follows from ids, or from feature or label rows. Any other array is
    a node column if it has as many rows as there are nodes, and an edge column if it has as many as there are
    edges. If both numbers are equal, its name must begin with ``node_`` or ``edge_``. An array with any other
    row count is ignored with a warning. A ``val_mask`` without any node is ignored, because official splits
    often have none. Pickled objects are never loaded.

    PyG's names (``edge_index``, ``x``, ``y``, ``edge_type``) are supported too. So is a square matrix from
    ``scipy.sparse.save_npz``, which is read at once. Row u, column v is an edge from u to v. The values
    become ``weight`` unless all are 1.
    """

    external = True

    def load(self) -> RawGraph:
        return build_graph_from_arrays(_read(self._path, self.workspace), self._path.stem, str(self._path))


def build_graph_from_arrays(arrays: Mapping[str, Array], name: str, where: str) -> RawGraph:
    """Build the graph from arrays that are named as in :class:`NpzSource`. ``where`` starts messages.

    Raises:
        DatasetError: If edge ends or known columns are missing, or have the wrong dtype or length.
    """
    arrays = _rename_pyg(arrays, where)
    source_name, destination_name = ("head", "tail") if "head" in arrays else ("src", "dst")
    _require(arrays, ("head", "rel", "tail") if "head" in arrays else ("src", "dst"), where)
    source_ids = _read_ids(arrays[source_name], source_name, where)
    destination_ids = _read_ids(arrays[destination_name], destination_name, where)
    num_nodes = _read_num_nodes(arrays, source_ids, destination_ids, where)
    node_columns, edge_columns = _read_columns(arrays, num_nodes, len(source_ids), where)
    if "triple_split" in arrays:
        _check_lengths(source_ids, arrays["triple_split"], "splits", where)
        masks = masks_of_split(arrays["triple_split"])
        edge_columns |= {name: mask for name, mask in masks.items() if mask.any()}

    edges = {EDGE_TYPE: (source_ids, destination_ids)}
    edge_data = {EDGE_TYPE: edge_columns}
    relation = arrays.get("rel", arrays.get("etype"))
    if relation is not None:
        names = arrays.get("relation_names", arrays.get("etype_names"))
        edges, edge_data = _group_by_relation(
            source_ids, destination_ids, edge_columns, relation, names, where
        )

    num_classes = count_classes(node_columns)
    if "num_classes" in arrays:
        num_classes = _read_count(arrays, "num_classes", where)
    return RawGraph(
        name=name,
        num_nodes={NODE_TYPE: num_nodes},
        edges=edges,
        node_data={NODE_TYPE: node_columns},
        edge_data=edge_data,
        num_classes={} if num_classes is None else {NODE_TYPE: num_classes},
    )


_PYG_NAMES = {"x": FEATURE, "y": LABEL, "edge_type": "etype"}


def _rename_pyg(arrays: Mapping[str, Array], where: str) -> Mapping[str, Array]:
    """Rename PyG's ``arrays`` as in :class:`NpzSource`."""
    if "edge_index" not in arrays:
        return arrays
    edge_index = arrays["edge_index"]
    if edge_index.ndim != 2 or len(edge_index) != 2:
        raise DatasetError(f"{where}: edge_index has shape {edge_index.shape}; expected (2, edges)")
    renamed = {"src": edge_index[0], "dst": edge_index[1]}
    for name, array in arrays.items():
        if name != "edge_index":
            renamed[_PYG_NAMES.get(name, name)] = array

    # x and y are node columns, even if there are as many edges as nodes.
    for name in (LABEL, FEATURE):
        if name in renamed and renamed[name].ndim and "num_nodes" not in arrays:
            renamed["num_nodes"] = np.array(len(renamed[name]))
    return renamed


def convert_matrix(matrix: Any, path: Path) -> dict[str, Array]:
    """Convert a matrix to a graph's arrays, with an edge u -> v for each entry in row u, column v."""
    if matrix.format in ("csr", "csc", "bsr"):
        # SciPy's compiled code uses the matrix's pointers unchecked.
        matrix.check_format(full_check=True)
    matrix = matrix.tocoo()
    if matrix.shape[0] != matrix.shape[1]:
        raise DatasetError(
            f"{path}: the matrix has shape {matrix.shape}, but the matrix of a graph is "
            "square; for two types of nodes write tables (docs/guides/your_data.md)"
        )
    arrays = {"src": matrix.row, "dst": matrix.col, "num_nodes": np.array(matrix.shape[0])}
    if (matrix.data != 1).any():
        arrays[EDGE_VALUES] = matrix.data
    return arrays


def _read(path: Path, workspace: Workspace | None) -> dict[str, Array]:
    """Read a .npz file's arrays by name. Raise DatasetError if it is damaged."""
    if not path.is_file():
        raise DatasetError(f"there is no file {path.absolute()}; expected a .npz file")
    try:
        with np.load(path, allow_pickle=False) as stored:
            if set(stored.files) >= {"format", "shape", "data"}:
                num_bytes = 4 * sum(member.file_size for member in stored.zip.infolist())
                return _read_matrix(path, num_bytes, workspace)
            if workspace is not None:
                return _unpack(path, workspace)
            return _read_plain_arrays(stored, path)
    except DglxError:  # Some errors in this package are Python errors, too.
        raise
    except _UNREADABLE as error:
        reason = f"not a readable .npz file of plain arrays ({error}; text ids are for tables)"
        raise DatasetError(f"{path}: {reason}") from error


def _read_matrix(path: Path, num_bytes: int, workspace: Workspace | None) -> dict[str, Array]:
    if workspace is not None and not workspace.fits(num_bytes):
        raise ConfigError(
            f"{path}: a matrix is read at once, which takes {format_bytes(num_bytes)}; grant "
            "more --memory, or save its rows and columns as src and dst"
        )
    return convert_matrix(importlib.import_module("scipy.sparse").load_npz(path), path)


def _read_plain_arrays(stored: Any, path: Path) -> dict[str, Array]:
    arrays = {}
    pickled = []
    for name in stored.files:
        try:
            arrays[name] = stored[name]
        except ValueError as error:
            # NumPy's message names this option if an array holds objects.
            if "allow_pickle" not in str(error) or name in _STRUCTURE | _REQUIRED_LENGTH:
                raise
            pickled.append(name)
    warn_ignored(str(path), pickled, "pickled objects, which are never loaded")
    return arrays


_EDGE_ORDER_ARRAYS = ("rel", "etype", "triple_split")
"""Arrays that order edges or give them masks."""


def _is_converted(name: str, dtype: np.dtype[Any]) -> bool:
    """Return whether an array is converted: ids in other dtypes, integer features, and compressed rows."""
    if name in ("src", "dst", "head", "tail"):
        return dtype not in (np.int32, np.int64)
    return name in _SPARSE_KEYS or (OTHER_NAMES.get(name, name) == FEATURE and dtype.kind in "iub")


def _unpack(path: Path, workspace: Workspace) -> dict[str, Array]:
    """Write a .npz file's arrays to a stage in ``workspace``, and return them memory-mapped.

    Raise ConfigError if arrays that must be converted do not fit in memory.
    """
    with zipfile.ZipFile(path) as archive:
        members = [member for member in archive.infolist() if member.filename.endswith(".npy")]
        headers = []
        converted_bytes = {}
        num_bytes = sum(member.file_size for member in members)
        for member in members:
            name = member.filename.removesuffix(".npy")
            dtype, shape = _read_header(archive.open(member))
            headers.append((name, shape))
            if name in _EDGE_ORDER_ARRAYS:
                converted_bytes[name] = num_bytes
            elif _is_converted(name, dtype):
                converted_bytes[name] = 8 * math.prod(shape)

        total = sum(converted_bytes.values())
        if not workspace.fits(total):
            raise ConfigError(
                f"{path}: {', '.join(sorted(converted_bytes))} are converted in memory, "
                f"which takes up to {format_bytes(total)}; store them as int32, int64 or "
                "float32, make a dataset with dglx ingest, or grant more --memory"
            )

        def write(folder: Path) -> None:
            with progress("Unpacking the arrays", num_bytes) as advance:
                for i, member in enumerate(members):
                    with archive.open(member) as stream:
                        dtype, _ = _read_header(stream)
                        values = spill(folder, str(i), dtype)
                        while piece := stream.read(dtype.itemsize << 16):
                            values.append(np.frombuffer(piece, dtype))
                            advance(len(piece))

        folder = workspace.stage("arrays", write)

    arrays = {}
    for i, (name, shape) in enumerate(headers):
        arrays[name] = map_spill(folder, str(i)).reshape(shape)
    return arrays


def _read_header(stream: IO[bytes]) -> tuple[np.dtype[Any], tuple[int, ...]]:
    version = np.lib.format.read_magic(stream)
    parse = np.lib.format.read_array_header_2_0
    if version == (1, 0):
        parse = np.lib.format.read_array_header_1_0
    shape, is_fortran, dtype = parse(stream)
    if dtype.hasobject or (is_fortran and len(shape) > 1):
        raise ValueError(f"{stream.name} holds objects, or columns one after the other")
    return dtype, shape


def _require(arrays: Mapping[str, Array], names: tuple[str, ...], where: str) -> None:
    for name in names:
        if name in arrays:
            continue
        raise DatasetError(
            f"{where}: the array {name!r} is missing; a graph needs src and dst, a knowledge graph head, "
            f"rel and tail, PyG's edge_index (the file has {', '.join(sorted(arrays)) or 'none'})"
        )


def _read_count(arrays: Mapping[str, Array], name: str, where: str) -> int:
    value = arrays[name]
    if value.size != 1 or value.dtype.kind not in "iu" or value.item() < 0:
        raise DatasetError(f"{where}: {name} is {value!r:.60}; expected one whole number of at least 0")
    return int(value.item())


def _read_num_nodes(
    arrays: Mapping[str, Array], source_ids: Array, destination_ids: Array, where: str
) -> int:
    """Return the node count that a file names, or the largest that ids or node columns need."""
    if "num_nodes" in arrays:
        num_nodes = _read_count(arrays, "num_nodes", where)
    elif "num_entities" in arrays:
        num_nodes = _read_count(arrays, "num_entities", where)
    else:
        num_nodes = 1 + max(int(source_ids.max(initial=-1)), int(destination_ids.max(initial=-1)))
        for name in (FEATURE, LABEL, *OTHER_NAMES):
            column = arrays.get(name)
            # An array with a row for each edge may be an edge column.
            if column is not None and column.ndim and len(column) != len(source_ids):
                num_nodes = max(num_nodes, len(column))
    if 8 * num_nodes > machine_memory()[0]:
        raise DatasetError(
            f"{where}: there are {num_nodes} nodes by num_nodes or the largest id, and one "
            f"number for each takes {format_bytes(8 * num_nodes)}, more than this machine "
            "has; number them from 0 without gaps"
        )
    return num_nodes


def _read_columns(
    arrays: Mapping[str, Array], num_nodes: int, num_edges: int, where: str
) -> tuple[dict[str, NodeColumn], dict[str, Array]]:
    """Return the node columns and the edge columns. An array's row count tells its owner."""
    node_arrays: dict[str, NodeColumn] = {}
    edge_arrays: dict[str, Array] = {}
    ignored = []
    is_counted = "num_nodes" in arrays or "num_entities" in arrays
    for name, array in arrays.items():
        if name in _STRUCTURE:
            continue
        count = len(array) if array.ndim else -1
        is_of_edges = name == EDGE_VALUES or name.startswith("edge_")
        is_of_nodes = name.startswith("node_") or name in _REQUIRED_LENGTH
        if count == num_edges == num_nodes and not (is_of_edges or is_of_nodes):
            raise DatasetError(
                f"{where}: array {name!r} has {count} rows, and there are as many nodes as "
                f"edges; rename it to 'node_{name}' or 'edge_{name}'"
            )
        if count == num_edges != num_nodes and is_of_nodes and not is_counted:
            raise DatasetError(
                f"{where}: array {name!r} has a row for each of the {count} edges, but the "
                f"largest id is {num_nodes - 1}; give num_nodes={count} if it belongs to "
                f"nodes, or rename it to 'edge_{name}'"
            )

        if count == num_nodes and not (is_of_edges and count == num_edges):
            node_arrays[name] = array
        elif count == num_edges:
            edge_arrays["weight" if name == EDGE_VALUES else name] = array
        elif name in _REQUIRED_LENGTH:
            raise DatasetError(
                f"{where}: array {name!r} has shape {array.shape}, which is neither one row "
                f"for each of the {num_nodes} nodes nor one for each of the {num_edges} edges"
            )
        else:
            ignored.append(f"{name} {array.shape}")
    reason = f"a row neither for each of the {num_nodes} nodes nor for each of the {num_edges} edges"
    warn_ignored(where, ignored, reason)

    if any(name in arrays for name in _SPARSE_KEYS):
        node_arrays[FEATURE] = _read_sparse_features(arrays, where)
    columns = standard_columns(node_arrays, where)
    val_mask = columns.get("val_mask")
    if val_mask is not None and not isinstance(val_mask, SparseRows) and not val_mask.any():
        del columns["val_mask"]
    return columns, edge_arrays


def _read_sparse_features(arrays: Mapping[str, Array], where: str) -> SparseRows:
    _require(arrays, _SPARSE_KEYS, where)
    values = arrays["feat_data"]
    if values.dtype.kind != "f":  # Counts and flags may be stored as small integers.
        values = values.astype(np.float32)
    return SparseRows(
        indptr=arrays["feat_indptr"].astype(np.int64),
        indices=arrays["feat_indices"].astype(np.int32, copy=False),
        values=values,
        num_columns=_read_count(arrays, "feat_dim", where),
    )


def _group_by_relation(
    source_ids: Array,
    destination_ids: Array,
    columns: Mapping[str, Array],
    relation: Array,
    names: Array | None,
    where: str,
) -> tuple[dict[EdgeType, tuple[Array, Array]], dict[EdgeType, dict[str, Array]]]:
    """Return the edges and their columns by edge type. Each relation with an edge is a type."""
    relation = _read_ids(relation, "rel or etype", where)
    if names is None:
        check_ids(relation, 1 << 20, "rel or etype", where, id_name="relation")
        names = np.array([f"r{code}" for code in range(int(relation.max(initial=-1)) + 1)])
    check_ids(relation, len(names), "rel or etype", where, id_name="relation")
    _check_lengths(source_ids, relation, "relations", where)
    repeat = first_repeat(names)
    if repeat is not None:
        raise DatasetError(f"{where}: two relations have the name {str(names[repeat[0]])!r}; rename one")

    # One stable sort puts each relation's edges together without changing their order.
    order = np.argsort(relation, kind="stable")
    offsets = np.searchsorted(relation[order], np.arange(len(names) + 1))
    edges = {}
    edge_data: dict[EdgeType, dict[str, Array]] = {}
    for code, name in enumerate(names):
        rows = order[offsets[code] : offsets[code + 1]]
        if len(rows) == 0:
            continue
        edge_type = (NODE_TYPE, str(name), NODE_TYPE)
        edges[edge_type] = (source_ids[rows], destination_ids[rows])
        edge_data[edge_type] = {}
        for key, column in columns.items():
            # A split may have no triple with a rare relation. Then the relation gets no mask.
            if not key.endswith("_mask") or column[rows].any():
                edge_data[edge_type][key] = column[rows]
    return edges, edge_data


def _read_ids(array: Array, name: str, where: str) -> Array:
    """Convert ``array`` to int32 or int64 in the machine's byte order, which compiled loops need."""
    check_integers(array, name, where)
    if array.dtype in (np.int32, np.int64):
        return array
    return array.astype(np.int32 if array.itemsize < 4 else np.int64)


def _check_lengths(source_ids: Array, values: Array, values_name: str, where: str) -> None:
    if len(source_ids) != len(values):
        raise DatasetError(f"{where}: {len(source_ids)} edges but {len(values)} {values_name} of edges")


@final
class TorchSource(DatasetSource):
    """A ``.pt`` from ``torch.save`` with a dict of tensors, named as in a ``.npz``. It has no options.

    For PyG's ``Data``, write ``torch.save(data.to_dict(), FILE)``. Pickled classes are never loaded.
    """

    def load(self) -> RawGraph:
        import torch

        where = str(self._path)
        remedy = "save a dict of tensors: for PyG torch.save(data.to_dict(), FILE)"
        magic = b""
        with suppress(OSError), self._path.open("rb") as file:
            magic = file.read(4)
        # torch would read any other file as an older format, which can run more code.
        if magic != b"PK\x03\x04":
            raise DatasetError(f"{where} is missing, not a torch.save file, or cut off; {remedy}")

        try:
            values = torch.load(self._path, map_location="cpu", weights_only=True)
        except Exception as error:
            classes = re.findall(r"GLOBAL ([\w.]+)", str(error))
            reason = f"holds the class {classes[0]}, which is never loaded" if classes else "is damaged"
            raise DatasetError(f"{where}: {reason}; {remedy}") from error
        # Dicts in the dict are the types in PyG's HeteroData.
        has_types = isinstance(values, dict) and any(isinstance(v, dict) and v for v in values.values())
        if not isinstance(values, dict) or has_types:
            raise DatasetError(f"{where} does not hold a dict of tensors of one type; {remedy}")
        arrays = {}
        ignored = []
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_quantized:
                arrays[str(name)] = array_of_tensor(value)
            elif isinstance(value, (bool, int, float)):
                arrays[str(name)] = np.array(value)
            else:
                ignored.append(str(name))
        warn_ignored(where, ignored, "no dense tensor")
        return build_graph_from_arrays(arrays, self._path.stem, where)


def warn_ignored(where: str, names: Sequence[str], reason: str) -> None:
    if names:
        _LOG.warning("%s: ignored %s: %s", where, ", ".join(names), reason)
