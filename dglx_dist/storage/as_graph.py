"""A dataset of one part as the graph that it was written from, to be cut into more."""

from __future__ import annotations

import numpy as np

from dglx_dist.errors import ConfigError
from dglx_dist.records import Array, EdgeType, RawGraph
from dglx_dist.storage.reader import StoredDataset, StoredPart


def graph_of(dataset: StoredDataset) -> RawGraph:
    """Return nodes and edges in the order of the source, where that is cheap: in a dataset of one part.

    Node data stays in its memory map. Edges go back to their original order in memory, and their data with
    them.

    Raises:
        ConfigError: there are several parts, or a tensor is stored as bfloat16.
        StorageError: a file is missing or damaged.
    """
    manifest = dataset.manifest
    if manifest.num_parts != 1:
        raise ConfigError(
            f"{dataset.folder} is cut into {manifest.num_parts} parts already; train on it, or cut the graph "
            "that it was made from"
        )
    for tensors in (*manifest.node_columns.values(), *manifest.edge_columns.values()):
        for name, info in tensors.items():
            if info.dtype == "bfloat16":
                raise ConfigError(
                    f"{dataset.folder} holds {name!r} as bfloat16; cut the graph that it was made from"
                )
    part = dataset.part(0)
    edges = {etype: _edges(part, etype) for etype in manifest.edge_types}
    found = {ntype: part.user_ids(ntype) for ntype in manifest.user_ids}
    return RawGraph(
        name=manifest.name,
        num_nodes={ntype: manifest.num_nodes(ntype) for ntype in manifest.node_types},
        edges=edges,
        node_data={
            ntype: {name: part.node_data(ntype, name) for name in columns}
            for ntype, columns in manifest.node_columns.items()
        },
        edge_data={
            etype: {name: _by_source(part, etype, part.edge_data(etype, name)) for name in columns}
            for etype, columns in manifest.edge_columns.items()
        },
        num_classes=dict(manifest.num_classes),
        user_ids={ntype: ids for ntype, ids in found.items() if ids is not None},
    )


def _edges(part: StoredPart, etype: EdgeType) -> tuple[Array, Array]:
    indptr = part.indptr(etype)
    dtype = np.int32 if len(indptr) <= np.iinfo(np.int32).max else np.int64
    destinations = np.repeat(np.arange(len(indptr) - 1, dtype=dtype), np.diff(indptr))
    return _by_source(part, etype, part.indices(etype)), _by_source(part, etype, destinations)


def _by_source(part: StoredPart, etype: EdgeType, rows: Array) -> Array:
    """Return rows of edges in the order of the source's list."""
    ordered = np.empty_like(rows)
    ordered[part.original_edge_ids(etype)] = rows
    return ordered
