"""Reading and writing DGL's partition files."""

import json
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import dgl
import numpy as np
import torch
from dgl.data.utils import save_tensors

from dglx_dist.data.dgl_files import DglFile, check_files, load_graphs, load_tensors
from dglx_dist.data.json_fields import Fields
from dglx_dist.data.storage.columns import numpy_dtype, safe_name
from dglx_dist.data.storage.files import name_write_failures, partial_folder, read_small_file
from dglx_dist.data.storage.manifest import Manifest, check_target, put_in_place
from dglx_dist.data.storage.writer import (
    CHUNK_BYTES,
    EdgeOrder,
    FeatureDtype,
    NodeOrder,
    check_feature_dtype,
    narrow,
    relabel_edges,
    relabel_nodes,
    resolve_dtypes,
    rows_of,
    take_rows,
    write_dataset,
)
from dglx_dist.errors import ConfigError, StorageError
from dglx_dist.progress import progress
from dglx_dist.records import (
    EDGE_TYPE,
    LABEL,
    NODE_TYPE,
    Array,
    Assignment,
    EdgeType,
    IdRanges,
    NodeColumn,
    RawGraph,
    format_type,
)

_LOG = logging.getLogger(__name__)
_ORIGINAL_IDS = "orig_nids.dgl"
K = TypeVar("K", bound=str | EdgeType)


def import_dgl_format(part_config: Path, folder: Path, *, overwrite: bool = False) -> Manifest:
    """Write a dataset from the files of DGL's ``partition_graph``. One process calls it.

    Parts and node ids are the same as DGL's per-type global ids. Edges get new ids, and ``original_edge_ids``
    are DGL's per-type global edge ids. Ids in ``orig_nids.dgl`` become user ids. DGL stores booleans as
    uint8, so uint8 columns named ``*mask`` become booleans. The whole graph must fit in memory. Raises
    StorageError if a file is missing, damaged or of an unsupported kind.
    """
    config = read_part_config(Path(part_config).absolute())
    check_files(file for part in range(config.num_parts) for file in config.dgl_files(part))
    collected = _DglReader(config)
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
    """Checked content of DGL's JSON file."""

    path: Path
    name: str
    method: str
    num_parts: int
    ntypes: list[str]
    etypes: list[EdgeType]
    nodes: IdRanges
    edges: IdRanges
    files: list[Mapping[str, object]]

    def file(self, part: int, kind: str) -> Path:
        name = self.files[part].get(kind)
        if not isinstance(name, str):
            raise StorageError(
                f"{self.path}: key 'part-{part}.{kind}' is {name!r}, expected a file name; parts that were "
                "saved for GraphBolt only cannot be read, so partition again without it"
            )
        return self.path.parent / name

    def dgl_files(self, part: int) -> list[DglFile]:
        """Return the files of a part, for :func:`check_files`."""
        structure = self.file(part, "part_graph")
        tensors = [self.file(part, kind) for kind in ("node_feats", "edge_feats")]
        tensors += [path for path in [structure.with_name(_ORIGINAL_IDS)] if path.exists()]
        return [("graphs", structure), *(("tensors", path) for path in tensors)]


def read_part_config(path: Path) -> PartConfig:
    """Read DGL's JSON file. Raise StorageError if it is missing or not DGL's."""
    try:
        raw = read_small_file(path)
    except OSError as problem:
        raise StorageError(f"{path} cannot be read ({problem.strerror})") from problem

    top = Fields.parse(raw, str(path), error=StorageError)
    num_parts = top.integer("num_parts", 1)
    ntypes = _read_numbered(top, "ntypes", NODE_TYPE)
    etypes = _read_numbered(top, "etypes", ":".join(EDGE_TYPE))
    return PartConfig(
        path=path,
        name=top.text("graph_name"),
        method=top.optional("part_method", top.text, "dgl"),
        num_parts=num_parts,
        ntypes=ntypes,
        etypes=[_parse_edge_type(name, path) for name in etypes],
        nodes=_read_id_ranges(top, "node_map", ntypes, num_parts),
        edges=_read_id_ranges(top, "edge_map", etypes, num_parts),
        files=[top.nested_fields(f"part-{part}").mapping for part in range(num_parts)],
    )


def _read_numbered(top: Fields, key: str, default: str) -> list[str]:
    if not top.has(key):
        return [default]
    numbers = top.nested_fields(key)
    names = sorted(numbers.mapping, key=numbers.integer)
    if [numbers.integer(name) for name in names] != list(range(len(names))):
        raise top.field_error(key, "the numbers 0, 1, 2, ...")
    return names


def _parse_edge_type(name: str, path: Path) -> EdgeType:
    pieces = name.split(":")
    if len(pieces) != 3:
        raise StorageError(
            f"{path}: the edge type {name!r} is not of the form source:relation:destination; "
            f"convert the file with DGL's tools/change_etype_to_canonical_etype.py"
        )
    return pieces[0], pieces[1], pieces[2]


def _read_id_ranges(top: Fields, key: str, names: Sequence[str], num_parts: int) -> IdRanges:
    # The entry of a part is [first, end), or only the end in old files.
    expected = f"{num_parts} ranges for each of {', '.join(names)}, growing by part and type"
    ranges_by_name = top.raw_value(key)

    # Old files with one type do not name it.
    named_ranges = (
        {names[0]: ranges_by_name}
        if len(names) == 1 and isinstance(ranges_by_name, list)
        else top.nested_fields(key).mapping
    )
    try:
        array = np.array([named_ranges.get(name) for name in names], dtype=np.int64)
    except (TypeError, ValueError, OverflowError) as problem:
        raise top.field_error(key, expected) from problem

    if array.shape == (1, num_parts):
        array = np.stack([np.pad(array[:, :-1], ((0, 0), (1, 0))), array], axis=-1)
    if array.shape != (len(names), num_parts, 2):
        raise top.field_error(key, expected)
    counts = array[..., 1] - array[..., 0]
    offsets = np.pad(np.cumsum(counts, axis=1), ((0, 0), (1, 0)))
    ranges = IdRanges.from_offsets(list(offsets))
    if (counts < 0).any() or not np.array_equal(ranges.starts, array[..., 0]):
        raise top.field_error(key, expected)
    return ranges


class _DglReader:
    def __init__(self, config: PartConfig) -> None:
        self._config = config
        self._ends = [np.full((2, int(count)), -1, np.int64) for count in config.edges.counts.sum(axis=1)]
        self._node_data: dict[str, dict[str, Array]] = {ntype: {} for ntype in config.ntypes}
        self._edge_data: dict[EdgeType, dict[str, Array]] = {etype: {} for etype in config.etypes}
        self._user_ids: dict[str, Array] = {}
        self.bfloat16: list[tuple[str | EdgeType, str]] = []

    def add_part(self, part: int) -> None:
        config = self._config
        path = config.file(part, "part_graph")
        structure = load_graphs(path)[0]
        missing = {dgl.NID, "inner_node"} - {*structure.ndata} | {dgl.EID, "inner_edge"} - {*structure.edata}
        if missing:
            raise StorageError(
                f"{path} has no {min(missing)!r} for its nodes or edges, so it is not a part written by DGL"
            )

        nodes = structure.ndata[dgl.NID].numpy()
        edges = structure.edata[dgl.EID].numpy()
        inner_nodes = structure.ndata["inner_node"].numpy() == 1

        # A part only has the data of edges into owned nodes.
        inner_edges = structure.edata["inner_edge"].numpy() == 1
        _check_ids(nodes[inner_nodes], config.nodes.part_range(part), "nodes", path)
        _check_ids(edges[inner_edges], config.edges.part_range(part), "edges", path)
        if len(nodes) and not 0 <= nodes.min() <= nodes.max() < config.nodes.counts.sum():
            raise StorageError(f"{path} has nodes that the graph lacks; copy it or partition again")
        source, destination = (end.numpy()[inner_edges] for end in structure.edges(order="eid"))
        self._add_edges(edges[inner_edges], nodes[source], nodes[destination], path)
        self._add_columns(self._node_data, config.file(part, "node_feats"), config.nodes, nodes[inner_nodes])
        self._add_columns(self._edge_data, config.file(part, "edge_feats"), config.edges, edges[inner_edges])
        self._add_user_ids(path.with_name(_ORIGINAL_IDS), part)

    def graph(self) -> RawGraph:
        config = self._config
        counts = config.nodes.counts.sum(axis=1).tolist()
        return RawGraph(
            name=config.name,
            num_nodes=dict(zip(config.ntypes, counts, strict=True)),
            edges={etype: (ends[0], ends[1]) for etype, ends in zip(config.etypes, self._ends, strict=True)},
            node_data=self._node_data,
            edge_data=self._edge_data,
            num_classes={
                ntype: int(columns[LABEL].max(initial=-1)) + 1
                for ntype, columns in self._node_data.items()
                if LABEL in columns and columns[LABEL].ndim == 1 and columns[LABEL].dtype.kind in "iu"
            },
            user_ids=self._user_ids,
        )

    def _add_edges(self, ids: Array, sources: Array, destinations: Array, path: Path) -> None:
        config = self._config
        kinds, ids_of_type = config.edges.to_typed(ids)
        source_kinds, sources = config.nodes.to_typed(sources)
        target_kinds, destinations = config.nodes.to_typed(destinations)
        for kind, etype in enumerate(config.etypes):
            is_of_type = kinds == kind
            for ntype, end_kinds in ((etype[0], source_kinds), (etype[2], target_kinds)):
                if (end_kinds[is_of_type] != config.ntypes.index(ntype)).any():
                    raise StorageError(f"{path} has edges of type {etype} between nodes of other types")
            self._ends[kind][:, ids_of_type[is_of_type]] = sources[is_of_type], destinations[is_of_type]

    def _add_columns(self, data: dict[K, dict[str, Array]], path: Path, ranges: IdRanges, ids: Array) -> None:
        owners = {format_type(kind_name): kind_name for kind_name in data}
        kinds, ids_of_type = ranges.to_typed(ids)
        for key, tensor in load_tensors(path).items():
            # Keys are type/column. Old files with one type leave it out.
            type_name, slash, name = key.partition("/")
            if not slash and len(owners) == 1:
                type_name = next(iter(owners))
                name = key
            if type_name not in owners:
                raise StorageError(f"{path}: {key!r} names none of the types {', '.join(owners)}")
            owner = owners[type_name]
            kind = list(owners).index(type_name)
            owned_ids = ids_of_type[kinds == kind]
            if len(tensor) != len(owned_ids):
                raise StorageError(f"{path}: {name!r} has {len(tensor)} rows for {len(owned_ids)} owned ids")
            rows = self._as_array(owner, name, tensor)
            total = int(ranges.counts[kind].sum())
            column = data[owner].setdefault(name, np.zeros((total, *rows.shape[1:]), rows.dtype))
            if column.shape[1:] != rows.shape[1:] or column.dtype != rows.dtype:
                raise StorageError(f"{path}: {name!r} has another shape or dtype than in the other parts")
            column[owned_ids] = rows

    def _as_array(self, owner: str | EdgeType, name: str, tensor: torch.Tensor) -> Array:
        if tensor.dtype == torch.bfloat16:
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
        for name, ids in load_tensors(path).items():
            kind = self._config.ntypes.index(name) if name in self._config.ntypes else None
            if kind is None or len(ids) != nodes.counts[kind, part]:
                raise StorageError(f"{path}: {len(ids)} original ids of {name!r} do not fit the part")
            column = self._user_ids.setdefault(name, np.zeros(int(nodes.counts[kind].sum()), np.int64))
            column[nodes.offsets[kind, part] : nodes.offsets[kind, part + 1]] = ids.numpy()


def _check_ids(ids: Array, expected: tuple[int, int], kind: str, path: Path) -> None:
    if not np.array_equal(np.sort(ids), np.arange(*expected)):
        raise StorageError(
            f"{path} owns {len(ids)} {kind}, but the JSON file says {expected[0]}..{expected[1] - 1}; "
            f"its files are not of one partitioning"
        )


_FILES = {"node_feats": "node_feat.dgl", "edge_feats": "edge_feat.dgl", "part_graph": "graph.dgl"}


def write_dgl_format(
    graph: RawGraph,
    assignment: Assignment,
    folder: Path,
    *,
    bfloat16: Collection[tuple[str | EdgeType, str]] = (),
    feature_dtype: FeatureDtype | None = None,
    formats: str | Sequence[str] | None = None,
) -> Path:
    """Write ``<folder>/<graph name>.json`` and ``part<p>/`` like DGL's ``partition_graph``.

    One process calls it. The features of one part at a time are in memory. Each part holds its nodes first,
    then the halo. DGL's per-type ids are the new ids of a dataset with the same arguments. Booleans become
    uint8, which DGL's files can hold. ``orig_nids.dgl`` and ``orig_eids.dgl`` hold the ids of the source. In
    a single part, edges keep these ids, as with DGL.

    Args:
        formats: Formats of the structure: ``coo`` (default), ``csc`` and ``csr``. For the other arguments see
            :func:`write_dataset`.

    Returns:
        Path of the JSON file, DGL's ``part_config``.

    Raises:
        ConfigError: graph and assignment do not match, or DGL's files cannot hold a value or a name.
        StorageError: ``folder`` is not empty, or cannot be written.
    """
    folder = Path(folder).absolute()
    check_target(folder, overwrite=None)
    _check_names(graph)
    check_feature_dtype(feature_dtype, graph)
    graph = _in_source_order(graph)
    of_types: dict[Any, Mapping[str, NodeColumn]] = {**graph.node_data, **graph.edge_data}
    dtypes = {kind: resolve_dtypes(columns, feature_dtype) for kind, columns in of_types.items()}
    writer = _DglWriter(graph, relabel_nodes(graph, assignment), frozenset(bfloat16), dtypes, formats)
    config = f"{safe_name(graph.name)}.json"
    with (
        name_write_failures(folder),
        partial_folder(folder) as partial,
        progress("Writing DGL's format", assignment.num_parts) as advance,
    ):
        for part in range(assignment.num_parts):
            writer.write_part(part, partial / f"part{part}")
            advance(1)
        (partial / config).write_text(json.dumps(writer.config(assignment), indent=4))
        put_in_place(partial, folder, overwrite=None)

    return folder / config


def _in_source_order(graph: RawGraph) -> RawGraph:
    orders = {etype: np.argsort(ids) for etype, ids in graph.edge_ids.items()}
    edges = {etype: (graph.edges[etype][0][o], graph.edges[etype][1][o]) for etype, o in orders.items()}
    data = {
        etype: {name: rows[o] for name, rows in graph.edge_data.get(etype, {}).items()}
        for etype, o in orders.items()
    }
    return replace(graph, edges={**graph.edges, **edges}, edge_data={**graph.edge_data, **data}, edge_ids={})


def part_structure(nodes: IdRanges, edges: IdRanges, part: int, ends: tuple[Array, Array]) -> dgl.DGLGraph:
    """Return the graph of a part like DGL's, with its nodes, then the halo, and columns like ``dgl.NID``.

    ``ends`` are the homogeneous (sources, destinations) of the in-edges of its nodes, in the order of their
    ids.
    """
    first, last = nodes.part_range(part)
    source, destination = ends
    owned = (source >= first) & (source < last)
    halo = np.unique(source[~owned])
    local_sources = np.where(owned, source - first, (last - first) + np.searchsorted(halo, source))
    global_ids = np.concatenate([np.arange(first, last), halo])
    kinds, owners = nodes.locate(global_ids)
    local_ends = torch.from_numpy(local_sources), torch.from_numpy(destination - first)
    structure = dgl.graph(local_ends, num_nodes=len(global_ids))
    structure.ndata[dgl.NID] = _convert_ids(global_ids)
    structure.ndata["part_id"] = _convert_ids(owners)
    structure.ndata["inner_node"] = torch.from_numpy((owners == part).astype(np.uint8))
    edge_ids = np.arange(*edges.part_range(part))
    structure.edata[dgl.EID] = _convert_ids(edge_ids)
    structure.edata["inner_edge"] = torch.ones(len(edge_ids), dtype=torch.uint8)

    if len(nodes.starts) > 1 or len(edges.starts) > 1:
        structure.ndata[dgl.NTYPE] = torch.from_numpy(kinds.astype(np.int32))
        edge_kinds, _ = edges.locate(edge_ids)
        structure.edata[dgl.ETYPE] = torch.from_numpy(edge_kinds.astype(np.int32))

    return structure


class _DglWriter:
    def __init__(
        self,
        graph: RawGraph,
        nodes: Mapping[str, NodeOrder],
        bfloat16: Collection[tuple[str | EdgeType, str]],
        dtypes: Mapping[str | EdgeType, Mapping[str, str]],
        formats: str | Sequence[str] | None,
    ) -> None:
        self._graph, self._formats = graph, formats
        self._nodes = nodes
        self._bfloat16, self._dtypes = bfloat16, dtypes
        self._ntypes = list(graph.num_nodes)
        self._edges: dict[EdgeType, EdgeOrder] = {
            etype: relabel_edges(graph, etype, nodes[etype[0]], nodes[etype[2]]) for etype in graph.edges
        }
        self._node_ranges = IdRanges.from_offsets([order.offsets for order in nodes.values()])
        self._edge_ranges = IdRanges.from_offsets([order.offsets for order in self._edges.values()])
        self._renumbers = max(len(order.offsets) for order in nodes.values()) > 2

    def write_part(self, part: int, folder: Path) -> None:
        folder.mkdir()
        structure = part_structure(self._node_ranges, self._edge_ranges, part, self._find_ends(part))
        dgl.save_graphs(str(folder / _FILES["part_graph"]), [structure], formats=self._formats)
        node_rows = {ntype: rows_of(order, part) for ntype, order in self._nodes.items()}
        edge_rows = {
            etype: rows_of(order, part) if self._renumbers else np.arange(len(order.indices))
            for etype, order in self._edges.items()
        }
        self._save_rows(folder, "node_feats", _ORIGINAL_IDS, node_rows, self._graph.node_data)
        self._save_rows(folder, "edge_feats", "orig_eids.dgl", edge_rows, self._graph.edge_data)

    def _save_rows(
        self,
        folder: Path,
        kind: str,
        ids: str,
        rows_of: Mapping[K, Array],
        data: Mapping[K, Mapping[str, NodeColumn]],
    ) -> None:
        columns = {
            f"{_name(owner)}/{name}": self._make_tensor((owner, name), column, rows)
            for owner, rows in rows_of.items()
            for name, column in data.get(owner, {}).items()
        }
        save_tensors(str(folder / _FILES[kind]), columns)
        save_tensors(str(folder / ids), {_name(owner): _convert_ids(rows) for owner, rows in rows_of.items()})

    def config(self, assignment: Assignment) -> dict[str, object]:
        etypes = [_name(etype) for etype in self._edges]
        parts = {
            f"part-{part}": {kind: f"part{part}/{name}" for kind, name in _FILES.items()}
            for part in range(assignment.num_parts)
        }
        return {
            "graph_name": self._graph.name,
            "num_nodes": self._graph.total_nodes,
            "num_edges": self._graph.total_edges,
            "part_method": assignment.method,
            "num_parts": assignment.num_parts,
            "halo_hops": 1,
            "node_map": ranges_by_type(self._ntypes, self._node_ranges),
            "edge_map": ranges_by_type(etypes, self._edge_ranges),
            "ntypes": {name: number for number, name in enumerate(self._ntypes)},
            "etypes": {name: number for number, name in enumerate(etypes)},
            **parts,
        }

    def _find_ends(self, part: int) -> tuple[Array, Array]:
        sources = [np.empty(0, np.int64)]
        destinations = [np.empty(0, np.int64)]
        for etype, order in self._edges.items():
            nodes = self._nodes[etype[2]].offsets
            kind = self._ntypes.index(etype[2])
            degrees = np.diff(order.indptr[nodes[part] : nodes[part + 1] + 1])
            first = self._node_ranges.starts[kind, part]
            destinations.append(np.repeat(first + np.arange(len(degrees)), degrees))
            indices = order.indices[order.offsets[part] : order.offsets[part + 1]]
            sources.append(self._node_ranges.from_typed(self._ntypes.index(etype[0]), indices))

            if not self._renumbers:
                by_source_id = np.argsort(rows_of(order, part))
                sources[-1] = sources[-1][by_source_id]
                destinations[-1] = destinations[-1][by_source_id]

        return np.concatenate(sources), np.concatenate(destinations)

    def _make_tensor(
        self, column: tuple[str | EdgeType, str], values: NodeColumn, rows: Array
    ) -> torch.Tensor:
        kind, name = column
        dtype = self._dtypes[kind].get(name, values.dtype.name)
        if dtype == values.dtype.name:
            array = take_rows(values, rows)
        else:
            array = np.empty((len(rows), *values.shape[1:]), numpy_dtype(dtype))
            step = max(CHUNK_BYTES // max(array[:1].nbytes, 1), 1)
            for first in range(0, len(rows), step):
                chunk = rows[first : first + step]
                description = f"{name!r} of {kind!r}"
                array[first : first + step] = narrow(take_rows(values, chunk), dtype, description, chunk)

        if column in self._bfloat16 or dtype == "bfloat16":
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        if array.dtype == np.bool_:
            array = array.view(np.uint8)
        try:
            return torch.from_numpy(np.ascontiguousarray(array))
        except (TypeError, ValueError) as problem:
            raise ConfigError(f"{kind}/{name} is {array.dtype}, which DGL's files cannot hold") from problem


def _convert_ids(ids: Array) -> torch.Tensor:
    return torch.from_numpy(ids.astype(np.int64))


def ranges_by_type(types: Sequence[K], ranges: IdRanges) -> dict[K, list[list[int]]]:
    """Return the (P, 2) homogeneous ranges by type, as in DGL's JSON file and its partition books."""
    ends = ranges.starts + ranges.counts
    return dict(zip(types, np.stack([ranges.starts, ends], axis=-1).tolist(), strict=True))


def _check_names(graph: RawGraph) -> None:
    if not graph.edges:
        raise ConfigError("the graph has no edge type; DGL's files need one")
    for name in graph.num_nodes:
        if ":" in name or "/" in name:
            raise ConfigError(f"DGL's files cannot hold the type name {name!r}, which has a ':' or a '/'")
    if changed := [etype[1] for etype in graph.edges if _name(etype) != format_type(etype)]:
        examples = f"{len(changed)}, such as {', '.join(changed[:3])}"
        _LOG.warning("relations are %%-encoded, as '/' and ':' separate DGL's names: %s", examples)


def _name(kind: str | EdgeType) -> str:
    if isinstance(kind, str):
        return kind
    relation = re.sub("[%/:]", lambda match: f"%{ord(match[0]):02X}", kind[1])
    return format_type((kind[0], relation, kind[2]))
