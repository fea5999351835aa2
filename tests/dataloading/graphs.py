"""Small graphs for the tests of sampling, and batches of them."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dglx_dist.dataloading.kernels import RawBatch, Schema, ThreadTable
from dglx_dist.dataloading.sampler import DrawSettings, LocalSource
from dglx_dist.keyed_random import Csc
from dglx_dist.records import EDGE_TYPE, NODE_TYPE

HASHED = 1 << 40
"""Nodes of a graph whose workspaces are hashed."""


def csc_from(in_edges: Sequence[Sequence[int]], weights: Sequence[float] = (), dtype: str = "int32") -> Csc:
    """Node n has the in-neighbours ``in_edges[n]``, whose edges are numbered one after another."""
    indptr = np.cumsum([0, *(len(row) for row in in_edges)]).astype(np.int64)
    indices = np.array([node for row in in_edges for node in row], dtype=dtype)
    return Csc(indptr, indices, np.array(weights, np.float32), 0, 0)


def random_csc(num_nodes: int, mean_degree: int, seed: int = 0, dtype: str = "int32") -> Csc:
    """Uneven in-degrees (some nodes have none, one has very many), distinct in-neighbours."""
    rng = np.random.default_rng(seed)
    degrees = np.minimum(rng.poisson(mean_degree * rng.pareto(3.0, num_nodes)), num_nodes - 1)
    degrees[0] = num_nodes // 2
    rows = [np.sort(rng.choice(num_nodes, degree, replace=False)) for degree in degrees]
    return csc_from([row.tolist() for row in rows], dtype=dtype)


def plan_draws(schema: Schema, fanouts: Sequence[int]) -> DrawSettings:
    hops = np.repeat(np.array(fanouts[::-1], np.int64)[:, None], len(schema.etypes), axis=1)
    return DrawSettings(schema=schema, fanouts=hops, replace=False, exclude={}, seed=3)


def sample(
    csc: Csc,
    seeds: Sequence[int] | NDArray[np.int64],
    fanouts: Sequence[int],
    *,
    epoch: int = 0,
    workspace: ThreadTable | None = None,
) -> RawBatch:
    num_nodes = len(csc.indptr) - 1
    schema = Schema(ntypes=(NODE_TYPE,), num_nodes=(num_nodes,), etypes=(EDGE_TYPE,))
    request = plan_draws(schema, fanouts).request({NODE_TYPE: np.asarray(seeds, np.int64)}, epoch, {})
    return LocalSource(schema, [csc]).sample(request, {}, workspace or ThreadTable(num_nodes))


def edges_of_hop(batch: RawBatch, hop: int) -> list[tuple[int, int, int]]:
    node_ends = batch.node_ends[:, 0]
    num_rows = node_ends[:-1] + 1
    first = int(num_rows[:hop].sum())
    indptr = batch.indptr[first : first + num_rows[hop]]
    edges = slice(batch.edge_ends[hop], batch.edge_ends[hop + 1])
    destinations = np.repeat(batch.nodes[: node_ends[hop]], np.diff(indptr))
    sources = batch.nodes[batch.sources[edges]]
    return list(zip(sources.tolist(), destinations.tolist(), batch.edge_ids[edges].tolist(), strict=True))
