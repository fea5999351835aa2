"""``dglx lab``: emulated servers that stay up, and what is up; the other commands have files of their own."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from dglx_dist.cli.lab_calibrate_command import lab_calibrate
from dglx_dist.cli.lab_options import EMULATED, Cpus, External, Internal, read_spec
from dglx_dist.cli.lab_run_command import lab_run
from dglx_dist.cli.report_command import show, warn

lab_app = typer.Typer(
    name="lab",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


@lab_app.callback(
    epilog="""
**Two servers with a slow link, in one command**

    dglx lab run --servers 2 --external 100mbit -- dglx train data/demo --epochs 2

**The same, for several commands**

    dglx lab up slow --servers 2 --external 100mbit\n
    dglx lab run --name slow -- dglx train data/demo --epochs 2\n
    dglx lab down slow

A server is a set of Linux namespaces: its own network, process numbers, mounts and `/dev/shm`, its share of
the cores, and a card that is joined to a bridge. Needs root and the packages iproute2 and util-linux.
"""
)
def lab() -> None:
    """Emulate servers with slow links between them on this machine, and run commands on them."""


# Options after the first word of COMMAND are COMMAND's, also without --.
lab_app.command("run", no_args_is_help=True, context_settings={"allow_interspersed_args": False})(lab_run)
lab_app.command("calibrate", no_args_is_help=True, context_settings={"allow_interspersed_args": False})(
    lab_calibrate
)


@lab_app.command()
def up(
    name: Annotated[
        str,
        typer.Argument(help="What it is called: up to 40 letters, digits and dashes.", show_default=False),
    ],
    servers: Annotated[int, typer.Option(rich_help_panel=EMULATED, help="Emulated servers.")] = 2,
    external: External = None,
    internal: Internal = None,
    cpus: Cpus = None,
) -> None:
    """Make a lab that stays up until `dglx lab down NAME`.

    What is left of labs that were killed is removed first. A name that exists is refused.

    Example: `dglx lab up slow --servers 4 --external 1gbit --internal 40gbit`
    """
    from dglx_dist.lab import opening

    made = opening.up(read_spec(servers, external, internal, cpus), name)
    first, last = made.servers[0], made.servers[-1]
    share = f"{first.cpu_share:.3g} cores each, held by {first.cpu_held_by}"
    _say(f"{name}: {servers} servers, {first.address} to {last.address}, {share}")
    _say(f"run on it: dglx lab run --name {name} -- COMMAND; take it down: dglx lab down {name}")


@lab_app.command()
def down(
    name: Annotated[str | None, typer.Argument(help="Which lab.", show_default=False)] = None,
    everything: Annotated[
        bool,
        typer.Option("--all", help="All labs of this machine, those of other users and shells included."),
    ] = False,
) -> None:
    """Take a lab down: end all that runs on its servers, and remove what the kernel kept for it.

    Example: `dglx lab down slow`, or `dglx lab down --all`, which also removes what killed labs left.
    """
    from dglx_dist.errors import ConfigError
    from dglx_dist.lab import cleaning

    if (name is None) is not everything:
        raise ConfigError("name one lab, or give --all; `dglx lab status` lists them")
    if name is not None:
        cleaning.down(name)
    gone = [name] if name is not None else cleaning.down_all()
    _say(f"down: {', '.join(gone)}" if gone else "no lab was up")


@lab_app.command()
def status() -> None:
    """List the labs of this machine: servers, rates, cores, and whether the process that made them lives.

    Says first what this machine lacks for emulated servers, if anything.
    """
    from dglx_dist.lab import host, state

    missing = host.what_is_missing()
    if missing:
        warn(f"no servers can be emulated here: {missing}")
    labs = state.list_labs()
    if not labs:
        _say("no lab is up")
        return
    table = Table("lab", "servers", "external", "internal", "cores each", "held by", "state", "created")
    for one in labs:
        spec, first = one.spec, next(iter(one.servers), None)
        table.add_row(
            one.name,
            str(spec.servers),
            str(spec.external or "unlimited"),
            str(spec.internal or "unlimited"),
            f"{first.cpu_share:.3g}" if first else "",
            first.cpu_held_by if first else "",
            state.describe_life(one),
            one.created,
        )
    show(table)


def _say(text: str) -> None:
    Console(highlight=False, soft_wrap=True, markup=False).print(text)
