"""Mini-batches from seeds, on the loader's threads: sampling, block construction, feature fetch."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, TypeVar, final

import dgl
import numpy as np
import torch
from dgl.heterograph import DGLBlock
from torch import Tensor

from dglx_dist.dataloading.feature_fetch import (
    WINDOW_BYTES,
    Ahead,
    Columns,
    Drawn,
    EdgesOfBlock,
    SplitColumn,
    edges_of,
    submit_columns,
)
from dglx_dist.dataloading.kernels import RawBatch, SampleRequest, Schema, ThreadTable
from dglx_dist.dataloading.sampler import BatchSource, DrawSettings, LocalSource, RemoteSource
from dglx_dist.dataloading.step_loader import Maker, run_ahead
from dglx_dist.errors import ConfigError
from dglx_dist.graph.kvstore import KVStore
from dglx_dist.internals.graphs import BlockTypes
from dglx_dist.internals.message_passing import place
from dglx_dist.internals.pytorch import Copy, ids_to_device
from dglx_dist.records import Array, EdgeType

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph


@final
class BatchBlockBuilder:
    """Builds the blocks of batches. Thread-safe.

    As with ``dgl.to_block``, every block has all node types on both sides, even those without a node, and all
    edge types in the graph's order; the destinations of a type are the first of its sources.
    """

    def __init__(self, schema: Schema, edge_weights: bool = False) -> None:
        self._schema, self._weighted = schema, edge_weights
        relations = [relation for _, relation, _ in schema.etypes]
        self._sources = schema.source_types.tolist()
        self._destinations = schema.destination_types.tolist()
        self._types = BlockTypes(schema.ntypes, relations, self._sources, self._destinations)

    def blocks(self, batch: RawBatch) -> tuple[dict[str, Tensor], list[DGLBlock]]:
        """Return ({node type: input node ids}, blocks), the input-most first; they share its arrays."""
        all_nodes = torch.from_numpy(batch.nodes)
        nodes = [all_nodes[first:last] for first, last in pairwise(batch.node_starts.tolist())]
        indptr, sources, edge_ids = map(torch.from_numpy, (batch.indptr, batch.sources, batch.edge_ids))
        columns = {dgl.EID: edge_ids}
        if self._weighted:
            columns["edge_weights"] = torch.from_numpy(batch.edge_weights)
        edge_ends, num_relations = batch.edge_ends.tolist(), len(self._sources)
        blocks: list[DGLBlock] = []
        row = 0
        for hop, (num_dst_of, num_src_of) in enumerate(pairwise(batch.node_ends.tolist())):
            edges, edge_columns = [], []
            ends = edge_ends[hop * num_relations : (hop + 1) * num_relations + 1]
            for relation, (first, last) in enumerate(pairwise(ends)):
                num_src = num_src_of[self._sources[relation]]
                num_dst = num_dst_of[self._destinations[relation]]
                offsets = indptr[row : row + num_dst + 1]
                edges.append((num_src, num_dst, offsets, sources[first:last]))
                edge_columns.append({name: values[first:last] for name, values in columns.items()})
                row += num_dst + 1
            blocks.append(self._types.block(edges, edge_columns, nodes, (num_src_of, num_dst_of)))
        return dict(zip(self._schema.ntypes, nodes, strict=True)), blocks[::-1]


Seeds: TypeAlias = Mapping[str, Array]
"""Node type to (B,) int64 distinct ids, B may be 0; a type without seeds may be missing."""

Excluded: TypeAlias = Mapping[EdgeType, Array]
"""Edge type to (X,) int64 ascending distinct ids of edges that a batch must not draw."""

NodeIds: TypeAlias = Tensor | dict[str, Tensor]
"""(n,) int64 global ids; a dict of them by type when the graph has more than one node type."""

NOTHING_EXCLUDED: Excluded = MappingProxyType({})

M = TypeVar("M", bound="MiniBatch")


@dataclass(frozen=True, kw_only=True)
class MiniBatch:
    """One batch, and the time it took."""

    input_nodes: NodeIds
    """The sources of the first block."""
    output_nodes: NodeIds
    """The seeds."""
    blocks: list[DGLBlock]
    """Layer 1 first."""
    sample_s: float
    """Seconds of sampling and building blocks; includes features if one call does both."""
    fetch_s: float
    """Seconds of fetching columns."""
    split: Sequence[SplitColumn] = ()
    """Columns that are set when the batch is delivered."""
    arrive: Callable[[], None] | None = None
    """Lets the consumer's stream wait for copies to a device."""

    def moved(self: M, device: torch.device, copy: Copy) -> M:
        """Return the batch on ``device``; :meth:`arrived` sets the rest there."""
        copied = partial(ids_to_device, device=device, copy=copy)
        return replace(
            self,
            input_nodes=_moved_nodes(self.input_nodes, copied),
            output_nodes=_moved_nodes(self.output_nodes, copied),
            blocks=[place(block, device, copy=copy) for block in self.blocks],
            split=[column.moved(copy) for column in self.split],
        )

    def arrived(self) -> None:
        """Let the current stream wait for the copies, and set the columns that are partly cached there."""
        if self.arrive is not None:
            self.arrive()
        for column in self.split:
            column.attach(self.blocks)


def _moved_nodes(nodes: NodeIds, copy: Copy) -> NodeIds:
    return copy(nodes) if isinstance(nodes, Tensor) else {ntype: copy(ids) for ntype, ids in nodes.items()}


@final
class SamplerMaker(Maker[str, MiniBatch]):
    """The maker of blocks around nodes by a sampler's own code."""

    def __init__(self, sampler: Any, g: DistGraph, columns: Columns) -> None:
        self._sampler, self._g, self._columns = sampler, g, columns

    def draw(
        self, seeds: Seeds, epoch: int, exclude: Excluded = NOTHING_EXCLUDED, *, step: int
    ) -> Drawn[MiniBatch]:
        # Drawn when it is made: nothing is announced.
        return Drawn(inputs={}, num_bytes=0, submit=lambda _claimed: partial(self._make, seeds, exclude))

    def _make(self, seeds: Seeds, exclude: Excluded) -> MiniBatch:
        begin = time.perf_counter()
        input_nodes, output_nodes, blocks = self._sample(_node_ids(seeds, self._g.ntypes), exclude)
        sampled = time.perf_counter()
        edges = [edges_of(block) for block in blocks] if self._columns.edges else []
        inputs, targets = self._arrays(input_nodes), self._arrays(output_nodes)
        # Nodes of a user's sampler may be repeated.
        finish = submit_columns(self._g.kvstore, self._columns, inputs, targets, edges, distinct=False)
        split = finish(blocks)
        end = time.perf_counter()
        return MiniBatch(
            input_nodes=input_nodes,
            output_nodes=output_nodes,
            blocks=blocks,
            sample_s=sampled - begin,
            fetch_s=end - sampled,
            split=split,
        )

    def offline(self) -> NoReturn:
        raise ConfigError(
            "draws of the sampler's own code cannot be reproduced by another rank; use "
            "dgl.dataloading.NeighborSampler"
        )

    def _sample(self, seeds: NodeIds, exclude: Excluded) -> Any:
        edges = {etype: torch.from_numpy(ids) for etype, ids in exclude.items() if len(ids)}
        if not edges:
            return self._sampler.sample(self._g, seeds)
        # DGL's samplers take plain ids where there is one edge type.
        excluded = edges if len(self._g.canonical_etypes) > 1 else next(iter(edges.values()))
        return self._sampler.sample(self._g, seeds, exclude_eids=excluded)

    def _arrays(self, nodes: NodeIds) -> dict[str, Array]:
        if isinstance(nodes, Tensor):
            return {self._g.ntypes[0]: nodes.numpy()}
        return {ntype: ids.numpy() for ntype, ids in nodes.items()}


def ids_by_type(nodes: dict[str, Tensor]) -> NodeIds:
    """Return ids as DGL's loaders yield them: without a dict if there is one node type."""
    return next(iter(nodes.values())) if len(nodes) == 1 else nodes


def _node_ids(seeds: Seeds, ntypes: Sequence[str]) -> NodeIds:
    nothing = np.empty(0, np.int64)
    return ids_by_type({ntype: torch.from_numpy(seeds.get(ntype, nothing)) for ntype in ntypes})


def drawn_bytes(nodes: int, offsets: int, edges: int) -> int:
    """Return the bytes of a drawn batch that waits for its rows; an edge has a source and an id."""
    return 8 * (nodes + offsets + 2 * edges)


@final
class KernelMaker:
    """The :class:`dglx_dist.dataloading.step_loader.Maker` of blocks around nodes by the compiled kernels."""

    def __init__(self, source: BatchSource, draws: DrawSettings, store: KVStore, columns: Columns) -> None:
        self._source, self._draws, self._store, self._columns = source, draws, store, columns
        self._source_of: Callable[[int], BatchSource] = lambda _step: source
        self._schema = draws.schema
        weighted = draws.by_source is not None and draws.by_source.unequal
        self._builder = BatchBlockBuilder(draws.schema, weighted)
        # One for each thread that makes a batch.
        self._idle: queue.SimpleQueue[ThreadTable] = queue.SimpleQueue()

    def offline(self) -> KernelMaker:
        if not isinstance(self._source, LocalSource):
            raise ConfigError(
                "this server has only a part of the graph's structure; open the graph with "
                "structure='replicated'"
            )
        return KernelMaker(self._source, self._draws, self._store, Columns())

    def sampling_signature(self) -> str:
        return self._draws.signature()

    def claim(self) -> Ahead:
        return self._columns.claim(self._store)

    def of_steps(
        self, seeds_of: Callable[[int], Seeds], epoch: int, steps: Iterator[int], num_threads: int
    ) -> KernelMaker:
        source, lock, most = self._source, threading.Lock(), 1
        if isinstance(source, LocalSource) or not self._store.looks_ahead:
            return self
        held: dict[int, RemoteSource] = {}

        def groups() -> Iterator[dict[int, SampleRequest]]:
            group: dict[int, SampleRequest] = {}
            for step in steps:
                new = self._draws.request(seeds_of(step), epoch, NOTHING_EXCLUDED, step)
                if len(group) >= most or any((one.streams != new.streams).any() for one in group.values()):
                    yield group
                    group = {}
                group[step] = new
            if group:
                yield group

        def draw(group: Mapping[int, SampleRequest]) -> dict[int, RemoteSource]:
            nonlocal most
            joint = source.drawn_jointly([*group.values()])
            num_edges = sum(len(edges.sources) for hop in joint.known for _, edges in hop)
            most = max(1, int(len(group) * min(4, WINDOW_BYTES / 4 / drawn_bytes(0, 1, num_edges))))
            return dict.fromkeys(group, joint)

        # The next ones are drawn meanwhile, on a thread that ends with the maker.
        drawn = run_ahead(draw, groups(), depth=1, num_threads=num_threads)

        def source_of(step: int) -> RemoteSource:
            with lock:
                while step not in held and (more := next(drawn, None)) is not None:
                    held.update(more)
                # After an error, or where the end has moved, a batch is drawn by itself.
                return held.pop(step, source)

        maker = copy(self)
        maker._source_of = source_of
        return maker

    def draw(
        self, seeds: Seeds, epoch: int, exclude: Excluded = NOTHING_EXCLUDED, *, step: int
    ) -> Drawn[MiniBatch]:
        begin = time.perf_counter()
        request = self._draws.request(seeds, epoch, exclude, step)
        source = self._source_of(step)
        try:
            workspace = self._idle.get_nowait()
        except queue.Empty:
            workspace = ThreadTable(sum(self._schema.num_nodes))
        try:
            batch = source.sample(request, exclude, workspace)
        finally:
            self._idle.put(workspace)
        inputs = {
            ntype: batch.nodes[batch.node_starts[number] : batch.node_starts[number + 1]]
            for number, ntype in enumerate(self._schema.ntypes)
        }
        return Drawn(
            inputs=self._columns.announced(inputs),
            num_bytes=drawn_bytes(len(batch.nodes), len(batch.indptr), len(batch.sources)),
            submit=partial(self._submit, batch, seeds, inputs, time.perf_counter() - begin),
        )

    def _submit(
        self, batch: RawBatch, seeds: Seeds, inputs: Mapping[str, Array], sample_s: float, claimed: Ahead
    ) -> Callable[[], MiniBatch]:
        begin = time.perf_counter()
        edges = self._edges(batch) if self._columns.edges else []
        pulled = submit_columns(self._store, self._columns, inputs, seeds, edges, claimed=claimed)
        submit_s = time.perf_counter() - begin

        def finish() -> MiniBatch:
            building = time.perf_counter()
            nodes, blocks = self._builder.blocks(batch)
            built = time.perf_counter()
            split = pulled(blocks)
            return MiniBatch(
                input_nodes=ids_by_type(nodes),
                output_nodes=_node_ids(seeds, self._schema.ntypes),
                blocks=blocks,
                sample_s=sample_s + (built - building),
                fetch_s=submit_s + time.perf_counter() - built,
                split=split,
            )

        return finish

    def _edges(self, batch: RawBatch) -> Sequence[EdgesOfBlock]:
        ends, num_relations = batch.edge_ends, len(self._schema.etypes)
        return [
            {
                etype: batch.edge_ids[ends[first + number] : ends[first + number + 1]]
                for number, etype in enumerate(self._schema.etypes)
            }
            for first in range(0, len(ends) - 1, num_relations)
        ][::-1]


BatchMaker: TypeAlias = SamplerMaker | KernelMaker
