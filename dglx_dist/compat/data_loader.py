"""DGL's ``DistDataLoader``: a script's own function, on batches of this rank's items."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from dglx_dist.cluster.collectives import gather_int64
from dglx_dist.cluster.session import current_session
from dglx_dist.errors import ConfigError
from dglx_dist.records import StepShare
from dglx_dist.sampling.ahead import run_ahead
from dglx_dist.sampling.options import whole_number
from dglx_dist.strategies.base import WRAPPED


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
        if self._for_inference or WRAPPED not in self._session.attached:
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
