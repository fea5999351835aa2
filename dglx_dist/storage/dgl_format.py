"""A graph and the owner of every node -> DGL's partition files, which stock DGL loads."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import dgl
import numpy as np
import torch
from dgl.data.utils import save_tensors

from dglx_dist.errors import ConfigError, StorageError
from dglx_dist.progress import progress
from dglx_dist.records import Array, Assignment, EdgeType, RawGraph
from dglx_dist.storage.dgl_ids import IdLine
from dglx_dist.storage.dgl_import import import_dgl_format as import_dgl_format
from dglx_dist.storage.folders import named_failures, partial_folder, publish
from dglx_dist.storage.layout import safe_name
from dglx_dist.storage.relabel import EdgeOrder, NodeOrder, relabel_edges, relabel_nodes

_FILES = {"node_feats": "node_feat.dgl", "edge_feats": "edge_feat.dgl", "part_graph": "graph.dgl"}


def write_dgl_format(
    graph: RawGraph,
    assignment: Assignment,
    folder: Path,
    *,
    bfloat16: Collection[tuple[str | EdgeType, str]] = (),
    formats: str | Sequence[str] | None = None,
) -> Path:
    """Write ``<folder>/<graph name>.json`` and ``part<p>/`` as DGL's ``partition_graph`` does.

    Each part holds its nodes first, then the halo: the other ends of its nodes' in-edges. Ids are those of a
    dataset written from the same arguments: DGL's per-type ids are our new ids. Booleans become uint8, which
    is all that DGL's files know. ``orig_nids.dgl`` and ``orig_eids.dgl`` hold the ids of the source. One
    part's features are held in memory at a time. Called by one process.

    Args:
        graph: What to write.
        assignment: The owner of every node.
        folder: Must not exist, or be empty.
        bfloat16: (node or edge type, column) of each uint16 array that holds bfloat16 bits.
        formats: As which of ``coo``, ``csc`` and ``csr`` structure is stored; None: ``coo``.

    Returns:
        The JSON file, which DGL calls ``part_config``.

    Raises:
        ConfigError: graph and assignment do not fit, or DGL's files cannot hold a value or a name.
        StorageError: ``folder`` holds something, or cannot be written.
    """
    folder = Path(folder).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise StorageError(f"{folder} exists already; choose another folder")
    _check_names(graph)
    job = _Job(graph, relabel_nodes(graph, assignment), frozenset(bfloat16), formats)
    config = f"{safe_name(graph.name)}.json"
    with (
        named_failures(folder),
        partial_folder(folder) as partial,
        progress("Writing DGL's format", assignment.num_parts) as advance,
    ):
        for part in range(assignment.num_parts):
            job.write_part(part, partial / f"part{part}")
            advance(1)
        text = json.dumps(job.config(assignment), indent=4)
        (partial / config).write_text(text)
        if not publish(partial, folder):
            raise StorageError(f"{folder} appeared while it was being written; choose another folder")
    return folder / config


class _Job:
    """One write: the graph under its new ids."""

    def __init__(
        self,
        graph: RawGraph,
        nodes: Mapping[str, NodeOrder],
        bfloat16: Collection[tuple[str | EdgeType, str]],
        formats: str | Sequence[str] | None,
    ) -> None:
        self._graph, self._formats = graph, formats
        self._nodes = nodes
        self._bfloat16 = bfloat16
        self._ntypes = list(graph.num_nodes)
        self._edges: dict[EdgeType, EdgeOrder] = {
            etype: relabel_edges(graph, etype, nodes[etype[0]], nodes[etype[2]]) for etype in graph.edges
        }
        self._node_line = IdLine.of_offsets([order.offsets for order in nodes.values()])
        self._edge_line = IdLine.of_offsets([order.offsets for order in self._edges.values()])

    def write_part(self, part: int, folder: Path) -> None:
        """Write structure, features and original ids of one part."""
        folder.mkdir()
        dgl.save_graphs(str(folder / _FILES["part_graph"]), [self._structure(part)], formats=self._formats)
        node_rows = {ntype: _rows(order, part) for ntype, order in self._nodes.items()}
        edge_rows = {etype: _rows(order, part) for etype, order in self._edges.items()}
        node_feats = {
            f"{ntype}/{name}": self._tensor((ntype, name), rows)
            for ntype, rows in node_rows.items()
            for name in self._graph.node_data.get(ntype, {})
        }
        edge_feats = {
            f"{':'.join(etype)}/{name}": self._tensor((etype, name), rows)
            for etype, rows in edge_rows.items()
            for name in self._graph.edge_data.get(etype, {})
        }
        save_tensors(str(folder / _FILES["node_feats"]), node_feats)
        save_tensors(str(folder / _FILES["edge_feats"]), edge_feats)
        save_tensors(str(folder / "orig_nids.dgl"), {ntype: _ids(rows) for ntype, rows in node_rows.items()})
        orig_eids = {":".join(etype): _ids(rows) for etype, rows in edge_rows.items()}
        save_tensors(str(folder / "orig_eids.dgl"), orig_eids)

    def config(self, assignment: Assignment) -> dict[str, object]:
        """Return what DGL's JSON file says."""
        etypes = [":".join(etype) for etype in self._edges]
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
            "node_map": _ranges(self._ntypes, self._node_line),
            "edge_map": _ranges(etypes, self._edge_line),
            "ntypes": {name: number for number, name in enumerate(self._ntypes)},
            "etypes": {name: number for number, name in enumerate(etypes)},
            **parts,
        }

    def _structure(self, part: int) -> dgl.DGLGraph:
        first, last = self._node_line.part_range(part)
        source, destination = self._ends(part, first)
        owned = (source >= first) & (source < last)
        halo = np.unique(source[~owned])
        local = np.where(owned, source - first, (last - first) + np.searchsorted(halo, source))
        global_ids = np.concatenate([np.arange(first, last), halo])
        kinds, owners = self._node_line.place(global_ids)
        structure = dgl.graph(
            (torch.from_numpy(local), torch.from_numpy(destination)), num_nodes=len(global_ids)
        )
        structure.ndata[dgl.NID] = _ids(global_ids)
        structure.ndata["part_id"] = _ids(owners)
        structure.ndata["inner_node"] = torch.from_numpy((owners == part).astype(np.uint8))
        edge_ids = np.arange(*self._edge_line.part_range(part))
        structure.edata[dgl.EID] = _ids(edge_ids)
        structure.edata["inner_edge"] = torch.ones(len(edge_ids), dtype=torch.uint8)
        if len(self._ntypes) > 1 or len(self._edges) > 1:
            structure.ndata[dgl.NTYPE] = torch.from_numpy(kinds.astype(np.int32))
            edge_kinds, _ = self._edge_line.place(edge_ids)
            structure.edata[dgl.ETYPE] = torch.from_numpy(edge_kinds.astype(np.int32))
        return structure

    def _ends(self, part: int, first: int) -> tuple[Array, Array]:
        """Return (global sources, local destinations) of the part's edges in the order of their ids."""
        sources, destinations = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for etype, order in self._edges.items():
            nodes = self._nodes[etype[2]].offsets
            kind = self._ntypes.index(etype[2])
            degrees = np.diff(order.indptr[nodes[part] : nodes[part + 1] + 1])
            shift = self._node_line.starts[kind, part] - first
            destinations.append(np.repeat(np.arange(len(degrees)) + shift, degrees))
            indices = order.indices[order.offsets[part] : order.offsets[part + 1]]
            sources.append(self._node_line.from_typed(self._ntypes.index(etype[0]), indices))
        return np.concatenate(sources), np.concatenate(destinations)

    def _tensor(self, column: tuple[str | EdgeType, str], rows: Array) -> torch.Tensor:
        kind, name = column
        if isinstance(kind, str):
            values = self._graph.node_data[kind][name]
            array = values[rows] if isinstance(values, np.ndarray) else values.dense(rows)
        else:
            array = self._graph.edge_data[kind][name][rows]
        if column in self._bfloat16:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        if array.dtype == np.bool_:
            array = array.view(np.uint8)
        try:
            return torch.from_numpy(np.ascontiguousarray(array))
        except (TypeError, ValueError) as problem:
            raise ConfigError(
                f"{kind}/{name} has dtype {array.dtype}, which DGL's files cannot hold"
            ) from problem


def _rows(order: NodeOrder | EdgeOrder, part: int) -> Array:
    return order.new_to_old[order.offsets[part] : order.offsets[part + 1]]


def _ids(ids: Array) -> torch.Tensor:
    return torch.from_numpy(ids.astype(np.int64))


def _ranges(names: Sequence[str], line: IdLine) -> dict[str, list[list[int]]]:
    ends = line.starts + line.counts
    return {
        name: [[int(first), int(end)] for first, end in zip(line.starts[kind], ends[kind], strict=True)]
        for kind, name in enumerate(names)
    }


def _check_names(graph: RawGraph) -> None:
    if not graph.edges:
        raise ConfigError("the graph has no edge type; DGL's files need one")
    for name in {*graph.num_nodes, *(piece for etype in graph.edges for piece in etype)}:
        if ":" in name or "/" in name:
            raise ConfigError(f"DGL's files cannot hold the type name {name!r}, which has a ':' or a '/'")
