"""Loader for full-graph training. Each step has one plan, with its blocks and columns.

An epoch has one plan, or one plan for each cooperative batch. See docs/strategies/shared_preload.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, TypeVar, final

import dgl
import numpy as np
import torch
from torch import Tensor

from dglx_dist.comm.codec import WireDtype
from dglx_dist.comm.collectives import gather_arrays, gather_int64, gather_json
from dglx_dist.comm.devices import copy_async, open_copy_stream
from dglx_dist.comm.exchange import row_exchanges
from dglx_dist.comm.session import Session
from dglx_dist.comm.trace import LOADER
from dglx_dist.dataloading.feature_fetch import LABEL_PHASE, Columns
from dglx_dist.dataloading.step_loader import EpochLoader, Stages
from dglx_dist.errors import ConfigError
from dglx_dist.graph.kvstore import KVStore
from dglx_dist.graph.row_kernels import allocate_rows
from dglx_dist.internals.graphs import OwnRowsColumn
from dglx_dist.internals.message_passing import is_on_torch_path, place
from dglx_dist.internals.pytorch import Copy
from dglx_dist.keyed_random import hash_ids, stream_key
from dglx_dist.records import Array, EdgeType, StepShare
from dglx_dist.strategies.full_graph.expansion import (
    Composition,
    EasOptions,
    cluster_seeds,
    compose_batches,
    make_selection,
)
from dglx_dist.strategies.full_graph.graph_types import (
    TypedLayer,
    TypedPlan,
    find_bounds,
    split_plan,
    unify_structure,
)
from dglx_dist.strategies.full_graph.halo_block import halo_block, repeat_first_row
from dglx_dist.strategies.full_graph.halo_exchange import ONCE, HaloExchange
from dglx_dist.strategies.full_graph.halo_plan import NO_IDS, HaloLayer, PlanCache, RankPlan
from dglx_dist.strategies.full_graph.options import LoaderRequest
from dglx_dist.strategies.full_graph.plan_builder import NO_SEEDS, Planner, PlanRequest
from dglx_dist.strategies.full_graph.typed_block import AnyHaloBlock, TypeExchanges, typed_halo_block

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph


PHASE = ONCE
"""Ledger phase for features and edge values, which are fetched once."""

K = TypeVar("K", str, EdgeType)
RowsByType: TypeAlias = dict[K, dict[str, Tensor]]
"""Column rows by type and name."""
Fetch: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Fills a column's halo rows."""


@final
@dataclass(frozen=True, kw_only=True)
class ServerSeeds:
    """This server's seeds, and how many seeds each server has."""

    own_seeds: Array
    """(n,) int64 ascending distinct seeds, from all ranks, that this server owns."""
    counts: tuple[int, ...]
    """(S,) seed count on each server."""
    digest: int
    """Hash over all servers' seeds."""

    def sizes(self, num_batches: int) -> Array:
        """Return how many seeds all servers together have in each cooperative batch, as (R,) int64."""
        counts = np.array(self.counts, np.int64)
        batches = np.arange(num_batches)[:, None]
        # The first batches have one seed more if the seeds cannot be divided evenly.
        has_extra_seed = batches < counts % num_batches
        return np.sum(counts // num_batches + has_extra_seed, axis=1)


def gather_seeds(g: DistGraph, seeds: Array) -> ServerSeeds:
    """Gather the seeds from all ranks and return those on this server. Every rank must call this.

    Each rank temporarily holds all ranks' seeds, 8 bytes each. Raises ConfigError if there are no seeds.
    """
    all_seeds = np.unique(np.concatenate(gather_arrays(seeds, g.session)))
    if not len(all_seeds):
        raise ConfigError(NO_SEEDS)

    server_offsets = np.searchsorted(all_seeds, find_bounds(g))
    server = g.session.topology.server
    hashes = hash_ids(all_seeds, stream_key(0, 0, 0))
    digest = np.bitwise_xor.reduce(hashes, initial=np.uint64(0))
    # The copy lets the other servers' seeds be freed.
    return ServerSeeds(
        own_seeds=all_seeds[server_offsets[server] : server_offsets[server + 1]].copy(),
        counts=tuple(np.diff(server_offsets).tolist()),
        digest=int(digest),
    )


@final
@dataclass(frozen=True, kw_only=True)
class PlanSpec:
    """Parameters that all plans share."""

    num_layers: int
    hops: int
    num_batches: int = 1
    """R, the number of cooperative batches. At least 1."""
    composition: Composition = "random"
    eas: EasOptions | None = None
    """Options for expansion-aware sampling, or None for the full neighbourhood."""
    seed: int = 0
    """Random seed for the composition and the external nodes."""
    cover: bool = False
    """Whether sums over in-edges have their own exchange."""


@final
class PlanMaker:
    """Makes plans. Every rank must construct it, and request the same plans in the same order.

    Args:
        seeds: The seeds for cooperative batches, or this rank's (K,) int64 ids for the only batch.
        mask: Edge column that marks the edges in the plans. None for all edges.
    """

    def __init__(self, g: DistGraph, seeds: ServerSeeds | Array, mask: str | None = None) -> None:
        self.seeds = seeds
        self.mask = mask
        self._planner = Planner(g, mask)
        self._is_leader = g.session.topology.local_rank == 0
        # A server's external nodes are selected once for all its batches.
        self._compose = lru_cache(1)(partial(_compose, g, seeds))
        self._make_selection = lru_cache(1)(make_selection)

    def make(self, spec: PlanSpec, step: int) -> RankPlan:
        """Return this rank's plan for the step. All ranks must call it, each from one thread at a time."""
        seeds = self.seeds
        if isinstance(seeds, ServerSeeds):
            # Only a server's leader passes the server's seeds.
            seeds = self._compose(spec)[step] if self._is_leader else NO_IDS
        selection = None
        if spec.eas is not None:
            selection = self._make_selection(spec.eas, seed=spec.seed)
        request = PlanRequest(
            seeds=seeds,
            num_layers=spec.num_layers,
            hops=spec.hops,
            eas=selection,
            cover=spec.cover,
            show_progress=not isinstance(self.seeds, ServerSeeds),
        )
        return self._planner.plan(request)


def _compose(g: DistGraph, seeds: ServerSeeds | Array, spec: PlanSpec) -> tuple[Array, ...]:
    """Return this server's seeds for each cooperative batch."""
    assert isinstance(seeds, ServerSeeds)
    own_seeds = seeds.own_seeds
    server = g.session.topology.server
    clusters = None
    if spec.composition == "ordered":
        nodes = np.arange(*find_bounds(g)[server : server + 2])
        clusters = cluster_seeds(unify_structure(g), nodes, own_seeds, spec.num_batches, seed=spec.seed)
    return compose_batches(own_seeds, spec.num_batches, spec.composition, seed=spec.seed, clusters=clusters)


@final
class PlanSource:
    """This rank's plans for all steps in an epoch. Every rank must construct it.

    All ranks have the same number of steps and request them in the same order. Requests use no collectives,
    so a thread can make plans one step ahead while the model trains. All epochs have the same plans.

    Plans for cooperative batches are stored on disk, with their fetched rows if there are several batches.
    With a mask both stay in memory, because the mask may have other values in the next run.

    Raises:
        ConfigError: there are more batches than seeds on the largest server.
        PeerError: a rank did not take part.
    """

    def __init__(self, g: DistGraph, maker: PlanMaker, spec: PlanSpec) -> None:
        self._maker = maker
        self._spec = spec
        self._cache: PlanCache | None = None
        self._on_disk: set[int] = set()
        self._held: dict[int, RankPlan] = {}
        """Plans in memory by step: the plan for a single batch, and plans that are not stored on disk."""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="dglx-plans")
        self._pending: dict[tuple[int, int], Future[RankPlan]] = {}
        self._position = (0, spec.num_batches)
        """Epoch and step that the next request should have."""
        self.row_cache: PlanCache | None = None
        """Disk cache for columns at planned rows, or None if they are not kept on disk."""

        if not isinstance(maker.seeds, ServerSeeds):
            # All ranks together have the same seeds in each epoch.
            self._sizes = gather_int64([self.plan(0, 0).seeds], g.session).sum(axis=0)
            return

        counts = maker.seeds.counts
        if not 1 <= spec.num_batches <= max(counts):
            raise ConfigError(
                f"batches={spec.num_batches} cooperative batches, but the servers have "
                f"{', '.join(map(str, counts))} seeds; give 1 to {max(counts)}"
            )
        self._sizes = maker.seeds.sizes(spec.num_batches)
        own_steps: list[int] = []
        if maker.mask is None:
            cache = _open_cache(g, maker.seeds, spec)
            self._cache = cache
            own_steps = [step for step in range(spec.num_batches) if cache.holds(step)]
        # Ranks make plans together. If one rank lacks a plan on disk, all ranks make it again.
        planned_steps: Sequence[Any] = gather_json(own_steps, g.session)
        self._on_disk = set.intersection(*map(set, planned_steps))
        self.row_cache = self._cache if len(self) > 1 else None

    def __len__(self) -> int:
        """Number of steps per epoch, equal on all ranks."""
        return self._spec.num_batches

    def plan(self, epoch: int, step: int) -> RankPlan:
        """Return a step's plan. A single batch always has the same object."""
        if len(self) == 1:
            # A single plan is not made ahead, so it is made on this thread, where Ctrl-C ends it.
            return self._make(step)

        # How far loaders look ahead depends on timing, but all ranks must make the same plans. So an epoch
        # that is left early is still planned to its end.
        if (epoch, step) != self._position:
            self._finish_epoch()
            self._position = (epoch, step)
        self._begin(epoch, range(step, min(step + 2, len(self))))
        self._position = (epoch, step + 1)
        return self._pending.pop((epoch, step)).result()

    def share(self, step: int, plan: RankPlan) -> StepShare:
        """Return how many seeds this rank has in a step with this plan, and how many all ranks have."""
        return StepShare(num_local=plan.seeds, num_global=int(self._sizes[step]))

    def close(self) -> None:
        """Finish pending plans. It may be called twice."""
        self._finish_epoch()
        self._pool.shutdown(wait=True)

    def _begin(self, epoch: int, steps: range) -> None:
        for step in steps:
            if (epoch, step) not in self._pending:
                self._pending[epoch, step] = self._pool.submit(self._make, step)

    def _finish_epoch(self) -> None:
        """Begin the epoch's remaining plans. The thread makes them even if nobody waits for them."""
        epoch, next_step = self._position
        self._begin(epoch, range(next_step, len(self)))
        self._position = (epoch, len(self))
        self._pending.clear()

    def _make(self, step: int) -> RankPlan:
        """Return a step's plan from memory or from disk, or make and keep it."""
        if step in self._held:
            return self._held[step]
        if self._cache is not None and step in self._on_disk:
            plan = self._cache.read(step)
        else:
            plan = self._maker.make(self._spec, step)
            if self._cache is not None and self._cache.write(step, plan):
                self._on_disk.add(step)
            else:
                self._held[step] = plan
        if len(self) == 1:
            # The loader keeps its features as long as it gets the same object.
            self._held[step] = plan
        return plan


def _open_cache(g: DistGraph, seeds: ServerSeeds, spec: PlanSpec) -> PlanCache:
    inputs = asdict(spec) | {
        "servers": g.session.topology.server_of_rank,
        # The spec has the loader's seed. Rows are split among ranks with the session's seed.
        "split_seed": g.session.seed,
        "seeds": [seeds.digest, *seeds.counts],
        "types": [g.ntypes, g.canonical_etypes],
    }
    return PlanCache(g.dataset.cache, inputs, g.session.topology)


@final
class ColumnReader:
    """Reads the columns that plans need by one-sided calls, on any thread.

    For each feature row on another server it sends 8 bytes and receives the row. A server receives each row
    once, because its ranks hold different rows. Edge values are read once for all layers. Rows in the
    ``cache`` on disk are mapped, and nothing is sent for them.
    """

    def __init__(self, g: DistGraph, columns: Columns, cache: PlanCache | None = None) -> None:
        self._store: KVStore = g.kvstore
        self._columns = columns
        self._cache = cache

    def inputs(self, plan: TypedPlan, fetch: Mapping[str, Fetch] | None = None) -> RowsByType[str]:
        """Return the features for this rank's rows or, if there is a ``fetch``, for all sources in layer 1.

        ``fetch`` has a function for each node type. It maps (own rows, (n_halo, *row) output) to the filled
        output, in the stored type. With it, this call is collective.
        """
        features = {}
        for ntype, keys in self._columns.inputs.items():
            nodes = plan.nodes[ntype]
            if fetch is None:
                rows = self._read_rows(keys, nodes, PHASE)
            else:
                rows = self._read_sources(keys, nodes, plan.layers[0].rows[ntype], fetch[ntype])
            features[ntype] = self._convert(rows)
        return features

    def _read_sources(
        self, keys: Mapping[str, str], nodes: Array, layer: HaloLayer, fetch: Fetch
    ) -> dict[str, Tensor]:
        features = {}
        for name, key in keys.items():
            # Own rows and halo rows are read in place, because features take most of a rank's memory.
            rows = allocate_rows(layer.num_sources, self._store.column(key).info)
            local_rows = rows[: len(nodes)]
            self._store.pull(key, nodes, out=local_rows, distinct=True, phase=PHASE)
            fetch(local_rows, rows[len(nodes) :])
            features[name] = rows
        return features

    def targets(self, plan: TypedPlan) -> RowsByType[str]:
        """Return the (seeds, *row) target columns."""
        targets = plan.targets()
        rows = {}
        for ntype, keys in self._columns.targets.items():
            rows[ntype] = self._read_rows(keys, targets[ntype], LABEL_PHASE)
        return rows

    def edges(self, plan: TypedPlan) -> RowsByType[EdgeType]:
        """Return the (E, *row) edge columns for layer 1. Later layers use a prefix of these edges."""
        rows = {}
        for etype, keys in self._columns.edges.items():
            edge_ids = plan.layers[0].relations[etype].edge_ids
            rows[etype] = self._convert(self._read_rows(keys, edge_ids, PHASE, layer=1))
        return rows

    def _read_rows(
        self, keys: Mapping[str, str], ids: Array, phase: str, layer: int = 0
    ) -> dict[str, Tensor]:
        """Return the rows at ``ids`` by column name, from the cache on disk or from the servers."""
        rows = {}
        pulls = {}
        for name, key in keys.items():
            column = self._store.column(key)
            stored_rows = None
            if self._cache is not None and self._cache.accepts(column, ids):
                stored_rows = self._cache.read_rows(column, ids)
            if stored_rows is None:
                pull = self._store.submit_pull(key, ids, distinct=True, phase=phase, layer=layer)
                pulls[name] = pull, column
            else:
                rows[name] = stored_rows

        # All columns are requested before the first one is waited for.
        for name, (pull, column) in pulls.items():
            rows[name] = pull()
            if self._cache is not None and self._cache.accepts(column, ids):
                self._cache.write_rows(column, ids, rows[name])
        return rows

    def _convert(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self._columns.memory.convert(values) for name, values in rows.items()}


@final
class HaloBatch:
    """One plan's blocks and columns on one rank, read by one-sided calls, on any thread.

    With ``filled``, the model's input has rows for all sources in layer 1, including the halo. Then the
    constructor is collective. Otherwise it only has this rank's rows, and layer 1 exchanges the halo.
    """

    def __init__(
        self,
        g: DistGraph,
        plan: RankPlan,
        reader: ColumnReader,
        copy: Copy,
        *,
        filled: bool,
        request: LoaderRequest,
    ) -> None:
        begin_s = time.perf_counter()
        self.plan = plan
        typed_plan = split_plan(plan, g)
        self.blocks: list[AnyHaloBlock] = []
        """Input layer first."""
        first_exchanges = self._build_blocks(g, typed_plan, copy, request)
        self._set_columns(typed_plan, reader, copy, first_exchanges if filled else None)

        own_nodes = {ntype: copy(torch.from_numpy(ids)) for ntype, ids in typed_plan.nodes.items()}
        self.input_nodes: NodeIds = own_nodes if len(own_nodes) > 1 else own_nodes[g.ntypes[0]]
        """(n,) int64 global ids for the model's input rows, by type if there are several."""
        if filled:
            self.input_nodes = self.blocks[0].srcdata[dgl.NID]
        self.arrive: Callable[[], None] | None = None
        """Lets the consumer's stream wait for copies to the device."""
        self.fetch_s = time.perf_counter() - begin_s
        """Seconds spent in the constructor, or 0 once they have been counted."""
        self.sample_s = 0.0

    def _build_blocks(
        self, g: DistGraph, plan: TypedPlan, copy: Copy, request: LoaderRequest
    ) -> TypeExchanges:
        """Add the blocks for ``plan`` to :attr:`blocks`, and return the exchanges for layer 1."""
        exchanges: list[TypeExchanges] = []
        for depth, layer in enumerate(plan.layers):
            if depth and layer is plan.layers[depth - 1]:
                # Deep models have many layers with one structure. It is stored on the device once.
                exchanges.append({key: halo.for_layer(depth + 1) for key, halo in exchanges[-1].items()})
                self.blocks.append(self.blocks[-1].with_exchanges(exchanges[-1]))
                continue
            exchanges.append(_open_exchanges(g, layer, depth + 1, request.wire))
            for halo in exchanges[-1].values():
                halo.rows_on(request.device, copy)
            block = _build_block(g, layer, plan.nodes, exchanges[-1], request.mask)
            self.blocks.append(place(block, request.device, copy=copy))
        return exchanges[0]

    def _set_columns(
        self, plan: TypedPlan, reader: ColumnReader, copy: Copy, exchanges: TypeExchanges | None
    ) -> None:
        """Read the blocks' columns. With ``exchanges``, features include the halo for layer 1."""
        # Edge columns are read once, because a later layer uses a prefix of the edges in layer 1.
        edges = {etype: _copy_all(rows, copy) for etype, rows in reader.edges(plan).items()}
        first_rows = plan.layers[0].rows
        fetch = None
        if exchanges is not None:
            fetch = {ntype: partial(exchanges[ntype].fetch, phase=PHASE) for ntype in first_rows}
        for ntype, columns in reader.inputs(plan, fetch).items():
            for name, rows in _copy_all(columns, copy).items():
                value = OwnRowsColumn(rows) if fetch is None else repeat_first_row(rows, first_rows[ntype])
                self.blocks[0].srcnodes[ntype].data[name] = value

        for ntype, columns in reader.targets(plan).items():
            self.blocks[-1].dstnodes[ntype].data.update(_copy_all(columns, copy))
        for block, layer in zip(self.blocks, plan.layers, strict=True):
            for etype, columns in edges.items():
                num_edges = len(layer.relations[etype].edge_ids)
                block.edges[etype].data.update({name: rows[:num_edges] for name, rows in columns.items()})

    def open_blocks(self, session: Session, step_number: int | None, share: StepShare) -> list[AnyHaloBlock]:
        """Return the blocks for a step in which this rank has ``share``, and set the session's share.

        A kept batch is delivered again, so the blocks are copies, on which a model may set columns.
        """
        # HaloModel applies n_local / n_global to the gradient at the model's output. So rows outside the
        # model, such as embeddings, have equal weight on each rank.
        session.step_share = StepShare(num_local=1, num_global=session.topology.world_size)
        blocks = [block.local_var() for block in self.blocks]
        for block in blocks:
            block.step_number = step_number
        blocks[-1].step_share = share
        return blocks


def _open_exchanges(g: DistGraph, layer: TypedLayer, number: int, wire: WireDtype) -> TypeExchanges:
    """Return the exchanges for layer ``number`` by node type and edge type."""
    halos: dict[str | EdgeType, HaloExchange] = {}
    for ntype, rows in layer.rows.items():
        halos[ntype] = HaloExchange(g.session, rows, number, wire)
    for etype, relation in layer.relations.items():
        is_shared = relation.cover is layer.rows[etype[0]].cover
        halos[etype] = halos[etype[0]] if is_shared else HaloExchange(g.session, relation, number, wire)
    return halos


def _build_block(
    g: DistGraph, layer: TypedLayer, nodes: Mapping[str, Array], exchanges: TypeExchanges, mask: str | None
) -> AnyHaloBlock:
    """Return the block for ``layer``. ``nodes`` are ids by node type for this rank's feature rows."""
    out_degrees = g.out_degrees if mask is None else partial(_refuse_out_degrees, mask)
    graph_data: Any = {"out_degrees": out_degrees, "edge_order": g.orig_edge_ids}
    if not g.is_homogeneous:
        return typed_halo_block(layer, nodes, exchanges, **graph_data)

    ((etype, relation),) = layer.relations.items()
    ids = torch.from_numpy(nodes[etype[0]])
    return halo_block(relation, ids, exchanges[etype], etype=etype, **graph_data)


def _refuse_out_degrees(mask: str, *_: Any, **__: Any) -> NoReturn:
    raise ConfigError(
        f"a layer divides by out-degrees, but messages run along the edges of mask={mask!r} only and "
        "out-degrees count all edges; use a layer that divides by in-degrees, like SAGEConv or GraphConv "
        "with norm='right', or leave the mask out"
    )


def _copy_all(columns: Mapping[str, Tensor], copy: Copy) -> dict[str, Tensor]:
    return {name: copy(rows) for name, rows in columns.items()}


NodeIds: TypeAlias = Tensor | dict[str, Tensor]
Batch: TypeAlias = tuple[NodeIds, NodeIds, list[AnyHaloBlock]]
"""Ids for the input rows, ids for this rank's seeds, and the blocks with the input layer first."""


@final
class FullGraphLoader(EpochLoader[HaloBatch, Batch]):
    """Iterates over ``(input_nodes, output_nodes, blocks)``. Every rank must construct it and iterate alike.

    A batch's seeds come from all ranks, and each seed is computed by a single rank. So ``output_nodes``
    differ from the indices that this rank passed. Take labels from ``blocks[-1].dstdata`` or by
    ``output_nodes``.

    With one step per epoch, structure and columns are kept from epoch to epoch. With ``use_pp``, the halo
    features for layer 1 are kept too. With several steps, the next step is read while one trains, from disk
    if the source stores it.
    """

    def __init__(self, g: DistGraph, source: PlanSource, request: LoaderRequest, *, use_pp: bool) -> None:
        self._g = g
        self._source = source
        self._request = request
        self._reader = ColumnReader(g, request.columns, source.row_cache)
        self._keeps = len(source) == 1
        self._use_pp = use_pp
        self._kept: HaloBatch | None = None
        device = request.device

        # A kept batch is copied once. Copies through page-locked memory would keep all that memory.
        self._copies = open_copy_stream(device) if is_on_torch_path(device) and not self._keeps else None
        # A kept batch may need an exchange, which must run on the thread of the training loop.
        num_threads = 0 if self._keeps else 1
        super().__init__(g.session, seed=request.seed, depth=request.depth, num_threads=num_threads)

        # Opening connections is collective, so it cannot be left to the look-ahead thread.
        row_exchanges(self._session)
        if self._keeps:
            # The time to load it belongs to no epoch.
            self.load(0, 0).fetch_s = 0.0

    def __len__(self) -> int:
        return len(self._source)

    def open_stages(self, epoch: int, steps: Callable[[], Iterator[int]]) -> HaloStages:
        return HaloStages(self, epoch)

    def load(self, epoch: int, step: int) -> HaloBatch:
        with self._session.timeline.span("plan", LOADER, epoch * len(self) + step):
            if self._kept is not None:
                return self._kept

            plan = self._source.plan(epoch, step)
            with_halo = self._keeps and self._use_pp
            make_batch = partial(
                HaloBatch, self._g, plan, self._reader, filled=with_halo, request=self._request
            )
            batch, arrive = copy_async(self._copies, self._request.device, make_batch)
            batch.arrive = arrive
        if self._keeps:
            self._kept = batch
        return batch

    def deliver(self, step: int, batch: HaloBatch) -> Batch:
        batch.fetch_s = 0.0  # A kept batch is read once.
        if batch.arrive is not None:
            batch.arrive()
        number = self.first_number + self._epoch * len(self) + step
        blocks = batch.open_blocks(self._session, number, self._source.share(step, batch.plan))
        return batch.input_nodes, blocks[-1].dstdata[dgl.NID], blocks


@final
class HaloStages(Stages[HaloBatch]):
    """The stages in full-graph training. The first stage makes the plan, the blocks and the rows."""

    def __init__(self, loader: FullGraphLoader, epoch: int) -> None:
        self.loader = loader
        self.epoch = epoch
        self._load = loader.load

    def sample(self, step: int) -> HaloBatch:
        return self._load(self.epoch, step)
