"""Loop of a run: steps, epochs, evaluation, early stopping, and checkpoints to resume from."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from dglx_dist.comm.collectives import check_replicas, gather_json
from dglx_dist.comm.ledger import LedgerRow
from dglx_dist.comm.session import Session, warn_user
from dglx_dist.comm.topology import read_launch
from dglx_dist.comm.trace import COMPUTE
from dglx_dist.dataloading.step_loader import LoaderTimes
from dglx_dist.errors import ConfigError, Stopped
from dglx_dist.graph.optim import SparseOptimizer
from dglx_dist.records import VALIDATION, EpochRecord
from dglx_dist.strategies.base import EpochTrainer, WrappedModel, find_float_parameter
from dglx_dist.training import checkpoint, tracing
from dglx_dist.training.best_epoch import BEST_WEIGHTS, FINAL_WEIGHTS, BestWeights, EarlyStopping, WeightFiles
from dglx_dist.training.checkpoint import ResumableLoader
from dglx_dist.training.config import (
    BF16,
    CLASSIFICATION,
    FLOAT32,
    LESS_IS_BETTER,
    METRICS_OF,
    RunOptions,
    compute_rate_factor,
    count_steps_between,
)
from dglx_dist.training.exact_mean import NUM_TERMS
from dglx_dist.training.fit_config import SCHEDULER, FitConfig, FitResult
from dglx_dist.training.inference import check_evaluable, evaluate
from dglx_dist.training.resume import (
    FACTS,
    LAUNCH,
    PRECISION,
    TRAINED_WITH,
    Progress,
    check_same,
    describe_strategy,
    find_differences,
)
from dglx_dist.training.tasks import StepLoss, Task

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph


log = logging.getLogger(__name__)


class TrainingRun:
    """A run of :func:`~dglx_dist.training.fit.train` from first to last epoch. All ranks call it."""

    def __init__(
        self,
        loader: TrainingLoader,
        g: DistGraph,
        config: FitConfig,
        step: Step,
        facts: Mapping[str, object],
        objects: Mapping[str, Any],
    ) -> None:
        self._loader = loader
        self._g = g
        self._config = config
        self._step = step
        self._facts = facts
        self._session: Session = g.session
        self._state = checkpoint.RunState(
            model=step.model,
            optimizer=step.optimizer,
            sparse=step.sparse,
            loader=loader,
            # These facts must be equal in the run that loads the checkpoint.
            dataset={"num_nodes": g.num_nodes(), "num_edges": g.num_edges()},
            state=objects,
        )
        self._scheduler = objects.get(SCHEDULER)
        self.files = WeightFiles(config.weights_folder, step.model)
        folder = config.checkpoint_folder
        every = count_steps_between(config.checkpoint_every, len(loader))
        # If checkpoints only keep the best epoch, one is enough.
        keep = config.keep or (1 if config.patience and not every else None)
        self._writer = None if folder is None else checkpoint.CheckpointWriter(folder, self._state, keep)
        self._deciding_metric = config.metric[0] if config.metric else ""
        self._task = config.task if isinstance(config.task, str) else "own"
        self.result = FitResult(precision=step.precision, task=self._task)
        """Result of the epochs so far."""
        self._next_epoch = 0
        """Index of the next or current epoch."""
        self._stopping = EarlyStopping(
            config.patience, self._deciding_metric in LESS_IS_BETTER, config.min_delta
        )
        self._figures: dict[str, float] = {}
        """Figures of the steps of the current epoch that are done."""
        self._best: tuple[BestWeights, FitResult | Progress] | None = None
        """Weights and results of the best epoch, if no folder has them."""
        self.sent = Counter[tracing.Pair]()
        """Bytes of this rank's ledger during training so far."""
        self._steps_between = 0 if folder is None else every
        """Number of steps between regular checkpoints. 0: there are none."""
        self._saved_at: tuple[int, int] | None = None
        """Epoch and step of the newest checkpoint."""
        self._is_warned = False
        self.first_step = 0
        """First step of the first epoch."""

    def resume(self) -> None:
        """Load the newest checkpoint, or delete all with ``overwrite``. Every rank must call it.

        Without a checkpoint nothing happens. Raises ConfigError if the run to continue has another
        configuration.
        """
        config, folder = self._config, self._config.checkpoint_folder
        if folder is not None and config.overwrite:
            checkpoint.remove_all(folder)
        # Progress checks the values before anything is loaded.
        if not config.resume or folder is None or (extra := checkpoint.read_extra(folder, Progress)) is None:
            return
        if config.goes_on:
            check_same(extra, self._facts, folder)
        resumed = checkpoint.load(folder, **vars(self._state), which="newest")
        if self._session.topology.rank == 0:
            differences = find_differences(extra, self._facts)
            suffix = f" of another configuration ({differences}), with its settings of the optimizer"
            log.warning("resuming from %s%s", resumed.path, suffix if differences else "")
        saved = Progress(resumed.extra)
        self._saved_at = (resumed.epoch, resumed.step)
        self._next_epoch = resumed.epoch
        if self._is_comparable(saved, folder):
            self._stopping.resume(saved.best, saved.evaluations_since_best)
        self.first_step = resumed.step
        if resumed.step:
            self._figures = saved.so_far[self._session.topology.rank]
        self.result = FitResult(
            accuracy=saved.accuracy,
            metrics=saved.metrics,
            task=self._task,
            best_epoch=self._stopping.epoch,
            best_val_accuracy=self._stopping.score,
            first_epoch=resumed.epoch,
            stopped_early=self._stopping.is_over,
            precision=self._step.precision,
        )
        if not self.has_epochs and self._session.topology.rank == 0:
            log.warning("nothing to train: %d epochs are done", self._next_epoch)

    def _is_comparable(self, saved: Progress, folder: str | Path) -> bool:
        """Return whether the saved best epoch has this metric and its weights. Every rank must call this."""
        if saved.best[0] is None:
            return True
        reason = ""
        if saved.deciding not in (None, self._deciding_metric):
            reason = f"by {saved.deciding}, but {self._deciding_metric or 'the accuracy'} decides now"
        elif self._config.patience is not None:
            extra = checkpoint.read_extra(self._checkpoint_path(saved.best[0]), Progress)
            if extra is None or str(Progress(extra).best) != str(saved.best):
                reason = f"but {folder} does not have its weights"
        if reason and self._session.topology.rank == 0:
            log.warning("epoch %d was the best, %s. Only later epochs are compared.", saved.best[0], reason)
        return not reason

    def _checkpoint_path(self, epoch: int) -> Path:
        assert self._config.checkpoint_folder is not None
        return Path(self._config.checkpoint_folder) / checkpoint.folder_name(epoch + 1)

    def check_evaluation(self) -> None:
        if not self.has_epochs or self._config.evaluate is not None:
            return
        if is_node_task := self._config.own_task is None:
            check_evaluable(self._step.model, self._g, self._evaluate_options)
        if not is_node_task or VALIDATION not in self._g.nodes[str(self._config.ntype)].data:
            self._check_patience()

    def _check_patience(self) -> None:
        if (patience := self._config.patience) is not None:
            is_measured = self._config.own_task is None or self._config.evaluate is not None
            remedy = "partition with a val_mask" if is_measured else "set evaluate="
            raise ConfigError(f"--early-stop {patience} needs validation targets. Remove it, or {remedy}.")

    @property
    def is_stopped(self) -> bool:
        return self._config.checkpoint_folder is not None and self._session.stop_point.is_over

    def leave(self) -> None:
        """End training. Save if it was stopped, else return to the best epoch. Every rank must call this."""
        self._session.stop_point.close()
        if not self.is_stopped:
            self.files.write(FINAL_WEIGHTS, self._next_epoch - 1)
            shown_epoch = self._next_epoch - 1 if self._config.patience is None else self._load_best()
            self.files.complete(shown_epoch, self.result.best_epoch)
        step = int(self._loader.state_dict()["step"])
        if self.is_stopped and self._saved_at != (self._next_epoch, step):
            self._save(step, wait=True)

    def _load_best(self) -> int:
        """Load the weights and scores of the best epoch, unless it is the last one. Return that epoch."""
        epoch = self.result.best_epoch
        if epoch is None or epoch == self._next_epoch - 1:
            return self._next_epoch - 1
        if self._writer is None:
            assert self._best is not None
            weights, scores = self._best
            weights.load()
        else:
            self._writer.wait()
            path = self._checkpoint_path(epoch)
            step = self._step
            loaded = checkpoint.load(path, model=step.model, sparse=step.sparse, random_state=False)
            scores = Progress(loaded.extra)
        self.result = replace(self.result, accuracy=scores.accuracy, metrics=scores.metrics)
        return epoch

    def make_stop_error(self) -> Stopped:
        error = Stopped(*(self._saved_at or (self._next_epoch, 0)), self._config.checkpoint_folder)
        if self._session.topology.rank == 0:
            log.warning("%s", error)
        return error

    @property
    def has_epochs(self) -> bool:
        return self._next_epoch < self._config.epochs and not self.result.stopped_early

    def advance(self, trainer: EpochTrainer | None, after_step: Callable[[], None]) -> Sequence[EpochRecord]:
        """Train one epoch, or with a ``trainer`` the epochs until the next stop. Evaluate and save there."""
        if trainer is None:
            if (record := self._train_epoch(after_step)) is None:
                return []
            records = [record]
        else:
            records, rows = trainer.run(self._next_epoch, self._next_stop() - self._next_epoch)
            records = [self._without_accuracy(record) for record in records]
            self._count_bytes(rows)
            for _ in records:
                after_step()
        self._next_epoch += len(records)
        parameters = dict(self._step.model.module.named_parameters())
        check_replicas({name: parameters[name] for name in self._step.model.parts.replicated}, self._session)
        records[-1] = self._finish(records[-1])
        self.result.epochs.extend(records)
        if any(math.isnan(record.loss) for record in records) and not self._is_warned:
            self._is_warned = True
            warn_user(
                f"the training loss of epoch {records[-1].epoch} is NaN. Look for seeds without a target, "
                "features that are not finite, or a learning rate that is too large."
            )
        if self._session.trace is not None:
            for record in records:
                self._session.trace.note_epoch(record)
        return records

    def _train_epoch(self, after_step: Callable[[], None]) -> EpochRecord | None:
        """Train the remaining steps of the next epoch, with checkpoints. Return None if it was stopped."""
        stop_point = self._session.stop_point
        overlaps = self._step.model.overlaps_steps

        def after_each() -> None:
            after_step()
            if not overlaps and stop_point.should_stop():
                self._end_pass_at(self._loader.state_dict()["step"])

        while True:
            if self._steps_between:
                steps_done = self._next_epoch * len(self._loader) + self._loader.state_dict()["step"]
                next_save = (steps_done // self._steps_between + 1) * self._steps_between
                # A pass that ends at the checkpoint has no batches in flight or prefetched, so its bits and
                # bytes equal those of a resumed run.
                self._end_pass_at(next_save - self._next_epoch * len(self._loader))
            counts_before = self._g.kvstore.cache_counts()
            figures, rows = train_pass(self._step, self._loader, self._session, after_each, self._figures)
            self._count_bytes(rows)
            counts = self._g.kvstore.cache_counts() - counts_before
            hits, misses = (self._figures.get(name, 0) for name in ("hits", "misses"))
            self._figures |= {**figures, "hits": hits + counts.hits, "misses": misses + counts.misses}
            if overlaps:
                stop_point.should_stop()
            if not (step := self._loader.state_dict()["step"]):
                break
            if self.is_stopped:
                return None
            pause = self._save(step)
            self._figures = {**self._figures, "checkpoint_s": self._figures.get("checkpoint_s", 0) + pause}
        totals = self._figures
        self._figures = {}
        record = tracing.gather_figures(gather_json(totals, self._session), self._next_epoch)
        return self._without_accuracy(record)

    def _without_accuracy(self, record: EpochRecord) -> EpochRecord:
        has_classes = self._task == CLASSIFICATION or self._task not in METRICS_OF
        return record if has_classes else replace(record, train_accuracy=math.nan)

    def _end_pass_at(self, step: int) -> None:
        # Checkpoints do not contain accumulated gradients, so a pass ends after a step of the optimizer.
        self._loader.end_at(self._step.accumulation.find_last_step(step, len(self._loader)))

    def _count_bytes(self, rows: Sequence[LedgerRow]) -> None:
        for row in rows:
            self.sent[row.phase, row.source, row.destination] += row.num_bytes

    def _next_stop(self) -> int:
        """Return the epoch before which a trainer stops for an evaluation or a checkpoint, or at the end."""
        # The loader of a trainer has one step per epoch, so steps between checkpoints are epochs.
        config = self._config
        intervals = [interval for interval in (config.eval_every, self._steps_between) if interval]
        if self._scheduler is not None:
            intervals.append(1)
        return min([config.epochs, *((self._next_epoch // every + 1) * every for every in intervals)])

    def _finish(self, record: EpochRecord) -> EpochRecord:
        """Evaluate, step the scheduler and save, if due after an epoch. Return the completed record."""
        config = self._config
        is_last = self._next_epoch == config.epochs
        if is_last or (config.eval_every and self._next_epoch % config.eval_every == 0):
            begin = time.perf_counter()
            before = self._session.ledger.snapshot()
            record = self._evaluate(record)
            figures = (
                time.perf_counter() - begin,
                _count_outside(self._session.ledger.since(before, control=False)),
            )
            seconds, sent = zip(*gather_json(figures, self._session), strict=True)
            record = replace(record, evaluation_s=max(seconds), evaluation_bytes_outside=sum(sent))
        is_last = is_last or self.result.stopped_early
        if self._scheduler is not None and not isinstance(self._scheduler, ReduceLROnPlateau):
            self._scheduler.step()
        self._session.stop_point.should_stop()
        # Otherwise the checkpoint that a resumed run began with would remain its newest one.
        saves = self._steps_between or self._saved_at is not None
        interval = self._steps_between or math.inf
        is_best = self._writer is not None and config.patience and self.result.best_epoch == record.epoch
        if is_best or (saves and (is_last or self._next_epoch * len(self._loader) % interval == 0)):
            pauses = gather_json(self._save(wait=is_last), self._session)
            record = replace(record, checkpoint_s=record.checkpoint_s + max(pauses))
        return record

    def _evaluate(self, record: EpochRecord) -> EpochRecord:
        """Update the result and the best epoch. Return ``record`` with the metrics. All ranks call this."""
        config = self._config
        for rows in self._step.sparse:
            # With an asynchronous optimizer, other ranks may still be writing rows.
            rows.flush()
        accuracy, metrics = self.result.accuracy, self.result.metrics
        if config.evaluate is not None or config.own_task is None:
            model, options = self._step.model, self._evaluate_options
            scores = config.evaluate(model) if config.evaluate else evaluate(model, self._g, **options)
            metrics = {name: value for name, value in scores.items() if not name.endswith("_mask")}
            accuracy = {name: value for name, value in scores.items() if name.endswith("_mask")}
            val_accuracy = accuracy.get(VALIDATION, metrics.get("val_accuracy"))
            record = replace(record, metrics=metrics, val_accuracy=val_accuracy)
        self.result = replace(self.result, accuracy=accuracy, metrics=metrics)
        validation = metrics.get(f"val_{self._deciding_metric}", accuracy.get(VALIDATION))
        if validation is None:
            self._check_patience()
            return record
        if isinstance(self._scheduler, ReduceLROnPlateau):
            self._scheduler.step(validation)
        if self._stopping.note(record.epoch, validation):
            self.result = replace(self.result, best_epoch=record.epoch, best_val_accuracy=validation)
            self.files.write(BEST_WEIGHTS, record.epoch)
            if config.patience is not None and self._writer is None:
                self._best = BestWeights(self._step.model, self._step.sparse), self.result
        else:
            self.result = replace(self.result, stopped_early=self._stopping.is_over)
        return record

    @property
    def _evaluate_options(self) -> dict[str, Any]:
        config = self._config
        names = "feature", "label", "num_layers", "ntype", "edge_feats"
        options = {name: getattr(config, name) for name in names}
        inputs = None if config.inputs is None else config.inputs.tensors
        options |= {"batch_size": config.eval_batch_size, "inputs": inputs, "task": config.task}
        return {**options, "metrics": config.metric}

    def close(self, *, failed: bool) -> None:
        """Wait for the last checkpoint. After a failure it may never be complete, so it is abandoned."""
        self._step.set_rates(1.0)
        if self._writer is not None:
            self._writer.abandon() if failed else self._writer.wait()

    def _save(self, step: int = 0, *, wait: bool = False) -> float:
        """Save after ``step`` steps of the next epoch, where the loader's pass has ended. All ranks call it.

        Return the seconds for which training stood still. With ``wait``, the checkpoint is complete on
        return.
        """
        assert self._writer is not None
        begin = time.perf_counter()
        best = (self._stopping.epoch, self._stopping.score)
        self._writer.wait()  # The writer thread reads ``protected``.
        best_epoch = best[0] if self._config.patience else None
        self._writer.protected = None if best_epoch is None else self._checkpoint_path(best_epoch)
        self._writer.save(
            epoch=self._next_epoch,
            step=step,
            extra={
                "best": None if best[0] is None else best,
                "deciding": self._deciding_metric,
                "evaluations_since_best": self._stopping.evaluations_since,
                "accuracy": self.result.accuracy,
                "metrics": self.result.metrics,
                "so_far": gather_json(self._figures, self._session) if step else [],
                TRAINED_WITH: describe_strategy(self._session),
                PRECISION: self.result.precision,
                FACTS: self._facts,
                LAUNCH: read_launch()[0],
            },
            wait=wait,
        )
        self._saved_at = (self._next_epoch, step)
        return time.perf_counter() - begin


class TrainingLoader(ResumableLoader, Protocol):
    """Interface of the loader for :func:`train_pass`."""

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
    """Optimizers of the model's input embeddings."""
    rates: Sequence[float] = ()
    """Learning rates of the optimizer's groups, then of ``sparse``, before the schedule's factor."""
    precision: str = FLOAT32
    """Precision of forward passes."""
    accumulation: Accumulation
    clip_norm: float | None = None
    """Maximum norm of the gradients of a step. None: they are not clipped."""
    schedule: RunOptions | None = None
    """Options with the ``schedule`` and ``warmup`` of the learning rate. None: it is constant."""

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


def _count_outside(rows: Sequence[LedgerRow]) -> int:
    return sum(row.num_bytes for row in rows if not row.inside)


def train_pass(
    step: Step, loader: TrainingLoader, session: Session, after_step: Callable[[], None], before: Figures
) -> tuple[Figures, Sequence[LedgerRow]]:
    """Train until the loader's pass ends. Return the epoch's figures, including ``before``, and the bytes."""
    step.model.train()
    loader.times(reset=True)
    step.model.exchange_seconds(reset=True)
    ledger_before = session.ledger.snapshot()
    steps: list[tuple[Tensor, int | Tensor, int]] = []
    begin = time.perf_counter()
    for batch in loader:
        # Steps are numbered like the loader's batches, so that a trace shows the batch of a step.
        position = loader.state_dict()
        index = position["epoch"] * len(loader) + position["step"] - 1
        if step.schedule is not None:
            step.set_rates(compute_rate_factor(step.schedule, index, len(loader)))
        place = position["step"], step.accumulation.find_last_step(position["step"], len(loader))
        step_loss = _train_step(step, batch, place, partial(session.timeline.span, row=COMPUTE, batch=index))
        if step_loss.num_targets:
            # The mean over no targets is NaN, which would spoil the total.
            steps.append((step_loss.loss.detach(), step_loss.num_correct, step_loss.num_targets))
        after_step()
    # The values are read at the end, because reading them in each step would wait for the device.
    loss = before.get("loss", 0.0)
    correct = 0
    targets = 0
    for step_loss_value, num_correct, num_targets in steps:
        loss += float(step_loss_value) * num_targets
        correct += int(num_correct)
        targets += num_targets
    seconds = time.perf_counter() - begin
    rows = session.ledger.since(ledger_before, control=False)
    times = loader.times()
    counts = {
        "correct": correct,
        "targets": targets,
        "inside": sum(row.num_bytes for row in rows if row.inside),
        "outside": _count_outside(rows),
        "seconds": seconds,
        "sample_s": times.sample_s,
        "fetch_s": times.fetch_s,
        "wait_s": times.wait_s,
        "exchange_s": step.model.exchange_seconds(),
    }
    # The losses are added in the order of the steps, so that a resumed epoch has the same bits.
    sums = {name: before.get(name, 0) + value for name, value in counts.items()}
    return {**before, "loss": loss, **sums}, rows


def _train_step(
    step: Step, batch: Any, step_range: tuple[int, int], span: Callable[[str], AbstractContextManager[None]]
) -> StepLoss:
    """Train on a batch. ``step_range`` is its step in the epoch and the last step with the same update."""
    autocast: AbstractContextManager[Any] = nullcontext()
    if step.precision == BF16:
        autocast = torch.autocast(find_float_parameter(step.model).device.type, torch.bfloat16)
    is_last = step_range[0] == step_range[1]
    step.accumulation.begin()
    with nullcontext() if is_last else step.model.no_sync():
        with span("forward"), autocast:
            step_loss = step.task(step.model, batch)
        if (step_range[0] - 1) % step.accumulation.number == 0:
            step.optimizer.zero_grad(set_to_none=True)
            for rows in step.sparse:
                rows.zero_grad()
        with span("backward"):
            step.accumulation.weigh(step_loss.loss).backward()  # type: ignore[no-untyped-call]  # torch does not annotate this
    if not is_last:
        return step_loss
    with span("step"):
        step.accumulation.finish(step.model.parameters())
        if step.clip_norm is not None:
            step.model.clip_grad_norm_(step.clip_norm)
        step.optimizer.step()
        for rows in step.sparse:
            rows.step()
    return step_loss


class Accumulation:
    """Weighs the mean losses of ``number`` batches by the number of terms that all ranks have in each."""

    def __init__(self, number: int, session: Session) -> None:
        self.number = number
        self._session = session
        self._sum = 0.0

    def find_last_step(self, step: int, steps_of_epoch: int) -> int:
        """Return the step of the epoch after which the gradients of ``step`` are complete."""
        return min(-(-step // self.number) * self.number, steps_of_epoch)

    def begin(self) -> None:
        """Forget the terms of the previous batch."""
        NUM_TERMS.get(self._session).clear()

    def weigh(self, loss: Tensor) -> Tensor:
        """Return the loss of a batch multiplied by its number of terms."""
        if self.number == 1:
            return loss
        share = self._session.model_share
        counts = set(NUM_TERMS.get(self._session))
        if len(counts) > 1 or share is None:
            raise ConfigError(
                f"accumulate={self.number} needs a loss that is one mean over a known number of terms, but "
                f"the means of this loss have {sorted(counts) or 'none'}. Remove accumulate=."
            )
        terms = next(iter(counts), float(share.num_global))
        self._sum += terms
        return loss * terms

    def finish(self, parameters: Iterable[nn.Parameter]) -> None:
        """Divide the gradients by the number of terms of all batches."""
        for parameter in parameters if self._sum else ():
            if parameter.grad is not None:
                parameter.grad /= self._sum
        self._sum = 0.0
