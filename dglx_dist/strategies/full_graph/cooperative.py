"""Plans of cooperative batches, made or read ahead during training (GraNNDis).

See docs/strategies/shared_preload.md, "cooperative".
"""

from __future__ import annotations

import threading
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, TypeAlias, final

import numpy as np
import torch
from torch import Tensor, nn

from dglx_dist.comm.collectives import barrier, gather_int64, gather_json, run_on_all_ranks
from dglx_dist.comm.system import return_memory
from dglx_dist.errors import ConfigError
from dglx_dist.progress import progress
from dglx_dist.records import Array, StepShare
from dglx_dist.strategies.full_graph.expansion import (
    Composition,
    EasOptions,
    EasSelector,
    Selection,
    cluster_seeds,
    compose,
    draw_of,
)
from dglx_dist.strategies.full_graph.halo_plan import PlanCache, PlanSource, RankPlan, RowFiles
from dglx_dist.strategies.full_graph.memory_estimate import (
    MemoryEstimate,
    MemoryTrace,
    choose_num_batches,
    estimate,
    trace_memory,
)
from dglx_dist.strategies.full_graph.options import LoaderRequest
from dglx_dist.strategies.full_graph.plan_builder import Planner, PlanRequest, ServerSeeds

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph


_Key: TypeAlias = tuple[int, int, int]
"""(draw of the composition, draw of the external nodes, step): equal keys, equal plans."""


@final
@dataclass(frozen=True, kw_only=True)
class CooperativeSpec:
    """Parameters of cooperative batches."""

    num_layers: int
    num_batches: int
    """R, at least 1."""
    composition: Composition
    eas: EasOptions | None
    """None: the full neighbourhood of all layers."""
    seed: int
    """Of the composition and of the external nodes."""
    split: str = "auto"
    """Partitioner that splits a cooperative batch among the ranks of a server."""

    @property
    def is_fixed(self) -> bool:
        return self.composition != "shuffled" and (self.eas is None or not self.eas.resample_every)


@final
class CooperativePlanner:
    """Makes the plan of any cooperative batch. All ranks must request the same plans in the same order."""

    def __init__(self, g: DistGraph, seeds: ServerSeeds) -> None:
        self.seeds = seeds
        self._g = g
        self._selector = EasSelector(g)
        # Has a barrier, so that all ranks answer before one sends requests.
        self._planner = Planner(g)
        topology = g.session.topology
        self._is_leader = topology.rank == topology.ranks_of_server(topology.server)[0]
        self._composed: tuple[CooperativeSpec, int, tuple[Array, ...]] | None = None
        self._rule: tuple[CooperativeSpec, int, Selection] | None = None

    def make(self, spec: CooperativeSpec, key: _Key) -> RankPlan:
        """Return this rank's plan; all ranks must call it, each from one thread at a time."""
        composition_draw, eas_draw, step = key
        request = PlanRequest(
            # Only the leader of a server passes its seeds.
            seeds=self._seeds_of(spec, composition_draw)[step] if self._is_leader else _NO_SEEDS,
            num_layers=spec.num_layers,
            hops=spec.num_layers,
            eas=self._rule_of(spec, eas_draw),
            split=spec.split,
            show_progress=False,
        )
        return self._planner.plan(request)

    def _seeds_of(self, spec: CooperativeSpec, draw: int) -> tuple[Array, ...]:
        known = self._composed
        if known is None or known[:2] != (spec, draw):
            clusters = self._clusters(spec) if spec.composition == "ordered" else None
            pieces = compose(
                self.seeds.own,
                spec.num_batches,
                spec.composition,
                seed=spec.seed,
                draw=draw,
                clusters=clusters,
            )
            known = self._composed = (spec, draw, pieces)
        return known[2]

    def _clusters(self, spec: CooperativeSpec) -> Array:
        server = self._g.session.topology.server
        first, last = self._g.get_node_partition_policy(self._g.ntypes[0]).bounds[server : server + 2]
        return cluster_seeds(
            self._g.structure(),
            np.arange(first, last),
            self.seeds.own,
            spec.num_batches,
            seed=spec.seed,
        )

    def _rule_of(self, spec: CooperativeSpec, draw: int) -> Selection | None:
        if spec.eas is None:
            return None
        known = self._rule
        # Cached, because external nodes of a server are selected once for all of its cooperative batches.
        if known is None or known[0].eas != spec.eas or known[1] != draw:
            rule = self._selector.rule(spec.eas, seed=spec.seed, draw=draw)
            known = self._rule = (spec, draw, rule)
        return known[2]


_NO_SEEDS: Array = np.empty(0, np.int64)
_KEPT_EPOCHS = 3


@final
class CooperativePlans(PlanSource):
    """One plan per cooperative batch, made on a thread one step ahead. Every rank must construct it.

    Plans that are equal in all epochs are made once and stored on disk if ``keep`` is set, with their fetched
    rows if there are several plans.

    Raises:
        ConfigError: there are more batches than the largest server has seeds.
        PeerError: a rank did not take part.
    """

    def __init__(
        self, g: DistGraph, planner: CooperativePlanner, spec: CooperativeSpec, *, keep: bool
    ) -> None:
        check_num_batches(spec.num_batches, planner.seeds)
        self._planner, self._spec = planner, spec
        self._sizes = planner.seeds.sizes(spec.num_batches).sum(axis=1)
        self._cache = _open_cache(g, planner.seeds, spec) if keep and spec.is_fixed else None
        self._row_files: RowFiles | None = None
        if self._cache is not None and len(self) > 1:
            self._row_files = self._cache.rows(g.session.topology.server)
        # Ranks make plans together: a plan that one rank lacks on disk is made again by all ranks.
        self._on_disk = _common_steps(g, self._cache, spec.num_batches)
        self._held: dict[_Key, RankPlan] = {}
        self._num_local: dict[_Key, int] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="dglx-plans")
        self._pending: dict[tuple[int, int], Future[RankPlan]] = {}
        self._position = (0, spec.num_batches)
        """Epoch and step expected by the next request."""
        _close_on_all_ranks(g, self)

    def __len__(self) -> int:
        return self._spec.num_batches

    @property
    def row_files(self) -> RowFiles | None:
        # With one batch the loader holds the rows in memory.
        return self._row_files

    def plan(self, epoch: int, step: int) -> RankPlan:
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

    def share(self, epoch: int, step: int) -> StepShare:
        num_local = self._num_local.get(self._key(epoch, step), 0)
        return StepShare(num_local=num_local, num_global=int(self._sizes[step]))

    def close(self) -> None:
        self._finish_epoch()
        self._pool.shutdown(wait=True)

    def _begin(self, epoch: int, step: int) -> None:
        if (epoch, step) not in self._pending:
            self._pending[epoch, step] = self._pool.submit(self._make, self._key(epoch, step))

    def _finish_epoch(self) -> None:
        epoch, first = self._position
        for step in range(first, len(self)):
            self._begin(epoch, step)
        self._position = (epoch, len(self))
        self._pending.clear()

    def _key(self, epoch: int, step: int) -> _Key:
        spec = self._spec
        return draw_of(spec.composition, epoch), spec.eas.draw(epoch) if spec.eas else 0, step

    def _make(self, key: _Key) -> RankPlan:
        if key in self._held:
            return self._held[key]
        step = key[-1]
        if self._cache is not None and step in self._on_disk:
            plan = self._cache.read(step)
        else:
            plan = self._planner.make(self._spec, key)
            if self._cache is not None:
                self._on_disk.add(step)
                if not self._cache.write(step, plan):
                    self._held[key] = plan
        self._num_local[key] = plan.seeds
        # Shares of past shuffled epochs are not requested again.
        while len(self._num_local) > _KEPT_EPOCHS * len(self):
            del self._num_local[next(iter(self._num_local))]
        if len(self) == 1:
            # The same object again, so that the loader keeps its features.
            self._held = {key: plan}
        return plan


def _close_on_all_ranks(g: DistGraph, plans: CooperativePlans) -> None:
    """Close ``plans`` with the graph or session, after a barrier: until then this rank answers others."""
    # Weak, so that the graph does not keep the data of a deleted loader alive.
    known, left, session = weakref.ref(plans), threading.Event(), g.session

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


def check_num_batches(num_batches: int, seeds: ServerSeeds) -> None:
    """Raise ConfigError unless each of ``num_batches`` batches has seeds on some server."""
    if not 1 <= num_batches <= max(seeds.counts):
        raise ConfigError(
            f"batches={num_batches} cooperative batches, but the servers have "
            f"{', '.join(map(str, seeds.counts))} seeds; give 1 to {max(seeds.counts)}"
        )


def _open_cache(g: DistGraph, seeds: ServerSeeds, spec: CooperativeSpec) -> PlanCache:
    facts = asdict(spec) | {
        "servers": g.session.topology.server_of_rank,
        # Seed of the partitioner; that of the spec is the loader's.
        "split_seed": g.session.seed,
        "seeds": [seeds.digest, *seeds.counts],
        "edges": list(g.canonical_etypes[0]),
    }
    return PlanCache(g.dataset.cache, facts, g.session.topology.rank)


def _common_steps(g: DistGraph, cache: PlanCache | None, num_batches: int) -> set[int]:
    local = [step for step in range(num_batches) if cache.holds(step)] if cache is not None else []
    found = set(range(num_batches))
    for steps in gather_json(local, g.session):
        found &= set(steps)  # type: ignore[call-overload]  # a list of numbers, as sent
    return found


@final
class MemoryChoice:
    """Chooses the number of cooperative batches by a memory limit. Every rank must construct it.

    ``memory_bytes`` is the limit of a rank for training, beyond its present use; ``num_batches`` of ``spec``
    is ignored.
    """

    def __init__(
        self,
        g: DistGraph,
        planner: CooperativePlanner,
        spec: CooperativeSpec,
        request: LoaderRequest,
        memory_bytes: int,
    ) -> None:
        self._g, self._planner, self._spec = g, planner, spec
        self._request, self._memory_bytes = request, memory_bytes

    def choose(self, model: nn.Module) -> tuple[int, MemoryEstimate]:
        """Return the fewest batches with which ``model`` fits into memory, and the largest one's estimate.

        Collective; the number is equal on all ranks. Rank 0 prints the estimate. From now on freed memory is
        returned to the system, because the allocator would otherwise retain half as much again. ConfigError,
        on all ranks: the model cannot be traced, or even the smallest batch does not fit.
        """
        return_memory()
        row = run_on_all_ranks(self._g.session, lambda: self._feature_row(), ConfigError)
        memory_trace = run_on_all_ranks(self._g.session, lambda: self._traced_memory(model, row), ConfigError)
        feature_bytes = row.numel() * row.element_size()
        largest: dict[int, MemoryEstimate] = {}

        def worst(number: int, steps: Array) -> int:
            estimates = [self._estimate(number, int(step), memory_trace, feature_bytes) for step in steps]
            largest[number] = max(estimates, key=lambda one: one.total)
            return int(gather_int64([largest[number].total], self._g.session).max())

        shown = self._g.session.topology.rank == 0
        with progress("choosing the number of cooperative batches", 1, enabled=shown) as advance:
            number = choose_num_batches(worst, self._memory_bytes, max(self._planner.seeds.counts))
            advance(1)
            batches = "1 cooperative batch" if number == 1 else f"{number} cooperative batches"
            advance.say(f"{batches} per epoch; the largest of rank 0 needs")
            for line in largest[number].lines():
                advance.say(line)
        return number, largest[number]

    def _estimate(
        self, number: int, step: int, memory_trace: MemoryTrace, feature_bytes: int
    ) -> MemoryEstimate:
        plan = self._planner.make(replace(self._spec, num_batches=number), (0, 0, step))
        # A single batch is kept; of several, the next ones are loaded during a step.
        ahead = 0 if number == 1 else self._request.depth
        return estimate(plan, memory_trace, feature_bytes, ahead=ahead)

    def _feature_row(self) -> Tensor:
        """Return (1, F) of the model's input, in the compute type."""
        inputs = next(iter(self._request.columns.inputs.values()), {})
        if len(inputs) != 1:
            raise ConfigError(
                "option memory needs one input column of the model, but the sampler prefetches "
                f"{list(inputs)}; give prefetch_node_feats=['feat'], or batches=R instead of memory"
            )
        (key,) = inputs.values()
        rows = self._g.kvstore.pull(key, np.zeros(1, np.int64), phase="preload")
        return self._request.columns.precision.converted(rows).clone()

    def _traced_memory(self, model: nn.Module, row: Tensor) -> MemoryTrace:
        g, num_nodes = self._g, self._g.num_nodes()
        topology = g.session.topology
        return trace_memory(
            model,
            self._request.num_layers,
            row.to(torch.device("cpu")),
            with_halo=len(topology.ranks_of_server(topology.server)) > 1,
            etype=g.canonical_etypes[0],
            out_degrees=lambda ids: g.out_degrees(ids % num_nodes),
            seed=g.session.seed,
        )
