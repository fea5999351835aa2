"""What a user writes after ``--``, as arguments of torchrun."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from dglx_dist.errors import ConfigError

_FORMS = (
    "write `dglx train ...`, `python script.py ...`, `python -m module ...`, `script.py ...` "
    "or `-m module ...`"
)
# What cli/common.py calls LAUNCHED: the launcher shows the error of the rank that failed first, once.
_LAUNCHED = "--launched"


def torchrun_arguments(command: Sequence[str]) -> list[str]:
    """Return what torchrun is to run for ``command``: a script or ``-m`` and a module, and its arguments.

    ``python`` means the Python that runs the lab, whatever stands before or after its name.

    Raises:
        ConfigError: it is none of the forms that ranks can be started in, starts ranks itself, or its script
            does not exist; the message says what to write.
    """
    if not command:
        raise ConfigError(f"there is no command to run; {_FORMS}")
    first, rest = command[0], list(command[1:])
    program = Path(first).name
    if program == "dglx":
        return _dglx(rest)
    if re.fullmatch(r"python(\d(\.\d+)?)?", program):
        return _python(command, rest)
    if first == "-m" or first.endswith(".py") or _is_program(first):
        return _python(command, list(command))
    if program in ("torchrun", "accelerate", "mpirun", "sh", "bash"):
        raise ConfigError(
            f"{' '.join(command)!r}: the lab starts torchrun on each server itself; leave {program} and its "
            f"options out: {_FORMS}"
        )
    raise ConfigError(f"{first!r} is nothing that torchrun can start as ranks; {_FORMS}")


def _dglx(arguments: list[str]) -> list[str]:
    name = next((word for word in arguments if not word.startswith("-")), "")
    if name != "train":
        raise ConfigError(
            f"`dglx {name}` runs in one process and needs no lab; run it by itself, and `dglx train` here"
        )
    return _without_ranks(["-m", "dglx_dist.cli", _LAUNCHED, *arguments])


def _python(command: Sequence[str], arguments: list[str]) -> list[str]:
    if arguments[:1] == ["-m"] and len(arguments) > 1:
        return _without_ranks(arguments) if arguments[1] == "dglx_dist.cli" else arguments
    if not arguments or arguments[0].startswith("-"):
        raise ConfigError(
            f"{' '.join(command)!r}: torchrun starts a script or a module, without options of Python; "
            + _FORMS
        )
    if not Path(arguments[0]).is_file() and not _is_program(arguments[0]):
        raise ConfigError(
            f"the script {arguments[0]!r} does not exist in {Path.cwd()}; give its path from "
            "here, or a whole one"
        )
    return arguments


def _is_program(path: str) -> bool:
    """Return whether ``path`` is a folder that Python runs, such as scripts/bench."""
    return Path(path, "__main__.py").is_file()


def _without_ranks(arguments: list[str]) -> list[str]:
    if any(word == "--ranks" or word.startswith("--ranks=") for word in arguments):
        raise ConfigError(
            "`dglx train --ranks` would start ranks of its own; leave it out: the lab starts --servers times "
            "--ranks-per-server of them, which are options of the lab and stand before --"
        )
    return arguments
