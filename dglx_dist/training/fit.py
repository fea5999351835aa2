"""``train`` prepares a run and loops over its epochs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from dglx_dist.comm.collectives import check_equal, run_on_all_ranks
from dglx_dist.comm.session import Session, current_session
from dglx_dist.dataloading.subgraphs import SubgraphLoader
from dglx_dist.errors import ConfigError
from dglx_dist.options import select_common_fields
from dglx_dist.progress import Advance, progress
from dglx_dist.records import TEST, TRAIN
from dglx_dist.strategies.base import (
    EpochTrainer,
    Objective,
    WrappedModel,
    find_float_parameter,
    get_strategy,
)
from dglx_dist.training import tracing
from dglx_dist.training.checkpoint import Sparse, list_optimizers
from dglx_dist.training.config import FLOAT32, REGRESSION, compute_rate_factor, list_metrics
from dglx_dist.training.exact_mean import make_exact
from dglx_dist.training.fit_config import (
    SCHEDULER,
    Callback,
    FitConfig,
    FitResult,
    Scheduler,
    check_loop,
    check_updates,
    is_scheduled,
)
from dglx_dist.training.inference import find_labelled_type
from dglx_dist.training.loop import Accumulation, Step, TrainingLoader, TrainingRun
from dglx_dist.training.models import Layered
from dglx_dist.training.object_state import Stateful
from dglx_dist.training.resume import describe_run, resolve_resume
from dglx_dist.training.tasks import (
    NodeClassification,
    choose_loss,
    compute_class_weights,
    compute_moments,
    read_task,
    warn_of_guesses,
)

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph


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
    """Train ``model`` and evaluate it exactly. Every rank must call this.

    If ``config.checkpoint_folder`` has checkpoints, training resumes from the newest one. On the same number
    of ranks, the weights are then bit-equal to those after an uninterrupted run. While training writes to
    that folder, SIGTERM, SIGUSR1 and Ctrl-C save a checkpoint after the current step and raise
    :class:`Stopped` on all ranks.

    Args:
        model: Result of :func:`dglx_dist.wrap`.
        loader: Yields ``(input_nodes, output_nodes, blocks)`` with features and labels attached, or batches
            for ``config.task``.
        optimizer: Optimizer over the parameters of ``model``.
        g: The graph that the loader samples. The model is evaluated on its masks.
        config: See :func:`dglx_dist.fit`, also for ``callbacks``.
        sparse: Optimizers for embeddings, stepped and saved with ``optimizer``.
        scheduler: Scheduler for ``optimizer``, stepped after each epoch. A ``ReduceLROnPlateau`` is stepped
            with the first validation metric after each evaluation. Checkpoints save it.
        state: More objects that checkpoints save, see :func:`dglx_dist.save`.

    Raises:
        ConfigError: the loader attaches no features or labels. Before training, also if the model cannot be
            evaluated exactly, or the checkpoints belong to another configuration.
        CheckpointError: the checkpoint to resume from does not match.
        StorageError: the trace cannot be written. This is raised before training if possible.
        Stopped: a rank received a signal to stop.
    """
    config = config or FitConfig()
    _refuse_unsupported(model, loader)
    config = resolve_resume(config, config.checkpoint_folder, g.session)
    groups = [{**group, "params": len(group["params"])} for group in optimizer.param_groups]
    check_equal(g.session, "the settings of the optimizer", groups)
    resolved_config = _resolve_task(config, g, model.module)
    config = _use_exact_loss(resolved_config, g, is_own=config.loss is not None)

    check_loop(config, get_strategy(g.session).traits, g.session.strategy)
    facts = describe_run(g, config, optimizer)
    objects = dict(state or {})
    check_updates(
        config,
        model,
        scheduler,
        objects,
        list_optimizers(sparse),
        has_own_evaluation=config.evaluate is not None,
        steps_of_epoch=len(loader),
    )
    if scheduler is not None:
        objects[SCHEDULER] = scheduler

    run = TrainingRun(loader, g, config, _make_step(model, optimizer, sparse, config), facts, objects)
    run.resume()
    run.check_evaluation()
    run.files.begin(run.result.best_epoch)
    shows_progress = config.show_progress and g.session.topology.rank == 0 and run.has_epochs
    with (
        tracing.open_scalars_writer(config.tensorboard, run.result.first_epoch, g.session) as write_scalars,
        _begin_run(g.session, config, is_over=not run.has_epochs),
        tracing.record_steps(config.trace, config.trace_steps, g.session) as count_step,
        _show_progress(run, loader, config, g.session, enabled=shows_progress) as advance,
    ):

        def after_step() -> None:
            count_step()
            advance(1)

        show = advance.show if shows_progress else None
        trainer = model.trainer(loader, optimizer, _make_objective(config, sparse), show)
        with _closing(run):
            with _closing(trainer):
                while run.has_epochs and not run.is_stopped:
                    for record in run.advance(trainer, after_step):
                        for callback in (write_scalars, *callbacks):
                            callback(record)
                        advance.say(tracing.format_epoch(record))
            run.leave()

        account = {} if trainer is None else trainer.account()
        if account:
            advance.say(f"cost {account['text']}")

    if run.is_stopped:
        raise run.make_stop_error()
    test = {"test_accuracy": run.result.accuracy[TEST]} if TEST in run.result.accuracy else {}
    warn_of_guesses(run.result.task, run.result.metrics | test, g, str(config.ntype), config.label)
    return replace(run.result, account=account, traffic=tracing.list_traffic(run.sent, g.session))


def _refuse_unsupported(model: WrappedModel, loader: TrainingLoader) -> None:
    """Raise ConfigError if the loader yields no blocks, or autocast is on for the model's device."""
    if isinstance(loader, SubgraphLoader):
        raise ConfigError(
            "dx.fit trains on blocks, but this loader yields graphs. Write your own loop, or use "
            "NeighborSampler."
        )

    device = find_float_parameter(model).device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        raise ConfigError(
            "inside torch.autocast the evaluation would not be exact, and the run would be recorded as "
            "float32. Call it outside of that block, with precision='bf16'."
        )


def _resolve_task(config: FitConfig, g: DistGraph, module: nn.Module) -> FitConfig:
    """Return ``config`` with the task, loss and metrics that the labels ask for. Every rank must call this.

    For a regression, also make ``module`` learn standardised targets.
    """
    if not isinstance(config.task, str):
        return config
    ntype = find_labelled_type(g, config.label) if config.ntype is None else config.ntype
    if config.class_weight != "none" and config.loss is not None:
        raise ConfigError("class_weight applies to the task's own loss only. Leave loss or class_weight out.")
    if config.loss is not None and config.evaluate is not None:
        # The user passes both loss and evaluation, so labels of any kind are fine.
        return replace(config, ntype=ntype)

    task, _ = read_task(g, ntype, config.label, config.task)
    weights = None
    if config.class_weight != "none":
        weights = compute_class_weights(g, ntype, config.label, task)
    has_targets = {config.label, TRAIN} <= g.nodes[ntype].data.keys()
    if task == REGRESSION and has_targets and config.loss is None and isinstance(module, Layered):
        mean, deviation = compute_moments(g, ntype, config.label, TRAIN)
        # If all targets are equal, their deviation is 0, and the error cannot be divided by it.
        weights = torch.where(deviation > 0, deviation, 1.0).to(find_float_parameter(module).device)
        module.standardise(mean.to(weights), weights)

    metric = config.metric
    if config.evaluate is None:
        metric = list_metrics(task, config.metric)
    loss = config.loss or choose_loss(task, weights)
    return replace(config, ntype=ntype, task=task, metric=metric, loss=loss)


def _use_exact_loss(config: FitConfig, g: DistGraph, *, is_own: bool) -> FitConfig:
    """Return ``config`` with the loss from :func:`make_exact`. ``is_own``: the user has passed the loss."""
    if config.own_task is not None or not get_strategy(g.session).traits.own_loop:
        return config
    loss = make_exact(config.loss, g, str(config.ntype), config.label, is_own=is_own)
    return replace(config, loss=loss)


@contextmanager
def _begin_run(session: Session, config: FitConfig, *, is_over: bool) -> Iterator[None]:
    """Call ``config.on_begin`` if epochs remain. If checkpoints are saved, signals can stop the block."""

    def begin() -> None:
        if config.on_begin is not None and not is_over:
            config.on_begin()

    # The block is entered first, so that a signal can stop any rank once rank 0 reports that training starts.
    with nullcontext() if config.checkpoint_folder is None else session.stoppable():
        run_on_all_ranks(session, begin)
        yield


def _show_progress(
    run: TrainingRun, loader: TrainingLoader, config: FitConfig, session: Session, *, enabled: bool
) -> AbstractContextManager[Advance]:
    """Open a progress bar over the run's remaining steps."""
    first_epoch = run.result.first_epoch
    last_epoch = config.epochs - 1
    title = f"training epochs {first_epoch} to {last_epoch}"
    if first_epoch == last_epoch:
        title = f"training epoch {first_epoch}"
    first_step = len(loader) * first_epoch + run.first_step
    num_steps = len(loader) * config.epochs

    def format_figures(num_done: float, speed: float) -> dict[str, str]:
        step = first_step + int(num_done)
        return tracing.format_live_figures(step, num_steps, len(loader), speed, run.result.epochs, session)

    figures = format_figures if config.watch else None
    return progress(title, num_steps - first_step, enabled=enabled, figures=figures)


def _make_step(
    model: WrappedModel, optimizer: torch.optim.Optimizer, sparse: Sparse, config: FitConfig
) -> Step:
    task = config.own_task
    if task is None:
        options = select_common_fields(config, NodeClassification)
        task = NodeClassification(**{**options, "loss": config.loss or cross_entropy})
    sparse_optimizers = list_optimizers(sparse)
    rates = [group["lr"] for group in optimizer.param_groups]
    rates += [sparse_optimizer.lr for sparse_optimizer in sparse_optimizers]
    return Step(
        model=model,
        optimizer=optimizer,
        task=task,
        sparse=sparse_optimizers,
        rates=rates,
        precision=config.precision or FLOAT32,
        accumulation=Accumulation(config.accumulate, current_session()),
        clip_norm=config.clip_norm,
        schedule=config if is_scheduled(config) else None,
    )


def _make_objective(config: FitConfig, sparse: Sparse) -> Objective:
    """Collect the settings for a trainer, which is a strategy's own loop over epochs."""
    loss = None
    if config.own_task is None:
        loss = config.loss or cross_entropy
    rate_factor = None
    if is_scheduled(config):
        # A trainer's epoch is one step.
        rate_factor = partial(compute_rate_factor, config, steps_of_epoch=1)
    additions = {"config.task": config.own_task, "config.inputs": config.inputs, "sparse": sparse}
    return Objective(
        loss=loss,
        feature=config.feature,
        label=config.label,
        extra_terms=tuple(name for name, value in additions.items() if value is not None),
        clip_norm=config.clip_norm,
        rate_factor=rate_factor,
    )


@contextmanager
def _closing(resource: EpochTrainer | TrainingRun | None) -> Iterator[None]:
    # After an error, `close` must not wait for the other ranks.
    failed = True
    try:
        yield
        failed = False
    finally:
        if resource is not None:
            resource.close(failed=failed)
