"""One batch of several node and edge types from its seeds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import final

import numpy as np
import torch

from dglx_dist.graph.kvstore import KVStore
from dglx_dist.sampling.attach import Columns, EdgesOfBlock, Fetch
from dglx_dist.sampling.blocks import TypedBlockBuilder
from dglx_dist.sampling.maker import (
    NOTHING_EXCLUDED,
    BatchMaker,
    Excluded,
    MiniBatch,
    Seeds,
    Workspaces,
    ids_by_type,
)
from dglx_dist.sampling.relational import TypedBatch
from dglx_dist.sampling.relational_source import TypedDraws, TypedSource


@final
class TypedMaker(BatchMaker):
    """Makes batches of graphs with several types with the compiled kernel.

    Args:
        source: Where the structure is.
        draws: How to draw.
        store: Where the columns are.
        columns: What to attach.
    """

    def __init__(self, source: TypedSource, draws: TypedDraws, store: KVStore, columns: Columns) -> None:
        self._source, self._draws, self._store, self._columns = source, draws, store, columns
        self._schema = draws.schema
        self._builder = TypedBlockBuilder(draws.schema)
        self._workspaces = Workspaces(sum(draws.schema.num_nodes))

    def make(self, seeds: Seeds, epoch: int, exclude: Excluded = NOTHING_EXCLUDED) -> MiniBatch:
        """Make a batch; see :class:`BatchMaker`."""
        begin = time.perf_counter()
        ask = self._draws.ask(seeds, epoch, exclude)
        with self._workspaces.borrowed() as workspace:
            batch = self._source.sample(ask, exclude, workspace)
        fetch = Fetch(self._store, self._columns)
        asked = time.perf_counter()
        inputs = {
            ntype: batch.nodes[batch.node_starts[number] : batch.node_starts[number + 1]]
            for number, ntype in enumerate(self._schema.ntypes)
        }
        fetch.start(inputs, seeds, self._edges(batch) if self._columns.edges else [])
        building = time.perf_counter()
        nodes, blocks = self._builder.blocks(batch)
        built = time.perf_counter()
        fetch.finish(blocks, {})
        targets = {
            ntype: torch.from_numpy(seeds.get(ntype, np.empty(0, np.int64))) for ntype in self._schema.ntypes
        }
        end = time.perf_counter()
        return MiniBatch(
            input_nodes=ids_by_type(nodes),
            output_nodes=ids_by_type(targets),
            blocks=blocks,
            sample_s=(asked - begin) + (built - building),
            fetch_s=(building - asked) + (end - built),
        )

    def _edges(self, batch: TypedBatch) -> Sequence[EdgesOfBlock]:
        """Return the edges of each block, the input-most first."""
        ends, num_relations = batch.edge_ends, len(self._schema.etypes)
        return [
            {
                etype: batch.edge_ids[ends[first + number] : ends[first + number + 1]]
                for number, etype in enumerate(self._schema.etypes)
            }
            for first in range(0, len(ends) - 1, num_relations)
        ][::-1]
