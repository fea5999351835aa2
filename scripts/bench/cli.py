"""The command line of the experiments."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from dglx_dist.cli import run_command_line
from dglx_dist.cli.common import show, warn
from dglx_dist.cli.train import INTERRUPTED
from dglx_dist.errors import ConfigError
from dglx_dist.options import parse_names
from dglx_dist.progress import say

if TYPE_CHECKING:
    from scripts.bench.records import BenchPlan, Experiment, Outcome


PROGRAM = "python scripts/bench"

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


@app.command(no_args_is_help=True)
def bench(  # noqa: PLR0913  # one argument per option
    ids: Annotated[
        list[str] | None, typer.Argument(metavar="[ID]...", help="The same as --only.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Results go here: `ID.json` each, `README.md`, pictures."),
    ] = None,
    suite: Annotated[
        str, typer.Option(help="quick: minutes; papers: all published claims; peers: others; large: A1's.")
    ] = "quick",
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="ID,ID", help="These experiments of whatever suite; repeatable."),
    ] = None,
    repetitions: Annotated[
        int, typer.Option(help="Of each variant, in turn. With fewer than 5 the results are labelled so.")
    ] = 5,
    work: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Datasets are made here once. Default: `work` in the folder of results."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of datasets, weights and draws.")] = 0,
    list_: Annotated[
        bool, typer.Option("--list", help="Show all experiments, and which can run here; measure nothing.")
    ] = False,
    report: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="Write README.md and pictures of earlier results anew; repeatable."),
    ] = None,
) -> None:
    """Measure what papers claim, side by side on emulated servers of this machine, and say what holds.

    `python scripts/bench --list`

    `python scripts/bench --suite quick --out results`

    `python scripts/bench D1 --out results`

    `python scripts/bench NAME --help`: programs that measure one part each; `--list` has their names.

    What is compared runs in turn (A B A B) on servers that are all up at once. Without root, ip and tc the
    servers share plain loopback, and no claim about a network is judged. Exit code 1: an experiment failed.
    """
    for table in list_tables() if list_ else ():
        show(table)
    for folder in () if list_ else report or ():
        write_pages(folder)
    if list_ or report:
        return
    if out is None:
        raise ConfigError("say with --out DIR where results go, or use --list to see what can be measured")
    from scripts.bench.records import BenchPlan

    if repetitions < 1 or seed < 0:
        raise ConfigError(f"--repetitions {repetitions} must be at least 1, --seed {seed} at least 0")
    chosen = choose(suite, [*(ids or []), *(only or [])])
    plan = BenchPlan(
        suite=suite,  # type: ignore[arg-type]  # choose() knows it
        out=out.absolute(),
        work=(work or out / "work").absolute(),
        repetitions=repetitions,
        seed=seed,
    )
    # As Ctrl-C does: what was started is ended on the way out.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        outcomes = measure(chosen, plan)
    except KeyboardInterrupt:
        warn(f"interrupted; what was measured is in {out}, and `{PROGRAM} --report {out}` makes a page of it")
        raise typer.Exit(INTERRUPTED) from None
    write_pages(out)
    from scripts.bench.figures import figures_of
    from scripts.bench.pages import summary

    for experiment, outcome in zip(chosen, outcomes, strict=True):
        print(f"{experiment.id}: {summary(figures_of(experiment, outcome))}")
    if any(one.status == "failed" for one in outcomes):
        raise typer.Exit(1)


def choose(suite: str, only: Sequence[str]) -> list[Experiment]:
    """Return the experiments that are asked for, each once; UnknownNameError for an unknown suite or id."""
    from scripts.bench import suites

    of_suite = suites.suite(suite)
    asked = [name for words in only for name in parse_names(words)]
    found = [suites.find(name) for name in asked] if asked else of_suite
    return list({one.id: one for one in found}.values())


def measure(experiments: Sequence[Experiment], plan: BenchPlan) -> list[Outcome]:
    """Run one after the other and tell what happens; one that fails does not stop the next."""
    from scripts.bench import driver
    from scripts.netlab.labs import what_is_missing

    missing = what_is_missing()
    if missing:
        warn(f"{missing}. The servers share plain loopback: no claim about a network is judged")
    if plan.repetitions < driver.FEWEST:
        warn(driver.QUICK_LOOK)
    outcomes = []
    for experiment in experiments:
        outcome = driver.run(experiment, plan, say)
        say(f"{experiment.id}: {outcome.status}{f' ({outcome.reason})' if outcome.reason else ''}")
        outcomes.append(outcome)
    return outcomes


def write_pages(folder: Path) -> None:
    """Draw the pictures of the results in ``folder`` and write its README.md."""
    from scripts.bench import pages, plots

    plots.draw(folder)
    print(f"report: {pages.write_page(folder)}")


def list_tables() -> tuple[Table, Table]:
    """Return all experiments (suites, claim, prediction, whether they can run here), and all programs."""
    from scripts.bench import suites

    experiments = Table("id", "suites", "claim", "prediction", "can run", show_lines=True)
    for one in suites.everything():
        reason = suites.why_absent(one)
        claim = f"{one.title}\n{one.claim.paper}: {one.claim.says}"
        experiments.add_row(one.id, ", ".join(one.suites), claim, one.prediction, reason or "yes")
    programs = Table("program", "what it measures")
    for name, (_, what) in suites.PROGRAMS.items():
        if what:
            programs.add_row(name, what)
    return experiments, programs


def main() -> None:
    """Run the command that the arguments of this process ask for, and end the process."""
    run_command_line(app, PROGRAM)
