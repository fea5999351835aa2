"""Full-graph training on neighbourhoods that each server holds whole: shared preloading (FLX), and EAS."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, final

from torch import Tensor, nn

from dglx_dist.cluster.session import Session
from dglx_dist.strategies.base import Reduction, Strategy, Traits, WrappedModel
from dglx_dist.strategies.granndis.options import PRELOADING, read_full_graph_options

if TYPE_CHECKING:
    from dglx_dist.graph import DistGraph

NAME = "shared_preload"


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
        self._options = read_full_graph_options(NAME, options, PRELOADING)

    def loader(self, g: DistGraph, indices: Tensor, sampler: Any, **loader_options: Any) -> Iterable[Any]:
        """Return a loader of one step an epoch; see :meth:`FullGraph.loader`."""
        from dglx_dist.strategies.granndis.opening import open_loader

        return open_loader(NAME, g, indices, sampler, self._options, loader_options)

    def wrap(self, model: nn.Module, g: DistGraph, reduction: Reduction = "mean") -> WrappedModel:
        """Return ``model`` with layers that exchange rows; see :meth:`FullGraph.wrap`."""
        from dglx_dist.strategies.granndis.opening import wrap_model

        return wrap_model(NAME, model, g, self._options, reduction)
