"""One epoch of training, and what it cost over all ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from dglx_dist.cluster.collectives import gather_json
from dglx_dist.cluster.session import Session
from dglx_dist.cluster.timeline import COMPUTE, Timeline
from dglx_dist.graph.sparse_optimizer import SparseOptimizer
from dglx_dist.records import EpochRecord
from dglx_dist.sampling.loader import LoaderTimes
from dglx_dist.strategies.base import WrappedModel
from dglx_dist.training.task import Task


class TrainingLoader(Protocol):
    """What :func:`train_epoch` iterates over."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Any: ...
    def times(self, *, reset: bool = False) -> LoaderTimes:
        """Seconds since the last reset."""
        ...

    def state_dict(self) -> Any:
        """Position, JSON values; ``epoch`` and ``step``, those done in it, among them."""
        ...

    def load_state_dict(self, state: Any) -> None:
        """Go on at a position."""
        ...


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one step needs."""

    model: WrappedModel
    optimizer: torch.optim.Optimizer
    task: Task
    sparse: Sequence[SparseOptimizer] = ()
    """Of the embeddings that go into the model."""


@dataclass(kw_only=True)
class _Sums:
    loss: float = 0.0
    correct: int = 0
    targets: int = 0


def train_epoch(
    step: Step, loader: TrainingLoader, session: Session, epoch: int, after_step: Callable[[], None]
) -> EpochRecord:
    """Train one epoch and return its record, without a validation accuracy; every rank must call it.

    Args:
        step: What to train with.
        loader: Yields the batches that the task takes.
        session: The run.
        epoch: Number in the record.
        after_step: Called after each step, for progress.
    """
    step.model.train()
    loader.times(reset=True)
    step.model.exchange_seconds(reset=True)
    counted = session.ledger.snapshot()
    sums = _Sums()
    begin = time.perf_counter()
    for batch in loader:
        # Numbered as the loader numbers its batches, so that a trace shows which batch a step is of.
        position = loader.state_dict()
        number = position["epoch"] * len(loader) + position["step"] - 1
        _train_step(step, batch, sums, _Spans(timeline=session.timeline, number=number))
        after_step()
    seconds = time.perf_counter() - begin
    rows = session.ledger.since(counted)
    times = loader.times()
    exchange_s = step.model.exchange_seconds()
    mine = {
        "loss": sums.loss,
        "correct": sums.correct,
        "targets": sums.targets,
        "inside": sum(row.num_bytes for row in rows if row.inside),
        "outside": sum(row.num_bytes for row in rows if not row.inside),
        "seconds": seconds,
        "sample_s": times.sample_s,
        "fetch_s": times.fetch_s,
        "wait_s": times.wait_s,
        "exchange_s": exchange_s,
    }
    return _over_ranks([row for row in gather_json(mine, session) if isinstance(row, dict)], epoch)


@dataclass(frozen=True, kw_only=True)
class _Spans:
    """Notes what a step does."""

    timeline: Timeline
    number: int

    def of(self, name: str) -> AbstractContextManager[None]:
        return self.timeline.span(name, COMPUTE, self.number)


def _train_step(step: Step, batch: Any, sums: _Sums, spans: _Spans) -> None:
    with spans.of("forward"):
        found = step.task(step.model, batch)
    step.optimizer.zero_grad(set_to_none=True)
    for rows in step.sparse:
        rows.zero_grad()
    with spans.of("backward"):
        found.loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it bare
    with spans.of("step"):
        step.optimizer.step()
        for rows in step.sparse:
            rows.step()
    if found.num_targets:
        # The mean over no targets is nan, which would spoil the sum.
        sums.loss += float(found.loss.detach()) * found.num_targets
        sums.correct += found.num_correct
        sums.targets += found.num_targets


def _over_ranks(ranks: Iterable[dict[str, Any]], epoch: int) -> EpochRecord:
    """Sum counts and bytes; take the slowest rank's seconds, and phases as means over the ranks.

    Ranks in lock-step wait and exchange at different times, so the longest of each phase would come to more
    than the epoch. Compute is what is left of it.
    """
    ranks = list(ranks)

    def total(name: str) -> Any:
        return sum(row[name] for row in ranks)

    def mean(name: str) -> float:
        return float(total(name)) / len(ranks)

    seconds = max(row["seconds"] for row in ranks)
    targets = total("targets")
    return EpochRecord(
        epoch=epoch,
        loss=total("loss") / targets if targets else math.nan,
        train_accuracy=total("correct") / targets if targets else math.nan,
        val_accuracy=None,
        seconds=seconds,
        num_samples=targets,
        sample_s=mean("sample_s"),
        fetch_s=mean("fetch_s"),
        wait_s=mean("wait_s"),
        compute_s=max(0.0, seconds - mean("wait_s") - mean("exchange_s")),
        exchange_s=mean("exchange_s"),
        bytes_inside=total("inside"),
        bytes_outside=total("outside"),
    )
