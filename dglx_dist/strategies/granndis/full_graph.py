"""Full-graph training with halo exchange at every layer: the fair baseline of GraNNDis (FB, FB+pp)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, final

from torch import Tensor, nn

from dglx_dist.cluster.session import Session
from dglx_dist.strategies.base import Reduction, Strategy, Traits, WrappedModel
from dglx_dist.strategies.granndis.options import COMMON, read_full_graph_options

if TYPE_CHECKING:
    from dglx_dist.graph import DistGraph

NAME = "full_graph"


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
        self._options = read_full_graph_options(NAME, options, COMMON, hops=0)

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
        from dglx_dist.strategies.granndis.opening import open_loader

        return open_loader(NAME, g, indices, sampler, self._options, loader_options)

    def wrap(self, model: nn.Module, g: DistGraph, reduction: Reduction = "mean") -> WrappedModel:
        """Return ``model`` with layers that exchange rows; every rank must call it.

        Raises:
            ConfigError: the model mixes rows, as a batch norm does; the graph has several types; or as under
                data_parallel.
        """
        from dglx_dist.strategies.granndis.opening import wrap_model

        return wrap_model(NAME, model, g, self._options, reduction)
