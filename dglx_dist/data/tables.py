"""Graphs in CSV or Parquet tables of nodes and edges, with the user's own ids."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

from dglx_dist.data.json_fields import Fields
from dglx_dist.data.sources import (
    DatasetSource,
    classes_of,
    count_classes,
    masks_of_split,
    refuse_unknown,
    standard_columns,
)
from dglx_dist.data.storage.columns import id_dtype
from dglx_dist.data.validate import check_columns, check_finite, check_unique
from dglx_dist.errors import DatasetError
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
)

SUFFIXES = (".csv", ".parquet")


def read_table(path: Path) -> Any:
    """Return the table in ``path``, a ``.csv`` with a header line or a ``.parquet``, as a pyarrow.Table."""
    if not path.is_file():
        raise DatasetError(f"there is no table {path.absolute()}")
    if path.suffix not in SUFFIXES:
        raise DatasetError(f"{path}: a table must be one of {', '.join(SUFFIXES)}, not {path.suffix!r}")
    try:
        if path.suffix == ".csv":
            return pyarrow.csv.read_csv(path)
        return pyarrow.parquet.read_table(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise DatasetError(f"{path}: not readable as a {path.suffix[1:]} table: {error}") from error


def column(table: Any, name: str, where: str) -> Any:
    """Return the column ``name`` in one chunk; DatasetError if it is missing or not unique."""
    check_names(table.column_names, [name], where)
    combined = table.column(name).combine_chunks()
    # A column without chunks stays a ChunkedArray.
    return plain(combined.combine_chunks() if isinstance(combined, pa.ChunkedArray) else combined)


def check_names(known: Sequence[str], names: Sequence[str], where: str) -> None:
    """Raise DatasetError unless each of ``names`` is one of the columns ``known``, once."""
    for name in names:
        count = list(known).count(name)
        if count == 0:
            raise DatasetError(f"{where}: has no column {name!r} (it has {', '.join(known) or 'none'})")
        if count > 1:
            raise DatasetError(f"{where}: has {count} columns {name!r}; rename all but one")


def plain(values: Any) -> Any:
    """Return a pyarrow array with dictionaries (pandas) decoded and string views (Polars) as strings."""
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    return values.cast(pa.large_string()) if pa.types.is_string_view(values.type) else values


def holds_text(values: Any) -> bool:
    """Whether a pyarrow array holds strings."""
    return bool(pa.types.is_string(values.type) or pa.types.is_large_string(values.type))


def id_column(table: Any, name: str, where: str) -> Any:
    """Return the ids in column ``name`` as a pyarrow int64 or large_string array without gaps."""
    ids = column(table, name, where)
    if table.num_rows == 0:
        raise DatasetError(f"{where}: the table has no row, which would leave the graph empty")
    refuse_gaps(ids, name, where)
    if pa.types.is_integer(ids.type):
        return as_int64(ids, name, where)
    if holds_text(ids):
        return ids.cast(pa.large_string())
    raise DatasetError(f"{where}: column {name!r} must hold integer or string ids; it holds {ids.type}")


def as_int64(values: Any, name: str, where: str) -> Any:
    """Return integers (a pyarrow array) as int64; DatasetError on overflow."""
    try:
        return values.cast(pa.int64())
    except pa.ArrowInvalid as error:
        raise DatasetError(f"{where}: column {name!r} has a number beyond 64 signed bits: {error}") from error


def refuse_gaps(values: Any, name: str, where: str, first_row: int = 0) -> None:
    """Raise DatasetError naming the first null of ``values`` (a pyarrow array)."""
    if values.null_count:
        row = first_row + int(np.argmax(pc.is_null(values).to_numpy(zero_copy_only=False)))
        raise DatasetError(f"{where}: column {name!r}, row {row}: is empty ({values.null_count} rows in all)")


def number_values(values: Any, name: str, where: str, first_row: int = 0) -> Array:
    """Return ``values`` (a pyarrow array) as (K,) numbers or booleans, or (K, F) if its rows are lists.

    Raises:
        DatasetError: values are missing, NaN, infinite or not numbers, or lists differ in length; names file
            (``where``), column and row (from ``first_row`` on).
    """
    refuse_gaps(values, name, where, first_row)
    width = None
    if pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
        width = list_width(values, name, where, first_row)
    elif pa.types.is_fixed_size_list(values.type):
        width = values.type.list_size
    flat = values if width is None else values.flatten()
    if not (
        pa.types.is_integer(flat.type) or pa.types.is_floating(flat.type) or pa.types.is_boolean(flat.type)
    ):
        raise DatasetError(
            f"{where}: column {name!r} must hold numbers; it holds {values.type}. Encode it as numbers or "
            f"leave it out"
        )
    if flat.null_count:
        position = int(np.argmax(pc.is_null(flat).to_numpy(zero_copy_only=False)))
        row = first_row + position // max(width or 1, 1)
        raise DatasetError(f"{where}: column {name!r}, row {row}: has an empty value")
    array = np.asarray(flat.to_numpy(zero_copy_only=False))
    array = array if width is None else array.reshape(len(values), width)
    check_finite(array, name, where, first_row)
    return array


def list_width(lists: Any, name: str, where: str, first_row: int) -> int:
    """Return the length of all ``lists`` (a pyarrow array); DatasetError if they differ."""
    lengths = pc.list_value_length(lists).to_numpy(zero_copy_only=False)
    if (lengths != lengths[:1]).any():
        row = int(np.argmax(lengths != lengths[0]))
        raise DatasetError(
            f"{where}: column {name!r}, row {first_row + row}: a list of {lengths[row]} values, but row "
            f"{first_row} has {lengths[0]}"
        )
    return int(lengths[0]) if len(lengths) else 0


def stacked_columns(table: Any, names: Sequence[str], where: str) -> Array:
    """Return the named number columns as one (K, F) float32 array."""
    stacked = np.empty((table.num_rows, len(names)), dtype=np.float32)
    for position, name in enumerate(names):
        values = number_values(column(table, name, where), name, where)
        if values.ndim != 1:
            raise DatasetError(f"{where}: column {name!r} holds lists; name it alone as the features")
        stacked[:, position] = values
    return stacked


DESCRIPTION = "graph.json"
_CONVENTION = (
    "nodes.csv (optional) and edges.csv, or nodes/TYPE.csv and edges/SOURCE__RELATION__DESTINATION.csv, "
    f"each .csv or .parquet, or {DESCRIPTION}"
)
_NODE_KEYS = ("file", "id", "label", "classes", "split", "features", "ignore")
_EDGE_KEYS = ("file", "source", "destination", "split", "features", "ignore")


@dataclass(frozen=True, kw_only=True)
class TableSpec:
    """One table and the roles of its columns; None: by the usual names."""

    path: Path
    keys: tuple[str, ...] | None = None
    """The id column of a node table; source and destination columns of an edge table."""
    label: str | None = None
    classes: int | None = None
    """Number of classes; None: the largest label + 1."""
    split: str | None = None
    features: tuple[str, ...] | None = None
    ignore: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TableLayout:
    """The tables of one graph."""

    name: str
    nodes: Mapping[str, TableSpec]
    """The nodes of types without a table are those that edges name."""
    edges: Mapping[EdgeType, TableSpec]


def find_layout(location: Path, ignore: tuple[str, ...]) -> TableLayout:
    """Read the layout of a folder or of a ``.json`` description; ``ignore`` holds for all tables."""
    if location.is_file():
        return _described(location, ignore)
    if not location.is_dir():
        raise DatasetError(f"there is no folder or description {location.absolute()}")
    if (location / DESCRIPTION).is_file():
        return _described(location / DESCRIPTION, ignore)
    if (location / "manifest.json").is_file():
        raise DatasetError(
            f"{location} is a partitioned dataset (it has a manifest.json), not a raw graph; train on it "
            f"directly, or partition the graph that it was made from"
        )
    single, nodes = _one_file(location, "edges"), _one_file(location, "nodes")
    if single is not None:
        node_paths = {} if nodes is None else {NODE_TYPE: nodes}
        edge_paths = {EDGE_TYPE: single}
    else:
        node_paths = {path.stem: path for path in _tables(location / "nodes")}
        edge_paths = {_edge_type(path.stem, "__", path): path for path in _tables(location / "edges")}
    if not edge_paths:
        raise DatasetError(f"{location.absolute()} has no table of edges; expected {_CONVENTION}")
    return TableLayout(
        name=location.resolve().name,
        nodes={ntype: TableSpec(path=path, ignore=ignore) for ntype, path in node_paths.items()},
        edges={etype: TableSpec(path=path, ignore=ignore) for etype, path in edge_paths.items()},
    )


def _tables(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*") if path.suffix in SUFFIXES)


def _one_file(folder: Path, stem: str) -> Path | None:
    found = [folder / f"{stem}{suffix}" for suffix in SUFFIXES if (folder / f"{stem}{suffix}").is_file()]
    if len(found) > 1:
        raise DatasetError(f"{folder} has both {found[0].name} and {found[1].name}; remove one")
    return found[0] if found else None


def _edge_type(text: str, separator: str, where: Path) -> EdgeType:
    pieces = text.split(separator)
    if len(pieces) != 3 or not all(pieces):
        raise DatasetError(
            f"{where}: an edge type is SOURCE{separator}RELATION{separator}DESTINATION, not {text!r}"
        )
    return pieces[0], pieces[1], pieces[2]


def _described(path: Path, ignore: tuple[str, ...]) -> TableLayout:
    where = str(path)
    top = Fields.parse(path.read_bytes(), where, error=DatasetError).only(("name", "nodes", "edges"))
    nodes, edges = top.maybe("nodes", top.inner, Fields({}, where)), top.inner("edges")
    return TableLayout(
        name=top.maybe("name", top.word, path.resolve().parent.name),
        nodes={ntype: _spec(nodes.inner(ntype).only(_NODE_KEYS), ("id",), ignore) for ntype in nodes.given},
        edges={
            _edge_type(key, ":", path): _spec(
                edges.inner(key).only(_EDGE_KEYS), ("source", "destination"), ignore
            )
            for key in edges.given
        },
    )


def _spec(entry: Fields, key_names: tuple[str, ...], ignore: tuple[str, ...]) -> TableSpec:
    given = [entry.maybe(name, entry.word, None) for name in key_names]
    keys = tuple(key for key in given if key is not None)
    if keys and len(keys) < len(given):
        raise entry.failure(f"it must name both or none of {', '.join(key_names)}")
    texts = tuple[str, ...]
    return TableSpec(
        path=Path(entry.where).parent / entry.word("file"),
        keys=keys or None,
        label=entry.maybe("label", entry.word, None),
        classes=entry.whole("classes", 1) if entry.has("classes") else None,
        split=entry.maybe("split", entry.word, None),
        features=entry.value("features", texts | None),
        ignore=(*(entry.value("ignore", texts | None) or ()), *ignore),
    )


_KEYS_OF_EDGES = (("src", "dst"), ("source", "destination"))
_SPLIT_CODES = {"train": 0, "val": 1, "valid": 1, "validation": 1, "test": 2, "": -1, "none": -1}


@final
class TablesSource(DatasetSource):
    """A folder of tables, or a ``.json`` that describes them.

    By convention: ``nodes.csv`` (may be absent: the nodes are then those of the edges) and
    ``edges.csv``; for several types ``nodes/TYPE.csv`` and
    ``edges/SOURCE__RELATION__DESTINATION.csv``; each may be ``.parquet``. In node tables, ``id`` holds
    integer or string ids (absent: the row number; in CSV an id of digits only is an integer, so 007
    is 7: write Parquet to keep the zeros), ``label`` numbers or strings (empty: none;
    strings are numbered in alphabetical order), ``split`` train, val or test, ``feat`` lists or
    ``feat_0``, ``feat_1`` ... the features; in edge tables ``src`` and ``dst`` the ids. Every other
    column is kept under its own name and must hold numbers. A description gives these roles to columns
    with other names. Ids other than 0..N-1 in order are kept in ``user_ids``.

    Option ``ignore``: columns to leave out, separated by commas.
    """

    def __init__(self, location: str, options: Mapping[str, object]) -> None:
        refuse_unknown(options, ("ignore",), "tables")
        ignore = tuple(filter(None, str(options.get("ignore", "")).split(",")))
        self._layout = find_layout(Path(location).expanduser(), ignore)

    def load(self) -> RawGraph:
        layout = self._layout
        tables = {etype: read_table(spec.path) for etype, spec in layout.edges.items()}
        ends = {etype: _ends(table, layout.edges[etype]) for etype, table in tables.items()}
        ids: dict[str, Any] = {}
        node_data: dict[str, dict[str, NodeColumn]] = {}
        for ntype, spec in layout.nodes.items():
            table = read_table(spec.path)
            ids[ntype], key = _node_ids(table, spec)
            node_data[ntype] = _columns(table, spec, {key})
        # Sorted, since the order of a set of strings changes from run to run, and ids follow it.
        for ntype in sorted({ntype for etype in ends for ntype in (etype[0], etype[2])} - ids.keys()):
            ids[ntype] = _ids_in_edges(ntype, ends)
        edges, edge_data = {}, {}
        for etype, (sources, destinations, keys) in ends.items():
            edges[etype] = (
                _positions(sources, ids, keys[0], layout, etype, etype[0]),
                _positions(destinations, ids, keys[1], layout, etype, etype[2]),
            )
            data = _columns(tables[etype], layout.edges[etype], set(keys))
            edge_data[etype] = {key: value for key, value in data.items() if isinstance(value, np.ndarray)}
        stated = {ntype: spec.classes for ntype, spec in layout.nodes.items() if spec.classes}
        return RawGraph(
            name=layout.name,
            num_nodes={ntype: len(values) for ntype, values in ids.items()},
            edges=edges,
            node_data=node_data,
            edge_data=edge_data,
            num_classes=classes_of(node_data) | stated,
            user_ids={ntype: _user_ids(values) for ntype, values in ids.items() if not _is_range(values)},
        )


def _node_ids(table: Any, spec: TableSpec) -> tuple[Any, str]:
    if spec.keys is None and "id" not in table.column_names:
        return pa.array(np.arange(table.num_rows)), "id"
    key = spec.keys[0] if spec.keys is not None else "id"
    ids = id_column(table, key, str(spec.path))
    if len(pc.unique(ids)) < len(ids):
        check_unique(_user_ids(ids), key, str(spec.path))
    return ids, key


def _ends(table: Any, spec: TableSpec) -> tuple[Any, Any, tuple[str, str]]:
    where = str(spec.path)
    keys = (spec.keys[0], spec.keys[1]) if spec.keys is not None else None
    for names in _KEYS_OF_EDGES:
        if keys is None and set(names) <= set(table.column_names):
            keys = names
    if keys is None:
        raise DatasetError(
            f"{where}: has no columns src and dst (it has {', '.join(table.column_names)}); rename them, or "
            f"name them in a graph.json"
        )
    return id_column(table, keys[0], where), id_column(table, keys[1], where), keys


def _ids_in_edges(node_type: str, ends: Mapping[EdgeType, tuple[Any, Any, tuple[str, str]]]) -> Any:
    found = []
    for edge_type, (sources, destinations, _) in ends.items():
        found += [pc.unique(sources)] if edge_type[0] == node_type else []
        found += [pc.unique(destinations)] if edge_type[2] == node_type else []
    if len({str(values.type) for values in found}) > 1:
        raise DatasetError(
            f"node type {node_type!r} has no table, and the edges name its nodes by integers in one place "
            f"and by strings in another; use one of them"
        )
    distinct = pc.unique(pa.chunked_array(found))
    return distinct.take(pc.sort_indices(distinct))


def _positions(
    values: Any, ids_of: Mapping[str, Any], key: str, layout: TableLayout, etype: EdgeType, ntype: str
) -> Array:
    """Return (E,) int32 or int64, the row in ``ids_of[ntype]`` of each of ``values``."""
    path, ids, spec = layout.edges[etype].path, ids_of[ntype], layout.nodes.get(ntype)
    owner = f"among the ids of {spec.path}" if spec is not None else "a node"
    if values.type != ids.type:
        raise DatasetError(
            f"{path}: column {key!r} holds {values.type} ids, but those {owner} are {ids.type}; "
            f"write both alike"
        )
    if _is_range(ids):
        numbers = np.asarray(values.to_numpy(zero_copy_only=False))
        unknown = (numbers < 0) | (numbers >= len(ids))
        positions = numbers.astype(id_dtype(len(ids)))
    else:
        found = pc.index_in(values, value_set=ids)
        unknown = pc.is_null(found).to_numpy(zero_copy_only=False)
        positions = np.asarray(pc.fill_null(found, -1).to_numpy(zero_copy_only=False))
    if unknown.any():
        row = int(np.argmax(unknown))
        raise DatasetError(
            f"{path}: column {key!r}, row {row}: node id {values[row].as_py()!r} is not {owner} "
            f"(rows of {key!r} with unknown ids: {int(unknown.sum())})"
        )
    return positions


def _columns(table: Any, spec: TableSpec, keys: set[str]) -> dict[str, NodeColumn]:
    where = str(spec.path)
    names = table.column_names
    taken = keys | set(spec.ignore)
    columns: dict[str, NodeColumn] = {}
    label, split = (
        given or (usual if usual in names else None)
        for given, usual in ((spec.label, LABEL), (spec.split, "split"))
    )
    if label is not None and label not in taken:
        columns[LABEL] = _label_column(table, label, where)
        taken.add(label)
    if split is not None and split not in taken:
        columns.update(_split_masks(table, split, where))
        taken.add(split)
    numbered = [(int(match[1]), name) for name in names if (match := re.fullmatch(r"feat_?(\d+)", name))]
    features = spec.features if spec.features is not None else tuple(name for _, name in sorted(numbered))
    given = [number_values(column(table, name, where), name, where) for name in features[:1]]
    if len(features) == 1 and given[0].ndim == 2:
        columns[FEATURE] = given[0]
    elif features:
        columns[FEATURE] = stacked_columns(table, features, where)
    taken.update(features)
    for name in names:
        if name not in taken:
            values = column(table, name, where)
            if holds_text(values):
                raise DatasetError(
                    f"{where}: column {name!r} holds strings, which no model can use; leave it out with "
                    f"ignore={name} (an option, or a list in graph.json), or encode it as numbers"
                )
            columns[name] = number_values(values, name, where)
    columns = standard_columns(columns, where)
    check_columns(columns, table.num_rows, spec.classes or count_classes(columns), where)
    return columns


def _label_column(table: Any, name: str, where: str) -> Array:
    values = column(table, name, where)
    if not holds_text(values):
        if not pa.types.is_integer(values.type):
            return number_values(values, name, where)
        return np.asarray(pc.fill_null(as_int64(values, name, where), -1).to_numpy(zero_copy_only=False))
    known = pc.if_else(pc.equal(values, ""), None, values)
    classes = pc.unique(known.drop_null())
    in_order = classes.take(pc.sort_indices(classes))
    codes = pc.index_in(known, value_set=in_order, skip_nulls=True)
    return np.asarray(pc.fill_null(codes, -1).to_numpy(zero_copy_only=False)).astype(np.int64)


def _split_masks(table: Any, name: str, where: str) -> dict[str, Array]:
    values = column(table, name, where)
    if pa.types.is_integer(values.type):
        refuse_gaps(values, name, where)
        codes = np.asarray(values.to_numpy(zero_copy_only=False))
        odd = (codes < -1) | (codes > 2)
    else:
        lower = pc.utf8_lower(pc.fill_null(values.cast(pa.large_string()), ""))
        place = pc.index_in(lower, value_set=pa.array(list(_SPLIT_CODES), pa.large_string()))
        odd = pc.is_null(place).to_numpy(zero_copy_only=False)
        places = np.asarray(pc.fill_null(place, 0).to_numpy(zero_copy_only=False))
        codes = np.array(list(_SPLIT_CODES.values()))[places]
    if odd.any():
        row = int(np.argmax(odd))
        raise DatasetError(
            f"{where}: column {name!r}, row {row}: {values[row].as_py()!r} is not a split; write train, val "
            f"or test (or 0, 1, 2), and nothing (or -1) where there is none"
        )
    masks = masks_of_split(codes)
    return {mask_name: masks[mask_name] for mask_name in SPLITS if masks[mask_name].any()}


def _is_range(ids: Any) -> bool:
    if not pa.types.is_integer(ids.type):
        return False
    return bool(np.array_equal(ids.to_numpy(zero_copy_only=False), np.arange(len(ids))))


def _user_ids(ids: Any) -> Array:
    dtype = np.int64 if pa.types.is_integer(ids.type) else np.str_
    return np.asarray(ids.to_numpy(zero_copy_only=False)).astype(dtype)
