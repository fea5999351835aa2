"""DGL's ``node_split`` and ``edge_split``: always masks."""

from __future__ import annotations

import warnings
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from dglx_dist.compat.book import RangePartitionBook
from dglx_dist.compat.opened import edge_type, graph_of_book, node_type
from dglx_dist.compat.tensor import DistTensor, inner_tensor
from dglx_dist.errors import ConfigError
from dglx_dist.graph import DistGraph
from dglx_dist.graph.ids import as_array
from dglx_dist.graph.split import edge_split as split_edges
from dglx_dist.graph.split import node_split as split_nodes
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, EdgeType


def node_split(
    nodes: Any,
    partition_book: RangePartitionBook | None = None,
    ntype: str = NODE_TYPE,
    rank: int | None = None,
    force_even: bool = True,
    node_trainer_ids: Any = None,
) -> Tensor:
    """Return the marked nodes that a rank works on.

    Args:
        nodes: (N,) DistTensor, tensor or array; every value but 0 marks its node.
        partition_book: Of one of the open graphs, also as read from its file; None: that of a DistTensor's
            graph, or of the only graph that is open.
        ntype: Node type.
        rank: Whose share; None: this rank's.
        force_even: Whether shares differ by at most one over all ranks.
        node_trainer_ids: (N,) rank that would like each node.

    Returns:
        (n,) int64 ids, ascending.

    Raises:
        ConfigError: there is not one value for each node, the book is of no open graph or of another than
            ``nodes``, or of several open graphs any could be meant.
    """
    g = _graph(nodes, partition_book)
    kind = node_type(g, ntype)
    mask = _mask(nodes, g, g.num_nodes(kind), kind)
    trainers = cast("Any", inner_tensor(node_trainer_ids))
    return split_nodes(mask, g.get_partition_book(), kind, rank, force_even, trainers)


def edge_split(
    edges: Any,
    partition_book: RangePartitionBook | None = None,
    etype: str | EdgeType = EDGE_TYPE[1],
    rank: int | None = None,
    force_even: bool = True,
    edge_trainer_ids: Any = None,
) -> Tensor:
    """Return the marked edges that a rank works on; as :func:`node_split`."""
    g = _graph(edges, partition_book)
    kind = edge_type(g, etype)
    mask = _mask(edges, g, g.num_edges(kind), kind)
    trainers = cast("Any", inner_tensor(edge_trainer_ids))
    return split_edges(mask, g.get_partition_book(), kind, rank, force_even, trainers)


def _mask(marked: Any, g: DistGraph, count: int, what: object) -> Any:
    """Return what ``marked`` marks, as a mask of bools.

    Raises:
        ConfigError: there is not one value for each row.
    """
    if len(marked) != count:
        raise ConfigError(f"the mask has {len(marked)} values for {count} rows of {what!r}; give one a row")
    if isinstance(marked, DistTensor):
        if marked.dtype == torch.bool:
            return marked.inner
        marked = marked.inner.to_local()
    values = as_array(marked)
    if values.dtype.kind in "iu" and count > 1 and np.array_equal(np.sort(values), np.arange(count)):
        if g.rank() == 0:
            warnings.warn(
                "all ids were given where a mask is expected; all rows are taken (DGL would leave out row 0)",
                stacklevel=3,
            )
        return np.ones(count, dtype=np.bool_)
    return values != 0


def _graph(marked: Any, given: RangePartitionBook | None) -> DistGraph:
    """Return the graph whose rows are split.

    Raises:
        ConfigError: it is not known, or the mask and the book are of different ones.
    """
    if given is not None and not isinstance(given, RangePartitionBook):
        raise ConfigError(f"partition_book is a {type(given).__name__}; give g.get_partition_book()")
    book = None if given is None else given.inner
    if not isinstance(marked, DistTensor):
        return graph_of_book(book)
    g = graph_of_book(marked.inner.part_policy.partition_book)
    if book is not None and graph_of_book(book) is not g:
        raise ConfigError(f"the mask {marked.name!r} is of the graph {g.name!r}, and the book of another")
    return g
