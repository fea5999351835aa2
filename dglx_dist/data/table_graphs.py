"""Read graphs in CSV or Parquet tables with nodes and edges, with the user's own ids."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dglx_dist.data.sources import DatasetSource, classes_of, count_classes, masks_of_split, standard_columns
from dglx_dist.data.storage.columns import id_dtype
from dglx_dist.data.tables import (
    TableColumn,
    as_numpy,
    check_column_names,
    column,
    find_first_true,
    id_column,
    read_table,
)
from dglx_dist.data.validate import check_columns, check_unique, warn_of_unknown
from dglx_dist.errors import DatasetError
from dglx_dist.records import EDGE_TYPE, FEATURE, LABEL, NODE_TYPE, Array, EdgeType, NodeColumn, RawGraph
from dglx_dist.registry import suggest_name

_LOG = logging.getLogger(__name__)
SUFFIXES = (".csv", ".parquet")
_BAD_SUFFIXES = {".tsv", ".json", ".jsonl", ".ndjson", ".gz", ".xlsx", ".feather", ".arrow", ".pq"}


def _stack_columns(table: Any, names: Sequence[str], where: str) -> Array:
    """Stack several columns with one number per row into (N, columns) float32 values."""
    stacked = np.empty((table.num_rows, len(names)), dtype=np.float32)
    for position, name in enumerate(names):
        table_column = column(table, name, where)
        values = table_column.numbers()
        if values.ndim != 1:
            raise table_column.error("holds lists; put all features into one column of lists named feat")
        stacked[:, position] = values
    return stacked


_CONVENTION = (
    "nodes.csv (optional) and edges.csv, or nodes/TYPE.csv and "
    "edges/SOURCE__RELATION__DESTINATION.csv, each .csv or .parquet"
)


def find_tables(folder: Path) -> tuple[dict[str, Path], dict[EdgeType, Path]]:
    """Find the tables for node types and for edge types. Node types without a table are not returned."""
    if not folder.is_dir():
        raise DatasetError(f"there is no folder {folder.absolute()}; expected {_CONVENTION}")
    if (folder / "manifest.json").is_file():
        raise DatasetError(
            f"{folder} is a partitioned dataset (it has a manifest.json), not a raw graph; "
            "train on it directly, or partition the original graph"
        )

    if (folder / "graph.json").is_file():
        _LOG.warning("%s is ignored; use it with `dglx ingest %s/graph.json`", folder / "graph.json", folder)
    for pattern in ("nodes.*", "edges.*", "*/*"):
        for path in sorted(folder.glob(pattern)):
            is_table = bool({path.stem.split(".")[0], path.parent.name} & {"nodes", "edges"})
            if is_table and path.suffix in _BAD_SUFFIXES:
                raise DatasetError(f"{path}: tables are .csv or .parquet; convert it, or move it elsewhere")

    edge_table = _find_single_file(folder, "edges")
    node_table = _find_single_file(folder, "nodes")
    if edge_table is not None:
        node_tables = {} if node_table is None else {NODE_TYPE: node_table}
        return node_tables, {EDGE_TYPE: edge_table}
    edge_tables = {_parse_edge_type(path): path for path in _list_tables(folder / "edges")}
    if not edge_tables:
        raise DatasetError(f"{folder.absolute()} has no table of edges; expected {_CONVENTION}")
    return {path.stem: path for path in _list_tables(folder / "nodes")}, edge_tables


def _list_tables(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*") if path.suffix in SUFFIXES)


def _find_single_file(folder: Path, stem: str) -> Path | None:
    paths = [path for path in _list_tables(folder) if path.stem == stem and path.is_file()]
    if len(paths) > 1:
        raise DatasetError(f"{folder} has both {paths[0].name} and {paths[1].name}; remove one")
    return paths[0] if paths else None


def _parse_edge_type(path: Path) -> EdgeType:
    pieces = path.stem.split("__")
    if len(pieces) != 3 or not all(pieces):
        raise DatasetError(f"{path}: an edge type is SOURCE__RELATION__DESTINATION, not {path.stem!r}")
    return pieces[0], pieces[1], pieces[2]


_END_COLUMNS = (
    *(("src", "dst"), ("source", "destination"), ("source", "target"), ("srcid", "dstid")),
    *(("sourceid", "destinationid"), ("sourceid", "targetid"), ("startid", "endid")),
)
"""Plain names for the two ends, in pairs; see :func:`_simplify_name`."""
SPLIT, _ID = "split", "id"
_ID_NAMES = {_ID, "ids", "node", "nodeid", "nodeids", "nodeidx", "nid", "vertex", "vertexid"}


_NEO4J_NAME = re.compile(r"[^:]*:(\w*ID)(\(.*\))?")


def _simplify_name(name: str) -> str:
    """Return a column's name in lower case, without punctuation and Neo4j's type name."""
    match = _NEO4J_NAME.fullmatch(name)
    if match:
        name = match[1]
    return re.sub(r"[\W_]", "", name.lower())


def _list_names_of_type(ntype: str) -> tuple[str, str]:
    """Return simplified names for columns with ``ntype`` ids: userid and user for the type users."""
    owner = _simplify_name(ntype).removesuffix("s")
    return f"{owner}id", owner


def is_node_id(name: str, ntype: str) -> bool:
    """Return whether a column's name in a node table suggests ids."""
    return _simplify_name(name) in {*_ID_NAMES, *_list_names_of_type(ntype)} - {LABEL, SPLIT, FEATURE}


def _read(path: Path, id_names: Collection[str] = ()) -> Any:
    """Read a table. Id columns are ``id_names``, edge ends, and usual names for ids."""
    id_keys = {*id_names, *chain.from_iterable(_END_COLUMNS)}
    types = path.stem.split("__")

    def is_id(name: str) -> bool:
        if name in id_keys or _simplify_name(name) in id_keys:
            return True
        return any(is_node_id(name, ntype) for ntype in types)

    return read_table(path, is_id)


_SPLIT_CODES = {
    **{"train": 0, "val": 1, "valid": 1, "validation": 1, "test": 2, "": -1, "none": -1},
    **{"0": 0, "1": 1, "2": 2, "-1": -1},
}


@final
class TablesSource(DatasetSource):
    """A folder of CSV or Parquet tables.

    The files are ``nodes.csv`` and ``edges.csv``, or for several types ``nodes/TYPE.csv`` and
    ``edges/SOURCE__RELATION__DESTINATION.csv``. Each may also be ``.parquet``. A node table may be missing.
    Then the nodes are the ends of edges.

    A node table may have these columns. Every other column is kept under its own name and must hold numbers.

    * ``id``: integer or string ids, where 007 is not 7. Without it, the id is the row number.
    * ``label``: numbers or strings, which are numbered in alphabetical order. Empty means no label.
      ``label_0``, ``label_1`` ... are several numbers per node.
    * ``split``: train, val or test.
    * ``feat``: lists of features. ``feat_0``, ``feat_1`` ... are single features.

    An edge table has the ids of its ends in ``src`` and ``dst``. Ids other than 0..N-1 in order are kept in
    ``user_ids``. Tables with other column names are for ``dglx ingest``.

    Usual names are recognised too: ``node_id``, ``nodeId``, ``nid``, ``_id``, ``:ID``, ``user_id`` for the
    type ``user`` and others for ids, and ``source`` and ``target``, ``src_id`` and ``dst_id``, ``:START_ID``
    and ``:END_ID``, or the ids of two types for ends.

    The option ``ignore`` lists columns to leave out, separated by commas. The option ``id`` lists columns of
    ids. A table uses the first of them that it has. With an empty option, or an empty last name for tables
    without ids, nodes are numbered by row. A column ``id`` that is not used for ids is left out.
    """

    known_options = ("ignore", "id")

    def __init__(self, location: str, options: Mapping[str, object]) -> None:
        super().__init__(location, options)
        self._ignored = str(options.get("ignore", ""))
        self._ids = None if options.get("id") is None else str(options["id"])
        self._name = self._path.resolve().name
        self._nodes, self._edges = find_tables(self._path)

    def load(self) -> RawGraph:
        id_names = set()
        for name in (self._ids or "").split(","):
            id_names |= {name, name.strip()}  # A column's name may begin or end with a space.
        nodes = {ntype: (str(path), _read(path, id_names)) for ntype, path in self._nodes.items()}
        edges = {etype: (str(path), _read(path)) for etype, path in self._edges.items()}
        node_names = _list_column_names(nodes)
        all_names = [*node_names, *_list_column_names(edges)]

        where = f"{self._name}: no table"
        ignored = {name for name in _choose_names(self._ignored, all_names, where, "ignore") if name}
        ids = None
        if self._ids is not None:
            candidates = [name for name in node_names if name and name not in ignored]
            ids = _choose_names(self._ids, candidates, f"{where} of nodes", "--id")
        return build_graph_from_tables(self._name, nodes, edges, ignored, ids)


def _list_column_names(tables: Mapping[Any, tuple[str, Any]]) -> list[str]:
    names: dict[str, None] = {}
    for _, table in tables.values():
        names |= dict.fromkeys(table.column_names)
    return list(names)


def _choose_names(listed: str, columns: Sequence[str], where: str, option: str) -> list[str]:
    """Split an option into its comma-separated names. Only the last one may be empty.

    Raises DatasetError if a name is not among ``columns``.
    """
    names = [name if name in columns else name.strip() for name in listed.split(",")]
    for name in [*filter(None, names), *names[:-1]]:
        if name not in columns:
            raise DatasetError(
                f"{where} has the column {name!r} of {option}{suggest_name(name, columns)} "
                f"(columns: {', '.join(columns) or 'none'})"
            )
    return names


def build_graph_from_tables(
    name: str,
    nodes: Mapping[str, tuple[str, Any]],
    edges: Mapping[EdgeType, tuple[str, Any]],
    ignored: Collection[str] = (),
    id_names: Sequence[str] | None = None,
) -> RawGraph:
    """Build the graph from pyarrow tables with the columns that :class:`TablesSource` describes.

    Each table comes with its file name, for messages. If a type has no table, its nodes are the edge ends.

    Args:
        name: The graph's name.
        nodes: By node type, the file name and the table.
        edges: By edge type, the file name and the table.
        ignored: Columns to leave out.
        id_names: Columns with node ids. By default they are recognised by their names.

    Raises:
        DatasetError: If a value is wrong. The message names file, column and row.
    """
    ends = {etype: _read_ends(table, where, etype) for etype, (where, table) in edges.items()}
    ids: dict[str, Any] = {}
    id_sources = {ntype: where for ntype, (where, _) in nodes.items()}
    node_data: dict[str, dict[str, NodeColumn]] = {}
    class_names: dict[str, list[str]] = {}
    for ntype, (where, table) in nodes.items():
        id_name = _find_id_column(table, ntype, where, ignored, id_names)
        if id_name is None:
            if id_names is None:
                _refuse_likely_ids(table, _collect_ends_at(ntype, ends), where, ignored)
            ids[ntype] = pa.array(np.arange(table.num_rows))
            id_sources[ntype] += " (the numbers of its rows; if a column has the ids, add --id COLUMN)"
        else:
            ids[ntype] = _read_node_ids(table, id_name, where)

        node_data[ntype] = _convert_columns(table, where, {_ID, id_name or _ID, *ignored})
        if LABEL in table.column_names and LABEL in node_data[ntype]:
            labels = column(table, LABEL, where)
            if labels.is_text:
                class_names[ntype] = _read_class_names(labels).to_pylist()
                warn_of_unknown(class_names[ntype], where, LABEL)

    # The order in a set of strings changes from run to run, but ids must not.
    end_types = {ntype for etype in ends for ntype in (etype[0], etype[2])}
    for ntype in sorted(end_types - ids.keys()):
        ids[ntype] = _collect_ids_in_edges(ntype, _collect_ends_at(ntype, ends))

    positions = {}
    edge_data: dict[EdgeType, dict[str, Array]] = {}
    for etype, (source, destination) in ends.items():
        sources = _find_positions(source, ids[etype[0]], id_sources.get(etype[0]))
        destinations = _find_positions(destination, ids[etype[2]], id_sources.get(etype[2]))
        positions[etype] = (sources, destinations)
        where, table = edges[etype]
        edge_data[etype] = {}
        for key, values in _convert_columns(table, where, {source.name, destination.name, *ignored}).items():
            if isinstance(values, np.ndarray):
                edge_data[etype][key] = values

    user_ids = {ntype: _make_user_ids(values) for ntype, values in ids.items() if not _is_range(values)}

    return RawGraph(
        name=name,
        num_nodes={ntype: len(values) for ntype, values in ids.items()},
        edges=positions,
        node_data=node_data,
        edge_data=edge_data,
        num_classes=classes_of(node_data),
        class_names=class_names,
        user_ids=user_ids,
    )


def _find_id_column(
    table: Any, ntype: str, where: str, ignored: Collection[str], id_names: Sequence[str] | None
) -> str | None:
    """Return the column with the ids: one in ``id_names``, or else one with a usual name.

    Return None if the nodes are numbered by row. Raise DatasetError if several columns could have the ids.
    """
    names = [name for name in table.column_names if name and name not in ignored]
    if id_names is not None:
        # Only the first name of --id that the table has is used.
        candidates = [name for name in id_names if name in names][:1]
        if _ID in names and candidates != [_ID] and (candidates or id_names == [""]):
            id_source = repr(candidates[0]) if candidates else "the number of its row"
            _LOG.warning("%s: by --id, the id of a node is %s; the column 'id' is left out", where, id_source)
        if candidates:
            return candidates[0]
        if id_names == [""]:
            return None

    if _ID in names:
        return _ID
    candidates = [name for name in names if is_node_id(name, ntype)]
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        reason = f"both {candidates[0]!r} and {candidates[1]!r} could be"
        remedy = ""
    elif id_names and "" not in id_names:
        reason = "no column of --id is"
        remedy = f" (--id '{','.join(id_names)},' numbers such nodes by row)"
    else:
        return None
    raise DatasetError(
        f"{where}: {reason} the column of ids (it has {', '.join(table.column_names)}); "
        f"choose one with --id COLUMN{remedy}"
    )


def _refuse_likely_ids(table: Any, ends: Sequence[TableColumn], where: str, ignored: Collection[str]) -> None:
    """Raise DatasetError if nodes would be numbered by row, but a column has the ids of all edge ends."""
    texts_by_end = [pc.unique(end.values).cast(pa.large_string()) for end in ends]
    end_texts = pc.unique(pa.chunked_array(texts_by_end, pa.large_string()))
    if len(end_texts) == 0:
        return
    data_columns = re.compile(rf"({FEATURE}|{LABEL})(_?\d+)?|{SPLIT}")
    for name in table.column_names:
        if name in ignored or data_columns.fullmatch(name):
            continue
        ids = column(table, name, where)
        can_be_ids = (ids.is_text or ids.is_integer) and not ids.values.null_count
        if not can_be_ids or _is_range(ids.values):
            continue
        texts = ids.texts()
        is_unique = len(pc.unique(texts)) == len(texts)
        if is_unique and pc.all(pc.is_in(end_texts, value_set=texts)).as_py():
            raise DatasetError(
                f"{where}: no column has a usual name of ids, but {name!r} ({texts[0]}, ...) looks like the "
                f"ids that edges use; add --id {name} to use it, or --id '' to number nodes by row"
            )


def _read_node_ids(table: Any, name: str, where: str) -> Any:
    ids = id_column(table, name, where).values
    if len(pc.unique(ids)) < len(ids):
        check_unique(_make_user_ids(ids), name, where)
    return ids


def _read_ends(table: Any, where: str, etype: EdgeType) -> tuple[TableColumn, TableColumn]:
    """Return the columns with source and destination ids. Raise DatasetError if there are none."""
    columns = {_simplify_name(name): name for name in table.column_names}
    columns |= {name: name for name in table.column_names}
    keys = list(_END_COLUMNS)
    for source, destination in zip(_list_names_of_type(etype[0]), _list_names_of_type(etype[2]), strict=True):
        if source != destination:
            keys.append((source, destination))
    existing = [pair for pair in keys if pair[0] in columns and pair[1] in columns]
    if not existing:
        check_column_names(table.column_names, (), where)
        raise DatasetError(
            f"{where}: has no columns src and dst (it has {', '.join(table.column_names)}); rename them, "
            "name them in a description for dglx ingest, or save triples as a .tsv without a header"
        )

    source, destination = existing[0]
    names = (columns[source], columns[destination])
    for name in names:
        simple_name = _simplify_name(name)
        similar = [other for other in table.column_names if _simplify_name(other) == simple_name]
        # The names src and dst are exact, whatever other names the table has.
        if len(similar) > 1 and names != _END_COLUMNS[0]:
            similar.remove(name)
            raise DatasetError(f"{where}: {name!r} or {similar[0]!r} may be an end of edges; rename one")
    return id_column(table, names[0], where), id_column(table, names[1], where)


def _collect_ends_at(
    node_type: str, ends: Mapping[EdgeType, tuple[TableColumn, TableColumn]]
) -> list[TableColumn]:
    """Return the columns in edge tables that have ``node_type`` ids."""
    columns = []
    for (source_type, _, destination_type), (source, destination) in ends.items():
        if source_type == node_type:
            columns.append(source)
        if destination_type == node_type:
            columns.append(destination)
    return columns


def _collect_ids_in_edges(node_type: str, ends: Sequence[TableColumn]) -> Any:
    """Return the sorted distinct ids for a node type without a table."""
    distinct = [pc.unique(end.values) for end in ends if len(end.values)]
    if not distinct:
        distinct = [ends[0].values]
    if len({str(values.type) for values in distinct}) > 1:
        raise DatasetError(
            f"{ends[0].where}: node type {node_type!r} has no table, and the edges use both integers and "
            "strings for its ids; use one kind of ids, or add a table of the nodes"
        )
    return _sort_distinct(pa.chunked_array(distinct))


def _find_positions(end: TableColumn, ids: Any, table: str | None) -> Array:
    """Find where the values in ``end`` are in ``ids``. Return (E,) int32 or int64 positions.

    ``table`` names the table with the ids for messages, or is None if there is no node table.
    """
    origin = f"among the ids of {table}" if table is not None else "a node"
    values = end.values
    # If ids are texts, all values in a small edge table may still look like numbers.
    if pa.types.is_large_string(ids.type) or len(values) == 0:
        values = end.texts()
    if len(values) == 0:
        values = values.cast(ids.type)
    if values.type != ids.type:
        raise end.error(f"holds texts, but the ids {origin} are whole numbers; use the same kind in both")

    if _is_range(ids):
        row_numbers = as_numpy(values)
        is_unknown = (row_numbers < 0) | (row_numbers >= len(ids))
        positions = row_numbers.astype(id_dtype(len(ids)))
    else:
        indices = pc.index_in(values, value_set=ids)
        is_unknown = as_numpy(pc.is_null(indices))
        positions = as_numpy(pc.fill_null(indices, -1))

    count = f"(rows of {end.name!r} with unknown ids: {int(is_unknown.sum())})"
    end.refuse(is_unknown, f"is not {origin} {count}", "node id ")
    return positions


def _convert_columns(table: Any, where: str, excluded: set[str]) -> dict[str, NodeColumn]:
    """Convert a table's columns that are not ``excluded`` to number arrays.

    Raise DatasetError if a column has texts and is neither a label nor a split.
    """
    columns: dict[str, NodeColumn] = {}
    names = [name for name in table.column_names if name not in excluded]
    if LABEL in names:
        columns[LABEL] = _read_labels(column(table, LABEL, where))
    if SPLIT in names:
        masks = masks_of_split(split_codes(column(table, SPLIT, where)))
        columns |= {name: mask for name, mask in masks.items() if mask.any()}
    for stem in sorted({FEATURE, LABEL} - {*names}):
        numbered_names = _find_numbered_columns(names, stem, where)
        if numbered_names:
            columns[stem] = _stack_columns(table, numbered_names, where)
            names = [name for name in names if name not in numbered_names]

    for name in names:
        if name in (LABEL, SPLIT):
            continue
        table_column = column(table, name, where)
        if table_column.is_text:
            raise _make_text_error(table_column, name, _ID in table.column_names, _ID in excluded)
        columns[name] = table_column.numbers()

    columns = standard_columns(columns, where)
    check_columns(columns, table.num_rows, count_classes(columns), where)
    return columns


def _find_numbered_columns(names: Sequence[str], stem: str, where: str) -> list[str]:
    """Return the names such as ``feat_0``, ordered by their numbers."""
    numbers = {}
    for name in names:
        match = re.fullmatch(rf"{stem}_?(\d+)", name)
        if match:
            numbers[name] = int(match[1])

    ordered = sorted(numbers, key=numbers.__getitem__)
    steps = np.diff([numbers[name] for name in ordered])
    if (steps != 1).any():
        examples = ", ".join(ordered[:4]) + (" ..." if len(ordered) > 4 else "")
        _LOG.warning("%s: the %d columns %s skip or repeat a number", where, len(ordered), examples)
    return ordered


def _make_text_error(table_column: TableColumn, name: str, has_id: bool, is_node_table: bool) -> DatasetError:
    """Explain why a column with texts is refused. The remedy depends on the table and its columns."""
    if name == FEATURE:
        example = table_column.values[0].as_py()
        return table_column.error(
            f"holds texts, such as {example!r:.40}; write numbers in columns feat_0, feat_1 "
            "..., or lists of numbers in Parquet"
        )

    hint = "save triples as a .tsv without a header"
    if is_node_table:
        hint = "rename it to 'label' if it is to be learnt"
        if not has_id:
            hint = f"{hint}, or 'id' if it has the ids (--id {name})"
    return table_column.error(
        f"holds strings, which no model can use; {hint}, encode it as numbers, or leave it "
        f"out (in a folder of tables: --option ignore={name})"
    )


def _read_labels(labels: TableColumn) -> Array:
    """Read a column's classes or targets, with -1 or NaN for rows without a label."""
    if not labels.is_text:
        if pa.types.is_floating(labels.values.type):
            return as_numpy(labels.values)  # A missing label is NaN.
        if labels.is_integer:
            return as_numpy(pc.fill_null(labels.as_int64(), -1))
        return labels.numbers()

    names = pc.if_else(pc.equal(labels.values, ""), None, labels.values)
    is_odd = pc.invert(pc.match_substring_regex(names, r"^\s*[-+]?[\d.]+([eE][-+]?\d+)?\s*$"))
    num_odd = pc.sum(is_odd).as_py() or 0  # Without values, the sum is None.
    if 0 < num_odd < len(names.drop_null()) / 2:
        row = find_first_true(pc.fill_null(is_odd, False))
        message = f"{names[row]!s:.40} is no number, but most labels are; all are read as class names"
        _LOG.warning("%s", labels.error(message, row))

    codes = pc.index_in(names, value_set=_read_class_names(labels), skip_nulls=True)
    return as_numpy(pc.fill_null(codes, -1)).astype(np.int64)


def _read_class_names(labels: TableColumn) -> Any:
    has_label = pc.not_equal(pc.fill_null(labels.values, ""), "")
    return _sort_distinct(labels.values.filter(has_label))


def _sort_distinct(values: Any) -> Any:
    distinct = pc.unique(values)
    return distinct.take(pc.sort_indices(distinct))


def split_codes(split: TableColumn) -> Array:
    """Return the (K,) int64 codes 0, 1 and 2 for train, val and test, and -1 for none.

    Raises DatasetError if there is another value.
    """
    texts = pc.utf8_lower(pc.fill_null(split.texts(), ""))
    index = pc.index_in(texts, value_set=pa.array(list(_SPLIT_CODES), pa.large_string()))
    remedy = "write train, val or test (or 0, 1, 2), or nothing (or -1) for no split"
    split.refuse(as_numpy(pc.is_null(index)), f"is not a split; {remedy}")
    return np.array(list(_SPLIT_CODES.values()))[as_numpy(index)]


def _is_range(ids: Any) -> bool:
    return bool(pa.types.is_integer(ids.type)) and np.array_equal(as_numpy(ids), np.arange(len(ids)))


def _make_user_ids(ids: Any) -> Array:
    return as_numpy(ids).astype(np.int64 if pa.types.is_integer(ids.type) else np.str_)
