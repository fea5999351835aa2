"""One batch from its seeds: sampled, built into blocks, features attached. Runs on the loader's threads."""

from __future__ import annotations

import hashlib
import queue
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any, TypeAlias, final

import numpy as np
import torch
from dgl.heterograph import DGLBlock
from torch import Tensor

from dglx_dist.draws.pick import Rule, merged
from dglx_dist.draws.rng import stream_key
from dglx_dist.errors import ConfigError
from dglx_dist.graph.gather import as_words
from dglx_dist.graph.in_edges import NO_EDGES
from dglx_dist.graph.kvstore import KVStore
from dglx_dist.records import Array, EdgeType
from dglx_dist.sampling.attach import Columns, EdgesOfBlock, Fetch, edges_of
from dglx_dist.sampling.blocks import BlockBuilder
from dglx_dist.sampling.buffers import BufferPool
from dglx_dist.sampling.kernel import Ask, RawBatch
from dglx_dist.sampling.source import BatchSource, WholeSource
from dglx_dist.sampling.workspace import Workspace

Seeds: TypeAlias = Mapping[str, Array]
"""Node type to (B,) int64 distinct ids, B may be 0; a type without seeds may be missing."""

Excluded: TypeAlias = Mapping[EdgeType, Array]
"""Edge type to (X,) int64 ascending distinct ids of edges that a batch must not draw."""

NodeIds: TypeAlias = Tensor | dict[str, Tensor]
"""(n,) int64 global ids; a dict of them by type when the graph has more than one node type."""

SampleBlocks: TypeAlias = Callable[[NodeIds, Excluded], tuple[NodeIds, NodeIds, list[DGLBlock]]]
"""Seeds and excluded edges to input nodes, output nodes and blocks."""

NOTHING_EXCLUDED: Excluded = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class MiniBatch:
    """What a loader yields, and how long it took."""

    input_nodes: NodeIds
    """The sources of the first block."""
    output_nodes: NodeIds
    """The seeds."""
    blocks: list[DGLBlock]
    """Layer 1 first."""
    sample_s: float
    """Seconds of sampling and building blocks; the features too where one call does both."""
    fetch_s: float
    """Seconds of fetching columns."""


class BatchMaker(ABC):
    """Makes the batches of one loader; called from several threads at a time."""

    @abstractmethod
    def make(self, seeds: Seeds, epoch: int, exclude: Excluded = NOTHING_EXCLUDED) -> MiniBatch:
        """Make the batch of ``seeds`` in ``epoch``, without the edges ``exclude``.

        Raises:
            ConfigError: a seed is given twice.
            PeerError: another rank that was asked is dead or silent.
        """

    def alone(self) -> BatchMaker:
        """Return what makes the same blocks without columns and without asking anybody.

        Raises:
            ConfigError: the structure is not whole here, or the sampler draws as it likes.
        """
        raise ConfigError(
            "the sampler's own code draws as it likes, so nobody else can draw the same; use "
            "dgl.dataloading.NeighborSampler"
        )

    def drawn_by(self) -> str:
        """Return what differs between ranks that would draw differently, "" where nobody can tell."""
        return ""


@dataclass(frozen=True, kw_only=True)
class Draws:
    """How all batches of a loader are drawn."""

    fanouts: tuple[int, ...]
    """Layer 1 first; -1 for all in-edges."""
    replace: bool
    exclude: Array
    """(X,) int64 ascending ids of edges never drawn."""
    seed: int
    idtype: np.dtype[Any]
    """Of the blocks' structure: int32 or int64."""

    def told(self) -> str:
        """Return the fields, the excluded edges as a digest."""
        digest = hashlib.sha256(np.ascontiguousarray(self.exclude).data).hexdigest()[:16]
        return f"fanouts={self.fanouts}, replace={self.replace}, exclude={digest}, seed={self.seed}"

    def ask(self, seeds: Array, epoch: int, exclude: Array = NO_EDGES) -> Ask:
        """Return what the kernels need for the batch of ``seeds``, without the edges ``exclude`` either."""
        fanouts = np.array(self.fanouts[::-1], np.int64)
        streams = np.array([stream_key(self.seed, epoch, hop) for hop in range(len(fanouts))], np.uint64)
        rule = Rule(self.replace, merged(self.exclude, exclude))
        return Ask(seeds, fanouts, streams, rule, np.empty(0, self.idtype), exclude)


@dataclass(frozen=True, kw_only=True)
class LocalColumn:
    """An input column whose rows are all in this server's memory, in one piece."""

    name: str
    rows: Array
    """(N, *row) as NumPy has it, C-contiguous."""
    dtype: torch.dtype


@final
class KernelMaker(BatchMaker):
    """Makes batches with the compiled kernels.

    Args:
        source: Where the structure is.
        draws: How to draw.
        store: Where the columns are.
        columns: What to attach, without what ``slicer`` copies.
        num_nodes: N.
        etype: Of the blocks.
        slicer: Samples in place of ``source`` and copies an input column in the same call.
    """

    def __init__(
        self,
        source: BatchSource,
        draws: Draws,
        store: KVStore,
        columns: Columns,
        *,
        num_nodes: int,
        etype: EdgeType,
        slicer: LocalSlicer | None = None,
    ) -> None:
        self._source, self._draws, self._store, self._columns = source, draws, store, columns
        self._slicer, self._workspaces = slicer, Workspaces(num_nodes)
        self._etype, self._builder = etype, BlockBuilder(etype)
        self._num_nodes = num_nodes

    def alone(self) -> BatchMaker:
        """See :meth:`BatchMaker.alone`."""
        if not self._source.is_whole:
            raise ConfigError(
                "this server has only a part of the graph's structure; open the graph with "
                "structure='replicated'"
            )
        return KernelMaker(
            self._source, self._draws, self._store, Columns(), num_nodes=self._num_nodes, etype=self._etype
        )

    def drawn_by(self) -> str:
        """See :meth:`BatchMaker.drawn_by`."""
        return self._draws.told()

    def make(self, seeds: Seeds, epoch: int, exclude: Excluded = NOTHING_EXCLUDED) -> MiniBatch:
        """Make a batch; see :class:`BatchMaker`."""
        begin = time.perf_counter()
        targets = seeds.get(self._etype[2], np.empty(0, np.int64))
        ask = self._draws.ask(targets, epoch, exclude.get(self._etype, NO_EDGES))
        with self._workspaces.borrowed() as workspace:
            batch, ready = self._sample(ask, workspace)
        fetch = Fetch(self._store, self._columns)
        asked = time.perf_counter()
        ntype = self._etype[0]
        fetch.start({ntype: batch.nodes}, {ntype: targets}, self._edges(batch))
        building = time.perf_counter()
        nodes, blocks = self._builder.blocks(batch)
        built = time.perf_counter()
        fetch.finish(blocks, {ntype: ready})
        end = time.perf_counter()
        return MiniBatch(
            input_nodes=nodes,
            output_nodes=torch.from_numpy(targets),
            blocks=blocks,
            sample_s=(asked - begin) + (built - building),
            fetch_s=(building - asked) + (end - built),
        )

    def _sample(self, ask: Ask, workspace: Workspace) -> tuple[RawBatch, dict[str, Tensor]]:
        if self._slicer is None:
            return self._source.sample(ask, workspace), {}
        return self._slicer.sample(ask, workspace)

    def _edges(self, batch: RawBatch) -> Sequence[EdgesOfBlock]:
        """Return the edges of each block, the input-most first."""
        return [{self._etype: batch.edge_ids[first:last]} for first, last in pairwise(batch.edge_ends)][::-1]


@final
class LocalSlicer:
    """Samples and copies one local input column in the same compiled call.

    Args:
        source: The whole structure.
        column: What to copy.
        num_batches: How many batches may be alive at a time.
    """

    def __init__(self, source: WholeSource, column: LocalColumn, num_batches: int) -> None:
        self._source, self._column = source, column
        (self._words,) = as_words(column.rows)
        self._pool = BufferPool(self._words.shape[1], self._words.dtype, num_batches)

    def sample(self, ask: Ask, workspace: Workspace) -> tuple[RawBatch, dict[str, Tensor]]:
        """Return the batch, and the column's name to its rows of the batch's nodes."""
        batch, out = self._source.sample_and_slice(ask, workspace, self._words, self._pool.borrow())
        self._pool.keep(out)
        rows = out[: len(batch.nodes)].reshape(-1).view(self._column.rows.dtype)
        shaped = torch.from_numpy(rows.reshape(len(batch.nodes), *self._column.rows.shape[1:]))
        return batch, {self._column.name: shaped.view(self._column.dtype)}


@final
class SamplerMaker(BatchMaker):
    """Makes batches with a sampler's own code.

    Args:
        sample: The sampler's.
        store: Where the columns are.
        columns: What to attach.
        ntypes: The graph's node types.
    """

    def __init__(self, sample: SampleBlocks, store: KVStore, columns: Columns, ntypes: Sequence[str]) -> None:
        self._sample, self._store, self._columns, self._ntypes = sample, store, columns, tuple(ntypes)

    def make(self, seeds: Seeds, epoch: int, exclude: Excluded = NOTHING_EXCLUDED) -> MiniBatch:
        """Make a batch; see :class:`BatchMaker`. The epoch is of no use: the sampler draws as it likes."""
        begin = time.perf_counter()
        targets = {ntype: torch.from_numpy(seeds.get(ntype, np.empty(0, np.int64))) for ntype in self._ntypes}
        input_nodes, output_nodes, blocks = self._sample(ids_by_type(targets), exclude)
        asked = time.perf_counter()
        # What a sampler of the user's lists may be repeated.
        fetch = Fetch(self._store, self._columns, distinct=False)
        edges = [edges_of(block) for block in blocks] if self._columns.edges else []
        fetch.start(self._arrays(input_nodes), self._arrays(output_nodes), edges)
        fetch.finish(blocks, {})
        end = time.perf_counter()
        return MiniBatch(
            input_nodes=input_nodes,
            output_nodes=output_nodes,
            blocks=blocks,
            sample_s=asked - begin,
            fetch_s=end - asked,
        )

    def _arrays(self, nodes: NodeIds) -> dict[str, Array]:
        if isinstance(nodes, Tensor):
            return {self._ntypes[0]: nodes.numpy()}
        return {ntype: ids.numpy() for ntype, ids in nodes.items()}


@final
class Workspaces:
    """The workspaces of a loader, as many as threads that make batches at a time.

    Args:
        num_nodes: Nodes of all types.
    """

    def __init__(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes
        self._idle: queue.SimpleQueue[Workspace] = queue.SimpleQueue()

    @contextmanager
    def borrowed(self) -> Iterator[Workspace]:
        """Lend a workspace to the calling thread, a new one when all are in use."""
        try:
            workspace = self._idle.get_nowait()
        except queue.Empty:
            workspace = Workspace(self._num_nodes)
        try:
            yield workspace
        finally:
            self._idle.put(workspace)


def ids_by_type(nodes: dict[str, Tensor]) -> NodeIds:
    """Return ids of all node types as DGL's loaders yield them: without a dict when there is one type."""
    return next(iter(nodes.values())) if len(nodes) == 1 else nodes
