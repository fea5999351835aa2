"""Reading what is written on the command line as a list or a set of pairs."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console

from dglx_dist.comm.topology import launched_by_torchrun, read_topology
from dglx_dist.errors import ConfigError, DglxError

LAUNCHED = "--launched"
"""Hidden flag of ranks whose launcher shows their error, so that they need not."""


def report(error: Exception, *, debug: bool) -> None:
    """Show one message on standard error, with ``debug`` a traceback in place of it.

    A rank leaves its message where torchrun collects it; the launcher of ``dglx train`` shows the first.
    """
    console = Console(stderr=True, soft_wrap=True)
    if launched_by_torchrun():
        # Only torchrun's ranks need torch for this; they have it already.
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)
    if debug:
        console.print_exception()
    elif LAUNCHED not in sys.argv:
        console.print(f"{_who()}{_text(error)}", style="red", highlight=False, markup=False)


def _text(error: Exception) -> str:
    if isinstance(error, DglxError):
        return f"error: {error}"
    return f"unexpected {type(error).__name__}: {error}\nrun the same command with --debug for the traceback"


def _who() -> str:
    return f"rank {read_topology().rank}: " if launched_by_torchrun() else ""


def names(text: str | None) -> tuple[str, ...]:
    """Read ``train,degree`` as ("train", "degree"); nothing is ()."""
    return tuple(name.strip() for name in (text or "").split(",") if name.strip())


def whole_numbers(text: str, option: str) -> tuple[int, ...]:
    """Read ``25,10`` as (25, 10); -1 is allowed and means all.

    Raises:
        ConfigError: naming the option and the word that is no whole number.
    """
    try:
        numbers = tuple(int(word) for word in names(text))
    except ValueError:
        raise ConfigError(f"{option} {text!r} must be whole numbers with commas, like 25,10") from None
    if not numbers or any(number < -1 for number in numbers):
        raise ConfigError(f"{option} {text!r} must be numbers of at least -1 (-1: all), like 25,10")
    return numbers


def fractions(text: str | None, option: str) -> tuple[float, ...] | None:
    """Read ``1,1,2`` as (1.0, 1.0, 2.0); nothing is None.

    Raises:
        ConfigError: naming the option and its value.
    """
    if text is None:
        return None
    try:
        return tuple(float(word) for word in names(text))
    except ValueError:
        raise ConfigError(f"{option} {text!r} must be numbers with commas, like 1,1,2") from None


def tolerances(text: str | None) -> float | dict[str, float]:
    """Read ``0.05`` as 0.05 for all, ``train=0.1,degree=0.02`` as one for each; nothing is {}.

    Raises:
        ConfigError: it is neither.
    """
    try:
        if text and "=" not in text:
            return float(text)
        return {name: float(value) for name, value in pairs(names(text), "--tolerance").items()}
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"--tolerance {text!r} must be like 0.05 or train=0.1,degree=0.02") from None


def by_name(text: str | None, option: str) -> str | dict[str, str] | None:
    """Read ``float16`` as one value for all, ``feat=float16,x=bfloat16`` as one for each; nothing is None.

    Raises:
        ConfigError: some words have ``=`` and others not.
    """
    return pairs(names(text), option) if text and "=" in text else text


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
    """Read ["a=1", "b=0.5", "c=true", "d=x"] with whole numbers, numbers and booleans as such."""
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


@contextmanager
def libraries_on_stderr() -> Iterator[None]:
    """Let what libraries in C print meanwhile go to standard error: METIS complains of tiny graphs there."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        # What they have printed may still be in their buffer.
        ctypes.CDLL(None).fflush(None)
        os.dup2(kept, 1)
        os.close(kept)
