"""Training steps: a pass of the loader with its figures, and steps on several batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from dglx_dist.comm.ledger import LedgerRow
from dglx_dist.comm.session import Session
from dglx_dist.comm.trace import COMPUTE
from dglx_dist.dataloading.step_loader import LoaderTimes
from dglx_dist.errors import ConfigError
from dglx_dist.graph.optim import SparseOptimizer
from dglx_dist.strategies.base import WrappedModel, float_of
from dglx_dist.training.checkpoint import Positioned
from dglx_dist.training.config import BF16, FLOAT32, RunOptions, rate_at
from dglx_dist.training.exact_mean import NUM_TERMS
from dglx_dist.training.tasks import StepLoss, Task


class TrainingLoader(Positioned, Protocol):
    """The loader interface of :func:`train_pass`."""

    def __iter__(self) -> Any: ...
    def end_at(self, step: int | None) -> None: ...
    def times(self, *, reset: bool = False) -> LoaderTimes: ...


@dataclass(frozen=True, kw_only=True)
class Step:
    """Model, optimizers and task of a training step."""

    model: WrappedModel
    optimizer: torch.optim.Optimizer
    task: Task
    sparse: Sequence[SparseOptimizer] = ()
    """Optimisers of the model's input embeddings."""
    rates: Sequence[float] = ()
    """Learning rates of the optimizer's groups, then of ``sparse``, of which the schedule gives a part."""
    precision: str = FLOAT32
    """Of forward passes."""
    accumulation: Accumulation
    clip_norm: float | None = None
    """Maximum norm of the gradients of a step; None: they are not clipped."""
    schedule: RunOptions | None = None
    """Whose ``schedule`` and ``warmup`` set the learning rate; None: it is constant."""

    def set_rates(self, factor: float) -> None:
        if self.schedule is None:
            return
        groups = self.optimizer.param_groups
        for group, rate in zip(groups, self.rates, strict=False):
            group["lr"] = rate * factor
        for rows, rate in zip(self.sparse, self.rates[len(groups) :], strict=True):
            rows.lr = rate * factor


Figures: TypeAlias = Mapping[str, float]
"""Counts, bytes and seconds of an epoch so far on this rank, by name."""


def train_pass(
    step: Step, loader: TrainingLoader, session: Session, after_step: Callable[[], None], before: Figures
) -> tuple[Figures, Sequence[LedgerRow]]:
    """Train until the loader's pass ends; return figures, with those ``before`` in its epoch, and bytes."""
    step.model.train()
    loader.times(reset=True)
    step.model.exchange_seconds(reset=True)
    counted = session.ledger.snapshot()
    steps: list[tuple[Tensor, int | Tensor, int]] = []
    begin = time.perf_counter()
    for batch in loader:
        # Numbered like the loader's batches, so that a trace shows the batch of a step.
        position = loader.state_dict()
        number = position["epoch"] * len(loader) + position["step"] - 1
        if step.schedule is not None:
            step.set_rates(rate_at(step.schedule, number, len(loader)))
        place = position["step"], step.accumulation.end_of(position["step"], len(loader))
        found = _train_step(step, batch, place, partial(session.timeline.span, row=COMPUTE, batch=number))
        if found.num_targets:
            # The mean over no targets is nan, which would spoil the total.
            steps.append((found.loss.detach(), found.num_correct, found.num_targets))
        after_step()
    # Read at the end: each step would wait for the device.
    loss, correct, targets = before.get("loss", 0.0), 0, 0
    for of_step, num_correct, num_targets in steps:
        loss += float(of_step) * num_targets
        correct += int(num_correct)
        targets += num_targets
    seconds = time.perf_counter() - begin
    rows = session.ledger.since(counted, control=False)
    times = loader.times()
    counts = {
        "correct": correct,
        "targets": targets,
        "inside": sum(row.num_bytes for row in rows if row.inside),
        "outside": sum(row.num_bytes for row in rows if not row.inside),
        "seconds": seconds,
        "sample_s": times.sample_s,
        "fetch_s": times.fetch_s,
        "wait_s": times.wait_s,
        "exchange_s": step.model.exchange_seconds(),
    }
    # The loss is added in the order of the steps, so that a resumed epoch has the same bits.
    sums = {name: before.get(name, 0) + value for name, value in counts.items()}
    return {**before, "loss": loss, **sums}, rows


def _train_step(
    step: Step, batch: Any, place: tuple[int, int], span: Callable[[str], AbstractContextManager[None]]
) -> StepLoss:
    """Train on a batch; ``place`` is its number, and that of the last one of the same optimizer step."""
    autocast: AbstractContextManager[Any] = nullcontext()
    if step.precision == BF16:
        autocast = torch.autocast(float_of(step.model).device.type, torch.bfloat16)
    is_last = place[0] == place[1]
    step.accumulation.begin()
    with nullcontext() if is_last else step.model.no_sync():
        with span("forward"), autocast:
            found = step.task(step.model, batch)
        if (place[0] - 1) % step.accumulation.number == 0:
            step.optimizer.zero_grad(set_to_none=True)
            for rows in step.sparse:
                rows.zero_grad()
        with span("backward"):
            step.accumulation.weigh(found.loss).backward()  # type: ignore[no-untyped-call]  # torch leaves it bare
    if not is_last:
        return found
    with span("step"):
        step.accumulation.finish(step.model.parameters())
        if step.clip_norm is not None:
            step.model.clip_grad_norm_(step.clip_norm)
        step.optimizer.step()
        for rows in step.sparse:
            rows.step()
    return found


class Accumulation:
    """Weighs the mean losses of ``number`` batches by the terms that all ranks have in each."""

    def __init__(self, number: int, session: Session) -> None:
        self.number, self._session, self._sum = number, session, 0.0

    def end_of(self, step: int, steps_of_epoch: int) -> int:
        """Return the steps of the epoch after which the gradients of ``step`` are complete."""
        return min(-(-step // self.number) * self.number, steps_of_epoch)

    def begin(self) -> None:
        """Forget the terms of the batch before."""
        NUM_TERMS.of(self._session).clear()

    def weigh(self, loss: Tensor) -> Tensor:
        """Return the loss of a batch times its number of terms."""
        if self.number == 1:
            return loss
        share, counts = self._session.model_share, set(NUM_TERMS.of(self._session))
        if len(counts) > 1 or share is None:
            raise ConfigError(
                f"accumulate={self.number} needs a loss that is one mean over a known number of terms, but "
                f"this one has {sorted(counts) or 'none'}; leave it out"
            )
        terms = next(iter(counts), float(share.num_global))
        self._sum += terms
        return loss * terms

    def finish(self, parameters: Iterable[nn.Parameter]) -> None:
        """Divide the gradients by the terms of all batches."""
        for parameter in parameters if self._sum else ():
            if parameter.grad is not None:
                parameter.grad /= self._sum
        self._sum = 0.0
