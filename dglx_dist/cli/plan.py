"""``dglx plan``."""

from __future__ import annotations

import json

from dglx_dist.cli.common import command, redirect_libraries_to_stderr, show, write
from dglx_dist.comm.topology import is_launched_by_torchrun
from dglx_dist.errors import ConfigError
from dglx_dist.options import find_flag
from dglx_dist.planner.config import PlanConfig
from dglx_dist.progress import say

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
        write(f"options of dglx train: {choice.chosen_prediction.candidate.arguments}")


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
