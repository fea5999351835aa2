"""From a graph, seeds and options to a loader of co-batches, whose number may wait for the model."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, final

from torch import nn

from dglx_dist.sampling.opening import check_alike
from dglx_dist.strategies.base import Reduction
from dglx_dist.strategies.granndis.co_batches import CoBatchPlanner, CoBatchPlans, CoBatchRecipe
from dglx_dist.strategies.granndis.co_loader import AwaitingLoader
from dglx_dist.strategies.granndis.co_memory import MemoryChoice
from dglx_dist.strategies.granndis.cooperative_options import CooperativeOptions
from dglx_dist.strategies.granndis.loader import FullGraphLoader
from dglx_dist.strategies.granndis.memory import MemoryEstimate
from dglx_dist.strategies.granndis.model import HaloModel
from dglx_dist.strategies.granndis.planning import check_one_type
from dglx_dist.strategies.granndis.request import Request, read_request
from dglx_dist.strategies.granndis.server_seeds import gather_seeds

if TYPE_CHECKING:
    from dglx_dist.graph import DistGraph

_STATE = "cooperative"


def open_co_loader(
    strategy: str,
    g: DistGraph,
    indices: Any,
    sampler: Any,
    options: CooperativeOptions,
    loader_options: Mapping[str, Any],
) -> FullGraphLoader | AwaitingLoader:
    """Return a loader of co-batches; every rank must call it.

    With option ``memory`` and no wrapped model yet, it cannot say how many steps an epoch has before a model
    is wrapped.

    Raises:
        ConfigError: on all ranks: something cannot be honoured.
        PeerError: a rank did not take part.
    """
    check_alike(g.session, f"options of {strategy}", f"{options}")
    request = read_request(strategy, g, indices, sampler, loader_options)
    planner = CoBatchPlanner(g, gather_seeds(g, request.seeds))

    def opened(num_batches: int) -> FullGraphLoader:
        recipe = _recipe(request, options, num_batches)
        source = CoBatchPlans(g, planner, recipe, keep=options.keep == "disk")
        return FullGraphLoader(g, source, request, use_pp=options.use_pp)

    if options.batches:
        return opened(options.batches)
    choice = MemoryChoice(g, planner, _recipe(request, options, 1), request, options.memory)
    state = _state(g)

    def fitting(model: nn.Module) -> tuple[FullGraphLoader, MemoryEstimate]:
        num_batches, needed = choice.choose(model)
        return opened(num_batches), needed

    loader = AwaitingLoader(fitting, state.model)
    state.settle_or_await(loader)
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
    _state(g).model_is(wrapped)
    return wrapped


def _recipe(request: Request, options: CooperativeOptions, num_batches: int) -> CoBatchRecipe:
    return CoBatchRecipe(
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
        self._awaiting: list[AwaitingLoader] = []

    def model(self) -> nn.Module | None:
        """Return the user's model that was wrapped last, if it is still there."""
        wrapped = self._model() if self._model is not None else None
        return None if wrapped is None else wrapped.module

    def settle_or_await(self, loader: AwaitingLoader) -> None:
        """Give ``loader`` the model that was wrapped for it, or the one that will be."""
        model = self.model()
        if model is None or not self._is_new:
            self._awaiting.append(loader)
        else:
            self._is_new = False
            loader.settle(model)

    def model_is(self, wrapped: HaloModel) -> None:
        """Give ``wrapped`` to all that wait, or else to the next one that comes."""
        self._model, awaiting = weakref.ref(wrapped), self._awaiting
        self._awaiting, self._is_new = [], not awaiting
        for loader in awaiting:
            if not loader.is_settled:
                loader.settle(wrapped.module)


def _state(g: DistGraph) -> _State:
    state = g.session.attached.setdefault(_STATE, _State())
    assert isinstance(state, _State)
    return state
