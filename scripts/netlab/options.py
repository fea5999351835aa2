"""What the commands of ``dglx lab`` share: options, what is checked first, how they speak and end."""

from __future__ import annotations

from collections.abc import Sequence
from types import FrameType
from typing import Annotated, NoReturn, TypeAlias

import typer
from rich.console import Console

from dglx_dist.errors import ConfigError
from dglx_dist.lab.base import LabSpec
from dglx_dist.lab.command import torchrun_arguments
from dglx_dist.lab.rates import Rate

EMULATED = "What is emulated"

External: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="RATE",
        rich_help_panel=EMULATED,
        help="Most that each server sends, and most that it receives, e.g. 100mbit, 2.5gbit. Default: not "
        "limited.",
    ),
]
Internal: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="RATE",
        rich_help_panel=EMULATED,
        help="The same for sockets between the ranks of one server. Default: not limited.",
    ),
]
Cpus: TypeAlias = Annotated[
    float | None,
    typer.Option(
        metavar="CORES",
        rich_help_panel=EMULATED,
        help="Cores of each server, may be a fraction. Default: this machine's, divided.",
    ),
]
RanksPerServer: TypeAlias = Annotated[
    int, typer.Option(rich_help_panel=EMULATED, help="Processes that torchrun starts on each.")
]


def read_spec(servers: int, external: str | None, internal: str | None, cpus: float | None) -> LabSpec:
    """Return the lab that the options ask for.

    Raises:
        ConfigError: one of them makes no sense.
    """
    return LabSpec(
        servers=servers,
        external=None if external is None else Rate.parse(external),
        internal=None if internal is None else Rate.parse(internal),
        cpus=cpus,
    )


def check_command(command: Sequence[str], ranks_per_server: int, timeout: float | None) -> None:
    """Find what is wrong with COMMAND and how it is run before any server is made.

    Raises:
        ConfigError: naming the option, or what to write in place of COMMAND.
    """
    torchrun_arguments(command)
    if ranks_per_server < 1:
        raise ConfigError(f"--ranks-per-server {ranks_per_server} must be at least 1")
    if timeout is not None and not 0 < timeout < float("inf"):
        raise ConfigError(f"--timeout {timeout:g} must be a number of seconds above 0")


def say(text: str, style: str = "") -> None:
    """Write a line to standard error; what goes to standard output is COMMAND's."""
    Console(stderr=True, soft_wrap=True).print(text, style=style, highlight=False, markup=False)


def end(number: int, frame: FrameType | None) -> NoReturn:
    """Handle SIGTERM: whoever ends the command means all that it started, which leaving its blocks ends."""
    raise SystemExit(128 + number)
