"""DGL's partition files -> a dataset of our format, with DGL's ids."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dgl
import numpy as np
import torch
from dgl.data.utils import load_tensors

from dglx_dist.errors import StorageError
from dglx_dist.progress import progress
from dglx_dist.records import EDGE_TYPE, LABEL, NODE_TYPE, Array, Assignment, EdgeType, RawGraph
from dglx_dist.storage.dgl_ids import IdLine
from dglx_dist.storage.fields import Fields
from dglx_dist.storage.manifest import Manifest
from dglx_dist.storage.writer import write_dataset


def import_dgl_format(part_config: Path, folder: Path, *, overwrite: bool = False) -> Manifest:
    """Write a partitioned dataset from the files of DGL's ``partition_graph``.

    Parts and node ids stay: new ids are DGL's per-type global ids. Edge ids follow our order;
    ``original_edge_ids`` are DGL's per-type global edge ids. Ids of ``orig_nids.dgl``, where it lies beside
    ``graph.dgl``, become the user's ids. DGL keeps booleans as uint8, so uint8 columns named ``*mask`` are
    taken for booleans. The whole graph is held in memory. Called by one process.

    Args:
        part_config: DGL's JSON file.
        folder: Where the dataset goes; as for ``write_dataset``.
        overwrite: Replace the dataset that is there.

    Raises:
        StorageError: a file is missing or damaged, or the parts are of a kind that cannot be read.
    """
    config = read_part_config(Path(part_config).absolute())
    collected = _Collected(config)
    with progress("Reading DGL's parts", config.num_parts) as advance:
        for part in range(config.num_parts):
            collected.add_part(part)
            advance(1)
    assignment = Assignment(
        num_parts=config.num_parts,
        part_of={
            ntype: np.repeat(np.arange(config.num_parts, dtype=np.int32), config.nodes.counts[kind])
            for kind, ntype in enumerate(config.ntypes)
        },
        method=config.method,
        seed=0,
        parameters={"imported_from": "dgl"},
    )
    return write_dataset(
        collected.graph(), assignment, folder, overwrite=overwrite, bfloat16=collected.bfloat16
    )


@dataclass(frozen=True, kw_only=True)
class PartConfig:
    """What DGL's JSON file says, checked."""

    path: Path
    name: str
    method: str
    num_parts: int
    ntypes: list[str]
    etypes: list[EdgeType]
    nodes: IdLine
    edges: IdLine
    files: list[Mapping[str, object]]

    def file(self, part: int, kind: str) -> Path:
        """Return the path of one of a part's files."""
        name = self.files[part].get(kind)
        if not isinstance(name, str):
            raise StorageError(
                f"{self.path}: key 'part-{part}.{kind}' is {name!r}, expected a file name; "
                f"parts saved for GraphBolt only cannot be read, partition again without it"
            )
        return self.path.parent / name


def read_part_config(path: Path) -> PartConfig:
    """Read DGL's JSON file.

    Raises:
        StorageError: it is missing, or not of that kind.
    """
    try:
        top = Fields(json.loads(path.read_bytes()), str(path))
    except OSError as problem:
        raise StorageError(f"{path} cannot be read ({problem.strerror})") from problem
    except ValueError as problem:
        raise StorageError(f"{path} is not JSON ({problem})") from problem
    num_parts = top.integer("num_parts", at_least=1)
    ntypes = _numbered(top, "ntypes", NODE_TYPE)
    etypes = _numbered(top, "etypes", ":".join(EDGE_TYPE))
    return PartConfig(
        path=path,
        name=top.text("graph_name"),
        method=top.text("part_method") if "part_method" in top.keys() else "dgl",  # noqa: SIM118  # no mapping
        num_parts=num_parts,
        ntypes=ntypes,
        etypes=[_edge_type(name, path) for name in etypes],
        nodes=_line(top, "node_map", ntypes, num_parts),
        edges=_line(top, "edge_map", etypes, num_parts),
        files=[top.mapping(f"part-{part}") for part in range(num_parts)],
    )


def _numbered(top: Fields, key: str, default: str) -> list[str]:
    if key not in top.keys():  # noqa: SIM118  # a method of Fields, not a mapping
        return [default]
    numbers = top.record(key)
    names = sorted(numbers.keys(), key=numbers.integer)
    if [numbers.integer(name) for name in names] != list(range(len(names))):
        raise top.wrong(key, "the numbers 0, 1, 2, ...")
    return names


def _edge_type(name: str, path: Path) -> EdgeType:
    pieces = name.split(":")
    if len(pieces) != 3:
        raise StorageError(
            f"{path}: the edge type {name!r} is not of the form source:relation:destination; "
            f"convert the file with DGL's tools/change_etype_to_canonical_etype.py"
        )
    return pieces[0], pieces[1], pieces[2]


def _line(top: Fields, key: str, names: Sequence[str], num_parts: int) -> IdLine:
    """Return the id ranges of one map; ``ranges[t][p]`` is [first, end), or the end alone in old files."""
    expected = (
        f"{num_parts} ranges for each of {', '.join(names)}, growing from part to part and type to type"
    )
    value: object = top.mapping(key) if len(names) > 1 else _only(top, key, names[0])
    lists = [value.get(name) for name in names] if isinstance(value, Mapping) else [value]
    try:
        array = np.array(lists, dtype=np.int64)
    except (TypeError, ValueError) as problem:
        raise top.wrong(key, expected) from problem
    if array.shape == (1, num_parts):
        array = np.stack([np.concatenate([array[:, :1] * 0, array[:, :-1]], axis=1), array], axis=-1)
    if array.shape != (len(names), num_parts, 2):
        raise top.wrong(key, expected)
    counts = array[..., 1] - array[..., 0]
    offsets = np.pad(np.cumsum(counts, axis=1), ((0, 0), (1, 0)))
    line = IdLine.of_offsets(list(offsets))
    if (counts < 0).any() or not np.array_equal(line.starts, array[..., 0]):
        raise top.wrong(key, expected)
    return line


def _only(top: Fields, key: str, name: str) -> object:
    """Return the ranges of the only type, which old files do not name."""
    value = top.value(key)
    return value.get(name) if isinstance(value, Mapping) else value


class _Collected:
    """The whole graph under DGL's per-type ids, filled part by part."""

    def __init__(self, config: PartConfig) -> None:
        self._config = config
        self._ends = [np.full((2, int(count)), -1, np.int64) for count in config.edges.counts.sum(axis=1)]
        self._columns: tuple[dict[tuple[int, str], Array], dict[tuple[int, str], Array]] = ({}, {})
        self._user_ids: dict[int, Array] = {}
        self.bfloat16: list[tuple[str | EdgeType, str]] = []

    def add_part(self, part: int) -> None:
        """Read one part.

        Raises:
            StorageError: naming the file that is missing, damaged, or does not fit the JSON file.
        """
        config = self._config
        path = config.file(part, "part_graph")
        structure = _load(path, lambda name: dgl.load_graphs(name)[0][0])
        for data, name in (
            *((structure.ndata, name) for name in (dgl.NID, "inner_node")),
            *((structure.edata, name) for name in (dgl.EID, "inner_edge")),
        ):
            if name not in data:
                raise StorageError(f"{path} has no {name!r} of its nodes or edges; it is no part of DGL's")
        nodes, edges = structure.ndata[dgl.NID].numpy(), structure.edata[dgl.EID].numpy()
        inner_nodes = structure.ndata["inner_node"].numpy() == 1
        # Only edges into owned nodes are whole in a part.
        inner_edges = structure.edata["inner_edge"].numpy() == 1
        _check_ids(nodes[inner_nodes], config.nodes.part_range(part), "nodes", path)
        _check_ids(edges[inner_edges], config.edges.part_range(part), "edges", path)
        source, destination = (end.numpy()[inner_edges] for end in structure.edges(order="eid"))
        self._add_edges(edges[inner_edges], nodes[source], nodes[destination], path)
        node_types = {name: kind for kind, name in enumerate(config.ntypes)}
        edge_types = {":".join(name): kind for kind, name in enumerate(config.etypes)}
        self._add_columns(0, config.file(part, "node_feats"), node_types, nodes[inner_nodes])
        self._add_columns(1, config.file(part, "edge_feats"), edge_types, edges[inner_edges])
        self._add_user_ids(path.with_name("orig_nids.dgl"), part)

    def graph(self) -> RawGraph:
        """Return the whole graph."""
        config = self._config
        node_data: dict[str, dict[str, Array]] = {}
        edge_data: dict[EdgeType, dict[str, Array]] = {}
        for (kind, name), column in self._columns[0].items():
            node_data.setdefault(config.ntypes[kind], {})[name] = column
        for (kind, name), column in self._columns[1].items():
            edge_data.setdefault(config.etypes[kind], {})[name] = column
        return RawGraph(
            name=config.name,
            num_nodes={
                ntype: int(config.nodes.counts[kind].sum()) for kind, ntype in enumerate(config.ntypes)
            },
            edges={
                etype: (self._ends[kind][0], self._ends[kind][1]) for kind, etype in enumerate(config.etypes)
            },
            node_data=node_data,
            edge_data=edge_data,
            num_classes={
                ntype: int(columns[LABEL].max(initial=-1)) + 1
                for ntype, columns in node_data.items()
                if LABEL in columns and columns[LABEL].ndim == 1 and columns[LABEL].dtype.kind in "iu"
            },
            user_ids={config.ntypes[kind]: ids for kind, ids in self._user_ids.items()},
        )

    def _add_edges(self, ids: Array, sources: Array, destinations: Array, path: Path) -> None:
        config = self._config
        kinds, typed = config.edges.to_typed(ids)
        source_kinds, sources = config.nodes.to_typed(sources)
        destination_kinds, destinations = config.nodes.to_typed(destinations)
        for kind, etype in enumerate(config.etypes):
            chosen = kinds == kind
            ends = (etype[0], source_kinds), (etype[2], destination_kinds)
            if any((found[chosen] != config.ntypes.index(ntype)).any() for ntype, found in ends):
                raise StorageError(f"{path} has edges of type {etype} between nodes of other types")
            self._ends[kind][:, typed[chosen]] = sources[chosen], destinations[chosen]

    def _add_columns(self, which: int, path: Path, types: Mapping[str, int], ids: Array) -> None:
        line = self._config.edges if which else self._config.nodes
        kinds, typed = line.to_typed(ids)
        for kind, name, tensor in _named(_load(path, load_tensors), types, path):
            chosen = typed[kinds == kind]
            if len(tensor) != len(chosen):
                raise StorageError(f"{path}: {name!r} has {len(tensor)} rows for {len(chosen)} owned ids")
            rows = self._as_array(which, kind, name, tensor)
            total = int(line.counts[kind].sum())
            column = self._columns[which].setdefault(
                (kind, name), np.zeros((total, *rows.shape[1:]), rows.dtype)
            )
            if column.shape[1:] != rows.shape[1:] or column.dtype != rows.dtype:
                raise StorageError(f"{path}: {name!r} has another shape or dtype than in the other parts")
            column[chosen] = rows

    def _as_array(self, which: int, kind: int, name: str, tensor: torch.Tensor) -> Array:
        if tensor.dtype == torch.bfloat16:
            owner: str | EdgeType = self._config.etypes[kind] if which else self._config.ntypes[kind]
            self.bfloat16.append((owner, name))
            return tensor.view(torch.int16).numpy().view(np.uint16)
        array: Array = tensor.numpy()
        if array.dtype == np.uint8 and array.ndim == 1 and name.endswith("mask"):
            return array != 0
        return array

    def _add_user_ids(self, path: Path, part: int) -> None:
        if not path.exists():
            return
        nodes = self._config.nodes
        for name, ids in _load(path, load_tensors).items():
            if (
                name not in self._config.ntypes
                or len(ids) != nodes.counts[self._config.ntypes.index(name), part]
            ):
                raise StorageError(f"{path}: {len(ids)} original ids of {name!r} do not fit the part")
            kind = self._config.ntypes.index(name)
            column = self._user_ids.setdefault(kind, np.zeros(int(nodes.counts[kind].sum()), np.int64))
            column[nodes.offsets[kind, part] : nodes.offsets[kind, part + 1]] = ids.numpy()


def _load(path: Path, read: Callable[[str], Any]) -> Any:
    # DGL aborts the process on some paths that do not exist.
    if not path.is_file():
        raise StorageError(f"{path} is missing; copy it here or partition the graph again")
    try:
        return read(str(path))
    except (dgl.DGLError, ValueError, RuntimeError) as problem:
        raise StorageError(f"{path} cannot be read by DGL ({problem}); copy it again") from problem


def _named(
    tensors: Mapping[str, torch.Tensor], types: Mapping[str, int], path: Path
) -> Iterator[tuple[int, str, torch.Tensor]]:
    """Yield (type number, column, tensor) of the keys ``type/column``; old files leave out the only type."""
    for key, tensor in tensors.items():
        owner, slash, name = key.partition("/")
        if not slash and len(types) == 1:
            yield 0, key, tensor
        elif owner in types:
            yield types[owner], name, tensor
        else:
            raise StorageError(f"{path}: {key!r} names none of the types {', '.join(types)}")


def _check_ids(ids: Array, expected: tuple[int, int], what: str, path: Path) -> None:
    if not np.array_equal(np.sort(ids), np.arange(*expected)):
        raise StorageError(
            f"{path} owns {len(ids)} {what}, but the JSON file says {expected[0]}..{expected[1] - 1}; "
            f"its files are not of one partitioning"
        )
