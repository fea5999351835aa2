"""DGL's distributed loaders, over those of the strategy."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast, final

import numpy as np
import torch
from torch import Tensor

from dglx_dist.compat.attached import remember
from dglx_dist.compat.drawn import without_empty_types
from dglx_dist.compat.graph import DistGraph, inner_graph
from dglx_dist.compat.tensor import inner_tensor
from dglx_dist.errors import ConfigError
from dglx_dist.graph import DistGraph as Inner
from dglx_dist.graph.ids import as_array
from dglx_dist.records import StepShare
from dglx_dist.strategies.base import WRAPPED, Strategy
from dglx_dist.strategies.data_parallel import DataParallel
from dglx_dist.strategies.opening import strategy_of


class _Loader:
    """Batches of a loader of ours, as DGL yields them."""

    def __init__(self, g: Inner, strategy: Strategy, inner: Any, options: Mapping[str, Any]) -> None:
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
        return WRAPPED in self._g.session.attached

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


def _strategy(g: Inner) -> Strategy:
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


def _edge_options(g: Any, inner: Inner, given: Mapping[str, Any]) -> dict[str, Any]:
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
