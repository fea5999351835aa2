"""Offer DGL's distributed loaders and sampling functions, which wrap this package's loaders."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, final

import dgl
import numpy as np
import torch
from torch import Tensor

from dglx_dist.comm.session import current_session, warn_user
from dglx_dist.compat.dist_graph import DistGraph, inner_graph, show_ids
from dglx_dist.compat.dist_tensor import DistTensor, inner_tensor, remember_batch
from dglx_dist.compat.partition_book import find_our_edges, find_shown_edges, get_edge_ids, map_each_type
from dglx_dist.dataloading.step_loader import Schedule, gather_counts, run_ahead
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_graph import DistGraph as InnerDistGraph
from dglx_dist.graph.dist_tensor import DistTensor as InnerTensor
from dglx_dist.graph.kvstore import KVStore
from dglx_dist.graph.partition_book import as_array
from dglx_dist.internals.graphs import remove_empty_types
from dglx_dist.options import check_integer
from dglx_dist.strategies.base import OpenedStrategy, open_strategy
from dglx_dist.strategies.data_parallel import DataParallel


class _Epochs(ABC):
    """Base class for loaders that work with ``for`` and, like DGL's, with ``next(loader)``."""

    _running: Iterator[Any] | None = None
    """Batches in the epoch that ``next(loader)`` has begun."""

    @abstractmethod
    def _batches(self) -> Iterator[Any]: ...

    def __iter__(self) -> Iterator[Any]:
        # The batches are not stored in _running. Leaving a loop early then closes the generator, and its
        # finally block runs at once.
        self._running = None
        return self._batches()

    def __next__(self) -> Any:
        if self._running is None:
            self._running = self._batches()
        return next(self._running)

    @property
    def expected_idxs(self) -> int:
        return len(self)  # type: ignore[arg-type]  # every loader has a length


@final
class DistDataLoader(_Epochs):
    """Calls ``collate_fn`` on lists of items, batch by batch. One rank may use it alone, as with DGL.

    Torch orders a shuffled epoch, as with DGL. A rank that has no more items stops. After a model was wrapped
    by ``dglx_dist.wrap``, all ranks must call ``iter()`` and ``len()`` together, and a rank without items
    yields empty lists until the last rank is done. A loader created under ``torch.no_grad()`` is for
    inference, and one rank may always use it alone.

    Args:
        dataset: This rank's items: a tensor with ids, or a sequence of ids or (type, id) pairs.
        queue_size: How many batches are prepared ahead, on one thread.

    Raises:
        ConfigError: If a number is below 1, or, with a wrapped model, if the ranks differ in ``batch_size``
            or ``drop_last``.
    """

    def __init__(
        self,
        dataset: Tensor | Sequence[Any],
        batch_size: int,
        shuffle: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
        queue_size: int | None = None,
    ) -> None:
        self._session = current_session()
        self.dataset = dataset
        self.shuffle = bool(shuffle)
        self.drop_last = bool(drop_last)
        self.batch_size = check_integer("batch_size", batch_size, least=1)
        self.queue_size = 0 if queue_size is None else check_integer("queue_size", queue_size, least=1)
        self.collate_fn = collate_fn or list
        self._order = torch.arange(len(dataset))
        self._for_inference = not torch.is_grad_enabled()

        # This rank's own schedule, and the common one after the ranks iterate together.
        self._own_schedule = Schedule.from_counts([len(dataset)], self.batch_size, self.drop_last, rank=0)
        self._common_schedule: Schedule | None = None

    @property
    def expected_idxs(self) -> int:
        return self._own_schedule.num_steps

    def __len__(self) -> int:
        return self._schedule().num_steps

    def __iter__(self) -> Iterator[Any]:
        if self.shuffle:
            self._order = self._order[torch.randperm(len(self._order))]
        return super().__iter__()

    def _batches(self) -> Iterator[Any]:
        """Yield the batches, and tell the session each batch's share in its step."""
        order = self._order
        schedule = self._schedule()
        # With a common schedule, gradients are weighted by the number of items. A rank that iterates on its
        # own trains under DistributedDataParallel, which takes the mean over ranks. Then each rank has the
        # same share, so the step's items are its own times the number of ranks.
        num_equal_ranks = 1
        if schedule is self._own_schedule:
            num_equal_ranks = self._session.topology.world_size

        def build_batch(step: int) -> Any:
            positions = order[schedule.slice_seeds(step)].tolist()
            return self.collate_fn([_to_python(self.dataset[position]) for position in positions])

        steps = range(schedule.num_steps)
        depth = max(self.queue_size, 1)
        num_threads = 1 if self.queue_size > 0 else 0
        try:
            batches = run_ahead(build_batch, steps, depth=depth, num_threads=num_threads)
            for step, batch in zip(steps, batches, strict=True):
                share = schedule.share(step)
                num_global = share.num_global * num_equal_ranks
                self._session.step_share = replace(share, num_global=num_global)
                yield batch
        finally:
            self._session.step_share = None

    def _schedule(self) -> Schedule:
        """Return the items in each step. The first call after a model was wrapped is collective."""
        if self._for_inference or not self._session.has_wrapped_model:
            return self._own_schedule
        if self._common_schedule is None:
            counts = gather_counts([len(self.dataset)], self.batch_size, self.drop_last, self._session)
            sizes = counts[:, 0].tolist()
            rank = self._session.topology.rank
            self._common_schedule = Schedule.from_counts(sizes, self.batch_size, self.drop_last, rank)
        return self._common_schedule


def _to_python(item: Any) -> Any:
    """Convert an id, or the id in a (type, id) pair, to a Python number."""
    if isinstance(item, tuple):
        type_name, node_id = item
        return type_name, _to_python(node_id)
    if isinstance(item, Tensor | np.generic):
        return item.item()
    return item


class _Loader(_Epochs):
    """Yields the batches from one of our loaders in DGL's form.

    Iterating raises ConfigError if the strategy works inside the model's layers and no model was wrapped.
    """

    def __init__(self, opened: OpenedStrategy, inner: Any, options: Mapping[str, Any]) -> None:
        self._g, self._inner = opened.g, inner
        self._batch_size = int(options.get("batch_size", 1))
        traits = opened.strategy.traits
        self._needs_wrap = traits.unit != "mini_batch" or traits.features != "rows"

        # If a strategy works inside the layers, its models expect unchanged blocks.
        self._drops_empty_types = len(self._g.canonical_etypes) > 1 and not self._needs_wrap
        self._for_inference = not torch.is_grad_enabled()

        # Scripts for DistDGL train with DistributedDataParallel.
        inner.checks_training = False

    def __len__(self) -> int:
        if self._needs_wrap or not self._ends_early:
            return len(self._inner)
        # The negations round up: the last batch may be incomplete.
        num_local, _ = self._inner.num_epoch_targets
        return -(-num_local // self._batch_size)

    @property
    def _ends_early(self) -> bool:
        """Whether this rank stops when it has no more items. A wrapped model needs it in every step."""
        return self._for_inference or not self._g.session.has_wrapped_model

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one. Each epoch has its own order and samples."""
        self._inner.set_epoch(epoch)

    def _batches(self) -> Iterator[Any]:
        session = self._g.session
        if self._needs_wrap and not session.has_wrapped_model:
            raise ConfigError(
                f"strategy {session.strategy!r} works inside the model. Replace "
                "DistributedDataParallel by model = dglx_dist.wrap(model, g), or use strategy "
                "data_parallel."
            )

        for input_nodes, *pairs, blocks in self._inner:
            share = blocks[-1].step_share
            if share is not None and share.num_local == 0 and self._ends_early:
                return
            if self._drops_empty_types:
                blocks = [remove_empty_types(block) for block in blocks]
            remember_batch(self._g, input_nodes, blocks)

            # Between the nodes and the blocks are output nodes, or the graphs with pairs.
            for graph in (*pairs, *blocks):
                if isinstance(graph, dgl.DGLGraph):
                    show_ids(self._g, graph)
            yield (input_nodes, *pairs, blocks)


@final
class DistNodeDataLoader(_Loader):
    """Yields ``(input_nodes, output_nodes, blocks)``.

    **Every rank must construct it**, with its own nodes or none. A rank waits here until all have done so,
    and after the time-out an error names the missing ones. Each rank then iterates at its own pace and stops
    when it has no more nodes, as with DGL. After a model was wrapped by ``dglx_dist.wrap``, all ranks iterate
    together and take equally many steps.

    A loader created under ``torch.no_grad()`` is for inference. It has mini-batches, whatever the strategy.

    Args:
        kwargs: ``batch_size``, ``shuffle``, ``drop_last``, ``queue_size`` (batches prepared ahead) and
            options for ``dglx_dist.DataLoader``. ``num_workers`` and ``pin_memory`` cause a warning.

    Raises:
        ConfigError: On all ranks, if an argument on one rank is not supported.
    """

    def __init__(
        self, g: DistGraph, nids: Any, graph_sampler: Any, device: Any = None, **kwargs: Any
    ) -> None:
        opened = _open(inner_graph(g))
        options = _options(kwargs, device)
        super().__init__(opened, opened.loader(nids, graph_sampler, **options), options)


@final
class DistEdgeDataLoader(_Loader):
    """Yields ``(input_nodes, pair_graph, [negative_pair_graph,] blocks)``.

    **Every rank must construct it**, like a :class:`DistNodeDataLoader`.

    Args:
        kwargs: ``exclude``, ``reverse_eids``, ``reverse_etypes``, ``negative_sampler``, and everything that
            :class:`DistNodeDataLoader` takes. A ``g_sampling`` other than ``g`` is refused.
    """

    def __init__(
        self, g: DistGraph, eids: Any, graph_sampler: Any, device: Any = None, **kwargs: Any
    ) -> None:
        inner = inner_graph(g)
        sampled_graph = kwargs.pop("g_sampling", None)
        if sampled_graph is not None and inner_graph(sampled_graph) is not inner:
            raise ConfigError("g_sampling is not the graph of the edges, which is sampled. Leave it out.")

        options = _options(kwargs, device) | _edge_options(g, inner, kwargs)
        opened = _open(inner)
        our_eids = map_each_type(find_our_edges, inner, eids)
        super().__init__(opened, opened.edge_loader(our_eids, graph_sampler, **options), options)


def _open(g: InnerDistGraph) -> OpenedStrategy:
    """Open the session's strategy, or data_parallel under ``torch.no_grad()``. Its blocks suit any model."""
    if torch.is_grad_enabled():
        return open_strategy(g)
    return DataParallel(g.session, {}).open(g)


def _options(kwargs: Mapping[str, Any], device: Any) -> dict[str, Any]:
    """Translate options for DGL's loader to options for this package's loader."""
    options = dict(kwargs)
    queue_size = options.pop("queue_size", None)
    if queue_size is not None:
        options["depth"] = queue_size
    options["device"] = "cpu" if device is None else device
    return options


def _edge_options(g: Any, inner: InnerDistGraph, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Translate options for an edge loader. The script's functions get and return DGL's edge ids."""
    exclude = kwargs.get("exclude")
    reverse_eids = None
    if exclude == "reverse_id":
        # DGL reads this option only in that mode.
        reverse_eids = kwargs.get("reverse_eids")
        if _is_identity(reverse_eids):
            warn_user(
                "reverse_eids says that each edge is its own reverse, so reverse edges are "
                "not excluded. dglx_dist.reverse_edge_ids(g.inner) finds them."
            )
            exclude = "self"
            reverse_eids = None

    reverse_etypes = None
    if exclude == "reverse_types":
        reverse_etypes = kwargs.get("reverse_etypes")
    if callable(exclude):
        exclude = partial(_call_exclude, exclude, inner)

    # Negative samplers from DGL and from this package are read, not called.
    negative_sampler = kwargs.get("negative_sampler")
    is_known = type(negative_sampler).__module__.startswith(("dgl.dataloading.", "dglx_dist."))
    if callable(negative_sampler) and not is_known:
        negative_sampler = partial(_call_negative_sampler, negative_sampler, g, inner)
    return {
        "exclude": exclude,
        "reverse_eids": map_each_type(_convert_reverse, inner, reverse_eids),
        "reverse_etypes": reverse_etypes,
        "negative_sampler": negative_sampler,
    }


def _is_identity(reverse_eids: object) -> bool:
    if not isinstance(reverse_eids, Tensor | np.ndarray | list):
        return False
    ids = as_array(reverse_eids)
    return ids.ndim == 1 and np.array_equal(ids, np.arange(len(ids)))


def _convert_reverse(store: KVStore, etype: Any, reverse_eids: Any) -> Any:
    """Convert a script's table of reverse edges to our ids, both its positions and its values."""
    ids = get_edge_ids(store, etype)
    if ids is None or reverse_eids is None:
        return inner_tensor(reverse_eids)
    # Tensors from dglx_dist, like the result of reverse_edge_ids, have our ids already. A table with another
    # length is refused later.
    if isinstance(reverse_eids, InnerTensor) or len(reverse_eids) != len(ids.ours):
        return inner_tensor(reverse_eids)

    if isinstance(reverse_eids, DistTensor):
        reverse_eids = reverse_eids.to_local()
    table = as_array(reverse_eids)
    # Negative ids stand for edges without a reverse.
    our_values = np.where(table < 0, table, ids.ours[table])
    return torch.from_numpy(our_values[ids.source])


def _call_exclude(exclude: Any, g: InnerDistGraph, edges: Any) -> Any:
    excluded = exclude(map_each_type(find_shown_edges, g, edges))
    if excluded is None:
        return None
    return map_each_type(find_our_edges, g, excluded)


def _call_negative_sampler(negative_sampler: Any, g: Any, inner: InnerDistGraph, _: object, eids: Any) -> Any:
    return negative_sampler(g, map_each_type(find_shown_edges, inner, eids))


def sample_neighbors(
    g: object,
    nodes: Any,
    fanout: int | Mapping[Any, int],
    edge_dir: str = "in",
    prob: str | None = None,
    exclude_edges: Any = None,
    replace: bool = False,
    use_graphbolt: bool = False,
) -> dgl.DGLGraph:
    """Sample nodes' in-edges into a graph with all nodes, with edge ids in ``edata[dgl.EID]``.

    Edge types without sampled edges are left out, as in DGL. ``prob`` names an edge tensor with weights or a
    mask. A bool as ``exclude_edges`` means ``replace``, which has this position in DGL 1.1.3.
    ``use_graphbolt`` has no effect.
    """
    if isinstance(exclude_edges, bool):
        replace = exclude_edges
        exclude_edges = None
    inner = inner_graph(g)
    seeds = _split_by_type(inner, nodes)
    sampled_graph = g if isinstance(g, DistGraph) else inner
    graph = sampled_graph.sample_neighbors(seeds, fanout, edge_dir, prob, exclude_edges, replace)
    return remove_empty_types(graph)


def sample_etype_neighbors(  # noqa: PLR0913 - DGL's signature
    g: object,
    nodes: Any,
    fanout: int | Mapping[Any, int],
    edge_dir: str = "in",
    prob: str | None = None,
    exclude_edges: Any = None,
    replace: bool = False,
    etype_sorted: bool = True,
    use_graphbolt: bool = False,
) -> dgl.DGLGraph:
    """Do the same as :func:`sample_neighbors`, with another DGL signature."""
    return sample_neighbors(g, nodes, fanout, edge_dir, prob, exclude_edges, replace, use_graphbolt)


def in_subgraph(g: object, nodes: Any) -> dgl.DGLGraph:
    """Return a graph with all nodes and all in-edges of ``nodes``, with ids in ``edata[dgl.EID]``."""
    return sample_neighbors(g, nodes, -1)


def _split_by_type(g: InnerDistGraph, nodes: Any) -> Any:
    """Convert homogeneous ids to ids by type if the graph has several node types. Keep other ids."""
    if isinstance(nodes, Mapping) or len(g.ntypes) == 1:
        return nodes
    type_ids, node_ids = g.get_partition_book().map_to_per_ntype(as_array(nodes))
    return {ntype: node_ids[type_ids == type_id] for type_id, ntype in enumerate(g.ntypes)}
