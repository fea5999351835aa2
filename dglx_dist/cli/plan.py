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
    # Standard output is for the result, which may be JSON.
    with redirect_libraries_to_stderr():
        choice = make_plan(config, None if config.as_json else _show_step)
    if config.as_json:
        write(json.dumps(choice.to_json()))
        return

    for line in format_plan_head(choice).split("\n"):
        write(line)
    show(build_plan_table(choice))
    for line in choice.lines():
        write(line)
    if choice.chosen_prediction is not None:
        write(f"next: {_suggest_training(config, choice.chosen_prediction.candidate)}")


def _show_step(text: str) -> None:
    say(f"counting: {text}", "dim")


def _suggest_training(config: PlanConfig, candidate: Candidate) -> str:
    """Return the command that trains the planned model as ``candidate``.

    Model options that were not given to ``dglx plan`` have equal defaults in ``dglx train``.
    """
    names = [field.name for field, _ in list_options(ModelConfig) if field.name in config.given]
    if "seed" in config.given:
        names.append("seed")
    if candidate.unit == "full_graph":
        names = [name for name in names if name not in _BATCH_OPTIONS]

    ranks = config.servers * config.per_server
    words = ["dglx", "train", str(config.data)]
    words += ["--ranks", str(ranks), "--servers", str(config.servers)]
    words += shlex.split(candidate.arguments)
    words += format_words(config, names)
    return shlex.join(words)


def _check_no_unused_options(config: PlanConfig) -> None:
    """Raise ConfigError if torchrun has started this process, or if ``--unit`` makes an option useless."""
    if is_launched_by_torchrun():
        raise ConfigError("dglx plan runs in one process, but torchrun has started this one. Run it alone.")

    if config.unit == "full_graph":
        for name in sorted(config.given.intersection(_BATCH_OPTIONS)):
            raise ConfigError(
                f"{find_flag(PlanConfig, name)} is for mini-batches, but --unit full_graph "
                "has none. Leave it out, or use --unit any."
            )
    if config.unit != "any" and "full_graph_epochs" in config.given:
        raise ConfigError(
            f"{find_flag(PlanConfig, 'full_graph_epochs')} compares whole graphs with "
            f"mini-batches, but --unit is {config.unit}. Add --unit any."
        )
