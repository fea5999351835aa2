"""The description of tables that GraphStorm's users know, read and checked before any table is opened.

What is understood of GraphStorm's ``gconstruct`` keys; every other key is refused with the list of these::

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

Paths are relative to the folder of the description, or else to the current one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dglx_dist.errors import ConfigError
from dglx_dist.ingest.entries import Entry, read_json
from dglx_dist.ingest.files import FileSet, line_files, named_files, read_files
from dglx_dist.records import LABEL, SPLITS, EdgeType

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
    """Columns of a table that become one tensor, or a part of it where names repeat."""

    columns: tuple[str, ...]
    name: str
    transform: str = "no-op"
    settings: Mapping[str, Any] = field(default_factory=dict)
    dtype: str | None = None


@dataclass(frozen=True, kw_only=True)
class LabelSpec:
    """What is to be learnt of one type, and how it is split."""

    task: str
    column: str | None = None
    """None for link prediction."""
    split: tuple[float, float, float] | None = DEFAULT_SPLIT
    """Shares of train, validation and test; None: the files tell."""
    files: Mapping[str, FileSet] = field(default_factory=dict)
    """train, valid, test -> files with the ids of their nodes."""
    id_column: str | None = None
    """Of these files, where they are Parquet or CSV; None: one id a line."""


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
    """As it was written."""


def read_config(path: Path) -> IngestConfig:
    """Read and check a description; no table is opened.

    Raises:
        ConfigError: it is missing, no JSON, has a key or value that cannot be honoured, or names no file.
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
    # As written, 0.8 + 0.1 + 0.1 is a little above 1.
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
