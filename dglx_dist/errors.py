"""Exceptions of dglx_dist."""

import re
from collections.abc import Iterable


class DglxError(Exception):
    """Base of all deliberate errors; the message has value, name and remedy."""

    is_shown_elsewhere = False
    """Whether another rank shows it, where it is not caught."""


def shorten_list(names: Iterable[object], most: int = 3) -> str:
    """Return ``names`` with commas, as "a, b, c and 42 more" where there are many."""
    shown = [str(name) for name in names]
    more = f" and {len(shown) - most} more" if len(shown) > most + 1 else ""
    return ", ".join(shown[:most] if more else shown) + more


def first_sentence(error: BaseException) -> str:
    """Return the message of ``error`` without the reasons and the remedy that follow."""
    return re.split(r"[;:] ", str(error), maxsplit=1)[0]


class ConfigError(DglxError, ValueError):
    """An option, an argument or a combination of them is invalid."""


class UnknownNameError(ConfigError):
    """A plugin name is not registered; the message lists the known names and the nearest one."""


class DatasetError(DglxError, ValueError):
    """Input data is wrong; the message names the file, the column and the first wrong row."""


class StorageError(DglxError):
    """A partitioned dataset on disk is missing, incomplete, damaged or of another format version."""


class PeerError(DglxError, ConnectionError):
    """Another rank has ended or does not answer; the message names it and the request."""


class RemoteError(DglxError):
    """The handler of a remote call raised; the message has its text."""


class CheckpointError(DglxError):
    """A checkpoint is missing, incomplete, or of a model, optimizer or dataset that does not match."""


class Stopped(SystemExit):
    """Training has stopped on all ranks because one was told to end; a checkpoint is saved.

    Uncaught it ends Python without a traceback, with the exit code 75 (EX_TEMPFAIL: start it again).
    """

    EXIT_CODE = 75

    def __init__(self, epoch: int, step: int, folder: object) -> None:
        super().__init__(self.EXIT_CODE)
        self.args = (
            f"stopped after {step} steps of epoch {epoch}, as asked; a checkpoint is saved in {folder}, and "
            "the same command goes on from it",
        )
