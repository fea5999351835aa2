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
        list[str] | None,
        typer.Argument(metavar="[ID]...", help="Experiments to run, as with --only.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Folder for the results: one `ID.json` each, `README.md`, pictures."
        ),
    ] = None,
    suite: Annotated[
        str,
        typer.Option(
            help="Suite to run: quick (minutes), papers (claims), peers (other packages), large (A1)."
        ),
    ] = "quick",
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="ID,ID", help="Experiments to run, from any suite. Repeatable."),
    ] = None,
    repetitions: Annotated[
        int,
        typer.Option(help="Number of repetitions of each variant. Results with fewer than 5 are labelled."),
    ] = 5,
    work: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Folder for generated datasets. Default: `work` in the folder of results."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed for datasets, weights and sampling.")] = 0,
    list_: Annotated[
        bool, typer.Option("--list", help="List all experiments and whether they can run here, then exit.")
    ] = False,
    report: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="Rewrite README.md and pictures of earlier results. Repeatable."),
    ] = None,
) -> None:
    """Reproduce published claims side by side on emulated servers, and report which of them hold.

    `python scripts/bench --list`

    `python scripts/bench --suite quick --out results`

    `python scripts/bench D1 --out results`

    `python scripts/bench NAME --help` shows a program that measures one component. `--list` prints all names.

    Variants run in turn (A B A B) on servers that are all up at once. Without root, ip and tc the servers
    share plain loopback, and claims about the network are not judged. The exit code is 1 if an experiment
    failed.
    """
    for table in list_tables() if list_ else ():
        show(table)
    for folder in () if list_ else report or ():
        write_pages(folder)
    if list_ or report:
        return
    if out is None:
        raise ConfigError("no folder for the results. Give --out DIR, or use --list to see all experiments")
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
    # SIGTERM acts like Ctrl-C, so that started jobs are stopped on the way out.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        outcomes = measure(chosen, plan)
    except KeyboardInterrupt:
        warn(f"interrupted. Finished measurements are in {out}. Use `{PROGRAM} --report {out}` to see them")
        raise typer.Exit(INTERRUPTED) from None
    write_pages(out)
    from scripts.bench.figures import figures_of
    from scripts.bench.pages import summary

    for experiment, outcome in zip(chosen, outcomes, strict=True):
        print(f"{experiment.id}: {summary(figures_of(experiment, outcome))}")
    if any(outcome.status == "failed" for outcome in outcomes):
        raise typer.Exit(1)


def choose(suite: str, only: Sequence[str]) -> list[Experiment]:
    """Return the requested experiments without duplicates.

    Raises:
        UnknownNameError: the suite or an id does not exist.
    """
    from scripts.bench import suites

    experiments = suites.suite(suite)
    ids = [name for words in only for name in parse_names(words)]
    chosen = [suites.find(name) for name in ids] if ids else experiments
    return list({experiment.id: experiment for experiment in chosen}.values())


def measure(experiments: Sequence[Experiment], plan: BenchPlan) -> list[Outcome]:
    """Run the experiments one after the other. A failed experiment does not stop the next one."""
    from scripts.bench import driver
    from scripts.netlab.labs import what_is_missing

    missing = what_is_missing()
    if missing:
        warn(f"{missing}. The servers share plain loopback, so claims about the network are not judged")
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
    """Return a table of all experiments and a table of all programs."""
    from scripts.bench import suites

    experiments = Table("id", "suites", "claim", "prediction", "can run", show_lines=True)
    for experiment in suites.everything():
        reason = suites.why_absent(experiment)
        claim = f"{experiment.title}\n{experiment.claim.paper}: {experiment.claim.says}"
        experiments.add_row(
            experiment.id, ", ".join(experiment.suites), claim, experiment.prediction, reason or "yes"
        )
    programs = Table("program", "what it measures")
    for name, (_, purpose) in suites.PROGRAMS.items():
        if purpose:
            programs.add_row(name, purpose)
    return experiments, programs


def main() -> None:
    """Run the command line of this process, and exit."""
    run_command_line(app, PROGRAM)
