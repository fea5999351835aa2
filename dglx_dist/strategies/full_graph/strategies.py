"""From a graph, seeds and options to a loader of co-batches, whose number may wait for the model."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, final

from torch import Tensor, nn

from dglx_dist.comm.collectives import gather_int64
from dglx_dist.comm.session import Session
from dglx_dist.dataloading.loader import check_alike
from dglx_dist.dataloading.step_loader import LoaderTimes
from dglx_dist.errors import ConfigError
from dglx_dist.graph.opening import together
from dglx_dist.records import StepShare
from dglx_dist.strategies.base import Reduction, Strategy, Traits, WrappedModel
from dglx_dist.strategies.full_graph.cooperative import (
    CooperativePlanner,
    CooperativePlans,
    CooperativeRecipe,
    MemoryChoice,
)
from dglx_dist.strategies.full_graph.halo_plan import OnePlan, PlanSource, RankPlan
from dglx_dist.strategies.full_graph.loader import Batch, FullGraphLoader
from dglx_dist.strategies.full_graph.memory_estimate import MemoryEstimate
from dglx_dist.strategies.full_graph.model import HaloModel
from dglx_dist.strategies.full_graph.options import (
    COMMON,
    PRELOADING,
    CooperativeOptions,
    FullGraphOptions,
    LoaderRequest,
    hops_of,
    read_cooperative_options,
    read_full_graph_options,
    read_request,
)
from dglx_dist.strategies.full_graph.plan_builder import (
    PlanRequest,
    SampledPlans,
    check_one_type,
    gather_seeds,
    make_plans,
)

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph


@final
class DeferredLoader:
    """A :class:`FullGraphLoader` whose number of steps follows from what a model needs.

    All but :meth:`settle` is as there, and may be called once there is a model: the next that is wrapped, or
    an earlier one when iterating begins without.

    Args:
        opened: Opens the loader for a model, and says what it needs; collective.
        earlier: Returns the model that was wrapped last, equally on all ranks; None: none.
    """

    def __init__(
        self,
        opened: Callable[[nn.Module], tuple[FullGraphLoader, MemoryEstimate]],
        earlier: Callable[[], nn.Module | None],
    ) -> None:
        self._opened, self._earlier = opened, earlier
        self._loader: FullGraphLoader | None = None
        self._memory: MemoryEstimate | None = None

    @property
    def is_settled(self) -> bool:
        """Whether it has got its model."""
        return self._loader is not None

    @property
    def memory(self) -> MemoryEstimate | None:
        """What the largest co-batch needs on this rank; None: there is no model yet."""
        return self._memory

    @property
    def plan(self) -> RankPlan | None:
        """See :attr:`FullGraphLoader.plan`."""
        return self._settled.plan

    def settle(self, model: nn.Module) -> None:
        """Open the loader for the user's ``model``; every rank must call it, once."""
        self._loader, self._memory = self._opened(model)

    def __len__(self) -> int:
        """See :meth:`FullGraphLoader.__len__`."""
        return len(self._settled)

    @property
    def epoch(self) -> int:
        """See :attr:`FullGraphLoader.epoch`."""
        return self._settled.epoch

    @property
    def num_targets_of_epoch(self) -> tuple[int, int]:
        """See :attr:`FullGraphLoader.num_targets_of_epoch`."""
        return self._settled.num_targets_of_epoch

    def set_epoch(self, epoch: int) -> None:
        """See :meth:`FullGraphLoader.set_epoch`."""
        self._settled.set_epoch(epoch)

    def times(self, *, reset: bool = False) -> LoaderTimes:
        """See :meth:`FullGraphLoader.times`."""
        return self._settled.times(reset=reset)

    def state_dict(self) -> dict[str, int]:
        """See :meth:`FullGraphLoader.state_dict`."""
        return self._settled.state_dict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """See :meth:`FullGraphLoader.load_state_dict`."""
        self._settled.load_state_dict(state)

    def __iter__(self) -> Iterator[Batch]:
        """See :meth:`FullGraphLoader.__iter__`."""
        model = self._earlier()
        if not self.is_settled and model is not None:
            self.settle(model)
        return iter(self._settled)

    @property
    def _settled(self) -> FullGraphLoader:
        if self._loader is None:
            raise ConfigError(
                "how many co-batches fit into option memory depends on the model; call dx.wrap(model, g) "
                "before using the loader, or give batches=R in place of memory"
            )
        return self._loader


_STATE = "cooperative"


def open_co_loader(
    strategy: str,
    g: DistGraph,
    indices: Any,
    sampler: Any,
    options: CooperativeOptions,
    loader_options: Mapping[str, Any],
) -> FullGraphLoader | DeferredLoader:
    """Return a loader of co-batches; every rank must call it.

    With option ``memory`` and no wrapped model yet, it cannot say how many steps an epoch has before a model
    is wrapped.

    Raises:
        ConfigError: on all ranks: something cannot be honoured.
        PeerError: a rank did not take part.
    """
    check_alike(g.session, f"options of {strategy}", f"{options}")
    request = read_request(strategy, g, indices, sampler, loader_options)
    planner = CooperativePlanner(g, gather_seeds(g, request.seeds))

    def opened(num_batches: int) -> FullGraphLoader:
        recipe = _recipe(request, options, num_batches)
        source = CooperativePlans(g, planner, recipe, keep=options.keep == "disk")
        return FullGraphLoader(g, source, request, use_pp=options.use_pp)

    if options.batches:
        return opened(options.batches)
    choice = MemoryChoice(g, planner, _recipe(request, options, 1), request, options.memory)
    state = _state(g)

    def fitting(model: nn.Module) -> tuple[FullGraphLoader, MemoryEstimate]:
        num_batches, needed = choice.choose_external(model)
        return opened(num_batches), needed

    loader = DeferredLoader(fitting, state.model)
    state.settle_or_defer(loader)
    return loader


def wrap_and_settle(
    model: nn.Module, g: DistGraph, options: CooperativeOptions, reduction: Reduction
) -> HaloModel:
    """Return ``model`` on halo blocks, after loaders that wait for one have settled; all ranks must call it.

    Raises:
        ConfigError: there are several types; as :class:`HaloModel`; or memory does not suffice.
    """
    check_one_type(_STATE, g)
    wrapped = HaloModel(model, g.session, reduction=reduction, bucket_bytes=options.bucket_bytes)
    _state(g).set_model(wrapped)
    return wrapped


def _recipe(request: LoaderRequest, options: CooperativeOptions, num_batches: int) -> CooperativeRecipe:
    return CooperativeRecipe(
        num_layers=request.num_layers,
        num_batches=num_batches,
        composition=options.composition,
        eas=options.eas,
        seed=request.seed,
        split=options.split,
    )


@final
class _State:
    """What loaders and models of one session must know of each other."""

    def __init__(self) -> None:
        self._model: weakref.ref[HaloModel] | None = None
        self._is_new = False
        """Whether the model was wrapped after all loaders that there are."""
        self._deferred: list[DeferredLoader] = []

    def model(self) -> nn.Module | None:
        """Return the user's model that was wrapped last, if it is still there."""
        wrapped = self._model() if self._model is not None else None
        return None if wrapped is None else wrapped.module

    def settle_or_defer(self, loader: DeferredLoader) -> None:
        """Give ``loader`` the model that was wrapped for it, or the one that will be."""
        model = self.model()
        if model is None or not self._is_new:
            self._deferred.append(loader)
        else:
            self._is_new = False
            loader.settle(model)

    def set_model(self, wrapped: HaloModel) -> None:
        """Give ``wrapped`` to all that wait, or else to the next one that comes."""
        self._model, awaiting = weakref.ref(wrapped), self._deferred
        self._deferred, self._is_new = [], not awaiting
        for loader in awaiting:
            if not loader.is_settled:
                loader.settle(wrapped.module)


def _state(g: DistGraph) -> _State:
    state = g.session.attached.setdefault(_STATE, _State())
    assert isinstance(state, _State)
    return state


COOPERATIVE = "cooperative"


@final
class Cooperative(Strategy):
    """Several steps an epoch; in each, every server trains its ranks together on some of its seeds.

    A server fetches what its seeds need once and splits it among its ranks, who exchange rows with each other
    and none with other servers.

    Options: ``batches`` (int): co-batches of an epoch, 1 when not given, which is shared_preload; or
    ``memory`` ("4GB"): what a rank may need, from which their number follows. ``composition``: "random" seeds
    together, the same in all epochs, "ordered" ones near each other, or "shuffled" anew in each epoch.
    ``keep``: "disk" keeps plans that all epochs share, and the rows fetched for them, beside the dataset;
    "rebuild" makes and fetches them in each epoch.
    ``external_hops``, ``external_fanout``, ``external_policy``, ``resample_every`` as under shared_preload;
    ``external_inner``: whether the expansion starts from the "server" or from the seeds of the "batch".
    ``split``, ``use_pp`` and ``bucket_bytes`` as under shared_preload. See docs/strategies/granndis.md.
    """

    traits = Traits(
        unit="full_graph",
        features="rows",
        exact=True,
        summary="features of each co-batch's neighbourhood; activations inside a server; all gradients",
    )

    def __init__(self, session: Session, options: Mapping[str, object]) -> None:
        self._session = session
        self._options = read_cooperative_options(COOPERATIVE, options)

    def loader(self, g: DistGraph, indices: Tensor, sampler: Any, **loader_options: Any) -> Iterable[Any]:
        """Return a loader of as many steps an epoch as there are co-batches; every rank must call it.

        Args:
            g: A graph of one node and one edge type.
            indices: (K,) this rank's seeds; each is trained on by the server that owns it.
            sampler: Of ``dgl.dataloading``: its number of layers counts, and what it prefetches.
            loader_options: What ``dglx_dist.DataLoader`` takes; the batch size has no meaning here.

        Raises:
            ConfigError: on all ranks, when something cannot be honoured.
        """

        return open_co_loader(COOPERATIVE, g, indices, sampler, self._options, loader_options)

    def wrap(self, model: nn.Module, g: DistGraph, reduction: Reduction = "mean") -> WrappedModel:
        """Return ``model`` with layers that exchange rows; every rank must call it.

        Loaders that were made before and await a model, to choose_external their number of co-batches, get it.

        Raises:
            ConfigError: as under full_graph; or memory does not suffice for the smallest co-batches.
        """

        return wrap_and_settle(model, g, self._options, reduction)


FULL_GRAPH = "full_graph"


@final
class FullGraph(Strategy):
    """One step an epoch on the whole graph; every layer exchanges the rows at the borders of the ranks.

    Options: ``use_pp`` (bool): whether the features of the halo are kept from the start on, which is the
    default, or sent anew in each epoch; ``bucket_bytes`` (int): gradients of parameters that are sent
    together, 4 MiB when not given. See docs/strategies/full_graph.md.
    """

    traits = Traits(
        unit="full_graph",
        features="rows",
        exact=True,
        summary="activations of border nodes, and their gradients, at every layer; all gradients",
    )

    def __init__(self, session: Session, options: Mapping[str, object]) -> None:
        self._session = session
        self._options = read_full_graph_options(FULL_GRAPH, options, COMMON, hops=0)

    def loader(self, g: DistGraph, indices: Tensor, sampler: Any, **loader_options: Any) -> Iterable[Any]:
        """Return a loader of one step an epoch; see :class:`FullGraphLoader` for what it yields.

        Args:
            g: A graph of one node and one edge type.
            indices: (K,) this rank's seeds; what one rank names and another one owns is computed there.
            sampler: Of ``dgl.dataloading``: its number of layers counts, and what it prefetches.
            loader_options: What ``dglx_dist.DataLoader`` takes; the batch size has no meaning here.

        Raises:
            ConfigError: on all ranks, when something cannot be honoured; see :func:`read_request`.
        """

        return open_loader(FULL_GRAPH, g, indices, sampler, self._options, loader_options)

    def wrap(self, model: nn.Module, g: DistGraph, reduction: Reduction = "mean") -> WrappedModel:
        """Return ``model`` with layers that exchange rows; every rank must call it.

        Raises:
            ConfigError: the model mixes rows, as a batch norm does; the graph has several types; or as under
                data_parallel.
        """

        return wrap_model(FULL_GRAPH, model, g, self._options, reduction)


def open_loader(
    strategy: str,
    g: DistGraph,
    indices: Any,
    sampler: Any,
    options: FullGraphOptions,
    loader_options: Mapping[str, Any],
) -> FullGraphLoader:
    """Return a loader of one step an epoch on all seeds; every rank must call it.

    Args:
        strategy: Name for messages.
        g: A graph of one node and one edge type.
        indices: This rank's seeds.
        sampler: Of ``dgl.dataloading``.
        options: Of the strategy.
        loader_options: What ``dglx_dist.DataLoader`` takes.

    Raises:
        ConfigError: on all ranks: see :func:`read_request` and :func:`make_plans`; or there are fewer layers
            than the option ``hops`` asks for.
        PeerError: a rank did not take part.
    """
    check_alike(g.session, f"options of {strategy}", f"{options}")
    request = read_request(strategy, g, indices, sampler, loader_options)
    hops = together(g.session, lambda: hops_of(options, request.num_layers), ConfigError)
    return FullGraphLoader(g, _source(g, request, hops, options), request, use_pp=options.use_pp)


def _source(g: DistGraph, request: LoaderRequest, hops: int, options: FullGraphOptions) -> PlanSource:
    seeds, num_layers, split = request.seeds, request.num_layers, options.split
    if options.eas is not None:
        wanted = PlanRequest(seeds=seeds, num_layers=num_layers, hops=hops, split=split)
        return SampledPlans(g, wanted, options.eas, seed=request.seed)
    plan = make_plans(g, seeds, num_layers, hops, split=split)
    counts = gather_int64([plan.seeds], g.session)
    return OnePlan(plan, StepShare(num_local=plan.seeds, num_global=int(counts.sum())))


def wrap_model(
    strategy: str, model: nn.Module, g: DistGraph, options: FullGraphOptions, reduction: Reduction
) -> HaloModel:
    """Return ``model`` on halo blocks; every rank must call it.

    Raises:
        ConfigError: there are several types; or as :class:`HaloModel`.
    """
    check_one_type(strategy, g)
    return HaloModel(model, g.session, reduction=reduction, bucket_bytes=options.bucket_bytes)


SHARED_PRELOAD = "shared_preload"


@final
class SharedPreload(Strategy):
    """One step an epoch; a server computes what its nodes need of others itself, for the first layers.

    Options: ``hops`` (int): layers, from the first one on, that are computed without other servers; all of
    them when not given, and with 0 it is full_graph. ``split`` (name of a partitioner): how a server's
    rows are given to its ranks, METIS when not given. ``use_pp`` and ``bucket_bytes`` as under full_graph.

    Expansion-aware sampling: ``external_hops`` (int) and ``external_fanout`` (int) take in only so many nodes
    of other servers, chosen by ``external_policy`` ("uniform_external", "degree" or "shadow"), once or anew
    after every ``resample_every`` (int) epochs; training is then no longer that of one process. See
    docs/strategies/granndis.md.
    """

    traits = Traits(
        unit="full_graph",
        features="rows",
        exact=True,
        summary="features of the neighbourhood, once; activations of border nodes above it; all gradients",
    )

    def __init__(self, session: Session, options: Mapping[str, object]) -> None:
        self._session = session
        self._options = read_full_graph_options(SHARED_PRELOAD, options, PRELOADING)

    def loader(self, g: DistGraph, indices: Tensor, sampler: Any, **loader_options: Any) -> Iterable[Any]:
        """Return a loader of one step an epoch; see :meth:`FullGraph.loader`."""

        return open_loader(SHARED_PRELOAD, g, indices, sampler, self._options, loader_options)

    def wrap(self, model: nn.Module, g: DistGraph, reduction: Reduction = "mean") -> WrappedModel:
        """Return ``model`` with layers that exchange rows; see :meth:`FullGraph.wrap`."""

        return wrap_model(SHARED_PRELOAD, model, g, self._options, reduction)
