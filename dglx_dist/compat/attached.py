"""Rows that a loader has attached to a batch already, for scripts that ask the graph for them."""

from __future__ import annotations

import weakref
from typing import Any, final

from torch import Tensor

from dglx_dist.cluster.session import Session

_BATCH = "compat.batch"


@final
class LastBatch:
    """The batch that was yielded last: its input nodes and its first block, held weakly."""

    def __init__(self, input_nodes: Tensor, block: Any) -> None:
        self._nodes, self._block = weakref.ref(input_nodes), weakref.ref(block)
        self._names = frozenset(block.srcdata)

    def rows(self, index: object, name: str) -> Tensor | None:
        """Return the rows of ``name`` that the block has, if ``index`` is the batch's own tensor of ids."""
        block = self._block()
        if block is None or index is None or index is not self._nodes() or name not in self._names:
            return None
        return block.srcdata[name]


def remember(session: Session, input_nodes: object, blocks: Any) -> None:
    """Note what is yielded now; ids by type are not noted, as strategies that cut columns have one type."""
    if isinstance(input_nodes, Tensor):
        session.attached[_BATCH] = LastBatch(input_nodes, blocks[0])


def attached_rows(session: Session, index: object, name: str) -> Tensor | None:
    """Return what the last batch's first block has under ``name`` for its own ids ``index``, or None.

    Under a strategy that cuts features by column, ``g.ndata[name][input_nodes]`` is then what the wrapped
    model takes, this rank's columns, and no row is fetched.
    """
    batch = session.attached.get(_BATCH)
    return batch.rows(index, name) if isinstance(batch, LastBatch) else None
