"""The strategies full_graph, shared_preload and cooperative."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, final

import torch
from torch import nn

from dglx_dist.comm.collectives import barrier, check_equal
from dglx_dist.graph.shared_memory import warn_about_edges
from dglx_dist.options import read_options
from dglx_dist.strategies.base import OpenedStrategy, Reduction, Strategy, Traits
from dglx_dist.strategies.candidate import Candidate, CandidateContext
from dglx_dist.strategies.full_graph.edge_loader import FullGraphEdgeLoader, read_edge_request
from dglx_dist.strategies.full_graph.loader import (
    FullGraphLoader,
    PlanMaker,
    PlanSource,
    PlanSpec,
    gather_seeds,
)
from dglx_dist.strategies.full_graph.model import HaloModel, check_norms_know_rows
from dglx_dist.strategies.full_graph.options import (
    COOPERATIVE,
    EXCHANGING,
    PRELOADING,
    FullGraphOptions,
    read_request,
)

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph


def _read_options(strategy: str, options: Mapping[str, object], *, names: Sequence[str]) -> FullGraphOptions:
    return read_options(f"strategy {strategy!r}", FullGraphOptions, options, names)


_EXTERNAL_HOPS = (1, 2)
"""Numbers of expansion rounds to compare."""
_EXTERNAL_FANOUT = 15
"""Fan-out in the paper."""
_BATCH_COUNTS = (2, 8, 32)
"""Numbers of cooperative batches to compare. Graphs that do not fit in memory need several."""
_MAX_BATCHES = 16


def _add_cover(**options: Any) -> Iterator[Candidate]:
    """Yield a candidate with ``options``, and one that sends partial sums, too."""
    yield Candidate(unit="full_graph", options=options)
    yield Candidate(unit="full_graph", options={**options, "aggregate": "cover"})


class _FullGraphStrategy(Strategy):
    name: ClassVar[str]
    gathers_seeds: ClassVar[bool] = False
    """Whether a server composes several steps from its seeds, instead of one step with all seeds."""
    edge_bytes: ClassVar[int]
    """Memory in bytes for each edge of a machine's servers, measured with two layers on one server."""

    options: FullGraphOptions

    def open(self, g: DistGraph) -> OpenedFullGraph:
        return OpenedFullGraph(self, g)


@final
class OpenedFullGraph(OpenedStrategy):
    """Full-graph training on one graph."""

    strategy: _FullGraphStrategy
    options: FullGraphOptions

    def make_loader(self, indices: Any, sampler: Any, **loader_options: Any) -> FullGraphLoader:
        """Return the loader. Every rank must call it.

        The rank or server that owns a seed computes it. The sampler gives the layer count and the columns to
        prefetch. A batch size has no effect. Raises ConfigError if an argument or option is not supported,
        see :func:`read_request`, and PeerError if a rank did not take part.
        """
        g = self.g
        options = self.options
        strategy = self.strategy
        check_equal(g.session, f"an option of {strategy.name}", asdict(options))
        request = read_request(strategy.name, g, indices, sampler, loader_options)
        request = replace(request, wire=options.wire_dtype)
        warn_about_edges(g.session, g.edge_bounds, strategy.edge_bytes)

        seeds = gather_seeds(g, request.seeds) if strategy.gathers_seeds else request.seeds
        spec = PlanSpec(
            num_layers=request.num_layers,
            hops=options.resolve_hops(request.num_layers),
            num_batches=options.batches,
            composition=options.composition,
            eas=options.eas,
            seed=request.seed,
            cover=options.aggregate == "cover",
        )
        source = PlanSource(g, PlanMaker(g, seeds, request.mask), spec)
        if len(source) > 1:
            close_with(self, source)
        return FullGraphLoader(g, source, request, use_pp=options.use_pp)

    def make_edge_loader(self, eids: Any, sampler: Any, **loader_options: Any) -> FullGraphEdgeLoader:
        """Return the loader for edge batches. Every rank must call it.

        Each step computes rows for all nodes. Raises ConfigError as :meth:`make_loader`, and if batches need
        other blocks in each step, see :func:`read_edge_request`.
        """
        arguments = {"eids": eids, "sampler": sampler, **loader_options}
        request = read_edge_request(self.strategy.name, self.g, self.options, arguments)

        # The encoder has the same options, and all nodes on this rank as seeds.
        names = ("seed", "device", "exclude", "feature_dtype")
        encoder_options = {name: getattr(request.options, name) for name in names}
        own_nodes = {}
        for ntype in self.g.ntypes:
            policy = self.g.get_node_partition_policy(ntype)
            own_nodes[ntype] = torch.arange(*policy.owned_range)
        encoder = self.make_loader(own_nodes, request.sampler, **encoder_options)
        return FullGraphEdgeLoader(self.g, request, encoder, self.options)

    def make_model(self, model: nn.Module, reduction: Reduction) -> HaloModel:
        """Wrap ``model`` so that its layers exchange rows. Every rank must call it.

        Raises ConfigError if the model mixes rows like a batch norm, or data_parallel could not train it
        either.
        """
        if not self.g.is_homogeneous:
            check_norms_know_rows(model)
        return HaloModel(model, self.session, self.options, reduction=reduction)


def close_with(opened: OpenedStrategy, source: PlanSource) -> None:
    """Close ``source`` together with the strategy or the session, and wait for the other ranks."""
    # The reference is weak, so that the graph does not keep a deleted loader's data alive.
    source_ref = weakref.ref(source)
    session = opened.session

    def close_source() -> None:
        session.before_close.remove(close_source)
        if close_source in opened.on_close:
            opened.on_close.remove(close_source)
        live_source = source_ref()
        if live_source is not None:
            live_source.close()
        barrier(session, "the last plan of cooperative batches")

    opened.on_close.append(close_source)
    session.before_close.append(close_source)


@final
class FullGraph(_FullGraphStrategy):
    """Trains on the whole graph with one step per epoch. Every layer exchanges border rows between ranks.

    From :class:`FullGraphOptions` it takes :data:`EXCHANGING`. See docs/strategies/full_graph.md.
    """

    name, edge_bytes = "full_graph", 60
    traits = Traits(
        unit="full_graph",
        summary="activations of border nodes, and their gradients, at every layer; all gradients",
        on_edges=True,
        excludes_edges=False,
        complexity=20,
    )

    @staticmethod
    def read_options(options: Mapping[str, object]) -> FullGraphOptions:
        return replace(_read_options(FullGraph.name, options, names=EXCHANGING), hops=0)

    @classmethod
    def candidates(cls, context: CandidateContext) -> Iterator[Candidate]:
        """Yield candidates without and with covers, with halo rows in 8 bits, and with stale halo rows."""
        if context.ranks == 1:
            yield Candidate(unit="full_graph")
            return
        yield from _add_cover()
        if context.servers > 1:
            yield Candidate(unit="full_graph", options={"wire_dtype": "int8"}, exact=False)
            yield Candidate(unit="full_graph", options={"staleness": 1}, exact=False)


@final
class SharedPreload(_FullGraphStrategy):
    """Trains with one step per epoch. In the first layers, a server computes all rows that it needs itself.

    From :class:`FullGraphOptions` it takes :data:`PRELOADING`. With expansion-aware sampling
    (``external_...``), training differs from a single process. See docs/strategies/shared_preload.md.
    """

    name, edge_bytes = "shared_preload", 140
    traits = Traits(
        unit="full_graph",
        summary="features of the neighbourhood, once; activations of border nodes above it; all gradients",
        on_edges=True,
        excludes_edges=False,
        complexity=30,
    )
    read_options = staticmethod(partial(_read_options, name, names=PRELOADING))

    @classmethod
    def candidates(cls, context: CandidateContext) -> Iterator[Candidate]:
        """Yield candidates with some or all layers preloaded, and with a limited external neighbourhood."""
        if context.servers == 1:
            return
        # Candidates with 0 hops and with all layers are listed elsewhere.
        num_layers = context.num_layers
        for hops in sorted({1, num_layers - 1} - {0, num_layers}):
            yield from _add_cover(hops=hops)

        if context.ranks > context.servers:
            yield from _add_cover()
        else:
            # With one rank per server, nothing is exchanged, so covers make no difference.
            yield Candidate(unit="full_graph")
        for hops in _EXTERNAL_HOPS:
            options = {"external_hops": hops, "external_fanout": _EXTERNAL_FANOUT}
            yield Candidate(unit="full_graph", options=options, exact=False)


@final
class Cooperative(_FullGraphStrategy):
    """Trains with several steps per epoch. In each step a server's ranks train together on a batch.

    A server fetches its seeds' neighbourhood once and splits it among its ranks. Ranks exchange rows only
    within their server. From :class:`FullGraphOptions` it takes :data:`COOPERATIVE`. See
    docs/strategies/shared_preload.md.
    """

    name = "cooperative"
    gathers_seeds = True
    edge_bytes = 260
    traits = Traits(
        unit="full_graph",
        summary="features of each batch's neighbourhood; activations inside a server; all gradients",
        on_edges=True,
        excludes_edges=False,
        complexity=40,
    )
    read_options = staticmethod(partial(_read_options, name, names=COOPERATIVE))

    @classmethod
    def candidates(cls, context: CandidateContext) -> Iterator[Candidate]:
        """Yield one candidate with as many batches as there are mini-batches, and some with other counts."""
        if context.servers == 1:
            return
        batch_counts = set(_BATCH_COUNTS)
        # With more batches, their neighbourhoods overlap too much.
        if 0 < context.steps <= _MAX_BATCHES:
            # An epoch has as many updates as with mini-batches. A single batch would be full_graph.
            num_batches = max(context.steps, 2)
            batch_counts.discard(num_batches)
            yield Candidate(unit="mini_batch", options={"batches": num_batches})
        for num_batches in sorted(batch_counts):
            yield Candidate(unit="full_graph", options={"batches": num_batches})
