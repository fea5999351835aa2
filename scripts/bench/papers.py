"""The experiments of one paper, one after the other, with the tables that only they have."""

from __future__ import annotations

import argparse
import inspect
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import typer

from dglx_dist.report.tables import markdown_table
from scripts.bench import results, suites
from scripts.bench.cli import measure, write_pages
from scripts.bench.experiments import choice as grids
from scripts.bench.experiments.push_pull import WIDTHS
from scripts.bench.experiments.serverless import COAUTHORS
from scripts.bench.figures import (
    VariantFigures,
    crossing,
    different_blocks,
    measured_bytes,
    predicted_bytes,
    variant_figures,
)
from scripts.bench.pages import judge_experiment, section
from scripts.bench.records import BenchPlan, Experiment, Outcome

(A1,) = grids.EXPERIMENTS


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
    parser = argparse.ArgumentParser(
        prog=f"python scripts/bench {name}",
        description=inspect.cleandoc(doc or ""),
        formatter_class=argparse.RawTextHelpFormatter,
    )
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
    """Measure one experiment after the other and print its section and tables; 1 when one failed.

    Args:
        chosen: Arguments as :func:`parser_of` has them.
        tables: What is printed of an experiment beside its section; empty ones are left out.
        plan: Of one experiment; None: :func:`plan_of`.
    """
    failed = False
    for experiment in [suites.find(name) for name in chosen.only.split(",")]:
        asked = plan_of(chosen) if plan is None else plan(experiment)
        (outcome,) = measure([experiment], asked)
        failed = failed or outcome.status == "failed"
        typer.echo(f"\n{section(experiment, outcome)}\n")
        if outcome.measurements and outcome.plan is not None:
            for table in filter(None, tables(outcome)):
                typer.echo(f"{table}\n")
        write_pages(asked.out)
    return int(failed)


def p3(argv: list[str]) -> int:
    """Push-pull parallelism on emulated servers: the experiments P1 to P9, and what they came to.

        sudo .venv/bin/python scripts/bench p3 --out runs/p3             # all of them
        sudo .venv/bin/python scripts/bench p3 --out runs/p3 --quick     # 1 repetition, half the steps
        sudo .venv/bin/python scripts/bench p3 --out runs/p3 --only P1,P6

    The same as ``--suite papers --only P1,P2,...``, with bytes by phase beside the formulas, the width at
    which the bytes of push-pull and of data parallelism cross, and the time by that of hash and of metis.
    """
    parser = parser_of(p3.__doc__, "p3", suites.FAMILIES["push_pull"], "1 repetition of half as many steps")
    return measure_in_turn(parser.parse_args(argv), _p3_tables)


def _p3_tables(outcome: Outcome) -> list[str]:
    figures = variant_figures(outcome)
    rows = [(one.variant.name, *(_by(one, kind, figures) for kind in ("hash", "metis"))) for one in figures]
    differ = ", ".join(different_blocks(outcome)) or "none"
    return [
        markdown_table(("variant", "hash / it", "metis / it"), rows),
        f"other blocks than data parallelism: {differ}",
        _break_even(outcome),
    ]


def _by(one: VariantFigures, kind: str, figures: Sequence[VariantFigures]) -> str:
    """Return the time of data parallelism on the cut ``kind`` at the same links, by this one's."""
    rate, width = one.variant.rate, one.variant.job.params.get("hidden")
    for other in figures:
        params = other.variant.job.params
        same = other.variant.rate == rate and params.get("hidden") == width
        if same and other.variant.name.startswith(kind) and other is not one:
            return f"{other.seconds.median / one.seconds.median:.2f}"
    return "-"


def _break_even(outcome: Outcome) -> str:
    found = measured_bytes(outcome)
    moved = ("features", "structure", "activations", "activation_gradients")
    pairs = {width: (f"hash, {width}", f"push_pull, {width}") for width in WIDTHS}
    if not all(name in found for pair in pairs.values() for name in pair):
        return ""
    points = []
    for width, pair in pairs.items():
        first, second = (sum(found[name].get(phase, 0.0) for phase in moved) for name in pair)
        points.append((float(width), first, second))
    assert outcome.plan is not None
    at = crossing(points)
    formula = outcome.plan.facts["break-even width, by the formula"]
    crossed = "none in 16 to 100" if at is None else f"{at:.1f}"
    return f"break-even width by measured bytes: {crossed}; by the formula: {formula}"


def granndis(argv: list[str]) -> int:
    """Full-graph training on emulated servers: the experiments G1 to G5, and what they came to.

        sudo .venv/bin/python scripts/bench granndis --out runs/granndis             # all of them
        sudo .venv/bin/python scripts/bench granndis --out runs/granndis --quick     # 1 repetition, less
        sudo .venv/bin/python scripts/bench granndis --out runs/granndis --only G1,G4

    The same as ``--suite papers --only G1,G2,...``, with bytes by phase beside the formulas, the closed form
    of phi, kappa and beta beside the gain that was measured, what is done once, accuracy beside time and the
    peak memory of a rank. Stock DistDGL trains beside G2.
    """
    ids = suites.FAMILIES["full_graph"]
    parser = parser_of(granndis.__doc__, "granndis", ids, "1 repetition on small graphs")
    return measure_in_turn(parser.parse_args(argv), _granndis_tables)


def _granndis_tables(outcome: Outcome) -> list[str]:
    rows = [
        (one.variant, f"{100 * one.accuracy[-1][1]:.1f} %") for one in outcome.measurements if one.accuracy
    ]
    return [markdown_table(("variant", "accuracy at the end"), rows) if rows else ""]


def dorylus(argv: list[str]) -> int:
    """Training in intervals on emulated servers: the experiments Y1 to Y5, and what they came to.

        sudo .venv/bin/python scripts/bench dorylus --out runs/dorylus             # all of them
        sudo .venv/bin/python scripts/bench dorylus --out runs/dorylus --quick     # 1 repetition, less
        sudo .venv/bin/python scripts/bench dorylus --out runs/dorylus --only Y3

    The same as ``--suite papers --only Y1,Y2,...``, with bytes by phase beside the formulas, what each option
    changes of them, epochs to the target by seed, calls and dollars, which are simulated. Y1 trains on
    coauthor_physics.npz of --data too, and says so where there is no such file.
    """
    quick = "1 repetition on a small graph; Y1 has all the same, for its seeds are what it is about"
    parser = parser_of(dorylus.__doc__, "dorylus", suites.FAMILIES["serverless"], quick)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of the .npz graphs")
    chosen = parser.parse_args(argv)

    def plan(experiment: Experiment) -> BenchPlan:
        asked = plan_of(chosen, few=chosen.quick and experiment.id != "Y1")
        if experiment.id == "Y1":
            _bring(chosen.data / COAUTHORS, asked.work / COAUTHORS)
        return asked

    return measure_in_turn(chosen, _dorylus_tables, plan)


def _bring(file: Path, place: Path) -> None:
    if place.is_file():
        return
    if not file.is_file():
        print(f"there is no {file}: Y1 trains on the built-in graph alone; name its folder with --data")
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, place)


def _dorylus_tables(outcome: Outcome) -> list[str]:
    head = ("variant", "calls", "relaunched", "simulated $ x 1e6", "test accuracy")
    first = {one.variant: one.extra for one in reversed(outcome.measurements)}
    rows = []
    for name in (one.variant.name for one in variant_figures(outcome)):
        extra = first[name]
        accuracy = extra.get("test_accuracy")
        counts = (f"{extra[key]:.1f}" for key in ("invocations", "relaunched"))
        reached = "-" if accuracy is None else f"{100 * accuracy:.1f} %"
        rows.append((name, *counts, f"{1e6 * extra['dollars']:.1f}", reached))
    return [markdown_table(head, rows), _delta_table(outcome), _seed_table(outcome)]


def _delta_table(outcome: Outcome) -> str:
    """Return what each variant moves more than the first one, by phase, beside the formula; Y4's."""
    found, expected = measured_bytes(outcome), predicted_bytes(outcome)
    names = [name for name in expected if name in found]
    if outcome.experiment != "Y4" or len(names) < 2:
        return ""
    base, rows = names[0], []
    for name in names[1:]:
        for phase in sorted(expected[name]):
            told = expected[name][phase] - expected[base][phase]
            measured = found[name].get(phase, 0) - found[base].get(phase, 0)
            if told or measured:
                rows.append((name, phase, f"{measured:+.0f}", f"{told:+d}", f"{measured - told:.0f}"))
    return markdown_table((f"bytes more than {base}", "phase", "measured", "by 4.6", "difference"), rows)


def _seed_table(outcome: Outcome) -> str:
    epochs: dict[str, list[str]] = {}
    for one in outcome.measurements:
        if "epochs_to_target" in one.extra and outcome.experiment == "Y1":
            epochs.setdefault(one.variant, []).append(str(one.extra["epochs_to_target"] or "not reached"))
    rows = [(name, ", ".join(of)) for name, of in epochs.items()]
    return markdown_table(("variant", "epochs to the target, by seed"), rows) if rows else ""


def regret(argv: list[str]) -> int:
    """The automatic choice beside the best of all: its regret over a grid, on emulated servers.

        sudo .venv/bin/python scripts/bench regret --out runs/regret         # 30 minutes on 2 free cores
        sudo .venv/bin/python scripts/bench regret --out runs/regret --quick # a few cells of it
        .venv/bin/python scripts/bench regret --out runs/regret --table      # the tables again

    It is experiment A1 on larger graphs, with more hidden widths and, unless told, one repetition: in every
    cell (mini-batches of 2 layers, whole graphs of 2 and of 14; hidden width; random and METIS cut;
    bandwidth) `dglx plan` predicts all exact ways to train, which are then trained on two servers of one
    rank: one epoch to warm up, two measured ones. Regret is the time of the way that was chosen by that of
    the fastest. Without the right to limit links all bandwidths are that of loopback, and no verdict is
    given.
    """
    few, only = "a small grid on small graphs", "families of cells whose name has this"
    parser = parser_of(regret.__doc__, "regret", ("",), few, only=only)
    parser.add_argument("--rates", default="100mbit,1gbit,10gbit", help="bandwidths by comma")
    parser.add_argument("--cuts", default="random,metis", help="partitioners by comma")
    parser.add_argument("--table", action="store_true", help="only print what was measured before")
    parser.set_defaults(repetitions=1)
    told = parser.parse_args(argv)
    outcome = _read_grid(told.out) if told.table else _measured_grid(told)
    print(section(A1, outcome))
    return 0 if judge_experiment(A1, outcome).word == "reproduced" else 1


def _measured_grid(told: argparse.Namespace) -> Outcome:
    grid = grids.grid_of(grids.SIZES["quick" if told.quick else "whole"])
    families = tuple(one for one in grid.families if told.only in one.name)
    if not families:
        sys.exit(f"no family has {told.only!r} in its name: {'; '.join(one.name for one in grid.families)}")
    grid = replace(
        grid, families=families, cuts=tuple(told.cuts.split(",")), rates=tuple(told.rates.split(","))
    )
    experiment = replace(A1, build=lambda plan: grids.plan_of(plan, grid))
    (outcome,) = measure([experiment], plan_of(told, few=False))
    return replace(outcome, command=f"python scripts/bench regret {' '.join(sys.argv[2:])}")


def _read_grid(folder: Path) -> Outcome:
    found = results.read_one(results.result_path(folder, A1.id))
    if found is None:
        sys.exit(f"{folder} has no result of {A1.id}; measure without --table first")
    return found
