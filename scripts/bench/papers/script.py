"""What the scripts of one paper share: their arguments, the loop, and the tables that all of them print."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import typer

from dglx_dist.bench import suites
from dglx_dist.bench.figures import ratio_figures
from dglx_dist.bench.records import BenchPlan, Experiment, Outcome
from dglx_dist.bench.sections import ratio_in_words
from dglx_dist.bench.verdict import judge
from dglx_dist.cli.bench_command import measure, write_pages
from dglx_dist.report.table import markdown_table


def parser_of(
    doc: str | None, name: str, ids: tuple[str, ...], quick: str, *, only: str = "ids by comma"
) -> argparse.ArgumentParser:
    """Return the parser of a script for experiments ``ids``, whose results go to runs/``name``.

    Args:
        doc: Of the script.
        name: Of the paper's system.
        ids: What it measures unless told otherwise.
        quick: What ``--quick`` does.
        only: What ``--only`` is told.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs") / name, help="results go here")
    parser.add_argument("--work", type=Path, help="datasets are made here once (default: work in --out)")
    parser.add_argument("--only", default=",".join(ids), help=only)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--seed", type=int, default=0)
    return parser


def plan_of(chosen: argparse.Namespace, *, few: bool | None = None) -> BenchPlan:
    """Return what the arguments ask for; ``few``: one repetition, None: where ``--quick`` is given."""
    return BenchPlan(
        suite="quick" if chosen.quick else "papers",
        out=chosen.out.absolute(),
        work=(chosen.work or chosen.out / "work").absolute(),
        repetitions=1 if (chosen.quick if few is None else few) else chosen.repetitions,
        seed=chosen.seed,
    )


def measure_in_turn(
    chosen: argparse.Namespace,
    tables: Callable[[Outcome], list[str]],
    plan: Callable[[Experiment], BenchPlan] | None = None,
) -> int:
    """Measure one experiment after the other and print what came of each; 1 when one failed.

    Args:
        chosen: Arguments as :func:`parser_of` has them.
        tables: What is printed of an experiment that was measured, in this order.
        plan: Of one experiment; None: :func:`plan_of`.
    """
    failed = False
    for experiment in [suites.find(name) for name in chosen.only.split(",")]:
        asked = plan_of(chosen) if plan is None else plan(experiment)
        began = time.perf_counter()
        (outcome,) = measure([experiment], asked)
        failed = failed or outcome.status == "failed"
        label = f"; {outcome.label}" if outcome.label else ""
        seconds = time.perf_counter() - began
        typer.echo(f"\n## {outcome.experiment}: {outcome.status} {outcome.reason} ({seconds:.0f} s){label}\n")
        if outcome.measurements and outcome.plan is not None:
            for table in tables(outcome):
                typer.echo(f"{table}\n")
        write_pages(asked.out)
    return int(failed)


def ratio_table(outcome: Outcome) -> str:
    """Return the ratios of an experiment as they were foretold and measured."""
    rows = [
        (
            one.ratio.name,
            one.ratio.quantity,
            "-" if one.ratio.predicted is None else f"{one.ratio.predicted:.3f}",
            ratio_in_words(one),
            str(judge(one)),
        )
        for one in ratio_figures(outcome)
    ]
    return markdown_table(("ratio", "of", "predicted", "measured (IQR)", "verdict"), rows)
