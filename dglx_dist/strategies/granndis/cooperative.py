"""Cooperative batching: mini-batches of whole servers, shared by their ranks (GraNNDis, algorithms 3.4)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, final

from torch import Tensor, nn

from dglx_dist.cluster.session import Session
from dglx_dist.strategies.base import Reduction, Strategy, Traits, WrappedModel
from dglx_dist.strategies.granndis.cooperative_options import read_cooperative_options

if TYPE_CHECKING:
    from dglx_dist.graph import DistGraph

NAME = "cooperative"


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
        self._options = read_cooperative_options(NAME, options)

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
        from dglx_dist.strategies.granndis.co_opening import open_co_loader

        return open_co_loader(NAME, g, indices, sampler, self._options, loader_options)

    def wrap(self, model: nn.Module, g: DistGraph, reduction: Reduction = "mean") -> WrappedModel:
        """Return ``model`` with layers that exchange rows; every rank must call it.

        Loaders that were made before and await a model, to choose their number of co-batches, get it.

        Raises:
            ConfigError: as under full_graph; or memory does not suffice for the smallest co-batches.
        """
        from dglx_dist.strategies.granndis.co_opening import wrap_and_settle

        return wrap_and_settle(model, g, self._options, reduction)
