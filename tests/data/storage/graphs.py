"""Small graphs to store, and what a stored dataset says when it is put together again."""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from operator import methodcaller
from pathlib import Path
from typing import Any

import numpy as np

from dglx_dist.data.storage.columns import make_column_info, read_column, write_column
from dglx_dist.data.storage.manifest import read_manifest, write_manifest
from dglx_dist.data.storage.reader import StoredDataset, StoredPart, open_dataset
from dglx_dist.data.storage.writer import write_dataset
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, Array, Assignment, EdgeType, RawGraph

RATES: EdgeType = ("user", "rates", "item")
FOLLOWS: EdgeType = ("user", "follows", "user")

# 0 -> 1 -> 2 -> 0 and 3 -> 4 -> 5 -> 3, joined by 2 -> 3; nodes 1, 3 and 5 go to part 1.
TWO_TRIANGLES = RawGraph(
    name="two triangles",
    num_nodes={NODE_TYPE: 6},
    edges={EDGE_TYPE: (np.array([0, 1, 2, 3, 4, 5, 2]), np.array([1, 2, 0, 4, 5, 3, 3]))},
    node_data={
        NODE_TYPE: {
            "feat": np.arange(12, dtype=np.float32).reshape(6, 2),
            "label": np.array([0, 1, 2, 0, 1, 2]),
            "train_mask": np.array([True, False, True, False, True, False]),
        }
    },
    edge_data={EDGE_TYPE: {"weight": np.arange(7, dtype=np.float32) / 10}},
    num_classes={NODE_TYPE: 3},
    user_ids={NODE_TYPE: np.array(["a", "b", "ç", "d", "e", "längst"])},
)
ODD_ONES_OUT = Assignment(
    num_parts=2, part_of={NODE_TYPE: np.array([0, 1, 0, 1, 0, 1], np.int32)}, method="by hand", seed=7
)


def random_homogeneous(seed: int, num_nodes: int = 40, num_edges: int = 150, width: int = 3) -> RawGraph:
    rng = np.random.default_rng(seed)
    ends = rng.integers(0, num_nodes, (2, num_edges))
    return RawGraph(
        name="random",
        num_nodes={NODE_TYPE: num_nodes},
        edges={EDGE_TYPE: (ends[0], ends[1])},
        node_data={
            NODE_TYPE: {
                "feat": rng.random((num_nodes, width), dtype=np.float32),
                "label": rng.integers(0, 4, num_nodes),
                "train_mask": rng.random(num_nodes) < 0.5,
            }
        },
        edge_data={EDGE_TYPE: {"w": rng.random(num_edges)}},
        num_classes={NODE_TYPE: 4},
    )


def random_heterogeneous(seed: int) -> RawGraph:
    rng = np.random.default_rng(seed)
    return RawGraph(
        name="shop",
        num_nodes={"user": 20, "item": 13},
        edges={
            RATES: (rng.integers(0, 20, 60), rng.integers(0, 13, 60)),
            FOLLOWS: (rng.integers(0, 20, 50), rng.integers(0, 20, 50)),
        },
        node_data={
            "user": {"feat": rng.random((20, 4), dtype=np.float32)},
            "item": {"price": rng.random(13)},
        },
        edge_data={RATES: {"stars": rng.integers(1, 6, 60)}},
    )


def random_owners(graph: RawGraph, num_parts: int, seed: int) -> Assignment:
    rng = np.random.default_rng(seed)
    part_of = {
        ntype: rng.integers(0, num_parts, count).astype(np.int32) for ntype, count in graph.num_nodes.items()
    }
    return Assignment(num_parts=num_parts, part_of=part_of, method="random", seed=seed)


def store(graph: RawGraph, assignment: Assignment, folder: Path) -> StoredDataset:
    write_dataset(graph, assignment, folder)
    return open_dataset(folder)


def put_value(folder: Path, path: str, at: int, value: int) -> None:
    values = read_column(folder / path, path).copy()
    values[at] = value
    (folder / path).unlink()
    written = write_column(folder / path, make_column_info(values, path), len(values), [values])
    manifest = read_manifest(folder)
    write_manifest(replace(manifest, files={**manifest.files, path: written}), folder)


def flip(path: Path, at: int, bit: int = 0) -> None:
    """Flip one bit of a byte and keep the time of change, as a disk that fails does."""
    status, content = path.stat(), bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def flipped_bits(path: Path, every: int = 1) -> Iterator[int]:
    """Flip a bit of each ``every``-th byte in turn, in what the file then is; yield its place."""
    for at in range(0, path.stat().st_size, every):
        flip(path, at, at % 8)
        yield at


def put_together(dataset: StoredDataset, ntype: str) -> Array:
    parts = range(dataset.manifest.num_parts)
    return np.concatenate([dataset.part(part).original_node_ids(ntype) for part in parts])


def read_back(dataset: StoredDataset) -> RawGraph:
    """The source graph, from nothing but what is stored, in the source's order."""
    manifest = dataset.manifest
    parts = [dataset.part(part) for part in range(manifest.num_parts)]
    node_ids = {ntype: put_together(dataset, ntype) for ntype in manifest.node_types}
    edge_ids = {
        etype: np.concatenate([part.original_edge_ids(etype) for part in parts])
        for etype in manifest.edge_types
    }

    def restore_order(original_ids: Array, read: Callable[[StoredPart], Array | None]) -> Array:
        stored = np.concatenate([read(part) for part in parts])
        out = np.empty_like(stored)
        out[original_ids] = stored
        return out

    edges = {}
    for source, relation, destination in manifest.edge_types:
        etype = (source, relation, destination)
        sources = restore_order(edge_ids[etype], methodcaller("indices", etype))
        degrees = np.concatenate([np.diff(part.indptr(etype)) for part in parts])
        destinations = np.empty_like(edge_ids[etype])
        destinations[edge_ids[etype]] = np.repeat(node_ids[destination], degrees)
        edges[etype] = node_ids[source][sources], destinations
    return RawGraph(
        name=manifest.name,
        num_nodes={ntype: manifest.num_nodes(ntype) for ntype in manifest.node_types},
        edges=edges,
        node_data={
            ntype: {
                name: restore_order(node_ids[ntype], methodcaller("node_data", ntype, name))
                for name in columns
            }
            for ntype, columns in manifest.node_columns.items()
        },
        edge_data={
            etype: {
                name: restore_order(edge_ids[etype], methodcaller("edge_data", etype, name))
                for name in columns
            }
            for etype, columns in manifest.edge_columns.items()
        },
        num_classes=manifest.num_classes,
        user_ids={
            ntype: restore_order(node_ids[ntype], methodcaller("user_ids", ntype))
            for ntype in manifest.user_ids
        },
    )


def assert_same_graph(found: RawGraph, expected: RawGraph) -> None:
    assert list(found.edges) == list(expected.edges)
    assert _plain(found) == _plain(expected)


def _plain(graph: RawGraph) -> list[Any]:
    def columns(data: Mapping[str, Any]) -> dict[str, Any]:
        return {name: (array.dtype.kind, array.shape, array.tolist()) for name, array in data.items()}

    return [
        (graph.name, dict(graph.num_nodes), dict(graph.num_classes), columns(graph.user_ids)),
        {ntype: columns(graph.node_data.get(ntype, {})) for ntype in graph.num_nodes},
        {etype: columns(graph.edge_data.get(etype, {})) for etype in graph.edges},
        {etype: [end.tolist() for end in ends] for etype, ends in graph.edges.items()},
    ]
