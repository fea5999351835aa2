"""Checks that a strategy, the gradients and a scheduler allow the updates that a run asks for."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from dglx_dist.comm.session import current_session
from dglx_dist.errors import ConfigError
from dglx_dist.graph.optim import SparseOptimizer
from dglx_dist.strategies.base import Traits, WrappedModel
from dglx_dist.training.config import AUTO_TASK, CLASSIFICATION, FLOAT32, LESS_IS_BETTER, RunOptions
from dglx_dist.training.object_state import Stateful

log = logging.getLogger(__name__)

Scheduler: TypeAlias = LRScheduler | ReduceLROnPlateau
SCHEDULER = "scheduler"
"""Name of the scheduler among the objects of a checkpoint."""


def needs_own_loop(config: RunOptions) -> str | None:
    """Return an option that only a training loop in torch has, as ``schedule cosine``, else None."""
    plain = {
        "precision": (None, FLOAT32),
        "task": (AUTO_TASK, CLASSIFICATION),
        "clip_norm": (None,),
        "accumulate": (1,),
        "class_weight": ("none",),
        "schedule": ("constant",),
        "warmup": (0,),
    }
    given = {name: getattr(config, name) for name in plain}
    asked = (name for name in plain if not callable(given[name]) and given[name] not in plain[name])
    return next((f"{name.replace('_', '-')} {given[name]}" for name in asked), None)


def check_loop(config: RunOptions, traits: Traits, strategy: str, scheduler: object = None) -> None:
    """Raise ConfigError if a strategy without a training loop in torch would have to change its steps."""
    if traits.own_loop:
        return
    if option := needs_own_loop(config):
        raise ConfigError(
            f"{option}: strategy {strategy!r} does not compute in torch but on workers, plain cross-entropy "
            "at a constant rate, in the dtype of the weights; leave it out, or use strategy='data_parallel'"
        )
    if scheduler is not None:
        raise ConfigError(
            f"{type(scheduler).__name__}: strategy {strategy!r} trains at a constant rate on workers; leave "
            "the scheduler out, or use strategy='data_parallel'"
        )


def check_updates(
    config: RunOptions,
    model: WrappedModel,
    scheduler: Scheduler | None,
    state: Mapping[str, Stateful],
    sparse: Sequence[SparseOptimizer],
    *,
    has_own_evaluation: bool,
    steps_of_epoch: int,
) -> None:
    """Raise ConfigError if the gradients cannot be clipped exactly, or the scheduler has no effect.

    Logs a warning on rank 0 if batches have nothing to be accumulated with.
    """
    if config.accumulate > 1 and steps_of_epoch == 1 and current_session().topology.rank == 0:
        log.warning(
            "accumulate=%d has no effect, because an epoch has one step here (strategy %r); leave it out, or "
            "use smaller batches where the strategy has any",
            config.accumulate,
            current_session().strategy,
        )
    uses = {"clip_norm": config.clip_norm, "accumulate": config.accumulate if config.accumulate > 1 else None}
    name = next((name for name, value in uses.items() if value is not None), None)
    if name and (model.overlaps_steps or sparse):
        what = (
            "embeddings have gradients of their own" if sparse else "steps overlap (pipeline depth above 1)"
        )
        raise ConfigError(
            f"{name}={uses[name]} needs all gradients of a step at once, but {what}; leave it out"
        )
    if SCHEDULER in state:
        raise ConfigError(f"state has the name {SCHEDULER!r}, which is that of scheduler=; give another name")
    if scheduler is None:
        return
    if is_scheduled(config):
        raise ConfigError(
            f"a {type(scheduler).__name__} and schedule={config.schedule!r} with warmup={config.warmup} both "
            "set the learning rate; give one of them"
        )
    if isinstance(scheduler, ReduceLROnPlateau):
        metric = config.metric[0] if config.metric else "accuracy"
        mode = "min" if metric in LESS_IS_BETTER else "max"
        if config.eval_every == 0:
            raise ConfigError("ReduceLROnPlateau needs evaluations, but eval_every=0; set at least 1")
        if not has_own_evaluation and scheduler.mode != mode:
            raise ConfigError(
                f"ReduceLROnPlateau(mode={scheduler.mode!r}) gets {metric} of validation; use mode={mode!r}"
            )


def is_scheduled(config: RunOptions) -> bool:
    return config.schedule != "constant" or config.warmup > 0
