"""``dglx lab run``."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from dglx_dist.cli.lab_options import (
    EMULATED,
    Cpus,
    External,
    Internal,
    RanksPerServer,
    check_command,
    end,
    read_spec,
    say,
)
from dglx_dist.cli.launch import INTERRUPTED
from dglx_dist.cli.report_command import show, warn
from dglx_dist.errors import ConfigError, StorageError
from dglx_dist.lab.alive import scratch_folder
from dglx_dist.lab.base import Card, label
from dglx_dist.lab.launch import run
from dglx_dist.lab.opening import attach, open_lab
from dglx_dist.lab.outcome import LabOutcome, find_outcome, write
from dglx_dist.report.units import plural, readable_bytes, readable_seconds

_RESULTS = "Results"


def lab_run(  # noqa: PLR0913  # one argument per option
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="COMMAND",
            help="`dglx train ...`, `python script.py ...`, `python -m module ...`, `script.py ...` or "
            "`-m module ...`; its options are its own.",
        ),
    ],
    servers: Annotated[
        int | None, typer.Option(rich_help_panel=EMULATED, help="Emulated servers. Default: 2.")
    ] = None,
    ranks_per_server: RanksPerServer = 1,
    external: External = None,
    internal: Internal = None,
    cpus: Cpus = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--name",
            rich_help_panel=EMULATED,
            help="Use the lab of this name that `dglx lab up` made, as it is, and leave it up.",
        ),
    ] = None,
    loopback: Annotated[
        bool,
        typer.Option(
            "--loopback",
            rich_help_panel=EMULATED,
            help="Emulate nothing: servers are torchrun nodes of this machine. Needs no root.",
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            rich_help_panel=_RESULTS,
            help="Write lab.json, the output of each server, and what each rank counted.",
        ),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(metavar="S", rich_help_panel=_RESULTS, help="End COMMAND after so many seconds."),
    ] = None,
) -> None:
    """Run COMMAND on emulated servers with slow links, started by torchrun on each, and count what they sent.

    Train on two servers, 100 Mbit/s between them, after `dglx partition ... --parts 2 --out data/demo`:

        dglx lab run --servers 2 --external 100mbit -- dglx train data/demo --epochs 5

    Any script that torchrun can start, four servers of half a core each:

        dglx lab run --servers 4 --external 1gbit --cpus 0.5 -- python train.py --strategy data_parallel

    A command that fails ends on all servers; the rank that failed first is told last, and its exit code is
    that of this command. Ctrl-C ends everything. Servers live in network namespaces, which need Linux, root
    and the programs ip and tc; where something is missing this says what, and runs on plain loopback, where
    no link is limited and the results say so.
    """
    check_command(command, ranks_per_server, timeout)
    given = {"--servers": servers, "--external": external, "--internal": internal, "--cpus": cpus}
    _refuse_beside_name(name, {**given, "--loopback": loopback})
    spec = read_spec(2 if servers is None else servers, external, internal, cpus)
    if out is not None:
        prepare(out)
    signal.signal(signal.SIGTERM, end)
    with ExitStack() as closing:
        lab = closing.enter_context(open_lab(spec, force_loopback=loopback) if name is None else attach(name))
        if lab.kind == "loopback" and not loopback:
            warn(f"nothing is emulated, COMMAND runs on plain loopback, because of: {lab.missing}")
        say(f"{plural(len(lab.servers), 'server')} of {plural(ranks_per_server, 'rank')}; {label(lab)}")
        trace = closing.enter_context(_trace_folder(out))
        try:
            done = run(
                lab,
                command,
                ranks_per_server=ranks_per_server,
                trace=trace,
                log_folder=out,
                timeout_s=timeout,
            )
        except KeyboardInterrupt:
            say("interrupted; COMMAND has ended on all servers", style="red")
            raise typer.Exit(INTERRUPTED) from None
        outcome = find_outcome(lab, command, ranks_per_server, done)
    _report(outcome, out)
    if done.failure is not None:
        say(done.failure, style="red")
    raise typer.Exit(done.exit_code)


def _refuse_beside_name(name: str | None, given: dict[str, object]) -> None:
    beside = [option for option, value in given.items() if value not in (None, False)]
    if name is not None and beside:
        raise ConfigError(
            f"--name {name} uses a lab that is up as it is: leave out {', '.join(beside)}, or take it down "
            f"with `dglx lab down {name}` and make another"
        )


@contextmanager
def _trace_folder(out: Path | None) -> Iterator[Path]:
    """Yield an empty folder for what the ranks count: below ``out``, else one that is removed."""
    if out is None:
        with scratch_folder() as temporary:
            yield temporary / "trace"
        return
    yield out / "trace"


def prepare(out: Path) -> None:
    """Make ``out`` and what is below it, without the traces of an earlier command.

    Raises:
        StorageError: nothing can be written there.
    """
    try:
        (out / "trace").mkdir(parents=True, exist_ok=True)
        # They would be taken for further sessions of this one.
        for earlier in out.glob("trace/rank-*"):
            earlier.unlink()
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise StorageError(
            f"cannot write to {out}: {error.strerror}; choose another folder with --out"
        ) from error


def _report(outcome: LabOutcome, out: Path | None) -> None:
    show(outcome_table(outcome))
    # Of a command that failed it goes without saying: ranks that were ended leave no count.
    if outcome.trace_missing is not None and outcome.run.failure is None:
        warn(f"the ledger of the ranks cannot be read: {outcome.trace_missing}")
    if out is not None:
        Console(highlight=False, soft_wrap=True, markup=False).print(f"written to {write(outcome, out)}")


def outcome_table(outcome: LabOutcome) -> Table:
    """Return one row per server: what its card and the ranks' ledger counted, and whether both agree."""
    epoch = outcome.epoch_seconds
    took = f"{readable_seconds(outcome.run.seconds)} s"
    if epoch is not None:
        several = len(outcome.trace.epoch_seconds()) > 1
        which = "per epoch after the first" if several else "for the only epoch"
        took += f", {readable_seconds(epoch)} s {which}"
    counted = bool(outcome.trace.sessions)
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        title=f"{outcome.label}: {took}",
        title_justify="left",
        caption=_LEGEND if counted else _NO_LEDGER,
        caption_justify="left",
    )
    for column in ("server", "card sent", "card received", "ledger sent", "ledger received", "ratio", ""):
        table.add_column(column, justify="left" if column in ("server", "") else "right", no_wrap=True)
    for one in outcome.witnesses:
        ratio = "" if one.ratio is None or one.verdict.startswith("too") else f"{one.ratio:.3f}"
        server = "all" if one.server is None else str(one.server)
        ledger = (*_both(one.ledger), ratio, one.verdict) if counted else ()
        table.add_row(server, *_both(one.card), *ledger)
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
    return readable_bytes(card.sent), readable_bytes(card.received)
