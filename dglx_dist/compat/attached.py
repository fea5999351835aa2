"""Rows that a loader has attached to a batch already, for scripts that ask the graph for them."""

from __future__ import annotations

import weakref
from typing import Any, final

from torch import Tensor

from dglx_dist.graph import DistGraph
from dglx_dist.graph.dist_tensor import DistTensor

_BATCH = "compat.batch"


@final
class LastBatch:
    """The batch that was yielded last: its input nodes and the rows on its first block, held weakly.

    The rows, not the block: copies that a script makes (``block.int()``) hold the same ones.
    """

    def __init__(self, g: DistGraph, input_nodes: Tensor, block: Any) -> None:
        self._nodes = weakref.ref(input_nodes)
        self._rows = {name: weakref.ref(rows) for name, rows in block.srcdata.items()}
        self._policy = g.get_node_partition_policy(g.ntypes[0])

    def rows(self, tensor: DistTensor, index: object) -> Tensor | None:
        """Return the rows of ``tensor`` that the block has, if ``index`` is the batch's own tensor of ids."""
        if index is None or index is not self._nodes() or tensor.name not in self._rows:
            return None
        # Edges, or another graph, may have something of that name.
        is_of_nodes = tensor.kvstore_key == self._policy.key(tensor.name)
        return self._rows[tensor.name]() if is_of_nodes and tensor.kvstore is self._policy.store else None


def remember(g: DistGraph, input_nodes: object, blocks: Any) -> None:
    """Note what is yielded now; ids by type are not noted, as strategies that cut columns have one type."""
    if isinstance(input_nodes, Tensor):
        g.session.attached[_BATCH] = LastBatch(g, input_nodes, blocks[0])


def attached_rows(tensor: DistTensor, index: object) -> Tensor | None:
    """Return what the last batch's first block has of ``tensor`` for its own ids ``index``, or None.

    Under a strategy that cuts features by column, ``g.ndata[name][input_nodes]`` is then what the wrapped
    model takes, this rank's columns, and no row is fetched.
    """
    batch = tensor.kvstore.session.attached.get(_BATCH)
    return batch.rows(tensor, index) if isinstance(batch, LastBatch) else None
