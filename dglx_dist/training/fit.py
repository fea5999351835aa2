"""Training loop: epochs, evaluation, early stopping, checkpoints, resume."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar, final

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from dglx_dist.comm.collectives import check_equal, gather_int64, gather_json
from dglx_dist.comm.session import Session
from dglx_dist.comm.trace import COMPUTE
from dglx_dist.dataloading.step_loader import LoaderTimes
from dglx_dist.errors import ConfigError
from dglx_dist.graph.column import CacheCounts
from dglx_dist.graph.optim import SparseOptimizer
from dglx_dist.options import check_ranges, common_fields
from dglx_dist.progress import progress
from dglx_dist.records import FEATURE, LABEL, SPLITS, EpochRecord
from dglx_dist.strategies.base import (
    CACHE_CHOICE,
    EpochTrainer,
    Objective,
    Traits,
    WrappedModel,
    strategy_of,
)
from dglx_dist.training import checkpoint
from dglx_dist.training.checkpoint import Positioned, Sparse, optimizers_of
from dglx_dist.training.config import BF16, FLOAT32, RunOptions
from dglx_dist.training.inference import check_evaluable, evaluate, float_of, labelled_type
from dglx_dist.training.relational import EntityInputs
from dglx_dist.training.tracing import recording, without_keys

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph
    from dglx_dist.planner.records import Choice


LossFunction: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(B, C) scores and (B,) labels to the mean loss over the B rows; ignored if B is 0."""


@dataclass(frozen=True, kw_only=True)
class StepLoss:
    """The loss of one batch on this rank."""

    loss: Tensor
    """() mean over this rank's targets, with a gradient even without targets."""
    num_targets: int
    """As the loader counts them: destinations, or positive edges."""
    num_correct: int | Tensor
    """Correct targets, for the train accuracy. A () tensor does not wait for the device."""


Task: TypeAlias = Callable[[WrappedModel, Any], StepLoss]
"""(wrapped model, batch of the loader) to its loss; calls the model once and no collective."""


@final
@dataclass(frozen=True, kw_only=True)
class NodeClassification:
    """Node classification on batches ``(input_nodes, output_nodes, blocks)``."""

    loss: LossFunction = cross_entropy
    feature: str = FEATURE
    label: str = LABEL
    ntype: str | None = None
    """Type of the classified nodes; required with several node types."""
    inputs: EntityInputs | None = None
    """Input rows by node type; None: ``feature`` of the only type."""

    def __call__(self, model: WrappedModel, batch: Any) -> StepLoss:
        blocks = batch[2]
        scores = model(blocks, _input_rows(model, blocks[0], self.feature, self.inputs))
        if isinstance(scores, dict):
            scores = scores[self.ntype or blocks[-1].dsttypes[0]]
        labels = blocks[-1].dstnodes[self.ntype or blocks[-1].dsttypes[0]].data[self.label]
        correct = (scores.detach().argmax(1) == labels).sum() if len(labels) else 0
        return StepLoss(loss=self.loss(scores, labels), num_targets=len(labels), num_correct=correct)


@final
@dataclass(frozen=True, kw_only=True)
class LinkPrediction:
    """Link prediction on batches ``(input_nodes, pair_graph, negative_pair_graph, blocks)``.

    The model is called with (blocks, input rows, pair graph, negative pair graph) and returns the scores of
    both graphs' edges, (P,) and (Q,), of all edge types together. An edge with a score above 0 is correct.
    """

    loss: LossFunction = binary_cross_entropy_with_logits
    """Loss of (P + Q,) scores and as many float labels: 1 for an edge, 0 for a negative."""
    feature: str = FEATURE
    inputs: EntityInputs | None = None
    """As in :class:`NodeClassification`."""

    def __call__(self, model: WrappedModel, batch: Any) -> StepLoss:
        _, pairs, negative_pairs, blocks = batch
        rows = _input_rows(model, blocks[0], self.feature, self.inputs)
        positive, negative = model(blocks, rows, pairs, negative_pairs)
        truth = torch.cat([torch.ones_like(positive), torch.zeros_like(negative)])
        return StepLoss(
            loss=self.loss(torch.cat([positive, negative]), truth),
            num_targets=len(positive),
            num_correct=(positive.detach() > 0).sum(),
        )


def _input_rows(model: nn.Module, block: Any, feature: str, inputs: EntityInputs | None) -> Any:
    weight = float_of(model)

    def converted(rows: Tensor) -> Tensor:
        # Autocast takes bfloat16 as it is, and would convert it back.
        half = rows.dtype == torch.bfloat16 and torch.is_autocast_enabled(weight.device.type)
        return rows if half else rows.to(weight.dtype)

    if inputs is None:
        return converted(block.srcdata[feature])
    return {ntype: converted(rows) for ntype, rows in inputs(block).items()}


class TrainingLoader(Positioned, Protocol):
    """The loader interface of :func:`train_epoch`.

    Its position has ``epoch`` and ``step``, the completed steps of it.
    """

    def __len__(self) -> int: ...
    def __iter__(self) -> Any: ...
    def times(self, *, reset: bool = False) -> LoaderTimes: ...


@dataclass(frozen=True, kw_only=True)
class Step:
    """Model, optimizers and task of a training step."""

    model: WrappedModel
    optimizer: torch.optim.Optimizer
    task: Task
    sparse: Sequence[SparseOptimizer] = ()
    """Optimisers of the model's input embeddings."""
    precision: str = FLOAT32
    """Of forward passes."""


def train_epoch(
    step: Step, loader: TrainingLoader, session: Session, epoch: int, after_step: Callable[[], None]
) -> EpochRecord:
    """Train one epoch and return its record, without a validation accuracy. Collective."""
    step.model.train()
    loader.times(reset=True)
    step.model.exchange_seconds(reset=True)
    before = session.ledger.snapshot()
    steps: list[tuple[Tensor, int | Tensor, int]] = []
    begin = time.perf_counter()
    for batch in loader:
        # Numbered like the loader's batches, so that a trace shows the batch of a step.
        position = loader.state_dict()
        number = position["epoch"] * len(loader) + position["step"] - 1
        found = _train_step(step, batch, partial(session.timeline.span, row=COMPUTE, batch=number))
        if found.num_targets:
            # The mean over no targets is nan, which would spoil the total.
            steps.append((found.loss.detach(), found.num_correct, found.num_targets))
        after_step()
    # Read at the end: each step would wait for the device.
    loss, correct, targets = 0.0, 0, 0
    for of_step, num_correct, num_targets in steps:
        loss += float(of_step) * num_targets
        correct += int(num_correct)
        targets += num_targets
    seconds = time.perf_counter() - begin
    rows = session.ledger.since(before)
    times = loader.times()
    local = {
        "loss": loss,
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
    return _over_ranks([row for row in gather_json(local, session) if isinstance(row, dict)], epoch)


def _train_step(step: Step, batch: Any, span: Callable[[str], AbstractContextManager[None]]) -> StepLoss:
    autocast: AbstractContextManager[Any] = nullcontext()
    if step.precision == BF16:
        autocast = torch.autocast(float_of(step.model).device.type, torch.bfloat16)
    with span("forward"), autocast:
        found = step.task(step.model, batch)
    step.optimizer.zero_grad(set_to_none=True)
    for rows in step.sparse:
        rows.zero_grad()
    with span("backward"):
        found.loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it bare
    with span("step"):
        step.optimizer.step()
        for rows in step.sparse:
            rows.step()
    return found


def _over_ranks(ranks: Sequence[dict[str, Any]], epoch: int) -> EpochRecord:
    """Sum counts and bytes; take the slowest rank's seconds, and phases as means over the ranks.

    Ranks in lock-step wait and exchange at different times, so the sum of the longest phases would exceed the
    epoch. Compute is the remainder.
    """

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


Options = TypeVar("Options", bound=RunOptions)

Callback = Callable[[EpochRecord], None]
"""Called on every rank after each epoch, with the same record."""

Evaluate = Callable[[WrappedModel], Mapping[str, float]]
"""The wrapped model to scores by mask name, higher is better, equal on all ranks. Collective."""

_, _VALIDATION, _TEST = SPLITS
TRAINED_WITH, PRECISION = "strategy", "precision"
"""Keys in ``extra`` of a checkpoint: name and options of the strategy, and the cache that ``auto`` chose; the
precision of forward passes."""


@dataclass(frozen=True, kw_only=True)
class FitConfig(RunOptions):
    """Configuration of :func:`train`, beside the options that ``dglx train`` has too; wrong: ConfigError."""

    checkpoint_folder: str | Path | None = None
    """Folder of checkpoints, shared by all ranks; None: none are saved."""
    feature: str = FEATURE
    label: str = LABEL
    loss: LossFunction = cross_entropy
    ntype: str | None = None
    """Type of the classified nodes; required if several node types have labels."""
    inputs: EntityInputs | None = None
    """Input rows by node type, from features and embeddings; None: ``feature`` of the only type."""
    task: Task | None = None
    """Replaces the node classification defined by the fields above."""
    evaluate: Evaluate | None = None
    """Replaces exact accuracy; a custom ``task`` is evaluated only by this."""
    eval_batch_size: int = 4096
    num_layers: int | None = None
    """For models without ``inference_layers()``: see :func:`dglx_dist.training.inference.evaluate`."""
    show_progress: bool = True
    """Progress bar of rank 0 on standard error."""

    def __post_init__(self) -> None:
        check_ranges(self, "{name}={value}")
        if self.patience is not None and self.eval_every == 0:
            raise ConfigError(
                f"patience={self.patience} counts evaluations; eval_every must be at least 1 too"
            )
        if self.resume and self.checkpoint_folder is None:
            raise ConfigError("resume needs checkpoint_folder; give the folder of the checkpoints")


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """Result of :func:`train`, equal on every rank."""

    epochs: list[EpochRecord] = field(default_factory=list)
    """Epochs of this call, without those before a resume."""
    accuracy: dict[str, float] = field(default_factory=dict)
    """Mask to exact accuracy after the last epoch."""
    best_epoch: int | None = None
    """Epoch of the highest validation accuracy; None without evaluation."""
    best_val_accuracy: float | None = None
    first_epoch: int = 0
    """Above 0 after a resume."""
    stopped_early: bool = False
    precision: str = FLOAT32
    """Of forward passes."""
    account: dict[str, object] = field(default_factory=dict)
    """Cost of the run, as ``dollars`` with a ``label``; empty if nothing is paid by use."""
    choice: Choice | None = None
    """Candidates of strategy ``auto``, with prediction and outcome; None: the strategy was given."""

    @property
    def val_accuracy(self) -> float | None:
        """Validation accuracy after the last epoch."""
        return self.accuracy.get(_VALIDATION)

    @property
    def test_accuracy(self) -> float | None:
        """Test accuracy after the last epoch."""
        return self.accuracy.get(_TEST)


def train(
    model: WrappedModel,
    loader: TrainingLoader,
    optimizer: torch.optim.Optimizer,
    g: DistGraph,
    config: FitConfig | None = None,
    *,
    callbacks: Sequence[Callback] = (),
    sparse: Sparse = None,
) -> FitResult:
    """Train ``model`` and evaluate it exactly. Collective.

    On as many ranks, a resumed run ends with bit-equal weights to one that was never interrupted.

    Args:
        model: The result of ``wrap``.
        loader: Yields ``(input_nodes, output_nodes, blocks)`` with features and labels attached, or batches
            for ``config.task``.
        optimizer: Over the wrapped model's parameters.
        g: The graph that the loader samples; evaluated on its masks.
        config: Defaults when not given.
        callbacks: Called after each epoch.
        sparse: Optimisers of embeddings, stepped and saved with ``optimizer``.

    Raises:
        ConfigError: the loader attaches no features or labels, or (before training) the model cannot be
            evaluated exactly.
        CheckpointError: the checkpoint to resume from does not match.
        StorageError: the trace cannot be written; before training if possible.
    """
    config = config or FitConfig()
    device = float_of(model).device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        raise ConfigError(
            "training inside torch.autocast would compute all steps with the weights of the first, which it "
            "keeps converted until its block ends; give precision='bf16' instead"
        )
    # Before anything is collective: ranks of other settings would wait for each other.
    shared = {one.name: getattr(config, one.name) for one in fields(RunOptions) if one.name != "trace"}
    of_groups = [{**group, "params": len(group["params"])} for group in optimizer.param_groups]
    check_equal(g.session, "the settings of training", {**shared, "optimizer": of_groups})
    config = with_precision(config, config.checkpoint_folder)
    check_precision(config.precision, strategy_of(g.session).traits, g.session.strategy)
    if config.task is None and config.ntype is None:
        config = replace(config, ntype=labelled_type(g, config.label))
    run = _Run(loader, g, config, _step_of(model, optimizer, sparse, config))
    run.resume()
    run.check_evaluation()
    steps = len(loader) * (config.epochs - run.result.first_epoch)
    enabled = config.show_progress and g.session.topology.rank == 0
    bar = progress(_progress_title(run.result.first_epoch, config.epochs), steps, enabled=enabled)
    trace = None if config.trace is None else Path(config.trace).absolute()
    with recording(trace, config.trace_steps, g.session) as count_step, bar as advance:

        def after_step() -> None:
            count_step()
            advance(1)

        account: dict[str, object] = {}
        show = advance.show if enabled else None
        trainer = model.trainer(loader, optimizer, _objective_of(config, sparse), show)
        with _closing(trainer):
            while run.has_epochs:
                for record in run.advance(trainer, after_step):
                    for callback in callbacks:
                        callback(record)
                    advance.say(epoch_line(record))
        if trainer is not None:
            account = trainer.account()
            advance.say(f"cost {account['text']}")
    return replace(run.result, account=account)


def with_precision(config: Options, checkpoints: str | Path | None) -> Options:
    """Return ``config`` with a precision: as given, else that of the checkpoint to resume. Collective."""
    if config.precision is not None:
        return config
    extra = checkpoint.read_extra(checkpoints) if config.resume and checkpoints is not None else None
    return replace(config, precision=BF16 if extra and extra.get(PRECISION) == BF16 else FLOAT32)


def check_precision(precision: str | None, traits: Traits, strategy: str) -> None:
    """Raise ConfigError unless forward passes under a strategy can have that precision; None: the default."""
    if precision == BF16 and not traits.own_loop:
        raise ConfigError(
            f"precision bf16: strategy {strategy!r} does not compute in torch but on workers, in the dtype "
            "of the weights; leave it out, or use strategy='data_parallel'"
        )


def epoch_line(record: EpochRecord) -> str:
    """Return ``epoch 3: loss 1.2345, val 84.1 %, 0.15 s``, without val if not evaluated."""
    validation = "" if record.val_accuracy is None else f"val {record.val_accuracy:.1%}, ".replace("%", " %")
    return f"epoch {record.epoch}: loss {record.loss:.4f}, {validation}{record.seconds:.2f} s"


def _progress_title(first: int, end: int) -> str:
    if first >= end:
        return f"nothing to train, {first} epochs are done"
    return f"training epoch {first}" if first + 1 == end else f"training epochs {first} to {end - 1}"


class _Run:
    """The state of one call of :func:`train`."""

    def __init__(self, loader: TrainingLoader, g: DistGraph, config: FitConfig, step: Step) -> None:
        self._loader, self._g, self._config, self._step = loader, g, config, step
        self._session: Session = g.session
        self._state: dict[str, Any] = {
            "model": step.model,
            "optimizer": step.optimizer,
            "sparse": step.sparse,
            "loader": loader,
            # Must be equal in the run that loads the checkpoint.
            "dataset": {"num_nodes": g.num_nodes(), "num_edges": g.num_edges()},
        }
        self.result = FitResult(precision=step.precision)
        """Of the epochs so far."""
        self._next, self._evaluations_since_best = 0, 0

    def resume(self) -> None:
        folder = self._config.checkpoint_folder
        if not self._config.resume or folder is None or not checkpoint.exists(folder):
            return
        resumed = checkpoint.load(folder, **self._state)
        self._next = resumed.epoch
        best = resumed.extra.get("best")
        self._evaluations_since_best = int(resumed.extra.get("evaluations_since_best", 0))
        self.result = FitResult(
            accuracy={str(name): float(value) for name, value in resumed.extra.get("accuracy", {}).items()},
            best_epoch=int(best[0]) if best else None,
            best_val_accuracy=float(best[1]) if best else None,
            first_epoch=resumed.epoch,
            stopped_early=self._patience_is_over(),
            precision=self._step.precision,
        )

    def check_evaluation(self) -> None:
        """Raise ConfigError before training if the evaluation after it is impossible."""
        if self.has_epochs and self._config.evaluate is None and self._config.task is None:
            check_evaluable(self._step.model, self._g, **self._evaluate_options)

    @property
    def has_epochs(self) -> bool:
        return self._next < self._config.epochs and not self.result.stopped_early

    def advance(self, trainer: EpochTrainer | None, after_step: Callable[[], None]) -> Sequence[EpochRecord]:
        """Train one epoch, or with a ``trainer`` those until the next stop; evaluate and save there."""
        before = self._g.kvstore.cache_counts()
        if trainer is None:
            found = [train_epoch(self._step, self._loader, self._session, self._next, after_step)]
        else:
            found = list(trainer.run(self._next, self._next_stop() - self._next))
            for _ in found:
                after_step()
        found[-1] = self._with_cache(found[-1], self._g.kvstore.cache_counts() - before)
        self._next += len(found)
        found[-1] = self._finish(found[-1])
        self.result.epochs.extend(found)
        if self._session.trace is not None:
            for record in found:
                self._session.trace.note_epoch(record)
        return found

    def _next_stop(self) -> int:
        config = self._config
        every = [config.eval_every] if config.eval_every else []
        every += [config.checkpoint_every] if config.checkpoint_folder is not None else []
        return min([config.epochs, *((self._next // number + 1) * number for number in every)])

    def _finish(self, record: EpochRecord) -> EpochRecord:
        config = self._config
        last = self._next == config.epochs
        if last or (config.eval_every and self._next % config.eval_every == 0):
            record = self._evaluate(record)
        last = last or self.result.stopped_early
        if config.checkpoint_folder is not None and (last or self._next % config.checkpoint_every == 0):
            self._save()
        return record

    def _with_cache(self, record: EpochRecord, counts: CacheCounts) -> EpochRecord:
        if not self._g.kvstore.has_cache:
            return record
        hits, misses = gather_int64([counts.hits, counts.misses], self._session).sum(axis=0).tolist()
        return replace(record, cache_hits=hits, cache_misses=misses)

    def _evaluate(self, record: EpochRecord) -> EpochRecord:
        config = self._config
        for rows in self._step.sparse:
            # With an asynchronous optimizer, other ranks may still be writing rows.
            rows.flush()
        accuracy = self.result.accuracy
        if config.evaluate is not None:
            accuracy = dict(config.evaluate(self._step.model))
        elif config.task is None:
            accuracy = evaluate(self._step.model, self._g, **self._evaluate_options)
        self.result = replace(self.result, accuracy=accuracy)
        validation, best = self.result.val_accuracy, self.result.best_val_accuracy
        if validation is None:
            return record
        if best is None or validation > best:
            self._evaluations_since_best = 0
            self.result = replace(self.result, best_epoch=record.epoch, best_val_accuracy=validation)
        else:
            self._evaluations_since_best += 1
            self.result = replace(self.result, stopped_early=self._patience_is_over())
        return replace(record, val_accuracy=validation)

    @property
    def _evaluate_options(self) -> dict[str, Any]:
        config = self._config
        options = {name: getattr(config, name) for name in ("feature", "label", "num_layers", "ntype")}
        inputs = None if config.inputs is None else config.inputs.tensors
        return {**options, "batch_size": config.eval_batch_size, "inputs": inputs}

    def _patience_is_over(self) -> bool:
        patience = self._config.patience
        return patience is not None and self._evaluations_since_best >= patience

    def _save(self) -> None:
        assert self._config.checkpoint_folder is not None
        best = (self.result.best_epoch, self.result.best_val_accuracy)
        checkpoint.save(
            self._config.checkpoint_folder,
            **self._state,
            epoch=self._next,
            extra={
                "best": None if best[0] is None else best,
                "evaluations_since_best": self._evaluations_since_best,
                "accuracy": self.result.accuracy,
                TRAINED_WITH: _trained_with(self._session),
                PRECISION: self.result.precision,
            },
        )


def _step_of(
    model: WrappedModel, optimizer: torch.optim.Optimizer, sparse: Sparse, config: FitConfig
) -> Step:
    task = config.task or NodeClassification(**common_fields(config, NodeClassification))
    precision = config.precision or FLOAT32
    return Step(
        model=model, optimizer=optimizer, task=task, sparse=optimizers_of(sparse), precision=precision
    )


def _objective_of(config: FitConfig, sparse: Sparse) -> Objective:
    beside = {"config.task": config.task, "config.inputs": config.inputs, "sparse": sparse}
    return Objective(
        loss=config.loss if config.task is None else None,
        feature=config.feature,
        label=config.label,
        beside=tuple(name for name, value in beside.items() if value is not None),
    )


@contextmanager
def _closing(trainer: EpochTrainer | None) -> Iterator[None]:
    # After an error, `close` must not wait for the other ranks.
    failed = True
    try:
        yield
        failed = False
    finally:
        if trainer is not None:
            trainer.close(failed=failed)


def _trained_with(session: Session) -> dict[str, object]:
    # Options for later runs, but none if they may have credentials or are not JSON.
    options: dict[str, object] | None = dict(session.options)
    try:
        if json.loads(json.dumps(without_keys(session.options))) != options:
            options = None
    except (TypeError, ValueError):
        options = None
    return {"name": session.strategy, "options": options, "cache": CACHE_CHOICE.of(session)}
