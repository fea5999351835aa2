"""What the loader's threads add to a batch: every owner's block, and this part's columns of its sources."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, final

import torch
from torch import Tensor

from dglx_dist.cluster.session import Session
from dglx_dist.cluster.timeline import LOADER
from dglx_dist.sampling.precision import Precision
from dglx_dist.sampling.row_memory import RowMemory
from dglx_dist.strategies.push_pull.group import Group
from dglx_dist.strategies.push_pull.options import StructureChoice
from dglx_dist.strategies.push_pull.structure import OwnersBlock, Place
from dglx_dist.strategies.push_pull.structure_choice import ChoosingStructure
from dglx_dist.strategies.push_pull.visit import OwnersInput


class Rows(Protocol):
    """Where this part's columns are."""

    def rows(self, name: str, nodes: Tensor, memory: RowMemory | None = None) -> Tensor:
        """Return (K, F_p) of (K,) int64 ids, in ``memory``; any thread."""


@dataclass(frozen=True, kw_only=True)
class Feed:
    """What a loader of push-pull brings, beside what the inner one does."""

    group: Group
    names: tuple[str, ...]
    """Features that come as this part's columns."""
    store: Rows | None
    """Where they are; None when there are no names."""
    structure: StructureChoice = "auto"
    look_ahead: bool = False
    """Whether batch i + 1 is there when batch i is yielded."""
    precision: Precision = field(default_factory=Precision)
    """What the columns become."""
    memory: RowMemory = field(default_factory=RowMemory)
    """Where they lie."""


@final
class FeedOfVisit:
    """One iteration's inputs, made on the loader's threads and taken by the consumer.

    Args:
        session: The run.
        feed: What to bring.
        structure: Where other owners' blocks come from.
        visit: The iteration.
        num_steps: Steps of an epoch.
    """

    def __init__(
        self, session: Session, feed: Feed, structure: ChoosingStructure, visit: int, num_steps: int
    ) -> None:
        self._session, self._feed, self._structure = session, feed, structure
        self._visit, self._num_steps = visit, num_steps
        self._ready: dict[int, tuple[OwnersInput, ...]] = {}

    def take(self, step: int) -> tuple[OwnersInput, ...]:
        """Return every owner's input of a batch that was made, by part."""
        return self._ready.pop(step)

    def close(self) -> None:
        """Let go of batches that nobody took, and of the memory that is lent; no thread may be at work."""
        self._ready.clear()
        # The inner loader names this iteration until the next one, and this one names it through the
        # structure: memory would stay, after the last use of a loader, until Python looks for such circles.
        self._feed = replace(self._feed, precision=Precision(), memory=RowMemory())

    def around(self, epoch: int, step: int, make: Callable[[], Any]) -> Any:
        """Make a batch and what belongs to it; on the loader's threads."""
        try:
            batch = make()
            begin = time.perf_counter()
            self._ready[step] = self._inputs(Place(visit=self._visit, epoch=epoch, step=step), batch)
        except BaseException as error:
            # Other threads of this loader wait for ranks that now wait for this one.
            self._structure.leave(self._visit, error)
            raise
        return replace(batch, fetch_s=batch.fetch_s + time.perf_counter() - begin)

    def _inputs(self, place: Place, batch: Any) -> tuple[OwnersInput, ...]:
        """Return every owner's input, by part."""
        number = place.epoch * self._num_steps + place.step
        own = OwnersBlock(block=batch.blocks[0], nodes=batch.input_nodes.to(torch.int64))
        group, timeline = self._feed.group, self._session.timeline
        with timeline.span("push structure", LOADER, number):
            brought = self._structure.of_others(place, own)
        self._structure.measured(batch.sample_s, brought.seconds)
        with timeline.span("gather columns", LOADER, number):
            return tuple(
                self._input(own if part == group.part else brought.blocks[part], number)
                for part in range(group.size)
            )

    def _input(self, owner: OwnersBlock, number: int) -> OwnersInput:
        feed = self._feed
        columns: dict[str, Tensor] = {}
        if feed.store is not None:
            for name in feed.names:
                rows = feed.store.rows(name, owner.nodes, feed.memory)
                columns[name] = feed.precision.converted(rows)
        return OwnersInput(block=owner.block, nodes=owner.nodes, columns=columns, number=number)
