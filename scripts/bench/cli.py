"""The command line of the experiments."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from dglx_dist.cli import run_command_line
from dglx_dist.cli.common import show, warn
from dglx_dist.cli.train import INTERRUPTED
from dglx_dist.errors import ConfigError
from dglx_dist.options import names

if TYPE_CHECKING:
    from scripts.bench.driver import Step
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
        typer.Argument(metavar="[ID]...", help="The same as --only.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Results go here: `ID.json` each, `README.md`, pictures."),
    ] = None,
    suite: Annotated[
        str,
        typer.Option(
            help="quick: minutes; papers: all published claims; peers: other packages; large: A1's."
        ),
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
    if list_:
        show(list_table())
        show(program_table())
        return
    if report:
        for folder in report:
            write_pages(folder)
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
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        outcomes = measure(chosen, plan)
    except KeyboardInterrupt:
        warn(f"interrupted; what was measured is in {out}, and `{PROGRAM} --report {out}` makes a page of it")
        raise typer.Exit(INTERRUPTED) from None
    write_pages(out)
    show(outcome_table(chosen, outcomes))
    if any(one.status == "failed" for one in outcomes):
        raise typer.Exit(1)


def choose(suite: str, only: Sequence[str]) -> list[Experiment]:
    """Return the experiments that are asked for, each once.

    Raises:
        UnknownNameError: there is no such suite or experiment.
    """
    from scripts.bench import suites

    of_suite = suites.suite(suite)
    asked = [name for words in only for name in names(words)]
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
    with Telling() as tell:
        for experiment in experiments:
            outcome = driver.run(experiment, plan, tell.step)
            tell.line(f"{experiment.id}: {outcome.status}{f' ({outcome.reason})' if outcome.reason else ''}")
            outcomes.append(outcome)
    return outcomes


def write_pages(folder: Path) -> None:
    """Draw the pictures of the results in ``folder`` and write its README.md."""
    from scripts.bench import pages, plots

    plots.draw(folder)
    page = pages.write_page(folder)
    Console(highlight=False, soft_wrap=True, markup=False).print(f"report: {page}")


class Telling:
    """Shows each step: as a bar where somebody looks on, else as lines; on standard error."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[left]}"),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=1, left="")

    def __enter__(self) -> Telling:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def step(self, step: Step) -> None:
        """Show what is done now, how far it is, and how long the rest may take."""
        left = "" if step.seconds_left is None else f"about {readable_minutes(step.seconds_left)} left"
        text = f"{step.experiment}: {step.doing}"
        if not step.total:
            # Making datasets has a bar of its own, and there can be one at a time.
            self._bar.stop()
            self.line(text)
            return
        if self._bar.disable:
            self.line(f"{text} ({step.done} of {step.total} jobs{', ' if left else ''}{left})")
        self._bar.start()
        self._bar.update(
            self._task, description=text, completed=step.done, total=max(step.total, 1), left=left
        )

    def line(self, text: str) -> None:
        """Show a line that stays."""
        self._console.print(text)


def readable_minutes(seconds: float) -> str:
    """Write e.g. 42 -> ``42 s``, 150 -> ``3 min``."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def list_table() -> Table:
    """Return all experiments: suites, claim, prediction and whether they can run here."""
    from scripts.bench import suites

    table = Table("id", "suites", "claim", "prediction", "can run", show_lines=True)
    for one in suites.everything():
        reason = suites.why_absent(one)
        claim = f"{one.title}\n{one.claim.paper}: {one.claim.says}"
        table.add_row(one.id, ", ".join(one.suites), claim, one.prediction, reason or "yes")
    return table


def program_table() -> Table:
    """Return all programs beside the experiments: name and what they measure."""
    from scripts.bench import suites

    table = Table("program", "what it measures")
    for name, (_, what) in suites.PROGRAMS.items():
        if what:
            table.add_row(name, what)
    return table


def outcome_table(experiments: Sequence[Experiment], outcomes: Sequence[Outcome]) -> Table:
    """Return one row per ratio of each outcome: what was claimed, predicted and measured."""
    table = Table("id", "claim", "ratio", "predicted", "measured", "outside, MB", "verdict", show_lines=True)
    for experiment, outcome in zip(experiments, outcomes, strict=True):
        for row in _rows(outcome):
            table.add_row(experiment.id, experiment.claim.says, *row)
    return table


def _rows(outcome: Outcome) -> Sequence[tuple[str, ...]]:
    from scripts.bench.figures import ratio_figures, variant_figures
    from scripts.bench.pages import judge

    if outcome.status != "measured":
        return [("", "", "", "", f"{outcome.status}: {outcome.reason.splitlines()[0]}")]
    outside = {one.variant.name: f"{one.bytes_outside / 1e6:.3g}" for one in variant_figures(outcome)}
    rows = []
    for one in ratio_figures(outcome):
        value = one.value
        measured = "" if value is None else f"{value.median:.2f} ({value.low:.2f} to {value.high:.2f})"
        predicted = "" if one.ratio.predicted is None else f"{one.ratio.predicted:.2f}"
        bytes_outside = f"{outside.get(one.ratio.over, '-')} / {outside.get(one.ratio.under, '-')}"
        label = f"; {outcome.label}" if outcome.label else ""
        rows.append((one.ratio.name, predicted, measured, bytes_outside, f"{judge(one)}{label}"))
    return rows or [("", "", "", "", "measured; it has no ratio")]


def _interrupt(*_: object) -> NoReturn:
    # As Ctrl-C does: what was started is ended on the way out.
    raise KeyboardInterrupt


def main() -> None:
    """Run the command that the arguments of this process ask for, and end the process."""
    run_command_line(app, PROGRAM)
