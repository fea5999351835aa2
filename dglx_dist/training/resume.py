"""Facts that a resumed run takes from its checkpoints, and facts that must be equal in both."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from dglx_dist.comm.collectives import broadcast_json, check_equal
from dglx_dist.comm.session import Session, collect_shared_facts
from dglx_dist.comm.topology import read_launch
from dglx_dist.errors import ConfigError, shorten_list
from dglx_dist.strategies.base import CACHE_CHOICE
from dglx_dist.training import checkpoint, tracing
from dglx_dist.training.checkpoint_folder import read_count
from dglx_dist.training.config import BF16, FLOAT32, RunOptions
from dglx_dist.training.fit_config import FitConfig, is_scheduled

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph

Options = TypeVar("Options", bound=RunOptions)
FACTS = "configuration"
"""Key in a checkpoint's ``extra`` for the facts that :func:`check_same` compares."""
LAUNCH = "launch"
"""Key for the torchrun start that saved the checkpoint."""
PRECISION = "precision"
"""Key for the precision in forward passes."""


def resolve_resume(config: Options, checkpoints: str | Path | None, session: Session) -> Options:
    """Return ``config`` with the settings that the checkpoints decide. Every rank must call this.

    If there are checkpoints and ``overwrite`` does not replace them, ``resume`` and ``goes_on`` are set.
    Without ``precision``, the checkpoint's precision is used.

    This function comes before all other collectives, because ranks with different settings would wait for
    each other in them. Raises ConfigError if the settings differ between ranks.
    """
    names = {field.name for field in fields(RunOptions)} - {"trace", "tensorboard"}
    settings = {name: getattr(config, name) for name in sorted(names)}
    settings["task"] = _name_task(config)
    settings["checkpoints"] = checkpoints is not None
    check_equal(session, "the settings of training", settings)

    launch, num_restarts = broadcast_json(read_launch(), session)
    extra = None
    if checkpoints is not None:
        checkpoint.lock_folder(checkpoints)
        # A first start with ``overwrite`` replaces the checkpoints, so they need not be readable.
        if num_restarts or not config.overwrite:
            extra = checkpoint.read_extra(checkpoints)

    if extra is not None and not config.resume:
        # A restart resumes from its launch's checkpoints. It only replaces those from earlier runs.
        is_same_launch = extra.get(LAUNCH) == launch
        if is_same_launch or not config.overwrite:
            config = replace(config, resume=True, overwrite=False, goes_on=True)

    if config.precision is not None:
        return config
    precision = FLOAT32
    if config.resume and extra is not None and extra.get(PRECISION) == BF16:
        precision = BF16
    return replace(config, precision=precision)


def _name_task(config: RunOptions) -> str:
    """Return the task's name. It is ``own`` for a user's function."""
    return config.task if isinstance(config.task, str) else "own"


def check_same(extra: Mapping[str, Any], facts: Mapping[str, object], where: object) -> None:
    """Raise ConfigError if the checkpoints in ``where`` belong to a run with other facts.

    ``extra`` are the JSON values from the newest checkpoint.
    """
    differences = find_differences(extra, facts)
    if differences:
        raise ConfigError(
            f"{where} has checkpoints of another configuration ({differences}). Choose another folder, or "
            "start over and delete them with --overwrite (in Python overwrite=True)."
        )


def find_differences(saved: Mapping[str, Any], facts: Mapping[str, object]) -> str:
    """List the facts that differ from a checkpoint's ``extra``. The text is empty if none do."""
    current_facts = json.loads(json.dumps(facts))
    # Facts that an earlier version did not save are not compared.
    saved_facts = {**current_facts, **saved.get(FACTS, {})}
    changes = []
    for name, value in current_facts.items():
        # Two NaN values have equal texts, but are not equal.
        if json.dumps(saved_facts[name]) != json.dumps(value):
            changes.append(f"{name}: {saved_facts[name]} -> {value}")

    return shorten_list(changes, most=4)


class Progress:
    """Values that ``dx.fit`` keeps in a checkpoint's ``extra``. TypeError or ValueError if invalid."""

    def __init__(self, extra: Mapping[str, Any]) -> None:
        best = extra.get("best")
        if best is not None and not (isinstance(best, list) and len(best) == 2):
            raise ValueError(f"'best' is {best!r}")
        self.best = (None, None) if best is None else (read_count(best[0]), _check_number(best[1]))
        self.evaluations_since_best = read_count(extra.get("evaluations_since_best", 0))
        self.accuracy = _check_numbers(extra.get("accuracy", {}))
        self.metrics = _check_numbers(extra.get("metrics", {}))
        self.deciding = extra.get("deciding")
        self.so_far = [_check_numbers(figures) for figures in extra.get("so_far", [])]
        """Figures for the unfinished epoch, by rank."""


def _check_number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is not a number")
    return value


def _check_numbers(values: Mapping[str, object]) -> dict[str, float]:
    return {name: _check_number(value) for name, value in values.items()}


UPDATE_OPTIONS = ("class_weight", "schedule", "warmup", "clip_norm", "accumulate")

TRAINED_WITH = "strategy"
"""Key in a checkpoint's ``extra``: the strategy's name and options, and the cache that ``auto`` chose."""


def describe_run(g: DistGraph, config: FitConfig, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """Return the facts that a run must have in common with the run that it resumes, as JSON values."""
    session = g.session
    safe_options = tracing.hide_credentials(session.options)
    shared = collect_shared_facts(session.strategy, safe_options, session.seed, curve=False)
    facts = {
        "dataset": g.dataset.manifest.checksum,
        "feature": config.feature,
        "label": config.label,
        "ntype": config.ntype,
        **config.configuration,
        "strategy": shared["strategy"],
        "options": shared["options"],
        "seed": shared["seed"],
        "precision": config.precision,
        "task": _name_task(config),
        **{name: getattr(config, name) for name in UPDATE_OPTIONS},
    }
    if is_scheduled(config):
        # With more epochs, a schedule has other rates from the first epoch on.
        facts["epochs"] = config.epochs

    facts["optimizer"] = type(optimizer).__name__
    for number, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if name != "params":
                facts[f"optimizer.{number}.{name}"] = _to_json_value(value)

    return facts


def _to_json_value(value: object) -> object:
    """Convert an optimizer's setting to JSON. Objects become their ``repr``."""
    if isinstance(value, Tensor):
        return value.tolist()
    return value if isinstance(value, bool | int | float | str | None) else repr(value)


def describe_strategy(session: Session) -> dict[str, object]:
    """Return the strategy's name, options and chosen cache, which later runs read from a checkpoint.

    The options are None if they may have credentials or are not JSON.
    """
    options: dict[str, object] | None = dict(session.options)
    try:
        if json.loads(json.dumps(tracing.hide_credentials(session.options))) != options:
            options = None
    except (TypeError, ValueError):
        options = None
    return {"name": session.strategy, "options": options, "cache": CACHE_CHOICE.get(session)}
