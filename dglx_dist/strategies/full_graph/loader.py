"""Loader of full-graph training: yields the blocks of all layers for one plan per step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, final

import dgl
import torch
from torch import Tensor

from dglx_dist.comm.exchange import row_exchanges
from dglx_dist.comm.session import if_alive
from dglx_dist.comm.trace import LOADER
from dglx_dist.dataloading.feature_fetch import LABEL_PHASE, Columns
from dglx_dist.dataloading.step_loader import EpochLoader
from dglx_dist.graph.kvstore import KVStore
from dglx_dist.graph.row_kernels import empty_rows
from dglx_dist.records import Array, StepShare
from dglx_dist.strategies.full_graph.halo_block import HaloBlock, halo_block
from dglx_dist.strategies.full_graph.halo_exchange import HaloExchange
from dglx_dist.strategies.full_graph.halo_plan import PlanCache, RankPlan
from dglx_dist.strategies.full_graph.options import LoaderRequest
from dglx_dist.strategies.full_graph.plan_source import PlanSource

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph


PHASE = "preload"
"""Ledger phase of features and edge values, which are fetched once."""

FetchHalo: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Maps ((own rows, *row), (n_halo, *row) output) to the filled output; collective."""


@final
class ColumnReader:
    """Reads the columns of plans by one-sided calls, on any thread; uncached without ``cache``.

    Sends 8 bytes for each feature row of another server and receives the row, once per server, because its
    ranks hold different rows. Edge values likewise, once for all layers. Rows on disk are mapped, and nothing
    is sent for them.
    """

    def __init__(self, g: DistGraph, columns: Columns, cache: PlanCache | None = None) -> None:
        self._store: KVStore = g.kvstore
        self._columns, self._cache = columns, cache

    def inputs(self, plan: RankPlan, fetch: FetchHalo | None = None) -> dict[str, Tensor]:
        """Return the (rows, *row) features of the rank, or with ``fetch`` those of all sources of layer 1.

        ``fetch`` fetches the halo in the stored type, which may be half as wide as the compute type; then
        this call is collective.
        """
        keys = _only(self._columns.inputs)
        if fetch is None:
            return self._converted(self._rows(keys, plan.nodes, PHASE))
        found = {}
        for name, key in keys.items():
            # Both are read in place: features are most of the memory of a rank.
            rows = empty_rows(plan.layers[0].num_sources, self._store.column(key).info)
            own = rows[: len(plan.nodes)]
            self._store.pull(key, plan.nodes, out=own, distinct=True, phase=PHASE)
            fetch(own, rows[len(plan.nodes) :])
            found[name] = rows
        return self._converted(found)

    def targets(self, plan: RankPlan) -> dict[str, Tensor]:
        """Return (seeds, *row)."""
        return self._rows(_only(self._columns.targets), plan.rows(len(plan.layers)), LABEL_PHASE)

    def edges(self, plan: RankPlan) -> dict[str, Tensor]:
        """Return (E, *row) of layer 1; those of every layer are a prefix."""
        return self._converted(self._rows(_only(self._columns.edges), plan.layers[0].edge_ids, PHASE, 1))

    def _rows(self, keys: Mapping[str, str], ids: Array, phase: str, layer: int = 0) -> dict[str, Tensor]:
        found, pulls = {}, {}
        for name, key in keys.items():
            column, cache = self._store.column(key), self._cache
            cache = cache if cache is not None and cache.takes(column, ids) else None
            stored = None if cache is None else cache.read_rows(column, ids)
            if stored is None:
                pull = self._store.submit_pull(key, ids, distinct=True, phase=phase, layer=layer)
                pulls[name] = pull, column, cache
            else:
                found[name] = stored
        for name, (pull, column, cache) in pulls.items():
            found[name] = pull()
            if cache is not None:
                cache.write_rows(column, ids, found[name])
        return found

    def _converted(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self._columns.precision.converted(values) for name, values in rows.items()}


def _only(by_type: Mapping[Any, Mapping[str, str]]) -> Mapping[str, str]:
    return next(iter(by_type.values()), {})


@final
class HaloBatch:
    """The blocks and columns of one plan on one rank, read by one-sided calls, on any thread.

    With ``filled``, the model's input has the rows of all sources of layer 1, including the halo, and the
    constructor is collective. Else it has the own rows, and the first layer exchanges their halo.
    """

    def __init__(
        self, g: DistGraph, plan: RankPlan, reader: ColumnReader, *, filled: bool, device: torch.device
    ) -> None:
        begin = time.perf_counter()
        self.plan = plan
        exchanges: list[HaloExchange] = []
        nodes = torch.from_numpy(plan.nodes)
        self._blocks: list[HaloBlock] = []
        for depth, layer in enumerate(plan.layers):
            if depth and layer is plan.layers[depth - 1]:
                # Deep models have many layers on one structure, which is stored on the device once.
                exchanges.append(exchanges[-1].at(depth + 1))
                self._blocks.append(self._blocks[-1].through(exchanges[-1]))
            else:
                exchanges.append(HaloExchange(g.session, layer, depth + 1))
                etype, degrees = g.canonical_etypes[0], g.out_degrees
                block = halo_block(layer, nodes, exchanges[-1], etype=etype, out_degrees=degrees)
                self._blocks.append(block.to(device))
        first, last = self._blocks[0], self._blocks[-1]
        edges = {name: rows.to(device) for name, rows in reader.edges(plan).items()}
        fetch = partial(exchanges[0].fetch, phase=PHASE) if filled else None
        for name, rows in reader.inputs(plan, fetch).items():
            (first.set_all if filled else first.set_own)(name, rows.to(device))
        last.dstdata.update({name: rows.to(device) for name, rows in reader.targets(plan).items()})
        for block, layer in zip(self._blocks, plan.layers, strict=True):
            block.edata.update({name: rows[: len(layer.edge_ids)] for name, rows in edges.items()})
        self.input_nodes: Tensor = (first.srcdata[dgl.NID] if filled else nodes).to(device)
        """(n,) int64 global ids of the input rows of the model."""
        self.fetch_s = time.perf_counter() - begin
        """Seconds spent in the constructor; 0 once they have been counted."""
        self.sample_s = 0.0

    def blocks(self) -> list[HaloBlock]:
        """Return the blocks, input layer first, with new frames and shared structure and columns."""
        return [block.fresh() for block in self._blocks]


Batch: TypeAlias = tuple[Tensor, Tensor, list[HaloBlock]]
"""(ids of the input rows, ids of the seeds computed by this rank, blocks with the input layer first)."""


@final
class FullGraphLoader(EpochLoader[HaloBatch, Batch]):
    """Iterates over ``(input_nodes, output_nodes, blocks)``; every rank must construct it and iterate alike.

    The seeds of a batch are those of all ranks, and each is computed by one of them. So ``output_nodes``
    differ from the indices given by this rank: take labels from ``blocks[-1].dstdata``, or by
    ``output_nodes``. With one step per epoch, structure and columns are kept from epoch to epoch, with
    ``use_pp`` also the halo features of layer 1. With several, those of the next step are read during a step,
    from disk if the source stores them.
    """

    def __init__(self, g: DistGraph, source: PlanSource, request: LoaderRequest, *, use_pp: bool) -> None:
        self._g, self._source, self._request = g, source, request
        self._reader = ColumnReader(g, request.columns, source.row_cache)
        self._keeps, self._use_pp = len(source) == 1, use_pp
        self._kept: HaloBatch | None = None
        # A kept batch may need an exchange, which must run on the thread of the loop.
        num_threads = 0 if self._keeps else 1
        super().__init__(g.session, seed=request.seed, depth=request.depth, num_threads=num_threads)
        # A graph outlives its loaders.
        g.on_close.append(if_alive(source.close))
        # Opening connections is collective, so it cannot be left to the look-ahead thread.
        row_exchanges(self._session)
        if self._keeps:
            # Its seconds are none of an epoch.
            self._load(0, 0).fetch_s = 0.0

    def __len__(self) -> int:
        return len(self._source)

    @property
    def plan(self) -> RankPlan | None:
        """The plan of this rank if an epoch has one step, else None."""
        return None if self._kept is None else self._kept.plan

    def batches_of(self, epoch: int) -> Callable[[int], HaloBatch]:
        return lambda step: self._load(epoch, step)

    def _load(self, epoch: int, step: int) -> HaloBatch:
        with self._session.timeline.span("plan", LOADER, epoch * len(self) + step):
            plan = self._source.plan(epoch, step)
            if self._kept is not None and self._kept.plan is plan:
                return self._kept
            # Freed first, or two batches would be held while the next one is read.
            self._kept = None
            filled = self._keeps and self._use_pp
            batch = HaloBatch(self._g, plan, self._reader, filled=filled, device=self._request.device)
        if self._keeps:
            self._kept = batch
        return batch

    def deliver(self, step: int, batch: HaloBatch) -> Batch:
        batch.fetch_s = 0.0  # a kept batch is read once
        # Rows outside of the model, such as embeddings, have equal weight on each rank: HaloModel has applied
        # n_local / n_global to the gradient at the model's output.
        self._session.step_share = StepShare(num_local=1, num_global=self._session.topology.world_size)
        blocks = batch.blocks()
        for block in blocks:
            block.step_number = self._epoch * len(self) + step
        blocks[-1].step_share = self._source.share(step, batch.plan)
        return batch.input_nodes, blocks[-1].dstdata[dgl.NID], blocks
