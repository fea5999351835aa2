"""Push-pull parallelism (P3): layer 1 split by input columns, the rest data parallel, pipelined."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, final

import numpy as np
from torch import Tensor, nn

from dglx_dist.comm.session import Session
from dglx_dist.data.storage.files import read_size
from dglx_dist.errors import ConfigError
from dglx_dist.layers.convolutions import Sync
from dglx_dist.records import FEATURE
from dglx_dist.strategies.base import Reduction, Strategy, Traits, WrappedModel, check_one_type
from dglx_dist.strategies.push_pull import cost as costs
from dglx_dist.strategies.push_pull.exchange import Group, make_group
from dglx_dist.strategies.push_pull.feature_columns import ColumnStore, open_columns
from dglx_dist.strategies.push_pull.input_layers import embeddings_of_all_nodes
from dglx_dist.strategies.push_pull.options import read_push_pull_options, smallest_group
from dglx_dist.strategies.push_pull.split_model import find_first_layer

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph


@final
class PushPull(Strategy):
    """Features are cut by column and never move; partial activations of the first layer do (P3).

    Options: ``depth`` (1 to 3 mini-batches in flight), ``weights`` ("whole" or "split"), ``order``
    ("forward_first" or "backward_first"), ``group_size`` (ranks that hold all columns together; 0: the fewest
    that ``memory`` allows, else all), ``memory`` ("4GB"), ``structure`` ("auto", "push" or "resample"),
    ``sync`` ("columns" or "inputs"), ``features`` (comma-separated names), ``cache_columns`` (bool),
    ``bucket_bytes`` (int). See docs/strategies/push_pull.md.
    """

    traits = Traits(
        unit="mini_batch",
        features="columns",
        exact=True,
        summary="partial activations of layer 1 and their gradients; structure of layer 1; other gradients",
        complexity=10,
    )

    read_options = staticmethod(read_push_pull_options)
    inspect = staticmethod(costs.inspect)
    candidates = staticmethod(costs.candidates)
    cost = staticmethod(costs.cost)

    def __init__(self, session: Session, options: Mapping[str, object]) -> None:
        self._session = session
        self._options = self.read_options(options)
        if self._options.group_size:
            make_group(session, self._options.group_size)

    def loader(self, g: DistGraph, indices: Tensor, sampler: Any, **loader_options: Any) -> Iterable[Any]:
        from dglx_dist.dataloading.loader import DataLoader

        return self._open_loader(DataLoader, g, indices, sampler, loader_options)

    def edge_loader(self, g: DistGraph, eids: Any, sampler: Any, **loader_options: Any) -> Iterable[Any]:
        from dglx_dist.dataloading.edge_loader import DistEdgeDataLoader

        return self._open_loader(DistEdgeDataLoader, g, eids, sampler, loader_options)

    def wrap(self, model: nn.Module, g: DistGraph, reduction: Reduction = "mean") -> WrappedModel:
        from dglx_dist.strategies.push_pull.wrapped_model import PushPullModel

        store, group = self._opened(g)
        if _input_is_embedding(model, store, g.num_nodes(), self._options.sync):
            store = ColumnStore([], group, self._session)
        _check_floats(store)
        return PushPullModel(model, g, store, group, self._options, reduction=reduction)

    def _open_loader(
        self, inner_class: Any, g: DistGraph, seeds: Any, sampler: Any, loader_options: Mapping[str, Any]
    ) -> Iterable[Any]:
        from dglx_dist.strategies.push_pull.loader import open_loader

        store, group = self._opened(g)
        return open_loader(inner_class, g, seeds, sampler, store, group, self._options, loader_options)

    def _opened(self, g: DistGraph) -> tuple[ColumnStore, Group]:
        check_one_type("push_pull", g)
        names = self._features(g)
        group = make_group(self._session, self._options.group_size or self._chosen_size(g, names))
        if not names:
            return ColumnStore([], group, self._session), group
        return open_columns(g, names, group, cache=self._options.cache_columns), group

    def _features(self, g: DistGraph) -> tuple[str, ...]:
        names = self._options.names
        missing = [name for name in names if name not in g.ndata]
        if missing == [FEATURE] and names == (FEATURE,):
            # The default: the input may be an embedding.
            return ()
        if missing:
            known = ", ".join(map(repr, g.ndata)) or "none"
            raise ConfigError(f"option features: the nodes have no {missing[0]!r} (known: {known})")
        return names

    def _chosen_size(self, g: DistGraph, names: tuple[str, ...]) -> int:
        world_size = self._session.topology.world_size
        if not self._options.memory or not names:
            # The size of an embedding is not known before there is a model.
            return world_size
        num_bytes = sum(int(np.prod(g.ndata[name].shape)) * g.ndata[name].dtype.itemsize for name in names)
        return smallest_group(world_size, num_bytes, read_size(self._options.memory))


def _input_is_embedding(model: nn.Module, store: ColumnStore, num_nodes: int, sync: Sync) -> bool:
    """Return whether no layer takes the features, and one takes the model's embedding of all nodes."""
    widths = [embedding.embedding_dim for _, embedding in embeddings_of_all_nodes(model, num_nodes)]
    features = sum(store.widths.values())
    return bool(widths) and not _takes(model, features, sync) and _takes(model, widths[0], sync)


def _takes(model: nn.Module, width: int, sync: Sync) -> bool:
    try:
        find_first_layer(model, width, sync)
    except ConfigError:
        return False
    return True


def _check_floats(store: ColumnStore) -> None:
    for name in store.names:
        if not store.dtype(name).is_floating_point:
            raise ConfigError(
                f"the feature {name!r} is {store.dtype(name)}, and the first layer computes with "
                "floating-point numbers; store it as float32 or float16, or name others with option features="
            )
