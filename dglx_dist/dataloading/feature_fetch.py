"""Asynchronous fetch of node and edge columns while blocks are built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, final

import dgl
import numpy as np
from dgl.heterograph import DGLBlock

from dglx_dist.dataloading.row_buffers import Precision, RowMemory
from dglx_dist.graph.column import PendingPull
from dglx_dist.graph.kvstore import KVStore
from dglx_dist.records import Array, EdgeType

EDGE_PHASE, LABEL_PHASE, FEATURE_PHASE = "edge_features", "labels", "features"
"""Phases of the byte ledger."""

EdgesOfBlock: TypeAlias = Mapping[EdgeType, Array]
"""Edge type to the (E,) ids of a block's edges."""

NO_ROWS: Array = np.empty(0, np.int64)


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The columns to attach: by type, name in the frame to name in the store."""

    inputs: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """For the sources of the first block, by node type."""
    targets: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """For the destinations of the last block, by node type."""
    edges: Mapping[EdgeType, Mapping[str, str]] = field(default_factory=dict)
    """For the edges of every block, by edge type."""
    precision: Precision = field(default_factory=Precision)
    """Converts the floating-point columns of inputs and edges."""
    memory: RowMemory = field(default_factory=RowMemory)
    """Memory for the rows of inputs."""


@final
class Fetch:
    """Pending columns of one batch. Not thread-safe.

    With ``distinct``, no input node and no target is repeated, as in all batches of compiled kernels.
    """

    def __init__(self, store: KVStore, columns: Columns, *, distinct: bool = True) -> None:
        self._store, self._columns, self._distinct = store, columns, distinct
        self._inputs: dict[tuple[str, str], PendingPull] = {}
        self._targets: dict[tuple[str, str], PendingPull] = {}
        self._edges: list[dict[tuple[EdgeType, str], PendingPull]] = []

    def start(
        self, inputs: Mapping[str, Array], targets: Mapping[str, Array], blocks: Sequence[EdgesOfBlock]
    ) -> None:
        """Send the requests for all rows of the batch, without waiting.

        Args:
            inputs: Node type to the (n,) int64 sources of the first block; a type may be missing.
            targets: Node type to the (B,) int64 destinations of the last.
            blocks: The edges of each block, the input-most first; read only when edge columns are fetched.
        """
        self._inputs = {
            (ntype, name): self._submit_input(key, inputs.get(ntype, NO_ROWS))
            for ntype, names in self._columns.inputs.items()
            for name, key in names.items()
        }
        self._targets = {
            (ntype, name): self._store.submit_pull(
                key, targets.get(ntype, NO_ROWS), distinct=self._distinct, phase=LABEL_PHASE
            )
            for ntype, names in self._columns.targets.items()
            for name, key in names.items()
        }
        self._edges = [
            {
                (etype, name): self._store.submit_pull(
                    key, edges[etype].astype(np.int64, copy=False), phase=EDGE_PHASE, layer=layer
                )
                for etype, names in self._columns.edges.items()
                for name, key in names.items()
            }
            for layer, edges in enumerate(blocks, start=1)
        ]

    def finish(self, blocks: Sequence[DGLBlock]) -> None:
        """Wait, and set the columns on ``blocks``, the input-most first.

        Raises:
            PeerError: an owner of rows is dead or silent.
        """
        converted = self._columns.precision.converted
        for (ntype, name), pull in self._inputs.items():
            blocks[0].srcnodes[ntype].data[name] = converted(pull())
        for (ntype, name), pull in self._targets.items():
            blocks[-1].dstnodes[ntype].data[name] = pull()
        # Without edge columns, `start` may have got no edges.
        for block, pulls in zip(blocks, self._edges, strict=bool(self._edges)):
            for (etype, name), pull in pulls.items():
                block.edges[etype].data[name] = converted(pull())

    def _submit_input(self, key: str, ids: Array) -> PendingPull:
        out = self._columns.memory.rows(key, len(ids), self._store.column(key).info)
        return self._store.submit_pull(key, ids, out=out, distinct=self._distinct, phase=FEATURE_PHASE)


def edges_of(block: DGLBlock) -> dict[EdgeType, Array]:
    """Return the edge ids of a block."""
    return {etype: block.edges[etype].data[dgl.EID].numpy() for etype in block.canonical_etypes}
