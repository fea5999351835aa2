"""Graphs in single files: ``.npz`` archives, tensors of torch, NetworkX's formats, and edge lists."""

import codecs
import gzip
import importlib
import io
import json
import logging
import math
import re
import tokenize
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dglx_dist.data.external_memory import Workspace, map_spill, spill
from dglx_dist.data.metis_text import EDGE_VALUES, read_metis
from dglx_dist.data.sources import (
    LINE_FORMATS,
    OTHER_NAMES,
    DatasetSource,
    array_of_tensor,
    count_classes,
    masks_of_split,
    open_text,
    standard_columns,
    suffix_of,
)
from dglx_dist.data.storage.files import read_small_file
from dglx_dist.data.table_graphs import build_graph_from_tables
from dglx_dist.data.tables import as_numpy, id_column
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

_SPARSE = ("feat_indptr", "feat_indices", "feat_data", "feat_dim")
_STRUCTURE = {
    *("src", "dst", "head", "tail", "rel", "etype", "etype_names", "relation_names", "triple_split"),
    *("num_classes", "num_nodes", "num_etypes", "num_entities", "num_relations", "both_directions", "split"),
    *_SPARSE,
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
    """A ``.npz`` of arrays. If memory is limited, it is unpacked into files. It has no options.

    ``src``, ``dst`` and ``num_nodes`` define a graph. ``etype`` and ``etype_names`` give it one edge type
    ("_N", name, "_N") per relation. ``head``, ``rel``, ``tail`` and ``triple_split`` define a knowledge graph
    with split masks on edges. Features are in ``features``, or as compressed rows in ``feat_indptr``,
    ``feat_indices``, ``feat_data`` and ``feat_dim``. ``num_classes`` may give the number of classes.

    Without ``num_nodes``, the number of nodes follows from ids or rows of features or labels. Any other array
    is a node column if it has as many rows as there are nodes, and an edge column if it has as many as there
    are edges. If both numbers are equal, its name must begin with ``node_`` or ``edge_``. With another number
    of rows it is ignored with a warning. A ``val_mask`` without any node is ignored, because official splits
    often have none. Pickled objects are never loaded.

    The names of PyG (``edge_index``, ``x``, ``y``, ``edge_type``) are supported too. So is a square matrix of
    ``scipy.sparse.save_npz``, which is read at once. Row u, column v is an edge from u to v. The values
    become ``weight`` unless all are 1.
    """

    external = True

    def load(self) -> RawGraph:
        return build_graph_from_arrays(_read(self._path, self.workspace), self._path.stem, str(self._path))


def build_graph_from_arrays(arrays: Mapping[str, Array], name: str, where: str) -> RawGraph:
    """Build the graph from arrays with the names of :class:`NpzSource`. ``where`` starts messages.

    Raises DatasetError if ends of edges or known columns are missing, or have the wrong dtype or length.
    """
    arrays = _rename_pyg(arrays, where)
    ends = ("head", "rel", "tail") if "head" in arrays else ("src", "dst")
    _require(arrays, ends, where)
    source_ids, destination_ids = (_read_ids(arrays[name], name, where) for name in (ends[0], ends[-1]))
    num_nodes = _read_num_nodes(arrays, source_ids, destination_ids, where)
    node_columns, edge_columns = _read_columns(arrays, num_nodes, len(source_ids), where)
    if "triple_split" in arrays:
        _check_lengths(source_ids, arrays["triple_split"], "splits", where)
        masks = masks_of_split(arrays["triple_split"])
        edge_columns.update({name: mask for name, mask in masks.items() if mask.any()})
    edges = {EDGE_TYPE: (source_ids, destination_ids)}
    edge_data = {EDGE_TYPE: edge_columns}
    relation = arrays.get("rel", arrays.get("etype"))
    if relation is not None:
        names = arrays.get("relation_names", arrays.get("etype_names"))
        edges, edge_data = _group_by_relation(
            source_ids, destination_ids, edge_columns, relation, names, where
        )
    has_num_classes = "num_classes" in arrays
    num_classes = _count(arrays, "num_classes", where) if has_num_classes else count_classes(node_columns)
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
    if "edge_index" not in arrays:
        return arrays
    edge_index = arrays["edge_index"]
    if edge_index.ndim != 2 or len(edge_index) != 2:
        raise DatasetError(f"{where}: edge_index has shape {edge_index.shape}; expected (2, edges)")
    renamed = {_PYG_NAMES.get(name, name): array for name, array in arrays.items() if name != "edge_index"}
    # x and y are node columns, even if there are as many edges as nodes.
    node_columns = [renamed[name] for name in (FEATURE, LABEL) if name in renamed and renamed[name].ndim]
    num_nodes = {"num_nodes": np.array(len(node_columns[0]))} if node_columns else {}
    return {"src": edge_index[0], "dst": edge_index[1], **num_nodes, **renamed}


def _convert_matrix(matrix: Any, path: Path) -> dict[str, Array]:
    if matrix.format in ("csr", "csc", "bsr"):
        # Compiled code uses its pointers unchecked.
        matrix.check_format(full_check=True)
    matrix = matrix.tocoo()
    if matrix.shape[0] != matrix.shape[1]:
        raise DatasetError(
            f"{path}: the matrix has shape {matrix.shape}, but the matrix of a graph is square; for two "
            "types of nodes write tables (docs/guides/your_data.md)"
        )
    arrays = {"src": matrix.row, "dst": matrix.col, "num_nodes": np.array(matrix.shape[0])}
    return arrays | ({EDGE_VALUES: matrix.data} if (matrix.data != 1).any() else {})


def _read(path: Path, workspace: Workspace | None) -> dict[str, Array]:
    if not path.is_file():
        raise DatasetError(f"there is no file {path.absolute()}; expected a .npz file")
    try:
        with np.load(path, allow_pickle=False) as stored:
            if set(stored.files) >= {"format", "shape", "data"}:
                num_bytes = 4 * sum(member.file_size for member in stored.zip.infolist())
                if workspace is not None and not workspace.fits(num_bytes):
                    raise ConfigError(
                        f"{path}: a matrix is read at once, which takes {format_bytes(num_bytes)}; grant "
                        "more --memory, or save its rows and columns as src and dst"
                    )
                return _convert_matrix(importlib.import_module("scipy.sparse").load_npz(path), path)
            if workspace is not None:
                return _unpack(path, workspace)
            arrays = {}
            pickled = []
            for name in stored.files:
                try:
                    arrays[name] = stored[name]
                except ValueError as error:
                    if "allow_pickle" not in str(error) or name in _STRUCTURE | _REQUIRED_LENGTH:
                        raise
                    pickled.append(name)
            _warn_ignored(str(path), pickled, "pickled objects, which are never loaded")
            return arrays
    except DglxError:  # Some of them are errors of Python too.
        raise
    except _UNREADABLE as error:
        reason = f"not a readable .npz file of plain arrays ({error}; text ids are for tables)"
        raise DatasetError(f"{path}: {reason}") from error


_EDGE_ORDER_ARRAYS = ("rel", "etype", "triple_split")
"""Arrays that order edges or give them masks."""


def _is_converted(name: str, dtype: np.dtype[Any]) -> bool:
    # Ids other than int32 and int64, integer features, and compressed rows are converted.
    if name in ("src", "dst", "head", "tail"):
        return dtype not in (np.int32, np.int64)
    return name in _SPARSE or (OTHER_NAMES.get(name, name) == FEATURE and dtype.kind in "iub")


def _unpack(path: Path, workspace: Workspace) -> dict[str, Array]:
    with zipfile.ZipFile(path) as archive:
        members = [member for member in archive.infolist() if member.filename.endswith(".npy")]
        names = [member.filename.removesuffix(".npy") for member in members]
        headers = {member: _read_header(archive.open(member)) for member in members}
        num_bytes = sum(member.file_size for member in members)
        sizes = {
            name: 8 * math.prod(shape)
            for name, (dtype, shape) in zip(names, headers.values(), strict=True)
            if _is_converted(name, dtype)
        }
        sizes |= {name: num_bytes for name in _EDGE_ORDER_ARRAYS if name in names}
        if not workspace.fits(sum(sizes.values())):
            raise ConfigError(
                f"{path}: {', '.join(sorted(sizes))} are converted in memory, which takes up to "
                f"{format_bytes(sum(sizes.values()))}; store them as int32, int64 or float32, make a "
                "dataset with dglx ingest, or grant more --memory"
            )

        def write(folder: Path) -> None:
            with progress("Unpacking the arrays", num_bytes) as advance:
                for i, (member, (dtype, _)) in enumerate(headers.items()):
                    values = spill(folder, str(i), dtype)
                    with archive.open(member) as stream:
                        _read_header(stream)
                        while piece := stream.read(dtype.itemsize << 16):
                            values.append(np.frombuffer(piece, dtype))
                            advance(len(piece))

        folder = workspace.stage("arrays", write)
    return {
        name: map_spill(folder, str(i)).reshape(shape)
        for i, (name, (_, shape)) in enumerate(zip(names, headers.values(), strict=True))
    }


def _read_header(stream: IO[bytes]) -> tuple[np.dtype[Any], tuple[int, ...]]:
    version = np.lib.format.read_magic(stream)
    parse = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, is_fortran, dtype = parse(stream)
    if dtype.hasobject or (is_fortran and len(shape) > 1):
        raise ValueError(f"{stream.name} holds objects, or columns one after the other")
    return dtype, shape


def _require(arrays: Mapping[str, Array], names: tuple[str, ...], where: str) -> None:
    missing = next((name for name in names if name not in arrays), None)
    if missing is not None:
        raise DatasetError(
            f"{where}: the array {missing!r} is missing; a graph needs src and dst, a knowledge graph head, "
            f"rel and tail, PyG's edge_index (the file has {', '.join(sorted(arrays)) or 'none'})"
        )


def _count(arrays: Mapping[str, Array], name: str, where: str) -> int:
    value = arrays[name]
    if value.size != 1 or value.dtype.kind not in "iu" or value.item() < 0:
        raise DatasetError(f"{where}: {name} is {value!r:.60}; expected one whole number of at least 0")
    return int(value.item())


def _read_num_nodes(
    arrays: Mapping[str, Array], source_ids: Array, destination_ids: Array, where: str
) -> int:
    count_names = [name for name in ("num_nodes", "num_entities") if name in arrays]
    if count_names:
        num_nodes = _count(arrays, count_names[0], where)
    else:
        node_columns = [arrays[name] for name in (FEATURE, LABEL, *OTHER_NAMES) if name in arrays]
        counts = [len(column) for column in node_columns if column.ndim and len(column) != len(source_ids)]
        num_nodes = max(*counts, *(1 + int(ids.max(initial=-1)) for ids in (source_ids, destination_ids)))
    if 8 * num_nodes > machine_memory()[0]:
        raise DatasetError(
            f"{where}: there are {num_nodes} nodes by num_nodes or the largest id, and one number for each "
            f"takes {format_bytes(8 * num_nodes)}, more than this machine has; number them from 0 without "
            "gaps"
        )
    return num_nodes


def _read_columns(
    arrays: Mapping[str, Array], num_nodes: int, num_edges: int, where: str
) -> tuple[dict[str, NodeColumn], dict[str, Array]]:
    node_arrays: dict[str, NodeColumn] = {}
    edge_arrays: dict[str, Array] = {}
    ignored = []
    for name, array in arrays.items():
        if name in _STRUCTURE:
            continue
        count = len(array) if array.ndim else -1
        is_of_edges = name == EDGE_VALUES or name.startswith("edge_")
        is_of_nodes = name.startswith("node_") or name in _REQUIRED_LENGTH
        is_counted = "num_nodes" in arrays or "num_entities" in arrays
        if count == num_edges == num_nodes and not (is_of_edges or is_of_nodes):
            raise DatasetError(
                f"{where}: array {name!r} has {count} rows, and there are as many nodes as edges; rename it "
                f"to 'node_{name}' or 'edge_{name}'"
            )
        if count == num_edges != num_nodes and is_of_nodes and not is_counted:
            raise DatasetError(
                f"{where}: array {name!r} has a row for each of the {count} edges, but the largest id is "
                f"{num_nodes - 1}; give num_nodes={count} if it belongs to nodes, or rename it to "
                f"'edge_{name}'"
            )
        if count == num_nodes and not (is_of_edges and count == num_edges):
            node_arrays[name] = array
        elif count == num_edges:
            edge_arrays["weight" if name == EDGE_VALUES else name] = array
        elif name in _REQUIRED_LENGTH:
            raise DatasetError(
                f"{where}: array {name!r} has shape {array.shape}, which is neither one row for each of the "
                f"{num_nodes} nodes nor one for each of the {num_edges} edges"
            )
        else:
            ignored.append(f"{name} {array.shape}")
    reason = f"a row neither for each of the {num_nodes} nodes nor for each of the {num_edges} edges"
    _warn_ignored(where, ignored, reason)
    if any(name in arrays for name in _SPARSE):
        _require(arrays, _SPARSE, where)
        values = arrays["feat_data"]
        node_arrays[FEATURE] = SparseRows(
            indptr=arrays["feat_indptr"].astype(np.int64),
            indices=arrays["feat_indices"].astype(np.int32, copy=False),
            # Counts and flags may be stored as small integers.
            values=values if values.dtype.kind == "f" else values.astype(np.float32),
            num_columns=_count(arrays, "feat_dim", where),
        )
    columns = standard_columns(node_arrays, where)
    val_mask = columns.get("val_mask")
    if val_mask is not None and not isinstance(val_mask, SparseRows) and not val_mask.any():
        del columns["val_mask"]
    return columns, edge_arrays


def _group_by_relation(
    source_ids: Array,
    destination_ids: Array,
    columns: Mapping[str, Array],
    relation: Array,
    names: Array | None,
    where: str,
) -> tuple[dict[EdgeType, tuple[Array, Array]], dict[EdgeType, dict[str, Array]]]:
    relation = _read_ids(relation, "rel or etype", where)
    if names is None:
        check_ids(relation, 1 << 20, "rel or etype", where, id_name="relation")
        names = np.array([f"r{code}" for code in range(int(relation.max(initial=-1)) + 1)])
    check_ids(relation, len(names), "rel or etype", where, id_name="relation")
    _check_lengths(source_ids, relation, "relations", where)
    # One stable sort puts each relation's edges together without changing their order.
    order = np.argsort(relation, kind="stable")
    offsets = np.searchsorted(relation[order], np.arange(len(names) + 1))
    edges = {}
    edge_data = {}
    if (repeat := first_repeat(names)) is not None:
        raise DatasetError(f"{where}: two relations have the name {str(names[repeat[0]])!r}; rename one")
    for code, name in enumerate(names):
        rows = order[offsets[code] : offsets[code + 1]]
        if len(rows):
            edge_type = (NODE_TYPE, str(name), NODE_TYPE)
            edges[edge_type] = (source_ids[rows], destination_ids[rows])
            # A split may have no triple of a rare relation. Then the relation gets no mask.
            pieces = {key: column[rows] for key, column in columns.items()}
            edge_data[edge_type] = {
                key: piece for key, piece in pieces.items() if not key.endswith("_mask") or piece.any()
            }
    return edges, edge_data


def _read_ids(array: Array, name: str, where: str) -> Array:
    # Compiled loops need the machine's byte order.
    check_integers(array, name, where)
    if array.dtype in (np.int32, np.int64):
        return array
    return array.astype(np.int32 if array.itemsize < 4 else np.int64)


def _check_lengths(source_ids: Array, values: Array, values_name: str, where: str) -> None:
    if len(source_ids) != len(values):
        raise DatasetError(f"{where}: {len(source_ids)} edges but {len(values)} {values_name} of edges")


@final
class TorchSource(DatasetSource):
    """A ``.pt`` of ``torch.save`` with a dict of tensors, named as in a ``.npz``. It has no options.

    For a ``Data`` of PyG, write ``torch.save(data.to_dict(), FILE)``. Pickled classes are never loaded.
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
        has_type = isinstance(values, dict) and not any(isinstance(v, dict) and v for v in values.values())
        if not has_type:
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
        _warn_ignored(where, ignored, "no dense tensor")
        return build_graph_from_arrays(arrays, self._path.stem, where)


_MAX_BYTES = 1 << 28


@final
class NetworkxSource(DatasetSource):
    """A NetworkX file of at most 256 MiB: ``.graphml``, ``.gml`` or ``.json``, also with ``.gz``.

    Edges of an undirected graph are stored in both directions. The second direction has no mask. Attributes
    have the same meaning as columns of tables (``TablesSource``). Texts, and attributes that some nodes or
    edges lack, are ignored. It has no options.
    """

    memory_per_byte = 20

    def load(self) -> RawGraph:
        where = str(self._path)
        suffix = suffix_of(self._path)
        try:
            content = read_small_file(self._path, _MAX_BYTES)
            if self._path.suffix == ".gz":
                with gzip.open(io.BytesIO(content)) as file:
                    content = file.read(_MAX_BYTES + 1)
            if len(content) > _MAX_BYTES:
                raise ValueError(f"it has more than {format_bytes(_MAX_BYTES)}; save its edges as a .txt")
            graph = _read_networkx(content.removeprefix(codecs.BOM_UTF8), suffix.removesuffix(".gz"))
        # Each reader raises its own errors for damaged files.
        except Exception as error:
            raise DatasetError(
                f"{where}: not a readable {suffix} of NetworkX, or cut off: {str(error) or repr(error)}"
            ) from error
        nodes = list(graph.nodes(data=True))
        edges = list(graph.edges(data=True))
        if not graph.is_directed():
            edges += [(v, u, _without_split(data)) for u, v, data in edges if u != v]
        # In XML all ids are texts, even numbers.
        texts = [str(node) for node, _ in nodes]
        to_id: Any = int if all(len(t) < 19 and t.isdecimal() and str(int(t)) == t for t in texts) else str
        nodes.sort(key=lambda node: int(node[0]) if to_id is int else 0)
        node_columns = _read_attributes([data for _, data in nodes], f"{where}, nodes")
        edge_columns = _read_attributes([data for *_, data in edges], f"{where}, edges")
        node_columns["id"] = pa.array([to_id(node) for node, _ in nodes])
        destinations = pa.array([to_id(v) for _, v, _ in edges])
        edge_columns |= {"src": pa.array([to_id(u) for u, *_ in edges]), "dst": destinations}
        tables = {NODE_TYPE: (where, pa.table(node_columns))}, {EDGE_TYPE: (where, pa.table(edge_columns))}
        return build_graph_from_tables(self._path.name.removesuffix(suffix), *tables)


def _read_networkx(content: bytes, suffix: str) -> Any:
    networkx = importlib.import_module("networkx")
    if suffix == ".json":
        value = json.loads(content)
        _check_node_link(value)
        json.dumps(value, ensure_ascii=False).encode()  # It fails for lone surrogates.
        graph = networkx.node_link_graph(value, edges="links" if "links" in value else "edges")
        ids = {json.dumps(node.get("id", [i])) for i, node in enumerate(value["nodes"])}
        return _check_declared(graph, len(ids))
    # Entities that refer to each other grow without limit. In UTF-16, zero bytes are between the characters.
    if b"<!ENTITY" in content.replace(b"\0", b""):
        raise ValueError("it declares entities (<!ENTITY), which are never expanded")
    # In .gml, nodes are named by their labels if there are any. Parallel edges need the key multigraph.
    has_labels = re.search(rb"node\s*\[[^\]]*?\blabel\s", content)
    options = {"label": "label" if has_labels else "id"} if suffix == ".gml" else {}
    if suffix == ".gml" and not re.search(rb"\bmultigraph\s", content):
        content = re.sub(rb"\bgraph\s*\[", b"graph [ multigraph 1 ", content, count=1)
    read_graph = getattr(networkx, f"read_{suffix[1:]}")
    try:
        graph = read_graph(io.BytesIO(content), **options)
    except networkx.NetworkXError as error:
        if not has_labels or "label" not in str(error):
            raise
        _LOG.warning("nodes are named by id, because their labels are not unique: %s", error)
        graph = read_graph(io.BytesIO(content), label="id")
    if suffix != ".gml":
        _check_declared(graph, len(re.findall(rb"<(?:\w+:)?node[\s>]", content)))
    return graph


def _check_node_link(value: Any) -> None:
    """Raise ValueError unless the JSON value has nodes and links in the format of NetworkX and D3."""
    keys: Mapping[str, Any] = value if isinstance(value, dict) else {}
    rows: Any = [keys.get("nodes"), keys.get("links", keys.get("edges"))]
    is_sound = all(isinstance(part, list) and all(isinstance(row, dict) for row in part) for part in rows)
    if not is_sound or not all({"source", "target"} <= link.keys() for link in rows[1]):
        raise ValueError(
            "it needs a list 'nodes' of objects with an id, and a list 'links' or 'edges' of objects with "
            f"source and target (it has {', '.join(map(repr, keys)) or 'no keys'}); write "
            "networkx.node_link_data, or a text with two ids per line"
        )


def _check_declared(graph: Any, num_declared: int) -> Any:
    """Return ``graph``. Raise ValueError if edges have ends other than the ``num_declared`` nodes."""
    if len(graph) > num_declared:
        raise ValueError(f"an edge ends in {list(graph)[num_declared]!r}, which is not among the nodes")
    return graph


def _without_split(data: Mapping[str, Any]) -> dict[str, Any]:
    # Only one direction of an edge may be a target.
    columns = {name: value for name, value in data.items() if name != "split"}
    return columns | {name: type(data[name])() for name in SPLITS if name in data}


def _read_attributes(rows: Sequence[Mapping[str, Any]], where: str) -> dict[str, Any]:
    columns = {}
    ignored = []
    for name in dict.fromkeys(chain.from_iterable(rows)):
        try:
            column = pa.array([row.get(name) for row in rows])
        except (pa.ArrowException, OverflowError):
            column = pa.nulls(len(rows))
        dtype = getattr(column.type, "value_type", column.type)
        is_number = pa.types.is_integer(dtype) or pa.types.is_floating(dtype) or pa.types.is_boolean(dtype)
        is_given = name in (LABEL, "split") and not pa.types.is_null(dtype)
        if (is_number and not column.null_count) or is_given:
            columns[name] = column
        else:
            ignored.append(str(name))
    _warn_ignored(where, ignored, "not a number in each")
    return columns


def _warn_ignored(where: str, names: Sequence[str], reason: str) -> None:
    if names:
        _LOG.warning("%s: ignored %s: %s", where, ", ".join(names), reason)


# It also matches times and dates.
_NUMBER = re.compile(rb"[-+.:/\d]+([eT][-+.:\dZ]+)?")
_ENTRY = re.compile(r"'(?!(?:src|dst)')([^']+)': (?:(-?\d+(?:\.\d+)?(?:e[-+]\d+)?)(?=[,}]))?")
"""Pattern of a key in NetworkX's dictionaries, and of its value if that is a number."""
_TEXT = re.compile(r""": ("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')""")
"""Pattern of a text value in such a dictionary. It may contain text that looks like an entry."""
INTERACTION = ("user", "interacts", "item")
_CODE_OF_FILE = {"train": 0, "valid": 1, "val": 1, "dev": 1, "test": 2}


@final
class EdgeListSource(DatasetSource):
    """A text with one edge per line, such as SNAP's ``.txt.gz``.

    A line has two ids and any columns of numbers. They are separated by spaces, tabs, commas or ``::``. ``#``
    starts a comment, or ``%`` if the text begins with it. Numbers in NetworkX's dictionary at the end of a
    line become columns. Texts, and ids other than 0..N-1, are kept as the user's ids. One further column is
    called ``weight``. More are called ``column2``, ``column3`` ... No reverse edges are added. For lists with
    each edge once, use ``--add-reverse-edges``.

    The option ``format`` gives the meaning of a line: ``edges``, ``triples`` or ``interactions``.
    Interactions are edges ("user", "interacts", "item") with separate ids of users and items. In a folder,
    each line has a user and all its items. Lines of three whole numbers are ambiguous and need the option.

    Lines with three texts, or a text between two numbers, are head, relation and tail of a knowledge graph.
    Ids stay texts, and each relation is an edge type. A folder with ``train.txt``, ``valid.txt`` (``val``,
    ``dev``) and ``test.txt``, or ``.tsv``, is a knowledge graph with its split.

    A text that begins with ``%%MatrixMarket`` (``.mtx``) is a square matrix. Row u, column v, counted from 1,
    is an edge from u - 1 to v - 1, in both directions if the matrix is symmetric. A ``.graph`` is in METIS's
    format. Its edges have both directions, and its node weights are called ``node_weight``.
    """

    known_options = ("format",)

    def __init__(self, location: str, options: Mapping[str, object]) -> None:
        super().__init__(location, options)
        self._format = options.get("format")
        if self._format not in (None, *LINE_FORMATS):
            raise ConfigError(f"format is {self._format!r}; it is one of {', '.join(LINE_FORMATS)}")

    def load(self) -> RawGraph:
        if self._path.is_dir():
            return self._load_folder()
        is_metis = suffix_of(self._path).removesuffix(".gz") == ".graph"
        if (arrays := (read_metis if is_metis else _read_matrix_market)(self._path)) is None:
            return self._load_lines()
        if self._format is not None:
            raise ConfigError(f"{self._path} defines its own format; leave out --format {self._format}")
        return build_graph_from_arrays(
            arrays, self._path.name.removesuffix(suffix_of(self._path)), str(self._path)
        )

    def _load_folder(self) -> RawGraph:
        files = self._find_split_files()
        name = self._path.resolve().name
        if self._format == "interactions":
            return _build_from_item_lists(files, name)
        if self._format == "edges":
            raise ConfigError(
                f"{self._path} is a folder of splits, which holds triples or interactions; give --format "
                "triples or interactions, or one file of edges"
            )
        read_all = ((path, *_read_lines(path, is_triples=True)) for path in files.values())
        tables = ((path, read, lines[0]) for path, read, lines, _ in read_all)
        return _build_from_triples(tables, list(files), name, str(self._path))

    def _load_lines(self) -> RawGraph:
        import pandas as pd

        where = str(self._path)
        name = self._path.name.removesuffix(suffix_of(self._path))
        is_triples = None if self._format is None else self._format == "triples"
        read, lines, are_triples = _read_lines(self._path, is_triples)
        line = lines[0]
        _refuse_header(read, where, line)
        # Names of relations may be any text, but a -> b is an edge.
        signs = (_SIGNS, _ARROW, _SIGNS) if all(are_triples) and 2 in read else (_SIGNS, _SIGNS)
        for column, refused in zip(read.columns, signs, strict=False):
            _refuse_signs(read[column], where, refused)
        if all(are_triples):
            return _build_from_triples([(self._path, read, line)], [-1], name, where)
        if read.shape[1] < 2:
            raise DatasetError(f"{where}: the line {line} does not have two ids")
        ends = [[re.fullmatch(r"-?\d+", str(end)) for end in row] for row in read.iloc[:2, :2].to_numpy()]
        if len(ends) == 2 and all(ends[1]) and not any(ends[0]):
            raise DatasetError(f"{where}: the line {line} is a header; begin it with #")
        if are_triples[0] and not read.dtypes[2:].map(pd.api.types.is_numeric_dtype).all():
            raise DatasetError(
                f"{where}: the line {lines[1]} is not head, relation and tail like {line}; if that line is a "
                "header, begin it with #"
            )
        numbered = {number: f"column{number}" for number in range(3, read.shape[1])}
        names = {0: "src", 1: "dst", 2: "column2" if numbered else "weight", **numbered}
        if 2 in read and self._format is None:
            _explain_columns(read, where, line)
        table = pa.Table.from_pandas(read.rename(columns=names))
        for end in ("src", "dst"):
            ids = id_column(table, end, where)
            if ids.is_integer:
                ids.refuse(as_numpy(pc.less(ids.values, 0)), "is negative; ids are 0 or more", "node id ")
        etype = INTERACTION if self._format == "interactions" else EDGE_TYPE
        return build_graph_from_tables(name, {}, {etype: (where, table)})

    def _find_split_files(self) -> dict[int, Path]:
        files: dict[int, Path] = {}
        for path in sorted(self._path.glob("*.t[xs][tv]")):
            code = _CODE_OF_FILE.get(path.stem, -1)
            if code in files:
                raise DatasetError(
                    f"{self._path}: {files[code].name} and {path.name} are the same split; remove one"
                )
            if code >= 0:
                files[code] = path
        if not files:
            raise DatasetError(f"{self._path} has no train.txt, valid.txt or test.txt; give a file")
        return files


def _read_matrix_market(path: Path) -> dict[str, Array] | None:
    with open_text(path, "list of edges or matrix, or cut off") as file:
        if not file.readline().removeprefix(codecs.BOM_UTF8).lower().startswith(b"%%matrixmarket"):
            return None
        file.seek(0)
        matrix = importlib.import_module("scipy.io").mmread(file)
    matrix = importlib.import_module("scipy.sparse").coo_array(matrix)
    message = "%s: read as a MatrixMarket matrix of shape %s with %d entries; nodes are counted from 0"
    _LOG.warning(message, path, matrix.shape, matrix.nnz)
    return _convert_matrix(matrix, path)


def _refuse_header(read: Any, where: str, line: str) -> None:
    """Refuse a first line with the numbers of nodes and edges, as in METIS's and other formats."""
    if read.shape[1] < 2 or any(column.dtype.kind == "f" for _, column in read.iloc[:, :2].items()):
        return
    sizes = [int(text) if re.fullmatch(r"\d+", text := str(number)) else -1 for number in read.iloc[0, :3]]
    num_rows = len(read) - 1
    try:
        max_id = int(read.iloc[1:, :2].to_numpy(dtype=np.int64).max(initial=0))
    except (ValueError, TypeError, OverflowError):
        return
    is_size = sizes[1] == num_rows or (len(sizes) == 3 and sizes[1] >= max_id and sizes[2] == num_rows)
    # METIS has a line for each node, and each edge twice.
    is_metis = sizes[0] == num_rows and 2 * sizes[1] == num_rows * read.shape[1]
    if num_rows and sizes[0] >= max_id and (is_size or is_metis):
        raise DatasetError(
            f"{where}: the line {line} could be a header with the numbers of nodes and edges, because "
            f"{num_rows} lines follow; if it is a header, begin it with #, and if it is an edge, move it "
            "behind the other lines (if it is a METIS file, rename it to end in .graph)"
        )


_ARROW = r"^(?:[-=~]*>|<[-=~]*|[-=]+|\u2192)$|\t"
"""Pattern of an arrow instead of an id, or of a tab in an id."""
_SIGNS = rf"""{_ARROW}|^[-=]+>|^["'].|.["',;:]$|^<.+>$|^\([^)]*\)$|^\[[^\]]*\]$|""" + "|".join(
    rf"{begin}[^{end}]*$|^[^{begin}]*{end}" for begin, end in ((r"\(", r"\)"), (r"\[", r"\]"), (r"\{", r"\}"))
)
"""Pattern that also matches ids with quotes, separators or brackets."""


def _refuse_signs(ids: Any, where: str, signs: str = _SIGNS) -> None:
    if ids.dtype.kind in "iuf":
        return
    texts = ids.astype(str)
    if (mask := texts.str.contains(signs, regex=True)).any():
        raise DatasetError(
            f"{where}: {texts[mask].iloc[0]!r} is not an id; write the ids of an edge with a space, tab or "
            "comma between them, without brackets, quotes, arrows or other signs"
        )


def _explain_columns(read: Any, where: str, line: str) -> None:
    """Log how further columns of edges are read. Raise DatasetError if their meaning is ambiguous."""
    columns = [read[i] for i in range(3)]
    is_alike = len({column.dtype for column in columns}) == 1 and columns[0].dtype.kind in "iuf"
    is_whole = 3 not in read and is_alike and all((column % 1 == 0).all() for column in columns)
    # A constant, or numbers larger than all ids, are a weight or a time.
    if is_whole and columns[2].nunique() > 1 and columns[2].min() <= max(columns[0].max(), columns[1].max()):
        line = f"three whole numbers like {line}"
    elif "::" in line:  # MovieLens writes ratings in this format.
        line = f"lines like {line}"
    else:
        names = "column2, column3 and so on" if 3 in read else "a weight"
        message = "%s: columns 1 and 2 are read as the ends of edges, and further columns as %s"
        _LOG.warning(f"{message}; give --format triples or interactions to change that", where, names)
        return
    raise DatasetError(
        f"{where}: {line} may be an edge and a weight, head, relation and tail, or user, item and rating; "
        "give --format edges, triples or interactions (in Python load_dataset(path, format=...))"
    )


def _build_from_item_lists(files: Mapping[int, Path], name: str) -> RawGraph:
    """Return the interactions of texts with a user and all its items per line, as in LightGCN's data."""
    rows: list[tuple[bytes, bytes, int]] = []
    for code, path in files.items():
        content = path.read_bytes().removeprefix(codecs.BOM_UTF8)
        lines = [line.split() for line in content.splitlines() if not line.lstrip().startswith((b"#", b"%"))]
        if len(widths := {len(line) for line in lines if line}) == 1 and max(widths) > 2:
            raise DatasetError(
                f"{path}: each line has {max(widths)} fields, and some may be ratings or times; write a user "
                "and an item in each line"
            )
        rows += [(line[0], item, code) for line in lines for item in line[1:]]
    where = str(next(iter(files.values())).parent)
    if not rows:
        raise DatasetError(f"{where}: no line has a user and an item; write both in each line")
    users, items, splits = zip(*rows, strict=True)
    table = {"split": pa.array(splits)}
    for end, ids in (("src", users), ("dst", items)):
        texts = pa.array([node_id.decode(errors="replace") for node_id in ids])
        is_number = pc.all(pc.match_substring_regex(texts, r"^(0|[1-9]\d{0,17})$")).as_py()
        table[end] = texts.cast(pa.int64()) if is_number else texts
    return build_graph_from_tables(name, {}, {INTERACTION: (where, pa.table(table))})


def _read_lines(path: Path, is_triples: bool | None = None) -> tuple[Any, list[str], list[bool]]:
    """Return the pandas table of ``path``, its first two lines, and which of these look like triples."""
    import pandas as pd

    comments, begin = list[bytes](), list[bytes]()
    entries = dict[str, Any]()
    with open_text(path, "list of edges, or cut off") as file:
        lines = map(bytes.strip, file)
        for line in lines:
            if not comments:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line and not line.startswith((b"#", b"%")):
                begin = [line, *filter(None, islice(lines, 1))]
                break
            comments.append(line)
        if not begin:
            raise ValueError("it has no line with two ids; write the edges")
        file.seek(0)
        source: Any = file
        if not is_triples and re.search(rb"\s\{(['\"].*)?\}$", begin[0]):
            content = file.read(_MAX_BYTES + 1)
            if len(content) > _MAX_BYTES:
                limit = format_bytes(_MAX_BYTES)
                raise ValueError(f"it has dictionaries and over {limit}; use write_edgelist(data=['weight'])")
            text, entries = _without_entries(content.decode(), str(path))
            source, comments = io.BytesIO(text.encode()), []
            begin = [line.partition(b"{")[0].strip() for line in begin]
        first = begin[0]
        if re.fullmatch(rb"[^\s,]+(::[^\s,]+)+", first):
            source = io.BytesIO(file.read().replace(b"::", b"\t"))
        separator = "," if b"," in first else r"\s+"
        triple_separator = "\t" if first.count(b"\t") == 2 else separator
        are_triples = [
            _is_triple(re.split(triple_separator.encode(), line.replace(b"::", b"\t")))
            if is_triples is None
            else is_triples
            for line in begin
        ]
        is_triples = all(are_triples)
        try:
            read = pd.read_csv(
                source,
                sep=triple_separator if is_triples else separator,
                skiprows=len(comments),
                # An IRI may contain a #, so triples have no comments.
                comment=None if is_triples else "%" if b"".join(comments).startswith(b"%") else "#",
                header=None,
                dtype=str if is_triples else None,
                low_memory=False,
                skipinitialspace=True,
                # Quotes, and texts such as NA, are parts of ids.
                quoting=3,
                keep_default_na=False,
                na_values=[""],
            )
        except pd.errors.ParserError as error:
            reason = str(error).removeprefix("Error tokenizing data. C error: ")
            if first.isdigit():
                reason = (
                    f"line {first.decode()} is a count, as in OpenKE's files of head, tail and relation; "
                    "remove it, and put relations between head and tail (--format triples)"
                )
            elif path.stem in _CODE_OF_FILE:
                reason += "; if each line is a user and all its items, add --format interactions"
            raise ValueError(reason) from error
    return read.assign(**entries), [repr(line.decode(errors="replace")) for line in begin], are_triples


def _without_entries(text: str, where: str) -> tuple[str, dict[str, Any]]:
    """Return lines of ``networkx.write_edgelist`` without their dictionaries, and the numbers in them."""
    lines = [re.split(r"\s(?=\{.*\}$)", line.strip(), maxsplit=1) for line in text.splitlines()]
    lines = [line for line in lines if line[0] and line[0][0] not in "#%"]
    entries = [_ENTRY.findall(_TEXT.sub(": ?", "".join(line[1:]))) for line in lines]
    rows = [{name: json.loads(number or "null") for name, number in line_entries} for line_entries in entries]
    columns = _read_attributes(rows, where)
    return "\n".join(line[0] for line in lines), {name: as_numpy(number) for name, number in columns.items()}


def _is_triple(pieces: Sequence[bytes]) -> bool:
    numbers = tuple(bool(_NUMBER.fullmatch(piece.strip())) for piece in pieces)
    return len(numbers) == 3 and (numbers == (True, False, True) or not (numbers[2] or all(numbers[:2])))


def _build_from_triples(
    read: Iterable[tuple[Path, Any, str]], splits: Sequence[int], name: str, where: str
) -> RawGraph:
    """Return the graph of several files. ``read`` has path, table and first line of each."""
    import pandas as pd

    tables = []
    for path, table, line in read:
        if table.shape[1] != 3 or str(table.iloc[0, 1]).lower() in ("relation", "predicate"):
            # In a folder, two columns are a user with one item.
            is_edge = table.shape[1] == 2 and splits == [-1]
            kind = "edges if it is an edge" if is_edge else "interactions if it is a user and its items"
            raise DatasetError(
                f"{path}: the line {line} is not head, relation and tail; remove a header, or add "
                f"--format {kind}"
            )
        table = table.apply(lambda column: column.str.rstrip())
        tables.append(table.set_axis(["head", "relation", "tail"], axis=1))
        for column in tables[-1]:
            id_column(pa.table({column: tables[-1][column]}), column, str(path))
    triples = pd.concat(tables)
    ends, entities = pd.factorize(pd.concat([triples["head"], triples["tail"]]), sort=True)
    relation, relations = pd.factorize(triples["relation"], sort=True)
    if len(relations) > max(100, triples["tail"].nunique()):
        _LOG.warning("%s: more relations than tails; check that lines are head, relation, tail", where)
    arrays = {
        "head": ends[: len(triples)],
        "tail": ends[len(triples) :],
        "rel": relation,
        "relation_names": np.array(relations, dtype=np.str_),
        "triple_split": np.repeat(splits, [len(table) for table in tables]),
    }
    user_ids = {NODE_TYPE: np.array(entities, dtype=np.str_)}
    return replace(build_graph_from_arrays(arrays, name, where), user_ids=user_ids)
