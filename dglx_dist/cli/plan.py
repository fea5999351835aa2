"""``dglx plan``."""

from __future__ import annotations

import json
import shlex

from dglx_dist.cli.common import command, redirect_libraries_to_stderr, show, write
from dglx_dist.comm.topology import is_launched_by_torchrun
from dglx_dist.errors import ConfigError
from dglx_dist.options import find_flag, format_words, list_options
from dglx_dist.planner.config import PlanConfig
from dglx_dist.progress import say
from dglx_dist.strategies.candidate import Candidate
from dglx_dist.training.config import ModelConfig

_BATCH_OPTIONS = ("fanouts", "batch_size")


@command(PlanConfig)
def plan(config: PlanConfig) -> None:
    """Report bytes, memory and compute time of an epoch under every strategy, and choose one.

    For example: `dglx plan data/demo --hidden 16 --servers 2 --ranks 4 --bandwidth-external 1gbit`

    Nothing is trained. One process counts the batches and plans of all ranks, and times the model on a few of
    them. The reported seconds are computing time here, and bytes divided by the given bandwidth. `dglx train
    --strategy auto` times real steps of every strategy, and trains.
    """
    from dglx_dist.cli.plan_job import make_plan
    from dglx_dist.report.tables import build_plan_table, format_plan_head

    _check_no_unused_options(config)
    as_json = config.as_json
    notify = None if as_json else lambda text: say(f"counting: {text}", "dim")
    with redirect_libraries_to_stderr():
        choice = make_plan(config, notify)
    if as_json:
        write(json.dumps(choice.to_json()))
        return
    for line in format_plan_head(choice).split("\n"):
        write(line)
    show(build_plan_table(choice))
    for line in choice.lines():
        write(line)
    if choice.chosen_prediction is not None:
        write(f"next: {_suggest_training(config, choice.chosen_prediction.candidate)}")


def _suggest_training(config: PlanConfig, candidate: Candidate) -> str:
    """Return the command that trains the planned model as ``candidate``.

    Options of the model that were not given to ``dglx plan`` have equal defaults in ``dglx train``.
    """
    names = [field.name for field, _ in list_options(ModelConfig) if field.name in config.given]
    names += ["seed"] * ("seed" in config.given)
    if candidate.unit == "full_graph":
        names = [name for name in names if name not in _BATCH_OPTIONS]
    ranks = config.servers * config.per_server
    target = f"dglx train {shlex.quote(str(config.data))} --ranks {ranks} --servers {config.servers}"
    return shlex.join([*shlex.split(f"{target} {candidate.arguments}"), *format_words(config, names)])


def _check_no_unused_options(config: PlanConfig) -> None:
    if is_launched_by_torchrun():
        raise ConfigError("dglx plan runs in one process, but torchrun has started this one. Run it alone.")
    unit = config.unit
    no_effect = {
        "is for mini-batches, but --unit full_graph has none. Leave it out, or use --unit any.": (
            _BATCH_OPTIONS * (unit == "full_graph")
        ),
        f"compares whole graphs with mini-batches, but --unit is {unit}. Add --unit any.": (
            ("full_graph_epochs",) * (unit != "any")
        ),
    }
    for message, names in no_effect.items():
        for name in names:
            if name in config.given:
                raise ConfigError(f"{find_flag(PlanConfig, name)} {message}")
