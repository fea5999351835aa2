"""Plans of all epochs, made or read ahead during training (GraNNDis).

See docs/strategies/shared_preload.md; an epoch has one plan, or those of several cooperative batches.
"""

from __future__ import annotations

import threading
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, TypeAlias, final

import numpy as np

from dglx_dist.comm.collectives import barrier, gather_int64, gather_json
from dglx_dist.errors import ConfigError
from dglx_dist.keyed_random import hash_ids, stream_key
from dglx_dist.records import Array, StepShare
from dglx_dist.strategies.full_graph.expansion import (
    AUTO,
    Composition,
    EasOptions,
    Selection,
    cluster_seeds,
    compose,
    draw_of,
    eas_rule,
)
from dglx_dist.strategies.full_graph.halo_plan import PlanCache, RankPlan
from dglx_dist.strategies.full_graph.plan_builder import Planner, PlanRequest

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph


_NO_SEEDS: Array = np.empty(0, np.int64)

_Key: TypeAlias = tuple[int, int, int]
"""(draw of the composition, draw of the external nodes, step): equal keys, equal plans."""


@final
@dataclass(frozen=True, kw_only=True)
class ServerSeeds:
    """The seeds of this server, and the number of seeds of all servers."""

    own: Array
    """(n,) int64 ascending distinct seeds that this server owns, given by any rank."""
    counts: tuple[int, ...]
    """(S,) seeds of each server."""
    digest: int
    """Hash of the seeds of all servers."""

    def sizes(self, num_batches: int) -> Array:
        """Return (R,) int64 seeds of all servers in each of R cooperative batches."""
        counts, step = np.array(self.counts, np.int64), np.arange(num_batches)[:, None]
        return np.sum(counts // num_batches + (step < counts % num_batches), axis=1)


def gather_seeds(g: DistGraph, seeds: Array) -> ServerSeeds:
    """Gather the existing ids ``seeds`` of all ranks and return those of this server. Collective.

    Each rank temporarily holds the seeds of all ranks, 8 bytes each.
    """
    most = int(gather_int64([len(seeds)], g.session).max())
    padded = np.full(most, -1, np.int64)
    padded[: len(seeds)] = seeds
    distinct = np.unique(gather_int64(padded, g.session))
    distinct = distinct[distinct >= 0]
    at = np.searchsorted(distinct, g.get_node_partition_policy(g.ntypes[0]).bounds)
    server = g.session.topology.server
    digest = np.bitwise_xor.reduce(hash_ids(distinct, stream_key(0, 0, 0)), initial=np.uint64(0))
    return ServerSeeds(
        own=distinct[at[server] : at[server + 1]].copy(),
        counts=tuple(np.diff(at).tolist()),
        digest=int(digest),
    )


@final
@dataclass(frozen=True, kw_only=True)
class PlanSpec:
    """Parameters of all plans."""

    num_layers: int
    hops: int
    num_batches: int = 1
    """R, at least 1."""
    composition: Composition = "random"
    eas: EasOptions | None = None
    """None: the full neighbourhood."""
    seed: int = 0
    """Of the composition and of the external nodes."""
    split: str = AUTO
    """Partitioner that splits the rows of a server among its ranks."""

    @property
    def is_fixed(self) -> bool:
        return self.composition != "shuffled" and (self.eas is None or not self.eas.resample_every)

    def key(self, epoch: int, step: int) -> _Key:
        return draw_of(self.composition, epoch), self.eas.draw(epoch) if self.eas else 0, step


@final
class PlanMaker:
    """Makes any plan. Every rank must construct it, and request the same plans in the same order.

    ``seeds`` are those of cooperative batches, or the (K,) int64 ids given by this rank for the only batch.
    """

    def __init__(self, g: DistGraph, seeds: ServerSeeds | Array) -> None:
        self.seeds = seeds
        self._g, self._planner = g, Planner(g)
        topology = g.session.topology
        self._is_leader = topology.rank == topology.ranks_of_server(topology.server)[0]
        self._composed: tuple[PlanSpec, int, tuple[Array, ...]] | None = None
        self._rule: tuple[EasOptions, int, Selection] | None = None

    def make(self, spec: PlanSpec, key: _Key) -> RankPlan:
        """Return this rank's plan; all ranks must call it, each from one thread at a time."""
        composition_draw, eas_draw, step = key
        if not isinstance(self.seeds, ServerSeeds):
            seeds = self.seeds
        else:
            # Only the leader of a server passes its seeds.
            seeds = self._composed_seeds(spec, composition_draw)[step] if self._is_leader else _NO_SEEDS
        return self._planner.plan(
            PlanRequest(
                seeds=seeds,
                num_layers=spec.num_layers,
                hops=spec.hops,
                eas=None if spec.eas is None else self._selection(spec.eas, spec.seed, eas_draw),
                split=spec.split,
                show_progress=not isinstance(self.seeds, ServerSeeds),
            )
        )

    def _composed_seeds(self, spec: PlanSpec, draw: int) -> tuple[Array, ...]:
        assert isinstance(self.seeds, ServerSeeds)
        known, own = self._composed, self.seeds.own
        if known is None or known[:2] != (spec, draw):
            g, server, clusters = self._g, self._g.session.topology.server, None
            if spec.composition == "ordered":
                nodes = np.arange(*g.get_node_partition_policy(g.ntypes[0]).bounds[server : server + 2])
                clusters = cluster_seeds(g.structure(), nodes, own, spec.num_batches, seed=spec.seed)
            pieces = compose(
                own, spec.num_batches, spec.composition, seed=spec.seed, draw=draw, clusters=clusters
            )
            known = self._composed = (spec, draw, pieces)
        return known[2]

    def _selection(self, eas: EasOptions, seed: int, draw: int) -> Selection:
        known = self._rule
        # Cached, because external nodes of a server are selected once for all of its cooperative batches.
        if known is None or known[:2] != (eas, draw):
            known = self._rule = (eas, draw, eas_rule(eas, seed=seed, draw=draw))
        return known[2]


@final
class PlanSource:
    """The plans of this rank; of several, made on a thread one step ahead. Every rank must construct it.

    All ranks have the same number of steps and request them in the same order; requests use no collectives,
    so a loader thread can make them while the model trains. Plans that are equal in all epochs are made once,
    and cooperative batches are stored on disk if ``keep`` is set, with their fetched rows if there are
    several.

    Raises:
        ConfigError: there are more batches than the largest server has seeds.
        PeerError: a rank did not take part.
    """

    def __init__(self, g: DistGraph, maker: PlanMaker, spec: PlanSpec, *, keep: bool = False) -> None:
        self._maker, self._spec = maker, spec
        self._cache: PlanCache | None = None
        self._on_disk: set[int] = set()
        self._held: dict[_Key, RankPlan] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="dglx-plans")
        self._pending: dict[tuple[int, int], Future[RankPlan]] = {}
        self._position = (0, spec.num_batches)
        """Epoch and step expected by the next request."""
        self.row_cache: PlanCache | None = None
        """Keeps the columns of planned rows; None: they are not kept on disk, or held by the loader."""
        if isinstance(maker.seeds, ServerSeeds):
            counts = maker.seeds.counts
            if not 1 <= spec.num_batches <= max(counts):
                raise ConfigError(
                    f"batches={spec.num_batches} cooperative batches, but the servers have "
                    f"{', '.join(map(str, counts))} seeds; give 1 to {max(counts)}"
                )
            self._sizes = maker.seeds.sizes(spec.num_batches)
            if keep and spec.is_fixed:
                self._cache = _open_cache(g, maker.seeds, spec)
                self._on_disk = _common_steps(g, self._cache, spec.num_batches)
                self.row_cache = self._cache if len(self) > 1 else None
        else:
            # All samples have the same seeds in total, though distributed differently over the ranks.
            self._sizes = gather_int64([self.plan(0, 0).seeds], g.session).sum(axis=0)
        if len(self) > 1:
            _close_on_all_ranks(g, self)

    def __len__(self) -> int:
        """Steps of an epoch, equal on all ranks."""
        return self._spec.num_batches

    def plan(self, epoch: int, step: int) -> RankPlan:
        """Return the plan of a step; of a single batch the same object again if it is unchanged."""
        if len(self) == 1:
            # Here, where Ctrl-C ends it: nothing is made ahead.
            return self._make(self._spec.key(epoch, step))
        # An epoch that is left early is still planned to its end: the look-ahead of loaders depends on
        # timing, but all ranks must make the same plans.
        if (epoch, step) != self._position:
            self._finish_epoch()
            self._position = (epoch, step)
        self._begin(epoch, step)
        if step + 1 < len(self):
            self._begin(epoch, step + 1)
        self._position = (epoch, step + 1)
        return self._pending.pop((epoch, step)).result()

    def share(self, step: int, plan: RankPlan) -> StepShare:
        """Return the seeds of this rank and of all ranks in a step of that plan."""
        return StepShare(num_local=plan.seeds, num_global=int(self._sizes[step]))

    def close(self) -> None:
        """Finish pending plans. No requests follow. May be called twice."""
        self._finish_epoch()
        self._pool.shutdown(wait=True)

    def _begin(self, epoch: int, step: int) -> None:
        if (epoch, step) not in self._pending:
            self._pending[epoch, step] = self._pool.submit(self._make, self._spec.key(epoch, step))

    def _finish_epoch(self) -> None:
        epoch, first = self._position
        for step in range(first, len(self)):
            self._begin(epoch, step)
        self._position = (epoch, len(self))
        self._pending.clear()

    def _make(self, key: _Key) -> RankPlan:
        if key in self._held:
            return self._held[key]
        step = key[-1]
        if self._cache is not None and step in self._on_disk:
            plan = self._cache.read(step)
        else:
            plan = self._maker.make(self._spec, key)
            if self._cache is not None:
                self._on_disk.add(step)
                if not self._cache.write(step, plan):
                    self._held[key] = plan
        if len(self) == 1:
            # The same object again, so that the loader keeps its features.
            self._held = {key: plan}
        return plan


def _close_on_all_ranks(g: DistGraph, source: PlanSource) -> None:
    """Close ``source`` with the graph or session, after a barrier: until then this rank answers others."""
    # Weak, so that the graph does not keep the data of a deleted loader alive.
    known, left, session = weakref.ref(source), threading.Event(), g.session

    def leave() -> None:
        if left.is_set():
            return
        left.set()
        found = known()
        if found is not None:
            found.close()
        barrier(session, "the last plan of cooperative batches")

    g.on_close.append(leave)
    session.before_close.append(leave)


def _open_cache(g: DistGraph, seeds: ServerSeeds, spec: PlanSpec) -> PlanCache:
    facts = asdict(spec) | {
        "servers": g.session.topology.server_of_rank,
        # Seed of the partitioner; that of the spec is the loader's.
        "split_seed": g.session.seed,
        "seeds": [seeds.digest, *seeds.counts],
        "edges": list(g.canonical_etypes[0]),
    }
    return PlanCache(g.dataset.cache, facts, g.session.topology)


def _common_steps(g: DistGraph, cache: PlanCache, num_batches: int) -> set[int]:
    # Ranks make plans together: a plan that one rank lacks on disk is made again by all ranks.
    local = [step for step in range(num_batches) if cache.holds(step)]
    found = set(range(num_batches))
    for steps in gather_json(local, g.session):
        found &= set(steps)  # type: ignore[call-overload]  # a list of numbers, as sent
    return found
