"""DGL's ``node_split`` and ``edge_split``: always masks."""

from __future__ import annotations

import warnings
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from dglx_dist.compat.book import RangePartitionBook
from dglx_dist.compat.tensor import DistTensor, inner_tensor
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_tensor import opened_graph
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
        partition_book: Of the graph opened last; None: that one.
        ntype: Node type.
        rank: Whose share; None: this rank's.
        force_even: Whether shares differ by at most one over all ranks.
        node_trainer_ids: (N,) rank that would like each node.

    Returns:
        (n,) int64 ids, ascending.

    Raises:
        ConfigError: there is not one value for each node, or another graph's book.
    """
    count = opened_graph().num_nodes(ntype)
    book = _inner_book(partition_book)
    trainers = cast("Any", inner_tensor(node_trainer_ids))
    return split_nodes(_mask(nodes, count, ntype), book, ntype, rank, force_even, trainers)


def edge_split(
    edges: Any,
    partition_book: RangePartitionBook | None = None,
    etype: str | EdgeType = EDGE_TYPE[1],
    rank: int | None = None,
    force_even: bool = True,
    edge_trainer_ids: Any = None,
) -> Tensor:
    """Return the marked edges that a rank works on; as :func:`node_split`."""
    count = opened_graph().num_edges(etype)
    book = _inner_book(partition_book)
    trainers = cast("Any", inner_tensor(edge_trainer_ids))
    return split_edges(_mask(edges, count, etype), book, etype, rank, force_even, trainers)


def _mask(marked: Any, count: int, what: object) -> Any:
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
        warnings.warn(
            "all ids were given where a mask is expected; all rows are taken (DGL would leave out row 0)",
            stacklevel=3,
        )
        return np.ones(count, dtype=np.bool_)
    return values != 0


def _inner_book(book: RangePartitionBook | None) -> Any:
    opened = opened_graph().get_partition_book()
    if book is None:
        return opened
    # A book that was loaded from a file has the partitions of the file, not the servers of this run.
    inner = book.inner if isinstance(book, RangePartitionBook) else book
    same = inner.ntypes == opened.ntypes and all(
        inner.num_nodes(ntype) == opened.num_nodes(ntype) for ntype in opened.ntypes
    )
    if not same:
        raise ConfigError("the partition book is of another graph than the one opened last; leave it out")
    return opened
