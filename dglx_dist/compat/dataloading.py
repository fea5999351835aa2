"""DGL's distributed loaders and sampling functions around ours."""

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
from dglx_dist.compat.dist_tensor import DistTensor, inner_tensor, remember
from dglx_dist.compat.partition_book import edge_ids, of_each_type, our_edges, shown_edges
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
    _running: Iterator[Any] | None = None

    @abstractmethod
    def _batches(self) -> Iterator[Any]: ...

    def __iter__(self) -> Iterator[Any]:
        # Not stored in _running: leaving a loop early then closes the generator, whose finally runs at once.
        self._running = None
        return self._batches()

    def __next__(self) -> Any:
        self._running = self._running or self._batches()
        return next(self._running)

    @property
    def expected_idxs(self) -> int:
        return len(self)  # type: ignore[arg-type]  # every one has a length


@final
class DistDataLoader(_Epochs):
    """Calls ``collate_fn`` on lists of items, batch by batch; as with DGL, one rank may use it alone.

    The order of a shuffled epoch is torch's, as with DGL. A rank that has run out of items stops. Once a
    model was wrapped by ``dglx_dist.wrap``, all ranks must call ``iter()`` and ``len()`` together: a rank
    without items yields empty lists until the last rank is done. A loader created under ``torch.no_grad()``
    is for inference, and one rank may always use it alone.
    ``dataset``: this rank's items, a tensor of ids, or a sequence of ids or (type, id) pairs. ``queue_size``:
    batches made ahead, on one thread. ConfigError: a number is below 1, or, with a wrapped model, the ranks
    differ in ``batch_size`` or ``drop_last``.
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
        self.dataset, self.shuffle, self.drop_last = dataset, bool(shuffle), bool(drop_last)
        self.batch_size = check_integer("batch_size", batch_size, least=1)
        self.queue_size = 0 if queue_size is None else check_integer("queue_size", queue_size, least=1)
        self.collate_fn = collate_fn or list
        self._order = torch.arange(len(dataset))
        self._for_inference = not torch.is_grad_enabled()
        # Of this rank, and of all once they iterate together.
        self._own = Schedule.from_counts([len(dataset)], self.batch_size, self.drop_last, rank=0)
        self._common: Schedule | None = None

    @property
    def expected_idxs(self) -> int:
        return self._own.num_steps

    def __len__(self) -> int:
        return self._schedule().num_steps

    def __iter__(self) -> Iterator[Any]:
        if self.shuffle:
            self._order = self._order[torch.randperm(len(self._order))]
        return super().__iter__()

    def _batches(self) -> Iterator[Any]:
        order, schedule = self._order, self._schedule()
        # DistributedDataParallel weights ranks equally, however many items each has.
        weight = self._session.topology.world_size if schedule is self._own else 1

        def make(step: int) -> Any:
            chosen = order[schedule.slice_seeds(step)].tolist()
            return self.collate_fn([_item(self.dataset[at]) for at in chosen])

        steps = range(schedule.num_steps)
        try:
            made = run_ahead(make, steps, depth=max(self.queue_size, 1), num_threads=int(self.queue_size > 0))
            for step, batch in zip(steps, made, strict=True):
                share = schedule.share(step)
                self._session.step_share = replace(share, num_global=share.num_global * weight)
                yield batch
        finally:
            self._session.step_share = None

    def _schedule(self) -> Schedule:
        """Return the items of each step; the first call after a model was wrapped is collective."""
        if self._for_inference or not self._session.has_wrapped_model:
            return self._own
        if self._common is None:
            counts = gather_counts([len(self.dataset)], self.batch_size, self.drop_last, self._session)
            made = counts[:, 0].tolist(), self.batch_size, self.drop_last, self._session.topology.rank
            self._common = Schedule.from_counts(*made)
        return self._common


def _item(item: Any) -> Any:
    if isinstance(item, tuple):
        return (item[0], _item(item[1]))
    return item.item() if isinstance(item, Tensor | np.generic) else item


class _Loader(_Epochs):
    """Yields the batches of one of our loaders in DGL's form.

    Iterating raises ConfigError if the strategy works inside the model's layers, and no model was wrapped.
    """

    def __init__(self, opened: OpenedStrategy, inner: Any, options: Mapping[str, Any]) -> None:
        self._g, self._inner = opened.g, inner
        self._batch_size = int(options.get("batch_size", 1))
        traits = opened.strategy.traits
        self._needs_wrap = traits.unit != "mini_batch" or traits.features != "rows"
        # Models of strategies that work inside the layers expect the blocks unchanged.
        self._drops_empty_types = len(self._g.canonical_etypes) > 1 and not self._needs_wrap
        self._for_inference = not torch.is_grad_enabled()
        # Scripts of DistDGL train with DistributedDataParallel.
        inner.checks_training = False

    def __len__(self) -> int:
        if self._needs_wrap or not self._ends_early:
            return len(self._inner)
        num_local, _ = self._inner.num_epoch_targets
        return -(-num_local // self._batch_size)

    @property
    def _ends_early(self) -> bool:
        """Whether this rank stops when its items are used up; a wrapped model needs it in every step."""
        return self._for_inference or not self._g.session.has_wrapped_model

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one; each has its own order and samples."""
        self._inner.set_epoch(epoch)

    def _batches(self) -> Iterator[Any]:
        if self._needs_wrap and not self._g.session.has_wrapped_model:
            remedy = "put model = dglx_dist.wrap(model, g) in the place of DistributedDataParallel, or use"
            name = self._g.session.strategy
            raise ConfigError(f"strategy {name!r} works inside the model: {remedy} strategy data_parallel")
        for batch in self._inner:
            blocks = batch[-1]
            share = blocks[-1].step_share
            if share is not None and share.num_local == 0 and self._ends_early:
                return
            if self._drops_empty_types:
                blocks = [remove_empty_types(block) for block in blocks]
            remember(self._g, batch[0], blocks)
            for graph in (*batch[1:-1], *blocks):
                if isinstance(graph, dgl.DGLGraph):
                    show_ids(self._g, graph)
            yield (*batch[:-1], blocks)


@final
class DistNodeDataLoader(_Loader):
    """Yields ``(input_nodes, output_nodes, blocks)``.

    **Every rank must construct it**, with its own nodes or none; ranks that do wait for those that do not,
    and an error names these after the time-out. Each rank then iterates at its own pace and stops when its
    nodes are used up, as with DGL. Once a model was wrapped by ``dglx_dist.wrap``, all ranks iterate
    together and have the same number of steps.

    A loader created under ``torch.no_grad()`` is for inference: mini-batches, whatever the strategy.

    ``kwargs``: ``batch_size``, ``shuffle``, ``drop_last``, ``queue_size`` (batches made ahead), options of
    ``dglx_dist.DataLoader``; ``num_workers`` and ``pin_memory`` are warned about. ConfigError, on all ranks:
    something cannot be honoured on one.
    """

    def __init__(
        self, g: DistGraph, nids: Any, graph_sampler: Any, device: Any = None, **kwargs: Any
    ) -> None:
        opened, options = _open(inner_graph(g)), _options(kwargs, device)
        super().__init__(opened, opened.loader(nids, graph_sampler, **options), options)


@final
class DistEdgeDataLoader(_Loader):
    """Yields ``(input_nodes, pair_graph, [negative_pair_graph,] blocks)``.

    **Every rank must construct it**, like a :class:`DistNodeDataLoader`.

    ``kwargs``: ``exclude``, ``reverse_eids``, ``reverse_etypes``, ``negative_sampler``, and those of
    :class:`DistNodeDataLoader`. A ``g_sampling`` other than ``g`` is refused.
    """

    def __init__(
        self, g: DistGraph, eids: Any, graph_sampler: Any, device: Any = None, **kwargs: Any
    ) -> None:
        inner = inner_graph(g)
        sampling = kwargs.pop("g_sampling", None)
        if sampling is not None and inner_graph(sampling) is not inner:
            why = "blocks are sampled from that of the edges"
            raise ConfigError(f"g_sampling is another graph, but {why}; leave it out")
        options, opened = {**_options(kwargs, device), **_edge_options(g, inner, kwargs)}, _open(inner)
        ours = of_each_type(our_edges, inner, eids)
        super().__init__(opened, opened.edge_loader(ours, graph_sampler, **options), options)


def _open(g: InnerDistGraph) -> OpenedStrategy:
    """Open the session's strategy; data_parallel under ``torch.no_grad()``, whose blocks suit any model."""
    return open_strategy(g) if torch.is_grad_enabled() else DataParallel(g.session, {}).open(g)


def _options(given: Mapping[str, Any], device: Any) -> dict[str, Any]:
    options = {name: value for name, value in given.items() if name != "queue_size"}
    if given.get("queue_size") is not None:
        options["depth"] = given["queue_size"]
    return {**options, "device": "cpu" if device is None else device}


def _edge_options(g: Any, inner: InnerDistGraph, given: Mapping[str, Any]) -> dict[str, Any]:
    exclude, reverse = given.get("exclude"), given.get("reverse_eids")
    if exclude != "reverse_id":
        # DGL reads it in that mode only.
        reverse = None
    elif _is_identity(reverse):
        why = "reverse_eids says that each edge is its own reverse, so reverse edges are not excluded"
        warn_user(f"{why}; dglx_dist.reverse_edge_ids(g.inner) finds them")
        exclude, reverse = "self", None
    etypes = given.get("reverse_etypes") if exclude == "reverse_types" else None
    negative = given.get("negative_sampler")
    # DGL's negative samplers and ours are read, not called.
    is_known = type(negative).__module__.startswith(("dgl.dataloading.", "dglx_dist."))
    if callable(negative) and not is_known:
        negative = partial(_on_graph, negative, g, inner)
    if callable(exclude):
        exclude = partial(_excluded, exclude, inner)
    return {
        "exclude": exclude,
        "reverse_eids": of_each_type(_our_reverse, inner, reverse),
        "reverse_etypes": etypes,
        "negative_sampler": negative,
    }


def _is_identity(reverse: object) -> bool:
    if not isinstance(reverse, Tensor | np.ndarray | list):
        return False
    ids = as_array(reverse)
    return ids.ndim == 1 and np.array_equal(ids, np.arange(len(ids)))


def _our_reverse(store: KVStore, etype: Any, reverse: Any) -> Any:
    ids = edge_ids(store, etype)
    # Tensors of dglx_dist, as reverse_edge_ids makes them, have its ids.
    if ids is None or reverse is None or isinstance(reverse, InnerTensor) or len(reverse) != len(ids.ours):
        return inner_tensor(reverse)
    table = as_array(reverse.to_local() if isinstance(reverse, DistTensor) else reverse)
    return torch.from_numpy(np.where(table < 0, table, ids.ours[table])[ids.source])


def _excluded(exclude: Any, g: InnerDistGraph, edges: Any) -> Any:
    answer = exclude(of_each_type(shown_edges, g, edges))
    return None if answer is None else of_each_type(our_edges, g, answer)


def _on_graph(negative: Any, g: Any, inner: InnerDistGraph, _: object, eids: Any) -> Any:
    return negative(g, of_each_type(shown_edges, inner, eids))


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
    """Sample in-edges of nodes into a graph of all nodes, with edge ids in ``edata[dgl.EID]``.

    Edge types without sampled edges are left out, as in DGL. ``prob`` names an edge tensor of weights or a
    mask. A bool as ``exclude_edges`` is taken for ``replace``, its place in DGL 1.1.3. ``use_graphbolt`` has
    no effect.
    """
    if isinstance(exclude_edges, bool):
        exclude_edges, replace = None, exclude_edges
    inner, options = inner_graph(g), (edge_dir, prob, exclude_edges, replace)
    view = g if isinstance(g, DistGraph) else inner
    return remove_empty_types(view.sample_neighbors(_by_type(inner, nodes), fanout, *options))


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
    """Do the same as :func:`sample_neighbors`, with DGL's other signature."""
    return sample_neighbors(g, nodes, fanout, edge_dir, prob, exclude_edges, replace, use_graphbolt)


def in_subgraph(g: object, nodes: Any) -> dgl.DGLGraph:
    """Return the graph of all nodes with all in-edges of ``nodes``, ids in ``edata[dgl.EID]``."""
    return sample_neighbors(g, nodes, -1)


def _by_type(g: InnerDistGraph, nodes: Any) -> Any:
    """Return homogeneous ids of a graph of several node types by type, other ids as they are."""
    if isinstance(nodes, Mapping) or len(g.ntypes) == 1:
        return nodes
    kinds, typed = g.get_partition_book().map_to_per_ntype(as_array(nodes))
    return {ntype: typed[kinds == number] for number, ntype in enumerate(g.ntypes)}
