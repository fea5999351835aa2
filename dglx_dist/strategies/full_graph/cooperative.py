"""The plans of co-batches, made or read ahead while the model trains (GraNNDis, algorithms 3.4)."""

from __future__ import annotations

import threading
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, TypeAlias, final

import numpy as np
import torch
from torch import Tensor, nn

from dglx_dist.comm.collectives import barrier, gather_int64, gather_json
from dglx_dist.comm.system import return_memory
from dglx_dist.errors import ConfigError
from dglx_dist.graph.opening import together
from dglx_dist.progress import progress
from dglx_dist.records import Array, StepShare
from dglx_dist.strategies.full_graph.expansion import (
    Composition,
    EasOptions,
    EasSelector,
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
    from dglx_dist.strategies.full_graph.expansion import Selection


_Key: TypeAlias = tuple[int, int, int]
"""(draw of the composition, draw of the external nodes, step): equal keys, equal plans."""


@final
@dataclass(frozen=True, kw_only=True)
class CooperativeRecipe:
    """What co-batches are made of."""

    num_layers: int
    num_batches: int
    """R, at least 1."""
    composition: Composition
    eas: EasOptions | None
    """None: the whole neighbourhood of all layers."""
    seed: int
    """Of the composition and of the external nodes."""
    split: str = "auto"
    """The partitioner that deals a co-batch out to a server's ranks."""

    @property
    def is_fixed(self) -> bool:
        """Whether all epochs have the same co-batches."""
        return self.composition != "shuffled" and (self.eas is None or not self.eas.resample_every)


@final
class CooperativePlanner:
    """Makes the plan of any co-batch. All ranks make one, and ask for the same plans in the same order.

    Args:
        g: A graph of one node and one edge type.
        seeds: Of this server.

    Raises:
        PeerError: a rank did not take part.
    """

    def __init__(self, g: DistGraph, seeds: ServerSeeds) -> None:
        self.seeds = seeds
        self._g = g
        self._selector = EasSelector(g)
        # Waits until all ranks are here, so that all answer before one asks.
        self._planner = Planner(g)
        topology = g.session.topology
        self._is_leader = topology.rank == topology.ranks_of_server(topology.server)[0]
        self._composed: tuple[CooperativeRecipe, int, tuple[Array, ...]] | None = None
        self._rule: tuple[CooperativeRecipe, int, Selection] | None = None

    def make(self, recipe: CooperativeRecipe, key: _Key) -> RankPlan:
        """Return this rank's plan; any thread, one at a time; takes part of all ranks.

        Raises:
            PeerError: a rank is dead or silent.
            RemoteError: another rank failed.
        """
        composition_draw, eas_draw, step = key
        request = PlanRequest(
            # What a server trains on is said once, by its first rank.
            seeds=self._seeds_of(recipe, composition_draw)[step] if self._is_leader else _NONE,
            num_layers=recipe.num_layers,
            hops=recipe.num_layers,
            eas=self._rule_of(recipe, eas_draw),
            split=recipe.split,
            show_progress=False,
        )
        return self._planner.plan(request)

    def _seeds_of(self, recipe: CooperativeRecipe, draw: int) -> tuple[Array, ...]:
        known = self._composed
        if known is None or known[:2] != (recipe, draw):
            clusters = self._clusters(recipe) if recipe.composition == "ordered" else None
            pieces = compose(
                self.seeds.own,
                recipe.num_batches,
                recipe.composition,
                seed=recipe.seed,
                draw=draw,
                clusters=clusters,
            )
            known = self._composed = (recipe, draw, pieces)
        return known[2]

    def _clusters(self, recipe: CooperativeRecipe) -> Array:
        server = self._g.session.topology.server
        first, last = self._g.get_node_partition_policy(self._g.ntypes[0]).bounds[server : server + 2]
        return cluster_seeds(
            self._g.structure(),
            np.arange(first, last),
            self.seeds.own,
            recipe.num_batches,
            seed=recipe.seed,
        )

    def _rule_of(self, recipe: CooperativeRecipe, draw: int) -> Selection | None:
        if recipe.eas is None:
            return None
        known = self._rule
        # Kept, because external nodes of a server are chosen once for all of its co-batches.
        if known is None or known[0].eas != recipe.eas or known[1] != draw:
            rule = self._selector.rule(recipe.eas, seed=recipe.seed, draw=draw)
            known = self._rule = (recipe, draw, rule)
        return known[2]


_NONE: Array = np.empty(0, np.int64)
_KEPT_EPOCHS = 3


@final
class CooperativePlans(PlanSource):
    """One plan per co-batch, each made once or, where epochs differ, when it is needed; the next one ahead.

    Every rank must make it. Plans that are the same in all epochs are kept on disk, if they may, and where
    there are several, what is fetched for them too.

    Args:
        g: A graph of one node and one edge type.
        planner: Of this graph.
        recipe: Of the co-batches.
        keep: Whether plans, and what is fetched for them, may be kept on disk.

    Raises:
        ConfigError: there are more co-batches than the largest server has seeds.
        PeerError: a rank did not take part.
    """

    def __init__(
        self, g: DistGraph, planner: CooperativePlanner, recipe: CooperativeRecipe, *, keep: bool
    ) -> None:
        check_num_batches(recipe.num_batches, planner.seeds)
        self._planner, self._recipe = planner, recipe
        self._sizes = planner.seeds.sizes(recipe.num_batches).sum(axis=1)
        self._cache = _open_cache(g, planner.seeds, recipe) if keep and recipe.is_fixed else None
        self._row_files: RowFiles | None = None
        if self._cache is not None and len(self) > 1:
            self._row_files = RowFiles(self._cache.rows_folder, g.session.topology.server)
        # Ranks make plans together: one that is not on the disk of all of them is made anew by all.
        self._on_disk = _common_steps(g, self._cache, recipe.num_batches)
        self._held: dict[_Key, RankPlan] = {}
        self._num_local: dict[_Key, int] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="dglx-plans")
        self._under_way: dict[tuple[int, int], Future[RankPlan]] = {}
        self._position = (0, recipe.num_batches)
        """Epoch, and the step that follows the one that was asked for last."""
        _close_on_all_ranks(g, self)

    def __len__(self) -> int:
        """See :meth:`PlanSource.__len__`: R."""
        return self._recipe.num_batches

    @property
    def row_files(self) -> RowFiles | None:
        """See :attr:`PlanSource.row_files`; of one co-batch, the loader holds the rows."""
        return self._row_files

    @property
    def recipe(self) -> CooperativeRecipe:
        """What the co-batches are made of."""
        return self._recipe

    def plan(self, epoch: int, step: int) -> RankPlan:
        """See :meth:`PlanSource.plan`.

        An epoch that is left for another step than the next one is planned to its end all the same: how far
        the ranks' loaders had run ahead is a matter of time, and they must make the same plans.
        """
        if (epoch, step) != self._position:
            self._finish_epoch()
            self._position = (epoch, step)
        self._begin(epoch, step)
        if step + 1 < len(self):
            self._begin(epoch, step + 1)
        self._position = (epoch, step + 1)
        return self._under_way.pop((epoch, step)).result()

    def share(self, epoch: int, step: int) -> StepShare:
        """See :meth:`PlanSource.share`."""
        num_local = self._num_local.get(self._key(epoch, step), 0)
        return StepShare(num_local=num_local, num_global=int(self._sizes[step]))

    def close(self) -> None:
        """See :meth:`PlanSource.close`; waits for plans of the epoch, in which all ranks take part."""
        self._finish_epoch()
        self._pool.shutdown(wait=True)

    def _begin(self, epoch: int, step: int) -> None:
        """Have the thread make a plan, unless it does already; it makes one after the other."""
        if (epoch, step) not in self._under_way:
            self._under_way[epoch, step] = self._pool.submit(self._make, self._key(epoch, step))

    def _finish_epoch(self) -> None:
        epoch, first = self._position
        for step in range(first, len(self)):
            self._begin(epoch, step)
        self._position = (epoch, len(self))
        self._under_way.clear()

    def _key(self, epoch: int, step: int) -> _Key:
        recipe = self._recipe
        return draw_of(recipe.composition, epoch), recipe.eas.draw(epoch) if recipe.eas else 0, step

    def _make(self, key: _Key) -> RankPlan:
        if key in self._held:
            return self._held[key]
        step = key[-1]
        if self._cache is not None and step in self._on_disk:
            plan = self._cache.read(step)
        else:
            plan = self._planner.make(self._recipe, key)
            if self._cache is not None:
                self._on_disk.add(step)
                if not self._cache.write(step, plan):
                    self._held[key] = plan
        self._num_local[key] = plan.seeds
        # Of shuffled epochs that are over, nobody asks.
        while len(self._num_local) > _KEPT_EPOCHS * len(self):
            del self._num_local[next(iter(self._num_local))]
        if len(self) == 1:
            # The same object again, so that its features are kept too.
            self._held = {key: plan}
        return plan


def _close_on_all_ranks(g: DistGraph, plans: CooperativePlans) -> None:
    """Have ranks that answer each other's plans go on doing so until all have ended theirs."""
    # Not kept: who lets a loader go lets go of what it has read, and a closed graph goes before the session.
    known, left, session = weakref.ref(plans), threading.Event(), g.session

    def leave() -> None:
        if left.is_set():
            return
        left.set()
        found = known()
        if found is not None:
            found.close()
        barrier(session, "the last co-batch's plan")

    g.on_close.append(leave)
    session.before_close.append(leave)


def check_num_batches(num_batches: int, seeds: ServerSeeds) -> None:
    """Raise ConfigError unless every one of ``num_batches`` has seeds on some server."""
    if not 1 <= num_batches <= max(seeds.counts):
        raise ConfigError(
            f"batches={num_batches} co-batches, and the servers have {', '.join(map(str, seeds.counts))} "
            f"seeds; give 1 to {max(seeds.counts)}"
        )


def _open_cache(g: DistGraph, seeds: ServerSeeds, recipe: CooperativeRecipe) -> PlanCache:
    facts = asdict(recipe) | {
        "servers": g.session.topology.server_of_rank,
        # Of the partitioner, while that of the recipe is the loader's.
        "split_seed": g.session.seed,
        "seeds": [seeds.digest, *seeds.counts],
        "edges": list(g.canonical_etypes[0]),
    }
    return PlanCache(g.dataset, facts, g.session.topology.rank)


def _common_steps(g: DistGraph, cache: PlanCache | None, num_batches: int) -> set[int]:
    """Return the steps whose plans all ranks have on disk; every rank must call it."""
    mine = [step for step in range(num_batches) if cache.holds(step)] if cache is not None else []
    found = set(range(num_batches))
    for steps in gather_json(mine, g.session):
        found &= set(steps)  # type: ignore[call-overload]  # a list of numbers, as sent
    return found


@final
class MemoryChoice:
    """Chooses a number of co-batches. Every rank makes one.

    Args:
        g: A graph of one node and one edge type.
        planner: Of the server's seeds.
        recipe: Of the co-batches; its number of them is of no meaning.
        request: What blocks have.
        memory_bytes: What a rank may need for training, beyond what it has before.
    """

    def __init__(
        self,
        g: DistGraph,
        planner: CooperativePlanner,
        recipe: CooperativeRecipe,
        request: LoaderRequest,
        memory_bytes: int,
    ) -> None:
        self._g, self._planner, self._recipe = g, planner, recipe
        self._request, self._memory_bytes = request, memory_bytes

    def choose(self, model: nn.Module) -> tuple[int, MemoryEstimate]:
        """Return the fewest co-batches that ``model`` trains on within the memory; every rank must call it.

        Rank 0 tells what the largest one needs. From now on what is freed goes back to the system, for what
        an allocator keeps would be half as much again.

        Returns:
            Their number, equal on all ranks, and what the largest one needs on this rank.

        Raises:
            ConfigError: on all ranks: the model cannot be tried out, or not even the smallest co-batch fits.
            PeerError: a rank did not take part.
        """
        return_memory()
        row = together(self._g.session, lambda: self._feature_row(), ConfigError)
        memory_trace = together(self._g.session, lambda: self._traced_memory(model, row), ConfigError)
        feature_bytes = row.numel() * row.element_size()
        largest: dict[int, MemoryEstimate] = {}

        def worst(number: int, steps: Array) -> int:
            mine = [self._needed(number, int(step), memory_trace, feature_bytes) for step in steps]
            largest[number] = max(mine, key=lambda one: one.total)
            return int(gather_int64([largest[number].total], self._g.session).max())

        shown = self._g.session.topology.rank == 0
        with progress("choosing the number of co-batches", 1, enabled=shown) as advance:
            number = choose_num_batches(worst, self._memory_bytes, max(self._planner.seeds.counts))
            advance(1)
            batches = "1 co-batch" if number == 1 else f"{number} co-batches"
            advance.say(f"{batches} an epoch; the largest of rank 0 needs")
            for line in largest[number].lines():
                advance.say(line)
        return number, largest[number]

    def _needed(
        self, number: int, step: int, memory_trace: MemoryTrace, feature_bytes: int
    ) -> MemoryEstimate:
        plan = self._planner.make(replace(self._recipe, num_batches=number), (0, 0, step))
        # One co-batch is kept, of several the next ones are loaded while one is trained on.
        ahead = 0 if number == 1 else self._request.depth
        return estimate(plan, memory_trace, feature_bytes, ahead=ahead)

    def _feature_row(self) -> Tensor:
        """Return (1, F) of what goes into the model, in its type."""
        inputs = next(iter(self._request.columns.inputs.values()), {})
        if len(inputs) != 1:
            raise ConfigError(
                f"option memory needs one column that goes into the model, and the sampler prefetches "
                f"{list(inputs)}; give prefetch_node_feats=['feat'], or batches=R in place of memory"
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
