"""The strategies full_graph, shared_preload and cooperative."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, final

from torch import Tensor, nn

from dglx_dist.comm.collectives import check_equal
from dglx_dist.comm.session import SessionField
from dglx_dist.errors import ConfigError
from dglx_dist.graph.shared_memory import warn_of_edges
from dglx_dist.options import read_options
from dglx_dist.strategies.base import (
    Reduction,
    Strategy,
    Traits,
    WrappedModel,
    check_one_type,
)
from dglx_dist.strategies.full_graph import cost as costs
from dglx_dist.strategies.full_graph.loader import (
    Batch,
    FullGraphLoader,
    PlanMaker,
    PlanSource,
    PlanSpec,
    gather_seeds,
)
from dglx_dist.strategies.full_graph.memory_estimate import MemoryEstimate, choose_batches
from dglx_dist.strategies.full_graph.model import HaloModel, check_rows_stay_apart
from dglx_dist.strategies.full_graph.options import (
    COOPERATIVE,
    EXCHANGING,
    PRELOADING,
    FullGraphOptions,
    read_request,
)

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph


def _read(strategy: str, options: Mapping[str, object], *, names: Sequence[str]) -> FullGraphOptions:
    return read_options(f"strategy {strategy!r}", FullGraphOptions, options, names)


class _FullGraphStrategy(Strategy):
    name: ClassVar[str]
    gathers_seeds: ClassVar[bool] = False
    """Whether a server composes its steps from its seeds, in place of one step of all seeds."""
    edge_bytes: ClassVar[int]
    """Memory of a machine for each edge of its servers, measured with two layers on one server."""

    inspect = staticmethod(check_rows_stay_apart)
    cost = staticmethod(costs.cost)

    _options: FullGraphOptions

    def loader(self, g: DistGraph, indices: Tensor, sampler: Any, **loader_options: Any) -> Iterable[Any]:
        """Return a :class:`FullGraphLoader`, or one that waits for a model; every rank must call it.

        With option ``memory`` it is made for the model wrapped before it, unless that one has a loader. Then
        its length is unknown until the next model is wrapped. The rank or server that owns a seed computes
        it. The sampler gives the number of layers and the columns to prefetch; a batch size has no effect.

        Raises:
            ConfigError: on all ranks: an argument or option is not supported; see :func:`read_request`.
            PeerError: a rank did not take part.
        """
        options = self._options
        check_equal(g.session, f"an option of {self.name}", asdict(options))
        request = read_request(self.name, g, indices, sampler, loader_options)
        request = replace(request, wire=options.wire_dtype)
        warn_of_edges(g.session, g.edge_bounds, self.edge_bytes)
        maker = PlanMaker(g, gather_seeds(g, request.seeds) if self.gathers_seeds else request.seeds)
        spec = PlanSpec(
            num_layers=request.num_layers,
            hops=options.hops_of(request.num_layers),
            num_batches=options.batches or 1,
            composition=options.composition,
            eas=options.eas,
            seed=request.seed,
            split=options.split,
            cover=options.aggregate == "cover",
        )

        def opened(spec: PlanSpec) -> FullGraphLoader:
            source = PlanSource(g, maker, spec, keep=options.keep == "disk")
            return FullGraphLoader(g, source, request, use_pp=options.use_pp)

        if not options.memory:
            return opened(spec)

        def opened_for(model: nn.Module) -> tuple[FullGraphLoader, MemoryEstimate]:
            number, estimate = choose_batches(g, maker, spec, request, options.memory_bytes, model)
            return opened(replace(spec, num_batches=number)), estimate

        state = _STATE.of(g.session)
        loader = DeferredLoader(opened_for, lambda: state.model())
        state.settle_or_defer(loader)
        return loader

    def wrap(self, model: nn.Module, g: DistGraph, reduction: Reduction = "mean") -> WrappedModel:
        """Return ``model`` with layers that exchange rows; every rank must call it.

        Settles deferred loaders of the session.

        Raises:
            ConfigError: the model mixes rows, as a batch norm does; the graph has several types; even the
                smallest cooperative batches exceed option ``memory``; or as for data_parallel.
        """
        check_one_type(self.name, g)
        wrapped = HaloModel(model, g.session, self._options, reduction=reduction)
        _STATE.of(g.session).set_model(wrapped)
        return wrapped


@final
class FullGraph(_FullGraphStrategy):
    """One step per epoch on the whole graph; every layer exchanges border rows between ranks.

    Options: :data:`EXCHANGING` of :class:`FullGraphOptions`. See docs/strategies/full_graph.md.
    """

    name, edge_bytes = "full_graph", 60
    traits = Traits(
        unit="full_graph",
        summary="activations of border nodes, and their gradients, at every layer; all gradients",
        complexity=20,
    )

    @staticmethod
    def read_options(options: Mapping[str, object]) -> FullGraphOptions:
        return replace(_read(FullGraph.name, options, names=EXCHANGING), hops=0)

    candidates = staticmethod(costs.exchanging_candidates)


@final
class SharedPreload(_FullGraphStrategy):
    """One step per epoch; for the first layers, a server computes the rows that it needs from other servers.

    Options: :data:`PRELOADING` of :class:`FullGraphOptions`. With those of expansion-aware sampling
    (``external_...``), training differs from that of one process. See docs/strategies/shared_preload.md.
    """

    name, edge_bytes = "shared_preload", 140
    traits = Traits(
        unit="full_graph",
        summary="features of the neighbourhood, once; activations of border nodes above it; all gradients",
        complexity=30,
    )
    read_options = staticmethod(partial(_read, name, names=PRELOADING))
    candidates = staticmethod(costs.preloading_candidates)


@final
class Cooperative(_FullGraphStrategy):
    """Several steps per epoch; in each, every server trains its ranks together on some of its seeds.

    A server fetches the neighbourhood of its seeds once and splits it among its ranks. Ranks exchange rows
    only within their server.

    Options: :data:`COOPERATIVE` of :class:`FullGraphOptions`. See docs/strategies/shared_preload.md.
    """

    name, gathers_seeds, edge_bytes = "cooperative", True, 260
    traits = Traits(
        unit="full_graph",
        summary="features of each batch's neighbourhood; activations inside a server; all gradients",
        complexity=40,
    )
    read_options = staticmethod(partial(_read, name, names=COOPERATIVE))
    candidates = staticmethod(costs.cooperative_candidates)


@final
class DeferredLoader:
    """A :class:`FullGraphLoader` whose number of steps depends on the memory of a model.

    It is usable once it has a model: the next one that is wrapped, or the ``earlier`` one, the same on all
    ranks, if iteration begins first. ``opened`` opens the loader for a model and returns its memory estimate;
    collective.
    """

    def __init__(
        self,
        opened: Callable[[nn.Module], tuple[FullGraphLoader, MemoryEstimate]],
        earlier: Callable[[], HaloModel | None],
    ) -> None:
        self._opened, self._earlier = opened, earlier
        self._loader: FullGraphLoader | None = None
        self.memory: MemoryEstimate | None = None
        """Estimate of the largest cooperative batch on this rank; None without a model."""

    def settle(self, model: nn.Module) -> None:
        """Open the loader for the user's ``model``, unless it is open; every rank must call it."""
        if self._loader is None:
            self._loader, self.memory = self._opened(model)

    def __len__(self) -> int:
        return len(self._settled)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(FullGraphLoader, name):
            raise AttributeError(name)
        return getattr(self._settled, name)

    def __iter__(self) -> Iterator[Batch]:
        if (wrapped := self._earlier()) is not None:
            self.settle(wrapped.module)
        return iter(self._settled)

    @property
    def _settled(self) -> FullGraphLoader:
        if self._loader is None:
            raise ConfigError(
                "the number of cooperative batches that fit into option memory depends on the model; call "
                "dx.wrap(model, g) before using the loader, or give batches=R instead of memory"
            )
        return self._loader


@final
class _State:
    def __init__(self) -> None:
        self.model: Callable[[], HaloModel | None] = lambda: None
        """The last one, while it lives."""
        self._is_new = False
        """Whether the model was wrapped after all existing loaders."""
        self._deferred: list[DeferredLoader] = []

    def settle_or_defer(self, loader: DeferredLoader) -> None:
        # Scripts that compare models make each loader while the last model lives.
        wrapped, self._is_new = self.model() if self._is_new else None, False
        if wrapped is None:
            self._deferred.append(loader)
        else:
            loader.settle(wrapped.module)

    def set_model(self, wrapped: HaloModel) -> None:
        self.model, deferred, self._deferred = weakref.ref(wrapped), self._deferred, []
        self._is_new = not deferred
        for loader in deferred:
            loader.settle(wrapped.module)


_STATE: SessionField[_State] = SessionField(lambda _: _State())
