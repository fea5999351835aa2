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
import time
from dataclasses import replace
from pathlib import Path

from dglx_dist.bench import results
from dglx_dist.bench.driver import run
from dglx_dist.bench.experiments.a1 import EXPERIMENT
from dglx_dist.bench.records import BenchPlan, Outcome
from dglx_dist.bench.regret import SIZES, grid_of, plan_of
from dglx_dist.bench.regret_table import nearness
from dglx_dist.bench.sections import section
from dglx_dist.bench.steps import Step
from dglx_dist.bench.verdict import judge_experiment


def main() -> int:
    """Measure, write and print; 1 where the aim is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/regret"), help="results go here")
    parser.add_argument("--quick", action="store_true", help="a small grid on small graphs")
    parser.add_argument("--rates", default="100mbit,1gbit,10gbit", help="bandwidths by comma")
    parser.add_argument("--cuts", default="random,metis", help="partitioners by comma")
    parser.add_argument("--only", default="", help="families whose name has this")
    parser.add_argument("--repetitions", type=int, default=1, help="of each way")
    parser.add_argument("--table", action="store_true", help="only print what was measured before")
    told = parser.parse_args()
    outcome = _read(told.out) if told.table else _measured(told)
    print(section(EXPERIMENT, outcome))
    near = nearness(outcome)
    return 0 if judge_experiment(EXPERIMENT, outcome).word == "reproduced" and near and near.is_near else 1


def _measured(told: argparse.Namespace) -> Outcome:
    grid = grid_of(SIZES["quick" if told.quick else "whole"])
    families = tuple(one for one in grid.families if told.only in one.name)
    grid = replace(
        grid, families=families, cuts=tuple(told.cuts.split(",")), rates=tuple(told.rates.split(","))
    )
    out = told.out.absolute()
    plan = BenchPlan(suite="papers", out=out, work=out / "work", repetitions=told.repetitions)
    experiment = replace(EXPERIMENT, build=lambda bench: plan_of(bench, grid))
    return replace(run(experiment, plan, _tell), command=f"scripts/bench/regret.py {' '.join(sys.argv[1:])}")


def _read(folder: Path) -> Outcome:
    found = results.read_one(results.result_path(folder, EXPERIMENT.id))
    if found is None:
        sys.exit(f"{folder} has no result of {EXPERIMENT.id}; measure without --table first")
    return found


def _tell(step: Step) -> None:
    left = "" if step.seconds_left is None else f", {step.seconds_left / 60:.0f} min left"
    print(f"{step.done} of {step.total}: {step.doing}{left}", file=sys.stderr)


if __name__ == "__main__":
    began = time.perf_counter()
    code = main()
    print(f"{time.perf_counter() - began:.0f} s", file=sys.stderr)
    sys.exit(code)
