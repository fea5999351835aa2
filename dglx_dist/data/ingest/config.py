"""Define the options for ``dglx ingest``, and parse its description of tables.

The description has the same format as in GraphStorm's ``gconstruct``. docs/guides/ingest.md lists the
supported keys. Any other key is an error. Paths are relative to the description's folder or to the current
folder.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from glob import escape as glob_escape
from glob import glob
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Generic, TypeAlias, TypeVar

from dglx_dist.data.json_fields import Fields, Within
from dglx_dist.data.storage.files import read_small_file
from dglx_dist.data.storage.remote import fetch_objects
from dglx_dist.data.tables import FileSet
from dglx_dist.errors import ConfigError
from dglx_dist.internals.cache_folder import find_dataset_cache
from dglx_dist.options import find_address, option, refuse_addresses, refuse_signed
from dglx_dist.records import LABEL, SPLITS, EdgeType


@dataclass(frozen=True, kw_only=True)
class IngestPlan:
    """Options for one ingestion. Raises ConfigError if the seed is negative."""

    out: Path = option(
        Path("data/ingested"),
        "Folder or address (s3://...) to write. It must be new or empty.",
        metavar="DIR",
    )
    memory: str = option(
        "2GB", "Memory limit of this process, such as 200MB. More data is spilled to disk.", metavar="SIZE"
    )
    """Memory limit, including the program and its libraries."""
    reverse_edges: bool = option(
        False, "Add the reverse of each edge type, named RELATION-rev.", flag="--add-reverse-edges"
    )
    name: str | None = option(None, "Name of the graph. Default: name of DIR.")
    seed: int = option(0, "Random seed for split_pct. The same seed draws the same nodes.")
    output_description: Path | None = option(
        None,
        "File for CONFIG with all ranges and categories, to transform later tables equally.",
        flag="--output-conf-file",
        metavar="FILE",
    )
    """File of ``write_description``. It is checked before ingestion starts."""
    workspace: Path | None = option(
        None, "Folder for spilled data. Default: beside DIR of --out.", metavar="DIR"
    )
    overwrite: bool = option(False, "Replace what is in DIR.")

    def __post_init__(self) -> None:
        refuse_addresses(self, ("output_description", "workspace"))
        refuse_signed(self, ("out",))
        if self.seed < 0:
            raise ConfigError(f"the seed is {self.seed}; it must be at least 0")


def read_json(path: Path) -> object:
    """Read a JSON file. Raise ConfigError if an object repeats a key."""
    try:
        value: object = json.loads(read_small_file(path), object_pairs_hook=_reject_repeated_keys)
        # Python accepts NaN and lone surrogates, which cannot be written back.
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except OSError as error:
        remedy = "name the description, or give a folder of tables to `dglx partition`"
        raise ConfigError(f"{path.absolute()} cannot be read: {error.strerror}; {remedy}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from None
    return value


def _reject_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {max(keys, key=keys.count)!r} appears twice in one object")
    return values


K = TypeVar("K", str, EdgeType)
FORMATS = ("csv", "parquet")


def read_files(entry: Fields) -> FileSet:
    """Return the files listed under ``files``. Their format is the entry's ``format``, or their suffix."""
    if not entry.has("format"):
        return named_files(entry, "files")
    paths = _find_paths(entry, "files")

    file_format = entry.nested_fields("format").reject_unknown(("name", "separator"))
    name = file_format.choice("name", FORMATS)
    if not file_format.has("separator"):
        return FileSet(paths=paths, format=name)
    separator = file_format.nonempty_text("separator")
    if name != "csv":
        raise file_format.field_error("separator", f"nothing for {name}")
    if len(separator) > 1 or not separator.isascii() or separator in '"\r\n\0':
        raise file_format.field_error("separator", "one ASCII character other than a quote or an end of line")
    return FileSet(paths=paths, format=name, separator=separator)


def named_files(entry: Fields, key: str) -> FileSet:
    """Return the files listed under ``key``. Their suffix gives their format. See :func:`read_files`."""
    paths = _find_paths(entry, key)
    for path in paths:
        if path.suffix[1:] not in FORMATS:
            raise entry.error(
                f"{path.name} has no known format; name it *.csv or *.parquet, or for a table of nodes or "
                'edges give format: {"name": ...}, one of csv, parquet'
            )
        if path.suffix != paths[0].suffix:
            raise entry.field_error(key, f"files of one format ({', '.join(FORMATS)})")
    return FileSet(paths=paths, format=paths[0].suffix[1:])


def _find_paths(entry: Fields, key: str) -> tuple[Path, ...]:
    paths: list[Path] = []
    for pattern in _read_words(entry, key):
        paths += _find_matches(pattern, entry)
    if len({path.resolve() for path in paths}) < len(paths):
        raise entry.field_error(key, "files that are named once each")
    return tuple(paths)


def _read_words(entry: Fields, key: str) -> tuple[str, ...]:
    """Return the words under ``key``. The value is one text or a list of texts, and must not be empty."""
    if isinstance(entry.mapping.get(key), str):
        return (entry.nonempty_text(key),)
    words = entry.items(key, 1)
    return tuple(map(words.nonempty_text, words.mapping))


def _find_matches(pattern: str, entry: Fields) -> list[Path]:
    """Return the files that match ``pattern`` beside the description, or else in the working folder.

    For an address, copy the object there and all objects below it to this machine.
    """
    if find_address(pattern) is not None:
        copy = Path(fetch_objects(pattern))
        return sorted(path for path in copy.rglob("*") if path.is_file()) if copy.is_dir() else [copy]
    folder = Path(entry.where).absolute().parent
    # A description at an address names objects, and no files of the machine that reads it.
    is_copy = folder.is_relative_to(find_dataset_cache().absolute())
    folders = [folder] if is_copy else [folder, Path.cwd()]
    for folder in folders:
        # A file may have a name such as part[1].csv, which does not match itself as a pattern.
        if (folder / pattern).is_file():
            return [folder / pattern]
        matches = [folder / name for name in glob(pattern, root_dir=folder, recursive=True)]
        paths = sorted(path for path in matches if path.is_file())
        if paths:
            return paths
    places = "beside the description" if is_copy else f"in {folders[0]} or {folders[1]}"
    raise entry.error(f"there is no file {pattern!r} {places}")


TRANSFORMS: Mapping[str, tuple[str, ...]] = {
    "max_min_norm": ("max_bound", "min_bound", "max_val", "min_val"),
    "standard": ("sum",),
    "to_categorical": ("separator", "mapping"),
    "no-op": ("separator", "truncate_dim"),
}
"""Setting names by transform."""

OUT_DTYPES = ("float16", "float32", "float64")
TASKS = ("classification", "regression", "link_prediction")
SPLIT_FILES = ("train", "valid", "test")
DEFAULT_SPLIT = (0.8, 0.1, 0.1)
_Share: TypeAlias = Annotated[float, Within(0, 1)]
VERSIONS = ("gconstruct-v0.1",)

_TABLE = ("files", "format", "features", "labels")
_NODE_KEYS = ("node_type", "node_id_col", *_TABLE)
_EDGE_KEYS = ("relation", "source_id_col", "dest_id_col", *_TABLE)
_FEATURE_KEYS = ("feature_col", "feature_name", "out_dtype", "transform")
_LABEL_KEYS = ("task_type", "label_col", "split_pct", "custom_split_filenames")


@dataclass(frozen=True, kw_only=True)
class FeatureSpec:
    """Table columns that form a tensor. Features with the same name form one tensor together."""

    columns: tuple[str, ...]
    name: str
    transform: str = "no-op"
    settings: Mapping[str, Any] = field(default_factory=dict)
    dtype: str | None = None


@dataclass(frozen=True, kw_only=True)
class LabelSpec:
    """One type's learning task, and how its rows are split."""

    task: str
    column: str | None = None
    """Column with labels. None: link prediction."""
    split: tuple[float, float, float] | None = DEFAULT_SPLIT
    """Shares for train, validation and test. None: ``files`` define the split."""
    files: Mapping[str, FileSet] = field(default_factory=dict)
    """Files with node ids, by split: train, valid, test."""
    id_column: str | None = None
    """Id column in Parquet or CSV ``files``. None: the files have one id per line."""


@dataclass(frozen=True, kw_only=True)
class TypeSpec(Generic[K]):
    """The table for one node or edge type."""

    kind: K
    files: FileSet
    id_columns: tuple[str, ...]
    """For nodes, the id column, or none to number nodes by row. For edges, the source and destination ids."""
    features: tuple[FeatureSpec, ...] = ()
    label: LabelSpec | None = None


@dataclass(frozen=True, kw_only=True)
class IngestConfig:
    """A parsed and checked description of tables."""

    path: Path
    nodes: tuple[TypeSpec[str], ...]
    edges: tuple[TypeSpec[EdgeType], ...]
    mapping: Mapping[str, Any]
    """The parsed JSON."""


def read_config(path: Path) -> IngestConfig:
    """Read and check a description. No table is opened.

    If the description is at an address in an object store, it is copied to a cache with the files it names.

    Raises ConfigError if the file is missing or not JSON, has an unsupported key or value, or names no file.
    """
    path = _fetch_description(path)
    top = Fields(read_json(path), str(path)).reject_unknown(("version", "nodes", "edges"))
    if top.has("version"):
        top.choice("version", VERSIONS)
    nodes = tuple(_parse_node(entry.reject_unknown(_NODE_KEYS)) for entry in top.nested_list("nodes", 1))
    edges = tuple(_parse_edge(entry.reject_unknown(_EDGE_KEYS)) for entry in top.nested_list("edges", 1))
    config = IngestConfig(path=path, nodes=nodes, edges=edges, mapping=top.mapping)
    _check_types(config)
    return config


def _fetch_description(path: Path) -> Path:
    """Copy a description at an address to this machine, with the files that it names beside it."""
    address = find_address(path)
    if address is None:
        return path
    folder, _, name = address.rpartition("/")
    texts = {os.path.normpath(text) for text in _iterate_texts(read_json(Path(fetch_objects(address))))}
    patterns = [text for text in texts if glob_escape(text) != text]

    def is_wanted(file: str) -> bool:
        return file == name or file in texts or any(_matches(file, pattern) for pattern in patterns)

    return Path(fetch_objects(folder, is_wanted), name)


def _matches(file: str, pattern: str) -> bool:
    """Return whether ``glob`` may find ``file`` by ``pattern``, where ** stands for any number of folders."""
    if "**" in pattern:
        return fnmatch(file, pattern) or fnmatch(file, pattern.replace("**/", ""))
    return file.count("/") == pattern.count("/") and PurePosixPath(file).match(pattern)


def _iterate_texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _iterate_texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _iterate_texts(item)


def _parse_node(entry: Fields) -> TypeSpec[str]:
    label = _parse_label(entry)
    if label is not None and label.task == "link_prediction":
        raise entry.error("link_prediction is a task for edges; move it to an entry of edges")
    id_columns: tuple[str, ...] = ()
    if entry.has("node_id_col"):
        id_columns = (entry.nonempty_text("node_id_col"),)
    return TypeSpec(
        kind=entry.nonempty_text("node_type"),
        files=read_files(entry),
        id_columns=id_columns,
        features=_parse_features(entry),
        label=label,
    )


def _parse_edge(entry: Fields) -> TypeSpec[EdgeType]:
    relation = _read_words(entry, "relation")
    if len(relation) != 3:
        raise entry.field_error("relation", "[source node type, relation, destination node type]")
    label = _parse_label(entry)
    if label is not None and label.files:
        raise entry.error(
            "custom_split_filenames cannot split edges; give split_pct, or a column of the table"
        )

    return TypeSpec(
        kind=(relation[0], relation[1], relation[2]),
        files=read_files(entry),
        id_columns=(entry.nonempty_text("source_id_col"), entry.nonempty_text("dest_id_col")),
        features=_parse_features(entry),
        label=label,
    )


def _parse_features(entry: Fields) -> tuple[FeatureSpec, ...]:
    """Return a type's features. Raise ConfigError if features for the same tensor differ in out_dtype."""
    if not entry.has("features"):
        return ()

    features = []
    dtypes: dict[str, set[str]] = {}
    for feature_entry in entry.nested_list("features", 1):
        feature = _parse_feature(feature_entry.reject_unknown(_FEATURE_KEYS))
        features.append(feature)
        if feature.dtype is not None:
            dtypes.setdefault(feature.name, set()).add(feature.dtype)

    for name, tensor_dtypes in dtypes.items():
        if len(tensor_dtypes) > 1:
            raise entry.error(
                f"the features {name!r} form one tensor and need one out_dtype, but they have "
                f"{', '.join(sorted(tensor_dtypes))}"
            )
    return tuple(features)


def _parse_feature(entry: Fields) -> FeatureSpec:
    columns = _read_words(entry, "feature_col")
    name = entry.optional("feature_name", entry.nonempty_text, columns[0])
    if not entry.has("feature_name") and len(columns) > 1:
        raise entry.error("several columns need a feature_name")
    if name in (LABEL, *SPLITS):
        raise entry.error(f"{name!r} is the name of labels or splits; give a feature_name")
    dtype = None
    if entry.has("out_dtype"):
        dtype = entry.choice("out_dtype", OUT_DTYPES)
    if not entry.has("transform"):
        return FeatureSpec(columns=columns, name=name, dtype=dtype)

    transform_entry = entry.nested_fields("transform")
    transform = transform_entry.optional("name", transform_entry.nonempty_text, "")
    if transform not in TRANSFORMS:
        raise entry.error(
            f"transform {transform!r} is not supported (supported: {', '.join(TRANSFORMS)}); "
            "apply it to the table beforehand"
        )

    keys = TRANSFORMS[transform]
    transform_entry.reject_unknown(("name", *keys))
    settings = {key: transform_entry.raw_value(key) for key in keys if transform_entry.has(key)}
    return FeatureSpec(columns=columns, name=name, transform=transform, settings=settings, dtype=dtype)


def _parse_label(parent: Fields) -> LabelSpec | None:
    """Return a type's task, or None if the description has no labels for it."""
    if not parent.has("labels"):
        return None
    entries = parent.nested_list("labels", 1)
    if len(entries) > 1:
        raise parent.error(f"{len(entries)} labels; only one task per type is supported")

    entry = entries[0].reject_unknown(_LABEL_KEYS)
    task = entry.choice("task_type", TASKS)
    column = entry.optional("label_col", entry.nonempty_text, None)
    if task == "link_prediction" and column is not None:
        raise entry.field_error("label_col", f"nothing for {task}")
    if task != "link_prediction" and column is None:
        raise entry.field_error("label_col", f"a column for {task}")

    if not entry.has("custom_split_filenames"):
        return LabelSpec(task=task, column=column, split=_parse_shares(entry))
    if entry.has("split_pct"):
        raise entry.field_error("split_pct", "nothing, because custom_split_filenames gives the split")
    files, id_column = _parse_split_files(entry.nested_fields("custom_split_filenames"))
    return LabelSpec(task=task, column=column, split=None, files=files, id_column=id_column)


def _parse_split_files(entry: Fields) -> tuple[dict[str, FileSet], str | None]:
    """Return the files by split, and their id column, or None if they have one id per line."""
    entry.reject_unknown((*SPLIT_FILES, "column"))
    columns: tuple[str | None, ...] = (None,)
    if entry.has("column"):
        columns = _read_words(entry, "column")
    if len(columns) > 1:
        raise entry.field_error("column", "one column of ids")

    files: dict[str, FileSet] = {}
    for name in filter(entry.has, SPLIT_FILES):
        if columns[0] is None:
            files[name] = FileSet(paths=_find_paths(entry, name), format="lines")
        else:
            files[name] = named_files(entry, name)
    if not files:
        raise entry.error("it names no file; give train, valid or test")
    return files, columns[0]


def _parse_shares(entry: Fields) -> tuple[float, float, float]:
    if not entry.has("split_pct"):
        return DEFAULT_SPLIT
    shares = entry.value("split_pct", tuple[_Share, ...])
    # In floating point, 0.8 + 0.1 + 0.1 is slightly more than 1.
    if len(shares) != 3 or not 0 < sum(shares) <= 1 + 1e-9:
        raise entry.field_error("split_pct", "three shares of train, validation and test, together at most 1")
    return shares[0], shares[1], shares[2]


def _check_types(config: IngestConfig) -> None:
    names = [node.kind for node in config.nodes]
    relations = [edge.kind for edge in config.edges]
    for kind, count in Counter([*names, *relations]).items():
        if count > 1:
            raise ConfigError(
                f"{config.path}: the type {kind!r} is described twice; list its files in one entry"
            )

    for source, relation, destination in relations:
        for ntype in (source, destination):
            if ntype not in names:
                raise ConfigError(
                    f"{config.path}: the edges {(source, relation, destination)} use the "
                    f"node type {ntype!r}, which is not among nodes ({', '.join(names)})"
                )
