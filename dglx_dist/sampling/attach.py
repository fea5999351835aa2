"""Columns of nodes and edges for the blocks that ask for them, fetched while blocks are built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import dgl
import numpy as np
from dgl.heterograph import DGLBlock
from torch import Tensor

from dglx_dist.graph.kvstore import KVStore
from dglx_dist.graph.pull import PendingPull
from dglx_dist.records import Array
from dglx_dist.sampling.precision import Precision

EDGE_PHASE, LABEL_PHASE, FEATURE_PHASE = "edge_features", "labels", "features"
"""The ledger's names of these bytes."""


@dataclass(frozen=True, kw_only=True)
class Columns:
    """What to attach: name in the frame to name in the store."""

    inputs: Mapping[str, str] = field(default_factory=dict)
    """For the sources of the first block."""
    targets: Mapping[str, str] = field(default_factory=dict)
    """For the destinations of the last block."""
    edges: Mapping[str, str] = field(default_factory=dict)
    """For the edges of every block."""
    precision: Precision = field(default_factory=Precision)
    """What the floating-point columns of inputs and edges become."""


@final
class Fetch:
    """Columns under way for one batch. All of its methods belong to one thread.

    Args:
        store: Where the columns are.
        columns: What to attach.
    """

    def __init__(self, store: KVStore, columns: Columns) -> None:
        self._store, self._columns = store, columns
        self._inputs: dict[str, PendingPull] = {}
        self._targets: dict[str, PendingPull] = {}

    def start(self, inputs: Array, targets: Array) -> None:
        """Ask for the rows of the input nodes and of the targets ((K,) int64 each); returns at once."""
        self._inputs = {
            name: self._store.submit_pull(key, inputs, phase=FEATURE_PHASE)
            for name, key in self._columns.inputs.items()
        }
        self._targets = {
            name: self._store.submit_pull(key, targets, phase=LABEL_PHASE)
            for name, key in self._columns.targets.items()
        }

    def finish(self, blocks: Sequence[DGLBlock], ready: Mapping[str, Tensor]) -> None:
        """Wait, and set the columns on ``blocks``; ``ready`` are input columns that are here already.

        Raises:
            PeerError: an owner of rows is dead or silent.
        """
        edges = [
            {
                name: self._store.submit_pull(key, _ids(block.edata[dgl.EID]), phase=EDGE_PHASE, layer=layer)
                for name, key in self._columns.edges.items()
            }
            for layer, block in enumerate(blocks, start=1)
        ]
        for name, rows in ready.items():
            blocks[0].srcdata[name] = self._columns.precision.converted(rows)
        for name, pull in self._inputs.items():
            blocks[0].srcdata[name] = self._columns.precision.converted(pull.result())
        for name, pull in self._targets.items():
            blocks[-1].dstdata[name] = pull.result()
        for block, pulls in zip(blocks, edges, strict=True):
            for name, pull in pulls.items():
                block.edata[name] = self._columns.precision.converted(pull.result())


def _ids(ids: Tensor) -> Array:
    return ids.numpy().astype(np.int64, copy=False)
