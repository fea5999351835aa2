"""DGL's distributed loaders, over those of the strategy."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast, final

import dgl
import numpy as np
import torch
from torch import Tensor

from dglx_dist.comm.collectives import gather_int64
from dglx_dist.comm.session import current_session
from dglx_dist.compat.dist_graph import DistGraph, inner_graph, without_empty_types
from dglx_dist.compat.dist_tensor import inner_tensor, remember
from dglx_dist.dataloading.step_loader import run_ahead, whole_number
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_graph import DistGraph as InnerDistGraph
from dglx_dist.graph.ids import Ids, as_array
from dglx_dist.records import StepShare
from dglx_dist.strategies.base import WRAPPED, Strategy, strategy_of
from dglx_dist.strategies.data_parallel import DataParallel


@final
class DistDataLoader:
    """Calls ``collate_fn`` on lists of items, batch by batch; as with DGL, a rank may use one alone.

    The order of a shuffled epoch is torch's, as with DGL. A rank that has run out of items stops. Once a
    model was wrapped by ``dglx_dist.wrap``, all ranks must iterate together, and ask for ``len()``: one
    without items goes on with empty lists until the last rank is done. Made under ``torch.no_grad()`` it is
    for inference, and stays a matter of one rank.

    Args:
        dataset: This rank's items: a tensor of ids, or a sequence of ids or (type, id) pairs.
        batch_size: Items per step.
        shuffle: Whether each epoch has another order.
        collate_fn: A list of items to a batch; None: the list.
        drop_last: Whether a last batch that is not full is left out.
        queue_size: Batches made ahead, on one thread; None: none.

    Raises:
        ConfigError: a number is none; with a wrapped model, on all ranks when they differ in one.
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
        self.batch_size = whole_number("batch_size", batch_size, least=1)
        self.queue_size = 0 if queue_size is None else whole_number("queue_size", queue_size, least=1)
        self.collate_fn = collate_fn or list
        self._order = torch.arange(len(dataset))
        self._for_inference = not torch.is_grad_enabled()
        # (steps,) items of this rank in each step, and (W, steps) of all once they must be in step.
        self._mine = _sizes(np.array([len(dataset)]), self.batch_size, self.drop_last)[0]
        self._of_all: np.ndarray[Any, Any] | None = None
        self._running: Iterator[Any] | None = None

    @property
    def expected_idxs(self) -> int:
        """Batches of an epoch on this rank."""
        return len(self._mine)

    def __len__(self) -> int:
        return len(self._shares())

    def __iter__(self) -> Iterator[Any]:
        if self.shuffle:
            self._order = self._order[torch.randperm(len(self._order))]
        # Not kept: a loop that is left early ends its batches, and their share of the step, there and then.
        self._running = None
        return self._batches(self._order, self._shares())

    def __next__(self) -> Any:
        """Return the next batch of the epoch that ``iter()`` began, which it does itself the first time.

        Raises:
            StopIteration: there is none, until ``iter()`` begins another epoch.
        """
        if self._running is None:
            self._running = self._batches(self._order, self._shares())
        return next(self._running)

    def _batches(self, order: Tensor, shares: list[StepShare]) -> Iterator[Any]:
        def make(step: int) -> Any:
            first = step * self.batch_size
            chosen = order[first : first + shares[step].num_local].tolist()
            return self.collate_fn([_item(self.dataset[at]) for at in chosen])

        steps = range(len(shares))
        try:
            made = run_ahead(make, steps, depth=max(self.queue_size, 1), num_threads=int(self.queue_size > 0))
            for share, batch in zip(shares, made, strict=True):
                self._session.step_share = share
                yield batch
        finally:
            self._session.step_share = None

    def _shares(self) -> list[StepShare]:
        """Return the items of each step; collective, the first time, once a model was wrapped."""
        topology = self._session.topology
        if self._for_inference or not WRAPPED.of(self._session):
            # DistributedDataParallel weighs ranks alike, however many items each has.
            world_size = topology.world_size
            return [StepShare(num_local=int(n), num_global=int(n) * world_size) for n in self._mine]
        if self._of_all is None:
            mine = [len(self.dataset), self.batch_size, int(self.drop_last)]
            rows = gather_int64(mine, self._session)
            if bool((rows[:, 1:] != rows[0, 1:]).any()):
                raise ConfigError(f"the ranks differ in batch_size or drop_last: {rows[:, 1:].tolist()}")
            self._of_all = _sizes(rows[:, 0], self.batch_size, self.drop_last)
        own, total = self._of_all[topology.rank], self._of_all.sum(axis=0)
        return [StepShare(num_local=int(n), num_global=int(of)) for n, of in zip(own, total, strict=True)]


def _item(item: Any) -> Any:
    """Return an id as an int, alone or with its type."""
    if isinstance(item, tuple):
        return (item[0], _item(item[1]))
    return item.item() if isinstance(item, Tensor | np.generic) else item


def _sizes(counts: np.ndarray[Any, Any], batch_size: int, drop_last: bool) -> np.ndarray[Any, Any]:
    kept = counts // batch_size * batch_size if drop_last else counts
    firsts = np.arange(0, int(kept.max(initial=0)), batch_size)
    return np.clip(kept[:, None] - firsts[None, :], 0, batch_size)


class _Loader:
    """Batches of a loader of ours, as DGL yields them."""

    def __init__(self, g: InnerDistGraph, strategy: Strategy, inner: Any, options: Mapping[str, Any]) -> None:
        self._g, self._inner = g, inner
        self._batch_size = int(options.get("batch_size", 1))
        traits = strategy.traits
        self._needs_wrap = traits.unit != "mini_batch" or traits.features != "rows"
        # Blocks of strategies inside the model are what that model knows.
        self._as_drawn = len(g.canonical_etypes) > 1 and not self._needs_wrap
        self._for_inference = not torch.is_grad_enabled()
        self._running: Iterator[Any] | None = None

    def __len__(self) -> int:
        """Steps of an epoch on this rank."""
        if self._needs_wrap or not self._ends_early:
            return len(self._inner)
        mine, _ = self._inner.num_targets_of_epoch
        return -(-mine // self._batch_size)

    @property
    def _is_wrapped(self) -> bool:
        return WRAPPED.of(self._g.session)

    @property
    def _ends_early(self) -> bool:
        """Whether this rank stops when its items are used up: only a wrapped model takes part without any."""
        return self._for_inference or not self._is_wrapped

    def __iter__(self) -> Iterator[Any]:
        """Return the batches of the next epoch.

        Raises:
            ConfigError: the strategy goes into the model's layers, and no model was wrapped.
        """
        # Not kept: a loop that is left early ends its batches, and their share of the step, there and then.
        self._running = None
        return self._batches()

    def __next__(self) -> Any:
        """Return the next batch of the epoch that ``iter()`` began, which it does itself the first time.

        Raises:
            StopIteration: there is none, until ``iter()`` begins another epoch.
        """
        if self._running is None:
            self._running = self._batches()
        return next(self._running)

    @property
    def expected_idxs(self) -> int:
        """As ``len()``."""
        return len(self)

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one: each has an order and draws of its own."""
        self._inner.set_epoch(epoch)

    def _batches(self) -> Iterator[Any]:
        if self._needs_wrap and not self._is_wrapped:
            raise ConfigError(
                f"strategy {self._g.session.strategy!r} works inside the model: put model = dglx_dist.wrap("
                "model, g) in the place of DistributedDataParallel, or use strategy data_parallel"
            )
        for batch in self._inner:
            share = batch[-1][-1].step_share
            if _is_empty(share) and self._ends_early:
                return
            blocks = batch[-1]
            if self._as_drawn:
                blocks = [without_empty_types(block) for block in blocks]
            remember(self._g, batch[0], blocks)
            yield (*batch[:-1], blocks)


@final
class DistNodeDataLoader(_Loader):
    """Yields ``(input_nodes, output_nodes, blocks)``.

    **Every rank must make it**, with its own nodes or none: made on some alone they wait for the others, and
    after the time-out an error names who is missing. Over a loader, each rank then iterates at its own pace
    and stops when its nodes are used up, as with DGL. Once a model was wrapped by ``dglx_dist.wrap``, all
    iterate together and have the same number of steps.

    Made under ``torch.no_grad()`` it is for inference: mini-batches, whatever the strategy.

    Args:
        g: The graph.
        nids: This rank's nodes, or a dict of them by type.
        graph_sampler: A sampler of ``dgl.dataloading``.
        device: Where batches shall be; None: the CPU.
        kwargs: ``batch_size``, ``shuffle``, ``drop_last``, ``queue_size`` (batches made ahead), and the
            options of ``dglx_dist.DataLoader``. ``num_workers`` and ``pin_memory`` are warned about.

    Raises:
        ConfigError: on all ranks, when something cannot be honoured on one.
    """

    def __init__(
        self, g: DistGraph, nids: Any, graph_sampler: Any, device: Any = None, **kwargs: Any
    ) -> None:
        inner = inner_graph(g)
        options = _options(kwargs, device)
        strategy = _strategy(inner)
        super().__init__(inner, strategy, strategy.loader(inner, nids, graph_sampler, **options), options)


@final
class DistEdgeDataLoader(_Loader):
    """Yields ``(input_nodes, pair_graph, [negative_pair_graph,] blocks)``.

    **Every rank must make it**, as a :class:`DistNodeDataLoader`.

    Args:
        g: The graph.
        eids: This rank's edges, or a dict of them by type.
        graph_sampler: A sampler of ``dgl.dataloading``.
        device: Where batches shall be; None: the CPU.
        kwargs: ``exclude``, ``reverse_eids``, ``reverse_etypes``, ``negative_sampler``, and those of
            :class:`DistNodeDataLoader`. A ``g_sampling`` other than ``g`` is refused.

    Raises:
        ConfigError: on all ranks, when something cannot be honoured on one.
    """

    def __init__(
        self, g: DistGraph, eids: Any, graph_sampler: Any, device: Any = None, **kwargs: Any
    ) -> None:
        inner = inner_graph(g)
        sampling = kwargs.pop("g_sampling", None)
        if sampling is not None and inner_graph(sampling) is not inner:
            raise ConfigError(
                "g_sampling is another graph, and blocks are drawn from the edges' own; leave it out"
            )
        options = {**_options(kwargs, device), **_edge_options(g, inner, kwargs)}
        strategy = _strategy(inner)
        super().__init__(
            inner, strategy, strategy.edge_loader(inner, eids, graph_sampler, **options), options
        )


def _strategy(g: InnerDistGraph) -> Strategy:
    """Return the session's strategy; under ``torch.no_grad()`` data parallel: blocks for any model."""
    if torch.is_grad_enabled():
        return strategy_of(g.session)
    return DataParallel(g.session, {})


def _options(given: Mapping[str, Any], device: Any) -> dict[str, Any]:
    """Return DGL's options as ours; what is warned about there is, here as well."""
    options = dict(given)
    queue_size = options.pop("queue_size", None)
    if queue_size is not None:
        options["depth"] = queue_size
    return {**options, "device": "cpu" if device is None else device}


def _edge_options(g: Any, inner: InnerDistGraph, given: Mapping[str, Any]) -> dict[str, Any]:
    exclude, reverse = given.get("exclude"), given.get("reverse_eids")
    reverse = (
        {etype: inner_tensor(one) for etype, one in reverse.items()}
        if isinstance(reverse, Mapping)
        else inner_tensor(reverse)
    )
    if exclude != "reverse_id":
        # DGL looks at it in that mode only.
        reverse = None
    elif _is_identity(reverse):
        if inner.rank() == 0:
            warnings.warn(
                "reverse_eids says that each edge is its own reverse, so reverse edges are not excluded; "
                "dglx_dist.reverse_edge_ids(g.inner) finds them",
                stacklevel=4,
            )
        exclude, reverse = "self", None
    etypes = given.get("reverse_etypes") if exclude == "reverse_types" else None
    negative = given.get("negative_sampler")
    return {
        "exclude": exclude,
        "reverse_eids": reverse,
        "reverse_etypes": etypes,
        "negative_sampler": _with_graph(cast("Any", negative), g) if _is_users_own(negative) else negative,
    }


def _is_identity(reverse: object) -> bool:
    if not isinstance(reverse, Tensor | np.ndarray | list):
        return False
    ids = as_array(reverse)
    return ids.ndim == 1 and np.array_equal(ids, np.arange(len(ids)))


def _is_users_own(negative: object) -> bool:
    """Whether a negative sampler is a function of the user's: DGL's own and ours are read, not called."""
    module = type(negative).__module__
    return callable(negative) and not module.startswith(("dgl.dataloading.", "dglx_dist."))


def _with_graph(negative: Callable[[Any, Any], Any], g: Any) -> Callable[[Any, Any], Any]:
    return lambda _, eids: negative(g, eids)


def _is_empty(share: StepShare | None) -> bool:
    return share is not None and share.num_local == 0


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
    """Draw in-edges of nodes; a graph of all nodes with the drawn edges, ids in ``edata[dgl.EID]``.

    Edge types of which nothing was drawn are left out, as DGL does.

    Args:
        g: The graph.
        nodes: Ids, or a dict of them by node type.
        fanout: Edges per node and edge type; -1: all.
        edge_dir: ``in``.
        prob: Name of an edge tensor of weights or a mask.
        exclude_edges: Edges that are not drawn; a bool is taken for ``replace``, as it stood here in 1.1.3.
        replace: Whether an edge may be drawn more than once.
        use_graphbolt: False.

    Raises:
        ConfigError: an argument that cannot be honoured.
    """
    _no_graphbolt(use_graphbolt)
    if isinstance(exclude_edges, bool):
        exclude_edges, replace = None, exclude_edges
    inner = inner_graph(g)
    seeds = _by_type(inner, nodes)
    return without_empty_types(inner.sample_neighbors(seeds, fanout, edge_dir, prob, exclude_edges, replace))


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
    """Draw in-edges of each edge type; ``nodes`` may be homogeneous ids. As :func:`sample_neighbors`."""
    _no_graphbolt(use_graphbolt)
    if isinstance(exclude_edges, bool):
        # Of 1.1.3: (..., prob, replace, etype_sorted).
        exclude_edges, replace = None, exclude_edges
    inner = inner_graph(g)
    seeds = _by_type(inner, nodes)
    return without_empty_types(inner.sample_neighbors(seeds, fanout, edge_dir, prob, exclude_edges, replace))


def in_subgraph(g: object, nodes: Any) -> dgl.DGLGraph:
    """Return the graph of all nodes with all in-edges of ``nodes``, ids in ``edata[dgl.EID]``."""
    inner = inner_graph(g)
    return without_empty_types(inner.sample_neighbors(_by_type(inner, nodes), -1))


def find_edges(g: object, edge_ids: Ids) -> tuple[Tensor, Tensor]:
    """Return (sources, destinations) of edges; of several types all ids are homogeneous ones."""
    inner = inner_graph(g)
    book = inner.get_partition_book()
    if len(book.etypes) == 1 and len(book.ntypes) == 1:
        return inner.find_edges(edge_ids)
    kinds, typed = book.map_to_per_etype(edge_ids)
    sources, destinations = torch.empty_like(typed), torch.empty_like(typed)
    for number, etype in enumerate(book.canonical_etypes):
        chosen = kinds == number
        found = inner.find_edges(typed[chosen], etype)
        sources[chosen] = book.map_to_homo_nid(found[0], etype[0])
        destinations[chosen] = book.map_to_homo_nid(found[1], etype[2])
    return sources, destinations


def _by_type(g: InnerDistGraph, nodes: Any) -> Any:
    """Return ids by node type where there are several and ``nodes`` are homogeneous ids."""
    if isinstance(nodes, Mapping) or len(g.ntypes) == 1:
        return nodes
    kinds, typed = g.get_partition_book().map_to_per_ntype(as_array(nodes))
    return {ntype: typed[kinds == number] for number, ntype in enumerate(g.ntypes)}


def _no_graphbolt(use_graphbolt: bool) -> None:
    if use_graphbolt:
        raise ConfigError("use_graphbolt=True cannot be honoured: there is one format; leave it out")
