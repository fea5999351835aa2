"""Graphs in CSV or Parquet tables of nodes and edges, with the user's own ids."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dglx_dist.datasets.base import DatasetSource
from dglx_dist.datasets.check import check_columns, check_unique
from dglx_dist.datasets.columns import count_classes, masks_of_split, standard_columns
from dglx_dist.datasets.options import refuse_unknown
from dglx_dist.datasets.table_files import (
    as_int64,
    column,
    id_column,
    number_column,
    read_table,
    refuse_gaps,
    stacked_columns,
)
from dglx_dist.datasets.table_layout import TableLayout, TableSpec, find_layout
from dglx_dist.errors import DatasetError
from dglx_dist.records import FEATURE, LABEL, SPLITS, Array, EdgeType, NodeColumn, RawGraph

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
    column is kept under its own name and must hold numbers. A description says the same with other
    names: see ``table_layout``. Ids other than 0..N-1 in order are kept in ``user_ids``.

    Option ``ignore``: columns to leave out, separated by commas.
    """

    def __init__(self, location: str, options: Mapping[str, object]) -> None:
        refuse_unknown(options, ("ignore",), "tables")
        ignore = tuple(filter(None, str(options.get("ignore", "")).split(",")))
        self._layout = find_layout(Path(location).expanduser(), ignore)

    def load(self) -> RawGraph:
        """Read every table, map the ids, and check each column while its file is known."""
        edge_tables = {edge_type: read_table(spec.path) for edge_type, spec in self._layout.edges.items()}
        ends = {
            edge_type: _ends(table, self._layout.edges[edge_type]) for edge_type, table in edge_tables.items()
        }
        ids: dict[str, Any] = {}
        node_data: dict[str, dict[str, NodeColumn]] = {}
        for node_type, spec in self._layout.nodes.items():
            table = read_table(spec.path)
            ids[node_type], key = _node_ids(table, spec)
            node_data[node_type] = _columns(table, spec, {key})
        # Sorted: the order of a set of texts changes from run to run, and new ids follow the order of types.
        for node_type in sorted({name for kind in ends for name in (kind[0], kind[2])} - ids.keys()):
            ids[node_type] = _ids_in_edges(node_type, ends)
        edges, edge_data = {}, {}
        for edge_type, (sources, destinations, keys) in ends.items():
            spec = self._layout.edges[edge_type]
            edges[edge_type] = (
                _positions(sources, ids[edge_type[0]], keys[0], spec.path, self._layout, edge_type[0]),
                _positions(destinations, ids[edge_type[2]], keys[1], spec.path, self._layout, edge_type[2]),
            )
            data = _columns(edge_tables[edge_type], spec, set(keys))
            edge_data[edge_type] = {
                key: value for key, value in data.items() if isinstance(value, np.ndarray)
            }
        counted = {
            node_type: self._layout.nodes[node_type].classes or count_classes(columns)
            for node_type, columns in node_data.items()
        }
        return RawGraph(
            name=self._layout.name,
            num_nodes={node_type: len(values) for node_type, values in ids.items()},
            edges=edges,
            node_data=node_data,
            edge_data=edge_data,
            num_classes={node_type: count for node_type, count in counted.items() if count is not None},
            user_ids={
                node_type: _user_ids(values) for node_type, values in ids.items() if not _is_range(values)
            },
        )


def _node_ids(table: Any, spec: TableSpec) -> tuple[Any, str]:
    """Return the ids of a node table as a pyarrow array, and the column they came from."""
    if spec.keys is None and "id" not in table.column_names:
        return pa.array(np.arange(table.num_rows)), "id"
    key = spec.keys[0] if spec.keys is not None else "id"
    ids = id_column(table, key, str(spec.path))
    if len(pc.unique(ids)) < len(ids):
        check_unique(ids.to_numpy(zero_copy_only=False).astype(_numpy_dtype(ids)), key, str(spec.path))
    return ids, key


def _ends(table: Any, spec: TableSpec) -> tuple[Any, Any, tuple[str, str]]:
    """Return source and destination ids of an edge table, and their columns."""
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
    """Return the distinct ids that edges name for a node type without a table, sorted."""
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


def _positions(values: Any, ids: Any, key: str, path: Path, layout: TableLayout, node_type: str) -> Array:
    """Return (E,) int32 or int64, the row in ``ids`` of each of ``values``."""
    spec = layout.nodes.get(node_type)
    owner = f"among the ids of {spec.path}" if spec is not None else "a node"
    if values.type != ids.type:
        raise DatasetError(
            f"{path}: column {key!r} holds {values.type} ids, but those {owner} are {ids.type}; "
            f"write both alike"
        )
    if _is_range(ids):
        numbers = np.asarray(values.to_numpy(zero_copy_only=False))
        unknown = (numbers < 0) | (numbers >= len(ids))
        positions = numbers.astype(np.int32 if len(ids) < 2**31 else np.int64)
    else:
        found = pc.index_in(values, value_set=ids)
        unknown = pc.is_null(found).to_numpy(zero_copy_only=False)
        positions = np.asarray(pc.fill_null(found, -1).to_numpy(zero_copy_only=False))
    if unknown.any():
        row = int(np.argmax(unknown))
        raise DatasetError(
            f"{path}: column {key!r}, row {row}: node id {values[row].as_py()!r} is not {owner} "
            f"({int(unknown.sum())} rows in all)"
        )
    return positions


def _columns(table: Any, spec: TableSpec, keys: set[str]) -> dict[str, NodeColumn]:
    """Return the data columns of a node or edge table under their standard names, checked."""
    where = str(spec.path)
    names = table.column_names
    taken = keys | set(spec.ignore)
    columns: dict[str, NodeColumn] = {}
    label = spec.label if spec.label is not None else (LABEL if LABEL in names else None)
    if label is not None and label not in taken:
        columns[LABEL] = _label_column(table, label, where)
        taken.add(label)
    split = spec.split if spec.split is not None else ("split" if "split" in names else None)
    if split is not None and split not in taken:
        columns.update(_split_masks(table, split, where))
        taken.add(split)
    features = spec.features if spec.features is not None else _numbered_features(names)
    if len(features) == 1 and number_column(table, features[0], where).ndim == 2:
        columns[FEATURE] = number_column(table, features[0], where)
    elif features:
        columns[FEATURE] = stacked_columns(table, features, where)
    taken.update(features)
    for name in names:
        if name not in taken:
            columns[name] = _other_column(table, name, where)
    columns = standard_columns(columns, where)
    check_columns(columns, table.num_rows, spec.classes or count_classes(columns), where)
    return columns


def _numbered_features(names: list[str]) -> tuple[str, ...]:
    numbered = [(int(match[1]), name) for name in names if (match := re.fullmatch(r"feat_?(\d+)", name))]
    return tuple(name for _, name in sorted(numbered))


def _other_column(table: Any, name: str, where: str) -> Array:
    values = column(table, name, where)
    if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
        raise DatasetError(
            f"{where}: column {name!r} holds strings, which no model can use; leave it out with "
            f"ignore={name} (an option, or a list in graph.json), or encode it as numbers"
        )
    return number_column(table, name, where)


def _label_column(table: Any, name: str, where: str) -> Array:
    values = column(table, name, where)
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if not (pa.types.is_string(values.type) or pa.types.is_large_string(values.type)):
        if not pa.types.is_integer(values.type):
            return number_column(table, name, where)
        return np.asarray(pc.fill_null(as_int64(values, name, where), -1).to_numpy(zero_copy_only=False))
    known = pc.if_else(pc.equal(values, ""), None, values)
    classes = pc.unique(known.drop_null())
    in_order = classes.take(pc.sort_indices(classes))
    codes = pc.index_in(known, value_set=in_order, skip_nulls=True)
    return np.asarray(pc.fill_null(codes, -1).to_numpy(zero_copy_only=False)).astype(np.int64)


def _split_masks(table: Any, name: str, where: str) -> dict[str, Array]:
    values = column(table, name, where)
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
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
            f"{where}: column {name!r}, row {row}: {values[row].as_py()!r} is no split; write train, val or "
            f"test (or 0, 1, 2), and nothing (or -1) where there is none"
        )
    masks = masks_of_split(codes)
    return {mask_name: masks[mask_name] for mask_name in SPLITS if masks[mask_name].any()}


def _is_range(ids: Any) -> bool:
    """Whether ``ids`` are 0..N-1 in this order, so that they need no mapping."""
    if not pa.types.is_integer(ids.type):
        return False
    return bool(np.array_equal(ids.to_numpy(zero_copy_only=False), np.arange(len(ids))))


def _user_ids(ids: Any) -> Array:
    return np.asarray(ids.to_numpy(zero_copy_only=False)).astype(_numpy_dtype(ids))


def _numpy_dtype(ids: Any) -> type:
    return np.int64 if pa.types.is_integer(ids.type) else np.str_
