"""Description of the tables to ingest, in the format of GraphStorm's ``gconstruct``.

The supported keys; any other key is an error that lists them::

    {
      "version": "gconstruct-v0.1",
      "nodes": [
        {"node_type": "user", "format": {"name": "parquet"}, "files": ["users-*.parquet"],
         "node_id_col": "id",
         "features": [{"feature_col": ["age", "income"], "feature_name": "feat", "out_dtype": "float32",
                       "transform": {"name": "max_min_norm"}}],
         "labels": [{"task_type": "classification", "label_col": "segment", "split_pct": [0.8, 0.1, 0.1]}]}
      ],
      "edges": [
        {"relation": ["user", "buys", "item"], "format": {"name": "csv", "separator": ","},
         "files": "buys.csv", "source_id_col": "user", "dest_id_col": "item"}
      ]
    }

Paths are relative to the folder of the description or to the current folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from glob import glob
from pathlib import Path
from typing import Any, Literal, final

from dglx_dist.errors import ConfigError
from dglx_dist.records import LABEL, SPLITS, EdgeType
from dglx_dist.registry import did_you_mean


def read_json(path: Path) -> object:
    """Read a JSON file in which no object repeats a key."""
    try:
        found: object = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_once)
        # Python accepts NaN and lone surrogates, which cannot be written back.
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
    except OSError as error:
        raise ConfigError(
            f"{path.absolute()} cannot be read: {error.strerror}; name the description"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from None
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    for key in found if len(found) < len(pairs) else ():
        if sum(key == one for one, _ in pairs) > 1:
            raise ValueError(f"the key {key!r} appears twice in one object")
    return found


@final
class Entry:
    """One JSON object with the keys ``known``; a ConfigError names file, object and key of a wrong value."""

    def __init__(self, value: object, known: Sequence[str], path: Path, what: str) -> None:
        if not isinstance(value, dict):
            raise ConfigError(f"{path}: {what} must be a JSON object with {', '.join(known)}, not {value!r}")
        for key in value:
            if key not in known:
                raise ConfigError(
                    f"{path}: {what} has the key {key!r}, which is not supported"
                    f"{did_you_mean(key, known)} (supported: {', '.join(known)})"
                )
        self.value: dict[str, Any] = value
        self.path = path
        self.what = what

    def wrong(self, key: str, expected: str) -> ConfigError:
        """Return the error that ``key`` must be ``expected``."""
        shown = f"is {self.value[key]!r}" if key in self.value else "is missing"
        return ConfigError(f"{self.path}: {self.what}: {key!r} {shown}; it must be {expected}")

    def get(self, key: str) -> Any:
        return self.value.get(key)

    def text(self, key: str) -> str:
        value = self.get(key)
        if not isinstance(value, str) or not value:
            raise self.wrong(key, "a text that is not empty")
        return value

    def optional_text(self, key: str) -> str | None:
        return None if self.get(key) is None else self.text(key)

    def texts(self, key: str) -> tuple[str, ...]:
        value = self.get(key)
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not values or not all(isinstance(v, str) and v for v in values):
            raise self.wrong(key, "a text, or a list of texts")
        return tuple(values)

    def one_of(self, key: str, known: Sequence[str]) -> str:
        value = self.text(key)
        if value not in known:
            raise self.wrong(key, f"one of {', '.join(known)}{did_you_mean(value, known)}")
        return value

    def list_of(self, key: str) -> list[Any]:
        value = self.get(key)
        if not isinstance(value, list) or not value:
            raise self.wrong(key, "a list that is not empty")
        return value


FORMATS = ("csv", "parquet")


@dataclass(frozen=True, kw_only=True)
class FileSet:
    """The files of one table, in the order of their rows."""

    paths: tuple[Path, ...]
    format: Literal["csv", "parquet"]
    separator: str = ","


def read_files(entry: Entry) -> FileSet:
    """Return the files under ``files``, in the format of the entry or else of their suffix."""
    stated = entry.get("format")
    if stated is None:
        return named_files(entry, "files")
    paths = _paths(entry, "files")
    form = Entry(stated, ("name", "separator"), entry.path, f"{entry.what}.format")
    name, separator = form.one_of("name", FORMATS), form.optional_text("separator")
    if separator is not None and name != "csv":
        raise form.wrong("separator", f"left out for {name}")
    if separator is not None and not _can_separate(separator):
        raise form.wrong("separator", "one character of ASCII, and neither a quote nor an end of line")
    return FileSet(paths=paths, format="csv" if name == "csv" else "parquet", separator=separator or ",")


def named_files(entry: Entry, key: str) -> FileSet:
    """Return the files that a key names, in the format of their suffix; see :func:`read_files`."""
    paths = _paths(entry, key)
    names = {path.suffix[1:] for path in paths}
    for name in FORMATS:
        if names == {name}:
            return FileSet(paths=paths, format="csv" if name == "csv" else "parquet")
    odd = next((path.name for path in paths if path.suffix[1:] not in FORMATS), "")
    if not odd:
        raise entry.wrong(key, f"files of one format ({', '.join(FORMATS)})")
    raise ConfigError(
        f"{entry.path}: {entry.what}: {odd} is of no known format; name it *.csv or *.parquet, or, where it "
        'is a table of nodes or edges, give format: {"name": ...}, one of csv, parquet'
    )


def line_files(entry: Entry, key: str) -> FileSet:
    """Return the files that a key names, with one id per line; see :func:`read_files`."""
    return FileSet(paths=_paths(entry, key), format="csv")


def _paths(entry: Entry, key: str) -> tuple[Path, ...]:
    paths = tuple(path for pattern in entry.texts(key) for path in _matches(pattern, entry))
    if len({path.resolve() for path in paths}) < len(paths):
        raise entry.wrong(key, "files of which none is named twice")
    return paths


def _can_separate(text: str) -> bool:
    return len(text) == 1 and text.isascii() and text not in '"\r\n\0'


def _matches(pattern: str, entry: Entry) -> list[Path]:
    for folder in (entry.path.absolute().parent, Path.cwd()):
        names = [pattern] if (folder / pattern).is_file() else glob(pattern, root_dir=folder, recursive=True)
        found = sorted(folder / name for name in names if (folder / name).is_file())
        if found:
            return found
    raise ConfigError(
        f"{entry.path}: {entry.what}: there is no file {pattern!r}, neither in "
        f"{entry.path.absolute().parent} nor in {Path.cwd()}"
    )


TRANSFORMS: Mapping[str, tuple[str, ...]] = {
    "max_min_norm": ("max_bound", "min_bound", "max_val", "min_val"),
    "standard": ("sum",),
    "to_categorical": ("separator", "mapping"),
    "no-op": ("separator", "truncate_dim"),
}
"""Name of each transform -> its settings."""

OUT_DTYPES = ("float16", "float32", "float64")
TASKS = ("classification", "regression", "link_prediction")
SPLIT_FILES = ("train", "valid", "test")
DEFAULT_SPLIT = (0.8, 0.1, 0.1)
VERSIONS = ("gconstruct-v0.1",)

_TABLE = ("files", "format", "features", "labels")
_NODE_KEYS = ("node_type", "node_id_col", *_TABLE)
_EDGE_KEYS = ("relation", "source_id_col", "dest_id_col", *_TABLE)
_FEATURE_KEYS = ("feature_col", "feature_name", "out_dtype", "transform")
_LABEL_KEYS = ("task_type", "label_col", "split_pct", "custom_split_filenames")


@dataclass(frozen=True, kw_only=True)
class FeatureSpec:
    """Columns of a table that make a tensor, or a part of it if the name repeats."""

    columns: tuple[str, ...]
    name: str
    transform: str = "no-op"
    settings: Mapping[str, Any] = field(default_factory=dict)
    dtype: str | None = None


@dataclass(frozen=True, kw_only=True)
class LabelSpec:
    """The learning task of one type, and how its rows are split."""

    task: str
    column: str | None = None
    """None for link prediction."""
    split: tuple[float, float, float] | None = DEFAULT_SPLIT
    """Shares of train, validation and test; None: ``files`` define the split."""
    files: Mapping[str, FileSet] = field(default_factory=dict)
    """train, valid, test -> files with the ids of their nodes."""
    id_column: str | None = None
    """Id column of Parquet or CSV ``files``; None: one id per line."""


@dataclass(frozen=True, kw_only=True)
class NodeSpec:
    """One node type."""

    ntype: str
    files: FileSet
    id_column: str | None
    """None: nodes are numbered by row."""
    features: tuple[FeatureSpec, ...] = ()
    label: LabelSpec | None = None


@dataclass(frozen=True, kw_only=True)
class EdgeSpec:
    """One edge type."""

    etype: EdgeType
    files: FileSet
    source_column: str
    destination_column: str
    features: tuple[FeatureSpec, ...] = ()
    label: LabelSpec | None = None


@dataclass(frozen=True, kw_only=True)
class IngestConfig:
    """A whole description."""

    path: Path
    nodes: tuple[NodeSpec, ...]
    edges: tuple[EdgeSpec, ...]
    raw: Mapping[str, Any]
    """The parsed JSON."""


def read_config(path: Path) -> IngestConfig:
    """Read and check a description; no table is opened.

    Raises:
        ConfigError: it is missing, not JSON, has an unsupported key or value, or names no file.
    """
    raw = read_json(path)
    top = Entry(raw, ("version", "nodes", "edges"), path, "the description")
    if top.get("version") not in (None, *VERSIONS):
        raise top.wrong("version", f"one of {', '.join(VERSIONS)}")
    nodes = tuple(_node(item, path, f"nodes[{i}]") for i, item in enumerate(top.list_of("nodes")))
    edges = tuple(_edge(item, path, f"edges[{i}]") for i, item in enumerate(top.list_of("edges")))
    _check_types(nodes, edges, path)
    return IngestConfig(path=path, nodes=nodes, edges=edges, raw=top.value)


def _node(value: object, path: Path, what: str) -> NodeSpec:
    entry = Entry(value, _NODE_KEYS, path, what)
    id_column = entry.optional_text("node_id_col")
    label = _label(entry)
    if label is not None and label.task == "link_prediction":
        raise ConfigError(f"{path}: {what}: link_prediction is a task of edges; move it there")
    return NodeSpec(
        ntype=entry.text("node_type"),
        files=read_files(entry),
        id_column=id_column,
        features=_features(entry),
        label=label,
    )


def _edge(value: object, path: Path, what: str) -> EdgeSpec:
    entry = Entry(value, _EDGE_KEYS, path, what)
    relation = entry.get("relation")
    if (
        not isinstance(relation, list)
        or len(relation) != 3
        or not all(isinstance(v, str) and v for v in relation)
    ):
        raise entry.wrong("relation", "[source node type, relation, destination node type]")
    label = _label(entry)
    if label is not None and label.files:
        raise ConfigError(
            f"{path}: {what}: custom_split_filenames is for nodes; give split_pct, or a column of the table"
        )
    return EdgeSpec(
        etype=(relation[0], relation[1], relation[2]),
        files=read_files(entry),
        source_column=entry.text("source_id_col"),
        destination_column=entry.text("dest_id_col"),
        features=_features(entry),
        label=label,
    )


def _features(entry: Entry) -> tuple[FeatureSpec, ...]:
    if entry.get("features") is None:
        return ()
    features = tuple(
        _feature(item, entry.path, f"{entry.what}.features[{i}]")
        for i, item in enumerate(entry.list_of("features"))
    )
    for name in dict.fromkeys(feature.name for feature in features):
        asked = {feature.dtype for feature in features if feature.name == name} - {None}
        if len(asked) > 1:
            raise ConfigError(
                f"{entry.path}: {entry.what}: the features {name!r} make one tensor, of one out_dtype, and "
                f"ask for {', '.join(sorted(map(str, asked)))}"
            )
    return features


def _feature(value: object, path: Path, what: str) -> FeatureSpec:
    entry = Entry(value, _FEATURE_KEYS, path, what)
    columns = entry.texts("feature_col")
    name = entry.optional_text("feature_name") or columns[0]
    if entry.get("feature_name") is None and len(columns) > 1:
        raise ConfigError(f"{path}: {what}: several columns need a feature_name")
    if name in (LABEL, *SPLITS):
        raise ConfigError(f"{path}: {what}: {name!r} is the name of labels or splits; give a feature_name")
    dtype = None if entry.get("out_dtype") is None else entry.one_of("out_dtype", OUT_DTYPES)
    if entry.get("transform") is None:
        return FeatureSpec(columns=columns, name=name, dtype=dtype)
    stated = entry.get("transform")
    chosen = stated.get("name") if isinstance(stated, dict) else None
    known = TRANSFORMS.get(chosen, ()) if isinstance(chosen, str) else ()
    if not known:
        raise ConfigError(
            f"{path}: {what}: transform {chosen!r} is not supported (supported: {', '.join(TRANSFORMS)}); "
            "apply it to the table beforehand"
        )
    form = Entry(stated, ("name", *known), path, f"{what}.transform")
    settings = {key: form.get(key) for key in known if form.get(key) is not None}
    return FeatureSpec(
        columns=columns, name=name, transform=form.text("name"), settings=settings, dtype=dtype
    )


def _label(parent: Entry) -> LabelSpec | None:
    if parent.get("labels") is None:
        return None
    items = parent.list_of("labels")
    if len(items) > 1:
        raise ConfigError(
            f"{parent.path}: {parent.what}: {len(items)} labels; one task for each type is supported"
        )
    entry = Entry(items[0], _LABEL_KEYS, parent.path, f"{parent.what}.labels[0]")
    task = entry.one_of("task_type", TASKS)
    column = entry.optional_text("label_col")
    if (column is None) != (task == "link_prediction"):
        raise entry.wrong("label_col", f"{'left out' if column else 'given'} for {task}")
    if entry.get("custom_split_filenames") is None:
        return LabelSpec(task=task, column=column, split=_shares(entry))
    if entry.get("split_pct") is not None:
        raise entry.wrong("split_pct", "left out where custom_split_filenames says the split")
    stated = entry.get("custom_split_filenames")
    form = Entry(stated, (*SPLIT_FILES, "column"), entry.path, f"{entry.what}.custom_split_filenames")
    columns = (None,) if form.get("column") is None else form.texts("column")
    if len(columns) > 1:
        raise form.wrong("column", "the one column of ids")
    read = line_files if columns[0] is None else named_files
    files = {name: read(form, name) for name in SPLIT_FILES if form.get(name) is not None}
    if not files:
        raise ConfigError(f"{form.path}: {form.what} names no file; give train, valid or test")
    return LabelSpec(task=task, column=column, split=None, files=files, id_column=columns[0])


def _shares(entry: Entry) -> tuple[float, float, float]:
    value = entry.get("split_pct")
    if value is None:
        return DEFAULT_SPLIT
    if not isinstance(value, list) or len(value) != 3 or not all(map(_is_share, value)):
        raise entry.wrong("split_pct", "three shares of train, validation and test")
    # In floating point, 0.8 + 0.1 + 0.1 is slightly above 1.
    if not 0 < sum(value) <= 1 + 1e-9:
        raise entry.wrong("split_pct", "three shares of train, validation and test, together at most 1")
    return value[0], value[1], value[2]


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def _check_types(nodes: Sequence[NodeSpec], edges: Sequence[EdgeSpec], path: Path) -> None:
    names: list[Any] = [node.ntype for node in nodes]
    relations: list[Any] = [edge.etype for edge in edges]
    for kind, found in (("node", names), ("edge", relations)):
        for one in found:
            if found.count(one) > 1:
                raise ConfigError(
                    f"{path}: {kind} type {one!r} is described twice; list its files in one entry"
                )
    for edge in edges:
        for ntype in (edge.etype[0], edge.etype[2]):
            if ntype not in names:
                raise ConfigError(
                    f"{path}: the edges {edge.etype} name the node type {ntype!r}, which is not among nodes "
                    f"({', '.join(names)})"
                )
