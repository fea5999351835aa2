"""What a resumed run takes from its checkpoints, and must have in common with them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from dglx_dist.comm.collectives import broadcast_json, check_equal
from dglx_dist.comm.session import Session
from dglx_dist.comm.topology import read_launch
from dglx_dist.errors import ConfigError, shorten_list
from dglx_dist.training import checkpoint
from dglx_dist.training.config import BF16, FLOAT32, RunOptions

Options = TypeVar("Options", bound=RunOptions)
FACTS, LAUNCH, PRECISION = "configuration", "launch", "precision"
"""Keys in ``extra`` of a checkpoint: the facts that :func:`check_same` compares, the start of torchrun that
saved it, and the precision of forward passes."""


def resolve_resume(config: Options, checkpoints: str | Path | None, session: Session) -> Options:
    """Return ``config`` with what the checkpoints decide; collective.

    ``resume`` and ``goes_on``, where there are some and ``overwrite`` does not replace them; a precision, as
    given, else that of the checkpoint.

    ConfigError: the ranks' settings differ. Called before anything else is collective, in which they would
    wait for each other.
    """
    files = ("trace", "tensorboard")
    shared = {one.name: getattr(config, one.name) for one in fields(RunOptions) if one.name not in files}
    task = config.task if isinstance(config.task, str) else "own"
    shared |= {"task": task, "checkpoints": checkpoints is not None}
    check_equal(session, "the settings of training", shared)
    launch, restarts = broadcast_json(read_launch(), session)
    extra = None
    if checkpoints is not None:
        checkpoint.occupy(checkpoints)
        extra = checkpoint.read_extra(checkpoints) if restarts or not config.overwrite else None
    # A restart is resumed from what it has saved itself, and only replaces what was there before.
    if extra is not None and not config.resume and (not config.overwrite or extra.get(LAUNCH) == launch):
        config = replace(config, resume=True, overwrite=False, goes_on=True)
    if config.precision is not None:
        return config
    is_half = config.resume and extra is not None and extra.get(PRECISION) == BF16
    return replace(config, precision=BF16 if is_half else FLOAT32)


def check_same(saved: Mapping[str, Any], facts: Mapping[str, object], where: object) -> None:
    """Raise ConfigError unless checkpoints ``where``, with ``extra`` ``saved``, are of a run of ``facts``."""
    if differ := find_differences(saved, facts):
        raise ConfigError(
            f"{where} has checkpoints of another configuration ({differ}); give another folder, or "
            "--overwrite (in Python overwrite=True), which begins anew and removes them"
        )


def find_differences(saved: Mapping[str, Any], facts: Mapping[str, object]) -> str:
    # What an earlier version did not save is not compared.
    now = json.loads(json.dumps(facts))
    before = {**now, **saved.get(FACTS, {})}
    differ = [name for name in now if json.dumps(before[name]) != json.dumps(now[name])]
    return shorten_list((f"{name}: {before[name]} -> {now[name]}" for name in differ), most=4)


class Progress:
    """``extra`` of a checkpoint of ``dx.fit``; TypeError or ValueError: a value is none of ours."""

    def __init__(self, extra: Mapping[str, Any]) -> None:
        best = extra.get("best")
        if best is not None and not (isinstance(best, list) and len(best) == 2):
            raise ValueError(f"'best' is {best!r}")
        self.best = (None, None) if best is None else (checkpoint.whole(best[0]), _number(best[1]))
        self.evaluations_since_best = checkpoint.whole(extra.get("evaluations_since_best", 0))
        self.accuracy = {name: _number(value) for name, value in extra.get("accuracy", {}).items()}
        self.metrics = {name: _number(value) for name, value in extra.get("metrics", {}).items()}
        self.deciding = extra.get("deciding")
        self.so_far = [
            {name: _number(value) for name, value in of_rank.items()} for of_rank in extra.get("so_far", [])
        ]
        """By rank: figures of the epoch that the checkpoint is inside of."""


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is no number")
    return value
