"""Graphs in one ``.npz`` file: node graphs, relational graphs and knowledge graphs."""

from __future__ import annotations

import re
import tokenize
import zipfile
import zlib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import final

import numpy as np

from dglx_dist.datasets.base import DatasetSource
from dglx_dist.datasets.check import check_ids, check_whole
from dglx_dist.datasets.columns import count_classes, masks_of_split, standard_columns
from dglx_dist.datasets.options import refuse_unknown
from dglx_dist.errors import DatasetError
from dglx_dist.records import EDGE_TYPE, FEATURE, NODE_TYPE, Array, EdgeType, NodeColumn, RawGraph, SparseRows

_SPARSE = ("feat_indptr", "feat_indices", "feat_data", "feat_dim")
_STRUCTURE = {
    *("src", "dst", "head", "tail", "rel", "etype", "etype_names", "relation_names", "triple_split"),
    *("num_classes", "num_nodes", "num_etypes", "num_entities", "num_relations", "both_directions", "split"),
    *_SPARSE,
}
# What NumPy lets through from a damaged archive: it reads an array's header before its checksum.
_UNREADABLE = (
    *(zipfile.BadZipFile, zlib.error, tokenize.TokenError, EOFError, OSError),
    *(ValueError, TypeError, AttributeError, RuntimeError, MemoryError),
)


@final
class NpzSource(DatasetSource):
    """A ``.npz`` of arrays; takes no options.

    ``src``, ``dst`` and ``num_nodes`` make a graph; with ``etype`` and ``etype_names`` it gets one
    edge type ("_N", name, "_N") per relation; with ``head``, ``rel``, ``tail`` and
    ``triple_split`` it is a knowledge graph whose edges carry the three masks. Features lie in
    ``features`` or as compressed rows in ``feat_indptr``, ``feat_indices``, ``feat_data``,
    ``feat_dim``, which stay compressed; ``num_classes`` may state the classes. Any other array is a
    node column when it has as many rows as there are nodes, else an edge column when it has as many as
    there are edges. A ``val_mask`` without any node counts as absent, since official splits often have
    none. Pickled objects are refused.
    """

    def __init__(self, location: str, options: Mapping[str, object]) -> None:
        refuse_unknown(options, (), "npz")
        self._path = Path(location).expanduser()

    def load(self) -> RawGraph:
        """Read the file whole."""
        arrays = _read(self._path)
        where = str(self._path)
        triples = "head" in arrays
        _require(arrays, ("head", "rel", "tail") if triples else ("src", "dst"), where)
        ends = ("head", "tail") if triples else ("src", "dst")
        source_ids, destination_ids = (_ids(arrays[name], name, where) for name in ends)
        num_nodes = _num_nodes(arrays, source_ids, destination_ids)
        node_columns, edge_columns = _columns(arrays, num_nodes, len(source_ids), where)
        if "triple_split" in arrays:
            _same_length(source_ids, arrays["triple_split"], "splits", where)
            masks = masks_of_split(arrays["triple_split"])
            edge_columns.update({name: mask for name, mask in masks.items() if mask.any()})
        edges, edge_data = {EDGE_TYPE: (source_ids, destination_ids)}, {EDGE_TYPE: edge_columns}
        relation = arrays.get("rel", arrays.get("etype"))
        if relation is not None:
            names = arrays.get("relation_names", arrays.get("etype_names"))
            edges, edge_data = _by_relation(source_ids, destination_ids, edge_columns, relation, names, where)
        num_classes = int(arrays["num_classes"]) if "num_classes" in arrays else count_classes(node_columns)
        return RawGraph(
            name=self._path.stem,
            num_nodes={NODE_TYPE: num_nodes},
            edges=edges,
            node_data={NODE_TYPE: node_columns},
            edge_data=edge_data,
            num_classes={} if num_classes is None else {NODE_TYPE: num_classes},
        )


def _read(path: Path) -> dict[str, Array]:
    if not path.is_file():
        raise DatasetError(f"there is no file {path.absolute()}; expected a .npz file")
    try:
        with np.load(path, allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files}
    except _UNREADABLE as error:
        raise DatasetError(f"{path}: not a readable .npz file of plain arrays ({error})") from error


def _require(arrays: Mapping[str, Array], names: tuple[str, ...], where: str) -> None:
    missing = [name for name in names if name not in arrays]
    if missing:
        raise DatasetError(
            f"{where}: lacks the array {missing[0]!r}; a graph needs src and dst, a knowledge graph head, "
            f"rel and tail (the file has {', '.join(sorted(arrays)) or 'none'})"
        )


def _num_nodes(arrays: Mapping[str, Array], source_ids: Array, destination_ids: Array) -> int:
    for name in ("num_nodes", "num_entities"):
        if name in arrays:
            return int(arrays[name])
    if len(source_ids) == 0:
        return 0
    return 1 + max(int(source_ids.max()), int(destination_ids.max()))


def _columns(
    arrays: Mapping[str, Array], num_nodes: int, num_edges: int, where: str
) -> tuple[dict[str, NodeColumn], dict[str, Array]]:
    of_nodes: dict[str, NodeColumn] = {}
    of_edges: dict[str, Array] = {}
    for name, array in arrays.items():
        if name in _STRUCTURE:
            continue
        if array.ndim and len(array) == num_nodes:
            of_nodes[name] = array
        elif array.ndim and len(array) == num_edges:
            of_edges[name] = array
        else:
            raise DatasetError(
                f"{where}: array {name!r} has shape {array.shape}, which is neither one row for each of the "
                f"{num_nodes} nodes nor one for each of the {num_edges} edges"
            )
    if any(name in arrays for name in _SPARSE):
        _require(arrays, _SPARSE, where)
        of_nodes[FEATURE] = _sparse_features(arrays)
    columns = standard_columns(of_nodes, where)
    empty = columns.get("val_mask")
    if empty is not None and not isinstance(empty, SparseRows) and not empty.any():
        del columns["val_mask"]
    return columns, of_edges


def _sparse_features(arrays: Mapping[str, Array]) -> SparseRows:
    values = arrays["feat_data"]
    return SparseRows(
        indptr=arrays["feat_indptr"].astype(np.int64),
        indices=arrays["feat_indices"].astype(np.int32, copy=False),
        # Counts and flags are stored small; a model multiplies floats.
        values=values if values.dtype.kind == "f" else values.astype(np.float32),
        num_columns=int(arrays["feat_dim"]),
    )


def _by_relation(
    source_ids: Array,
    destination_ids: Array,
    columns: Mapping[str, Array],
    relation: Array,
    names: Array | None,
    where: str,
) -> tuple[dict[EdgeType, tuple[Array, Array]], dict[EdgeType, dict[str, Array]]]:
    relation = _ids(relation, "rel or etype", where)
    if names is None:
        names = np.array([f"r{code}" for code in range(int(relation.max(initial=-1)) + 1)])
    check_ids(relation, len(names), "rel or etype", where, what="relation")
    _same_length(source_ids, relation, "relations", where)
    # One stable sort puts each relation's edges together without changing their order.
    order = np.argsort(relation, kind="stable")
    first = np.searchsorted(relation[order], np.arange(len(names) + 1))
    edges, edge_data = {}, {}
    for code, name in enumerate(_short_names([str(name) for name in names])):
        rows = order[first[code] : first[code + 1]]
        if len(rows):
            edge_type = (NODE_TYPE, name, NODE_TYPE)
            edges[edge_type] = (source_ids[rows], destination_ids[rows])
            # A split may have no triple of a rare relation; the mask is absent there.
            pieces = {key: column[rows] for key, column in columns.items()}
            edge_data[edge_type] = {
                key: piece for key, piece in pieces.items() if not key.endswith("_mask") or piece.any()
            }
    return edges, edge_data


def _ids(array: Array, name: str, where: str) -> Array:
    """Return an array of ids as int32 or int64 in the machine's byte order, which compiled loops need."""
    check_whole(array, name, where)
    if array.dtype in (np.int32, np.int64):
        return array
    return array.astype(np.int32 if array.itemsize < 4 else np.int64)


def _same_length(source_ids: Array, others: Array, what: str, where: str) -> None:
    if len(source_ids) != len(others):
        raise DatasetError(f"{where}: {len(source_ids)} edges but {len(others)} {what} of edges")


def _short_names(names: list[str]) -> list[str]:
    """Return names that files can carry: the last piece of an IRI where that is unique, else all of it."""
    tails = [re.split(r"[#/]", name.strip("<>").rstrip("#/"))[-1] for name in names]
    times = Counter(tails)
    chosen = [tail if times[tail] == 1 else name.strip("<>") for tail, name in zip(tails, names, strict=True)]
    clean = [re.sub(r"[^0-9A-Za-z_-]", "_", name) or "_" for name in chosen]
    if len(set(clean)) == len(clean):
        return clean
    return [f"{name}_{code}" for code, name in enumerate(clean)]
