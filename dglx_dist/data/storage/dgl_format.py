"""Read and write DGL's partition files."""

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
    """Convert files from DGL's ``partition_graph`` to a dataset. One process calls this.

    Parts stay the same, and node ids equal DGL's per-type global ids. Edges get new ids, and
    ``original_edge_ids`` are DGL's per-type global edge ids. Ids in ``orig_nids.dgl`` become user ids. DGL
    stores booleans as uint8, so uint8 columns named ``*mask`` become booleans. The whole graph must fit in
    memory. Raises StorageError if a file is missing, damaged or in an unsupported format.
    """
    config = read_part_config(Path(part_config).absolute())
    num_parts = config.num_parts
    check_files(file for part in range(num_parts) for file in config.dgl_files(part))
    reader = _DglReader(config)
    with progress("Reading DGL's parts", num_parts) as advance:
        for part in range(num_parts):
            reader.add_part(part)
            advance(1)

    part_of = {}
    for ntype, num_nodes in zip(config.ntypes, config.nodes.counts, strict=True):
        part_of[ntype] = np.repeat(np.arange(num_parts, dtype=np.int32), num_nodes)
    assignment = Assignment(
        num_parts=num_parts,
        part_of=part_of,
        method=config.method,
        seed=0,
        parameters={"imported_from": "dgl"},
    )
    return write_dataset(reader.graph(), assignment, folder, overwrite=overwrite, bfloat16=reader.bfloat16)


@dataclass(frozen=True, kw_only=True)
class PartConfig:
    """DGL's JSON file after all values are checked."""

    path: Path
    name: str
    method: str
    num_parts: int
    ntypes: list[str]
    etypes: list[EdgeType]
    nodes: IdRanges
    edges: IdRanges
    files: list[Mapping[str, object]]

    def file(self, part: int, key: str) -> Path:
        """Return the path that the JSON file has under ``key`` for ``part``."""
        name = self.files[part].get(key)
        if not isinstance(name, str):
            raise StorageError(
                f"{self.path}: key 'part-{part}.{key}' is {name!r}, expected a file name; parts that were "
                "saved for GraphBolt only cannot be read, so partition again without it"
            )
        return self.path.parent / name

    def dgl_files(self, part: int) -> list[DglFile]:
        """List a part's files for :func:`check_files`."""
        structure = self.file(part, "part_graph")
        files: list[DglFile] = [("graphs", structure)]
        files += [("tensors", self.file(part, key)) for key in ("node_feats", "edge_feats")]
        original_ids = structure.with_name(_ORIGINAL_IDS)
        if original_ids.exists():
            files.append(("tensors", original_ids))
        return files


def read_part_config(path: Path) -> PartConfig:
    """Read DGL's JSON file. Raise StorageError if it is missing or not DGL's."""
    try:
        content = read_small_file(path)
    except OSError as problem:
        raise StorageError(f"{path} cannot be read ({problem.strerror})") from problem

    top = Fields.parse(content, str(path), error=StorageError)
    num_parts = top.integer("num_parts", 1)
    ntypes = _read_type_names(top, "ntypes", NODE_TYPE)
    etypes = _read_type_names(top, "etypes", ":".join(EDGE_TYPE))
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


def _read_type_names(top: Fields, key: str, default: str) -> list[str]:
    """Return the type names ordered by their numbers, or ``default`` if the key is missing."""
    if not top.has(key):
        return [default]
    entries = top.nested_fields(key)
    names = sorted(entries.mapping, key=entries.integer)
    numbers = [entries.integer(name) for name in names]
    if numbers != list(range(len(names))):
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
    """Return each part's id ranges. The file has [first, end) per part, or only the end in old files."""
    expected = f"{num_parts} ranges for each of {', '.join(names)}, growing by part and type"
    value = top.raw_value(key)
    if len(names) == 1 and isinstance(value, list):
        # Old files with one type do not name it.
        named_ranges: Mapping[str, object] = {names[0]: value}
    else:
        named_ranges = top.nested_fields(key).mapping
    try:
        array = np.array([named_ranges.get(name) for name in names], dtype=np.int64)
    except (TypeError, ValueError, OverflowError) as problem:
        raise top.field_error(key, expected) from problem

    if array.shape == (1, num_parts):
        # The first part begins at 0, and each other part where the previous one ends.
        starts = np.pad(array[:, :-1], ((0, 0), (1, 0)))
        array = np.stack([starts, array], axis=-1)
    if array.shape != (len(names), num_parts, 2):
        raise top.field_error(key, expected)

    counts = array[..., 1] - array[..., 0]
    offsets = np.pad(np.cumsum(counts, axis=1), ((0, 0), (1, 0)))
    ranges = IdRanges.from_offsets(list(offsets))
    if (counts < 0).any() or not np.array_equal(ranges.starts, array[..., 0]):
        raise top.field_error(key, expected)
    return ranges


class _DglReader:
    """Collects nodes, edges and columns from all parts into arrays for the whole graph."""

    def __init__(self, config: PartConfig) -> None:
        self._config = config
        self._ends = [np.full((2, int(count)), -1, np.int64) for count in config.edges.counts.sum(axis=1)]
        self._node_data: dict[str, dict[str, Array]] = {ntype: {} for ntype in config.ntypes}
        self._edge_data: dict[EdgeType, dict[str, Array]] = {etype: {} for etype in config.etypes}
        self._user_ids: dict[str, Array] = {}
        self.bfloat16: list[tuple[str | EdgeType, str]] = []

    def add_part(self, part: int) -> None:
        """Read a part, with its columns and the user's ids. Raise StorageError if a file is damaged."""
        config = self._config
        path = config.file(part, "part_graph")
        structure = load_graphs(path)[0]
        missing = {dgl.NID, "inner_node"}.difference(structure.ndata)
        missing |= {dgl.EID, "inner_edge"}.difference(structure.edata)
        if missing:
            raise StorageError(
                f"{path} lacks the node or edge data {sorted(missing)}, so it is not a part written by DGL"
            )

        # DGL calls nodes that a part owns, and edges into them, *inner*. A part has no data for other ones.
        node_ids = structure.ndata[dgl.NID].numpy()
        edge_ids = structure.edata[dgl.EID].numpy()
        is_inner_edge = structure.edata["inner_edge"].numpy() == 1
        inner_nodes = node_ids[structure.ndata["inner_node"].numpy() == 1]
        inner_edges = edge_ids[is_inner_edge]
        _check_ids(inner_nodes, config.nodes.part_range(part), "nodes", path)
        _check_ids(inner_edges, config.edges.part_range(part), "edges", path)
        num_nodes = config.nodes.counts.sum()
        if len(node_ids) and (node_ids.min() < 0 or node_ids.max() >= num_nodes):
            raise StorageError(
                f"{path} has ids of nodes that do not exist. Copy the file again, or partition again."
            )

        local_sources, local_destinations = structure.edges(order="eid")
        sources = node_ids[local_sources.numpy()[is_inner_edge]]
        destinations = node_ids[local_destinations.numpy()[is_inner_edge]]
        self._add_edges(inner_edges, sources, destinations, path)
        self._add_columns(self._node_data, config.file(part, "node_feats"), config.nodes, inner_nodes)
        self._add_columns(self._edge_data, config.file(part, "edge_feats"), config.edges, inner_edges)
        self._add_user_ids(path.with_name(_ORIGINAL_IDS), part)

    def graph(self) -> RawGraph:
        """Return the graph that the added parts form."""
        config = self._config
        counts = config.nodes.counts.sum(axis=1).tolist()
        num_classes = {}
        for ntype, columns in self._node_data.items():
            labels = columns.get(LABEL)
            if labels is not None and labels.ndim == 1 and labels.dtype.kind in "iu":
                num_classes[ntype] = int(labels.max(initial=-1)) + 1
        return RawGraph(
            name=config.name,
            num_nodes=dict(zip(config.ntypes, counts, strict=True)),
            edges={etype: (ends[0], ends[1]) for etype, ends in zip(config.etypes, self._ends, strict=True)},
            node_data=self._node_data,
            edge_data=self._edge_data,
            num_classes=num_classes,
            user_ids=self._user_ids,
        )

    def _add_edges(self, ids: Array, sources: Array, destinations: Array, path: Path) -> None:
        """Set the edges' sources and destinations. All ids are over all types."""
        config = self._config
        edge_types, type_ids = config.edges.to_typed(ids)
        source_types, sources = config.nodes.to_typed(sources)
        destination_types, destinations = config.nodes.to_typed(destinations)
        for index, etype in enumerate(config.etypes):
            is_of_type = edge_types == index
            for ntype, end_types in ((etype[0], source_types), (etype[2], destination_types)):
                if (end_types[is_of_type] != config.ntypes.index(ntype)).any():
                    raise StorageError(f"{path} has edges of type {etype} between nodes of other types")
            self._ends[index][:, type_ids[is_of_type]] = sources[is_of_type], destinations[is_of_type]

    def _add_columns(self, data: dict[K, dict[str, Array]], path: Path, ranges: IdRanges, ids: Array) -> None:
        """Add one part's columns to ``data``. ``ids`` are the ids that the part owns, over all types."""
        types = {format_type(type_key): type_key for type_key in data}
        type_indices, type_ids = ranges.to_typed(ids)
        for key, tensor in load_tensors(path).items():
            # Keys are type/column. Old files with one type have the column only.
            type_name, slash, name = key.partition("/")
            if not slash and len(types) == 1:
                type_name = next(iter(types))
                name = key
            if type_name not in types:
                raise StorageError(f"{path}: {key!r} names none of the types {', '.join(types)}")

            index = list(types).index(type_name)
            owned_ids = type_ids[type_indices == index]
            if len(tensor) != len(owned_ids):
                raise StorageError(f"{path}: {name!r} has {len(tensor)} rows for {len(owned_ids)} owned ids")

            rows = self._as_array(types[type_name], name, tensor)
            columns = data[types[type_name]]
            if name not in columns:
                columns[name] = np.zeros((int(ranges.counts[index].sum()), *rows.shape[1:]), rows.dtype)
            column = columns[name]
            if column.shape[1:] != rows.shape[1:] or column.dtype != rows.dtype:
                raise StorageError(f"{path}: {name!r} has another shape or dtype than in the other parts")
            column[owned_ids] = rows

    def _as_array(self, type_key: str | EdgeType, name: str, tensor: torch.Tensor) -> Array:
        if tensor.dtype == torch.bfloat16:
            self.bfloat16.append((type_key, name))
            return tensor.view(torch.int16).numpy().view(np.uint16)
        array: Array = tensor.numpy()
        if array.dtype == np.uint8 and array.ndim == 1 and name.endswith("mask"):
            return array != 0
        return array

    def _add_user_ids(self, path: Path, part: int) -> None:
        if not path.exists():
            return
        nodes = self._config.nodes
        ntypes = self._config.ntypes
        for name, ids in load_tensors(path).items():
            if name not in ntypes or len(ids) != nodes.counts[ntypes.index(name), part]:
                raise StorageError(f"{path}: {len(ids)} original ids of {name!r} do not fit the part")
            index = ntypes.index(name)
            column = self._user_ids.setdefault(name, np.zeros(int(nodes.counts[index].sum()), np.int64))
            column[nodes.offsets[index, part] : nodes.offsets[index, part + 1]] = ids.numpy()


def _check_ids(ids: Array, expected: tuple[int, int], item_name: str, path: Path) -> None:
    if not np.array_equal(np.sort(ids), np.arange(*expected)):
        raise StorageError(
            f"{path} owns {len(ids)} {item_name}, but the JSON file says "
            f"{expected[0]}..{expected[1] - 1}; its files are not of one partitioning"
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

    One process calls this. Only one part's features are in memory at a time. Each part holds its own nodes
    first, then the halo. DGL's per-type ids equal the new ids that a dataset gets with the same arguments.
    Booleans become uint8, because DGL's files cannot hold booleans. ``orig_nids.dgl`` and ``orig_eids.dgl``
    hold the source's ids. If there is a single part, edges keep these ids, as with DGL.

    Args:
        formats: Formats for the structure: ``coo`` (default), ``csc`` and ``csr``. For the other arguments
            see :func:`write_dataset`.

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
    data: dict[Any, Mapping[str, NodeColumn]] = {**graph.node_data, **graph.edge_data}
    dtypes = {type_key: resolve_dtypes(columns, feature_dtype) for type_key, columns in data.items()}
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
    """Return ``graph`` with edges sorted by the ids that they have in the source."""
    edges = dict(graph.edges)
    edge_data = dict(graph.edge_data)
    for etype, ids in graph.edge_ids.items():
        order = np.argsort(ids)
        src, dst = graph.edges[etype]
        edges[etype] = (src[order], dst[order])
        edge_data[etype] = {name: rows[order] for name, rows in graph.edge_data.get(etype, {}).items()}
    return replace(graph, edges=edges, edge_data=edge_data, edge_ids={})


def part_structure(nodes: IdRanges, edges: IdRanges, part: int, ends: tuple[Array, Array]) -> dgl.DGLGraph:
    """Build a part's graph like DGL, with its own nodes, then the halo, and columns like ``dgl.NID``.

    ``ends`` are (sources, destinations) for the in-edges of the part's nodes, sorted by edge id. All ids are
    over all types.
    """
    first, last = nodes.part_range(part)
    source, destination = ends
    is_owned = (source >= first) & (source < last)
    halo = np.unique(source[~is_owned])
    # Local ids count the owned nodes first, and then the halo.
    local_sources = np.where(is_owned, source - first, (last - first) + np.searchsorted(halo, source))
    local_ends = torch.from_numpy(local_sources), torch.from_numpy(destination - first)
    global_ids = np.concatenate([np.arange(first, last), halo])
    node_types, owners = nodes.locate(global_ids)
    structure = dgl.graph(local_ends, num_nodes=len(global_ids))
    structure.ndata[dgl.NID] = _convert_ids(global_ids)
    structure.ndata["part_id"] = _convert_ids(owners)
    structure.ndata["inner_node"] = torch.from_numpy((owners == part).astype(np.uint8))

    edge_ids = np.arange(*edges.part_range(part))
    structure.edata[dgl.EID] = _convert_ids(edge_ids)
    structure.edata["inner_edge"] = torch.ones(len(edge_ids), dtype=torch.uint8)
    if len(nodes.starts) > 1 or len(edges.starts) > 1:
        structure.ndata[dgl.NTYPE] = torch.from_numpy(node_types.astype(np.int32))
        edge_types, _ = edges.locate(edge_ids)
        structure.edata[dgl.ETYPE] = torch.from_numpy(edge_types.astype(np.int32))
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
        self._graph = graph
        self._formats = formats
        self._nodes = nodes
        self._bfloat16 = bfloat16
        self._dtypes = dtypes
        self._ntypes = list(graph.num_nodes)
        self._edges: dict[EdgeType, EdgeOrder] = {}
        for etype in graph.edges:
            self._edges[etype] = relabel_edges(graph, etype, nodes[etype[0]], nodes[etype[2]])
        self._node_ranges = IdRanges.from_offsets([order.offsets for order in nodes.values()])
        self._edge_ranges = IdRanges.from_offsets([order.offsets for order in self._edges.values()])

        # If there is a single part, edges keep their ids.
        self._renumbers = max(len(order.offsets) for order in nodes.values()) > 2

    def write_part(self, part: int, folder: Path) -> None:
        folder.mkdir()
        structure = part_structure(self._node_ranges, self._edge_ranges, part, self._find_ends(part))
        dgl.save_graphs(str(folder / _FILES["part_graph"]), [structure], formats=self._formats)

        node_rows = {ntype: rows_of(order, part) for ntype, order in self._nodes.items()}
        edge_rows = {etype: rows_of(order, part) for etype, order in self._edges.items()}
        if not self._renumbers:
            edge_rows = {etype: np.arange(len(rows)) for etype, rows in edge_rows.items()}
        self._save_rows(folder, "node_feats", _ORIGINAL_IDS, node_rows, self._graph.node_data)
        self._save_rows(folder, "edge_feats", "orig_eids.dgl", edge_rows, self._graph.edge_data)

    def _save_rows(
        self,
        folder: Path,
        key: str,
        ids_file: str,
        rows_by_type: Mapping[K, Array],
        data: Mapping[K, Mapping[str, NodeColumn]],
    ) -> None:
        """Write one part's columns, and the original ids of their rows."""
        columns = {}
        original_ids = {}
        for type_key, rows in rows_by_type.items():
            type_name = _encode_type(type_key)
            original_ids[type_name] = _convert_ids(rows)
            for name, column in data.get(type_key, {}).items():
                columns[f"{type_name}/{name}"] = self._make_tensor((type_key, name), column, rows)
        save_tensors(str(folder / _FILES[key]), columns)
        save_tensors(str(folder / ids_file), original_ids)

    def config(self, assignment: Assignment) -> dict[str, object]:
        """Return the values for DGL's JSON file."""
        etypes = [_encode_type(etype) for etype in self._edges]
        parts = {}
        for part in range(assignment.num_parts):
            parts[f"part-{part}"] = {key: f"part{part}/{name}" for key, name in _FILES.items()}
        return {
            "graph_name": self._graph.name,
            "num_nodes": self._graph.total_nodes,
            "num_edges": self._graph.total_edges,
            "part_method": assignment.method,
            "num_parts": assignment.num_parts,
            "halo_hops": 1,
            "node_map": ranges_by_type(self._ntypes, self._node_ranges),
            "edge_map": ranges_by_type(etypes, self._edge_ranges),
            "ntypes": {name: index for index, name in enumerate(self._ntypes)},
            "etypes": {name: index for index, name in enumerate(etypes)},
            **parts,
        }

    def _find_ends(self, part: int) -> tuple[Array, Array]:
        """Return one part's edge sources and destinations, as ids over all types."""
        sources = [np.empty(0, np.int64)]
        destinations = [np.empty(0, np.int64)]
        for etype, order in self._edges.items():
            nodes = self._nodes[etype[2]].offsets
            degrees = np.diff(order.indptr[nodes[part] : nodes[part + 1] + 1])
            first = self._node_ranges.starts[self._ntypes.index(etype[2]), part]
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
        """Return ``rows`` from ``values`` in the dtype to store. ``column`` is their (type, name)."""
        type_key, name = column
        dtype = self._dtypes[type_key].get(name, values.dtype.name)
        if dtype == values.dtype.name:
            array = take_rows(values, rows)
        else:
            array = np.empty((len(rows), *values.shape[1:]), numpy_dtype(dtype))
            step = max(CHUNK_BYTES // max(array[:1].nbytes, 1), 1)

            # Rows are converted in chunks, so that their wider values are never all in memory.
            for first in range(0, len(rows), step):
                chunk = rows[first : first + step]
                description = f"{name!r} of {type_key!r}"
                array[first : first + step] = narrow(take_rows(values, chunk), dtype, description, chunk)

        if column in self._bfloat16 or dtype == "bfloat16":
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        if array.dtype == np.bool_:
            array = array.view(np.uint8)

        try:
            return torch.from_numpy(np.ascontiguousarray(array))
        except (TypeError, ValueError) as problem:
            raise ConfigError(
                f"{type_key}/{name} is {array.dtype}, which DGL's files cannot hold"
            ) from problem


def _convert_ids(ids: Array) -> torch.Tensor:
    return torch.from_numpy(ids.astype(np.int64))


def ranges_by_type(types: Sequence[K], ranges: IdRanges) -> dict[K, list[list[int]]]:
    """Return (P, 2) ranges of ids over all types, by type, as in DGL's JSON file and partition books."""
    ends = ranges.starts + ranges.counts
    return dict(zip(types, np.stack([ranges.starts, ends], axis=-1).tolist(), strict=True))


def _check_names(graph: RawGraph) -> None:
    if not graph.edges:
        raise ConfigError("the graph has no edge type; DGL's files need one")
    for name in graph.num_nodes:
        if ":" in name or "/" in name:
            raise ConfigError(f"DGL's files cannot hold the type name {name!r}, which has a ':' or a '/'")
    changed = [etype[1] for etype in graph.edges if _encode_type(etype) != format_type(etype)]
    if changed:
        examples = f"{len(changed)}, such as {', '.join(changed[:3])}"
        _LOG.warning("relations are %%-encoded, as '/' and ':' separate DGL's names: %s", examples)


def _encode_type(type_key: str | EdgeType) -> str:
    """Return the name that a type has in DGL's files."""
    if isinstance(type_key, str):
        return type_key
    source, relation, destination = type_key
    encoded = re.sub("[%/:]", lambda match: f"%{ord(match[0]):02X}", relation)
    return format_type((source, encoded, destination))
