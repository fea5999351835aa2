"""Which rank of a server holds which of its rows: balanced on the work of the layers (algorithms 3.2)."""

from __future__ import annotations

import numpy as np

from dglx_dist.partition.base import Partitioner
from dglx_dist.partition.options import PartitionOptions
from dglx_dist.partition.registry import PARTITIONERS
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, Array, RawGraph
from dglx_dist.strategies.granndis.closure import Closure
from dglx_dist.strategies.granndis.row_index import RowIndex

AUTO = "auto"

MAX_GROUPS = 4
"""Groups of layers whose work is balanced each by itself; METIS finds little with more."""

TOLERANCE = 0.1
"""A rank may have so much more of a group's work than its share."""


def check_split(method: str) -> str:
    """Return the partitioner's name that ``method`` means: METIS for ``auto``.

    Raises:
        UnknownNameError: there is no such partitioner.
    """
    return PARTITIONERS.resolve("metis" if method == AUTO else method)


def split_rows(closure: Closure, num_ranks: int, method: str, seed: int) -> Array:
    """Give every row of a server to one of its ranks; called alone.

    Ranks wait for each other at every layer, so with a partitioner that balances several weights each
    group of layers is balanced by itself; with one that balances one weight, the sum over the layers.

    Args:
        closure: With hops above 0: all sources are rows of it.
        num_ranks: G, at least 1.
        method: A partitioner's name, or ``auto``.
        seed: The same one gives the same answer.

    Returns:
        (n,) int32 in [0, G); a rank may get none.

    Raises:
        ConfigError: the partitioner is not installed, or cannot do it.
    """
    num_rows = len(closure.nodes)
    if num_ranks == 1 or num_rows == 0:
        return np.zeros(num_rows, dtype=np.int32)
    plugin = PARTITIONERS.get(check_split(method))
    weights = _weights_for(plugin, closure)
    options = PartitionOptions(
        balance=tuple(weights) if "balance" in plugin.honours else (),
        tolerance=TOLERANCE if {"balance", "tolerance"} <= plugin.honours else {},
    )
    graph = RawGraph(
        name="closure",
        num_nodes={NODE_TYPE: num_rows},
        edges={EDGE_TYPE: _edges_among_rows(closure)},
        node_data={NODE_TYPE: weights},
    )
    return plugin(options).assign(graph, num_ranks, seed).part_of[NODE_TYPE]


def work_of_groups(closure: Closure) -> dict[str, Array]:
    """Return the (n,) int64 work of the rows in each group of layers, by name; they add up to the work.

    Layers that compute the same rows are one group; so are neighbours where there would be too many.
    """
    different = np.unique(closure.counts[1:])
    groups = np.array_split(different, min(len(different), MAX_GROUPS))
    row, degrees = np.arange(len(closure.nodes)), closure.in_degrees + 1
    weights = {}
    for number, group in enumerate(groups):
        layers = closure.counts[1:][np.isin(closure.counts[1:], group)]
        times = len(layers) - np.searchsorted(np.sort(layers), row, side="right")
        weights[f"layers_{number}"] = times * degrees
    return weights


def _weights_for(plugin: type[Partitioner], closure: Closure) -> dict[str, Array]:
    return work_of_groups(closure) if plugin.max_constraints is None else {"work": closure.work}


def _edges_among_rows(closure: Closure) -> tuple[Array, Array]:
    """Return (sources, destinations) as rows."""
    num_ids = int(max(closure.nodes.max(initial=-1), closure.sources.max(initial=-1))) + 1
    sources = RowIndex(closure.nodes, num_ids).places(closure.sources)
    assert not (sources < 0).any(), "a source is no row: split_rows is for hops above 0"
    return sources, np.repeat(np.arange(len(closure.indptr) - 1), np.diff(closure.indptr))
