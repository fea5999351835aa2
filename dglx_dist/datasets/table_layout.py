"""Which tables make a graph: by the names in a folder, or by a JSON description.

A description, with every setting that it may have (only ``edges`` and each ``file`` are needed)::

    {
      "name": "shop",
      "nodes": {
        "user": {"file": "users.csv", "id": "user_id", "label": "segment", "classes": 5,
                 "split": "use", "features": ["age", "income"], "ignore": ["city"]}
      },
      "edges": {
        "user:buys:item": {"file": "buys.parquet", "source": "user", "destination": "item",
                           "split": "use", "features": ["price"], "ignore": ["day"]}
      }
    }

A graph of one type writes ``_N`` and ``_N:_E:_N``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dglx_dist.datasets.table_files import SUFFIXES
from dglx_dist.errors import DatasetError
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, EdgeType

DESCRIPTION = "graph.json"
_CONVENTION = (
    "nodes.csv (optional) and edges.csv, or nodes/TYPE.csv and edges/SOURCE__RELATION__DESTINATION.csv, "
    f"each .csv or .parquet, or {DESCRIPTION}"
)
_NODE_KEYS = {"file", "id", "label", "classes", "split", "features", "ignore"}
_EDGE_KEYS = {"file", "source", "destination", "split", "features", "ignore"}


@dataclass(frozen=True, kw_only=True)
class TableSpec:
    """One table and what its columns mean; None where the usual names decide."""

    path: Path
    keys: tuple[str, ...] | None = None
    """The id column of a node table; source and destination columns of an edge table."""
    label: str | None = None
    classes: int | None = None
    """How many there are; None to take the largest label + 1."""
    split: str | None = None
    features: tuple[str, ...] | None = None
    ignore: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TableLayout:
    """The tables of one graph."""

    name: str
    nodes: Mapping[str, TableSpec]
    """Node types without a table get their nodes from the edges."""
    edges: Mapping[EdgeType, TableSpec]


def find_layout(location: Path, ignore: tuple[str, ...]) -> TableLayout:
    """Read the layout of a folder or of a ``.json`` description; no table is opened.

    Args:
        location: The folder or the description; paths in it are relative to its own folder.
        ignore: Columns that no table's data is taken from.

    Raises:
        DatasetError: neither exists, nothing in the folder fits, or the description is wrong.
    """
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
    single = _one_file(location, "edges")
    if single is not None:
        nodes = _one_file(location, "nodes")
        return TableLayout(
            name=location.resolve().name,
            nodes={} if nodes is None else {NODE_TYPE: TableSpec(path=nodes, ignore=ignore)},
            edges={EDGE_TYPE: TableSpec(path=single, ignore=ignore)},
        )
    edges = {_edge_type(path.stem, "__", path): path for path in _tables(location / "edges")}
    if not edges:
        raise DatasetError(f"{location.absolute()} has no table of edges; expected {_CONVENTION}")
    return TableLayout(
        name=location.resolve().name,
        nodes={path.stem: TableSpec(path=path, ignore=ignore) for path in _tables(location / "nodes")},
        edges={edge_type: TableSpec(path=path, ignore=ignore) for edge_type, path in edges.items()},
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
    try:
        description = json.loads(path.read_text())
    except ValueError as error:
        raise DatasetError(f"{path}: not valid JSON: {error}") from error
    _require_keys(description, {"name", "nodes", "edges"}, {"edges"}, path, "the description")
    nodes = _entries(description, "nodes", path)
    edges = _entries(description, "edges", path)
    return TableLayout(
        name=str(description.get("name", path.resolve().parent.name)),
        nodes={
            node_type: _spec(entry, ("id",), _NODE_KEYS, path, f"nodes {node_type!r}", ignore)
            for node_type, entry in nodes.items()
        },
        edges={
            _edge_type(key, ":", path): _spec(
                entry, ("source", "destination"), _EDGE_KEYS, path, f"edges {key!r}", ignore
            )
            for key, entry in edges.items()
        },
    )


def _entries(description: Mapping[str, object], key: str, path: Path) -> dict[str, object]:
    entries = description.get(key, {})
    if not isinstance(entries, dict):
        raise DatasetError(f"{path}: {key!r} must be an object of type -> table, not {entries!r}")
    return entries


def _spec(
    entry: object, key_names: tuple[str, ...], known: set[str], path: Path, what: str, ignore: tuple[str, ...]
) -> TableSpec:
    _require_keys(entry, known, {"file"}, path, what)
    assert isinstance(entry, dict)  # what _require_keys has just found out
    given = [entry.get(name) for name in key_names]
    if any(given) and not all(given):
        raise DatasetError(f"{path}: {what} must name both or none of {', '.join(key_names)}")
    features = entry.get("features")
    return TableSpec(
        path=path.parent / str(entry["file"]),
        keys=tuple(map(str, given)) if all(given) else None,
        label=_text(entry, "label"),
        classes=_count(entry, "classes", path, what),
        split=_text(entry, "split"),
        features=None if features is None else _names(features, path, what, "features"),
        ignore=(*_names(entry.get("ignore", []), path, what, "ignore"), *ignore),
    )


def _text(entry: Mapping[str, object], key: str) -> str | None:
    return None if entry.get(key) is None else str(entry[key])


def _count(entry: Mapping[str, object], key: str, path: Path, what: str) -> int | None:
    value = entry.get(key)
    if value is None or (isinstance(value, int) and value > 0):
        return value
    raise DatasetError(f"{path}: {what}: {key!r} must be a whole number above 0, not {value!r}")


def _names(value: object, path: Path, what: str, key: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise DatasetError(f"{path}: {what}: {key!r} must be a list of column names, not {value!r}")
    return tuple(value)


def _require_keys(entry: object, known: set[str], needed: set[str], path: Path, what: str) -> None:
    if not isinstance(entry, dict):
        raise DatasetError(f"{path}: {what} must be a JSON object with {', '.join(sorted(known))}")
    for key in entry:
        if key not in known:
            raise DatasetError(f"{path}: {what} has no setting {key!r} (known: {', '.join(sorted(known))})")
    for key in sorted(needed):
        if key not in entry:
            raise DatasetError(f"{path}: {what} lacks {key!r}")
