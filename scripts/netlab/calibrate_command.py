"""``dglx lab calibrate``."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from dglx_dist.cli.lab_options import (
    EMULATED,
    Cpus,
    Internal,
    RanksPerServer,
    check_command,
    end,
    read_spec,
    say,
)
from dglx_dist.cli.lab_run_command import prepare
from dglx_dist.cli.launch import INTERRUPTED
from dglx_dist.cli.report_command import show, warn
from dglx_dist.errors import LabError
from dglx_dist.lab import host
from dglx_dist.lab.alive import scratch_folder
from dglx_dist.lab.calibrate import CalibrationPlan, CommandMeasure, write
from dglx_dist.lab.opening import open_lab
from dglx_dist.lab.phi import Calibration, check_arguments, find_rate
from dglx_dist.report.units import readable_seconds

_SEARCH = "Search"


def lab_calibrate(  # noqa: PLR0913  # one argument per option
    command: Annotated[
        list[str],
        typer.Argument(metavar="COMMAND", help="As for `dglx lab run`; it must train two epochs or more."),
    ],
    phi: Annotated[
        float,
        typer.Option(
            rich_help_panel=_SEARCH, help="Wanted share of its time that the network costs COMMAND, 0 to 1."
        ),
    ] = 0.65,
    tolerance: Annotated[
        float, typer.Option(rich_help_panel=_SEARCH, help="Good enough when phi is no further off.")
    ] = 0.03,
    tries: Annotated[
        int, typer.Option(rich_help_panel=_SEARCH, help="Most rates that are tried; the nearest counts.")
    ] = 6,
    servers: Annotated[int, typer.Option(rich_help_panel=EMULATED, help="Emulated servers.")] = 2,
    ranks_per_server: RanksPerServer = 1,
    internal: Internal = None,
    cpus: Cpus = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write calibration.json, and the output of every run."),
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(metavar="S", help="Give up when one run takes so many seconds.")
    ] = None,
) -> None:
    """Find the rate between servers at which the network takes a wanted share of COMMAND's time.

    Machines differ in how fast they compute, so equal rates compare nothing; equal shares do. phi = 1 -
    seconds of an epoch without limits / seconds at the rate. COMMAND is run once without limits, then at one
    rate after another; the first epoch of each run does not count.

        dglx lab calibrate --servers 2 --phi 0.65 -- dglx train data/demo --epochs 4 --eval-every 0

    The rate it ends with is what `--external` of `dglx lab run` takes. Needs emulated servers: Linux, root,
    ip and tc.
    """
    check_command(command, ranks_per_server, timeout)
    check_arguments(phi, tolerance, tries)
    missing = host.what_is_missing()
    if missing:
        raise LabError(f"a rate can only be found where links can be limited: {missing}")
    plan = CalibrationPlan(command=command, ranks_per_server=ranks_per_server, timeout_s=timeout)
    spec = read_spec(servers, None, internal, cpus)
    if out is not None:
        prepare(out)
    signal.signal(signal.SIGTERM, end)
    with ExitStack() as closing:
        lab = closing.enter_context(open_lab(spec))
        folder = out or closing.enter_context(scratch_folder())
        try:
            measure = CommandMeasure(lab, plan, folder, say)
            found = find_rate(measure, phi, tolerance=tolerance, max_tries=tries)
        except KeyboardInterrupt:
            say("interrupted; COMMAND has ended on all servers")
            raise typer.Exit(INTERRUPTED) from None
        written = None if out is None else write(out, found, lab, plan)
    show(tries_table(found))
    if not found.within_tolerance:
        warn(
            f"phi {found.phi:.2f} is the nearest to {phi:g} of {len(found.tries)} tries; more epochs per run "
            "make it less noisy, --tries allows more rates"
        )
    say(f"use --external {found.rate}" + ("" if written is None else f"; written to {written}"))


def tries_table(found: Calibration) -> Table:
    """Return one row per rate that was tried, after the one without a limit."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("rate", "seconds per epoch", "phi", ""):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    table.add_row("not limited", readable_seconds(found.seconds_free), "", "")
    for one in found.tries:
        chosen = "use this" if one.rate == found.rate else ""
        table.add_row(str(one.rate), readable_seconds(one.seconds), f"{one.phi:.3f}", chosen)
    return table
