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
from dglx_dist.graph.row_kernels import torch_dtype
from dglx_dist.records import STANDARD_ERROR, VALIDATION, EpochRecord
from dglx_dist.strategies.base import EpochTrainer, WrappedModel, find_float_parameter
from dglx_dist.training import checkpoint, tracing
from dglx_dist.training.best_epoch import BEST_WEIGHTS, FINAL_WEIGHTS, BestWeights, EarlyStopping, WeightFiles
from dglx_dist.training.checkpoint import ResumableLoader
from dglx_dist.training.config import (
    BF16,
    CLASSIFICATION,
    FLOAT32,
    LESS_IS_BETTER,
    METRICS_BY_TASK,
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
        self._writer: checkpoint.CheckpointWriter | None = None
        self._steps_between = 0
        """Number of steps between regular checkpoints. 0: there are none."""
        folder = config.checkpoint_folder
        if folder is not None:
            self._steps_between = count_steps_between(config.checkpoint_every, len(loader))
            keep = config.keep
            if keep is None and config.patience and not self._steps_between:
                # Only best epochs are saved, and a better one replaces the one before it.
                keep = 1
            self._writer = checkpoint.CheckpointWriter(folder, self._state, keep)

        self._deciding_metric = config.metric[0] if config.metric else ""
        self._task = config.task if isinstance(config.task, str) else "own"
        self.result = FitResult(precision=step.precision, task=self._task)
        """Result of the epochs so far."""
        self._next_epoch = 0
        """Index of the next or current epoch."""
        less_is_better = self._deciding_metric in LESS_IS_BETTER
        self._stopping = EarlyStopping(config.patience, less_is_better, config.min_delta)
        self._figures: dict[str, float] = {}
        """Figures of the steps of the current epoch that are done."""
        self._best: tuple[BestWeights, FitResult | Progress] | None = None
        """Weights and results of the best epoch, if no folder has them."""
        self.sent = Counter[tracing.Pair]()
        """Bytes of this rank's ledger during training so far."""
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
        config = self._config
        folder = config.checkpoint_folder
        if folder is not None and config.overwrite:
            checkpoint.remove_all(folder)
        if folder is None or not config.resume:
            return

        # Progress checks the values before anything is loaded.
        extra = checkpoint.read_extra(folder, Progress)
        if extra is None:
            return
        if config.goes_on:
            check_same(extra, self._facts, folder)
        resumed = checkpoint.load(folder, **vars(self._state), which="newest")
        suffix = ""
        differences = find_differences(extra, self._facts)
        if differences:
            suffix = f" of another configuration ({differences}), with its settings of the optimizer"
        self._log_warning("resuming from %s%s", resumed.path, suffix)
        self._restore(resumed, folder)

    def _log_warning(self, text: str, *values: object) -> None:
        """Log a warning on rank 0, so that a user sees it once."""
        if self._session.topology.rank == 0:
            log.warning(text, *values)

    def _restore(self, resumed: checkpoint.LoadedCheckpoint, folder: str | Path) -> None:
        """Continue the counts, figures and scores of a checkpoint. Every rank must call this."""
        saved = Progress(resumed.extra)
        self._saved_at = (resumed.epoch, resumed.step)
        self._next_epoch = resumed.epoch
        self.first_step = resumed.step
        if resumed.step:
            self._figures = saved.so_far[self._session.topology.rank]
        if self._is_comparable(saved, folder):
            self._stopping.resume(saved.best, saved.evaluations_since_best)

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
        if not self.has_epochs:
            self._log_warning("nothing to train: %d epochs are done", self._next_epoch)

    def _is_comparable(self, saved: Progress, folder: str | Path) -> bool:
        """Return whether later epochs can be compared with the saved best epoch. Every rank must call this.

        They cannot if another metric decides now, or if the weights of the best epoch are missing.
        """
        best_epoch, _ = saved.best
        if best_epoch is None:
            return True

        if saved.deciding not in (None, self._deciding_metric):
            reason = f"by {saved.deciding}, but {self._deciding_metric or 'the accuracy'} decides now"
        elif self._config.patience is None:
            return True  # The weights of the best epoch are not needed.
        else:
            extra = checkpoint.read_extra(self._checkpoint_path(best_epoch), Progress)
            # The texts of two NaN scores are equal, but their values are not.
            if extra is not None and str(Progress(extra).best) == str(saved.best):
                return True
            reason = f"but {folder} does not have its weights"

        self._log_warning("epoch %d was the best, %s. Only later epochs are compared.", best_epoch, reason)
        return False

    def _checkpoint_path(self, epoch: int) -> Path:
        assert self._config.checkpoint_folder is not None
        return Path(self._config.checkpoint_folder) / checkpoint.folder_name(epoch + 1)

    def check_evaluation(self) -> None:
        """Raise ConfigError before training if the evaluation would fail, or patience has no score."""
        config = self._config
        if not self.has_epochs or config.evaluate is not None:
            return
        has_validation = False
        if config.own_task is None:
            options = {**self._evaluate_options, "sample": config.eval_sample}
            check_evaluable(self._step.model, self._g, options)
            has_validation = VALIDATION in self._g.nodes[str(config.ntype)].data
        if not has_validation:
            self._check_patience()

    def _check_patience(self) -> None:
        """Raise ConfigError if early stopping is requested. It needs a score, and there is none."""
        config = self._config
        if config.patience is None:
            return
        remedy = "partition with a val_mask"
        if config.own_task is not None and config.evaluate is None:
            remedy = "set evaluate="
        raise ConfigError(f"--early-stop {config.patience} needs validation targets. Remove it, or {remedy}.")

    @property
    def is_stopped(self) -> bool:
        return self._config.checkpoint_folder is not None and self._session.stop_point.is_over

    def leave(self) -> None:
        """End training. Save if it was stopped, else return to the best epoch. Every rank must call this."""
        self._session.stop_point.close()
        if self.is_stopped:
            step = int(self._loader.state_dict()["step"])
            if self._saved_at != (self._next_epoch, step):
                self._save(step, wait=True)
            return

        epoch_of_weights = self._next_epoch - 1
        self.files.write(FINAL_WEIGHTS, epoch_of_weights)
        if self._config.patience is not None:
            epoch_of_weights = self._load_best()
            self._replace_estimates()
        self.files.complete(epoch_of_weights, self.result.best_epoch)

    def _load_best(self) -> int:
        """Load the weights and scores of the best epoch, and return that epoch.

        If the last epoch is the best, or no epoch was evaluated, return the last epoch and load nothing.
        """
        last_epoch = self._next_epoch - 1
        epoch = self.result.best_epoch
        if epoch is None or epoch == last_epoch:
            return last_epoch

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

    def _replace_estimates(self) -> None:
        """Evaluate exactly if the scores of the result are estimates. Every rank must call this."""
        is_estimated = any(name.endswith(STANDARD_ERROR) for name in self.result.metrics)
        if self._config.evaluate is not None or not is_estimated:
            return
        accuracy, metrics = _split_scores(evaluate(self._step.model, self._g, **self._evaluate_options))
        score = metrics.get(f"val_{self._deciding_metric}", accuracy.get(VALIDATION))
        self.result = replace(self.result, accuracy=accuracy, metrics=metrics, best_val_accuracy=score)

    def make_stop_error(self) -> Stopped:
        """Return the error that tells the user where the run can be resumed. Rank 0 logs it, too."""
        epoch, step = self._next_epoch, 0
        if self._saved_at is not None:
            epoch, step = self._saved_at
        error = Stopped(epoch, step, self._config.checkpoint_folder)
        self._log_warning("%s", error)
        return error

    @property
    def has_epochs(self) -> bool:
        return self._next_epoch < self._config.epochs and not self.result.stopped_early

    def advance(self, trainer: EpochTrainer | None, after_step: Callable[[], None]) -> Sequence[EpochRecord]:
        """Train one epoch, or with a ``trainer`` the epochs until the next stop. Evaluate and save there.

        Return the records of the trained epochs. The list is empty if a signal ended the epoch early.
        """
        if trainer is None:
            record = self._train_epoch(after_step)
            if record is None:
                return []
            records = [record]
        else:
            num_epochs = self._next_stop() - self._next_epoch
            records, rows = trainer.run(self._next_epoch, num_epochs)
            records = [self._without_accuracy(record) for record in records]
            self._count_bytes(rows)
            for _ in records:
                after_step()

        self._next_epoch += len(records)
        parameters = dict(self._step.model.module.named_parameters())
        replicated = {name: parameters[name] for name in self._step.model.parts.replicated}
        check_replicas(replicated, self._session)
        records[-1] = self._finish(records[-1])
        self.result.epochs.extend(records)
        self._warn_of_nan(records)
        if self._session.trace is not None:
            for record in records:
                self._session.trace.note_epoch(record)
        return records

    def _warn_of_nan(self, records: Sequence[EpochRecord]) -> None:
        """Warn once in a run if a training loss is NaN."""
        if self._is_warned or not any(math.isnan(record.loss) for record in records):
            return
        self._is_warned = True
        warn_user(
            f"the training loss of epoch {records[-1].epoch} is NaN. Look for seeds without a target, "
            "features that are not finite, or a learning rate that is too large."
        )

    def _train_epoch(self, after_step: Callable[[], None]) -> EpochRecord | None:
        """Train the remaining steps of the next epoch, with checkpoints. Return None if it was stopped."""
        stop_point = self._session.stop_point
        overlaps = self._step.model.overlaps_steps

        def after_each() -> None:
            after_step()
            # With overlapping steps, the ranks only agree on a stop between two passes.
            if not overlaps and stop_point.should_stop():
                self._end_pass_at(self._loader.state_dict()["step"])

        while True:
            if self._steps_between:
                self._end_pass_at_next_save()
            self._train_pass(after_each)
            if overlaps:
                stop_point.should_stop()

            step = self._loader.state_dict()["step"]
            if step == 0:
                break  # The loader is at the start of the next epoch.
            if self.is_stopped:
                return None
            checkpoint_s = self._figures.get("checkpoint_s", 0) + self._save(step)
            self._figures = {**self._figures, "checkpoint_s": checkpoint_s}

        totals = self._figures
        self._figures = {}
        record = tracing.gather_figures(gather_json(totals, self._session), self._next_epoch)
        return self._without_accuracy(record)

    def _train_pass(self, after_step: Callable[[], None]) -> None:
        """Train until the loader's pass ends, and add its figures and bytes to those of the epoch."""
        counts_before = self._g.kvstore.cache_counts()
        figures, rows = train_pass(self._step, self._loader, self._session, after_step, self._figures)
        self._count_bytes(rows)
        counts = self._g.kvstore.cache_counts() - counts_before
        hits = self._figures.get("hits", 0) + counts.hits
        misses = self._figures.get("misses", 0) + counts.misses
        self._figures |= {**figures, "hits": hits, "misses": misses}

    def _without_accuracy(self, record: EpochRecord) -> EpochRecord:
        """Return ``record`` with NaN as the train accuracy if the targets are not classes."""
        if self._task == CLASSIFICATION or self._task not in METRICS_BY_TASK:
            return record
        return replace(record, train_accuracy=math.nan)

    def _end_pass_at_next_save(self) -> None:
        """Let the loader's pass end where the next checkpoint is due.

        No batch is then in flight or prefetched, so bits and bytes equal those of a resumed run.
        """
        first_step = self._next_epoch * len(self._loader)
        steps_done = first_step + self._loader.state_dict()["step"]
        next_save = (steps_done // self._steps_between + 1) * self._steps_between
        self._end_pass_at(next_save - first_step)

    def _end_pass_at(self, step: int) -> None:
        # Checkpoints do not contain accumulated gradients, so a pass ends after a step of the optimizer.
        last_step = self._step.accumulation.find_last_step(step, len(self._loader))
        self._loader.end_at(last_step)

    def _count_bytes(self, rows: Sequence[LedgerRow]) -> None:
        for row in rows:
            self.sent[row.phase, row.source, row.destination] += row.num_bytes

    def _next_stop(self) -> int:
        """Return the epoch before which a trainer stops for an evaluation or a checkpoint, or at the end."""
        # The loader of a trainer has one step per epoch, so steps between checkpoints are epochs.
        intervals = [self._config.eval_every, self._steps_between]
        if self._scheduler is not None:
            intervals.append(1)
        next_stop = self._config.epochs
        for interval in intervals:
            if interval:
                next_stop = min(next_stop, (self._next_epoch // interval + 1) * interval)
        return next_stop

    def _finish(self, record: EpochRecord) -> EpochRecord:
        """Evaluate, step the scheduler and save, if due after an epoch. Return the completed record."""
        eval_every = self._config.eval_every
        is_last = self._next_epoch == self._config.epochs
        if is_last or (eval_every and self._next_epoch % eval_every == 0):
            record = self._evaluate_timed(record, None if is_last else self._config.eval_sample)
        is_last = is_last or self.result.stopped_early
        if self._scheduler is not None and not isinstance(self._scheduler, ReduceLROnPlateau):
            self._scheduler.step()

        self._session.stop_point.should_stop()
        if self._is_save_due(record.epoch, is_last=is_last):
            pauses = gather_json(self._save(wait=is_last), self._session)
            record = replace(record, checkpoint_s=record.checkpoint_s + max(pauses))
        return record

    def _is_save_due(self, epoch: int, *, is_last: bool) -> bool:
        """Return whether a checkpoint is due after ``epoch``."""
        # Early stopping returns to the best epoch, so that epoch must have a checkpoint.
        is_best = self.result.best_epoch == epoch
        if is_best and self._writer is not None and self._config.patience:
            return True

        # A resumed run has saved a checkpoint before. If it did not save at its end, the checkpoint that it
        # resumed from would remain the newest one.
        if is_last and self._saved_at is not None:
            return True
        if not self._steps_between:
            return False
        num_steps_done = self._next_epoch * len(self._loader)
        return is_last or num_steps_done % self._steps_between == 0

    def _evaluate_timed(self, record: EpochRecord, sample: float | None) -> EpochRecord:
        """Evaluate. Return ``record`` with the metrics, and the slowest rank's seconds and all bytes."""
        begin_s = time.perf_counter()
        ledger_before = self._session.ledger.snapshot()
        record = self._evaluate(record, sample)
        seconds = time.perf_counter() - begin_s
        num_bytes = _count_outside(self._session.ledger.since(ledger_before, control=False))

        figures = gather_json((seconds, num_bytes), self._session)
        seconds_by_rank, bytes_by_rank = zip(*figures, strict=True)
        return replace(record, evaluation_s=max(seconds_by_rank), evaluation_bytes_outside=sum(bytes_by_rank))

    def _evaluate(self, record: EpochRecord, sample: float | None) -> EpochRecord:
        """Update the result and the best epoch. Return ``record`` with the metrics. All ranks call this."""
        config = self._config
        for optimizer in self._step.sparse:
            # With an asynchronous optimizer, other ranks may still be writing rows.
            optimizer.flush()

        accuracy = self.result.accuracy
        metrics = self.result.metrics
        if config.evaluate is not None or config.own_task is None:
            if config.evaluate is not None:
                scores = config.evaluate(self._step.model)
            else:
                scores = evaluate(self._step.model, self._g, **self._evaluate_options, sample=sample)
            accuracy, metrics = _split_scores(scores)
            val_accuracy = accuracy.get(VALIDATION, metrics.get("val_accuracy"))
            record = replace(record, metrics=metrics, val_accuracy=val_accuracy)

        self.result = replace(self.result, accuracy=accuracy, metrics=metrics)

        validation_score = metrics.get(f"val_{self._deciding_metric}", accuracy.get(VALIDATION))
        if validation_score is None:
            self._check_patience()
        else:
            self._note_score(record.epoch, validation_score)

        return record

    def _note_score(self, epoch: int, score: float) -> None:
        """Pass a validation score to the scheduler and early stopping. Keep the weights of a best epoch."""
        if isinstance(self._scheduler, ReduceLROnPlateau):
            self._scheduler.step(score)
        if not self._stopping.note(epoch, score):
            self.result = replace(self.result, stopped_early=self._stopping.is_over)
            return

        self.result = replace(self.result, best_epoch=epoch, best_val_accuracy=score)
        self.files.write(BEST_WEIGHTS, epoch)
        if self._config.patience is not None and self._writer is None:
            self._best = BestWeights(self._step.model, self._step.sparse), self.result

    @property
    def _evaluate_options(self) -> dict[str, Any]:
        """Arguments of :func:`evaluate`."""
        config = self._config
        return {
            "feature": config.feature,
            "label": config.label,
            "num_layers": config.num_layers,
            "ntype": config.ntype,
            "edge_feats": config.edge_feats,
            "batch_size": config.eval_batch_size,
            "inputs": None if config.inputs is None else config.inputs.tensors,
            "task": config.task,
            "metrics": config.metric,
            "hidden_dtype": config.eval_activations and torch_dtype(config.eval_activations),
        }

    def close(self, *, failed: bool) -> None:
        """Wait for the last checkpoint. After a failure it may never be complete, so it is abandoned."""
        self._step.set_rates(1.0)
        if self._writer is None:
            return
        if failed:
            self._writer.abandon()
        else:
            self._writer.wait()

    def _save(self, step: int = 0, *, wait: bool = False) -> float:
        """Save after ``step`` steps of the next epoch, where the loader's pass has ended. All ranks call it.

        Return the seconds for which training stood still. With ``wait``, the checkpoint is complete on
        return.
        """
        assert self._writer is not None
        begin_s = time.perf_counter()
        self._writer.wait()  # The writer thread reads ``protected``.

        # The checkpoint of the best epoch is not removed while the run may return to this epoch.
        best_epoch = self._stopping.epoch
        self._writer.protected = None
        if best_epoch is not None and self._config.patience:
            self._writer.protected = self._checkpoint_path(best_epoch)
        self._writer.save(
            epoch=self._next_epoch,
            step=step,
            extra={
                "best": None if best_epoch is None else (best_epoch, self._stopping.score),
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
        return time.perf_counter() - begin_s


def _split_scores(scores: Mapping[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the accuracy by mask, and the metrics by name."""
    accuracy = {name: value for name, value in scores.items() if name.endswith("_mask")}
    return accuracy, {name: value for name, value in scores.items() if name not in accuracy}


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
        """Set all learning rates to ``factor`` times their initial values. Without a schedule, keep them."""
        if self.schedule is None:
            return
        groups = self.optimizer.param_groups
        for group, rate in zip(groups, self.rates, strict=False):
            group["lr"] = rate * factor
        sparse_rates = self.rates[len(groups) :]
        for optimizer, rate in zip(self.sparse, sparse_rates, strict=True):
            optimizer.lr = rate * factor


Figures: TypeAlias = Mapping[str, float]
"""Counts, bytes and seconds of an epoch so far on this rank, by name."""


def _count_outside(rows: Sequence[LedgerRow]) -> int:
    return sum(row.num_bytes for row in rows if not row.inside)


def train_pass(
    step: Step, loader: TrainingLoader, session: Session, after_step: Callable[[], None], before: Figures
) -> tuple[Figures, Sequence[LedgerRow]]:
    """Train until the loader's pass ends.

    Return the figures of the epoch so far, to which ``before`` contributes the earlier passes, and the
    ledger's rows of this pass.
    """
    step.model.train()
    loader.times(reset=True)
    step.model.exchange_seconds(reset=True)
    ledger_before = session.ledger.snapshot()
    losses: list[StepLoss] = []
    begin_s = time.perf_counter()

    for batch in loader:
        # Steps are numbered like the loader's batches, so that a trace shows the batch of a step.
        position = loader.state_dict()
        step_of_epoch = position["step"]
        index = position["epoch"] * len(loader) + step_of_epoch - 1
        if step.schedule is not None:
            step.set_rates(compute_rate_factor(step.schedule, index, len(loader)))
        last_step = step.accumulation.find_last_step(step_of_epoch, len(loader))
        span = partial(session.timeline.span, row=COMPUTE, batch=index)
        step_loss = _train_step(step, batch, (step_of_epoch, last_step), span)
        if step_loss.num_targets:
            # The mean over no targets is NaN, which would spoil the total.
            losses.append(replace(step_loss, loss=step_loss.loss.detach()))
        after_step()

    # The values are read at the end, because reading them in each step would wait for the device. The losses
    # are added in the order of the steps, so that a resumed epoch has the same bits.
    loss = before.get("loss", 0.0)
    for step_loss in losses:
        loss += float(step_loss.loss) * step_loss.num_targets
    num_correct = sum(int(step_loss.num_correct) for step_loss in losses)
    seconds = time.perf_counter() - begin_s

    rows = session.ledger.since(ledger_before, control=False)
    times = loader.times()
    figures_of_pass = {
        "correct": num_correct,
        "targets": sum(step_loss.num_targets for step_loss in losses),
        "inside": sum(row.num_bytes for row in rows if row.inside),
        "outside": _count_outside(rows),
        "seconds": seconds,
        "sample_s": times.sample_s,
        "fetch_s": times.fetch_s,
        "wait_s": times.wait_s,
        "exchange_s": step.model.exchange_seconds(),
    }
    totals = {name: before.get(name, 0) + value for name, value in figures_of_pass.items()}
    return {**before, "loss": loss, **totals}, rows


def _train_step(
    step: Step, batch: Any, step_range: tuple[int, int], span: Callable[[str], AbstractContextManager[None]]
) -> StepLoss:
    """Train on a batch, and update the weights if the gradients are complete.

    ``step_range`` is the step of the batch in the epoch, and the step after which the weights are updated.
    """
    step_of_epoch, last_step = step_range
    is_last = step_of_epoch == last_step
    is_first = (step_of_epoch - 1) % step.accumulation.number == 0
    autocast: AbstractContextManager[Any] = nullcontext()
    if step.precision == BF16:
        device = find_float_parameter(step.model).device
        autocast = torch.autocast(device.type, torch.bfloat16)

    step.accumulation.begin()
    # Ranks add up their gradients only in the last backward pass before an update.
    with nullcontext() if is_last else step.model.no_sync():
        with span("forward"), autocast:
            step_loss = step.task(step.model, batch)
        if is_first:
            step.optimizer.zero_grad(set_to_none=True)
            for sparse_optimizer in step.sparse:
                sparse_optimizer.zero_grad()
        with span("backward"):
            loss = step.accumulation.weigh(step_loss.loss)
            loss.backward()  # type: ignore[no-untyped-call]  # torch does not annotate this

    if not is_last:
        return step_loss

    with span("step"):
        step.accumulation.finish(step.model.parameters())
        if step.clip_norm is not None:
            step.model.clip_grad_norm_(step.clip_norm)
        step.optimizer.step()
        for sparse_optimizer in step.sparse:
            sparse_optimizer.step()

    return step_loss


class Accumulation:
    """Weighs the mean losses of ``number`` batches by the number of terms that all ranks have in each."""

    def __init__(self, number: int, session: Session) -> None:
        self.number = number
        self._session = session
        self._sum = 0.0

    def find_last_step(self, step: int, steps_of_epoch: int) -> int:
        """Return the step of the epoch after which the gradients of ``step`` are complete."""
        num_updates = math.ceil(step / self.number)
        return min(num_updates * self.number, steps_of_epoch)

    def begin(self) -> None:
        """Forget the terms of the previous batch."""
        NUM_TERMS.get(self._session).clear()

    def weigh(self, loss: Tensor) -> Tensor:
        """Return the loss of a batch multiplied by its number of terms.

        Raises ConfigError if the loss has means over different numbers of terms, or the number is unknown.
        """
        if self.number == 1:
            return loss
        share = self._session.model_share
        term_counts = set(NUM_TERMS.get(self._session))
        if len(term_counts) > 1 or share is None:
            raise ConfigError(
                f"accumulate={self.number} needs a loss that is one mean over a known number of terms, but "
                f"the means of this loss have {sorted(term_counts) or 'none'}. Remove accumulate=."
            )

        # Without a recorded mean, each seed of all ranks is one term.
        num_terms = float(share.num_global)
        if term_counts:
            num_terms = term_counts.pop()
        self._sum += num_terms
        return loss * num_terms

    def finish(self, parameters: Iterable[nn.Parameter]) -> None:
        """Divide the gradients by the number of terms of all batches."""
        if self._sum == 0:
            return  # Single batches are not weighed.
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad /= self._sum
        self._sum = 0.0
