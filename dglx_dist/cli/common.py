"""Console output, errors and option values shared by the commands."""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.table import Table

from dglx_dist.comm.topology import launched_by_torchrun, read_topology
from dglx_dist.errors import ConfigError, DglxError

T = TypeVar("T")

LAUNCHED = "--launched"
"""Hidden flag of ranks whose launcher shows their error, so that they need not."""


def report_error(error: Exception, *, debug: bool) -> None:
    """Show one message on standard error; with ``debug`` a traceback instead.

    A rank also leaves its message where torchrun collects it; the launcher of ``dglx train`` shows the first.
    """
    if launched_by_torchrun():
        # Imported here: it loads torch, which torchrun's ranks have loaded anyway.
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)
    if debug:
        Console(stderr=True, soft_wrap=True).print_exception()
    elif LAUNCHED not in sys.argv:
        rank = f"rank {read_topology().rank}: " if launched_by_torchrun() else ""
        say(f"{rank}{_message(error)}", "red")


def _message(error: Exception) -> str:
    if isinstance(error, DglxError):
        return f"error: {error}"
    return f"unexpected {type(error).__name__}: {error}\nrun the same command with --debug for the traceback"


def write(text: str, style: str = "") -> None:
    """Write a line to standard output, brackets and colons as they are."""
    Console(highlight=False, soft_wrap=True, markup=False, emoji=False).print(text, style=style)


def say(text: str, style: str = "") -> None:
    """Write a line to standard error."""
    Console(stderr=True, soft_wrap=True).print(text, style=style, highlight=False, markup=False)


def warn(text: str) -> None:
    """Write a warning to standard error."""
    say(f"warning: {text}", "yellow")


def show(table: Table) -> None:
    """Print a table; at least 150 columns wide where the output is no terminal."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=max(console.width, 150))
    console.print(table)


def draw_or_warn(draw: Callable[[], object], target: Path, remedy: str = "", *, quiet: bool = False) -> None:
    """Call ``draw``, which writes ``target``, and print its path, or warn why it cannot be written.

    Args:
        draw: Writes ``target`` into its folder, which is created if need be.
        target: The picture.
        remedy: End of the warning, e.g. ``; say where with --picture FILE``.
        quiet: Do not print the path, as beside JSON.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        draw()
    except OSError as error:
        warn(f"the picture could not be written to {target}: {error.strerror}{remedy}")
    else:
        if not quiet:
            write(f"picture: {target}")


def check_picture(picture: Path, option: str, example: str) -> None:
    """Create the folder of ``picture``, the value of ``option``; ConfigError unless it can be written."""
    try:
        picture.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=picture.parent):
            is_folder = picture.is_dir()
    except OSError as error:
        raise ConfigError(
            f"{option} {picture} cannot be written ({error.strerror}); give a file in a folder that can be"
        ) from error
    if is_folder:
        raise ConfigError(f"{option} {picture} is a folder; give the name of a file in it, such as {example}")


def names(text: str, _option: str = "") -> tuple[str, ...]:
    """Read ``train,degree`` as ("train", "degree")."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def whole_numbers(text: str, option: str) -> tuple[int, ...]:
    """Read ``25,10`` as (25, 10); -1 is allowed and means all.

    Raises:
        ConfigError: a word is no whole number of at least -1.
    """
    try:
        numbers = tuple(int(word) for word in names(text))
    except ValueError:
        raise ConfigError(f"{option} {text!r} must be whole numbers with commas, like 25,10") from None
    if not numbers or any(number < -1 for number in numbers):
        raise ConfigError(f"{option} {text!r} must be numbers of at least -1 (-1: all), like 25,10")
    return numbers


def fractions(text: str, option: str) -> tuple[float, ...]:
    """Read ``1,1,2`` as (1.0, 1.0, 2.0).

    Raises:
        ConfigError: a word is no number.
    """
    try:
        return tuple(float(word) for word in names(text))
    except ValueError:
        raise ConfigError(f"{option} {text!r} must be numbers with commas, like 1,1,2") from None


def tolerances(text: str, option: str) -> float | dict[str, float]:
    """Read ``0.05`` as 0.05 for all, ``train=0.1,degree=0.02`` as one for each; nothing is {}.

    Raises:
        ConfigError: ``text`` is neither.
    """
    found = by_name(text, option) or {}
    try:
        return float(found) if isinstance(found, str) else {name: float(found[name]) for name in found}
    except ValueError:
        raise ConfigError(f"{option} {text!r} must be like 0.05 or train=0.1,degree=0.02") from None


def by_name(text: str, option: str) -> str | dict[str, str]:
    """Read ``float16`` as one value for all, ``feat=float16,x=bfloat16`` as one for each.

    Raises:
        ConfigError: some words have ``=`` and others not.
    """
    return pairs(names(text), option) if "=" in text else text


def pairs(words: Sequence[str], option: str) -> dict[str, str]:
    """Read ["a=1", "b=x"] as {"a": "1", "b": "x"}.

    Raises:
        ConfigError: a word has no ``=``.
    """
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"{option} {word!r} must be NAME=VALUE")
        found[name.strip()] = value.strip()
    return found


def literals(words: Sequence[str], option: str) -> dict[str, object]:
    """Read ["a=1", "b=0.5", "c=true", "d=x"] as {"a": 1, "b": 0.5, "c": True, "d": "x"}."""
    return {name: _literal(value) for name, value in pairs(words, option).items()}


def _literal(text: str) -> object:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def in_option(flag: str, parse: Callable[[str], T], text: str) -> T:
    """Return ``parse(text)``; the text of a ConfigError begins with ``flag``."""
    try:
        return parse(text)
    except ConfigError as error:
        raise ConfigError(f"{flag}: {error}") from None


@contextmanager
def libraries_on_stderr() -> Iterator[None]:
    """Redirect what C libraries print to standard error: METIS complains about tiny graphs."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        # Their output may still be in the C library's buffer.
        ctypes.CDLL(None).fflush(None)
        os.dup2(kept, 1)
        os.close(kept)
