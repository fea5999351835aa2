"""Configure ``train``, describe its result, and check that the strategy supports the requested updates."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from dglx_dist.comm.session import current_session
from dglx_dist.errors import ConfigError
from dglx_dist.graph.optim import SparseOptimizer
from dglx_dist.options import check_ranges
from dglx_dist.records import FEATURE, LABEL, TEST, VALIDATION, EpochRecord
from dglx_dist.strategies.base import Traits, WrappedModel
from dglx_dist.training.config import AUTO_TASK, FLOAT32, LESS_IS_BETTER, RunOptions, check_run
from dglx_dist.training.inference import EdgeNames
from dglx_dist.training.object_state import Stateful
from dglx_dist.training.relational import EntityInputs
from dglx_dist.training.tasks import LossFunction, Task

Callback = Callable[[EpochRecord], None]
"""Called on every rank after each epoch, with the same record."""

Evaluate = Callable[[WrappedModel], Mapping[str, float]]
"""Maps the wrapped model to metrics by name, equal on all ranks. Collective.

``val_mask`` and ``test_mask`` are accuracies or other scores where more is better. Other metrics are recorded
under their names, like ``val_mrr``.
"""


@dataclass(frozen=True, kw_only=True)
class FitConfig(RunOptions):
    """Configuration for ``fit.train``, on top of the options for ``dglx train``. ConfigError if invalid."""

    checkpoint_folder: str | Path | None = None
    """Folder of checkpoints, shared by all ranks. None: no checkpoints are saved."""
    weights_folder: str | Path | None = None
    """Folder for ``model.safetensors`` (weights of the best epoch by validation, or of the last epoch without
    validation) and ``final.safetensors`` (weights of the last epoch). None: no files are written.
    """
    feature: str = FEATURE
    label: str = LABEL
    edge_feats: EdgeNames = ()
    """Edge data of the blocks in training and evaluation. (): that of the loader, if you pass one."""
    loss: LossFunction | None = None
    """Loss function. None: cross-entropy, binary cross-entropy or squared error, according to the task."""
    ntype: str | None = None
    """Type of the classified nodes. Required if several node types have labels."""
    inputs: EntityInputs | None = None
    """Input rows by node type, from features and embeddings. None: ``feature`` of the only type."""
    task: Task | str | None = AUTO_TASK
    """``auto``, ``classification``, ``multilabel`` or ``regression``. Or a function that replaces the node
    task defined by the fields above. ``metric`` then has names that ``evaluate`` returns.
    """
    evaluate: Evaluate | None = None
    """Function that replaces exact accuracy. A custom ``task`` is evaluated only by this."""
    eval_batch_size: int | None = None
    """Maximum number of nodes that an evaluation computes at once. None: as many as fit in about 1 GB."""
    configuration: Mapping[str, object] = field(default_factory=dict)
    """More facts (JSON values) that must be equal if a run is resumed from an existing checkpoint."""
    on_begin: Callable[[], None] | None = None
    """Called on all ranks before the first step, after the checkpoint is loaded, if epochs remain."""
    num_layers: int | None = None
    """Number of blocks, for models without ``inference_layers()``. See :func:`evaluate`."""
    show_progress: bool = True
    """Whether rank 0 shows a progress bar on standard error."""

    def __post_init__(self) -> None:
        if self.task is None:
            object.__setattr__(self, "task", AUTO_TASK)
        check_ranges(self, "{name}={value}")
        check_run(self)
        if self.resume and self.checkpoint_folder is None:
            raise ConfigError("resume needs checkpoint_folder. Set it to the folder of the checkpoints.")

    @property
    def own_task(self) -> Task | None:
        """Function that replaces the node task."""
        return None if isinstance(self.task, str) else self.task


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """Result of ``fit.train``, equal on all ranks."""

    epochs: list[EpochRecord] = field(default_factory=list)
    """Epoch records from this call. Epochs before a resume are not included."""
    accuracy: dict[str, float] = field(default_factory=dict)
    """Mask to exact accuracy after the last epoch, or with ``patience`` after the best epoch."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Exact metrics after the same epoch, like ``test_f1_micro``."""
    task: str = "own"
    """Node task. ``own``: the user's function."""
    best_epoch: int | None = None
    """Epoch with the best first validation metric. None without evaluation."""
    best_val_accuracy: float | None = None
    """Value of the deciding metric at the best epoch, even if it is not accuracy.

    With ``eval_sample``, it is exact if ``patience`` is set.
    """
    first_epoch: int = 0
    """First epoch that this call trained. Above 0 after a resume."""
    stopped_early: bool = False
    precision: str = FLOAT32
    """Precision of forward passes."""
    account: dict[str, object] = field(default_factory=dict)
    """The run's cost, as ``dollars`` with a ``label``. Empty if nothing is paid by use."""
    traffic: dict[str, list[list[int]]] = field(default_factory=dict)
    """Bytes that training sent in this call, by phase: [source rank, destination rank, bytes]. Rank -1 is a
    worker. The bytes add up to ``bytes_inside`` and ``bytes_outside``, except that an epoch's steps before a
    resume are missing here.
    """
    choice: Any = None
    """The ``planner.records.Choice`` of strategy ``auto``, with outcome. None: you named the strategy."""

    @property
    def val_accuracy(self) -> float | None:
        """Validation accuracy in ``accuracy``."""
        return self.accuracy.get(VALIDATION)

    @property
    def test_accuracy(self) -> float | None:
        """Test accuracy in ``accuracy``."""
        return self.accuracy.get(TEST)


log = logging.getLogger(__name__)

Scheduler: TypeAlias = LRScheduler | ReduceLROnPlateau

SCHEDULER = "scheduler"
"""The scheduler's name among the objects in a checkpoint."""

PLAIN_VALUES: Mapping[str, tuple[object, ...]] = {"precision": (None, FLOAT32), "accumulate": (1,)}
"""Options that change a step, with the values that every strategy supports."""


def needs_own_loop(config: RunOptions) -> str | None:
    """Return the first option that needs a training loop in torch, like ``accumulate 2``, or None."""
    for name, plain_values in PLAIN_VALUES.items():
        value = getattr(config, name)
        if not callable(value) and value not in plain_values:
            return f"{name.replace('_', '-')} {value}"
    return None


def check_loop(config: RunOptions, traits: Traits, strategy: str) -> None:
    """Raise ConfigError if the options change steps, but the strategy has no training loop in torch."""
    option = needs_own_loop(config)
    if option is not None and not traits.own_loop:
        raise ConfigError(
            f"{option}: strategy {strategy!r} takes one step per epoch, in the dtype of the weights. Leave "
            "it out, or use strategy='data_parallel'."
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
    """Raise ConfigError if gradients cannot be clipped or accumulated exactly, or the scheduler does not fit.

    Rank 0 logs a warning if an epoch has one step, because then there is nothing to accumulate.
    """
    if config.accumulate > 1 and steps_of_epoch == 1 and current_session().topology.rank == 0:
        log.warning(
            "accumulate=%d has no effect, because an epoch has one step here (strategy %r). Leave it out, or "
            "use smaller batches if the strategy has any.",
            config.accumulate,
            current_session().strategy,
        )

    setting = None
    if config.clip_norm is not None:
        setting = f"clip_norm={config.clip_norm}"
    elif config.accumulate > 1:
        setting = f"accumulate={config.accumulate}"
    if setting is not None and (model.overlaps_steps or sparse):
        obstacle = "steps overlap (pipeline depth above 1)"
        if sparse:
            obstacle = "embeddings have separate gradients"
        raise ConfigError(f"{setting} needs all gradients of a step, but {obstacle}. Leave it out.")

    if SCHEDULER in state:
        raise ConfigError(f"state has the name {SCHEDULER!r}, which scheduler= uses. Choose another name.")
    if scheduler is None:
        return
    if is_scheduled(config):
        raise ConfigError(
            f"a {type(scheduler).__name__} and schedule={config.schedule!r} with warmup={config.warmup} both "
            "set the learning rate. Use one of them."
        )

    if isinstance(scheduler, ReduceLROnPlateau):
        metric = config.metric[0] if config.metric else "accuracy"
        mode = "min" if metric in LESS_IS_BETTER else "max"
        if config.eval_every == 0:
            raise ConfigError("ReduceLROnPlateau needs evaluations, but eval_every=0. Set it to at least 1.")
        if not has_own_evaluation and scheduler.mode != mode:
            raise ConfigError(
                f"ReduceLROnPlateau(mode={scheduler.mode!r}) gets the metric {metric}. Use mode={mode!r}."
            )


def is_scheduled(config: RunOptions) -> bool:
    return config.schedule != "constant" or config.warmup > 0
