"""Validate raw graphs and assignments. Errors name the column and the first wrong row."""

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from itertools import combinations

import numpy as np

from dglx_dist.errors import ConfigError, DatasetError
from dglx_dist.records import LABEL, SPLITS, Array, Assignment, NodeColumn, RawGraph, SparseRows

_LOG = logging.getLogger(__name__)
_ROWS_AT_ONCE = 1 << 16
MAX_CLASSES = 1 << 24
"""Maximum number of classes. A larger label is probably an id or a measurement."""


def check_raw_graph(graph: RawGraph, where: str) -> None:
    """Check that ids, columns, labels and splits in ``graph`` are consistent. ``where`` starts messages.

    Raises:
        DatasetError: If there is no node, an id is out of range, a column has the wrong length, a feature is
            NaN or infinite, a label is outside [-1, classes), a user id occurs twice, or splits overlap, are
            empty, or contain a node without label.
    """
    if graph.total_nodes == 0:
        raise DatasetError(f"{where}: the graph has no nodes; there must be at least one")
    masks = [(name, column) for columns in graph.edge_data.values() for name, column in columns.items()]
    selecting = {
        name for name, mask in masks if name in SPLITS and isinstance(mask, np.ndarray) and mask.any()
    }
    for edge_type, (source_ids, destination_ids) in graph.edges.items():
        source, relation, destination = edge_type
        for node_type in (source, destination):
            if node_type not in graph.num_nodes:
                raise DatasetError(
                    f"{where}: edge type {edge_type} ends in node type {node_type!r}, which "
                    f"the graph lacks (it has {', '.join(map(repr, graph.num_nodes))})"
                )

        owner = where if graph.is_homogeneous else f"{where}, edges {relation!r}"
        if len(source_ids) != len(destination_ids):
            raise DatasetError(f"{owner}: {len(source_ids)} sources but {len(destination_ids)} destinations")
        check_ids(source_ids, graph.num_nodes[source], "src", owner)
        check_ids(destination_ids, graph.num_nodes[destination], "dst", owner)
        check_columns(graph.edge_data.get(edge_type, {}), len(source_ids), None, owner, selecting)

    for node_type in {**graph.node_data, **graph.user_ids}:
        owner = where if graph.is_homogeneous else f"{where}, nodes {node_type!r}"
        if node_type not in graph.num_nodes:
            raise DatasetError(f"{owner}: columns or user ids of a node type that the graph lacks")
        columns = graph.node_data.get(node_type, {})
        count = graph.num_nodes[node_type]
        classes = graph.num_classes.get(node_type)
        label = columns.get(LABEL)
        check_columns(columns, count, classes, owner)
        if classes is not None and isinstance(label, np.ndarray) and label.ndim == 1:
            _warn_of_classes(label, classes, owner)
        if node_type in graph.user_ids:
            _check_length(graph.user_ids[node_type], count, "id", owner)
            check_unique(graph.user_ids[node_type], "id", owner)


def check_assignment(assignment: Assignment, graph: RawGraph) -> None:
    """Raise ConfigError unless each node in ``graph`` has one owner among the parts."""
    if assignment.num_parts < 1:
        raise ConfigError(f"the assignment has {assignment.num_parts} parts; there must be at least 1")
    for ntype, num_nodes in graph.num_nodes.items():
        if ntype not in assignment.part_of:
            raise ConfigError(f"the assignment names no owners for nodes of type {ntype!r}")
        part_of = np.asarray(assignment.part_of[ntype])
        if part_of.shape != (num_nodes,) or part_of.dtype.kind not in "iu":
            raise ConfigError(
                f"the owners of nodes of type {ntype!r} are {part_of.dtype} of shape {part_of.shape}; "
                f"expected one whole number for each of the {num_nodes} nodes"
            )

        is_outside = (part_of < 0) | (part_of >= assignment.num_parts)
        if is_outside.any():
            node = _find_first(is_outside)
            raise ConfigError(
                f"node {node} of type {ntype!r} is assigned to part {part_of[node]}, "
                f"but the parts are 0..{assignment.num_parts - 1}"
            )


def column_error(where: str, column: str, problem: str, row: int | None = None) -> DatasetError:
    """Return an error about a ``problem`` in ``column`` in the file ``where``, or in one row."""
    row_text = "" if row is None else f", row {row}:"
    return DatasetError(f"{where}: column {column!r}{row_text} {problem}")


def check_ids(ids: Array, end: int, column: str, where: str, id_name: str = "node id") -> None:
    """Raise DatasetError unless ``ids`` are (K,) integers in [0, end). Messages call an id ``id_name``."""
    check_integers(ids, column, where)
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= end):
        # Only the message needs the row, and temporary arrays to find it.
        row = _find_first((ids < 0) | (ids >= end))
        raise column_error(where, column, f"{id_name} {ids[row]} is outside 0..{end - 1}", row)


def check_integers(values: Array, column: str, where: str) -> None:
    """Raise DatasetError unless ``values`` are (K,) integers."""
    if values.ndim != 1 or values.dtype.kind not in "iu":
        details = f"it is {values.dtype} of shape {values.shape}"
        if values.dtype.kind in "USO":
            details = f"{details}; texts as ids are for tables (docs/guides/your_data.md)"
        raise column_error(where, column, f"must hold one whole number a row; {details}")


def check_unique(ids: Array, column: str, where: str) -> None:
    """Raise DatasetError if a value in ``ids`` ((K,) integers or strings) occurs twice."""
    repeat = first_repeat(ids)
    if repeat is not None:
        row, earlier = repeat
        raise column_error(where, column, describe_repeated_id(ids[row].item(), f"row {earlier}"), row)


def describe_repeated_id(node_id: object, earlier: str) -> str:
    """Explain that an id is the same as in the row ``earlier``."""
    return f"node id {node_id!r} already occurs in {earlier}; every node may have one row only"


def first_repeat(values: Array) -> tuple[int, int] | None:
    """Find the first row in (K,) ``values`` that repeats an earlier row's value.

    Return that row, and the earliest row with the same value. Return None if all values differ.
    """
    order = np.argsort(values, kind="stable")
    sorted_values = values[order]
    # A stable order keeps equal values in row order, so in a run all except the first are repeats.
    repeating_rows = order[1:][sorted_values[1:] == sorted_values[:-1]]
    if len(repeating_rows) == 0:
        return None
    row = int(repeating_rows.min())
    return row, _find_first(values == values[row])


def check_columns(
    columns: Mapping[str, NodeColumn],
    num_rows: int,
    num_classes: int | None,
    where: str,
    selecting: Collection[str] = (),
) -> None:
    """Raise DatasetError unless the (num_rows, ...) columns on one node or edge type are valid.

    Masks in ``selecting`` select rows of another type, so they may be empty for this one. For example, a
    split may have no edge with a rare relation.
    """
    for name, column in columns.items():
        _check_length(column, num_rows, name, where)
        if isinstance(column, SparseRows):
            _check_sparse(column, name, where)
        else:
            # A NaN label means that the node has no target.
            is_target = name == LABEL and column.ndim == 1 and column.dtype.kind == "f"
            check_finite(np.where(np.isnan(column), 0, column) if is_target else column, name, where)

    masks = {}
    for name in SPLITS:
        if name in columns:
            masks[name] = _check_mask(columns[name], name, where, name in selecting)
    for (name, mask), (other_name, other_mask) in combinations(masks.items(), 2):
        is_in_both = mask & other_mask
        if is_in_both.any():
            raise DatasetError(
                f"{where}: columns {name!r} and {other_name!r} overlap: row {_find_first(is_in_both)} is in "
                f"both ({int(is_in_both.sum())} rows in all); unmark these rows in one column, or "
                "rename the column if it is not a split"
            )

    label = columns.get(LABEL)
    if label is None or isinstance(label, SparseRows) or label.ndim != 1:
        return  # Several targets per node may be any numbers.
    if num_classes is not None:
        _check_classes(label, num_classes, where)
    elif label.dtype.kind != "f":
        return  # Integers that are no classes have no value for a missing label.

    is_unlabelled = label < 0 if label.dtype.kind in "iu" else np.isnan(label)
    for name, mask in masks.items():
        is_missing = mask & is_unlabelled
        if is_missing.any():
            message = f"no label (empty or -1), but its split is {name.removesuffix('_mask')}"
            remedy = f"leave 'split' empty (or {name} False) there"
            raise column_error(where, LABEL, f"{message}; {remedy}", _find_first(is_missing))


def check_finite(column: Array, name: str, where: str, first_row: int = 0) -> None:
    """Raise DatasetError if a floating-point (K, ...) ``column`` has a NaN or an infinity.

    ``first_row`` is the number of the column's first row, for the message.
    """
    if column.dtype.kind != "f":
        return
    # Pieces are checked, because a boolean for every feature would take a quarter of the column's memory.
    for first in range(0, len(column), _ROWS_AT_ONCE):
        piece = column[first : first + _ROWS_AT_ONCE]
        is_finite = np.isfinite(piece)
        if not is_finite.all():
            index = tuple(int(axis[0]) for axis in np.nonzero(~is_finite))
            position = f" at position {list(index[1:])}" if len(index) > 1 else ""
            message = f"{piece[index]}{position} is not a finite number; replace it before loading"
            raise column_error(where, name, message, first_row + first + index[0])


def _check_sparse(column: SparseRows, name: str, where: str) -> None:
    """Raise DatasetError if compressed rows have wrong pointers, positions or values."""
    lengths = np.diff(column.indptr)
    if column.indptr[0] != 0 or column.indptr[-1] != len(column.indices) or (lengths < 0).any():
        stored = f"{len(column.indices)}, the number of stored values"
        raise column_error(where, name, f"has row pointers that do not rise from 0 to {stored}")

    if len(column.values) != len(column.indices):
        counts = f"{len(column.indices)} column indices but {len(column.values)} values"
        raise column_error(where, name, f"has {counts}")
    is_invalid = (column.indices < 0) | (column.indices >= column.num_columns)
    if column.values.dtype.kind == "f":
        is_invalid |= ~np.isfinite(column.values)
    if is_invalid.any():
        position = _find_first(is_invalid)
        row = int(np.searchsorted(column.indptr, position, side="right")) - 1
        value = f"value {column.values[position]} at position {column.indices[position]}"
        message = f"{value} must be finite and in a column of 0..{column.num_columns - 1}"
        raise column_error(where, name, message, row)

    positions = np.repeat(np.arange(len(lengths)), lengths) * column.num_columns + column.indices
    positions.sort(kind="stable")  # Sorting is fast if the positions already ascend.
    repeats = positions[1:][positions[1:] == positions[:-1]]
    if len(repeats):
        row, column_index = divmod(int(repeats[0]), column.num_columns)
        raise column_error(where, name, f"position {column_index} is stored twice; add up the values", row)


def _check_mask(mask: NodeColumn, name: str, where: str, may_be_empty: bool) -> Array:
    if isinstance(mask, SparseRows) or mask.dtype != np.bool_ or mask.ndim != 1:
        raise column_error(where, name, "must hold one boolean per row")
    if not (may_be_empty or mask.any()):
        raise column_error(where, name, "selects no row; leave the column out when there is no such split")
    return mask


def _check_classes(label: Array, num_classes: int, where: str) -> None:
    if label.dtype.kind not in "iu":
        raise column_error(where, LABEL, f"must hold whole numbers; it is {label.dtype}")
    is_invalid = (label < -1) | (label >= num_classes)
    if is_invalid.any():
        row = _find_first(is_invalid)
        message = f"label {label[row]} is outside 0..{num_classes - 1} (-1: none)"
        remedy = f"write regression targets with a decimal point, such as {label[row]}.0"
        raise column_error(where, LABEL, f"{message}; {remedy}", row)


def _warn_of_classes(label: Array, num_classes: int, where: str) -> None:
    """Log a warning if labels are so many different numbers that they could be measurements."""
    labels = label[label >= 0]
    if num_classes > 20 and num_classes > min(len(labels) / 2, 2 * len(np.unique(labels))):
        reason = f"has {num_classes} classes for {len(labels)} labelled nodes, or most are empty"
        _LOG.warning("%s: column %r %s; train with --task regression if they measure", where, LABEL, reason)


_NO_LABEL = {"unknown", "unk", "na", "n/a", "nan", "none", "null", "nil", "missing", "?", "-"}


def warn_of_unknown(names: Iterable[str], where: str, column: str) -> None:
    """Log a warning if a class's name seems to stand for no label."""
    candidates = [name for name in names if name.strip().lower() in _NO_LABEL]
    if candidates:
        message = "%s: column %r: %r is read as a class; leave the column empty in rows without a label"
        _LOG.warning(message, where, column, candidates[0])


def number_codes(graph: RawGraph, where: str) -> RawGraph:
    """Replace labels that are codes by class numbers. The codes become the class names.

    Labels are codes if they are repeated and larger than the number of nodes.
    """
    for ntype, columns in graph.node_data.items():
        label = columns.get(LABEL)
        num_classes = graph.num_classes.get(ntype, 0)
        if num_classes <= max(graph.num_nodes[ntype], FEW_CLASSES) or not isinstance(label, np.ndarray):
            continue
        if label.ndim > 1 or label.dtype.kind not in "iu":
            continue

        codes, counts = np.unique(label[label >= 0], return_counts=True)
        if _REPEATS * len(codes) <= counts.sum():
            numbered = {**columns, LABEL: np.where(label < 0, -1, np.searchsorted(codes, label))}
            message = "%s: the labels %d to %d are numbered as %d classes; if they measure, write %d.0"
            _LOG.warning(message, where, codes[0], codes[-1], len(codes), codes[0])
            graph = replace(
                graph,
                node_data={**graph.node_data, ntype: numbered},
                num_classes={**graph.num_classes, ntype: len(codes)},
                class_names={**graph.class_names, ntype: list(map(str, codes.tolist()))},
            )
    return graph


FEW_CLASSES, _REPEATS = 20, 4
"""Minimum number of classes, and mean number of occurrences, for labels that are numbered as codes."""


def _check_length(column: NodeColumn, num_rows: int, name: str, where: str) -> None:
    if len(column.shape) == 0 or column.shape[0] != num_rows:
        raise column_error(where, name, f"has shape {tuple(column.shape)}; it needs {num_rows} rows")


def _find_first(mask: Array) -> int:
    return int(np.argmax(mask))
