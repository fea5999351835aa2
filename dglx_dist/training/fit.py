"""Training loop: epochs, evaluation, early stopping, checkpoints, resume."""

from __future__ import annotations

import json
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import ReduceLROnPlateau

from dglx_dist.comm.collectives import check_equal, gather_json, run_on_all_ranks
from dglx_dist.comm.ledger import LedgerRow
from dglx_dist.comm.session import Session, current_session, shared_facts, warn_user
from dglx_dist.comm.topology import read_launch
from dglx_dist.comm.trace import COMPUTE
from dglx_dist.dataloading.step_loader import LoaderTimes
from dglx_dist.errors import ConfigError, Stopped
from dglx_dist.graph.optim import SparseOptimizer
from dglx_dist.options import check_ranges, common_fields
from dglx_dist.progress import Advance, progress
from dglx_dist.records import FEATURE, LABEL, SPLITS, EpochRecord
from dglx_dist.strategies.base import (
    CACHE_CHOICE,
    EpochTrainer,
    Objective,
    WrappedModel,
    float_of,
    strategy_of,
)
from dglx_dist.training import checkpoint, tracing
from dglx_dist.training.accumulate import Accumulation
from dglx_dist.training.checkpoint import Positioned, Sparse, optimizers_of
from dglx_dist.training.config import (
    AUTO_TASK,
    BF16,
    CLASSIFICATION,
    FLOAT32,
    LESS_IS_BETTER,
    METRICS_OF,
    REGRESSION,
    RunOptions,
    check_run,
    metrics_of,
    rate_at,
    steps_between,
)
from dglx_dist.training.exact_mean import make_exact
from dglx_dist.training.inference import EdgeNames, check_evaluable, evaluate, labelled_type
from dglx_dist.training.models import Layered
from dglx_dist.training.object_state import Stateful
from dglx_dist.training.relational import EntityInputs
from dglx_dist.training.replicas import check_replicas
from dglx_dist.training.resume import FACTS, LAUNCH, Progress, check_same, find_differences, resolve_resume
from dglx_dist.training.resume import PRECISION as PRECISION
from dglx_dist.training.tasks import LinkPrediction as LinkPrediction
from dglx_dist.training.tasks import (
    LossFunction,
    StepLoss,
    Task,
    class_weights,
    loss_of,
    moments,
    read_task,
    warn_of_guesses,
)
from dglx_dist.training.tasks import NodeClassification as NodeClassification
from dglx_dist.training.tracing import epoch_line as epoch_line
from dglx_dist.training.update_checks import SCHEDULER, Scheduler, check_loop, check_updates, is_scheduled
from dglx_dist.training.weights import BEST_WEIGHTS, FINAL_WEIGHTS, BestWeights, WeightFiles

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph
    from dglx_dist.planner.records import Choice


log = logging.getLogger(__name__)


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


Callback = Callable[[EpochRecord], None]
"""Called on every rank after each epoch, with the same record."""

Evaluate = Callable[[WrappedModel], Mapping[str, float]]
"""The wrapped model to metrics by name, equal on all ranks. Collective.

``val_mask`` and ``test_mask`` are accuracies, or another score of which more is better; others are recorded
under their names, as ``val_mrr``.
"""

_TRAIN, _VALIDATION, _TEST = SPLITS
_OF_UPDATES = ("class_weight", "schedule", "warmup", "clip_norm", "accumulate")
TRAINED_WITH = "strategy"
"""Key in ``extra`` of a checkpoint: name and options of the strategy, and the cache that ``auto`` chose."""


@dataclass(frozen=True, kw_only=True)
class FitConfig(RunOptions):
    """Configuration of :func:`train`, beside the options that ``dglx train`` has too; wrong: ConfigError."""

    checkpoint_folder: str | Path | None = None
    """Folder of checkpoints, shared by all ranks; None: none are saved."""
    weights_folder: str | Path | None = None
    """Folder for ``model.safetensors``, the weights of the best epoch by validation (without it of the last),
    and ``final.safetensors``, those of the last; None: none are written."""
    feature: str = FEATURE
    label: str = LABEL
    edge_feats: EdgeNames = ()
    """Edge data of the blocks in training and evaluation; (): that of the loader, if one is given."""
    loss: LossFunction | None = None
    """None: that of the task; cross-entropy, binary cross-entropy or squared error."""
    ntype: str | None = None
    """Type of the classified nodes; required if several node types have labels."""
    inputs: EntityInputs | None = None
    """Input rows by node type, from features and embeddings; None: ``feature`` of the only type."""
    task: Task | str | None = AUTO_TASK
    """``auto``, ``classification``, ``multilabel`` or ``regression``. Or a function, which replaces the node
    task defined by the fields above; ``metric`` are then names of ``evaluate``."""
    evaluate: Evaluate | None = None
    """Replaces exact accuracy; a custom ``task`` is evaluated only by this."""
    eval_batch_size: int = 4096
    configuration: Mapping[str, object] = field(default_factory=dict)
    """More facts, JSON values, that must be the same where a run is resumed from a checkpoint found."""
    on_begin: Callable[[], None] | None = None
    """Called on all ranks once the checkpoint is loaded, before the first step; not without epochs to do."""
    num_layers: int | None = None
    """For models without ``inference_layers()``: see :func:`dglx_dist.training.inference.evaluate`."""
    show_progress: bool = True
    """Progress bar of rank 0 on standard error."""

    def __post_init__(self) -> None:
        if self.task is None:
            object.__setattr__(self, "task", AUTO_TASK)
        check_ranges(self, "{name}={value}")
        check_run(self)
        if self.resume and self.checkpoint_folder is None:
            raise ConfigError("resume needs checkpoint_folder; give the folder of the checkpoints")

    @property
    def own_task(self) -> Task | None:
        """The function that replaces the node task."""
        return None if isinstance(self.task, str) else self.task


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """Result of :func:`train`, equal on every rank."""

    epochs: list[EpochRecord] = field(default_factory=list)
    """Epochs of this call, without those before a resume."""
    accuracy: dict[str, float] = field(default_factory=dict)
    """Mask to exact accuracy after the last epoch; of the best one, if there is ``patience``."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Exact metrics of the same epoch, as ``test_f1_micro``."""
    task: str = "own"
    """Of nodes; ``own``: a function of the user."""
    best_epoch: int | None = None
    """Epoch of the best first metric of validation; None without evaluation."""
    best_val_accuracy: float | None = None
    """That metric, whichever it is."""
    first_epoch: int = 0
    """Above 0 after a resume."""
    stopped_early: bool = False
    precision: str = FLOAT32
    """Of forward passes."""
    account: dict[str, object] = field(default_factory=dict)
    """Cost of the run, as ``dollars`` with a ``label``; empty if nothing is paid by use."""
    traffic: dict[str, list[list[int]]] = field(default_factory=dict)
    """Payload of training in this call: phase -> [source rank, destination rank, bytes], where a rank -1 is a
    worker. Its sum is that of ``bytes_inside`` and ``bytes_outside``; of an epoch begun earlier, the rest."""
    choice: Choice | None = None
    """Candidates of strategy ``auto``, with prediction and outcome; None: the strategy was given."""

    @property
    def val_accuracy(self) -> float | None:
        """Validation accuracy, of the epoch of ``accuracy``."""
        return self.accuracy.get(_VALIDATION)

    @property
    def test_accuracy(self) -> float | None:
        """Test accuracy, of the epoch of ``accuracy``."""
        return self.accuracy.get(_TEST)


def train(  # noqa: PLR0913 - all but four have defaults
    model: WrappedModel,
    loader: TrainingLoader,
    optimizer: torch.optim.Optimizer,
    g: DistGraph,
    config: FitConfig | None = None,
    *,
    callbacks: Sequence[Callback] = (),
    sparse: Sparse = None,
    scheduler: Scheduler | None = None,
    state: Mapping[str, Stateful] | None = None,
) -> FitResult:
    """Train ``model`` and evaluate it exactly. Collective.

    Resumes from the newest checkpoint in ``config.checkpoint_folder``, if there is one. On as many ranks,
    that ends with bit-equal weights to a run that was never interrupted. With the folder, SIGTERM, SIGUSR1
    and Ctrl-C save a checkpoint after the step and raise :class:`Stopped` on all ranks.

    Args:
        model: Of :func:`dglx_dist.wrap`.
        loader: Yields ``(input_nodes, output_nodes, blocks)`` with features and labels attached, or batches
            for ``config.task``.
        optimizer: Over the parameters of ``model``.
        g: The graph that the loader samples; evaluated on its masks.
        config, callbacks: As of :func:`dglx_dist.fit`.
        sparse: Optimisers of embeddings, stepped and saved with ``optimizer``.
        scheduler: Of ``optimizer``, stepped after each epoch; a ``ReduceLROnPlateau`` after each evaluation,
            with the first metric of validation. Saved and resumed.
        state: More objects that checkpoints save, as of :func:`dglx_dist.save`.

    Raises:
        ConfigError: the loader attaches no features or labels, or (before training) the model cannot be
            evaluated exactly, or the checkpoints are of another configuration.
        CheckpointError: the checkpoint to resume from does not match.
        StorageError: the trace cannot be written; before training if possible.
        Stopped: a rank was told to end.
    """
    config = config or FitConfig()
    device = float_of(model).device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        raise ConfigError(
            "inside torch.autocast, the evaluation would not be exact, and what was trained be recorded as "
            "float32; end its block before, and give precision='bf16' instead"
        )
    config = resolve_resume(config, config.checkpoint_folder, g.session)
    of_groups = [{**group, "params": len(group["params"])} for group in optimizer.param_groups]
    check_equal(g.session, "the settings of the optimizer", of_groups)
    config = _with_exact_loss(_with_task(config, g, model.module), g, is_own=config.loss is not None)
    check_loop(config, strategy_of(g.session).traits, g.session.strategy, scheduler)
    facts = _facts(g, config, optimizer)
    check_updates(
        config,
        model,
        scheduler,
        state or {},
        optimizers_of(sparse),
        has_own_evaluation=config.evaluate is not None,
        steps_of_epoch=len(loader),
    )
    objects = {**(state or {}), **({} if scheduler is None else {SCHEDULER: scheduler})}
    run = _Run(loader, g, config, _step_of(model, optimizer, sparse, config), facts, objects)
    run.resume()
    run.check_evaluation()
    run.files.begin(run.result.best_epoch)
    enabled = config.show_progress and g.session.topology.rank == 0 and run.has_epochs
    with (
        tracing.scalars_writer(config.tensorboard, run.result.first_epoch, g.session) as write,
        _started(g.session, config, is_over=not run.has_epochs),
        tracing.recording(config.trace, config.trace_steps, g.session) as count_step,
        _progress_of(run, loader, config, g.session, enabled=enabled) as advance,
    ):

        def after_step() -> None:
            count_step()
            advance(1)

        show = advance.show if enabled else None
        trainer = model.trainer(loader, optimizer, _objective_of(config, sparse), show)
        with _closing(run):
            with _closing(trainer):
                while run.has_epochs and not run.is_stopped:
                    for record in run.advance(trainer, after_step):
                        for callback in (write, *callbacks):
                            callback(record)
                        advance.say(epoch_line(record))
            run.leave()
        account = {} if trainer is None else trainer.account()
        if account:
            advance.say(f"cost {account['text']}")
    if run.is_stopped:
        raise run.stopped()
    of_test = {"test_accuracy": run.result.accuracy[_TEST]} if _TEST in run.result.accuracy else {}
    warn_of_guesses(run.result.task, run.result.metrics | of_test, g, str(config.ntype), config.label)
    return replace(run.result, account=account, traffic=tracing.traffic_of(run.sent, g.session))


def _with_task(config: FitConfig, g: DistGraph, module: nn.Module) -> FitConfig:
    """Return ``config`` with task, loss, metrics, node type; standardise a regression's model. Collective."""
    if not isinstance(config.task, str):
        return config
    ntype = labelled_type(g, config.label) if config.ntype is None else config.ntype
    if config.class_weight != "none" and config.loss is not None:
        raise ConfigError("class_weight is for the task's own loss; leave loss or class_weight out")
    if config.loss is not None and config.evaluate is not None:
        return replace(config, ntype=ntype)  # They take any labels.
    task, _ = read_task(g, ntype, config.label, config.task)
    weights = None if config.class_weight == "none" else class_weights(g, ntype, config.label, task)
    has_targets = {config.label, _TRAIN} <= g.nodes[ntype].data.keys()
    if task == REGRESSION and has_targets and config.loss is None and isinstance(module, Layered):
        mean, deviation = moments(g, ntype, config.label, _TRAIN)
        weights = torch.where(deviation > 0, deviation, 1.0).to(float_of(module).device)
        module.standardise(mean.to(weights), weights)
    metric = config.metric if config.evaluate else metrics_of(task, config.metric)
    return replace(config, ntype=ntype, task=task, metric=metric, loss=config.loss or loss_of(task, weights))


def _with_exact_loss(config: FitConfig, g: DistGraph, *, is_own: bool) -> FitConfig:
    if config.own_task is not None or not strategy_of(g.session).traits.own_loop:
        return config
    return replace(config, loss=make_exact(config.loss, g, str(config.ntype), config.label, is_own=is_own))


@contextmanager
def _started(session: Session, config: FitConfig, *, is_over: bool) -> Iterator[None]:
    # What rank 0 says after this, such as that training starts, is true of all ranks: they can be stopped.
    with nullcontext() if config.checkpoint_folder is None else session.stoppable():
        run_on_all_ranks(session, (lambda: None) if is_over or not config.on_begin else config.on_begin)
        yield


def _facts(g: DistGraph, config: FitConfig, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """Return what a run must have in common with the one that it resumes, JSON values."""
    session = g.session
    options = shared_facts(session.strategy, tracing.without_keys(session.options), session.seed, curve=False)
    groups = {
        f"optimizer.{number}.{name}": _plain(value)
        for number, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if name != "params"
    }
    return {
        "dataset": g.dataset.manifest.checksum,
        **{name: getattr(config, name) for name in ("feature", "label", "ntype")},
        **config.configuration,
        **{name: options[name] for name in ("strategy", "options", "seed")},
        "precision": config.precision,
        "task": config.task if isinstance(config.task, str) else "own",
        **{name: getattr(config, name) for name in _OF_UPDATES},
        # A schedule of more epochs has other rates from the first one on.
        **({"epochs": config.epochs} if is_scheduled(config) else {}),
        "optimizer": type(optimizer).__name__,
        **groups,
    }


def _plain(value: object) -> object:
    if isinstance(value, Tensor):
        return value.tolist()
    return value if isinstance(value, bool | int | float | str | None) else repr(value)


def _progress_of(
    run: _Run, loader: TrainingLoader, config: FitConfig, session: Session, *, enabled: bool
) -> AbstractContextManager[Advance]:
    first, end = run.result.first_epoch, config.epochs
    title = f"training epoch {first}" if first + 1 == end else f"training epochs {first} to {end - 1}"
    done, total = len(loader) * first + run.first_step, len(loader) * end

    def figures(num_done: float, speed: float) -> dict[str, str]:
        step = done + int(num_done)
        return tracing.live_figures(step, total, len(loader), speed, run.result.epochs, session)

    return progress(title, total - done, enabled=enabled, figures=figures if config.watch else None)


class _Run:
    def __init__(
        self,
        loader: TrainingLoader,
        g: DistGraph,
        config: FitConfig,
        step: Step,
        facts: Mapping[str, object],
        objects: Mapping[str, Any],
    ) -> None:
        self._loader, self._g, self._config, self._step = loader, g, config, step
        self._facts = facts
        self._session: Session = g.session
        self._state = checkpoint.RunState(
            model=step.model,
            optimizer=step.optimizer,
            sparse=step.sparse,
            loader=loader,
            # Must be equal in the run that loads the checkpoint.
            dataset={"num_nodes": g.num_nodes(), "num_edges": g.num_edges()},
            state=objects,
        )
        self._scheduler = objects.get(SCHEDULER)
        self.files = WeightFiles(config.weights_folder, step.model)
        folder, every = config.checkpoint_folder, steps_between(config.checkpoint_every, len(loader))
        # Of checkpoints that are there for the best epoch alone, the others are of no use.
        keep = config.keep or (1 if config.patience and not every else None)
        self._writer = None if folder is None else checkpoint.CheckpointWriter(folder, self._state, keep)
        self._deciding = config.metric[0] if config.metric else ""
        self._task = config.task if isinstance(config.task, str) else "own"
        self.result = FitResult(precision=step.precision, task=self._task)
        """Of the epochs so far."""
        self._next, self._evaluations_since_best = 0, 0
        self._so_far: dict[str, float] = {}
        """Of the epoch ``_next``, before the loader's position."""
        self._best: tuple[BestWeights, FitResult | Progress] | None = None
        """Where no folder has them: weights of the best epoch, and its results."""
        self.sent = Counter[tracing.Pair]()
        """Bytes of this rank's ledger in training so far."""
        self._steps_between = 0 if folder is None else every
        """Of regular checkpoints; 0: none."""
        self._saved_at: tuple[int, int] | None = None
        """Epoch and step of the newest checkpoint."""
        self._is_warned = False
        self.first_step = 0
        """Of the first epoch."""

    def resume(self) -> None:
        config, folder = self._config, self._config.checkpoint_folder
        if folder is not None and config.overwrite:
            checkpoint.remove_all(folder)
        # Checked before anything is loaded.
        if not config.resume or folder is None or (extra := checkpoint.read_extra(folder, Progress)) is None:
            return
        if config.goes_on:
            check_same(extra, self._facts, folder)
        resumed = checkpoint.load(folder, **vars(self._state), which="newest")
        if self._session.topology.rank == 0:
            differ = find_differences(extra, self._facts)
            kept = f" of another configuration ({differ}); the optimizer's settings are its own"
            log.warning("going on from %s%s", resumed.path, kept if differ else "")
        saved, self._saved_at = Progress(resumed.extra), (resumed.epoch, resumed.step)
        self._next, self._evaluations_since_best = resumed.epoch, saved.evaluations_since_best
        best = saved.best
        if not self._is_comparable(saved, folder):
            best, self._evaluations_since_best = (None, None), 0
        self.first_step = resumed.step
        if resumed.step:
            self._so_far = saved.so_far[self._session.topology.rank]
        self.result = FitResult(
            accuracy=saved.accuracy,
            metrics=saved.metrics,
            task=self._task,
            best_epoch=best[0],
            best_val_accuracy=best[1],
            first_epoch=resumed.epoch,
            stopped_early=self._patience_is_over(),
            precision=self._step.precision,
        )
        if not self.has_epochs and self._session.topology.rank == 0:
            log.warning("nothing to train: %d epochs are done", self._next)

    def _is_comparable(self, saved: Progress, folder: str | Path) -> bool:
        """Whether the best epoch so far is by the same metric, and its weights are there. Collective."""
        if saved.best[0] is None:
            return True
        problem = ""
        if saved.deciding not in (None, self._deciding):
            problem = f"by {saved.deciding}, and {self._deciding or 'the accuracy'} decides now"
        elif self._config.patience is not None:
            extra = checkpoint.read_extra(self._path_of(saved.best[0]), Progress)
            if extra is None or str(Progress(extra).best) != str(saved.best):
                problem = f"and {folder} does not have its weights"
        if problem and self._session.topology.rank == 0:
            log.warning("epoch %d was the best, %s: the best is now of later ones", saved.best[0], problem)
        return not problem

    def _path_of(self, epoch: int) -> Path:
        assert self._config.checkpoint_folder is not None
        return Path(self._config.checkpoint_folder) / checkpoint.folder_name(epoch + 1)

    def check_evaluation(self) -> None:
        if not self.has_epochs or self._config.evaluate is not None:
            return
        if is_node_task := self._config.own_task is None:
            check_evaluable(self._step.model, self._g, self._evaluate_options)
        if not is_node_task or _VALIDATION not in self._g.nodes[str(self._config.ntype)].data:
            self._check_patience()

    def _check_patience(self) -> None:
        if (patience := self._config.patience) is not None:
            is_measured = self._config.own_task is None or self._config.evaluate is not None
            remedy = "partition with a val_mask" if is_measured else "give evaluate="
            raise ConfigError(f"--early-stop {patience} lacks validation targets; leave it out, or {remedy}")

    @property
    def is_stopped(self) -> bool:
        return self._config.checkpoint_folder is not None and self._session.stop_point.is_over

    def leave(self) -> None:
        """End training; save it if stopped, else go back to the best epoch if ``patience``; collective."""
        self._session.stop_point.close()
        if not self.is_stopped:
            self.files.write(FINAL_WEIGHTS, self._next - 1)
            shown_epoch = self._next - 1 if self._config.patience is None else self._load_best()
            self.files.complete(shown_epoch, self.result.best_epoch)
        step = int(self._loader.state_dict()["step"])
        if self.is_stopped and self._saved_at != (self._next, step):
            self._save(step, wait=True)

    def _load_best(self) -> int:
        epoch = self.result.best_epoch
        if epoch is None or epoch == self._next - 1:
            return self._next - 1
        if self._writer is None:
            assert self._best is not None
            weights, scores = self._best
            weights.load()
        else:
            self._writer.wait()
            model, rows = self._step.model, self._step.sparse
            found = checkpoint.load(self._path_of(epoch), model=model, sparse=rows, random_state=False)
            scores = Progress(found.extra)
        self.result = replace(self.result, accuracy=scores.accuracy, metrics=scores.metrics)
        return epoch

    def stopped(self) -> Stopped:
        found = Stopped(*(self._saved_at or (self._next, 0)), self._config.checkpoint_folder)
        if self._session.topology.rank == 0:
            log.warning("%s", found)
        return found

    @property
    def has_epochs(self) -> bool:
        return self._next < self._config.epochs and not self.result.stopped_early

    def advance(self, trainer: EpochTrainer | None, after_step: Callable[[], None]) -> Sequence[EpochRecord]:
        """Train one epoch, or with a ``trainer`` those until the next stop; evaluate and save there."""
        if trainer is None:
            if (record := self._train_epoch(after_step)) is None:
                return []
            found = [record]
        else:
            found, rows = trainer.run(self._next, self._next_stop() - self._next)
            self._count(rows)
            for _ in found:
                after_step()
        self._next += len(found)
        own = dict(self._step.model.module.named_parameters())
        check_replicas({name: own[name] for name in self._step.model.parts.replicated}, self._session)
        found[-1] = self._finish(found[-1])
        self.result.epochs.extend(found)
        if any(math.isnan(record.loss) for record in found) and not self._is_warned:
            self._is_warned = True
            warn_user(
                f"the training loss of epoch {found[-1].epoch} is NaN: look for seeds without a target, "
                "features that are not finite, and a learning rate that is too large"
            )
        if self._session.trace is not None:
            for record in found:
                self._session.trace.note_epoch(record)
        return found

    def _train_epoch(self, after_step: Callable[[], None]) -> EpochRecord | None:
        """Train the rest of the next epoch, with its checkpoints on the way; None: stopped inside of it."""
        stop_point, overlaps = self._session.stop_point, self._step.model.overlaps_steps

        def after_each() -> None:
            after_step()
            if not overlaps and stop_point.passed():
                self._end_at(self._loader.state_dict()["step"])

        while True:
            if self._steps_between:
                done = self._next * len(self._loader) + self._loader.state_dict()["step"]
                due = (done // self._steps_between + 1) * self._steps_between
                # A pass that ends there has no batches in flight or made ahead: bits and bytes are those of
                # the run that resumes.
                self._end_at(due - self._next * len(self._loader))
            before = self._g.kvstore.cache_counts()
            found, rows = train_pass(self._step, self._loader, self._session, after_each, self._so_far)
            self._count(rows)
            counts = self._g.kvstore.cache_counts() - before
            hits, misses = (self._so_far.get(name, 0) for name in ("hits", "misses"))
            self._so_far |= {**found, "hits": hits + counts.hits, "misses": misses + counts.misses}
            if overlaps:
                stop_point.passed()
            if not (step := self._loader.state_dict()["step"]):
                break
            if self.is_stopped:
                return None
            pause = self._save(step)
            self._so_far = {**self._so_far, "checkpoint_s": self._so_far.get("checkpoint_s", 0) + pause}
        figures, self._so_far = self._so_far, {}
        record = tracing.over_ranks(gather_json(figures, self._session), self._next)
        has_classes = self._task == CLASSIFICATION or self._task not in METRICS_OF
        return record if has_classes else replace(record, train_accuracy=math.nan)

    def _end_at(self, step: int) -> None:
        # Checkpoints do not have gradients of batches before the step of the optimizer.
        self._loader.end_at(self._step.accumulation.end_of(step, len(self._loader)))

    def _count(self, rows: Sequence[LedgerRow]) -> None:
        for row in rows:
            self.sent[row.phase, row.source, row.destination] += row.num_bytes

    def _next_stop(self) -> int:
        # The loader of a trainer has one step an epoch.
        config = self._config
        every = [number for number in (config.eval_every, self._steps_between) if number]
        return min([config.epochs, *((self._next // number + 1) * number for number in every)])

    def _finish(self, record: EpochRecord) -> EpochRecord:
        config = self._config
        last = self._next == config.epochs
        if last or (config.eval_every and self._next % config.eval_every == 0):
            record = self._evaluate(record)
        last = last or self.result.stopped_early
        if self._scheduler is not None and not isinstance(self._scheduler, ReduceLROnPlateau):
            self._scheduler.step()
        self._session.stop_point.passed()
        # Else the checkpoint that a resumed run began with would stay its newest one.
        saves, every = self._steps_between or self._saved_at is not None, self._steps_between or math.inf
        is_best = self._writer is not None and config.patience and self.result.best_epoch == record.epoch
        if is_best or (saves and (last or self._next * len(self._loader) % every == 0)):
            pauses = gather_json(self._save(wait=last), self._session)
            record = replace(record, checkpoint_s=record.checkpoint_s + max(pauses))
        return record

    def _evaluate(self, record: EpochRecord) -> EpochRecord:
        config = self._config
        for rows in self._step.sparse:
            # With an asynchronous optimizer, other ranks may still be writing rows.
            rows.flush()
        accuracy, metrics = self.result.accuracy, self.result.metrics
        if config.evaluate is not None or config.own_task is None:
            model, options = self._step.model, self._evaluate_options
            found = config.evaluate(model) if config.evaluate else evaluate(model, self._g, **options)
            metrics = {name: value for name, value in found.items() if not name.endswith("_mask")}
            accuracy = {name: value for name, value in found.items() if name.endswith("_mask")}
            of_validation = accuracy.get(_VALIDATION, metrics.get("val_accuracy"))
            record = replace(record, metrics=metrics, val_accuracy=of_validation)
        self.result = replace(self.result, accuracy=accuracy, metrics=metrics)
        validation = metrics.get(f"val_{self._deciding}", accuracy.get(_VALIDATION))
        if validation is None:
            self._check_patience()
            return record
        if isinstance(self._scheduler, ReduceLROnPlateau):
            self._scheduler.step(validation)
        best, sign = self.result.best_val_accuracy, -1 if self._deciding in LESS_IS_BETTER else 1
        was_nan = best is not None and math.isnan(best) and not math.isnan(validation)
        if best is None or was_nan or sign * validation > sign * best:
            self._evaluations_since_best = 0
            self.result = replace(self.result, best_epoch=record.epoch, best_val_accuracy=validation)
            self.files.write(BEST_WEIGHTS, record.epoch)
            if config.patience is not None and self._writer is None:
                self._best = BestWeights(self._step.model, self._step.sparse), self.result
        else:
            self._evaluations_since_best += 1
            self.result = replace(self.result, stopped_early=self._patience_is_over())
        return record

    @property
    def _evaluate_options(self) -> dict[str, Any]:
        config = self._config
        options = {
            name: getattr(config, name) for name in ("feature", "label", "num_layers", "ntype", "edge_feats")
        }
        inputs = None if config.inputs is None else config.inputs.tensors
        options |= {"batch_size": config.eval_batch_size, "inputs": inputs, "task": config.task}
        return {**options, "metrics": config.metric}

    def _patience_is_over(self) -> bool:
        patience = self._config.patience
        return patience is not None and self._evaluations_since_best >= patience

    def close(self, *, failed: bool) -> None:
        """Wait for the last checkpoint, unless training ``failed``: it may never be complete then."""
        self._step.set_rates(1.0)
        if self._writer is not None:
            self._writer.abandon() if failed else self._writer.wait()

    def _save(self, step: int = 0, *, wait: bool = False) -> float:
        """Save after ``step`` steps of the next epoch, where the loader's pass has ended; collective.

        Returns the seconds for which training stood still. With ``wait`` the checkpoint is then complete.
        """
        assert self._writer is not None
        begin = time.perf_counter()
        best = (self.result.best_epoch, self.result.best_val_accuracy)
        self._writer.wait()  # It reads what it spares.
        self._writer.spared = None if best[0] is None or not self._config.patience else self._path_of(best[0])
        self._writer.save(
            epoch=self._next,
            step=step,
            extra={
                "best": None if best[0] is None else best,
                "deciding": self._deciding,
                "evaluations_since_best": self._evaluations_since_best,
                "accuracy": self.result.accuracy,
                "metrics": self.result.metrics,
                "so_far": gather_json(self._so_far, self._session) if step else [],
                TRAINED_WITH: _trained_with(self._session),
                PRECISION: self.result.precision,
                FACTS: self._facts,
                LAUNCH: read_launch()[0],
            },
            wait=wait,
        )
        self._saved_at = (self._next, step)
        return time.perf_counter() - begin


def _step_of(
    model: WrappedModel, optimizer: torch.optim.Optimizer, sparse: Sparse, config: FitConfig
) -> Step:
    options = common_fields(config, NodeClassification) | {"loss": config.loss or cross_entropy}
    task = config.own_task or NodeClassification(**options)
    rows = optimizers_of(sparse)
    return Step(
        model=model,
        optimizer=optimizer,
        task=task,
        sparse=rows,
        rates=[*(group["lr"] for group in optimizer.param_groups), *(one.lr for one in rows)],
        precision=config.precision or FLOAT32,
        accumulation=Accumulation(config.accumulate, current_session()),
        clip_norm=config.clip_norm,
        schedule=config if is_scheduled(config) else None,
    )


def _objective_of(config: FitConfig, sparse: Sparse) -> Objective:
    beside = {"config.task": config.own_task, "config.inputs": config.inputs, "sparse": sparse}
    return Objective(
        loss=(config.loss or cross_entropy) if config.own_task is None else None,
        feature=config.feature,
        label=config.label,
        beside=tuple(name for name, value in beside.items() if value is not None),
    )


@contextmanager
def _closing(open_one: EpochTrainer | _Run | None) -> Iterator[None]:
    # After an error, `close` must not wait for the other ranks.
    failed = True
    try:
        yield
        failed = False
    finally:
        if open_one is not None:
            open_one.close(failed=failed)


def _trained_with(session: Session) -> dict[str, object]:
    # Options for later runs, but none if they may have credentials or are not JSON.
    options: dict[str, object] | None = dict(session.options)
    try:
        if json.loads(json.dumps(tracing.without_keys(session.options))) != options:
            options = None
    except (TypeError, ValueError):
        options = None
    return {"name": session.strategy, "options": options, "cache": CACHE_CHOICE.of(session)}
