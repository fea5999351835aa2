"""``python scripts/netlab``: run commands on emulated servers with slow links, and keep such servers up."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer
from rich import box
from rich.table import Table

from dglx_dist.cli import run_command_line
from dglx_dist.cli.common import command, show, warn, write
from dglx_dist.cli.train import INTERRUPTED
from dglx_dist.errors import ConfigError
from dglx_dist.memory import format_bytes
from dglx_dist.options import ABOVE_ZERO, at_least, check_ranges, option, prefix_errors
from dglx_dist.planner.records import Rate
from dglx_dist.progress import say
from dglx_dist.report.tables import format_seconds, plural
from scripts.netlab import labs, state
from scripts.netlab.base import Card, LabSpec, label
from scripts.netlab.calibrate import (
    Calibration,
    CommandMeasure,
    check_arguments,
    find_rate,
    write_calibration,
)
from scripts.netlab.labs import attach, open_lab
from scripts.netlab.launch import run as run_on
from scripts.netlab.launch import torchrun_arguments
from scripts.netlab.traces import LabOutcome, find_outcome, make_out, write_outcome
from scripts.out_files import scratch_folder

PROGRAM = "python scripts/netlab"

_emulated = partial(option, panel="What is emulated")
_rate = partial(_emulated, None, parse=prefix_errors(Rate.parse), metavar="RATE")
_external = partial(
    _rate, "Most that each server sends, and most that it receives, e.g. 100mbit. Default: not limited."
)


@dataclass(frozen=True, kw_only=True)
class LabConfig:
    """Options of all commands that make servers."""

    servers: int = _emulated(2, "Emulated servers.")
    external: Rate | None = None
    internal: Rate | None = _rate(
        "The same for sockets between the ranks of one server. Default: not limited."
    )
    cpus: float | None = _emulated(
        None, "Cores of each server, may be a fraction. Default: this machine's, divided.", metavar="CORES"
    )

    @property
    def spec(self) -> LabSpec:
        """The lab that is asked for; ConfigError: it makes no sense."""
        return LabSpec(servers=self.servers, external=self.external, internal=self.internal, cpus=self.cpus)


@dataclass(frozen=True, kw_only=True)
class CommandConfig(LabConfig):
    """Options of what runs a command."""

    command: list[str] = option(
        ...,
        "`dglx train ...`, `python script.py ...`, `python -m module ...`, `script.py ...` or "
        "`-m module ...`; its options are its own.",
        metavar="COMMAND",
    )
    ranks_per_server: int = _emulated(1, "Processes that torchrun starts on each.", check=at_least(1))
    out: Path | None = option(
        None, "Write what is found, and the output of each server.", metavar="DIR", panel="Results"
    )
    timeout: float | None = option(
        None, "End COMMAND after so many seconds.", check=ABOVE_ZERO, metavar="S", panel="Results"
    )

    def __post_init__(self) -> None:
        torchrun_arguments(self.command)
        check_ranges(self)

    def folder(self, closing: ExitStack) -> Path:
        """Return where results go, a folder that is removed in the end without ``out``."""
        return self.out or closing.enter_context(scratch_folder())


@dataclass(frozen=True, kw_only=True)
class RunConfig(CommandConfig):
    """Options of ``run``."""

    external: Rate | None = _external()
    name: str | None = _emulated(None, "Use the lab of this name that `up` made, as it is, and leave it up.")
    loopback: bool = _emulated(
        False, "Emulate nothing: servers are torchrun nodes of this machine. Needs no root."
    )
    given: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class CalibrateConfig(CommandConfig):
    """Options of ``calibrate``."""

    phi: float = option(
        0.65, "Wanted share of its time that the network costs COMMAND, 0 to 1.", panel="Search"
    )
    tolerance: float = option(0.03, "Good enough when phi is no further off.", panel="Search")
    tries: int = option(6, "Most rates that are tried; the nearest counts.", panel="Search")


@dataclass(frozen=True, kw_only=True)
class UpConfig(LabConfig):
    """Options of ``up``."""

    external: Rate | None = _external()
    name: str = option(..., "What it is called: up to 40 letters, digits and dashes.")


app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


@app.callback(
    epilog="""
**Two servers with a slow link, in one command**

    python scripts/netlab run --servers 2 --external 100mbit -- dglx train data/demo --epochs 2

**The same, for several commands**

    python scripts/netlab up slow --servers 2 --external 100mbit\n
    python scripts/netlab run --name slow -- dglx train data/demo --epochs 2\n
    python scripts/netlab down slow

A server is a set of Linux namespaces: its own network, process numbers, mounts and `/dev/shm`, its share of
the cores, and a card that is joined to a bridge. Needs root and the packages iproute2 and util-linux.
"""
)
def lab() -> None:
    """Emulate servers with slow links between them on this machine, and run commands on them."""


# Options after the first word of COMMAND are COMMAND's, also without --.
_OF_COMMAND = {"allow_interspersed_args": False}


@app.command(no_args_is_help=True, context_settings=_OF_COMMAND)
@command(RunConfig)
def run(config: RunConfig) -> None:
    """Run COMMAND on emulated servers with slow links, started by torchrun on each, and count what they sent.

    Train on two servers, 100 Mbit/s between them, after `dglx partition ... --parts 2 --out data/demo`:

        python scripts/netlab run --servers 2 --external 100mbit -- dglx train data/demo --epochs 5

    Any script that torchrun can start, four servers of half a core each:

        python scripts/netlab run --servers 4 --external 1gbit --cpus 0.5 -- python train.py

    A command that fails ends on all servers; the rank that failed first is told last, and its exit code is
    that of this command. Ctrl-C ends everything. Servers live in network namespaces, which need Linux, root
    and the programs ip and tc; where something is missing this says what, and runs on plain loopback, where
    no link is limited and the results say so.
    """
    beside = [
        name for name in ("servers", "external", "internal", "cpus", "loopback") if name in config.given
    ]
    if config.name is not None and beside:
        raise ConfigError(
            f"--name {config.name} uses a lab that is up as it is: leave out --{', --'.join(beside)}, or "
            f"take it down with `{PROGRAM} down {config.name}` and make another"
        )
    spec, ranks, out = config.spec, config.ranks_per_server, config.out
    if out is not None:
        make_out(out)
    with _ended_on_signals(), ExitStack() as closing:
        lab = closing.enter_context(
            open_lab(spec, force_loopback=config.loopback) if config.name is None else attach(config.name)
        )
        if lab.kind == "loopback" and not config.loopback:
            warn(f"nothing is emulated, COMMAND runs on plain loopback, because of: {lab.missing}")
        say(f"{plural(len(lab.servers), 'server')} of {plural(ranks, 'rank')}; {label(lab)}")
        folder = config.folder(closing)
        done = run_on(
            lab,
            config.command,
            ranks_per_server=ranks,
            trace=folder / "trace",
            log_folder=out,
            timeout_s=config.timeout,
        )
        outcome = find_outcome(lab, config.command, ranks, done)
    _report(outcome, out)
    if done.failure is not None:
        say(done.failure, style="red")
    raise typer.Exit(done.exit_code)


@contextmanager
def _ended_on_signals() -> Iterator[None]:
    # Whoever ends the command means all that it started, which leaving its blocks ends.
    def end(number: int, _: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    former = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except KeyboardInterrupt:
        say("interrupted; COMMAND has ended on all servers", style="red")
        raise typer.Exit(INTERRUPTED) from None
    finally:
        signal.signal(signal.SIGTERM, former)


def _report(outcome: LabOutcome, out: Path | None) -> None:
    show(outcome_table(outcome))
    # Of a command that failed it goes without saying: ranks that were ended leave no count.
    if outcome.trace_missing is not None and outcome.run.failure is None:
        warn(f"the ledger of the ranks cannot be read: {outcome.trace_missing}")
    if out is not None:
        write(f"written to {write_outcome(outcome, out)}")


def outcome_table(outcome: LabOutcome) -> Table:
    """Return one row per server: what its card and the ranks' ledger counted, and whether both agree."""
    epoch = outcome.epoch_seconds
    took = f"{format_seconds(outcome.run.seconds)} s"
    if epoch is not None:
        several = len(outcome.trace.epoch_seconds()) > 1
        which = "per epoch after the first" if several else "for the only epoch"
        took += f", {format_seconds(epoch)} s {which}"
    counted = bool(outcome.trace.sessions)
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        title=f"{outcome.lab['label']}: {took}",
        title_justify="left",
        caption=_LEGEND if counted else _NO_LEDGER,
        caption_justify="left",
    )
    for column in ("server", "card sent", "card received", "ledger sent", "ledger received", "ratio", ""):
        table.add_column(column, justify="left" if column in ("server", "") else "right", no_wrap=True)
    for witness in outcome.witnesses:
        ratio = "" if witness.ratio is None or witness.verdict.startswith("too") else f"{witness.ratio:.3f}"
        server = "all" if witness.server is None else str(witness.server)
        ledger = (*_both(witness.ledger), ratio, witness.verdict) if counted else ()
        table.add_row(server, *_both(witness.card), *ledger)
    if not outcome.witnesses:
        for number, (sent, received) in outcome.trace.ledger_outside_by_server().items():
            table.add_row(str(number), "", "", *_both(Card(sent=sent, received=received)), "", "no card here")
    return table


_LEGEND = (
    "bytes between servers; card: with headers, starting up and keeping in touch; ledger: what dglx_dist "
    "counted; ratio: card / ledger"
)
_NO_LEDGER = "there is no ledger: COMMAND opened no session of dglx_dist, or its ranks did not end well"


def _both(card: Card) -> tuple[str, str]:
    return format_bytes(card.sent), format_bytes(card.received)


@app.command(no_args_is_help=True, context_settings=_OF_COMMAND)
@command(CalibrateConfig)
def calibrate(config: CalibrateConfig) -> None:
    """Find the rate between servers at which the network takes a wanted share of COMMAND's time.

    Machines differ in how fast they compute, so equal rates compare nothing; equal shares do. phi = 1 -
    seconds of an epoch without limits / seconds at the rate. COMMAND is run once without limits, then at one
    rate after another; the first epoch of each run does not count.

        python scripts/netlab calibrate --phi 0.65 -- dglx train data/demo --epochs 4 --eval-every 0

    The rate it ends with is what `--external` of `run` takes. Needs emulated servers: Linux, root, ip and tc.
    """
    search = config.phi, config.tolerance, config.tries
    check_arguments(*search)
    spec, out = config.spec, config.out
    if out is not None:
        make_out(out)
    with _ended_on_signals(), ExitStack() as closing:
        lab = closing.enter_context(open_lab(spec))
        measure = CommandMeasure(
            lab,
            config.command,
            config.folder(closing),
            say,
            ranks_per_server=config.ranks_per_server,
            timeout_s=config.timeout,
        )
        calibration = find_rate(measure, *search)
        written = None if out is None else write_calibration(out, calibration, measure)
    show(tries_table(calibration))
    if not calibration.within_tolerance:
        warn(
            f"phi {calibration.phi:.2f} is the nearest to {config.phi:g} in {len(calibration.tries)} tries. "
            "Use more epochs per run to reduce the noise, or raise --tries"
        )
    say(f"use --external {calibration.rate}" + ("" if written is None else f"; written to {written}"))


def tries_table(calibration: Calibration) -> Table:
    """Return one row per rate that was tried, after the one without a limit."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("rate", "seconds per epoch", "phi", ""):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    table.add_row("not limited", format_seconds(calibration.seconds_free), "", "")
    for attempt in calibration.tries:
        chosen = "use this" if attempt.rate == calibration.rate else ""
        table.add_row(str(attempt.rate), format_seconds(attempt.seconds), f"{attempt.phi:.3f}", chosen)
    return table


@app.command()
@command(UpConfig)
def up(config: UpConfig) -> None:
    """Make a lab that stays up until `python scripts/netlab down NAME`.

    What is left of labs that were killed is removed first. A name that exists is refused.

    Example: `python scripts/netlab up slow --servers 4 --external 1gbit --internal 40gbit`
    """
    name, made = config.name, labs.open_detached(config.spec, config.name)
    first, last = made.servers[0], made.servers[-1]
    share = f"{first.cpu_share:.3g} cores each, held by {first.cpu_held_by}"
    write(f"{name}: {config.servers} servers, {first.address} to {last.address}, {share}")
    write(f"run on it: {PROGRAM} run --name {name} -- COMMAND; take it down: {PROGRAM} down {name}")


@app.command()
def down(
    name: Annotated[str | None, typer.Argument(help="Which lab.", show_default=False)] = None,
    everything: Annotated[
        bool,
        typer.Option("--all", help="All labs of this machine, those of other users and shells included."),
    ] = False,
) -> None:
    """Take a lab down: end all that runs on its servers, and remove what the kernel kept for it.

    Example: `python scripts/netlab down slow`; `down --all` also removes what killed labs left.
    """
    if (name is None) is not everything:
        raise ConfigError("name one lab, or give --all; `python scripts/netlab status` lists them")
    gone = state.take_down_all() if name is None else state.take_down(name)
    write(f"down: {', '.join(gone)}" if gone else "no lab was up")


@app.command()
def status() -> None:
    """List the labs of this machine: servers, rates, cores, and whether the process that made them lives.

    Says first what this machine lacks for emulated servers, if anything.
    """
    missing = labs.what_is_missing()
    if missing:
        warn(f"no servers can be emulated here: {missing}")
    noted = state.list_labs()
    if not noted:
        write("no lab is up")
        return
    table = Table("lab", "servers", "external", "internal", "cores each", "held by", "state", "created")
    for lab in noted:
        spec, first = lab.spec, next(iter(lab.servers), None)
        table.add_row(
            lab.name,
            str(spec.servers),
            str(spec.external or "unlimited"),
            str(spec.internal or "unlimited"),
            f"{first.cpu_share:.3g}" if first else "",
            first.cpu_held_by if first else "",
            state.describe_life(lab),
            lab.created,
        )
    show(table)


def main() -> None:
    """Run the command that the arguments of this process ask for, and end the process."""
    run_command_line(app, PROGRAM)
