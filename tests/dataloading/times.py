"""Random graphs with times, sources of trees over them, and reference answers in plain Python."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dglx_dist.data.storage.writer import write_dataset
from dglx_dist.data.times import NEVER, sort_by_time, to_keys
from dglx_dist.dataloading.kernels import Schema
from dglx_dist.dataloading.sampler import DrawSettings
from dglx_dist.dataloading.trees import TreeRule, TreeSource, make_row_draw
from dglx_dist.graph.structure import NO_EDGES, ReplicatedStructure
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, Array, Assignment, EdgeType, RawGraph

TIME_KINDS = ("ties", "equal", "missing", "negative", "floats", "missing floats", "infinite")


def draw_times(kind: str, count: int, rng: np.random.Generator) -> Array:
    """Times of a kind: few distinct values, all equal, with gaps, below 0, or floats with NaN or infinity."""
    times = rng.integers(-4, 5, count)
    if kind == "equal":
        times = np.full(count, 7)
    elif kind == "missing":
        times[rng.random(count) < 0.3] = np.iinfo(np.int64).min
    elif kind == "negative":
        times = rng.integers(-40, 0, count) - (1 << 40)
    elif kind in ("floats", "missing floats", "infinite"):
        times = np.round(rng.normal(0, 3, count), 1)
        times[rng.random(count) < 0.2] = {"floats": -0.0, "missing floats": np.nan, "infinite": -np.inf}[kind]
    return times


@dataclass
class TimedGraph:
    """In-edges of one type with times: the edges of node n are ``indptr[n]:indptr[n + 1]``."""

    indptr: Array
    indices: Array
    times: Array

    @property
    def num_nodes(self) -> int:
        return len(self.indptr) - 1

    def past(self, node: int, time: float, window: float | None = None, exclude: Any = ()) -> list[int]:
        """Edges that may be drawn, by time and then by id."""
        exists = to_keys(self.times) != NEVER
        edges = [e for e in range(self.indptr[node], self.indptr[node + 1]) if exists[e] and e not in exclude]
        edges = [
            e for e in edges if self.times[e] <= time and (window is None or self.times[e] >= time - window)
        ]
        return sorted(edges, key=lambda edge: (self.times[edge], edge))


def random_timed_graph(kind: str, seed: int, num_nodes: int = 40) -> TimedGraph:
    """Uneven in-degrees: some nodes have no in-edges, node 0 has 150."""
    rng = np.random.default_rng(seed)
    degrees = rng.poisson(15 * rng.random(num_nodes) ** 2)
    degrees[0] = 150
    indptr = np.concatenate([[0], np.cumsum(degrees)])
    indices = np.concatenate([np.sort(rng.integers(0, num_nodes, degree)) for degree in degrees])
    return TimedGraph(indptr, indices.astype(np.int32), draw_times(kind, int(indptr[-1]), rng))


def open_trees(graph: TimedGraph, fanouts: list[int], exclude: Array = NO_EDGES, **rule: Any) -> Any:
    """Return a function from (seeds, times, epoch) to the sampled batch and the tree of each row."""
    schema = Schema(ntypes=(NODE_TYPE,), num_nodes=(graph.num_nodes,), etypes=(EDGE_TYPE,))
    structure = ReplicatedStructure(EDGE_TYPE, graph.num_nodes, graph.indptr, graph.indices)
    dtype = "float64" if graph.times.dtype.kind == "f" else "int64"
    tree_rule = TreeRule(dtype=dtype, **rule)
    order = sort_by_time(graph.indptr, to_keys(graph.times))
    structure.serve("trees", make_row_draw(tree_rule, NO_EDGES, {0: order}))
    hops = np.array(fanouts[::-1], np.int64)[:, None]
    draws = DrawSettings(schema=schema, fanouts=hops, replace=False, exclude={}, seed=3)
    source = TreeSource(schema, [structure], "trees", tree_rule)

    def sample(seeds: Array, times: Array, epoch: int = 0, exclude: Array = exclude) -> Any:
        request = draws.request({NODE_TYPE: np.asarray(seeds)}, epoch, {})
        keys = to_keys(np.asarray(times).astype(dtype))
        batch, trees, _ = source.sample(request, {EDGE_TYPE: exclude}, keys)
        return batch, trees

    return sample


def list_draws(batch: Any, trees: Array, hop: int) -> list[tuple[int, int, list[int], list[int]]]:
    """Return (tree, node, sources, edges) of each row of a hop."""
    num_rows = batch.node_ends[:-1, 0] + 1
    first = int(num_rows[:hop].sum())
    indptr = batch.indptr[first : first + num_rows[hop]]
    edges = batch.edge_ids[batch.edge_ends[hop] : batch.edge_ends[hop + 1]]
    sources = batch.sources[batch.edge_ends[hop] : batch.edge_ends[hop + 1]]
    assert (np.repeat(trees[: len(indptr) - 1], np.diff(indptr)) == trees[sources]).all(), (
        "trees are disjoint"
    )
    return [
        (
            int(trees[row]),
            int(batch.nodes[row]),
            batch.nodes[sources[indptr[row] : indptr[row + 1]]].tolist(),
            edges[indptr[row] : indptr[row + 1]].tolist(),
        )
        for row in range(len(indptr) - 1)
    ]


VISITS, LIKES, OWNS = ("user", "visits", "item"), ("user", "likes", "item"), ("item", "owns", "user")


def raw_timed_shop() -> RawGraph:
    """Visits and their reverse have times, likes have none. Items have a time at which they appear."""
    rng = np.random.default_rng(2)
    users, items, count = rng.integers(0, 30, 400), rng.integers(0, 20, 400), 400
    edges: dict[EdgeType, tuple[Array, Array]] = {
        VISITS: (users, items),
        LIKES: (rng.integers(0, 30, 60), rng.integers(0, 20, 60)),
        OWNS: (items, users),
    }
    moments = rng.integers(0, 50, count)
    return RawGraph(
        name="timed shop",
        num_nodes={"item": 20, "user": 30},
        edges=edges,
        node_data={
            "item": {"born": rng.integers(0, 25, 20), "feat": np.arange(20.0)[:, None]},
            "user": {"feat": np.arange(30.0)[:, None]},
        },
        edge_data={VISITS: {"t": moments}, OWNS: {"t": moments}},
    )


def raw_ring(num_nodes: int = 60) -> RawGraph:
    """Node n has n % 17 in-edges, at times 0, 1, 2 ... from the nearest neighbour on."""
    pairs = [
        ((n + step) % num_nodes, n, step % 11) for n in range(num_nodes) for step in range(1, n % 17 + 1)
    ]
    sources, destinations, times = np.array(pairs).T
    ids = np.arange(num_nodes)
    return RawGraph(
        name="timed ring",
        num_nodes={NODE_TYPE: num_nodes},
        edges={EDGE_TYPE: (sources, destinations)},
        node_data={NODE_TYPE: {"feat": np.stack([ids, ids % 7], 1).astype(np.float64), "label": ids % 3}},
        edge_data={EDGE_TYPE: {"time": times}},
        num_classes={NODE_TYPE: 3},
    )


def write_parts(raw: RawGraph, folder: Path, num_parts: int) -> Path:
    part_of: Mapping[str, Array] = {
        ntype: (np.arange(count) // 3 % num_parts).astype(np.int32) for ntype, count in raw.num_nodes.items()
    }
    write_dataset(raw, Assignment(num_parts=num_parts, part_of=part_of, method="file", seed=0), folder)
    return folder
