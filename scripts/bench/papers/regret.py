"""The automatic choice beside the best of all: its regret over a grid, on emulated servers.

    sudo .venv/bin/python scripts/bench/regret.py --out runs/regret         # 30 minutes on 2 free cores
    sudo .venv/bin/python scripts/bench/regret.py --out runs/regret --quick # a few cells of it
    .venv/bin/python scripts/bench/regret.py --out runs/regret --table      # the tables again

It is experiment A1 of `dglx bench` on larger graphs, with more hidden widths and, unless told, one
repetition: in every cell (mini-batches of 2 layers, whole graphs of 2 and of 14; hidden width; random and
METIS cut; bandwidth) `dglx plan` foretells all exact ways to train, which are then trained on two servers of
one rank: one epoch to warm up, two measured ones. Regret is the time of the way that was chosen by that of
the fastest. Without the right to limit links all bandwidths are that of loopback, and no verdict is given.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from dglx_dist.bench import results
from dglx_dist.bench.experiments.a1 import EXPERIMENT
from dglx_dist.bench.records import Outcome
from dglx_dist.bench.regret import SIZES, grid_of, plan_of
from dglx_dist.bench.sections import section
from dglx_dist.bench.verdict import judge_experiment
from dglx_dist.cli import bench_script
from dglx_dist.cli.bench_command import measure


def main() -> int:
    """Measure, write and print; 1 where the aim is missed."""
    few, only = "a small grid on small graphs", "families of cells whose name has this"
    parser = bench_script.parser_of(__doc__, "regret", ("",), few, only=only)
    parser.add_argument("--rates", default="100mbit,1gbit,10gbit", help="bandwidths by comma")
    parser.add_argument("--cuts", default="random,metis", help="partitioners by comma")
    parser.add_argument("--table", action="store_true", help="only print what was measured before")
    parser.set_defaults(repetitions=1)
    told = parser.parse_args()
    outcome = _read(told.out) if told.table else _measured(told)
    print(section(EXPERIMENT, outcome))
    return 0 if judge_experiment(EXPERIMENT, outcome).word == "reproduced" else 1


def _measured(told: argparse.Namespace) -> Outcome:
    grid = grid_of(SIZES["quick" if told.quick else "whole"])
    families = tuple(one for one in grid.families if told.only in one.name)
    if not families:
        sys.exit(f"no family has {told.only!r} in its name: {'; '.join(one.name for one in grid.families)}")
    grid = replace(
        grid, families=families, cuts=tuple(told.cuts.split(",")), rates=tuple(told.rates.split(","))
    )
    experiment = replace(EXPERIMENT, build=lambda plan: plan_of(plan, grid))
    (outcome,) = measure([experiment], bench_script.plan_of(told, few=False))
    return replace(outcome, command=f"scripts/bench/regret.py {' '.join(sys.argv[1:])}")


def _read(folder: Path) -> Outcome:
    found = results.read_one(results.result_path(folder, EXPERIMENT.id))
    if found is None:
        sys.exit(f"{folder} has no result of {EXPERIMENT.id}; measure without --table first")
    return found


if __name__ == "__main__":
    sys.exit(main())
